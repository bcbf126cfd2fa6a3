// Launcher: runs this executable once a rank on this machine, watches the ranks, and ends the job as one.
//
// In:   the command line without --nproc, a number of ranks. Out: an exit code.
// Next: each child finds RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT and runs `train`.
//
// A rank that throws sends its cause through a pipe; the first one to arrive is printed, once, and the rest of the job is
// killed. A rank that was killed by a signal has no words: it is named. SIGTERM, SIGINT and SIGUSR1 are passed on; ranks that
// have not stopped when the grace time is over are killed. If the launcher itself is killed, the kernel ends its children.
#pragma once

#include <exception>
#include <string>
#include <vector>

namespace mtraining::cli {

struct LaunchOptions {
  std::vector<std::string> arguments;  ///< argv of a child, without argv[0] and without --nproc
  int ranks = 1;
  double stop_grace_s = 20;
};

/// Returns 0 when all ranks ended well, 2 where the first cause was a user's mistake, else 1.
/// Errors: ExternalError where no process can be started.
int launch(const LaunchOptions& options);

/// Whether this process is a child of launch().
bool started_by_launch();

/// What an error means to whoever started this process: 2 and its words for a user's mistake, 1 for a failure.
struct Failure {
  int exit_code = 1;
  std::string message;  ///< one line
};
Failure failure_of(const std::exception& error);

/// In a child of launch(): sends the cause to the launcher, which prints it. Otherwise (torchrun, a single process) prints it.
void report_error(int rank, int exit_code, const std::string& message);

}  // namespace mtraining::cli
