#include "mtraining/attention/column_exchange.h"

#include "mtraining/attention/list_uploads.h"
#include "mtraining/attention/tensors.h"
#include "mtraining/base/check.h"

namespace mtraining::attention {

ColumnExchange::ColumnExchange(RingContext::State& state, IndexPlan& index_plan,
                               const index::ColumnPlan& plan, const at::Tensor& k,
                               const at::Tensor& v)
    : state_(state),
      index_plan_(index_plan),
      plan_(plan),
      k_(k),
      v_(v),
      packed_(plan.slices.size()),
      gathered_(plan.slices.size()),
      grads_(plan.slices.size()),
      wire_(plan.slices.size()),
      reduced_(plan.slices.size()),
      gathers_(plan.slices.size()),
      reductions_(plan.slices.size()) {}

ColumnExchange::Rows ColumnExchange::own_rows(int slice) const {
  const std::vector<index::PackedRow>& rows = plan_.slices[slice].rows[state_.cp_rank];
  const auto count = static_cast<int64_t>(rows.size());
  at::Tensor indices = at::empty({3, count}, at::kLong);
  auto* to = indices.mutable_data_ptr<int64_t>();
  for (int64_t i = 0; i < count; ++i) {
    to[i] = rows[i].batch;
    to[count + i] = rows[i].kv_head;
    to[2 * count + i] = rows[i].offset;
  }
  if (!k_.device().is_cpu() && count > 0) {
    indices = upload(indices.const_data_ptr(), static_cast<int64_t>(indices.nbytes()), k_.device())
                  .view(at::kLong)
                  .view({3, count});
  }
  return {indices[0], indices[1], indices[2]};
}

std::string ColumnExchange::buffer_name(const char* what, int slice) const {
  return concat("columns ", what, " ", slice % kSlicesInMemory);
}

bool ColumnExchange::needs_multiprocessors() const {
  const auto posted = [](const comm::WorkPtr& work) { return work != nullptr; };
  return (state_.columns_group->needs_multiprocessors() &&
          std::any_of(gathers_.begin(), gathers_.end(), posted)) ||
         std::any_of(reductions_.begin(), reductions_.end(), posted);
}

void ColumnExchange::post_gather(int slice) {
  const int64_t rows = rows_per_rank(slice), head_dim = k_.size(3);
  packed_[slice] = state_.buffers.get(buffer_name("packed", slice), {rows, 2, head_dim},
                                      k_.scalar_type(), k_.device());
  gathered_[slice] = state_.buffers.get(buffer_name("gathered", slice),
                                        {state_.layout.cp_size(), rows, 2, head_dim},
                                        k_.scalar_type(), k_.device());
  const Rows own = own_rows(slice);
  const int64_t count = own.batch.numel();
  at::Tensor& packed = packed_[slice];
  if (count > 0) {
    packed.narrow(0, 0, count).select(1, 0).copy_(k_.index({own.batch, own.offset, own.kv_head}));
    packed.narrow(0, 0, count).select(1, 1).copy_(v_.index({own.batch, own.offset, own.kv_head}));
  }
  packed.narrow(0, count, rows - count).zero_();
  std::vector<comm::Buffer> parts;
  for (at::Tensor& part : gathered_[slice].unbind(0)) parts.push_back(writable_bytes_of(part));
  gathers_[slice] = state_.columns_group->all_gather(bytes_of(packed), std::move(parts));
  state_.watch_transfer({&gathers_[slice], 1}, k_.device(), "columns", slice);
}

kernels::KeySource ColumnExchange::gathered(int slice) {
  auto stretch = state_.begin_stretch(k_.device());
  gathers_[slice]->wait();
  gathers_[slice].reset();
  state_.end_stretch(std::move(stretch), "wait", slice, 0);
  const int64_t head_dim = k_.size(3);
  kernels::KeySource source;
  source.k = {gathered_[slice].const_data_ptr(), 0, 2 * head_dim, 0};
  source.v = {gathered_[slice].select(2, 1).const_data_ptr(), 0, 2 * head_dim, 0};
  source.num_keys = state_.layout.cp_size() * rows_per_rank(slice);
  source.columns = index_plan_.slice_lists(plan_.slices[slice], k_.device());
  return source;
}

void ColumnExchange::add_gradient_buffers(int slice, kernels::KeySource& source,
                                          at::ScalarType grad_state) {
  const int64_t head_dim = k_.size(3);
  if (slice >= kSlicesInMemory && reductions_[slice - kSlicesInMemory]) {  // its buffers come again
    reductions_[slice - kSlicesInMemory]->wait();
    reductions_[slice - kSlicesInMemory].reset();
  }
  grads_[slice] = state_.buffers.get(buffer_name("gradients", slice),
                                     {state_.layout.cp_size(), rows_per_rank(slice), 2, head_dim},
                                     grad_state, k_.device());
  grads_[slice].zero_();
  source.dk = {grads_[slice].data_ptr(), 0, 2 * head_dim, 0};
  source.dv = {grads_[slice].select(2, 1).data_ptr(), 0, 2 * head_dim, 0};
}

void ColumnExchange::post_reduce(int slice, at::ScalarType grad_wire) {
  wire_[slice] = grads_[slice];
  if (grad_wire != grads_[slice].scalar_type()) {
    wire_[slice] = state_.buffers.get(buffer_name("gradients on the wire", slice),
                                      grads_[slice].sizes(), grad_wire, k_.device());
    wire_[slice].copy_(grads_[slice]);
  }
  // One a slice, for they wait until dk and dv are home.
  reduced_[slice] =
      state_.buffers.get(concat("columns reduced ", slice), {rows_per_rank(slice), 2, k_.size(3)},
                         grad_wire, k_.device());
  std::vector<comm::ConstBuffer> parts;
  for (const at::Tensor& part : wire_[slice].unbind(0)) parts.push_back(bytes_of(part));
  reductions_[slice] = state_.columns_group->reduce_scatter(
      std::move(parts), writable_bytes_of(reduced_[slice]), element_type(grad_wire));
  state_.watch_transfer({&reductions_[slice], 1}, k_.device(), "columns", slice);
}

void ColumnExchange::add_reduced_to(at::Tensor& dk, at::Tensor& dv) {
  for (int slice = 0; slice < num_slices(); ++slice) {
    auto stretch = state_.begin_stretch(k_.device());
    if (reductions_[slice]) reductions_[slice]->wait();
    reductions_[slice].reset();
    state_.end_stretch(std::move(stretch), "wait", slice, 0);
    const Rows own = own_rows(slice);
    const int64_t count = own.batch.numel();
    if (count == 0) continue;
    const at::Tensor rows = reduced_[slice].narrow(0, 0, count).to(dk.scalar_type());
    // A slice names a row once, so that nothing has to be accumulated (which on a GPU would sort the rows first).
    for (const auto& [to, part] : {std::pair<at::Tensor&, int64_t>(dk, 0), {dv, 1}}) {
      const at::Tensor sum =
          to.index({own.batch, own.offset, own.kv_head}).add_(rows.select(1, part));
      to.index_put_({own.batch, own.offset, own.kv_head}, sum);
    }
  }
}

}  // namespace mtraining::attention
