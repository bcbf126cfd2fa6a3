#include "mtraining/kernels/dispatch.h"

#include <algorithm>
#include <sstream>

#include "mtraining/base/check.h"
#include "mtraining/kernels/validate.h"

namespace mtraining::kernels {
namespace {

constexpr int kAnyNewer = 9999;

bool serves_device(const Kernel& kernel, const DeviceKind& device) {
  if (!device.cuda) return kernel.max_capability == 0;
  return device.capability() >= kernel.min_capability &&
         device.capability() <= kernel.max_capability;
}

bool serves_head_dim(const Kernel& kernel, int64_t head_dim) {
  if (!kernel.head_dims.empty())
    return std::find(kernel.head_dims.begin(), kernel.head_dims.end(), head_dim) !=
           kernel.head_dims.end();
  return head_dim >= 8 && head_dim % 8 == 0 && head_dim <= kernel.max_head_dim;
}

bool serves_dtype(const Kernel& kernel, DType dtype) {
  return std::find(kernel.dtypes.begin(), kernel.dtypes.end(), dtype) != kernel.dtypes.end();
}

template <typename Range, typename Name>
std::string joined(const Range& range, const Name& name) {
  std::string text;
  for (const auto& value : range) text += concat(text.empty() ? "" : ", ", name(value));
  return text;
}

std::string capability_text(const Kernel& kernel) {
  if (kernel.max_capability == 0) return "the host";
  const auto dotted = [](int capability) { return concat(capability / 10, ".", capability % 10); };
  if (kernel.max_capability == kAnyNewer)
    return concat("compute capability ", dotted(kernel.min_capability), " and newer");
  return concat("compute capability ", dotted(kernel.min_capability), " to ",
                dotted(kernel.max_capability));
}

std::string head_dims_text(const Kernel& kernel) {
  if (kernel.head_dims.empty()) return concat("multiples of 8 up to ", kernel.max_head_dim);
  return joined(kernel.head_dims, [](int64_t d) { return d; });
}

std::string device_text(const DeviceKind& device) {
  return device.cuda ? concat("a GPU of compute capability ", device.major, ".", device.minor)
                     : std::string("the host");
}

}  // namespace

const char* to_string(Backend backend) {
  switch (backend) {
    case Backend::kRef:
      return "ref";
    case Backend::kSm80:
      return "sm80";
    case Backend::kSm90:
      return "sm90";
    case Backend::kTorch:
      return "torch";
  }
  return "?";
}

const char* to_string(Direction direction) {
  return direction == Direction::kForward ? "forward" : "backward";
}

const char* to_string(DType dtype) {
  switch (dtype) {
    case DType::kFloat64:
      return "float64";
    case DType::kFloat32:
      return "float32";
    case DType::kBFloat16:
      return "bf16";
    case DType::kFloat16:
      return "fp16";
  }
  return "?";
}

const std::vector<Kernel>& kernel_table() {
  static const std::vector<Kernel> table = [] {
    const std::vector<DType> all = {DType::kFloat64, DType::kFloat32, DType::kBFloat16,
                                    DType::kFloat16};
    const std::vector<DType> halves = {DType::kBFloat16, DType::kFloat16};
    const std::vector<DType> dense = {DType::kFloat32, DType::kBFloat16, DType::kFloat16};
    std::vector<Kernel> rows;
    for (const Direction direction : {Direction::kForward, Direction::kBackward}) {
      const bool forward = direction == Direction::kForward;
      rows.push_back({Backend::kRef,
                      direction,
                      0,
                      0,
                      all,
                      {},
                      kMaxHeadDim,
                      false,
                      false,
                      "64 queries x 64 keys"});
      rows.push_back({Backend::kTorch,
                      direction,
                      80,
                      kAnyNewer,
                      dense,
                      {},
                      256,
                      true,
                      false,
                      "scaled_dot_product_attention"});
      rows.push_back({Backend::kSm80,
                      direction,
                      80,
                      kAnyNewer,
                      halves,
                      {},
                      256,
                      false,
                      false,
                      "64 queries x 64 keys, mma.sync"});
#ifdef MTRAINING_ALL_KERNELS
      const std::vector<int64_t> hopper =
          forward ? std::vector<int64_t>{64, 96, 128, 256} : std::vector<int64_t>{64, 128};
#else
      const std::vector<int64_t> hopper{64, 128};
#endif
      rows.push_back(
          {Backend::kSm90, direction, 90, 90, halves, hopper, hopper.back(), false, true,
           forward ? "2 x 64 queries x 64 keys, wgmma" : "128 keys x 64 queries, wgmma"});
    }
    return rows;
  }();
  return table;
}

std::string describe_kernels() {
  std::ostringstream out;
  for (const Kernel& kernel : kernel_table()) {
    out << to_string(kernel.backend) << " " << to_string(kernel.direction) << ": "
        << capability_text(kernel) << "; "
        << joined(kernel.dtypes, [](DType dtype) { return to_string(dtype); }) << "; head_dim "
        << head_dims_text(kernel) << "; " << kernel.tile
        << (kernel.dense_alone_only ? "; dense attention on one rank only" : "")
        << (kernel.copies_tensors ? "; 16-byte aligned rows" : "") << "\n";
  }
  return out.str();
}

Choice choose(const Request& request) {
  std::vector<const Kernel*> candidates;
  for (const Kernel& kernel : kernel_table()) {
    if (kernel.direction == request.direction && serves_device(kernel, request.device) &&
        (!kernel.dense_alone_only || request.dense_alone))
      candidates.push_back(&kernel);
  }
  const std::string what =
      concat(to_string(request.direction), " of sparse attention on ", device_text(request.device));
  MT_CHECK_SUPPORTED(!candidates.empty(), what, " is not supported: the kernels are\n",
                     describe_kernels());
  const auto wants = [&](const auto& serves, const std::string& got, const auto& text) {
    std::vector<const Kernel*> left;
    for (const Kernel* kernel : candidates)
      if (serves(*kernel)) left.push_back(kernel);
    MT_CHECK_SUPPORTED(
        !left.empty(), what, ": expected ",
        joined(candidates,
               [&](const Kernel* k) { return concat(text(*k), " (", to_string(k->backend), ")"); }),
        ", got ", got);
    candidates = left;
  };
  wants([&](const Kernel& k) { return serves_dtype(k, request.dtype); }, to_string(request.dtype),
        [](const Kernel& k) {
          return joined(k.dtypes, [](DType dtype) { return to_string(dtype); });
        });
  wants([&](const Kernel& k) { return serves_head_dim(k, request.head_dim); },
        concat("head_dim ", request.head_dim),
        [](const Kernel& k) { return concat("head_dim ", head_dims_text(k)); });
  const bool can_copy = request.rows_aligned && (!request.columns || request.position_stride == 1);
  wants([&](const Kernel& k) { return can_copy || !k.copies_tensors; },
        request.rows_aligned
            ? concat("columns with position_stride ", request.position_stride)
            : std::string("rows that are not 16-byte aligned, or strides that are not"),
        [](const Kernel&) { return "16-byte aligned rows, position_stride 1 for columns"; });
  // Dense attention by itself first; then the newest kernel that runs there.
  const auto rank = [](const Kernel* k) {
    return std::pair(k->dense_alone_only ? 1 : 0, k->min_capability);
  };
  const Kernel* best =
      *std::max_element(candidates.begin(), candidates.end(),
                        [&](const Kernel* a, const Kernel* b) { return rank(a) < rank(b); });
  return {best->backend, best->tile};
}

Grid LaunchPlanner::flat(const char* what, int64_t rows, int64_t items) const {
  MT_CHECK_ARG(rows >= 0 && items >= 0, what, ": expected sizes >= 0, got ", rows, " x ", items);
  MT_CHECK_SUPPORTED(items == 0 || rows <= kMaxGridX / items, what,
                     ": expected at most 2^31 - 1 thread blocks, got ", rows, " x ", items);
  return {std::max<int64_t>(1, rows * items), 1, 1};
}

Grid LaunchPlanner::looping(int64_t work, int per_sm) const {
  const int64_t most = int64_t{std::max(1, device_.num_sms)} * per_sm;
  return {std::clamp<int64_t>(work, 1, most), 1, 1};
}

int64_t LaunchPlanner::chunks(int64_t rows, int64_t items, int64_t least) const {
  const int64_t wanted =
      (4 * int64_t{std::max(1, device_.num_sms)} + rows - 1) / std::max<int64_t>(1, rows);
  const int64_t most = (items + least - 1) / least;
  return std::max<int64_t>(1, std::min(wanted, most));
}

}  // namespace mtraining::kernels
