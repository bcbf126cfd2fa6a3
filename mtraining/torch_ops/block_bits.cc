#include "mtraining/torch_ops/block_bits.h"

#include <ATen/ATen.h>
#include <c10/core/DeviceGuard.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "mtraining/attention/block_patterns.h"
#include "mtraining/attention/tensors.h"
#include "mtraining/base/check.h"
#include "mtraining/layout/layout.h"
#include "mtraining/torch_ops/attend.h"
#include "mtraining/torch_ops/estimate.h"
#include "mtraining/torch_ops/later_checks.h"

namespace mtraining::torch_ops {
namespace {

using attention::check_tensor;
using attention::shape_text;

constexpr int64_t kBitsAWord = 32;
/// Of a mask in bytes: how many of them are made into bits together.
constexpr int64_t kMostBytes = int64_t{64} << 20;

int64_t blocks_of(int64_t seq_len) { return units_of(seq_len, layout::kBlock); }
int64_t padded(int64_t units) { return units_of(units, kBitsAWord) * kBitsAWord; }

attention::BlockChoice as_choice(const BlockBits& blocks, int64_t seq_len) {
  attention::BlockChoice choice;
  choice.sizes = {static_cast<int>(blocks.bits.size(0)), static_cast<int>(blocks.bits.size(1)),
                  seq_len};
  choice.query_blocks_per_unit = blocks.query_unit;
  choice.key_blocks_per_unit = blocks.key_unit;
  return choice;
}

/// q and k in whole blocks, on one rank that holds the sequence.
struct WholeSequence {
  WholeSequence(const at::Tensor& given_q, const at::Tensor& given_k,
                const at::Tensor& document_starts) {
    check_shapes(given_q, given_k, nullptr);
    const int64_t batch = given_q.size(0), seq_len = given_q.size(1), blocks = blocks_of(seq_len);
    check_what_came(given_q.device());
    if (document_starts.defined()) {
      check_tensor("document_starts", document_starts, {{"B", batch}, {"S", seq_len}}, at::kInt,
                   given_q.device());
      documents = checked_document_starts(document_starts.cpu(), batch, seq_len);
    }
    const auto whole = [&](const at::Tensor& rows) {
      const int64_t missing = blocks * layout::kBlock - seq_len;
      return missing == 0 ? rows.detach()
                          : at::constant_pad_nd(rows.detach(), {0, 0, 0, 0, 0, missing}, 0);
    };
    q = whole(given_q);
    k = whole(given_k);
    for (int64_t block = 0; block < blocks; ++block)
      block_starts.push_back(static_cast<int32_t>(block * layout::kBlock));
    shard.seq_len = seq_len;
    shard.block_starts = block_starts;
  }
  at::Tensor q, k, documents;
  std::vector<int32_t> block_starts;
  attention::BlockShard shard;
};

at::Tensor bits_of(const attention::BlockChoice& choice) {
  for (attention::BlockChoice::Refusal refusal : choice.refusals) {
    const at::Tensor place = std::exchange(refusal.place, {});  // the check keeps no device memory
    check_when_known(place, [refusal](const int64_t* found) { refusal.check(*found); });
  }
  return choice.bits.view(
      {choice.sizes.batch, choice.sizes.num_q_heads, choice.bits.size(1), choice.bits.size(2)});
}

}  // namespace

void check_block_bits(const BlockBits& blocks, int64_t batch, int64_t heads, int64_t seq_len,
                      at::Device device) {
  MT_CHECK_ARG(blocks.query_unit >= 1 && blocks.key_unit >= 1,
               "blocks: expected units of at least 1 block, got ", blocks.query_unit, " and ",
               blocks.key_unit);
  MT_CHECK_ARG(blocks.bits.dim() == 4, "bits: expected [B, H, query units, words] int32, got ",
               shape_text(blocks.bits));
  const int64_t units = units_of(blocks_of(seq_len), blocks.key_unit);
  check_tensor("bits", blocks.bits,
               {{"B", batch},
                {"H", heads},
                {"query units", units_of(blocks_of(seq_len), blocks.query_unit)},
                {"words", units_of(units, kBitsAWord)}},
               at::kInt, device);
}

void check_block_bits(const BlockBits& blocks, int64_t seq_len) {
  MT_CHECK_ARG(blocks.bits.dim() == 4, "bits: expected [B, H, query units, words] int32, got ",
               shape_text(blocks.bits));
  MT_CHECK_ARG(seq_len >= 1, "seq_len: expected at least 1, got ", seq_len);
  check_block_bits(blocks, blocks.bits.size(0), blocks.bits.size(1), seq_len, blocks.bits.device());
}

index::Index from_bits(const BlockBits& blocks, int64_t seq_len) {
  return attention::index_of(as_choice(blocks, seq_len), blocks.bits.contiguous().flatten(0, 1));
}

at::Tensor bits_of_index(const index::Index& index) {
  const int64_t blocks = index.num_blocks(), words = units_of(blocks, kBitsAWord);
  at::Tensor bits = at::zeros({index.batch, index.num_q_heads, blocks, words}, at::kInt);
  auto* const all = reinterpret_cast<uint32_t*>(bits.mutable_data_ptr<int32_t>());
  for (int64_t row = 0; row < int64_t{index.batch} * index.num_q_heads; ++row) {
    for (int64_t q = 0; q < blocks; ++q) {
      for (const int32_t k : index.blocks.row(row, q, blocks))
        all[(row * blocks + q) * words + k / kBitsAWord] |= uint32_t{1} << (k % kBitsAWord);
    }
  }
  return bits;
}

at::Tensor longest_list(const BlockBits& blocks, int64_t seq_len) {
  check_block_bits(blocks, seq_len);
  const index::Index index = from_bits(blocks, seq_len);
  const int64_t rows = blocks.bits.size(0) * blocks.bits.size(1);
  int64_t longest = 0;
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t* begin = index.blocks.row_begin.data() + row * index.num_blocks();
    longest = std::max(longest, begin[index.num_blocks()] - begin[0]);
  }
  return at::scalar_tensor(longest, at::kLong);
}

at::Tensor bits_of_mask(const at::Tensor& mask) {
  MT_CHECK_ARG(mask.dim() == 4 && mask.size(2) == mask.size(3) && mask.numel() > 0 &&
                   mask.scalar_type() == at::kBool,
               "mask: expected [B, H, N, N] bool, none of them 0, got ", shape_text(mask));
  const int64_t rows = mask.size(0) * mask.size(1), units = mask.size(2);
  const at::Tensor heads = mask.reshape({rows * units, units});
  at::Tensor bits =
      at::empty({rows * units, padded(units) / kBitsAWord}, mask.options().dtype(at::kInt));
  const int64_t at_a_time = std::max<int64_t>(1, kMostBytes / (4 * padded(units)));
  for (int64_t row = 0; row < rows * units; row += at_a_time) {
    const int64_t count = std::min(at_a_time, rows * units - row);
    bits.narrow(0, row, count)
        .copy_(attention::packed_bits(
            at::constant_pad_nd(heads.narrow(0, row, count), {0, padded(units) - units}, 0)));
  }
  return bits.view({mask.size(0), mask.size(1), units, -1});
}

at::Tensor bits_of_lists(const at::Tensor& offsets, const at::Tensor& indices) {
  MT_CHECK_ARG(offsets.dim() == 3 && offsets.size(0) >= 1 && offsets.size(1) >= 1 &&
                   offsets.size(2) >= 2 && offsets.scalar_type() == at::kLong,
               "offsets: expected [B, H, N + 1] int64, none of B, H, N 0, got ",
               shape_text(offsets));
  MT_CHECK_ARG(indices.dim() == 1 &&
                   (indices.scalar_type() == at::kInt || indices.scalar_type() == at::kLong),
               "indices: expected [entries] int32, got ", shape_text(indices));
  MT_CHECK_ARG(indices.device() == offsets.device(), "indices: expected device ", offsets.device(),
               " as offsets, got ", indices.device());
  const c10::DeviceGuard guard(offsets.device());
  check_what_came(offsets.device());
  const int64_t batch = offsets.size(0), heads = offsets.size(1), begins = offsets.size(2),
                units = begins - 1, rows = batch * heads, entries = indices.size(0);
  const at::Tensor flat = offsets.flatten();
  const at::Tensor wrong_begin =
      at::cat({flat.narrow(0, 0, 1).lt(0),
               flat.narrow(0, 1, flat.numel() - 1).lt(flat.narrow(0, 0, flat.numel() - 1))})
          .logical_or(flat.gt(entries));
  check_when_known(first_where(wrong_begin, flat), [=](const int64_t* found) {
    MT_CHECK_ARG(found[0] < 0, "offsets[", found[0] / begins / heads, ", ",
                 found[0] / begins % heads, ", ", found[0] % begins,
                 "]: expected ascending offsets in [0, ", entries,
                 "], the entries of indices, got ", found[1]);
  });
  const at::Tensor wrong_index = indices.lt(0).logical_or(indices.ge(units));
  at::Tensor row, block = indices.to(at::kLong);
  if (entries > 0) {
    // Rows of all heads follow one another; the last begin of each head begins none.
    const at::Tensor ascending = std::get<0>(flat.clamp(0, entries).cummax(0)).contiguous();
    const at::Tensor place =
        at::searchsorted(ascending, at::arange(entries, flat.options()), /*out_int32=*/false,
                         /*right=*/true)
            .sub(1);
    const at::Tensor unit = place.clamp_min(0).remainder(begins);
    const at::Tensor listed = place.ge(0).logical_and(unit.lt(units));
    check_when_known(first_where(wrong_index.logical_and(listed), indices),
                     [=](const int64_t* found) {
                       MT_CHECK_ARG(found[0] < 0, "indices[", found[0],
                                    "]: expected a block in [0, ", units, "), got ", found[1]);
                     });
    row = at::where(listed.logical_and(wrong_index.logical_not()),
                    place.clamp_min(0).floor_divide(begins).mul(units).add(unit), -1);
    block = block.clamp(0, units - 1);
  }
  at::Tensor bits =
      at::empty({rows * units, padded(units) / kBitsAWord}, offsets.options().dtype(at::kInt));
  const int64_t at_a_time = std::max<int64_t>(1, kMostBytes / (4 * padded(units)));
  for (int64_t first = 0; first < rows * units; first += at_a_time) {
    const int64_t count = std::min(at_a_time, rows * units - first), cells = count * padded(units);
    at::Tensor chosen = at::zeros({cells + 1}, offsets.options().dtype(at::kByte));
    if (entries > 0) {
      const at::Tensor here = row.ge(first).logical_and(row.lt(first + count));
      const at::Tensor cell = at::where(here, (row - first) * padded(units) + block, cells);
      chosen.scatter_(0, cell, 1);
    }
    bits.narrow(0, first, count)
        .copy_(attention::packed_bits(chosen.narrow(0, 0, cells).view({count, -1})));
  }
  return bits.view({batch, heads, units, -1});
}

pattern::XAttentionOptions xattention_options(int64_t block, int64_t stride, double threshold) {
  pattern::XAttentionOptions options;
  options.block = checked_int("xattention_block", block);
  options.stride = checked_int("xattention_stride", stride);
  options.threshold = threshold;
  pattern::check(options);
  return options;
}
pattern::MobaOptions moba_options(int64_t chunk, int64_t top_k) {
  const pattern::MobaOptions options{.chunk = chunk, .top_k = top_k};
  pattern::check(options);
  return options;
}

at::Tensor choose_xattention(const at::Tensor& q, const at::Tensor& k,
                             const at::Tensor& document_starts, double softmax_scale,
                             const pattern::XAttentionOptions& options) {
  pattern::check(options);
  const c10::DeviceGuard guard(q.device());
  const WholeSequence whole(q, k, document_starts);
  return bits_of(attention::choose_xattention(whole.shard, whole.q, whole.k, softmax_scale,
                                              whole.documents, options));
}

at::Tensor choose_moba(const at::Tensor& q, const at::Tensor& k, const at::Tensor& document_starts,
                       const pattern::MobaOptions& options) {
  pattern::check(options);
  const c10::DeviceGuard guard(q.device());
  const WholeSequence whole(q, k, document_starts);
  return bits_of(attention::choose_moba(whole.shard, whole.q, whole.k, whole.documents, options));
}

}  // namespace mtraining::torch_ops
