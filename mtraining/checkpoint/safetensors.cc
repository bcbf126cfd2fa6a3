#include "mtraining/checkpoint/safetensors.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>

#include "mtraining/base/check.h"
#include "mtraining/base/json.h"
#include "mtraining/checkpoint/disk.h"

namespace mtraining::checkpoint {
namespace {

using nlohmann::json;

static_assert(std::endian::native == std::endian::little, "the format is little endian");

constexpr int64_t kLengthBytes = 8;
constexpr int64_t kMaxHeaderBytes = 100'000'000;  // the format's own bound
constexpr std::string_view kMetadata = "__metadata__";

struct TypeName {
  StoredType type;
  std::string_view name;
  int64_t bytes;
};
constexpr TypeName kTypes[] = {{StoredType::kF64, "F64", 8},   {StoredType::kF32, "F32", 4},
                               {StoredType::kBF16, "BF16", 2}, {StoredType::kF16, "F16", 2},
                               {StoredType::kI64, "I64", 8},   {StoredType::kI32, "I32", 4},
                               {StoredType::kU8, "U8", 1},     {StoredType::kBool, "BOOL", 1}};

const TypeName& entry_of(StoredType type) {
  for (const TypeName& entry : kTypes)
    if (entry.type == type) return entry;
  throw InternalError("no such StoredType");
}

std::optional<int64_t> as_size(const json& value) {
  if (!value.is_number_unsigned() && !(value.is_number_integer() && value.get<int64_t>() >= 0))
    return std::nullopt;
  const auto size = value.get<uint64_t>();
  if (size > uint64_t{1} << 62) return std::nullopt;
  return static_cast<int64_t>(size);
}

}  // namespace

std::string to_hex(uint64_t checksum) {
  char text[17];
  std::snprintf(text, sizeof(text), "%016llx", static_cast<unsigned long long>(checksum));
  return text;
}

int64_t bytes_of(StoredType type) { return entry_of(type).bytes; }

std::string_view to_string(StoredType type) { return entry_of(type).name; }

std::optional<StoredType> parse_stored_type(std::string_view name) {
  for (const TypeName& entry : kTypes)
    if (entry.name == name) return entry.type;
  return std::nullopt;
}

int64_t num_elements(const TensorSpec& spec) {
  // In floating point beside the product: a factor of 0 after an overflow would hide it.
  int64_t elements = 1;
  double size = 1;
  for (const int64_t length : spec.shape) {
    MT_CHECK_ARG(length >= 0, "tensor ", in_quotes(spec.name), ": expected sizes >= 0, got ",
                 length);
    size *= static_cast<double>(std::max<int64_t>(length, 1));
    MT_CHECK_ARG(size * 8 < 0x1p62, "tensor ", in_quotes(spec.name),
                 ": its shape has more elements than a file can hold");
    elements *= length;
  }
  return elements;
}

int64_t num_bytes(const TensorSpec& spec) { return num_elements(spec) * bytes_of(spec.type); }

std::string to_string(const TensorSpec& spec) {
  std::string text = concat(to_string(spec.type), " [");
  for (size_t i = 0; i < spec.shape.size(); ++i) text += concat(i ? ", " : "", spec.shape[i]);
  return text + "]";
}

// ---------------------------------------------------------------- reader
struct SafetensorsFile::Mapping {
  const std::byte* data = nullptr;
  int64_t bytes = 0;

  explicit Mapping(const std::string& path) {
    const int file = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    MT_CHECK_ARG(file >= 0, path, ": cannot be opened: ", std::strerror(errno));
    struct stat status {};
    const bool regular = ::fstat(file, &status) == 0 && S_ISREG(status.st_mode);
    bytes = regular ? status.st_size : 0;
    void* memory = MAP_FAILED;
    if (bytes > 0)
      memory = ::mmap(nullptr, static_cast<size_t>(bytes), PROT_READ, MAP_PRIVATE, file, 0);
    const int code = errno;
    ::close(file);
    MT_CHECK_ARG(regular, path, ": expected a file, got something else");
    MT_CHECK_EXTERNAL(bytes == 0 || memory != MAP_FAILED, path, ": cannot map ", bytes,
                      " bytes: ", std::strerror(code));
    if (bytes > 0) data = static_cast<const std::byte*>(memory);
  }
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
  ~Mapping() {
    if (data) ::munmap(const_cast<std::byte*>(data), static_cast<size_t>(bytes));
  }
};

SafetensorsFile::SafetensorsFile(SafetensorsFile&&) noexcept = default;
SafetensorsFile& SafetensorsFile::operator=(SafetensorsFile&&) noexcept = default;
SafetensorsFile::~SafetensorsFile() = default;

SafetensorsFile::SafetensorsFile(const std::filesystem::path& path)
    : path_(path.string()), mapping_(std::make_unique<Mapping>(path_)) {
  const int64_t bytes = mapping_->bytes;
  MT_CHECK_ARG(
      bytes >= kLengthBytes, path_,
      ": not a safetensors file: expected a header length of 8 bytes at offset 0, got a file of ",
      bytes, " bytes");
  uint64_t length = 0;
  std::memcpy(&length, mapping_->data, sizeof(length));
  MT_CHECK_ARG(
      length >= 2 && length <= uint64_t{kMaxHeaderBytes}, path_,
      ": not a safetensors file, or one that was never finished: expected a header length of 2 to ",
      kMaxHeaderBytes, " bytes at offset 0, got ", length);
  const int64_t data_begin = kLengthBytes + static_cast<int64_t>(length);
  MT_CHECK_ARG(data_begin <= bytes, path_, ": truncated: its header ends at offset ", data_begin,
               ", but the file at ", bytes);
  read_header({reinterpret_cast<const char*>(mapping_->data) + kLengthBytes, length}, data_begin);

  int64_t expected = data_begin;
  const StoredTensor* before = nullptr;
  for (const StoredTensor& tensor : tensors_) {
    const std::string name = in_quotes(tensor.spec.name);
    MT_CHECK_ARG(tensor.begin >= expected, path_, ": tensor ", name, " begins at offset ",
                 tensor.begin, ", inside tensor ", before ? in_quotes(before->spec.name) : "",
                 " that ends at ", expected);
    MT_CHECK_ARG(tensor.begin == expected, path_, ": expected tensor ", name, " at offset ",
                 expected, ", got ", tensor.begin, ": a hole of ", tensor.begin - expected,
                 " bytes");
    MT_CHECK_ARG(tensor.end <= bytes, path_, ": truncated: tensor ", name, " ends at offset ",
                 tensor.end, ", but the file at ", bytes);
    expected = tensor.end;
    before = &tensor;
  }
  MT_CHECK_ARG(expected == bytes, path_,
               ": expected the file to end with its last tensor at offset ", expected, ", got ",
               bytes);
}

void SafetensorsFile::read_header(std::string_view header, int64_t data_begin) {
  MT_CHECK_ARG(header.front() == '{', path_,
               ": not a safetensors file: expected a JSON object at offset 8");
  const json root = parse_json(header, path_, kLengthBytes, 4);
  for (const auto& [name, entry] : root.items()) {
    if (name == kMetadata) {
      MT_CHECK_ARG(entry.is_object(), path_, ": ", kMetadata, ": expected an object of strings");
      for (const auto& [key, value] : entry.items()) {
        MT_CHECK_ARG(value.is_string(), path_, ": ", kMetadata, ": expected a string for ",
                     in_quotes(key), ", got ", value.type_name());
        metadata_[key] = value.get<std::string>();
      }
      continue;
    }
    const std::string what = concat(path_, ": tensor ", in_quotes(name));
    MT_CHECK_ARG(entry.is_object() && entry.size() == 3 && entry.contains("dtype") &&
                     entry.contains("shape") && entry.contains("data_offsets"),
                 what, ": expected an object of dtype, shape and data_offsets");
    StoredTensor tensor;
    tensor.spec.name = name;
    const json& dtype = entry["dtype"];
    MT_CHECK_ARG(dtype.is_string(), what, ": expected dtype to be a string, got ",
                 dtype.type_name());
    const auto type = parse_stored_type(dtype.get_ref<const std::string&>());
    MT_CHECK_SUPPORTED(type.has_value(), what,
                       ": expected dtype F64, F32, BF16, F16, I64, I32, U8 or BOOL, got ",
                       in_quotes(dtype.get_ref<const std::string&>()));
    tensor.spec.type = *type;
    const json& shape = entry["shape"];
    MT_CHECK_ARG(shape.is_array(), what, ": expected shape to be an array, got ",
                 shape.type_name());
    for (const json& length : shape) {
      const auto size = as_size(length);
      MT_CHECK_ARG(size.has_value(), what, ": expected sizes >= 0 in shape");
      tensor.spec.shape.push_back(*size);
    }
    const json& offsets = entry["data_offsets"];
    std::optional<int64_t> begin, end;
    if (offsets.is_array() && offsets.size() == 2) {
      begin = as_size(offsets[0]);
      end = as_size(offsets[1]);
    }
    MT_CHECK_ARG(begin && end && *begin <= *end, what,
                 ": expected data_offsets to be [begin, end] with 0 <= begin <= end");
    int64_t bytes = 0;
    try {
      bytes = num_bytes(tensor.spec);
    } catch (const InvalidArgument& error) {
      throw InvalidArgument(concat(path_, ": ", error.what()));
    }
    MT_CHECK_ARG(*end - *begin == bytes, what, ": ", to_string(tensor.spec), " takes ", bytes,
                 " bytes, but data_offsets [", *begin, ", ", *end, "] hold ", *end - *begin);
    tensor.begin = data_begin + *begin;
    tensor.end = data_begin + *end;
    tensors_.push_back(std::move(tensor));
  }
  std::stable_sort(tensors_.begin(), tensors_.end(),
                   [](const StoredTensor& a, const StoredTensor& b) {
                     return std::pair(a.begin, a.end) < std::pair(b.begin, b.end);
                   });
  for (size_t i = 0; i < tensors_.size(); ++i) by_name_[tensors_[i].spec.name] = i;
  read_checksums();
}

void SafetensorsFile::read_checksums() {
  const auto given = metadata_.find(std::string(kChecksumKey));
  if (given == metadata_.end()) return;
  const std::string what = concat(path_, ": ", kMetadata, ": ", in_quotes(kChecksumKey));
  const json root = parse_json(given->second, what);
  MT_CHECK_ARG(root.is_object(), what, ": expected an object of checksums, got ", root.type_name());
  checksums_.resize(tensors_.size());
  is_verified_ = std::make_unique<std::atomic<bool>[]>(tensors_.size());
  for (const auto& [name, value] : root.items()) {
    const std::string hex = value.is_string() ? value.get<std::string>() : "";
    MT_CHECK_ARG(hex.size() == 16 && hex.find_first_not_of("0123456789abcdef") == std::string::npos,
                 what, ": ", in_quotes(name), ": expected 16 hexadecimal digits, got ",
                 value.dump());
    const auto tensor = by_name_.find(name);
    if (tensor == by_name_.end()) continue;  // taken out by a program that keeps metadata
    checksums_[tensor->second] = std::strtoull(hex.c_str(), nullptr, 16);
  }
}

const StoredTensor* SafetensorsFile::find(std::string_view name) const {
  const auto found = by_name_.find(name);
  return found == by_name_.end() ? nullptr : &tensors_[found->second];
}

std::span<const std::byte> SafetensorsFile::data(std::string_view name) const {
  const StoredTensor* tensor = find(name);
  MT_CHECK_ARG(tensor != nullptr, path_, ": expected a tensor ", in_quotes(name), ", got none");
  return data(*tensor);
}

std::span<const std::byte> SafetensorsFile::data(const StoredTensor& tensor) const {
  const std::span bytes(mapping_->data + tensor.begin,
                        static_cast<size_t>(tensor.end - tensor.begin));
  if (checksums_.empty()) return bytes;
  const size_t i = by_name_.find(tensor.spec.name)->second;
  if (checksums_[i] && !is_verified_[i]) {
    MT_CHECK_ARG(XXH3_64bits(bytes.data(), bytes.size()) == *checksums_[i], path_, ": tensor ",
                 in_quotes(tensor.spec.name),
                 " is damaged: its checksum is not the one it was written with");
    is_verified_[i] = true;
  }
  return bytes;
}

void SafetensorsFile::release(const StoredTensor& tensor) const {
  // Whole pages inside the tensor: a page at its edge may hold a neighbour's bytes that are being read.
  const int64_t page = ::sysconf(_SC_PAGESIZE);
  const int64_t begin = (tensor.begin + page - 1) / page * page, end = tensor.end / page * page;
  if (begin < end)
    ::madvise(const_cast<std::byte*>(mapping_->data) + begin, static_cast<size_t>(end - begin),
              MADV_DONTNEED);
}

// ---------------------------------------------------------------- writer
struct SafetensorsWriter::State {
  struct Hasher {
    XXH3_state_t* state = XXH3_createState();
    Hasher() { XXH3_64bits_reset(state); }
    ~Hasher() { XXH3_freeState(state); }
    Hasher(const Hasher&) = delete;
    Hasher& operator=(const Hasher&) = delete;
  };
  struct Slot {
    TensorSpec spec;
    int64_t begin = 0, end = 0, written = 0;  // bytes; begin and end from the start of the file
    std::unique_ptr<Hasher> hasher = std::make_unique<Hasher>();
    uint64_t checksum() const { return XXH3_64bits_digest(hasher->state); }
  };
  /// With its length before it. As long whatever the checksums are.
  std::string header() {
    if (with_checksums) {
      json checksums = json::object();
      for (const Slot& slot : slots) checksums[slot.spec.name] = to_hex(slot.checksum());
      root[std::string(kMetadata)][std::string(kChecksumKey)] = checksums.dump();
    }
    std::string text = root.dump();
    constexpr size_t kAlignment = 64;
    text.resize(
        (text.size() + kLengthBytes + kAlignment - 1) / kAlignment * kAlignment - kLengthBytes,
        ' ');
    const uint64_t length = text.size();
    text.insert(0, reinterpret_cast<const char*>(&length), sizeof(length));
    return text;
  }
  nlohmann::ordered_json root = nlohmann::ordered_json::object();
  bool with_checksums = false;
  std::vector<Slot> slots;
  std::map<std::string, size_t, std::less<>> by_name;
  int64_t bytes = 0;
  std::optional<OutputFile> file;
};

SafetensorsWriter::SafetensorsWriter(const std::filesystem::path& path,
                                     const std::vector<TensorSpec>& specs,
                                     const std::map<std::string, std::string>& metadata,
                                     bool with_checksums)
    : state_(std::make_unique<State>()) {
  state_->with_checksums = with_checksums;
  std::vector<TensorSpec> sorted = specs;
  std::stable_sort(sorted.begin(), sorted.end(), [](const TensorSpec& a, const TensorSpec& b) {
    return bytes_of(a.type) > bytes_of(b.type);
  });
  nlohmann::ordered_json& root = state_->root;
  if (!metadata.empty())
    root[std::string(kMetadata)] = metadata;
  else if (with_checksums)
    root[std::string(kMetadata)] = json::object();
  int64_t offset = 0;
  for (TensorSpec& spec : sorted) {
    MT_CHECK_ARG(!spec.name.empty() && spec.name != kMetadata, path.string(),
                 ": a tensor cannot be called ", in_quotes(spec.name));
    const int64_t bytes = num_bytes(spec);
    const auto [place, is_new] = state_->by_name.try_emplace(spec.name, state_->slots.size());
    MT_CHECK_ARG(is_new, path.string(), ": tensor ", in_quotes(spec.name), " is given twice");
    root[spec.name] = {{"dtype", to_string(spec.type)},
                       {"shape", spec.shape},
                       {"data_offsets", {offset, offset + bytes}}};
    State::Slot& slot = state_->slots.emplace_back();
    slot.spec = std::move(spec);
    slot.begin = offset;
    slot.end = offset + bytes;
    offset += bytes;
  }
  int64_t data_begin = 0;
  try {
    data_begin = static_cast<int64_t>(state_->header().size());
  } catch (const json::exception&) {
    throw InvalidArgument(concat(path.string(), ": a tensor's name or metadata is not UTF-8"));
  }
  MT_CHECK_ARG(data_begin - kLengthBytes <= kMaxHeaderBytes, path.string(),
               ": expected a header of at most ", kMaxHeaderBytes, " bytes, got ",
               data_begin - kLengthBytes);
  for (State::Slot& slot : state_->slots) {
    slot.begin += data_begin;
    slot.end += data_begin;
  }
  state_->bytes = data_begin + offset;
  state_->file.emplace(path);
  state_->file->reserve(state_->bytes);
}

SafetensorsWriter::~SafetensorsWriter() = default;

int64_t SafetensorsWriter::file_bytes() const { return state_->bytes; }

void SafetensorsWriter::write(std::string_view name, std::span<const std::byte> bytes) {
  const std::string path = state_->file->path().string();
  const auto found = state_->by_name.find(name);
  MT_CHECK_ARG(found != state_->by_name.end(), path, ": no tensor ", in_quotes(name),
               " was announced");
  State::Slot& slot = state_->slots[found->second];
  const int64_t room = slot.end - slot.begin - slot.written;
  MT_CHECK_ARG(static_cast<int64_t>(bytes.size()) <= room, path, ": tensor ", in_quotes(name),
               ": expected ", slot.end - slot.begin, " bytes, got ", bytes.size() - room, " more");
  state_->file->write(slot.begin + slot.written, bytes);
  slot.written += static_cast<int64_t>(bytes.size());
  XXH3_64bits_update(slot.hasher->state, bytes.data(), bytes.size());
}

uint64_t SafetensorsWriter::checksum(std::string_view name) const {
  const auto found = state_->by_name.find(name);
  MT_CHECK_ARG(found != state_->by_name.end(), state_->file->path().string(), ": no tensor ",
               in_quotes(name), " was announced");
  return state_->slots[found->second].checksum();
}

void SafetensorsWriter::finish() {
  for (const State::Slot& slot : state_->slots)
    MT_CHECK_ARG(slot.written == slot.end - slot.begin, state_->file->path().string(), ": tensor ",
                 in_quotes(slot.spec.name), ": expected ", slot.end - slot.begin, " bytes, got ",
                 slot.written);
  const std::string header = state_->header();
  state_->file->write(0, std::as_bytes(std::span(header)));
  state_->file->finish();
}

}  // namespace mtraining::checkpoint
