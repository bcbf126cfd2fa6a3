// The choice of one head by one thread block: which diagonals, what is forced, whether the head goes dense, its lists and bits.
//
// In:   masses by diagonal, bits of chosen columns. Out: as write_choice (lists.h). Next: lists.cu (a launch of its own), choose.cu
//       (the end of the launch that also chooses the columns).
//
// Every function is called by all kChoiceThreads threads of a block.
#pragma once

#include "mtraining/kernels/pattern_cuda/lists.h"
#include "mtraining/kernels/pattern_cuda/radix.cuh"

namespace mtraining::kernels::pattern_cuda {

inline constexpr int kChoiceThreads = 512;
inline constexpr int kChoiceWarps = kChoiceThreads / 32;
inline constexpr int64_t kBlockPairs = kBlock * kBlock;
inline constexpr int kDiagonalBits = 17;  // of an inverse position: num_blocks <= 2^16

/// Exclusive prefix of `count` over the block's threads, and the sum.
__device__ inline int block_prefix(int count, int* total, int* warp_sums) {
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
  for (int w = 0; w < kChoiceWarps; ++w) {
    if (w < warp) before += warp_sums[w];
    all += warp_sums[w];
  }
  *total = all;
  return before + sum - count;
}

/// Sum of int64 over the block, in every thread.
__device__ inline int64_t block_sum(int64_t value, int64_t* warp_sums) {
  for (int distance = 16; distance > 0; distance /= 2)
    value += __shfl_xor_sync(~0u, value, distance);
  __syncthreads();
  if (threadIdx.x % 32 == 0) warp_sums[threadIdx.x / 32] = value;
  __syncthreads();
  int64_t sum = 0;
  for (int w = 0; w < kChoiceWarps; ++w) sum += warp_sums[w];
  return sum;
}
__device__ inline int64_t block_max(int64_t value, int64_t* warp_tops) {
  for (int distance = 16; distance > 0; distance /= 2)
    value = max(value, __shfl_xor_sync(~0u, value, distance));
  __syncthreads();
  if (threadIdx.x % 32 == 0) warp_tops[threadIdx.x / 32] = value;
  __syncthreads();
  int64_t top = warp_tops[0];
  for (int w = 1; w < kChoiceWarps; ++w) top = max(top, warp_tops[w]);
  return top;
}

/// The words of a thread: a run, so that lists come out ascending.
struct Run {
  int begin, end;
};
__device__ inline Run run_of_thread(int words) {
  const int per_thread = (words + kChoiceThreads - 1) / kChoiceThreads;
  const int begin = min(words, static_cast<int>(threadIdx.x) * per_thread);
  return {begin, min(words, begin + per_thread)};
}

/// Ascending list of the set bits of word(0), .., word(words - 1); returns the count. fill_rest: -1 beyond it.
template <typename Word>
__device__ int write_list(int words, const Word& word, int32_t* list, int64_t capacity,
                          int* warp_sums, bool fill_rest = true) {
  // A warp has a run of words, and its lanes write one of them at a time: bits may be thick in places.
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int share = (words + kChoiceThreads - 1) / kChoiceThreads * 32;
  const int begin = min(words, warp * share), end = min(words, begin + share);
  const auto word_of = [&](int w) { return w < end ? word(w) : 0u; };
  int count = 0;
  for (int first = begin; first < end; first += 32) count += __popc(word_of(first + lane));
  count = __reduce_add_sync(~0u, count);
  __syncthreads();
  if (lane == 0) warp_sums[warp] = count;
  __syncthreads();
  int64_t at = 0;
  int total = 0;
  for (int w = 0; w < kChoiceWarps; ++w) {
    if (w < warp) at += warp_sums[w];
    total += warp_sums[w];
  }
  for (int first = begin; first < end; first += 32) {
    const uint32_t own = word_of(first + lane);
    int sum = __popc(own);
    for (int distance = 1; distance < 32; distance *= 2) {
      const int other = __shfl_up_sync(~0u, sum, distance);
      if (lane >= distance) sum += other;
    }
    for (uint32_t left = __ballot_sync(~0u, own != 0); left != 0; left &= left - 1) {
      const int source = __ffs(left) - 1;
      const uint32_t bits = __shfl_sync(~0u, own, source);
      const int64_t place =
          at + __shfl_sync(~0u, sum, source) - __popc(bits) + __popc(bits & ((1u << lane) - 1));
      if ((bits >> lane & 1) != 0 && place < capacity) list[place] = (first + source) * 32 + lane;
    }
    at += __shfl_sync(~0u, sum, 31);
  }
  for (int64_t i = total + threadIdx.x; fill_rest && i < capacity; i += kChoiceThreads)
    list[i] = -1;
  return min(static_cast<int64_t>(total), capacity);
}

/// How many chosen diagonals lie below c. words and before (set bits of earlier words) in shared memory.
__device__ inline int diagonals_below(const uint32_t* words, const int* before, int c) {
  return before[c / 32] + __popc(words[c / 32] & ((1u << (c % 32)) - 1));
}

/// Pairs of the words of columns that this thread sums: 64 for every query block that meets a column outside the diagonals.
__device__ inline int64_t column_pairs(uint32_t word, int w, int num_blocks,
                                       const uint32_t* diagonals, const int* before) {
  if (word == 0) return 0;
  const int met = num_blocks - w / 2;
  return static_cast<int64_t>(__popc(word)) * (met - diagonals_below(diagonals, before, met)) *
         kBlock;
}

/// Shared memory: words of diagonals and set bits before each, one word more than there are.
struct DiagonalMemory {
  uint32_t* words;
  int* before;
  int count;
};
__device__ inline DiagonalMemory diagonal_memory(uint32_t* memory, int num_blocks) {
  const int words = num_blocks / 32 + 1;
  return {memory, reinterpret_cast<int*>(memory + words), words};
}
inline int64_t diagonal_memory_bytes(int64_t num_blocks) { return (num_blocks / 32 + 1) * 8; }

/// Fills `before`, and returns the pairs of the diagonals.
__device__ inline int64_t finish_diagonals(const DiagonalMemory& d, int num_blocks, int* warp_sums,
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
__device__ inline DocumentPairs document_pairs(const int32_t* starts, int num_blocks,
                                               const DiagonalMemory& d, Run run,
                                               const uint32_t* columns) {
  DocumentPairs pairs = {0, 0};
  for (int q = threadIdx.x; q < num_blocks; q += kChoiceThreads) {
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

/// By one thread of a launch.
__device__ inline void tell_fault(const ChoiceParams& p) {
  if (p.fault == nullptr || *p.fault == 0) return;
  report_fault(p.report, {*p.fault, p.num_q_heads, p.seq_len, p.first_sample, 0, 0, 0});
}

/// What a thread block shares while it chooses.
struct ChoiceMemory {
  RadixBins bins;
  Search search;
  int warp_sums[kChoiceWarps];
  int64_t warp_totals[kChoiceWarps];
};

/// Closes the search over items [0, count) whose masses `item` gives; `is_item` leaves some out.
template <typename Item, typename IsItem>
__device__ void search_some(ChoiceMemory& m, int count, const Item& item, const IsItem& is_item,
                            double p, int64_t cap, int inverse_bits) {
  int64_t sum = 0, top = 0;
  int items = 0;
  for (int i = threadIdx.x; i < count; i += kChoiceThreads) {
    if (!is_item(i)) continue;
    int64_t mass;
    uint32_t inverse;
    item(i, &mass, &inverse);
    sum += mass;
    top = max(top, mass);
    ++items;
  }
  sum = block_sum(sum, m.warp_totals);
  items = static_cast<int>(block_sum(items, m.warp_totals));
  top = block_max(top, m.warp_totals);
  if (threadIdx.x == 0) {
    begin_search(m.search, sum, items, p, cap);
    m.search.shift = top > 0 ? 64 - __clzll(top) : 1;
    if (m.search.open && p >= 1 && (cap < 0 || cap >= items)) close_with_all(m.search);
  }
  search_items(
      m.search, m.bins, count,
      [&](int i, int64_t* mass, uint32_t* inverse) {
        if (!is_item(i)) return false;
        item(i, mass, inverse);
        return true;
      },
      inverse_bits);
}

/// Chosen diagonals (local ones too) into d.words. Returns whether a cap removed some.
__device__ inline bool choose_diagonals(const ChoiceArgs& args, int64_t choice, ChoiceMemory& m,
                                        const DiagonalMemory& d, const int64_t* masses) {
  const ChoiceParams& p = args.p;
  const int num_blocks = args.num_blocks;
  const auto item = [&](int c, int64_t* mass, uint32_t* inverse) {
    *mass = masses[c];
    *inverse = num_blocks - 1 - c;
  };
  if (p.offset_bits == nullptr) {
    search_some(
        m, num_blocks, item, [](int) { return true; }, p.p_slash, p.max_diagonals, kDiagonalBits);
    for (int first = threadIdx.x / 32 * 32; first < d.count * 32; first += kChoiceThreads) {
      const int c = first + threadIdx.x % 32;
      const bool is_chosen =
          c < num_blocks && (c < p.local_blocks || chosen(m.search, masses[c], num_blocks - 1 - c));
      const uint32_t word = __ballot_sync(~0u, is_chosen);
      if (threadIdx.x % 32 == 0) d.words[first / 32] = word;
    }
    __syncthreads();
    return m.search.cut != 0;
  }
  // An offset on the block grid lies on one diagonal, any other crosses two; those past the last do not exist.
  const uint32_t* offsets = p.offset_bits + choice * args.column_words;
  const auto word = [&](int w) { return w < args.column_words ? offsets[w] : 0u; };
  for (int first = threadIdx.x / 32 * 32; first < d.count * 32; first += kChoiceThreads) {
    const int c = first + threadIdx.x % 32;
    const bool crossed =
        c < num_blocks && ((word(2 * c) | word(2 * c + 1)) != 0 ||
                           (c > 0 && ((word(2 * c - 2) & ~1u) | word(2 * c - 1)) != 0));
    const uint32_t found = __ballot_sync(~0u, crossed);
    if (threadIdx.x % 32 == 0) d.words[first / 32] = found;
  }
  __syncthreads();
  const auto is_item = [&](int c) { return (d.words[c / 32] >> (c % 32) & 1) != 0; };
  bool cut = false;
  if (p.max_diagonals >= 0) {
    search_some(m, num_blocks, item, is_item, 1, p.max_diagonals, kDiagonalBits);
    cut = m.search.cut != 0;
  }
  for (int first = threadIdx.x / 32 * 32; first < d.count * 32; first += kChoiceThreads) {
    const int c = first + threadIdx.x % 32;
    const bool is_chosen =
        c < num_blocks &&
        (c < p.local_blocks ||
         (is_item(c) && (p.max_diagonals < 0 || chosen(m.search, masses[c], num_blocks - 1 - c))));
    const uint32_t kept = __ballot_sync(~0u, is_chosen);
    if (threadIdx.x % 32 == 0) d.words[first / 32] = kept;
  }
  __syncthreads();
  return cut;
}

/// From d.words and the bits of chosen columns to the lists and bits of one head. word_memory: shared memory for the column words, or
/// null where they do not fit. columns_are_filled: the column list holds -1s.
__device__ inline void write_head(const ChoiceArgs& args, int64_t row, ChoiceMemory& m,
                                  const DiagonalMemory& d, const uint32_t* chosen_columns,
                                  bool is_cut, uint32_t* word_memory, bool columns_are_filled) {
  const ChoiceParams& p = args.p;
  const int num_blocks = args.num_blocks;
  const int64_t batch = row / p.num_q_heads;
  const int64_t diagonal_pairs = finish_diagonals(d, num_blocks, m.warp_sums, m.warp_totals);

  // Columns with what is forced.
  uint32_t* const column_bits = args.bits.columns + row * args.column_words;
  uint32_t* const columns = word_memory != nullptr ? word_memory : column_bits;
  const Run run = run_of_thread(args.column_words);
  int64_t pairs = 0;
#pragma unroll 4
  for (int w = threadIdx.x; w < args.column_words; w += kChoiceThreads) {
    uint32_t word = __ldcg(chosen_columns + w);
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
  pairs = diagonal_pairs + block_sum(pairs, m.warp_totals);  // and the words are there for all
  int64_t causal_pairs = static_cast<int64_t>(num_blocks) * (num_blocks + 1) / 2 * kBlockPairs;
  if (p.document_start != nullptr && p.dense_threshold < 1) {
    const DocumentPairs counted =
        document_pairs(p.document_start + batch * p.seq_len, num_blocks, d, run, columns);
    pairs = block_sum(counted.chosen, m.warp_totals);
    causal_pairs = block_sum(counted.causal, m.warp_totals);
  }
  const bool dense =
      p.dense_threshold < 1 &&
      static_cast<double>(pairs) >= p.dense_threshold * static_cast<double>(causal_pairs);
  __syncthreads();
  if (dense) {
    for (int w = threadIdx.x; w < d.count; w += kChoiceThreads) {
      const int real = num_blocks - w * 32;
      d.words[w] = real >= 32 ? ~0u : real > 0 ? (1u << real) - 1 : 0;
    }
    for (int w = threadIdx.x; w < args.column_words; w += kChoiceThreads) columns[w] = 0;
  }
  __syncthreads();
  if (word_memory != nullptr) {
    for (int w = threadIdx.x; w < args.column_words; w += kChoiceThreads)
      column_bits[w] = columns[w];
  }
  for (int w = threadIdx.x; w < args.diagonal_words; w += kChoiceThreads) {
    const uint64_t high = 2 * w + 1 < d.count ? d.words[2 * w + 1] : 0;
    args.bits.diagonals[row * args.diagonal_words + w] = d.words[2 * w] | high << 32;
  }
  const int num_diagonals = write_list(
      d.count, [&](int w) { return d.words[w]; },
      args.lists.diagonals + row * args.lists.diagonal_capacity, args.lists.diagonal_capacity,
      m.warp_sums);
  const int num_columns = write_list(
      args.column_words, [&](int w) { return columns[w]; },
      args.lists.columns + row * args.lists.column_capacity, args.lists.column_capacity,
      m.warp_sums, !columns_are_filled);
  if (threadIdx.x == 0) {
    args.lists.num_diagonals[row] = num_diagonals;
    args.lists.num_columns[row] = num_columns;
    args.dense_heads[row] = dense;
    if (is_cut) atomic_add(args.caps_hit, 1);
  }
}

}  // namespace mtraining::kernels::pattern_cuda
