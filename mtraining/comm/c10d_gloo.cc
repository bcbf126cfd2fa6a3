#include <atomic>
#include <cstring>
#include <exception>
#include <functional>
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
  /// One buffer may have many sends and receives pending; waiting on it fails as soon as any of its peers is lost. The waits of c10d
  /// know one peer each, so that a rank could wait for a healthy peer that itself waits for the lost one.
  std::unique_ptr<gloo::transport::UnboundBuffer> buffer(const void* data, int64_t bytes) {
    return contexts_.front()->createUnboundBuffer(const_cast<void*>(data),
                                                  static_cast<size_t>(bytes));
  }
  void close_connections() {
    for (auto& context : contexts_) context->closeConnections();
  }
};

/// Everything is made of Gloo's sends and receives, posted in the caller's thread. A collective is one round of messages from every
/// rank to every other (a large all-reduce: two), each led by a frame that says what was called, so that ranks that call different
/// things learn it. Gloo's own collectives hand each call over two more threads and take several rounds: with more ranks than
/// cores a small one took 4 to 16 ms, this takes 1 to 2. Payloads pass through staging memory: a call given up on must not touch the
/// caller's buffers.
class GlooCommunicator : public Communicator, public Breakable {
 public:
  GlooCommunicator(const GroupOptions& options, c10::intrusive_ptr<GlooGroup> group)
      : name_(options.name),
        rank_(options.rank),
        size_(options.size),
        group_(std::move(group)),
        board_(options.board),
        timeout_(options.timeout) {}

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
  void barrier() override { collective(Call{}, {}, 0, {})->wait(); }

 private:
  /// Sizes and order of one exchange, sent ahead of its parts.
  struct Header {
    static constexpr int kMaxParts = 5;
    int64_t sequence = 0, collectives = 0, parts = 0;
    int64_t bytes[kMaxParts] = {};
    bool operator==(const Header&) const = default;
  };
  /// What leads a collective's message; a small payload rides along.
  struct Frame {
    static constexpr int64_t kRoom = 480;
    Call call;
    uint8_t payload[kRoom] = {};
  };

  class CollectiveWork;
  class ExchangeWork;
  /// Called in wait() with the parts of all ranks in rank order, [size, part_bytes].
  using Finish = std::function<void(CollectiveWork&, const uint8_t* parts)>;

  /// `outgoing`: what each rank gets, [size, part_bytes], or one part for all.
  WorkPtr collective(Call call, std::vector<uint8_t> outgoing, int64_t part_bytes, Finish finish);
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
};

/// Gloo matches messages of a pair of ranks by tag: which exchange or collective, which part (0: an exchange's header, 1 to 5 its
/// parts, 6: a collective's frame, 7 its payload), and a digest of the size.
int message_tag(int64_t sequence, int part, int64_t bytes) {
  uint64_t digest = static_cast<uint64_t>(bytes) * 0x9e3779b97f4a7c15u;
  digest >>= 48;
  return static_cast<int>(((sequence & 0xfff) << 19) | (static_cast<int64_t>(part) << 16) |
                          static_cast<int64_t>(digest));
}
constexpr int kFramePart = 6, kPayloadPart = 7;

class GlooCommunicator::CollectiveWork : public Work {
 public:
  CollectiveWork(GlooCommunicator& owner, const Call& call, std::vector<uint8_t> outgoing,
                 int64_t part_bytes, Finish finish)
      : group_(owner.group_),
        board_(owner.board_),
        broken_(&owner.broken_),
        text_(owner.text(describe(call))),
        name_(owner.name_),
        rank_(owner.rank_),
        size_(owner.size_),
        timeout_(owner.timeout_),
        call_(call),
        outgoing_(std::move(outgoing)),
        part_bytes_(part_bytes),
        finish_(std::move(finish)) {}

  void post() {
    if (*broken_) board_->raise(text_, "the communicator is closed");
    try {
      framed_ = part_bytes_ <= Frame::kRoom;
      frames_out_.resize(static_cast<size_t>(size_));
      frames_in_.resize(static_cast<size_t>(size_));
      incoming_.resize(static_cast<size_t>(part_bytes_ * size_));
      for (int peer : peers()) {
        frames_out_[peer].call = call_;
        if (framed_ && part_bytes_ > 0)
          std::memcpy(frames_out_[peer].payload, part_to(peer), static_cast<size_t>(part_bytes_));
      }
      const auto frame_bytes = static_cast<int64_t>(sizeof(Frame));
      const int64_t send_stride = one_for_all() ? 0 : part_bytes_;
      // Receives first: a send whose receive is posted goes out in one message.
      frames_.post_recv(*this, kFramePart, frames_in_.data(), frame_bytes);
      if (!framed_) payload_.post_recv(*this, kPayloadPart, incoming_.data(), part_bytes_);
      frames_.post_send(*this, kFramePart, frames_out_.data(), frame_bytes, frame_bytes);
      if (!framed_)
        payload_.post_send(*this, kPayloadPart, outgoing_.data(), part_bytes_, send_stride);
    } catch (const std::exception& e) {
      board_->raise(text_, first_line(e));
    }
  }

  void wait() override {
    if (waited_) return;
    try {
      frames_.wait_recv(*this);
      for (int peer : peers()) agree(peer);
      payload_.wait_recv(*this);
      frames_.wait_send(*this);
      payload_.wait_send(*this);
      for (int peer : peers()) {
        if (framed_ && part_bytes_ > 0)
          std::memcpy(part_from(peer), frames_in_[peer].payload, static_cast<size_t>(part_bytes_));
      }
      if (part_bytes_ > 0)
        std::memcpy(part_from(rank_), part_to(rank_), static_cast<size_t>(part_bytes_));
      if (finish_) finish_(*this, incoming_.data());
    } catch (const InvalidArgument&) {
      *broken_ = true;  // after one failure the group is out of step
      throw;
    } catch (const std::exception& e) {
      *broken_ = true;
      board_->raise(text_, first_line(e));
    }
    waited_ = true;
  }

  /// A second round in which every rank gives one part to all: [size, bytes]. Only from `finish`.
  std::vector<uint8_t> gather(const std::vector<uint8_t>& mine) {
    const auto bytes = static_cast<int64_t>(mine.size());
    std::vector<uint8_t> all(mine.size() * static_cast<size_t>(size_));
    Round second;
    second.post_recv(*this, kPayloadPart, all.data(), bytes, kSecond);
    second.post_send(*this, kPayloadPart, mine.data(), bytes, 0, kSecond);
    std::memcpy(all.data() + rank_ * bytes, mine.data(), mine.size());
    second.wait_recv(*this);
    second.wait_send(*this);
    return all;
  }

 private:
  static constexpr int64_t kSecond = int64_t{1} << 40;  // keeps the tags of the second round apart

  /// A message from every rank to every other.
  struct Round {
    std::unique_ptr<gloo::transport::UnboundBuffer> in, out;

    void post_recv(CollectiveWork& work, int part, void* data, int64_t bytes, int64_t salt = 0) {
      in = work.group_->buffer(data, bytes * work.size_);
      for (int peer : work.peers())
        in->recv(peer, work.slot(part, bytes ^ salt), static_cast<size_t>(peer * bytes),
                 static_cast<size_t>(bytes));
    }
    /// `stride` 0: the same bytes for all.
    void post_send(CollectiveWork& work, int part, const void* data, int64_t bytes, int64_t stride,
                   int64_t salt = 0) {
      out = work.group_->buffer(data, stride == 0 ? bytes : stride * work.size_);
      for (int peer : work.peers())
        out->send(peer, work.slot(part, bytes ^ salt), static_cast<size_t>(peer * stride),
                  static_cast<size_t>(bytes));
    }
    void wait_recv(CollectiveWork& work) {
      for (int i = 1; in && i < work.size_; ++i) in->waitRecv(work.timeout_);
    }
    void wait_send(CollectiveWork& work) {
      for (int i = 1; out && i < work.size_; ++i) out->waitSend(work.timeout_);
    }
  };

  /// The next rank first, so that not all ranks send to the same one at once.
  std::vector<int> peers() const {
    std::vector<int> result;
    for (int hop = 1; hop < size_; ++hop) result.push_back((rank_ + hop) % size_);
    return result;
  }
  uint8_t* part_from(int rank) { return incoming_.data() + rank * part_bytes_; }
  const uint8_t* part_to(int rank) const {
    return outgoing_.data() + (one_for_all() ? 0 : rank * part_bytes_);
  }
  bool one_for_all() const { return static_cast<int64_t>(outgoing_.size()) == part_bytes_; }
  uint64_t slot(int part, int64_t bytes) const {
    return static_cast<uint64_t>(message_tag(call_.sequence, part, bytes));
  }
  void agree(int peer) const {
    const Call& other = frames_in_[peer].call;
    MT_CHECK_ARG(other == call_, "communicator '", name_,
                 "': ranks call different collectives: rank ", rank_, " calls ", describe(call_),
                 ", rank ", peer, " calls ", describe(other));
  }

  c10::intrusive_ptr<GlooGroup> group_;
  FailureBoardPtr board_;
  std::atomic<bool>* broken_;
  const std::string text_, name_;
  const int rank_, size_;
  const milliseconds timeout_;
  const Call call_;
  std::vector<uint8_t> outgoing_, incoming_;
  std::vector<Frame> frames_out_, frames_in_;
  const int64_t part_bytes_;
  bool framed_ = true, waited_ = false;
  Finish finish_;
  Round frames_, payload_;  // last, so that they go first: they refer to the memory above
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

WorkPtr GlooCommunicator::collective(Call call, std::vector<uint8_t> outgoing, int64_t part_bytes,
                                     Finish finish) {
  call.sequence = collectives_++;
  ++counters_.calls;
  counters_.bytes_sent += payload_bytes(call, rank_, size_);
  auto work = std::make_unique<CollectiveWork>(*this, call, std::move(outgoing), part_bytes,
                                               std::move(finish));
  work->post();
  return work;
}

std::vector<uint8_t> copy_of(ConstBuffer buffer) {
  const auto* data = static_cast<const uint8_t*>(buffer.data);
  return {data, data + buffer.bytes};
}
void put(const Buffer& to, const uint8_t* from) {
  if (to.bytes > 0) std::memcpy(to.data, from, static_cast<size_t>(to.bytes));
}
/// In rank order, over parts [size, part_bytes].
void reduce_parts(const Call& call, int size, const uint8_t* parts, int64_t part_bytes, void* to) {
  std::vector<const void*> sources;
  for (int r = 0; r < size; ++r) sources.push_back(parts + r * part_bytes);
  reduce(call.type, call.op, part_bytes / size_of(call.type), sources, {&to, 1});
}

WorkPtr GlooCommunicator::all_gather(ConstBuffer send, std::vector<Buffer> recv) {
  const Call call = check_all_gather(*this, send, recv);
  return collective(call, copy_of(send), send.bytes,
                    [recv = std::move(recv)](CollectiveWork&, const uint8_t* parts) {
                      for (const Buffer& part : recv) {
                        put(part, parts);
                        parts += part.bytes;
                      }
                    });
}

WorkPtr GlooCommunicator::reduce_scatter(std::vector<ConstBuffer> send, Buffer recv,
                                         ElementType type) {
  const Call call = check_reduce_scatter(*this, send, recv, type);
  std::vector<uint8_t> outgoing;
  outgoing.reserve(static_cast<size_t>(recv.bytes * size_));
  for (const ConstBuffer& part : send) {
    const auto* data = static_cast<const uint8_t*>(part.data);
    outgoing.insert(outgoing.end(), data, data + part.bytes);
  }
  return collective(call, std::move(outgoing), recv.bytes,
                    [call, recv, size = size_](CollectiveWork&, const uint8_t* parts) {
                      if (recv.bytes > 0) reduce_parts(call, size, parts, recv.bytes, recv.data);
                    });
}

WorkPtr GlooCommunicator::all_reduce(Buffer data, ElementType type, ReduceOp op) {
  const Call call = check_all_reduce(*this, data, type, op);
  // One round of whole arrays is quicker than two rounds of parts until the bytes, not the messages, take the time.
  constexpr int64_t kOneRoundBytes = int64_t{256} << 10;
  std::vector<uint8_t> outgoing = copy_of({data.data, data.bytes});
  if (data.bytes * size_ <= kOneRoundBytes || size_ == 1) {
    return collective(call, std::move(outgoing), data.bytes,
                      [call, data, size = size_](CollectiveWork&, const uint8_t* parts) {
                        if (data.bytes > 0) reduce_parts(call, size, parts, data.bytes, data.data);
                      });
  }
  const int64_t element = size_of(type);
  const int64_t part_bytes = (data.bytes / element + size_ - 1) / size_ * element;
  outgoing.resize(static_cast<size_t>(part_bytes * size_));
  return collective(
      call, std::move(outgoing), part_bytes,
      [call, data, part_bytes, size = size_](CollectiveWork& work, const uint8_t* parts) {
        std::vector<uint8_t> sum(static_cast<size_t>(part_bytes));
        reduce_parts(call, size, parts, part_bytes, sum.data());
        put(data, work.gather(sum).data());
      });
}

WorkPtr GlooCommunicator::broadcast(Buffer data, int root) {
  const Call call = check_broadcast(*this, data, root);
  // Every rank sends its array; small enough groups and arrays of a job's start make more not worth its code.
  return collective(call, copy_of({data.data, data.bytes}), data.bytes,
                    [data, root](CollectiveWork&, const uint8_t* parts) {
                      put(data, parts + root * data.bytes);
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
