// Device choice: vertical_slash on a GPU, on the caller's stream: no allocation, no synchronisation with the host.
//
// In:   this rank's q and k in device memory, a workspace, where a communicator over device memory is needed (several ranks).
// Out:  the index as device lists of fixed capacity with counts, and as bits. Next: torch_ops/, attention/.
//
// The steps are those of build_vertical_slash; choices are the same, entry for entry, on equal masses (masses themselves come
// from tensor cores: kernels/pattern_cuda/window.h). Values that are refused throw nothing here, since nobody waits for the device:
// they count as no mass and are reported; whoever next looks at the report throws.
#pragma once

#include <cstdint>

#include "mtraining/kernels/pattern_cuda/lists.h"
#include "mtraining/pattern/pattern.h"

namespace mtraining::pattern {

/// What a rank's device needs to know of the layout; made once, kept by the caller.
struct DeviceLayout {
  const int32_t* block_starts = nullptr;  ///< [n / 64] of this rank's shard
  /// [padded blocks, 2] rank and local block of each block; null: one rank that holds the sequence in order
  const int32_t* owners = nullptr;
};

struct DeviceIndex {
  kernels::pattern_cuda::IndexLists lists;
  kernels::pattern_cuda::IndexBits bits;
  uint8_t* dense_heads = nullptr;  ///< [B * H]
  int64_t* caps_hit = nullptr;
  /// In host memory that the device can write to, code 0 before the first call; or null.
  kernels::pattern_cuda::FaultReport* report = nullptr;
  int64_t first_sample = 0;  ///< of the call's batch, for the report
};
/// Errors: NotFinite, or InvalidArgument for lists and documents that a user gave: one sentence that says which input, where, as the
/// host says it.
void check_fault(const kernels::pattern_cuda::FaultReport& report);

/// Observation rows: int32 [count] in device memory, ascending. window_positions and sampled_positions (observation.h) give them; one
/// document's window can be written by the device itself (kernels::pattern_cuda::write_positions).
struct DeviceRows {
  const int32_t* positions = nullptr;
  int64_t count = 0;
  bool consecutive = false;  ///< each is the one before plus 1: quicker
};

/// Errors: Unsupported naming what a GPU does not choose (layout without blocks, kv_group over too many rows); dtype and head_dim are
/// refused by the first launch.
void check_device_choice(const LocalAttention& local, const VerticalSlashOptions& options);

int64_t device_choice_bytes(const LocalAttention& local, const VerticalSlashOptions& options,
                            int64_t num_rows, int64_t floor_rows);
/// The rows serve every sample of local: samples whose windows differ (has_windows_by_sample) are built one by one. floor_rows: rows
/// that recall_floor judges by (observation.h, floor_positions), none where it is 0.
/// local.q, k, document_starts: device memory. k needs no padding: rows at and beyond num_keys do not exist. group: null on one
/// rank. Collective over it. `num_keys`: rows of k that exist, at most layout->tokens_per_rank(). Launches on one rank: 5;
/// pooling by offsets and recall_floor add some.
void build_vertical_slash_on_device(const LocalAttention& local, int64_t num_keys,
                                    const VerticalSlashOptions& options, const DeviceRows& rows,
                                    const DeviceRows& floor_rows, const DeviceLayout& layout,
                                    comm::Communicator* group, void* workspace,
                                    int64_t workspace_bytes, void* stream,
                                    const DeviceIndex& index);

int64_t device_recall_bytes(const LocalAttention& local, int64_t rows);
/// covered int64 [B, H, rows.count] of all ranks: the mass of each row that the bits cover; a row's whole mass is kMassOne.
/// Collective over `group` (null: one rank).
void measure_covered_on_device(const LocalAttention& local, int64_t num_keys,
                               const DeviceRows& rows, const DeviceLayout& layout,
                               comm::Communicator* group, void* workspace, int64_t workspace_bytes,
                               void* stream, const kernels::pattern_cuda::IndexBits& bits,
                               int64_t* covered);

}  // namespace mtraining::pattern
