// AttentionCase: one mask to be measured, and the inputs that all cases of a run share.
//
// In:   a pattern file, a shape's name, or a density; sizes and a seed.
// Out:  an index::Index with its name; q, k, v, dout in the asked type.
// Next: attention_launch.h runs it on the CPU; device benches upload the same inputs.
//
// Inputs are structured (testing/generator.h): from sharp to diffuse heads, so that a pattern that is chosen from them is sparse.
// Torch-free.
#pragma once

#include <cstdint>
#include <memory>
#include <new>
#include <string>
#include <string_view>
#include <vector>

#include "mtraining/index/index.h"
#include "mtraining/kernels/params.h"

namespace mtraining::bench {

struct AttentionSizes {
  int64_t seq_len = 16384;
  int64_t num_q_heads = 4, num_kv_heads = 2, head_dim = 64;
  kernels::DType dtype = kernels::DType::kFloat32;
};
/// Errors: InvalidArgument naming the flag.
void check(const AttentionSizes& sizes);
/// 1 / sqrt(head_dim).
double scale_of(const AttentionSizes& sizes);
/// "float32", "float64", "bf16", "fp16". Errors: InvalidArgument.
kernels::DType parse_dtype(std::string_view name);
std::string_view to_string(kernels::DType dtype);

struct AttentionCase {
  std::string pattern;  ///< what of the causal mask is computed, in words
  index::Index index;
};
/// About `density` of the causal pairs in every head: half of it block diagonals (0, 1 and others spread evenly), half single
/// columns, spread evenly; 1: everything. Errors: InvalidArgument outside (0, 1].
AttentionCase density_case(const AttentionSizes& sizes, double density);
/// A file in the form of sim/pattern_file.h. Errors: those of read_pattern_file; InvalidArgument where its heads are not `heads`.
AttentionCase file_case(const AttentionSizes& sizes, const std::string& path);
/// local | typical | wide | uneven of sim/pattern_shapes.h.
AttentionCase shape_case(const AttentionSizes& sizes, std::string_view shape);
double total_pairs(const index::Index& index);

/// Host memory as tensors have it: 64-byte aligned, zeroed. Movable.
class AlignedBytes {
 public:
  AlignedBytes() = default;
  explicit AlignedBytes(int64_t bytes)
      : data_(new (kAlignment) uint8_t[static_cast<size_t>(bytes)]()), bytes_(bytes) {}
  uint8_t* data() const { return data_.get(); }
  int64_t size() const { return bytes_; }

 private:
  static constexpr std::align_val_t kAlignment{64};
  struct Free {
    void operator()(uint8_t* p) const { ::operator delete[](p, kAlignment); }
  };
  std::unique_ptr<uint8_t[], Free> data_;
  int64_t bytes_ = 0;
};

/// q, dout [S, H, D] and k, v [S, Hk, D] of the sizes' type.
struct AttentionInputs {
  AlignedBytes q, k, v, dout;
  std::string digest;
};
AttentionInputs make_inputs(const AttentionSizes& sizes, uint64_t seed);

}  // namespace mtraining::bench
