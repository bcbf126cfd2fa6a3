#include "mtraining/attention/ring_case.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <mutex>

#include "mtraining/attention/tensors.h"
#include "mtraining/base/check.h"
#include "mtraining/base/parallel.h"
#include "mtraining/testing/generator.h"
#include "mtraining/testing/plain.h"
#include "mtraining/testing/random.h"
#include "mtraining/testing/rounding.h"
#include "mtraining/testing/shards.h"

namespace mtraining::attention::testing {
namespace {

using mtraining::testing::Random;

std::vector<int32_t> chosen(Random& random, int64_t count, double share) {
  std::vector<int32_t> values;
  for (int64_t i = 0; i < count; ++i) {
    if (random.uniform() < share) values.push_back(static_cast<int32_t>(i));
  }
  return values;
}

std::vector<double> scaled_by_block(std::vector<double> values, int64_t batch, int64_t seq_len,
                                    double scale) {
  const int64_t width = std::ssize(values) / (batch * seq_len);
  for (int64_t i = 0; i < std::ssize(values); ++i) {
    const int64_t position = i / width % seq_len;
    values[i] *= 1 + scale * static_cast<double>(position / 64 % 7);
  }
  return values;
}

at::Tensor rows_tensor(const std::vector<double>& values, int64_t batch, int64_t seq_len,
                       int64_t heads, int64_t head_dim, const std::vector<int64_t>& positions,
                       at::ScalarType dtype) {
  const std::vector<double> rows =
      mtraining::testing::take_rows(values, batch, seq_len, positions, std::nan(""));
  return at::from_blob(const_cast<double*>(rows.data()),
                       {batch, std::ssize(positions), heads, head_dim}, at::kDouble)
      .to(dtype, false, true);
}

/// Half of the distance from the truth. Launches are merged by a stored lse, and backward has P from it: its rounding, a share
/// |lse| * 2^-24 of a weight, meets the rounding of a score, as large, that plain has too. So gradients in float32 and float64
/// may be off by twice what the comparator allows.
std::vector<double> halved(const std::vector<double>& got, const std::vector<double>& truth) {
  std::vector<double> result(got.size());
  for (size_t i = 0; i < got.size(); ++i) {
    result[i] = std::isfinite(got[i]) ? truth[i] + (got[i] - truth[i]) / 2 : got[i];
  }
  return result;
}

std::vector<double> doubles(const at::Tensor& tensor) {
  const at::Tensor values = tensor.cpu().to(at::kDouble).contiguous();
  const double* data = values.const_data_ptr<double>();
  return {data, data + values.numel()};
}

}  // namespace

std::string to_string(const ProblemOptions& o) {
  return concat("B", o.batch, " N", o.seq_len, " H", o.num_q_heads, "/", o.num_kv_heads, " D",
                o.head_dim, " precision ", static_cast<int>(o.precision), " documents ",
                static_cast<int>(o.documents), " choice ", static_cast<int>(o.choice));
}

std::string to_string(const RingOptions& o) {
  return concat(topology::to_string(o.topology), " ", layout::to_string(o.layout.kind), " ",
                o.layout.stripe, o.ring == ring::RingKind::kFlat ? " flat" : " hierarchical",
                o.inner == ring::InnerKind::kGather ? " gather" : " ring", " stride ",
                o.ring_stride, " prefetch ", o.prefetch_steps, " shards ", o.launch_shards,
                o.columns == ColumnMode::kOnce ? " once " : " per_step ",
                o.max_column_rows_per_rank,
                o.gradient_transport == GradientTransport::kFloat32 ? "" : " bf16 gradients");
}

RingProblem::RingProblem(const ProblemOptions& options) : options_(options) {
  const auto& o = options_;
  const mtraining::testing::Qkv qkv = mtraining::testing::make_qkv({.batch = o.batch,
                                                                    .seq_len = o.seq_len,
                                                                    .num_q_heads = o.num_q_heads,
                                                                    .num_kv_heads = o.num_kv_heads,
                                                                    .head_dim = o.head_dim,
                                                                    .seed = o.seed});
  const auto rounded = [&](const std::vector<float>& values) {
    return mtraining::testing::round_to(o.precision, std::span<const float>(values));
  };
  inputs_.batch = o.batch;
  inputs_.num_queries = inputs_.num_keys = o.seq_len;
  inputs_.num_q_heads = o.num_q_heads;
  inputs_.num_kv_heads = o.num_kv_heads;
  inputs_.head_dim = o.head_dim;
  inputs_.q = rounded(qkv.q);
  inputs_.k = mtraining::testing::round_to(
      o.precision, std::span<const double>(
                       scaled_by_block(rounded(qkv.k), o.batch, o.seq_len, o.scale_by_block)));
  inputs_.v = mtraining::testing::round_to(
      o.precision, std::span<const double>(
                       scaled_by_block(rounded(qkv.v), o.batch, o.seq_len, o.scale_by_block)));
  inputs_.dout = rounded(qkv.dout);

  Random random(o.seed + 17);
  const int64_t blocks = (o.seq_len + 63) / 64;
  for (int64_t row = 0; row < o.batch * o.num_q_heads; ++row) {
    const int64_t head = row % o.num_q_heads;
    std::vector<int32_t> diagonals, columns;
    switch (o.choice) {
      case Choice::kDense:
        diagonals = chosen(random, blocks, 1);
        break;
      case Choice::kSparse:
        diagonals = chosen(random, blocks, 0.15 + 0.5 * random.uniform());
        if (head != 1) columns = chosen(random, o.seq_len, 0.02 + 0.1 * random.uniform());
        if (head != 2) diagonals.push_back(0);
        break;
      case Choice::kFew:
        diagonals = {0};
        columns = chosen(random, o.seq_len, 0.01);
        break;
      case Choice::kEmpty:
        if (head != 0) diagonals = {0};
        break;
      case Choice::kBlocks:
        break;
      case Choice::kMany:
        diagonals = {0};
        columns = chosen(random, o.seq_len, 0.7);
        break;
    }
    std::sort(diagonals.begin(), diagonals.end());
    diagonals.erase(std::unique(diagonals.begin(), diagonals.end()), diagonals.end());
    diagonals_.push_back(diagonals);
    columns_.push_back(columns);
  }
  index_ = index::make_index(static_cast<int>(o.batch), static_cast<int>(o.num_q_heads), o.seq_len,
                             diagonals_, columns_);
  documents_ = mtraining::testing::make_document_starts(o.documents, o.batch, o.seq_len);
  if (o.choice != Choice::kBlocks) return;
  index::BlockRows rows{{0}, {}};
  for (int64_t q = 0; q < o.batch * o.num_q_heads * blocks; ++q) {
    const double share = random.uniform() < 0.2 ? 0 : 0.4;  // some query blocks have nothing
    for (int64_t k = 0; k < blocks; ++k) {
      blocks_.push_back(k <= q % blocks && random.uniform() < share);
      if (blocks_.back() != 0) rows.key_blocks.push_back(static_cast<int32_t>(k));
    }
    rows.row_begin.push_back(std::ssize(rows.key_blocks));
  }
  index_ = index::make_block_index(static_cast<int>(o.batch), static_cast<int>(o.num_q_heads),
                                   o.seq_len, std::move(rows));
}

mtraining::testing::Mask RingProblem::mask() const {
  if (!blocks_.empty()) {
    const int64_t blocks = (options_.seq_len + 63) / 64;
    return [this, blocks](int64_t b, int64_t h, int64_t i, int64_t j) {
      const int64_t start = documents_.empty() ? 0 : documents_[b * options_.seq_len + i];
      const int64_t row = (b * options_.num_q_heads + h) * blocks + i / 64;
      return start <= j && j <= i && blocks_[row * blocks + j / 64] != 0;
    };
  }
  return mtraining::testing::vertical_slash_mask(diagonals_, columns_, options_.num_q_heads,
                                                 documents_, options_.seq_len);
}

const Solution& RingProblem::truth() const {
  if (!truth_) truth_ = std::make_unique<Solution>(mtraining::testing::solve(inputs_, mask()));
  return *truth_;
}
const Solution& RingProblem::plain() const {
  if (!plain_)
    plain_ = std::make_unique<Solution>(
        mtraining::testing::solve_plain(inputs_, mask(), options_.precision));
  return *plain_;
}

at::ScalarType RingProblem::dtype() const {
  switch (options_.precision) {
    case Precision::kFloat64:
      return at::kDouble;
    case Precision::kFloat32:
      return at::kFloat;
    case Precision::kBFloat16:
      return at::kBFloat16;
    case Precision::kFloat16:
      return at::kHalf;
  }
  return at::kFloat;
}

RankInputs rank_inputs(const RingProblem& problem, const layout::Layout& layout, int cp_rank) {
  const ProblemOptions& o = problem.options();
  const std::vector<int64_t> positions = layout.positions(cp_rank);
  const auto take = [&](const std::vector<double>& values, int64_t heads) {
    return rows_tensor(values, o.batch, o.seq_len, heads, o.head_dim, positions, problem.dtype());
  };
  RankInputs inputs;
  inputs.q = take(problem.inputs().q, o.num_q_heads);
  inputs.k = take(problem.inputs().k, o.num_kv_heads);
  inputs.v = take(problem.inputs().v, o.num_kv_heads);
  inputs.dout = take(problem.inputs().dout, o.num_q_heads);
  if (!problem.documents().empty()) {
    inputs.document_starts = at::from_blob(const_cast<int32_t*>(problem.documents().data()),
                                           {o.batch, o.seq_len}, at::kInt)
                                 .clone();
  }
  return inputs;
}

void use_one_thread() {
  at::set_num_threads(1);
  set_num_threads(1);
}

RankInputs on_device(const RankInputs& inputs, at::Device device) {
  RankInputs moved = inputs;  // documents stay on the host
  for (at::Tensor* tensor : {&moved.q, &moved.k, &moved.v, &moved.dout})
    *tensor = tensor->to(device);
  return moved;
}

RankResult run_rank(RingContext& context, const RingProblem& problem) {
  return run_rank(context, problem, rank_inputs(problem, context.layout(), context.cp_rank()));
}

RankResult run_rank(RingContext& context, const RingProblem& problem, const RankInputs& in) {
  RankResult result;
  result.forward = ring_forward(context, in.q, in.k, in.v, problem.index(), 0, in.document_starts);
  result.backward =
      ring_backward(context, in.dout, in.q, in.k, in.v, result.forward.out, result.forward.lse,
                    problem.index(), 0, in.document_starts, result.forward.out_residual);
  return result;
}

Solution empty_solution(const RingProblem& problem) {
  Solution whole;
  const auto& in = problem.inputs();
  const double nan = std::nan("");
  whole.out.assign(in.q.size(), nan);
  whole.dq.assign(in.q.size(), nan);
  whole.dk.assign(in.k.size(), nan);
  whole.dv.assign(in.k.size(), nan);
  whole.lse.assign(static_cast<size_t>(in.batch * in.num_q_heads * in.num_queries), nan);
  return whole;
}

void put_rank(const RankResult& result, const RingProblem& problem, const layout::Layout& layout,
              int cp_rank, Solution& whole) {
  const ProblemOptions& o = problem.options();
  const std::vector<int64_t> positions = layout.positions(cp_rank);
  // One copy of each: what is asked of single rows of a GPU's memory waits for it, row by row.
  const at::Tensor out = result.forward.out.cpu(), lse = result.forward.lse.cpu(),
                   dq = result.backward.dq.cpu(), dk = result.backward.dk.cpu(),
                   dv = result.backward.dv.cpu();
  const auto put = [&](const at::Tensor& rows, int64_t batch, std::vector<double>& values) {
    mtraining::testing::put_rows(doubles(rows), batch, o.seq_len, positions, values);
  };
  put(out, o.batch, whole.out);
  put(lse, o.batch * o.num_q_heads, whole.lse);
  put(dq, o.batch, whole.dq);
  put(dk, o.batch, whole.dk);
  put(dv, o.batch, whole.dv);
  // Padding, which lies behind: empty rows, no gradients.
  const auto real = std::lower_bound(positions.begin(), positions.end(), o.seq_len);
  const int64_t first = real - positions.begin(), padding = positions.end() - real;
  for (const at::Tensor& rows : {out, dq, dk, dv}) {
    MT_ASSERT((rows.narrow(1, first, padding) == 0).all().item<bool>(), "rank ", cp_rank,
              " has a padded row that is not zero");
  }
  MT_ASSERT((lse.narrow(2, first, padding) == -std::numeric_limits<double>::infinity())
                .all()
                .item<bool>(),
            "rank ", cp_rank, " has a padded row with a finite lse");
}

Solution run_ring(const RingProblem& problem, const RingOptions& options, const Inspect& inspect) {
  Solution whole = empty_solution(problem);
  std::mutex mutex;
  comm::run_loopback(options.layout.cp_size, [&](comm::Transport& transport) {
    use_one_thread();
    RingContext context(options, transport);
    const RankInputs in = rank_inputs(problem, context.layout(), context.cp_rank());
    const RankResult result = run_rank(context, problem);
    if (inspect) inspect(context, in, result);
    std::unique_lock lock(mutex);
    put_rank(result, problem, context.layout(), context.cp_rank(), whole);
  });
  return whole;
}

RingOptions ring_options(int nodes, int ranks_per_node, layout::LayoutKind kind, int64_t stripe,
                         int64_t seq_len) {
  RingOptions options;
  options.topology = {.nodes = nodes, .ranks_per_node = ranks_per_node};
  options.layout = {
      .kind = kind, .seq_len = seq_len, .cp_size = nodes * ranks_per_node, .stripe = stripe};
  return options;
}

Comparison compare_with_truth(const Solution& got, const RingProblem& problem) {
  const Solution &truth = problem.truth(), &plain = problem.plain();
  const int64_t width = problem.options().head_dim;
  const Precision precision = problem.options().precision;
  const bool wide = precision == Precision::kFloat32 || precision == Precision::kFloat64;
  const auto gradient = [&](const std::vector<double>& a, const std::vector<double>& b) {
    return wide ? halved(a, b) : a;
  };
  Comparison result;
  const auto check = [&](const char* name, const std::vector<double>& a,
                         const std::vector<double>& b, const std::vector<double>& c) {
    const auto verdict = mtraining::testing::compare(name, a, b, c, width, precision);
    if (!verdict) result.fault += verdict.text + "\n";
    double& worst = std::strcmp(name, "out") == 0 ? result.worst_out : result.worst_gradient;
    worst = std::max(worst, verdict.worst);
  };
  check("out", got.out, truth.out, plain.out);
  check("dq", gradient(got.dq, truth.dq), truth.dq, plain.dq);
  check("dk", gradient(got.dk, truth.dk), truth.dk, plain.dk);
  check("dv", gradient(got.dv, truth.dv), truth.dv, plain.dv);
  const auto lse = mtraining::testing::compare_lse("lse", got.lse, truth.lse, plain.lse, precision);
  if (!lse) result.fault += lse.text + "\n";
  return result;
}

bool same_bits(const Solution& a, const Solution& b) {
  const auto same = [](const std::vector<double>& x, const std::vector<double>& y) {
    return x.size() == y.size() && std::memcmp(x.data(), y.data(), x.size() * sizeof(double)) == 0;
  };
  return same(a.out, b.out) && same(a.lse, b.lse) && same(a.dq, b.dq) && same(a.dk, b.dk) &&
         same(a.dv, b.dv);
}

double largest_difference(const Solution& a, const Solution& b) {
  double largest = 0;
  const auto add = [&](const std::vector<double>& x, const std::vector<double>& y) {
    for (size_t i = 0; i < x.size(); ++i) {
      if (x[i] == y[i]) continue;
      const double difference = std::abs(x[i] - y[i]) / std::max(1.0, std::abs(x[i]));
      largest = std::isfinite(difference) ? std::max(largest, difference)
                                          : std::numeric_limits<double>::infinity();
    }
  };
  add(a.out, b.out);
  add(a.lse, b.lse);
  add(a.dq, b.dq);
  add(a.dk, b.dk);
  add(a.dv, b.dv);
  return largest;
}

}  // namespace mtraining::attention::testing
