#include "mtraining/testing/plain.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "mtraining/testing/parallel.h"
#include "mtraining/testing/rounding.h"

namespace mtraining::testing {
namespace {

template <typename Real>
Solution solve_in(const Problem& problem, const Mask& mask, Precision precision, Delta source) {
  check(problem);
  const int64_t num_queries = problem.num_queries, num_keys = problem.num_keys,
                dim = problem.head_dim;
  const int64_t heads = problem.num_q_heads, kv_heads = problem.num_kv_heads,
                group = heads / kv_heads;
  const Real scale = static_cast<Real>(
      problem.softmax_scale != 0 ? problem.softmax_scale : 1 / std::sqrt(static_cast<double>(dim)));
  const bool gradients = !problem.dout.empty();
  const auto stored = [precision](Real value) {
    return static_cast<Real>(round_to(precision, static_cast<double>(value)));
  };
  const auto reals = [](const std::vector<double>& values) {
    return std::vector<Real>(values.begin(), values.end());
  };
  const std::vector<Real> q = reals(problem.q), k = reals(problem.k), v = reals(problem.v),
                          dout = reals(problem.dout);

  Solution solution;
  solution.out.assign(q.size(), 0);
  solution.lse.assign(problem.batch * heads * num_queries,
                      -std::numeric_limits<double>::infinity());
  std::vector<Real> dk(gradients ? k.size() : 0, 0), dv(gradients ? v.size() : 0, 0);
  if (gradients) solution.dq.assign(q.size(), 0);

  std::vector<uint8_t> visible(num_queries * num_keys);
  std::vector<Real> p(num_queries * num_keys), ds(gradients ? num_queries * num_keys : 0);
  for (int64_t b = 0; b < problem.batch; ++b) {
    for (int64_t h = 0; h < heads; ++h) {
      const int64_t kv = h / group;
      const auto query_at = [&](int64_t i) { return ((b * num_queries + i) * heads + h) * dim; };
      const auto key_at = [&](int64_t j) { return ((b * num_keys + j) * kv_heads + kv) * dim; };
      const auto product = [dim](const Real* x, const Real* y) {
        Real sum = 0;
        for (int64_t d = 0; d < dim; ++d) sum += x[d] * y[d];
        return sum;
      };
      parallel_for(num_queries, [&](int64_t i) {
        const int64_t row = i * num_keys;
        Real top = -std::numeric_limits<Real>::infinity();
        bool empty = true;
        for (int64_t j = 0; j < num_keys; ++j) {
          visible[row + j] = mask(b, h, i, j) ? 1 : 0;
          if (visible[row + j] == 0) continue;
          empty = false;
          p[row + j] = stored(stored(product(&q[query_at(i)], &k[key_at(j)])) * scale);
          top = std::max(top, p[row + j]);
        }
        if (empty) return;
        Real sum = 0;
        for (int64_t j = 0; j < num_keys; ++j)
          if (visible[row + j] != 0) sum += std::exp(p[row + j] - top);
        solution.lse[(b * heads + h) * num_queries + i] = static_cast<double>(top + std::log(sum));
        std::vector<Real> out(dim, 0), dq(dim, 0);
        for (int64_t j = 0; j < num_keys; ++j) {
          if (visible[row + j] == 0) continue;
          p[row + j] = stored(std::exp(p[row + j] - top) / sum);
          for (int64_t d = 0; d < dim; ++d) out[d] += p[row + j] * v[key_at(j) + d];
        }
        for (int64_t d = 0; d < dim; ++d)
          solution.out[query_at(i) + d] = static_cast<double>(stored(out[d]));
        if (!gradients) return;
        Real delta = 0;
        for (int64_t j = 0; j < num_keys; ++j) {
          if (visible[row + j] == 0) continue;
          ds[row + j] = stored(product(&dout[query_at(i)], &v[key_at(j)]));
          delta += p[row + j] * ds[row + j];
        }
        if (source == Delta::kFromOut) {
          delta = 0;
          for (int64_t d = 0; d < dim; ++d) delta += dout[query_at(i) + d] * stored(out[d]);
        }
        for (int64_t j = 0; j < num_keys; ++j) {
          if (visible[row + j] == 0) continue;
          ds[row + j] = stored(stored(p[row + j] * (ds[row + j] - delta)) * scale);
          for (int64_t d = 0; d < dim; ++d) dq[d] += ds[row + j] * k[key_at(j) + d];
        }
        for (int64_t d = 0; d < dim; ++d)
          solution.dq[query_at(i) + d] = static_cast<double>(stored(dq[d]));
      });
      if (!gradients) continue;
      parallel_for(num_keys, [&](int64_t j) {
        for (int64_t i = 0; i < num_queries; ++i) {
          if (visible[i * num_keys + j] == 0) continue;
          const Real probability = p[i * num_keys + j], gradient = ds[i * num_keys + j];
          for (int64_t d = 0; d < dim; ++d) {
            dk[key_at(j) + d] += gradient * q[query_at(i) + d];
            dv[key_at(j) + d] += probability * dout[query_at(i) + d];
          }
        }
      });
    }
  }
  const auto finish = [&](const std::vector<Real>& values) {
    std::vector<double> out(values.size());
    for (size_t i = 0; i < values.size(); ++i) out[i] = static_cast<double>(stored(values[i]));
    return out;
  };
  solution.dk = finish(dk);
  solution.dv = finish(dv);
  return solution;
}

}  // namespace

Solution solve_plain(const Problem& problem, const Mask& mask, Precision precision, Delta delta) {
  return precision == Precision::kFloat64 ? solve_in<double>(problem, mask, precision, delta)
                                          : solve_in<float>(problem, mask, precision, delta);
}

}  // namespace mtraining::testing
