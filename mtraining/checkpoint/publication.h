// Publication: puts a checkpoint into place whole or not at all, keeps the last few, finds the one to go on from.
//
// In:   a folder of checkpoints, a function by which each rank writes its files. Out: <root>/step-00000010, and <root>/latest
//       that names it. Next: the trainer's saving and --resume.
//
// Order: write into <root>/.incomplete-step-N; flush files and folders; write complete.json, which lists all files and sizes;
// rename to step-N; flush the root; replace `latest`; remove what was published before the last `keep`. A process that dies, or a disk
// that fills, at any point leaves the newest published checkpoint whole. Whether a folder is complete is said by complete.json
// and the sizes on disk, never by its name; which is newest, by a number in it that counts publications, so that a run that went
// back to an older checkpoint goes on from its own. All ranks must see the same file system. Torch-free.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "mtraining/checkpoint/agreement.h"

namespace mtraining::checkpoint {

struct PublicationOptions {
  std::filesystem::path root;  ///< made where it does not exist
  int64_t train_step = 0;
  int rank = 0;
  int keep = 2;  ///< last published checkpoints that stay; 0: all
};

/// Collective: all ranks, with the same root, train_step and keep. `write` is called on every rank once the folder exists and
/// writes that rank's files into it; `verify`, which may be empty, is called on rank 0 once all have written, and throws where
/// the whole is not good. A checkpoint of the same step is replaced. Returns <root>/step-N on every rank.
/// Errors: on every rank the same ExternalError, the message of the lowest rank that failed; what was written is removed then.
std::filesystem::path publish(
    const PublicationOptions& options,
    const std::function<void(const std::filesystem::path& folder)>& write,
    const std::function<void(const std::filesystem::path& folder)>& verify, const Agreement& agree);

/// Why a folder is no complete checkpoint, in one sentence; "" where it is one. Cost: a stat a file.
std::string incomplete_reason(const std::filesystem::path& folder);

struct PublishedCheckpoint {
  std::filesystem::path folder;
  int64_t train_step = 0;
  int64_t publication = 0;  ///< counts up with each checkpoint published in this root
};
struct IgnoredFolder {
  std::string reason;            ///< why it is no complete checkpoint: one sentence
  bool never_published = false;  ///< its writing was interrupted: nothing refers to it
};
struct CheckpointList {
  std::vector<PublishedCheckpoint> complete;  ///< ascending by publication
  std::vector<IgnoredFolder> ignored;
};
/// What a folder of checkpoints holds; empty where it does not exist.
CheckpointList list_checkpoints(const std::filesystem::path& root);
/// For --resume=auto: the complete checkpoint that was published last; none where there is none.
std::optional<PublishedCheckpoint> find_newest(const std::filesystem::path& root);

/// Tokenizer, chat template and generation settings of a Hugging Face folder: bytes by name.
using CompanionFiles = std::map<std::string, std::string>;
/// Those that the folder has. Errors: InvalidArgument where there is no such folder, or one of them cannot be read.
CompanionFiles read_companion_files(const std::filesystem::path& folder);
/// Errors: ExternalError.
void write_companion_files(const CompanionFiles& files, const std::filesystem::path& folder);

}  // namespace mtraining::checkpoint
