// Splitting and joining against the host's rounding, over counts around a thread's step and beyond what one grid takes.
#include "mtraining/kernels/rounding_cuda/rounding.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>
#include <string>
#include <type_traits>
#include <vector>

#include "mtraining/base/check.h"
#include "mtraining/kernels/dispatch.h"
#include "mtraining/kernels/sm90/device_memory.h"
#include "mtraining/testing/random.h"

namespace mtraining::kernels::rounding_cuda {
namespace {

using sm90::check_device;
using sm90::DeviceMemory;

bool has_gpu() {
  int count = 0;
  return cudaGetDeviceCount(&count) == cudaSuccess && count > 0;
}

template <typename Half>
Half narrow(float x) {
  if constexpr (std::is_same_v<Half, __half>)
    return __float2half_rn(x);
  else
    return __float2bfloat16_rn(x);
}
float widen(__half x) { return __half2float(x); }
float widen(__nv_bfloat16 x) { return __bfloat162float(x); }

uint16_t bits_of(float x, DType dtype) {
  if (dtype == DType::kFloat16) return std::bit_cast<uint16_t>(narrow<__half>(x));
  return std::bit_cast<uint16_t>(narrow<__nv_bfloat16>(x));
}
float value_of(uint16_t bits, DType dtype) {
  if (dtype == DType::kFloat16) return widen(std::bit_cast<__half>(bits));
  return widen(std::bit_cast<__nv_bfloat16>(bits));
}

/// Of all sizes that a result has, with ties of the rounding, zeros of both signs and infinities among them.
std::vector<float> values_of(int64_t count) {
  testing::Random random(count);
  std::vector<float> values(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; ++i) {
    const auto u = static_cast<float>(2 * random.uniform() - 1);
    switch (i % 7) {
      case 0:
        values[i] = 1 + 0x1p-8f * (1 + static_cast<float>(i % 2) * 2);  // halfway in bf16
        break;
      case 1:
        values[i] = u == 0 ? -0.0f : u * 0x1p-20f;
        break;
      case 2:
        values[i] = i % 3 == 0 ? -0.0f : 0.0f;
        break;
      case 3:
        values[i] = i % 91 == 3 ? std::numeric_limits<float>::infinity() : 1000 * u;
        break;
      default:
        values[i] = u;
    }
  }
  return values;
}

constexpr uint16_t kUntouched = 0xFFFF;
constexpr int64_t kGuard = 8;

TEST(Rounding, SplitsAsTheHostDoesAndJoinsToWhatTheTwoHold) {
  if (!has_gpu()) GTEST_SKIP() << "no GPU";
  for (const DType dtype : {DType::kBFloat16, DType::kFloat16}) {
    // 4096 thread blocks of 256 threads take 2^22 values at a time.
    for (const int64_t count : {1, 2, 3, 4, 5, 7, 1023, 1024, 1027, (1 << 22) + 1030}) {
      SCOPED_TRACE(concat(to_string(dtype), ", ", count, " values"));
      const std::vector<float> values = values_of(count);
      const DeviceMemory given(values);
      for (const bool with_residual : {true, false}) {
        const DeviceMemory rounded((count + kGuard) * 2), residual((count + kGuard) * 2),
            joined((count + kGuard) * 4);
        void* const rest = with_residual ? residual.get() : nullptr;
        split(given.get<float>(), count, dtype, rounded.get(), rest, nullptr);
        join(rounded.get(), rest, count, dtype, joined.get<float>(), nullptr);
        check_device(cudaDeviceSynchronize(), "rounding");
        const auto got = rounded.read<uint16_t>(), left = residual.read<uint16_t>();
        const auto whole = joined.read<uint32_t>();
        int64_t wrong = 0;
        for (int64_t i = 0; i < count && wrong < 3; ++i) {
          const uint16_t near = bits_of(values[i], dtype);
          const uint16_t lost = bits_of(values[i] - value_of(near, dtype), dtype);
          // Infinity less itself is a NaN of any bits.
          const bool odd = std::isinf(values[i]);
          const float sum = value_of(near, dtype) + (with_residual ? value_of(lost, dtype) : 0.0f);
          const bool right = got[i] == near && (!with_residual || odd || left[i] == lost) &&
                             (odd ? with_residual == std::isnan(std::bit_cast<float>(whole[i]))
                                  : whole[i] == std::bit_cast<uint32_t>(sum));
          if (right) continue;
          ++wrong;
          ADD_FAILURE() << "[" << i << "] " << values[i] << ": rounded " << got[i] << ", want "
                        << near << "; residual " << left[i] << ", want " << lost << "; joined "
                        << std::bit_cast<float>(whole[i]) << ", want " << sum;
        }
        for (int64_t i = count; i < count + kGuard; ++i) {
          ASSERT_EQ(got[i], kUntouched);
          ASSERT_EQ(left[i], kUntouched);
          ASSERT_EQ(whole[i], 0xFFFFFFFFu);
        }
        if (!with_residual) {
          ASSERT_EQ(left[0], kUntouched);
        }
      }
    }
  }
}

TEST(Rounding, TakesNothingAndRefusesWiderTypes) {
  split(nullptr, 0, DType::kBFloat16, nullptr, nullptr, nullptr);
  join(nullptr, nullptr, 0, DType::kFloat16, nullptr, nullptr);
  const auto message = [](const auto& call) {
    try {
      call();
    } catch (const Unsupported& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  float value = 0;
  EXPECT_NE(message([&] {
              split(&value, 1, DType::kFloat32, &value, nullptr, nullptr);
            }).find("expected bf16 or fp16, got float32"),
            std::string::npos);
  EXPECT_NE(message([&] {
              join(&value, nullptr, 1, DType::kFloat32, &value, nullptr);
            }).find("expected bf16 or fp16, got float32"),
            std::string::npos);
}

}  // namespace
}  // namespace mtraining::kernels::rounding_cuda
