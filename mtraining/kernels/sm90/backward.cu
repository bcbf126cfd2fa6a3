// Checks and launches of the Hopper backward.
#include <algorithm>
#include <utility>

#include "mtraining/base/check.h"
#include "mtraining/kernels/sm90/backward.h"
#include "mtraining/kernels/sm90/backward_args.cuh"
#include "mtraining/kernels/validate.h"

namespace mtraining::kernels::sm90 {
namespace {

constexpr int64_t kCounterBytes = 256;
// As in the forward: keys beyond about half of L2, and the heads of one kv head are done before the next one's.
constexpr int64_t kGroupAboveBytes = int64_t{24} << 20;
constexpr int64_t kColumnQueryBlocks = 128, kLeastColumnQueryBlocks = 32;
constexpr int64_t kStagesPerItem = 256, kLeastStagesPerItem = 32, kItemsPerSm = 8;

int64_t blocks_of(int64_t tokens) { return (tokens + kBlock - 1) / kBlock; }

/// Where the parts of the workspace begin.
struct Workspace {
  int64_t statistics, query_bounds, gathered, gathered_dk, gathered_dv, bytes;
};

Workspace layout_of(const BackwardParams& p) {
  const int64_t rows = p.batch * p.num_q_heads, blocks = rows * blocks_of(p.num_queries);
  const int64_t gathered = rows * most_gathered_rows(p) * p.head_dim;  // elements
  Workspace w;
  w.statistics = kCounterBytes;
  w.query_bounds = w.statistics + blocks * 128 * 4;
  w.gathered = round_up(w.query_bounds + blocks * 16, 256);
  w.gathered_dk = w.gathered + round_up(2 * gathered * 2, 256);
  w.gathered_dv = w.gathered_dk + gathered * 4;
  w.bytes = w.gathered_dv + gathered * 4;
  return w;
}

BackwardLauncher launcher(DType dtype, int64_t head_dim) {
  if (dtype == DType::kBFloat16 && head_dim == 128) return launch_backward_bf16_d128;
  if (dtype == DType::kBFloat16 && head_dim == 64) return launch_backward_bf16_d64;
  if (dtype == DType::kFloat16 && head_dim == 128) return launch_backward_fp16_d128;
  if (dtype == DType::kFloat16 && head_dim == 64) return launch_backward_fp16_d64;
  return nullptr;
}

QueryLauncher query_launcher(DType dtype, int64_t head_dim) {
  if (dtype == DType::kBFloat16)
    return head_dim == 128 ? launch_queries_bf16_d128 : launch_queries_bf16_d64;
  return head_dim == 128 ? launch_queries_fp16_d128 : launch_queries_fp16_d64;
}

void check_types(const BackwardParams& p) {
  MT_CHECK_SUPPORTED(launcher(p.dtype, p.head_dim) != nullptr,
                     "sm90 backward: expected bf16 or fp16 with head_dim 64 or 128, got dtype ",
                     static_cast<int>(p.dtype), " with head_dim ", p.head_dim);
}

void check_params(const BackwardParams& p) {
  check_types(p);
  check_sizes(p);
  MT_CHECK_SUPPORTED(p.batch < 32768 && p.num_q_heads < 65536,
                     "sm90 backward: expected a batch below 32768 and fewer than 65536 heads, got ",
                     p.batch, " and ", p.num_q_heads);
  for (int s = 0; s < p.num_sources; ++s) {
    const KeySource& source = p.sources[s];
    for (const View& view : {source.dk, source.dv}) {
      MT_CHECK_SUPPORTED(reinterpret_cast<uintptr_t>(view.data) % 8 == 0 &&
                             view.stride_batch % 2 == 0 && view.stride_token % 2 == 0 &&
                             view.stride_head % 2 == 0,
                         "sm90 backward: source ", s,
                         ": dk, dv: expected 8-byte aligned memory and even strides, got strides ",
                         view.stride_batch, ", ", view.stride_token, ", ", view.stride_head);
    }
    MT_CHECK_SUPPORTED(
        source.blocks.kind != BlockListKind::kCsr || source.num_keys == 0 ||
            source.blocks.key_row_begin != nullptr,
        "sm90 backward: source ", s,
        ": CSR lists need their transpose (blocks.key_row_begin, blocks.query_blocks), got null");
  }
  check_rounded_rows("dq_rounded", p.dq_rounded);
  const int64_t needed = backward_workspace_bytes(p);
  MT_CHECK_ARG(p.workspace != nullptr && p.workspace_bytes >= needed &&
                   reinterpret_cast<uintptr_t>(p.workspace) % 256 == 0,
               "sm90 backward: expected a 256-byte aligned workspace of ", needed, " bytes, got ",
               p.workspace_bytes, " at ", p.workspace);
}

/// Statistics and bounds of the query blocks, gathered columns; resets both queues. args.gather is filled.
void prepare(const BackwardParams& p, const Workspace& w, PrepareArgs& args) {
  char* memory = static_cast<char*>(p.workspace);
  args.lse = static_cast<const float*>(p.lse);
  args.delta = static_cast<const float*>(p.delta);
  args.q_block_starts = p.q_block_starts;
  args.document_start = p.document_start;
  args.document_stride_batch = p.document_stride_batch;
  args.num_heads = static_cast<int32_t>(p.num_q_heads);
  args.num_rows = static_cast<int32_t>(p.batch * p.num_q_heads);
  args.num_queries = static_cast<int32_t>(p.num_queries);
  args.num_q_blocks = static_cast<int32_t>(blocks_of(p.num_queries));
  args.seq_len = static_cast<int32_t>(p.seq_len);
  args.position_stride = static_cast<int32_t>(p.position_stride);
  // fp16 applies the scale last: see KeyConsumer.
  args.delta_scale = p.dtype == DType::kFloat16 ? 1.0f : static_cast<float>(p.softmax_scale);
  args.statistics = reinterpret_cast<float*>(memory + w.statistics);
  args.query_bounds = reinterpret_cast<int4*>(memory + w.query_bounds);
  args.counters = reinterpret_cast<int32_t*>(memory);
  check_cuda(launch_prepare(args, static_cast<cudaStream_t>(p.stream)), "preparing rows");
}

/// Adds the gradients of the gathered columns of sources[first, last) to those of their keys.
void scatter(const BackwardParams& p, const BackwardArgs& from, int first, int last) {
  ScatterArgs args;
  args.num_sources = 0;
  int64_t max_capacity = 0;
  for (int s = first; s < last; ++s) {
    const ColumnLists& columns = p.sources[s].columns;
    if (columns.counts == nullptr || columns.capacity == 0) continue;
    const GradientArgs& to = from.gradients[s - first];
    args.sources[args.num_sources++] = {to.dk,
                                        to.dv,
                                        to.dk_stride_batch,
                                        to.dk_stride_token,
                                        to.dk_stride_head,
                                        to.dv_stride_batch,
                                        to.dv_stride_token,
                                        to.dv_stride_head,
                                        columns.key_rows,
                                        columns.positions,
                                        columns.counts,
                                        columns.capacity,
                                        from.sources[s - first].gathered_begin};
    max_capacity = std::max(max_capacity, columns.capacity);
  }
  if (args.num_sources == 0) return;
  args.num_heads = from.num_heads;
  args.heads_per_kv_head = from.heads_per_kv_head;
  args.num_rows = from.num_rows;
  args.head_dim = static_cast<int32_t>(p.head_dim);
  args.gathered_rows = from.gathered_rows;
  args.gathered_dk = from.gathered_dk;
  args.gathered_dv = from.gathered_dv;
  check_cuda(launch_scatter_columns(args, max_capacity, static_cast<cudaStream_t>(p.stream)),
             "adding the gradients of columns");
}

/// dq alone, from the same sources and gathered columns, in the order of their lists.
void queries(const BackwardParams& p, const BackwardArgs& from, int64_t keys_bytes, bool beside,
             int num_sms) {
  QueryArgs args = {};
  args.q = from.q;
  args.dout = from.dout;
  args.gathered_k = from.gathered_k;
  args.gathered_v = from.gathered_v;
  std::copy_n(from.sources, from.num_sources, args.sources);
  args.num_sources = from.num_sources;
  args.num_heads = from.num_heads;
  args.heads_per_kv_head = from.heads_per_kv_head;
  args.num_rows = from.num_rows;
  args.num_queries = from.num_queries;
  args.num_q_blocks = from.num_q_blocks;
  args.group_rows = keys_bytes > kGroupAboveBytes ? args.heads_per_kv_head : args.num_rows;
  args.gathered_rows = from.gathered_rows;
  args.q_head_step = from.q_head_step;
  args.q_batch_step = from.q_batch_step;
  args.dout_head_step = from.dout_head_step;
  args.dout_batch_step = from.dout_batch_step;
  args.seq_len = from.seq_len;
  args.position_stride = from.position_stride;
  args.q_block_starts = p.q_block_starts;
  args.document_start = from.document_start;
  args.document_stride_batch = from.document_stride_batch;
  args.diagonal_bits = from.diagonal_bits;
  args.diagonal_words = from.diagonal_words;
  args.scale_log2 = from.scale_log2;
  args.scale = from.scale;
  args.statistics = from.statistics;
  args.dq = static_cast<float*>(p.dq.data);
  args.dq_stride_batch = p.dq.stride_batch;
  args.dq_stride_token = p.dq.stride_token;
  args.dq_stride_head = p.dq.stride_head;
  args.rounded = device::half_rows_of(p.dq_rounded);
  args.next_item = from.next_item + 1;
  check_cuda(query_launcher(p.dtype, p.head_dim)(args, beside, num_sms,
                                                 static_cast<cudaStream_t>(p.stream)),
             "launching dq");
}

/// How many of the query heads of a kv head an item of key blocks walks. One after the other, SMs drift apart, and queries that
/// neighbouring key blocks share leave L2 in between; items should still be long beside the storing of dk and dv, and several an SM.
/// items: with all of the heads.
int32_t heads_per_item(const BackwardParams& p, int first, int last, int64_t items, int num_sms) {
  const int64_t parts = (kItemsPerSm * num_sms + items - 1) / std::max<int64_t>(items, 1);
  const int64_t group = p.num_q_heads / p.num_kv_heads;
  const int64_t most = std::max<int64_t>(1, group / std::max<int64_t>(parts, 1));
  int64_t stages = 1;  // of a head, at most
  for (int s = first; s < last; ++s) {
    const BlockLists& blocks = p.sources[s].blocks;
    if (blocks.kind == BlockListKind::kCsr) return static_cast<int32_t>(most);  // not known here
    if (blocks.kind == BlockListKind::kEntries) stages = std::max(stages, blocks.capacity + 1);
  }
  stages = std::min(stages, blocks_of(p.num_queries));
  const int64_t least = std::min(group, (kLeastStagesPerItem + stages - 1) / stages);
  return static_cast<int32_t>(
      std::max(least, std::min(most, (kStagesPerItem + stages - 1) / stages)));
}

/// One launch over sources[first, last).
void backward_range(const BackwardParams& p, const Workspace& w, int first, int last, int num_sms) {
  BackwardArgs args = {};
  char* memory = static_cast<char*>(p.workspace);
  const int64_t rows = p.batch * p.num_q_heads;
  args.q = tensor_map("q", p.q, p.dtype, p.head_dim, p.num_queries, p.num_q_heads, p.batch);
  args.dout =
      tensor_map("dout", p.dout, p.dtype, p.head_dim, p.num_queries, p.num_q_heads, p.batch);
  const bool adds_dq = p.dq_rounded.data == nullptr;
  if (adds_dq)
    args.dq = gradient_map("dq", p.dq, p.head_dim, p.num_queries, p.num_q_heads, p.batch);
  args.num_sources = last - first;
  args.num_heads = static_cast<int32_t>(p.num_q_heads);
  args.heads_per_kv_head = static_cast<int32_t>(p.num_q_heads / p.num_kv_heads);
  args.num_kv_heads = static_cast<int32_t>(p.num_kv_heads);
  args.num_rows = static_cast<int32_t>(rows);
  args.num_queries = static_cast<int32_t>(p.num_queries);
  args.num_q_blocks = static_cast<int32_t>(blocks_of(p.num_queries));
  args.q_head_step = p.q.stride_head != 0;
  args.q_batch_step = p.q.stride_batch != 0;
  args.dout_head_step = p.dout.stride_head != 0;
  args.dout_batch_step = p.dout.stride_batch != 0;
  args.seq_len = static_cast<int32_t>(p.seq_len);
  args.position_stride = static_cast<int32_t>(p.position_stride);
  args.document_start = p.document_start;
  args.document_stride_batch = p.document_stride_batch;
  args.diagonal_bits = p.diagonal_bits;
  args.diagonal_words = p.diagonal_words;
  args.scale_log2 = static_cast<float>(p.softmax_scale * 1.4426950408889634);
  args.scale = static_cast<float>(p.softmax_scale);
  args.statistics = reinterpret_cast<const float*>(memory + w.statistics);
  args.query_bounds = reinterpret_cast<const int4*>(memory + w.query_bounds);
  args.gathered_dk = reinterpret_cast<float*>(memory + w.gathered_dk);
  args.gathered_dv = reinterpret_cast<float*>(memory + w.gathered_dv);
  args.next_item = reinterpret_cast<int32_t*>(memory);
  int64_t block_pairs = 0, column_tiles = 0;
  for (int s = first; s < last; ++s) {
    const KeySource& source = p.sources[s];
    args.gradients[s - first] = {static_cast<float*>(source.dk.data),
                                 static_cast<float*>(source.dv.data),
                                 source.dk.stride_batch,
                                 source.dk.stride_token,
                                 source.dk.stride_head,
                                 source.dv.stride_batch,
                                 source.dv.stride_token,
                                 source.dv.stride_head};
    if (source.blocks.kind != BlockListKind::kNone && source.num_keys > 0) {
      block_pairs = std::max(block_pairs, (source.num_keys + 127) / 128);
      args.block_sources[args.num_block_sources++] = static_cast<uint8_t>(s - first);
    }
    if (source.columns.counts != nullptr && source.columns.capacity > 0) {
      column_tiles = std::max(column_tiles, (source.columns.capacity + 127) / 128);
      args.column_sources[args.num_column_sources++] = static_cast<uint8_t>(s - first);
    }
  }
  // One item for all queries of a column tile gives one order of its sums. Otherwise short ones, last: long ones would leave SMs
  // idle at the end, or, first, leave the SMs' walks over key blocks out of step and their queries out of L2.
  args.columns_first = p.deterministic ? 1 : 0;
  // Four items an SM where there are so few.
  const int64_t for_four =
      column_tiles * args.num_column_sources * rows * args.num_q_blocks / (4 * num_sms);
  const int64_t column_q_blocks = std::clamp(for_four, kLeastColumnQueryBlocks, kColumnQueryBlocks);
  args.column_q_blocks =
      p.deterministic ? args.num_q_blocks
                      : static_cast<int32_t>(std::min<int64_t>(args.num_q_blocks, column_q_blocks));
  const int64_t chunks = (args.num_q_blocks + args.column_q_blocks - 1) / args.column_q_blocks;
  const int64_t column_items = column_tiles * args.num_column_sources * rows * chunks;
  const int64_t whole_items = block_pairs * args.num_block_sources * p.batch * p.num_kv_heads;
  args.heads_per_item = p.deterministic ? args.heads_per_kv_head
                                        : heads_per_item(p, first, last, whole_items, num_sms);
  args.head_parts = (args.heads_per_kv_head + args.heads_per_item - 1) / args.heads_per_item;
  const int64_t items = column_items + whole_items * args.head_parts;
  MT_CHECK_SUPPORTED(items < (int64_t{1} << 31) - 4096,
                     "sm90 backward: expected fewer than 2^31 pairs of key blocks, got ", items);
  args.block_pairs = static_cast<int32_t>(block_pairs);
  args.column_tiles = static_cast<int32_t>(column_tiles);
  args.column_items = static_cast<int32_t>(column_items);
  args.num_items = static_cast<int32_t>(items);
  if (items == 0 && adds_dq) return;
  PrepareArgs before;
  args.gathered_rows =
      static_cast<int32_t>(plan_sources(p, first, last, memory + w.gathered, args.sources,
                                        &before.gather, &args.gathered_k, &args.gathered_v));
  // Where a column tile's queries are several items, each adds its part.
  const bool parts = column_items > 0 && chunks > 1;
  before.gathered_dk = parts ? args.gathered_dk : nullptr;
  before.gathered_dv = parts ? args.gathered_dv : nullptr;
  prepare(p, w, before);
  if (items > 0)
    check_cuda(launcher(p.dtype, p.head_dim)(args, !p.deterministic, num_sms,
                                             static_cast<cudaStream_t>(p.stream)),
               "launching");
  // SMs that have no keys left begin with queries, unless some are to be left alone.
  const bool beside = items > 0 && p.sm_margin <= 0;
  if (p.deterministic) queries(p, args, keys_bytes(p, first, last), beside, num_sms);
  scatter(p, args, first, last);
}

}  // namespace

int64_t backward_workspace_bytes(const BackwardParams& params) { return layout_of(params).bytes; }

bool rounds_dq(const BackwardParams& params) {
  return params.deterministic && params.num_sources <= kMaxSources;
}

void backward(const BackwardParams& params) {
  check(params, rounds_dq(params));
  check_params(params);
  if (params.batch == 0 || params.num_queries == 0) return;
  const int num_sms = multiprocessors(params);
  const Workspace workspace = layout_of(params);
  // Without any source dq_rounded is still to be written.
  int first = 0;
  do {
    const int last = std::min(first + kMaxSources, params.num_sources);
    backward_range(params, workspace, first, last, num_sms);
    first = last;
  } while (first < params.num_sources);
}

void delta(const BackwardParams& p, const RoundedOut& out, void* delta) {
  check_delta(p, out, delta);
  check_types(p);
  check_sizes(p);
  if (p.batch == 0 || p.num_queries == 0) return;
  for (const auto& [name, view] :
       {std::pair{"dout", &p.dout}, {"out.rounded", &out.rounded}, {"out.residual", &out.residual}})
    check_rounded_rows(name, *view);
  DeltaArgs args;
  args.dout = p.dout;
  args.rounded = out.rounded;
  args.residual = out.residual;
  args.lse = static_cast<const float*>(p.lse);
  args.delta = static_cast<float*>(delta);
  args.num_heads = static_cast<int32_t>(p.num_q_heads);
  args.num_rows = static_cast<int32_t>(p.batch * p.num_q_heads);
  args.num_queries = static_cast<int32_t>(p.num_queries);
  check_cuda(launch_delta(args, p.dtype, static_cast<int>(p.head_dim),
                          static_cast<cudaStream_t>(p.stream)),
             "computing delta");
}

}  // namespace mtraining::kernels::sm90
