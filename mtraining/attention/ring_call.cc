#include "mtraining/attention/ring_call.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <iterator>

#include "mtraining/attention/tensors.h"
#include "mtraining/base/check.h"

namespace mtraining::attention {
namespace {

constexpr const char* kAgreedNames[] = {"the call (0 forward, 1 backward)",
                                        "batch",
                                        "num_q_heads",
                                        "num_kv_heads",
                                        "head_dim",
                                        "dtype",
                                        "softmax_scale's bits",
                                        "the index's digest",
                                        "document_starts' digest"};
constexpr size_t kNumAgreed = std::size(kAgreedNames);

uint64_t digest_of(const at::Tensor& document_starts) {
  if (!document_starts.defined()) return 0;
  uint64_t digest = 0xcbf29ce484222325u;
  const auto* values = document_starts.const_data_ptr<int32_t>();
  for (int64_t i = 0; i < document_starts.numel(); ++i) {
    digest = (digest ^ static_cast<uint32_t>(values[i])) * 0x100000001b3u;
    digest ^= digest >> 29;
  }
  return digest | 1;
}

void agree(RingContext::State& state, const std::array<int64_t, kNumAgreed>& mine) {
  comm::Communicator& group = *state.agreement_group;
  std::vector<std::array<int64_t, kNumAgreed>> all(static_cast<size_t>(group.size()));
  std::vector<comm::Buffer> parts;
  for (auto& part : all) parts.push_back({part.data(), static_cast<int64_t>(sizeof(part))});
  group.all_gather({mine.data(), static_cast<int64_t>(sizeof(mine))}, parts)->wait();
  for (int r = 0; r < group.size(); ++r) {
    for (size_t i = 0; i < kNumAgreed; ++i) {
      MT_CHECK_ARG(all[r][i] == mine[i], "ring attention: ranks differ in ", kAgreedNames[i],
                   ": rank ", group.rank(), " has ", mine[i], ", rank ", r, " has ", all[r][i]);
    }
  }
}

/// This rank's rows of document_starts. A row's document starts at or before it.
at::Tensor local_document_start(const RingContext::State& state,
                                const at::Tensor& document_starts) {
  const int64_t batch = document_starts.size(0), seq_len = document_starts.size(1);
  const auto rows = static_cast<int64_t>(state.positions.size());
  at::Tensor local = at::zeros({batch, rows}, at::kInt);
  const auto* from = document_starts.const_data_ptr<int32_t>();
  auto* to = local.mutable_data_ptr<int32_t>();
  for (int64_t b = 0; b < batch; ++b) {
    for (int64_t t = 0; t < rows; ++t) {
      const int64_t position = state.positions[t];
      if (position >= seq_len) continue;
      const int32_t start = from[b * seq_len + position];
      MT_CHECK_ARG(start >= 0 && start <= position, "document_starts[", b, ", ", position,
                   "]: expected 0 .. ", position, ", got ", start);
      to[b * rows + t] = start;
    }
  }
  return local;
}

}  // namespace

/// On a GPU a masked pair weighs 0, and 0 times what padding may hold (infinities, NaN) would not be 0: a copy with zeros there.
at::Tensor without_padding(const RingContext::State& state, at::Tensor rows) {
  const auto real =
      std::lower_bound(state.positions.begin(), state.positions.end(), state.layout.seq_len()) -
      state.positions.begin();
  const int64_t padding = rows.size(1) - real;
  if (rows.is_cpu() || padding == 0) return rows;
  rows = rows.clone(at::MemoryFormat::Contiguous);
  rows.narrow(1, real, padding).zero_();
  return rows;
}

namespace {

RingCall checked_call(RingContext::State& state, const ListSizes& index, uint64_t index_digest,
                      const char* direction, const at::Tensor& q, const at::Tensor& k,
                      const at::Tensor& v, double softmax_scale,
                      const at::Tensor& document_starts) {
  const int64_t n = state.layout.tokens_per_rank();
  const int64_t head_dim = q.defined() && q.dim() == 4 ? q.size(3) : 0;
  const at::ScalarType dtype = q.defined() ? q.scalar_type() : at::kFloat;
  const at::Device device = q.defined() ? q.device() : at::kCPU;
  check_tensor("q", q,
               {{"B", index.batch}, {"S_local", n}, {"H", index.num_q_heads}, {"D", head_dim}},
               dtype, device);
  kernel_dtype(q, "q");
  MT_CHECK_SUPPORTED(device.is_cpu() || device.is_cuda(),
                     "q: expected a tensor on the CPU or a GPU, got one on ", device);
  MT_CHECK_SUPPORTED(device.is_cpu() || state.layout.cp_size() == 1 || state.device_index_group,
                     "q: tensors on a GPU over ", state.layout.cp_size(),
                     " ranks need a transport over device memory (nccl)");
  const int64_t kv_heads = k.defined() && k.dim() == 4 ? k.size(2) : 1;
  check_tensor("k", k, {{"B", index.batch}, {"S_local", n}, {"Hk", kv_heads}, {"D", head_dim}},
               dtype, device);
  check_tensor("v", v, {{"B", index.batch}, {"S_local", n}, {"Hk", kv_heads}, {"D", head_dim}},
               dtype, device);
  MT_CHECK_ARG(kv_heads >= 1 && index.num_q_heads % kv_heads == 0,
               "k: expected num_kv_heads Hk that divides H=", index.num_q_heads, ", got ",
               shape_text(k));
  MT_CHECK_ARG(std::isfinite(softmax_scale) && softmax_scale >= 0,
               "softmax_scale: expected a positive number, or 0 for 1/sqrt(D), got ",
               softmax_scale);

  RingCall call;
  call.q = without_padding(state, with_contiguous_rows(q));
  call.k = without_padding(state, k.contiguous());
  call.v = without_padding(state, v.contiguous());
  call.softmax_scale =
      softmax_scale > 0 ? softmax_scale : 1 / std::sqrt(static_cast<double>(head_dim));
  at::Tensor documents;
  if (document_starts.defined()) {
    check_tensor("document_starts", document_starts,
                 {{"B", index.batch}, {"S", state.layout.seq_len()}}, at::kInt, at::kCPU);
    documents = document_starts.contiguous();
    const at::Tensor local = local_document_start(state, documents);
    call.document_start = device.is_cpu() ? local
                                          : upload(local.const_data_ptr(),
                                                   static_cast<int64_t>(local.nbytes()), device)
                                                .view(at::kInt)
                                                .view(local.sizes());
  }
  if (state.agreement_group->size() == 1) return call;
  agree(state, {std::strcmp(direction, "backward") == 0, index.batch, index.num_q_heads, kv_heads,
                head_dim, static_cast<int64_t>(dtype), std::bit_cast<int64_t>(call.softmax_scale),
                static_cast<int64_t>(index_digest), static_cast<int64_t>(digest_of(documents))});
  return call;
}

}  // namespace

RingCall checked_call(RingContext::State& state, IndexPlan& plan, const char* direction,
                      const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                      double softmax_scale, const at::Tensor& document_starts) {
  const ListSizes& index = plan.sizes();
  MT_CHECK_ARG(index.seq_len == state.layout.seq_len(), "index: expected seq_len ",
               state.layout.seq_len(), ", got ", index.seq_len);
  if (!plan.is_awaited()) {
    const int64_t rows = int64_t{index.batch} * index.num_q_heads,
                  diagonals = plan.index().diagonals.rows, columns = plan.index().columns.rows;
    MT_CHECK_ARG(diagonals == rows && columns == rows,
                 "index: expected lists of batch x num_q_heads = ", rows, " rows, got ", diagonals,
                 " of diagonals and ", columns, " of columns");
  }
  return checked_call(state, index, plan.digest(), direction, q, k, v, softmax_scale,
                      document_starts);
}

RingCall checked_call(RingContext::State& state, const at::Tensor& q, const at::Tensor& k,
                      const at::Tensor& v, double softmax_scale,
                      const at::Tensor& document_starts) {
  const ListSizes sizes{static_cast<int>(q.size(0)), static_cast<int>(q.size(2)),
                        state.layout.seq_len()};
  return checked_call(state, sizes, IndexPlan::kAwaitedDigest, "forward", q, k, v, softmax_scale,
                      document_starts);
}

void check_gradient_inputs(const at::Tensor& q, const at::Tensor& dout,
                           const ForwardResult& saved) {
  MT_CHECK_ARG(q.defined() && q.dim() == 4, "q: expected [B, S_local, H, D], got ", shape_text(q));
  const NamedSizes rows = {
      {"B", q.size(0)}, {"S_local", q.size(1)}, {"H", q.size(2)}, {"D", q.size(3)}};
  check_tensor("dout", dout, rows, q.scalar_type(), q.device());
  if (saved.out_residual.defined()) {
    check_tensor("out_residual", saved.out_residual, rows, q.scalar_type(), q.device());
  }
  check_tensor("out", saved.out, rows, q.scalar_type(), q.device());
  check_tensor("lse", saved.lse, {{"B", q.size(0)}, {"H", q.size(2)}, {"S_local", q.size(1)}},
               state_type(q.scalar_type()), q.device());
}

}  // namespace mtraining::attention
