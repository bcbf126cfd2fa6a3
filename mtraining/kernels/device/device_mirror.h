// DeviceMirror: runs a CUDA back end on parameters whose memory lies on the host. For tests.
//
// In:   host memory ranges and params that point into them. Out: the same params pointing into copies on the device; after the
//       launch everything is copied back, so that whatever was overwritten shows. Next: sm80/attention_test.cc.
// Stream: the default one; copies synchronise. Errors: ExternalError, InternalError for a pointer outside every range.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <span>
#include <vector>

#include "mtraining/base/check.h"
#include "mtraining/kernels/params.h"
#include "mtraining/kernels/ref/launch_case.h"

namespace mtraining::kernels::device {

using testing::MemoryRange;

class DeviceMirror {
 public:
  explicit DeviceMirror(std::span<const MemoryRange> ranges, int64_t workspace_bytes)
      : ranges_(ranges.begin(), ranges.end()) {
    for (const MemoryRange& range : ranges_) {
      offsets_.push_back(bytes_);
      bytes_ += (range.bytes + 2 * kAlignment - 1) / kAlignment * kAlignment;
    }
    workspace_ = bytes_;
    bytes_ += workspace_bytes;
    run(cudaMalloc(&memory_, bytes_), "cudaMalloc");
    upload();
  }
  ~DeviceMirror() { cudaFree(memory_); }
  DeviceMirror(const DeviceMirror&) = delete;
  DeviceMirror& operator=(const DeviceMirror&) = delete;

  /// All ranges as the host has them; the rest, the workspace too, is filled with ones.
  void upload() const {
    run(cudaMemset(memory_, 0xFF, bytes_), "cudaMemset");
    for (size_t i = 0; i < ranges_.size(); ++i)
      run(cudaMemcpy(memory_ + offsets_[i], ranges_[i].data, ranges_[i].bytes,
                     cudaMemcpyHostToDevice),
          "copying to the device");
  }
  /// Waits for the launch and copies everything back.
  void download() const {
    run(cudaDeviceSynchronize(), "the kernels");
    for (size_t i = 0; i < ranges_.size(); ++i)
      run(cudaMemcpy(ranges_[i].data, memory_ + offsets_[i], ranges_[i].bytes,
                     cudaMemcpyDeviceToHost),
          "copying from the device");
  }

  /// What all ranges hold on the device now.
  std::vector<char> read() const {
    std::vector<char> bytes(workspace_);
    run(cudaMemcpy(bytes.data(), memory_, workspace_, cudaMemcpyDeviceToHost),
        "copying from the device");
    return bytes;
  }

  void* workspace() const { return memory_ + workspace_; }

  template <typename T>
  T* at(T* host) const {
    if (host == nullptr) return nullptr;
    const auto address = reinterpret_cast<intptr_t>(host);
    for (size_t i = 0; i < ranges_.size(); ++i) {
      const auto begin = reinterpret_cast<intptr_t>(ranges_[i].data);
      if (address == begin || (address > begin && address < begin + ranges_[i].bytes))
        return reinterpret_cast<T*>(memory_ + offsets_[i] + (address - begin));
    }
    throw InternalError("a pointer of the parameters lies in no mirrored range");
  }
  ConstView at(ConstView view) const {
    view.data = at(static_cast<const char*>(view.data));
    return view;
  }
  View at(View view) const {
    view.data = at(static_cast<char*>(view.data));
    return view;
  }
  KeySource at(KeySource source) const {
    source.k = at(source.k);
    source.v = at(source.v);
    source.dk = at(source.dk);
    source.dv = at(source.dv);
    source.block_starts = at(source.block_starts);
    source.blocks.entries = at(source.blocks.entries);
    source.blocks.num_entries = at(source.blocks.num_entries);
    source.blocks.row_begin = at(source.blocks.row_begin);
    source.blocks.key_blocks = at(source.blocks.key_blocks);
    source.columns.key_rows = at(source.columns.key_rows);
    source.columns.positions = at(source.columns.positions);
    source.columns.counts = at(source.columns.counts);
    return source;
  }
  /// What forward and backward share; sources: where the translated ones go.
  void translate(AttentionParams& p, std::vector<KeySource>& sources) const {
    sources.clear();
    for (int s = 0; s < p.num_sources; ++s) sources.push_back(at(p.sources[s]));
    p.sources = sources.data();
    p.q = at(p.q);
    p.q_block_starts = at(p.q_block_starts);
    p.document_start = at(p.document_start);
    p.diagonal_bits = at(p.diagonal_bits);
    p.workspace = workspace();
  }

 private:
  static constexpr int64_t kAlignment = 256;
  static void run(cudaError_t error, const char* what) {
    MT_CHECK_EXTERNAL(error == cudaSuccess, what, ": ", cudaGetErrorString(error));
  }

  std::vector<MemoryRange> ranges_;
  std::vector<int64_t> offsets_;
  int64_t bytes_ = 0, workspace_ = 0;
  char* memory_ = nullptr;
};

}  // namespace mtraining::kernels::device
