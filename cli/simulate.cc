#include "cli/simulate.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "cli/parse_options.h"
#include "mtraining/base/check.h"
#include "mtraining/base/json.h"
#include "mtraining/index/columns.h"
#include "mtraining/layout/layout.h"
#include "mtraining/ring/schedule.h"
#include "mtraining/sim/event_simulation.h"
#include "mtraining/sim/imbalance.h"
#include "mtraining/sim/latency_model.h"
#include "mtraining/sim/pattern_file.h"
#include "mtraining/sim/traffic_bytes.h"
#include "mtraining/topology/topology.h"
#include "mtraining/trace/chrome_trace.h"

namespace mtraining::cli {
namespace {

using Json = nlohmann::ordered_json;

/// Backward computes five products where forward computes two.
constexpr double kBackwardFactor = 2.5;
/// Launches (ranks x ranks) of one variant that are simulated one by one; more would take minutes and gigabytes.
constexpr int64_t kMostRanks = 256;
constexpr int kTimelineWidth = 72;
constexpr int kTimelineRanks = 32;
/// Rows of gathered columns a rank holds at a time; bytes depend on it only through rounding up.
constexpr int64_t kColumnRowsPerRank = 16384;

struct Options {
  std::string topology_text;
  std::optional<double> compute_ms, intra_ms, inter_ms;
  double index_ms = 0, cpu_ms = 0;
  std::string pattern;
  std::string layout, ring, inner = "gather", columns = "once", gradient_transport = "fp32";
  std::optional<int64_t> stripe;
  int ring_stride = 1, prefetch_steps = 2;
  std::optional<int64_t> num_kv_heads;
  int64_t head_dim = 128;
  double tflops = 400, intra_gb_per_s = 300, inter_gb_per_s = 25;
  bool backward = false, json = false;
  std::optional<std::string> trace;
};

const char* const kExamples =
    "Examples:\n"
    "  mtraining simulate --topology 4x8 --t-comp-ms .51 --t-intra-ms .13 --t-inter-ms .98 \\\n"
    "      --t-index-ms 1.13 --t-cpu-ms 2.08\n"
    "  mtraining simulate --topology 4x8 --pattern typical.json\n"
    "  mtraining simulate --topology 4x8 --pattern typical.json --layout block_striped --stripe 64 "
    "\\\n"
    "      --ring flat --ring-stride 15 --trace ring.json\n";

void declare(CLI::App& app, Options& options) {
  app.name("mtraining simulate");
  app.footer(kExamples);
  app.add_option("--topology", options.topology_text,
                 "Nodes x ranks of a node, such as 4x8 (required)");
  app.add_option("--t-comp-ms", options.compute_ms, "Computation of one shard, ms");
  app.add_option("--t-intra-ms", options.intra_ms, "Hop of one shard's K and V inside a node, ms");
  app.add_option("--t-inter-ms", options.inter_ms, "Hop of one shard's K and V between nodes, ms");
  app.add_option("--t-index-ms", options.index_ms, "Index, once a layer, ms");
  app.add_option("--t-cpu-ms", options.cpu_ms, "Host, once a layer, ms");
  app.add_option(
      "--pattern", options.pattern,
      "JSON file of offset ranges and columns, or of key blocks, per head: imbalance, bytes, "
      "timeline");
  app.add_option("--layout", options.layout,
                 "Only this layout: block_striped, zigzag, contiguous, striped");
  app.add_option("--stripe", options.stripe, "Only this stripe of block_striped (else 64 and 128)");
  app.add_option("--ring", options.ring, "Only this ring: flat, hierarchical");
  app.add_option("--inner", options.inner, "Inside a node of a hierarchical ring: gather, ring")
      ->capture_default_str();
  app.add_option("--ring-stride", options.ring_stride, "Flat ring: a hop goes this many ranks on")
      ->capture_default_str();
  app.add_option("--prefetch-steps", options.prefetch_steps, "Transfers ahead of the launch")
      ->capture_default_str();
  app.add_option("--columns", options.columns,
                 "once: one launch over all columns; per_step: with their shard")
      ->capture_default_str();
  app.add_option("--gradient-transport", options.gradient_transport, "fp32 or bf16")
      ->capture_default_str();
  app.add_option("--kv-heads", options.num_kv_heads,
                 "K/V heads (absent: 2, or 1 where the pattern's heads are odd)");
  app.add_option("--head-dim", options.head_dim, "Head dimension")->capture_default_str();
  app.add_option("--tflops", options.tflops,
                 "Attention forward rate of a rank, TFLOP/s, where --t-comp-ms is absent")
      ->capture_default_str();
  app.add_option("--intra-gb-per-s", options.intra_gb_per_s,
                 "A rank's link inside its node, GB/s, where --t-intra-ms is absent")
      ->capture_default_str();
  app.add_option("--inter-gb-per-s", options.inter_gb_per_s,
                 "A rank's link between nodes, GB/s, where --t-inter-ms is absent")
      ->capture_default_str();
  app.add_flag("--backward", options.backward, "The timeline of backward instead of forward");
  app.add_flag("--json", options.json, "One JSON object instead of text");
  app.add_option("--trace", options.trace, "Also write the timeline for Perfetto to this file");
}

void check_positive(const char* flag, double value) {
  MT_CHECK_ARG(std::isfinite(value) && value > 0, flag, ": expected a number above 0, got ", value);
}

void check_one_of(const char* flag, const std::string& value, const char* one, const char* other) {
  MT_CHECK_ARG(value == one || value == other, flag, ": expected ", one, " or ", other, ", got '",
               value, "'");
}

/// What the closed form knows nothing of.
constexpr std::array kPatternOnly = {
    "--layout",         "--stripe",         "--ring",    "--inner",
    "--ring-stride",    "--prefetch-steps", "--columns", "--gradient-transport",
    "--kv-heads",       "--head-dim",       "--tflops",  "--intra-gb-per-s",
    "--inter-gb-per-s", "--backward",       "--trace"};

void check(const CLI::App& app, const Options& options) {
  check_positive("--tflops", options.tflops);
  check_positive("--intra-gb-per-s", options.intra_gb_per_s);
  check_positive("--inter-gb-per-s", options.inter_gb_per_s);
  MT_CHECK_ARG(!options.stripe ||
                   (*options.stripe >= layout::kBlock && *options.stripe % layout::kBlock == 0),
               "--stripe: expected a positive multiple of ", layout::kBlock, ", got ",
               options.stripe.value_or(0));
  check_one_of("--columns", options.columns, "once", "per_step");
  check_one_of("--gradient-transport", options.gradient_transport, "fp32", "bf16");
  MT_CHECK_ARG(options.head_dim >= 1, "--head-dim: expected >= 1, got ", options.head_dim);
  MT_CHECK_ARG(!options.num_kv_heads || *options.num_kv_heads >= 1,
               "--kv-heads: expected >= 1, got ", options.num_kv_heads.value_or(1));
  MT_CHECK_ARG(!options.trace || !options.trace->empty(),
               "--trace: expected a file name, got an empty text");
  if (options.pattern.empty()) {
    MT_CHECK_ARG(options.compute_ms.has_value(),
                 "simulate: expected --t-comp-ms, or --pattern FILE, got neither");
    for (const char* flag : kPatternOnly) {
      MT_CHECK_ARG(app.count(flag) == 0, flag, ": expected it beside --pattern FILE, got none");
    }
  }
}

sim::StepTimes step_times(const Options& options) {
  return {.compute_ms = options.compute_ms.value_or(0),
          .intra_ms = options.intra_ms.value_or(0),
          .inter_ms = options.inter_ms.value_or(0),
          .index_ms = options.index_ms,
          .cpu_ms = options.cpu_ms};
}

/// A layout and a ring: one line of the table.
struct Variant {
  layout::LayoutKind layout = layout::LayoutKind::kBlockStriped;
  int64_t stripe = 64;
  ring::ScheduleOptions ring;

  bool hierarchical() const { return ring.ring == ring::RingKind::kHierarchical; }
  std::string layout_name() const {
    std::string name(layout::to_string(layout));
    return layout == layout::LayoutKind::kBlockStriped ? concat(name, " ", stripe) : name;
  }
  std::string ring_name() const {
    if (!hierarchical()) {
      return ring.ring_stride == 1 ? "flat" : concat("flat, stride ", ring.ring_stride);
    }
    return concat("hierarchical, ", ring::to_string(ring.inner));
  }
};

std::vector<Variant> variants(const Options& options, const topology::Topology& topology) {
  std::vector<std::pair<layout::LayoutKind, int64_t>> layouts;
  if (!options.layout.empty()) {
    const layout::LayoutKind kind = layout::parse_layout_kind(options.layout);
    layouts.push_back({kind, options.stripe.value_or(64)});
    if (kind == layout::LayoutKind::kBlockStriped && !options.stripe)
      layouts.push_back({kind, 128});
  } else {
    for (int64_t stripe :
         options.stripe ? std::vector<int64_t>{*options.stripe} : std::vector<int64_t>{64, 128}) {
      layouts.push_back({layout::LayoutKind::kBlockStriped, stripe});
    }
    layouts.push_back({layout::LayoutKind::kZigzag, 64});
    layouts.push_back({layout::LayoutKind::kContiguous, 64});
    layouts.push_back({layout::LayoutKind::kStriped, 64});
  }
  std::vector<ring::RingKind> rings = {ring::RingKind::kFlat, ring::RingKind::kHierarchical};
  if (!options.ring.empty()) rings = {ring::parse_ring_kind(options.ring)};
  const ring::InnerKind inner = ring::parse_inner_kind(options.inner);
  std::vector<Variant> result;
  for (const auto& [kind, stripe] : layouts) {
    for (ring::RingKind ring : rings) {
      const bool flat = ring == ring::RingKind::kFlat;
      result.push_back({.layout = kind,
                        .stripe = stripe,
                        .ring = {.topology = topology,
                                 .ring = ring,
                                 .inner = inner,
                                 .ring_stride = flat ? options.ring_stride : 1,
                                 .prefetch_steps = options.prefetch_steps}});
    }
  }
  return result;
}

/// One direction of one variant.
struct Pass {
  std::vector<ring::Schedule> schedules;
  sim::Timeline timeline;
  double total_ms = 0;
  std::vector<sim::LinkBytes> ring_bytes;
  int64_t column_bytes = 0;  // of each rank

  sim::LinkBytes largest() const {
    sim::LinkBytes most;
    for (const sim::LinkBytes& rank : ring_bytes) {
      most.inner = std::max(most.inner, rank.inner);
      most.outer = std::max(most.outer, rank.outer);
    }
    return most;
  }
  sim::LinkBytes total() const {
    sim::LinkBytes sum;
    for (const sim::LinkBytes& rank : ring_bytes) {
      sum.inner += rank.inner;
      sum.outer += rank.outer;
    }
    return sum;
  }
};

struct Row {
  Variant variant;
  sim::Imbalance imbalance;
  sim::StepLoads loads;
  Pass forward, backward;
};

/// Whether the sparse index can run on this layout at all.
bool is_supported(const index::Index& index, layout::LayoutKind kind) {
  if (kind != layout::LayoutKind::kStriped) return true;
  return std::all_of(index.diagonals.counts.begin(), index.diagonals.counts.end(),
                     [&](int32_t count) { return count == index.num_blocks(); });
}

Pass simulate_pass(const Options& options, const Row& row, const sim::ShardSizes& sizes,
                   const sim::StepTimes& times, double us_per_pair, const index::ColumnPlan& plan,
                   bool backward) {
  Pass pass;
  const topology::Topology& topology = row.variant.ring.topology;
  for (int rank = 0; rank < topology.cp_size(); ++rank) {
    pass.schedules.push_back(backward ? ring::backward_schedule(row.variant.ring, rank)
                                      : ring::forward_schedule(row.variant.ring, rank));
  }
  sim::CostModel cost{.kv_bytes = sizes.kv_bytes(), .grad_bytes = sizes.grad_bytes()};
  // A given hop time becomes a rate, so that gradients pay for their size.
  const auto rate = [&](const std::optional<double>& hop_ms, double gb_per_s) {
    if (!hop_ms) return gb_per_s * 1e3;
    return *hop_ms > 0 ? static_cast<double>(cost.kv_bytes) / (*hop_ms * 1e3) : 0;
  };
  cost.inner.bytes_per_us = rate(options.intra_ms, options.intra_gb_per_s);
  cost.outer.bytes_per_us = rate(options.inter_ms, options.inter_gb_per_s);
  const sim::LaunchCost launch{.us_per_pair = us_per_pair * (backward ? kBackwardFactor : 1)};
  pass.timeline = sim::simulate(pass.schedules, topology,
                                sim::compute_times(row.loads, launch, backward), cost);
  pass.total_ms = pass.timeline.total_us / 1e3;
  if (!backward) pass.total_ms += times.index_ms + times.cpu_ms;
  pass.ring_bytes = sim::ring_bytes(row.variant.ring, sizes, backward);
  if (options.columns == "once") {
    pass.column_bytes = sim::column_bytes(plan, topology.cp_size(), sizes, backward);
  }
  return pass;
}

Row make_row(const Options& options, const Variant& variant, const index::Index& index,
             int num_kv_heads) {
  Row row{.variant = variant, .imbalance = {}, .loads = {}, .forward = {}, .backward = {}};
  const topology::Topology& topology = variant.ring.topology;
  const layout::Layout layout({.kind = variant.layout,
                               .seq_len = index.seq_len,
                               .cp_size = topology.cp_size(),
                               .stripe = variant.stripe,
                               .nodes = variant.hierarchical() ? topology.nodes : 1});
  const sim::PairTable pairs = sim::count_pairs(index, layout);
  const auto columns =
      options.columns == "once" ? sim::ColumnCost::kOnce : sim::ColumnCost::kPerStep;
  row.loads = sim::step_loads(pairs, variant.ring, columns);
  row.imbalance = sim::measure(row.loads, variant.ring);
  const sim::ShardSizes sizes{.tokens = layout.tokens_per_rank(),
                              .num_kv_heads = num_kv_heads,
                              .head_dim = options.head_dim,
                              .grad_element_bytes = options.gradient_transport == "fp32" ? 4 : 2};
  const double world = topology.cp_size();
  const double mean_shard_pairs = static_cast<double>(row.imbalance.total_pairs) / (world * world);
  double us_per_pair = 4.0 * static_cast<double>(options.head_dim) / (options.tflops * 1e6);
  if (options.compute_ms) {
    us_per_pair = mean_shard_pairs > 0 ? *options.compute_ms * 1e3 / mean_shard_pairs : 0;
  }
  index::ColumnPlan plan;
  if (options.columns == "once") {
    plan = index::plan_columns(index, layout, num_kv_heads, kColumnRowsPerRank);
  }
  const sim::StepTimes times = step_times(options);
  row.forward = simulate_pass(options, row, sizes, times, us_per_pair, plan, false);
  row.backward = simulate_pass(options, row, sizes, times, us_per_pair, plan, true);
  return row;
}

std::string fixed(double value, int digits) {
  char text[64];
  std::snprintf(text, sizeof text, "%.*f", digits, value);
  return text;
}

/// Left-aligned first two columns, the others right-aligned.
void print_table(const std::vector<std::vector<std::string>>& lines) {
  std::vector<size_t> widths;
  for (const auto& line : lines) {
    widths.resize(std::max(widths.size(), line.size()));
    for (size_t i = 0; i < line.size(); ++i) widths[i] = std::max(widths[i], line[i].size());
  }
  for (const auto& line : lines) {
    std::string text;
    for (size_t i = 0; i < line.size(); ++i) {
      const std::string space(widths[i] - line[i].size(), ' ');
      text += (i > 0 ? "  " : "") + (i < 2 ? line[i] + space : space + line[i]);
    }
    text.erase(text.find_last_not_of(' ') + 1);
    std::printf("%s\n", text.c_str());
  }
}

std::string megabytes(int64_t bytes) { return fixed(static_cast<double>(bytes) / 1e6, 1); }

void print_rows(const std::vector<Row>& rows) {
  std::vector<std::vector<std::string>> lines = {{"layout", "ring", "worker", "step", "lockstep",
                                                  "fwd ms", "bwd ms", "intra MB", "inter MB",
                                                  "columns MB"}};
  for (const Row& row : rows) {
    const sim::LinkBytes forward = row.forward.largest(), backward = row.backward.largest();
    lines.push_back({row.variant.layout_name(), row.variant.ring_name(),
                     fixed(row.imbalance.worker, 3), fixed(row.imbalance.step, 3),
                     fixed(row.imbalance.lockstep, 3), fixed(row.forward.total_ms, 2),
                     fixed(row.backward.total_ms, 2), megabytes(forward.inner + backward.inner),
                     megabytes(forward.outer + backward.outer),
                     megabytes(row.forward.column_bytes + row.backward.column_bytes)});
  }
  print_table(lines);
  std::printf(
      "worker: largest rank / mean rank; step: largest launch / mean launch of a rank, mean over\n"
      "ranks; lockstep: time if ranks wait for each other / mean rank (flat: at every launch;\n"
      "hierarchical: inside a node at every launch, all at every outer step). In pairs computed.\n"
      "MB: sent by the rank that sends most, one layer, forward and backward.\n");
}

void print_timeline(const Row& row, const Pass& pass, bool backward) {
  const double total_us = pass.timeline.total_us;
  std::printf("\ntimeline of %s, %s, %s: %s ms, '#' ring launch, 'c' column launch, '.' waiting\n",
              row.variant.layout_name().c_str(), row.variant.ring_name().c_str(),
              backward ? "backward" : "forward", fixed(total_us / 1e3, 2).c_str());
  const int world = static_cast<int>(pass.schedules.size());
  for (int rank = 0; rank < std::min(world, kTimelineRanks); ++rank) {
    std::string line(kTimelineWidth, '.');
    const auto draw = [&](const sim::OpTime& time, char mark) {
      if (total_us <= 0) return;
      const int begin = static_cast<int>(time.begin_us / total_us * kTimelineWidth);
      const int end = static_cast<int>(std::ceil(time.end_us / total_us * kTimelineWidth));
      for (int i = begin; i < std::min(end, kTimelineWidth); ++i) line[i] = mark;
    };
    for (const ring::Op& op : pass.schedules[rank].ops) {
      if (op.kind == ring::OpKind::kLaunch) draw(pass.timeline.ops[rank][op.id], '#');
    }
    if (!pass.timeline.columns.empty()) draw(pass.timeline.columns[rank], 'c');
    const double busy = total_us > 0 ? pass.timeline.compute_us[rank] / total_us * 100 : 0;
    std::printf("rank %3d |%s| %5.1f %% busy\n", rank, line.c_str(), busy);
  }
  if (world > kTimelineRanks) std::printf("(%d further ranks)\n", world - kTimelineRanks);
}

Json bytes_json(const Pass& pass) {
  const sim::LinkBytes largest = pass.largest(), total = pass.total();
  const auto world = static_cast<int64_t>(pass.ring_bytes.size());
  return {{"ms", pass.total_ms},
          {"intra_bytes_largest_rank", largest.inner},
          {"inter_bytes_largest_rank", largest.outer},
          {"intra_bytes", total.inner},
          {"inter_bytes", total.outer},
          {"column_bytes", pass.column_bytes * world}};
}

Json row_json(const Row& row) {
  Json json = {{"layout", layout::to_string(row.variant.layout)},
               {"ring", ring::to_string(row.variant.ring.ring)}};
  if (row.variant.layout == layout::LayoutKind::kBlockStriped) json["stripe"] = row.variant.stripe;
  if (row.variant.hierarchical()) {
    json["inner"] = ring::to_string(row.variant.ring.inner);
  } else {
    json["ring_stride"] = row.variant.ring.ring_stride;
  }
  json["worker_imbalance"] = row.imbalance.worker;
  json["step_imbalance"] = row.imbalance.step;
  json["step_imbalance_worst"] = row.imbalance.step_worst;
  json["lockstep_imbalance"] = row.imbalance.lockstep;
  json["pairs"] = row.imbalance.total_pairs;
  json["forward"] = bytes_json(row.forward);
  json["backward"] = bytes_json(row.backward);
  return json;
}

std::vector<trace::Span> spans(const Row& row, const Pass& pass, int rank) {
  std::vector<trace::Span> result;
  const auto add = [&](std::string name, std::string line, const sim::OpTime& time, int ring_step,
                       int64_t pairs) {
    trace::Span span;
    span.name = std::move(name);
    span.row = std::move(line);
    span.begin_us = std::llround(time.begin_us);
    span.end_us = std::llround(time.end_us);
    span.ring_step = ring_step;
    span.pairs = pairs;
    result.push_back(std::move(span));
  };
  for (const ring::Op& op : pass.schedules[rank].ops) {
    const bool launch = op.kind == ring::OpKind::kLaunch;
    add(std::string(ring::to_string(op.kind)),
        launch ? "compute" : std::string(ring::to_string(op.channel)),
        pass.timeline.ops[rank][op.id], op.ring_step,
        launch ? row.loads.by_step[rank][op.ring_step] : -1);
  }
  if (!pass.timeline.columns.empty()) {
    add("columns", "compute", pass.timeline.columns[rank], -1, row.loads.columns_once[rank]);
  }
  return result;
}

Json timeline_json(const Row& row, const Pass& pass, bool backward) {
  Json ranks = Json::array();
  for (int rank = 0; rank < static_cast<int>(pass.schedules.size()); ++rank) {
    Json list = Json::array();
    for (const trace::Span& span : spans(row, pass, rank)) {
      Json entry = {{"what", span.name},
                    {"row", span.row},
                    {"ring_step", span.ring_step},
                    {"begin_us", span.begin_us},
                    {"end_us", span.end_us}};
      if (span.pairs >= 0) entry["pairs"] = span.pairs;
      list.push_back(std::move(entry));
    }
    ranks.push_back(std::move(list));
  }
  return {{"layout", row.variant.layout_name()},
          {"ring", row.variant.ring_name()},
          {"direction", backward ? "backward" : "forward"},
          {"total_us", pass.timeline.total_us},
          {"ranks", std::move(ranks)}};
}

void write_trace(const std::string& path, const Row& row, const Pass& pass) {
  std::vector<std::string> per_rank;
  for (int rank = 0; rank < static_cast<int>(pass.schedules.size()); ++rank) {
    trace::SpanRecorder recorder;
    for (trace::Span& span : spans(row, pass, rank)) recorder.add(std::move(span));
    per_rank.push_back(recorder.serialize());
  }
  trace::write_chrome_trace(path, per_rank);
}

int kv_heads(const Options& options, const index::Index& index) {
  if (!options.num_kv_heads) return index.num_q_heads % 2 == 0 ? 2 : 1;
  MT_CHECK_ARG(index.num_q_heads % *options.num_kv_heads == 0,
               "--kv-heads: expected a divisor of the pattern's ", index.num_q_heads,
               " heads, got ", *options.num_kv_heads);
  return static_cast<int>(*options.num_kv_heads);
}

void simulate_pattern(const Options& options, const topology::Topology& topology, Json& json) {
  MT_CHECK_SUPPORTED(int64_t{topology.nodes} * topology.ranks_per_node <= kMostRanks,
                     "--topology: expected at most ", kMostRanks,
                     " ranks beside --pattern FILE, got ", topology::to_string(topology),
                     "; without --pattern any number is answered");
  // Everything that can be wrong is found before the file is opened.
  const std::vector<Variant> all = variants(options, topology);
  for (const Variant& variant : all) ring::forward_schedule(variant.ring, 0);
  const sim::NamedIndex read = sim::read_index_file(options.pattern);
  const index::Index& index = read.index;
  const int num_kv_heads = kv_heads(options, index);
  int64_t total_pairs = 0;
  for (int h = 0; h < index.num_q_heads; ++h) total_pairs += index::computed_pairs(index, 0, h);
  std::vector<Row> rows;
  std::vector<std::string> unsupported;
  for (const Variant& variant : all) {
    if (is_supported(index, variant.layout)) {
      rows.push_back(make_row(options, variant, index, num_kv_heads));
    } else if (unsupported.empty() || unsupported.back() != variant.layout_name()) {
      unsupported.push_back(variant.layout_name());
    }
  }
  MT_CHECK_SUPPORTED(!rows.empty(),
                     "layout striped: a sparse pattern needs blocks of 64 "
                     "consecutive tokens; ",
                     options.pattern, " is sparse");
  // The last row of the first layout: the hierarchical ring unless --ring says otherwise.
  const Row* shown = &rows.front();
  for (const Row& row : rows) {
    if (row.variant.layout_name() == rows.front().variant.layout_name()) shown = &row;
  }
  const Pass& pass = options.backward ? shown->backward : shown->forward;
  if (options.trace) write_trace(*options.trace, *shown, pass);
  if (options.json) {
    json["pattern"] = {{"name", read.name},          {"seq_len", index.seq_len},
                       {"heads", index.num_q_heads}, {"kv_heads", num_kv_heads},
                       {"pairs", total_pairs},       {"density", index::density(index)}};
    json["columns"] = options.columns;
    json["table"] = Json::array();
    for (const Row& row : rows) json["table"].push_back(row_json(row));
    json["unsupported_layouts"] = unsupported;
    json["timeline"] = timeline_json(*shown, pass, options.backward);
    return;
  }
  std::printf("topology %s, pattern %s: seq_len %lld, %d heads (%d kv), density %s, columns %s\n",
              topology::to_string(topology).c_str(), in_quotes(read.name).c_str(),
              static_cast<long long>(index.seq_len), index.num_q_heads, num_kv_heads,
              fixed(index::density(index), 4).c_str(), options.columns.c_str());
  print_rows(rows);
  for (const std::string& name : unsupported) {
    std::printf("%s: not shown, a sparse pattern needs blocks of 64 consecutive tokens\n",
                name.c_str());
  }
  print_timeline(*shown, pass, options.backward);
}

void simulate_closed_form(const Options& options, const topology::Topology& topology, Json& json) {
  const sim::StepTimes times = step_times(options);
  const double flat_ms = sim::flat_ring_ms(topology, times);
  const double hierarchical_ms = sim::hierarchical_ring_ms(topology, times);
  const double change = flat_ms > 0 ? (hierarchical_ms / flat_ms - 1) * 100 : 0;
  if (options.json) {
    json["closed_form"] = {{"flat_ms", flat_ms}, {"hierarchical_ms", hierarchical_ms}};
    return;
  }
  std::printf("topology %s, one layer forward\n", topology::to_string(topology).c_str());
  print_table({{"flat", "", fixed(flat_ms, 2), "ms"},
               {"hierarchical", "", fixed(hierarchical_ms, 2), "ms",
                concat("(", change > 0 ? "+" : "", fixed(change, 1), " %)")}});
}

}  // namespace

int run_simulate(int argc, char** argv) {
  CLI::App app(
      "What a ring of attention costs: totals from step times, and what a pattern does to it");
  Options options;
  declare(app, options);
  if (!parse_options(app, "simulate", argc, argv)) return 0;
  MT_CHECK_ARG(!options.topology_text.empty(),
               "simulate: expected --topology NODESxRANKS, got none");
  const topology::Topology topology = topology::parse_topology(options.topology_text);
  check(app, options);
  Json json = {{"topology", topology::to_string(topology)}};
  if (options.compute_ms) simulate_closed_form(options, topology, json);
  if (!options.pattern.empty()) simulate_pattern(options, topology, json);
  if (options.json) std::printf("%s\n", json.dump().c_str());
  return 0;
}

}  // namespace mtraining::cli
