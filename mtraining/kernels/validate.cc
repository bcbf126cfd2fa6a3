#include "mtraining/kernels/validate.h"

#include <limits>
#include <string>
#include <utility>

#include "mtraining/base/check.h"

namespace mtraining::kernels {
namespace {

int64_t blocks_of(int64_t tokens) { return (tokens + kBlock - 1) / kBlock; }

int64_t distance(const Entry& entry, int64_t blocks_per_stripe) {
  return entry.lambda * blocks_per_stripe + entry.delta;
}

void check_sizes(int64_t batch, int64_t num_q_heads, int64_t num_kv_heads, int64_t head_dim,
                 DType dtype, int64_t position_stride, int64_t seq_len, double softmax_scale) {
  MT_CHECK_ARG(batch >= 0, "batch: expected >= 0, got ", batch);
  MT_CHECK_ARG(num_kv_heads >= 1, "num_kv_heads: expected >= 1, got ", num_kv_heads);
  MT_CHECK_ARG(num_q_heads >= 1 && num_q_heads % num_kv_heads == 0,
               "num_q_heads: expected a multiple of num_kv_heads = ", num_kv_heads, ", got ",
               num_q_heads);
  MT_CHECK_ARG(head_dim >= 1, "head_dim: expected >= 1, got ", head_dim);
  MT_CHECK_SUPPORTED(head_dim % 8 == 0 && head_dim <= kMaxHeadDim,
                     "head_dim: expected a multiple of 8 up to ", kMaxHeadDim, ", got ", head_dim);
  MT_CHECK_ARG(dtype == DType::kFloat64 || dtype == DType::kFloat32 || dtype == DType::kBFloat16 ||
                   dtype == DType::kFloat16,
               "dtype: expected float64, float32, bfloat16 or float16, got code ",
               static_cast<int>(dtype));
  MT_CHECK_ARG(position_stride >= 1, "position_stride: expected >= 1, got ", position_stride);
  MT_CHECK_ARG(seq_len >= 0 && seq_len <= std::numeric_limits<int32_t>::max(),
               "seq_len: expected 0 .. 2^31-1, got ", seq_len);
  MT_CHECK_ARG(softmax_scale > 0 && softmax_scale <= std::numeric_limits<double>::max(),
               "softmax_scale: expected a finite number > 0, got ", softmax_scale);
}

/// The parts of names are put together only for a refusal: this runs in every launch.
template <typename... Name>
void check_pointer(const void* pointer, bool needed, const Name&... name) {
  MT_CHECK_ARG(!needed || pointer != nullptr, name..., ": expected a pointer, got null");
}

/// Rows that are written must not overlap.
template <typename... Name>
void check_output(const View& view, int64_t batch, int64_t tokens, int64_t heads, bool shared,
                  const Name&... name) {
  check_pointer(view.data, batch * tokens * heads > 0, name...);
  MT_CHECK_ARG(tokens <= 1 || view.stride_token != 0, name..., ": expected stride_token != 0 for ",
               tokens, " tokens, got 0");
  MT_CHECK_ARG(shared || heads <= 1 || view.stride_head != 0, name...,
               ": expected stride_head != 0 for ", heads, " heads, got 0");
  MT_CHECK_ARG(shared || batch <= 1 || view.stride_batch != 0, name...,
               ": expected stride_batch != 0 for batch ", batch, ", got 0");
}

void check_attention(const AttentionParams& p, bool gradients) {
  check_sizes(p.batch, p.num_q_heads, p.num_kv_heads, p.head_dim, p.dtype, p.position_stride,
              p.seq_len, p.softmax_scale);
  MT_CHECK_ARG(p.num_queries >= 0, "num_queries: expected >= 0, got ", p.num_queries);
  MT_CHECK_ARG(p.num_sources >= 0, "num_sources: expected >= 0, got ", p.num_sources);
  const bool rows = p.batch * p.num_queries > 0;
  check_pointer(p.q.data, rows, "q");
  check_pointer(p.q_block_starts, rows, "q_block_starts");
  check_pointer(p.sources, p.num_sources > 0, "sources");
  for (int s = 0; s < p.num_sources; ++s) {
    const KeySource& source = p.sources[s];
    MT_CHECK_ARG(source.num_keys >= 0, "sources[", s, "].num_keys", ": expected >= 0, got ",
                 source.num_keys);
    MT_CHECK_ARG(source.num_keys <= std::numeric_limits<int32_t>::max(), "sources[", s,
                 "].num_keys", ": expected < 2^31, got ", source.num_keys);
    const bool keys = source.num_keys > 0 && rows;
    check_pointer(source.k.data, keys, "sources[", s, "].k");
    check_pointer(source.v.data, keys, "sources[", s, "].v");
    const BlockLists& blocks = source.blocks;
    if (blocks.kind == BlockListKind::kEntries) {
      MT_CHECK_ARG(blocks.capacity >= 0, "sources[", s, "].blocks.capacity",
                   ": expected >= 0, got ", blocks.capacity);
      MT_CHECK_ARG(blocks.blocks_per_stripe >= 1, "sources[", s, "].blocks.blocks_per_stripe",
                   ": expected >= 1, got ", blocks.blocks_per_stripe);
      check_pointer(blocks.num_entries, keys, "sources[", s, "].blocks.num_entries");
      check_pointer(blocks.entries, keys && blocks.capacity > 0, "sources[", s, "].blocks.entries");
    } else if (blocks.kind == BlockListKind::kCsr) {
      check_pointer(blocks.row_begin, keys, "sources[", s, "].blocks.row_begin");
    } else {
      MT_CHECK_ARG(blocks.kind == BlockListKind::kNone, "sources[", s, "].blocks.kind",
                   ": expected none, entries or csr, got code ", static_cast<int>(blocks.kind));
    }
    const bool has_blocks = blocks.kind != BlockListKind::kNone;
    check_pointer(source.block_starts, keys && has_blocks, "sources[", s, "].block_starts");
    if (source.columns.counts != nullptr) {
      MT_CHECK_ARG(source.columns.capacity >= 0, "sources[", s, "].columns.capacity",
                   ": expected >= 0, got ", source.columns.capacity);
      const bool listed = keys && source.columns.capacity > 0;
      check_pointer(source.columns.key_rows, listed, "sources[", s, "].columns.key_rows");
      check_pointer(source.columns.positions, listed, "sources[", s, "].columns.positions");
      MT_CHECK_ARG(p.diagonal_bits == nullptr || p.diagonal_words * 64 >= blocks_of(p.seq_len),
                   "diagonal_words: expected one bit for each of ", blocks_of(p.seq_len),
                   " blocks, got ", p.diagonal_words, " words");
    }
    for (int other = 0; gradients && keys && other < s; ++other) {
      // Ranges of different sources are summed at the same time.
      MT_CHECK_ARG(p.sources[other].num_keys == 0 || p.sources[other].dk.data != source.dk.data,
                   "sources[", s, "].dk", ": expected rows of its own, got those of sources[",
                   other, "]");
      MT_CHECK_ARG(p.sources[other].num_keys == 0 || p.sources[other].dv.data != source.dv.data,
                   "sources[", s, "].dv", ": expected rows of its own, got those of sources[",
                   other, "]");
    }
    if (gradients && rows) {
      // Without blocks a key row belongs to one (sample, kv head): a gathered buffer has no batch
      // and head strides.
      check_output(source.dk, p.batch, source.num_keys, p.num_kv_heads, !has_blocks, "sources[", s,
                   "].dk");
      check_output(source.dv, p.batch, source.num_keys, p.num_kv_heads, !has_blocks, "sources[", s,
                   "].dv");
    }
  }
}

}  // namespace

bool needs_out(const ForwardParams& p, int64_t most_sources) {
  return p.rounded.data == nullptr || !p.first || p.num_sources > most_sources;
}

void check(const ForwardParams& p, int64_t most_sources) {
  check_attention(p, false);
  if (needs_out(p, most_sources))
    check_output(p.out, p.batch, p.num_queries, p.num_q_heads, false, "out");
  MT_CHECK_ARG(p.residual.data == nullptr || p.rounded.data != nullptr,
               "residual: expected null without rounded, got a pointer");
  for (const auto& [name, view] : {std::pair{"rounded", &p.rounded}, {"residual", &p.residual}}) {
    if (view->data != nullptr)
      check_output(*view, p.batch, p.num_queries, p.num_q_heads, false, name);
  }
  check_pointer(p.lse, p.batch * p.num_queries > 0, "lse");
}

void check(const BackwardParams& p, bool rounds_dq) {
  check_attention(p, true);
  const bool rows = p.batch * p.num_queries > 0;
  check_pointer(p.dout.data, rows, "dout");
  check_pointer(p.lse, rows, "lse");
  check_pointer(p.delta, rows, "delta");
  if (p.dq_rounded.data == nullptr) {
    check_output(p.dq, p.batch, p.num_queries, p.num_q_heads, false, "dq");
    return;
  }
  MT_CHECK_SUPPORTED(rounds_dq,
                     "dq_rounded: expected null, got a pointer: here dq is summed in more than one "
                     "go (parts added as they come, or more sources than one launch takes)");
  check_output(p.dq_rounded, p.batch, p.num_queries, p.num_q_heads, false, "dq_rounded");
}

void check(const WindowParams& p) {
  check_sizes(p.batch, p.num_q_heads, p.num_kv_heads, p.head_dim, p.dtype, p.position_stride,
              p.seq_len, p.softmax_scale);
  MT_CHECK_ARG(p.num_rows >= 0, "num_rows: expected >= 0, got ", p.num_rows);
  MT_CHECK_ARG(p.num_keys >= 0 && p.num_keys <= std::numeric_limits<int32_t>::max(),
               "num_keys: expected 0 .. 2^31-1, got ", p.num_keys);
  const bool rows = p.batch * p.num_rows > 0;
  check_pointer(p.q.data, rows, "q");
  check_pointer(p.row_positions, rows, "row_positions");
  check_pointer(p.k.data, rows && p.num_keys > 0, "k");
  check_pointer(p.k_block_starts, rows && p.num_keys > 0, "k_block_starts");
}

void check_delta(const BackwardParams& p, const RoundedOut& out, const void* delta) {
  check_sizes(p.batch, p.num_q_heads, p.num_kv_heads, p.head_dim, p.dtype, p.position_stride,
              p.seq_len, p.softmax_scale);
  MT_CHECK_ARG(p.num_queries >= 0, "num_queries: expected >= 0, got ", p.num_queries);
  const bool rows = p.batch * p.num_queries > 0;
  check_pointer(p.dout.data, rows, "dout");
  check_pointer(p.lse, rows, "lse");
  check_pointer(out.rounded.data, rows, "out.rounded");
  check_pointer(delta, rows, "delta");
}

void check_columns(const ColumnLists& columns, int64_t rows, int64_t num_keys, bool read_key_rows,
                   const char* name) {
  if (columns.counts == nullptr) return;
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t count = columns.counts[r];
    MT_CHECK_ARG(count >= 0 && count <= columns.capacity, name, ".counts[", r,
                 "]: expected 0 .. capacity = ", columns.capacity, ", got ", count);
    for (int64_t i = 0; i < count; ++i) {
      const int64_t at = r * columns.capacity + i;
      const int64_t position = columns.positions[at];
      MT_CHECK_ARG(position > (i == 0 ? -1 : columns.positions[at - 1]), name, ".positions[", r,
                   "][", i, "]: expected ascending positions >= 0, got ", position,
                   i == 0 ? std::string() : concat(" after ", columns.positions[at - 1]));
      if (!read_key_rows) continue;
      const int64_t key_row = columns.key_rows[at];
      MT_CHECK_ARG(key_row >= 0 && key_row < num_keys, name, ".key_rows[", r, "][", i,
                   "]: expected a row below num_keys = ", num_keys, ", got ", key_row);
    }
  }
}

void check_lists(const AttentionParams& p) {
  if (p.batch * p.num_queries == 0) return;
  const int64_t rows = p.batch * p.num_q_heads;
  const int64_t num_q_blocks = blocks_of(p.num_queries);
  for (int64_t i = 0; i < num_q_blocks; ++i) {
    MT_CHECK_ARG(p.q_block_starts[i] >= 0, "q_block_starts[", i, "]: expected >= 0, got ",
                 p.q_block_starts[i]);
  }
  for (int s = 0; s < p.num_sources; ++s) {
    const KeySource& source = p.sources[s];
    if (source.num_keys == 0) continue;
    const std::string at = concat("sources[", s, "].");
    const int64_t num_k_blocks = blocks_of(source.num_keys);
    const BlockLists& blocks = source.blocks;
    if (blocks.kind != BlockListKind::kNone) {
      for (int64_t i = 0; i < num_k_blocks; ++i) {
        MT_CHECK_ARG(source.block_starts[i] >= 0, at, "block_starts[", i, "]: expected >= 0, got ",
                     source.block_starts[i]);
      }
    }
    for (int64_t r = 0; r < rows && blocks.kind == BlockListKind::kEntries; ++r) {
      const int64_t count = blocks.num_entries[r];
      MT_CHECK_ARG(count >= 0 && count <= blocks.capacity, at, "blocks.num_entries[", r,
                   "]: expected 0 .. capacity = ", blocks.capacity, ", got ", count);
      const int64_t m = blocks.blocks_per_stripe;
      for (int64_t i = 0; i < count; ++i) {
        const Entry* entry = blocks.entries + r * blocks.capacity + i;
        MT_CHECK_ARG(entry->delta > -m && entry->delta < m, at, "blocks.entries[", r, "][", i,
                     "].delta: expected above -", m, " and below ", m, ", got ", entry->delta);
        if (i == 0) continue;
        // The same distance in blocks, split in its two possible ways, reaches different query
        // blocks.
        const int64_t before = distance(entry[-1], m), here = distance(*entry, m);
        const bool split = before == here && entry[-1].lambda != entry->lambda &&
                           (i == 1 || distance(entry[-2], m) < here);
        MT_CHECK_ARG(before < here || split, at, "blocks.entries[", r, "][", i,
                     "]: expected ascending lambda * ", m, " + delta, got (", entry->lambda, ", ",
                     entry->delta, ") after (", entry[-1].lambda, ", ", entry[-1].delta, ")");
      }
    }
    for (int64_t r = 0; r < rows && blocks.kind == BlockListKind::kCsr; ++r) {
      const int64_t* begin = blocks.row_begin + r * (num_q_blocks + 1);
      for (int64_t i = 0; i < num_q_blocks; ++i) {
        MT_CHECK_ARG(begin[i] >= 0 && begin[i] <= begin[i + 1], at, "blocks.row_begin[", r, "][",
                     i + 1, "]: expected >= ", begin[i], ", got ", begin[i + 1]);
        MT_CHECK_ARG(begin[i] == begin[i + 1] || blocks.key_blocks != nullptr, at,
                     "blocks.key_blocks: expected a pointer, got null");
        for (int64_t e = begin[i]; e < begin[i + 1]; ++e) {
          const int64_t block = blocks.key_blocks[e];
          MT_CHECK_ARG(block >= 0 && block < num_k_blocks, at, "blocks.key_blocks[", e,
                       "]: expected a block below ", num_k_blocks, ", got ", block);
          MT_CHECK_ARG(e == begin[i] || blocks.key_blocks[e - 1] < block, at, "blocks.key_blocks[",
                       e, "]: expected ascending blocks, got ", block, " after ",
                       blocks.key_blocks[e - 1]);
        }
      }
    }
    check_columns(source.columns, rows, source.num_keys, true, (at + "columns").c_str());
  }
}

}  // namespace mtraining::kernels
