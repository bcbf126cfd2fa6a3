// LinkSpeed: how fast ranks of this machine exchange memory, measured through the transport that training uses.
//
// In:   a number of ranks (threads of this process) and a back end. Out: bytes a second, microseconds. Next: doctor.cc.
#pragma once

#include <cstdint>
#include <string>

namespace mtraining::cli {

struct LinkSpeed {
  double bytes_per_s = 0;  ///< what each rank sends while it receives as much
  double small_us = 0;     ///< one exchange of 8 bytes
};

/// Each rank sends to the next of a ring. "gloo": over the loopback; "nccl", "peer_copies": rank r on GPU r. Cost: about .3 s.
/// Errors: ExternalError with the transport's words.
LinkSpeed measure_link(const std::string& backend, int ranks, int64_t bytes, int rounds);

}  // namespace mtraining::cli
