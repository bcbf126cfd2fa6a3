// Block choice: what patterns that choose key blocks one by one have in common: rows as float64, rows of the whole sequence, lists
// that each rank made of some query blocks.
//
// In:   this rank's q or k; lists by (head row, query block). Out: the same on every rank, bit for bit.
// Next: moba.cc, xattention.cc.
#pragma once

#include <cstdint>
#include <vector>

#include "mtraining/comm/transport.h"
#include "mtraining/index/index.h"
#include "mtraining/pattern/pattern.h"

namespace mtraining::pattern {

/// `count` elements as float64, exactly. NaN and inf stay what they are.
void read_row(kernels::DType dtype, const void* row, int64_t count, double* out);

/// Collective: the real rows of all ranks, [B, heads, N, D] in q's dtype. Errors: InvalidArgument on every rank alike where one is not
/// finite, naming `name` and the first place.
std::vector<uint8_t> gather_whole(const char* name, const LocalAttention& local,
                                  const kernels::ConstView& view, int64_t heads,
                                  comm::Communicator& group);

/// XAttention's choice for the query block masses.size() - 1 from masses by key block: its own block, the block `sink`, and the best of
/// those between, lower first among equals, until they hold `threshold` of all. Ascending. Integers: the same wherever they come from.
std::vector<int64_t> best_blocks(const std::vector<int64_t>& masses, int64_t sink,
                                 double threshold);

/// Collective: lists [B * H * NB]; each is empty on all ranks but one.
index::BlockRows gather_lists(const std::vector<std::vector<int32_t>>& lists,
                              comm::Communicator& group);

}  // namespace mtraining::pattern
