#include "mtraining/data/token_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <limits>
#include <utility>

#include "mtraining/base/check.h"
#include "mtraining/base/error_kinds.h"

namespace mtraining::data {
namespace {

constexpr char kMagic[9] = {'M', 'M', 'I', 'D', 'I', 'D', 'X', '\0', '\0'};
constexpr int64_t kHeaderBytes = 9 + 8 + 1 + 8 + 8;
constexpr int64_t kUInt16VocabLimit = 65500;

template <typename T>
T load(const uint8_t* data) {
  T value;
  std::memcpy(&value, data, sizeof(T));
  return value;
}

template <typename T>
void store(std::ofstream& out, T value) {
  out.write(reinterpret_cast<const char*>(&value), sizeof(T));
}

int64_t load_token(const uint8_t* data, TokenType type) {
  switch (type) {
    case TokenType::kUInt8:
      return load<uint8_t>(data);
    case TokenType::kInt8:
      return load<int8_t>(data);
    case TokenType::kInt16:
      return load<int16_t>(data);
    case TokenType::kUInt16:
      return load<uint16_t>(data);
    case TokenType::kInt32:
      return load<int32_t>(data);
    case TokenType::kInt64:
      return load<int64_t>(data);
    default:
      break;
  }
  MT_ASSERT(false, "token type ", static_cast<int>(type), " passed the check at opening");
  return 0;
}

std::pair<int64_t, int64_t> range_of(TokenType type) {
  switch (type) {
    case TokenType::kUInt8:
      return {0, std::numeric_limits<uint8_t>::max()};
    case TokenType::kInt8:
      return {0, std::numeric_limits<int8_t>::max()};
    case TokenType::kInt16:
      return {0, std::numeric_limits<int16_t>::max()};
    case TokenType::kUInt16:
      return {0, std::numeric_limits<uint16_t>::max()};
    case TokenType::kInt32:
      return {0, std::numeric_limits<int32_t>::max()};
    default:
      return {0, std::numeric_limits<int64_t>::max()};
  }
}

}  // namespace

int64_t size_of(TokenType type) {
  switch (type) {
    case TokenType::kUInt8:
    case TokenType::kInt8:
      return 1;
    case TokenType::kInt16:
    case TokenType::kUInt16:
      return 2;
    case TokenType::kInt32:
    case TokenType::kFloat32:
      return 4;
    case TokenType::kInt64:
    case TokenType::kFloat64:
      return 8;
  }
  throw InvalidArgument(concat("token dtype code: expected 1 to 8, got ", static_cast<int>(type)));
}

std::string_view to_string(TokenType type) {
  switch (type) {
    case TokenType::kUInt8:
      return "u8";
    case TokenType::kInt8:
      return "i8";
    case TokenType::kInt16:
      return "i16";
    case TokenType::kInt32:
      return "i32";
    case TokenType::kInt64:
      return "i64";
    case TokenType::kFloat64:
      return "f64";
    case TokenType::kFloat32:
      return "f32";
    case TokenType::kUInt16:
      return "u16";
  }
  return "unknown";
}

TokenType token_type_for(int64_t vocab_size) {
  if (vocab_size <= 256) return TokenType::kUInt8;
  if (vocab_size < kUInt16VocabLimit) return TokenType::kUInt16;
  return TokenType::kInt32;
}

MappedFile::MappedFile(const std::filesystem::path& path) : path_(path.string()) {
  const int fd = ::open(path_.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) throw FileMissing(concat(path_, ": cannot be opened: ", std::strerror(errno)));
  struct stat info {};
  const bool regular = ::fstat(fd, &info) == 0 && S_ISREG(info.st_mode);
  bytes_ = info.st_size;
  void* mapped = nullptr;
  if (regular && bytes_ > 0) {
    mapped = ::mmap(nullptr, static_cast<size_t>(bytes_), PROT_READ, MAP_SHARED, fd, 0);
  }
  const int error = errno;
  ::close(fd);
  MT_CHECK_ARG(regular, path_, ": expected a regular file");
  MT_CHECK_EXTERNAL(mapped != MAP_FAILED, path_, ": cannot be mapped: ", std::strerror(error));
  data_ = static_cast<const uint8_t*>(mapped);
}

MappedFile::MappedFile(MappedFile&& other) noexcept
    : path_(std::move(other.path_)),
      data_(std::exchange(other.data_, nullptr)),
      bytes_(std::exchange(other.bytes_, 0)) {}

MappedFile::~MappedFile() {
  if (data_ != nullptr) ::munmap(const_cast<uint8_t*>(data_), static_cast<size_t>(bytes_));
}

TokenFile::TokenFile(const std::filesystem::path& prefix, int64_t vocab_size)
    : prefix_(prefix.string()),
      vocab_size_(vocab_size),
      index_(prefix_ + ".idx"),
      tokens_(prefix_ + ".bin") {
  const std::string& name = index_.path();
  const uint8_t* at = index_.data();
  MT_CHECK_ARG(index_.bytes() >= kHeaderBytes, name, ": offset 0: expected a header of ",
               kHeaderBytes, " bytes, the file has ", index_.bytes());
  MT_CHECK_ARG(std::memcmp(at, kMagic, sizeof(kMagic)) == 0, name,
               ": offset 0: expected the magic bytes MMIDIDX\\0\\0 of a token index");
  const auto version = load<uint64_t>(at + 9);
  MT_CHECK_ARG(version == 1, name, ": offset 9: expected version 1, got ", version);
  const uint8_t code = at[17];
  MT_CHECK_ARG(code >= 1 && code <= 8, name, ": offset 17: expected a dtype code from 1 to 8, got ",
               static_cast<int>(code));
  type_ = static_cast<TokenType>(code);
  MT_CHECK_SUPPORTED(type_ != TokenType::kFloat32 && type_ != TokenType::kFloat64, name,
                     ": offset 17: dtype ", to_string(type_), " holds no token ids");
  MT_CHECK_ARG(type_ != TokenType::kUInt16 || vocab_size < kUInt16VocabLimit, name,
               ": offset 17: dtype u16 is only for vocabularies below ", kUInt16VocabLimit,
               ", model.vocab_size is ", vocab_size, ": ids would have wrapped");

  const auto sequences = load<uint64_t>(at + 18);
  const auto documents = load<uint64_t>(at + 26);
  const auto room = static_cast<uint64_t>(index_.bytes() - kHeaderBytes);
  // Each count alone is bounded first, so that the sum below cannot wrap.
  MT_CHECK_ARG(sequences <= room / 12, name, ": offset 18: ", sequences,
               " sequences need 12 bytes each, the file has ", room, " after its header");
  MT_CHECK_ARG(documents >= 1 && documents <= room / 8, name, ": offset 26: ", documents,
               " document entries need 8 bytes each (and at least one), the file has ", room,
               " after its header");
  const uint64_t expected = kHeaderBytes + sequences * 12 + documents * 8;
  MT_CHECK_ARG(expected == static_cast<uint64_t>(index_.bytes()), name, ": ", sequences,
               " sequences and ", documents, " document entries need ", expected,
               " bytes, the file has ", index_.bytes());

  const int64_t num_sequences = static_cast<int64_t>(sequences);
  const int64_t lengths_at = kHeaderBytes;
  const int64_t pointers_at = lengths_at + num_sequences * 4;
  const int64_t documents_at = pointers_at + num_sequences * 8;
  const int64_t width = size_of(type_);
  starts_.resize(num_sequences + 1, 0);
  byte_pointers_.resize(num_sequences);
  int64_t next_pointer = 0;
  for (int64_t s = 0; s < num_sequences; ++s) {
    const auto length = load<int32_t>(at + lengths_at + s * 4);
    MT_CHECK_ARG(length >= 0, name, ": offset ", lengths_at + s * 4, ": length of sequence ", s,
                 " is negative: ", length);
    const auto pointer = load<int64_t>(at + pointers_at + s * 8);
    MT_CHECK_ARG(
        pointer >= 0 && pointer <= tokens_.bytes() && length * width <= tokens_.bytes() - pointer,
        name, ": offset ", pointers_at + s * 8, ": sequence ", s, " of ", num_sequences,
        " is said to be at bytes ", pointer, " .. ", pointer, " + ", length * width, " of ",
        tokens_.path(), ", which has ", tokens_.bytes());
    MT_CHECK_ARG(pointer >= next_pointer, name, ": offset ", pointers_at + s * 8,
                 ": pointers must ascend; sequence ", s, " begins at byte ", pointer,
                 ", the sequence before it ends at ", next_pointer);
    contiguous_ = contiguous_ && pointer == next_pointer;
    next_pointer = pointer + length * width;
    byte_pointers_[s] = pointer;
    starts_[s + 1] = starts_[s] + length;
  }
  MT_CHECK_ARG(next_pointer == tokens_.bytes(), name, ": its ", num_sequences,
               " sequences end at byte ", next_pointer, " of ", tokens_.path(), ", which has ",
               tokens_.bytes());

  documents_.resize(documents);
  document_starts_.resize(documents);
  for (size_t d = 0; d < documents; ++d) {
    const int64_t offset = documents_at + static_cast<int64_t>(d) * 8;
    documents_[d] = load<int64_t>(at + offset);
    const int64_t least = d == 0 ? 0 : documents_[d - 1];
    MT_CHECK_ARG(
        documents_[d] >= least && documents_[d] <= num_sequences && (d > 0 || documents_[d] == 0),
        name, ": offset ", offset, ": document entry ", d, " is ", documents_[d], ", expected ",
        d == 0 ? "0" : "an ascending sequence number", " (", num_sequences, " sequences)");
    document_starts_[d] = starts_[documents_[d]];
  }
  MT_CHECK_ARG(documents_.back() == num_sequences, name, ": offset ", index_.bytes() - 8,
               ": the last document entry is ", documents_.back(),
               ", expected the number of sequences, ", num_sequences);
}

void TokenFile::read(int64_t begin, std::span<int64_t> out) const {
  const int64_t count = static_cast<int64_t>(out.size());
  MT_CHECK_ARG(begin >= 0 && begin + count <= num_tokens(), prefix_, ": tokens ", begin, " .. ",
               begin + count, " asked for, the file has ", num_tokens());
  if (count == 0) return;
  const int64_t width = size_of(type_);
  int64_t sequence = std::upper_bound(starts_.begin(), starts_.end(), begin) - starts_.begin() - 1;
  int64_t done = 0;
  while (done < count) {
    const int64_t at = begin + done;
    int64_t pointer = at * width;
    int64_t run = count - done;
    if (!contiguous_) {
      while (starts_[sequence + 1] <= at) ++sequence;
      pointer = byte_pointers_[sequence] + (at - starts_[sequence]) * width;
      run = std::min(run, starts_[sequence + 1] - at);
    }
    for (int64_t i = 0; i < run; ++i) {
      const int64_t id = load_token(tokens_.data() + pointer + i * width, type_);
      MT_CHECK_ARG(id >= 0 && (vocab_size_ == 0 || id < vocab_size_), tokens_.path(), ": offset ",
                   pointer + i * width, ": token id ", id, " is outside the vocabulary of ",
                   vocab_size_);
      out[done + i] = id;
    }
    done += run;
  }
}

struct TokenFileWriter::State {
  std::string prefix;
  TokenType type;
  std::ofstream tokens;
  std::vector<int32_t> lengths;
  std::vector<int64_t> documents{0};
};

TokenFileWriter::TokenFileWriter(const std::filesystem::path& prefix, TokenType type)
    : state_(std::make_unique<State>()) {
  size_of(type);
  MT_CHECK_ARG(type != TokenType::kFloat32 && type != TokenType::kFloat64, prefix.string(),
               ": dtype ", to_string(type), " holds no token ids");
  state_->prefix = prefix.string();
  state_->type = type;
  std::filesystem::remove(state_->prefix + ".idx");  // never an old index beside new tokens
  state_->tokens.open(state_->prefix + ".bin", std::ios::binary | std::ios::trunc);
  MT_CHECK_ARG(state_->tokens.good(), state_->prefix, ".bin: cannot be created");
}

TokenFileWriter::~TokenFileWriter() = default;

void TokenFileWriter::add_sequence(std::span<const int64_t> ids) {
  const auto [least, most] = range_of(state_->type);
  const int64_t width = size_of(state_->type);
  MT_CHECK_ARG(ids.size() <= static_cast<size_t>(std::numeric_limits<int32_t>::max()),
               state_->prefix, ": a sequence of ", ids.size(),
               " tokens does not fit the index's int32 lengths");
  std::vector<char> bytes(ids.size() * width);
  for (size_t i = 0; i < ids.size(); ++i) {
    MT_CHECK_ARG(ids[i] >= least && ids[i] <= most, state_->prefix, ": token id ", ids[i],
                 " does not fit dtype ", to_string(state_->type));
    std::memcpy(bytes.data() + i * width, &ids[i],
                width);  // little endian: the low bytes come first
  }
  state_->tokens.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  state_->lengths.push_back(static_cast<int32_t>(ids.size()));
}

void TokenFileWriter::end_document() {
  state_->documents.push_back(static_cast<int64_t>(state_->lengths.size()));
}

void TokenFileWriter::finish() {
  const auto sequences = static_cast<int64_t>(state_->lengths.size());
  if (state_->documents.back() != sequences) end_document();
  state_->tokens.close();
  MT_CHECK_EXTERNAL(!state_->tokens.fail(), state_->prefix, ".bin: writing failed (disk full?)");
  std::ofstream out(state_->prefix + ".idx", std::ios::binary | std::ios::trunc);
  out.write(kMagic, sizeof(kMagic));
  store<uint64_t>(out, 1);
  store<uint8_t>(out, static_cast<uint8_t>(state_->type));
  store<uint64_t>(out, static_cast<uint64_t>(sequences));
  store<uint64_t>(out, state_->documents.size());
  for (const int32_t length : state_->lengths) store<int32_t>(out, length);
  int64_t pointer = 0;
  for (const int32_t length : state_->lengths) {
    store<int64_t>(out, pointer);
    pointer += length * size_of(state_->type);
  }
  for (const int64_t document : state_->documents) store<int64_t>(out, document);
  out.close();
  MT_CHECK_EXTERNAL(!out.fail(), state_->prefix, ".idx: writing failed (disk full?)");
}

}  // namespace mtraining::data
