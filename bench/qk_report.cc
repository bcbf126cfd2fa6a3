#include "bench/qk_report.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <numeric>

#include "mtraining/base/check.h"
#include "mtraining/base/parallel.h"
#include "mtraining/checkpoint/safetensors.h"
#include "mtraining/comm/loopback.h"
#include "mtraining/pattern/observation.h"
#include "mtraining/sim/imbalance.h"

namespace mtraining::bench {
namespace {

constexpr size_t kFirst = 8;  // entries of a list that are shown

kernels::DType dtype_of(const checkpoint::SafetensorsFile& file,
                        const checkpoint::TensorSpec& spec) {
  switch (spec.type) {
    case checkpoint::StoredType::kF64:
      return kernels::DType::kFloat64;
    case checkpoint::StoredType::kF32:
      return kernels::DType::kFloat32;
    case checkpoint::StoredType::kBF16:
      return kernels::DType::kBFloat16;
    case checkpoint::StoredType::kF16:
      return kernels::DType::kFloat16;
    default:
      throw InvalidArgument(concat(file.path(), ": tensor ", spec.name,
                                   ": expected F64, F32, BF16 or F16, got ",
                                   checkpoint::to_string(spec)));
  }
}

const checkpoint::StoredTensor& tensor(const checkpoint::SafetensorsFile& file, const char* name,
                                       const char* form) {
  const checkpoint::StoredTensor* found = file.find(name);
  std::string names;
  for (const auto& t : file.tensors())
    names += concat(names.empty() ? "" : ", ", checkpoint::to_string(t.spec), " ", t.spec.name);
  MT_CHECK_ARG(found != nullptr, file.path(), ": expected a tensor ", name, " ", form, ", got ",
               names.empty() ? "none" : names.substr(0, 200));
  const std::vector<int64_t>& shape = found->spec.shape;
  MT_CHECK_ARG(shape.size() == 3 && shape[0] >= 1 && shape[1] >= 1 && shape[2] >= 1, file.path(),
               ": tensor ", name, ": expected ", form, ", got ",
               checkpoint::to_string(found->spec));
  return *found;
}

AlignedBytes copy(std::span<const std::byte> bytes) {
  AlignedBytes result(static_cast<int64_t>(bytes.size()));
  std::memcpy(result.data(), bytes.data(), bytes.size());
  return result;
}

/// [n, H, D] of a rank from [H, S, D]; padding rows are zero.
AlignedBytes shard(const AlignedBytes& all, int64_t heads, const AttentionSizes& sizes,
                   const layout::Layout& layout, int cp_rank) {
  const int64_t row = sizes.head_dim * kernels::size_of(sizes.dtype);
  AlignedBytes result(layout.tokens_per_rank() * heads * row);
  const std::vector<int64_t> positions = layout.positions(cp_rank);
  for (size_t i = 0; i < positions.size(); ++i) {
    if (positions[i] >= sizes.seq_len) continue;
    for (int64_t h = 0; h < heads; ++h) {
      std::memcpy(result.data() + (static_cast<int64_t>(i) * heads + h) * row,
                  all.data() + (h * sizes.seq_len + positions[i]) * row, static_cast<size_t>(row));
    }
  }
  return result;
}

/// One head of an index as an index of its own.
index::Index head_of(const index::Index& index, int head) {
  const auto list = [&](const index::Lists& lists) {
    const auto row = lists.row(index.row(0, head));
    return std::vector<std::vector<int32_t>>{{row.begin(), row.end()}};
  };
  return index::make_index(1, 1, index.seq_len, list(index.diagonals), list(index.columns));
}

Json imbalance_json(const index::Index& head, const topology::Topology& topology) {
  const ring::ScheduleOptions ring{.topology = topology, .ring = ring::RingKind::kFlat};
  Json json = Json::object();
  const auto add = [&](const std::string& name, layout::LayoutKind kind, int64_t stripe) {
    const layout::Layout layout(
        {.kind = kind, .seq_len = head.seq_len, .cp_size = topology.cp_size(), .stripe = stripe});
    const sim::Imbalance of = sim::measure(
        sim::step_loads(sim::count_pairs(head, layout), ring, sim::ColumnCost::kOnce), ring);
    json[name] = {{"worker", rounded(of.worker, 4)},
                  {"step", rounded(of.step, 4)},
                  {"lockstep", rounded(of.lockstep, 4)}};
  };
  add("block_striped 64", layout::LayoutKind::kBlockStriped, 64);
  add("block_striped 128", layout::LayoutKind::kBlockStriped, 128);
  add("zigzag", layout::LayoutKind::kZigzag, 64);
  add("contiguous", layout::LayoutKind::kContiguous, 64);
  return json;
}

/// What one rank finds of one (pooling, p); the same on every rank.
struct Found {
  index::Index index;
  std::vector<double> window;  // recall by head
  pattern::Recall recall;
};

Found find(const pattern::LocalAttention& local, const pattern::VerticalSlashOptions& options,
           comm::Communicator& group, uint64_t seed) {
  Found found;
  found.index = pattern::build_vertical_slash(local, options, group);
  const pattern::Observation window(
      local, pattern::window_positions(options, local.layout->seq_len()), group);
  const std::vector<int64_t> covered = window.covered(found.index);
  for (int64_t h = 0; h < local.num_q_heads; ++h) {
    const int64_t* first = &covered[h * window.num_rows()];
    const double sum =
        static_cast<double>(std::accumulate(first, first + window.num_rows(), int64_t{0}));
    found.window.push_back(std::min(1.0, sum / (static_cast<double>(kernels::kMassOne) *
                                                static_cast<double>(window.num_rows()))));
  }
  found.recall = pattern::measure_recall(local, options, found.index, group, seed);
  return found;
}

}  // namespace

QueryKeys read_query_keys(const std::filesystem::path& path) {
  const checkpoint::SafetensorsFile file(path);
  const checkpoint::StoredTensor& q = tensor(file, "q", "[H, S, D]");
  const checkpoint::StoredTensor& k = tensor(file, "k", "[Hk, S, D]");
  MT_CHECK_ARG(q.spec.type == k.spec.type, file.path(), ": expected q and k of one dtype, got ",
               checkpoint::to_string(q.spec), " and ", checkpoint::to_string(k.spec));
  const std::vector<int64_t>&qs = q.spec.shape, &ks = k.spec.shape;
  MT_CHECK_ARG(
      qs[1] == ks[1] && qs[2] == ks[2] && qs[0] % ks[0] == 0, file.path(),
      ": expected q [H, S, D] and k [Hk, S, D] with the same S and D and Hk a divisor of H, got ",
      checkpoint::to_string(q.spec), " and ", checkpoint::to_string(k.spec));
  QueryKeys result;
  result.sizes = {.seq_len = qs[1],
                  .num_q_heads = qs[0],
                  .num_kv_heads = ks[0],
                  .head_dim = qs[2],
                  .dtype = dtype_of(file, q.spec)};
  check(result.sizes);
  result.q = copy(file.data(q));
  result.k = copy(file.data(k));
  return result;
}

std::vector<Json> qk_report(const QueryKeys& given, const QkReportOptions& options) {
  const AttentionSizes& sizes = given.sizes;
  MT_CHECK_ARG(options.ranks >= 1 && options.ranks <= 256,
               "--ranks: expected a number from 1 to 256, got ", options.ranks);
  MT_CHECK_ARG(options.balance.cp_size() <= 256, "--virtual: expected at most 256 ranks, got ",
               topology::to_string(options.balance));
  for (const double p : options.p) {
    MT_CHECK_ARG(p >= 0 && p <= 1, "--p: expected numbers in [0, 1], got ", p);
  }
  pattern::check(options.pattern);
  const layout::Layout layout({.kind = options.layout,
                               .seq_len = sizes.seq_len,
                               .cp_size = options.ranks,
                               .stripe = options.stripe});
  MT_CHECK_SUPPORTED(layout.has_blocks(),
                     "--layout striped: a sparse pattern needs blocks of 64 consecutive tokens");
  std::vector<pattern::VerticalSlashOptions> choices;
  for (const pattern::SlashPooling pooling : options.poolings) {
    for (const double p : options.p) {
      pattern::VerticalSlashOptions choice = options.pattern;
      choice.slash_pooling = pooling;
      choice.p_vertical = choice.p_slash = p;
      choices.push_back(choice);
    }
  }

  std::vector<Found> found;
  const int threads = options.ranks == 1 ? num_threads() : 1;
  comm::run_loopback(options.ranks, [&](comm::Transport& transport) {
    const ThreadCountScope scope(threads);
    std::vector<int> members(static_cast<size_t>(options.ranks));
    std::iota(members.begin(), members.end(), 0);
    const auto group = transport.open("index", members);
    const int64_t n = layout.tokens_per_rank();
    const AlignedBytes q = shard(given.q, sizes.num_q_heads, sizes, layout, transport.rank());
    const AlignedBytes k = shard(given.k, sizes.num_kv_heads, sizes, layout, transport.rank());
    pattern::LocalAttention local;
    local.layout = &layout;
    local.cp_rank = transport.rank();
    local.batch = 1;
    local.num_q_heads = sizes.num_q_heads;
    local.num_kv_heads = sizes.num_kv_heads;
    local.head_dim = sizes.head_dim;
    local.dtype = sizes.dtype;
    local.softmax_scale = 1 / std::sqrt(static_cast<double>(sizes.head_dim));
    const int64_t q_row = sizes.num_q_heads * sizes.head_dim;
    const int64_t k_row = sizes.num_kv_heads * sizes.head_dim;
    local.q = {q.data(), n * q_row, q_row, sizes.head_dim};
    local.k = {k.data(), n * k_row, k_row, sizes.head_dim};
    for (const pattern::VerticalSlashOptions& choice : choices) {
      Found mine = find(local, choice, *group, options.recall_seed);
      if (transport.rank() == 0) found.push_back(std::move(mine));
    }
  });

  std::vector<Json> rows;
  for (size_t i = 0; i < choices.size(); ++i) {
    for (int h = 0; h < static_cast<int>(sizes.num_q_heads); ++h) {
      const index::Index head = head_of(found[i].index, h);
      const auto diagonals = head.diagonals.row(0), columns = head.columns.row(0);
      const auto first = [](std::span<const int32_t> list) {
        return Json(std::vector<int32_t>(
            list.begin(), list.begin() + static_cast<int64_t>(std::min(kFirst, list.size()))));
      };
      rows.push_back({{"head", h},
                      {"slash_pooling", word_of(pattern::kPoolingWords, choices[i].slash_pooling)},
                      {"p", choices[i].p_slash},
                      {"columns", columns.size()},
                      {"diagonals", diagonals.size()},
                      {"density", rounded(index::density(head), 5)},
                      {"window_recall", rounded(found[i].window[h], 4)},
                      {"first_diagonals", first(diagonals)},
                      {"first_columns", first(columns)},
                      {"recall", rounded(found[i].recall.by_head[h], 4)},
                      {"seq_len", sizes.seq_len},
                      {"ranks", options.ranks},
                      {"balance_ranks", topology::to_string(options.balance)},
                      {"imbalance", imbalance_json(head, options.balance)}});
    }
  }
  return rows;
}

}  // namespace mtraining::bench
