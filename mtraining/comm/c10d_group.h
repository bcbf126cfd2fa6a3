// What the Gloo and the NCCL communicators share; private to the c10d files of this folder.
//
// In:   a c10d store. Out: tensors that wrap raw buffers; the board where the first cause of a failure is kept; the two makers.
// Next: c10d.cc opens communicators with it.
#pragma once

#include <ATen/ATen.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "mtraining/base/check.h"
#include "mtraining/comm/patient_worker.h"
#include "mtraining/comm/transport.h"

namespace gloo::transport {
class Device;
}

namespace mtraining::comm::c10d_detail {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

inline at::ScalarType scalar_type(ElementType type) {
  switch (type) {
    case ElementType::kInt64:
      return at::kLong;
    case ElementType::kInt32:
      return at::kInt;
    case ElementType::kFloat32:
      return at::kFloat;
    case ElementType::kFloat64:
      return at::kDouble;
    case ElementType::kBFloat16:
      return at::kBFloat16;
  }
  MT_ASSERT(false, "element type ", static_cast<int>(type));
}

inline at::Tensor wrap(const void* data, int64_t bytes, ElementType type, at::Device device) {
  return at::from_blob(const_cast<void*>(data), {bytes / size_of(type)},
                       at::TensorOptions().dtype(scalar_type(type)).device(device));
}
inline at::Tensor wrap_bytes(const void* data, int64_t bytes, at::Device device = at::kCPU) {
  return at::from_blob(const_cast<void*>(data), {bytes},
                       at::TensorOptions().dtype(at::kByte).device(device));
}

/// First line only: torch appends a C++ backtrace to its errors.
inline std::string first_line(const std::exception& e) {
  const std::string text = e.what();
  return text.substr(0, text.find('\n'));
}

/// Where the job's first cause of failure is kept, and who must be woken when this rank gives up. The store is on rank 0, which may
/// have died, or hang, and then never answers: one thread asks it, and nobody waits for an answer longer than he says.
class FailureBoard {
 public:
  static constexpr milliseconds kAnswer{2000};  ///< a store that takes longer hangs

  FailureBoard(c10::intrusive_ptr<c10d::Store> store, int rank)
      : store_(std::move(store)), rank_(rank) {}

  /// Keeps `cause` if the job has none yet. Of one rank only the first can be it.
  void report(const std::string& cause) noexcept {
    try {
      if (reported_.exchange(true)) return;
      const std::string text = concat("rank ", rank_, ": ", cause);
      worker_.ask(
          kAnswer,
          [store = store_, text] {
            store->compareSet(kKey, {}, std::vector<uint8_t>(text.begin(), text.end()));
            return true;
          },
          PatientWorker::WhenLate::kAskStill);
    } catch (...) {  // a store that is gone
    }
  }

  /// The job's first cause, or nothing if none is known within `patience` (the failing rank may still be about to report it).
  std::string find(milliseconds patience) noexcept {
    const auto deadline = steady_clock::now() + patience;
    try {
      for (;;) {
        const auto cause = worker_.ask(kAnswer, [store = store_]() -> std::string {
          if (!store->check({kKey})) return {};
          const std::vector<uint8_t> value = store->get(kKey);
          return {value.begin(), value.end()};
        });
        if (!cause || !cause->empty()) return cause.value_or(std::string());
        if (steady_clock::now() >= deadline) return {};
        std::this_thread::sleep_for(milliseconds(20));
      }
    } catch (...) {
      return {};
    }
  }

  /// What `question` of the store returns; nothing where the store does not answer in time. Errors: its own.
  template <typename Question>
  auto ask(milliseconds patience, Question question) {
    return worker_.ask(patience, std::move(question));
  }

  /// For an operation that failed with `error`: ExternalError with the job's first cause, which may be this one.
  [[noreturn]] void raise(const std::string& text, const std::string& error) {
    std::string cause = find(milliseconds(1000));
    if (cause.empty()) report(concat(text, ": ", error));
    throw ExternalError(cause.empty() ? concat(text, ": ", error)
                                      : concat(text, ": ", error, "; first cause: ", cause));
  }

 private:
  static constexpr const char* kKey = "mtraining/failure";
  c10::intrusive_ptr<c10d::Store> store_;
  int rank_;
  std::atomic<bool> reported_{false};
  PatientWorker worker_;
};
using FailureBoardPtr = std::shared_ptr<FailureBoard>;

/// A communicator that its transport can break on purpose, so that peers notice at once.
class Breakable {
 public:
  virtual ~Breakable() = default;
  virtual void break_connections() noexcept = 0;
};

struct GroupOptions {
  std::string name;
  int rank = 0, size = 1;  // in the group
  c10::intrusive_ptr<c10d::Store> store;
  FailureBoardPtr board;
  milliseconds timeout{0};
};
/// Each is also a Breakable. Collective over the group.
CommunicatorPtr make_gloo_group(const GroupOptions& options,
                                const std::shared_ptr<gloo::transport::Device>& device);
#ifdef USE_C10D_NCCL
CommunicatorPtr make_nccl_group(const GroupOptions& options);
/// cudaStream_t of this thread.
void* current_cuda_stream();
#endif

}  // namespace mtraining::comm::c10d_detail
