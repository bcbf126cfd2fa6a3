#include "cli/eval.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cmath>
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "cli/convert.h"
#include "cli/eval_tasks.h"
#include "cli/parse_options.h"
#include "cli/weights_run.h"
#include "mtraining/base/check.h"
#include "mtraining/comm/loopback.h"
#include "mtraining/data/token_file.h"
#include "mtraining/model/hf_config.h"
#include "mtraining/train/score.h"

namespace mtraining::cli {
namespace {

using Json = nlohmann::ordered_json;

constexpr const char* kHelp =
    R"(usage: mtraining eval perplexity|needle|ruler|infinitebench --checkpoint DIR --data FILE [options]

  perplexity     the mean loss of the weights over a token file, each token once
  needle         answers to questions about a sentence in a long text, by length and depth
  ruler          RULER's tasks: retrieval, tracing, counting, questions
  infinitebench  InfiniteBench's tasks: retrieval, books, dialogue, code, arithmetic

Dense and with sparse patterns, one JSON object a line. mtraining eval perplexity --help and mtraining eval needle --help tell more;
python -m mtraining.tasks makes the files of needle, ruler and infinitebench.

examples:
  mtraining eval perplexity --checkpoint runs/quickstart/vertical_slash --data runs/quickstart/data/valid
  mtraining eval perplexity --checkpoint models/base --data book --window 32768 --attention dense vertical_slash --set attention.p_slash=0.95
  mtraining eval needle --checkpoint models/base --data needle.jsonl --attention dense vertical_slash --out needle.out.jsonl
)";

struct Options {
  WeightsOptions weights;
  std::string data;
  std::vector<std::string> attention = {"dense", "vertical_slash"};
  int64_t window = 0, stride = 0, max_windows = 0;
};

/// The trained length, or what the file has; an option may say less or more.
int64_t window_of(const Options& o, const model::HfConfig& config, int64_t tokens) {
  MT_CHECK_ARG(tokens >= 2, o.data, ".bin: expected at least 2 tokens, got ", tokens);
  if (o.window > 0) {
    MT_CHECK_ARG(o.window < tokens,
                 "--window: expected at most the file's tokens - 1 = ", tokens - 1, ", got ",
                 o.window);
    return o.window;
  }
  return std::min(config.max_position_embeddings, tokens - 1);
}

void perplexity(const Options& o) {
  const std::string weights = find_weights(o.weights.checkpoint).string();
  const model::HfConfig hf = model::read_hf_config(weights);
  const int64_t window = window_of(o, hf, data::TokenFile(o.data, hf.vocab_size).num_tokens());
  const int64_t stride = o.stride > 0 ? o.stride : window;
  MT_CHECK_ARG(stride <= window, "--stride: expected 1 to the window = ", window,
               ", or tokens are left out; got ", stride);
  // Everything that can be wrong is found before the weights are read.
  std::vector<WeightsRun> all;
  std::vector<train::LayerPatterns> patterns;
  for (const std::string& name : o.attention) {
    all.push_back(configure_weights(weights, o.data, name, window, o.weights.set));
    patterns.push_back(train::layer_patterns(all.back().loaded.config));
  }
  const train::RunConfig& config = all[0].loaded.config;
  const train::ResolvedRun& resolved = all[0].resolved;
  enter(all[0], o.weights.threads);
  const std::unique_ptr<comm::Transport> transport = comm::make_single();
  train::Scorer scorer(config, resolved, *transport, o.data);
  for (size_t i = 0; i < patterns.size(); ++i) {
    const auto begin = std::chrono::steady_clock::now();
    const train::Score score = scorer.run(patterns[i], stride, o.max_windows);
    const double seconds =
        std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    MT_CHECK_ARG(std::isfinite(score.loss), weights, ": its loss on ", o.data,
                 " is not finite: expected weights that are");
    const Json row = {{"attention", o.attention[i]},
                      {"loss", score.loss},
                      {"perplexity", std::exp(score.loss)},
                      {"scored_tokens", score.tokens},
                      {"windows", score.windows},
                      {"window", window},
                      {"stride", stride},
                      {"density", score.density},
                      {"recall", score.recall},
                      {"recall_worst", score.recall_worst},
                      {"density_by_layer", score.density_by_layer},
                      {"recall_by_layer", score.recall_by_layer},
                      {"dtype", config.model.dtype == at::kFloat ? "float32" : "bf16"},
                      {"device", resolved.device.str()},
                      {"seconds", seconds},
                      {"checkpoint", weights},
                      {"data", o.data}};
    std::cout << row.dump(-1, ' ', false, Json::error_handler_t::replace) << std::endl;
  }
}

}  // namespace

int run_eval(int argc, char** argv) {
  const std::string what = argc > 1 ? argv[1] : "";
  if (what == "--help" || what == "-h") {
    std::cout << kHelp;
    return 0;
  }
  if (const auto kind = eval::kind_of(what)) return run_eval_tasks(*kind, argc - 1, argv + 1);
  MT_CHECK_ARG(what == "perplexity",
               "eval: expected perplexity, needle, ruler or infinitebench, got ",
               what.empty() ? "none" : what, "; see mtraining eval --help");
  CLI::App app("The mean loss of weights over a token file, each token but the first once",
               "mtraining eval perplexity");
  app.footer(
      "DIR is a Hugging Face folder, a checkpoint or a run's folder (its last checkpoint); FILE a "
      "token file without extension, "
      "whose _loss_mask counts. A window reads so many tokens and predicts the one after each of "
      "them.\n\n"
      "Examples:\n"
      "  mtraining eval perplexity --checkpoint runs/quickstart/vertical_slash --data "
      "runs/quickstart/data/valid\n"
      "  mtraining eval perplexity --checkpoint models/base --data book --window 32768 --stride "
      "16384 "
      "--attention vertical_slash --set attention.p_slash=0.95\n");
  Options o;
  add_weights_options(app, o.weights);
  app.add_option("--data", o.data, "The token file (required)");
  app.add_option("--attention", o.attention,
                 "One row each: dense, vertical_slash, fixed, xattention, moba (dense and "
                 "vertical_slash)");
  app.add_option("--window", o.window, "Tokens that are read at once (absent: the trained length)");
  app.add_option("--stride", o.stride, "Tokens between windows (absent: the window)");
  app.add_option("--max-windows", o.max_windows, "The first so many alone (absent: all)");
  if (!parse_options(app, "eval perplexity", argc - 1, argv + 1)) return 0;
  check_weights_options("eval perplexity", o.weights);
  MT_CHECK_ARG(!o.data.empty(), "eval perplexity: expected --data FILE, got none");
  check_positive(app, "--window", o.window);
  check_positive(app, "--stride", o.stride);
  check_positive(app, "--max-windows", o.max_windows);
  perplexity(o);
  return 0;
}

}  // namespace mtraining::cli
