// Each pass against float64 on the host, element by element, over sizes, strides and both dtypes; nothing written beyond its rows.
#include "mtraining/kernels/elementwise_cuda/elementwise.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "mtraining/base/check.h"
#include "mtraining/kernels/dispatch.h"
#include "mtraining/kernels/sm90/device_memory.h"
#include "mtraining/testing/error_of.h"
#include "mtraining/testing/gpu.h"
#include "mtraining/testing/random.h"

namespace mtraining::kernels::elementwise_cuda {
namespace {

using sm90::DeviceMemory;
using Values = std::vector<double>;

constexpr DType kBoth[] = {DType::kFloat32, DType::kBFloat16};

uint16_t to_bf16(float x) {
  const auto bits = std::bit_cast<uint32_t>(x);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
float from_bf16(uint16_t x) { return std::bit_cast<float>(static_cast<uint32_t>(x) << 16); }
double rounded(double x, DType dtype) {
  const auto near = static_cast<float>(x);
  return dtype == DType::kFloat32 ? near : from_bf16(to_bf16(near));
}
/// Half a unit in the last place, relative.
double unit(DType dtype) { return dtype == DType::kFloat32 ? 0x1p-24 : 0x1p-8; }

/// Values of a dtype on the device, with a guard behind them.
class Array {
 public:
  Array(DType dtype, int64_t count) : dtype_(dtype), count_(count), memory_(bytes() + kGuard) {}
  Array(DType dtype, const Values& values) : Array(dtype, static_cast<int64_t>(values.size())) {
    std::vector<char> raw(bytes());
    for (int64_t i = 0; i < count_; ++i) {
      if (dtype == DType::kFloat32)
        reinterpret_cast<float*>(raw.data())[i] = static_cast<float>(values[i]);
      else
        reinterpret_cast<uint16_t*>(raw.data())[i] = to_bf16(static_cast<float>(values[i]));
    }
    sm90::check_device(cudaMemcpy(get(), raw.data(), raw.size(), cudaMemcpyHostToDevice), "copy");
  }
  void* get() const { return memory_.get(); }
  float* floats() const { return memory_.get<float>(); }
  /// Expects the guard untouched.
  Values read() const {
    const std::vector<char> raw = memory_.read<char>();
    for (int64_t i = 0; i < kGuard; ++i)
      EXPECT_EQ(static_cast<unsigned char>(raw[bytes() + i]), 0xFF) << "written beyond the end";
    Values values(count_);
    for (int64_t i = 0; i < count_; ++i) {
      values[i] = dtype_ == DType::kFloat32
                      ? reinterpret_cast<const float*>(raw.data())[i]
                      : from_bf16(reinterpret_cast<const uint16_t*>(raw.data())[i]);
    }
    return values;
  }

 private:
  static constexpr int64_t kGuard = 256;
  int64_t bytes() const { return count_ * size_of(dtype_); }

  DType dtype_;
  int64_t count_;
  DeviceMemory memory_;
};

Values random_values(int64_t count, uint64_t seed, DType dtype, double scale = 1) {
  testing::Random random(seed);
  Values values(count);
  for (double& value : values) value = rounded(scale * random.normal(), dtype);
  return values;
}

/// |got - truth| <= one rounding of the result + `noise` (of sums and exponentials in float32), everywhere.
void expect_close(const std::string& name, const Values& got, const Values& truth, DType dtype,
                  double noise) {
  ASSERT_EQ(got.size(), truth.size()) << name;
  double worst = 0;
  size_t place = 0;
  for (size_t i = 0; i < got.size(); ++i) {
    const double allowed = 1.01 * unit(dtype) * std::abs(truth[i]) + noise;
    const double error = std::abs(got[i] - truth[i]) / allowed;
    if (!(error <= worst)) worst = error, place = i;
  }
  EXPECT_LE(worst, 1) << name << " at " << place << ": got " << got[place] << ", expected "
                      << truth[place];
}

struct NormCase {
  int64_t rows, width, heads, token_stride;  // 0: plain rows
};

TEST(RmsNorm, ForwardAndBackwardEqualFloat64) {
  MT_NEEDS_GPU();
  const NormCase cases[] = {{1, 8, 1, 0},     {7, 64, 1, 0},       {300, 128, 3, 3 * 128 + 8},
                            {9, 256, 1, 0},   {5, 264, 1, 0},      {3000, 2048, 1, 0},
                            {33, 2056, 1, 0}, {40, 4096, 1, 4104}, {12, 5000, 1, 0},
                            {6, 8192, 1, 0},  {5, 16384, 1, 0},    {4001, 40, 1, 48}};
  for (const DType dtype : kBoth) {
    for (const NormCase& c : cases) {
      for (const bool adds : {false, true}) {
        const std::string name = concat(to_string(dtype), " ", c.rows, " x ", c.width, " heads ",
                                        c.heads, adds ? " added" : "");
        const Rows lie{c.heads, c.token_stride};
        const double eps = c.rows % 2 == 0 ? 1e-6 : 0.3;  // one that shows
        const auto at = [&](int64_t row, int64_t column) {
          return c.token_stride == 0
                     ? row * c.width + column
                     : row / c.heads * c.token_stride + row % c.heads * c.width + column;
        };
        const int64_t extent = at(c.rows - 1, c.width - 1) + 1;
        const int64_t count = c.rows * c.width;
        const Values x = random_values(extent, 1, dtype, 3), added = random_values(count, 2, dtype),
                     weight = random_values(c.width, 3, dtype),
                     dout = random_values(count, 4, dtype), dsum = random_values(count, 5, dtype);
        Values sums(count), out(count), roots(c.rows), dx(count), dweight(c.width), size(c.width);
        for (int64_t r = 0; r < c.rows; ++r) {
          double squares = 0, product = 0;
          for (int64_t i = 0; i < c.width; ++i) {
            double& s = sums[r * c.width + i];
            s = adds ? rounded(x[at(r, i)] + added[r * c.width + i], dtype) : x[at(r, i)];
            squares += s * s;
          }
          const double root = 1 / std::sqrt(squares / c.width + eps);
          roots[r] = root;
          for (int64_t i = 0; i < c.width; ++i) {
            const int64_t e = r * c.width + i;
            out[e] = sums[e] * root * weight[i];
            product += dout[e] * weight[i] * sums[e] * root;
            dweight[i] += dout[e] * sums[e] * root;
            size[i] += std::abs(dout[e] * sums[e] * root);
          }
          for (int64_t i = 0; i < c.width; ++i) {
            const int64_t e = r * c.width + i;
            dx[e] = root * (dout[e] * weight[i] - sums[e] * root * product / c.width) +
                    (adds ? dsum[e] : 0);
          }
        }
        const Array x_on(dtype, x), added_on(dtype, added), weight_on(dtype, weight),
            sum_on(dtype, count), out_on(dtype, count), roots_on(DType::kFloat32, c.rows);
        rms_norm({.dtype = dtype,
                  .rows = c.rows,
                  .width = c.width,
                  .x = x_on.get(),
                  .x_rows = lie,
                  .added = adds ? added_on.get() : nullptr,
                  .weight = weight_on.get(),
                  .sum = adds ? sum_on.get() : nullptr,
                  .out = out_on.get(),
                  .inverse_root = roots_on.floats(),
                  .eps = eps});
        expect_close("out, " + name, out_on.read(), out, dtype, 1e-5);
        expect_close("inverse_root, " + name, roots_on.read(), roots, DType::kFloat32, 1e-6);
        if (adds) {
          EXPECT_EQ(sum_on.read(), sums) << name;
        }

        // Gradients lie as x does, or plain where the sum was.
        Values dout_lies(adds ? count : extent);
        for (int64_t r = 0; r < c.rows; ++r) {
          for (int64_t i = 0; i < c.width; ++i)
            dout_lies[adds ? r * c.width + i : at(r, i)] = dout[r * c.width + i];
        }
        const Array dout_on(dtype, dout_lies), dsum_on(dtype, dsum), dx_on(dtype, extent),
            dweight_on(dtype, c.width),
            partials(DType::kFloat32, rms_norm_partial_rows(dtype, c.rows, c.width) * c.width);
        rms_norm_backward({.dtype = dtype,
                           .rows = c.rows,
                           .width = c.width,
                           .dout = dout_on.get(),
                           .dout_rows = adds ? Rows{} : lie,
                           .x = adds ? sum_on.get() : x_on.get(),
                           .x_rows = adds ? Rows{} : lie,
                           .dx_rows = lie,
                           .weight = weight_on.get(),
                           .inverse_root = roots_on.floats(),
                           .added = adds ? dsum_on.get() : nullptr,
                           .dx = dx_on.get(),
                           .dweight = dweight_on.get(),
                           .partials = partials.floats()});
        const Values spread = dx_on.read();
        Values got(count);
        for (int64_t r = 0; r < c.rows; ++r)
          for (int64_t i = 0; i < c.width; ++i) got[r * c.width + i] = spread[at(r, i)];
        expect_close("dx, " + name, got, dx, dtype, 2e-5);
        const double largest = *std::max_element(size.begin(), size.end());
        expect_close("dweight, " + name, dweight_on.read(), dweight, dtype, 1e-6 * largest + 1e-6);
        partials.read();
      }
    }
  }
}

TEST(RmsNorm, RowsOfZerosAndInPlaceGradients) {
  MT_NEEDS_GPU();
  const int64_t rows = 3, width = 64;
  const Array zeros(DType::kBFloat16, Values(rows * width, 0)),
      ones(DType::kBFloat16, Values(width, 1)), dout(DType::kBFloat16, Values(rows * width, 1e-3)),
      out(DType::kBFloat16, rows * width), roots(DType::kFloat32, rows),
      dweight(DType::kBFloat16, width),
      partials(DType::kFloat32, rms_norm_partial_rows(DType::kBFloat16, rows, width) * width);
  rms_norm({.rows = rows,
            .width = width,
            .x = zeros.get(),
            .weight = ones.get(),
            .out = out.get(),
            .inverse_root = roots.floats(),
            .eps = 1e-6});
  EXPECT_EQ(out.read(), Values(rows * width, 0));
  rms_norm_backward({.rows = rows,
                     .width = width,
                     .dout = dout.get(),
                     .x = zeros.get(),
                     .weight = ones.get(),
                     .inverse_root = roots.floats(),
                     .added = dout.get(),
                     .dx = dout.get(),
                     .dweight = dweight.get(),
                     .partials = partials.floats()});
  const double d = rounded(1e-3, DType::kBFloat16);
  expect_close("dx in place", dout.read(), Values(rows * width, d * 1001), DType::kBFloat16, 1e-4);
  EXPECT_EQ(dweight.read(), Values(width, 0));
}

// What is summed over runs of rows must not be rounded before the last sum.
TEST(RmsNorm, TheWeightsGradientOfAPartIsFloat32) {
  MT_NEEDS_GPU();
  const int64_t rows = 300, width = 72;
  const DType dtype = DType::kBFloat16;
  const Values x = random_values(rows * width, 1, dtype), d = random_values(rows * width, 2, dtype),
               w = random_values(width, 3, dtype);
  const Array x_on(dtype, x), d_on(dtype, d), w_on(dtype, w), out(dtype, rows * width),
      dx(dtype, rows * width), roots(DType::kFloat32, rows), dweight(DType::kFloat32, width),
      partials(DType::kFloat32, rms_norm_partial_rows(dtype, rows, width) * width);
  rms_norm({.rows = rows,
            .width = width,
            .x = x_on.get(),
            .weight = w_on.get(),
            .out = out.get(),
            .inverse_root = roots.floats(),
            .eps = 1e-6});
  rms_norm_backward({.rows = rows,
                     .width = width,
                     .dout = d_on.get(),
                     .x = x_on.get(),
                     .weight = w_on.get(),
                     .inverse_root = roots.floats(),
                     .dx = dx.get(),
                     .dweight = dweight.get(),
                     .wide_dweight = true,
                     .partials = partials.floats()});
  Values truth(width, 0);
  for (int64_t row = 0; row < rows; ++row) {
    double squares = 0;
    for (int64_t i = 0; i < width; ++i) squares += x[row * width + i] * x[row * width + i];
    const double root = 1 / std::sqrt(squares / width + 1e-6);
    for (int64_t i = 0; i < width; ++i) truth[i] += d[row * width + i] * x[row * width + i] * root;
  }
  expect_close("dweight", dweight.read(), truth, DType::kFloat32, 1e-4);
}

struct RopeCase {
  int64_t tokens, q_heads, kv_heads, head_dim, table_tokens, pad;
};

TEST(Rope, TurnsAndTurnsBackAsFloat64) {
  MT_NEEDS_GPU();
  const RopeCase cases[] = {{1, 1, 1, 8, 1, 0},       {300, 16, 2, 128, 300, 0},
                            {14, 4, 2, 24, 7, 8},     {5000, 4, 1, 64, 2500, 0},
                            {33, 32, 8, 128, 33, 16}, {9, 3, 3, 256, 9, 0},
                            {64, 28, 4, 40, 16, 0}};
  for (const DType dtype : kBoth) {
    for (const RopeCase& c : cases) {
      const std::string name = concat(to_string(dtype), " ", c.tokens, " tokens, ", c.q_heads, "/",
                                      c.kv_heads, " heads of ", c.head_dim);
      const int64_t half = c.head_dim / 2, turned = c.q_heads + c.kv_heads;
      const int64_t width = (c.q_heads + 2 * c.kv_heads) * c.head_dim, stride = width + c.pad;
      const Values cos = random_values(c.table_tokens * half, 1, DType::kFloat32),
                   sin = random_values(c.table_tokens * half, 2, DType::kFloat32);
      const Values x = random_values(c.tokens * stride, 3, dtype);
      Values y = x;
      for (int64_t t = 0; t < c.tokens; ++t) {
        for (int64_t h = 0; h < turned; ++h) {
          for (int64_t i = 0; i < half; ++i) {
            const int64_t a = t * stride + h * c.head_dim + i, b = a + half;
            const double co = cos[t % c.table_tokens * half + i],
                         si = sin[t % c.table_tokens * half + i];
            y[a] = x[a] * co - x[b] * si;
            y[b] = x[b] * co + x[a] * si;
          }
        }
      }
      const Array cos_on(DType::kFloat32, cos), sin_on(DType::kFloat32, sin), x_on(dtype, x);
      rope({.dtype = dtype,
            .tokens = c.tokens,
            .rotated_heads = turned,
            .head_dim = c.head_dim,
            .cos = cos_on.floats(),
            .sin = sin_on.floats(),
            .table_tokens = c.table_tokens,
            .x = x_on.get(),
            .token_stride = stride});
      expect_close("x, " + name, x_on.read(), y, dtype, 2e-6);  // the rest of a token as it was

      const int64_t q_stride = c.q_heads * c.head_dim + c.pad, kv = c.kv_heads * c.head_dim;
      const Values dq = random_values(c.tokens * q_stride, 4, dtype),
                   dk = random_values(c.tokens * kv, 5, dtype),
                   dv = random_values(c.tokens * kv, 6, dtype);
      Values drow(c.tokens * width), dbias(width);
      for (int64_t t = 0; t < c.tokens; ++t) {
        for (int64_t h = 0; h < turned; ++h) {
          const double* d = h < c.q_heads ? &dq[t * q_stride + h * c.head_dim]
                                          : &dk[t * kv + (h - c.q_heads) * c.head_dim];
          for (int64_t i = 0; i < half; ++i) {
            const double co = cos[t % c.table_tokens * half + i],
                         si = sin[t % c.table_tokens * half + i];
            drow[t * width + h * c.head_dim + i] = d[i] * co + d[half + i] * si;
            drow[t * width + h * c.head_dim + half + i] = d[half + i] * co - d[i] * si;
          }
        }
        for (int64_t i = 0; i < kv; ++i) drow[t * width + turned * c.head_dim + i] = dv[t * kv + i];
        for (int64_t i = 0; i < width; ++i) dbias[i] += rounded(drow[t * width + i], dtype);
      }
      const Array dq_on(dtype, dq), dk_on(dtype, dk), dv_on(dtype, dv),
          drow_on(dtype, c.tokens * width), dbias_on(dtype, width);
      RopeBackward p{.dtype = dtype,
                     .tokens = c.tokens,
                     .q_heads = c.q_heads,
                     .kv_heads = c.kv_heads,
                     .head_dim = c.head_dim,
                     .cos = cos_on.floats(),
                     .sin = sin_on.floats(),
                     .table_tokens = c.table_tokens,
                     .dq = dq_on.get(),
                     .dk = dk_on.get(),
                     .dv = dv_on.get(),
                     .dq_token_stride = q_stride,
                     .dk_token_stride = kv,
                     .dv_token_stride = kv,
                     .drow = drow_on.get()};
      rope_backward(p);
      expect_close("drow, " + name, drow_on.read(), drow, dtype, 2e-6);
      const Array partials(DType::kFloat32, rope_partial_rows(p) * width);
      p.dbias = dbias_on.get();
      p.partials = partials.floats();
      rope_backward(p);
      expect_close("drow again, " + name, drow_on.read(), drow, dtype, 2e-6);
      // A value on the border of two roundings may fall on the other side.
      expect_close("dbias, " + name, dbias_on.read(), dbias, dtype,
                   1e-5 * std::sqrt(c.tokens) + (dtype == DType::kBFloat16 ? 0.02 : 0));
      partials.read();
    }
  }
}

TEST(Swiglu, ForwardAndBackwardEqualFloat64AlsoInPlace) {
  MT_NEEDS_GPU();
  const int64_t sizes[][2] = {{1, 8}, {3, 24}, {129, 40}, {37, 11008}, {500, 704}, {1025, 1032}};
  for (const DType dtype : kBoth) {
    for (const auto& [rows, width] : sizes) {
      const std::string name = concat(to_string(dtype), " ", rows, " x ", width);
      Values gate_up = random_values(rows * 2 * width, 1, dtype, 3);
      gate_up[0] = 90, gate_up[1] = -90, gate_up[2] = 0;
      const Values d = random_values(rows * width, 2, dtype);
      Values product(rows * width), dgate_up(gate_up.size());
      for (int64_t r = 0; r < rows; ++r) {
        for (int64_t i = 0; i < width; ++i) {
          const int64_t e = r * width + i, g = r * 2 * width + i, u = g + width;
          const double s = 1 / (1 + std::exp(-gate_up[g])), a = gate_up[g] * s;
          product[e] = a * gate_up[u];
          dgate_up[u] = d[e] * a;
          dgate_up[g] = d[e] * gate_up[u] * s * (1 + gate_up[g] * (1 - s));
        }
      }
      const Array gate_up_on(dtype, gate_up), product_on(dtype, rows * width), d_on(dtype, d),
          dgate_up_on(dtype, static_cast<int64_t>(gate_up.size()));
      swiglu({.dtype = dtype,
              .rows = rows,
              .width = width,
              .gate_up = gate_up_on.get(),
              .product = product_on.get()});
      expect_close("product, " + name, product_on.read(), product, dtype, 2e-5);
      const auto expect_gradient = [&](const std::string& how, const Array& got_d,
                                       const Array& got_product) {
        expect_close("dgate_up, " + how + name, got_d.read(), dgate_up, dtype, 5e-5);
        expect_close("product, " + how + name, got_product.read(), product, dtype, 2e-5);
      };
      SwigluBackward p{.dtype = dtype,
                       .rows = rows,
                       .width = width,
                       .gate_up = gate_up_on.get(),
                       .dproduct = d_on.get(),
                       .dgate_up = dgate_up_on.get(),
                       .product = product_on.get()};
      swiglu_backward(p);
      expect_gradient("", dgate_up_on, product_on);
      EXPECT_EQ(gate_up_on.read(), gate_up);
      EXPECT_EQ(d_on.read(), d);
      p.dgate_up = gate_up_on.get();
      p.product = d_on.get();
      swiglu_backward(p);
      expect_gradient("in place, ", gate_up_on, d_on);
    }
  }
}

TEST(CrossEntropy, LossAndGradientInPlaceEqualFloat64) {
  MT_NEEDS_GPU();
  constexpr int64_t kIgnored = -100;
  const int64_t sizes[][3] = {{1, 1, 1},        {5, 3, 3},           {9, 7, 12},
                              {20, 1000, 1008}, {3, 151936, 151936}, {4, 50257, 50264},
                              {2, 8193, 8193},  {7, 4096, 4100}};
  const DType kinds[][2] = {{DType::kFloat32, DType::kFloat32},
                            {DType::kFloat32, DType::kBFloat16},
                            {DType::kBFloat16, DType::kBFloat16}};
  for (const auto& [logits_dtype, gradient_dtype] : kinds) {
    for (const auto& [rows, vocab, stride] : sizes) {
      for (const double scale : {1.0, 40.0}) {
        const std::string name = concat(to_string(logits_dtype), " to ", to_string(gradient_dtype),
                                        " ", rows, " x ", vocab, " scale ", scale);
        const Values logits = random_values(rows * stride, 1, logits_dtype, scale);
        std::vector<int64_t> labels(rows);
        testing::Random random(2);
        for (int64_t r = 0; r < rows; ++r)
          labels[r] = r % 4 == 3 ? kIgnored : r == 0 ? vocab - 1 : random.below(vocab);
        Values loss(rows), gradient(rows * vocab);
        for (int64_t r = 0; r < rows; ++r) {
          if (labels[r] == kIgnored) continue;
          const double* x = &logits[r * stride];
          const double top = *std::max_element(x, x + vocab);
          double sum = 0;
          for (int64_t i = 0; i < vocab; ++i) sum += std::exp(x[i] - top);
          const double lse = top + std::log(sum);
          loss[r] = lse - x[labels[r]];
          for (int64_t i = 0; i < vocab; ++i)
            gradient[r * vocab + i] = std::exp(x[i] - lse) - (i == labels[r]);
        }
        const Array logits_on(logits_dtype, logits), loss_on(DType::kFloat32, rows);
        const DeviceMemory labels_on(labels);
        CrossEntropy p{.logits_dtype = logits_dtype,
                       .gradient_dtype = gradient_dtype,
                       .rows = rows,
                       .vocab = vocab,
                       .logits = logits_on.get(),
                       .row_stride = stride,
                       .labels = labels_on.get<int64_t>(),
                       .ignored = kIgnored,
                       .loss = loss_on.floats(),
                       .gradient = false};
        cross_entropy(p);
        expect_close("loss, " + name, loss_on.read(), loss, DType::kFloat32, 2e-5 * scale);
        EXPECT_EQ(logits_on.read(), logits) << name;
        p.gradient = true;
        cross_entropy(p);
        expect_close("loss again, " + name, loss_on.read(), loss, DType::kFloat32, 2e-5 * scale);
        // Rows of the gradient begin where rows of the logits did.
        const int64_t step = stride * size_of(logits_dtype) / size_of(gradient_dtype);
        const Array all(gradient_dtype, step * rows);
        sm90::check_device(
            cudaMemcpy(all.get(), logits_on.get(), step * rows * size_of(gradient_dtype),
                       cudaMemcpyDeviceToDevice),
            "copy");
        const Values spread = all.read();
        Values got(rows * vocab);
        for (int64_t r = 0; r < rows; ++r)
          for (int64_t i = 0; i < vocab; ++i) got[r * vocab + i] = spread[r * step + i];
        expect_close("gradient, " + name, got, gradient, gradient_dtype, 3e-6 * scale);
        logits_on.read();
      }
    }
  }
}

// Gradients are narrower than logits: a thread that is ahead would write over what another has yet to read. Many rows at a time, one
// sweep each, let threads of a block drift apart.
TEST(CrossEntropy, ThreadsOfARowWaitForOneAnother) {
  MT_NEEDS_GPU();
  constexpr int64_t kRows = 4096, kVocab = 8192;
  const Values row = random_values(kVocab, 3, DType::kFloat32);
  Values logits;
  for (int64_t r = 0; r < kRows; ++r) logits.insert(logits.end(), row.begin(), row.end());
  const DeviceMemory labels(std::vector<int64_t>(kRows, 17));
  for (int repeat = 0; repeat < 3; ++repeat) {
    const Array on(DType::kFloat32, logits), loss(DType::kFloat32, kRows);
    cross_entropy({.rows = kRows,
                   .vocab = kVocab,
                   .logits = on.get(),
                   .row_stride = kVocab,
                   .labels = labels.get<int64_t>(),
                   .ignored = -100,
                   .loss = loss.floats()});
    std::vector<uint16_t> got(2 * kRows * kVocab);
    sm90::check_device(
        cudaMemcpy(got.data(), on.get(), got.size() * sizeof(uint16_t), cudaMemcpyDeviceToHost),
        "copy");
    int64_t different = 0;
    for (int64_t r = 1; r < kRows; ++r)
      different += std::memcmp(&got[2 * r * kVocab], got.data(), kVocab * sizeof(uint16_t)) != 0;
    EXPECT_EQ(different, 0) << "rows of the same logits have other gradients";
  }
}

TEST(CrossEntropy, SpecialValuesStayInTheirRow) {
  MT_NEEDS_GPU();
  constexpr double kInf = std::numeric_limits<double>::infinity();
  constexpr int64_t kVocab = 40000, kIgnored = -1;
  const Values plain = random_values(kVocab, 1, DType::kFloat32);
  Values logits;
  for (int r = 0; r < 7; ++r) logits.insert(logits.end(), plain.begin(), plain.end());
  for (int64_t i = 0; i < kVocab; ++i) logits[i] = NAN;  // ignored: nothing of it is seen
  for (int64_t i = 0; i < kVocab - 9; ++i) logits[kVocab + i] = -kInf;  // few are possible
  logits[3 * kVocab + 7] = NAN;                                         // loss NaN
  for (int64_t i = 0; i < kVocab - 9; ++i) logits[6 * kVocab + i] = -kInf;
  logits[6 * kVocab + 7] = NAN;  // a thread that sees nothing else but minus infinity has it
  const Array on(DType::kFloat32, logits), loss(DType::kFloat32, 7);
  const std::vector<int64_t> labels = {kIgnored, kVocab - 1, 5, 6, kVocab, 5, kVocab - 1};
  const DeviceMemory labels_on(labels);
  cross_entropy({.gradient_dtype = DType::kFloat32,
                 .rows = 7,
                 .vocab = kVocab,
                 .logits = on.get(),
                 .row_stride = kVocab,
                 .labels = labels_on.get<int64_t>(),
                 .ignored = kIgnored,
                 .loss = loss.floats()});
  const Values got = loss.read(), d = on.read();
  EXPECT_EQ(got[0], 0);
  EXPECT_EQ(Values(d.begin(), d.begin() + kVocab), Values(kVocab, 0));
  double sum = 0;
  for (int64_t i = kVocab - 9; i < kVocab; ++i) sum += std::exp(plain[i]);
  EXPECT_NEAR(got[1], std::log(sum) - plain[kVocab - 1], 1e-5);
  EXPECT_EQ(d[kVocab + 3], 0);
  EXPECT_TRUE(std::isnan(got[3]));
  EXPECT_TRUE(std::isnan(got[6]));
  EXPECT_TRUE(std::isnan(got[4])) << "a label outside of the vocabulary";
  EXPECT_TRUE(std::isfinite(got[2]));
  EXPECT_EQ(got[2], got[5]) << "the same row, the same bits";
}

TEST(Elementwise, WhatIsNotSupportedIsSaidInOneSentence) {
  alignas(16) static char memory[64] = {};
  void* any = memory;
  auto* floats = reinterpret_cast<float*>(memory);
  RmsNormForward norm{
      .rows = 1, .width = 20, .x = any, .weight = any, .out = any, .inverse_root = floats};
  EXPECT_NE(testing::error_of([&] { rms_norm(norm); }).find("8 divides"), std::string::npos);
  norm.width = 16392;
  EXPECT_NE(testing::error_of([&] { rms_norm(norm); }).find("at most 16384"), std::string::npos);
  norm.width = 16;
  norm.dtype = DType::kFloat64;
  EXPECT_NE(testing::error_of([&] { rms_norm(norm); }).find("float32 or bf16"), std::string::npos);
  norm.dtype = DType::kFloat32;
  norm.added = any;
  EXPECT_NE(testing::error_of([&] { rms_norm(norm); }).find("`sum`"), std::string::npos);
  norm.sum = memory + 2;
  EXPECT_NE(testing::error_of([&] { rms_norm(norm); }).find("16-byte aligned"), std::string::npos);
  EXPECT_NE(testing::error_of([&] {
              swiglu({.rows = 1, .width = 12, .gate_up = any, .product = any});
            }).find("8 divides"),
            std::string::npos);
  EXPECT_NE(testing::error_of([&] {
              rope({.tokens = 4, .rotated_heads = 2, .head_dim = 12, .table_tokens = 4});
            }).find("head_dim"),
            std::string::npos);
  EXPECT_NE(testing::error_of([&] {
              rope({.tokens = 4,
                    .rotated_heads = 2,
                    .head_dim = 16,
                    .table_tokens = 3,
                    .token_stride = 32});
            }).find("multiple of the table"),
            std::string::npos);
  EXPECT_NE(testing::error_of([&] {
              cross_entropy({.logits_dtype = DType::kBFloat16,
                             .gradient_dtype = DType::kFloat32,
                             .rows = 1,
                             .vocab = 4,
                             .row_stride = 4});
            }).find("no wider"),
            std::string::npos);
}

}  // namespace
}  // namespace mtraining::kernels::elementwise_cuda
