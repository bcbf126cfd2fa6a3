#include "mtraining/checkpoint/publication.h"

#include <algorithm>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <set>
#include <string_view>

#include "mtraining/base/check.h"
#include "mtraining/base/json.h"
#include "mtraining/checkpoint/disk.h"

namespace mtraining::checkpoint {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr std::string_view kComplete = "complete.json";
constexpr std::string_view kLatest = "latest";
constexpr std::string_view kStep = "step-";
constexpr std::string_view kIncomplete = ".incomplete-";
constexpr std::string_view kReplaced = ".replaced-";

std::string name_of(int64_t train_step) {
  char name[40];
  std::snprintf(name, sizeof(name), "step-%08lld", static_cast<long long>(train_step));
  return name;
}

bool is_step_name(std::string_view name) {
  return name.starts_with(kStep) && name.size() > kStep.size() &&
         name.find_first_not_of("0123456789", kStep.size()) == std::string_view::npos;
}

/// Runs `body`; its error as text.
template <typename Body>
std::string error_of(const Body& body) {
  try {
    body();
  } catch (const std::exception& error) {
    return *error.what() ? error.what() : "unknown error";
  }
  return "";
}

/// What complete.json says. Errors: why the folder is no complete checkpoint.
PublishedCheckpoint open_complete(const fs::path& folder) {
  const fs::path record = folder / kComplete;
  std::error_code code;
  MT_CHECK_ARG(fs::is_directory(folder, code), folder.string(), ": expected a folder, got none");
  MT_CHECK_ARG(fs::exists(record, code), folder.string(), ": is not complete: it has no ",
               kComplete);
  const json root = read_json_file(record);
  const auto is_count = [&](const char* key) {
    return root.contains(key) && root[key].is_number_unsigned();
  };
  MT_CHECK_ARG(root.is_object() && is_count("train_step") && is_count("publication") &&
                   root.contains("files") && root["files"].is_object(),
               record.string(), ": expected an object of train_step, publication and files");
  for (const auto& [name, bytes] : root["files"].items()) {
    MT_CHECK_ARG(bytes.is_number_unsigned(), record.string(), ": ", in_quotes(name),
                 ": expected a size");
    const auto got = fs::file_size(folder / name, code);
    MT_CHECK_ARG(!code, folder.string(), ": is not complete: ", in_quotes(name), " is missing");
    MT_CHECK_ARG(got == bytes.get<uint64_t>(), folder.string(),
                 ": is not complete: ", in_quotes(name), ": expected ", bytes.get<uint64_t>(),
                 " bytes, got ", got);
  }
  return {folder, root["train_step"].get<int64_t>(), root["publication"].get<int64_t>()};
}

std::vector<std::string> names_in(const fs::path& folder) {
  std::vector<std::string> names;
  std::error_code code;
  for (fs::directory_iterator it(folder, code), end; !code && it != end; it.increment(code))
    names.push_back(it->path().filename());
  MT_CHECK_EXTERNAL(!code || !fs::exists(folder), folder.string(),
                    ": cannot be listed: ", code.message());
  std::sort(names.begin(), names.end());
  return names;
}

/// Left by a process that died: nothing of it is referred to.
void remove_leftovers(const fs::path& root) {
  for (const std::string& name : names_in(root)) {
    if (name.starts_with(kIncomplete)) remove_tree(root / name);
    if (!name.starts_with(kReplaced)) continue;
    const std::string_view replaced = std::string_view(name).substr(kReplaced.size());
    if (incomplete_reason(root / replaced).empty()) {
      remove_tree(root / name);
    } else if (incomplete_reason(root / name).empty() && !fs::exists(root / replaced)) {
      rename_path(root / name, root / replaced);  // the process died between the two renames
    }
  }
}

void write_complete(const fs::path& folder, int64_t train_step, int64_t publication) {
  json files = json::object();
  for (const fs::directory_entry& entry : fs::recursive_directory_iterator(folder))
    if (entry.is_regular_file())
      files[entry.path().lexically_relative(folder).generic_string()] = entry.file_size();
  const json root = {{"version", 1},
                     {"train_step", train_step},
                     {"publication", publication},
                     {"files", std::move(files)}};
  write_text_file(folder / kComplete, root.dump(1) + "\n");
}

void remove_older(const fs::path& root, int keep, const fs::path& just_published) {
  if (keep == 0) return;
  const CheckpointList list = list_checkpoints(root);
  const auto count = static_cast<int64_t>(list.complete.size());
  for (int64_t i = 0; i < count - keep; ++i) {
    const fs::path& folder = list.complete[static_cast<size_t>(i)].folder;
    if (folder == just_published) continue;
    // Out of sight first: one that is half removed must not be taken for one that is damaged.
    const fs::path hidden = root / (std::string(kIncomplete) + folder.filename().string());
    rename_path(folder, hidden);
    remove_tree(hidden);
  }
}

/// Everything after all ranks have written: rank 0 alone.
void put_into_place(const PublicationOptions& options, const fs::path& part,
                    const fs::path& published) {
  const std::optional<PublishedCheckpoint> before = find_newest(options.root);
  sync_tree(part);
  write_complete(part, options.train_step, before ? before->publication + 1 : 1);
  sync_folder(part);
  // One name cannot be exchanged for another in one step everywhere: between the two renames the older one counts under its
  // hidden name. A damaged one is no loss, so it never takes the hidden name of a whole one.
  const bool whole = incomplete_reason(published).empty();
  const std::string name = published.filename().string();
  const fs::path replaced = options.root / (std::string(kReplaced) + name);
  const fs::path damaged = options.root / (std::string(kIncomplete) + "damaged-" + name);
  if (fs::exists(published)) {
    if (whole) remove_tree(replaced);
    rename_path(published, whole ? replaced : damaged);
  }
  rename_path(part, published);
  sync_folder(options.root);
  if (fs::exists(replaced)) remove_tree(replaced);
  if (fs::exists(damaged)) remove_tree(damaged);
  replace_text_file(options.root / kLatest, published.filename().string() + "\n");
  remove_older(options.root, options.keep, published);
}

}  // namespace

fs::path publish(const PublicationOptions& options,
                 const std::function<void(const fs::path&)>& write,
                 const std::function<void(const fs::path&)>& verify, const Agreement& agree) {
  const std::string name = name_of(options.train_step);
  const fs::path part = options.root / (std::string(kIncomplete) + name);
  const fs::path published = options.root / name;
  const bool first = options.rank == 0;
  const auto agree_or_throw = [&](const std::string& mine) {
    const std::string error = agree(mine);
    if (error.empty()) return;
    // A full disk is of no use to anybody: give back what this checkpoint took.
    if (first) error_of([&] { remove_tree(part); });
    throw ExternalError(concat("checkpoint of train_step ", options.train_step, ": ", error));
  };
  agree_or_throw(error_of([&] {
    MT_CHECK_ARG(options.train_step >= 0 && options.keep >= 0,
                 "checkpoint: expected train_step and keep >= 0, got ", options.train_step, " and ",
                 options.keep);
    if (!first) return;
    std::error_code code;
    fs::create_directories(options.root, code);
    MT_CHECK_EXTERNAL(!code, options.root.string(), ": cannot make the folder: ", code.message());
    remove_leftovers(options.root);
    make_folder(part);
  }));
  agree_or_throw(error_of([&] { write(part); }));
  agree_or_throw(error_of([&] {
    if (!first) return;
    if (verify) verify(part);
    put_into_place(options, part, published);
  }));
  return published;
}

std::string incomplete_reason(const fs::path& folder) {
  return error_of([&] { open_complete(folder); });
}

CheckpointList list_checkpoints(const fs::path& root) {
  CheckpointList list;
  const std::vector<std::string> names = names_in(root);
  for (const std::string& name : names) {
    // One that was being replaced counts while its successor is not there.
    const bool replaced = name.starts_with(kReplaced);
    const std::string plain = replaced ? name.substr(kReplaced.size()) : name;
    if (replaced && incomplete_reason(root / plain).empty()) continue;
    if (name.starts_with(kIncomplete)) {
      list.ignored.push_back(
          {concat((root / name).string(), ": is not complete: its writing was interrupted"), true});
      continue;
    }
    if (!is_step_name(plain)) continue;
    const std::string reason =
        error_of([&] { list.complete.push_back(open_complete(root / name)); });
    if (!reason.empty()) list.ignored.push_back({reason, false});
  }
  std::stable_sort(list.complete.begin(), list.complete.end(),
                   [](const PublishedCheckpoint& a, const PublishedCheckpoint& b) {
                     return a.publication < b.publication;
                   });
  return list;
}

std::optional<PublishedCheckpoint> find_newest(const fs::path& root) {
  const CheckpointList list = list_checkpoints(root);
  if (list.complete.empty()) return std::nullopt;
  return list.complete.back();
}

CompanionFiles read_companion_files(const fs::path& folder) {
  constexpr std::string_view kFiles[] = {
      "added_tokens.json",      "chat_template.jinja", "chat_template.json",
      "generation_config.json", "merges.txt",          "special_tokens_map.json",
      "spiece.model",           "tokenizer.json",      "tokenizer.model",
      "tokenizer_config.json",  "vocab.json",          "vocab.txt"};
  constexpr std::string_view kTemplates = "additional_chat_templates";
  std::error_code ignored;
  MT_CHECK_ARG(fs::is_directory(folder, ignored), folder.string(),
               ": expected a folder with tokenizer and template files, got none");
  CompanionFiles files;
  const auto read = [&](const std::string& name) {
    if (fs::is_regular_file(folder / name)) files[name] = read_text_file(folder / name);
  };
  for (const std::string_view name : kFiles) read(std::string(name));
  if (fs::is_directory(folder / kTemplates)) {
    for (const std::string& name : names_in(folder / kTemplates))
      read(concat(kTemplates, '/', name));
  }
  return files;
}

void write_companion_files(const CompanionFiles& files, const fs::path& folder) {
  std::set<fs::path> folders;
  for (const auto& [name, bytes] : files) {
    const fs::path path = folder / name;
    if (path.parent_path() != folder) {
      make_folder(path.parent_path(), true);
      folders.insert(path.parent_path());
    }
    write_text_file(path, bytes);
  }
  for (const fs::path& made : folders) sync_folder(made);
}

}  // namespace mtraining::checkpoint
