#include <c10/core/impl/VirtualGuardImpl.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <charconv>
#include <cstdio>
#include <cstdlib>
#include <optional>
#include <sstream>
#include <string>
#include <vector>

#include "bench/ring_bench.h"
#include "cli/bench.h"
#include "cli/meeting.h"
#include "cli/parse_options.h"
#include "mtraining/base/check.h"
#include "mtraining/comm/c10d.h"
#include "mtraining/comm/loopback.h"
#include "mtraining/sim/pattern_file.h"
#include "mtraining/topology/rendezvous.h"

namespace mtraining::cli {
namespace {

const char* const kExamples =
    "Examples:\n"
    "  mtraining bench ring --virtual 4x8 --breakdown\n"
    "  mtraining bench ring --virtual 2x2 --ring flat --seq-len 4096 --density .1\n"
    "  mtraining bench ring --device cuda --virtual 2x4 --shape typical --seq-len 131072 --heads "
    "16 "
    "--head-dim 128 --dtype bf16 --breakdown\n"
    "  torchrun --no-python --nproc-per-node 8 mtraining bench ring --device cuda --topology 2x4 "
    "--shape typical --seq-len 524288 --heads 16 --head-dim 128 --dtype bf16 "
    "--variant ring=flat --variant ring=hierarchical,inner=ring,launch-shards=2\n";

struct Options {
  std::string device = "cpu", virtual_ranks = "2x2", topology, ring, inner = "gather",
              layout = "block_striped";
  std::string columns = "once", gradient_transport = "fp32", transfers = "collectives",
              dtype = "float32", pattern, shape;
  std::optional<double> density;
  std::optional<int64_t> seq_len, heads;
  int64_t kv_heads = 2, head_dim = 64, stripe = 64, seed = 1;
  double p = 0.9;
  int ring_stride = 1, prefetch_steps = 2, launch_shards = 0, sm_margin = 8, repeats = 3,
      warm_up = 1;
  double inner_gb_per_s = 0, outer_gb_per_s = 0;
  bool breakdown = false, alone = false, any_order = false, layer = false, timeline = false;
  std::vector<std::string> variants;
};

void declare(CLI::App& app, Options& o) {
  app.name("mtraining bench ring");
  app.footer(kExamples);
  app.add_option("--virtual", o.virtual_ranks,
                 "Nodes x ranks of a node, as threads of this process")
      ->capture_default_str();
  app.add_option("--topology", o.topology,
                 "Nodes x ranks of a node, as the processes that a launcher started");
  app.add_option("--device", o.device,
                 "cpu or cuda: threads share one GPU, processes have one each")
      ->capture_default_str();
  app.add_flag("--alone", o.alone, "Rank 0's launches only: transfers cost and bring nothing");
  app.add_option("--inner-gb-per-s", o.inner_gb_per_s,
                 "Ranks that share a GPU: speed of what leaves one inside a node; 0: no limit");
  app.add_option("--outer-gb-per-s", o.outer_gb_per_s, "The same between nodes");
  app.add_option("--ring", o.ring, "Only this ring: flat, hierarchical");
  app.add_option("--inner", o.inner, "Inside a node of a hierarchical ring: gather, ring")
      ->capture_default_str();
  app.add_option("--ring-stride", o.ring_stride, "Flat ring: a hop goes this many ranks on")
      ->capture_default_str();
  app.add_option("--prefetch-steps", o.prefetch_steps, "Transfers ahead of the launch")
      ->capture_default_str();
  app.add_option("--launch-shards", o.launch_shards,
                 "Arrived shards a launch takes on a flat or inner ring; 0: chosen")
      ->capture_default_str();
  app.add_option("--sm-margin", o.sm_margin, "Multiprocessors that launches leave to transfers")
      ->capture_default_str();
  app.add_flag("--any-order", o.any_order, "A backward whose sums have no fixed order");
  app.add_option("--layout", o.layout, "block_striped, zigzag, contiguous, striped")
      ->capture_default_str();
  app.add_option("--stripe", o.stripe, "Stripe of block_striped")->capture_default_str();
  app.add_option("--columns", o.columns, "once or per_step")->capture_default_str();
  app.add_option("--gradient-transport", o.gradient_transport, "fp32 or bf16")
      ->capture_default_str();
  app.add_option("--transfers", o.transfers, "Inside a node: collectives or peer_copies")
      ->capture_default_str();
  app.add_option("--seq-len", o.seq_len, "Tokens (absent: the pattern file's, or 8192)");
  app.add_option("--heads", o.heads, "Query heads (absent: the pattern file's, or 4)");
  app.add_option("--kv-heads", o.kv_heads, "K/V heads")->capture_default_str();
  app.add_option("--head-dim", o.head_dim, "Head dimension")->capture_default_str();
  app.add_option("--dtype", o.dtype, "float32, float64, bf16, fp16")->capture_default_str();
  app.add_option("--p", o.p, "Budgets of the pattern that the ranks choose together")
      ->capture_default_str();
  app.add_option("--density", o.density,
                 "Instead of a choice: half diagonals, half columns; 1: dense");
  app.add_option("--pattern", o.pattern,
                 "Instead of a choice: a JSON file of offset ranges and columns");
  app.add_option("--shape", o.shape, "Instead of a choice: local, typical, wide, uneven");
  app.add_option("--repeats", o.repeats, "Timed runs")->capture_default_str();
  app.add_option("--warm-up", o.warm_up, "Runs before them")->capture_default_str();
  app.add_option("--seed", o.seed, "Of the inputs")->capture_default_str();
  app.add_option("--variant", o.variants,
                 "A row with some of these flags changed, as ring=flat,sm-margin=0; may be "
                 "repeated: all in one job");
  app.add_flag(
      "--layer", o.layer,
      "As a layer runs: the index is chosen within the forward, under its first transfers");
  app.add_flag("--timeline", o.timeline,
               "Also a line with rank 0's launches, transfers and waits of the last repeat");
  app.add_flag("--breakdown", o.breakdown, "Also a line a phase: launches, columns, waits");
}

/// `o` with the flags that a variant names.
Options changed(Options o, const std::string& variant) {
  std::istringstream parts(variant);
  for (std::string part; std::getline(parts, part, ',');) {
    const size_t equals = part.find('=');
    const std::string name = part.substr(0, equals),
                      value = equals == std::string::npos ? "" : part.substr(equals + 1);
    const auto number = [&] {
      int result = 0;
      const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), result);
      MT_CHECK_ARG(error == std::errc() && end == value.data() + value.size(), "--variant: ", name,
                   ": expected a whole number, got '", value, "'");
      return result;
    };
    const auto rate = [&] {
      char* end = nullptr;
      const double result = std::strtod(value.c_str(), &end);
      MT_CHECK_ARG(!value.empty() && *end == '\0' && result >= 0, "--variant: ", name,
                   ": expected a number of at least 0, got '", value, "'");
      return result;
    };
    if (name == "ring") {
      o.ring = value;
    } else if (name == "inner") {
      o.inner = value;
    } else if (name == "columns") {
      o.columns = value;
    } else if (name == "gradient-transport") {
      o.gradient_transport = value;
    } else if (name == "transfers") {
      o.transfers = value;
    } else if (name == "inner-gb-per-s") {
      o.inner_gb_per_s = rate();
    } else if (name == "outer-gb-per-s") {
      o.outer_gb_per_s = rate();
    } else if (name == "ring-stride") {
      o.ring_stride = number();
    } else if (name == "prefetch-steps") {
      o.prefetch_steps = number();
    } else if (name == "launch-shards") {
      o.launch_shards = number();
    } else if (name == "sm-margin") {
      o.sm_margin = number();
    } else {
      throw InvalidArgument(
          concat("--variant: expected ring, inner, columns, gradient-transport, transfers, "
                 "inner-gb-per-s, outer-gb-per-s, ring-stride, "
                 "prefetch-steps, launch-shards or sm-margin, got '",
                 name, "' in '", variant, "'"));
    }
  }
  return o;
}

template <typename Value, size_t kCount>
Value parse(const char* flag, const std::string& text, const Word<Value> (&words)[kCount]) {
  const auto value = value_of(words, text);
  MT_CHECK_ARG(value, flag, ": expected ", listed(words, ", ", " or "), ", got '", text, "'");
  return *value;
}

attention::RingOptions ring_options(const Options& o, const topology::Topology& topology) {
  attention::RingOptions ring;
  ring.columns = parse("--columns", o.columns, attention::kColumnWords);
  ring.gradient_transport =
      parse("--gradient-transport", o.gradient_transport, attention::kGradientTransportWords);
  ring.transfers = parse("--transfers", o.transfers, attention::kTransferWords);
  ring.layout.kind = layout::parse_layout_kind(o.layout);
  ring.layout.stripe = o.stripe;
  ring.topology = topology;
  ring.ring = o.ring.empty() ? ring::RingKind::kHierarchical : ring::parse_ring_kind(o.ring);
  ring.inner = ring::parse_inner_kind(o.inner);
  ring.ring_stride = ring.ring == ring::RingKind::kFlat ? o.ring_stride : 1;
  ring.prefetch_steps = o.prefetch_steps;
  ring.launch_shards = o.launch_shards;
  ring.sm_margin = o.sm_margin;
  ring.deterministic = !o.any_order;
  return ring;
}

}  // namespace

/// This process as one rank of the job that a launcher started. The meeting lasts as long: it sees a rank die while the others wait for
/// a GPU that waits for that rank.
struct Job {
  std::unique_ptr<Meeting> meeting;
  std::unique_ptr<comm::Transport> transport;
};

Job join_job(const topology::LaunchEnvironment& launch, bool on_gpu) {
  Job job;
#ifdef MT_WITH_CUDA
  if (on_gpu)
    c10::impl::VirtualGuardImpl(at::kCUDA).setDevice(
        {at::kCUDA, static_cast<c10::DeviceIndex>(launch.local_rank)});
#endif
  if (launch.world_size == 1) {
    job.transport = comm::make_single();
    return job;
  }
  const topology::Rendezvous rendezvous = topology::find_rendezvous(launch);
  comm::C10dOptions options;
  options.rank = launch.rank;
  options.size = launch.world_size;
  options.master_addr = rendezvous.one_host ? "127.0.0.1" : rendezvous.address;
  if (on_gpu) options.backend = "nccl";
  MeetingOptions meeting;
  meeting.rendezvous = rendezvous;
  meeting.rank = launch.rank;
  meeting.size = launch.world_size;
  meeting.identity = "bench ring";
  meeting.on_stop = [] { ::_exit(0); };
  meeting.on_failure = [](const std::string& cause) {
    std::fprintf(stderr, "mtraining: error: %s\n", cause.c_str());
    ::_exit(1);
  };
  job.meeting = std::make_unique<Meeting>(meeting);
  options.share_port = [&](int port) { return job.meeting->share_port(port); };
  job.transport = comm::make_c10d(options);
  return job;
}

int bench_ring(int argc, char** argv) {
  CLI::App app(
      "One attention layer over ranks that are threads of this process, or processes of a job, a "
      "JSON line a ring");
  Options o;
  declare(app, o);
  if (!parse_options(app, "bench ring", argc, argv)) return 0;
  MT_CHECK_ARG(o.device == "cpu" || o.device == "cuda", "--device: expected cpu or cuda, got '",
               o.device, "'");
  const bool in_job = !o.topology.empty();
  MT_CHECK_ARG(
      !in_job || (app.count("--virtual") == 0 && !o.alone),
      "bench ring: expected --topology (processes) or --virtual, --alone (threads), got both");
  const topology::Topology topology =
      topology::parse_topology(in_job ? o.topology : o.virtual_ranks);
  const bool on_gpu = o.device == "cuda";
  const auto check_rates = [&](const Options& row) {
    MT_CHECK_ARG(row.inner_gb_per_s >= 0 && row.outer_gb_per_s >= 0,
                 "--inner-gb-per-s, --outer-gb-per-s: expected at least 0, got ",
                 row.inner_gb_per_s, " and ", row.outer_gb_per_s);
    MT_CHECK_ARG((on_gpu && !in_job && !o.alone) || row.inner_gb_per_s + row.outer_gb_per_s == 0,
                 "--inner-gb-per-s, --outer-gb-per-s: for ranks that share one GPU (--device cuda "
                 "--virtual)");
  };
  check_rates(o);
  if (!o.ring.empty()) ring::parse_ring_kind(o.ring);
  ring_options(o, topology);
  for (const std::string& variant : o.variants) {
    const Options row = changed(o, variant);
    check_rates(row);
    ring_options(row, topology);
  }
  const int chosen = static_cast<int>(app.count("--p") + app.count("--density") +
                                      app.count("--pattern") + app.count("--shape"));
  MT_CHECK_ARG(chosen <= 1,
               "bench ring: expected one of --p, --density, --pattern and --shape, got ", chosen);
  std::optional<sim::OffsetPattern> file;
  if (!o.pattern.empty()) file = sim::read_pattern_file(o.pattern);
  bench::RingBenchOptions options;
  options.sizes = {
      .seq_len = o.seq_len.value_or(file ? file->seq_len : 8192),
      .num_q_heads = o.heads.value_or(file ? static_cast<int64_t>(file->heads.size()) : 4),
      .num_kv_heads = o.kv_heads,
      .head_dim = o.head_dim,
      .dtype = bench::parse_dtype(o.dtype)};
  bench::check(options.sizes);
  std::optional<bench::AttentionCase> given;
  if (file) given = bench::file_case(options.sizes, o.pattern);
  if (!o.shape.empty()) given = bench::shape_case(options.sizes, o.shape);
  if (o.density) given = bench::density_case(options.sizes, *o.density);
  options.given = given ? &*given : nullptr;
  options.place.on_gpu = on_gpu;
  options.place.alone = o.alone;
  Job job;
  if (in_job) {
    const topology::LaunchEnvironment launch = topology::read_launch_environment();
    MT_CHECK_ARG(launch.world_size == topology.cp_size(), "--topology: expected ",
                 topology::to_string(topology), " = ", topology.cp_size(),
                 " processes, got a job of ", launch.world_size,
                 " (start them with torchrun --no-python --nproc-per-node ", topology.cp_size(),
                 ")");
    job = join_job(launch, on_gpu);
    options.place.job = job.transport.get();
  }
  options.p = o.p;
  options.repeats = o.repeats;
  options.warm_up = o.warm_up;
  options.breakdown = o.breakdown || o.timeline;
  options.whole_layer = o.layer;
  options.timeline = o.timeline;
  options.seed = static_cast<uint64_t>(o.seed);
  std::vector<Options> rows;
  for (const std::string& variant : o.variants) rows.push_back(changed(o, variant));
  if (rows.empty()) {
    for (const char* ring : {"flat", "hierarchical"}) {
      if (!o.ring.empty() && o.ring != ring) continue;
      rows.push_back(o);
      rows.back().ring = ring;
    }
  }
  const bench::Provenance from = bench::provenance();
  for (const Options& row : rows) {
    options.ring = ring_options(row, topology);
    options.place.inner_bytes_per_s = row.inner_gb_per_s * 1e9;
    options.place.outer_bytes_per_s = row.outer_gb_per_s * 1e9;
    for (const std::string& line : bench::bench_ring(options, from))
      std::printf("%s\n", line.c_str());
    std::fflush(stdout);
  }
  if (job.meeting) job.meeting->end();
  return 0;
}

}  // namespace mtraining::cli
