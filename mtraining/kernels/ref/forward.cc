// Query-stationary forward: one task is one (sample, head, query block); its sums stay in scratch
// over all sources.
#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <vector>

#include "mtraining/base/parallel.h"
#include "mtraining/kernels/attention_kernels.h"
#include "mtraining/kernels/merge_row.h"
#include "mtraining/kernels/ref/rounding.h"
#include "mtraining/kernels/ref/tile_ops.h"
#include "mtraining/kernels/ref/walk.h"
#include "mtraining/kernels/validate.h"

namespace mtraining::kernels::ref {
namespace {

template <typename T>
struct ForwardScratch {
  explicit ForwardScratch(int64_t depth)
      : rows(kTile * depth),
        q_lanes(kTile * depth),
        out_lanes(kTile * depth),
        scores(kTile * kTile),
        keys(depth),
        values(depth) {}
  Scratch<T> rows, q_lanes, out_lanes, scores;
  KeyRows<T> keys, values;
  alignas(64) T row_max[kTile], row_sum[kTile], rescale[kTile];
  QueryTile<T> q;
  KeyTile<T> k[2];
};

template <typename T>
class Forward {
 public:
  explicit Forward(const ForwardParams& params)
      : p_(params),
        ops_(tile_ops<T>()),
        depth_(padded_depth(params.head_dim)),
        group_(params.num_q_heads / params.num_kv_heads) {}

  void run() {
    const int64_t num_q_blocks = blocks_of(p_.num_queries);
    std::vector<std::unique_ptr<ForwardScratch<T>>> scratch(num_threads());
    // Late query blocks see the most keys: they go first.
    parallel_for(p_.batch * p_.num_q_heads * num_q_blocks, [&](int64_t task, int worker) {
      if (!scratch[worker]) scratch[worker] = std::make_unique<ForwardScratch<T>>(depth_);
      const int64_t row = task / num_q_blocks;
      query_block(row / p_.num_q_heads, row % p_.num_q_heads,
                  num_q_blocks - 1 - task % num_q_blocks, *scratch[worker]);
    });
  }

 private:
  void query_block(int64_t batch, int64_t head, int64_t q_block, ForwardScratch<T>& s) const {
    const int64_t row = batch * p_.num_q_heads + head;
    make_query_tile(p_, batch, q_block, s.q);
    prefetch_block(p_, p_.q, p_.dtype, batch, head, q_block - 1);  // the next task
    if (ref::needs_out(p_)) {
      prefetch_block(p_, const_of(p_.out), state_dtype(p_.dtype), batch, head, q_block);
    }
    for (int i = 0; i < kTile; ++i) {
      s.row_max[i] = -std::numeric_limits<T>::infinity();
      s.row_sum[i] = 0;
    }
    const auto keys_of = [&](int n) {
      return head_of(p_.sources[n].k, batch, head / group_, p_.dtype);
    };
    const auto values_of = [&](int n) {
      return head_of(p_.sources[n].v, batch, head / group_, p_.dtype);
    };
    bool loaded = false;
    for_each_key_tile(
        p_, row, q_block, s.q, KeyRange{}, s.k,
        [&](const KeyTile<T>& k) {
          const KeySource& source = p_.sources[k.source];
          prefetch_rows<false>(keys_of(k.source), source.k.stride_token, k.rows, k.num_keys,
                               p_.head_dim, size_of(p_.dtype));
          prefetch_rows<false>(values_of(k.source), source.v.stride_token, k.rows, k.num_keys,
                               p_.head_dim, size_of(p_.dtype));
        },
        [&](const KeyTile<T>& k) {
          const KeySource& source = p_.sources[k.source];
          if (!loaded) {
            ops_.load_rows(p_.dtype, head_of(p_.q, batch, head, p_.dtype), p_.q.stride_token,
                           s.q.rows, kTile, p_.head_dim, depth_, s.rows);
            ops_.transpose_to_lanes(s.rows, depth_, static_cast<T>(p_.softmax_scale), s.q_lanes);
          }
          const T* const* k_rows = s.keys.point(ops_, p_, source.k, batch, head / group_, k);
          compute_scores<T>(ops_, p_, row, s.q, k, depth_, k_rows, s.q_lanes, s.scores);
          const bool moved =
              ops_.online_softmax(k.num_keys, s.scores, s.row_max, s.row_sum, s.rescale);
          if (loaded && moved) ops_.scale_lanes(depth_, s.rescale, s.out_lanes);
          const T* const* v_rows = s.values.point(ops_, p_, source.v, batch, head / group_, k);
          ops_.weighted_values(k.num_keys, depth_, v_rows, s.scores, loaded, s.out_lanes);
          loaded = true;
        });
    finish(batch, head, loaded, s);
  }

  /// Normalises the sums and writes them, or merges them into what is there; or gives the rounded result of both.
  void finish(int64_t batch, int64_t head, bool any, ForwardScratch<T>& s) const {
    constexpr T kEmpty = -std::numeric_limits<T>::infinity();
    const bool rounds = p_.rounded.data != nullptr;
    if (!any && !p_.first && !rounds) return;
    if (any) {
      for (int i = 0; i < kTile; ++i) s.rescale[i] = s.row_sum[i] == 0 ? T{1} : s.row_sum[i];
      ops_.transpose_to_rows(s.out_lanes, depth_, s.rescale, s.rows);
    }
    T* lse = static_cast<T*>(p_.lse) + (batch * p_.num_q_heads + head) * p_.num_queries + s.q.first;
    for (int i = 0; i < s.q.num_rows; ++i) {
      const bool empty = !any || s.row_sum[i] == 0;
      const T row_lse = empty ? kEmpty : s.row_max[i] + std::log(s.row_sum[i]);
      const T* row_out = s.rows + i * depth_;
      const T* state = nullptr;
      if (!p_.first || !rounds)
        state = head_of<T>(p_.out, batch, head) + (s.q.first + i) * p_.out.stride_token;
      // Where the result goes as it is; q's lanes are done with.
      T* out = rounds ? static_cast<T*>(s.q_lanes) : const_cast<T*>(state);
      if (!p_.first) {
        if (rounds) std::copy(state, state + p_.head_dim, out);
        merge_row(p_.head_dim, out, lse + i, row_out, row_lse);
      } else {
        if (empty) {
          std::fill(out, out + p_.head_dim, T{0});
        } else {
          std::copy(row_out, row_out + p_.head_dim, out);
        }
        lse[i] = row_lse;
      }
      if (rounds) {
        round_row(out, p_.head_dim, p_.dtype, row_of(p_.rounded, batch, head, s.q.first + i),
                  row_of(p_.residual, batch, head, s.q.first + i));
      }
    }
  }

  /// A row of dtype; null where the view is.
  void* row_of(const View& view, int64_t batch, int64_t head, int64_t token) const {
    if (view.data == nullptr) return nullptr;
    return static_cast<char*>(view.data) +
           (batch * view.stride_batch + head * view.stride_head + token * view.stride_token) *
               size_of(p_.dtype);
  }

  const ForwardParams& p_;
  const TileOps<T>& ops_;
  const int64_t depth_;
  const int64_t group_;  // query heads of a kv head
};

}  // namespace

bool needs_out(const ForwardParams& params) {
  return kernels::needs_out(params, std::numeric_limits<int>::max());
}

void forward(const ForwardParams& params) {
  check(params, std::numeric_limits<int>::max());
  check_lists(params);
  if (params.dtype == DType::kFloat64) {
    Forward<double>(params).run();
  } else {
    Forward<float>(params).run();
  }
}

}  // namespace mtraining::kernels::ref
