#include "mtraining/checkpoint/training_state.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <nlohmann/json.hpp>
#include <utility>

#include "mtraining/base/check.h"
#include "mtraining/base/json.h"
#include "mtraining/checkpoint/disk.h"

namespace mtraining::checkpoint {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr int64_t kVersion = 1;
std::string stem_of(int rank, int world_size) {
  char name[48];
  std::snprintf(name, sizeof(name), "rank-%05d-of-%05d", rank, world_size);
  return name;
}

std::string entry_of(const StatePiece& piece) {
  return concat(piece.tensor.name, '[', piece.begin, ':', piece.end, ']');
}

json to_json(const Progress& progress) {
  return {{"train_step", progress.train_step},
          {"micro_step", progress.micro_step},
          {"sample_position", progress.sample_position},
          {"tokens_total", progress.tokens_total},
          {"skipped_steps", progress.skipped_steps},
          {"seed", progress.seed},
          {"notes", progress.notes}};
}

Progress progress_of(const json& root) {
  Progress progress;
  progress.train_step = root.at("train_step").get<int64_t>();
  progress.micro_step = root.at("micro_step").get<int64_t>();
  progress.sample_position = root.at("sample_position").get<int64_t>();
  progress.tokens_total = root.at("tokens_total").get<int64_t>();
  progress.skipped_steps = root.at("skipped_steps").get<int64_t>();
  progress.seed = root.at("seed").get<uint64_t>();
  progress.notes = root.at("notes").get<std::string>();
  return progress;
}

}  // namespace

// ---------------------------------------------------------------- writer
struct TrainingStateWriter::State {
  fs::path folder;
  std::string stem;
  std::vector<StatePiece> pieces;
  Progress progress;
  std::unique_ptr<SafetensorsWriter> tensors;
};

TrainingStateWriter::TrainingStateWriter(const fs::path& folder, int rank, int world_size,
                                         const std::vector<StatePiece>& pieces,
                                         const Progress& progress)
    : state_(std::make_unique<State>()) {
  MT_CHECK_ARG(rank >= 0 && rank < world_size, "rank: expected 0 to ", world_size - 1, ", got ",
               rank);
  if (!progress.notes.empty()) parse_json(progress.notes, "Progress::notes");
  state_->folder = folder;
  state_->stem = stem_of(rank, world_size);
  state_->pieces = pieces;
  state_->progress = progress;
  std::vector<TensorSpec> specs;
  for (const StatePiece& piece : pieces) {
    const int64_t elements = num_elements(piece.tensor);
    MT_CHECK_ARG(piece.begin >= 0 && piece.begin <= piece.end && piece.end <= elements, "tensor ",
                 in_quotes(piece.tensor.name), ": expected a range inside its ", elements,
                 " elements, got [", piece.begin, ", ", piece.end, ")");
    specs.push_back({entry_of(piece), piece.tensor.type, {piece.end - piece.begin}});
  }
  state_->tensors =
      std::make_unique<SafetensorsWriter>(folder / (state_->stem + ".safetensors"), specs);
}

TrainingStateWriter::~TrainingStateWriter() = default;

void TrainingStateWriter::write(size_t piece, std::span<const std::byte> bytes) {
  MT_CHECK_ARG(piece < state_->pieces.size(), "piece: expected 0 to ", state_->pieces.size(),
               " (exclusive), got ", piece);
  state_->tensors->write(entry_of(state_->pieces[piece]), bytes);
}

void TrainingStateWriter::finish() {
  state_->tensors->finish();
  json pieces = json::array();
  for (size_t i = 0; i < state_->pieces.size(); ++i) {
    const StatePiece& piece = state_->pieces[i];
    pieces.push_back({{"name", piece.tensor.name},
                      {"dtype", to_string(piece.tensor.type)},
                      {"shape", piece.tensor.shape},
                      {"begin", piece.begin},
                      {"end", piece.end},
                      {"xxh3", to_hex(state_->tensors->checksum(entry_of(piece)))}});
  }
  const json root = {{"version", kVersion},
                     {"progress", to_json(state_->progress)},
                     {"pieces", std::move(pieces)}};
  write_text_file(state_->folder / (state_->stem + ".json"), root.dump() + "\n");
}

// ---------------------------------------------------------------- reader
TrainingState::TrainingState(const fs::path& folder) : path_(folder.string()) {
  std::error_code ignored;
  MT_CHECK_ARG(fs::is_directory(folder, ignored), path_,
               ": expected a folder with training state, got none");
  std::string first;
  for (const fs::directory_entry& entry : fs::directory_iterator(folder)) {
    const std::string name = entry.path().filename();
    int rank = -1, world_size = 0, end = 0;
    const int got = std::sscanf(name.c_str(), "rank-%5d-of-%5d.json%n", &rank, &world_size, &end);
    if (got != 2 || end != static_cast<int>(name.size())) continue;
    MT_CHECK_ARG(world_size >= 1 && (world_size_ == 0 || world_size == world_size_), path_,
                 ": expected the files of one number of ranks, got ", first, " and ", name);
    world_size_ = world_size;
    first = name;
  }
  MT_CHECK_ARG(world_size_ > 0, path_, ": expected files rank-..-of-...json, got none");
  for (int rank = 0; rank < world_size_; ++rank) add_rank(stem_of(rank, world_size_), rank);
  for (auto& [name, tensor] : tensors_) check_coverage(tensor);
}

TrainingState::~TrainingState() = default;

void TrainingState::add_rank(const std::string& stem, int rank) {
  const fs::path path = fs::path(path_) / (stem + ".json");
  const json root = read_json_file(path);
  files_.push_back(std::make_unique<SafetensorsFile>(fs::path(path_) / (stem + ".safetensors")));
  const SafetensorsFile& file = *files_.back();
  size_t pieces = 0;
  try {
    MT_CHECK_SUPPORTED(root.at("version") == kVersion, path.string(), ": expected version ",
                       kVersion, ", got ", root.at("version").dump());
    const Progress progress = progress_of(root.at("progress"));
    if (rank == 0) progress_ = progress;
    MT_CHECK_ARG(progress == progress_, path.string(), ": its progress (train_step ",
                 progress.train_step, ") is not that of rank 0 (train_step ", progress_.train_step,
                 ")");
    for (const json& each : root.at("pieces")) {
      StatePiece piece;
      piece.tensor.name = each.at("name").get<std::string>();
      const auto type = parse_stored_type(each.at("dtype").get<std::string>());
      MT_CHECK_ARG(type.has_value(), path.string(), ": tensor ", in_quotes(piece.tensor.name),
                   ": unknown dtype ", each["dtype"].dump());
      piece.tensor.type = *type;
      piece.tensor.shape = each.at("shape").get<std::vector<int64_t>>();
      piece.begin = each.at("begin").get<int64_t>();
      piece.end = each.at("end").get<int64_t>();
      const std::string entry = entry_of(piece);
      const int64_t elements = num_elements(piece.tensor);
      MT_CHECK_ARG(piece.begin >= 0 && piece.begin <= piece.end && piece.end <= elements,
                   path.string(), ": piece ", in_quotes(entry), " leaves its tensor of ", elements,
                   " elements");
      const StoredTensor* stored = file.find(entry);
      MT_CHECK_ARG(stored && stored->spec.type == piece.tensor.type &&
                       stored->spec.shape == std::vector<int64_t>{piece.end - piece.begin},
                   file.path(), ": expected a tensor ", in_quotes(entry), " of ",
                   piece.end - piece.begin, " elements ", to_string(piece.tensor.type),
                   stored ? ", got " + to_string(stored->spec) : ", got none");
      Tensor& tensor =
          tensors_.try_emplace(piece.tensor.name, Tensor{piece.tensor, {}}).first->second;
      MT_CHECK_ARG(tensor.spec.type == piece.tensor.type && tensor.spec.shape == piece.tensor.shape,
                   path.string(), ": tensor ", in_quotes(piece.tensor.name), ": expected ",
                   to_string(tensor.spec), " as on another rank, got ", to_string(piece.tensor));
      const std::string hex = each.at("xxh3").get<std::string>();
      tensor.pieces.push_back({piece.begin, piece.end, entry, files_.size() - 1,
                               std::strtoull(hex.c_str(), nullptr, 16), false});
      ++pieces;
    }
  } catch (const json::exception&) {
    throw InvalidArgument(concat(path.string(), ": expected version, progress and pieces as ",
                                 "training writes them; a key is missing or of another type"));
  }
  MT_CHECK_ARG(pieces == file.tensors().size(), file.path(), ": expected ", pieces, " tensors as ",
               path.filename().string(), " lists, got ", file.tensors().size());
}

void TrainingState::check_coverage(Tensor& tensor) const {
  std::sort(tensor.pieces.begin(), tensor.pieces.end(), [](const Piece& a, const Piece& b) {
    return std::pair(a.begin, a.end) < std::pair(b.begin, b.end);
  });
  int64_t expected = 0;
  const auto fail = [&](int64_t begin, int64_t end, const char* what) {
    throw InvalidArgument(concat(path_, ": tensor ", in_quotes(tensor.spec.name), ": elements [",
                                 begin, ", ", end, ") are ", what));
  };
  for (const Piece& piece : tensor.pieces) {
    if (piece.begin == piece.end) continue;
    if (piece.begin > expected) fail(expected, piece.begin, "in no rank's file");
    if (piece.begin < expected) fail(piece.begin, std::min(expected, piece.end), "in two files");
    expected = piece.end;
  }
  const int64_t elements = num_elements(tensor.spec);
  if (expected < elements) fail(expected, elements, "in no rank's file");
}

std::vector<TensorSpec> TrainingState::tensors() const {
  std::vector<TensorSpec> result;
  for (const auto& [name, tensor] : tensors_) result.push_back(tensor.spec);
  return result;
}

const TensorSpec* TrainingState::find(std::string_view name) const {
  const auto found = tensors_.find(name);
  return found == tensors_.end() ? nullptr : &found->second.spec;
}

void TrainingState::read(std::string_view name, int64_t begin, int64_t end,
                         std::span<std::byte> out) {
  const auto found = tensors_.find(name);
  MT_CHECK_ARG(found != tensors_.end(), path_, ": expected a tensor ", in_quotes(name),
               ", got none");
  Tensor& tensor = found->second;
  const int64_t elements = num_elements(tensor.spec), width = bytes_of(tensor.spec.type);
  MT_CHECK_ARG(begin >= 0 && begin <= end && end <= elements, path_, ": tensor ", in_quotes(name),
               ": expected a range inside its ", elements, " elements, got [", begin, ", ", end,
               ")");
  MT_CHECK_ARG(static_cast<int64_t>(out.size()) == (end - begin) * width, path_, ": tensor ",
               in_quotes(name), ": expected room for ", (end - begin) * width, " bytes, got ",
               out.size());
  for (Piece& piece : tensor.pieces) {
    const int64_t from = std::max(begin, piece.begin), to = std::min(end, piece.end);
    if (from >= to) continue;
    const std::span<const std::byte> bytes = files_[piece.file]->data(piece.entry);
    if (!piece.verified) {
      MT_CHECK_ARG(XXH3_64bits(bytes.data(), bytes.size()) == piece.checksum,
                   files_[piece.file]->path(), ": tensor ", in_quotes(piece.entry),
                   " is damaged: its checksum is not the one it was written with");
      piece.verified = true;
    }
    std::memcpy(out.data() + (from - begin) * width, bytes.data() + (from - piece.begin) * width,
                static_cast<size_t>((to - from) * width));
  }
}

}  // namespace mtraining::checkpoint
