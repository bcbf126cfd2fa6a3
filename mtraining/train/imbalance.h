// Imbalance: how unevenly the ranks of a context-parallel group worked.
//
// In:   per rank a list of (pairs, seconds) of each ring step. Out: worker and step degree, 1 = even. Next: metrics.
//
// worker = slowest rank's total / mean total. step = sum over ring steps of the slowest rank / mean total: what lockstep costs.
// Source: paper section 3.3.
#pragma once

#include <vector>

namespace mtraining::train {

struct Imbalance {
  double worker = 1, step = 1;
};

/// `gathered[rank]` = {pairs of step 0, seconds of step 0, pairs of step 1, ..}; `which` 0: pairs, 1: seconds. Several groups of
/// cp_size ranks: their mean.
Imbalance imbalance_of(const std::vector<std::vector<double>>& gathered, int cp_size, int which);

}  // namespace mtraining::train
