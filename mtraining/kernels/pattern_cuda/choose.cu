#include <algorithm>
#include <map>
#include <mutex>

#include "mtraining/base/check.h"
#include "mtraining/kernels/dispatch.h"
#include "mtraining/kernels/pattern_cuda/choice.cuh"
#include "mtraining/kernels/pattern_cuda/choose.h"
#include "mtraining/kernels/pattern_cuda/device.h"
#include "mtraining/kernels/pattern_cuda/select.cuh"

namespace mtraining::kernels::pattern_cuda {
namespace {

constexpr int kThreads = kChoiceThreads;
// Shared memory of a thread block: what an SM of every architecture has.
constexpr int kMostBytes = 94 << 10;
// Keys of the last bin that fit where the first bins were.
constexpr int kKeptMatches = kFirstBins;

/// What the thread blocks of a choice tell each other; begins as zeros.
struct Meeting {
  unsigned of_keys, of_all;  // arrivals
  int32_t num_matches;
  int32_t diagonals_cut, columns_cut;
};

struct ChooseArgs {
  ChoiceArgs choice;
  Keys keys;
  const int64_t* totals;
  double p;
  int64_t cap;
  int64_t* histogram;  // [choices, 4096, 2]
  Meeting* meetings;   // [choices]
  int32_t* candidates;
  uint32_t *column_bits, *diagonal_words;  // [choices, ..]
  int32_t choices, groups;
  bool masses_fit, words_fit;  // into shared memory
};

/// Keys of a share that may be chosen, where they are so few that they fit.
constexpr int kKeptKeys = 3584;
struct KeptKeys {
  int64_t masses[kKeptKeys];
  int32_t keys[kKeptKeys];
};

/// Shared memory: bins first, what was found in the last of them after that.
union KeyMemory {
  FirstBins bins;
  struct {
    int64_t masses[kKeptMatches];
    uint32_t inverses[kKeptMatches];
  } matches;
};
static_assert(sizeof(KeyMemory) == sizeof(FirstBins));

/// All thread blocks that count on `arrivals` have arrived `target` times, and see what was written before.
__device__ void meet(unsigned* arrivals, unsigned target) {
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    atomicAdd(arrivals, 1u);
    unsigned seen;
    do {
      asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(arrivals) : "memory");
    } while (seen < target);
    __threadfence();
  }
  __syncthreads();
}

/// Writes -1 to [begin, end), 16 bytes at a time.
__device__ void clear(int32_t* begin, int32_t* end) {
  int32_t* const first =
      reinterpret_cast<int32_t*>((reinterpret_cast<uintptr_t>(begin) + 15) & ~uintptr_t{15});
  int32_t* const last =
      reinterpret_cast<int32_t*>(reinterpret_cast<uintptr_t>(end) & ~uintptr_t{15});
  if (first >= last) {
    for (int32_t* at = begin + threadIdx.x; at < end; at += kThreads) *at = -1;
    return;
  }
  for (int4* at = reinterpret_cast<int4*>(first) + threadIdx.x; at < reinterpret_cast<int4*>(last);
       at += kThreads)
    *at = {-1, -1, -1, -1};
  if (begin + threadIdx.x < first) begin[threadIdx.x] = -1;
  if (last + threadIdx.x < end) last[threadIdx.x] = -1;
}

/// A share of a choice's keys: leaves their bits in args.column_bits, and whether the cap cut in memory.search.
__device__ void choose_keys(const ChooseArgs& args, int64_t choice, int part, KeyMemory& kept,
                            KeptKeys& list, int& num_listed, ChoiceMemory& memory,
                            int64_t* warp_sums) {
  const Keys& keys = args.keys;
  Meeting& meeting = args.meetings[choice];
  const int begin = part * keys.chunk_keys, end = min(keys.num_keys, begin + keys.chunk_keys);
  // Keys of less than that, all of them together, hold less than what may be left out, with room for the budget's rounding.
  int64_t least = 0;
  if (args.totals != nullptr && args.p < 1) {
    least = static_cast<int64_t>((1 - args.p) * (63.0 / 64) *
                                 (static_cast<double>(args.totals[choice]) / keys.seq_len));
    uint64_t prefix;
    int32_t shift;
    prefix_of_bin(first_bin(least), &prefix, &shift);
    least = static_cast<int64_t>(prefix << shift);  // bins are passed over whole or not at all
  }
  uint32_t* const bits = args.column_bits + choice * args.choice.column_words;
  for (int first = begin + 32 * static_cast<int>(threadIdx.x); first < end;
       first += 32 * kThreads) {
    const int word = (keys.block_starts[first / 64] + first % 64) / 32;
    if (word < args.choice.column_words) bits[word] = 0;
  }
  if (threadIdx.x == 0) num_listed = 0;
  fill_first_bins<kThreads>(keys, choice, begin, end, least, kept.bins, [&](int key, int64_t mass) {
    if (least == 0) return;
    const int at = atomicAdd(&num_listed, 1);
    if (at >= kKeptKeys) return;
    list.keys[at] = key;
    list.masses[at] = mass;
  });
  const bool is_listed = least > 0 && num_listed <= kKeptKeys;
  int64_t* const histogram = args.histogram + choice * kFirstBins * 2;
  add_first_bins<kThreads>(kept.bins, histogram);
  meet(&meeting.of_keys, keys.chunks);

  Search& s = memory.search;
  pick_first_bin<kThreads>(histogram, s, warp_sums, args.p, args.cap);
  if (s.open) {  // in all thread blocks of the choice, or in none
    if (is_listed) {
      for (int i = threadIdx.x; i < num_listed; i += kThreads)
        if (first_bin(list.masses[i]) == s.bin)
          args.candidates[choice * keys.num_keys + atomicAdd(&meeting.num_matches, 1)] =
              list.keys[i];
    } else {
      collect_keys<kThreads>(keys, choice, begin, end, s.bin, args.candidates,
                             &meeting.num_matches);
    }
    meet(&meeting.of_keys, 2 * keys.chunks);
    const int num_matches = __ldcg(&meeting.num_matches);
    const Matches found{keys, args.candidates, choice};
    if (num_matches <= kKeptMatches) {
      for (int i = threadIdx.x; i < num_matches; i += kThreads)
        found(i, &kept.matches.masses[i], &kept.matches.inverses[i]);
      search_items(
          s, memory.bins, num_matches,
          [&](int i, int64_t* mass, uint32_t* inverse) {
            *mass = kept.matches.masses[i];
            *inverse = kept.matches.inverses[i];
            return true;
          },
          kInverseBits);
    } else {
      search_items(s, memory.bins, num_matches, found, kInverseBits);
    }
  }
  if (!is_listed) {
    mark_keys<kThreads>(keys, choice, begin, end, s, args.column_bits, args.choice.column_words);
    return;
  }
  for (int i = threadIdx.x; i < num_listed; i += kThreads) {
    const int position = position_of(keys, list.keys[i]);
    if (chosen(s, list.masses[i], inverse_of(keys, position)))
      atomicOr(bits + position / 32, 1u << (position % 32));
  }
}

__global__ void __launch_bounds__(kThreads) choose_kernel(const __grid_constant__ ChooseArgs args) {
  extern __shared__ uint4 memory_bytes[];
  KeyMemory& kept = *reinterpret_cast<KeyMemory*>(memory_bytes);
  __shared__ ChoiceMemory memory;
  __shared__ int64_t warp_sums[2 * kChoiceWarps];
  __shared__ int num_listed;
  const ChoiceParams& p = args.choice.p;
  const IndexLists& lists = args.choice.lists;
  const int num_blocks = args.choice.num_blocks, shared = static_cast<int>(p.heads_per_choice);
  const int parts = args.keys.chunks + 1, part = static_cast<int>(blockIdx.x) % parts;
  const bool has_diagonals = part == args.keys.chunks;
  const DiagonalMemory d = diagonal_memory(reinterpret_cast<uint32_t*>(memory_bytes), num_blocks);
  if (blockIdx.x == 0 && threadIdx.x == 0) tell_fault(p);
  // Beside the diagonals, their masses while they are chosen, the words of columns later.
  uint32_t* const rest = reinterpret_cast<uint32_t*>(memory_bytes) + (2 * d.count + 3) / 4 * 4;
  for (int64_t choice = blockIdx.x / parts; choice < args.choices; choice += args.groups) {
    Meeting& meeting = args.meetings[choice];
    uint32_t* const words = args.diagonal_words + choice * d.count;
    __syncthreads();  // the memory is free
    if (has_diagonals) {
      const int64_t* masses = p.diagonal_masses + choice * (num_blocks + 1);
      if (args.masses_fit) {
        auto* const near = reinterpret_cast<int64_t*>(rest);
        for (int c = threadIdx.x; c < num_blocks; c += kThreads) near[c] = masses[c];
        masses = near;
        __syncthreads();
      }
      const bool cut = choose_diagonals(args.choice, choice, memory, d, masses);
      for (int w = threadIdx.x; w < d.count; w += kThreads) words[w] = d.words[w];
      if (threadIdx.x == 0) meeting.diagonals_cut = cut;
    } else {
      // Rows of the lists hold -1s where nothing else will be written: each thread block its share of them.
      const int64_t capacity = lists.column_capacity * shared;
      const int64_t share = (capacity + args.keys.chunks - 1) / args.keys.chunks;
      clear(lists.columns + choice * capacity + min(capacity, part * share),
            lists.columns + choice * capacity + min(capacity, (part + 1) * share));
      choose_keys(args, choice, part, kept, *reinterpret_cast<KeptKeys*>(&kept + 1), num_listed,
                  memory, warp_sums);
      // Every share has the same search; one of them says where the cap cut.
      if (part == 0 && threadIdx.x == 0) meeting.columns_cut = memory.search.cut;
    }
    meet(&meeting.of_all, parts);
    for (int head = part; head < shared; head += parts) {
      for (int w = threadIdx.x; w < d.count; w += kThreads) d.words[w] = __ldcg(words + w);
      const bool cut = __ldcg(&meeting.diagonals_cut) != 0 || __ldcg(&meeting.columns_cut) != 0;
      __syncthreads();
      write_head(args.choice, choice * shared + head, memory, d,
                 args.column_bits + choice * args.choice.column_words, cut,
                 args.words_fit ? rest : nullptr, true);
      __syncthreads();
    }
  }
}

int64_t align(int64_t bytes) { return (bytes + 255) / 256 * 256; }
int64_t diagonal_words(int64_t seq_len) { return (seq_len + kBlock - 1) / kBlock / 32 + 1; }

/// Thread blocks that one SM of the current device runs at a time with so much shared memory.
int blocks_an_sm(int64_t bytes) {
  static std::mutex mutex;
  static std::map<std::pair<int, int64_t>, int> known;
  int device = 0;
  check_cuda(cudaGetDevice(&device), "asking for the device");
  const std::lock_guard<std::mutex> lock(mutex);
  const auto [at, is_unknown] = known.try_emplace({device, bytes}, 0);
  if (is_unknown) {
    check_cuda(cudaFuncSetAttribute(choose_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    kMostBytes),
               "choosing: shared memory");
    check_cuda(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&at->second, choose_kernel, kThreads,
                                                             static_cast<size_t>(bytes)),
               "choosing: occupancy");
  }
  return at->second;
}

}  // namespace

int64_t choose_zeroed_bytes(int64_t choices) {
  return align(choices * kFirstBins * 2 * 8) +
         align(choices * static_cast<int64_t>(sizeof(Meeting)));
}

int64_t choose_workspace_bytes(int64_t choices, int64_t num_keys, int64_t seq_len) {
  return choose_zeroed_bytes(choices) + align(choices * num_keys * 4) +
         align(choices * ((seq_len + 31) / 32) * 4) + align(choices * diagonal_words(seq_len) * 4);
}

void choose(const ChooseParams& params, const IndexLists& lists, const IndexBits& bits,
            uint8_t* dense_heads, int64_t* caps_hit) {
  const ChoiceParams& p = params.choice;
  const auto stream = static_cast<cudaStream_t>(p.stream);
  const int64_t num_blocks = (p.seq_len + kBlock - 1) / kBlock;
  MT_CHECK_SUPPORTED(num_blocks <= kMaxBlocks, "an index on a GPU: expected at most ",
                     kMaxBlocks * kBlock, " tokens, got ", p.seq_len);
  const int64_t choices = p.batch * p.num_q_heads / p.heads_per_choice;
  if (!params.zeroed)
    check_cuda(cudaMemsetAsync(caps_hit, 0, sizeof(int64_t), stream), "index: resetting caps_hit");
  if (choices == 0) return;
  MT_CHECK_ARG(params.workspace != nullptr && params.column_masses != nullptr &&
                   params.block_starts != nullptr && p.diagonal_masses != nullptr,
               "choosing: expected pointers, got a null one");
  ChooseArgs args = {};
  args.choice = {p,
                 lists,
                 bits,
                 dense_heads,
                 caps_hit,
                 static_cast<int32_t>(num_blocks),
                 static_cast<int32_t>((p.seq_len + 31) / 32),
                 static_cast<int32_t>((num_blocks + 63) / 64)};
  char* memory = static_cast<char*>(params.workspace);
  const auto take = [&](int64_t bytes) {
    char* const at = memory;
    memory += align(bytes);
    return at;
  };
  args.histogram = reinterpret_cast<int64_t*>(take(choices * kFirstBins * 2 * 8));
  args.meetings = reinterpret_cast<Meeting*>(take(choices * static_cast<int64_t>(sizeof(Meeting))));
  args.candidates = reinterpret_cast<int32_t*>(take(choices * params.num_keys * 4));
  args.column_bits = reinterpret_cast<uint32_t*>(take(choices * args.choice.column_words * 4));
  args.diagonal_words = reinterpret_cast<uint32_t*>(take(choices * diagonal_words(p.seq_len) * 4));
  if (!params.zeroed) {
    check_cuda(cudaMemsetAsync(params.workspace, 0, choose_zeroed_bytes(choices), stream),
               "choosing: resetting the histogram");
  }
  args.totals = params.totals;
  args.p = params.p_vertical;
  args.cap = params.max_columns;
  args.choices = static_cast<int32_t>(choices);

  int64_t bytes =
      std::max<int64_t>(sizeof(KeyMemory) + sizeof(KeptKeys), diagonal_memory_bytes(num_blocks));
  const auto fits = [&](int64_t more) {
    const int64_t wanted = diagonal_memory_bytes(num_blocks) + 16 + more;
    if (wanted > kMostBytes) return false;
    bytes = std::max(bytes, wanted);
    return true;
  };
  args.masses_fit = fits(num_blocks * 8);
  args.words_fit = fits(int64_t{args.choice.column_words} * 4);
  const int64_t sms = device_of_stream().num_sms, resident = sms * blocks_an_sm(bytes);
  MT_CHECK_EXTERNAL(resident >= 2, "choosing: the device runs no two thread blocks at a time");
  // A thread block an SM where there are few choices; two or more a choice in any case.
  const int64_t most = std::max<int64_t>(1, (params.num_keys + 2047) / 2048);
  const int64_t shares = std::clamp<int64_t>(sms / choices - 1, 1, most);
  args.keys = {params.column_masses,
               params.block_starts,
               static_cast<int32_t>(params.num_keys),
               static_cast<int32_t>(p.seq_len),
               static_cast<int32_t>(shares),
               static_cast<int32_t>(((params.num_keys + shares - 1) / shares + 63) / 64 * 64)};
  args.groups = static_cast<int32_t>(
      std::min<int64_t>(choices, std::max<int64_t>(1, resident / (shares + 1))));
  void* arguments[] = {&args};
  check_cuda(cudaLaunchCooperativeKernel(
                 choose_kernel, dim3(static_cast<unsigned>(args.groups * (shares + 1))),
                 dim3(kThreads), arguments, static_cast<size_t>(bytes), stream),
             "choosing");
}

}  // namespace mtraining::kernels::pattern_cuda
