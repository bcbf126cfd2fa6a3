#include "mtraining/comm/call.h"

#include <numeric>
#include <sstream>

#include "mtraining/base/check.h"

namespace mtraining::comm {
namespace {

const char* name_of(ElementType type) {
  switch (type) {
    case ElementType::kInt64:
      return "int64";
    case ElementType::kInt32:
      return "int32";
    case ElementType::kFloat32:
      return "float32";
    case ElementType::kFloat64:
      return "float64";
    case ElementType::kBFloat16:
      return "bf16";
  }
  return "?";
}

std::string list_of(const std::vector<int64_t>& values) {
  std::ostringstream out;
  out << "[";
  for (size_t i = 0; i < values.size(); ++i) out << (i ? ", " : "") << values[i];
  out << "]";
  return out.str();
}

void check_buffer(const Communicator& group, const char* what, const void* data, int64_t bytes) {
  MT_CHECK_ARG(bytes >= 0 && (data != nullptr || bytes == 0), "communicator '", group.name(),
               "': ", what, ": ", bytes, " bytes at ", data);
}

void check_elements(const Communicator& group, const char* what, int64_t bytes, ElementType type) {
  MT_CHECK_ARG(bytes % size_of(type) == 0, "communicator '", group.name(), "': ", what, ": ", bytes,
               " bytes are no multiple of ", name_of(type), "'s ", size_of(type));
}

}  // namespace

CommunicatorPtr Transport::open_copies(const std::string& name,
                                       const std::vector<int>& /*members*/) {
  throw Unsupported(concat("communicator '", name,
                           "': copies between GPUs need processes with a GPU each (nccl)"));
}

int64_t size_of(ElementType type) {
  switch (type) {
    case ElementType::kInt64:
    case ElementType::kFloat64:
      return 8;
    case ElementType::kInt32:
    case ElementType::kFloat32:
      return 4;
    case ElementType::kBFloat16:
      return 2;
  }
  MT_ASSERT(false, "element type ", static_cast<int>(type));
}

std::string describe(const Call& call) {
  std::ostringstream out;
  switch (call.kind) {
    case CallKind::kAllGather:
      out << "all_gather(" << call.bytes << " bytes a rank)";
      break;
    case CallKind::kReduceScatter:
      out << "reduce_scatter(" << call.bytes << " bytes of " << name_of(call.type) << " a rank)";
      break;
    case CallKind::kAllReduce:
      out << "all_reduce(" << call.bytes << " bytes of " << name_of(call.type) << ", "
          << (call.op == ReduceOp::kSum ? "sum" : "max") << ")";
      break;
    case CallKind::kBroadcast:
      out << "broadcast(" << call.bytes << " bytes from " << call.root << ")";
      break;
    case CallKind::kBarrier:
      out << "barrier()";
      break;
  }
  out << " as collective " << call.sequence;
  return out.str();
}

std::string describe_exchange(int64_t sequence, int to, const std::vector<int64_t>& send_bytes,
                              int from, const std::vector<int64_t>& recv_bytes) {
  return concat("exchange ", sequence, ": sends ", list_of(send_bytes), " bytes to ", to,
                ", receives ", list_of(recv_bytes), " bytes from ", from);
}

Call check_all_gather(const Communicator& group, ConstBuffer send,
                      const std::vector<Buffer>& recv) {
  check_buffer(group, "all_gather send", send.data, send.bytes);
  MT_CHECK_ARG(static_cast<int>(recv.size()) == group.size(), "communicator '", group.name(),
               "': all_gather: expected ", group.size(), " receive parts, got ", recv.size());
  for (const Buffer& part : recv) {
    check_buffer(group, "all_gather receive", part.data, part.bytes);
    MT_CHECK_ARG(part.bytes == send.bytes, "communicator '", group.name(),
                 "': all_gather: expected receive parts of ", send.bytes, " bytes as sent, got ",
                 part.bytes);
  }
  return {.kind = CallKind::kAllGather, .bytes = send.bytes};
}

Call check_reduce_scatter(const Communicator& group, const std::vector<ConstBuffer>& send,
                          Buffer recv, ElementType type) {
  check_buffer(group, "reduce_scatter receive", recv.data, recv.bytes);
  check_elements(group, "reduce_scatter", recv.bytes, type);
  MT_CHECK_ARG(static_cast<int>(send.size()) == group.size(), "communicator '", group.name(),
               "': reduce_scatter: expected ", group.size(), " send parts, got ", send.size());
  for (const ConstBuffer& part : send) {
    check_buffer(group, "reduce_scatter send", part.data, part.bytes);
    MT_CHECK_ARG(part.bytes == recv.bytes, "communicator '", group.name(),
                 "': reduce_scatter: expected send parts of ", recv.bytes,
                 " bytes as received, got ", part.bytes);
  }
  return {.kind = CallKind::kReduceScatter, .type = type, .bytes = recv.bytes};
}

Call check_all_reduce(const Communicator& group, Buffer data, ElementType type, ReduceOp op) {
  check_buffer(group, "all_reduce", data.data, data.bytes);
  check_elements(group, "all_reduce", data.bytes, type);
  return {.kind = CallKind::kAllReduce, .type = type, .op = op, .bytes = data.bytes};
}

Call check_broadcast(const Communicator& group, Buffer data, int root) {
  check_buffer(group, "broadcast", data.data, data.bytes);
  MT_CHECK_ARG(root >= 0 && root < group.size(), "communicator '", group.name(),
               "': broadcast: root ", root, " is not in [0, ", group.size(), ")");
  return {.kind = CallKind::kBroadcast, .root = root, .bytes = data.bytes};
}

void check_exchange(const Communicator& group, int to, const std::vector<ConstBuffer>& send,
                    int from, const std::vector<Buffer>& recv) {
  const int size = group.size();
  MT_CHECK_ARG(to >= 0 && to < size && from >= 0 && from < size, "communicator '", group.name(),
               "': exchange to ", to, " from ", from, ": peers must be in [0, ", size, ")");
  MT_CHECK_ARG((to == group.rank()) == (from == group.rank()), "communicator '", group.name(),
               "': exchange to ", to, " from ", from, " on rank ", group.rank(),
               ": a rank that sends to itself also receives from itself");
  for (const ConstBuffer& part : send) check_buffer(group, "exchange send", part.data, part.bytes);
  for (const Buffer& part : recv) check_buffer(group, "exchange receive", part.data, part.bytes);
}

int64_t payload_bytes(const Call& call, int rank, int size) {
  switch (call.kind) {
    case CallKind::kAllGather:
    case CallKind::kReduceScatter:
      return (size - 1) * call.bytes;
    case CallKind::kAllReduce:
      return 2 * (size - 1) * call.bytes / size;
    case CallKind::kBroadcast:
      return rank == call.root ? (size - 1) * call.bytes : 0;
    case CallKind::kBarrier:
      return 0;
  }
  return 0;
}

std::string describe_members(const std::string& name, const std::vector<int>& members) {
  std::ostringstream out;
  out << "communicator '" << name << "' of ranks [";
  for (size_t i = 0; i < members.size(); ++i) out << (i ? "," : "") << members[i];
  out << "]";
  return out.str();
}

void check_members(const std::string& name, const std::vector<int>& members, int job_size) {
  MT_CHECK_ARG(!members.empty(), "communicator '", name, "': expected at least one member");
  for (size_t i = 0; i < members.size(); ++i) {
    MT_CHECK_ARG(
        members[i] >= 0 && members[i] < job_size && (i == 0 || members[i] > members[i - 1]),
        describe_members(name, members), ": expected ascending ranks in [0, ", job_size, ")");
  }
}

}  // namespace mtraining::comm
