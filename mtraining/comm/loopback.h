// Loopback: N ranks as threads of one process, for tests, sweeps over large cp_size and single-process runs of size 1.
//
// In:   a number of ranks and one function. Out: that function ran once per rank, each with its Transport. Next: tests, cli.
#pragma once

#include <chrono>
#include <functional>
#include <memory>

#include "mtraining/comm/transport.h"

namespace mtraining::comm {

// Nothing is buffered: bytes move when both sides have called, so a buffer that is changed too early shows. Where all ranks wait
// for one another (one of them may have returned), they fail at once, with what each waits for. A rank's calls come from its own
// thread only.

/// Runs `body` on `ranks` threads. The first exception of any rank wakes all waiting ranks (they fail with ExternalError
/// naming the rank that failed first) and is rethrown after all threads have joined.
void run_loopback(int ranks, const std::function<void(Transport&)>& body,
                  std::chrono::milliseconds timeout = std::chrono::seconds(60));

/// A transport of one rank; every collective is a copy.
std::unique_ptr<Transport> make_single();

}  // namespace mtraining::comm
