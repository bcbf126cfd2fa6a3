// Members: the ranks that open a communicator together.
//
// In:   a number of ranks. Out: their list. Next: transport.h, whose open() takes it.
#pragma once

#include <numeric>
#include <vector>

namespace mtraining::comm {

/// 0 .. size - 1.
inline std::vector<int> all_ranks(int size) {
  std::vector<int> members(static_cast<size_t>(size));
  std::iota(members.begin(), members.end(), 0);
  return members;
}

}  // namespace mtraining::comm
