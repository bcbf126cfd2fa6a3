// TokenFile: a memory-mapped pair <prefix>.bin / <prefix>.idx of token ids in Megatron's format; TokenFileWriter makes one.
//
// In:   a path without extension and the vocabulary size. Out: sequences, documents and ranges of token ids.
// Next: batches.h cuts samples of seq_len + 1 tokens out of the stream.
//
// Index (little endian): "MMIDIDX\0\0" (9 bytes), u64 version 1, u8 dtype code, u64 sequences, u64 documents + 1, int32 length
// of each sequence, int64 byte pointer of each sequence into the .bin, int64 document index (first sequence of each document,
// then the number of sequences). The .bin holds the ids alone. Token by token the file is one stream: sequence after sequence.
// Everything is checked when the file is opened; an error names file and offset. Thread-safe once open.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace mtraining::data {

/// Codes of the format; the value is what the index holds.
enum class TokenType : uint8_t {
  kUInt8 = 1,
  kInt8 = 2,
  kInt16 = 3,
  kInt32 = 4,
  kInt64 = 5,
  kFloat64 = 6,
  kFloat32 = 7,
  kUInt16 = 8,
};
/// Bytes of one token. Errors: InvalidArgument on an unknown code.
int64_t size_of(TokenType type);
std::string_view to_string(TokenType type);
/// The smallest of u8, u16, i32 that holds ids below vocab_size. u16 only below 65500: the format's rule.
TokenType token_type_for(int64_t vocab_size);

/// Read-only mapping of a whole file. Movable.
class MappedFile {
 public:
  /// Errors: InvalidArgument naming the path where it cannot be opened (a file that the user named).
  explicit MappedFile(const std::filesystem::path& path);
  ~MappedFile();
  MappedFile(MappedFile&& other) noexcept;
  MappedFile& operator=(MappedFile&&) = delete;
  const uint8_t* data() const { return data_; }
  int64_t bytes() const { return bytes_; }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
  const uint8_t* data_ = nullptr;
  int64_t bytes_ = 0;
};

class TokenFile {
 public:
  /// `prefix` without ".bin" / ".idx". vocab_size 0: ids are not checked against a vocabulary.
  /// Errors: InvalidArgument naming file, offset, what was expected and got: missing file, magic, version, dtype code, counts
  /// that do not fit the file, negative lengths, pointers that do not follow from the lengths or leave the .bin, document
  /// index not ascending or beyond the sequences, u16 with a vocabulary of 65500 or more. Unsupported: float types.
  TokenFile(const std::filesystem::path& prefix, int64_t vocab_size);

  const std::string& prefix() const { return prefix_; }
  TokenType type() const { return type_; }
  int64_t num_sequences() const { return static_cast<int64_t>(starts_.size()) - 1; }
  int64_t num_documents() const { return static_cast<int64_t>(documents_.size()) - 1; }
  int64_t num_tokens() const { return starts_.back(); }

  /// First token of sequence s in the stream; s == num_sequences() gives num_tokens().
  int64_t sequence_start(int64_t s) const { return starts_[s]; }
  /// First tokens of all documents in the stream, ascending, then num_tokens().
  const std::vector<int64_t>& document_starts() const { return document_starts_; }

  /// Ids [begin, begin + out.size()) of the stream. Errors: InvalidArgument naming file and offset where an id is negative or
  /// not below the vocabulary.
  void read(int64_t begin, std::span<int64_t> out) const;

 private:
  std::string prefix_;
  int64_t vocab_size_ = 0;
  MappedFile index_, tokens_;
  TokenType type_ = TokenType::kUInt8;
  std::vector<int64_t> starts_;           ///< [sequences + 1] token offsets in the stream
  std::vector<int64_t> byte_pointers_;    ///< [sequences]
  std::vector<int64_t> documents_;        ///< [documents + 1] sequence numbers
  std::vector<int64_t> document_starts_;  ///< [documents + 1] token offsets
  bool contiguous_ = true;                ///< pointers follow each other without gaps
};

/// Writes <prefix>.bin as sequences come and <prefix>.idx on finish(). Without finish() no index exists.
class TokenFileWriter {
 public:
  /// Errors: InvalidArgument on float types and where the files cannot be created.
  TokenFileWriter(const std::filesystem::path& prefix, TokenType type);
  ~TokenFileWriter();
  /// Appends one sequence. Errors: InvalidArgument where an id does not fit the type (it is never wrapped).
  void add_sequence(std::span<const int64_t> ids);
  void end_document();
  /// Ends an open document, writes the index. Errors: ExternalError (disk full, ..).
  void finish();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace mtraining::data
