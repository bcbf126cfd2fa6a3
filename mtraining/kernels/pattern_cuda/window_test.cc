// Estimation on the device against the host's kernels: masses to a tolerance, their sums, and independence of ranks bit for bit.
#include "mtraining/kernels/pattern_cuda/window.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <string>
#include <vector>

#include "mtraining/kernels/sm90/device_memory.h"
#include "mtraining/layout/layout.h"
#include "mtraining/testing/generator.h"
#include "mtraining/testing/gpu.h"
#include "mtraining/testing/random.h"
#include "mtraining/testing/rounding.h"
#include "mtraining/testing/shards.h"

namespace mtraining::kernels::pattern_cuda {
namespace {

using layout::LayoutKind;
using sm90::DeviceMemory;

struct Case {
  std::string name;
  LayoutKind layout = LayoutKind::kContiguous;
  int64_t seq_len = 1000, stripe = 64;
  int cp_size = 1;
  int64_t batch = 1, heads = 8, kv_heads = 2, head_dim = 128, rows = 64;
  DType dtype = DType::kBFloat16;
  bool strided = false, documents = false;
  int64_t shared = 1;
};

struct Masses {
  std::vector<int64_t> columns, diagonals, offsets;  // columns by position, [choices, N]
  std::vector<int64_t> covered, row_sum;             // [B, H, R]
  // Of a call that wants no offsets: other kernels on Hopper.
  std::vector<int64_t> lone_columns, lone_diagonals, totals;
};

/// What the masks of the covered test hold: every third diagonal, every seventh key.
bool diagonal_in_mask(int64_t row, int64_t c) { return (c + row) % 3 == 0; }
bool column_in_mask(int64_t row, int64_t j) { return (j + row) % 7 == 0; }

class Runner {
 public:
  explicit Runner(const Case& c) : c_(c), layout_({c.layout, c.seq_len, c.cp_size, c.stripe, 1}) {
    const testing::Qkv qkv = testing::make_qkv({.batch = c.batch,
                                                .seq_len = c.seq_len,
                                                .num_q_heads = c.heads,
                                                .num_kv_heads = c.kv_heads,
                                                .head_dim = c.head_dim,
                                                .seed = 11});
    precision_ =
        c.dtype == DType::kBFloat16 ? testing::Precision::kBFloat16 : testing::Precision::kFloat16;
    q_ = testing::round_to(precision_, std::span<const float>(qkv.q));
    k_ = testing::round_to(precision_, std::span<const float>(qkv.k));
    rows_ = std::min(c.rows, c.seq_len);
    for (int64_t r = 0; r < rows_; ++r)
      positions_.push_back(static_cast<int32_t>(c.strided ? (r + 1) * c.seq_len / rows_ - 1
                                                          : c.seq_len - rows_ + r));
    for (int64_t b = 0; c.documents && b < c.batch; ++b)
      for (int32_t p : positions_) starts_.push_back(std::max(0, p - 90 - static_cast<int32_t>(b)));
  }

  int64_t num_blocks() const { return (c_.seq_len + 63) / 64; }
  int64_t choices() const { return c_.batch * c_.heads / c_.shared; }

  WindowParams params() const {
    WindowParams p;
    p.batch = c_.batch;
    p.num_q_heads = c_.heads;
    p.num_kv_heads = c_.kv_heads;
    p.head_dim = c_.head_dim;
    p.dtype = c_.dtype;
    p.softmax_scale = 1 / std::sqrt(static_cast<double>(c_.head_dim));
    p.num_rows = rows_;
    p.seq_len = c_.seq_len;
    p.num_keys = layout_.tokens_per_rank();
    p.q = {nullptr, c_.heads * rows_ * c_.head_dim, c_.heads * c_.head_dim, c_.head_dim};
    p.k = {nullptr, p.num_keys * c_.kv_heads * c_.head_dim, c_.kv_heads * c_.head_dim, c_.head_dim};
    return p;
  }
  auto packed_rows() const {
    return testing::pack(
        precision_,
        testing::take_rows<double>(q_, c_.batch, c_.seq_len,
                                   std::vector<int64_t>(positions_.begin(), positions_.end())));
  }
  auto packed_keys(int rank) const {
    return testing::pack(
        precision_, testing::take_rows<double>(k_, c_.batch, c_.seq_len, layout_.positions(rank)));
  }

  Masses on_host() const {
    WindowParams p = params();
    const auto q = packed_rows();
    p.q.data = q.data();
    p.row_positions = positions_.data();
    p.row_document_start = starts_.empty() ? nullptr : starts_.data();
    const int64_t outputs = c_.batch * c_.heads * rows_;
    std::vector<float> top(outputs, -INFINITY);
    std::vector<decltype(packed_keys(0))> keys;
    std::vector<std::vector<int32_t>> block_starts;
    for (int rank = 0; rank < c_.cp_size; ++rank) {
      keys.push_back(packed_keys(rank));
      block_starts.push_back(layout_.block_starts(rank));
    }
    const auto each = [&](const auto& run) {
      for (int rank = 0; rank < c_.cp_size; ++rank) {
        p.k.data = keys[rank].data();
        p.k_block_starts = block_starts[rank].data();
        run(rank);
      }
    };
    each([&](int) {
      std::vector<float> own(outputs);
      ref::window_row_max(p, own.data());
      for (int64_t i = 0; i < outputs; ++i) top[i] = std::max(top[i], own[i]);
    });
    Masses made;
    made.row_sum.assign(outputs, 0);
    each([&](int) { ref::window_row_sum(p, top.data(), made.row_sum.data()); });
    std::vector<int64_t> diagonals(c_.batch * c_.heads * (num_blocks() + 1), 0),
        offsets(c_.batch * c_.heads * c_.seq_len, 0);
    made.columns.assign(choices() * c_.seq_len, 0);
    made.covered.assign(outputs, 0);
    const int64_t words = (num_blocks() + 63) / 64;
    std::vector<uint64_t> bits(c_.batch * c_.heads * words, 0);
    std::vector<int32_t> column_positions, counts;
    for (int64_t row = 0; row < c_.batch * c_.heads; ++row) {
      for (int64_t d = 0; d < num_blocks(); ++d)
        if (diagonal_in_mask(row, d)) bits[row * words + d / 64] |= uint64_t{1} << (d % 64);
      std::vector<int32_t> own;
      for (int64_t j = 0; j < c_.seq_len; ++j)
        if (column_in_mask(row, j)) own.push_back(static_cast<int32_t>(j));
      counts.push_back(static_cast<int32_t>(own.size()));
      own.resize(c_.seq_len, 0);
      column_positions.insert(column_positions.end(), own.begin(), own.end());
    }
    ColumnLists lists;
    lists.positions = column_positions.data();
    lists.counts = counts.data();
    lists.capacity = c_.seq_len;
    each([&](int rank) {
      std::vector<int64_t> columns(c_.batch * c_.heads * p.num_keys, 0);
      ref::window_masses(p, top.data(), made.row_sum.data(),
                         {columns.data(), diagonals.data(), offsets.data()});
      const std::vector<int64_t> positions = layout_.positions(rank);
      for (int64_t row = 0; row < c_.batch * c_.heads; ++row)
        for (int64_t t = 0; t < p.num_keys; ++t)
          if (positions[t] < c_.seq_len)
            made.columns[row / c_.shared * c_.seq_len + positions[t]] +=
                columns[row * p.num_keys + t];
      ref::window_covered(p, top.data(), made.row_sum.data(), bits.data(), words, lists,
                          made.covered.data());
    });
    const auto by_choice = [&](const std::vector<int64_t>& by_head, int64_t width) {
      std::vector<int64_t> sums(choices() * width, 0);
      for (size_t i = 0; i < by_head.size(); ++i)
        sums[static_cast<int64_t>(i) / width / c_.shared * width +
             static_cast<int64_t>(i) % width] += by_head[i];
      return sums;
    };
    made.diagonals = by_choice(diagonals, num_blocks() + 1);
    made.offsets = by_choice(offsets, c_.seq_len);
    return made;
  }

  /// All ranks by turns on one device; maxima and sums are exchanged through the host.
  Masses on_device(int64_t* fault = nullptr) const {
    WindowParams p = params();
    const DeviceMemory q(packed_rows()), positions(positions_), starts(starts_);
    p.q.data = q.get();
    p.row_positions = positions.get<int32_t>();
    p.row_document_start = starts_.empty() ? nullptr : starts.get<int32_t>();
    const int64_t outputs = c_.batch * c_.heads * rows_;
    const DeviceMemory flag(std::vector<int64_t>(1, 0));
    std::vector<DeviceMemory> keys, block_starts, workspaces;
    for (int rank = 0; rank < c_.cp_size; ++rank) {
      keys.emplace_back(packed_keys(rank));
      block_starts.emplace_back(layout_.block_starts(rank));
      workspaces.emplace_back(window_workspace_bytes(p));
    }
    const auto each = [&](const auto& run) {
      for (int rank = 0; rank < c_.cp_size; ++rank) {
        p.k.data = keys[rank].get();
        p.k_block_starts = block_starts[rank].get<int32_t>();
        run(rank);
        sm90::check_device(cudaDeviceSynchronize(), "a pass");
      }
    };
    std::vector<float> top(outputs, -INFINITY);
    each([&](int rank) {
      const DeviceMemory own(outputs * 4);
      window_scan(p, workspaces[rank].get(), own.get<float>(), flag.get<int64_t>());
      const std::vector<float> got = own.read<float>();
      for (int64_t i = 0; i < outputs; ++i) top[i] = std::max(top[i], got[i]);
    });
    const DeviceMemory row_max(top);
    Masses made;
    made.row_sum.assign(outputs, 0);
    each([&](int rank) {
      const DeviceMemory own(outputs * 8);
      window_row_sum(p, workspaces[rank].get(), row_max.get<float>(), own.get<int64_t>(),
                     flag.get<int64_t>());
      const std::vector<int64_t> got = own.read<int64_t>();
      for (int64_t i = 0; i < outputs; ++i) made.row_sum[i] += got[i];
    });
    if (fault != nullptr) *fault = flag.read<int64_t>()[0];
    const DeviceMemory row_sum(made.row_sum);
    made.columns.assign(choices() * c_.seq_len, 0);
    made.diagonals.assign(choices() * (num_blocks() + 1), 0);
    made.offsets.assign(choices() * c_.seq_len, 0);
    made.lone_columns = made.columns;
    made.lone_diagonals = made.diagonals;
    made.totals.assign(choices(), 0);
    made.covered.assign(outputs, 0);
    const int64_t words = (num_blocks() + 63) / 64, column_words = (c_.seq_len + 31) / 32;
    std::vector<uint64_t> bits(c_.batch * c_.heads * words, 0);
    std::vector<uint32_t> columns(c_.batch * c_.heads * column_words, 0);
    for (int64_t row = 0; row < c_.batch * c_.heads; ++row) {
      for (int64_t d = 0; d < num_blocks(); ++d)
        if (diagonal_in_mask(row, d)) bits[row * words + d / 64] |= uint64_t{1} << (d % 64);
      for (int64_t j = 0; j < c_.seq_len; ++j)
        if (column_in_mask(row, j)) columns[row * column_words + j / 32] |= 1u << (j % 32);
    }
    const DeviceMemory device_bits(bits), device_columns(columns);
    const auto add = [](std::vector<int64_t>& to, const DeviceMemory& from) {
      const std::vector<int64_t> own = from.read<int64_t>();
      for (size_t i = 0; i < to.size(); ++i) to[i] += own[i];
    };
    each([&](int rank) {
      const DeviceMemory by_column(choices() * p.num_keys * 8),
          diagonals(choices() * (num_blocks() + 1) * 8), offsets(choices() * c_.seq_len * 8),
          covered(outputs * 8);
      window_masses(p, row_max.get<float>(), row_sum.get<int64_t>(),
                    {.heads_per_choice = c_.shared,
                     .consecutive_rows = !c_.strided,
                     .columns = by_column.get<int64_t>(),
                     .diagonals = diagonals.get<int64_t>(),
                     .offsets = offsets.get<int64_t>()});
      const DeviceMemory lone_columns(by_column.bytes()), lone_diagonals(diagonals.bytes()),
          totals(choices() * 8);
      window_masses(p, row_max.get<float>(), row_sum.get<int64_t>(),
                    {.heads_per_choice = c_.shared,
                     .consecutive_rows = !c_.strided,
                     .columns = lone_columns.get<int64_t>(),
                     .diagonals = lone_diagonals.get<int64_t>(),
                     .totals = totals.get<int64_t>()});
      window_covered(p, row_max.get<float>(), row_sum.get<int64_t>(), device_bits.get<uint64_t>(),
                     words, device_columns.get<uint32_t>(), column_words, covered.get<int64_t>());
      sm90::check_device(cudaDeviceSynchronize(), "masses");
      add(made.diagonals, diagonals);
      add(made.lone_diagonals, lone_diagonals);
      add(made.totals, totals);
      add(made.offsets, offsets);
      add(made.covered, covered);
      const std::vector<int64_t> positions = layout_.positions(rank);
      const auto add_columns = [&](std::vector<int64_t>& to, const DeviceMemory& from) {
        const std::vector<int64_t> own = from.read<int64_t>();
        for (int64_t row = 0; row < choices(); ++row)
          for (int64_t t = 0; t < p.num_keys; ++t) {
            if (positions[t] < c_.seq_len)
              to[row * c_.seq_len + positions[t]] += own[row * p.num_keys + t];
            else
              EXPECT_EQ(own[row * p.num_keys + t], 0);
          }
      };
      add_columns(made.columns, by_column);
      add_columns(made.lone_columns, lone_columns);
    });
    return made;
  }

  std::vector<double> q_, k_;

 private:
  Case c_;
  layout::Layout layout_;
  testing::Precision precision_;
  int64_t rows_ = 0;
  std::vector<int32_t> positions_, starts_;
};

/// Each mass within a relative 1e-4 and an absolute 1e-6 of a row's whole; `unit`: what a row's whole mass is.
void expect_close(const char* what, const std::vector<int64_t>& got,
                  const std::vector<int64_t>& want, double unit) {
  ASSERT_EQ(got.size(), want.size());
  double worst = 0;
  size_t place = 0;
  for (size_t i = 0; i < got.size(); ++i) {
    const double error = std::abs(static_cast<double>(got[i]) - static_cast<double>(want[i])) /
                         (1e-4 * static_cast<double>(want[i]) + 2e-5 * unit);
    if (error > worst) {
      worst = error;
      place = i;
    }
  }
  EXPECT_LE(worst, 1) << what << "[" << place << "]: got " << got[place] << ", want "
                      << want[place];
}

std::vector<Case> cases() {
  std::vector<Case> all;
  for (const int64_t seq_len : {1, 5, 63, 64, 65, 130, 777, 1000})
    all.push_back({.name = concat("length ", seq_len), .seq_len = seq_len});
  for (const auto& [heads, kv_heads] : {std::pair<int64_t, int64_t>{1, 1}, {4, 4}, {7, 1}, {16, 2}})
    all.push_back(
        {.name = concat("heads ", heads, "/", kv_heads), .heads = heads, .kv_heads = kv_heads});
  for (const int64_t rows : {1, 17, 65, 200})
    all.push_back({.name = concat("rows ", rows), .rows = rows});
  for (const bool strided : {false, true})
    all.push_back({.name = concat("documents, strided ", strided),
                   .seq_len = 600,
                   .batch = 2,
                   .strided = strided,
                   .documents = true});
  all.push_back({.name = "strided", .strided = true});
  all.push_back({.name = "fp16 64", .head_dim = 64, .dtype = DType::kFloat16});
  all.push_back({.name = "bf16 64", .batch = 2, .head_dim = 64});
  all.push_back({.name = "fp16 128", .dtype = DType::kFloat16});
  for (const int64_t head_dim : {96, 256})
    for (const bool strided : {false, true})
      all.push_back({.name = concat("bf16 ", head_dim), .head_dim = head_dim, .strided = strided});
  // One tile of rows a kv head, and so many key blocks to a thread block that its ring goes round: 5, 7, 5 and 16.
  for (const int64_t heads : {1, 4})
    for (const int64_t head_dim : {64, 128})
      for (const int64_t seq_len : {300, 400, 777})
        all.push_back({.name = concat("heads ", heads, "/", heads, ", length ", seq_len),
                       .seq_len = seq_len,
                       .heads = heads,
                       .kv_heads = heads,
                       .head_dim = head_dim});
  all.push_back(
      {.name = "heads 32/32", .seq_len = 4096, .heads = 32, .kv_heads = 32, .head_dim = 64});
  all.push_back({.name = "heads 2/2, block_striped",
                 .layout = LayoutKind::kBlockStriped,
                 .stripe = 128,
                 .cp_size = 3,
                 .heads = 2});
  for (const int64_t heads : {6, 12, 24})  // of two kv heads: 3, 6 and 12 tiles of rows
    all.push_back({.name = concat("heads ", heads, "/2"), .heads = heads});
  all.push_back({.name = "64, two tiles", .batch = 2, .heads = 2, .head_dim = 64, .rows = 100});
  all.push_back({.name = "kv_group", .shared = 4});
  all.push_back({.name = "kv_group strided", .strided = true, .shared = 4});
  all.push_back(
      {.name = "block_striped", .layout = LayoutKind::kBlockStriped, .stripe = 128, .cp_size = 3});
  all.push_back({.name = "zigzag", .layout = LayoutKind::kZigzag, .cp_size = 2, .strided = true});
  return all;
}

TEST(WindowOnDevice, MassesAreTheHostsToATolerance) {
  MT_NEEDS_GPU();
  for (const Case& c : cases()) {
    SCOPED_TRACE(c.name);
    const Runner runner(c);
    int64_t fault = -1;
    const Masses got = runner.on_device(&fault), want = runner.on_host();
    EXPECT_EQ(fault, 0);
    expect_close("row_sum", got.row_sum, want.row_sum, 0x1p40);
    expect_close("columns", got.columns, want.columns, 0x1p40);
    expect_close("diagonals", got.diagonals, want.diagonals, 0x1p46);
    expect_close("columns, no offsets", got.lone_columns, want.columns, 0x1p40);
    expect_close("diagonals, no offsets", got.lone_diagonals, want.diagonals, 0x1p46);
    for (int64_t row = 0; row < runner.choices(); ++row) {
      const auto first = got.lone_columns.begin() + row * c.seq_len;
      EXPECT_EQ(got.totals[row], std::accumulate(first, first + c.seq_len, int64_t{0}));
    }
    expect_close("offsets", got.offsets, want.offsets, 0x1p40);
    expect_close("covered", got.covered, want.covered, 0x1p40);
  }
}

TEST(WindowOnDevice, DoesNotDependOnRanksAndLayout) {
  MT_NEEDS_GPU();
  for (const bool strided : {false, true}) {
    const Masses one = Runner({.name = "one rank", .strided = strided}).on_device();
    for (const LayoutKind kind :
         {LayoutKind::kContiguous, LayoutKind::kZigzag, LayoutKind::kBlockStriped}) {
      for (const int ranks : {1, 2, 3, 5}) {
        SCOPED_TRACE(concat(layout::to_string(kind), " over ", ranks, ", strided ", strided));
        const Masses many =
            Runner({.name = "ranks", .layout = kind, .cp_size = ranks, .strided = strided})
                .on_device();
        EXPECT_EQ(one.row_sum, many.row_sum);
        EXPECT_EQ(one.columns, many.columns);
        EXPECT_EQ(one.diagonals, many.diagonals);
        EXPECT_EQ(one.lone_columns, many.lone_columns);
        EXPECT_EQ(one.lone_diagonals, many.lone_diagonals);
        EXPECT_EQ(one.totals, many.totals);
        EXPECT_EQ(one.covered, many.covered);
      }
    }
  }
}

TEST(WindowOnDevice, ValuesThatTheHostRefusesAreNoMassAndTheFirstIsReported) {
  MT_NEEDS_GPU();
  const double inf = std::numeric_limits<double>::infinity();
  for (const int64_t head_dim : {64, 96, 128}) {
    for (const int64_t heads : {2, 8}) {  // of two kv heads: a tile of rows, or four
      for (const double bad : {std::nan(""), -inf, 0x1p50}) {
        for (const bool strided : {false, true}) {
          if (strided && bad != -inf) continue;
          SCOPED_TRACE(concat("head_dim ", head_dim, ", heads ", heads, ", ", bad));
          Runner runner({.name = "refused",
                         .batch = 2,
                         .heads = heads,
                         .head_dim = head_dim,
                         .strided = strided});
          const auto spoil_key = [&](int64_t sample, int64_t position, int64_t head) {
            runner.k_[((sample * 1000 + position) * 2 + head) * head_dim + head_dim - 1] = bad;
          };
          const auto fault_of = [&] {
            int64_t fault = -1;
            const Masses got = runner.on_device(&fault);
            for (const int64_t mass : got.columns)
              EXPECT_TRUE(mass >= 0 && mass <= int64_t{1} << 60);
            for (const int64_t mass : got.diagonals)
              EXPECT_TRUE(mass >= 0 && mass <= int64_t{1} << 60);
            return fault;
          };
          spoil_key(1, 777, 1);
          EXPECT_EQ(fault_of(), fault_code(FaultKind::kKey, 1777));
          spoil_key(1, 500, 0);
          EXPECT_EQ(fault_of(), fault_code(FaultKind::kKey, 1500));
          spoil_key(0, 999, 1);
          EXPECT_EQ(fault_of(), fault_code(FaultKind::kKey, 999));
          runner.q_[((1000 + 999) * heads + 1) * head_dim + 3] =
              bad;  // the last row of the second sample
          EXPECT_EQ(fault_of(), fault_code(FaultKind::kQuery, (heads + 1) * 1000 + 999));
        }
      }
    }
  }
  // Large but allowed: the host takes it.
  Runner runner({.name = "large"});
  for (int64_t d = 0; d < 128; ++d) {
    runner.k_[500 * 2 * 128 + d] = 0x1p20;
    runner.q_[999 * 8 * 128 + d] = 0x1p20;
  }
  int64_t fault = -1;
  runner.on_device(&fault);
  EXPECT_EQ(fault, fault_code(FaultKind::kScore, 0));
  EXPECT_EQ(fault_kind(fault), FaultKind::kScore);
  EXPECT_EQ(fault_place(fault_code(FaultKind::kQuery, 12345)), 12345);
}

}  // namespace
}  // namespace mtraining::kernels::pattern_cuda
