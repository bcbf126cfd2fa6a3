#include "cli/bench.h"

#include <cstdio>
#include <string>
#include <vector>

#include "cli/nearest.h"
#include "mtraining/base/check.h"

namespace mtraining::cli {
namespace {

constexpr const char* kHelp = R"(usage: mtraining bench attention|ring|train [options]

  attention  one layer's attention on this machine: forward, backward, index, beside torch's dense one;
             with --qk FILE what a pattern chooses from given q and k
  ring       one layer over ranks that are threads of this process: phases, bytes by channel, imbalance
  train      train steps of a configuration on random tokens

Each prints one JSON object a line. mtraining bench WHAT --help tells more.

examples:
  mtraining bench attention --density .05 --threads 2
  mtraining bench attention --qk qk.safetensors --ranks 4
  mtraining bench ring --virtual 4x8 --breakdown
  mtraining bench train --config recipes/quickstart.toml --ranks 4 --steps 5
)";

}  // namespace

int run_bench(int argc, char** argv) {
  const std::vector<std::string> known = {"attention", "ring", "train"};
  const std::string what = argc > 1 ? argv[1] : "";
  if (what == "--help" || what == "-h") {
    std::fputs(kHelp, stdout);
    return 0;
  }
  MT_CHECK_ARG(!what.empty(), "bench: expected attention, ring or train, got none");
  if (what == "attention") return bench_attention(argc - 1, argv + 1);
  if (what == "ring") return bench_ring(argc - 1, argv + 1);
  if (what == "train") return bench_train(argc - 1, argv + 1);
  throw InvalidArgument(concat("bench: expected attention, ring or train, got ", what,
                               "; nearest: ", nearest(what, known)));
}

}  // namespace mtraining::cli
