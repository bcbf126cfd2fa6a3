// Dispatch: which back end serves an attention call, as a table of plain data that can be printed and tested without a device.
//
// In:   what a call is: direction, device, dtype, head_dim, how its memory is laid out.
// Out:  the back end and its tile, or Unsupported that names what is missing and what there is; grids within a device's limits.
// Next: launch.h runs the choice; attention/ and torch_ops/ ask once a call.
//
// Pure functions: no device is touched. A new kernel is a row of the table in dispatch.cc and a line in launch.cc.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "mtraining/kernels/params.h"

namespace mtraining::kernels {

enum class Backend : int32_t { kRef, kSm80, kSm90, kTorch };
enum class Direction : int32_t { kForward, kBackward };
const char* to_string(Backend backend);
const char* to_string(Direction direction);
const char* to_string(DType dtype);

/// Where a call's memory lies: the host, or a CUDA device of a compute capability.
struct DeviceKind {
  bool cuda = false;
  int major = 0, minor = 0;
  int num_sms = 0;
  int capability() const { return major * 10 + minor; }
};

/// What decides, besides what every back end takes.
struct Request {
  Direction direction = Direction::kForward;
  DeviceKind device;
  DType dtype = DType::kBFloat16;
  int64_t head_dim = 128;
  /// One rank, one document, every causal pair: torch's own dense attention is as exact and quicker.
  bool dense_alone = false;
  /// 16-byte aligned rows whose strides are multiples of 16 bytes: what tensor copies read.
  bool rows_aligned = true;
  /// Single keys beside blocks; `striped` has no blocks of consecutive positions to look them up in.
  bool columns = false;
  int64_t position_stride = 1;
};

struct Choice {
  Backend backend = Backend::kRef;
  std::string tile;  ///< what one thread block (one task of a thread) works on
};

/// The first row that serves the request. Errors: Unsupported naming the dtype, head_dim, capability or layout and the rows that
/// come nearest.
Choice choose(const Request& request);

/// One row of the table.
struct Kernel {
  Backend backend;
  Direction direction;
  int min_capability, max_capability;  ///< 0 .. 0: the host
  std::vector<DType> dtypes;
  std::vector<int64_t> head_dims;  ///< empty: multiples of 8 up to max_head_dim
  int64_t max_head_dim;
  bool dense_alone_only;
  bool copies_tensors;  ///< needs aligned rows, and position_stride 1 for columns
  const char* tile;
};
const std::vector<Kernel>& kernel_table();
/// The table as text, a line a row.
std::string describe_kernels();

/// A grid of thread blocks.
struct Grid {
  int64_t x = 1, y = 1, z = 1;
  bool operator==(const Grid&) const = default;
};
/// CUDA's limits: x below 2^31, y and z below 2^16.
inline constexpr int64_t kMaxGridX = (int64_t{1} << 31) - 1;
inline constexpr int64_t kMaxGridYZ = (int64_t{1} << 16) - 1;

/// Plans launches whose sizes may pass a grid's limits.
class LaunchPlanner {
 public:
  explicit LaunchPlanner(const DeviceKind& device) : device_(device) {}

  /// A thread block for each of rows x items, flattened on x: block b works on row b / items, item b % items. Errors:
  /// Unsupported naming `what` where that passes 2^31 - 1 (512K tokens, 4096 heads are 33 million).
  Grid flat(const char* what, int64_t rows, int64_t items) const;
  /// Blocks that loop over `work` items, at most `per_sm` of them an SM; at least one.
  Grid looping(int64_t work, int per_sm) const;
  /// How many chunks each of `rows` rows is cut into so that the device is full, at least `least` items of `items` a chunk.
  int64_t chunks(int64_t rows, int64_t items, int64_t least) const;

 private:
  DeviceKind device_;
};

}  // namespace mtraining::kernels
