// Stop signals: SIGTERM, SIGINT and SIGUSR1 end a training process in time, wherever it is.
//
// In:   signals; the phase of the run, the last finished train step and the last saved one. Out: a flag that the trainer reads; at the latest
//       train.stop_grace_s after the first signal the end of the process, with exit code 0 and a last line.
// Next: train.cc, launcher.cc.
//
// Before the first step there is nothing to keep: a signal ends the process at once, or, where another launcher has started
// several ranks, as soon as the others know (4 s at most; cli/meeting.h). Later the trainer drops the
// step under way at the next layer and saves the steps before it; what has not come to that within the grace is lost. A second signal, a second or more after the first, ends the process at once
// (a terminal and a launcher often send the first one twice). All state is lock-free, and handlers only write and exit.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>
#include <vector>

namespace mtraining::cli {

/// What a rank of --nproc tells its launcher (a rank, an exit code, words) when a signal ends it before the first step.
inline constexpr char kLeftLine[] = "0 0 left\n";

/// Installs the handlers, ignores SIGPIPE and unblocks the stop signals. Needs nothing but system calls: it may run before
/// libraries, libc among them, are initialised. `environment`: what main() is given as its third argument. Only a process whose launcher gave it rank 0, or none, will print.
void install_stop_handlers(char** environment);
/// True from the first signal on; the address lives as long as the process.
const std::atomic<bool>& stop_wanted();
/// What was done before this process, by a checkpoint. by_itself: the same command would find the next checkpoint too.
void begins_after(int64_t train_step, bool has_checkpoint, bool by_itself);
/// The run begins: from here on signals leave `grace_s` seconds to the step under way and to saving what is finished.
void begin_steps(double grace_s, bool prints);
void step_finished(int64_t train_step);
void checkpoint_saved(int64_t train_step);
/// Ends the process as a stop does: exit code 0 and, on rank 0, the last line.
[[noreturn]] void leave_stopped();
/// No longer ends the process by itself: what is left is the closing of files.
void end_steps();
/// Whether an error now is a consequence of the stop: no step was finished yet, or the grace is over for the other ranks too.
bool error_is_due_to_stop();
/// Files and empty folders that an end before the first step takes away, in this order; replaces those given before. Called by one thread.
void remove_on_stop(const std::vector<std::string>& paths);
/// The last line of a stopped run, with its newline.
std::string stopped_line();

}  // namespace mtraining::cli
