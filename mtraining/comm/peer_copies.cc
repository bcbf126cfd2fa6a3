#include "mtraining/comm/peer_copies.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "mtraining/base/check.h"
#include "mtraining/comm/call.h"
#include "mtraining/comm/device_element.h"
#include "mtraining/comm/peer_board.h"
#include "mtraining/kernels/exchange_cuda/exchange.h"

namespace mtraining::comm {
namespace {

namespace exchange_cuda = kernels::exchange_cuda;
using namespace peer_copies;  // NOLINT: this file's other half
using std::chrono::milliseconds;
using std::chrono::steady_clock;

constexpr int64_t kFirstBytes = int64_t{1} << 20;

/// What a call receives.
struct Receipt {
  std::string text;  // the call
  struct Part {
    int from = 0;
    uint64_t number = 0;
    std::vector<Buffer> to;  // copies; of a sum: none
  };
  std::vector<Part> parts;  // ascending by rank
  Call call;
  bool exchange = false;
  bool sums = false;
  const void* own = nullptr;  // of a sum: this rank's part, at its place in the order
  void* sum = nullptr;
  std::shared_ptr<Event>
      posted;  // on the caller's stream: destinations are free, own parts are there
  std::shared_ptr<Event> moved;
  steady_clock::time_point deadline;
  // Under the communicator's mutex:
  bool dropped = false;  // nobody waits: its destinations are no longer there
  bool taking = false;   // what moves its bytes is being enqueued
  bool over = false;     // enqueued, or failed
  std::string error;
  std::vector<Work::Then> then;
};
using ReceiptPtr = std::shared_ptr<Receipt>;

class PeerCopies : public PeerCopiesCommunicator, public std::enable_shared_from_this<PeerCopies> {
 public:
  PeerCopies(std::string name, const PeerCopiesOptions& options)
      : name_(std::move(name)),
        options_(options),
        rank_(options.host->rank()),
        size_(options.host->size()) {
    MT_CHECK_SUPPORTED(size_ <= kMaxRanks, "communicator '", name_, "': copies among at most ",
                       kMaxRanks, " GPUs of a host, got ", size_);
    check_cuda(cudaGetDevice(&device_), "asking for the device");
    board_.emplace(*options_.host);
    std::string error = board_->error();
    try {
      agree(error);
      attempt(error, [&] { share(); });
      agree(error);
      attempt(error, [&] { open_peers(); });
      agree(error);
      thread_ = std::thread([this] { work(); });
    } catch (const Unsupported&) {  // on all members alike
      close_peers();
      attempt(error, [&] {
        options_.host->barrier();  // nobody looks at anybody's memory any more
        free_own();
      });
      throw;
    } catch (...) {
      close_peers();
      throw;
    }
  }
  ~PeerCopies() override {
    {
      const std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    wake_.notify_all();
    if (thread_.joinable()) thread_.join();
    // The device may wait for a rank that never comes, and whoever frees memory waits for the device: then it is left to the process's end.
    if (!settles()) return;
    close_peers();
    free_own();
  }

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  const std::string& name() const override { return name_; }
  void break_off(const std::string& cause) noexcept override {
    {
      const std::lock_guard lock(mutex_);
      if (broken_.empty()) broken_ = cause.empty() ? "broken off" : cause;
    }
    wake_.notify_all();
    over_.notify_all();
  }

  WorkPtr exchange(int to, std::vector<ConstBuffer> send, int from,
                   std::vector<Buffer> recv) override {
    check_exchange(*this, to, send, from, recv);
    MT_CHECK_ARG(send.size() <= kMaxParts && recv.size() <= kMaxParts, "communicator '", name_,
                 "': exchange: expected at most ", kMaxParts, " parts");
    ++counters_.calls;
    ReceiptPtr receipt =
        start(describe_exchange(exchanges_++, to, part_bytes(send), from, part_bytes(recv)), {});
    receipt->exchange = true;
    if (to == rank_) {
      MT_CHECK_ARG(part_bytes(send) == part_bytes(recv), "communicator '", name_,
                   "': an exchange does not match: ", receipt->text);
      for (size_t p = 0; p < send.size(); ++p) copy_own(recv[p].data, send[p]);
    } else {
      for (const ConstBuffer& part : send) counters_.bytes_sent += part.bytes;
      Letter letter;
      letter.only = to;
      letter.to[to] = std::move(send);
      post(letter, *receipt);
      receipt->parts.push_back({from, ++received_[from], std::move(recv)});
    }
    return finish(std::move(receipt));
  }

  WorkPtr all_gather(ConstBuffer send, std::vector<Buffer> recv) override {
    ReceiptPtr receipt = start_collective(check_all_gather(*this, send, recv));
    if (send.bytes > 0) {
      copy_own(recv[rank_].data, send);
      Letter letter;
      letter.shared = send;
      post(letter, *receipt);
      for (int r = 0; r < size_; ++r)
        if (r != rank_) receipt->parts.push_back({r, ++received_[r], {recv[r]}});
    }
    return finish(std::move(receipt));
  }

  WorkPtr reduce_scatter(std::vector<ConstBuffer> send, Buffer recv, ElementType type) override {
    ReceiptPtr receipt = start_collective(check_reduce_scatter(*this, send, recv, type));
    if (recv.bytes > 0) {
      Letter letter;
      for (int r = 0; r < size_; ++r)
        if (r != rank_) letter.to[r] = {send[r]};
      post(letter, *receipt);
      sum(*receipt, send[rank_].data, recv.data);
    }
    return finish(std::move(receipt));
  }

  WorkPtr all_reduce(Buffer data, ElementType type, ReduceOp op) override {
    ReceiptPtr receipt = start_collective(check_all_reduce(*this, data, type, op));
    if (data.bytes > 0) {
      Letter letter;
      letter.shared = {data.data, data.bytes};
      post(letter, *receipt);
      sum(*receipt, data.data, data.data);
    }
    return finish(std::move(receipt));
  }

  WorkPtr broadcast(Buffer data, int root) override {
    ReceiptPtr receipt = start_collective(check_broadcast(*this, data, root));
    if (data.bytes > 0 && rank_ == root) {
      Letter letter;
      letter.shared = {data.data, data.bytes};
      post(letter, *receipt);
    } else if (data.bytes > 0) {
      receipt->parts.push_back({root, ++received_[root], {data}});
    }
    return finish(std::move(receipt));
  }

  void barrier() override {
    start_collective({});
    options_.host->barrier();
  }

 private:
  /// What a call sends: the same bytes to all others, or to each its parts.
  struct Letter {
    ConstBuffer shared;
    int only = -1;  // to this rank
    std::array<std::vector<ConstBuffer>, kMaxRanks> to;
  };

  class CopiesWork : public Work {
   public:
    CopiesWork(std::shared_ptr<PeerCopies> owner, ReceiptPtr receipt)
        : owner_(std::move(owner)), receipt_(std::move(receipt)) {}
    ~CopiesWork() override {
      if (!waited_) owner_->drop(*receipt_);
    }
    void wait() override {
      owner_->await(*receipt_);
      waited_ = true;
    }
    void when_enqueued(const Then& then) override { owner_->when_enqueued(*receipt_, then); }

   private:
    std::shared_ptr<PeerCopies> owner_;
    ReceiptPtr receipt_;
    bool waited_ = false;
  };

  template <typename Body>
  static void attempt(std::string& error, const Body& body) {
    try {
      body();
    } catch (const std::exception& e) {
      error = e.what();
    }
  }
  /// Unsupported on all ranks where any has an error.
  void agree(const std::string& error) {
    std::array<char, 256> mine{};
    std::strncpy(mine.data(), error.c_str(), mine.size() - 1);
    std::vector<std::array<char, 256>> all(static_cast<size_t>(size_));
    std::vector<Buffer> parts;
    for (auto& part : all) parts.push_back({part.data(), static_cast<int64_t>(part.size())});
    options_.host->all_gather({mine.data(), static_cast<int64_t>(mine.size())}, parts)->wait();
    for (int r = 0; r < size_; ++r) {
      MT_CHECK_SUPPORTED(all[r][0] == '\0', "communicator '", name_,
                         "': copies between the GPUs of a host are not possible here: rank ", r,
                         ": ", all[r].data());
    }
  }

  void allocate(Slot& slot, int64_t bytes) {
    void* memory = nullptr;
    check_cuda(cudaMalloc(&memory, static_cast<size_t>(bytes)), "cudaMalloc");
    allocated_.push_back(memory);
    slot.memory = memory;
    slot.bytes = bytes;
    ++slot.generation;
    check_cuda(cudaIpcGetMemHandle(&slot.handle, memory), "sharing memory");
  }
  /// First memory and events of this rank, for the others to open.
  void share() {
    int least = 0, greatest = 0;
    check_cuda(cudaDeviceGetStreamPriorityRange(&least, &greatest), "asking for priorities");
    check_cuda(cudaStreamCreateWithPriority(&stream_, cudaStreamNonBlocking, greatest),
               "making a stream");
    Page& page = board_->page(rank_);
    page.process = ::getpid();
    page.device = device_;
    for (int s = 0; s < kSlots; ++s) {
      Slot& slot = slots_[s];
      allocate(slot, kFirstBytes);
      const int32_t mark = mark_of(rank_, s);
      check_cuda(cudaMemcpy(slot.memory, &mark, sizeof(mark), cudaMemcpyHostToDevice), "marking");
      // So small a copy is only under way when the call returns.
      check_cuda(cudaDeviceSynchronize(), "marking");
      slot.ready = std::make_unique<Event>(true);
      page.ready[s] = slot.ready->share();
      page.posts[s].address = slot.memory;
      page.posts[s].generation = slot.generation;
      page.posts[s].memory = slot.handle;
      for (int r = 0; r < size_; ++r) {
        if (r == rank_) continue;
        peers_[r][s].done = std::make_unique<Event>(true);
        page.done[r][s] = peers_[r][s].done->share();
      }
    }
  }
  static int32_t mark_of(int rank, int slot) { return 0x6d74 + 100 * rank + slot; }
  void open_peers() {
    for (int r = 0; r < size_; ++r) {
      if (r == rank_) continue;
      const Page& page = board_->page(r);
      for (int s = 0; s < kSlots; ++s) {
        PeerSlot& peer = peers_[r][s];
        peer.ready = std::make_unique<Event>(page.ready[s], is_here(r));
        peer.read = std::make_unique<Event>(page.done[rank_][s], is_here(r));
        map(r, peer, page.posts[s]);
        int32_t mark = 0;
        check_cuda(cudaMemcpy(&mark, peer.memory, sizeof(mark), cudaMemcpyDeviceToHost),
                   "reading a peer's memory");
        MT_CHECK_EXTERNAL(mark == mark_of(r, s), "peer copies: read ", mark,
                          " in the memory of rank ", r, ", expected ", mark_of(r, s));
      }
    }
  }
  /// A thread of this process, as where a test or a doctor has all ranks.
  bool is_here(int rank) const { return board_->page(rank).process == ::getpid(); }
  void map(int rank, PeerSlot& peer, const Post& post) {
    if (peer.generation == post.generation) return;
    if (is_here(rank)) {
      const int device = board_->page(rank).device;
      const cudaError_t error =
          device == device_ ? cudaSuccess : cudaDeviceEnablePeerAccess(device, 0);
      if (error == cudaErrorPeerAccessAlreadyEnabled) {
        cudaGetLastError();
      } else {
        check_cuda(error, "reaching a peer's memory");
      }
      peer.memory = post.address;
      peer.generation = post.generation;
      return;
    }
    // The old memory stays open until the end, as it is there until then: the device may still read it, and must not be waited for.
    void* memory = nullptr;
    check_cuda(cudaIpcOpenMemHandle(&memory, post.memory, cudaIpcMemLazyEnablePeerAccess),
               "opening a peer's memory");
    opened_.push_back(memory);
    peer.memory = memory;
    peer.generation = post.generation;
  }
  void close_peers() {
    for (void* memory : opened_) cudaIpcCloseMemHandle(memory);
    opened_.clear();
  }
  void free_own() {
    if (stream_ != nullptr) cudaStreamDestroy(stream_);
    stream_ = nullptr;
    for (void* memory : allocated_) cudaFree(memory);
    allocated_.clear();
  }

  /// Waits until neither this rank nor a peer has anything to do with the memory. False where that does not come.
  bool settles() {
    const auto start = steady_clock::now();
    auto asked = start;
    if (fails(start + milliseconds(201), asked)) return false;
    const auto is_over = [&](const auto& done, milliseconds patience) {
      while (!done()) {
        const auto now = steady_clock::now();
        if (now - start > patience || fails(now, asked)) return false;
        std::this_thread::sleep_for(milliseconds(1));
      }
      return true;
    };
    // Others may be reading; whoever has failed or is gone no longer does, and nobody is told.
    constexpr milliseconds kPeers{2000};
    for (int s = 0; s < kSlots; ++s) {
      for (int r = 0; r < size_; ++r) {
        if (slots_[s].last[r] == 0) continue;
        if (!is_over([&] { return board_->page(r).taken[rank_].load() >= slots_[s].last[r]; },
                     kPeers))
          return false;
        // An event of this process may be gone by now: whoever has ranks as threads lets them meet before they end.
        if (is_here(r)) continue;
        const cudaEvent_t read = peers_[r][s].read->get();
        if (!is_over([&] { return cudaEventQuery(read) != cudaErrorNotReady; }, kPeers))
          return false;
      }
      const cudaEvent_t ready = slots_[s].ready->get();
      if (!is_over([&] { return cudaEventQuery(ready) != cudaErrorNotReady; }, options_.timeout))
        return false;
    }
    return is_over([&] { return cudaStreamQuery(stream_) != cudaErrorNotReady; }, options_.timeout);
  }
  /// Whether the job has failed, as far as this rank knows.
  bool fails(steady_clock::time_point now, steady_clock::time_point& asked) {
    {
      const std::lock_guard lock(mutex_);
      if (!broken_.empty()) return true;
    }
    if (now - asked <= milliseconds(200) || !options_.failure) return false;
    asked = now;
    return !options_.failure().empty();
  }

  cudaStream_t caller_stream() const {
    return options_.current_stream ? static_cast<cudaStream_t>(options_.current_stream()) : nullptr;
  }
  void copy_own(void* to, ConstBuffer from) {
    if (from.bytes == 0 || to == from.data) return;
    check_cuda(cudaMemcpyAsync(to, from.data, static_cast<size_t>(from.bytes),
                               cudaMemcpyDeviceToDevice, caller_stream()),
               "copying");
  }
  std::string named(const std::string& call) const {
    return concat("communicator '", name_, "' rank ", rank_, ", ", call);
  }

  ReceiptPtr start(std::string text, const Call& call) {
    auto receipt = std::make_shared<Receipt>();
    receipt->text = std::move(text);
    receipt->call = call;
    receipt->deadline = steady_clock::now() + options_.timeout;
    return receipt;
  }
  ReceiptPtr start_collective(Call call) {
    call.sequence = collectives_++;
    ++counters_.calls;
    counters_.bytes_sent += payload_bytes(call, rank_, size_);
    return start(describe(call), call);
  }

  /// The job has failed, or the time is over.
  std::string trouble(const Receipt& receipt, steady_clock::time_point& asked) {
    const auto now = steady_clock::now();
    {
      const std::lock_guard lock(mutex_);
      if (!broken_.empty()) return broken_;
    }
    if (now > receipt.deadline) return concat("timeout after ", options_.timeout.count(), " ms");
    if (now - asked > milliseconds(200) && options_.failure) {
      asked = now;
      const std::string cause = options_.failure();
      if (!cause.empty()) return concat("first cause: ", cause);
    }
    return {};
  }

  /// Fills the next slot on the caller's stream and tells the addressees.
  void post(const Letter& letter, const Receipt& receipt) {
    const int number_of_slot = static_cast<int>(posts_++ % kSlots);
    Slot& slot = slots_[number_of_slot];
    Post& page = board_->page(rank_).posts[number_of_slot];
    const cudaStream_t stream = caller_stream();
    auto asked = steady_clock::now();
    for (int r = 0; r < size_; ++r) {
      if (slot.last[r] == 0) continue;
      while (board_->page(r).taken[rank_].load(std::memory_order_acquire) < slot.last[r]) {
        const std::string cause = trouble(receipt, asked);
        MT_CHECK_EXTERNAL(cause.empty(), named(receipt.text), ": rank ", r,
                          " has not come to an earlier call: ", cause);
        std::this_thread::yield();
      }
      peers_[r][number_of_slot].read->hold(stream);
      page.number[r].store(0, std::memory_order_relaxed);
      slot.last[r] = 0;
    }
    int64_t bytes = letter.shared.bytes;
    const auto padded = [](int64_t size) { return (size + 255) / 256 * 256; };
    for (const auto& parts : letter.to)
      for (const ConstBuffer& part : parts) bytes += padded(part.bytes);
    // What was there stays until the end: peers may have it open.
    if (bytes > slot.bytes) allocate(slot, std::max(bytes, slot.bytes + slot.bytes / 2));
    page.address = slot.memory;
    page.generation = slot.generation;
    page.memory = slot.handle;
    page.call = receipt.call;
    page.parts = letter.only < 0 ? -1 : static_cast<int32_t>(letter.to[letter.only].size());
    int64_t offset = 0;
    const auto put = [&](const ConstBuffer& part) {
      if (part.bytes > 0) {
        check_cuda(
            cudaMemcpyAsync(static_cast<char*>(slot.memory) + offset, part.data,
                            static_cast<size_t>(part.bytes), cudaMemcpyDeviceToDevice, stream),
            "filling a slot");
      }
      const int64_t begin = offset;
      offset += padded(part.bytes);
      return begin;
    };
    std::array<bool, kMaxRanks> addressed = {};
    if (letter.shared.bytes > 0) put(letter.shared);
    for (int r = 0; r < size_; ++r) {
      if (r == rank_) continue;
      addressed[r] = letter.only < 0 || letter.only == r;
      page.offset[r] = {};
      page.bytes[r] = {};
      if (letter.shared.bytes > 0) page.bytes[r][0] = letter.shared.bytes;
      for (size_t p = 0; p < letter.to[r].size(); ++p) {
        page.offset[r][p] = put(letter.to[r][p]);
        page.bytes[r][p] = letter.to[r][p].bytes;
      }
    }
    slot.ready->record(stream);
    for (int r = 0; r < size_; ++r) {
      if (!addressed[r]) continue;
      slot.last[r] = ++sent_[r];
      page.number[r].store(slot.last[r], std::memory_order_release);
    }
  }

  void sum(Receipt& receipt, const void* own, void* to) {
    receipt.sums = true;
    receipt.own = own;
    receipt.sum = to;
    for (int r = 0; r < size_; ++r)
      if (r != rank_) receipt.parts.push_back({r, ++received_[r], {}});
  }

  WorkPtr finish(ReceiptPtr receipt) {
    receipt->posted = std::make_shared<Event>(false);
    receipt->posted->record(caller_stream());
    if (receipt->parts.empty() && !receipt->sums) {
      receipt->moved = receipt->posted;
      receipt->over = true;
    } else {
      receipt->moved = std::make_shared<Event>(false);
      const std::lock_guard lock(mutex_);
      pending_.push_back(receipt);
    }
    wake_.notify_one();
    return std::make_unique<CopiesWork>(shared_from_this(), std::move(receipt));
  }

  void await(const Receipt& receipt) {
    {
      std::unique_lock lock(mutex_);
      over_.wait(lock, [&] { return receipt.over || !broken_.empty(); });
      if (!receipt.over || !receipt.error.empty()) {
        const std::string cause =
            concat(named(receipt.text), ": ", receipt.error.empty() ? broken_ : receipt.error);
        lock.unlock();
        if (options_.report) options_.report(cause);
        throw ExternalError(cause);
      }
    }
    receipt.moved->hold(caller_stream());
  }
  /// Nobody waits for it: no byte arrives after this, but for what the current stream's next work waits for. Peers see nothing of it.
  void drop(Receipt& receipt) noexcept {
    try {
      {
        std::unique_lock lock(mutex_);
        receipt.dropped = true;
        receipt.then.clear();
        over_.wait(lock, [&] { return !receipt.taking; });
        if (!receipt.over || !receipt.error.empty()) return;
      }
      receipt.moved->hold(caller_stream());
    } catch (...) {  // a device that fails says so to whoever uses it next
    }
  }
  void when_enqueued(Receipt& receipt, const Work::Then& then) {
    {
      const std::lock_guard lock(mutex_);
      if (!receipt.over) receipt.then.push_back(then);
      if (!receipt.over || !receipt.error.empty()) return;
    }
    then([&] { receipt.moved->hold(caller_stream()); });
  }

  // ---- the thread ----

  void work() {
    cudaSetDevice(device_);
    auto asked = steady_clock::now();
    for (;;) {
      ReceiptPtr next;
      {
        std::unique_lock lock(mutex_);
        wake_.wait(lock, [&] { return stopping_ || !pending_.empty(); });
        if (stopping_) return;
        next = pending_.front();
      }
      std::string error;
      // One after the other: the calls of a communicator have an order.
      attempt(error, [&] {
        for (const Receipt::Part& part : next->parts) {
          for (int looks = 0; find(part) < 0; ++looks) {
            const std::string cause = trouble(*next, asked);
            MT_CHECK_EXTERNAL(cause.empty(), "rank ", part.from, " has not come to it: ", cause);
            {
              const std::lock_guard lock(mutex_);
              MT_CHECK_EXTERNAL(!stopping_, "nobody waits for it any more");
            }
            if (looks < 5000) {
              std::this_thread::yield();
            } else {
              std::this_thread::sleep_for(std::chrono::microseconds(20));
            }
          }
        }
        take(*next);
      });
      while (!ends(*next, error)) attempt(error, [&] { tell(*next); });
      over_.notify_all();
    }
  }
  /// False where somebody has asked meanwhile to be told.
  bool ends(Receipt& receipt, const std::string& error) {
    const std::lock_guard lock(mutex_);
    if (error.empty() && !receipt.then.empty()) return false;
    receipt.error = error;
    if (broken_.empty()) broken_ = error;
    receipt.taking = false;
    receipt.over = true;
    pending_.pop_front();
    return true;
  }
  void tell(Receipt& receipt) {
    std::vector<Work::Then> then;
    {
      const std::lock_guard lock(mutex_);
      then.swap(receipt.then);
    }
    for (const Work::Then& each : then) each([&] { receipt.moved->hold(caller_stream()); });
  }
  /// The slot of the peer that holds it; -1: not yet.
  int find(const Receipt::Part& part) const {
    for (int s = 0; s < kSlots; ++s) {
      if (board_->page(part.from).posts[s].number[rank_].load(std::memory_order_acquire) ==
          part.number)
        return s;
    }
    return -1;
  }
  /// All peers have come: enqueues what moves their bytes. Of one that was dropped, nothing: the peers' slots are free again.
  void take(Receipt& receipt) {
    bool dropped = false;
    {
      const std::lock_guard lock(mutex_);
      receipt.taking = true;
      dropped = receipt.dropped;
    }
    std::array<const void*, kMaxRanks> sources = {};
    std::array<int, kMaxRanks> slot_of = {};
    // All of it before any byte moves: what is refused must not be under way.
    for (const Receipt::Part& part : receipt.parts) {
      const int s = slot_of[part.from] = find(part);
      const Post& post = board_->page(part.from).posts[s];
      check_match(receipt, part, post);
      map(part.from, peers_[part.from][s], post);
    }
    receipt.posted->hold(stream_);
    for (const Receipt::Part& part : receipt.parts) {
      const int s = slot_of[part.from];
      const Post& post = board_->page(part.from).posts[s];
      PeerSlot& peer = peers_[part.from][s];
      peer.ready->hold(stream_);
      const auto* memory = static_cast<const char*>(peer.memory);
      sources[part.from] = memory + post.offset[rank_][0];
      for (size_t p = 0; p < part.to.size(); ++p) {
        if (part.to[p].bytes == 0 || dropped) continue;
        check_cuda(
            cudaMemcpyAsync(part.to[p].data, memory + post.offset[rank_][p],
                            static_cast<size_t>(part.to[p].bytes), cudaMemcpyDefault, stream_),
            "copying from a peer");
      }
    }
    if (receipt.sums && !dropped) {
      sources[rank_] = receipt.own;
      exchange_cuda::reduce_in_order(
          element_of(receipt.call.type), receipt.call.op == ReduceOp::kMax,
          receipt.call.bytes / size_of(receipt.call.type),
          {sources.data(), static_cast<size_t>(size_)}, {&receipt.sum, 1}, stream_);
    }
    for (const Receipt::Part& part : receipt.parts) {
      peers_[part.from][slot_of[part.from]].done->record(stream_);
      board_->page(rank_).taken[part.from].store(part.number, std::memory_order_release);
    }
    receipt.moved->record(stream_);
  }
  void check_match(const Receipt& receipt, const Receipt::Part& part, const Post& post) const {
    const bool same = receipt.exchange == (post.parts >= 0) &&
                      (receipt.exchange ? static_cast<size_t>(post.parts) == part.to.size()
                                        : receipt.call == post.call);
    MT_CHECK_ARG(
        same, "rank ", part.from, " called something else: ",
        post.parts >= 0 ? concat("an exchange of ", post.parts, " parts") : describe(post.call));
    for (size_t p = 0; p < part.to.size(); ++p) {
      MT_CHECK_ARG(part.to[p].bytes == post.bytes[rank_][p], "part ", p, ": rank ", part.from,
                   " sends ", post.bytes[rank_][p], " bytes, this rank receives ",
                   part.to[p].bytes);
    }
  }

  const std::string name_;
  const PeerCopiesOptions options_;
  const int rank_, size_;
  int device_ = 0;
  std::optional<Board> board_;
  std::array<Slot, kSlots> slots_;
  std::array<std::array<PeerSlot, kSlots>, kMaxRanks> peers_;
  std::vector<void*> allocated_;
  std::vector<void*> opened_;  // of peers in other processes
  cudaStream_t stream_ = nullptr;
  uint64_t posts_ = 0;
  std::array<uint64_t, kMaxRanks> sent_ = {}, received_ = {};  // posts by peer
  int64_t exchanges_ = 0, collectives_ = 0;

  std::mutex mutex_;
  std::condition_variable wake_, over_;
  std::deque<ReceiptPtr> pending_;
  bool stopping_ = false;
  std::string broken_;
  std::thread thread_;
};

}  // namespace

std::shared_ptr<PeerCopiesCommunicator> make_peer_copies(const std::string& name,
                                                         const PeerCopiesOptions& options) {
  return std::make_shared<PeerCopies>(name, options);
}

}  // namespace mtraining::comm
