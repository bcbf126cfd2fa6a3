#include "cli/train.h"

#include <ATen/Parallel.h>
#include <c10/util/Logging.h>
#include <malloc.h>
#include <netdb.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <iostream>
#include <memory>
#include <numeric>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "cli/config_file.h"
#include "cli/device.h"
#include "cli/dry_run.h"
#include "cli/launcher.h"
#include "cli/meeting.h"
#include "cli/nearest.h"
#include "cli/printed.h"
#include "cli/progress.h"
#include "cli/resume.h"
#include "cli/run_folder.h"
#include "cli/stop.h"
#include "mtraining/base/check.h"
#include "mtraining/base/error_kinds.h"
#include "mtraining/base/parallel.h"
#include "mtraining/comm/c10d.h"
#include "mtraining/comm/loopback.h"
#include "mtraining/topology/rendezvous.h"
#include "mtraining/topology/topology.h"
#include "mtraining/train/device.h"
#include "mtraining/train/trainer.h"

namespace mtraining::cli {
namespace {

constexpr const char* kHelp = R"(usage: mtraining train --config FILE [options]

Trains the model that FILE (TOML) describes.

  --config FILE           the configuration
  --set KEY=VALUE         overrides a key; also --KEY VALUE or --KEY=VALUE where KEY has a dot
  --nproc N               starts N ranks on this machine (without it: one rank, or the launcher's environment)
  --out DIR               the run's folder (default runs/<name of FILE>): config.toml, metrics.jsonl, trace.json, summary.json
  --resume WHAT           auto (default): goes on from the last checkpoint of the run's folder, begins anew where it holds none;
                          never: begins anew, in a folder without a run; a path: goes on from this checkpoint or run
  --dry-run               checks everything that can be checked without data, prints the resolved configuration and what follows
                          from it: ranks, tokens, memory, kernels, where the run would go on
  --help                  this text

examples:
  mtraining train --config recipes/quickstart.toml --nproc 4     (after ./dev quickstart, which makes its data)
  mtraining train --config recipes/quickstart.toml --nproc 4 --attention.pattern dense --out runs/dense
  mtraining train --config recipes/quickstart.toml --nproc 4 --set train.steps=10 --dry-run
  torchrun --no-python --nproc-per-node 4 mtraining train --config recipes/quickstart.toml
)";

const std::vector<std::string> kFlags = {"--config", "--set",     "--nproc", "--out",
                                         "--resume", "--dry-run", "--help"};

struct Arguments {
  std::string config, out, resume = "auto";
  std::vector<Override> overrides;
  std::optional<int> nproc;
  bool dry_run = false, help = false;
  std::vector<std::string> for_children;  ///< all but --nproc
};

Override split_override(const std::string& text, const std::string& flag) {
  const size_t equals = text.find('=');
  MT_CHECK_ARG(equals != std::string::npos && equals > 0, flag, ": expected key=value, got \"",
               text, "\"");
  return {text.substr(0, equals), text.substr(equals + 1)};
}

Arguments parse(int argc, char** argv) {
  Arguments result;
  result.for_children.emplace_back("train");
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i];
    const size_t equals = word.find('=');
    const std::string flag = word.substr(0, equals);
    std::optional<std::string> value;
    if (equals != std::string::npos) value = word.substr(equals + 1);
    const int first = i;
    const auto take = [&]() -> std::string {
      if (value) return *value;
      MT_CHECK_ARG(i + 1 < argc, flag, ": expected a value after it, got the end of the command");
      return argv[++i];
    };
    if (flag == "--help" || flag == "-h") {
      result.help = true;
    } else if (flag == "--dry-run") {
      result.dry_run = true;
    } else if (flag == "--config") {
      result.config = take();
    } else if (flag == "--out") {
      result.out = take();
    } else if (flag == "--set") {
      result.overrides.push_back(split_override(take(), "--set"));
    } else if (flag == "--resume") {
      result.resume = take();
      MT_CHECK_ARG(!result.resume.empty(),
                   "--resume: expected \"auto\", \"never\" or a path, got \"\"");
    } else if (flag == "--nproc") {
      const std::string text = take();
      char* end = nullptr;
      const long count = std::strtol(text.c_str(), &end, 10);
      MT_CHECK_ARG(!text.empty() && *end == '\0' && count >= 1 && count <= 4096,
                   "--nproc: expected a number from 1 to 4096, got \"", text, "\"");
      result.nproc = static_cast<int>(count);
      continue;
    } else if (flag.rfind("--", 0) == 0 && flag.find('.') != std::string::npos) {
      result.overrides.push_back({flag.substr(2), take()});
    } else {
      throw InvalidArgument(
          concat("train: unknown flag ", word, "; nearest known flag: ", nearest(flag, kFlags)));
    }
    for (int j = first; j <= i; ++j) result.for_children.emplace_back(argv[j]);
  }
  return result;
}

std::string default_out(const std::string& config) {
  return (std::filesystem::path("runs") / std::filesystem::path(config).stem()).string();
}

std::string environment(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

/// Asked once, here: a store would ask until its timeout.
void check_resolves(const std::string& address, const std::string& origin) {
  addrinfo* found = nullptr;
  const int unresolved = ::getaddrinfo(address.c_str(), nullptr, nullptr, &found);
  MT_CHECK_ARG(unresolved == 0, origin, ": ", address,
               " cannot be resolved: ", ::gai_strerror(unresolved));
  ::freeaddrinfo(found);
}

/// One thread says why this process ends; another that also knows waits for that end.
void claim_the_end() {
  static std::atomic_flag claimed;
  if (!claimed.test_and_set()) return;
  while (true) ::pause();
}

std::chrono::milliseconds rendezvous_timeout() {
  const std::string text = environment("MTRAINING_RENDEZVOUS_TIMEOUT_S");
  char* end = nullptr;
  const double seconds = text.empty() ? 600 : std::strtod(text.c_str(), &end);
  MT_CHECK_ARG(text.empty() || (*end == '\0' && seconds > 0 && seconds <= 1e6),
               "environment variable MTRAINING_RENDEZVOUS_TIMEOUT_S: expected seconds, got \"",
               text, "\"");
  return std::chrono::milliseconds(static_cast<int64_t>(seconds * 1000));
}

std::unique_ptr<Meeting> meet(const topology::LaunchEnvironment& launch,
                              const topology::Rendezvous& rendezvous, const std::string& config) {
  MeetingOptions options;
  options.rendezvous = rendezvous;
  options.rank = launch.rank;
  options.size = launch.world_size;
  options.identity = config;
  options.timeout = rendezvous_timeout();
  options.on_stop = [] {
    claim_the_end();
    leave_stopped();
  };
  options.on_failure = [rank = launch.rank](const std::string& cause) {
    claim_the_end();
    report_error(rank, 1, cause);
    ::_exit(1);
  };
  return std::make_unique<Meeting>(options);
}

comm::C10dOptions transport_options(const topology::LaunchEnvironment& launch,
                                    const topology::Rendezvous& rendezvous, bool on_gpus) {
  comm::C10dOptions options;
  options.rank = launch.rank;
  options.size = launch.world_size;
  // Where all ranks are on one host its name need not resolve, nor be reachable.
  options.master_addr = rendezvous.one_host ? "127.0.0.1" : rendezvous.address;
  options.master_port = rendezvous.ports.front();
  if (on_gpus) options.backend = "nccl";
  return options;
}

/// This rank's ways to the others. The meeting comes first, so that whoever ends the process can tell them.
struct Connections {
  std::unique_ptr<Meeting> meeting;  ///< under another launcher than --nproc, until the first step
  std::unique_ptr<comm::Transport> transport;
  /// Here, so that a failure reaches the peers before the trainer's groups go: they may wait for work that never ends.
  std::optional<train::Trainer> trainer;
};

void connect(const train::RunConfig& config, const topology::LaunchEnvironment& launch,
             Connections& connections) {
  if (launch.world_size == 1) {
    connections.transport = comm::make_single();
    return;
  }
  const topology::Rendezvous rendezvous = topology::find_rendezvous(launch);
  if (rendezvous.address_is_given) check_resolves(rendezvous.address, "MASTER_ADDR");
  comm::C10dOptions options =
      transport_options(launch, rendezvous, config.train.device == train::DeviceKind::kCuda);
  options.timeout =
      std::chrono::milliseconds(static_cast<int64_t>(config.parallel.timeout_s * 1000));
  if (!started_by_launch()) {
    if (!rendezvous.address_is_given)
      check_resolves(rendezvous.address, "the launcher's host of rank 0 (set MASTER_ADDR)");
    connections.meeting = meet(launch, rendezvous, to_toml(config));
    options.share_port = [&](int port) { return connections.meeting->share_port(port); };
  }
  connections.transport = comm::make_c10d(options);
}

/// More ranks than cores: the threads of a rank's transport spin while another thread holds a connection's lock, and a
/// writer that a woken reader preempts keeps that lock. Batch scheduling lets the writer finish: a barrier of 4 ranks on
/// 2 busy cores takes .4 to .8 ms instead of 5.5.
void share_cores(int local_ranks) {
  const int cores = num_threads();
  if (local_ranks > cores) {
    const sched_param none{};
    ::sched_setscheduler(0, SCHED_BATCH, &none);  // refused: only slower
  }
  // A step's tensors come and go by the megabyte: given back to the system each time, they cost 25000 page faults a step.
  ::mallopt(M_MMAP_THRESHOLD, 1 << 30);
  ::mallopt(M_TRIM_THRESHOLD, 1 << 30);
  const int each = std::max(1, cores / std::max(1, local_ranks));
  set_num_threads(each);
  at::set_num_threads(each);
}

/// What is wrong with a file, and where files come from when there is none.
void open_data(const train::RunConfig& config, const train::ResolvedRun& resolved) {
  try {
    train::check_data(config, resolved);
  } catch (const FileMissing& error) {
    throw InvalidArgument(concat(error.what(),
                                 "; python -m mtraining.prepare makes token files, ./dev "
                                 "quickstart those of recipes/quickstart.toml"));
  }
}

std::vector<std::string> open_weights(const train::RunConfig& config) {
  try {
    return train::check_weights(config);
  } catch (const InvalidArgument& error) {
    throw InvalidArgument(concat("model.init_from: ", error.what()));
  } catch (const Unsupported& error) {
    throw Unsupported(concat("model.init_from: ", error.what()));
  }
}

void leave_finished(const std::string& out, const Start& start,
                    const topology::LaunchEnvironment& launch, comm::Communicator& all,
                    Connections& connections) {
  all.barrier();  // nobody is still reading the folder
  if (connections.meeting) connections.meeting->end();
  if (launch.rank != 0) return;
  std::cout << out << ": nothing is left to train: " << start.checkpoint << " has all "
            << start.steps_done
            << " train steps; a larger train.steps goes on, another --out begins anew" << std::endl;
}

int train_here(train::RunConfig config, const train::ResolvedRun& resolved,
               const topology::LaunchEnvironment& launch, const std::string& resume,
               Connections& connections) {
  // torch's own warnings about lost peers would bury the cause.
  ::setenv("TORCH_CPP_LOG_LEVEL", "ERROR", 0);
  c10::initLogging();
  share_cores(launch.local_world_size.value_or(launch.world_size));
  train::enter_device(resolved.device);  // communicators are of the current one
  connect(config, launch, connections);
  // Ranks have met, so that each learns why another leaves; the folder is touched only when all else is known to be right.
  open_data(config, resolved);
  std::vector<int> ranks(launch.world_size);
  std::iota(ranks.begin(), ranks.end(), 0);
  // What the folder holds is decided under its lock, or another launch could change it meanwhile.
  std::optional<RunFolder> folder;
  Start start;
  if (launch.rank == 0) {
    folder.emplace(config.out);
    start = choose_start(resume, config, resolved.steps);
  }
  const comm::CommunicatorPtr all = connections.transport->open_host("start", ranks);
  all->barrier();
  if (launch.rank != 0) start = choose_start(resume, config, resolved.steps);
  if (start.kind == StartKind::kFinished) {
    leave_finished(config.out, start, launch, *all, connections);
    return 0;
  }
  std::vector<std::string> notices = start.notices;
  if (start.kind == StartKind::kAnew) {
    for (const std::string& file : open_weights(config))
      notices.push_back(concat(*config.init_from, ": ", file, " is not read"));
  } else {
    notices.push_back(concat("goes on from ", start.checkpoint));
  }
  if (!resolved.device.is_cpu()) notices.push_back(concat("trains on ", resolved.device));
  begins_after(start.steps_done, start.kind == StartKind::kResume, resume == "auto");
  config.text = to_toml(config);
  train::Trainer& trainer =
      connections.trainer.emplace(config, resolved, *connections.transport, start.checkpoint);
  if (folder) folder->write("config.toml", to_toml(config));
  train::TrainObserver observer;
  std::optional<Progress> progress;
  if (launch.rank == 0) {
    progress.emplace(std::string(to_string(config.attention.pattern)), stdout_is_terminal());
    for (const std::string& notice : notices) progress->notice(notice);
    observer.preflight = [&](const train::Preflight& p) { progress->preflight(p); };
    observer.warning = [&](const std::string& text) { progress->warning(text); };
  }
  observer.saved = [](int64_t step) { checkpoint_saved(step); };
  observer.step = [&](const trace::StepMetrics& m, int64_t total) {
    step_finished(m.train_step);
    if (progress) progress->step(m, total);
  };
  if (connections.meeting) connections.meeting->end();
  begin_steps(config.train.stop_grace_s, launch.rank == 0);
  const train::TrainResult result = trainer.run(observer, &stop_wanted());
  end_steps();
  if (progress) {
    progress->finish();
    if (result.stopped) std::cout << stopped_line() << std::flush;
  }
  return 0;
}

}  // namespace

int run_train(int argc, char** argv) {
  const Arguments arguments = parse(argc, argv);
  if (arguments.help) {
    std::cout << kHelp;
    check_printed();
    return 0;
  }
  MT_CHECK_ARG(!arguments.config.empty(),
               "train: expected --config FILE; see mtraining train --help");
  topology::LaunchEnvironment launch = topology::read_launch_environment();
  // In a batch script's own shell, and in a step of one task, --nproc is what starts the ranks.
  const bool alone = launch.launcher == "none" || !launch.certain ||
                     (launch.launcher == "srun" && launch.world_size == 1);
  const bool launching = arguments.nproc.has_value() && alone;
  MT_CHECK_ARG(!arguments.nproc.has_value() || launching, "--nproc: ", launch.launcher,
               " has already started the ranks; leave it out");
  if (launching) {
    launch = {};
    launch.launcher = "none";
    launch.world_size = *arguments.nproc;
    launch.local_world_size = *arguments.nproc;
  }
  LoadedConfig loaded = load_config(arguments.config, arguments.overrides);
  loaded.config.out = arguments.out.empty() ? default_out(arguments.config) : arguments.out;
  const train::ResolvedRun resolved = resolve_here(loaded, launch);
  if (arguments.dry_run) {
    const Start start = choose_start(arguments.resume, loaded.config, resolved.steps);
    if (launching || launch.rank == 0)
      print_dry_run(loaded.config, resolved, launch, launching, start);
    check_printed();
    return 0;
  }
  if (launching && *arguments.nproc > 1) {
    if (stop_wanted()) leave_stopped();
    return cli::launch(
        {arguments.for_children, *arguments.nproc, loaded.config.train.stop_grace_s});
  }
  Connections connections;
  if (launch.world_size == 1)
    return train_here(loaded.config, resolved, launch, arguments.resume, connections);

  // One rank of several. Whatever fails ends this process at once: destructors could wait for peers that wait for us.
  Failure failure;
  try {
    const int result = train_here(loaded.config, resolved, launch, arguments.resume, connections);
    std::cout << std::flush;
    return result;
  } catch (const std::exception& error) {
    failure = failure_of(error);
  }
  if (failure.exit_code == 1 && error_is_due_to_stop()) {
    if (launch.rank == 0) std::cout << stopped_line() << std::flush;
    ::_exit(0);
  }
  claim_the_end();
  report_error(launch.rank, failure.exit_code, failure.message);
  // Not every launcher ends the others: they may be waiting for this rank to open a communicator.
  if (connections.meeting) connections.meeting->fail(failure.message);
  if (connections.transport) connections.transport->abort(failure.message);
  ::_exit(failure.exit_code);
}

}  // namespace mtraining::cli
