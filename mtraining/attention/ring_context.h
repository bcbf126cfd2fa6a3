// RingContext::State: what ring_attention.h keeps behind RingContext. Private to attention/.
//
// In:   RingOptions, a Transport. Out: layout, schedules, open communicators, shared buffers. Next: ring_attention.cc, autograd.cc.
#pragma once

#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <array>
#include <chrono>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "mtraining/attention/buffers.h"
#include "mtraining/attention/device_lists.h"
#include "mtraining/attention/index_plan.h"
#include "mtraining/attention/list_uploads.h"
#include "mtraining/attention/ring_attention.h"

namespace mtraining::attention {

inline constexpr int kNumChannels = 6;

struct RingContext::State {
  State(const RingOptions& options, comm::Transport& transport, std::vector<int> members);

  comm::Communicator& channel(ring::Channel channel) {
    return *channels[static_cast<size_t>(channel)];
  }
  /// Rank in the channel's group of a cp rank that belongs to it.
  int group_rank(ring::Channel channel, int cp_rank) const;
  /// A stretch of this thread's work, or of its stream's, that the observer is to hear of; nothing where there is none.
  struct Stretch {
    int64_t begin_us = 0;
    std::optional<c10::Event> begin;  ///< on a GPU
  };
  Stretch begin_stretch(at::Device device) const;
  void end_stretch(Stretch stretch, const char* what, int ring_step, int64_t pairs);
  /// Tells the observer how long the transfers are under way from now on; on a GPU alone. Nobody waits, nor is anything put between
  /// what ranks do: a watched pass is as the same one unwatched.
  void watch_transfer(std::span<const comm::WorkPtr> works, at::Device device,
                      std::string_view channel, int ring_step);
  /// Tells the observer of the stretches that the device has done; of all of them, having waited.
  void report_stretches(bool wait);

  RingOptions options;
  layout::Layout layout;
  int cp_rank = 0;
  ring::Schedule forward, backward;
  std::array<comm::CommunicatorPtr, kNumChannels> channels;
  comm::CommunicatorPtr index_group;  ///< for host memory
  comm::CommunicatorPtr
      device_index_group;  ///< for device memory, where the transport has it; else null
  comm::CommunicatorPtr columns_group;             ///< over all cp ranks
  comm::CommunicatorPtr agreement_group;           ///< likewise, for host memory: what a call is
  std::vector<std::vector<int32_t>> block_starts;  ///< by cp rank
  std::vector<int64_t> positions;                  ///< of this rank's rows
  StepObserver observer;
  int64_t tag = -1;
  /// Shared with whoever enqueues the last of a transfer, which may be a peer's thread.
  struct DeviceStretch {
    DeviceStretch(const StepTiming& known, c10::Event first)
        : timing(known), begin(std::move(first)) {}
    StepTiming timing;
    c10::Event begin;
    std::mutex mutex;
    std::optional<c10::Event> end;  ///< under the mutex; absent: not enqueued yet
  };
  std::deque<std::shared_ptr<DeviceStretch>> unreported;
  std::map<std::string_view, c10::Stream>
      watching;                     ///< by channel: a stream that waits for its transfers
  std::optional<c10::Event> clock;  ///< an event that is over, and when it was
  double clock_us = 0;
  Buffers buffers;
  std::shared_ptr<DeviceLists> estimated;  ///< beside a given pattern, the last one
  ListUploads uploads;                     ///< of block_starts
  std::vector<int32_t>
      block_owners;  ///< [blocks, 2] rank and local block of each; empty where the layout has no blocks
  std::vector<int32_t> source_ranks;  ///< 0 .. cp_size - 1
  std::vector<int32_t>
      residue_distances;  ///< [cp_size] residue of this rank minus that of each; empty where there are none
  bool forward_by_torch = false;  ///< whose kernels the last forward took
  IndexPlanCache plans;
  std::shared_ptr<const index::Index> dense;  ///< the last dense index asked for
};

}  // namespace mtraining::attention
