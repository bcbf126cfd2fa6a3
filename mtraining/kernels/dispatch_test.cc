// Which back end serves what, what is refused by which words, and grids beyond CUDA's limits: all without a device.
#include "mtraining/kernels/dispatch.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>

#include "mtraining/base/check.h"
#include "mtraining/kernels/validate.h"
#include "mtraining/testing/error_of.h"

namespace mtraining::kernels {
namespace {

constexpr DeviceKind kHost;
constexpr DeviceKind kHopper{.cuda = true, .major = 9, .minor = 0, .num_sms = 132};

std::string refusal(const Request& request) {
  return testing::error_of<Unsupported>([&] { choose(request); });
}

TEST(Dispatch, TheHostTakesEveryTypeAndHeadSizeOfTheContractInBothDirections) {
  for (const Direction direction : {Direction::kForward, Direction::kBackward}) {
    for (const DType dtype :
         {DType::kFloat64, DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
      for (int64_t d = 8; d <= kMaxHeadDim; d += 8) {
        for (const bool dense : {false, true}) {
          EXPECT_EQ(choose({.direction = direction,
                            .device = kHost,
                            .dtype = dtype,
                            .head_dim = d,
                            .dense_alone = dense})
                        .backend,
                    Backend::kRef);
        }
      }
    }
    EXPECT_NE(refusal({.direction = direction, .device = kHost, .head_dim = 12}), "");
    EXPECT_NE(refusal({.direction = direction, .device = kHost, .head_dim = kMaxHeadDim + 8}), "");
  }
}

TEST(Dispatch, HopperTakesItsOwnForSparseAndTorchForDenseAlone) {
  for (const Direction direction : {Direction::kForward, Direction::kBackward}) {
    for (const DType dtype : {DType::kBFloat16, DType::kFloat16}) {
      for (const int64_t d : {64, 128}) {
        Request request{.direction = direction, .device = kHopper, .dtype = dtype, .head_dim = d};
        EXPECT_EQ(choose(request).backend, Backend::kSm90);
        request.dense_alone = true;
        EXPECT_EQ(choose(request).backend, Backend::kTorch);
      }
    }
  }
}

TEST(Dispatch, WhatHoppersTensorCopiesCannotReadGoesToTheOlderKernels) {
  const auto backend = [](const auto& change) {
    Request request;
    request.device = kHopper;
    change(request);
    return choose(request).backend;
  };
  EXPECT_EQ(backend([](Request& r) { r.rows_aligned = false; }), Backend::kSm80);
  EXPECT_EQ(backend([](Request& r) { r.position_stride = 4; }), Backend::kSm90);
  EXPECT_EQ(backend([](Request& r) {
              r.position_stride = 4;
              r.columns = true;
            }),
            Backend::kSm80);
  for (int64_t head_dim = 8; head_dim <= 256; head_dim += 8) {
    // Those with a Hopper tile in every build, and those with one where all kernels are compiled.
    bool tile = head_dim == 64 || head_dim == 128;
#ifdef MTRAINING_ALL_KERNELS
    tile |= head_dim == 96 || head_dim == 256;
#endif
    EXPECT_EQ(backend([&](Request& r) { r.head_dim = head_dim; }),
              tile ? Backend::kSm90 : Backend::kSm80)
        << head_dim;
  }
  for (const int64_t head_dim : {96, 256}) {
    EXPECT_EQ(backend([&](Request& r) {
                r.direction = Direction::kBackward;
                r.head_dim = head_dim;
              }),
              Backend::kSm80)
        << head_dim;
  }
  for (const int capability : {80, 86, 89, 100, 120}) {
    const DeviceKind device{
        .cuda = true, .major = capability / 10, .minor = capability % 10, .num_sms = 100};
    Request request;
    request.device = device;
    EXPECT_EQ(choose(request).backend, Backend::kSm80) << capability;
  }
}

TEST(Dispatch, WhatIsRefusedIsNamedWithWhatThereIs) {
  const std::string dtype = refusal({.device = kHopper, .dtype = DType::kFloat32});
  EXPECT_NE(dtype.find("bf16, fp16"), std::string::npos) << dtype;
  EXPECT_NE(dtype.find("got float32"), std::string::npos) << dtype;
  const std::string head_dim = refusal({.device = kHopper, .head_dim = 320});
  EXPECT_NE(head_dim.find("head_dim 64, "), std::string::npos) << head_dim;
  EXPECT_NE(head_dim.find("got head_dim 320"), std::string::npos) << head_dim;
  const std::string old = refusal({.device = {.cuda = true, .major = 7, .minor = 5}});
  EXPECT_NE(old.find("compute capability 7.5"), std::string::npos) << old;
  EXPECT_NE(old.find("sm90 forward"), std::string::npos) << old;
}

// A law over the table: what choose() gives is a row that says it serves the request.
TEST(Dispatch, EveryChoiceIsARowThatServesIt) {
  int chosen = 0;
  for (const int capability : {0, 75, 80, 86, 89, 90, 100, 120}) {
    for (const Direction direction : {Direction::kForward, Direction::kBackward}) {
      for (const DType dtype :
           {DType::kFloat64, DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
        for (const int64_t d : {8, 16, 64, 72, 96, 128, 256, 512}) {
          for (const bool dense : {false, true}) {
            const Request request{.direction = direction,
                                  .device = {.cuda = capability > 0,
                                             .major = capability / 10,
                                             .minor = capability % 10},
                                  .dtype = dtype,
                                  .head_dim = d,
                                  .dense_alone = dense};
            if (!refusal(request).empty()) continue;
            const Choice choice = choose(request);
            const auto& table = kernel_table();
            const auto row = std::find_if(table.begin(), table.end(), [&](const Kernel& k) {
              return k.backend == choice.backend && k.direction == direction &&
                     capability >= k.min_capability && capability <= k.max_capability &&
                     std::count(k.dtypes.begin(), k.dtypes.end(), dtype) == 1 &&
                     (k.head_dims.empty()
                          ? d <= k.max_head_dim
                          : std::count(k.head_dims.begin(), k.head_dims.end(), d) == 1) &&
                     (dense || !k.dense_alone_only);
            });
            ASSERT_NE(row, table.end());
            EXPECT_EQ(choice.tile, row->tile);
            EXPECT_NE(describe_kernels().find(row->tile), std::string::npos);
            ++chosen;
          }
        }
      }
    }
  }
  EXPECT_GT(chosen, 100);
}

TEST(LaunchPlanner, GridsStayWithinCudasLimitsAndCoverTheWork) {
  const LaunchPlanner planner(kHopper);
  // 512K tokens are 8192 blocks; 16 heads, and heads x batch = 65536, beyond what y and z hold.
  EXPECT_EQ(planner.flat("blocks", 16, 8192), (Grid{131072, 1, 1}));
  EXPECT_EQ(planner.flat("blocks", 65536, 8192), (Grid{536870912, 1, 1}));
  EXPECT_EQ(planner.flat("blocks", 0, 8192), (Grid{1, 1, 1}));
  EXPECT_THROW(planner.flat("blocks", 65536, 65536), Unsupported);
  EXPECT_THROW(planner.flat("blocks", -1, 1), InvalidArgument);
  for (const int64_t work : {0, 1, 100, 1 << 20}) {
    const Grid grid = planner.looping(work, 2);
    EXPECT_GE(grid.x, 1);
    EXPECT_LE(grid.x, std::max<int64_t>(1, std::min<int64_t>(work, 264)));
  }
  for (const int64_t rows : {1, 16, 64, 65536}) {
    for (const int64_t items : {1, 7, 2048, 16384}) {
      const int64_t chunks = planner.chunks(rows, items, 8);
      EXPECT_GE(chunks, 1);
      EXPECT_LE(chunks, (items + 7) / 8);
      EXPECT_TRUE(planner.flat("chunks", rows, chunks).x <= kMaxGridX);
    }
  }
}

}  // namespace
}  // namespace mtraining::kernels
