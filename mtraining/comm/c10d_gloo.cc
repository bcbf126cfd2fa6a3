#include <atomic>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <exception>
#include <functional>
#include <mutex>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include "mtraining/comm/c10d_group.h"
#include "mtraining/comm/call.h"
#include "mtraining/comm/reduce.h"

namespace mtraining::comm::c10d_detail {
namespace {

/// ProcessGroupGloo whose connections can be closed while its threads wait on them.
class GlooGroup : public c10d::ProcessGroupGloo {
 public:
  using ProcessGroupGloo::ProcessGroupGloo;
  void close_connections() {
    for (auto& context : contexts_) context->closeConnections();
  }
};

/// Collectives run one after another on a thread of their own over staging memory, for two reasons: they consist of several Gloo calls
/// (a check that all ranks ask for the same, then one or two transfers), and a call given up on must not touch the caller's buffers.
/// Exchanges are posted directly: Gloo's own sends and receives are asynchronous.
class GlooCommunicator : public Communicator, public Breakable {
 public:
  GlooCommunicator(const GroupOptions& options, c10::intrusive_ptr<GlooGroup> group)
      : name_(options.name),
        rank_(options.rank),
        size_(options.size),
        group_(std::move(group)),
        board_(options.board),
        timeout_(options.timeout),
        worker_([this] { work_loop(); }) {}

  ~GlooCommunicator() override {
    bool busy = false;
    {
      std::unique_lock lock(queue_mutex_);
      stopping_ = true;
      busy = running_ || !queue_.empty();
    }
    queue_changed_.notify_all();
    if (busy) break_connections();
    worker_.join();
  }

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  const std::string& name() const override { return name_; }

  void break_connections() noexcept override {
    try {
      broken_ = true;
      group_->close_connections();
    } catch (...) {  // already closed
    }
  }

  WorkPtr exchange(int to, std::vector<ConstBuffer> send, int from,
                   std::vector<Buffer> recv) override;
  WorkPtr all_gather(ConstBuffer send, std::vector<Buffer> recv) override;
  WorkPtr reduce_scatter(std::vector<ConstBuffer> send, Buffer recv, ElementType type) override;
  WorkPtr all_reduce(Buffer data, ElementType type, ReduceOp op) override;
  WorkPtr broadcast(Buffer data, int root) override;
  void barrier() override {
    enqueue(Call{}, {}, {}, [](Job&) {})->wait();
  }

 private:
  struct Job {
    Call call;
    std::vector<uint8_t> in, out;  // staging
    std::vector<Buffer> results;   // where parts of `out` go in wait()
    std::function<void(Job&)> run;
    std::mutex mutex;
    std::condition_variable changed;
    bool done = false;
    std::exception_ptr error;
  };
  using JobPtr = std::shared_ptr<Job>;

  /// Sizes and order of one exchange, sent ahead of its parts.
  struct Header {
    static constexpr int kMaxParts = 5;
    int64_t sequence = 0, collectives = 0, parts = 0;
    int64_t bytes[kMaxParts] = {};
    bool operator==(const Header&) const = default;
  };

  class JobWork;
  class ExchangeWork;

  WorkPtr enqueue(Call call, std::vector<ConstBuffer> inputs, std::vector<Buffer> results,
                  std::function<void(Job&)> run);
  void work_loop();
  void agree(const Call& call);
  void wait_for(const c10::intrusive_ptr<c10d::Work>& work) { work->wait(timeout_); }
  template <typename Issue>
  c10::intrusive_ptr<c10d::Work> issue(Issue&& call) {
    std::unique_lock lock(issue_mutex_);
    return call();
  }
  void gather_bytes(const std::vector<uint8_t>& in, std::vector<uint8_t>& out);
  void reduce_parts(Job& job, const std::vector<uint8_t>& parts, int64_t part_bytes, void* to);
  std::string text(const std::string& call) const {
    return concat("communicator '", name_, "' rank ", rank_, ", ", call);
  }

  const std::string name_;
  const int rank_, size_;
  c10::intrusive_ptr<GlooGroup> group_;
  FailureBoardPtr board_;
  const milliseconds timeout_;
  int64_t exchanges_to_ = 0;
  std::vector<int64_t> sent_to_ = std::vector<int64_t>(static_cast<size_t>(size_), 0);
  std::vector<int64_t> received_from_ = std::vector<int64_t>(static_cast<size_t>(size_), 0);
  int64_t collectives_ = 0;
  std::atomic<bool> broken_{false};

  std::mutex issue_mutex_;  // the caller's thread and the worker both issue Gloo calls
  std::mutex queue_mutex_;
  std::condition_variable queue_changed_;
  std::deque<JobPtr> queue_;
  bool running_ = false, stopping_ = false;
  std::thread worker_;
};

class GlooCommunicator::JobWork : public Work {
 public:
  JobWork(JobPtr job, FailureBoardPtr board, std::string text)
      : job_(std::move(job)), board_(std::move(board)), text_(std::move(text)) {}

  void wait() override {
    if (waited_) return;
    {
      std::unique_lock lock(job_->mutex);
      job_->changed.wait(lock, [&] { return job_->done; });
    }
    if (job_->error) {
      try {
        std::rethrow_exception(job_->error);
      } catch (const InvalidArgument&) {
        throw;
      } catch (const std::exception& e) {
        board_->raise(text_, first_line(e));
      }
    }
    waited_ = true;
    const uint8_t* from = job_->out.data();
    for (const Buffer& result : job_->results) {
      if (result.bytes > 0) std::memcpy(result.data, from, static_cast<size_t>(result.bytes));
      from += result.bytes;
    }
  }

 private:
  JobPtr job_;
  FailureBoardPtr board_;
  std::string text_;
  bool waited_ = false;
};

class GlooCommunicator::ExchangeWork : public Work {
 public:
  Header sent, expected, received;
  at::Tensor sent_tensor, received_tensor;
  std::vector<at::Tensor> parts;  // keep the wrappers alive
  c10::intrusive_ptr<c10d::Work> header_recv;
  std::vector<c10::intrusive_ptr<c10d::Work>> others;
  FailureBoardPtr board;
  c10::intrusive_ptr<GlooGroup> group;
  std::string text, group_name;
  int from = 0;
  milliseconds timeout;

  void wait() override {
    if (waited_) return;
    try {
      if (header_recv) header_recv->wait(timeout);
      // The tag of a part carries its size, so parts of other sizes wait unmatched while this is said.
      if (received != expected) refuse();
      for (const auto& work : others) work->wait(timeout);
    } catch (const InvalidArgument&) {
      throw;
    } catch (const std::exception& e) {
      board->raise(text, concat("rank ", from, " or the peer sent to: ", first_line(e)));
    }
    waited_ = true;
  }

 private:
  /// The sender waits for a receive that will not come: it learns why from the board once the connections close.
  [[noreturn]] void refuse() {
    const std::string cause = concat(
        "communicator '", group_name, "': an exchange does not match: ", text, ", after ",
        expected.collectives, " collectives; rank ", from, " sends ", describe_header(received));
    board->report(cause);
    group->close_connections();
    throw InvalidArgument(cause);
  }

  static std::string describe_header(const Header& header) {
    std::string out = "[";
    for (int p = 0; p < std::min<int64_t>(header.parts, Header::kMaxParts); ++p)
      out += (p ? ", " : "") + std::to_string(header.bytes[p]);
    return concat(out, "] bytes as its exchange ", header.sequence, " with this rank, after ",
                  header.collectives, " collectives");
  }
  bool waited_ = false;
};

/// Gloo matches messages of a pair of ranks by tag: which exchange, which part (0: the header), and a digest of the size.
int message_tag(int64_t sequence, int part, int64_t bytes) {
  uint64_t digest = static_cast<uint64_t>(bytes) * 0x9e3779b97f4a7c15u;
  digest >>= 48;
  return static_cast<int>(((sequence & 0xfff) << 19) | (static_cast<int64_t>(part) << 16) |
                          static_cast<int64_t>(digest));
}

WorkPtr GlooCommunicator::exchange(int to, std::vector<ConstBuffer> send, int from,
                                   std::vector<Buffer> recv) {
  check_exchange(*this, to, send, from, recv);
  MT_CHECK_SUPPORTED(send.size() <= Header::kMaxParts && recv.size() <= Header::kMaxParts,
                     "communicator '", name_, "': an exchange has at most ", Header::kMaxParts,
                     " parts");
  ++counters_.calls;
  auto work = std::make_unique<ExchangeWork>();
  const auto header_of = [&](int64_t sequence, const std::vector<int64_t>& bytes) {
    Header header{.sequence = sequence,
                  .collectives = collectives_,
                  .parts = static_cast<int64_t>(bytes.size()),
                  .bytes = {}};
    std::copy(bytes.begin(), bytes.end(), header.bytes);
    return header;
  };
  work->sent = header_of(sent_to_[to]++, part_bytes(send));
  work->expected = header_of(received_from_[from]++, part_bytes(recv));
  work->board = board_;
  work->group = group_;
  work->group_name = name_;
  work->from = from;
  work->timeout = timeout_;
  work->text =
      text(describe_exchange(exchanges_to_++, to, part_bytes(send), from, part_bytes(recv)));
  if (broken_) board_->raise(work->text, "the communicator is closed");
  if (to == rank_) {  // Gloo has no connection of a rank with itself
    MT_CHECK_ARG(part_bytes(send) == part_bytes(recv), "communicator '", name_,
                 "': an exchange does not match: ", work->text);
    for (size_t p = 0; p < send.size(); ++p) {
      if (send[p].bytes > 0)
        std::memmove(recv[p].data, send[p].data, static_cast<size_t>(send[p].bytes));
    }
    work->received = work->expected;
    return work;
  }
  for (const ConstBuffer& part : send) counters_.bytes_sent += part.bytes;
  work->sent_tensor = wrap_bytes(&work->sent, sizeof(Header));
  work->received_tensor = wrap_bytes(&work->received, sizeof(Header));
  try {
    std::unique_lock lock(issue_mutex_);
    std::vector<at::Tensor> one = {work->received_tensor};
    work->header_recv = group_->recv(one, from, message_tag(work->expected.sequence, 0, 0));
    for (size_t p = 0; p < recv.size(); ++p) {
      if (recv[p].bytes == 0) continue;
      one = {wrap_bytes(recv[p].data, recv[p].bytes)};
      work->others.push_back(group_->recv(
          one, from, message_tag(work->expected.sequence, static_cast<int>(p) + 1, recv[p].bytes)));
    }
    one = {work->sent_tensor};
    work->others.push_back(group_->send(one, to, message_tag(work->sent.sequence, 0, 0)));
    for (size_t p = 0; p < send.size(); ++p) {
      if (send[p].bytes == 0) continue;
      one = {wrap_bytes(send[p].data, send[p].bytes)};
      work->others.push_back(group_->send(
          one, to, message_tag(work->sent.sequence, static_cast<int>(p) + 1, send[p].bytes)));
    }
  } catch (const std::exception& e) {
    board_->raise(work->text, first_line(e));
  }
  return work;
}

WorkPtr GlooCommunicator::enqueue(Call call, std::vector<ConstBuffer> inputs,
                                  std::vector<Buffer> results, std::function<void(Job&)> run) {
  call.sequence = collectives_++;
  ++counters_.calls;
  counters_.bytes_sent += payload_bytes(call, rank_, size_);
  auto job = std::make_shared<Job>();
  job->call = call;
  for (const ConstBuffer& input : inputs) {
    const uint8_t* data = static_cast<const uint8_t*>(input.data);
    job->in.insert(job->in.end(), data, data + input.bytes);
  }
  job->results = std::move(results);
  job->run = std::move(run);
  {
    std::unique_lock lock(queue_mutex_);
    queue_.push_back(job);
  }
  queue_changed_.notify_all();
  return std::make_unique<JobWork>(job, board_, text(describe(call)));
}

void GlooCommunicator::work_loop() {
  std::exception_ptr first_error;
  for (;;) {
    JobPtr job;
    {
      std::unique_lock lock(queue_mutex_);
      running_ = false;
      queue_changed_.wait(lock, [&] { return stopping_ || !queue_.empty(); });
      if (queue_.empty()) return;
      job = queue_.front();
      queue_.pop_front();
      running_ = true;
    }
    std::exception_ptr error = first_error;  // after one failure the group is out of step
    if (!error) {
      try {
        MT_CHECK_EXTERNAL(!broken_, "the communicator is closed");
        agree(job->call);
        job->run(*job);
      } catch (...) {
        error = first_error = std::current_exception();
      }
    }
    {
      std::unique_lock lock(job->mutex);
      job->error = error;
      job->done = true;
    }
    job->changed.notify_all();
  }
}

void GlooCommunicator::agree(const Call& call) {
  std::vector<uint8_t> mine(sizeof(Call)), all;
  std::memcpy(mine.data(), &call, sizeof(Call));
  gather_bytes(mine, all);
  for (int r = 0; r < size_; ++r) {
    Call other;
    std::memcpy(&other, all.data() + static_cast<size_t>(r) * sizeof(Call), sizeof(Call));
    MT_CHECK_ARG(other == call, "communicator '", name_,
                 "': ranks call different collectives: rank ", rank_, " calls ", describe(call),
                 ", rank ", r, " calls ", describe(other));
  }
}

void GlooCommunicator::gather_bytes(const std::vector<uint8_t>& in, std::vector<uint8_t>& out) {
  out.resize(in.size() * static_cast<size_t>(size_));
  if (in.empty()) return;
  at::Tensor from = wrap_bytes(in.data(), static_cast<int64_t>(in.size()));
  at::Tensor to = wrap_bytes(out.data(), static_cast<int64_t>(out.size()));
  wait_for(issue([&] { return group_->_allgather_base(to, from); }));
}

void GlooCommunicator::reduce_parts(Job& job, const std::vector<uint8_t>& parts, int64_t part_bytes,
                                    void* to) {
  std::vector<const void*> sources;
  for (int r = 0; r < size_; ++r) sources.push_back(parts.data() + r * part_bytes);
  reduce(job.call.type, job.call.op, part_bytes / size_of(job.call.type), sources, {&to, 1});
}

WorkPtr GlooCommunicator::all_gather(ConstBuffer send, std::vector<Buffer> recv) {
  const Call call = check_all_gather(*this, send, recv);
  return enqueue(call, {send}, std::move(recv),
                 [this](Job& job) { gather_bytes(job.in, job.out); });
}

WorkPtr GlooCommunicator::reduce_scatter(std::vector<ConstBuffer> send, Buffer recv,
                                         ElementType type) {
  const Call call = check_reduce_scatter(*this, send, recv, type);
  return enqueue(call, std::move(send), {recv}, [this](Job& job) {
    // Gloo's own reduce-scatter sums in ring order; all-to-all moves the same bytes and leaves the order to us.
    std::vector<uint8_t> parts(job.in.size());
    job.out.resize(static_cast<size_t>(job.call.bytes));
    if (parts.empty()) return;
    at::Tensor from = wrap_bytes(job.in.data(), static_cast<int64_t>(job.in.size()));
    at::Tensor to = wrap_bytes(parts.data(), static_cast<int64_t>(parts.size()));
    std::vector<int64_t> even;
    wait_for(issue([&] { return group_->alltoall_base(to, from, even, even); }));
    reduce_parts(job, parts, job.call.bytes, job.out.data());
  });
}

WorkPtr GlooCommunicator::all_reduce(Buffer data, ElementType type, ReduceOp op) {
  const Call call = check_all_reduce(*this, data, type, op);
  return enqueue(call, {{data.data, data.bytes}}, {data}, [this](Job& job) {
    const Call& call = job.call;
    job.out = job.in;
    if (call.bytes == 0) return;
    constexpr int64_t kSmallBytes =
        16384;  // one message is quicker than two rounds of smaller ones
    // Floats not by Gloo: its sums follow the ring and its maximum loses NaN.
    if (call.type == ElementType::kInt64 || call.type == ElementType::kInt32) {
      std::vector<at::Tensor> tensors = {wrap(job.out.data(), call.bytes, call.type, at::kCPU)};
      c10d::AllreduceOptions options;
      options.reduceOp = call.op == ReduceOp::kSum ? c10d::ReduceOp::SUM : c10d::ReduceOp::MAX;
      wait_for(issue([&] { return group_->allreduce(tensors, options); }));
      return;
    }
    std::vector<uint8_t> parts;
    if (call.bytes <= kSmallBytes) {
      gather_bytes(job.in, parts);
      reduce_parts(job, parts, call.bytes, job.out.data());
      return;
    }
    const int64_t element = size_of(call.type);
    const int64_t part_bytes = (call.bytes / element + size_ - 1) / size_ * element;
    job.in.resize(static_cast<size_t>(part_bytes * size_));
    parts.resize(job.in.size());
    at::Tensor from = wrap_bytes(job.in.data(), static_cast<int64_t>(job.in.size()));
    at::Tensor to = wrap_bytes(parts.data(), static_cast<int64_t>(parts.size()));
    std::vector<int64_t> even;
    wait_for(issue([&] { return group_->alltoall_base(to, from, even, even); }));
    std::vector<uint8_t> sum(static_cast<size_t>(part_bytes));
    reduce_parts(job, parts, part_bytes, sum.data());
    gather_bytes(sum, job.out);
  });
}

WorkPtr GlooCommunicator::broadcast(Buffer data, int root) {
  const Call call = check_broadcast(*this, data, root);
  return enqueue(call, {{data.data, data.bytes}}, {data}, [this](Job& job) {
    job.out = job.in;
    if (job.call.bytes == 0) return;
    std::vector<at::Tensor> tensors = {wrap_bytes(job.out.data(), job.call.bytes)};
    c10d::BroadcastOptions options;
    options.rootRank = job.call.root;
    wait_for(issue([&] { return group_->broadcast(tensors, options); }));
  });
}

}  // namespace

CommunicatorPtr make_gloo_group(const GroupOptions& options,
                                const std::shared_ptr<gloo::transport::Device>& device) {
  auto gloo = c10d::ProcessGroupGloo::Options::create(options.timeout);
  gloo->devices = {device};
  gloo->threads = 1;
  auto group = c10::make_intrusive<GlooGroup>(options.store, options.rank, options.size, gloo);
  return std::make_shared<GlooCommunicator>(options, std::move(group));
}

}  // namespace mtraining::comm::c10d_detail
