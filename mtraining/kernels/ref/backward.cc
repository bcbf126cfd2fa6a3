// Query-stationary backward: a task owns a range of key rows of one (sample, kv head) and walks its
// query heads in order, so that every dk, dv row is summed in one order by one task. dq of a query
// block is a sum over the ranges: each task waits until the range before it has added its part. The
// ranges depend on params alone, not on the thread count.
#include <atomic>
#include <cmath>
#include <limits>
#include <memory>
#include <thread>
#include <vector>

#include "mtraining/base/parallel.h"
#include "mtraining/kernels/attention_kernels.h"
#include "mtraining/kernels/ref/tile_ops.h"
#include "mtraining/kernels/ref/walk.h"
#include "mtraining/kernels/validate.h"

namespace mtraining::kernels::ref {
namespace {

template <typename T>
struct BackwardScratch {
  explicit BackwardScratch(int64_t depth)
      : q_rows(kTile * depth),
        q_lanes(kTile * depth),
        dout_rows(kTile * depth),
        dout_lanes(kTile * depth),
        dq(kTile * depth),
        p(kTile * kTile),
        dp(kTile * kTile),
        keys(depth),
        values(depth),
        key_gradients(depth),
        value_gradients(depth) {}
  Scratch<T> q_rows, q_lanes, dout_rows, dout_lanes, dq, p, dp;
  KeyRows<T> keys, values;
  GradientRows<T> key_gradients, value_gradients;
  alignas(64) T lse[kTile], delta[kTile];
  QueryTile<T> q;
  KeyTile<T> k[2];
};

template <typename T>
class Backward {
 public:
  explicit Backward(const BackwardParams& params)
      : p_(params),
        ops_(tile_ops<T>()),
        depth_(padded_depth(params.head_dim)),
        group_(params.num_q_heads / params.num_kv_heads),
        num_q_blocks_(blocks_of(params.num_queries)) {
    for (int n = 0; n < p_.num_sources; ++n)
      first_unit_.push_back(first_unit_.back() + blocks_of(p_.sources[n].num_keys));
  }

  void run() {
    const int64_t groups = p_.batch * p_.num_kv_heads;
    if (groups == 0 || num_q_blocks_ == 0 || first_unit_.back() == 0) return;
    const std::vector<std::vector<KeyRange>> ranges = split();
    const int64_t parts = static_cast<int64_t>(ranges[0].size());
    std::vector<Progress> progress(groups * parts);
    std::vector<std::unique_ptr<BackwardScratch<T>>> scratch(num_threads());
    // All first ranges, then all second ones: a range's predecessor is then mostly done when it
    // starts.
    parallel_for(groups * parts, [&](int64_t task, int worker) {
      const int64_t part = task / groups, kv_group = task % groups;
      Progress& mine = progress[kv_group * parts + part];
      try {
        if (!scratch[worker]) scratch[worker] = std::make_unique<BackwardScratch<T>>(depth_);
        key_range(kv_group, ranges[kv_group][part], part == 0 ? nullptr : &mine - 1, mine,
                  *scratch[worker]);
      } catch (...) {
        mine.steps.store(std::numeric_limits<int64_t>::max(),
                         std::memory_order_release);  // nobody waits for this range
        throw;
      }
    });
  }

 private:
  struct alignas(64) Progress {
    std::atomic<int64_t> steps{0};  // (head, query block) steps whose dq this range has added
  };

  /// Ranges of about equal work for every (sample, kv head); late keys, which fewer queries see,
  /// come first.
  std::vector<std::vector<KeyRange>> split() const {
    const int64_t groups = p_.batch * p_.num_kv_heads, units = first_unit_.back();
    const int64_t wanted = (kTasks + groups - 1) / groups;
    std::vector<std::vector<KeyRange>> ranges(groups);
    if (wanted == 1) {
      for (auto& of_group : ranges) of_group.push_back({0, units});
      return ranges;
    }
    std::vector<std::vector<double>> work(groups, std::vector<double>(units, 0.0));
    double tiles = 0;
    for (int64_t row = 0; row < p_.batch * p_.num_q_heads; ++row) {
      std::vector<double>& mine =
          work[row / p_.num_q_heads * p_.num_kv_heads + row % p_.num_q_heads / group_];
      for (int n = 0; n < p_.num_sources; ++n) {
        const KeySource& source = p_.sources[n];
        if (source.num_keys == 0) continue;
        for (int64_t q_block = 0; q_block < num_q_blocks_; ++q_block) {
          const int64_t last = p_.q_block_starts[q_block] + (kBlock - 1) * p_.position_stride;
          for_each_key_block(p_, source, row, q_block, 0, blocks_of(source.num_keys),
                             [&](int64_t block) {
                               if (source.block_starts[block] > last) return;
                               mine[first_unit_[n] + block] += 1;
                               tiles += 1;
                             });
        }
        if (source.columns.counts == nullptr) continue;
        for (int64_t c = 0; c < source.columns.counts[row]; ++c) {
          const int64_t at = row * source.columns.capacity + c;
          const double seen = 1.0 - static_cast<double>(source.columns.positions[at]) /
                                        static_cast<double>(p_.seq_len + 1);
          const double cost = std::max(0.0, seen) * static_cast<double>(num_q_blocks_) / kBlock;
          mine[first_unit_[n] + source.columns.key_rows[at] / kBlock] += cost;
          tiles += cost;
        }
      }
    }
    // A range repeats the loading of q and dout: worth it from four tiles a step on.
    const double steps = static_cast<double>(p_.batch * p_.num_q_heads * num_q_blocks_);
    const int64_t parts =
        std::max<int64_t>(1, std::min<int64_t>(wanted, static_cast<int64_t>(tiles / (4 * steps))));
    for (int64_t g = 0; g < groups; ++g) {
      double total = 0, done = 0;
      for (const double w : work[g]) total += w;
      int64_t end = units;
      for (int64_t part = 0; part < parts; ++part) {
        int64_t begin = end;
        while (begin > 0 && (part == parts - 1 || done < total * static_cast<double>(part + 1) /
                                                             static_cast<double>(parts))) {
          done += work[g][--begin];
        }
        ranges[g].push_back({begin, end});
        end = begin;
      }
    }
    return ranges;
  }

  void key_range(int64_t kv_group, const KeyRange& range, const Progress* before, Progress& mine,
                 BackwardScratch<T>& s) const {
    const int64_t batch = kv_group / p_.num_kv_heads, kv_head = kv_group % p_.num_kv_heads;
    int64_t step = 0;
    for (int64_t head = kv_head * group_; head < (kv_head + 1) * group_; ++head) {
      for (int64_t q_block = 0; q_block < num_q_blocks_; ++q_block, ++step) {
        const bool any = query_block(batch, head, kv_head, q_block, range, s);
        if (before != nullptr) {
          for (int spins = 0; before->steps.load(std::memory_order_acquire) <= step; ++spins) {
            if (spins > 64) std::this_thread::yield();
          }
        }
        if (any) {
          ops_.add_rows(s.dq, depth_, s.q.rows, kTile, p_.head_dim, head_of<T>(p_.dq, batch, head),
                        p_.dq.stride_token);
        }
        mine.steps.store(step + 1, std::memory_order_release);
      }
    }
  }

  /// This range's part of dq of one query block into scratch, of dk and dv into memory. False where
  /// it sees no key.
  bool query_block(int64_t batch, int64_t head, int64_t kv_head, int64_t q_block,
                   const KeyRange& range, BackwardScratch<T>& s) const {
    const int64_t row = batch * p_.num_q_heads + head;
    make_query_tile(p_, batch, q_block, s.q);
    prefetch_block(p_, p_.q, p_.dtype, batch, head, q_block + 1);
    prefetch_block(p_, p_.dout, p_.dtype, batch, head, q_block + 1);
    hide_empty_rows(row, s);
    const int64_t bytes = size_of(p_.dtype);
    const auto keys_of = [&](int n) { return head_of(p_.sources[n].k, batch, kv_head, p_.dtype); };
    const auto values_of = [&](int n) {
      return head_of(p_.sources[n].v, batch, kv_head, p_.dtype);
    };
    bool loaded = false;
    for_each_key_tile(
        p_, row, q_block, s.q, range, s.k,
        [&](const KeyTile<T>& k) {
          const KeySource& source = p_.sources[k.source];
          prefetch_rows<false>(keys_of(k.source), source.k.stride_token, k.rows, k.num_keys,
                               p_.head_dim, bytes);
          prefetch_rows<false>(values_of(k.source), source.v.stride_token, k.rows, k.num_keys,
                               p_.head_dim, bytes);
          prefetch_rows<true>(head_of<T>(source.dk, batch, kv_head), source.dk.stride_token, k.rows,
                              k.num_keys, p_.head_dim, sizeof(T));
          prefetch_rows<true>(head_of<T>(source.dv, batch, kv_head), source.dv.stride_token, k.rows,
                              k.num_keys, p_.head_dim, sizeof(T));
        },
        [&](const KeyTile<T>& k) {
          const KeySource& source = p_.sources[k.source];
          if (!loaded) load_queries(batch, head, s);
          const int64_t keys = k.num_keys;
          const T scale = static_cast<T>(p_.softmax_scale);
          const T* const* k_rows = s.keys.point(ops_, p_, source.k, batch, kv_head, k);
          const T* const* v_rows = s.values.point(ops_, p_, source.v, batch, kv_head, k);
          T* const* dk_rows = s.key_gradients.point(p_, source.dk, batch, kv_head, k);
          T* const* dv_rows = s.value_gradients.point(p_, source.dv, batch, kv_head, k);
          compute_scores<T>(ops_, p_, row, s.q, k, depth_, k_rows, s.q_lanes, s.p);
          ops_.probabilities(keys, s.lse, s.p);
          ops_.scores(keys, depth_, v_rows, s.dout_lanes, s.dp);
          ops_.score_gradients(keys, s.p, s.delta, scale, s.dp);
          ops_.key_gradients(keys, depth_, s.p, s.dout_rows, dv_rows);
          ops_.key_gradients(keys, depth_, s.dp, s.q_rows, dk_rows);
          ops_.query_gradients(keys, depth_, s.dp, k_rows, loaded, s.dq);
          s.key_gradients.finish(ops_, p_, k);
          s.value_gradients.finish(ops_, p_, k);
          loaded = true;
        });
    return loaded;
  }

  /// Rows that saw no key have no gradient, whatever was saved for them.
  void hide_empty_rows(int64_t row, BackwardScratch<T>& s) const {
    const T* lse = static_cast<const T*>(p_.lse) + row * p_.num_queries;
    const T* delta = static_cast<const T*>(p_.delta) + row * p_.num_queries;
    for (int i = 0; i < kTile; ++i) {
      s.lse[i] = s.delta[i] = 0;
      if (s.q.rows[i] < 0) continue;
      if (lse[s.q.rows[i]] == -std::numeric_limits<T>::infinity()) {
        s.q.hide(i);
        continue;
      }
      s.lse[i] = lse[s.q.rows[i]];
      s.delta[i] = delta[s.q.rows[i]];
    }
    s.q.measure();
  }

  void load_queries(int64_t batch, int64_t head, BackwardScratch<T>& s) const {
    ops_.load_rows(p_.dtype, head_of(p_.q, batch, head, p_.dtype), p_.q.stride_token, s.q.rows,
                   kTile, p_.head_dim, depth_, s.q_rows);
    ops_.load_rows(p_.dtype, head_of(p_.dout, batch, head, p_.dtype), p_.dout.stride_token,
                   s.q.rows, kTile, p_.head_dim, depth_, s.dout_rows);
    ops_.transpose_to_lanes(s.q_rows, depth_, static_cast<T>(p_.softmax_scale), s.q_lanes);
    ops_.transpose_to_lanes(s.dout_rows, depth_, T{1}, s.dout_lanes);
  }

  static constexpr int64_t kTasks = 8;  // enough for the cores of a small machine

  const BackwardParams& p_;
  const TileOps<T>& ops_;
  const int64_t depth_;
  const int64_t group_;  // query heads of a kv head
  const int64_t num_q_blocks_;
  std::vector<int64_t> first_unit_{0};  // of each source
};

template <typename T>
void compute_delta(const BackwardParams& p, const RoundedOut& out, T* delta) {
  const TileOps<T>& ops = tile_ops<T>();
  const int64_t depth = padded_depth(p.head_dim), num_q_blocks = blocks_of(p.num_queries);
  struct Tiles {
    explicit Tiles(int64_t n) : rows(n), out(n), dout(n) {}
    Scratch<T> rows, out, dout;
    alignas(64) T sums[kTile];
  };
  std::vector<std::unique_ptr<Tiles>> scratch(num_threads());
  parallel_for(p.batch * p.num_q_heads * num_q_blocks, [&](int64_t task, int worker) {
    if (!scratch[worker]) scratch[worker] = std::make_unique<Tiles>(kTile * depth);
    Tiles& s = *scratch[worker];
    const int64_t row = task / num_q_blocks, batch = row / p.num_q_heads,
                  head = row % p.num_q_heads;
    const int64_t first = task % num_q_blocks * kBlock,
                  count = std::min<int64_t>(kBlock, p.num_queries - first);
    const T* lse = static_cast<const T*>(p.lse) + row * p.num_queries + first;
    prefetch_block(p, out.rounded, p.dtype, batch, head, task % num_q_blocks + 1);
    prefetch_block(p, p.dout, p.dtype, batch, head, task % num_q_blocks + 1);
    int32_t rows[kTile];
    for (int64_t i = 0; i < kTile; ++i) {
      const bool empty = i >= count || lse[i] == -std::numeric_limits<T>::infinity();
      rows[i] = empty ? -1 : static_cast<int32_t>(first + i);
    }
    const auto load = [&](const ConstView& view, Scratch<T>& to) {
      ops.load_rows(p.dtype, head_of(view, batch, head, p.dtype), view.stride_token, rows, kTile,
                    p.head_dim, depth, s.rows);
      ops.transpose_to_lanes(s.rows, depth, T{1}, to);
    };
    load(out.rounded, s.out);
    if (out.residual.data != nullptr) {
      load(out.residual, s.dout);
      T *sum = s.out, *rest = s.dout;
      for (int64_t i = 0; i < kTile * depth; ++i) sum[i] += rest[i];
    }
    load(p.dout, s.dout);
    ops.lane_dots(depth, s.out, s.dout, s.sums);
    for (int64_t i = 0; i < count; ++i) delta[row * p.num_queries + first + i] = s.sums[i];
  });
}

}  // namespace

void backward(const BackwardParams& params) {
  check(params, /*rounds_dq=*/false);
  check_lists(params);
  if (params.dtype == DType::kFloat64) {
    Backward<double>(params).run();
  } else {
    Backward<float>(params).run();
  }
}

void delta(const BackwardParams& params, const RoundedOut& out, void* delta) {
  check_delta(params, out, delta);
  if (params.dtype == DType::kFloat64) {
    compute_delta(params, out, static_cast<double*>(delta));
  } else {
    compute_delta(params, out, static_cast<float*>(delta));
  }
}

}  // namespace mtraining::kernels::ref
