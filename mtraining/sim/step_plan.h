// StepPlan: what a training run needs of a GPU's memory, of the links and of time, computed from its sizes.
//
// In:   a decoder's sizes, how a train step is split and recomputed, a density, rates of the machine.
// Out:  memory by item, bytes by link, seconds by part of one train step.
// Next: cli/plan.cc prints it and compares splits.
//
// Every formula is in docs/math/plan.md. Memory, bytes: exact sums of what is allocated and sent, as far as they are listed. Seconds: work /
// rate, with the ring from event_simulation.h. Torch-free.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "mtraining/index/index.h"
#include "mtraining/layout/layout.h"
#include "mtraining/ring/schedule.h"
#include "mtraining/topology/topology.h"

namespace mtraining::sim {

struct DecoderSizes {
  int64_t vocab_size = 0, hidden_size = 0, intermediate_size = 0, num_layers = 0;
  int64_t num_q_heads = 0, num_kv_heads = 0, head_dim = 0;
  bool tied = true;
  bool qkv_bias = false, out_bias = false, qk_norm = false;
};
int64_t layer_parameters(const DecoderSizes& model);
/// Each tensor once; a tied head has none of its own.
int64_t total_parameters(const DecoderSizes& model);

enum class RecomputeMode { kNone, kLayer, kExceptAttention };

struct RunShape {
  int64_t seq_len = 0;
  int64_t micro_batch = 1, accumulation = 1;
  int dp_size = 1;
  topology::Topology topology;  ///< of one context-parallel group
  ring::RingKind ring = ring::RingKind::kHierarchical;
  ring::InnerKind inner = ring::InnerKind::kGather;
  int ring_stride = 1, prefetch_steps = 2, launch_shards = 1;
  layout::LayoutKind layout = layout::LayoutKind::kBlockStriped;
  int64_t stripe = 64;
  bool columns_once = true;
  int64_t max_column_rows_per_rank = 16384;
  int64_t element_bytes = 2;       ///< of parameters and activations
  int64_t grad_element_bytes = 4;  ///< of accumulated gradients
  int64_t wire_element_bytes = 4;  ///< of dk, dv on the ring
  int zero = 0;
  bool offload_optimizer = false;
  RecomputeMode recompute = RecomputeMode::kNone;
  int64_t recompute_span = 1;
  int64_t offload_layers = 0;
  int64_t mlp_tile = 0;
  int64_t loss_chunk = 1024;
  bool deterministic = true;  ///< attention's backward; then a GPU of one rank sums dq in one go
  bool on_gpu = true;         ///< false: as torch computes on a CPU

  int ranks() const { return topology.cp_size() * dp_size; }
};
layout::Layout layout_of(const RunShape& run);
ring::ScheduleOptions schedule_of(const RunShape& run);

struct MemoryItem {
  std::string name;
  int64_t bytes = 0;
  bool on_host = false;
};
/// Of one rank, at the peak: while the loss is computed or while the last layer goes back, whichever needs more.
std::vector<MemoryItem> memory_plan(const DecoderSizes& model, const RunShape& run);
int64_t device_bytes(const std::vector<MemoryItem>& items);
/// What autograd keeps of one layer for its backward, without recomputation: bytes of a rank.
int64_t layer_activation_bytes(const DecoderSizes& model, const RunShape& run);
/// What one layer keeps between its forward and its backward under run.recompute; the first of a span where several are one.
int64_t kept_layer_bytes(const DecoderSizes& model, const RunShape& run);
/// The same of all layers: on the device, and in host memory.
struct KeptBytes {
  int64_t device = 0, host = 0;
};
KeptBytes kept_bytes(const DecoderSizes& model, const RunShape& run);
/// Slots of the rings and, on a CPU, the float32 state that all layers share; gathered columns apart.
int64_t ring_buffer_bytes(const DecoderSizes& model, const RunShape& run);

/// A pattern of about this density, half diagonals, half columns; columns of different heads differ, as real ones do. Batch 1.
index::Index planned_index(int64_t seq_len, int num_heads, double density);

/// Sent by the rank that sends most in one train step.
struct BytesPlan {
  int64_t ring_intra = 0, ring_inter = 0;  ///< K, V, dk, dv of shards
  int64_t columns = 0;                     ///< rows of columns and their gradients, to all ranks
  int64_t gradients = 0;  ///< reduction of gradients and, with zero 2, gathering of parameters
};
BytesPlan bytes_plan(const DecoderSizes& model, const RunShape& run, const index::Index& index);

struct MachineRates {
  double attention_forward_tflops = 520;
  double attention_backward_tflops = 400;
  double matmul_tflops = 400;
  double intra_gb_per_s = 118;
  double inter_gb_per_s = 25;
  double host_gb_per_s = 50;  ///< between a GPU and its host, one way
  double device_gb_per_s = 4300;
  double index_ms = 1.13;  ///< a layer
  double launch_us = 15;   ///< host time a launch
};
/// Errors: InvalidArgument naming the flag of a rate that is not a finite number above 0.
void check(const MachineRates& rates);

/// Seconds of one train step.
struct TimePlan {
  double attention_forward_s = 0,
         attention_backward_s = 0;  ///< with what of the ring is not hidden
  double attention_again_s = 0;     ///< recomputation
  double index_s = 0;
  double matmul_s = 0;  ///< projections, MLP, head, recomputation included
  double gradients_s = 0;
  double optimizer_s = 0;
  double total() const {
    return attention_forward_s + attention_backward_s + attention_again_s + index_s + matmul_s +
           gradients_s + optimizer_s;
  }
  bool compute_bound = true;  ///< of the ring: launches, not links, set its time
  double density = 1;
};
TimePlan time_plan(const DecoderSizes& model, const RunShape& run, const index::Index& index,
                   const MachineRates& rates);

}  // namespace mtraining::sim
