#include "mtraining/torch_ops/ring.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <chrono>
#include <utility>

#include "mtraining/base/check.h"
#include "mtraining/base/parallel.h"
#include "mtraining/comm/c10d.h"
#include "mtraining/torch_ops/errors.h"
#include "mtraining/torch_ops/index_tensors.h"
#include "mtraining/torch_ops/ring_agreement.h"

namespace mtraining::torch_ops {
namespace {

attention::RingOptions ring_options(const RingShape& shape) {
  const auto cp_size = static_cast<int>(shape.members.size());
  attention::RingOptions options;
  options.layout.kind = layout::parse_layout_kind(shape.layout);
  options.layout.seq_len = shape.seq_len;
  options.layout.cp_size = cp_size;
  options.layout.stripe = shape.stripe;
  MT_CHECK_ARG(shape.nodes >= 1 && cp_size % shape.nodes == 0,
               "device_mesh: expected an outer size that divides ", cp_size, ", got ", shape.nodes);
  options.topology = {.nodes = static_cast<int>(shape.nodes),
                      .ranks_per_node = cp_size / static_cast<int>(shape.nodes)};
  options.ring = ring::parse_ring_kind(shape.ring);
  options.inner = ring::parse_inner_kind(shape.inner);
  options.ring_stride = static_cast<int>(shape.ring_stride);
  options.prefetch_steps = static_cast<int>(shape.prefetch_steps);
  options.columns = parse_word("columns", shape.columns, attention::kColumnWords);
  options.gradient_transport = parse_word("gradient_transport", shape.gradient_transport,
                                          attention::kGradientTransportWords);
  options.deterministic = shape.deterministic;
  return options;
}

}  // namespace

Ring::Ring(const c10::IValue& group, const RingShape& shape) {
  in_python_terms([&] {
    open_ = std::make_shared<Open>();
    comm::GroupTransportOptions transport;
    transport.members = shape.members;
    transport.scope = shape.scope;
    transport.master_addr = shape.master_addr;
    transport.timeout = std::chrono::milliseconds(shape.timeout_ms);
    transport.on_device = shape.on_device;
    open_->transport = comm::make_c10d_over(group, transport);
    try {
      open_->context =
          std::make_unique<attention::RingContext>(ring_options(shape), *open_->transport);
    } catch (const std::exception& e) {
      open_->transport->abort(e.what());  // the others may have come without such an error
      throw;
    }
  });
}

std::tuple<at::Tensor, at::Tensor, std::vector<at::Tensor>> Ring::attend(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
    const at::Tensor& document_starts, double softmax_scale,
    const attention::AttentionPattern& pattern, const GivenIndex& index, bool want_index) {
  set_num_threads(at::get_num_threads());  // stays: backward runs in this thread as well
  return in_python_terms([&]() -> std::tuple<at::Tensor, at::Tensor, std::vector<at::Tensor>> {
    try {
      const int64_t seq_len = open_->context->layout().seq_len();
      attention::AttentionCall call;
      call.softmax_scale = softmax_scale;
      call.document_starts = document_starts;
      call.owner = open_;
      call.pattern = pattern;
      if (index.blocks.defined()) {
        BlockBits host = index.blocks;
        host.bits = host.bits.cpu();
        check_block_bits(host, seq_len);
        call.index = std::make_shared<const index::Index>(from_bits(host, seq_len));
      } else if (!index.lists.empty()) {
        const std::vector<at::Tensor>& lists = index.lists;
        MT_CHECK_ARG(lists.size() == 4, "index: expected 4 tensors, got ", lists.size());
        call.index = std::make_shared<const index::Index>(from_tensors(
            {lists[0].cpu(), lists[1].cpu(), lists[2].cpu(), lists[3].cpu(), {}, {}}, seq_len));
      }
      check_agreement(call_values(q, k, document_starts, softmax_scale, pattern, call.index.get()),
                      open_->context->index_group());
      const attention::AttentionOutput output =
          attention::sparse_ring_attention(*open_->context, q, k, v, call);
      std::vector<at::Tensor> used;
      if (want_index && output.index->has_blocks()) {
        used = {bits_of_index(*output.index).to(q.device())};
      } else if (want_index) {
        const IndexTensors tensors =
            to_tensors(*output.index, std::max<int64_t>(output.index->diagonals.capacity, 1),
                       std::max<int64_t>(output.index->columns.capacity, 1));
        used = {tensors.diagonals,   tensors.num_diagonals, tensors.columns,
                tensors.num_columns, tensors.dense_heads,   tensors.caps_hit};
        for (at::Tensor& tensor : used) tensor = tensor.to(q.device());
      }
      return {output.out, output.lse, used};
    } catch (const std::exception& e) {
      open_->transport->abort(e.what());
      throw;
    }
  });
}

void Ring::barrier() {
  in_python_terms([&] { open_->context->index_group().barrier(); });
}

}  // namespace mtraining::torch_ops
