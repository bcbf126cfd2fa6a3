// The laws of a Transport over NCCL: on one rank, where no NCCL is opened, and on two GPUs.
#include <ATen/ATen.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include "mtraining/comm/c10d.h"
#include "mtraining/comm/mirrored_transport.h"
#include "mtraining/comm/transport_laws.h"
#include "mtraining/testing/process_ranks.h"

namespace mtraining::comm {
namespace {

using mirrored::MirroredTransport;
using mirrored::OnDevice;
using mirrored::stream_of_thread;
using testing::RankProcess;

void on_ranks(int size, const std::function<void(Transport&)>& body) {
  const auto run = testing::run_processes(size, free_port, [&](const RankProcess& process) {
    mirrored::run(cudaSetDevice(process.rank), "choosing a device");
    const mirrored::ThreadStream stream;
    const c10::cuda::CUDAStreamGuard current(c10::cuda::getStreamFromExternal(
        stream_of_thread, static_cast<c10::DeviceIndex>(process.rank)));
    auto transport = make_c10d({.backend = "nccl",
                                .master_port = process.port,
                                .rank = process.rank,
                                .size = process.size,
                                .timeout = std::chrono::seconds(40)});
    body(*transport);
  });
  if (!run.in_child) testing::expect_all_passed(run);
}

void laws_hold(int size) {
  on_ranks(size, [](Transport& transport) {
    MirroredTransport mirrored(transport);
    laws::all_laws(mirrored);
  });
}
TEST(Nccl, EveryCallDoesWhatItSaysOnOneRank) { laws_hold(1); }
TEST(Nccl, EveryCallDoesWhatItSaysOnTwoRanks) { laws_hold(2); }

TEST(Nccl, AGroupOfOneRankIsOpenAtOnceAndClosedByAnAbort) {
  on_ranks(1, [](Transport& transport) {
    transport.open("first", {0})->barrier();
    const auto start = std::chrono::steady_clock::now();
    for (int i = 0; i < 20; ++i) transport.open("another", {0});
    EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::milliseconds(500));
    const CommunicatorPtr group = transport.open("alone", {0});
    EXPECT_FALSE(group->needs_multiprocessors());
    transport.abort("enough");
    const std::string text = laws::error_of([&] { group->barrier(); });
    EXPECT_NE(text.find("communicator 'alone' rank 0, barrier() as collective 0"),
              std::string::npos)
        << text;
  });
}

TEST(Nccl, ADroppedExchangeIsOverBeforeItsMemoryIsUsedAgain) {
  on_ranks(2, [](Transport& transport) {
    const CommunicatorPtr group = transport.open("ring", {0, 1});
    const int peer = 1 - group->rank();
    constexpr int64_t kBytes = 256 << 20;
    const OnDevice mine(kBytes), got(kBytes);
    mirrored::run(cudaMemsetAsync(mine.data(), 1, kBytes, stream_of_thread), "memset");
    for (int repeat = 0; repeat < 3; ++repeat) {
      group->exchange(peer, {{mine.data(), kBytes}}, peer, {{got.data(), kBytes}}).reset();
      mirrored::run(cudaMemsetAsync(got.data(), 2, kBytes, stream_of_thread), "memset");
    }
    group->barrier();
    std::vector<unsigned char> bytes(kBytes);
    got.get(bytes.data());
    EXPECT_EQ(std::count(bytes.begin(), bytes.end(), 2), kBytes);
  });
}

}  // namespace
}  // namespace mtraining::comm
