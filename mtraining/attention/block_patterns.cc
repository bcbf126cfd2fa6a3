#include "mtraining/attention/block_patterns.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <utility>
#include <vector>

#include "mtraining/attention/tensors.h"
#include "mtraining/base/error_kinds.h"
#include "mtraining/kernels/window.h"

namespace mtraining::attention {
namespace {

constexpr int64_t kBlock = layout::kBlock;
// Of a matrix of scores: how many query blocks are looked at together.
constexpr int64_t kMostScores = int64_t{1} << 25;

int64_t blocks_of(int64_t tokens, int64_t block = kBlock) { return (tokens + block - 1) / block; }

comm::Communicator* group_of(RingContext::State& state, at::Device device) {
  if (state.layout.cp_size() == 1) return nullptr;
  comm::Communicator* const group =
      device.is_cpu() ? state.index_group.get() : state.device_index_group.get();
  MT_ASSERT(group != nullptr, "no communicator for memory of ", device.str());
  return group;
}

void all_reduce(comm::Communicator* group, at::Tensor& contiguous, comm::ElementType type,
                comm::ReduceOp op = comm::ReduceOp::kSum) {
  if (group != nullptr) group->all_reduce(writable_bytes_of(contiguous), type, op)->wait();
}

/// The first row [B, S, heads, D] that is not finite, sample by sample and head by head; `unit`: what S counts.
BlockChoice::Refusal refusal(const char* name, const char* unit, const at::Tensor& rows) {
  const at::Tensor bad = at::isfinite(rows).all(-1).logical_not_().transpose(1, 2).flatten();
  const at::Tensor place = at::arange(bad.numel(), bad.options().dtype(at::kLong));
  return {at::where(bad, place, bad.numel()).min().view({1}),
          bad.numel(),
          name,
          unit,
          rows.size(2),
          rows.size(1)};
}

/// Of the host's memory, where q and k are, without waiting for the device.
at::Tensor to_device(const at::Tensor& host, at::Device device) {
  if (device.is_cpu()) return host;
  const at::Tensor contiguous = host.contiguous();
  return upload(contiguous.const_data_ptr(), static_cast<int64_t>(contiguous.nbytes()), device)
      .view(host.scalar_type())
      .view(host.sizes());
}

/// Real rows of all ranks in order, [B, N, heads, D].
at::Tensor whole_sequence(const BlockShard& from_rank, const at::Tensor& shard) {
  const int64_t n = from_rank.seq_len;
  if (from_rank.group == nullptr) return shard.narrow(1, 0, n);
  std::vector<int64_t> tokens, positions;
  for (int64_t t = 0; t < std::ssize(from_rank.positions); ++t) {
    if (from_rank.positions[t] >= n) continue;
    tokens.push_back(t);
    positions.push_back(from_rank.positions[t]);
  }
  const at::Tensor from = to_device(at::tensor(tokens, at::kLong), shard.device()),
                   to = to_device(at::tensor(positions, at::kLong), shard.device());
  // Bits are summed as integers: zeros of all ranks but the owner leave every bit as it is.
  at::Tensor whole =
      at::zeros({shard.size(0), n + n % 2, shard.size(2), shard.size(3)}, shard.options());
  whole.index_copy_(1, to, shard.index_select(1, from));
  all_reduce(from_rank.group, whole, comm::ElementType::kInt32);
  return whole.narrow(1, 0, n);
}

/// [N, D] as groups [ceil(N / stride), stride * D], zeros after the end. Queries are put in reverse order, so that a score is one dot
/// product of groups.
at::Tensor groups_of(const at::Tensor& rows, int64_t stride, bool reverse) {
  const int64_t n = rows.size(0), groups = blocks_of(n, stride);
  at::Tensor padded = at::constant_pad_nd(rows, {0, 0, 0, groups * stride - n}, 0)
                          .reshape({groups, stride, rows.size(1)});
  if (reverse) padded = padded.flip(1);
  return padded.reshape({groups, stride * rows.size(1)}).contiguous();
}

at::Tensor products(const at::Tensor& a, const at::Tensor& b) {
  if (a.is_cuda() && (a.scalar_type() == at::kBFloat16 || a.scalar_type() == at::kHalf))
    return at::mm(a, b.t(), at::kFloat).to(at::kDouble);
  return at::mm(a.to(at::kDouble), b.to(at::kDouble).t());
}

int64_t padded(int64_t units) { return (units + 31) / 32 * 32; }

/// Attention by query block and key block of one head, int64 [query blocks of this rank, KB].
class XAttentionHead {
 public:
  XAttentionHead(at::Tensor q_groups, at::Tensor k_groups, const at::Tensor& first_groups,
                 double scale, const pattern::XAttentionOptions& options)
      : q_(std::move(q_groups)),
        k_(std::move(k_groups)),
        first_groups_(first_groups),
        scale_(scale),
        per_block_(options.block / options.stride),
        groups_(k_.size(0)),
        key_blocks_(blocks_of(groups_, per_block_)),
        columns_(at::arange(groups_, k_.options().dtype(at::kLong))) {}

  at::Tensor masses(int64_t first, int64_t step) const {
    const int64_t rows = blocks_of(key_blocks_ - first, step);
    at::Tensor all =
        at::zeros({std::max<int64_t>(rows, 0), key_blocks_}, k_.options().dtype(at::kLong));
    const int64_t at_a_time = std::max<int64_t>(1, kMostScores / (per_block_ * groups_));
    for (int64_t row = 0; row < rows; row += at_a_time) {
      const int64_t count = std::min(at_a_time, rows - row);
      // Groups of these query blocks; those that do not exist are left out at the end.
      at::Tensor groups = ((at::arange(count, columns_.options()) + row) * step + first)
                              .unsqueeze(1)
                              .mul(per_block_)
                              .add(at::arange(per_block_, columns_.options()))
                              .flatten();
      const at::Tensor exists = groups.lt(groups_);
      groups = groups.clamp_max(groups_ - 1);
      at::Tensor scores = products(q_.index_select(0, groups), k_).mul_(scale_);
      at::Tensor hidden = columns_.unsqueeze(0).gt(groups.unsqueeze(1));
      if (first_groups_.defined())
        hidden = hidden.logical_or(
            columns_.unsqueeze(0).lt(first_groups_.index_select(0, groups).unsqueeze(1)));
      scores.masked_fill_(hidden, -INFINITY);
      scores = at::softmax(scores, -1).mul_(exists.unsqueeze(1));
      scores = at::constant_pad_nd(scores, {0, key_blocks_ * per_block_ - groups_}, 0)
                   .view({count, per_block_, key_blocks_, per_block_})
                   .sum({1, 3});
      all.narrow(0, row, count).copy_(scores.mul_(static_cast<double>(kernels::kMassOne)).round_());
    }
    return all;
  }

 private:
  at::Tensor q_, k_, first_groups_;
  double scale_;
  int64_t per_block_, groups_, key_blocks_;
  at::Tensor columns_;
};

}  // namespace

at::Tensor packed_bits(const at::Tensor& chosen) {
  const at::TensorOptions ints = chosen.options().dtype(at::kInt);
  const at::Tensor weights = at::ones({32}, ints).bitwise_left_shift(at::arange(32, ints));
  return chosen.view({chosen.size(0), -1, 32})
      .to(at::kInt)
      .mul_(weights)
      .sum({-1}, false, at::kInt);
}

at::Tensor best_blocks(const at::Tensor& masses, const at::Tensor& sinks, int64_t first,
                       int64_t step, double threshold) {
  const int64_t rows = masses.size(0), key_blocks = masses.size(1);
  const at::TensorOptions longs = masses.options();
  const at::Tensor own = at::arange(rows, longs).mul(step).add(first).unsqueeze(1),
                   sink = sinks.unsqueeze(1), block = at::arange(key_blocks, longs).unsqueeze(0);
  const at::Tensor forced = block.eq(own).logical_or(block.eq(sink));
  const at::Tensor total = masses.sum(-1, /*keepdim=*/true);
  // pattern::top_p_threshold.
  at::Tensor wanted = at::zeros_like(total);
  if (threshold > 0) {
    const at::Tensor product = at::ceil(total.to(at::kDouble).mul(threshold));
    wanted = at::where(product.ge(total.to(at::kDouble)), total, product.to(at::kLong));
  }
  const at::Tensor between = block.gt(sink).logical_and(block.lt(own));
  const auto [mass, order] =
      masses.masked_fill(between.logical_not(), -1).sort(/*stable=*/true, -1, /*descending=*/true);
  const at::Tensor counted = mass.clamp_min(0);
  const at::Tensor held_before = masses.mul(forced).sum(-1, true) + counted.cumsum(-1) - counted;
  const at::Tensor taken = mass.ge(0).logical_and(held_before.lt(wanted));
  return forced.scatter(-1, order, taken).logical_or(forced);
}

BlockChoice choose_xattention(const BlockShard& shard, const at::Tensor& q, const at::Tensor& k,
                              double softmax_scale, const at::Tensor& document_starts,
                              const pattern::XAttentionOptions& options) {
  pattern::check(options);
  const int64_t n = shard.seq_len, batch = q.size(0), heads = q.size(2);
  const int64_t shared = heads / k.size(2), stride = options.stride;
  const int64_t wide = options.block / kBlock, query_blocks = blocks_of(n, options.block);
  const at::Tensor whole_q = whole_sequence(shard, q), whole_k = whole_sequence(shard, k);
  const double scale =
      (softmax_scale > 0 ? softmax_scale : 1 / std::sqrt(static_cast<double>(q.size(3)))) /
      static_cast<double>(stride);
  const int64_t first = shard.cp_rank, step = shard.cp_size;

  BlockChoice choice;
  choice.sizes = {static_cast<int>(batch), static_cast<int>(heads), n};
  choice.query_blocks_per_unit = choice.key_blocks_per_unit = wide;
  choice.most_key_blocks = blocks_of(n);
  choice.refusals = {refusal("q", "position", whole_q), refusal("k", "position", whole_k)};
  choice.bits = at::empty({batch * heads, query_blocks, padded(query_blocks) / 32},
                          q.options().dtype(at::kInt));
  at::Tensor k_groups;
  for (int64_t r = 0; r < batch * heads; ++r) {
    const int64_t b = r / heads, h = r % heads;
    if (r % shared == 0)
      k_groups = groups_of(whole_k.select(0, b).select(1, h / shared), stride, false);
    at::Tensor first_groups, sinks = at::zeros({query_blocks}, q.options().dtype(at::kLong));
    if (document_starts.defined()) {
      const at::Tensor starts = document_starts[b].to(at::kLong);
      first_groups = to_device(starts.slice(0, 0, n, stride).floor_divide(stride), q.device());
      sinks =
          to_device(starts.slice(0, 0, n, options.block).floor_divide(options.block), q.device());
    }
    const XAttentionHead head(groups_of(whole_q.select(0, b).select(1, h), stride, true), k_groups,
                              first_groups, scale, options);
    // Later query blocks cost more: dealt out in turn.
    at::Tensor chosen =
        at::zeros({query_blocks, padded(query_blocks)}, q.options().dtype(at::kByte));
    if (first < query_blocks) {
      const at::Tensor own =
          best_blocks(head.masses(first, step), sinks.slice(0, first, query_blocks, step), first,
                      step, options.threshold);
      chosen.slice(0, first, query_blocks, step).narrow(1, 0, query_blocks).copy_(own);
    }
    all_reduce(shard.group, chosen, comm::ElementType::kInt32);
    choice.bits.select(0, r).copy_(packed_bits(chosen));
  }
  return choice;
}

BlockChoice choose_moba(const BlockShard& shard, const at::Tensor& q, const at::Tensor& k,
                        const at::Tensor& document_starts, const pattern::MobaOptions& options) {
  pattern::check(options);
  const int64_t n = shard.seq_len, blocks = blocks_of(n), batch = q.size(0), heads = q.size(2),
                kv_heads = k.size(2), dim = q.size(3);
  const int64_t per_chunk = options.chunk / kBlock, chunks = blocks_of(blocks, per_chunk);
  const at::TensorOptions longs = q.options().dtype(at::kLong);

  // This rank's blocks that hold real tokens, and where they are in the sequence.
  std::vector<int64_t> local, global;
  const std::span<const int32_t> starts = shard.block_starts;
  for (int64_t i = 0; i < std::ssize(starts); ++i) {
    if (starts[i] >= n) continue;
    local.push_back(i);
    global.push_back(starts[i] / kBlock);
  }
  const int64_t own_blocks = std::ssize(local);
  const at::Tensor from = to_device(at::tensor(local, at::kLong), q.device()),
                   to = to_device(at::tensor(global, at::kLong), q.device());
  const at::Tensor real = (n - to * kBlock).clamp_max(kBlock);  // tokens of each block
  const at::Tensor is_real = at::arange(kBlock, longs)
                                 .unsqueeze(0)
                                 .lt(real.unsqueeze(1))
                                 .view({1, own_blocks, kBlock, 1, 1});
  // [B, own blocks, heads, D] sums; padding may hold anything.
  const auto sums = [&](const at::Tensor& rows) {
    return at::where(is_real,
                     rows.reshape({batch, -1, kBlock, rows.size(2), dim})
                         .index_select(1, from)
                         .to(at::kDouble),
                     0.0)
        .sum(2);
  };
  at::Tensor key_sums = at::zeros({batch, blocks, kv_heads, dim}, longs.dtype(at::kDouble));
  key_sums.index_copy_(1, to, sums(k));
  all_reduce(shard.group, key_sums, comm::ElementType::kFloat64);
  BlockChoice choice;
  choice.sizes = {static_cast<int>(batch), static_cast<int>(heads), n};
  choice.key_blocks_per_unit = per_chunk;
  choice.most_key_blocks = std::min(blocks, options.top_k * per_chunk);
  choice.refusals = {refusal("k", "block", key_sums)};
  // [B, H, chunks, D]
  const at::Tensor key_means =
      at::constant_pad_nd(key_sums, {0, 0, 0, 0, 0, chunks * per_chunk - blocks}, 0)
          .view({batch, chunks, per_chunk, kv_heads, dim})
          .sum(2)
          .div_(static_cast<double>(options.chunk))
          .permute({0, 2, 1, 3})
          .repeat_interleave(heads / kv_heads, 1);
  const at::Tensor query_means =
      (sums(q) / real.to(at::kDouble).view({1, own_blocks, 1, 1})).permute({0, 2, 1, 3});
  // +0 makes one zero of two. [B, H, own blocks, chunks]
  at::Tensor gates = at::matmul(query_means, key_means.transpose(-1, -2)) + 0.0;

  const at::Tensor chunk = at::arange(chunks, longs),
                   own_chunk = to.floor_divide(per_chunk).view({1, 1, own_blocks, 1});
  at::Tensor first_chunk = at::zeros({batch, 1, own_blocks, 1}, longs);
  if (document_starts.defined()) {
    first_chunk = to_device(document_starts, q.device())
                      .to(at::kLong)
                      .index_select(1, to * kBlock)
                      .floor_divide(options.chunk)
                      .view({batch, 1, own_blocks, 1});
  }
  const at::Tensor before = chunk.ge(first_chunk).logical_and(chunk.lt(own_chunk));
  at::Tensor fault =
      before.logical_and(at::isfinite(gates).logical_not()).any().to(at::kLong).view({1});
  all_reduce(shard.group, fault, comm::ElementType::kInt64, comm::ReduceOp::kMax);
  choice.refusals.push_back({1 - fault, 1, "q"});
  gates = gates.masked_fill(before.logical_not(), -INFINITY);
  const auto [gate, order] = gates.sort(/*stable=*/true, -1, /*descending=*/true);
  const at::Tensor taken = gate.gt(-INFINITY).logical_and(chunk.lt(options.top_k - 1));
  const at::Tensor chosen_chunks = at::zeros(gates.sizes(), longs.dtype(at::kBool))
                                       .scatter(-1, order, taken)
                                       .logical_or(chunk.eq(own_chunk));

  choice.bits =
      at::empty({batch * heads, blocks, padded(chunks) / 32}, q.options().dtype(at::kInt));
  for (int64_t r = 0; r < batch * heads; ++r) {
    at::Tensor chosen = at::zeros({blocks, padded(chunks)}, longs.dtype(at::kByte));
    chosen.narrow(1, 0, chunks)
        .index_copy_(0, to, chosen_chunks[r / heads][r % heads].to(at::kByte));
    all_reduce(shard.group, chosen, comm::ElementType::kInt32);
    choice.bits.select(0, r).copy_(packed_bits(chosen));
  }
  return choice;
}

namespace {

BlockShard shard_of(RingContext::State& state, at::Device device) {
  return {.seq_len = state.layout.seq_len(),
          .cp_rank = state.cp_rank,
          .cp_size = state.layout.cp_size(),
          .block_starts = state.block_starts[state.cp_rank],
          .positions = state.positions,
          .group = group_of(state, device)};
}

}  // namespace

BlockChoice choose_xattention(RingContext::State& state, const at::Tensor& q, const at::Tensor& k,
                              double softmax_scale, const at::Tensor& document_starts,
                              const pattern::XAttentionOptions& options) {
  return choose_xattention(shard_of(state, q.device()), q, k, softmax_scale, document_starts,
                           options);
}

BlockChoice choose_moba(RingContext::State& state, const at::Tensor& q, const at::Tensor& k,
                        const at::Tensor& document_starts, const pattern::MobaOptions& options) {
  return choose_moba(shard_of(state, q.device()), q, k, document_starts, options);
}

void BlockChoice::Refusal::check(int64_t place) const {
  if (place == none) return;
  MT_CHECK_FINITE(unit != nullptr, name, ": expected finite values, got NaN or inf");
  MT_CHECK_FINITE(false, name, ": expected finite values, got NaN or inf at sample ",
                  place / units / heads, ", head ", place / units % heads, ", ", unit, " ",
                  place % units);
}

index::Index index_of(const BlockChoice& choice, const at::Tensor& host_bits) {
  const int64_t rows = host_bits.size(0), words = host_bits.size(2), units = host_bits.size(1),
                blocks = blocks_of(choice.sizes.seq_len);
  const int64_t wide = choice.key_blocks_per_unit;
  const auto* bits = reinterpret_cast<const uint32_t*>(host_bits.const_data_ptr<int32_t>());
  int64_t room = 0;
  for (int64_t i = 0; i < host_bits.numel(); ++i) room += std::popcount(bits[i]);
  index::BlockRows lists;
  lists.row_begin.reserve(rows * blocks + 1);
  lists.row_begin.push_back(0);
  lists.key_blocks.resize(room * choice.query_blocks_per_unit * wide);
  int32_t* next = lists.key_blocks.data();
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t q = 0; q < blocks; ++q) {
      const uint32_t* row = bits + (r * units + q / choice.query_blocks_per_unit) * words;
      for (int64_t w = 0; w <= q / wide / 32; ++w) {
        for (uint32_t left = row[w]; left != 0; left &= left - 1) {
          const int64_t first = (w * 32 + std::countr_zero(left)) * wide;
          const int64_t end = std::min(first + wide, q + 1);
          for (int64_t block = first; block < end; ++block) *next++ = static_cast<int32_t>(block);
        }
      }
      lists.row_begin.push_back(next - lists.key_blocks.data());
    }
  }
  lists.key_blocks.resize(next - lists.key_blocks.data());
  return index::make_block_index(choice.sizes.batch, choice.sizes.num_q_heads, choice.sizes.seq_len,
                                 std::move(lists));
}

namespace {

index::Index awaited(const BlockChoice& choice) {
  for (const BlockChoice::Refusal& refusal : choice.refusals)
    refusal.check(refusal.place.item<int64_t>());
  return index_of(choice, choice.bits.cpu());
}

}  // namespace

index::Index xattention_by_tensors(RingContext::State& state, const at::Tensor& q,
                                   const at::Tensor& k, double softmax_scale,
                                   const at::Tensor& document_starts,
                                   const pattern::XAttentionOptions& options) {
  return awaited(choose_xattention(state, q, k, softmax_scale, document_starts, options));
}

index::Index moba_by_tensors(RingContext::State& state, const at::Tensor& q, const at::Tensor& k,
                             const at::Tensor& document_starts,
                             const pattern::MobaOptions& options) {
  return awaited(choose_moba(state, q, k, document_starts, options));
}

}  // namespace mtraining::attention
