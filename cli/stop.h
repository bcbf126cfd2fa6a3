// Stop signals: SIGTERM, SIGINT and SIGUSR1 end a training process in time, wherever it is.
//
// In:   signals; the phase of the run and the last finished train step. Out: a flag that the trainer reads; at the latest
//       train.stop_grace_s after the first signal the end of the process, with exit code 0 and a last line.
// Next: train.cc, launcher.cc.
//
// Before the first step there is nothing to keep: a signal ends the process at once. Later the step under way may end; when
// it does not within the grace it is dropped. A second signal, a second or more after the first, ends the process at once
// (a terminal and a launcher often send the first one twice). All state is lock-free, and handlers only write and exit.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>

namespace mtraining::cli {

/// Installs the handlers, ignores SIGPIPE and unblocks the stop signals. Needs nothing but libc: it may run before libraries
/// are initialised. Only a process whose launcher gave it rank 0, or none, will print.
void install_stop_handlers();
/// True from the first signal on; the address lives as long as the process.
const std::atomic<bool>& stop_wanted();
/// The run begins: from here on signals leave `grace_s` seconds to the step under way. `folder` is named in the last line.
void begin_steps(double grace_s, const std::string& folder, bool prints);
void step_finished(int64_t train_step);
/// No longer ends the process by itself: what is left is the closing of files.
void end_steps();
/// Whether an error now is a consequence of the stop: no step was finished yet, or the grace is over for the other ranks too.
bool error_is_due_to_stop();
/// The last line of a stopped run, with its newline.
std::string stopped_line();

}  // namespace mtraining::cli
