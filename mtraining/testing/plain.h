// Plain attention in a low precision: what someone would write first. Measures how much error the precision itself causes.
//
// In:   the oracle's Problem and Mask, a precision. Out: its Solution with every stored array rounded to that precision.
// Next: comparator.h allows twice the error of this against the oracle.
//
// Inputs are used as given (round them first, so that oracle and plain see the same). Products are summed in float32 (float64
// for kFloat64), in order; scores, probabilities, their gradients and the results are each rounded when stored; lse is not.
#pragma once

#include "mtraining/testing/comparator.h"
#include "mtraining/testing/oracle.h"

namespace mtraining::testing {

/// Where rowsum(P * dP) comes from in the backward pass.
enum class Delta {
  kFromProbabilities,  ///< that sum itself
  kFromOut,  ///< rowsum(dout * out) of the stored out: all that passes in parts (tiles, ring steps) can have. Where one key
  ///< takes nearly all of the weight, the rounding of out is not cancelled, and dq and dk are less exact.
};
Solution solve_plain(const Problem& problem, const Mask& mask, Precision precision,
                     Delta delta = Delta::kFromProbabilities);

}  // namespace mtraining::testing
