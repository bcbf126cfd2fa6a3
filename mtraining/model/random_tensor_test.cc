#include "mtraining/model/random_tensor.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

namespace mtraining::model {
namespace {

TEST(RandomTensor, ElementsAreTheStreamsValues) {
  const Rng rng(11, 29);
  const at::Tensor values = random_normal(rng, {70001}, 0.25, at::kCPU, at::kFloat);
  for (const int64_t i : {int64_t{0}, int64_t{1}, int64_t{65535}, int64_t{65536}, int64_t{70000}}) {
    EXPECT_EQ(values[i].item<float>(),
              static_cast<float>(0.25 * rng.normal(static_cast<uint64_t>(i))));
  }
}

}  // namespace
}  // namespace mtraining::model
