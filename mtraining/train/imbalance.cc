#include "mtraining/train/imbalance.h"

#include <algorithm>

namespace mtraining::train {

Imbalance imbalance_of(const std::vector<std::vector<double>>& gathered, int cp_size, int which) {
  Imbalance mean{0, 0};
  const size_t groups = gathered.size() / cp_size;
  for (size_t g = 0; g < groups; ++g) {
    const size_t steps = gathered[g * cp_size].size() / 2;
    double sum_of_slowest = 0, total = 0, slowest = 0;
    std::vector<double> of_rank(cp_size, 0);
    for (size_t s = 0; s < steps; ++s) {
      double most = 0;
      for (int r = 0; r < cp_size; ++r) {
        const double value = gathered[g * cp_size + r][2 * s + which];
        of_rank[r] += value;
        most = std::max(most, value);
      }
      sum_of_slowest += most;
    }
    for (const double value : of_rank) {
      total += value;
      slowest = std::max(slowest, value);
    }
    const double mean_total = total / cp_size;
    mean.worker += (mean_total > 0 ? slowest / mean_total : 1) / static_cast<double>(groups);
    mean.step += (mean_total > 0 ? sum_of_slowest / mean_total : 1) / static_cast<double>(groups);
  }
  return mean;
}

}  // namespace mtraining::train
