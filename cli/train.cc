#include "cli/train.h"

#include <ATen/Parallel.h>
#include <c10/util/Exception.h>
#include <c10/util/Logging.h>
#include <malloc.h>
#include <netdb.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <iostream>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "cli/config_file.h"
#include "cli/launcher.h"
#include "cli/nearest.h"
#include "cli/progress.h"
#include "cli/run_folder.h"
#include "cli/stop.h"
#include "mtraining/base/check.h"
#include "mtraining/base/parallel.h"
#include "mtraining/comm/c10d.h"
#include "mtraining/comm/loopback.h"
#include "mtraining/topology/topology.h"
#include "mtraining/train/trainer.h"

namespace mtraining::cli {
namespace {

constexpr const char* kHelp = R"(usage: mtraining train --config FILE [options]

Trains the model that FILE (TOML) describes.

  --config FILE           the configuration
  --set KEY=VALUE         overrides a key; also --KEY VALUE or --KEY=VALUE where KEY has a dot
  --nproc N               starts N ranks on this machine (without it: one rank, or the launcher's environment)
  --out DIR               the run's folder (default runs/<name of FILE>): config.toml, metrics.jsonl, trace.json, summary.json
  --resume never          begins anew (auto and a path belong to a part that is not built)
  --dry-run               checks everything that can be checked without data, prints the resolved configuration
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
  std::string config, out;
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
      const std::string resume = take();
      MT_CHECK_SUPPORTED(resume == "never", "--resume: only \"never\" is built, got \"", resume,
                         "\"");
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

comm::C10dOptions rendezvous(const topology::LaunchEnvironment& launch) {
  comm::C10dOptions options;
  options.rank = launch.rank;
  options.size = launch.world_size;
  const std::string address = environment("MASTER_ADDR"), port = environment("MASTER_PORT");
  MT_CHECK_ARG(!address.empty() && !port.empty(), "MASTER_ADDR and MASTER_PORT: expected both for ",
               launch.world_size, " ranks, got \"", address, "\" and \"", port, "\"");
  options.master_addr = address;
  const auto [end, error] =
      std::from_chars(port.data(), port.data() + port.size(), options.master_port);
  MT_CHECK_ARG(error == std::errc() && end == port.data() + port.size() &&
                   options.master_port > 0 && options.master_port < 65536,
               "MASTER_PORT: expected 1 to 65535, got \"", port, "\"");
  addrinfo* found = nullptr;  // asked once here, because the store would ask until its timeout
  const int unresolved = ::getaddrinfo(address.c_str(), nullptr, nullptr, &found);
  MT_CHECK_ARG(unresolved == 0, "MASTER_ADDR: ", address,
               " cannot be resolved: ", ::gai_strerror(unresolved));
  ::freeaddrinfo(found);
  return options;
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

void print_dry_run(const train::RunConfig& config, const train::ResolvedRun& resolved) {
  const layout::Layout layout(train::ring_options(config, resolved).layout);
  std::cout << to_toml(config) << "\n# cp_size " << resolved.cp_size << " ("
            << resolved.topology.nodes << " nodes of " << resolved.topology.ranks_per_node
            << "), dp_size " << resolved.dp_size << ", " << resolved.steps << " train steps of "
            << resolved.accumulation << " micro-steps, " << layout.tokens_per_rank()
            << " tokens a rank (" << layout.padded_len() - layout.seq_len()
            << " of padding a sequence)" << std::endl;
}

/// What is wrong with a file, and where files come from when there is none.
void open_data(const train::RunConfig& config, const train::ResolvedRun& resolved) {
  try {
    train::check_data(config, resolved);
  } catch (const InvalidArgument& error) {
    const std::string message = error.what();
    const bool missing = message.find("cannot be opened") != std::string::npos;
    throw InvalidArgument(
        message + (missing ? "; python -m mtraining.prepare makes token files, ./dev quickstart "
                             "those of recipes/quickstart.toml"
                           : ""));
  }
}

/// `transport` is set as soon as there is one, so that whoever ends the process can tell the other ranks.
int train_here(train::RunConfig config, const train::ResolvedRun& resolved,
               const topology::LaunchEnvironment& launch,
               std::unique_ptr<comm::Transport>& transport) {
  // torch's own warnings about lost peers would bury the cause.
  ::setenv("TORCH_CPP_LOG_LEVEL", "ERROR", 0);
  c10::initLogging();
  share_cores(launch.local_world_size.value_or(launch.world_size));
  transport = launch.world_size == 1 ? comm::make_single() : comm::make_c10d(rendezvous(launch));
  // Ranks have met, so that each learns why another leaves; the folder is touched only when all else is known to be right.
  open_data(config, resolved);
  std::optional<RunFolder> folder;
  if (launch.rank == 0) folder.emplace(config.out);
  train::Trainer trainer(config, resolved, *transport);
  if (folder) folder->write("config.toml", to_toml(config));
  train::TrainObserver observer;
  std::optional<Progress> progress;
  if (launch.rank == 0) {
    const bool dense = config.attention.pattern == pattern::PatternKind::kDense;
    progress.emplace(dense ? "dense" : "vertical_slash", ::isatty(STDOUT_FILENO) != 0);
    observer.preflight = [&](const train::Preflight& p) { progress->preflight(p); };
    observer.warning = [&](const std::string& text) { progress->warning(text); };
  }
  observer.step = [&](const trace::StepMetrics& m, int64_t total) {
    step_finished(m.train_step);
    if (progress) progress->step(m, total);
  };
  begin_steps(config.train.stop_grace_s, config.out, launch.rank == 0);
  const train::TrainResult result = trainer.run(observer, &stop_wanted());
  end_steps();
  if (progress) {
    progress->finish();
    if (result.stopped) std::cout << stopped_line() << std::flush;
  }
  return 0;
}

void check_printed() {
  MT_CHECK_EXTERNAL(std::cout.flush().good(),
                    "standard output cannot be written: ", std::strerror(errno));
}

std::string one_line(std::string text) {
  std::replace(text.begin(), text.end(), '\n', ' ');
  return text;
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
  const bool launching = arguments.nproc.has_value() && launch.launcher == "none";
  MT_CHECK_ARG(!arguments.nproc.has_value() || launching, "--nproc: ", launch.launcher,
               " has already started the ranks; leave it out");
  if (launching) {
    launch.world_size = *arguments.nproc;
    launch.local_world_size = *arguments.nproc;
  }
  LoadedConfig loaded = load_config(arguments.config, arguments.overrides);
  loaded.config.out = arguments.out.empty() ? default_out(arguments.config) : arguments.out;
  train::ResolvedRun resolved;
  try {
    resolved = train::resolve(loaded.config, launch);
  } catch (const InvalidArgument& error) {
    throw InvalidArgument(with_place(loaded, error.what()));
  } catch (const Unsupported& error) {
    throw Unsupported(with_place(loaded, error.what()));
  }
  if (arguments.dry_run) {
    if (launching || launch.rank == 0) print_dry_run(loaded.config, resolved);
    check_printed();
    return 0;
  }
  if (launching && *arguments.nproc > 1) {
    return cli::launch(
        {arguments.for_children, *arguments.nproc, loaded.config.train.stop_grace_s});
  }
  std::unique_ptr<comm::Transport> transport;
  if (launch.world_size == 1) return train_here(loaded.config, resolved, launch, transport);

  // One rank of several. Whatever fails ends this process at once: destructors could wait for peers that wait for us.
  int code = 1;
  std::string message;
  try {
    const int result = train_here(loaded.config, resolved, launch, transport);
    std::cout << std::flush;
    return result;
  } catch (const InvalidArgument& error) {
    code = 2;
    message = error.what();
  } catch (const Unsupported& error) {
    code = 2;
    message = error.what();
  } catch (const c10::Error& error) {
    message = error.what_without_backtrace();
  } catch (const std::exception& error) {
    message = error.what();
  }
  if (code == 1 && error_is_due_to_stop()) {
    if (launch.rank == 0) std::cout << stopped_line() << std::flush;
    ::_exit(0);
  }
  report_error(launch.rank, code, one_line(message));
  // Not every launcher ends the others: they may be waiting for this rank to open a communicator.
  if (transport) transport->abort(one_line(message));
  ::_exit(code);
}

}  // namespace mtraining::cli
