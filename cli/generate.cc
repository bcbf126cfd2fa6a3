#include "cli/generate.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <iostream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "cli/convert.h"
#include "cli/parse_options.h"
#include "cli/weights_run.h"
#include "mtraining/base/check.h"
#include "mtraining/base/json.h"
#include "mtraining/model/hf_config.h"
#include "mtraining/train/generate.h"

namespace mtraining::cli {
namespace {

struct Options {
  WeightsOptions weights;
  std::string input, attention = "dense";
  std::vector<int64_t> stops;
  int64_t max_new_tokens = 64;
};

/// The "ids" of each line that is not blank. Errors: InvalidArgument naming file and line.
std::vector<std::vector<int64_t>> read_prompts(const std::string& path, int64_t vocabulary) {
  const std::string text = read_text_file(path);
  std::vector<std::vector<int64_t>> prompts;
  int64_t number = 0;
  for (size_t begin = 0; begin < text.size(); ++number) {
    const size_t end = std::min(text.find('\n', begin), text.size());
    const std::string line = text.substr(begin, end - begin);
    const std::string where = concat(path, ":", number + 1);
    const auto offset = static_cast<int64_t>(begin);
    begin = end + 1;
    if (line.find_first_not_of(" \t\r") == std::string::npos) continue;
    const nlohmann::json root = parse_json(line, where, offset);
    MT_CHECK_ARG(
        root.is_object() && root.contains("ids") && root["ids"].is_array() && !root["ids"].empty(),
        where, ": expected an object with \"ids\", an array of token ids");
    std::vector<int64_t>& ids = prompts.emplace_back();
    for (const nlohmann::json& id : root["ids"]) {
      const bool fits =
          id.is_number_integer() && id.get<int64_t>() >= 0 && id.get<int64_t>() < vocabulary;
      MT_CHECK_ARG(fits, where, ": \"ids\"[", ids.size(), "]: expected 0 to ", vocabulary - 1,
                   ", got ", id.dump());
      ids.push_back(id.get<int64_t>());
    }
  }
  MT_CHECK_ARG(!prompts.empty(), path, ": expected lines with \"ids\", got none");
  return prompts;
}

void generate(const Options& o) {
  const std::string weights = find_weights(o.weights.checkpoint).string();
  const model::HfConfig hf = model::read_hf_config(weights);
  const std::vector<std::vector<int64_t>> prompts = read_prompts(o.input, hf.vocab_size);
  int64_t longest = 0;
  for (const auto& ids : prompts) longest = std::max<int64_t>(longest, std::ssize(ids));
  MT_CHECK_ARG(longest + o.max_new_tokens <= hf.max_position_embeddings, o.input,
               ": expected at most max_position_embeddings - --max-new-tokens = ",
               hf.max_position_embeddings - o.max_new_tokens, " ids a line, got ", longest);
  std::vector<std::string> set = o.weights.set;
  const bool placed = std::any_of(set.begin(), set.end(), [](const std::string& text) {
    return text.starts_with("train.device=");
  });
  if (!placed) set.emplace_back("train.device=cpu");  // a row of work a token: nothing for a GPU
  const WeightsRun run = configure_weights(weights, o.input, o.attention, longest, set);
  enter(run, o.weights.threads);
  train::Generator generator(run.loaded.config, run.resolved);
  for (const std::vector<int64_t>& ids : prompts) {
    const nlohmann::ordered_json row = {
        {"ids", ids}, {"output", generator.continue_greedily(ids, o.max_new_tokens, o.stops)}};
    std::cout << row.dump() << std::endl;
  }
}

}  // namespace

int run_generate(int argc, char** argv) {
  CLI::App app("Continues lines of token ids greedily", "mtraining generate");
  app.footer(
      "DIR is a Hugging Face folder, a checkpoint or a run's folder (its last checkpoint); a line "
      "of FILE is {\"ids\": [1, 2, 3]}, a line of "
      "the output the same with \"output\". The prompt is read with the pattern, new tokens attend "
      "to all before them. "
      "On the CPU unless --set train.device=cuda. python -m mtraining.generate takes text.\n\n"
      "Examples:\n"
      "  mtraining generate --checkpoint runs/quickstart/vertical_slash --input prompts.jsonl\n"
      "  mtraining generate --checkpoint models/base --input prompts.jsonl --attention "
      "vertical_slash --max-new-tokens 32 --stop-id 2\n");
  Options o;
  add_weights_options(app, o.weights);
  app.add_option("--input", o.input, "JSON lines with \"ids\" (required)");
  app.add_option("--attention", o.attention,
                 "Over the prompt: dense, vertical_slash, fixed, xattention, moba")
      ->capture_default_str();
  app.add_option("--max-new-tokens", o.max_new_tokens, "At most, a line")->capture_default_str();
  app.add_option("--stop-id", o.stops, "An id after which a line ends; several may be given");
  if (!parse_options(app, "generate", argc, argv)) return 0;
  check_weights_options("generate", o.weights);
  MT_CHECK_ARG(!o.input.empty(), "generate: expected --input FILE.jsonl, got none");
  MT_CHECK_ARG(o.max_new_tokens >= 1 && o.max_new_tokens <= int64_t{1} << 31,
               "--max-new-tokens: expected at least 1, got ", o.max_new_tokens);
  generate(o);
  return 0;
}

}  // namespace mtraining::cli
