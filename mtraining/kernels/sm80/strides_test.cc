// Small inputs that hurt other implementations, on the kernels of a GPU, sm_80 and sm_90: strides beyond 32 bits, expanded inputs, one-key rows, empty
// rows whose memory holds NaN, huge scores on masked lanes, thousands of columns. What the right answer is can be seen without an oracle.
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "mtraining/base/check.h"
#include "mtraining/base/rng.h"
#include "mtraining/kernels/dispatch.h"
#include "mtraining/kernels/sm80/backward.h"
#include "mtraining/kernels/sm80/forward.h"
#include "mtraining/kernels/sm90/backward.h"
#include "mtraining/kernels/sm90/device_memory.h"
#include "mtraining/kernels/sm90/forward.h"
#include "mtraining/testing/gpu.h"
#include "mtraining/testing/rounding.h"

namespace mtraining::kernels::sm80 {
namespace {

using sm90::check_device;
using sm90::DeviceMemory;

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

/// Whose kernels run.
class Strides : public ::testing::TestWithParam<Backend> {
 protected:
  /// Head sizes of these that the back end serves.
  std::vector<int64_t> served(std::vector<int64_t> head_dims) const {
    std::erase_if(head_dims, [&](int64_t d) {
      for (const Direction direction : {Direction::kForward, Direction::kBackward}) {
        bool serves = false;
        for (const Kernel& kernel : kernel_table()) {
          serves |= kernel.backend == GetParam() && kernel.direction == direction &&
                    (kernel.head_dims.empty() ||
                     std::count(kernel.head_dims.begin(), kernel.head_dims.end(), d) > 0);
        }
        if (!serves) return true;
      }
      return false;
    });
    return head_dims;
  }
  bool has_device() const {
    const int major = mtraining::testing::gpu_major_capability();
    return GetParam() == Backend::kSm90 ? major == 9 : major >= 8;
  }
};
INSTANTIATE_TEST_SUITE_P(Kernels, Strides, ::testing::Values(Backend::kSm80, Backend::kSm90),
                         [](const auto& param) { return std::string(to_string(param.param)); });
#define MT_NEEDS_DEVICE() \
  if (!has_device()) GTEST_SKIP() << "needs a device that runs " << to_string(GetParam())

/// bf16 rows [tokens, dim] or float32 ones on the device, `stride` elements apart.
struct Matrix {
  DeviceMemory owned;
  char* data = nullptr;
  int64_t tokens = 0, dim = 0, stride = 0, size = 0;

  static Matrix contiguous(int64_t tokens, int64_t dim, int64_t size) {
    Matrix m;
    m.owned = DeviceMemory(tokens * dim * size);
    m.data = m.owned.get<char>();
    m.tokens = tokens;
    m.dim = m.stride = dim;
    m.size = size;
    return m;
  }
  static Matrix inside(const DeviceMemory& wide, int64_t first, int64_t stride, int64_t tokens,
                       int64_t dim, int64_t size) {
    Matrix m;
    m.data = wide.get<char>() + first * size;
    m.tokens = tokens;
    m.dim = dim;
    m.stride = stride;
    m.size = size;
    return m;
  }
  void write(const std::vector<float>& values) {
    std::vector<char> bytes(values.size() * size);
    for (size_t i = 0; i < values.size(); ++i) {
      if (size == 4) {
        std::memcpy(bytes.data() + 4 * i, &values[i], 4);
      } else {
        const uint16_t x = mtraining::testing::to_bf16(values[i]);
        std::memcpy(bytes.data() + 2 * i, &x, 2);
      }
    }
    check_device(cudaMemcpy2D(data, stride * size, bytes.data(), dim * size, dim * size, tokens,
                              cudaMemcpyHostToDevice),
                 "writing rows");
  }
  std::vector<float> read() const {
    std::vector<float> values(tokens * dim);
    check_device(cudaMemcpy2D(values.data(), dim * 4, data, stride * 4, dim * 4, tokens,
                              cudaMemcpyDeviceToHost),
                 "reading rows");
    return values;
  }
  ConstView view() const { return {data, 0, stride, 0}; }
  View out_view() const { return {data, 0, stride, 0}; }
};

std::vector<float> normal(int64_t count, uint64_t seed) {
  const Rng rng(seed);
  std::vector<float> values(count);
  for (int64_t i = 0; i < count; ++i)
    values[i] = mtraining::testing::from_bf16(
        mtraining::testing::to_bf16(static_cast<float>(rng.normal(static_cast<uint64_t>(i)))));
  return values;
}

/// One head, every query block listed with every key block, consecutive positions.
struct Small {
  explicit Small(Backend backend) : sm90(backend == Backend::kSm90) {}
  bool sm90;
  int64_t dim = 64, queries = 70, keys = 70;
  int32_t q_start = 0, k_start = 0;
  int64_t seq_len = 1 << 20;
  double scale = 1;
  std::vector<int32_t> document_start;
  ColumnLists columns;  // instead of blocks
  const uint64_t* diagonal_bits = nullptr;
  int64_t diagonal_words = 0;
  std::vector<float> lse, delta;

  void forward(const Matrix& q, const Matrix& k, const Matrix& v, const Matrix& out) {
    lse_memory = DeviceMemory(queries * 4);
    run(q, k, v, [&](AttentionParams& p, const KeySource& source) {
      ForwardParams f;
      static_cast<AttentionParams&>(f) = p;
      f.sources = &source;
      f.out = out.out_view();
      f.lse = lse_memory.get();
      f.workspace_bytes =
          sm90 ? sm90::forward_workspace_bytes(f) : sm80::forward_workspace_bytes(f);
      const DeviceMemory workspace(f.workspace_bytes);
      f.workspace = workspace.get();
      sm90 ? sm90::forward(f) : sm80::forward(f);
      check_device(cudaDeviceSynchronize(), "the kernel");
    });
    lse = lse_memory.read<float>();
  }
  /// After forward.
  void backward(const Matrix& q, const Matrix& k, const Matrix& v, const Matrix& out,
                const Matrix& dout, const Matrix& dq, const Matrix& dk, const Matrix& dv,
                bool deterministic) {
    for (const Matrix* m : {&dq, &dk, &dv})
      check_device(cudaMemset2D(m->data, m->stride * 4, 0, m->dim * 4, m->tokens), "zeros");
    const DeviceMemory delta_memory(queries * 4);
    // What a forward would have left of this out.
    const std::vector<float> saved = out.read();
    std::vector<float> near(saved), rest(saved);
    for (size_t i = 0; i < saved.size(); ++i) {
      near[i] = mtraining::testing::from_bf16(mtraining::testing::to_bf16(saved[i]));
      rest[i] -= near[i];
    }
    Matrix rounded = Matrix::contiguous(queries, dim, 2),
           residual = Matrix::contiguous(queries, dim, 2);
    rounded.write(near);
    residual.write(rest);
    run(q, k, v, [&](AttentionParams& p, const KeySource& without) {
      KeySource source = without;
      source.dk = dk.out_view();
      source.dv = dv.out_view();
      BackwardParams b;
      static_cast<AttentionParams&>(b) = p;
      b.sources = &source;
      b.dout = dout.view();
      b.lse = lse_memory.get();
      b.delta = delta_memory.get();
      b.dq = dq.out_view();
      b.deterministic = deterministic;
      b.workspace_bytes =
          sm90 ? sm90::backward_workspace_bytes(b) : sm80::backward_workspace_bytes(b);
      const DeviceMemory workspace(b.workspace_bytes);
      b.workspace = workspace.get();
      const RoundedOut read = {rounded.view(), residual.view()};
      sm90 ? sm90::delta(b, read, delta_memory.get()) : sm80::delta(b, read, delta_memory.get());
      sm90 ? sm90::backward(b) : sm80::backward(b);
      check_device(cudaDeviceSynchronize(), "the kernel");
    });
    delta = delta_memory.read<float>();
  }

 private:
  template <typename Fn>
  void run(const Matrix& q, const Matrix& k, const Matrix& v, const Fn& fn) {
    const int64_t q_blocks = (queries + 63) / 64, k_blocks = (keys + 63) / 64;
    std::vector<int32_t> q_starts, k_starts, key_blocks;
    std::vector<int32_t> query_blocks;
    std::vector<int64_t> row_begin{0}, key_row_begin{0};
    for (int64_t i = 0; i < q_blocks; ++i) {
      q_starts.push_back(static_cast<int32_t>(q_start + 64 * i));
      for (int64_t j = 0; j < k_blocks; ++j) key_blocks.push_back(static_cast<int32_t>(j));
      row_begin.push_back(static_cast<int64_t>(key_blocks.size()));
    }
    for (int64_t j = 0; j < k_blocks; ++j) {
      k_starts.push_back(static_cast<int32_t>(k_start + 64 * j));
      for (int64_t i = 0; i < q_blocks; ++i) query_blocks.push_back(static_cast<int32_t>(i));
      key_row_begin.push_back(static_cast<int64_t>(query_blocks.size()));
    }
    const DeviceMemory q_starts_memory(q_starts), k_starts_memory(k_starts),
        keys_memory(key_blocks), begin_memory(row_begin), queries_memory(query_blocks),
        key_begin_memory(key_row_begin), documents(document_start);
    AttentionParams p;
    p.batch = p.num_q_heads = p.num_kv_heads = 1;
    p.head_dim = dim;
    p.num_queries = queries;
    p.dtype = DType::kBFloat16;
    p.softmax_scale = scale;
    p.seq_len = seq_len;
    p.q = q.view();
    p.q_block_starts = q_starts_memory.get<int32_t>();
    if (!document_start.empty()) p.document_start = documents.get<int32_t>();
    KeySource source;
    source.k = k.view();
    source.v = v.view();
    source.num_keys = keys;
    source.block_starts = k_starts_memory.get<int32_t>();
    source.columns = columns;
    p.diagonal_bits = diagonal_bits;
    p.diagonal_words = diagonal_words;
    if (columns.counts == nullptr) {
      source.blocks.kind = BlockListKind::kCsr;
      source.blocks.row_begin = begin_memory.get<int64_t>();
      source.blocks.key_blocks = keys_memory.get<int32_t>();
      source.blocks.key_row_begin = key_begin_memory.get<int64_t>();
      source.blocks.query_blocks = queries_memory.get<int32_t>();
    }
    p.num_sources = 1;
    fn(p, source);
  }
  DeviceMemory lse_memory;
};

TEST_P(Strides, RowsBeyondThirtyTwoBitsOfOffset) {
  MT_NEEDS_DEVICE();
  // 70 rows 2^25 elements apart: the last lies beyond 2^31 elements, 4.7 GB (bf16) and 9.4 GB (float32).
  constexpr int64_t kStride = int64_t{1} << 25, kTokens = 70, kDim = 64;
  const std::vector<float> values[4] = {normal(kTokens * kDim, 1), normal(kTokens * kDim, 2),
                                        normal(kTokens * kDim, 3), normal(kTokens * kDim, 4)};
  const DeviceMemory wide16(kTokens * kStride * 2), wide32(kTokens * kStride * 4);
  std::vector<float> results[2][5];
  for (const bool far : {false, true}) {
    Matrix in[4], out[4];
    for (int i = 0; i < 4; ++i) {
      in[i] = far ? Matrix::inside(wide16, i * 4096, kStride, kTokens, kDim, 2)
                  : Matrix::contiguous(kTokens, kDim, 2);
      out[i] = far ? Matrix::inside(wide32, i * 4096, kStride, kTokens, kDim, 4)
                   : Matrix::contiguous(kTokens, kDim, 4);
      in[i].write(values[i]);
    }
    Small small(GetParam());
    small.scale = 0.125;
    small.forward(in[0], in[1], in[2], out[0]);
    small.backward(in[0], in[1], in[2], out[0], in[3], out[1], out[2], out[3], true);
    for (int i = 0; i < 4; ++i) results[far][i] = out[i].read();
    results[far][4] = small.lse;
  }
  for (int i = 0; i < 5; ++i) EXPECT_EQ(results[0][i], results[1][i]) << i;
  double sum = 0;
  for (const float x : results[0][3]) sum += std::abs(x);
  EXPECT_GT(sum, 1);  // there was something to compare
}

TEST_P(Strides, ExpandedInputsEqualTheirCopies) {
  MT_NEEDS_DEVICE();
  if (GetParam() == Backend::kSm90) {
    const Matrix in = Matrix::contiguous(130, 64, 2), out = Matrix::contiguous(130, 64, 4);
    Matrix expanded = Matrix::contiguous(1, 64, 2);
    expanded.stride = 0;
    Small small(GetParam());
    small.queries = small.keys = 130;
    EXPECT_THROW(small.forward(expanded, in, in, out), Unsupported);
    EXPECT_THROW(small.forward(in, expanded, in, out), Unsupported);
    EXPECT_THROW(small.forward(in, in, expanded, out), Unsupported);
    return;  // the dispatch gives them to sm_80
  }
  for (const int64_t dim : {64, 128}) {
    constexpr int64_t kTokens = 130;
    std::vector<float> results[2][5];
    for (const bool expanded : {false, true}) {
      Matrix in[4], out[4];
      for (int i = 0; i < 4; ++i) {
        std::vector<float> row = normal(dim, 7 + i), values;
        for (int64_t t = 0; t < (expanded ? 1 : kTokens); ++t)
          values.insert(values.end(), row.begin(), row.end());
        in[i] = Matrix::contiguous(expanded ? 1 : kTokens, dim, 2);
        in[i].write(values);
        if (expanded) in[i].stride = 0;
        out[i] = Matrix::contiguous(kTokens, dim, 4);
      }
      Small small(GetParam());
      small.dim = dim;
      small.queries = small.keys = kTokens;
      small.scale = 0.1;
      small.forward(in[0], in[1], in[2], out[0]);
      small.backward(in[0], in[1], in[2], out[0], in[3], out[1], out[2], out[3], true);
      for (int i = 0; i < 4; ++i) results[expanded][i] = out[i].read();
      results[expanded][4] = small.lse;
    }
    for (int i = 0; i < 5; ++i) EXPECT_EQ(results[0][i], results[1][i]) << i;
  }
}

TEST_P(Strides, ASingleKeyGivesItsValueAndNoScoreGradient) {
  MT_NEEDS_DEVICE();
  for (const int64_t dim : served({16, 64, 96, 128, 256})) {
    for (const bool deterministic : {false, true}) {
      Matrix in[4], out[4];
      std::vector<float> values[4];
      for (int i = 0; i < 4; ++i) {
        values[i] = normal(dim, 20 + i);
        in[i] = Matrix::contiguous(1, dim, 2);
        in[i].write(values[i]);
        out[i] = Matrix::contiguous(1, dim, 4);
      }
      Small small(GetParam());
      small.dim = dim;
      small.queries = small.keys = 1;
      small.scale = 1 / std::sqrt(static_cast<double>(dim));
      small.forward(in[0], in[1], in[2], out[0]);
      small.backward(in[0], in[1], in[2], out[0], in[3], out[1], out[2], out[3], deterministic);
      EXPECT_EQ(out[0].read(), values[2]);
      EXPECT_EQ(out[3].read(), values[3]);
      for (const Matrix* gradient : {&out[1], &out[2]}) {
        for (const float x : gradient->read()) EXPECT_LT(std::abs(x), 1e-5) << dim;
      }
    }
  }
}

TEST_P(Strides, EmptyRowsLeaveNoTraceWhateverTheirMemoryHolds) {
  MT_NEEDS_DEVICE();
  // Keys begin at position 40: queries 0 .. 39 see none.
  constexpr int64_t kTokens = 130, kDim = 64, kEmpty = 40;
  for (const bool deterministic : {false, true}) {
    std::vector<float> results[2][5];
    for (const bool poisoned : {false, true}) {
      Matrix in[4], out[4];
      std::vector<float> values[4];
      for (int i = 0; i < 4; ++i) {
        values[i] = normal(kTokens * kDim, 30 + i);
        in[i] = Matrix::contiguous(kTokens, kDim, 2);
        out[i] = Matrix::contiguous(kTokens, kDim, 4);
        if (poisoned && (i == 0 || i == 3)) std::fill_n(values[i].begin(), kEmpty * kDim, kNan);
        in[i].write(values[i]);
      }
      Small small(GetParam());
      small.queries = small.keys = kTokens;
      small.k_start = kEmpty;
      small.scale = 0.125;
      small.forward(in[0], in[1], in[2], out[0]);
      for (int64_t i = 0; i < kTokens; ++i) EXPECT_EQ(small.lse[i] == -kInf, i < kEmpty) << i;
      std::vector<float> saved = out[0].read();
      for (int64_t x = 0; x < kEmpty * kDim; ++x) ASSERT_EQ(saved[x], 0);
      results[poisoned][0] = saved;
      if (poisoned) std::fill_n(saved.begin(), kEmpty * kDim, kNan);
      out[0].write(saved);
      small.backward(in[0], in[1], in[2], out[0], in[3], out[1], out[2], out[3], deterministic);
      for (int i = 1; i < 4; ++i) results[poisoned][i] = out[i].read();
      results[poisoned][4] = small.delta;
      for (int64_t x = 0; x < kEmpty * kDim; ++x) ASSERT_EQ(results[poisoned][1][x], 0);
    }
    for (int i = 0; i < 5; ++i) {
      for (size_t x = 0; x < results[0][i].size(); ++x)
        ASSERT_NEAR(results[0][i][x], results[1][i][x], deterministic ? 0 : 1e-4) << i << " " << x;
    }
  }
}

TEST_P(Strides, HugeScoresOnMaskedLanesLeaveNoTrace) {
  MT_NEEDS_DEVICE();
  constexpr int64_t kTokens = 70;
  for (const int64_t kDim : served({16, 64, 96, 128, 256}))
    for (const int huge : {16, 33, 64}) {
      for (const bool deterministic : {false, true}) {
        std::vector<float> values[4];
        for (auto& x : values) x.assign(kTokens * kDim, 0);
        Small small(GetParam());
        small.dim = kDim;
        small.document_start.assign(kTokens, 0);
        // Rows below `huge` see only small keys by causality; later rows belong to a document that begins there, whose keys score
        // -500 where those that are hidden score about 0.
        for (int i = 0; i < kTokens; ++i) {
          small.document_start[i] = i < huge ? 0 : huge;
          values[0][i * kDim] = i < huge ? 1.0f : -1.0f;
          values[1][i * kDim] = i < huge ? 0.015625f * i : 500.0f;
          values[2][i * kDim] = static_cast<float>(i);
          values[3][i * kDim] = 1;
        }
        Matrix in[4], out[4];
        for (int i = 0; i < 4; ++i) {
          in[i] = Matrix::contiguous(kTokens, kDim, 2);
          in[i].write(values[i]);
          out[i] = Matrix::contiguous(kTokens, kDim, 4);
        }
        small.forward(in[0], in[1], in[2], out[0]);
        small.backward(in[0], in[1], in[2], out[0], in[3], out[1], out[2], out[3], deterministic);
        for (const Matrix& m : out) {
          for (const float x : m.read()) ASSERT_TRUE(std::isfinite(x)) << huge;
        }
        const std::vector<float> got = out[0].read();
        for (int i = 0; i < kTokens; ++i) {
          double sum = 0, expected = 0;
          for (int j = i < huge ? 0 : huge; j <= i; ++j) {
            const double p =
                std::exp(static_cast<double>(values[0][i * kDim]) * values[1][j * kDim] +
                         (i < huge ? 0 : 500));
            sum += p;
            expected += p * j;
          }
          EXPECT_NEAR(got[i * kDim], expected / sum, 0.01 * (1 + expected / sum)) << i;
        }
      }
    }
}

// Memory that ends with the last key and query; NaN behind inputs and a sentinel behind what is written. Every query sees
// every key: a key that does not exist would have weight e^0. Against float64.
TEST_P(Strides, TailsOfRaggedMemory) {
  MT_NEEDS_DEVICE();
  constexpr int64_t kDim = 128, kBehind = 64;
  constexpr int kSentinel = 0x41;
  for (const int64_t keys : {1, 63, 65, 70, 129}) {
    for (const int64_t queries : {1, 70}) {
      for (const bool deterministic : {false, true}) {
        std::vector<DeviceMemory> memory;
        Matrix in[4], out[4];
        std::vector<float> values[4];
        for (int i = 0; i < 4; ++i) {
          const int64_t tokens = i == 1 || i == 2 ? keys : queries;
          const int64_t out_tokens = i == 2 || i == 3 ? keys : queries;
          memory.emplace_back((tokens + kBehind) * kDim * 2);
          in[i] = Matrix::inside(memory.back(), 0, kDim, tokens, kDim, 2);
          values[i] = normal(tokens * kDim, 70 + i);
          in[i].write(values[i]);
          memory.emplace_back((out_tokens + kBehind) * kDim * 4);
          check_device(cudaMemset(memory.back().get(), kSentinel, memory.back().bytes()),
                       "the sentinel");
          out[i] = Matrix::inside(memory.back(), 0, kDim, out_tokens, kDim, 4);
        }
        Small small(GetParam());
        small.dim = kDim;
        small.queries = queries;
        small.keys = keys;
        small.q_start = 192;
        small.scale = 0.1;
        small.forward(in[0], in[1], in[2], out[0]);
        small.backward(in[0], in[1], in[2], out[0], in[3], out[1], out[2], out[3], deterministic);
        std::vector<double> expected[4];
        for (int i = 0; i < 4; ++i)
          expected[i].assign((i == 2 || i == 3 ? keys : queries) * kDim, 0);
        for (int64_t q = 0; q < queries; ++q) {
          std::vector<double> p(keys, 0), dp(keys, 0);
          double sum = 0, delta = 0;
          for (int64_t k = 0; k < keys; ++k) {
            for (int64_t d = 0; d < kDim; ++d) {
              p[k] += 0.1 * values[0][q * kDim + d] * values[1][k * kDim + d];
              dp[k] += double{values[3][q * kDim + d]} * values[2][k * kDim + d];
            }
            sum += std::exp(p[k]);
          }
          EXPECT_NEAR(small.lse[q], std::log(sum), 1e-4);
          for (int64_t k = 0; k < keys; ++k) delta += (p[k] = std::exp(p[k]) / sum) * dp[k];
          for (int64_t k = 0; k < keys; ++k) {
            const double ds = 0.1 * p[k] * (dp[k] - delta);
            for (int64_t d = 0; d < kDim; ++d) {
              expected[0][q * kDim + d] += p[k] * values[2][k * kDim + d];
              expected[1][q * kDim + d] += ds * values[1][k * kDim + d];
              expected[2][k * kDim + d] += ds * values[0][q * kDim + d];
              expected[3][k * kDim + d] += p[k] * values[3][q * kDim + d];
            }
          }
        }
        for (int i = 0; i < 4; ++i) {
          const std::vector<float> got = out[i].read();
          double error = 0, norm = 0;
          for (size_t x = 0; x < got.size(); ++x) {
            error += (got[x] - expected[i][x]) * (got[x] - expected[i][x]);
            norm += expected[i][x] * expected[i][x];
          }
          EXPECT_LE(error, 4e-4 * norm + 1e-8) << i << ", " << keys << " keys, " << queries;
          const std::vector<char> all = memory[2 * i + 1].read<char>();
          for (size_t x = got.size() * 4; x < all.size(); ++x)
            ASSERT_EQ(all[x], kSentinel) << i << " written behind its end";
        }
      }
    }
  }
}

// 8300 columns in an order of their own and a bitmap that hides some, one head; also the chunks of the backward: 70 and 20000
// queries. Against float64.
TEST_P(Strides, ThousandsOfColumns) {
  MT_NEEDS_DEVICE();
  constexpr int64_t kColumns = 8300;
  for (const int64_t kDim : served({64, 256}))
    for (const int64_t queries : {70, 20000}) {
      const int32_t q_start = queries == 70 ? 9024 : 0;
      Matrix in[4], out[4];
      std::vector<float> values[4];
      for (int i = 0; i < 4; ++i) {
        const int64_t tokens = i == 1 || i == 2 ? kColumns : queries;
        values[i] = normal(tokens * kDim, 50 + i);
        in[i] = Matrix::contiguous(tokens, kDim, 2);
        in[i].write(values[i]);
        const int64_t out_tokens = i == 2 || i == 3 ? kColumns : queries;
        out[i] = Matrix::contiguous(out_tokens, kDim, 4);
      }
      std::vector<int32_t> rows(kColumns), positions(kColumns);
      for (int64_t c = 0; c < kColumns; ++c) {
        rows[c] = static_cast<int32_t>(c * 4001 % kColumns);
        positions[c] = static_cast<int32_t>(c + c / 12);
      }
      const std::vector<int32_t> counts{kColumns};
      const std::vector<uint64_t> bits(8, 0x8421084210842108ull);
      const DeviceMemory rows_memory(rows), positions_memory(positions), counts_memory(counts),
          bits_memory(bits);
      Small small(GetParam());
      small.dim = kDim;
      small.queries = queries;
      small.q_start = q_start;
      small.keys = kColumns;
      small.scale = 0.125;
      small.columns = {rows_memory.get<int32_t>(), positions_memory.get<int32_t>(),
                       counts_memory.get<int32_t>(), kColumns};
      small.diagonal_bits = bits_memory.get<uint64_t>();
      small.diagonal_words = 8;
      small.seq_len = 8 * 64 * 64;
      small.forward(in[0], in[1], in[2], out[0]);
      const std::vector<float> got = out[0].read();
      for (const bool deterministic : {true, false}) {
        small.backward(in[0], in[1], in[2], out[0], in[3], out[1], out[2], out[3], deterministic);
        const std::vector<float> dq = out[1].read(), dk = out[2].read(), dv = out[3].read();
        // Sums over all queries of dk and dv are checked through their products with fixed vectors, rows of out and dq one by one.
        std::vector<double> dv_sum(kDim, 0), dk_sum(kDim, 0);
        double dq_error = 0, dq_norm = 0;
        for (int64_t i = 0; i < queries; i += queries == 70 ? 1 : 997) {
          const int64_t position = q_start + i;
          std::vector<double> p(kColumns, 0), row(kDim, 0), dp(kColumns, 0), expected(kDim, 0);
          double top = -INFINITY, sum = 0, delta = 0;
          const auto counts_here = [&](int64_t c) {
            const int64_t diagonal = position / 64 - positions[c] / 64;
            return positions[c] <= position && (bits[diagonal / 64] >> (diagonal % 64) & 1) == 0;
          };
          for (int64_t c = 0; c < kColumns; ++c) {
            if (!counts_here(c)) continue;
            for (int64_t d = 0; d < kDim; ++d) {
              p[c] += 0.125 * values[0][i * kDim + d] * values[1][rows[c] * kDim + d];
              dp[c] += double{values[3][i * kDim + d]} * values[2][rows[c] * kDim + d];
            }
            top = std::max(top, p[c]);
          }
          for (int64_t c = 0; c < kColumns; ++c)
            sum += p[c] = counts_here(c) ? std::exp(p[c] - top) : 0;
          for (int64_t c = 0; c < kColumns && sum > 0; ++c) {
            p[c] /= sum;
            delta += p[c] * dp[c];
            for (int64_t d = 0; d < kDim; ++d) row[d] += p[c] * values[2][rows[c] * kDim + d];
          }
          double error = 0, norm = 0;
          for (int64_t d = 0; d < kDim; ++d) {
            error += (row[d] - got[i * kDim + d]) * (row[d] - got[i * kDim + d]);
            norm += row[d] * row[d];
          }
          ASSERT_LE(error, 1e-4 * norm + 1e-12) << i;
          for (int64_t c = 0; c < kColumns && sum > 0; ++c) {
            for (int64_t d = 0; d < kDim; ++d)
              expected[d] += 0.125 * p[c] * (dp[c] - delta) * values[1][rows[c] * kDim + d];
          }
          for (int64_t d = 0; d < kDim; ++d) {
            dq_error += (expected[d] - dq[i * kDim + d]) * (expected[d] - dq[i * kDim + d]);
            dq_norm += expected[d] * expected[d];
          }
          if (queries == 70) {
            for (int64_t c = 0; c < kColumns; ++c) {
              const double weight = std::cos(rows[c]) * p[c];
              for (int64_t d = 0; d < kDim; ++d) {
                dv_sum[d] += weight * values[3][i * kDim + d];
                dk_sum[d] += weight * 0.125 * (dp[c] - delta) * values[0][i * kDim + d];
              }
            }
          }
        }
        EXPECT_LE(dq_error, 4e-4 * dq_norm);
        if (queries > 70) continue;
        double dv_error = 0, dv_norm = 0, dk_error = 0, dk_norm = 0;
        std::vector<double> weights(kColumns);
        for (int64_t c = 0; c < kColumns; ++c) weights[c] = std::cos(c);
        for (int64_t d = 0; d < kDim; ++d) {
          double v = 0, k = 0;
          for (int64_t c = 0; c < kColumns; ++c) {
            v += weights[c] * dv[c * kDim + d];
            k += weights[c] * dk[c * kDim + d];
          }
          dv_error += (v - dv_sum[d]) * (v - dv_sum[d]);
          dk_error += (k - dk_sum[d]) * (k - dk_sum[d]);
          dv_norm += dv_sum[d] * dv_sum[d];
          dk_norm += dk_sum[d] * dk_sum[d];
        }
        EXPECT_LE(dv_error, 1e-4 * dv_norm);
        EXPECT_LE(dk_error, 1e-4 * dk_norm);
      }
    }
}

// More key blocks of a query, or query blocks of a key, than a kernel lists at a time twice over; each pair counts, with about the
// same weight. Sampled rows against float64.
TEST_P(Strides, HundredsOfBlocks) {
  MT_NEEDS_DEVICE();
  constexpr int64_t kMany = 64 * 540, kFew = 70;
  for (const int64_t dim : served({64, 128, 256})) {
    for (const auto& [queries, keys] : {std::pair{kFew, kMany}, {kMany, kFew}}) {
      Matrix in[4], out[4];
      std::vector<float> values[4], got[4];
      for (int i = 0; i < 4; ++i) {
        const int64_t tokens = i == 1 || i == 2 ? keys : queries;
        values[i] = normal(tokens * dim, 90 + i);
        in[i] = Matrix::contiguous(tokens, dim, 2);
        in[i].write(values[i]);
        out[i] = Matrix::contiguous(i == 2 || i == 3 ? keys : queries, dim, 4);
      }
      Small small(GetParam());
      small.dim = dim;
      small.queries = queries;
      small.keys = keys;
      small.q_start = static_cast<int32_t>(kMany);
      small.scale = 0.3 / std::sqrt(static_cast<double>(dim));
      small.forward(in[0], in[1], in[2], out[0]);
      small.backward(in[0], in[1], in[2], out[0], in[3], out[1], out[2], out[3], false);
      for (int i = 0; i < 4; ++i) got[i] = out[i].read();
      // Rows of the queries against all keys (out, dq), and of the keys against all queries (dk, dv).
      for (const bool of_queries : {true, false}) {
        const int64_t rows = of_queries ? queries : keys, others = of_queries ? keys : queries;
        double error[2] = {}, norm[2] = {};
        for (int64_t t = 5; t < rows; t += rows == kFew ? 21 : 1733) {
          std::vector<double> first(dim, 0), second(dim, 0);
          double total = 0;
          for (int64_t other = 0; other < others; ++other) {
            const int64_t i = of_queries ? t : other, j = of_queries ? other : t;
            double score = 0, dp = 0;
            for (int64_t d = 0; d < dim; ++d) {
              score += double{values[0][i * dim + d]} * values[1][j * dim + d];
              dp += double{values[3][i * dim + d]} * values[2][j * dim + d];
            }
            const double p = std::exp(small.scale * score - small.lse[i]);
            const double ds = small.scale * p * (dp - small.delta[i]);
            total += p;
            for (int64_t d = 0; d < dim; ++d) {
              first[d] += of_queries ? p * values[2][j * dim + d] : ds * values[0][i * dim + d];
              second[d] += of_queries ? ds * values[1][j * dim + d] : p * values[3][i * dim + d];
            }
          }
          EXPECT_TRUE(!of_queries || std::abs(total - 1) < 1e-3) << t << ", sum " << total;
          for (int64_t d = 0; d < dim; ++d) {
            const double a = got[of_queries ? 0 : 2][t * dim + d] - first[d],
                         b = got[of_queries ? 1 : 3][t * dim + d] - second[d];
            error[0] += a * a;
            error[1] += b * b;
            norm[0] += first[d] * first[d];
            norm[1] += second[d] * second[d];
          }
        }
        for (int x = 0; x < 2; ++x)
          EXPECT_LE(error[x], 4e-4 * norm[x]) << (of_queries ? "queries " : "keys ") << x
                                              << ", head_dim " << dim << ", " << keys << " keys";
      }
    }
  }
}

}  // namespace
}  // namespace mtraining::kernels::sm80
