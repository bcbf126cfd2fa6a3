// PatternShapes: vertical-slash patterns of the shapes that real heads show, the same on every
// machine.
//
// In:   a shape's name, seq_len, heads. Out: an OffsetPattern.
// Next: tests of balance; benches that have no pattern file.
//
// local: a near band, few lines. typical: a band that differs by head, some clusters. wide: a broad
// band, many clusters. uneven: from head to head nearly nothing to nearly everything, columns alone
// or a band alone.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "mtraining/sim/pattern_file.h"

namespace mtraining::sim {

std::vector<std::string_view> pattern_shapes();
/// Errors: InvalidArgument on an unknown name or a seq_len below 1024 (shorter bands are cut to
/// fit).
OffsetPattern make_pattern(std::string_view shape, int64_t seq_len, int num_heads);

}  // namespace mtraining::sim
