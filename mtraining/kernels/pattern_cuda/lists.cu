#include <algorithm>

#include "mtraining/base/check.h"
#include "mtraining/kernels/dispatch.h"
#include "mtraining/kernels/pattern_cuda/device.h"
#include "mtraining/kernels/pattern_cuda/instructions.cuh"
#include "mtraining/kernels/pattern_cuda/lists.h"
#include "mtraining/kernels/pattern_cuda/radix.cuh"

namespace mtraining::kernels::pattern_cuda {
namespace {

constexpr int kThreads = 512;
constexpr int kWarps = kThreads / 32;
constexpr int64_t kBlockPairs = kBlock * kBlock;

/// Exclusive prefix of `count` over the block's threads, and the sum. All threads.
__device__ int block_prefix(int count, int* total, int* warp_sums) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int sum = count;
  for (int distance = 1; distance < 32; distance *= 2) {
    const int other = __shfl_up_sync(~0u, sum, distance);
    if (lane >= distance) sum += other;
  }
  __syncthreads();
  if (lane == 31) warp_sums[warp] = sum;
  __syncthreads();
  int before = 0, all = 0;
  for (int w = 0; w < kWarps; ++w) {
    if (w < warp) before += warp_sums[w];
    all += warp_sums[w];
  }
  *total = all;
  return before + sum - count;
}

/// Sum of int64 over the block, in every thread.
__device__ int64_t block_sum(int64_t value, int64_t* warp_sums) {
  for (int distance = 16; distance > 0; distance /= 2)
    value += __shfl_xor_sync(~0u, value, distance);
  __syncthreads();
  if (threadIdx.x % 32 == 0) warp_sums[threadIdx.x / 32] = value;
  __syncthreads();
  int64_t sum = 0;
  for (int w = 0; w < kWarps; ++w) sum += warp_sums[w];
  return sum;
}
__device__ int64_t block_max(int64_t value, int64_t* warp_tops) {
  for (int distance = 16; distance > 0; distance /= 2)
    value = max(value, __shfl_xor_sync(~0u, value, distance));
  __syncthreads();
  if (threadIdx.x % 32 == 0) warp_tops[threadIdx.x / 32] = value;
  __syncthreads();
  int64_t top = warp_tops[0];
  for (int w = 1; w < kWarps; ++w) top = max(top, warp_tops[w]);
  return top;
}

/// The words of a thread: a run, so that lists come out ascending.
struct Run {
  int begin, end;
};
__device__ Run run_of_thread(int words) {
  const int per_thread = (words + kThreads - 1) / kThreads;
  const int begin = min(words, static_cast<int>(threadIdx.x) * per_thread);
  return {begin, min(words, begin + per_thread)};
}

/// Ascending list of the set bits of word(0), .., word(words - 1), -1 beyond the count. All threads; returns the count.
template <typename Word>
__device__ int write_list(int words, const Word& word, int32_t* list, int64_t capacity,
                          int* warp_sums) {
  const Run run = run_of_thread(words);
  int count = 0;
  for (int w = run.begin; w < run.end; ++w) count += __popc(word(w));
  int total;
  int64_t at = block_prefix(count, &total, warp_sums);
  for (int w = run.begin; w < run.end; ++w) {
    for (uint32_t rest = word(w); rest != 0; rest &= rest - 1) {
      if (at < capacity) list[at] = w * 32 + __ffs(rest) - 1;
      ++at;
    }
  }
  for (int64_t i = total + threadIdx.x; i < capacity; i += kThreads) list[i] = -1;
  return min(static_cast<int64_t>(total), capacity);
}

/// How many chosen diagonals lie below c. words and before (set bits of earlier words) in shared memory.
__device__ int diagonals_below(const uint32_t* words, const int* before, int c) {
  return before[c / 32] + __popc(words[c / 32] & ((1u << (c % 32)) - 1));
}

/// Pairs of the words of columns that this thread sums: 64 for every query block that meets a column outside the diagonals.
__device__ int64_t column_pairs(uint32_t word, int w, int num_blocks, const uint32_t* diagonals,
                                const int* before) {
  if (word == 0) return 0;
  const int met = num_blocks - w / 2;
  return static_cast<int64_t>(__popc(word)) * (met - diagonals_below(diagonals, before, met)) *
         kBlock;
}

/// Dynamic shared memory: words of diagonals and set bits before each, one word more than there are.
struct DiagonalMemory {
  uint32_t* words;
  int* before;
  int count;
};
__device__ DiagonalMemory diagonal_memory(int num_blocks) {
  extern __shared__ uint32_t memory[];
  const int words = num_blocks / 32 + 1;
  return {memory, reinterpret_cast<int*>(memory + words), words};
}
int64_t diagonal_memory_bytes(int64_t num_blocks) { return (num_blocks / 32 + 1) * 8; }

/// Fills `before`, and returns the pairs of the diagonals. All threads.
__device__ int64_t finish_diagonals(const DiagonalMemory& d, int num_blocks, int* warp_sums,
                                    int64_t* warp_totals) {
  __syncthreads();
  const Run run = run_of_thread(d.count);
  int count = 0;
  int64_t pairs = 0;
  for (int w = run.begin; w < run.end; ++w) {
    count += __popc(d.words[w]);
    for (uint32_t rest = d.words[w]; rest != 0; rest &= rest - 1)
      pairs += (num_blocks - (w * 32 + __ffs(rest) - 1)) * kBlockPairs;
  }
  int total;
  int at = block_prefix(count, &total, warp_sums);
  for (int w = run.begin; w < run.end; ++w) {
    d.before[w] = at;
    at += __popc(d.words[w]);
  }
  return block_sum(pairs, warp_totals);
}

struct DocumentPairs {
  int64_t chosen, causal;
};
/// A thread's share of what is computed of a row of documents: nothing before the document of a query block's first row
/// (index::computed_pairs).
__device__ DocumentPairs document_pairs(const int32_t* starts, int num_blocks,
                                        const DiagonalMemory& d, Run run, const uint32_t* columns) {
  DocumentPairs pairs = {0, 0};
  for (int q = threadIdx.x; q < num_blocks; q += kThreads) {
    const int seen = q - starts[q * kBlock] / kBlock + 1;
    pairs.chosen += diagonals_below(d.words, d.before, seen) * kBlockPairs;
    pairs.causal += seen * kBlockPairs;
  }
  for (int w = run.begin; w < run.end; ++w) {
    for (uint32_t rest = columns[w]; rest != 0; rest &= rest - 1) {
      const int position = w * 32 + __ffs(rest) - 1, key_block = w / 2;
      // The last query block whose first row's document has begun at the column; starts ascend.
      int low = key_block, high = num_blocks;
      while (low + 1 < high) {
        const int middle = (low + high) / 2;
        (starts[middle * kBlock] <= position ? low : high) = middle;
      }
      const int met = low - key_block + 1;
      pairs.chosen += static_cast<int64_t>(met - diagonals_below(d.words, d.before, met)) * kBlock;
    }
  }
  return pairs;
}

struct ChoiceArgs {
  ChoiceParams p;
  IndexLists lists;
  IndexBits bits;
  uint8_t* dense_heads;
  int64_t* caps_hit;
  int32_t num_blocks, column_words, diagonal_words;  // 32-bit, 64-bit
};

__global__ void __launch_bounds__(kThreads) choice_kernel(const __grid_constant__ ChoiceArgs args) {
  __shared__ RadixBins bins;
  __shared__ Search search;
  __shared__ int warp_sums[kWarps];
  __shared__ int64_t warp_totals[kWarps];
  const ChoiceParams& p = args.p;
  const int64_t row = blockIdx.x, choice = row / p.heads_per_choice;
  const int64_t batch = row / p.num_q_heads;
  const int num_blocks = args.num_blocks;
  const DiagonalMemory d = diagonal_memory(num_blocks);
  const int64_t* masses = p.diagonal_masses + choice * (num_blocks + 1);

  int64_t sum = 0, top = 0;
  for (int c = threadIdx.x; c < num_blocks; c += kThreads) {
    sum += masses[c];
    top = max(top, masses[c]);
  }
  sum = block_sum(sum, warp_totals);
  top = block_max(top, warp_totals);
  if (threadIdx.x == 0) {
    begin_search(search, sum, num_blocks, p.p_slash, p.max_diagonals);
    search.shift = top > 0 ? 64 - __clzll(top) : 1;
    if (search.open && p.p_slash >= 1 && (p.max_diagonals < 0 || p.max_diagonals >= num_blocks))
      close_with_all(search);
  }
  constexpr int kInverseBits = 17;  // num_blocks <= 2^16
  const auto item = [&](int c, int64_t* mass, uint32_t* inverse) {
    *mass = masses[c];
    *inverse = num_blocks - 1 - c;
  };
  search_items(search, bins, num_blocks, item, kInverseBits);

  for (int first = threadIdx.x / 32 * 32; first < d.count * 32; first += kThreads) {
    const int c = first + threadIdx.x % 32;
    const bool is_chosen =
        c < num_blocks && (c < p.local_blocks || chosen(search, masses[c], num_blocks - 1 - c));
    const uint32_t word = __ballot_sync(~0u, is_chosen);
    if (threadIdx.x % 32 == 0) d.words[first / 32] = word;
  }
  const int64_t diagonal_pairs = finish_diagonals(d, num_blocks, warp_sums, warp_totals);

  // Columns with what is forced; kept in args.bits, from where this thread reads its own words again.
  uint32_t* const columns = args.bits.columns + row * args.column_words;
  const uint32_t* const chosen_columns = p.column_bits + choice * args.column_words;
  const Run run = run_of_thread(args.column_words);
  int64_t pairs = 0;
  for (int w = run.begin; w < run.end; ++w) {
    uint32_t word = chosen_columns[w];
    if (p.document_start == nullptr) {
      const int64_t left = p.sink_tokens - int64_t{w} * 32;
      if (left > 0) word |= left >= 32 ? ~0u : (1u << left) - 1;
    } else if (p.sink_tokens > 0) {
      for (int b = 0; b < 32; ++b) {
        const int position = w * 32 + b;
        if (position < p.seq_len &&
            position - p.document_start[batch * p.seq_len + position] < p.sink_tokens)
          word |= 1u << b;
      }
    }
    const int64_t real = p.seq_len - int64_t{w} * 32;
    if (real < 32) word &= (1u << real) - 1;
    columns[w] = word;
    pairs += column_pairs(word, w, num_blocks, d.words, d.before);
  }
  pairs = diagonal_pairs + block_sum(pairs, warp_totals);
  int64_t causal_pairs = static_cast<int64_t>(num_blocks) * (num_blocks + 1) / 2 * kBlockPairs;
  if (p.document_start != nullptr && p.dense_threshold < 1) {
    const DocumentPairs counted =
        document_pairs(p.document_start + batch * p.seq_len, num_blocks, d, run, columns);
    pairs = block_sum(counted.chosen, warp_totals);
    causal_pairs = block_sum(counted.causal, warp_totals);
  }
  const bool dense =
      p.dense_threshold < 1 &&
      static_cast<double>(pairs) >= p.dense_threshold * static_cast<double>(causal_pairs);
  if (dense) {
    for (int w = threadIdx.x; w < d.count; w += kThreads) {
      const int real = num_blocks - w * 32;
      d.words[w] = real >= 32 ? ~0u : real > 0 ? (1u << real) - 1 : 0;
    }
    for (int w = run.begin; w < run.end; ++w) columns[w] = 0;
  }
  __syncthreads();
  for (int w = threadIdx.x; w < args.diagonal_words; w += kThreads) {
    const uint64_t high = 2 * w + 1 < d.count ? d.words[2 * w + 1] : 0;
    args.bits.diagonals[row * args.diagonal_words + w] = d.words[2 * w] | high << 32;
  }
  const int num_diagonals = write_list(
      d.count, [&](int w) { return d.words[w]; },
      args.lists.diagonals + row * args.lists.diagonal_capacity, args.lists.diagonal_capacity,
      warp_sums);
  const int num_columns = write_list(
      args.column_words, [&](int w) { return columns[w]; },
      args.lists.columns + row * args.lists.column_capacity, args.lists.column_capacity, warp_sums);
  if (threadIdx.x == 0) {
    args.lists.num_diagonals[row] = num_diagonals;
    args.lists.num_columns[row] = num_columns;
    args.dense_heads[row] = dense;
    if (search.cut || p.columns_cut[choice] != 0) atomic_add(args.caps_hit, 1);
  }
}

__global__ void __launch_bounds__(kThreads)
    bits_kernel(IndexLists lists, int64_t seq_len, int num_blocks, int diagonal_words,
                int column_words, IndexBits bits) {
  const int64_t row = blockIdx.x;
  auto* diagonals = reinterpret_cast<unsigned long long*>(bits.diagonals + row * diagonal_words);
  uint32_t* columns = bits.columns + row * column_words;
  for (int w = threadIdx.x; w < diagonal_words; w += kThreads) diagonals[w] = 0;
  for (int w = threadIdx.x; w < column_words; w += kThreads) columns[w] = 0;
  __syncthreads();
  const auto count_of = [&](const int32_t* counts, int64_t capacity) {
    return min(max(static_cast<int64_t>(counts[row]), int64_t{0}), capacity);
  };
  const int64_t num_diagonals = count_of(lists.num_diagonals, lists.diagonal_capacity);
  for (int64_t i = threadIdx.x; i < num_diagonals; i += kThreads) {
    const int32_t c = lists.diagonals[row * lists.diagonal_capacity + i];
    if (c >= 0 && c < num_blocks) atomicOr(diagonals + c / 64, 1ull << (c % 64));
  }
  const int64_t num_columns = count_of(lists.num_columns, lists.column_capacity);
  for (int64_t i = threadIdx.x; i < num_columns; i += kThreads) {
    const int32_t j = lists.columns[row * lists.column_capacity + i];
    if (j >= 0 && j < seq_len) atomicOr(columns + j / 32, 1u << (j % 32));
  }
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

__device__ uint32_t half_word(const uint64_t* words, int w) {
  return static_cast<uint32_t>(words[w / 2] >> (w % 2 * 32));
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
  const DiagonalMemory d = diagonal_memory(num_blocks);
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

void bits_of_lists(const IndexLists& lists, int64_t rows, int64_t seq_len, const IndexBits& bits,
                   void* stream) {
  const Sizes sizes = sizes_of(seq_len);
  if (rows == 0) return;
  bits_kernel<<<grid_of("index", rows), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(
      lists, seq_len, sizes.num_blocks, sizes.diagonal_words, sizes.column_words, bits);
  check_cuda(cudaGetLastError(), "index: bits of lists");
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
