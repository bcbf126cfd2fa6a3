// The executable: finds the verb, turns errors into one line and an exit code.
#include <signal.h>

#include <cstring>
#include <exception>
#include <iostream>
#include <string>
#include <vector>

#include "cli/bench.h"
#include "cli/convert.h"
#include "cli/doctor.h"
#include "cli/eval.h"
#include "cli/generate.h"
#include "cli/inspect.h"
#include "cli/launcher.h"
#include "cli/nearest.h"
#include "cli/plan.h"
#include "cli/printed.h"
#include "cli/simulate.h"
#include "cli/stop.h"
#include "cli/train.h"
#include "mtraining/base/check.h"

namespace {

struct Verb {
  const char* name;
  int (*run)(
      int argc,
      char** argv);  ///< argv[0] is the verb; an exit code, or one of the errors of base/check.h
  const char* what;
  bool prints_results = true;  ///< a run whose progress nobody reads goes on
};

constexpr Verb kVerbs[] = {
    {"train", mtraining::cli::run_train, "trains a model over context-parallel ranks", false},
    {"simulate", mtraining::cli::run_simulate,
     "predicts imbalance, bytes and time of a ring without running it"},
    {"plan", mtraining::cli::run_plan,
     "what a configuration needs: memory, bytes, time, best split"},
    {"bench", mtraining::cli::run_bench,
     "measures attention, the ring or train steps on this machine"},
    {"doctor", mtraining::cli::run_doctor,
     "what this machine has for training, and what it lacks, with the remedy"},
    {"eval", mtraining::cli::run_eval,
     "a checkpoint's loss on a text, or its scores on a long-context test, dense and sparse"},
    {"generate", mtraining::cli::run_generate, "continues lines of token ids greedily"},
    {"inspect", mtraining::cli::run_inspect,
     "what a token file, a checkpoint or a run's folder holds"},
    {"convert", mtraining::cli::run_convert,
     "Hugging Face folder <-> checkpoint, and a training state for other ranks"},
};

constexpr const char* kExamples = R"(
mtraining VERB --help tells more.

examples:
  mtraining train --config recipes/quickstart.toml --nproc 4     (after ./dev quickstart, which makes its data)
  mtraining plan --config recipes/qwen2.5-3b-512k.toml --topology 4x8
  mtraining simulate --topology 4x8 --t-comp-ms .51 --t-intra-ms .13 --t-inter-ms .98 --t-index-ms 1.13 --t-cpu-ms 2.08
)";

std::string help() {
  std::string text = "usage: mtraining VERB [options]\n\n";
  for (const Verb& verb : kVerbs) {
    std::string name = verb.name;
    name.resize(11, ' ');
    text += "  " + name + verb.what + "\n";
  }
  return text + kExamples;
}

int dispatch(int argc, char** argv) {
  const std::string verb = argc > 1 ? argv[1] : "";
  if (verb.empty() || verb == "--help" || verb == "-h" || verb == "help") {
    std::cout << help();
    mtraining::cli::check_printed();
    return verb.empty() ? 2 : 0;
  }
  std::vector<std::string> names;
  for (const Verb& known : kVerbs) {
    names.emplace_back(known.name);
    if (verb != known.name) continue;
    const int code = known.run(argc - 1, argv + 1);
    if (known.prints_results) mtraining::cli::check_printed();
    return code;
  }
  throw mtraining::InvalidArgument(mtraining::concat(
      "unknown verb ", verb, "; nearest known verb: ", mtraining::cli::nearest(verb, names)));
}

/// Before the libraries' own initialisers, which take a while: a job may be stopped in its first second.
void before_libraries(int argc, char** argv, char** environment) {
  ::signal(SIGXFSZ, SIG_IGN);  // a file that may not grow is an error with words, not a death
  if (argc > 1 && std::strcmp(argv[1], "train") == 0)
    mtraining::cli::install_stop_handlers(environment);
}
[[gnu::section(".preinit_array"),
  gnu::used]] void (*const kBeforeLibraries)(int, char**, char**) = before_libraries;

}  // namespace

int main(int argc, char** argv) {
  try {
    return dispatch(argc, argv);
  } catch (const std::exception& error) {
    const mtraining::cli::Failure failure = mtraining::cli::failure_of(error);
    std::cout << std::flush;
    std::cerr << "mtraining: error: " << failure.message << std::endl;
    return failure.exit_code;
  }
}
