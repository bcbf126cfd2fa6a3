#include "mtraining/attention/tensors.h"

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <sstream>

#include "mtraining/base/check.h"

namespace mtraining::attention {

std::string dtype_name(at::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat:
      return "float32";
    case at::kDouble:
      return "float64";
    case at::kBFloat16:
      return "bf16";
    case at::kHalf:
      return "fp16";
    case at::kInt:
      return "int32";
    default:
      return c10::toString(dtype);
  }
}

std::string shape_text(const at::Tensor& tensor) {
  if (!tensor.defined()) return "an undefined tensor";
  std::ostringstream out;
  out << "[";
  for (int64_t d = 0; d < tensor.dim(); ++d) out << (d ? ", " : "") << tensor.size(d);
  out << "] " << dtype_name(tensor.scalar_type());
  if (!tensor.device().is_cpu()) out << " on " << tensor.device();
  return out.str();
}

kernels::DType kernel_dtype(const at::Tensor& tensor, const char* name) {
  switch (tensor.scalar_type()) {
    case at::kDouble:
      return kernels::DType::kFloat64;
    case at::kFloat:
      return kernels::DType::kFloat32;
    case at::kBFloat16:
      return kernels::DType::kBFloat16;
    case at::kHalf:
      return kernels::DType::kFloat16;
    default:
      throw Unsupported(concat(name, ": expected float32, bf16, fp16 or float64, got ",
                               dtype_name(tensor.scalar_type())));
  }
}

at::ScalarType state_type(at::ScalarType dtype) {
  return dtype == at::kDouble ? at::kDouble : at::kFloat;
}

comm::ElementType element_type(at::ScalarType dtype) {
  switch (dtype) {
    case at::kDouble:
      return comm::ElementType::kFloat64;
    case at::kFloat:
      return comm::ElementType::kFloat32;
    case at::kBFloat16:
      return comm::ElementType::kBFloat16;
    default:
      MT_ASSERT(false, "no element type for ", dtype_name(dtype));
  }
}

kernels::ConstView const_view(const at::Tensor& tensor) {
  return {tensor.const_data_ptr(), tensor.stride(0), tensor.stride(1), tensor.stride(2)};
}
kernels::View view(at::Tensor& tensor) {
  return {tensor.data_ptr(), tensor.stride(0), tensor.stride(1), tensor.stride(2)};
}

at::Tensor with_contiguous_rows(const at::Tensor& tensor) {
  return tensor.stride(-1) == 1 || tensor.size(-1) == 1 ? tensor : tensor.contiguous();
}

void* current_stream(at::Device device) {
  if (device.is_cpu()) return nullptr;
  const c10::impl::VirtualGuardImpl guard(device.type());
  return guard.getStreamNativeHandle(guard.getStream(device));
}

bool rows_are_aligned(const at::Tensor& tensor) {
  const auto size = static_cast<int64_t>(tensor.element_size());
  if (reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % 16 != 0) return false;
  if (tensor.size(-1) > 1 && tensor.stride(-1) != 1) return false;
  if (tensor.dim() == 4 && tensor.size(1) > 1 && tensor.stride(1) == 0) return false;
  for (int64_t d = 0; d + 1 < tensor.dim(); ++d)
    if (tensor.size(d) > 1 && tensor.stride(d) * size % 16 != 0) return false;
  return true;
}

at::Tensor with_aligned_rows(const at::Tensor& tensor) {
  return rows_are_aligned(tensor) ? tensor : tensor.clone(at::MemoryFormat::Contiguous);
}

comm::ConstBuffer bytes_of(const at::Tensor& contiguous) {
  MT_ASSERT(contiguous.is_contiguous(), "a buffer for transport must be contiguous");
  return {contiguous.const_data_ptr(), static_cast<int64_t>(contiguous.nbytes())};
}
comm::Buffer writable_bytes_of(at::Tensor& contiguous) {
  MT_ASSERT(contiguous.is_contiguous(), "a buffer for transport must be contiguous");
  return {contiguous.data_ptr(), static_cast<int64_t>(contiguous.nbytes())};
}

void check_tensor(const char* name, const at::Tensor& tensor, const NamedSizes& sizes,
                  at::ScalarType dtype, at::Device device) {
  bool ok = tensor.defined() && tensor.layout() == at::kStrided &&
            tensor.dim() == static_cast<int64_t>(sizes.size()) && tensor.scalar_type() == dtype &&
            tensor.device() == device;
  for (size_t d = 0; ok && d < sizes.size(); ++d)
    ok = tensor.size(static_cast<int64_t>(d)) == sizes[d].second;
  if (ok) return check_storage(name, tensor);
  std::ostringstream expected;
  for (size_t d = 0; d < sizes.size(); ++d)
    expected << (d ? ", " : "") << sizes[d].first << "=" << sizes[d].second;
  std::ostringstream where;
  if (!device.is_cpu()) where << " on " << device;
  throw InvalidArgument(concat(name, ": expected [", expected.str(), "] ", dtype_name(dtype),
                               where.str(), ", got ", shape_text(tensor)));
}

void check_storage(const char* name, const at::Tensor& tensor) {
  if (!tensor.is_cpu() && !tensor.is_cuda()) return;
  const size_t needed =
      at::detail::computeStorageNbytes(tensor.sizes(), tensor.strides(), tensor.element_size(),
                                       static_cast<size_t>(tensor.storage_offset()));
  MT_CHECK_ARG(!tensor.has_storage() || tensor.storage().nbytes() >= needed, name,
               ": expected a storage of at least ", needed, " bytes for ", shape_text(tensor),
               ", got ", tensor.storage().nbytes());
}

}  // namespace mtraining::attention
