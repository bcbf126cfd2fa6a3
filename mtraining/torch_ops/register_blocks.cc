// Registration of the operators of single blocks: attention over them, their bits made of masks, lists, q and k.
//
// In:   loading this library. Out: schemas, kernels of the CPU and of a GPU, shapes (Meta), gradients (Autograd).
// Next: python/mtraining/block_index.py and ops.py call them; register.cc has the other operators.
#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <string>

#include "mtraining/torch_ops/attend.h"
#include "mtraining/torch_ops/block_bits.h"
#include "mtraining/torch_ops/registration.h"
#ifdef MT_WITH_CUDA
#include "mtraining/torch_ops/block_lists.h"
#include "mtraining/torch_ops/device_ops.h"
#endif

namespace mtraining::torch_ops {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

using AttendBlocksOp = AttendResult(const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                                    int64_t, int64_t, c10::SymInt, const MaybeTensor&, double);
using AttendBlocksBackwardOp = Gradients(const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                                         const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                                         int64_t, int64_t, c10::SymInt, const MaybeTensor&, double);

struct OnCpu {
  static constexpr auto attend = &torch_ops::attend;
  static constexpr auto attend_backward = &torch_ops::attend_backward;
  static constexpr auto longest_list = &torch_ops::longest_list;
};
#ifdef MT_WITH_CUDA
struct OnGpu {
  static constexpr auto attend = &attend_on_device;
  static constexpr auto attend_backward = &attend_backward_on_device;
  static constexpr auto longest_list = &longest_list_on_device;
};
#endif

// ---------------------------------------------------------------- attention
template <typename Where>
AttendResult attend_blocks(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& bits,
                           int64_t query_unit, int64_t key_unit, int64_t capacity,
                           const MaybeTensor& document_starts, double softmax_scale) {
  check_devices(
      {"q", q},
      {{"k", k}, {"v", v}, {"bits", bits}, {"document_starts", or_undefined(document_starts)}});
  return in_python_terms([&]() -> AttendResult {
    const Attended result = Where::attend({q,
                                           k,
                                           v,
                                           {},
                                           or_undefined(document_starts),
                                           softmax_scale,
                                           {bits, query_unit, key_unit, capacity}});
    return {result.out, result.lse, result.out_residual};
  });
}

void check_backward_devices(const Tensor& dout, const Tensor& q, const Tensor& k, const Tensor& v,
                            const Tensor& out, const Tensor& lse, const Tensor& out_residual,
                            const Tensor& bits, const MaybeTensor& document_starts) {
  check_devices({"q", q}, {{"k", k},
                           {"v", v},
                           {"dout", dout},
                           {"out", out},
                           {"lse", lse},
                           {"out_residual", out_residual},
                           {"bits", bits},
                           {"document_starts", or_undefined(document_starts)}});
}

template <typename Where>
Gradients attend_blocks_backward(const Tensor& dout, const Tensor& q, const Tensor& k,
                                 const Tensor& v, const Tensor& out, const Tensor& lse,
                                 const Tensor& out_residual, const Tensor& bits, int64_t query_unit,
                                 int64_t key_unit, int64_t capacity,
                                 const MaybeTensor& document_starts, double softmax_scale) {
  check_backward_devices(dout, q, k, v, out, lse, out_residual, bits, document_starts);
  return in_python_terms([&] {
    return Where::attend_backward({q,
                                   k,
                                   v,
                                   {},
                                   or_undefined(document_starts),
                                   softmax_scale,
                                   {bits, query_unit, key_unit, capacity}},
                                  dout, {out, lse, out_residual});
  });
}

AttendResult attend_blocks_meta(const Tensor& q, const Tensor& k, const Tensor& v,
                                const Tensor& bits, int64_t, int64_t, c10::SymInt,
                                const MaybeTensor& document_starts, double) {
  check_devices(
      {"q", q},
      {{"k", k}, {"v", v}, {"bits", bits}, {"document_starts", or_undefined(document_starts)}});
  return attended_shapes(q);
}

Gradients attend_blocks_backward_meta(const Tensor& dout, const Tensor& q, const Tensor& k,
                                      const Tensor& v, const Tensor& out, const Tensor& lse,
                                      const Tensor& out_residual, const Tensor& bits, int64_t,
                                      int64_t, c10::SymInt, const MaybeTensor& document_starts,
                                      double) {
  check_backward_devices(dout, q, k, v, out, lse, out_residual, bits, document_starts);
  return {empty_as(q), empty_as(k), empty_as(v)};
}

class AttendBlocks : public torch::autograd::Function<AttendBlocks> {
 public:
  static variable_list forward(AutogradContext* graph, const Tensor& q, const Tensor& k,
                               const Tensor& v, const Tensor& bits, int64_t query_unit,
                               int64_t key_unit, const c10::SymInt& capacity,
                               const MaybeTensor& document_starts, double softmax_scale) {
    at::AutoDispatchBelowADInplaceOrView guard;
    static const auto op = op_named<AttendBlocksOp>("mtraining::attend_blocks");
    auto [out, lse, out_residual] =
        op.call(q, k, v, bits, query_unit, key_unit, capacity, document_starts, softmax_scale);
    graph->save_for_backward(
        {q, k, v, out, lse, out_residual, bits, or_undefined(document_starts)});
    graph->saved_data["query_unit"] = query_unit;
    graph->saved_data["key_unit"] = key_unit;
    graph->saved_data["capacity"] = capacity;
    graph->saved_data["softmax_scale"] = softmax_scale;
    graph->mark_non_differentiable({lse, out_residual});
    graph->set_materialize_grads(false);  // zeros as large as out, for out_residual
    return {out, lse, out_residual};
  }

  static variable_list backward(AutogradContext* graph, const variable_list& grads) {
    if (!grads[0].defined()) return variable_list(9);
    const variable_list t = graph->get_saved_variables();
    static const auto op = op_named<AttendBlocksBackwardOp>("mtraining::attend_blocks_backward");
    auto& saved = graph->saved_data;
    auto [dq, dk, dv] =
        op.call(grads[0], t[0], t[1], t[2], t[3], t[4], t[5], t[6], saved["query_unit"].toInt(),
                saved["key_unit"].toInt(), saved["capacity"].toSymInt(), or_none(t[7]),
                saved["softmax_scale"].toDouble());
    return {dq, dk, dv, {}, {}, {}, {}, {}, {}};
  }
};

/// The gradients can be asked for under create_graph, but not be differentiated in turn.
class AttendBlocksBackward : public torch::autograd::Function<AttendBlocksBackward> {
 public:
  static variable_list forward(AutogradContext*, const Tensor& dout, const Tensor& q,
                               const Tensor& k, const Tensor& v, const Tensor& out,
                               const Tensor& lse, const Tensor& out_residual, const Tensor& bits,
                               int64_t query_unit, int64_t key_unit, const c10::SymInt& capacity,
                               const MaybeTensor& document_starts, double softmax_scale) {
    at::AutoDispatchBelowADInplaceOrView guard;
    static const auto op = op_named<AttendBlocksBackwardOp>("mtraining::attend_blocks_backward");
    auto [dq, dk, dv] = op.call(dout, q, k, v, out, lse, out_residual, bits, query_unit, key_unit,
                                capacity, document_starts, softmax_scale);
    return {dq, dk, dv};
  }
  static variable_list backward(AutogradContext*, const variable_list&) {
    C10_THROW_ERROR(NotImplementedError, "attend: a second derivative is not supported");
  }
};

AttendResult attend_blocks_autograd(const Tensor& q, const Tensor& k, const Tensor& v,
                                    const Tensor& bits, int64_t query_unit, int64_t key_unit,
                                    c10::SymInt capacity, const MaybeTensor& document_starts,
                                    double softmax_scale) {
  const variable_list results = AttendBlocks::apply(q, k, v, bits, query_unit, key_unit, capacity,
                                                    document_starts, softmax_scale);
  return {results[0], results[1], results[2]};
}

Gradients attend_blocks_backward_autograd(const Tensor& dout, const Tensor& q, const Tensor& k,
                                          const Tensor& v, const Tensor& out, const Tensor& lse,
                                          const Tensor& out_residual, const Tensor& bits,
                                          int64_t query_unit, int64_t key_unit,
                                          c10::SymInt capacity, const MaybeTensor& document_starts,
                                          double softmax_scale) {
  const variable_list results =
      AttendBlocksBackward::apply(dout, q, k, v, out, lse, out_residual, bits, query_unit, key_unit,
                                  capacity, document_starts, softmax_scale);
  return {results[0], results[1], results[2]};
}

// ---------------------------------------------------------------- bits
Tensor block_bits_of_mask(const Tensor& mask) {
  check_devices({"mask", mask}, {});
  return in_python_terms([&] { return bits_of_mask(mask); });
}
Tensor block_bits_of_lists(const Tensor& offsets, const Tensor& indices) {
  check_devices({"offsets", offsets}, {{"indices", indices}});
  return in_python_terms([&] { return bits_of_lists(offsets, indices); });
}
template <typename Where>
Tensor longest_block_list(const Tensor& bits, int64_t query_unit, int64_t key_unit,
                          int64_t seq_len) {
  check_devices({"bits", bits}, {});
  return in_python_terms([&] {
    return Where::longest_list({bits, query_unit, key_unit, 0}, seq_len);
  });
}
Tensor choose_xattention_op(const Tensor& q, const Tensor& k, const MaybeTensor& document_starts,
                            double softmax_scale, int64_t block, int64_t stride, double threshold) {
  check_devices({"q", q}, {{"k", k}, {"document_starts", or_undefined(document_starts)}});
  return in_python_terms([&] {
    return choose_xattention(q, k, or_undefined(document_starts),
                             checked_scale(softmax_scale, q.dim() == 4 ? q.size(3) : 1),
                             xattention_options(block, stride, threshold));
  });
}
Tensor choose_moba_op(const Tensor& q, const Tensor& k, const MaybeTensor& document_starts,
                      int64_t chunk, int64_t top_k) {
  check_devices({"q", q}, {{"k", k}, {"document_starts", or_undefined(document_starts)}});
  return in_python_terms(
      [&] { return choose_moba(q, k, or_undefined(document_starts), moba_options(chunk, top_k)); });
}

Tensor empty_bits(const Tensor& like, const c10::SymInt& batch, const c10::SymInt& heads,
                  const c10::SymInt& query_units, const c10::SymInt& key_units) {
  return at::empty_symint({batch, heads, query_units, units_of(key_units, 32)},
                          like.options().dtype(at::kInt));
}
Tensor block_bits_of_mask_meta(const Tensor& mask) {
  TORCH_CHECK_VALUE(mask.dim() == 4, "mask: expected [B, H, N, N], got ", mask.dim(),
                    " dimensions");
  return empty_bits(mask, mask.sym_size(0), mask.sym_size(1), mask.sym_size(2), mask.sym_size(3));
}
Tensor block_bits_of_lists_meta(const Tensor& offsets, const Tensor& indices) {
  check_devices({"offsets", offsets}, {{"indices", indices}});
  TORCH_CHECK_VALUE(offsets.dim() == 3, "offsets: expected [B, H, N + 1], got ", offsets.dim(),
                    " dimensions");
  const c10::SymInt units = offsets.sym_size(2) - 1;
  return empty_bits(offsets, offsets.sym_size(0), offsets.sym_size(1), units, units);
}
Tensor longest_block_list_meta(const Tensor& bits, int64_t, int64_t, c10::SymInt) {
  return at::empty({}, bits.options().dtype(at::kLong));
}
/// Of units of blocks of 64.
Tensor choice_meta(const Tensor& q, const Tensor& k, const MaybeTensor& document_starts,
                   int64_t query_unit, int64_t key_unit) {
  check_devices({"q", q}, {{"k", k}, {"document_starts", or_undefined(document_starts)}});
  TORCH_CHECK_VALUE(q.dim() == 4, "q: expected [B, S, H, D], got ", q.dim(), " dimensions");
  const c10::SymInt blocks = units_of(q.sym_size(1), 64);
  return empty_bits(q, q.sym_size(0), q.sym_size(2), units_of(blocks, query_unit),
                    units_of(blocks, key_unit));
}
Tensor choose_xattention_meta(const Tensor& q, const Tensor& k, const MaybeTensor& document_starts,
                              double, int64_t block, int64_t stride, double threshold) {
  in_python_terms([&] { xattention_options(block, stride, threshold); });
  return choice_meta(q, k, document_starts, block / 64, block / 64);
}
Tensor choose_moba_meta(const Tensor& q, const Tensor& k, const MaybeTensor& document_starts,
                        int64_t chunk, int64_t top_k) {
  in_python_terms([&] { moba_options(chunk, top_k); });
  return choice_meta(q, k, document_starts, 1, chunk / 64);
}

void check_xattention(int64_t block, int64_t stride, double threshold) {
  in_python_terms([&] { xattention_options(block, stride, threshold); });
}
void check_moba(int64_t chunk, int64_t top_k) {
  in_python_terms([&] { moba_options(chunk, top_k); });
}

template <typename Where>
void register_ops(torch::Library& m) {
  m.impl("attend_blocks", &attend_blocks<Where>);
  m.impl("attend_blocks_backward", &attend_blocks_backward<Where>);
  m.impl("block_bits_of_mask", &block_bits_of_mask);
  m.impl("block_bits_of_lists", &block_bits_of_lists);
  m.impl("longest_block_list", &longest_block_list<Where>);
  m.impl("choose_xattention", &choose_xattention_op);
  m.impl("choose_moba", &choose_moba_op);
}

const std::string kBlocks = "Tensor bits, int query_unit, int key_unit, ";
const std::string kXAttentionKeys =
    "int xattention_block, int xattention_stride, float xattention_threshold";
const std::string kMobaKeys = "int moba_chunk, int moba_top_k";

}  // namespace

TORCH_LIBRARY_FRAGMENT(mtraining, m) {
  const auto define = [&m](const std::string& schema) { m.def(schema.c_str()); };
  define("attend_blocks(Tensor q, Tensor k, Tensor v, " + kBlocks +
         "SymInt capacity, Tensor? document_starts, float softmax_scale) -> (Tensor out, Tensor "
         "lse, Tensor out_residual)");
  define(
      "attend_blocks_backward(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
      "Tensor out_residual, " +
      kBlocks +
      "SymInt capacity, Tensor? document_starts, float softmax_scale) -> (Tensor dq, Tensor dk, "
      "Tensor dv)");
  define("block_bits_of_mask(Tensor mask) -> Tensor");
  define("block_bits_of_lists(Tensor offsets, Tensor indices) -> Tensor");
  define("longest_block_list(" + kBlocks + "SymInt seq_len) -> Tensor");
  define("choose_xattention(Tensor q, Tensor k, Tensor? document_starts, float softmax_scale, " +
         kXAttentionKeys + ") -> Tensor");
  define("choose_moba(Tensor q, Tensor k, Tensor? document_starts, " + kMobaKeys + ") -> Tensor");
  m.def(("check_xattention(" + kXAttentionKeys + ") -> ()").c_str(), &check_xattention);
  m.def(("check_moba(" + kMobaKeys + ") -> ()").c_str(), &check_moba);
}

TORCH_LIBRARY_IMPL(mtraining, CPU, m) { register_ops<OnCpu>(m); }
#ifdef MT_WITH_CUDA
TORCH_LIBRARY_IMPL(mtraining, CUDA, m) { register_ops<OnGpu>(m); }
#endif

TORCH_LIBRARY_IMPL(mtraining, Meta, m) {
  m.impl("attend_blocks", &attend_blocks_meta);
  m.impl("attend_blocks_backward", &attend_blocks_backward_meta);
  m.impl("block_bits_of_mask", &block_bits_of_mask_meta);
  m.impl("block_bits_of_lists", &block_bits_of_lists_meta);
  m.impl("longest_block_list", &longest_block_list_meta);
  m.impl("choose_xattention", &choose_xattention_meta);
  m.impl("choose_moba", &choose_moba_meta);
}

TORCH_LIBRARY_IMPL(mtraining, Autograd, m) {
  m.impl("attend_blocks", &attend_blocks_autograd);
  m.impl("attend_blocks_backward", &attend_blocks_backward_autograd);
}

}  // namespace mtraining::torch_ops
