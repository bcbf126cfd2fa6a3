// Fault: the first value that no index can be chosen from, as one integer in device memory that nobody waits for.
//
// In:   what a kernel found. Out: a code, 0 where nothing was found; a report that the host reads when it likes.
// Next: window.h (who finds), pattern/ (the sentence).
//
// Of two faults the earlier one has the larger code, so that ranks and thread blocks agree on one by its maximum.
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define MT_HOST_DEVICE __host__ __device__
#else
#define MT_HOST_DEVICE
#endif

namespace mtraining::kernels::pattern_cuda {

enum class FaultKind : int32_t {
  kQuery,  // place: (sample * num_q_heads + head) * seq_len + position
  kKey,    // sample * seq_len + position
  kScore   // sample * num_q_heads + head
};

inline constexpr int64_t kFaultPlaces = int64_t{1} << 60;

MT_HOST_DEVICE constexpr int64_t fault_code(FaultKind kind, int64_t place) {
  return (4 - static_cast<int64_t>(kind)) * kFaultPlaces - 1 - place;
}
MT_HOST_DEVICE constexpr FaultKind fault_kind(int64_t code) {
  return static_cast<FaultKind>(3 - code / kFaultPlaces);
}
MT_HOST_DEVICE constexpr int64_t fault_place(int64_t code) {
  return kFaultPlaces - 1 - code % kFaultPlaces;
}

/// In host memory that the device can write to; what is reported stays until the host sets code to 0.
struct FaultReport {
  int64_t code;  // written last
  int64_t num_q_heads, seq_len, first_sample;
};

}  // namespace mtraining::kernels::pattern_cuda
