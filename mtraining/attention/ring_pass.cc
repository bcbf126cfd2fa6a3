#include "mtraining/attention/ring_pass.h"

#include <algorithm>

#include "mtraining/attention/tensors.h"
#include "mtraining/base/check.h"

namespace mtraining::attention {

void RingPass::begin() {
  for (; begun_ < schedule_.ops.size(); ++begun_) {
    const ring::Op& op = schedule_.ops[begun_];
    if (!op.after.empty()) return;
    if (op.kind == ring::OpKind::kExchange) {
      exchange(op);
    } else if (op.kind == ring::OpKind::kAllGather) {
      all_gather(op);
    } else {
      return;
    }
  }
}

void RingPass::run(const Launch& launch) {
  std::vector<int> visits(static_cast<size_t>(state_.layout.cp_size()), 0);
  for (; begun_ < schedule_.ops.size(); ++begun_) {
    const ring::Op& op = schedule_.ops[begun_];
    for (int id : op.after) finish(id, op.ring_step);
    switch (op.kind) {
      case ring::OpKind::kExchange:
        exchange(op);
        break;
      case ring::OpKind::kAllGather:
        all_gather(op);
        break;
      case ring::OpKind::kReduceScatter:
        reduce_scatter(op);
        break;
      case ring::OpKind::kLaunch:
        for (const ring::SourceRef& source : op.sources) ++visits[source.source_rank];
        launch(op);
        break;
      case ring::OpKind::kZeroGrad:
        zero_grad(op);
        break;
      case ring::OpKind::kAddGrad:
        add_grad(op);
        break;
    }
  }
  for (const ring::Op& op : schedule_.ops) finish(op.id, op.ring_step);
  for (size_t r = 0; r < visits.size(); ++r) {
    MT_ASSERT(visits[r] == 1, "rank ", state_.cp_rank, " attended ", visits[r],
              " times to the shard of rank ", r);
  }
}

bool RingPass::needs_multiprocessors() const {
  return std::any_of(pending_.begin(), pending_.end(), [](const Transfer& transfer) {
    return !transfer.works.empty() && transfer.needs_multiprocessors;
  });
}

void RingPass::posted(const ring::Op& op, bool sums) {
  Transfer& transfer = pending_[op.id];
  transfer.needs_multiprocessors = sums || state_.channel(op.channel).needs_multiprocessors();
  state_.watch_transfer(transfer.works, slots_.k(0).device(), ring::to_string(op.channel),
                        op.ring_step);
}

void RingPass::exchange(const ring::Op& op) {
  comm::Communicator& group = state_.channel(op.channel);
  const int to = state_.group_rank(op.channel, op.to),
            from = state_.group_rank(op.channel, op.from);
  std::vector<comm::ConstBuffer> send;
  std::vector<comm::Buffer> recv;
  if (!ring::is_kv(op.channel)) {
    pack_grad(op.send_slot);
    send = {bytes_of(slots_.wire_dk(op.send_slot)), bytes_of(slots_.wire_dv(op.send_slot))};
    recv = {writable_bytes_of(slots_.wire_dk(op.recv_slot)),
            writable_bytes_of(slots_.wire_dv(op.recv_slot))};
    pending_[op.id].grad_slots_to_unpack = {op.recv_slot};
  } else {
    send = {bytes_of(slots_.k(op.send_slot)), bytes_of(slots_.v(op.send_slot))};
    recv = {writable_bytes_of(slots_.k(op.recv_slot)), writable_bytes_of(slots_.v(op.recv_slot))};
  }
  pending_[op.id].works.push_back(group.exchange(to, std::move(send), from, std::move(recv)));
  posted(op, false);
}

void RingPass::all_gather(const ring::Op& op) {
  comm::Communicator& group = state_.channel(op.channel);
  std::vector<comm::Buffer> k, v;
  for (int slot : op.slots) {
    k.push_back(writable_bytes_of(slots_.k(slot)));
    v.push_back(writable_bytes_of(slots_.v(slot)));
  }
  pending_[op.id].works.push_back(group.all_gather(bytes_of(slots_.k(op.send_slot)), std::move(k)));
  pending_[op.id].works.push_back(group.all_gather(bytes_of(slots_.v(op.send_slot)), std::move(v)));
  posted(op, false);
}

void RingPass::reduce_scatter(const ring::Op& op) {
  comm::Communicator& group = state_.channel(op.channel);
  std::vector<comm::ConstBuffer> dk, dv;
  for (int slot : op.slots) {
    pack_grad(slot);
    dk.push_back(bytes_of(slots_.wire_dk(slot)));
    dv.push_back(bytes_of(slots_.wire_dv(slot)));
  }
  const comm::ElementType type = element_type(slots_.wire_dk(op.recv_slot).scalar_type());
  pending_[op.id].works.push_back(
      group.reduce_scatter(std::move(dk), writable_bytes_of(slots_.wire_dk(op.recv_slot)), type));
  pending_[op.id].works.push_back(
      group.reduce_scatter(std::move(dv), writable_bytes_of(slots_.wire_dv(op.recv_slot)), type));
  pending_[op.id].grad_slots_to_unpack = {op.recv_slot};
  posted(op, true);
}

void RingPass::zero_grad(const ring::Op& op) {
  slots_.dk(op.recv_slot).zero_();
  slots_.dv(op.recv_slot).zero_();
}

void RingPass::add_grad(const ring::Op& op) {
  slots_.dk(op.recv_slot).add_(slots_.dk(op.send_slot));
  slots_.dv(op.recv_slot).add_(slots_.dv(op.send_slot));
}

void RingPass::finish(int id, int for_ring_step) {
  Transfer& transfer = pending_[id];
  if (transfer.works.empty()) return;
  auto stretch = state_.begin_stretch(slots_.k(0).device());
  for (comm::WorkPtr& work : transfer.works) work->wait();
  state_.end_stretch(std::move(stretch), "wait", for_ring_step, 0);
  if (slots_.grads_are_converted()) {
    for (int slot : transfer.grad_slots_to_unpack) {
      slots_.dk(slot).copy_(slots_.wire_dk(slot));
      slots_.dv(slot).copy_(slots_.wire_dv(slot));
    }
  }
  transfer = {};
}

void RingPass::pack_grad(int slot) {
  if (!slots_.grads_are_converted()) return;
  slots_.wire_dk(slot).copy_(slots_.dk(slot));
  slots_.wire_dv(slot).copy_(slots_.dv(slot));
}

}  // namespace mtraining::attention
