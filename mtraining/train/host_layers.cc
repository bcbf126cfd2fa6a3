#include "mtraining/train/host_layers.h"

#include <ATen/ATen.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <bit>
#include <exception>
#include <utility>

#include "mtraining/base/check.h"

namespace mtraining::train {
namespace {

constexpr size_t kMostLeaving = 2;
constexpr int64_t kLeastPiece = int64_t{1} << 20;

c10::Stream current_stream(at::Device device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

int64_t padded_bytes(const at::Tensor& tensor) {
  return tensor.defined() ? (static_cast<int64_t>(tensor.nbytes()) + 511) / 512 * 512 : 0;
}

/// torch rounds pinned memory up to a power of two: pieces of powers of two waste at most the least piece.
std::vector<at::Tensor> pinned_pieces(int64_t bytes) {
  std::vector<at::Tensor> pieces;
  while (bytes > 0) {
    const auto piece = static_cast<int64_t>(std::bit_floor(static_cast<uint64_t>(bytes)));
    pieces.push_back(at::empty({std::max(piece, kLeastPiece)},
                               at::TensorOptions(at::kByte).pinned_memory(true)));
    bytes -= pieces.back().numel();
  }
  return pieces;
}

/// Calls copy(bytes of the tensor, bytes of the memory) for each run that lies in one piece.
template <typename Copy>
void for_each_run(const at::Tensor& tensor, const std::vector<at::Tensor>& memory, int64_t offset,
                  Copy&& copy) {
  const at::Tensor bytes = tensor.view({-1}).view(at::kByte);
  int64_t begin = 0, piece_begin = 0;
  for (const at::Tensor& piece : memory) {
    const int64_t from = std::max(offset + begin, piece_begin);
    const int64_t to = std::min(offset + bytes.numel(), piece_begin + piece.numel());
    if (from < to) {
      copy(bytes.narrow(0, from - offset, to - from),
           piece.narrow(0, from - piece_begin, to - from));
      begin = to - offset;
    }
    piece_begin += piece.numel();
  }
  MT_ASSERT(begin == bytes.numel(), "kept tensors grew from one step to the next");
}

}  // namespace

HostLayers::HostLayers(at::Device device, int64_t count) : device_(device), count_(count) {
  if (!device.is_cpu() && count > 0)
    copies_ = c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device);
}

HostLayers::~HostLayers() {
  try {
    clear();
  } catch (const std::exception&) {
    // The device has failed: nothing on it can be saved, and whoever learns of it first says so.
  }
}

void HostLayers::put(int64_t layer, std::vector<at::Tensor> tensors) {
  Kept& kept = kept_[layer];
  MT_ASSERT(!kept.is_away, "layer ", layer, " was put away twice");
  kept.is_away = true;
  if (!copies_) {
    kept.tensors = std::move(tensors);
    return;
  }
  int64_t bytes = 0;
  kept.shapes.clear();
  for (at::Tensor& tensor : tensors) {
    if (tensor.defined()) tensor = tensor.detach().contiguous();
    bytes += padded_bytes(tensor);
    kept.shapes.push_back(tensor.defined() ? at::empty_like(tensor, at::kMeta) : at::Tensor());
  }
  if (kept.memory.empty()) kept.memory = pinned_pieces(bytes);
  send();
  while (leaving_.size() >= kMostLeaving) release_left();
  waiting_ = {layer, std::move(tensors)};
}

void HostLayers::send() {
  if (!waiting_) return;
  const Waiting waiting = *std::exchange(waiting_, {});
  const std::vector<at::Tensor>& memory = kept_.at(waiting.layer).memory;
  c10::Event made(device_.type());
  made.record(current_stream(device_));
  made.block(*copies_);
  {
    const c10::StreamGuard guard(*copies_);
    int64_t offset = 0;
    for (const at::Tensor& tensor : waiting.tensors) {
      if (!tensor.defined()) continue;
      for_each_run(tensor, memory, offset, [](const at::Tensor& here, at::Tensor there) {
        there.copy_(here, /*non_blocking=*/true);
      });
      offset += padded_bytes(tensor);
    }
  }
  c10::Event copied(device_.type());
  copied.record(*copies_);
  leaving_.push_back({waiting.tensors, std::move(copied)});
}

void HostLayers::release_left() {
  leaving_.front().copied.block(current_stream(device_));
  leaving_.pop_front();
}

void HostLayers::fetch(int64_t layer) {
  const auto found = kept_.find(layer);
  if (!copies_ || found == kept_.end() || !found->second.is_away || found->second.returned) return;
  Kept& kept = found->second;
  send();
  while (!leaving_.empty()) release_left();
  // Allocated in the order of the current stream, whose kernels may still use that memory.
  kept.tensors.clear();
  for (const at::Tensor& shape : kept.shapes) {
    kept.tensors.push_back(
        shape.defined() ? at::empty(shape.sizes(), shape.options().device(device_)) : at::Tensor());
  }
  c10::Event free(device_.type());
  free.record(current_stream(device_));
  free.block(*copies_);
  {
    const c10::StreamGuard guard(*copies_);
    int64_t offset = 0;
    for (const at::Tensor& tensor : kept.tensors) {
      if (!tensor.defined()) continue;
      for_each_run(tensor, kept.memory, offset, [](at::Tensor here, const at::Tensor& there) {
        here.copy_(there, /*non_blocking=*/true);
      });
      offset += padded_bytes(tensor);
    }
  }
  kept.returned.emplace(device_.type());
  kept.returned->record(*copies_);
}

std::vector<at::Tensor> HostLayers::take(int64_t layer) {
  fetch(layer);
  Kept& kept = kept_.at(layer);
  MT_ASSERT(kept.is_away, "layer ", layer, " is taken and was not put away");
  kept.is_away = false;
  if (kept.returned) kept.returned->block(current_stream(device_));
  kept.returned.reset();
  return std::exchange(kept.tensors, {});
}

void HostLayers::clear() {
  waiting_.reset();
  while (!leaving_.empty()) release_left();
  for (auto& [layer, kept] : kept_) {
    if (kept.is_away) {
      if (kept.returned) kept.returned->block(current_stream(device_));
      kept.returned.reset();
      kept.tensors.clear();
      kept.is_away = false;
    }
  }
}

int64_t HostLayers::host_bytes() const {
  int64_t bytes = 0;
  for (const auto& [layer, kept] : kept_) {
    for (const at::Tensor& piece : kept.memory) bytes += piece.numel();
  }
  return bytes;
}

}  // namespace mtraining::train
