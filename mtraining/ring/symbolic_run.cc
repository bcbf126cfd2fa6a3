#include "mtraining/ring/symbolic_run.h"

#include <algorithm>
#include <deque>
#include <map>
#include <numeric>
#include <random>
#include <set>
#include <tuple>
#include <utility>

#include "mtraining/base/check.h"

namespace mtraining::ring {

bool is_transfer(OpKind kind) {
  return kind == OpKind::kExchange || kind == OpKind::kAllGather || kind == OpKind::kReduceScatter;
}

Job make_job(const ScheduleOptions& options, bool backward) {
  Job job{.topology = options.topology, .backward = backward, .ranks = {}};
  for (int rank = 0; rank < options.topology.cp_size(); ++rank) {
    job.ranks.push_back(backward ? backward_schedule(options, rank)
                                 : forward_schedule(options, rank));
  }
  return job;
}

namespace {

constexpr int kEmpty = -1;

struct SlotAccess {
  bool grad;
  int slot;
  bool write;
};
std::vector<SlotAccess> accesses(const Op& op) {
  const bool grad = !is_kv(op.channel);
  std::vector<SlotAccess> found;
  switch (op.kind) {
    case OpKind::kExchange:
      found = {{grad, op.send_slot, false}, {grad, op.recv_slot, true}};
      break;
    case OpKind::kAllGather:
      found = {{false, op.send_slot, false}};
      for (int slot : op.slots) found.push_back({false, slot, true});
      break;
    case OpKind::kReduceScatter:
      found = {{true, op.recv_slot, true}};
      for (int slot : op.slots) found.push_back({true, slot, false});
      break;
    case OpKind::kLaunch:
      for (const SourceRef& source : op.sources) {
        found.push_back({false, source.kv_slot, false});
        if (source.grad_slot >= 0) found.push_back({true, source.grad_slot, true});
      }
      break;
    case OpKind::kZeroGrad:
      found = {{true, op.recv_slot, true}};
      break;
    case OpKind::kAddGrad:
      found = {{true, op.send_slot, false}, {true, op.recv_slot, true}};
      break;
  }
  return found;
}

/// Two operations that touch one slot, one of them writing, must be ordered by `after`: then no
/// executor, however asynchronous, overwrites a slot that is in use or in flight. Also the bounds
/// of every id and slot.
std::string find_hazard(const Schedule& schedule, int rank) {
  const int count = static_cast<int>(schedule.ops.size());
  const int words = count / 64 + 1;
  std::vector<std::vector<uint64_t>> before(count, std::vector<uint64_t>(words, 0));
  std::map<std::pair<bool, int>, std::vector<std::pair<int, bool>>> history;
  for (int id = 0; id < count; ++id) {
    const Op& op = schedule.ops[id];
    const auto where = concat("rank ", rank, " op ", id, " (", to_string(op.kind), "): ");
    if (op.id != id) return concat(where, "wrong id ", op.id);
    for (int earlier : op.after) {
      if (earlier < 0 || earlier >= id) return concat(where, "after names ", earlier);
      before[id][earlier / 64] |= uint64_t{1} << (earlier % 64);
      for (int word = 0; word < words; ++word) before[id][word] |= before[earlier][word];
    }
    std::set<std::pair<bool, int>> own;
    for (const SlotAccess& access : accesses(op)) {
      const int limit = access.grad ? schedule.num_grad_slots : schedule.num_kv_slots;
      if (access.slot < 0 || access.slot >= limit) return concat(where, "slot ", access.slot);
      if (!access.grad && access.write && access.slot == 0)
        return concat(where, "writes the own shard");
      if (!own.insert({access.grad, access.slot}).second)
        return concat(where, "uses slot ", access.slot, " twice");
      auto& uses = history[{access.grad, access.slot}];
      for (const auto& [other, other_writes] : uses) {
        if ((access.write || other_writes) && !(before[id][other / 64] >> (other % 64) & 1)) {
          return concat(where, "touches ", access.grad ? "grad" : "kv", " slot ", access.slot,
                        " while op ", other, " may use it");
        }
      }
      uses.push_back({id, access.write});
    }
  }
  return "";
}

/// Gradient of one shard: which ranks' contributions it holds, each with its count.
struct Gradient {
  int shard = kEmpty;  ///< kEmpty: zero, of no shard yet
  std::vector<int> contributions;
  bool defined = false;
};

/// Runs all ranks' lists together on symbolic contents. `seed` < 0: each rank issues in list order
/// and waits, blocking, for `after`. Otherwise operations start in random order as soon as `after`
/// allows, those of a channel in list order. A transfer completes only when all its partners have
/// issued theirs (rendezvous, the strictest transport).
class SymbolicRun {
 public:
  SymbolicRun(const Job& job, int seed) : job_(job), seed_(seed), random_(seed < 0 ? 1 : seed) {
    const int world = job.topology.cp_size();
    for (int rank = 0; rank < world; ++rank) {
      const Schedule& schedule = job.ranks[rank];
      kv_.emplace_back(schedule.num_kv_slots, kEmpty);
      kv_.back()[0] = rank;
      grad_.emplace_back(schedule.num_grad_slots,
                         Gradient{kEmpty, std::vector<int>(world, 0), false});
      issued_.emplace_back(schedule.ops.size(), false);
      done_.emplace_back(schedule.ops.size(), false);
      next_.push_back(0);
      launched_.emplace_back(world, 0);
      launch_count_.push_back(0);
    }
  }

  std::string run() {
    const int world = static_cast<int>(job_.ranks.size());
    size_t remaining = 0;
    for (const Schedule& schedule : job_.ranks) remaining += schedule.ops.size();
    std::vector<int> order(world);
    std::iota(order.begin(), order.end(), 0);
    while (finished_ < remaining) {
      const size_t before = finished_ + started_;
      could_start_ = false;
      std::shuffle(order.begin(), order.end(), random_);
      for (int rank : order) {
        seed_ < 0 ? issue_in_order(rank) : issue_any(rank);
        if (!fault_.empty()) return fault_;
      }
      if (finished_ + started_ == before && !could_start_)
        return concat("deadlock: ", finished_, " of ", remaining, " operations done");
    }
    for (const auto& [key, queue] : transfers_) {
      if (!queue.empty()) return "a transfer has no partner";
    }
    return check_result();
  }

 private:
  bool ready(int rank, const Op& op) const {
    return std::all_of(op.after.begin(), op.after.end(), [&](int id) { return done_[rank][id]; });
  }
  void issue_in_order(int rank) {
    const auto& ops = job_.ranks[rank].ops;
    while (next_[rank] < ops.size() && ready(rank, ops[next_[rank]]))
      start(rank, ops[next_[rank]++]);
  }
  void issue_any(int rank) {
    std::set<int> blocked;
    std::vector<const Op*> candidates;
    for (const Op& op : job_.ranks[rank].ops) {
      if (issued_[rank][op.id]) continue;
      const bool ordered = is_transfer(op.kind) || op.kind == OpKind::kLaunch;
      const int queue = op.kind == OpKind::kLaunch ? -1 : static_cast<int>(op.channel);
      if (ordered && blocked.count(queue)) continue;
      if (ready(rank, op)) candidates.push_back(&op);
      if (ordered) blocked.insert(queue);
    }
    if (candidates.empty()) return;
    could_start_ = true;
    if (random_() % 3 != 0) start(rank, *candidates[random_() % candidates.size()]);
  }

  void fail(int rank, const Op& op, const std::string& what) {
    if (fault_.empty())
      fault_ = concat("rank ", rank, " op ", op.id, " (", to_string(op.kind), " ",
                      to_string(op.channel), "): ", what);
  }
  void complete(int rank, const Op& op) {
    done_[rank][op.id] = true;
    ++finished_;
  }

  void start(int rank, const Op& op) {
    issued_[rank][op.id] = true;
    ++started_;
    switch (op.kind) {
      case OpKind::kExchange:
        start_exchange(rank, op);
        break;
      case OpKind::kAllGather:
      case OpKind::kReduceScatter:
        start_collective(rank, op);
        break;
      case OpKind::kLaunch:
        launch(rank, op);
        complete(rank, op);
        break;
      case OpKind::kZeroGrad:
        grad_[rank][op.recv_slot] = {kEmpty, std::vector<int>(job_.ranks.size(), 0), true};
        complete(rank, op);
        break;
      case OpKind::kAddGrad:
        add(rank, op, grad_[rank][op.recv_slot], grad_[rank][op.send_slot]);
        complete(rank, op);
        break;
    }
  }

  void add(int rank, const Op& op, Gradient& sum, const Gradient& addend) {
    if (!sum.defined || !addend.defined) return fail(rank, op, "adds an undefined gradient");
    if (sum.shard != addend.shard) {
      return fail(rank, op, concat("adds gradients of shards ", sum.shard, " and ", addend.shard));
    }
    for (size_t i = 0; i < sum.contributions.size(); ++i)
      sum.contributions[i] += addend.contributions[i];
  }

  void launch(int rank, const Op& op) {
    if (op.sources.empty()) fail(rank, op, "launch over nothing");
    for (const SourceRef& source : op.sources) {
      if (kv_[rank][source.kv_slot] != source.source_rank) {
        fail(rank, op,
             concat("expects shard ", source.source_rank, " in kv slot ", source.kv_slot,
                    ", found ", kv_[rank][source.kv_slot]));
      }
      if (++launched_[rank][source.source_rank] > 1)
        fail(rank, op, concat("attends twice to ", source.source_rank));
      if (job_.backward != (source.grad_slot >= 0))
        return fail(rank, op, "grad slot does not fit the direction");
      if (!job_.backward) continue;
      Gradient& gradient = grad_[rank][source.grad_slot];
      if (!gradient.defined) fail(rank, op, "accumulates into an undefined gradient");
      if (gradient.shard != kEmpty && gradient.shard != source.source_rank)
        fail(rank, op, "accumulates into another shard's");
      gradient.shard = source.source_rank;
      ++gradient.contributions[rank];
    }
    if (launch_count_[rank]++ == 0 && op.sources[0].source_rank != rank)
      fail(rank, op, "own shard is not first");
  }

  /// The n-th send from a to b on a channel meets the n-th receive of b from a.
  void start_exchange(int rank, const Op& op) {
    if (op.to < 0 || op.from < 0) return fail(rank, op, "no peer");
    const bool kv = is_kv(op.channel);
    pending_[{rank, op.id}] = 2;
    transfers_[{op.channel, rank, op.to}].push_back({rank, op.id, true, op.send_slot,
                                                     kv ? kv_[rank][op.send_slot] : 0,
                                                     kv ? Gradient{} : grad_[rank][op.send_slot]});
    transfers_[{op.channel, op.from, rank}].push_back({rank, op.id, false, op.recv_slot, 0, {}});
    // The receive buffer is undefined until the data is there.
    kv ? void(kv_[rank][op.recv_slot] = kEmpty) : void(grad_[rank][op.recv_slot].defined = false);
    for (auto key : {std::tuple{op.channel, rank, op.to}, std::tuple{op.channel, op.from, rank}})
      match(key);
  }

  struct Half {
    int rank, id;
    bool send;
    int slot;
    int kv;
    Gradient gradient;
  };
  void match(const std::tuple<Channel, int, int>& key) {
    auto& queue = transfers_[key];
    while (true) {
      const auto send =
          std::find_if(queue.begin(), queue.end(), [](const Half& half) { return half.send; });
      const auto receive =
          std::find_if(queue.begin(), queue.end(), [](const Half& half) { return !half.send; });
      if (send == queue.end() || receive == queue.end()) return;
      if (is_kv(std::get<0>(key))) {
        kv_[receive->rank][receive->slot] = send->kv;
      } else {
        grad_[receive->rank][receive->slot] = send->gradient;
      }
      const Half sent = *send, received = *receive;
      const auto same = [](const Half& a, const Half& b) {
        return a.rank == b.rank && a.id == b.id && a.send == b.send;
      };
      std::erase_if(queue,
                    [&](const Half& half) { return same(half, sent) || same(half, received); });
      for (const Half& half : {sent, received}) {
        if (--pending_[{half.rank, half.id}] == 0)
          complete(half.rank, job_.ranks[half.rank].ops[half.id]);
      }
    }
  }

  /// The n-th call of every rank of the node on a channel is one collective.
  void start_collective(int rank, const Op& op) {
    const int node = job_.topology.node(rank), ranks = job_.topology.ranks_per_node;
    if (static_cast<int>(op.slots.size()) != ranks)
      return fail(rank, op, "slots do not fit the node");
    auto& calls = collectives_[{op.channel, node}];
    const size_t call = collective_count_[{op.channel, rank}]++;
    if (calls.size() <= call) calls.resize(call + 1);
    calls[call].push_back({rank, op.id});
    if (static_cast<int>(calls[call].size()) < ranks) return;
    for (const auto& [member, id] : calls[call]) {
      const Op& mine = job_.ranks[member].ops[id];
      if (mine.kind != op.kind) return fail(rank, op, "ranks of a node call different collectives");
      const int own = job_.topology.local_rank(member);
      if (op.kind == OpKind::kReduceScatter) {
        grad_[member][mine.recv_slot] = {kEmpty, std::vector<int>(job_.ranks.size(), 0), true};
      }
      for (const auto& [other, other_id] : calls[call]) {
        const Op& theirs = job_.ranks[other].ops[other_id];
        const int from = job_.topology.local_rank(other);
        if (op.kind == OpKind::kAllGather) {
          kv_[member][mine.slots[from]] = kv_[other][theirs.send_slot];
        } else {
          Gradient& sum = grad_[member][mine.recv_slot];
          if (sum.shard == kEmpty) sum.shard = grad_[other][theirs.slots[own]].shard;
          add(member, mine, sum, grad_[other][theirs.slots[own]]);
        }
      }
    }
    for (const auto& [member, id] : calls[call]) complete(member, job_.ranks[member].ops[id]);
  }

  std::string check_result() const {
    const int world = static_cast<int>(job_.ranks.size());
    for (int rank = 0; rank < world; ++rank) {
      for (int source = 0; source < world; ++source) {
        if (launched_[rank][source] != 1) {
          return concat("rank ", rank, " attends ", launched_[rank][source], " times to ", source);
        }
      }
      if (!job_.backward) continue;
      const int home = job_.ranks[rank].home_grad_slot;
      if (home < 0 || home >= job_.ranks[rank].num_grad_slots) return "no home slot";
      const Gradient& gradient = grad_[rank][home];
      if (!gradient.defined || gradient.shard != rank)
        return concat("rank ", rank, ": home slot holds shard ", gradient.shard);
      for (int other = 0; other < world; ++other) {
        if (gradient.contributions[other] != 1) {
          return concat("rank ", rank, ": ", gradient.contributions[other], " contributions of ",
                        other);
        }
      }
    }
    return "";
  }

  const Job& job_;
  int seed_;
  std::mt19937 random_;
  std::vector<std::vector<int>> kv_;
  std::vector<std::vector<Gradient>> grad_;
  std::vector<std::vector<bool>> issued_, done_;
  std::vector<size_t> next_;
  std::vector<std::vector<int>> launched_;
  std::vector<int> launch_count_;
  std::map<std::tuple<Channel, int, int>, std::deque<Half>> transfers_;
  std::map<std::pair<int, int>, int> pending_;
  std::map<std::pair<Channel, int>, std::vector<std::vector<std::pair<int, int>>>> collectives_;
  std::map<std::pair<Channel, int>, size_t> collective_count_;
  size_t finished_ = 0, started_ = 0;
  bool could_start_ = false;
  std::string fault_;
};

}  // namespace

std::string verify(const Job& job, int random_orders) {
  for (size_t rank = 0; rank < job.ranks.size(); ++rank) {
    std::string fault = find_hazard(job.ranks[rank], static_cast<int>(rank));
    if (!fault.empty()) return fault;
  }
  for (int seed = -1; seed < random_orders; ++seed) {
    std::string fault = SymbolicRun(job, seed).run();
    if (!fault.empty()) return concat(seed < 0 ? "in list order: " : "in random order: ", fault);
  }
  return "";
}

}  // namespace mtraining::ring
