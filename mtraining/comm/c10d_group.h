// What the Gloo and the NCCL communicators share; private to the c10d files of this folder.
//
// In:   a c10d store. Out: tensors that wrap raw buffers; the board where the first cause of a failure is kept; the two makers.
// Next: c10d.cc opens communicators with it.
#pragma once

#include <ATen/ATen.h>

#include <chrono>
#include <future>
#include <memory>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "mtraining/base/check.h"
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

/// Where the job's first cause of failure is kept, and who must be woken when this rank gives up.
class FailureBoard {
 public:
  FailureBoard(c10::intrusive_ptr<c10d::Store> store, int rank)
      : store_(std::move(store)), rank_(rank) {}

  /// Keeps `cause` if the job has none yet.
  void report(const std::string& cause) noexcept {
    const std::string text = concat("rank ", rank_, ": ", cause);
    in_time(milliseconds(0), [store = store_, text] {
      store->compareSet(kKey, {}, std::vector<uint8_t>(text.begin(), text.end()));
      return std::string();
    });
  }

  /// The job's first cause, or nothing if none is known within `patience` (the failing rank may still be about to report it).
  std::string find(milliseconds patience) noexcept {
    return in_time(patience, [store = store_, deadline = steady_clock::now() + patience] {
      for (;;) {
        if (store->check({kKey})) {
          const std::vector<uint8_t> value = store->get(kKey);
          return std::string(value.begin(), value.end());
        }
        if (steady_clock::now() >= deadline) return std::string();
        std::this_thread::sleep_for(milliseconds(20));
      }
    });
  }

  /// For an operation that failed with `error`: ExternalError with the job's first cause, which may be this one.
  [[noreturn]] void raise(const std::string& text, const std::string& error) {
    std::string cause = find(milliseconds(1000));
    if (cause.empty()) report(concat(text, ": ", error));
    throw ExternalError(cause.empty() ? concat(text, ": ", error)
                                      : concat(text, ": ", error, "; first cause: ", cause));
  }

 private:
  /// What the store says, or nothing: it is on rank 0, which may have died, or hang, and then never answers.
  template <typename Ask>
  static std::string in_time(milliseconds patience, Ask ask) noexcept {
    try {
      const auto answer = std::make_shared<std::promise<std::string>>();
      std::future<std::string> known = answer->get_future();
      std::thread([answer, ask = std::move(ask)] {
        std::string text;
        try {
          text = ask();
        } catch (...) {
        }
        answer->set_value(text);
      }).detach();
      if (known.wait_for(patience + milliseconds(2000)) == std::future_status::ready)
        return known.get();
    } catch (...) {  // no thread to be had
    }
    return {};
  }

  static constexpr const char* kKey = "mtraining/failure";
  c10::intrusive_ptr<c10d::Store> store_;
  int rank_;
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
