// Against the host's rounding, over counts around a thread's step and beyond what one grid takes.
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
#include "mtraining/testing/gpu.h"
#include "mtraining/testing/random.h"

namespace mtraining::kernels::rounding_cuda {
namespace {

using sm90::check_device;
using sm90::DeviceMemory;

template <typename Half>
Half narrow(float x) {
  if constexpr (std::is_same_v<Half, __half>)
    return __float2half_rn(x);
  else
    return __float2bfloat16_rn(x);
}

uint16_t bits_of(float x, DType dtype) {
  if (dtype == DType::kFloat16) return std::bit_cast<uint16_t>(narrow<__half>(x));
  return std::bit_cast<uint16_t>(narrow<__nv_bfloat16>(x));
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

TEST(Rounding, RoundsAsTheHostDoesInEveryArray) {
  MT_NEEDS_GPU();
  // 8192 thread blocks of 256 threads take 2^24 values at a time.
  const std::vector<int64_t> counts[] = {
      {1}, {7, 8, 9}, {0, 5, 0, 16}, {1023, 1024, 1027}, {2048, 1, 3}, {(1 << 24) + 4099, 12}};
  for (const DType dtype : {DType::kBFloat16, DType::kFloat16}) {
    for (const std::vector<int64_t>& each : counts) {
      SCOPED_TRACE(concat(to_string(dtype), ", ", each.size(), " arrays from ", each[0], " on"));
      std::vector<std::vector<float>> values;
      std::vector<DeviceMemory> from, to;
      std::vector<Rounded> arrays;
      for (const int64_t count : each) {
        values.push_back(values_of(count));
        from.emplace_back(values.back());
        to.emplace_back((count + kGuard) * 2);
        arrays.push_back({from.back().get<float>(), count, to.back().get()});
      }
      round(arrays, dtype, nullptr);
      check_device(cudaDeviceSynchronize(), "rounding");
      for (size_t a = 0; a < each.size(); ++a) {
        const auto got = to[a].read<uint16_t>();
        int64_t wrong = 0;
        for (int64_t i = 0; i < each[a] && wrong < 3; ++i) {
          const uint16_t want = bits_of(values[a][i], dtype);
          if (got[i] == want) continue;
          ++wrong;
          ADD_FAILURE() << "array " << a << "[" << i << "] " << values[a][i] << ": got " << got[i]
                        << ", want " << want;
        }
        for (int64_t i = each[a]; i < each[a] + kGuard; ++i) ASSERT_EQ(got[i], kUntouched);
      }
    }
  }
}

TEST(Rounding, TakesNothingAndRefusesWhatItCannotDo) {
  round({}, DType::kBFloat16, nullptr);
  round(std::vector<Rounded>(2), DType::kFloat16, nullptr);
  const auto message = [](size_t arrays, DType dtype) {
    try {
      round(std::vector<Rounded>(arrays), dtype, nullptr);
    } catch (const Unsupported& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  EXPECT_NE(message(1, DType::kFloat32).find("expected bf16 or fp16, got float32"),
            std::string::npos);
  EXPECT_NE(message(5, DType::kFloat16).find("expected at most 4 arrays, got 5"),
            std::string::npos);
}

}  // namespace
}  // namespace mtraining::kernels::rounding_cuda
