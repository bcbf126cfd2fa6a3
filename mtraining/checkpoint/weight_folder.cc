#include "mtraining/checkpoint/weight_folder.h"

#include <algorithm>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>

#include "mtraining/base/check.h"
#include "mtraining/base/json.h"
#include "mtraining/checkpoint/disk.h"

namespace mtraining::checkpoint {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

/// "a", "b" and 3 more
std::string list_of(const std::vector<std::string>& names) {
  constexpr size_t kShown = 5;
  std::string text;
  for (size_t i = 0; i < std::min(names.size(), kShown); ++i)
    text += (i ? ", " : "") + in_quotes(names[i]);
  if (names.size() > kShown) text += concat(" and ", names.size() - kShown, " more");
  return text;
}

std::vector<std::string> safetensors_in(const fs::path& folder) {
  std::vector<std::string> names;
  for (const fs::directory_entry& entry : fs::directory_iterator(folder))
    if (entry.path().extension() == ".safetensors") names.push_back(entry.path().filename());
  std::sort(names.begin(), names.end());
  return names;
}

/// name -> file, from the index file.
std::map<std::string, std::string> read_weight_map(const fs::path& index) {
  const json root = read_json_file(index);
  MT_CHECK_ARG(root.is_object() && root.contains("weight_map") && root["weight_map"].is_object(),
               index.string(), ": expected an object with an object weight_map");
  std::map<std::string, std::string> result;
  for (const auto& [name, file] : root["weight_map"].items()) {
    MT_CHECK_ARG(file.is_string(), index.string(), ": weight_map ", in_quotes(name),
                 ": expected the name of a file, got ", file.type_name());
    const auto& text = file.get_ref<const std::string&>();
    // A name that leaves the folder would read files that nobody meant.
    MT_CHECK_ARG(!text.empty() && text == fs::path(text).filename().string() && text != "." &&
                     text != ".." && text.find('\0') == std::string::npos,
                 index.string(), ": weight_map ", in_quotes(name),
                 ": expected the name of a file in the same folder, got ", in_quotes(text));
    result[name] = text;
  }
  MT_CHECK_ARG(!result.empty(), index.string(), ": expected tensors in weight_map, got none");
  return result;
}

}  // namespace

// ---------------------------------------------------------------- reader
WeightFolder::WeightFolder(const fs::path& folder) : path_(folder.string()) {
  std::error_code ignored;
  MT_CHECK_ARG(fs::is_directory(folder, ignored), path_,
               ": expected a folder with weights, got none");
  const bool indexed = fs::exists(folder / kWeightIndexFile, ignored);
  const bool single = fs::exists(folder / kWeightFile, ignored);
  if (indexed) {
    open_indexed();
    const bool named =
        std::find(files_.begin(), files_.end(), std::string(kWeightFile)) != files_.end();
    MT_CHECK_ARG(
        !single || named, path_, ": holds both ", kWeightFile, " and ", kWeightIndexFile,
        ", and the index does not name the file: expected one of them, for loaders disagree "
        "on which counts");
  } else {
    const std::vector<std::string> others = safetensors_in(folder);
    MT_CHECK_ARG(single, path_, ": expected ", kWeightFile, " or ", kWeightIndexFile, ", got ",
                 others.empty() ? "no safetensors file" : list_of(others));
    open_single();
  }
  list_unused();
}

void WeightFolder::open_single() {
  files_.emplace_back(kWeightFile);
  open_.push_back(std::make_unique<SafetensorsFile>(fs::path(path_) / kWeightFile));
  for (const StoredTensor& tensor : open_[0]->tensors())
    places_[tensor.spec.name] = {open_[0].get(), &tensor};
}

void WeightFolder::open_indexed() {
  const fs::path index = fs::path(path_) / kWeightIndexFile;
  const std::map<std::string, std::string> weight_map = read_weight_map(index);
  std::set<std::string> files;
  for (const auto& [name, file] : weight_map) files.insert(file);
  files_.assign(files.begin(), files.end());
  std::vector<std::string> missing;
  for (const std::string& file : files_)
    if (!fs::exists(fs::path(path_) / file)) missing.push_back(file);
  MT_CHECK_ARG(missing.empty(), index.string(), ": names ", files_.size(), " files, of which ",
               missing.size(), " are missing: ", list_of(missing));
  for (const std::string& file : files_) {
    open_.push_back(std::make_unique<SafetensorsFile>(fs::path(path_) / file));
    std::vector<std::string> unnamed;
    for (const StoredTensor& tensor : open_.back()->tensors()) {
      const std::string& name = tensor.spec.name;
      const auto [place, is_new] = places_.try_emplace(name, Place{open_.back().get(), &tensor});
      MT_CHECK_ARG(is_new, path_, ": tensor ", in_quotes(name), " is in two files, ",
                   fs::path(place->second.file->path()).filename().string(), " and ", file);
      if (!weight_map.contains(name)) unnamed.push_back(name);
    }
    MT_CHECK_ARG(unnamed.empty(), open_.back()->path(), ": holds tensors that ", kWeightIndexFile,
                 " does not name: ", list_of(unnamed));
  }
  for (const auto& [name, file] : weight_map) {
    const auto place = places_.find(name);
    MT_CHECK_ARG(place != places_.end(), index.string(), ": expected tensor ", in_quotes(name),
                 " in ", file, ", which does not hold it");
    const std::string got = fs::path(place->second.file->path()).filename();
    MT_CHECK_ARG(got == file, index.string(), ": expected tensor ", in_quotes(name), " in ", file,
                 ", but it is in ", got);
  }
}

void WeightFolder::list_unused() {
  for (const std::string& name : safetensors_in(path_))
    if (std::find(files_.begin(), files_.end(), name) == files_.end())
      unused_files_.push_back(name);
}

std::vector<std::string> WeightFolder::names() const {
  std::vector<std::string> result;
  for (const auto& [name, place] : places_) result.push_back(name);
  return result;
}

const TensorSpec* WeightFolder::find(std::string_view name) const {
  const auto found = places_.find(name);
  return found == places_.end() ? nullptr : &found->second.tensor->spec;
}

const WeightFolder::Place& WeightFolder::place_of(std::string_view name) const {
  const auto found = places_.find(name);
  MT_CHECK_ARG(found != places_.end(), path_, ": expected a tensor ", in_quotes(name),
               ", got none in ", list_of(files_));
  return found->second;
}

std::span<const std::byte> WeightFolder::data(std::string_view name) const {
  const Place& place = place_of(name);
  return place.file->data(*place.tensor);
}

void WeightFolder::release(std::string_view name) const {
  const Place& place = place_of(name);
  place.file->release(*place.tensor);
}

const std::string& WeightFolder::file_of(std::string_view name) const {
  return place_of(name).file->path();
}

// ---------------------------------------------------------------- writer
struct WeightFolderWriter::State {
  fs::path folder;
  std::vector<std::string> files;
  std::vector<std::unique_ptr<SafetensorsWriter>> writers;
  std::map<std::string, size_t, std::less<>> shard_of;
  int64_t total_bytes = 0;
};

WeightFolderWriter::WeightFolderWriter(const fs::path& folder, const std::vector<TensorSpec>& specs,
                                       int64_t max_shard_bytes)
    : state_(std::make_unique<State>()) {
  MT_CHECK_ARG(max_shard_bytes >= 1, "max_shard_bytes: expected at least 1, got ", max_shard_bytes);
  state_->folder = folder;
  std::vector<std::vector<TensorSpec>> shards(1);
  int64_t shard_bytes = 0;
  for (const TensorSpec& spec : specs) {
    const int64_t bytes = num_bytes(spec);
    if (!shards.back().empty() && shard_bytes + bytes > max_shard_bytes) {
      shards.emplace_back();
      shard_bytes = 0;
    }
    const bool is_new = state_->shard_of.try_emplace(spec.name, shards.size() - 1).second;
    MT_CHECK_ARG(is_new, folder.string(), ": tensor ", in_quotes(spec.name), " is given twice");
    shards.back().push_back(spec);
    shard_bytes += bytes;
    state_->total_bytes += bytes;
  }
  for (size_t i = 0; i < shards.size(); ++i) {
    char name[64];
    std::snprintf(name, sizeof(name), "model-%05zu-of-%05zu.safetensors", i + 1, shards.size());
    state_->files.push_back(shards.size() == 1 ? std::string(kWeightFile) : name);
    state_->writers.push_back(std::make_unique<SafetensorsWriter>(
        folder / state_->files.back(), shards[i],
        std::map<std::string, std::string>{{"format", "pt"}}, true));
  }
}

WeightFolderWriter::~WeightFolderWriter() = default;

void WeightFolderWriter::write(std::string_view name, std::span<const std::byte> bytes) {
  const auto found = state_->shard_of.find(name);
  MT_CHECK_ARG(found != state_->shard_of.end(), state_->folder.string(), ": no tensor ",
               in_quotes(name), " was announced");
  state_->writers[found->second]->write(name, bytes);
}

void WeightFolderWriter::finish() {
  for (const auto& writer : state_->writers) writer->finish();
  if (state_->files.size() > 1) {
    json weight_map = json::object();
    for (const auto& [name, shard] : state_->shard_of) weight_map[name] = state_->files[shard];
    const json root = {{"metadata", {{"total_size", state_->total_bytes}}},
                       {"weight_map", std::move(weight_map)}};
    write_text_file(state_->folder / kWeightIndexFile, root.dump(2) + "\n");
  }
  sync_folder(state_->folder);
}

}  // namespace mtraining::checkpoint
