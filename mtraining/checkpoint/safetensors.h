// Safetensors: named tensors in a file. SafetensorsFile reads one through a memory mapping, SafetensorsWriter streams one.
//
// In:   a path. Out: names, dtypes, shapes, bytes; or a file. Next: weight_folder.h (shards), training_state.h.
//
// Form: u64 little endian length of the header; the header, a JSON object {name: {dtype, shape, data_offsets: [begin, end]}}
// with an optional "__metadata__" of strings; then the data, little endian, row-major, without holes. Offsets count from the
// end of the header. Everything is checked when the file is opened: a file that opens can be read to its end.
// Source: the public safetensors format, whose Python package reads and writes the same files.
//
// Checksums: files of weights hold the xxh3 of each tensor's bytes in their metadata, as JSON text under kChecksumKey. A tensor that has
// one is compared with it when its bytes are first handed out; files of other programs have none.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace mtraining::checkpoint {

inline constexpr std::string_view kChecksumKey = "mtraining.xxh3";

enum class StoredType { kF64, kF32, kBF16, kF16, kI64, kI32, kU8, kBool };
/// 16 hexadecimal digits, as checksums are written.
std::string to_hex(uint64_t checksum);
int64_t bytes_of(StoredType type);
/// As the format spells it: "BF16".
std::string_view to_string(StoredType type);
/// The inverse; none for other names.
std::optional<StoredType> parse_stored_type(std::string_view name);

struct TensorSpec {
  std::string name;
  StoredType type = StoredType::kF32;
  std::vector<int64_t> shape;  ///< empty: a scalar
};
/// Errors: InvalidArgument naming the tensor: a negative size, more than 2^62 bytes.
int64_t num_elements(const TensorSpec& spec);
int64_t num_bytes(const TensorSpec& spec);
/// "F32 [2, 3]"
std::string to_string(const TensorSpec& spec);

struct StoredTensor {
  TensorSpec spec;
  int64_t begin = 0;  ///< bytes from the start of the file
  int64_t end = 0;
};

/// A whole file, mapped read-only. Thread-safe once open. Movable.
class SafetensorsFile {
 public:
  /// Errors, all naming file and offset or tensor: InvalidArgument: missing, no regular file, shorter than its header says,
  /// a header that is no JSON, a name twice, an entry of another form, shape and dtype that do not give the byte range,
  /// ranges that overlap, leave the file or leave holes. Unsupported: a dtype not in StoredType.
  /// Cost: reads the header alone.
  explicit SafetensorsFile(const std::filesystem::path& path);
  SafetensorsFile(SafetensorsFile&&) noexcept;
  SafetensorsFile& operator=(SafetensorsFile&&) noexcept;
  ~SafetensorsFile();

  const std::string& path() const { return path_; }
  /// In the order of the file.
  const std::vector<StoredTensor>& tensors() const { return tensors_; }
  const std::map<std::string, std::string>& metadata() const { return metadata_; }
  /// Null where there is none of this name.
  const StoredTensor* find(std::string_view name) const;
  /// Owned by this file; not necessarily aligned to the element size. Errors: InvalidArgument naming file and tensor where there is
  /// none of this name, or where its bytes are not those that its checksum was made of. Cost: where it has one, the first call reads it whole.
  std::span<const std::byte> data(std::string_view name) const;
  std::span<const std::byte> data(const StoredTensor& tensor) const;
  /// Takes the tensor's pages out of this process's memory; they come back from the file when touched again.
  void release(const StoredTensor& tensor) const;

 private:
  struct Mapping;
  void read_header(std::string_view header, int64_t data_begin);
  void read_checksums();

  std::string path_;
  std::unique_ptr<Mapping> mapping_;
  std::vector<StoredTensor> tensors_;
  std::map<std::string, size_t, std::less<>> by_name_;
  std::map<std::string, std::string> metadata_;
  std::vector<std::optional<uint64_t>> checksums_;    // by tensor; empty: none has one
  std::unique_ptr<std::atomic<bool>[]> is_verified_;  // by tensor, beside them
};

/// Writes a file whose tensors are known beforehand and whose data come in pieces. The header goes in last: a file whose
/// writer did not finish() never opens. Not thread-safe.
class SafetensorsWriter {
 public:
  /// Data begin at a multiple of 64 bytes and tensors of wide elements come first, so that all are aligned.
  /// with_checksums: those of all tensors stand in the metadata under kChecksumKey.
  /// Errors: InvalidArgument on a name twice, an empty or reserved name; ExternalError where the disk has not room for it.
  SafetensorsWriter(const std::filesystem::path& path, const std::vector<TensorSpec>& specs,
                    const std::map<std::string, std::string>& metadata = {{"format", "pt"}},
                    bool with_checksums = false);
  ~SafetensorsWriter();

  /// The next bytes of a tensor; tensors may come in any order and take turns.
  /// Errors: InvalidArgument on an unknown name or more bytes than it holds; ExternalError (disk full, ..).
  void write(std::string_view name, std::span<const std::byte> bytes);
  /// Errors: InvalidArgument naming a tensor that did not get all its bytes. Flushes to the device.
  void finish();
  /// Of the whole file.
  int64_t file_bytes() const;
  /// xxh3 of the bytes of a tensor so far: the same number on every machine. Errors: InvalidArgument on an unknown name.
  uint64_t checksum(std::string_view name) const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace mtraining::checkpoint
