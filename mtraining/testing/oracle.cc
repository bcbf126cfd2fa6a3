#include "mtraining/testing/oracle.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <tuple>

#include "mtraining/base/check.h"
#include "mtraining/testing/parallel.h"

namespace mtraining::testing {
namespace {

double dot(const double* a, const double* b, int64_t n) {
  double sum[4] = {0, 0, 0, 0};
  int64_t d = 0;
  for (; d + 4 <= n; d += 4)
    for (int lane = 0; lane < 4; ++lane) sum[lane] += a[d + lane] * b[d + lane];
  for (; d < n; ++d) sum[0] += a[d] * b[d];
  return (sum[0] + sum[1]) + (sum[2] + sum[3]);
}

void add(double* to, double factor, const double* from, int64_t n) {
  for (int64_t d = 0; d < n; ++d) to[d] += factor * from[d];
}

}  // namespace

Solution solve(const Problem& problem, const Mask& mask) {
  const auto [batch, num_queries, num_keys, heads, kv_heads, dim] =
      std::tuple(problem.batch, problem.num_queries, problem.num_keys, problem.num_q_heads,
                 problem.num_kv_heads, problem.head_dim);
  check(problem);
  const int64_t group = heads / kv_heads;
  const double scale =
      problem.softmax_scale != 0 ? problem.softmax_scale : 1 / std::sqrt(static_cast<double>(dim));
  const bool gradients = !problem.dout.empty();

  Solution solution;
  solution.out.assign(problem.q.size(), 0);
  solution.lse.assign(batch * heads * num_queries, -std::numeric_limits<double>::infinity());
  if (gradients) {
    solution.dq.assign(problem.q.size(), 0);
    solution.dk.assign(problem.k.size(), 0);
    solution.dv.assign(problem.v.size(), 0);
  }

  // One head at a time: probabilities and score gradients of all its pairs.
  std::vector<uint8_t> visible(num_queries * num_keys);
  std::vector<double> probability(num_queries * num_keys),
      score_gradient(gradients ? num_queries * num_keys : 0);
  for (int64_t b = 0; b < batch; ++b) {
    for (int64_t h = 0; h < heads; ++h) {
      const int64_t kv = h / group;
      const auto query_at = [&](int64_t i) { return ((b * num_queries + i) * heads + h) * dim; };
      const auto key_at = [&](int64_t j) { return ((b * num_keys + j) * kv_heads + kv) * dim; };

      parallel_for(num_queries, [&](int64_t i) {
        uint8_t* sees = &visible[i * num_keys];
        double* p = &probability[i * num_keys];
        double top = -std::numeric_limits<double>::infinity();
        bool empty = true;
        for (int64_t j = 0; j < num_keys; ++j) {
          sees[j] = mask(b, h, i, j) ? 1 : 0;
          if (sees[j] == 0) continue;
          empty = false;
          p[j] = scale * dot(&problem.q[query_at(i)], &problem.k[key_at(j)], dim);
          top = std::max(top, p[j]);
        }
        if (empty) return;
        double sum = 0;
        for (int64_t j = 0; j < num_keys; ++j) {
          if (sees[j] == 0) continue;
          p[j] = std::exp(p[j] - top);
          sum += p[j];
        }
        solution.lse[(b * heads + h) * num_queries + i] = top + std::log(sum);
        for (int64_t j = 0; j < num_keys; ++j) {
          if (sees[j] == 0) continue;
          p[j] /= sum;
          add(&solution.out[query_at(i)], p[j], &problem.v[key_at(j)], dim);
        }
        if (!gradients) return;
        double* ds = &score_gradient[i * num_keys];
        double delta =
            0;  // as sum of p * dp, so that a row with a single key has a gradient of exactly 0
        for (int64_t j = 0; j < num_keys; ++j) {
          if (sees[j] == 0) continue;
          ds[j] = dot(&problem.dout[query_at(i)], &problem.v[key_at(j)], dim);
          delta += p[j] * ds[j];
        }
        for (int64_t j = 0; j < num_keys; ++j) {
          if (sees[j] == 0) continue;
          ds[j] = p[j] * (ds[j] - delta) * scale;
          add(&solution.dq[query_at(i)], ds[j], &problem.k[key_at(j)], dim);
        }
      });

      if (!gradients) continue;
      parallel_for(num_keys, [&](int64_t j) {
        for (int64_t i = 0; i < num_queries; ++i) {
          if (visible[i * num_keys + j] == 0) continue;
          add(&solution.dk[key_at(j)], score_gradient[i * num_keys + j], &problem.q[query_at(i)],
              dim);
          add(&solution.dv[key_at(j)], probability[i * num_keys + j], &problem.dout[query_at(i)],
              dim);
        }
      });
    }
  }
  return solution;
}

void check(const Problem& problem) {
  const auto expect = [](const char* name, size_t got, int64_t want) {
    MT_CHECK_ARG(static_cast<int64_t>(got) == want, name, ": expected ", want, " values, got ",
                 got);
  };
  MT_CHECK_ARG(problem.batch >= 1 && problem.num_queries >= 1 && problem.num_keys >= 1 &&
                   problem.head_dim >= 1,
               "problem: expected sizes of at least 1, got batch ", problem.batch, ", queries ",
               problem.num_queries, ", keys ", problem.num_keys, ", head_dim ", problem.head_dim);
  MT_CHECK_ARG(problem.num_kv_heads >= 1 && problem.num_q_heads % problem.num_kv_heads == 0,
               "problem: expected query heads to be a multiple of kv heads, got ",
               problem.num_q_heads, " and ", problem.num_kv_heads);
  const int64_t queries =
      problem.batch * problem.num_queries * problem.num_q_heads * problem.head_dim;
  const int64_t keys = problem.batch * problem.num_keys * problem.num_kv_heads * problem.head_dim;
  expect("q", problem.q.size(), queries);
  expect("k", problem.k.size(), keys);
  expect("v", problem.v.size(), keys);
  if (!problem.dout.empty()) expect("dout", problem.dout.size(), queries);
}

Mask vertical_slash_mask(const std::vector<std::vector<int32_t>>& diagonals,
                         const std::vector<std::vector<int32_t>>& columns, int64_t num_q_heads,
                         const std::vector<int32_t>& document_starts, int64_t seq_len) {
  MT_CHECK_ARG(diagonals.size() == columns.size(),
               "vertical_slash_mask: expected as many rows of diagonals as of columns, got ",
               diagonals.size(), " and ", columns.size());
  struct Chosen {
    std::vector<std::vector<bool>> diagonal, column;
  };
  auto chosen = std::make_shared<Chosen>();
  for (size_t row = 0; row < diagonals.size(); ++row) {
    chosen->diagonal.emplace_back((seq_len + 63) / 64, false);
    chosen->column.emplace_back(seq_len, false);
    for (int32_t c : diagonals[row]) chosen->diagonal[row].at(c) = true;
    for (int32_t j : columns[row]) chosen->column[row].at(j) = true;
  }
  return [=, starts = document_starts](int64_t b, int64_t h, int64_t i, int64_t j) {
    if (j > i || (!starts.empty() && j < starts[b * seq_len + i])) return false;
    const size_t row = static_cast<size_t>(b * num_q_heads + h);
    return chosen->diagonal[row][i / 64 - j / 64] || chosen->column[row][j];
  };
}

}  // namespace mtraining::testing
