// The query pass of the backward: dq of one query block of a head, summed over all its keys in one order.
//
// In:   BackwardArgs. Out: dq. Next: one instantiation a file, backward_queries_<dtype>_d<head_dim>.cu.
#pragma once

#include "mtraining/kernels/sm80/backward_products.cuh"
#include "mtraining/kernels/sm80/launch_shared.cuh"
#include "mtraining/kernels/sm80/query_list.cuh"
#include "mtraining/kernels/sm80/query_scores.cuh"

namespace mtraining::kernels::sm80 {

template <int kD>
struct BackwardQueriesShape : BackwardShape<kD> {
  using Base = BackwardShape<kD>;
  using List = QueryList<1, Base::kWarps, Base::kThreads + kStagesKept,
                         kQueryColumns * Base::kWarps + kStagesKept>;
  // Steps of the queries' and the output gradients' rows that registers have room for.
  static constexpr int kQueriesHeld = kD == 128 ? 7 : 4;
  static constexpr int kDoutsHeld = kD == 128 ? 0 : 4;
  static constexpr int shared_bytes(int stages) {
    return (2 + 2 * stages) * Tile<kD>::kBytes + Base::kPassedBytes +
           static_cast<int>(sizeof(typename List::Memory));
  }
};

template <typename Element, int kD>
struct BackwardQueries {
  using Shape = BackwardQueriesShape<kD>;
  using List = typename Shape::List;
  const BackwardArgs& args;
  uint32_t queries, douts, walked, passed;  // shared addresses; passed: dS of a stage
  List list;
  int first, column, summed, lane;  // of the warp: row, key of its scores, gradient column
  int row = 0, q_block = 0;
  float dq[Shape::kSummed];
  LeftRows<kD, Shape::kQueriesHeld> query_left;
  LeftRows<kD, Shape::kDoutsHeld> dout_left;
  // Of rows first + lane / 4 and each 8 below; lse in powers of two, +inf where the row is empty.
  float lse[4], delta[4];

  __device__ __forceinline__ BackwardQueries(const BackwardArgs& a, char* memory)
      : args(a),
        queries(shared_address(memory)),
        douts(queries + Tile<kD>::kBytes),
        walked(douts + Tile<kD>::kBytes),
        passed(walked + 2 * a.stages * Tile<kD>::kBytes),
        list(a, *reinterpret_cast<typename List::Memory*>(
                    memory + (2 + 2 * a.stages) * Tile<kD>::kBytes + Shape::kPassedBytes)),
        first(Shape::row()),
        column(Shape::share() * Shape::kColumns),
        summed(Shape::share() * Shape::kSummed),
        lane(threadIdx.x % 32) {
    query_left.at = Tile<kD>::left(queries, first, lane);
    dout_left.at = Tile<kD>::left(douts, first, lane);
  }

  __device__ __forceinline__ uint32_t keys(int i) const {
    return walked + (i & (args.stages - 1)) * 2 * Tile<kD>::kBytes;
  }

  __device__ __forceinline__ void issue(int i) {
    if (i < list.built()) {
#pragma unroll 1
      for (int values = 0; values < 2; ++values)
        list.template load<kD>(i, values == 1, keys(i) + values * Tile<kD>::kBytes);
    }
    copy_async_commit();
  }

  __device__ __forceinline__ void begin_item() {
    list.begin(row, q_block);
    const int batch = row / args.num_heads, head = row % args.num_heads;
    const QueryBounds bounds = list.bounds(0);
    load_any_tile<kD, Shape::kThreads>(queries,
                                       query_rows(args, args.q, batch, head, q_block, bounds),
                                       args.head_dim, args.vectors);
    load_any_tile<kD, Shape::kThreads>(douts,
                                       query_rows(args, args.dout, batch, head, q_block, bounds),
                                       args.head_dim, args.vectors);
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const int inside = first + lane / 4 + 8 * r;
      const int token = q_block * 64 + inside;
      lse[r] = -INFINITY;
      delta[r] = 0;
      if (token < args.num_queries &&
          bounds.first + inside * int64_t{args.position_stride} <= bounds.last) {
        const int64_t at = int64_t{row} * args.num_queries + token;
        lse[r] = args.lse[at] * 1.4426950408889634f;
        delta[r] = args.delta[at];
      }
      if (lse[r] == -INFINITY) {
        lse[r] = INFINITY;
        delta[r] = 0;
      }
    }
#pragma unroll
    for (int x = 0; x < Shape::kSummed; ++x) dq[x] = 0;
  }

  /// 0 to probabilities of rows that see one key.
  __device__ __forceinline__ void forget_lone_keys(float (&p)[Shape::kColumns], int i) const {
    const Stage stage = list.stage(i);
    if ((stage.info & kColumns) != 0) return;
    const int keys = min(64, args.sources[stage.info & 0xFF].num_keys - stage.key * 64);
    uint32_t lone = 0;  // bit x: of p[x]
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const int inside = first + lane / 4 + 8 * r;
      const int token = q_block * 64 + inside;
      const int document =
          args.document_start != nullptr && token < args.num_queries
              ? args.document_start[row / args.num_heads * args.document_stride_batch + token]
              : 0;
      const int at = lone_key(list.bounds(0).first + inside * args.position_stride, document,
                              stage.start, args.position_stride, keys) -
                     column - lane % 4 * 2;
      if (at >= 0 && at < Shape::kColumns && at % 8 < 2)
        lone |= 1u << (at / 8 * 8 + 2 * r + at % 8);
    }
    if (lone == 0) return;
#pragma unroll
    for (int x = 0; x < Shape::kColumns; ++x)
      if ((lone >> x & 1) != 0 && p[x] >= all_weight(lse[x / 2 % 4])) p[x] = 0;
  }

  __device__ __forceinline__ void compute(int i) {
    constexpr int kColumns = Shape::kColumns;
    if (i == 0) {
      query_left.hold();
      dout_left.hold();
    }
    const uint32_t right = Tile<kD>::right(keys(i), lane) + column * Tile<kD>::kRowBytes;
    float s[kColumns], dp[kColumns];
    transposed_product<Element, kD>(s, query_left, right, Nothing{});
    if ((list.stage(i).info & kMasked) != 0)
      mask_scores<4, kColumns>(s, args, list, i, 0, q_block, first, column, lane);
    transposed_product<Element, kD>(dp, dout_left, right + Tile<kD>::kBytes, [&](int x) {
      s[x] = exp2_approx(fmaf(s[x], args.scale_log2, -lse[x / 2 % 4]));
    });
    if ((list.stage(i).info & kMasked) != 0) forget_lone_keys(s, i);
#pragma unroll
    for (int x = 0; x < kColumns; ++x) s[x] *= dp[x] - delta[x / 2 % 4];
    typename Shape::Packed own;
    pack_rows<Element, kColumns>(own, s);
    store_rows(passed, own, first, column, lane);
    add_product<Element, kD, Shape::kSummed, kColumns>(
        dq, own, Tile<64>::left(passed, first, lane), column, Tile<kD>::summed(keys(i), lane),
        summed, [] { Shape::meet(); }, Nothing{});
  }

  __device__ __forceinline__ void store() {
    const int64_t batch = row / args.num_heads, head = row % args.num_heads;
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const int64_t token = q_block * 64 + first + lane / 4 + 8 * r;
      const bool none = lse[r] == INFINITY;
      if (args.dq_rounded.data != nullptr) {
        device::store_rounded<Element, Shape::kSummed>(
            args.dq_rounded.row(batch, token, head) + summed, nullptr, token < args.num_queries,
            args.head_dim - summed, args.vector_rounded, lane, [&](int j) {
              return none ? make_float2(0, 0)
                          : make_float2(dq[8 * j + 2 * r] * args.scale,
                                        dq[8 * j + 2 * r + 1] * args.scale);
            });
        continue;
      }
      if (none) continue;
      float* at = args.dq.data + batch * args.dq.stride_batch + token * args.dq.stride_token +
                  head * args.dq.stride_head + summed + 2 * (lane % 4);
#pragma unroll
      for (int j = 0; j < Shape::kSummed / 8; ++j) {
        if (summed + 8 * j >= args.head_dim) break;
        const float x = dq[8 * j + 2 * r] * args.scale, y = dq[8 * j + 2 * r + 1] * args.scale;
        if (args.vector_dq) {
          auto* pair = reinterpret_cast<float2*>(at + 8 * j);
          const float2 before = *pair;
          *pair = make_float2(before.x + x, before.y + y);
        } else {
          at[8 * j] += x;
          at[8 * j + 1] += y;
        }
      }
    }
  }

  __device__ __forceinline__ void run_item() {
    begin_item();
    for (int i = 0;; ++i) {
      list.refill(i, args.stages);
      if (i == 0 && args.stages > 1) issue(0);
      if (i >= list.built()) break;
      if (args.stages > 1) {
        copy_async_wait<0>();
        __syncthreads();
        issue(i + 1);
      } else {
        __syncthreads();
        issue(i);
        copy_async_wait<0>();
        __syncthreads();
      }
      compute(i);
    }
    if (list.built() > 0 || args.dq_rounded.data != nullptr) store();
    copy_async_wait<0>();
  }

  __device__ __forceinline__ void run(int32_t* shared_item) {
    int taken = 0;
    if (threadIdx.x == 0) taken = atomicAdd(args.next_item, 1);
    for (;;) {
      __syncthreads();
      if (threadIdx.x == 0) {
        *shared_item = taken;
        taken = atomicAdd(args.next_item, 1);
      }
      __syncthreads();
      const int item = *shared_item;
      if (item >= args.num_rows * args.num_q_blocks) return;
      // Heads of a kv head together, the last query blocks first.
      const int group = args.heads_per_kv_head;
      const int inside = item % (group * args.num_q_blocks);
      row = item / (group * args.num_q_blocks) * group + inside % group;
      q_block = args.num_q_blocks - 1 - inside / group;
      run_item();
    }
  }
};

template <typename Element, int kD>
__global__ void __launch_bounds__(BackwardShape<kD>::kThreads, BackwardShape<kD>::kBlocksPerSm)
    backward_queries_kernel(const __grid_constant__ BackwardArgs args) {
  extern __shared__ __align__(1024) char memory[];
  using List = typename BackwardQueriesShape<kD>::List;
  auto* list = reinterpret_cast<typename List::Memory*>(
      memory + (2 + 2 * args.stages) * Tile<kD>::kBytes + BackwardShape<kD>::kPassedBytes);
  BackwardQueries<Element, kD> pass(args, memory);
  pass.run(&list->item);
}

template <typename Element, int kD>
cudaError_t launch_backward_queries(const BackwardArgs& args, const Launch& l) {
  static std::atomic<uint64_t> ready{0};  // bit per device
  const cudaError_t error = allow_shared_memory(backward_queries_kernel<Element, kD>, ready);
  if (error != cudaSuccess) return error;
  // clang-format off
  backward_queries_kernel<Element, kD>
      <<<l.blocks, BackwardShape<kD>::kThreads, l.shared_bytes, l.stream>>>(args);
  // clang-format on
  return cudaGetLastError();
}

}  // namespace mtraining::kernels::sm80
