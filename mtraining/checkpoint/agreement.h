// Agreement: all ranks learn whether one of them failed, before anything depends on it.
//
// In:   each rank's own error, "" for none. Out: on all ranks the error of the lowest rank that has one, or "".
// Next: publication.h; any point where a check can fail on one rank only (a missing file, a full disk).
#pragma once

#include <functional>
#include <string>

#include "mtraining/comm/transport.h"

namespace mtraining::checkpoint {

/// Collective. Does not return before every rank has called it.
using Agreement = std::function<std::string(const std::string& error)>;

/// Of a single process.
std::string agree_alone(const std::string& error);
/// Over a communicator that takes host memory (Gloo, loopback), which must outlive it. Errors are cut to 1000 bytes.
/// Errors: ExternalError where a rank does not answer. Cost: one all-gather of 1 KiB a rank.
Agreement agree_over(comm::Communicator& communicator);

}  // namespace mtraining::checkpoint
