#include "mtraining/pattern/device_choice.h"

#include <algorithm>

#include "mtraining/base/check.h"
#include "mtraining/kernels/pattern_cuda/select.h"
#include "mtraining/kernels/pattern_cuda/window.h"
#include "mtraining/pattern/observation.h"

namespace mtraining::pattern {
namespace {

namespace cuda = kernels::pattern_cuda;

constexpr int64_t kBlock = layout::kBlock;

/// Hands out a workspace piece by piece; with no memory it only counts.
class Arena {
 public:
  Arena(void* memory, int64_t bytes) : memory_(static_cast<char*>(memory)), bytes_(bytes) {}
  template <typename T>
  T* take(int64_t count) {
    const int64_t begin = used_;
    used_ += (count * static_cast<int64_t>(sizeof(T)) + 255) / 256 * 256;
    if (memory_ == nullptr) return nullptr;
    MT_CHECK_ARG(used_ <= bytes_, "workspace: expected at least ", used_, " bytes, got ", bytes_);
    return reinterpret_cast<T*>(memory_ + begin);
  }
  int64_t used() const { return used_; }

 private:
  char* memory_;
  int64_t bytes_, used_ = 0;
};

/// Memory of an observation of some rows.
struct ObservationMemory {
  int16_t* rows;
  int32_t* document_start;
  void* scan;
  float* row_max;
  int64_t* row_sum;
};

kernels::WindowParams window_params(const LocalAttention& local, int64_t num_keys, int64_t rows) {
  kernels::WindowParams p;
  p.batch = local.batch;
  p.num_q_heads = local.num_q_heads;
  p.num_kv_heads = local.num_kv_heads;
  p.head_dim = local.head_dim;
  p.dtype = local.dtype;
  p.softmax_scale = local.softmax_scale;
  p.num_rows = rows;
  p.k = local.k;
  p.num_keys = num_keys;
  p.seq_len = local.layout->seq_len();
  return p;
}

ObservationMemory take_observation(Arena& arena, const LocalAttention& local, int64_t rows) {
  const int64_t per_head = local.batch * local.num_q_heads * rows;
  ObservationMemory m;
  m.rows = arena.take<int16_t>(per_head * local.head_dim + 1);  // 4-byte words are exchanged
  m.document_start = arena.take<int32_t>(local.batch * rows);
  m.scan = arena.take<char>(
      cuda::window_workspace_bytes(window_params(local, local.layout->tokens_per_rank(), rows)));
  m.row_max = arena.take<float>(per_head);
  m.row_sum = arena.take<int64_t>(per_head);
  return m;
}

template <typename T>
void sum_over_ranks(comm::Communicator* group, T* values, int64_t count, comm::ElementType type,
                    comm::ReduceOp op = comm::ReduceOp::kSum) {
  if (group == nullptr || group->size() == 1) return;
  group->all_reduce({values, count * static_cast<int64_t>(sizeof(T))}, type, op)->wait();
}

/// Gathers the rows, scans the keys, and leaves maxima and sums of all ranks in the memory.
kernels::WindowParams observe(const LocalAttention& local, int64_t num_keys, const DeviceRows& rows,
                              const DeviceLayout& layout, comm::Communicator* group, void* stream,
                              const ObservationMemory& m, int32_t* status) {
  kernels::WindowParams p = window_params(local, num_keys, rows.count);
  p.stream = stream;
  p.k_block_starts = layout.block_starts;
  p.row_positions = rows.positions;
  cuda::RowsParams gather;
  gather.batch = local.batch;
  gather.num_q_heads = local.num_q_heads;
  gather.head_dim = local.head_dim;
  gather.num_rows = rows.count;
  gather.seq_len = p.seq_len;
  gather.dtype = local.dtype;
  gather.q = local.q;
  gather.row_positions = rows.positions;
  gather.owners = layout.owners;
  gather.cp_rank = local.cp_rank;
  gather.document_start = local.document_starts;
  gather.rows = m.rows;
  gather.row_document_start = m.document_start;
  gather.stream = stream;
  cuda::gather_rows(gather);
  const int64_t elements = local.batch * local.num_q_heads * rows.count * local.head_dim;
  // Zeros of all ranks but the owner leave every bit as it is. An odd last element is summed with what follows it: head_dim is even.
  sum_over_ranks(group, reinterpret_cast<int32_t*>(m.rows), elements / 2,
                 comm::ElementType::kInt32);
  p.q = {m.rows, local.num_q_heads * rows.count * local.head_dim, local.head_dim,
         rows.count * local.head_dim};
  if (local.document_starts != nullptr) p.row_document_start = m.document_start;
  const int64_t outputs = local.batch * local.num_q_heads * rows.count;
  cuda::window_scan(p, m.scan, m.row_max);
  sum_over_ranks(group, m.row_max, outputs, comm::ElementType::kFloat32, comm::ReduceOp::kMax);
  cuda::window_row_sum(p, m.scan, m.row_max, m.row_sum, status);
  // A key that is not finite is seen by the rank that has it.
  sum_over_ranks(group, status, 1, comm::ElementType::kInt32, comm::ReduceOp::kMax);
  sum_over_ranks(group, m.row_sum, outputs, comm::ElementType::kInt64);
  return p;
}

/// Everything that build_vertical_slash_on_device takes from the workspace, in order.
struct ChoiceMemory {
  ObservationMemory observation;
  int64_t *columns, *diagonals;
  uint32_t* bits;
  int32_t* cut;
  void* selection;
};

int64_t heads_per_choice(const LocalAttention& local, const VerticalSlashOptions& options) {
  return options.selection == Selection::kKvGroup ? local.num_q_heads / local.num_kv_heads : 1;
}

ChoiceMemory take_choice(Arena& arena, const LocalAttention& local,
                         const VerticalSlashOptions& options, int64_t num_rows) {
  const int64_t seq_len = local.layout->seq_len(), n = local.layout->tokens_per_rank();
  const int64_t choices = local.batch * local.num_q_heads / heads_per_choice(local, options);
  ChoiceMemory m;
  m.observation = take_observation(arena, local, num_rows);
  m.columns = arena.take<int64_t>(choices * n);
  m.diagonals = arena.take<int64_t>(choices * ((seq_len + kBlock - 1) / kBlock + 1));
  m.bits = arena.take<uint32_t>(choices * ((seq_len + 31) / 32));
  m.cut = arena.take<int32_t>(choices);
  m.selection = arena.take<char>(cuda::KeySelection::workspace_bytes(choices, n));
  return m;
}

}  // namespace

void check_device_choice(const LocalAttention& local, const VerticalSlashOptions& options) {
  check(options);
  MT_CHECK_ARG(local.layout != nullptr, "layout: expected one, got null");
  MT_CHECK_SUPPORTED(local.layout->has_blocks(),
                     "attention.pattern: vertical_slash needs 64 consecutive positions on a rank, "
                     "which layout ",
                     layout::to_string(local.layout->kind()),
                     " has not; use block_striped, zigzag or contiguous");
  MT_CHECK_SUPPORTED(
      options.slash_pooling == SlashPooling::kBlock,
      "slash_pooling: on a GPU \"block\" is supported; build the index on the CPU for "
      "\"paper\" and \"token\"");
  MT_CHECK_SUPPORTED(options.recall_floor == 0,
                     "recall_floor: not supported on a GPU; expected 0, got ",
                     options.recall_floor);
  MT_CHECK_SUPPORTED(heads_per_choice(local, options) * max_window_rows(options) < (1 << 17),
                     "selection: kv_group over ", heads_per_choice(local, options), " heads with ",
                     max_window_rows(options), " rows: their product must stay below ", 1 << 17,
                     " for the masses to fit 62 bits");
}

int64_t device_choice_bytes(const LocalAttention& local, const VerticalSlashOptions& options,
                            int64_t num_rows) {
  Arena arena(nullptr, 0);
  take_choice(arena, local, options, num_rows);
  return arena.used();
}

void build_vertical_slash_on_device(const LocalAttention& local, int64_t num_keys,
                                    const VerticalSlashOptions& options, const DeviceRows& rows,
                                    const DeviceLayout& layout, comm::Communicator* group,
                                    void* workspace, int64_t workspace_bytes, void* stream,
                                    const DeviceIndex& index) {
  check_device_choice(local, options);
  MT_CHECK_ARG(workspace != nullptr, "workspace: expected a pointer, got null");
  const int64_t seq_len = local.layout->seq_len();
  const int64_t num_blocks = (seq_len + kBlock - 1) / kBlock;
  const int64_t shared = heads_per_choice(local, options);
  const int64_t choices = local.batch * local.num_q_heads / shared;
  Arena arena(workspace, workspace_bytes);
  const ChoiceMemory m = take_choice(arena, local, options, rows.count);

  const kernels::WindowParams p =
      observe(local, num_keys, rows, layout, group, stream, m.observation, index.status);
  cuda::window_masses(p, m.observation.row_max, m.observation.row_sum,
                      {.heads_per_choice = shared,
                       .consecutive_rows = rows.consecutive,
                       .columns = m.columns,
                       .diagonals = m.diagonals});
  sum_over_ranks(group, m.diagonals, choices * (num_blocks + 1), comm::ElementType::kInt64);

  cuda::KeySelection keys({.rows = choices,
                           .num_keys = num_keys,
                           .seq_len = seq_len,
                           .masses = m.columns,
                           .block_starts = layout.block_starts,
                           .p = options.p_vertical,
                           .cap = options.max_columns.value_or(-1),
                           .bits = m.bits,
                           .cut = m.cut,
                           .workspace = m.selection,
                           .stream = stream});
  const auto sum = [&](const cuda::Summed& summed) {
    sum_over_ranks(group, summed.values, summed.count, comm::ElementType::kInt64);
  };
  const cuda::Summed first = keys.begin();
  if (group == nullptr || group->size() == 1) {
    keys.finish();
  } else {
    sum(first);
    for (int round = 0; round < keys.rounds(); ++round) sum(keys.round(round));
    keys.mark();
    sum_over_ranks(group, reinterpret_cast<int32_t*>(m.bits), choices * ((seq_len + 31) / 32),
                   comm::ElementType::kInt32);
  }
  cuda::write_choice({.batch = local.batch,
                      .num_q_heads = local.num_q_heads,
                      .seq_len = seq_len,
                      .heads_per_choice = shared,
                      .diagonal_masses = m.diagonals,
                      .p_slash = options.p_slash,
                      .max_diagonals = options.max_diagonals.value_or(-1),
                      .column_bits = m.bits,
                      .columns_cut = m.cut,
                      .local_blocks = options.local_blocks,
                      .sink_tokens = options.sink_tokens,
                      .document_start = local.document_starts,
                      .dense_threshold = options.dense_threshold,
                      .stream = stream},
                     index.lists, index.bits, index.dense_heads, index.caps_hit);
}

int64_t device_recall_bytes(const LocalAttention& local, int64_t rows) {
  Arena arena(nullptr, 0);
  take_observation(arena, local, rows);
  arena.take<int32_t>(1);
  return arena.used();
}

void measure_covered_on_device(const LocalAttention& local, int64_t num_keys,
                               const DeviceRows& rows, const DeviceLayout& layout,
                               comm::Communicator* group, void* workspace, int64_t workspace_bytes,
                               void* stream, const cuda::IndexBits& bits, int64_t* covered) {
  Arena arena(workspace, workspace_bytes);
  const ObservationMemory m = take_observation(arena, local, rows.count);
  const int64_t seq_len = local.layout->seq_len();
  const kernels::WindowParams p =
      observe(local, num_keys, rows, layout, group, stream, m, arena.take<int32_t>(1));
  cuda::window_covered(p, m.row_max, m.row_sum, bits.diagonals,
                       ((seq_len + kBlock - 1) / kBlock + 63) / 64, bits.columns,
                       (seq_len + 31) / 32, covered);
  sum_over_ranks(group, covered, local.batch * local.num_q_heads * rows.count,
                 comm::ElementType::kInt64);
}

}  // namespace mtraining::pattern
