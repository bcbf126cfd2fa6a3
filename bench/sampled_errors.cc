#include "bench/sampled_errors.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>

#include "mtraining/base/check.h"
#include "mtraining/testing/random.h"

namespace mtraining::bench {
namespace {

constexpr int64_t kBlock = 64;

/// Keys that a query computes, ascending, in the device's memory.
at::Tensor keys_of(const AskedAttention& asked, int64_t head, int64_t position) {
  std::vector<uint8_t> needed(static_cast<size_t>(position + 1), 0);
  for (const int32_t diagonal : asked.index->diagonals.row(head)) {
    const int64_t block = position / kBlock - diagonal;
    if (block < 0) continue;
    for (int64_t j = block * kBlock; j < std::min((block + 1) * kBlock, position + 1); ++j)
      needed[j] = 1;
  }
  for (const int32_t column : asked.index->columns.row(head))
    if (column <= position) needed[column] = 1;
  std::vector<int64_t> keys;
  for (int64_t j = 0; j <= position; ++j)
    if (needed[j] != 0) keys.push_back(j);
  return at::tensor(keys, at::kLong).to(asked.q.device());
}

/// Queries that compute a key.
at::Tensor queries_of(const AskedAttention& asked, int64_t head, int64_t key) {
  const auto diagonals = asked.index->diagonals.row(head);
  const auto columns = asked.index->columns.row(head);
  const bool always = std::find(columns.begin(), columns.end(), key) != columns.end();
  std::vector<int64_t> queries;
  for (size_t t = 0; t < asked.positions.size(); ++t) {
    const int64_t position = asked.positions[t];
    if (position < key || position >= asked.k.size(0)) continue;
    const auto diagonal = static_cast<int32_t>(position / kBlock - key / kBlock);
    if (always || std::binary_search(diagonals.begin(), diagonals.end(), diagonal))
      queries.push_back(static_cast<int64_t>(t));
  }
  return at::tensor(queries, at::kLong).to(asked.q.device());
}

at::Tensor rows_of(const at::Tensor& tensor, int64_t head, const at::Tensor& rows) {
  return tensor.select(1, head).index_select(0, rows).to(at::kDouble);
}

/// The larger of two, NaN where one is: what is no number must show.
double worse(double one, double other) { return std::isnan(one) || one > other ? one : other; }

/// Sums of squares of differences and of expected values.
struct Compared {
  double difference = 0, size = 0, largest_row = 0;
  void add(const at::Tensor& got, const at::Tensor& expected) {
    const double row_difference = (got.to(at::kDouble) - expected).norm().item<double>();
    const double row_size = expected.norm().item<double>();
    difference += row_difference * row_difference;
    size += row_size * row_size;
    largest_row = worse(largest_row, row_difference / std::max(row_size, 1e-30));
  }
  double relative() const { return std::sqrt(difference / std::max(size, 1e-300)); }
};

}  // namespace

Json sampled_errors(const AskedAttention& asked, const ComputedAttention& computed, int rows,
                    uint64_t seed) {
  MT_CHECK_ARG(asked.index->blocks.row_begin.empty(),
               "sampled_errors: expected an index of diagonals and columns, got one of blocks");
  testing::Random random(seed);
  const int64_t heads = asked.q.size(1), kv_heads = asked.k.size(1), group = heads / kv_heads;
  const int64_t seq_len = asked.k.size(0), count = asked.q.size(0);
  Compared out, dq, dk, dv;
  double lse_error = 0;
  for (int sample = 0; sample < rows; ++sample) {
    const int64_t head = random.below(heads), row = random.below(count);
    const int64_t position = asked.positions[row];
    if (position >= seq_len) continue;
    const at::Tensor needed = keys_of(asked, head, position);
    if (needed.numel() == 0) continue;
    const at::Tensor k = rows_of(asked.k, head / group, needed);
    const at::Tensor v = rows_of(asked.v, head / group, needed);
    const at::Tensor scores =
        k.mv(asked.q.select(1, head).select(0, row).to(at::kDouble)) * asked.softmax_scale;
    const at::Tensor weights = scores.softmax(0);
    const at::Tensor expected = v.t().mv(weights);
    out.add(computed.out.select(1, head).select(0, row), expected);
    lse_error =
        worse(lse_error, std::abs(scores.logsumexp(0).item<double>() -
                                  computed.lse.select(0, head).select(0, row).item().toDouble()));
    if (!computed.dq.defined()) continue;
    const at::Tensor dout = asked.dout.select(1, head).select(0, row).to(at::kDouble);
    const at::Tensor ds = weights * (v.mv(dout) - dout.dot(expected)) * asked.softmax_scale;
    dq.add(computed.dq.select(1, head).select(0, row), k.t().mv(ds));
  }
  for (int sample = 0; computed.dk.defined() && sample < (rows + 3) / 4; ++sample) {
    const int64_t kv_head = random.below(kv_heads), key = random.below(seq_len);
    const at::Tensor k = asked.k.select(1, kv_head).select(0, key).to(at::kDouble);
    const at::Tensor v = asked.v.select(1, kv_head).select(0, key).to(at::kDouble);
    at::Tensor dk_expected = at::zeros_like(k), dv_expected = at::zeros_like(v);
    for (int64_t head = kv_head * group; head < (kv_head + 1) * group; ++head) {
      const at::Tensor needed = queries_of(asked, head, key);
      if (needed.numel() == 0) continue;
      const at::Tensor q = rows_of(asked.q, head, needed);
      const at::Tensor dout = rows_of(asked.dout, head, needed);
      const at::Tensor lse = computed.lse.select(0, head).index_select(0, needed).to(at::kDouble);
      const at::Tensor weights = (q.mv(k) * asked.softmax_scale - lse).exp();
      const at::Tensor delta = (dout * rows_of(computed.out, head, needed)).sum(1);
      dv_expected += dout.t().mv(weights);
      dk_expected += q.t().mv(weights * (dout.mv(v) - delta) * asked.softmax_scale);
    }
    dk.add(computed.dk.select(1, kv_head).select(0, key), dk_expected);
    dv.add(computed.dv.select(1, kv_head).select(0, key), dv_expected);
  }
  const auto digits = [](double value) { return std::stod(concat(value)); };  // six of them
  Json keys = {{"out_error", digits(out.largest_row)}, {"lse_error", digits(lse_error)}};
  if (computed.dq.defined()) keys["dq_error"] = digits(dq.relative());
  if (computed.dk.defined()) {
    keys["dk_error"] = digits(dk.relative());
    keys["dv_error"] = digits(dv.relative());
  }
  return keys;
}

}  // namespace mtraining::bench
