// The Hopper backward over the forward's table of cases, and what only a backward can do wrong.
#include <gtest/gtest.h>

#include <string>

#include "mtraining/kernels/sm90/backward_case.h"

namespace mtraining::kernels::sm90 {
namespace {

TEST(Sm90Backward, OneRankMatchesTheOracleAtEveryRaggedLength) {
  MT_NEEDS_HOPPER();
  for (const int64_t seq_len : {1, 5, 63, 64, 65, 127, 128, 129, 300, 449, 1000}) {
    run_case({.name = concat("contiguous ", seq_len), .seq_len = seq_len, .ragged_memory = true});
    run_case({.name = concat("contiguous, columns ", seq_len),
              .seq_len = seq_len,
              .columns = Columns::kPerStep,
              .ragged_memory = true});
  }
}

TEST(Sm90Backward, DenseMatchesTheOracle) {
  MT_NEEDS_HOPPER();
  run_case({.name = "dense contiguous", .seq_len = 700, .dense = true});
  run_case({.name = "dense zigzag",
            .layout = LayoutKind::kZigzag,
            .seq_len = 700,
            .cp_size = 2,
            .dense = true});
  run_case({.name = "dense striped",
            .layout = LayoutKind::kStriped,
            .seq_len = 700,
            .cp_size = 3,
            .csr = true,
            .dense = true});
}

TEST(Sm90Backward, EveryGroupSizeReadsItsKvHead) {
  MT_NEEDS_HOPPER();
  for (const auto& [heads, kv_heads] :
       {std::pair<int64_t, int64_t>{4, 4}, {8, 1}, {14, 2}, {16, 2}}) {
    run_case({.name = concat("heads ", heads, "/", kv_heads),
              .seq_len = 400,
              .num_q_heads = heads,
              .num_kv_heads = kv_heads,
              .columns = Columns::kPerStep});
  }
}

TEST(Sm90Backward, StripesOverRanksMatchTheOracle) {
  MT_NEEDS_HOPPER();
  for (const int64_t stripe : {64, 128, 192}) {
    for (const int cp_size : {1, 2, 3, 8}) {
      run_case({.name = concat("block_striped ", stripe, " W ", cp_size),
                .layout = LayoutKind::kBlockStriped,
                .seq_len = 1100,
                .stripe = stripe,
                .cp_size = cp_size,
                .columns = Columns::kOnce});
    }
  }
  run_case({.name = "block_striped 128 W 4 of 2 nodes",
            .layout = LayoutKind::kBlockStriped,
            .seq_len = 1111,
            .stripe = 128,
            .cp_size = 4,
            .nodes = 2,
            .columns = Columns::kPerStep});
  run_case({.name = "zigzag W 4",
            .layout = LayoutKind::kZigzag,
            .seq_len = 1111,
            .cp_size = 4,
            .columns = Columns::kOnce});
}

TEST(Sm90Backward, CsrMatchesTheOracle) {
  MT_NEEDS_HOPPER();
  run_case({.name = "csr contiguous", .seq_len = 900, .columns = Columns::kPerStep, .csr = true});
  run_case({.name = "csr block_striped 128 W 2",
            .layout = LayoutKind::kBlockStriped,
            .seq_len = 900,
            .stripe = 128,
            .cp_size = 2,
            .columns = Columns::kOnce,
            .csr = true});
}

TEST(Sm90Backward, LaunchesAddUp) {
  MT_NEEDS_HOPPER();
  for (const bool without_diagonal : {false, true}) {
    run_case({.name = concat("one launch a source, without diagonal ", without_diagonal),
              .layout = LayoutKind::kBlockStriped,
              .seq_len = 1000,
              .cp_size = 4,
              .columns = Columns::kOnce,
              .launches = Launches::kOnePerSource,
              .without_diagonal = without_diagonal});
  }
}

TEST(Sm90Backward, DocumentsAreSeparate) {
  MT_NEEDS_HOPPER();
  for (const Documents documents : testing::kAllDocuments) {
    run_case({.name = concat("documents ", static_cast<int>(documents)),
              .layout = LayoutKind::kBlockStriped,
              .seq_len = 700,
              .stripe = 128,
              .cp_size = 2,
              .batch = 2,
              .columns = Columns::kOnce,
              .documents = documents});
  }
}

TEST(Sm90Backward, EmptyRowsHaveNoGradient) {
  MT_NEEDS_HOPPER();
  run_case({.name = "without diagonal 0", .seq_len = 500, .without_diagonal = true});
  run_case({.name = "without diagonal 0, columns",
            .seq_len = 500,
            .columns = Columns::kPerStep,
            .without_diagonal = true});
  run_case({.name = "without diagonal 0, columns, documents",
            .seq_len = 500,
            .columns = Columns::kPerStep,
            .documents = Documents::kMidBlock,
            .without_diagonal = true});
}

TEST(Sm90Backward, OtherTypesAndHeadSizes) {
  MT_NEEDS_HOPPER();
  for (const DType dtype : {DType::kBFloat16, DType::kFloat16}) {
    for (const int64_t head_dim : {64, 128}) {
      run_case({.name = concat("dtype ", static_cast<int>(dtype), " D ", head_dim),
                .layout = LayoutKind::kBlockStriped,
                .seq_len = 777,
                .stripe = 128,
                .cp_size = 2,
                .batch = 2,
                .num_q_heads = 6,
                .num_kv_heads = 2,
                .head_dim = head_dim,
                .dtype = dtype,
                .columns = Columns::kOnce,
                .documents = Documents::kMidBlock});
    }
  }
}

TEST(Sm90Backward, ManySources) {
  MT_NEEDS_HOPPER();
  run_case({.name = "40 sources",
            .layout = LayoutKind::kBlockStriped,
            .seq_len = 3000,
            .cp_size = 40,
            .num_q_heads = 2,
            .num_kv_heads = 1,
            .columns = Columns::kPerStep});
}

TEST(Sm90Backward, OutlierChannels) {
  MT_NEEDS_HOPPER();
  for (const DType dtype : {DType::kBFloat16, DType::kFloat16}) {
    for (const int64_t head_dim : {64, 128}) {
      run_case(
          {.name = concat("outlier channels, dtype ", static_cast<int>(dtype), " D ", head_dim),
           .seq_len = 500,
           .head_dim = head_dim,
           .dtype = dtype,
           .columns = Columns::kPerStep,
           .outlier_channel = 20});
    }
  }
}

TEST(Sm90Backward, HugeScoresOnMaskedLanesLeaveNoTrace) {
  MT_NEEDS_HOPPER();
  for (const int64_t head_dim : {64, 128}) {
    for (const int64_t seq_len : {70, 400}) {
      run_case({.name = concat("masked scores of +500, ", seq_len, " D ", head_dim),
                .seq_len = seq_len,
                .batch = 2,
                .head_dim = head_dim,
                .columns = Columns::kPerStep,
                .documents = Documents::kMidBlock,
                .ragged_memory = true,
                .huge_scores = true});
    }
  }
}

/// Beyond 128 query blocks the default mode cuts a column tile's queries into several items, the deterministic one does not.
TEST(Sm90Backward, BothModesAgreeOnLongSequences) {
  MT_NEEDS_HOPPER();
  run_case({.name = "long",
            .seq_len = 17000,
            .num_q_heads = 2,
            .num_kv_heads = 1,
            .columns = Columns::kPerStep,
            .num_columns = 300});
}

/// Five hundred times each, beside other work: the deterministic mode to the bit, the default but for the order of its sums.
TEST(Sm90Backward, RepeatsAreEqualBesideOtherWork) {
  MT_NEEDS_HOPPER();
  for (const int64_t head_dim : {64, 128}) {
    run_case({.name = concat("repeated, D ", head_dim),
              .seq_len = 700,
              .batch = 2,
              .num_q_heads = 6,
              .head_dim = head_dim,
              .columns = Columns::kPerStep,
              .documents = Documents::kMidBlock,
              .num_columns = 100,
              .repeats = 500});
  }
  run_case({.name = "repeated, outlier channels, D 64",
            .seq_len = 500,
            .head_dim = 64,
            .columns = Columns::kPerStep,
            .outlier_channel = 20,
            .repeats = 100});
}

/// B = S = H = 1: out is v, so dq and dk are 0 exactly and dv is dout.
TEST(Sm90Backward, ASingleKeyHasNoScoreGradient) {
  MT_NEEDS_HOPPER();
  for (const double outliers : {0.0, 20.0}) {
    for (const int64_t head_dim : {64, 128}) {
      const Gradients got = run_case({.name = concat("a single key, D ", head_dim),
                                      .seq_len = 300,
                                      .num_q_heads = 1,
                                      .num_kv_heads = 1,
                                      .head_dim = head_dim,
                                      .documents = Documents::kEveryToken,
                                      .outlier_channel = outliers});
      for (const double x : got.dq) ASSERT_EQ(x, 0);
      for (const double x : got.default_dq) ASSERT_EQ(x, 0);
      for (const double x : got.dk) ASSERT_EQ(x, 0);
      for (size_t i = 0; i < got.dv.size(); ++i)
        ASSERT_NEAR(got.dv[i], got.dout[i], 1e-6) << i;  // the sum began at 1
    }
  }
}

/// Heads of which a column is all that many rows see: in tiles where nothing else hides keys, too.
TEST(Sm90Backward, ALoneColumnHasNoScoreGradient) {
  MT_NEEDS_HOPPER();
  const Case c{.name = "a lone column",
               .seq_len = 900,
               .num_q_heads = 16,
               .columns = Columns::kPerStep,
               .without_diagonal = true,
               .num_columns = 1};
  const Choice choice = choose(c);
  const testing::Mask mask =
      testing::vertical_slash_mask(choice.diagonals, choice.columns, c.num_q_heads, {}, c.seq_len);
  const Gradients got = run_case(c);
  int64_t in_other_blocks = 0;
  for (int64_t h = 0; h < c.num_q_heads; ++h) {
    for (int64_t i = 0; i < c.seq_len; ++i) {
      int64_t keys = 0, key = 0;
      for (int64_t j = 0; j <= i; ++j) {
        if (!mask(0, h, i, j)) continue;
        ++keys;
        key = j;
      }
      if (keys != 1) continue;
      if (key / 64 < i / 64) ++in_other_blocks;
      for (int64_t d = 0; d < c.head_dim; ++d) {
        const int64_t at = (i * c.num_q_heads + h) * c.head_dim + d;
        ASSERT_EQ(got.dq[at], 0) << "head " << h << ", row " << i;
        ASSERT_EQ(got.default_dq[at], 0) << "head " << h << ", row " << i;
      }
    }
  }
  EXPECT_GT(in_other_blocks, 64);
}

/// All that the kernels do, in shapes small enough for compute-sanitizer: racecheck (on a build with MT_SM90_RACECHECK) and memcheck.
TEST(Sm90Backward, SmallShapes) {
  MT_NEEDS_HOPPER();
  for (const int64_t head_dim : {64, 128}) {
    run_case({.name = concat("small, documents, D ", head_dim),
              .seq_len = 150,
              .num_q_heads = 2,
              .num_kv_heads = 1,
              .head_dim = head_dim,
              .columns = Columns::kPerStep,
              .documents = Documents::kMidBlock,
              .ragged_memory = true,
              .num_columns = 20});
    run_case({.name = concat("small, csr over two ranks, D ", head_dim),
              .layout = LayoutKind::kBlockStriped,
              .seq_len = 250,
              .cp_size = 2,
              .num_q_heads = 2,
              .num_kv_heads = 1,
              .head_dim = head_dim,
              .columns = Columns::kOnce,
              .csr = true,
              .without_diagonal = true,
              .num_columns = 20});
  }
}

TEST(Sm90Backward, RefusesWhatItCannotDo) {
  const auto message = [](BackwardParams params, int64_t dout_stride_token, bool transposed) {
    alignas(256) static char memory[256];
    KeySource source;
    const int64_t begin = 0;
    source.num_keys = params.num_queries;
    source.k = source.v = {memory, 0, params.head_dim, 0};
    source.dk = {memory, 2, params.head_dim, 2};
    source.dv = {memory, 2, params.head_dim, 2};
    source.block_starts = reinterpret_cast<const int32_t*>(memory);
    source.blocks.kind = BlockListKind::kCsr;
    source.blocks.row_begin = &begin;
    if (transposed) source.blocks.key_row_begin = &begin;
    params.sources = &source;
    params.num_sources = 1;
    params.q = {memory, 0, params.head_dim, 0};
    params.dout = {memory, 0, dout_stride_token, 0};
    params.q_block_starts = reinterpret_cast<const int32_t*>(memory);
    params.lse = params.delta = memory;
    params.dq = {memory, 2, params.head_dim, 2};
    params.workspace = memory;  // never reached
    params.workspace_bytes = int64_t{1} << 40;
    try {
      backward(params);
    } catch (const std::exception& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  const auto expect = [](const std::string& got, const std::string& part) {
    EXPECT_NE(got.find(part), std::string::npos) << got;
  };
  BackwardParams params;
  params.batch = params.num_q_heads = params.num_kv_heads = 1;
  params.num_queries = params.seq_len = 64;
  params.head_dim = 128;
  params.softmax_scale = 1;
  params.dtype = DType::kFloat32;
  expect(message(params, 128, true), "expected bf16 or fp16 with head_dim 64 or 128");
  params.dtype = DType::kBFloat16;
  params.head_dim = 96;
  expect(message(params, 96, true), "head_dim 96");
  params.head_dim = 128;
  expect(message(params, 128, false), "CSR lists need their transpose");
  if (!has_hopper()) return;  // the last check asks the driver
  expect(message(params, 0, true), "dout: tokens expanded with stride 0 are not supported");
}

}  // namespace
}  // namespace mtraining::kernels::sm90
