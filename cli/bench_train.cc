#include <signal.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "bench/train_bench.h"
#include "cli/bench.h"
#include "cli/config_file.h"
#include "cli/device.h"
#include "cli/launcher.h"
#include "cli/parse_options.h"
#include "mtraining/base/check.h"
#include "mtraining/comm/c10d.h"
#include "mtraining/topology/rendezvous.h"
#include "mtraining/train/device.h"

namespace mtraining::cli {
namespace {

/// The arguments of a rank: all but --nproc.
std::vector<std::string> for_ranks(int argc, char** argv) {
  std::vector<std::string> arguments = {"bench", "train"};
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i];
    if (word == "--nproc") {
      ++i;
    } else if (word.rfind("--nproc=", 0) != 0) {
      arguments.push_back(word);
    }
  }
  return arguments;
}

/// This process, a child of launch(), as one rank of the job.
std::unique_ptr<comm::Transport> join(const topology::LaunchEnvironment& launch, bool on_gpus) {
  if (on_gpus) train::enter_device({at::kCUDA, static_cast<at::DeviceIndex>(launch.local_rank)});
  comm::C10dOptions options;
  options.rank = launch.rank;
  options.size = launch.world_size;
  options.master_port = topology::find_rendezvous(launch).ports.front();
  if (on_gpus) options.backend = "nccl";
  return comm::make_c10d(options);
}

void print_rows(const std::string& file, const std::vector<Override>& overrides,
                const topology::LaunchEnvironment& launch, bench::TrainBenchOptions options,
                bool breakdown) {
  LoadedConfig loaded = load_config(file, overrides);
  const bench::Provenance from = bench::provenance();
  std::vector<std::string> lines;
  try {
    choose_device(loaded, launch);
    options.config = loaded.config;
    if (breakdown) {
      options.step_ended = [](const std::string& line) {
        std::printf("%s\n", line.c_str());
        std::fflush(stdout);
      };
    }
    std::unique_ptr<comm::Transport> job;
    if (started_by_launch()) {
      job = join(launch, loaded.config.train.device == train::DeviceKind::kCuda);
      options.job = job.get();
      options.launch = launch;
    }
    lines = bench::bench_train(options, from);
  } catch (const InvalidArgument& error) {
    throw InvalidArgument(with_place(loaded, error.what()));
  } catch (const Unsupported& error) {
    throw Unsupported(with_place(loaded, error.what()));
  }
  for (const std::string& line : lines) {
    const bool is_part = line.rfind("{\"case\":\"train p", 0) == 0;
    if (breakdown || !is_part) std::printf("%s\n", line.c_str());
  }
}

/// As a rank of --nproc: whatever fails ends this process at once, since destructors could wait for peers that wait for it.
void print_rows_as_rank(const std::string& file, const std::vector<Override>& overrides,
                        bench::TrainBenchOptions options, bool breakdown) {
  sigset_t none;  // launch() held them back until exec
  ::sigemptyset(&none);
  ::sigprocmask(SIG_SETMASK, &none, nullptr);
  ::setenv("TORCH_CPP_LOG_LEVEL", "ERROR", 0);  // its warnings of peers that ended before
  c10::initLogging();
  const topology::LaunchEnvironment launch = topology::read_launch_environment();
  options.ranks = {1, launch.world_size};
  Failure failure;
  try {
    return print_rows(file, overrides, launch, std::move(options), breakdown);
  } catch (const std::exception& error) {
    failure = failure_of(error);
  }
  report_error(launch.rank, failure.exit_code, failure.message);
  ::_exit(failure.exit_code);
}

}  // namespace

int bench_train(int argc, char** argv) {
  CLI::App app(
      "Train steps of a configuration on random tokens over ranks that are threads of this "
      "process, on one GPU, or over processes with a GPU each");
  app.name("mtraining bench train");
  app.footer(
      "Examples:\n"
      "  mtraining bench train --config recipes/quickstart.toml --virtual 2x2 --steps 3\n"
      "  mtraining bench train --config recipes/quickstart.toml --set attention.pattern=dense "
      "--ranks 4\n"
      "  mtraining bench train --config recipes/qwen2.5-3b-512k.toml --device cuda --layers 4 "
      "--steps 1 "
      "--breakdown --dense-arm --set parallel.cp_size=1 --set train.global_batch_size=1\n"
      "  mtraining bench train --config recipes/qwen2.5-3b-512k.toml --device cuda --nproc 2 "
      "--layers 4 --set parallel.cp_size=2 --set parallel.cp_inner_size=2 --set "
      "train.global_batch_size=1\n");
  std::string config, virtual_ranks;
  std::vector<std::string> set;
  int ranks = 1, nproc = 1;
  bool breakdown = false;
  std::string device;
  bench::TrainBenchOptions options;
  app.add_option("--config", config, "The configuration (required); its data is not read");
  app.add_option("--set", set, "Overrides a key: key=value")->expected(1)->take_all();
  app.add_option("--ranks", ranks, "Ranks of one node")->capture_default_str();
  app.add_option("--virtual", virtual_ranks, "Instead: nodes x ranks of a node");
  app.add_option("--nproc", nproc, "Instead: so many processes of this machine, on a GPU each")
      ->capture_default_str();
  app.add_option("--steps", options.steps, "Timed train steps")->capture_default_str();
  app.add_option("--warm-up", options.warm_up, "Train steps before them")->capture_default_str();
  app.add_option("--device", device, "cpu or cuda, instead of train.device");
  app.add_option("--layers", options.layers,
                 "Run so many layers and compute the step of all; 0: run all")
      ->capture_default_str();
  app.add_flag("--dense-arm", options.dense_arm,
               "Also the same with dense attention, and the ratio");
  app.add_flag("--breakdown", breakdown, "Also a line a part of the step");
  app.add_flag("--kernels", options.kernels,
               "A GPU: one step more, and a line with the time of each kernel in it");
  if (!parse_options(app, "bench train", argc, argv)) return 0;
  MT_CHECK_ARG(!config.empty(), "bench train: expected --config FILE, got none");
  MT_CHECK_ARG(app.count("--ranks") == 0 || virtual_ranks.empty(),
               "bench train: expected --ranks or --virtual, got both");
  MT_CHECK_ARG(
      app.count("--nproc") == 0 || (app.count("--ranks") == 0 && virtual_ranks.empty()),
      "bench train: expected --nproc (processes) or --ranks, --virtual (threads), got both");
  MT_CHECK_ARG(nproc >= 1 && nproc <= 64, "--nproc: expected a number from 1 to 64, got ", nproc);
  MT_CHECK_ARG(ranks >= 1 && ranks <= 64, "--ranks: expected a number from 1 to 64, got ", ranks);
  options.ranks = virtual_ranks.empty() ? topology::Topology{1, ranks}
                                        : topology::parse_topology(virtual_ranks);
  std::vector<Override> overrides;
  for (const std::string& text : set) {
    const size_t equals = text.find('=');
    MT_CHECK_ARG(equals != std::string::npos && equals > 0, "--set: expected key=value, got '",
                 text, "'");
    overrides.push_back({text.substr(0, equals), text.substr(equals + 1)});
  }
  if (!device.empty()) overrides.push_back({"train.device", device});
  if (nproc > 1 && !started_by_launch()) return launch({for_ranks(argc, argv), nproc});
  if (started_by_launch()) {
    print_rows_as_rank(config, overrides, std::move(options), breakdown);
    return 0;
  }
  topology::LaunchEnvironment launch;
  launch.world_size = options.ranks.cp_size();
  launch.local_world_size = options.ranks.cp_size();
  print_rows(config, overrides, launch, std::move(options), breakdown);
  return 0;
}

}  // namespace mtraining::cli
