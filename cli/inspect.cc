#include "cli/inspect.h"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "cli/config_file.h"
#include "cli/parse_options.h"
#include "mtraining/base/check.h"
#include "mtraining/base/json.h"
#include "mtraining/checkpoint/publication.h"
#include "mtraining/checkpoint/training_state.h"
#include "mtraining/checkpoint/weight_folder.h"
#include "mtraining/data/token_file.h"
#include "mtraining/model/hf_config.h"

namespace mtraining::cli {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;

constexpr const char* kFooter = R"(
PATH: a token file (with or without .bin or .idx), a .safetensors file, a Hugging Face folder, a checkpoint, its training_state, a
folder of checkpoints, or a run's folder.

examples:
  mtraining inspect runs/quickstart/data/train
  mtraining inspect runs/quickstart/vertical_slash
  mtraining inspect runs/quickstart/vertical_slash/checkpoints/step-00000100 --tensors
  mtraining inspect model.safetensors --json
)";

constexpr int64_t kSampledTokens = int64_t{1} << 22;
constexpr int64_t kChunk = 4096;

bool there(const fs::path& path) {
  std::error_code ignored;
  return fs::exists(path, ignored);
}

Json shape_of(const std::vector<int64_t>& shape) { return Json(shape); }

// ---------------------------------------------------------------- token files

/// Least and greatest id over chunks that are spread evenly over the file.
void sample_ids(const data::TokenFile& file, Json& out) {
  const int64_t tokens = file.num_tokens();
  const int64_t chunks = std::min((tokens + kChunk - 1) / kChunk, kSampledTokens / kChunk);
  std::vector<int64_t> ids;
  int64_t least = 0, greatest = 0, seen = 0;
  for (int64_t c = 0; c < chunks; ++c) {
    const int64_t begin = chunks == 1 ? 0 : (tokens - std::min(tokens, kChunk)) * c / (chunks - 1);
    ids.resize(static_cast<size_t>(std::min(kChunk, tokens - begin)));
    file.read(begin, ids);
    const auto [low, high] = std::minmax_element(ids.begin(), ids.end());
    least = seen == 0 ? *low : std::min(least, *low);
    greatest = seen == 0 ? *high : std::max(greatest, *high);
    seen += static_cast<int64_t>(ids.size());
  }
  out["sampled_tokens"] = std::min(seen, tokens);
  if (seen > 0) {
    out["least_id"] = least;
    out["greatest_id"] = greatest;
  }
}

Json inspect_tokens(const std::string& prefix) {
  const data::TokenFile file(prefix, 0);
  int64_t longest = 0, shortest = file.num_sequences() > 0 ? file.num_tokens() : 0;
  for (int64_t s = 0; s < file.num_sequences(); ++s) {
    const int64_t length = file.sequence_start(s + 1) - file.sequence_start(s);
    longest = std::max(longest, length);
    shortest = std::min(shortest, length);
  }
  Json out = {{"kind", "token file"},
              {"path", prefix},
              {"dtype", data::to_string(file.type())},
              {"tokens", file.num_tokens()},
              {"sequences", file.num_sequences()},
              {"documents", file.num_documents()},
              {"shortest_sequence", shortest},
              {"longest_sequence", longest}};
  sample_ids(file, out);
  const std::string mask = prefix + "_loss_mask";
  out["loss_mask"] = there(mask + ".idx");
  if (!out["loss_mask"].get<bool>()) return out;
  const data::TokenFile mask_file(mask, 2);
  MT_CHECK_ARG(mask_file.num_tokens() == file.num_tokens(), mask, ".idx: expected ",
               file.num_tokens(), " values as ", prefix, " has tokens, got ",
               mask_file.num_tokens());
  return out;
}

// ---------------------------------------------------------------- tensors

struct Tensors {
  Json list = Json::array();
  std::map<std::string, int64_t> count_by_type;
  int64_t elements = 0, bytes = 0;
  void add(const checkpoint::TensorSpec& spec) {
    const std::string type(checkpoint::to_string(spec.type));
    list.push_back({{"name", spec.name}, {"dtype", type}, {"shape", shape_of(spec.shape)}});
    ++count_by_type[type];
    elements += checkpoint::num_elements(spec);
    bytes += checkpoint::num_bytes(spec);
  }
  void write(Json& out) const {
    out["tensor_count"] = list.size();
    out["tensors_by_dtype"] = count_by_type;
    out["parameters"] = elements;
    out["bytes"] = bytes;
    out["tensors"] = list;
  }
};

Json inspect_safetensors(const fs::path& path) {
  const checkpoint::SafetensorsFile file(path);
  Json out = {{"kind", "safetensors file"}, {"path", path.string()}};
  Tensors tensors;
  for (const checkpoint::StoredTensor& tensor : file.tensors()) tensors.add(tensor.spec);
  tensors.write(out);
  out["metadata"] = file.metadata();
  return out;
}

Json model_facts(const fs::path& folder) {
  const model::HfConfig c = model::read_hf_config(folder);
  return {{"family", model::to_string(c.family)},
          {"vocab_size", c.vocab_size},
          {"hidden_size", c.hidden_size},
          {"intermediate_size", c.intermediate_size},
          {"num_hidden_layers", c.num_hidden_layers},
          {"num_attention_heads", c.num_attention_heads},
          {"num_key_value_heads", c.num_key_value_heads},
          {"head_dim", c.head_dim},
          {"max_position_embeddings", c.max_position_embeddings},
          {"tie_word_embeddings", c.tie_word_embeddings},
          {"dtype", c.dtype.empty() ? "not given" : c.dtype}};
}

Json state_facts(const fs::path& folder) {
  const checkpoint::TrainingState state(folder);
  const checkpoint::Progress& p = state.progress();
  Json out = {{"train_step", p.train_step},
              {"micro_step", p.micro_step},
              {"sample_position", p.sample_position},
              {"tokens_total", p.tokens_total},
              {"skipped_steps", p.skipped_steps},
              {"seed", p.seed},
              {"written_by_ranks", state.world_size()}};
  Tensors tensors;
  for (const checkpoint::TensorSpec& spec : state.tensors()) tensors.add(spec);
  tensors.write(out);
  return out;
}

// ---------------------------------------------------------------- checkpoints and runs

constexpr const char* kState = "training_state";

Json inspect_state(const fs::path& folder) {
  Json out = {{"kind", "training state"}, {"path", folder.string()}};
  out.update(state_facts(folder));
  return out;
}

Json inspect_checkpoint(const fs::path& folder) {
  const bool has_state = there(folder / kState);
  Json out = {{"kind", has_state ? "checkpoint" : "Hugging Face folder"},
              {"path", folder.string()}};
  if (has_state || there(folder / "complete.json")) {
    const std::string reason = checkpoint::incomplete_reason(folder);
    MT_CHECK_ARG(reason.empty(), reason);
    out["complete"] = true;
  }
  out["model"] = model_facts(folder);
  const checkpoint::WeightFolder weights(folder);
  Tensors tensors;
  for (const std::string& name : weights.names()) tensors.add(*weights.find(name));
  tensors.write(out);
  out["files"] = weights.files();
  out["unused_files"] = weights.unused_files();
  if (has_state) out["training_state"] = state_facts(folder / kState);
  return out;
}

Json list_of(const fs::path& root) {
  const checkpoint::CheckpointList list = checkpoint::list_checkpoints(root);
  Json complete = Json::array();
  for (const checkpoint::PublishedCheckpoint& one : list.complete)
    complete.push_back({{"folder", one.folder.string()}, {"train_step", one.train_step}});
  Json ignored = Json::array();
  for (const checkpoint::IgnoredFolder& one : list.ignored) ignored.push_back(one.reason);
  return {{"complete", complete}, {"ignored", ignored}};
}

/// The last whole row of metrics.jsonl; `rows` counts them, `cut` says whether the file ends within one.
Json last_row(const fs::path& path, int64_t& rows, bool& cut) {
  std::error_code error;
  MT_CHECK_ARG(fs::is_regular_file(path, error), path.string(), ": expected a file, ",
               error ? error.message() : std::string("got something else"));
  std::ifstream file(path);
  MT_CHECK_ARG(file.good(), path.string(), ": cannot be opened: ", std::strerror(errno));
  std::string line, last;
  int64_t offset = 0, last_offset = 0;
  while (std::getline(file, line)) {
    cut = file.eof();
    if (!cut) {
      last = line;
      last_offset = offset;
      ++rows;
    }
    offset += static_cast<int64_t>(line.size()) + 1;
  }
  if (rows == 0) return nullptr;
  const nlohmann::json row = parse_json(last, path.string(), last_offset);
  MT_CHECK_ARG(row.is_object() && row.contains("train_step"), path.string(), ": offset ",
               last_offset, ": expected an object with train_step, got another form");
  return Json::parse(row.dump());
}

/// Whether the run's first rank holds its lock.
bool is_running(const fs::path& folder) {
  const int fd = ::open((folder / ".lock").c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) return false;
  const bool held = ::flock(fd, LOCK_SH | LOCK_NB) != 0 && errno == EWOULDBLOCK;
  ::close(fd);
  return held;
}

Json run_config(const fs::path& path) {
  const train::RunConfig config = load_config(path.string(), {}).config;
  Json out = {{"seq_len", config.train.seq_len},
              {"global_batch_size", config.train.global_batch_size}};
  if (config.train.steps) out["steps"] = *config.train.steps;
  if (config.train.tokens) out["tokens"] = *config.train.tokens;
  if (config.parallel.cp_size) out["cp_size"] = *config.parallel.cp_size;
  out["dp_size"] = config.parallel.dp_size;
  out["pattern"] = std::string(to_string(config.attention.pattern));
  out["seed"] = config.train.seed;
  return out;
}

Json inspect_run(const fs::path& folder) {
  Json out = {{"kind", "run"}, {"path", folder.string()}, {"running", is_running(folder)}};
  if (there(folder / "config.toml")) out["config"] = run_config(folder / "config.toml");
  int64_t rows = 0;
  bool cut = false;
  Json last = nullptr;
  if (there(folder / "metrics.jsonl")) last = last_row(folder / "metrics.jsonl", rows, cut);
  out["steps_done"] = last.is_null() ? Json(0) : last["train_step"];
  if (cut) out["metrics_end"] = "the last row of metrics.jsonl is cut";
  if (!last.is_null()) out["last_metrics"] = last;
  out["finished"] = there(folder / "summary.json");
  if (there(folder / "checkpoints")) out["checkpoints"] = list_of(folder / "checkpoints");
  return out;
}

bool holds_state_files(const fs::path& folder) {
  std::error_code error;
  for (fs::directory_iterator it(folder, error), end; !error && it != end; it.increment(error)) {
    const std::string name = it->path().filename().string();
    if (name.rfind("rank-", 0) == 0 && name.find("-of-") != std::string::npos) return true;
  }
  return false;
}

Json inspect_folder(const fs::path& folder) {
  if (there(folder / "config.json") || there(folder / kState) ||
      there(folder / checkpoint::kWeightFile) || there(folder / checkpoint::kWeightIndexFile))
    return inspect_checkpoint(folder);
  if (there(folder / "metrics.jsonl") || there(folder / "config.toml")) return inspect_run(folder);
  if (holds_state_files(folder)) return inspect_state(folder);
  const checkpoint::CheckpointList list = checkpoint::list_checkpoints(folder);
  if (!list.complete.empty() || !list.ignored.empty() || there(folder / "latest")) {
    Json out = {{"kind", "folder of checkpoints"}, {"path", folder.string()}};
    out.update(list_of(folder));
    return out;
  }
  throw InvalidArgument(concat(
      folder.string(),
      ": expected a checkpoint (config.json), a run (metrics.jsonl, config.toml), a training "
      "state (rank-..-of-..) or checkpoints (step-..), got a folder with none of them"));
}

bool begins_with(const fs::path& path, const std::string& magic) {
  std::ifstream file(path, std::ios::binary);
  std::string head(magic.size(), '\0');
  file.read(head.data(), static_cast<std::streamsize>(head.size()));
  return file.gcount() == static_cast<std::streamsize>(head.size()) && head == magic;
}

Json inspect_path(const fs::path& path) {
  std::error_code error;
  if (fs::is_directory(path, error)) return inspect_folder(path);
  const std::string text = path.string();
  const std::string extension = path.extension().string();
  if (extension == ".idx" || extension == ".bin")
    return inspect_tokens(text.substr(0, text.size() - 4));
  if (!there(path)) {
    MT_CHECK_ARG(there(text + ".idx") || there(text + ".bin"), text,
                 ": cannot be opened: ", std::strerror(ENOENT));
    return inspect_tokens(text);
  }
  MT_CHECK_ARG(fs::is_regular_file(path, error), text,
               ": expected a regular file or a folder, got something else");
  if (extension == ".safetensors") return inspect_safetensors(path);
  MT_CHECK_ARG(!begins_with(path, "MMIDIDX"), text,
               ": expected the name of a token file's index to end in .idx");
  throw InvalidArgument(concat(text,
                               ": expected a token file (.bin, .idx), a .safetensors file or a "
                               "folder, got a file of another kind"));
}

// ---------------------------------------------------------------- output

std::string plain(const Json& value) {
  return value.is_string() ? value.get<std::string>() : value.dump();
}

void print_text(const Json& value, const std::string& indent, bool tensors) {
  for (const auto& [key, item] : value.items()) {
    if (key == "tensors" && !tensors) continue;
    std::string head = indent + key;
    if (item.is_object()) {
      std::cout << head << "\n";
      print_text(item, indent + "  ", tensors);
    } else if (item.is_array() && key != "shape") {
      std::cout << head << (item.empty() ? "  none" : "") << "\n";
      for (const Json& element : item) {
        std::string line;
        if (element.is_object()) {
          for (const auto& [name, part] : element.items())
            line += (line.empty() ? "" : "  ") + (name == "name" ? "" : name + " ") + plain(part);
        } else {
          line = plain(element);
        }
        std::cout << indent << "  " << line << "\n";
      }
    } else {
      head.resize(std::max<size_t>(head.size() + 1, 28), ' ');
      std::cout << head << plain(item) << "\n";
    }
  }
}

}  // namespace

int run_inspect(int argc, char** argv) {
  CLI::App app("What a token file, a checkpoint or a run's folder holds", "mtraining inspect");
  app.footer(kFooter);
  std::string path;
  bool as_json = false, tensors = false;
  app.add_option("PATH", path, "the file or folder")->required();
  app.add_flag("--json", as_json, "prints one JSON object, with all tensors");
  app.add_flag("--tensors", tensors, "lists every tensor");
  if (!parse_options(app, "inspect", argc, argv)) return 0;
  MT_CHECK_ARG(!path.empty(), "inspect: expected a path, got \"\"");
  const Json facts = inspect_path(path);
  if (as_json) {
    std::cout << facts.dump(2, ' ', false, Json::error_handler_t::replace) << "\n";
  } else {
    print_text(facts, "", tensors);
  }
  return 0;
}

}  // namespace mtraining::cli
