#include "mtraining/layout/layout.h"

#include <limits>

#include "mtraining/base/check.h"

namespace mtraining::layout {
namespace {

/// Length that the padded sequence is a multiple of.
int64_t padding_multiple(const LayoutOptions& options) {
  const int64_t cp_size = options.cp_size;
  switch (options.kind) {
    case LayoutKind::kContiguous:
    case LayoutKind::kStriped:
      return kBlock * cp_size;
    case LayoutKind::kZigzag:
      return 2 * kBlock * cp_size;
    case LayoutKind::kBlockStriped:
      return options.stripe * cp_size;
  }
  MT_ASSERT(false, "layout kind ", static_cast<int>(options.kind));
  return 0;
}

}  // namespace

LayoutKind parse_layout_kind(std::string_view name) {
  const auto kind = value_of(kLayoutWords, name);
  MT_CHECK_ARG(kind, "layout: expected one of ", listed(kLayoutWords, ", ", ", "), ", got '", name,
               "'");
  return *kind;
}

std::string_view to_string(LayoutKind kind) { return word_of(kLayoutWords, kind); }

Layout::Layout(const LayoutOptions& options) : options_(options) {
  const auto where = concat(" (layout ", to_string(options.kind), ", seq_len ", options.seq_len,
                            ", cp_size ", options.cp_size, ")");
  MT_CHECK_ARG(options.cp_size >= 1, "cp_size: expected >= 1, got ", options.cp_size, where);
  MT_CHECK_ARG(options.seq_len >= 1, "seq_len: expected >= 1, got ", options.seq_len, where);
  if (options.kind == LayoutKind::kBlockStriped) {
    MT_CHECK_ARG(options.stripe >= kBlock && options.stripe % kBlock == 0,
                 "stripe: expected a positive multiple of ", kBlock, ", got ", options.stripe,
                 where);
    MT_CHECK_ARG(options.nodes >= 1 && options.cp_size % options.nodes == 0,
                 "nodes: expected a divisor of cp_size ", options.cp_size, ", got ", options.nodes,
                 where);
  }
  // Kernels take positions as int32.
  constexpr int64_t kMaxLen = std::numeric_limits<int32_t>::max();
  MT_CHECK_ARG(options.seq_len <= kMaxLen, "seq_len: expected at most ", kMaxLen, ", got ",
               options.seq_len, where);
  MT_CHECK_ARG(options.kind != LayoutKind::kBlockStriped || options.stripe <= kMaxLen,
               "stripe: expected at most ", kMaxLen, ", got ", options.stripe, where);
  const int64_t multiple = padding_multiple(options);
  padded_len_ = (options.seq_len + multiple - 1) / multiple * multiple;
  MT_CHECK_ARG(padded_len_ <= kMaxLen, "seq_len: expected at most ", kMaxLen,
               " after padding to a multiple of ", multiple, ", got ", padded_len_, where);
}

Owner Layout::owner(int64_t position) const {
  MT_CHECK_ARG(position >= 0 && position < padded_len_, "position: expected in [0, ", padded_len_,
               "), got ", position);
  const int64_t world = options_.cp_size;
  const int64_t shard = tokens_per_rank();
  switch (options_.kind) {
    case LayoutKind::kContiguous:
      return {static_cast<int>(position / shard), position % shard};
    case LayoutKind::kZigzag: {
      const int64_t chunk_len = shard / 2;
      const int64_t chunk = position / chunk_len;
      const int64_t within = position % chunk_len;
      if (chunk < world) return {static_cast<int>(chunk), within};
      return {static_cast<int>(2 * world - 1 - chunk), chunk_len + within};
    }
    case LayoutKind::kStriped:
      return {static_cast<int>(position % world), position / world};
    case LayoutKind::kBlockStriped: {
      const int64_t stripe = position / options_.stripe;
      return {rank_of_residue(static_cast<int>(stripe % world)),
              stripe / world * options_.stripe + position % options_.stripe};
    }
  }
  MT_ASSERT(false, "layout kind ", static_cast<int>(options_.kind));
  return {};
}

int64_t Layout::position(int cp_rank, int64_t offset) const {
  MT_CHECK_ARG(cp_rank >= 0 && cp_rank < options_.cp_size, "cp_rank: expected in [0, ",
               options_.cp_size, "), got ", cp_rank);
  const int64_t shard = tokens_per_rank();
  MT_CHECK_ARG(offset >= 0 && offset < shard, "offset: expected in [0, ", shard, "), got ", offset);
  const int64_t world = options_.cp_size;
  switch (options_.kind) {
    case LayoutKind::kContiguous:
      return cp_rank * shard + offset;
    case LayoutKind::kZigzag: {
      const int64_t chunk_len = shard / 2;
      if (offset < chunk_len) return cp_rank * chunk_len + offset;
      return (2 * world - 1 - cp_rank) * chunk_len + offset - chunk_len;
    }
    case LayoutKind::kStriped:
      return offset * world + cp_rank;
    case LayoutKind::kBlockStriped: {
      const int64_t local_stripe = offset / options_.stripe;
      return (local_stripe * world + residue(cp_rank)) * options_.stripe + offset % options_.stripe;
    }
  }
  MT_ASSERT(false, "layout kind ", static_cast<int>(options_.kind));
  return 0;
}

std::vector<int64_t> Layout::positions(int cp_rank) const {
  std::vector<int64_t> result(static_cast<size_t>(tokens_per_rank()));
  // One mapping a block: 64 local tokens are 64 positions at a fixed stride in every kind.
  for (int64_t first = 0; first < tokens_per_rank(); first += kBlock) {
    const int64_t start = position(cp_rank, first);
    for (int64_t i = 0; i < kBlock; ++i) result[first + i] = start + i * position_stride();
  }
  return result;
}

int Layout::residue(int cp_rank) const {
  MT_CHECK_SUPPORTED(options_.kind != LayoutKind::kZigzag,
                     "layout zigzag: a rank holds two chunks and so has no single residue");
  MT_CHECK_ARG(cp_rank >= 0 && cp_rank < options_.cp_size, "cp_rank: expected in [0, ",
               options_.cp_size, "), got ", cp_rank);
  if (options_.kind != LayoutKind::kBlockStriped) return cp_rank;
  const int ranks_per_node = options_.cp_size / options_.nodes;
  return cp_rank % ranks_per_node * options_.nodes + cp_rank / ranks_per_node;
}

int Layout::rank_of_residue(int residue) const {
  MT_CHECK_SUPPORTED(options_.kind != LayoutKind::kZigzag,
                     "layout zigzag: a rank holds two chunks and so has no single residue");
  MT_CHECK_ARG(residue >= 0 && residue < options_.cp_size, "residue: expected in [0, ",
               options_.cp_size, "), got ", residue);
  if (options_.kind != LayoutKind::kBlockStriped) return residue;
  const int ranks_per_node = options_.cp_size / options_.nodes;
  return residue % options_.nodes * ranks_per_node + residue / options_.nodes;
}

std::vector<int32_t> Layout::block_starts(int cp_rank) const {
  std::vector<int32_t> starts(static_cast<size_t>(blocks_per_rank()));
  for (int64_t block = 0; block < blocks_per_rank(); ++block) {
    starts[block] = static_cast<int32_t>(position(cp_rank, block * kBlock));
  }
  return starts;
}

int64_t Layout::blocks_per_stripe() const {
  MT_CHECK_SUPPORTED(
      options_.kind == LayoutKind::kBlockStriped || options_.kind == LayoutKind::kContiguous,
      "layout ", to_string(options_.kind), ": its blocks follow no single (stripe, residue) rule");
  return options_.kind == LayoutKind::kBlockStriped ? options_.stripe / kBlock : blocks_per_rank();
}

}  // namespace mtraining::layout
