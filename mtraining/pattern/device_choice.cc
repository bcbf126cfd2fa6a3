#include "mtraining/pattern/device_choice.h"

#include <algorithm>

#include "mtraining/base/check.h"
#include "mtraining/base/error_kinds.h"
#include "mtraining/kernels/pattern_cuda/choose.h"
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

/// Memory of an observation of some rows. Sums lie where a launch before them zeroes memory.
struct ObservationMemory {
  int16_t* rows;
  int32_t* document_start;
  void* scan;
  float* row_max;
  int64_t* row_sum;
  int64_t* fault;
};

bool is_alone(comm::Communicator* group) { return group == nullptr || group->size() == 1; }

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

/// All but what is zeroed.
ObservationMemory take_observation(Arena& arena, const LocalAttention& local, int64_t rows) {
  const int64_t per_head = local.batch * local.num_q_heads * rows;
  ObservationMemory m = {};
  m.rows = arena.take<int16_t>(per_head * local.head_dim + 1);  // 4-byte words are exchanged
  m.document_start = arena.take<int32_t>(local.batch * rows);
  m.scan = arena.take<char>(
      cuda::window_workspace_bytes(window_params(local, local.layout->tokens_per_rank(), rows)));
  m.row_max = arena.take<float>(per_head);
  return m;
}
void take_zeroed(Arena& arena, const LocalAttention& local, int64_t rows, ObservationMemory& m) {
  m.row_sum = arena.take<int64_t>(local.batch * local.num_q_heads * rows);
  m.fault = arena.take<int64_t>(1);
}

template <typename T>
void sum_over_ranks(comm::Communicator* group, T* values, int64_t count, comm::ElementType type,
                    comm::ReduceOp op = comm::ReduceOp::kSum) {
  if (is_alone(group)) return;
  group->all_reduce({values, count * static_cast<int64_t>(sizeof(T))}, type, op)->wait();
}

/// Gathers the rows, sets memory, scans the keys, and leaves maxima and sums of all ranks in the memory.
kernels::WindowParams observe(const LocalAttention& local, int64_t num_keys, const DeviceRows& rows,
                              const DeviceLayout& layout, comm::Communicator* group, void* stream,
                              const ObservationMemory& m,
                              std::initializer_list<cuda::Region> regions) {
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
  const int64_t outputs = local.batch * local.num_q_heads * rows.count;
  gather.regions[gather.num_regions++] = {m.row_max, outputs * 4, cuda::kNoMaximum};
  for (const cuda::Region& region : regions) gather.regions[gather.num_regions++] = region;
  gather.stream = stream;
  cuda::gather_rows(gather);
  const int64_t elements = local.batch * local.num_q_heads * rows.count * local.head_dim;
  // Zeros of all ranks but the owner leave every bit as it is. An odd last element is summed with what follows it: head_dim is even.
  sum_over_ranks(group, reinterpret_cast<int32_t*>(m.rows), elements / 2,
                 comm::ElementType::kInt32);
  p.q = {m.rows, local.num_q_heads * rows.count * local.head_dim, local.head_dim,
         rows.count * local.head_dim};
  if (local.document_starts != nullptr) p.row_document_start = m.document_start;
  cuda::window_scan(p, m.scan, m.row_max, m.fault, true);
  sum_over_ranks(group, m.row_max, outputs, comm::ElementType::kFloat32, comm::ReduceOp::kMax);
  cuda::window_row_sum(p, m.scan, m.row_max, m.row_sum, m.fault, true);
  // A key that is not finite is seen by the rank that has it.
  sum_over_ranks(group, m.fault, 1, comm::ElementType::kInt64, comm::ReduceOp::kMax);
  sum_over_ranks(group, m.row_sum, outputs, comm::ElementType::kInt64);
  return p;
}

int64_t heads_per_choice(const LocalAttention& local, const VerticalSlashOptions& options) {
  return options.selection == Selection::kKvGroup ? local.num_q_heads / local.num_kv_heads : 1;
}

/// Everything that build_vertical_slash_on_device takes from the workspace, in order.
struct ChoiceMemory {
  ObservationMemory observation;
  int64_t *columns, *diagonals, *offsets, *totals;
  cuda::Region zeroed;
  void* choosing;  // one rank
  // several ranks
  uint32_t* bits;
  int32_t* cut;
  void* selection;
  // pooling by offsets
  int32_t* offset_starts;
  int64_t* budgets;
  uint32_t* offset_bits;
  int32_t* offset_cut;
  void* offset_selection;
  // recall_floor
  ObservationMemory floor;
  cuda::Region floor_zeroed;
  int64_t* covered;
  uint8_t* below;
};

ChoiceMemory take_choice(Arena& arena, const LocalAttention& local,
                         const VerticalSlashOptions& options, int64_t num_rows, int64_t floor_rows,
                         bool alone) {
  const int64_t seq_len = local.layout->seq_len(), n = local.layout->tokens_per_rank();
  const int64_t shared = heads_per_choice(local, options);
  const int64_t choices = local.batch * local.num_q_heads / shared, words = (seq_len + 31) / 32;
  const int64_t blocks = (seq_len + kBlock - 1) / kBlock;
  const bool columns_are_sums = shared > 1 || num_rows > kBlock;
  ChoiceMemory m = {};
  m.observation = take_observation(arena, local, num_rows);
  if (!columns_are_sums) m.columns = arena.take<int64_t>(choices * n);

  const int64_t begin = arena.used();
  take_zeroed(arena, local, num_rows, m.observation);
  m.zeroed.data = m.observation.row_sum;
  m.diagonals = arena.take<int64_t>(choices * (blocks + 1));
  m.totals = arena.take<int64_t>(choices);
  if (columns_are_sums) m.columns = arena.take<int64_t>(choices * n);
  if (options.slash_pooling != SlashPooling::kBlock)
    m.offsets = arena.take<int64_t>(choices * seq_len);
  if (alone) {
    // What it wants zeroed comes first; all pieces are multiples of what the arena aligns to.
    m.choosing = arena.take<char>(cuda::choose_zeroed_bytes(choices));
    m.zeroed.bytes = arena.used() - begin;
    arena.take<char>(cuda::choose_workspace_bytes(choices, n, seq_len) -
                     cuda::choose_zeroed_bytes(choices));
  } else {
    m.zeroed.bytes = arena.used() - begin;
    m.bits = arena.take<uint32_t>(choices * words);
    m.cut = arena.take<int32_t>(choices);
    m.selection = arena.take<char>(cuda::KeySelection::workspace_bytes(choices, n));
  }
  if (options.slash_pooling != SlashPooling::kBlock) {
    m.offset_starts = arena.take<int32_t>(blocks);
    m.budgets = arena.take<int64_t>(choices);
    m.offset_bits = arena.take<uint32_t>(choices * words);
    m.offset_cut = arena.take<int32_t>(choices);
    m.offset_selection = arena.take<char>(cuda::KeySelection::workspace_bytes(choices, seq_len));
  }
  if (floor_rows > 0) {
    m.floor = take_observation(arena, local, floor_rows);
    const int64_t floor_begin = arena.used();
    take_zeroed(arena, local, floor_rows, m.floor);
    m.floor_zeroed = {m.floor.row_sum, arena.used() - floor_begin, 0};
    m.covered = arena.take<int64_t>(local.batch * local.num_q_heads * floor_rows);
    m.below = arena.take<uint8_t>(local.batch * local.num_q_heads);
  }
  return m;
}

/// Offsets that "paper" and "token" pooling take, as bits. All ranks have all offsets.
void choose_offsets(const VerticalSlashOptions& options, const ChoiceMemory& m, int64_t choices,
                    int64_t seq_len, void* stream) {
  cuda::write_positions(seq_len, 0, false, nullptr, (seq_len + kBlock - 1) / kBlock,
                        m.offset_starts, stream);
  const bool paper = options.slash_pooling == SlashPooling::kPaper;
  if (paper) {
    cuda::slash_budgets(m.diagonals, choices, seq_len, options.p_slash, m.budgets, stream);
  }
  cuda::KeySelection offsets({.rows = choices,
                              .num_keys = seq_len,
                              .seq_len = seq_len,
                              .masses = m.offsets,
                              .block_starts = m.offset_starts,
                              .p = paper ? 1 : options.p_slash,
                              .caps = paper ? m.budgets : nullptr,
                              .bits = m.offset_bits,
                              .cut = m.offset_cut,
                              .workspace = m.offset_selection,
                              .stream = stream});
  offsets.begin();
  offsets.finish();
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
  const int64_t rows = local.document_starts == nullptr ? options.last_q : max_window_rows(options);
  MT_CHECK_SUPPORTED(heads_per_choice(local, options) * rows < (1 << 17),
                     "selection: kv_group over ", heads_per_choice(local, options), " heads with ",
                     rows, " rows: their product must stay below ", 1 << 17,
                     " for the masses to fit 62 bits");
}

void check_fault(const kernels::pattern_cuda::FaultReport& report) {
  if (report.code == 0) return;
  const int64_t place = cuda::fault_place(report.code), n = report.seq_len,
                heads = report.num_q_heads;
  const auto refuse_list = [&](const char* list, const char* what) {
    MT_CHECK_ARG(false, "make_index: ", list, " of sample ", place / heads, ", head ",
                 place % heads, ": expected ", what, " in [0, ", report.end, "), got ",
                 report.value);
  };
  switch (cuda::fault_kind(report.code)) {
    case cuda::FaultKind::kQuery:
      MT_CHECK_FINITE(
          false, "q: expected finite values below 2^50, got NaN, inf or a larger one at sample ",
          report.first_sample + place / n / heads, ", head ", place / n % heads, ", position ",
          place % n);
    case cuda::FaultKind::kKey:
      MT_CHECK_FINITE(
          false, "k: expected finite values below 2^50, got NaN, inf or a larger one at sample ",
          report.first_sample + place / n, ", position ", place % n);
    case cuda::FaultKind::kScore:
      MT_CHECK_FINITE(false, "attention scores: expected values below 2^16 on a GPU, got larger ",
                      "ones at sample ", report.first_sample + place / heads, ", head ",
                      place % heads);
    case cuda::FaultKind::kCount:
      MT_CHECK_ARG(false, place % 2 == 0 ? "num_diagonals[" : "num_columns[", place / 2 / heads,
                   ", ", place / 2 % heads, "]: expected 0 .. ", report.end - 1,
                   " (the capacity), got ", report.value);
    case cuda::FaultKind::kDiagonal:
      refuse_list("diagonals", "block diagonals");
      break;
    case cuda::FaultKind::kColumn:
      refuse_list("columns", "positions");
      break;
    case cuda::FaultKind::kDocument:
      MT_CHECK_ARG(false, "document_starts[", place / n, ", ", place % n, "]: expected 0 .. ",
                   place % n, ", got ", report.value);
  }
  MT_ASSERT(false, "fault ", report.code);
}

int64_t device_choice_bytes(const LocalAttention& local, const VerticalSlashOptions& options,
                            int64_t num_rows, int64_t floor_rows) {
  Arena arena(nullptr, 0);
  take_choice(arena, local, options, num_rows, floor_rows, local.layout->cp_size() == 1);
  return arena.used();
}

void build_vertical_slash_on_device(const LocalAttention& local, int64_t num_keys,
                                    const VerticalSlashOptions& options, const DeviceRows& rows,
                                    const DeviceRows& floor_rows, const DeviceLayout& layout,
                                    comm::Communicator* group, void* workspace,
                                    int64_t workspace_bytes, void* stream,
                                    const DeviceIndex& index) {
  check_device_choice(local, options);
  MT_CHECK_ARG(workspace != nullptr, "workspace: expected a pointer, got null");
  MT_CHECK_ARG(is_alone(group) == (local.layout->cp_size() == 1), "group: expected ",
               local.layout->cp_size(), " ranks, got ", group == nullptr ? 1 : group->size());
  MT_CHECK_ARG(options.recall_floor == 0 || floor_rows.count > 0,
               "recall_floor: expected rows to judge by, got none");
  const int64_t seq_len = local.layout->seq_len();
  const int64_t num_blocks = (seq_len + kBlock - 1) / kBlock;
  const int64_t shared = heads_per_choice(local, options);
  const int64_t heads = local.batch * local.num_q_heads, choices = heads / shared;
  const bool alone = is_alone(group), by_offsets = options.slash_pooling != SlashPooling::kBlock;
  const bool has_floor = options.recall_floor > 0;
  Arena arena(workspace, workspace_bytes);
  const ChoiceMemory m =
      take_choice(arena, local, options, rows.count, has_floor ? floor_rows.count : 0, alone);

  const kernels::WindowParams p =
      observe(local, num_keys, rows, layout, group, stream, m.observation,
              {m.zeroed, {index.caps_hit, sizeof(int64_t), 0}});
  cuda::window_masses(p, m.observation.row_max, m.observation.row_sum,
                      {.heads_per_choice = shared,
                       .consecutive_rows = rows.consecutive,
                       .columns = m.columns,
                       .diagonals = m.diagonals,
                       .offsets = m.offsets,
                       .totals = m.totals,
                       .zeroed = true});
  sum_over_ranks(group, m.diagonals, choices * (num_blocks + 1), comm::ElementType::kInt64);
  if (by_offsets) {
    sum_over_ranks(group, m.offsets, choices * seq_len, comm::ElementType::kInt64);
    choose_offsets(options, m, choices, seq_len, stream);
  }

  cuda::ChoiceParams choice;
  choice.batch = local.batch;
  choice.num_q_heads = local.num_q_heads;
  choice.seq_len = seq_len;
  choice.heads_per_choice = shared;
  choice.diagonal_masses = m.diagonals;
  choice.p_slash = options.p_slash;
  choice.max_diagonals = options.max_diagonals.value_or(-1);
  choice.offset_bits = m.offset_bits;
  choice.local_blocks = options.local_blocks;
  choice.sink_tokens = options.sink_tokens;
  choice.document_start = local.document_starts;
  choice.dense_threshold = options.dense_threshold;
  choice.fault = m.observation.fault;
  choice.report = index.report;
  choice.first_sample = index.first_sample;
  choice.stream = stream;
  if (alone) {
    cuda::choose({.choice = choice,
                  .num_keys = num_keys,
                  .column_masses = m.columns,
                  .totals = m.totals,
                  .block_starts = layout.block_starts,
                  .p_vertical = options.p_vertical,
                  .max_columns = options.max_columns.value_or(-1),
                  .workspace = m.choosing,
                  .zeroed = true},
                 index.lists, index.bits, index.dense_heads, index.caps_hit);
  } else {
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
    sum(keys.begin());
    for (int round = 0; round < keys.rounds(); ++round) sum(keys.round(round));
    keys.mark();
    sum_over_ranks(group, reinterpret_cast<int32_t*>(m.bits), choices * ((seq_len + 31) / 32),
                   comm::ElementType::kInt32);
    choice.column_bits = m.bits;
    choice.columns_cut = m.cut;
    cuda::write_choice(choice, index.lists, index.bits, index.dense_heads, index.caps_hit);
  }

  if (has_floor) {
    const kernels::WindowParams elsewhere =
        observe(local, num_keys, floor_rows, layout, group, stream, m.floor, {m.floor_zeroed});
    cuda::window_covered(elsewhere, m.floor.row_max, m.floor.row_sum, index.bits.diagonals,
                         (num_blocks + 63) / 64, index.bits.columns, (seq_len + 31) / 32,
                         m.covered);
    sum_over_ranks(group, m.covered, heads * floor_rows.count, comm::ElementType::kInt64);
    cuda::heads_below_floor(m.covered, choices, shared, floor_rows.count, options.recall_floor,
                            m.below, stream);
    cuda::make_dense(m.below, heads, seq_len, index.bits, index.dense_heads, stream);
    cuda::lists_of_bits(index.bits, heads, seq_len, index.lists, stream);
  }
}

int64_t device_recall_bytes(const LocalAttention& local, int64_t rows) {
  Arena arena(nullptr, 0);
  ObservationMemory m = take_observation(arena, local, rows);
  take_zeroed(arena, local, rows, m);
  return arena.used();
}

void measure_covered_on_device(const LocalAttention& local, int64_t num_keys,
                               const DeviceRows& rows, const DeviceLayout& layout,
                               comm::Communicator* group, void* workspace, int64_t workspace_bytes,
                               void* stream, const cuda::IndexBits& bits, int64_t* covered) {
  Arena arena(workspace, workspace_bytes);
  ObservationMemory m = take_observation(arena, local, rows.count);
  const int64_t begin = arena.used();
  take_zeroed(arena, local, rows.count, m);
  const int64_t seq_len = local.layout->seq_len();
  const kernels::WindowParams p = observe(local, num_keys, rows, layout, group, stream, m,
                                          {{m.row_sum, arena.used() - begin, 0}});
  cuda::window_covered(p, m.row_max, m.row_sum, bits.diagonals,
                       ((seq_len + kBlock - 1) / kBlock + 63) / 64, bits.columns,
                       (seq_len + 31) / 32, covered);
  sum_over_ranks(group, covered, local.batch * local.num_q_heads * rows.count,
                 comm::ElementType::kInt64);
}

}  // namespace mtraining::pattern
