// Registration of everything that Python and TorchScript see as torch.ops.mtraining and torch.classes.mtraining.
//
// In:   loading this library. Out: schemas, kernels of the CPU and of a GPU where the build has them, shapes (Meta), gradients
//       (Autograd), the class Ring.
// Next: python/mtraining/ops.py and ring.py call them; register_blocks.cc has the operators of single blocks.
#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <initializer_list>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include "mtraining/layout/layout.h"
#include "mtraining/torch_ops/attend.h"
#include "mtraining/torch_ops/errors.h"
#include "mtraining/torch_ops/estimate.h"
#include "mtraining/torch_ops/registration.h"
#include "mtraining/torch_ops/ring.h"
#ifdef MT_WITH_CUDA
#include "mtraining/torch_ops/device_ops.h"
#endif

namespace mtraining::torch_ops {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// ---------------------------------------------------------------- schemas as types
using Recalled = std::tuple<Tensor, Tensor>;
using BuiltIndex = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;
using AttendOp = AttendResult(const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                              const Tensor&, const Tensor&, const Tensor&, const MaybeTensor&,
                              double);
using AttendBackwardOp = Gradients(const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                                   const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                                   const Tensor&, const Tensor&, const Tensor&, const MaybeTensor&,
                                   double);

/// The index of a call as its schema has it.
struct GivenIndex {
  const Tensor &diagonals, &num_diagonals, &columns, &num_columns;
  IndexTensors tensors() const { return {diagonals, num_diagonals, columns, num_columns, {}, {}}; }
};

void check_with_index(Named first, std::initializer_list<Named> others, const GivenIndex& index,
                      const MaybeTensor& document_starts) {
  check_devices(first, others);
  check_devices(first, {{"diagonals", index.diagonals},
                        {"num_diagonals", index.num_diagonals},
                        {"columns", index.columns},
                        {"num_columns", index.num_columns},
                        {"document_starts", or_undefined(document_starts)}});
}

// ---------------------------------------------------------------- what runs on them
/// The functions behind the operators, by where their tensors are.
struct OnCpu {
  static constexpr auto build_index = &torch_ops::build_index;
  static constexpr auto attend = &torch_ops::attend;
  static constexpr auto attend_backward = &torch_ops::attend_backward;
  static constexpr auto index_mask = &torch_ops::index_mask;
  static constexpr auto index_pairs = &torch_ops::index_pairs;
  static constexpr auto measure_recall = &torch_ops::measure_recall;
};
#ifdef MT_WITH_CUDA
struct OnGpu {
  static constexpr auto build_index = &build_index_on_device;
  static constexpr auto attend = &attend_on_device;
  static constexpr auto attend_backward = &attend_backward_on_device;
  static constexpr auto index_mask = &index_mask_on_device;
  static constexpr auto index_pairs = &index_pairs_on_device;
  static constexpr auto measure_recall = &measure_recall_on_device;
};
#endif

template <typename Where>
AttendResult attend_op(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& diagonals,
                       const Tensor& num_diagonals, const Tensor& columns,
                       const Tensor& num_columns, const MaybeTensor& document_starts,
                       double softmax_scale) {
  const GivenIndex index{diagonals, num_diagonals, columns, num_columns};
  check_with_index({"q", q}, {{"k", k}, {"v", v}}, index, document_starts);
  return in_python_terms([&]() -> AttendResult {
    const Attended result =
        Where::attend({q, k, v, index.tensors(), or_undefined(document_starts), softmax_scale});
    return {result.out, result.lse, result.out_residual};
  });
}

void check_backward(const Tensor& dout, const Tensor& q, const Tensor& k, const Tensor& v,
                    const Tensor& out, const Tensor& lse, const Tensor& out_residual,
                    const GivenIndex& index, const MaybeTensor& document_starts) {
  check_with_index({"q", q},
                   {{"k", k},
                    {"v", v},
                    {"dout", dout},
                    {"out", out},
                    {"lse", lse},
                    {"out_residual", out_residual}},
                   index, document_starts);
}

template <typename Where>
Gradients attend_backward_op(const Tensor& dout, const Tensor& q, const Tensor& k, const Tensor& v,
                             const Tensor& out, const Tensor& lse, const Tensor& out_residual,
                             const Tensor& diagonals, const Tensor& num_diagonals,
                             const Tensor& columns, const Tensor& num_columns,
                             const MaybeTensor& document_starts, double softmax_scale) {
  const GivenIndex index{diagonals, num_diagonals, columns, num_columns};
  check_backward(dout, q, k, v, out, lse, out_residual, index, document_starts);
  return in_python_terms([&] {
    return Where::attend_backward(
        {q, k, v, index.tensors(), or_undefined(document_starts), softmax_scale}, dout,
        {out, lse, out_residual});
  });
}

template <typename Where>
BuiltIndex build_index_op(const Tensor& q, const Tensor& k, const MaybeTensor& document_starts,
                          double softmax_scale, double p_vertical, double p_slash, int64_t last_q,
                          std::string_view window, std::string_view slash_pooling,
                          std::string_view selection, int64_t sink_tokens, int64_t local_blocks,
                          std::optional<int64_t> max_columns, std::optional<int64_t> max_diagonals,
                          double dense_threshold, double recall_floor, int64_t recall_rows) {
  check_devices({"q", q}, {{"k", k}, {"document_starts", or_undefined(document_starts)}});
  return in_python_terms([&]() -> BuiltIndex {
    const IndexTensors index =
        Where::build_index(q, k, or_undefined(document_starts), softmax_scale,
                           make_options(p_vertical, p_slash, last_q, window, slash_pooling,
                                        selection, sink_tokens, local_blocks, max_columns,
                                        max_diagonals, dense_threshold, recall_floor, recall_rows));
    return {index.diagonals,   index.num_diagonals, index.columns,
            index.num_columns, index.dense_heads,   index.caps_hit};
  });
}

template <typename Where>
Recalled recall_op(const Tensor& q, const Tensor& k, const Tensor& diagonals,
                   const Tensor& num_diagonals, const Tensor& columns, const Tensor& num_columns,
                   const MaybeTensor& document_starts, double softmax_scale, int64_t last_q,
                   std::string_view window, int64_t rows, int64_t seed) {
  const GivenIndex index{diagonals, num_diagonals, columns, num_columns};
  check_with_index({"q", q}, {{"k", k}}, index, document_starts);
  return in_python_terms([&] {
    return Where::measure_recall(q, k, index.tensors(), or_undefined(document_starts),
                                 softmax_scale, recall_options(last_q, window, rows), seed);
  });
}

template <typename Where>
Tensor index_mask_op(const Tensor& diagonals, const Tensor& num_diagonals, const Tensor& columns,
                     const Tensor& num_columns, const MaybeTensor& document_starts,
                     int64_t seq_len) {
  const GivenIndex index{diagonals, num_diagonals, columns, num_columns};
  check_with_index({"diagonals", diagonals}, {}, index, document_starts);
  return in_python_terms(
      [&] { return Where::index_mask(index.tensors(), or_undefined(document_starts), seq_len); });
}

template <typename Where>
Tensor index_pairs_op(const Tensor& diagonals, const Tensor& num_diagonals, const Tensor& columns,
                      const Tensor& num_columns, int64_t seq_len) {
  const GivenIndex index{diagonals, num_diagonals, columns, num_columns};
  check_with_index({"diagonals", diagonals}, {}, index, {});
  return in_python_terms([&] { return Where::index_pairs(index.tensors(), seq_len); });
}

template <typename Where>
void register_ops(torch::Library& m) {
  m.impl("build_index", &build_index_op<Where>);
  m.impl("attend", &attend_op<Where>);
  m.impl("attend_backward", &attend_backward_op<Where>);
  m.impl("recall", &recall_op<Where>);
  m.impl("index_mask", &index_mask_op<Where>);
  m.impl("index_pairs", &index_pairs_op<Where>);
}

// ---------------------------------------------------------------- shapes
AttendResult attend_meta(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& diagonals,
                         const Tensor& num_diagonals, const Tensor& columns,
                         const Tensor& num_columns, const MaybeTensor& document_starts, double) {
  check_with_index({"q", q}, {{"k", k}, {"v", v}}, {diagonals, num_diagonals, columns, num_columns},
                   document_starts);
  return attended_shapes(q);
}

Gradients attend_backward_meta(const Tensor& dout, const Tensor& q, const Tensor& k,
                               const Tensor& v, const Tensor& out, const Tensor& lse,
                               const Tensor& out_residual, const Tensor& diagonals,
                               const Tensor& num_diagonals, const Tensor& columns,
                               const Tensor& num_columns, const MaybeTensor& document_starts,
                               double) {
  check_backward(dout, q, k, v, out, lse, out_residual,
                 {diagonals, num_diagonals, columns, num_columns}, document_starts);
  return {empty_as(q), empty_as(k), empty_as(v)};
}

BuiltIndex build_index_meta(const Tensor& q, const Tensor& k, const MaybeTensor& document_starts,
                            double, double p_vertical, double p_slash, int64_t last_q,
                            std::string_view window, std::string_view slash_pooling,
                            std::string_view selection, int64_t sink_tokens, int64_t local_blocks,
                            std::optional<int64_t> max_columns,
                            std::optional<int64_t> max_diagonals, double dense_threshold,
                            double recall_floor, int64_t recall_rows) {
  check_devices({"q", q}, {{"k", k}, {"document_starts", or_undefined(document_starts)}});
  return in_python_terms([&]() -> BuiltIndex {
    MT_CHECK_ARG(q.dim() == 4, "q: expected [B, S, H, D], got ", q.dim(), " dimensions");
    const pattern::VerticalSlashOptions options = make_options(
        p_vertical, p_slash, last_q, window, slash_pooling, selection, sink_tokens, local_blocks,
        max_columns, max_diagonals, dense_threshold, recall_floor, recall_rows);
    const c10::SymInt batch = q.sym_size(0), seq_len = q.sym_size(1), heads = q.sym_size(2);
    const at::TensorOptions ints = q.options().dtype(at::kInt);
    const auto counts = [&] { return at::empty_symint({batch, heads}, ints); };
    return {
        at::empty_symint({batch, heads, diagonal_capacity(seq_len)}, ints),
        counts(),
        at::empty_symint(
            {batch, heads, column_capacity(seq_len, options, document_starts.has_value())}, ints),
        counts(),
        at::empty_symint({batch, heads}, ints.dtype(at::kBool)),
        at::empty({}, ints.dtype(at::kLong))};
  });
}

Recalled recall_meta(const Tensor& q, const Tensor& k, const Tensor& diagonals,
                     const Tensor& num_diagonals, const Tensor& columns, const Tensor& num_columns,
                     const MaybeTensor& document_starts, double, int64_t, std::string_view, int64_t,
                     int64_t) {
  check_with_index({"q", q}, {{"k", k}}, {diagonals, num_diagonals, columns, num_columns},
                   document_starts);
  const auto by_head = [&] {
    return at::empty_symint({q.sym_size(0), q.sym_size(2)}, q.options().dtype(at::kDouble));
  };
  return {by_head(), by_head()};
}

Tensor index_mask_meta(const Tensor& diagonals, const Tensor& num_diagonals, const Tensor& columns,
                       const Tensor& num_columns, const MaybeTensor& document_starts,
                       c10::SymInt seq_len) {
  check_with_index({"diagonals", diagonals}, {}, {diagonals, num_diagonals, columns, num_columns},
                   document_starts);
  return at::empty_symint({diagonals.sym_size(0), diagonals.sym_size(1), seq_len, seq_len},
                          diagonals.options().dtype(at::kBool));
}

Tensor index_pairs_meta(const Tensor& diagonals, const Tensor& num_diagonals, const Tensor& columns,
                        const Tensor& num_columns, c10::SymInt) {
  check_with_index({"diagonals", diagonals}, {}, {diagonals, num_diagonals, columns, num_columns},
                   {});
  return at::empty_symint({diagonals.sym_size(0), diagonals.sym_size(1)},
                          diagonals.options().dtype(at::kLong));
}

// ---------------------------------------------------------------- gradients
class Attend : public torch::autograd::Function<Attend> {
 public:
  static variable_list forward(AutogradContext* graph, const Tensor& q, const Tensor& k,
                               const Tensor& v, const Tensor& diagonals,
                               const Tensor& num_diagonals, const Tensor& columns,
                               const Tensor& num_columns, const MaybeTensor& document_starts,
                               double softmax_scale) {
    at::AutoDispatchBelowADInplaceOrView guard;
    static const auto op = op_named<AttendOp>("mtraining::attend");
    auto [out, lse, out_residual] = op.call(q, k, v, diagonals, num_diagonals, columns, num_columns,
                                            document_starts, softmax_scale);
    graph->save_for_backward({q, k, v, out, lse, out_residual, diagonals, num_diagonals, columns,
                              num_columns, or_undefined(document_starts)});
    graph->saved_data["softmax_scale"] = softmax_scale;
    graph->mark_non_differentiable({lse, out_residual});
    graph->set_materialize_grads(false);  // zeros as large as out, for out_residual
    return {out, lse, out_residual};
  }

  static variable_list backward(AutogradContext* graph, const variable_list& grads) {
    if (!grads[0].defined()) return variable_list(9);
    const variable_list t = graph->get_saved_variables();
    static const auto op = op_named<AttendBackwardOp>("mtraining::attend_backward");
    auto [dq, dk, dv] =
        op.call(grads[0], t[0], t[1], t[2], t[3], t[4], t[5], t[6], t[7], t[8], t[9],
                or_none(t[10]), graph->saved_data["softmax_scale"].toDouble());
    return {dq, dk, dv, {}, {}, {}, {}, {}, {}};
  }
};

/// The gradients can be asked for under create_graph, but not be differentiated in turn.
class AttendBackward : public torch::autograd::Function<AttendBackward> {
 public:
  static variable_list forward(AutogradContext*, const Tensor& dout, const Tensor& q,
                               const Tensor& k, const Tensor& v, const Tensor& out,
                               const Tensor& lse, const Tensor& out_residual,
                               const Tensor& diagonals, const Tensor& num_diagonals,
                               const Tensor& columns, const Tensor& num_columns,
                               const MaybeTensor& document_starts, double softmax_scale) {
    at::AutoDispatchBelowADInplaceOrView guard;
    static const auto op = op_named<AttendBackwardOp>("mtraining::attend_backward");
    auto [dq, dk, dv] = op.call(dout, q, k, v, out, lse, out_residual, diagonals, num_diagonals,
                                columns, num_columns, document_starts, softmax_scale);
    return {dq, dk, dv};
  }
  static variable_list backward(AutogradContext*, const variable_list&) {
    C10_THROW_ERROR(NotImplementedError, "attend: a second derivative is not supported");
  }
};

AttendResult attend_autograd(const Tensor& q, const Tensor& k, const Tensor& v,
                             const Tensor& diagonals, const Tensor& num_diagonals,
                             const Tensor& columns, const Tensor& num_columns,
                             const MaybeTensor& document_starts, double softmax_scale) {
  const variable_list results = Attend::apply(q, k, v, diagonals, num_diagonals, columns,
                                              num_columns, document_starts, softmax_scale);
  return {results[0], results[1], results[2]};
}

Gradients attend_backward_autograd(const Tensor& dout, const Tensor& q, const Tensor& k,
                                   const Tensor& v, const Tensor& out, const Tensor& lse,
                                   const Tensor& out_residual, const Tensor& diagonals,
                                   const Tensor& num_diagonals, const Tensor& columns,
                                   const Tensor& num_columns, const MaybeTensor& document_starts,
                                   double softmax_scale) {
  const variable_list results =
      AttendBackward::apply(dout, q, k, v, out, lse, out_residual, diagonals, num_diagonals,
                            columns, num_columns, document_starts, softmax_scale);
  return {results[0], results[1], results[2]};
}

// ---------------------------------------------------------------- without tensors
void check_pattern(double p_vertical, double p_slash, int64_t last_q, std::string_view window,
                   std::string_view slash_pooling, std::string_view selection, int64_t sink_tokens,
                   int64_t local_blocks, std::optional<int64_t> max_columns,
                   std::optional<int64_t> max_diagonals, double dense_threshold,
                   double recall_floor, int64_t recall_rows) {
  in_python_terms([&] {
    make_options(p_vertical, p_slash, last_q, window, slash_pooling, selection, sink_tokens,
                 local_blocks, max_columns, max_diagonals, dense_threshold, recall_floor,
                 recall_rows);
  });
}

/// int64 [n]: the positions that a rank holds, in order; at and beyond seq_len they are padding.
Tensor layout_positions(std::string_view kind, int64_t seq_len, int64_t cp_size, int64_t stripe,
                        int64_t nodes, int64_t cp_rank) {
  return in_python_terms([&] {
    const layout::Layout layout({.kind = layout::parse_layout_kind(kind),
                                 .seq_len = seq_len,
                                 .cp_size = static_cast<int>(cp_size),
                                 .stripe = stripe,
                                 .nodes = static_cast<int>(nodes)});
    MT_CHECK_ARG(cp_rank >= 0 && cp_rank < cp_size, "cp_rank: expected 0 .. ", cp_size - 1,
                 ", got ", cp_rank);
    return at::tensor(layout.positions(static_cast<int>(cp_rank)), at::kLong);
  });
}

// ---------------------------------------------------------------- the ring
c10::intrusive_ptr<Ring> open_ring(const c10::IValue& group, std::vector<int64_t> members,
                                   std::string scope, std::string master_addr, int64_t timeout_ms,
                                   int64_t nodes, int64_t seq_len, std::string layout,
                                   int64_t stripe, std::string ring, std::string inner,
                                   int64_t ring_stride, int64_t prefetch_steps, std::string columns,
                                   std::string gradient_transport, bool deterministic,
                                   bool on_device) {
  RingShape shape;
  shape.members = std::move(members);
  shape.scope = std::move(scope);
  shape.master_addr = std::move(master_addr);
  shape.timeout_ms = timeout_ms;
  shape.nodes = nodes;
  shape.seq_len = seq_len;
  shape.layout = std::move(layout);
  shape.stripe = stripe;
  shape.ring = std::move(ring);
  shape.inner = std::move(inner);
  shape.ring_stride = ring_stride;
  shape.prefetch_steps = prefetch_steps;
  shape.columns = std::move(columns);
  shape.gradient_transport = std::move(gradient_transport);
  shape.deterministic = deterministic;
  shape.on_device = on_device;
  return c10::make_intrusive<Ring>(group, shape);
}

using RingResult = std::tuple<Tensor, Tensor, std::vector<Tensor>>;

RingResult ring_attend_vertical_slash(
    const c10::intrusive_ptr<Ring>& ring, const Tensor& q, const Tensor& k, const Tensor& v,
    const MaybeTensor& document_starts, double softmax_scale, bool want_index, double p_vertical,
    double p_slash, int64_t last_q, const std::string& window, const std::string& slash_pooling,
    const std::string& selection, int64_t sink_tokens, int64_t local_blocks,
    std::optional<int64_t> max_columns, std::optional<int64_t> max_diagonals,
    double dense_threshold, double recall_floor, int64_t recall_rows) {
  attention::AttentionPattern pattern;
  pattern.vertical_slash = in_python_terms([&] {
    return make_options(p_vertical, p_slash, last_q, window, slash_pooling, selection, sink_tokens,
                        local_blocks, max_columns, max_diagonals, dense_threshold, recall_floor,
                        recall_rows);
  });
  return ring->attend(q, k, v, or_undefined(document_starts), softmax_scale, pattern, {},
                      want_index);
}

attention::AttentionPattern of_kind(pattern::PatternKind kind) {
  attention::AttentionPattern pattern;
  pattern.kind = kind;
  return pattern;
}

RingResult ring_attend_xattention(const c10::intrusive_ptr<Ring>& ring, const Tensor& q,
                                  const Tensor& k, const Tensor& v,
                                  const MaybeTensor& document_starts, double softmax_scale,
                                  bool want_index, int64_t block, int64_t stride,
                                  double threshold) {
  attention::AttentionPattern pattern = of_kind(pattern::PatternKind::kXAttention);
  pattern.xattention =
      in_python_terms([&] { return xattention_options(block, stride, threshold); });
  return ring->attend(q, k, v, or_undefined(document_starts), softmax_scale, pattern, {},
                      want_index);
}

RingResult ring_attend_moba(const c10::intrusive_ptr<Ring>& ring, const Tensor& q, const Tensor& k,
                            const Tensor& v, const MaybeTensor& document_starts,
                            double softmax_scale, bool want_index, int64_t chunk, int64_t top_k) {
  attention::AttentionPattern pattern = of_kind(pattern::PatternKind::kMoba);
  pattern.moba = in_python_terms([&] { return moba_options(chunk, top_k); });
  return ring->attend(q, k, v, or_undefined(document_starts), softmax_scale, pattern, {},
                      want_index);
}

RingResult ring_attend_dense(const c10::intrusive_ptr<Ring>& ring, const Tensor& q, const Tensor& k,
                             const Tensor& v, const MaybeTensor& document_starts,
                             double softmax_scale, bool want_index) {
  return ring->attend(q, k, v, or_undefined(document_starts), softmax_scale,
                      of_kind(pattern::PatternKind::kDense), {}, want_index);
}

RingResult ring_attend_index(const c10::intrusive_ptr<Ring>& ring, const Tensor& q, const Tensor& k,
                             const Tensor& v, const std::vector<Tensor>& index,
                             const MaybeTensor& document_starts, double softmax_scale) {
  return ring->attend(q, k, v, or_undefined(document_starts), softmax_scale,
                      of_kind(pattern::PatternKind::kDense), {index, {}}, false);
}

RingResult ring_attend_blocks(const c10::intrusive_ptr<Ring>& ring, const Tensor& q,
                              const Tensor& k, const Tensor& v, const Tensor& bits,
                              int64_t query_unit, int64_t key_unit,
                              const MaybeTensor& document_starts, double softmax_scale) {
  return ring->attend(q, k, v, or_undefined(document_starts), softmax_scale,
                      of_kind(pattern::PatternKind::kDense), {{}, {bits, query_unit, key_unit, 0}},
                      false);
}

const std::string kPatternKeys =
    "float p_vertical, float p_slash, int last_q, str window, str slash_pooling, str selection, "
    "int sink_tokens, int local_blocks, int? max_columns, int? max_diagonals, float "
    "dense_threshold, float recall_floor, int recall_rows";
const std::string kIndexLists =
    "Tensor diagonals, Tensor num_diagonals, Tensor columns, Tensor num_columns";

}  // namespace

TORCH_LIBRARY(mtraining, m) {
  m.class_<Ring>("Ring")
      .def("attend_vertical_slash", &ring_attend_vertical_slash)
      .def("attend_dense", &ring_attend_dense)
      .def("attend_xattention", &ring_attend_xattention)
      .def("attend_moba", &ring_attend_moba)
      .def("attend_index", &ring_attend_index)
      .def("attend_blocks", &ring_attend_blocks)
      .def("barrier", &Ring::barrier)
      .def("bytes_sent", &Ring::bytes_sent)
      .def_static("open", &open_ring);

  const auto define = [&m](const std::string& schema) { m.def(schema.c_str()); };
  define("build_index(Tensor q, Tensor k, Tensor? document_starts, float softmax_scale, " +
         kPatternKeys + ") -> (Tensor diagonals, Tensor num_diagonals, Tensor columns, Tensor " +
         "num_columns, Tensor dense_heads, Tensor caps_hit)");
  define("attend(Tensor q, Tensor k, Tensor v, " + kIndexLists +
         ", Tensor? document_starts, float softmax_scale) -> (Tensor out, Tensor lse, Tensor "
         "out_residual)");
  define(
      "attend_backward(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor "
      "out_residual, " +
      kIndexLists +
      ", Tensor? document_starts, float softmax_scale) -> (Tensor dq, Tensor dk, Tensor dv)");
  define("recall(Tensor q, Tensor k, " + kIndexLists +
         ", Tensor? document_starts, float softmax_scale, int last_q, str window, int rows, int "
         "seed) -> "
         "(Tensor window, Tensor sampled)");
  define("index_mask(" + kIndexLists + ", Tensor? document_starts, SymInt seq_len) -> Tensor");
  define("index_pairs(" + kIndexLists + ", SymInt seq_len) -> Tensor");
  m.def(("check_pattern(" + kPatternKeys + ") -> ()").c_str(), &check_pattern);
  m.def(
      "layout_positions(str layout, int seq_len, int cp_size, int stripe, int nodes, int cp_rank) "
      "-> Tensor",
      &layout_positions);
}

TORCH_LIBRARY_IMPL(mtraining, CPU, m) { register_ops<OnCpu>(m); }
#ifdef MT_WITH_CUDA
TORCH_LIBRARY_IMPL(mtraining, CUDA, m) { register_ops<OnGpu>(m); }
#endif

TORCH_LIBRARY_IMPL(mtraining, Meta, m) {
  m.impl("build_index", &build_index_meta);
  m.impl("attend", &attend_meta);
  m.impl("attend_backward", &attend_backward_meta);
  m.impl("recall", &recall_meta);
  m.impl("index_mask", &index_mask_meta);
  m.impl("index_pairs", &index_pairs_meta);
}

TORCH_LIBRARY_IMPL(mtraining, Autograd, m) {
  m.impl("attend", &attend_autograd);
  m.impl("attend_backward", &attend_backward_autograd);
}

}  // namespace mtraining::torch_ops
