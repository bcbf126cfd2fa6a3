// Tensors: at::Tensor seen as the kernels' plain views, and the checks of a call's inputs.
//
// In:   tensors. Out: kernels::View, dtypes; InvalidArgument that says what was expected and got. Next: ring_attention.cc.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "mtraining/comm/transport.h"
#include "mtraining/kernels/params.h"

namespace mtraining::attention {

/// Errors: Unsupported naming `name` and its dtype.
kernels::DType kernel_dtype(const at::Tensor& tensor, const char* name);
/// What out, lse and gradients are held in: float64 for float64, else float32.
at::ScalarType state_type(at::ScalarType dtype);
comm::ElementType element_type(at::ScalarType dtype);

/// [B, S, H, D] with a last stride of 1.
kernels::ConstView const_view(const at::Tensor& tensor);
kernels::View view(at::Tensor& tensor);
/// The tensor itself where D is contiguous, else a contiguous copy (an expanded gradient has stride 0).
at::Tensor with_contiguous_rows(const at::Tensor& tensor);

/// cudaStream_t of the tensor's device that work of this thread is ordered on; null on the CPU.
void* current_stream(at::Device device);
/// True where rows of [B, S, H, D] are 16-byte aligned and so are steps from row to row, and tokens are not expanded: what tensor
/// copies of a GPU read.
bool rows_are_aligned(const at::Tensor& tensor);
/// The tensor itself where they are, else a copy, even of one that is contiguous: then its memory begins at an odd place.
at::Tensor with_aligned_rows(const at::Tensor& tensor);

comm::ConstBuffer bytes_of(const at::Tensor& contiguous);
comm::Buffer writable_bytes_of(at::Tensor& contiguous);

/// Named sizes, "[B=1, S_local=4096, H=16, D=128]".
using NamedSizes = std::vector<std::pair<const char*, int64_t>>;
/// InvalidArgument `name: expected [B=1, ...] bf16, got [...] float32` unless shape, dtype and device are these.
void check_tensor(const char* name, const at::Tensor& tensor, const NamedSizes& sizes,
                  at::ScalarType dtype, at::Device device);
/// InvalidArgument where the tensor's storage is smaller than its shape and strides say (resized or freed by its owner): kernels
/// read through pointers. check_tensor does it too.
void check_storage(const char* name, const at::Tensor& tensor);
std::string dtype_name(at::ScalarType dtype);
std::string shape_text(const at::Tensor& tensor);

}  // namespace mtraining::attention
