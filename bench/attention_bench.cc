#include "bench/attention_bench.h"

#include <memory>

#include "mtraining/base/check.h"
#include "mtraining/base/parallel.h"

namespace mtraining::bench {
namespace {

constexpr const char* kPeer = "torch sdpa";

Json spread_json(const Spread& s) {
  return {{"median", rounded(s.median)}, {"min", rounded(s.min)}, {"max", rounded(s.max)}};
}

}  // namespace

void check(const AttentionBenchOptions& options) {
  check(options.sizes);
  check(options.place, options.sizes);
  MT_CHECK_ARG(options.repeats >= 1, "--repeats: expected at least 1, got ", options.repeats);
  MT_CHECK_ARG(options.warm_up >= 0, "--warm-up: expected at least 0, got ", options.warm_up);
  MT_CHECK_ARG(!options.peer || options.place.cp_size == 1,
               "--peer sdpa: expected --cp-size 1, got ", options.place.cp_size,
               ": a rank's share beside the whole sequence is not the same work");
}

AttentionArms cpu_arms(const AttentionBenchOptions& options, const AttentionInputs& inputs) {
  return {.device = cpu_name(options.place.threads),
          .inputs = inputs.digest,
          .launch =
              [&options, &inputs](const index::Index& index) {
                return make_launch(options.place, options.sizes, inputs, index);
              },
          .peer =
              [&options, &inputs] {
                return std::make_unique<SdpaPeer>(options.sizes, inputs, options.place.threads);
              }};
}

std::vector<AttentionRow> bench_attention(const AttentionBenchOptions& options,
                                          const AttentionInputs& inputs,
                                          const std::vector<AttentionCase>& cases,
                                          const Provenance& from,
                                          const std::function<void(int repeat)>& progress) {
  check(options);
  return bench_attention(options, cpu_arms(options, inputs), cases, from, progress);
}

std::vector<AttentionRow> bench_attention(const AttentionBenchOptions& options,
                                          const AttentionArms& arms,
                                          const std::vector<AttentionCase>& cases,
                                          const Provenance& from,
                                          const std::function<void(int repeat)>& progress) {
  const AttentionSizes& sizes = options.sizes;
  const LaunchPlace& place = options.place;
  check(options);
  MT_CHECK_ARG(!cases.empty(), "bench attention: expected at least one case, got none");
  const layout::Layout layout({.kind = place.layout,
                               .seq_len = sizes.seq_len,
                               .cp_size = place.cp_size,
                               .stripe = place.stripe});
  const ThreadCountScope threads(place.threads);

  AttentionRow blank{.case_name = "attention", .pattern = "", .workload = {}, .peer = {}};
  blank.workload = {.mask = "causal",
                    .dtype = std::string(to_string(sizes.dtype)),
                    .seq_len = sizes.seq_len,
                    .num_queries = place.cp_size == 1 ? sizes.seq_len : layout.tokens_per_rank(),
                    .num_q_heads = sizes.num_q_heads,
                    .num_kv_heads = sizes.num_kv_heads,
                    .head_dim = sizes.head_dim,
                    .inputs = arms.inputs,
                    .device = arms.device,
                    .harness = from.harness};
  std::vector<AttentionRow> rows;
  std::unique_ptr<SdpaPeer> peer;
  if (options.peer) {
    peer = arms.peer();
    AttentionRow row = blank;
    row.pattern = "dense";
    row.peer = kPeer;
    // Every causal pair; what more of its tiles torch computes is its own affair.
    row.pairs = static_cast<double>(sizes.num_q_heads) * static_cast<double>(sizes.seq_len) *
                static_cast<double>(sizes.seq_len + 1) / 2;
    rows.push_back(std::move(row));
  }
  std::vector<std::unique_ptr<AttentionLaunch>> launches;
  for (const AttentionCase& c : cases) {
    launches.push_back(arms.launch(c.index));
    AttentionRow row = blank;
    row.pattern = c.pattern;
    row.pairs = launches.back()->pairs();
    row.more["density"] = rounded(index::density(c.index), 5);
    if (place.cp_size > 1) {
      row.more["layout"] = layout::to_string(place.layout);
      if (place.layout == layout::LayoutKind::kBlockStriped) row.more["stripe"] = place.stripe;
      row.more["cp_size"] = place.cp_size;
      row.more["cp_rank"] = place.cp_rank;
    }
    rows.push_back(std::move(row));
  }

  for (int repeat = -options.warm_up; repeat < options.repeats; ++repeat) {
    size_t at = 0;
    const auto run = [&](auto& arm, bool with_index) {
      AttentionRow warm_up = blank;
      AttentionRow& row = repeat < 0 ? warm_up : rows[at];
      ++at;
      if constexpr (requires { arm.pairs(); }) {
        if (with_index) arm.index(row.index, options.estimation);
      }
      arm.forward(row.forward);
      arm.backward(row.backward);
    };
    if (peer) run(*peer, false);
    for (const auto& launch : launches) run(*launch, place.cp_size == 1);
    if (progress) progress(repeat);
  }
  size_t at = 0;
  if (peer) peer->add_facts(rows[at++].more);
  for (const auto& launch : launches) launch->add_facts(rows[at++].more, options.repeats);
  if (peer) {
    for (size_t i = 1; i < rows.size(); ++i) {
      const Ratio r = ratio(rows.front(), rows[i]);
      rows[i].more["ratio_to_dense_sdpa"] = spread_json(r.wall);
      if (r.processor)
        rows[i].more["ratio_to_dense_sdpa_processor_time"] = spread_json(*r.processor);
    }
  }
  return rows;
}

}  // namespace mtraining::bench
