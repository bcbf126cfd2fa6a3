// TokenRuns: a layer's work on tokens, one run of them after the other.
//
// In:   a number of tokens, the length of a run, a body. Out: body(first token, number of tokens), once a run.
// Next: mlp.cc, device_passes.cc.
#pragma once

#include <algorithm>
#include <cstdint>

namespace mtraining::model {

template <typename Body>
void for_each_run(int64_t tokens, int64_t run, Body&& body) {
  for (int64_t begin = 0; begin < tokens; begin += run) body(begin, std::min(run, tokens - begin));
}

}  // namespace mtraining::model
