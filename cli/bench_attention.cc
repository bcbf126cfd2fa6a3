#include <CLI/CLI.hpp>
#include <cstdio>
#include <optional>
#include <string>
#include <vector>

#include "bench/attention_bench.h"
#include "bench/qk_report.h"
#include "bench/torch_device.h"
#ifdef MT_WITH_CUDA
#include "bench/device_launch.h"
#endif
#include "cli/bench.h"
#include "cli/parse_options.h"
#include "mtraining/base/check.h"
#include "mtraining/base/parallel.h"
#include "mtraining/sim/pattern_file.h"

namespace mtraining::cli {
namespace {

const char* const kExamples =
    "Examples:\n"
    "  mtraining bench attention --density .02 .05 .1 .2 .5 1 --threads 2\n"
    "  mtraining bench attention --pattern typical.json --head-dim 128 --repeats 3\n"
    "  mtraining bench attention --shape local typical --seq-len 32768 --cp-size 8\n"
    "  mtraining bench attention --p .9 .95\n"
    "  mtraining bench attention --device cuda --density .02 .05 .1 --seq-len 131072 --heads 16 "
    "--head-dim 128\n"
    "  mtraining bench attention --qk qk.safetensors --ranks 4\n";

struct Options {
  std::string qk;
  std::vector<std::string> patterns, shapes;
  std::vector<double> densities, p;
  std::vector<int64_t> seq_lens;
  std::optional<int64_t> heads;
  int64_t kv_heads = 2, head_dim = 64, seed = 1;
  std::string dtype = "", device = "cpu", peer = "", layout = "";
  int64_t stripe = 64;
  int threads = num_threads(), cp_size = 1, cp_rank = 0;
  std::optional<int> repeats, warm_up;
  bool deterministic = false;
  std::string backend;
  // of the pattern; absent: the configuration's defaults, or with --qk those of the bare pattern
  std::optional<int> last_q, sink_tokens, local_blocks, recall_rows;
  std::optional<int64_t> max_columns, max_diagonals;
  std::optional<double> dense_threshold;
  std::string selection, window;
  std::vector<std::string> slash_pooling;
  int ranks = 1;
  std::string virtual_ranks = "4x8";
};

constexpr const char* kQkOnly[] = {"--ranks", "--virtual", "--slash-pooling", "--recall-rows"};
constexpr const char* kNotWithQk[] = {
    "--pattern",  "--shape",   "--density", "--seq-len",       "--heads",   "--kv-heads",
    "--head-dim", "--dtype",   "--device",  "--peer",          "--cp-size", "--cp-rank",
    "--repeats",  "--warm-up", "--seed",    "--deterministic", "--backend"};

void declare(CLI::App& app, Options& o) {
  app.name("mtraining bench attention");
  app.footer(kExamples);
  app.add_option("--pattern", o.patterns, "Cases from JSON files of offset ranges and columns");
  app.add_option("--shape", o.shapes, "Cases from shapes: local, typical, wide, uneven");
  app.add_option("--density", o.densities,
                 "Cases of these densities, half diagonals, half columns (default .05 where no "
                 "case is asked for)");
  app.add_option(
      "--p", o.p,
      "Cases whose index is chosen from the inputs, at these budgets; with --qk .9 and .95");
  app.add_option(
      "--qk", o.qk,
      "Instead: what the pattern chooses from q [H, S, D] and k [Hk, S, D] of a safetensors file");
  app.add_option(
      "--seq-len", o.seq_lens,
      "Tokens; several: every case at every length (absent: the pattern file's, or 16384)");
  app.add_option("--heads", o.heads, "Query heads (absent: the pattern file's, or 4)");
  app.add_option("--kv-heads", o.kv_heads, "K/V heads")->capture_default_str();
  app.add_option("--head-dim", o.head_dim, "Head dimension")->capture_default_str();
  app.add_option("--dtype", o.dtype,
                 "float32, float64, bf16, fp16 (absent: float32; bf16 on a GPU)");
  app.add_option("--layout", o.layout,
                 "block_striped, zigzag, contiguous, striped (absent: block_striped; contiguous "
                 "for one rank)");
  app.add_option("--stripe", o.stripe, "Stripe of block_striped")->capture_default_str();
  app.add_option("--cp-size", o.cp_size,
                 "The share of one rank of so many: all shards in one launch")
      ->capture_default_str();
  app.add_option("--cp-rank", o.cp_rank, "Which rank")->capture_default_str();
  app.add_option("--device", o.device, "cpu or cuda")->capture_default_str();
  app.add_option("--backend", o.backend, "On a GPU: sm80 or sm90 (absent: what dispatch chooses)");
  app.add_flag("--deterministic", o.deterministic,
               "The backward whose gradients are the same bits on every run (the CPU's always is)");
  app.add_option("--threads", o.threads, "Threads, of the peer too")->capture_default_str();
  app.add_option("--repeats", o.repeats,
                 "Timed runs of each case, in turn (absent: 5; 9 on a GPU)");
  app.add_option("--warm-up", o.warm_up, "Runs before them (absent: 1; 3 on a GPU)");
  app.add_option("--peer", o.peer,
                 "sdpa: torch's dense attention beside each case (default with one rank); none");
  app.add_option("--seed", o.seed, "Of the inputs")->capture_default_str();
  app.add_option("--last-q", o.last_q, "Observation rows (64)");
  app.add_option("--sink-tokens", o.sink_tokens, "Forced first columns (64; with --qk 0)");
  app.add_option("--local-blocks", o.local_blocks, "Forced diagonals (2; with --qk 1)");
  app.add_option("--max-columns", o.max_columns, "Cap a head");
  app.add_option("--max-diagonals", o.max_diagonals, "Cap a head");
  app.add_option("--dense-threshold", o.dense_threshold,
                 "Share of a head's causal pairs from which it goes dense (.8; with --qk 1, off)");
  app.add_option("--selection", o.selection, "head or kv_group");
  app.add_option("--window", o.window, "last or strided");
  app.add_option("--slash-pooling", o.slash_pooling, "--qk: block, token, paper (block and token)");
  app.add_option("--recall-rows", o.recall_rows, "--qk: rows sampled outside the window (256)");
  app.add_option("--ranks", o.ranks, "--qk: loopback ranks that estimate together")
      ->capture_default_str();
  app.add_option("--virtual", o.virtual_ranks, "--qk: nodes x ranks whose imbalance is told")
      ->capture_default_str();
}

pattern::VerticalSlashOptions pattern_options(const Options& o) {
  pattern::VerticalSlashOptions options;
  if (!o.qk.empty()) {
    options.sink_tokens = 0;
    options.local_blocks = 1;
    options.dense_threshold = 1;
  }
  options.last_q = o.last_q.value_or(options.last_q);
  options.sink_tokens = o.sink_tokens.value_or(options.sink_tokens);
  options.local_blocks = o.local_blocks.value_or(options.local_blocks);
  options.recall_rows = o.recall_rows.value_or(options.recall_rows);
  options.max_columns = o.max_columns;
  options.max_diagonals = o.max_diagonals;
  options.dense_threshold = o.dense_threshold.value_or(options.dense_threshold);
  if (!o.selection.empty()) options.selection = pattern::parse_selection(o.selection);
  if (!o.window.empty()) options.window = pattern::parse_window(o.window);
  pattern::check(options);
  return options;
}

int report_qk(const Options& o) {
  bench::QkReportOptions options;
  options.pattern = pattern_options(o);
  if (!o.p.empty()) options.p = o.p;
  if (!o.slash_pooling.empty()) {
    options.poolings.clear();
    for (const std::string& name : o.slash_pooling)
      options.poolings.push_back(pattern::parse_slash_pooling(name));
  }
  options.ranks = o.ranks;
  if (!o.layout.empty()) options.layout = layout::parse_layout_kind(o.layout);
  options.stripe = o.stripe;
  options.balance = topology::parse_topology(o.virtual_ranks);
  const bench::QueryKeys given = bench::read_query_keys(o.qk);
  const ThreadCountScope threads(o.threads);
  for (const bench::Json& row : bench::qk_report(given, options))
    std::printf("%s\n", row.dump().c_str());
  return 0;
}

/// Everything that can be wrong is found here, before any length runs.
struct Measurement {
  bench::AttentionBenchOptions options;
  std::vector<bench::AttentionCase> cases;  ///< but those whose index is chosen from the inputs
};

Measurement prepare(const Options& o, int64_t seq_len) {
  const bool on_gpu = o.device == "cuda";
  Measurement made;
  bench::AttentionBenchOptions& options = made.options;
  bench::AttentionSizes& sizes = options.sizes;
  sizes = {.seq_len = seq_len,
           .num_q_heads = o.heads.value_or(4),
           .num_kv_heads = o.kv_heads,
           .head_dim = o.head_dim,
           .dtype = bench::parse_dtype(!o.dtype.empty() ? o.dtype
                                       : on_gpu         ? "bf16"
                                                        : "float32")};
  options.place = {.device = o.device,
                   .threads = o.threads,
                   .layout = !o.layout.empty() ? layout::parse_layout_kind(o.layout)
                             : o.cp_size == 1  ? layout::LayoutKind::kContiguous
                                               : layout::LayoutKind::kBlockStriped,
                   .stripe = o.stripe,
                   .cp_size = o.cp_size,
                   .cp_rank = o.cp_rank,
                   .deterministic = o.deterministic,
                   .backend = o.backend};
  MT_CHECK_ARG(o.peer.empty() || o.peer == "sdpa" || o.peer == "none",
               "--peer: expected sdpa or none, got '", o.peer, "'");
  options.peer = o.peer.empty() ? o.cp_size == 1 : o.peer == "sdpa";
  options.repeats = o.repeats.value_or(on_gpu ? 9 : 5);
  options.warm_up = o.warm_up.value_or(on_gpu ? 3 : 1);
  options.seed = static_cast<uint64_t>(o.seed);
  options.estimation = pattern_options(o);
  bench::check(options);
  MT_CHECK_SUPPORTED(sizes.num_q_heads <= 4096, "--heads: expected at most 4096, got ",
                     sizes.num_q_heads);
  auto& cases = made.cases;
  for (const std::string& path : o.patterns) cases.push_back(bench::file_case(sizes, path));
  for (const std::string& shape : o.shapes) cases.push_back(bench::shape_case(sizes, shape));
  for (const double density : o.densities) cases.push_back(bench::density_case(sizes, density));
  for (const double p : o.p)
    MT_CHECK_ARG(p >= 0 && p <= 1, "--p: expected numbers in [0, 1], got ", p);
  if (on_gpu) bench::torch_device(options.place);  // or what is missing
  return made;
}

void run(const Options& o, Measurement& made, const bench::Provenance& from) {
  const bench::AttentionBenchOptions& options = made.options;
  const bench::AttentionSizes& sizes = options.sizes;
  const auto add_chosen = [&](const auto& choose) {
    for (const double p : o.p) {
      pattern::VerticalSlashOptions chosen = options.estimation;
      chosen.p_vertical = chosen.p_slash = p;
      made.cases.push_back({concat("vertical_slash p ", p), choose(chosen)});
    }
  };
  const auto print = [&](const bench::AttentionArms& arms) {
    for (const bench::AttentionRow& row : bench::bench_attention(options, arms, made.cases, from))
      std::printf("%s\n", bench::to_line(row, from).c_str());
    std::fflush(stdout);  // of a length that is done
  };
  if (o.device == "cuda") {
#ifdef MT_WITH_CUDA
    const bench::DeviceInputs inputs =
        bench::make_device_inputs(options.place, sizes, options.seed);
    add_chosen([&](const auto& chosen) { return bench::choose_device_index(inputs, chosen); });
    print(bench::device_arms(options, inputs));
#endif
    return;
  }
  const bench::AttentionInputs inputs = bench::make_inputs(sizes, options.seed);
  add_chosen([&](const auto& chosen) { return bench::choose_index(sizes, inputs, chosen); });
  print(bench::cpu_arms(options, inputs));
}

int measure(Options o) {
  if (!o.patterns.empty()) {
    const sim::OffsetPattern file = sim::read_pattern_file(o.patterns.front());
    if (o.seq_lens.empty()) o.seq_lens = {file.seq_len};
    if (!o.heads) o.heads = static_cast<int64_t>(file.heads.size());
  }
  if (o.seq_lens.empty()) o.seq_lens = {16384};
  if (o.patterns.empty() && o.shapes.empty() && o.densities.empty() && o.p.empty())
    o.densities = {0.05};
  std::vector<Measurement> all;
  for (const int64_t seq_len : o.seq_lens) all.push_back(prepare(o, seq_len));
  const bench::Provenance from = bench::provenance();
  for (Measurement& one : all) run(o, one, from);
  return 0;
}

}  // namespace

int bench_attention(int argc, char** argv) {
  CLI::App app(
      "One layer's attention on this machine, a JSON line a case; or what a pattern chooses from "
      "given q and k");
  Options options;
  declare(app, options);
  if (!parse_options(app, "bench attention", argc, argv)) return 0;
  MT_CHECK_ARG(options.threads >= 1 && options.threads <= 1024,
               "--threads: expected a number from 1 to 1024, got ", options.threads);
  if (!options.qk.empty()) {
    for (const char* flag : kNotWithQk)
      MT_CHECK_ARG(app.count(flag) == 0, flag, ": expected it without --qk, got both");
    return report_qk(options);
  }
  for (const char* flag : kQkOnly)
    MT_CHECK_ARG(app.count(flag) == 0, flag, ": expected it beside --qk FILE, got none");
  return measure(options);
}

}  // namespace mtraining::cli
