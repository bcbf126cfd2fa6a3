#include <algorithm>

#include "mtraining/base/check.h"
#include "mtraining/kernels/dispatch.h"
#include "mtraining/kernels/pattern_cuda/choice.cuh"
#include "mtraining/kernels/pattern_cuda/device.h"
#include "mtraining/kernels/pattern_cuda/lists.h"
#include "mtraining/kernels/window.h"

namespace mtraining::kernels::pattern_cuda {
namespace {

constexpr int kThreads = kChoiceThreads;
constexpr int kWarps = kChoiceWarps;

extern __shared__ uint32_t dynamic_memory[];

__global__ void __launch_bounds__(kThreads) choice_kernel(const __grid_constant__ ChoiceArgs args) {
  __shared__ ChoiceMemory memory;
  const ChoiceParams& p = args.p;
  const int64_t row = blockIdx.x, choice = row / p.heads_per_choice;
  if (row == 0 && threadIdx.x == 0) tell_fault(p);
  const DiagonalMemory d = diagonal_memory(dynamic_memory, args.num_blocks);
  const bool cut =
      choose_diagonals(args, choice, memory, d, p.diagonal_masses + choice * (args.num_blocks + 1));
  write_head(args, row, memory, d, p.column_bits + choice * args.column_words,
             cut || p.columns_cut[choice] != 0, nullptr, false);
}

/// How many diagonals the budget takes.
__global__ void __launch_bounds__(kThreads)
    budget_kernel(const int64_t* diagonal_masses, int num_blocks, double p, int64_t* budgets) {
  __shared__ ChoiceMemory memory;
  const int64_t* masses = diagonal_masses + blockIdx.x * static_cast<int64_t>(num_blocks + 1);
  search_some(
      memory, num_blocks,
      [&](int c, int64_t* mass, uint32_t* inverse) {
        *mass = masses[c];
        *inverse = num_blocks - 1 - c;
      },
      [](int) { return true; }, p, -1, kDiagonalBits);
  int64_t count = 0;
  for (int c = threadIdx.x; c < num_blocks; c += kThreads)
    count += chosen(memory.search, masses[c], num_blocks - 1 - c);
  count = block_sum(count, memory.warp_totals);
  if (threadIdx.x == 0) budgets[blockIdx.x] = count;
}

/// A thread block a choice: heads of it whose covered rows fall below the floor take the others with them.
__global__ void __launch_bounds__(kThreads)
    floor_kernel(const int64_t* covered, int64_t num_rows, int64_t heads_per_choice, double whole,
                 double floor, uint8_t* heads) {
  __shared__ int64_t warp_totals[kWarps];
  bool below = false;
  for (int64_t h = 0; h < heads_per_choice; ++h) {
    const int64_t* rows = covered + (blockIdx.x * heads_per_choice + h) * num_rows;
    int64_t sum = 0;
    for (int64_t r = threadIdx.x; r < num_rows; r += kThreads) sum += rows[r];
    sum = block_sum(sum, warp_totals);
    below = below || fmin(1.0, static_cast<double>(sum) / whole) < floor;
  }
  for (int64_t h = threadIdx.x; h < heads_per_choice; h += kThreads)
    heads[blockIdx.x * heads_per_choice + h] = below;
}

__device__ uint32_t half_word(const uint64_t* words, int w) {
  return static_cast<uint32_t>(words[w / 2] >> (w % 2 * 32));
}

constexpr int64_t kDocumentsPerBlock = 16 * kThreads;

/// A block a head; those behind look at documents.
__global__ void __launch_bounds__(kThreads)
    given_lists_kernel(const __grid_constant__ GivenLists given, int num_blocks, int diagonal_words,
                       int column_words) {
  __shared__ int warp_sums[kWarps];
  const int64_t rows = given.batch * given.num_q_heads, row = blockIdx.x;
  const auto tell = [&](FaultKind kind, int64_t place, int64_t value, int64_t end) {
    report_fault(given.report,
                 {fault_code(kind, place), given.num_q_heads, given.seq_len, 0, value, end, 0});
  };
  if (row >= rows) {
    const int64_t begin = (row - rows) * kDocumentsPerBlock;
    const int64_t end = min(begin + kDocumentsPerBlock, given.batch * given.seq_len);
    for (int64_t i = begin + threadIdx.x; i < end; i += kThreads) {
      const int32_t start = given.document_start[i];
      if (start < 0 || start > i % given.seq_len)
        tell(FaultKind::kDocument, i, start, i % given.seq_len + 1);
    }
    return;
  }
  auto* diagonals =
      reinterpret_cast<unsigned long long*>(given.bits.diagonals) + row * diagonal_words;
  uint32_t* columns = given.bits.columns + row * column_words;
  for (int w = threadIdx.x; w < diagonal_words; w += kThreads) diagonals[w] = 0;
  __syncthreads();
  const auto count_of = [&](const int32_t* counts, int64_t capacity, int which) {
    const int32_t count = counts[row];
    if (threadIdx.x == 0 && (count < 0 || count > capacity))
      tell(FaultKind::kCount, 2 * row + which, count, capacity + 1);
    return min(max(static_cast<int64_t>(count), int64_t{0}), capacity);
  };
  const int64_t num_diagonals =
      count_of(given.lists.num_diagonals, given.lists.diagonal_capacity, 0);
  for (int64_t i = threadIdx.x; i < num_diagonals; i += kThreads) {
    const int32_t c = given.lists.diagonals[row * given.lists.diagonal_capacity + i];
    if (c >= 0 && c < num_blocks) {
      atomicOr(diagonals + c / 64, 1ull << (c % 64));
    } else {
      tell(FaultKind::kDiagonal, row, c, num_blocks);
    }
  }
  // Columns that are a list already, as a choice leaves them, go as they are; bits are made of them where they are asked for, or put
  // them in order.
  const bool launches = given.entries != nullptr;
  const int32_t* list = given.lists.columns + row * given.lists.column_capacity;
  const int64_t num_columns = count_of(given.lists.num_columns, given.lists.column_capacity, 1);
  bool ascending = num_columns <= given.capacity;
  for (int64_t i = threadIdx.x; i < num_columns; i += kThreads) {
    const int32_t j = list[i];
    if (j < 0 || j >= given.seq_len) tell(FaultKind::kColumn, row, j, given.seq_len);
    ascending = ascending && j > (i == 0 ? -1 : list[i - 1]) && j < given.seq_len;
  }
  const bool listed = __syncthreads_and(ascending) != 0 && launches;
  int count = static_cast<int>(num_columns);
  if (listed) {
    for (int64_t i = threadIdx.x; i < num_columns; i += kThreads)
      given.positions[row * given.capacity + i] = list[i];
  } else {
    for (int w = threadIdx.x; w < column_words; w += kThreads) columns[w] = 0;
    __syncthreads();
    for (int64_t i = threadIdx.x; i < num_columns; i += kThreads) {
      const int32_t j = list[i];
      if (j >= 0 && j < given.seq_len) atomicOr(columns + j / 32, 1u << (j % 32));
    }
    __syncthreads();
  }
  if (!launches) return;
  if (!listed) {
    const volatile uint32_t* column_bits = columns;
    count = write_list(
        column_words, [&](int w) { return column_bits[w]; }, given.positions + row * given.capacity,
        given.capacity, warp_sums, false);
  }
  const volatile uint32_t* words = reinterpret_cast<uint32_t*>(diagonals);
  const Run run = run_of_thread(2 * diagonal_words);
  int own = 0, total;
  for (int w = run.begin; w < run.end; ++w) own += __popc(words[w]);
  int64_t at = row * given.entry_capacity + block_prefix(own, &total, warp_sums);
  for (int w = run.begin; w < run.end; ++w) {
    for (uint32_t rest = words[w]; rest != 0; rest &= rest - 1)
      given.entries[at++] = {0, w * 32 + __ffs(rest) - 1};
  }
  if (threadIdx.x == 0) {
    given.num_entries[row] = total;
    given.counts[row] = count;
  }
  if (row != 0) return;
  for (int i = threadIdx.x; i < num_blocks; i += kThreads) given.block_starts[i] = i * kBlock;
}

__global__ void __launch_bounds__(kThreads)
    dense_kernel(const uint8_t* heads, int64_t seq_len, int num_blocks, int diagonal_words,
                 int column_words, IndexBits bits, uint8_t* dense_heads) {
  const int64_t row = blockIdx.x;
  if (heads[row] == 0) return;
  for (int w = threadIdx.x; w < diagonal_words; w += kThreads) {
    const int real = num_blocks - w * 64;
    bits.diagonals[row * diagonal_words + w] =
        real >= 64 ? ~uint64_t{0} : (uint64_t{1} << real) - 1;
  }
  for (int w = threadIdx.x; w < column_words; w += kThreads)
    bits.columns[row * column_words + w] = 0;
  if (threadIdx.x == 0) dense_heads[row] = 1;
}

__global__ void __launch_bounds__(kThreads)
    lists_kernel(IndexBits bits, int diagonal_words, int column_words, IndexLists lists) {
  __shared__ int warp_sums[kWarps];
  const int64_t row = blockIdx.x;
  const uint64_t* diagonals = bits.diagonals + row * diagonal_words;
  const uint32_t* columns = bits.columns + row * column_words;
  const int num_diagonals = write_list(
      2 * diagonal_words, [&](int w) { return half_word(diagonals, w); },
      lists.diagonals + row * lists.diagonal_capacity, lists.diagonal_capacity, warp_sums);
  const int num_columns = write_list(
      column_words, [&](int w) { return columns[w]; }, lists.columns + row * lists.column_capacity,
      lists.column_capacity, warp_sums);
  if (threadIdx.x == 0) {
    lists.num_diagonals[row] = num_diagonals;
    lists.num_columns[row] = num_columns;
  }
}

/// Both ways to write a diagonal at local distance x = lambda * m + delta, the smaller lambda first: the order of the list.
struct EntriesOfHead {
  const EntriesParams& p;
  const uint64_t* bits;
  int64_t distance;
  template <typename Emit>
  __device__ void at(int64_t x, const Emit& emit) const {
    const int64_t m = p.blocks_per_stripe;
    const int64_t lower = x >= 0 ? x / m : -1;
    for (int64_t lambda = lower; lambda <= lower + 1; ++lambda) {
      const int64_t delta = x - lambda * m;
      const int64_t c = (lambda * p.ranks + distance) * m + delta;
      if (lambda < 0 || lambda >= p.stripes_per_rank || delta <= -m || c < 0 || c >= p.num_blocks)
        continue;
      if ((bits[c / 64] >> (c % 64) & 1) != 0)
        emit(Entry{static_cast<int32_t>(lambda), static_cast<int32_t>(delta)});
    }
  }
};

__global__ void __launch_bounds__(kThreads)
    entries_kernel(const __grid_constant__ EntriesParams p) {
  __shared__ int warp_sums[kWarps];
  const int64_t row = blockIdx.x % p.rows, source = blockIdx.x / p.rows;
  const EntriesOfHead head{p, p.diagonal_bits + row * ((p.num_blocks + 63) / 64),
                           p.distances == nullptr ? 0 : p.distances[source]};
  const int64_t lowest = 1 - p.blocks_per_stripe,
                count = p.blocks_per_stripe * (p.stripes_per_rank + 1) - 1;
  const int64_t per_thread = (count + kThreads - 1) / kThreads;
  const int64_t begin = min(count, threadIdx.x * per_thread), end = min(count, begin + per_thread);
  int own = 0;
  for (int64_t i = begin; i < end; ++i) head.at(lowest + i, [&](Entry) { ++own; });
  int total;
  int at = block_prefix(own, &total, warp_sums);
  Entry* const list = p.entries + (source * p.rows + row) * p.capacity;
  for (int64_t i = begin; i < end; ++i) {
    head.at(lowest + i, [&](Entry entry) {
      if (at < p.capacity) list[at] = entry;
      ++at;
    });
  }
  if (threadIdx.x == 0)
    p.num_entries[source * p.rows + row] = static_cast<int32_t>(min(int64_t{total}, p.capacity));
}

__global__ void __launch_bounds__(kThreads)
    shard_columns_kernel(const __grid_constant__ ShardColumnsParams p) {
  __shared__ int warp_sums[kWarps];
  const int64_t row = blockIdx.x % p.rows, source = blockIdx.x / p.rows;
  const int rank = p.sources == nullptr ? 0 : p.sources[source];
  const int words = static_cast<int>((p.seq_len + 31) / 32);
  const uint32_t* bits = p.column_bits + row * words;
  const auto word = [&](int w) {
    return p.owners == nullptr || p.owners[w / 2 * 2] == rank ? bits[w] : 0u;
  };
  const Run run = run_of_thread(words);
  int own = 0;
  for (int w = run.begin; w < run.end; ++w) own += __popc(word(w));
  int total;
  int64_t at = block_prefix(own, &total, warp_sums);
  const int64_t list = (source * p.rows + row) * p.capacity;
  for (int w = run.begin; w < run.end; ++w) {
    const int block = p.owners == nullptr ? w / 2 : p.owners[w / 2 * 2 + 1];
    for (uint32_t rest = word(w); rest != 0; rest &= rest - 1, ++at) {
      const int bit = __ffs(rest) - 1;
      if (at >= p.capacity) continue;
      p.positions[list + at] = w * 32 + bit;
      p.key_rows[list + at] = block * 64 + w % 2 * 32 + bit;
    }
  }
  if (threadIdx.x == 0)
    p.counts[source * p.rows + row] = static_cast<int32_t>(min(int64_t{total}, p.capacity));
}

__global__ void positions_kernel(int64_t seq_len, int64_t num_rows, bool strided,
                                 int32_t* row_positions, int64_t num_blocks,
                                 int32_t* block_starts) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (row_positions != nullptr && i < num_rows) {
    row_positions[i] =
        static_cast<int32_t>(strided ? (i + 1) * seq_len / num_rows - 1 : seq_len - num_rows + i);
  }
  if (block_starts != nullptr && i < num_blocks) block_starts[i] = static_cast<int32_t>(i * kBlock);
}

__global__ void __launch_bounds__(kThreads)
    pairs_kernel(IndexBits bits, int num_blocks, int diagonal_words, int column_words,
                 int64_t* pairs) {
  __shared__ int warp_sums[kWarps];
  __shared__ int64_t warp_totals[kWarps];
  const int64_t row = blockIdx.x;
  const DiagonalMemory d = diagonal_memory(dynamic_memory, num_blocks);
  for (int w = threadIdx.x; w < d.count; w += kThreads)
    d.words[w] = w < 2 * diagonal_words ? half_word(bits.diagonals + row * diagonal_words, w) : 0;
  const int64_t diagonal_pairs = finish_diagonals(d, num_blocks, warp_sums, warp_totals);
  __syncthreads();
  int64_t sum = 0;
  for (int w = threadIdx.x; w < column_words; w += kThreads)
    sum += column_pairs(bits.columns[row * column_words + w], w, num_blocks, d.words, d.before);
  sum = block_sum(sum, warp_totals);
  if (threadIdx.x == 0) pairs[row] = diagonal_pairs + sum;
}

__global__ void mask_kernel(IndexBits bits, int64_t num_q_heads, int64_t seq_len,
                            int diagonal_words, int column_words, const int32_t* document_start,
                            uint8_t* mask, int64_t queries) {
  const int64_t query = blockIdx.x;  // of [rows, N]
  if (query >= queries) return;
  const int64_t row = query / seq_len, i = query % seq_len;
  const int64_t start =
      document_start == nullptr ? 0 : document_start[row / num_q_heads * seq_len + i];
  for (int64_t j = threadIdx.x; j < seq_len; j += blockDim.x) {
    bool visible = j <= i && j >= start;
    if (visible) {
      const int64_t c = i / kBlock - j / kBlock;
      visible = (bits.diagonals[row * diagonal_words + c / 64] >> (c % 64) & 1) != 0 ||
                (bits.columns[row * column_words + j / 32] >> (j % 32) & 1) != 0;
    }
    mask[query * seq_len + j] = visible;
  }
}

struct Sizes {
  int num_blocks, diagonal_words, column_words;
};
Sizes sizes_of(int64_t seq_len) {
  const int64_t blocks = (seq_len + kBlock - 1) / kBlock;
  MT_CHECK_SUPPORTED(blocks <= kMaxBlocks, "an index on a GPU: expected at most ",
                     kMaxBlocks * kBlock, " tokens, got ", seq_len);
  return {static_cast<int>(blocks), static_cast<int>((blocks + 63) / 64),
          static_cast<int>((seq_len + 31) / 32)};
}
unsigned grid_of(const char* what, int64_t rows, int64_t items = 1) {
  return static_cast<unsigned>(LaunchPlanner(device_of_stream()).flat(what, rows, items).x);
}

}  // namespace

void write_choice(const ChoiceParams& params, const IndexLists& lists, const IndexBits& bits,
                  uint8_t* dense_heads, int64_t* caps_hit) {
  const Sizes sizes = sizes_of(params.seq_len);
  const auto stream = static_cast<cudaStream_t>(params.stream);
  check_cuda(cudaMemsetAsync(caps_hit, 0, sizeof(int64_t), stream), "index: resetting caps_hit");
  const int64_t rows = params.batch * params.num_q_heads;
  if (rows == 0) return;
  const ChoiceArgs args = {params,
                           lists,
                           bits,
                           dense_heads,
                           caps_hit,
                           sizes.num_blocks,
                           sizes.column_words,
                           sizes.diagonal_words};
  choice_kernel<<<grid_of("index", rows), kThreads, diagonal_memory_bytes(sizes.num_blocks),
                  stream>>>(args);
  check_cuda(cudaGetLastError(), "index: choice");
}

void slash_budgets(const int64_t* diagonal_masses, int64_t choices, int64_t seq_len, double p,
                   int64_t* budgets, void* stream) {
  const Sizes sizes = sizes_of(seq_len);
  if (choices == 0) return;
  budget_kernel<<<grid_of("index", choices), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(
      diagonal_masses, sizes.num_blocks, p, budgets);
  check_cuda(cudaGetLastError(), "index: slash budgets");
}

void heads_below_floor(const int64_t* covered, int64_t choices, int64_t heads_per_choice,
                       int64_t num_rows, double floor, uint8_t* heads, void* stream) {
  if (choices == 0) return;
  floor_kernel<<<grid_of("index", choices), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(
      covered, num_rows, heads_per_choice, static_cast<double>(kMassOne * num_rows), floor, heads);
  check_cuda(cudaGetLastError(), "index: heads below the floor of recall");
}

void read_lists(const GivenLists& given) {
  const Sizes sizes = sizes_of(given.seq_len);
  const int64_t rows = given.batch * given.num_q_heads;
  if (rows == 0) return;
  const int64_t documents =
      given.document_start == nullptr || given.report == nullptr
          ? 0
          : (given.batch * given.seq_len + kDocumentsPerBlock - 1) / kDocumentsPerBlock;
  given_lists_kernel<<<grid_of("index", rows + documents), kThreads, 0,
                       static_cast<cudaStream_t>(given.stream)>>>(
      given, sizes.num_blocks, sizes.diagonal_words, sizes.column_words);
  check_cuda(cudaGetLastError(), "index: lists");
}

void make_dense(const uint8_t* heads, int64_t rows, int64_t seq_len, const IndexBits& bits,
                uint8_t* dense_heads, void* stream) {
  const Sizes sizes = sizes_of(seq_len);
  if (rows == 0) return;
  dense_kernel<<<grid_of("index", rows), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(
      heads, seq_len, sizes.num_blocks, sizes.diagonal_words, sizes.column_words, bits,
      dense_heads);
  check_cuda(cudaGetLastError(), "index: dense heads");
}

void lists_of_bits(const IndexBits& bits, int64_t rows, int64_t seq_len, const IndexLists& lists,
                   void* stream) {
  const Sizes sizes = sizes_of(seq_len);
  if (rows == 0) return;
  lists_kernel<<<grid_of("index", rows), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(
      bits, sizes.diagonal_words, sizes.column_words, lists);
  check_cuda(cudaGetLastError(), "index: lists of bits");
}

int64_t entries_capacity(int64_t blocks_per_stripe, int64_t stripes_per_rank, int64_t num_blocks,
                         int64_t ranks) {
  // Each diagonal gives one entry where ranks >= 2, two otherwise; each distance at most two.
  return std::max<int64_t>(1, std::min(ranks == 1 ? 2 * num_blocks : num_blocks,
                                       2 * blocks_per_stripe * (stripes_per_rank + 1)));
}

void write_entries(const EntriesParams& params) {
  if (params.rows * params.num_sources == 0) return;
  entries_kernel<<<grid_of("index", params.rows, params.num_sources), kThreads, 0,
                   static_cast<cudaStream_t>(params.stream)>>>(params);
  check_cuda(cudaGetLastError(), "index: entries");
}

void write_shard_columns(const ShardColumnsParams& params) {
  if (params.rows * params.num_sources == 0) return;
  shard_columns_kernel<<<grid_of("index", params.rows, params.num_sources), kThreads, 0,
                         static_cast<cudaStream_t>(params.stream)>>>(params);
  check_cuda(cudaGetLastError(), "index: columns of shards");
}

void write_positions(int64_t seq_len, int64_t num_rows, bool strided, int32_t* row_positions,
                     int64_t num_blocks, int32_t* block_starts, void* stream) {
  const int64_t most = std::max<int64_t>({num_rows, num_blocks, 1});
  positions_kernel<<<grid_of("positions", (most + 255) / 256), 256, 0,
                     static_cast<cudaStream_t>(stream)>>>(seq_len, num_rows, strided, row_positions,
                                                          num_blocks, block_starts);
  check_cuda(cudaGetLastError(), "index: positions");
}

void count_pairs(const IndexBits& bits, int64_t rows, int64_t seq_len, int64_t* pairs,
                 void* stream) {
  const Sizes sizes = sizes_of(seq_len);
  if (rows == 0) return;
  pairs_kernel<<<grid_of("index", rows), kThreads, diagonal_memory_bytes(sizes.num_blocks),
                 static_cast<cudaStream_t>(stream)>>>(bits, sizes.num_blocks, sizes.diagonal_words,
                                                      sizes.column_words, pairs);
  check_cuda(cudaGetLastError(), "index: pairs");
}

void write_mask(const IndexBits& bits, int64_t batch, int64_t num_q_heads, int64_t seq_len,
                const int32_t* document_start, uint8_t* mask, void* stream) {
  const Sizes sizes = sizes_of(seq_len);
  const int64_t queries = batch * num_q_heads * seq_len;
  if (queries == 0) return;
  mask_kernel<<<grid_of("index", queries), 256, 0, static_cast<cudaStream_t>(stream)>>>(
      bits, num_q_heads, seq_len, sizes.diagonal_words, sizes.column_words, document_start, mask,
      queries);
  check_cuda(cudaGetLastError(), "index: mask");
}

}  // namespace mtraining::kernels::pattern_cuda
