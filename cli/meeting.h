// Meeting: ranks that another launcher started find each other, and share one fate until the first step.
//
// In:   topology::Rendezvous. Out: all ranks are known to be there and to run the same thing; a port of rank 0; whoever stops or
//       fails before the first step takes the others along at once, with its words.
// Next: comm/c10d.h opens its store on the shared port; cli/stop.h takes over at the first step.
//
// Rank 0 listens on the first of the ports that it can have and greets with the job's name, so that a rank that reaches another
// job, or a stranger, goes on to the next port. A rank then says its number, how many it expects and what it runs; rank 0 refuses
// what does not fit, in one sentence. The connection stays open: a stop or a failure travels over it, and a connection that
// ends without a word is a rank that died. Not needed under --nproc, whose launcher sees its ranks. A thread of its own serves
// the connections and ends the process when another rank has ended the job.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>

#include "mtraining/topology/rendezvous.h"

namespace mtraining::cli {

struct MeetingOptions {
  topology::Rendezvous rendezvous;
  int rank = 0;
  int size = 1;
  std::string identity;  ///< what all ranks must agree on: a text without newlines
  std::chrono::milliseconds timeout = std::chrono::minutes(10);
  /// Called from the meeting's thread, at most one of the two, when another rank has ended the job or this one was asked to stop
  /// and has said so. They must end the process.
  std::function<void()> on_stop;
  std::function<void(const std::string& cause)> on_failure;
};

class Meeting {
 public:
  /// Collective. Returns when all ranks have come. Errors: InvalidArgument, one sentence: the port is in use, what ranks run
  /// differs, a rank came twice; ExternalError: ranks that have not come in time (named), a rank that left.
  explicit Meeting(MeetingOptions options);
  ~Meeting();
  Meeting(const Meeting&) = delete;
  Meeting& operator=(const Meeting&) = delete;

  /// Rank 0 gives a number and gets it back, the others get it.
  int share_port(int port);
  /// Collective: returns when all ranks have called it. From then on nobody speaks here any more.
  void end();
  /// Tells the others why this rank leaves. Returns when it is sent. Local, never throws, no effect after end().
  void fail(const std::string& cause) noexcept;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace mtraining::cli
