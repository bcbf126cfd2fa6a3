#include "cli/resume.h"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>
#include <optional>
#include <set>
#include <sstream>

#include "cli/config_file.h"
#include "mtraining/base/check.h"
#include "mtraining/checkpoint/publication.h"
#include "mtraining/train/run_state.h"

namespace mtraining::cli {
namespace {

namespace fs = std::filesystem;

enum class KeyKind { kFixed, kDeliberate, kFree };

KeyKind kind_of(const std::string& key) {
  static const std::set<std::string> kDeliberateOnes = {"model.init_from", "model.dtype",
                                                        "model.initializer_range",
                                                        "model.embedding_initializer_range"};
  static const std::set<std::string> kFixedOnes = {"data.train", "data.shuffle_seed",
                                                   "data.document_mask", "train.seq_len",
                                                   "train.global_batch_size"};
  static const std::set<std::string> kFreeOnes = {
      "data.valid",
      "train.micro_batch_size",
      "train.stop_grace_s",
      "train.preflight",
      "train.device",
      "train.loss_chunk",
      "train.mlp_tile",
      "train.offload_layers",
      "train.peak_flops_per_s",
      "train.recall_every",
      "train.recompute",
      "train.recompute_span",
      "train.steps",
      "train.tokens",
      "attention.layout",
      "attention.stripe",
      "attention.ring",
      "attention.inner",
      "attention.ring_stride",
      "attention.prefetch_steps",
      "attention.launch_shards",
      "attention.columns",
      "attention.gradient_transport",
      "attention.transfers",
      "attention.deterministic",
      "attention.sm_margin",
      "attention.estimate",
      "attention.recall_rows",
  };
  if (kDeliberateOnes.contains(key)) return KeyKind::kDeliberate;
  if (key.starts_with("model.") || kFixedOnes.contains(key)) return KeyKind::kFixed;
  for (const char* section : {"parallel.", "eval.", "trace.", "checkpoint."}) {
    if (key.starts_with(section)) return KeyKind::kFree;
  }
  return kFreeOnes.contains(key) ? KeyKind::kFree : KeyKind::kDeliberate;
}

struct Difference {
  std::string key, before, now;
};

/// Keys that only one of them has count where they are fixed or deliberate by name and not the fruit of another version: a key
/// that this program does not know is passed over.
std::vector<Difference> differences(const std::string& before, const std::string& now) {
  const auto a = keys_of(before), b = keys_of(now);
  const std::vector<std::string> known = known_keys();
  std::vector<Difference> found;
  for (const std::string& key : known) {
    const auto in_a = a.find(key), in_b = b.find(key);
    const std::string old_value = in_a == a.end() ? "none" : in_a->second;
    const std::string new_value = in_b == b.end() ? "none" : in_b->second;
    if (old_value != new_value) found.push_back({key, old_value, new_value});
  }
  return found;
}

std::string read_text(const fs::path& path) {
  std::ostringstream text;
  text << std::ifstream(path).rdbuf();
  return text.str();
}

/// Refuses what may not change; says what changes all the same.
void compare(const std::string& where, const std::string& before, const train::RunConfig& config,
             bool named, std::vector<std::string>& notices) {
  for (const Difference& d : differences(before, to_toml(config))) {
    const KeyKind kind = kind_of(d.key);
    const bool may = kind == KeyKind::kFree || (kind == KeyKind::kDeliberate && named);
    MT_CHECK_ARG(may, d.key, ": ", where, " was trained with ", d.before, ", got ", d.now,
                 "; give this run a folder of its own with --out",
                 kind == KeyKind::kDeliberate ? ", or name the checkpoint with --resume" : "");
    if (kind == KeyKind::kDeliberate || d.key == "train.steps" || d.key == "train.tokens")
      notices.push_back(concat(d.key, " = ", d.now, " from here on, ", d.before, " before"));
  }
}

bool has_rows(const fs::path& out) {
  std::error_code error;
  const auto bytes = fs::file_size(out / "metrics.jsonl", error);
  return !error && bytes > 0;
}

Start start_from(const fs::path& checkpoint, const train::RunConfig& config, int64_t steps,
                 bool named) {
  const train::CheckpointInfo info = train::read_checkpoint_info(checkpoint);
  Start start;
  start.checkpoint = checkpoint.string();
  start.steps_done = info.position.steps_done;
  compare(start.checkpoint, info.config, config, named, start.notices);
  const bool all_steps = start.steps_done >= steps;
  const bool done = all_steps && (info.position.evaluated || start.steps_done > steps);
  start.kind = done ? StartKind::kFinished : StartKind::kResume;
  return start;
}

/// The folder holds no complete checkpoint. What is there of a run must not be lost by an oversight.
Start start_anew(const train::RunConfig& config, const checkpoint::CheckpointList& list) {
  const fs::path out = config.out;
  for (const checkpoint::IgnoredFolder& ignored : list.ignored) {
    MT_CHECK_ARG(ignored.never_published, "--out: ", config.out,
                 " holds a run without a whole checkpoint: ", ignored.reason,
                 "; remove the folder or give another one");
  }
  Start start;
  if (!has_rows(out)) return start;
  const std::string before = read_text(out / "config.toml");
  const auto differ = differences(before, to_toml(config));
  const bool same = !keys_of(before).empty() &&
                    std::all_of(differ.begin(), differ.end(), [](const Difference& d) {
                      return kind_of(d.key) == KeyKind::kFree;
                    });
  MT_CHECK_ARG(same && !fs::exists(out / "summary.json"), "--out: ", config.out,
               " holds a run already (metrics.jsonl) and no checkpoint to go on from; remove the "
               "folder or give another one");
  start.notices.push_back(
      concat(config.out, " holds a run that ended before its first checkpoint; it begins anew"));
  return start;
}

/// A checkpoint, or the folder of a run or of its checkpoints.
fs::path named_checkpoint(const fs::path& path) {
  std::error_code ignored;
  MT_CHECK_ARG(fs::is_directory(path, ignored), "--resume: ", path.string(),
               ": expected \"auto\", \"never\" or a folder, got none of that name");
  for (const fs::path& root : {path, path / "checkpoints"}) {
    const checkpoint::CheckpointList list = checkpoint::list_checkpoints(root);
    if (!list.complete.empty()) return list.complete.back().folder;
  }
  const bool hf = fs::exists(path / "config.json") && !fs::exists(path / "training_state");
  MT_CHECK_ARG(!hf, "--resume: ", path.string(),
               " holds weights and no training state; model.init_from begins with them");
  const std::string reason = checkpoint::incomplete_reason(path);
  MT_CHECK_ARG(reason.empty(), "--resume: ", reason);
  return path;
}

}  // namespace

Start choose_start(const std::string& resume, const train::RunConfig& config, int64_t steps) {
  const fs::path out = config.out;
  const checkpoint::CheckpointList list = checkpoint::list_checkpoints(out / "checkpoints");
  if (resume == "never") {
    MT_CHECK_ARG(!has_rows(out) && list.complete.empty(), "--out: ", config.out,
                 " holds a run already (metrics.jsonl); remove the folder or give another one");
    return {};
  }
  if (resume == "auto") {
    return list.complete.empty() ? start_anew(config, list)
                                 : start_from(list.complete.back().folder, config, steps, false);
  }
  const fs::path checkpoint = named_checkpoint(resume);
  Start start = start_from(checkpoint, config, steps, true);
  std::error_code ignored;
  const bool own_folder = fs::equivalent(checkpoint.parent_path(), out / "checkpoints", ignored);
  MT_CHECK_ARG(own_folder || (!has_rows(out) && list.complete.empty()), "--out: ", config.out,
               " holds another run than ", resume, "; give this one a folder of its own");
  return start;
}

}  // namespace mtraining::cli
