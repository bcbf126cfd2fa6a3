// Fault: the first value that no index can be chosen from, or that no index holds, as one integer in memory that nobody waits for.
//
// In:   what a kernel found. Out: a code, 0 where nothing was found; a report that the host reads when it likes.
// Next: window.h, lists.h (who finds), pattern/ (the sentence).
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
  kScore,  // sample * num_q_heads + head
  // Of lists and documents that a user gives.
  kCount,     // 2 * (sample * num_q_heads + head), and 1 for columns
  kDiagonal,  // sample * num_q_heads + head
  kColumn,    // the same
  kDocument   // sample * seq_len + position
};
inline constexpr int64_t kFaultKinds = 7;

inline constexpr int64_t kFaultPlaces = int64_t{1} << 60;

MT_HOST_DEVICE constexpr int64_t fault_code(FaultKind kind, int64_t place) {
  return (kFaultKinds - static_cast<int64_t>(kind)) * kFaultPlaces - 1 - place;
}
MT_HOST_DEVICE constexpr FaultKind fault_kind(int64_t code) {
  return static_cast<FaultKind>(kFaultKinds - 1 - code / kFaultPlaces);
}
MT_HOST_DEVICE constexpr int64_t fault_place(int64_t code) {
  return kFaultPlaces - 1 - code % kFaultPlaces;
}

/// In host memory that the device can write to; what is reported stays until the host sets code and claimed to 0.
struct FaultReport {
  int64_t code;  // written last
  int64_t num_q_heads, seq_len, first_sample;
  int64_t value,
      end;  // of lists and documents: what was got, and where the range ends that it is not in
  int32_t claimed;  // by the thread that writes
};

#ifdef __CUDACC__
/// Any number of threads may call it: one of them reports, unless the host has yet to read an earlier fault.
__device__ inline void report_fault(FaultReport* report, const FaultReport& found) {
  if (report == nullptr || *static_cast<volatile int64_t*>(&report->code) != 0 ||
      atomicExch(&report->claimed, 1) != 0)
    return;
  volatile FaultReport* const to = report;
  to->num_q_heads = found.num_q_heads;
  to->seq_len = found.seq_len;
  to->first_sample = found.first_sample;
  to->value = found.value;
  to->end = found.end;
  __threadfence_system();
  to->code = found.code;
}
#endif

}  // namespace mtraining::kernels::pattern_cuda
