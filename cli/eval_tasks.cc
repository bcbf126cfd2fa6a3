#include "cli/eval_tasks.h"

#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "cli/convert.h"
#include "cli/parse_options.h"
#include "cli/progress_line.h"
#include "cli/weights_run.h"
#include "mtraining/base/check.h"
#include "mtraining/checkpoint/safetensors.h"
#include "mtraining/checkpoint/weight_folder.h"
#include "mtraining/eval/answer.h"
#include "mtraining/eval/digest.h"
#include "mtraining/eval/results.h"
#include "mtraining/eval/summary.h"
#include "mtraining/model/hf_config.h"
#include "mtraining/train/generate.h"
#include "mtraining/train/layer_patterns.h"

namespace mtraining::cli {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;
using Clock = std::chrono::steady_clock;

struct Options {
  WeightsOptions weights;
  std::string data, out, shard = "1/1";
  std::vector<std::string> attention = {"dense", "vertical_slash"};
  int64_t max_samples = 0, max_tokens = 0;
};

/// "2/8": samples 1, 9, 17, .. of a file.
struct Shard {
  int64_t first = 0, step = 1;
};
Shard parse_shard(const std::string& text) {
  const size_t slash = text.find('/');
  const auto number = [&](const std::string& part) {
    MT_CHECK_ARG(!part.empty() && part.size() < 7 &&
                     part.find_first_not_of("0123456789") == std::string::npos,
                 "--shard: expected I/N such as 1/8, got '", text, "'");
    return std::stoll(part);
  };
  MT_CHECK_ARG(slash != std::string::npos, "--shard: expected I/N such as 1/8, got '", text, "'");
  const Shard shard{number(text.substr(0, slash)) - 1, number(text.substr(slash + 1))};
  MT_CHECK_ARG(shard.first >= 0 && shard.first < shard.step,
               "--shard: expected I/N with 1 <= I <= N, got '", text, "'");
  return shard;
}

double seconds_since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

/// What tells weights from others without reading them: config.json, and of each file its tensors and their checksums; where it has
/// none, its size and time.
std::string weights_digest(const std::string& folder) {
  std::ifstream config(fs::path(folder) / "config.json", std::ios::binary);
  std::string text((std::istreambuf_iterator<char>(config)), std::istreambuf_iterator<char>());
  const checkpoint::WeightFolder whole(folder);
  for (const std::string& name : whole.files()) {
    const fs::path path = fs::path(folder) / name;
    const checkpoint::SafetensorsFile file(path);
    bool has_checksums = false;
    for (const auto& [key, value] : file.metadata()) {
      text += concat('\n', key, ' ', value);
      has_checksums = has_checksums || key.ends_with("xxh3");
    }
    for (const checkpoint::StoredTensor& tensor : file.tensors())
      text += concat('\n', tensor.spec.name, ' ', to_string(tensor.spec), ' ', tensor.begin);
    if (!has_checksums)
      text += concat('\n', fs::file_size(path), ' ',
                     fs::last_write_time(path).time_since_epoch().count());
  }
  return eval::digest_of(text);
}

/// The configuration but for what says nothing of the answers.
std::string settings_of(const train::RunConfig& config) {
  std::string text;
  for (const auto& [key, value] : keys_of(to_toml(config))) {
    const bool matters = key.starts_with("attention.") || key.starts_with("model.");
    if (matters && key != "model.init_from") text += concat(key, " = ", value, '\n');
  }
  return text;
}

/// A line that is written over on a terminal; a line now and then elsewhere. On standard error: results may go to standard output.
class Countdown {
 public:
  explicit Countdown(std::string label) : label_(std::move(label)) {}
  ~Countdown() {
    if (terminal_ && open_) std::cerr << std::endl;
  }
  void say(int64_t done, int64_t total) {
    if (!terminal_ && seconds_since(last_) < 30) return;
    last_ = Clock::now();
    const double each = seconds_since(begin_) / static_cast<double>(done);
    std::string line = concat(label_, ": ", done, " of ", total, " samples, ",
                              duration_text(each * static_cast<double>(total - done)), " left");
    if (!terminal_) {
      std::cerr << line << std::endl;
      return;
    }
    line.resize(std::max<size_t>(line.size(), 60), ' ');
    std::cerr << '\r' << line << std::flush;
    open_ = true;
  }

 private:
  std::string label_;
  bool terminal_ = ::isatty(STDERR_FILENO) == 1;
  bool open_ = false;
  Clock::time_point begin_ = Clock::now(), last_ = begin_;
};

/// One pattern over the samples.
struct Arm {
  std::string attention;
  WeightsRun run;
  Json facts;  ///< of the run, with its digest
  std::string digest() const { return facts.at("run").get<std::string>(); }
};

Arm make_arm(const Options& o, const std::string& weights, const std::string& weights_id,
             const std::string& attention, const std::set<int64_t>& lengths) {
  Arm arm{attention,
          configure_weights(weights, o.data, attention, *lengths.rbegin(), o.weights.set),
          {}};
  train::RunConfig config = arm.run.loaded.config;
  const std::string settings = settings_of(config);
  // A pattern that does not fit a length is found now, not after hours.
  for (const int64_t length : lengths) {
    config.train.seq_len = length;
    train::layer_patterns(config);
  }
  const std::string dtype = config.model.dtype == at::kFloat ? "float32" : "bf16";
  const std::string device(arm.run.resolved.device.is_cuda() ? "cuda" : "cpu");
  arm.facts = {
      {"run", eval::digest_of(concat(weights_id, '\n', settings, '\n', dtype, '\n', device))},
      {"attention", attention},
      {"checkpoint", weights},
      {"weights", weights_id},
      {"dtype", dtype},
      {"device", arm.run.resolved.device.str()},
      {"settings", settings}};
  return arm;
}

Json to_json(const eval::SummaryRow& row, eval::Kind kind, const Arm& arm) {
  const auto or_null = [](const auto& value) { return value ? Json(*value) : Json(nullptr); };
  Json made = {{"kind", eval::to_string(kind)}, {"attention", arm.attention}, {"by", row.by}};
  if (row.task) made["task"] = *row.task;
  if (row.by.find("length") != std::string::npos) made["length"] = or_null(row.length);
  if (row.by.find("depth") != std::string::npos) made["depth"] = or_null(row.depth);
  made["samples"] = row.samples;
  made["scored"] = row.scored;
  made["truncated"] = row.truncated;
  made["prompt_tokens"] = row.mean_prompt_tokens;
  made["score"] = or_null(row.score);
  if (row.by == "all")
    for (const char* key : {"run", "checkpoint", "weights", "dtype", "device"})
      made[key] = arm.facts.at(key);
  return made;
}

void print(const Json& row) {
  std::cout << row.dump(-1, ' ', false, Json::error_handler_t::replace) << std::endl;
}

void evaluate(eval::Kind kind, const Options& o) {
  const Shard shard = parse_shard(o.shard);
  const std::string weights = find_weights(o.weights.checkpoint).string();
  const model::HfConfig hf = model::read_hf_config(weights);
  const int64_t most = o.max_tokens > 0 ? o.max_tokens : hf.max_position_embeddings;
  const eval::SampleFile samples(o.data, kind, {hf.vocab_size, most});
  std::vector<size_t> chosen;
  std::set<int64_t> lengths;
  const auto end = std::ssize(samples.facts());
  for (int64_t i = shard.first; i < end; i += shard.step) {
    if (o.max_samples > 0 && std::ssize(chosen) == o.max_samples) break;
    chosen.push_back(i);
    lengths.insert(samples.facts()[i].prompt_tokens);
  }
  MT_CHECK_ARG(!chosen.empty(), "--shard: ", o.shard, " of ", o.data, "'s ", end,
               " samples has none");
  std::vector<Arm> arms;
  const std::string weights_id = weights_digest(weights);
  for (const std::string& attention : o.attention) {
    for (const Arm& before : arms)
      MT_CHECK_ARG(before.attention != attention, "--attention: ", attention, " is given twice");
    arms.push_back(make_arm(o, weights, weights_id, attention, lengths));
  }
  std::unique_ptr<eval::ResultFile> file;
  if (!o.out.empty()) {
    std::error_code ignored;
    MT_CHECK_ARG(!fs::equivalent(o.out, o.data, ignored), "--out: is --data itself");
    file = std::make_unique<eval::ResultFile>(o.out);
    if (file->cut_bytes() > 0)
      std::cerr << "mtraining: " << o.out << ": cut off the " << file->cut_bytes()
                << " bytes of a last line that was not finished" << std::endl;
  }
  std::unique_ptr<train::Generator> generator;  // made when a sample needs it
  const eval::Model model = {
      [&](const eval::Sample& s) {
        return generator->continue_greedily(s.ids, s.max_new_tokens, s.stops);
      },
      [&](const eval::Sample& s) { return generator->option_log_likelihoods(s.ids, s.options); }};
  for (const Arm& arm : arms) {  // of another run: said before the first sample is read
    if (file == nullptr) break;
    for (const size_t i : chosen) file->find(samples.facts()[i], arm.attention, arm.digest());
  }
  for (const Arm& arm : arms) {
    Countdown countdown(concat(eval::to_string(kind), ", ", arm.attention));
    eval::Summary summary;
    std::vector<size_t> missing;
    for (const size_t i : chosen) {
      const eval::Result* found =
          file ? file->find(samples.facts()[i], arm.attention, arm.digest()) : nullptr;
      if (found != nullptr) {
        summary.add(*found);
      } else {
        missing.push_back(i);
      }
    }
    if (file) {
      file->begin_run(arm.facts);
    } else {
      print(arm.facts);
    }
    for (size_t n = 0; n < missing.size(); ++n) {
      if (generator == nullptr) {
        enter(arm.run, o.weights.threads);
        generator = std::make_unique<train::Generator>(arm.run.loaded.config, arm.run.resolved);
      }
      generator->attend_with(arm.run.loaded.config.attention);
      const eval::Sample sample = samples.read(missing[n]);
      const auto begin = Clock::now();
      eval::Row row{{sample.facts, arm.attention, arm.digest(), {}}, {}};
      row.answer = eval::answer(sample, model);
      row.result.score = row.answer.score;
      row.density = generator->prompt_density();
      row.seconds = seconds_since(begin);
      if (file) {
        file->add(row);
      } else {
        print(eval::to_json(row));
      }
      summary.add(row.result);
      countdown.say(static_cast<int64_t>(n) + 1, std::ssize(missing));
    }
    for (const eval::SummaryRow& row : summary.rows()) print(to_json(row, kind, arm));
  }
}

}  // namespace

int run_eval_tasks(eval::Kind kind, int argc, char** argv) {
  const std::string verb = concat("eval ", eval::to_string(kind));
  CLI::App app("A checkpoint's answers to the samples of a long-context test, and their scores",
               concat("mtraining ", verb));
  app.footer(concat(
      "DIR is a Hugging Face folder, a checkpoint or a run's folder (its last checkpoint); FILE "
      "holds a sample a line: python -m mtraining.tasks ",
      eval::to_string(kind),
      " makes it. The prompt is read with the pattern, new tokens attend to all before them; of "
      "equal logits the lower id is taken. Scores are of tokens: an answer counts where its tokens "
      "stand among the new ones; python -m mtraining.tasks score gives each test's own scores of "
      "the text. With --out the same command goes on where it was stopped. docs/evaluation.md has "
      "all keys.\n\n"
      "Examples:\n  mtraining ",
      verb, " --checkpoint models/base --data ", eval::to_string(kind),
      ".jsonl --attention dense vertical_slash --set attention.p_slash=0.95 --out ",
      eval::to_string(kind), ".out.jsonl\n  CUDA_VISIBLE_DEVICES=1 mtraining ", verb,
      " --checkpoint models/base --data ", eval::to_string(kind),
      ".jsonl --shard 2/8 --out part-2.jsonl\n"));
  Options o;
  add_weights_options(app, o.weights);
  app.add_option("--data", o.data, "The samples (required)");
  app.add_option("--attention", o.attention,
                 "Over the prompt, one after the other: dense, vertical_slash, fixed, xattention, "
                 "moba (dense and vertical_slash)");
  app.add_option("--out", o.out,
                 "Rows of samples go to this file, and what it holds is not done again (absent: to "
                 "standard output)");
  app.add_option("--shard", o.shard, "I/N: every N-th sample from the I-th on")
      ->capture_default_str();
  app.add_option("--max-samples", o.max_samples, "The first so many alone (absent: all)");
  app.add_option("--max-tokens", o.max_tokens,
                 "Of prompt and answer; beyond the trained length give model.rope_scaling by --set "
                 "(absent: max_position_embeddings)");
  if (!parse_options(app, verb, argc, argv)) return 0;
  check_weights_options(verb, o.weights);
  MT_CHECK_ARG(!o.data.empty(), verb, ": expected --data FILE.jsonl, got none");
  check_positive(app, "--max-samples", o.max_samples);
  check_positive(app, "--max-tokens", o.max_tokens);
  evaluate(kind, o);
  return 0;
}

}  // namespace mtraining::cli
