#include "mtraining/torch_ops/ring_agreement.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <iomanip>
#include <sstream>

#include "mtraining/attention/tensors.h"
#include "mtraining/base/check.h"

namespace mtraining::torch_ops {
namespace {

template <typename Value>
std::string as_text(const Value& value) {
  std::ostringstream out;
  out << std::setprecision(17) << value;
  return out.str();
}
std::string as_text(const std::optional<int64_t>& value) {
  return value ? as_text(*value) : "none";
}

class Digest {
 public:
  void add(const void* data, size_t bytes) {
    const auto* from = static_cast<const unsigned char*>(data);
    for (size_t i = 0; i < bytes; ++i) hash_ = (hash_ ^ from[i]) * 1099511628211ULL;
  }
  void add(const index::Lists& lists) {
    for (int64_t row = 0; row < lists.rows; ++row) {
      const auto values = lists.row(row);
      add(&lists.counts[static_cast<size_t>(row)], sizeof(int32_t));
      add(values.data(), values.size_bytes());
    }
  }
  std::string text() const { return concat("content ", std::hex, hash_); }

 private:
  uint64_t hash_ = 14695981039346656037ULL;
};

std::string sizes_text(const at::Tensor& tensor) {
  return tensor.defined() ? as_text(tensor.sizes()) : "none";
}

std::string documents_text(const at::Tensor& document_starts) {
  if (!document_starts.defined()) return "none";
  if (!document_starts.is_cpu()) return "not on the CPU";
  const at::Tensor contiguous = document_starts.contiguous();
  Digest digest;
  digest.add(contiguous.const_data_ptr(), contiguous.nbytes());
  return digest.text();
}

/// As Python knows them.
const char* name_of(pattern::PatternKind kind) {
  switch (kind) {
    case pattern::PatternKind::kVerticalSlash:
      return "VerticalSlash";
    case pattern::PatternKind::kXAttention:
      return "XAttention";
    case pattern::PatternKind::kMoba:
      return "Moba";
    case pattern::PatternKind::kDense:
    case pattern::PatternKind::kFixed:
      break;
  }
  return "Dense";
}

}  // namespace

std::vector<AgreedValue> call_values(const at::Tensor& q, const at::Tensor& k,
                                     const at::Tensor& document_starts, double softmax_scale,
                                     const attention::AttentionPattern& pattern,
                                     const index::Index* replayed) {
  using pattern::PatternKind;
  Digest lists;
  if (replayed != nullptr) {
    lists.add(replayed->diagonals);
    lists.add(replayed->columns);
    const index::BlockRows& blocks = replayed->blocks;
    lists.add(blocks.row_begin.data(), blocks.row_begin.size() * sizeof(int64_t));
    lists.add(blocks.key_blocks.data(), blocks.key_blocks.size() * sizeof(int32_t));
  }
  const std::string kind = replayed != nullptr ? "a given index" : name_of(pattern.kind);
  std::vector<AgreedValue> values = {
      {"pattern", kind},
      {"index", replayed != nullptr ? lists.text() : "none"},
      {"dtype", attention::dtype_name(q.scalar_type())},
      {"shape of q", sizes_text(q)},
      {"shape of k", sizes_text(k)},
      {"softmax_scale", as_text(softmax_scale)},
      {"document_starts", documents_text(document_starts)},
  };
  const auto add_of = [&](PatternKind kind, const char* name, const auto& value) {
    const bool counts = replayed == nullptr && pattern.kind == kind;
    values.push_back({concat("pattern (", name, ")"), counts ? as_text(value) : "none"});
  };
  const auto add = [&](const char* name, const auto& value) {
    add_of(PatternKind::kVerticalSlash, name, value);
  };
  const pattern::VerticalSlashOptions& shown = pattern.vertical_slash;
  add("p_vertical", shown.p_vertical);
  add("p_slash", shown.p_slash);
  add("last_q", shown.last_q);
  add("window", word_of(pattern::kWindowWords, shown.window));
  add("slash_pooling", word_of(pattern::kPoolingWords, shown.slash_pooling));
  add("selection", word_of(pattern::kSelectionWords, shown.selection));
  add("sink_tokens", shown.sink_tokens);
  add("local_blocks", shown.local_blocks);
  add("max_columns", shown.max_columns);
  add("max_diagonals", shown.max_diagonals);
  add("dense_threshold", shown.dense_threshold);
  add("recall_floor", shown.recall_floor);
  add("recall_rows", shown.recall_rows);
  add_of(PatternKind::kXAttention, "xattention_block", pattern.xattention.block);
  add_of(PatternKind::kXAttention, "xattention_stride", pattern.xattention.stride);
  add_of(PatternKind::kXAttention, "xattention_threshold", pattern.xattention.threshold);
  add_of(PatternKind::kMoba, "moba_chunk", pattern.moba.chunk);
  add_of(PatternKind::kMoba, "moba_top_k", pattern.moba.top_k);
  return values;
}

void check_agreement(const std::vector<AgreedValue>& values, comm::Communicator& group) {
  if (group.size() == 1) return;
  using Cell = std::array<char, kAgreedBytes>;
  const size_t ranks = static_cast<size_t>(group.size());
  std::vector<Cell> mine(values.size(), Cell{});
  for (size_t i = 0; i < values.size(); ++i) {
    std::memcpy(mine[i].data(), values[i].text.data(),
                std::min(values[i].text.size(), kAgreedBytes - 1));
  }
  std::vector<std::vector<Cell>> all(ranks, mine);
  const auto bytes = static_cast<int64_t>(mine.size() * sizeof(Cell));
  std::vector<comm::Buffer> received;
  for (std::vector<Cell>& cells : all) received.push_back({cells.data(), bytes});
  group.all_gather({mine.data(), bytes}, received)->wait();
  for (size_t i = 0; i < values.size(); ++i) {
    for (size_t rank = 1; rank < ranks; ++rank) {
      MT_CHECK_ARG(all[rank][i] == all[0][i],
                   "ring_attention: expected the same call on all ranks, ", "but ranks differ in ",
                   values[i].name, ": rank 0 has ", all[0][i].data(), ", rank ", rank, " has ",
                   all[rank][i].data());
    }
  }
}

}  // namespace mtraining::torch_ops
