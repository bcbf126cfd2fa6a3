// Every fault of the parameters is found before anything is written, and the message names the
// field.
#include "mtraining/kernels/validate.h"

#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include "mtraining/base/check.h"
#include "mtraining/kernels/attention_kernels.h"

namespace mtraining::kernels {
namespace {

constexpr int64_t kTokens = 130, kHeads = 4, kKvHeads = 2, kDim = 16;

/// A correct launch of two query blocks and a ragged third, entries and columns; tests then break
/// one thing.
struct Launch {
  std::vector<float> q, k, v, out, lse, dout, delta, dq, dk, dv;
  std::vector<int32_t> starts{0, 64, 128}, num_entries, rows, positions, counts, key_blocks;
  std::vector<int64_t> row_begin;
  std::vector<Entry> entries;
  std::vector<uint64_t> bits;
  KeySource source;
  ForwardParams f;
  BackwardParams b;

  Launch()
      : q(kTokens * kHeads * kDim, 0.1f),
        k(kTokens * kKvHeads * kDim, 0.2f),
        v(k),
        out(q.size(), 7),
        lse(kTokens * kHeads, 7),
        dout(q),
        delta(lse.size(), 0),
        dq(q.size(), 7),
        dk(k.size(), 7),
        dv(k.size(), 7),
        num_entries(kHeads, 2),
        rows(kHeads * 3),
        positions(kHeads * 3),
        counts(kHeads, 3),
        row_begin(kHeads * 4, 0),
        entries(kHeads * 4),
        bits(kHeads, 3) {
    for (int64_t h = 0; h < kHeads; ++h) {
      entries[h * 4] = {0, 0};
      entries[h * 4 + 1] = {0, 1};
      for (int i = 0; i < 3; ++i) rows[h * 3 + i] = positions[h * 3 + i] = i;
    }
    const int64_t q_row = kHeads * kDim, k_row = kKvHeads * kDim;
    source.k = {k.data(), kTokens * k_row, k_row, kDim};
    source.v = {v.data(), kTokens * k_row, k_row, kDim};
    source.num_keys = kTokens;
    source.block_starts = starts.data();
    source.blocks.kind = BlockListKind::kEntries;
    source.blocks.entries = entries.data();
    source.blocks.num_entries = num_entries.data();
    source.blocks.capacity = 4;
    source.blocks.blocks_per_stripe = 3;
    source.columns = {rows.data(), positions.data(), counts.data(), 3};
    source.dk = {dk.data(), kTokens * k_row, k_row, kDim};
    source.dv = {dv.data(), kTokens * k_row, k_row, kDim};
    const auto fill = [&](AttentionParams& p) {
      p.batch = 1;
      p.num_q_heads = kHeads;
      p.num_kv_heads = kKvHeads;
      p.head_dim = kDim;
      p.num_queries = kTokens;
      p.softmax_scale = 0.25;
      p.seq_len = kTokens;
      p.q = {q.data(), kTokens * q_row, q_row, kDim};
      p.q_block_starts = starts.data();
      p.sources = &source;
      p.num_sources = 1;
      p.diagonal_bits = bits.data();
      p.diagonal_words = 1;
    };
    fill(f);
    f.out = {out.data(), kTokens * q_row, q_row, kDim};
    f.lse = lse.data();
    fill(b);
    b.dout = {dout.data(), kTokens * q_row, q_row, kDim};
    b.lse = lse.data();
    b.delta = delta.data();
    b.dq = {dq.data(), kTokens * q_row, q_row, kDim};
  }

  bool untouched() const {
    for (const auto* x : {&out, &lse, &dq, &dk, &dv}) {
      for (const float value : *x) {
        if (value != 7) return false;
      }
    }
    return true;
  }
};

/// `named` must stand in the message of both kernels (or of the one that has the field).
void expect_refused(const std::string& named, const std::function<void(Launch&)>& damage,
                    bool forward = true, bool backward = true) {
  SCOPED_TRACE(named);
  Launch launch;
  damage(launch);
  const auto expect = [&](const auto& run) {
    try {
      run();
      ADD_FAILURE() << "accepted";
    } catch (const InvalidArgument& error) {
      EXPECT_NE(std::string(error.what()).find(named), std::string::npos) << error.what();
      EXPECT_NE(std::string(error.what()).find("got"), std::string::npos) << error.what();
      EXPECT_NE(std::string(error.what()).find("expected"), std::string::npos) << error.what();
    } catch (const Unsupported& error) {
      EXPECT_NE(std::string(error.what()).find(named), std::string::npos) << error.what();
    }
  };
  if (forward) expect([&] { ref::forward(launch.f); });
  if (backward) expect([&] { ref::backward(launch.b); });
  EXPECT_TRUE(launch.untouched());
}

void set_both(Launch& l, const std::function<void(AttentionParams&)>& change) {
  change(l.f);
  change(l.b);
}

TEST(Validate, ACorrectLaunchRuns) {
  Launch launch;
  ref::forward(launch.f);
  ref::backward(launch.b);
  EXPECT_FALSE(launch.untouched());
}

TEST(Validate, Sizes) {
  expect_refused("num_q_heads", [](Launch& l) { set_both(l, [](auto& p) { p.num_q_heads = 3; }); });
  expect_refused("num_kv_heads",
                 [](Launch& l) { set_both(l, [](auto& p) { p.num_kv_heads = 0; }); });
  expect_refused("batch", [](Launch& l) { set_both(l, [](auto& p) { p.batch = -1; }); });
  expect_refused("head_dim", [](Launch& l) { set_both(l, [](auto& p) { p.head_dim = 12; }); });
  expect_refused("head_dim", [](Launch& l) { set_both(l, [](auto& p) { p.head_dim = 1024; }); });
  expect_refused("num_queries",
                 [](Launch& l) { set_both(l, [](auto& p) { p.num_queries = -5; }); });
  expect_refused("position_stride",
                 [](Launch& l) { set_both(l, [](auto& p) { p.position_stride = 0; }); });
  expect_refused("seq_len",
                 [](Launch& l) { set_both(l, [](auto& p) { p.seq_len = int64_t{1} << 31; }); });
  expect_refused("softmax_scale",
                 [](Launch& l) { set_both(l, [](auto& p) { p.softmax_scale = 0; }); });
  expect_refused("dtype",
                 [](Launch& l) { set_both(l, [](auto& p) { p.dtype = static_cast<DType>(9); }); });
  expect_refused("sources[0].num_keys", [](Launch& l) { l.source.num_keys = -1; });
  expect_refused("diagonal_words", [](Launch& l) {
    set_both(l, [](auto& p) {
      p.diagonal_words = 1;
      p.seq_len = 64 * 64 + 1;
    });
  });
}

TEST(Validate, Pointers) {
  expect_refused("q:", [](Launch& l) { set_both(l, [](auto& p) { p.q.data = nullptr; }); });
  expect_refused("q_block_starts",
                 [](Launch& l) { set_both(l, [](auto& p) { p.q_block_starts = nullptr; }); });
  expect_refused("sources:", [](Launch& l) { set_both(l, [](auto& p) { p.sources = nullptr; }); });
  expect_refused("sources[0].k:", [](Launch& l) { l.source.k.data = nullptr; });
  expect_refused("sources[0].v:", [](Launch& l) { l.source.v.data = nullptr; });
  expect_refused("sources[0].block_starts", [](Launch& l) { l.source.block_starts = nullptr; });
  expect_refused("blocks.entries", [](Launch& l) { l.source.blocks.entries = nullptr; });
  expect_refused("blocks.num_entries", [](Launch& l) { l.source.blocks.num_entries = nullptr; });
  expect_refused("columns.positions", [](Launch& l) { l.source.columns.positions = nullptr; });
  expect_refused("columns.key_rows", [](Launch& l) { l.source.columns.key_rows = nullptr; });
  expect_refused(
      "out:", [](Launch& l) { l.f.out.data = nullptr; }, true, false);
  expect_refused("lse:", [](Launch& l) {
    l.f.lse = nullptr;
    l.b.lse = nullptr;
  });
  expect_refused(
      "dout:", [](Launch& l) { l.b.dout.data = nullptr; }, false, true);
  expect_refused(
      "delta:", [](Launch& l) { l.b.delta = nullptr; }, false, true);
  expect_refused(
      "dq:", [](Launch& l) { l.b.dq.data = nullptr; }, false, true);
  expect_refused(
      "dk:", [](Launch& l) { l.source.dk.data = nullptr; }, false, true);
  expect_refused(
      "dv:", [](Launch& l) { l.source.dv.data = nullptr; }, false, true);
}

TEST(Validate, RoundedResults) {
  const auto round = [](Launch& l) {
    l.f.rounded = l.f.out;
    l.f.out = {};
  };
  {
    Launch launch;
    round(launch);
    ref::forward(launch.f);
    EXPECT_FALSE(launch.untouched());
  }
  // A launch that merges reads the float32 state.
  expect_refused(
      "out:",
      [&](Launch& l) {
        round(l);
        l.f.first = false;
      },
      true, false);
  expect_refused(
      "residual:", [](Launch& l) { l.f.residual = l.f.out; }, true, false);
  expect_refused(
      "rounded:",
      [&](Launch& l) {
        round(l);
        l.f.rounded.stride_head = 0;
      },
      true, false);
  expect_refused(
      "residual:",
      [&](Launch& l) {
        round(l);
        l.f.residual = l.f.rounded;
        l.f.residual.stride_token = 0;
      },
      true, false);
  // Some back ends add parts of dq as they come, and so cannot round the sum.
  expect_refused(
      "dq_rounded:", [](Launch& l) { l.b.dq_rounded = l.b.dq; }, false, true);
  Launch launch;
  EXPECT_THROW(ref::delta(launch.b, {}, launch.delta.data()), InvalidArgument);
}

TEST(Validate, OutputsMayNotOverlap) {
  expect_refused(
      "out:", [](Launch& l) { l.f.out.stride_head = 0; }, true, false);
  expect_refused(
      "dq:", [](Launch& l) { l.b.dq.stride_token = 0; }, false, true);
  expect_refused(
      "dk:", [](Launch& l) { l.source.dk.stride_head = 0; }, false, true);
}

TEST(Validate, SourcesOfALaunchShareNoGradientRows) {
  Launch launch;
  KeySource sources[] = {launch.source, launch.source};
  launch.b.sources = sources;
  launch.b.num_sources = 2;
  try {
    ref::backward(launch.b);
    ADD_FAILURE() << "accepted";
  } catch (const InvalidArgument& error) {
    EXPECT_NE(std::string(error.what()).find("sources[1].dk"), std::string::npos) << error.what();
  }
  EXPECT_TRUE(launch.untouched());
  // Reading the same keys twice is the caller's affair.
  launch.f.sources = sources;
  launch.f.num_sources = 2;
  ref::forward(launch.f);
}

// B44: lists that are unsorted, have duplicates or point outside are refused, never followed.
TEST(Validate, Lists) {
  expect_refused("blocks.num_entries[1]", [](Launch& l) { l.num_entries[1] = 5; });
  expect_refused("blocks.num_entries[0]", [](Launch& l) { l.num_entries[0] = -1; });
  expect_refused("blocks.entries[2][1]", [](Launch& l) { l.entries[2 * 4 + 1] = {0, 0}; });
  expect_refused("blocks.entries[2][1]", [](Launch& l) { l.entries[2 * 4 + 1] = {0, -2}; });
  expect_refused("blocks.entries[0][1].delta", [](Launch& l) { l.entries[1] = {0, 3}; });
  expect_refused("columns.counts[3]", [](Launch& l) { l.counts[3] = 4; });
  expect_refused("columns.positions[1][2]", [](Launch& l) { l.positions[1 * 3 + 2] = 1; });
  expect_refused("columns.positions[1][0]", [](Launch& l) { l.positions[1 * 3] = -1; });
  expect_refused("columns.key_rows[0][1]", [](Launch& l) { l.rows[1] = kTokens; });
  const auto csr = [](Launch& l) {
    l.key_blocks = {0, 0, 1, 0, 1, 2};
    for (int64_t h = 0; h < kHeads; ++h) {
      for (int64_t i = 0; i < 4; ++i) l.row_begin[h * 4 + i] = i * (i + 1) / 2;
    }
    l.source.blocks.kind = BlockListKind::kCsr;
    l.source.blocks.row_begin = l.row_begin.data();
    l.source.blocks.key_blocks = l.key_blocks.data();
  };
  {
    Launch launch;
    csr(launch);
    ref::forward(launch.f);
  }
  expect_refused("blocks.key_blocks[4]", [&](Launch& l) {
    csr(l);
    l.key_blocks[4] = 0;
  });
  expect_refused("blocks.key_blocks[5]", [&](Launch& l) {
    csr(l);
    l.key_blocks[5] = 3;
  });
  expect_refused("blocks.key_blocks[0]", [&](Launch& l) {
    csr(l);
    l.key_blocks[0] = -1;
  });
  expect_refused("blocks.row_begin[2][2]", [&](Launch& l) {
    csr(l);
    l.row_begin[2 * 4 + 2] = 0;
  });
  expect_refused("blocks.row_begin", [&](Launch& l) {
    csr(l);
    l.source.blocks.row_begin = nullptr;
  });
  expect_refused("blocks.key_blocks", [&](Launch& l) {
    csr(l);
    l.source.blocks.key_blocks = nullptr;
  });
  expect_refused("block_starts[1]", [](Launch& l) { l.starts[1] = -64; });
}

TEST(Validate, ADistanceMaySplitTwoWaysButNotThrice) {
  Launch launch;
  launch.entries[1] = {0, 1};
  launch.entries[2] = {1, -2};
  launch.num_entries[0] = 3;
  ref::forward(launch.f);
  launch.entries[3] = {0, 1};
  launch.num_entries[0] = 4;
  EXPECT_THROW(ref::forward(launch.f), InvalidArgument);
}

TEST(Validate, NothingToDoNeedsNoPointers) {
  ForwardParams f;
  f.num_q_heads = f.num_kv_heads = 1;
  f.head_dim = 64;
  f.softmax_scale = 1;
  ref::forward(f);
  BackwardParams b;
  b.num_q_heads = b.num_kv_heads = 1;
  b.head_dim = 64;
  b.softmax_scale = 1;
  ref::backward(b);
}

}  // namespace
}  // namespace mtraining::kernels
