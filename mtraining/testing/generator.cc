#include "mtraining/testing/generator.h"

#include <algorithm>
#include <cmath>

#include "mtraining/base/check.h"
#include "mtraining/testing/random.h"

namespace mtraining::testing {
namespace {

// Rotates pair (d, d + D/2) of one head's vector by position * theta^(-2d/D).
void rotate(float* x, int64_t dim, double position, double theta) {
  for (int64_t d = 0; d < dim / 2; ++d) {
    const double angle =
        position * std::pow(theta, -2.0 * static_cast<double>(d) / static_cast<double>(dim));
    const double c = std::cos(angle), s = std::sin(angle);
    const double a = x[d], b = x[d + dim / 2];
    x[d] = static_cast<float>(a * c - b * s);
    x[d + dim / 2] = static_cast<float>(a * s + b * c);
  }
}

// Which distance a head looks back to: local, then bands ever further away.
int64_t band_of(int64_t head, int64_t seq_len) {
  const int64_t bands[] = {0, 70, 5, seq_len / 3, 130, seq_len / 2, 17, seq_len / 5};
  return bands[head % 8];
}

}  // namespace

Qkv make_qkv(const QkvOptions& options) {
  const auto& o = options;
  MT_CHECK_ARG(
      o.batch >= 1 && o.seq_len >= 1 && o.num_kv_heads >= 1 && o.num_q_heads % o.num_kv_heads == 0,
      "make_qkv: expected batch, seq_len >= 1 and query heads a multiple of kv heads, got ",
      o.batch, ", ", o.seq_len, ", ", o.num_q_heads, ", ", o.num_kv_heads);
  MT_CHECK_ARG(o.head_dim >= 4 && o.head_dim % 2 == 0,
               "make_qkv: head_dim: expected an even number of at least 4, got ", o.head_dim);
  const int64_t dim = o.head_dim, half = dim / 2, group = o.num_q_heads / o.num_kv_heads;
  const double inverse_scale = std::sqrt(static_cast<double>(dim));
  // A score stands out once it passes the logarithm of how many others there are.
  const double crowd = std::log(static_cast<double>(o.seq_len) + 1);
  Random random(o.seed);
  Qkv made;
  made.q.resize(o.batch * o.seq_len * o.num_q_heads * dim);
  made.dout.resize(made.q.size());
  made.k.resize(o.batch * o.seq_len * o.num_kv_heads * dim);
  made.v.resize(made.k.size());

  // Mean direction of each kv head's keys: weight on the quick half of the pairs, whose products fall off with distance.
  std::vector<double> mean(o.num_kv_heads * dim, 0);
  for (int64_t g = 0; g < o.num_kv_heads; ++g) {
    double squares = 0;
    for (int64_t d = 0; d < half; ++d) {
      const double weight = d < (half + 1) / 2 ? 0.5 + random.uniform() : 0.1 * random.uniform();
      const double angle = 6.283185307179586 * random.uniform();
      mean[g * dim + d] = weight * std::cos(angle);
      mean[g * dim + d + half] = weight * std::sin(angle);
      squares += weight * weight;
    }
    for (int64_t d = 0; d < dim; ++d) mean[g * dim + d] /= std::sqrt(squares);
  }
  const double mean_norm = std::sqrt(inverse_scale * crowd);
  const double outlier_norm = std::sqrt(inverse_scale * crowd);

  std::vector<float> head(dim);
  for (int64_t b = 0; b < o.batch; ++b) {
    for (int64_t g = 0; g < o.num_kv_heads; ++g) {
      std::vector<double> outlier(o.seq_len, 0);
      for (int64_t j = 0; j < std::min(o.sink_keys, static_cast<int>(o.seq_len)); ++j)
        outlier[j] = 1.0;
      for (int n = 0; n < o.vertical_keys; ++n)
        outlier[random.below(o.seq_len)] = 0.75 + 0.5 * random.uniform();
      for (int64_t i = 0; i < o.seq_len; ++i) {
        for (int64_t d = 0; d < dim; ++d)
          head[d] =
              static_cast<float>(mean_norm * mean[g * dim + d] + 0.5 * o.noise * random.normal());
        rotate(head.data(), dim, static_cast<double>(i), o.theta);
        // After the rotation, so that every later query sees an outlier alike, however far away.
        head[half - 1] += static_cast<float>(outlier_norm * outlier[i]);
        const int64_t at = ((b * o.seq_len + i) * o.num_kv_heads + g) * dim;
        std::copy(head.begin(), head.end(), &made.k[at]);
        for (int64_t d = 0; d < dim; ++d) made.v[at + d] = static_cast<float>(random.normal());
      }
    }
    for (int64_t h = 0; h < o.num_q_heads; ++h) {
      const int64_t g = h / group;
      // From sharp (the band alone is above the crowd by e^6) to diffuse (every key counts).
      const double sharpness =
          o.num_q_heads == 1
              ? 1.0
              : 1.0 - static_cast<double>(h) / static_cast<double>(o.num_q_heads - 1);
      const double band = mean_norm * (0.25 + 1.5 * sharpness);
      const double attraction = outlier_norm * (0.25 + 0.9 * sharpness);
      std::vector<float> direction(dim);
      for (int64_t d = 0; d < dim; ++d) direction[d] = static_cast<float>(band * mean[g * dim + d]);
      rotate(direction.data(), dim, static_cast<double>(-band_of(h, o.seq_len)), o.theta);
      for (int64_t i = 0; i < o.seq_len; ++i) {
        for (int64_t d = 0; d < dim; ++d)
          head[d] = static_cast<float>(direction[d] + 0.5 * o.noise * random.normal());
        rotate(head.data(), dim, static_cast<double>(i), o.theta);
        head[half - 1] += static_cast<float>(attraction);
        const int64_t at = ((b * o.seq_len + i) * o.num_q_heads + h) * dim;
        std::copy(head.begin(), head.end(), &made.q[at]);
        for (int64_t d = 0; d < dim; ++d) made.dout[at + d] = static_cast<float>(random.normal());
      }
    }
  }
  if (o.outlier_channel > 0) {
    for (int64_t channel : {int64_t{1}, half}) {
      for (size_t at = static_cast<size_t>(channel); at < made.q.size(); at += dim)
        made.q[at] *= static_cast<float>(o.outlier_channel);
      for (size_t at = static_cast<size_t>(channel); at < made.k.size(); at += dim)
        made.k[at] *= static_cast<float>(o.outlier_channel);
    }
  }
  return made;
}

}  // namespace mtraining::testing
