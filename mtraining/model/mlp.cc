#include "mtraining/model/mlp.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <utility>

#include "mtraining/base/check.h"
#include "mtraining/model/token_runs.h"

namespace mtraining::model {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

/// A sum over runs: the first as it is; from the second on in float32.
class RunSum {
 public:
  void add(at::Tensor value) {
    if (!sum_.defined()) {
      dtype_ = value.scalar_type();
      sum_ = std::move(value);
    } else {
      if (sum_.scalar_type() != at::kDouble) sum_ = sum_.to(at::kFloat);
      sum_.add_(value);
    }
  }
  at::Tensor take() { return sum_.defined() ? std::move(sum_).to(dtype_) : at::Tensor(); }

 private:
  at::Tensor sum_;
  at::ScalarType dtype_ = at::kFloat;
};

/// x [tokens, hidden]. `keep` makes the function save gate(x) and up(x).
class Mlp : public torch::autograd::Function<Mlp> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, const at::Tensor& gate,
                            const at::Tensor& up, const at::Tensor& down, int64_t run, bool keep) {
    at::Tensor y = at::empty({x.size(0), down.size(0)}, x.options());
    at::Tensor gates, ups;
    if (keep) {
      gates = at::empty({x.size(0), gate.size(0)}, x.options());
      ups = at::empty_like(gates);
    }
    for_each_run(x.size(0), run, [&](int64_t begin, int64_t count) {
      const at::Tensor rows = x.narrow(0, begin, count);
      at::Tensor g = at::linear(rows, gate), u = at::linear(rows, up);
      if (keep) {
        gates.narrow(0, begin, count).copy_(g);
        ups.narrow(0, begin, count).copy_(u);
      }
      y.narrow(0, begin, count).copy_(at::linear(at::silu_(g).mul_(u), down));
    });
    context->save_for_backward({x, gate, up, down, gates, ups});
    context->saved_data["run"] = run;
    return y;
  }

  static variable_list backward(AutogradContext* context, const variable_list& upstream) {
    const variable_list saved = context->get_saved_variables();
    const at::Tensor &x = saved[0], &gate = saved[1], &up = saved[2], &down = saved[3];
    const bool kept = saved[4].defined();
    const at::Tensor dy = upstream[0];
    at::Tensor dx = at::empty_like(x);
    RunSum dgate, dup, ddown;
    for_each_run(x.size(0), context->saved_data["run"].toInt(), [&](int64_t begin, int64_t count) {
      const auto rows_of = [&](const at::Tensor& t) { return t.narrow(0, begin, count); };
      const at::Tensor rows = rows_of(x), d = rows_of(dy);
      const at::Tensor g = kept ? rows_of(saved[4]) : at::linear(rows, gate);
      const at::Tensor u = kept ? rows_of(saved[5]) : at::linear(rows, up);
      const at::Tensor a = at::silu(g);
      ddown.add(at::mm(d.t(), a * u));
      const at::Tensor dproduct = at::mm(d, down);
      const at::Tensor du = dproduct * a;
      const at::Tensor dg = at::silu_backward(dproduct * u, g);
      dgate.add(at::mm(dg.t(), rows));
      dup.add(at::mm(du.t(), rows));
      rows_of(dx).copy_(at::mm(dg, gate).addmm_(du, up));
    });
    return {dx, dgate.take(), dup.take(), ddown.take(), at::Tensor(), at::Tensor()};
  }
};

}  // namespace

at::Tensor mlp(const at::Tensor& x, const at::Tensor& gate, const at::Tensor& up,
               const at::Tensor& down, int64_t tile) {
  MT_CHECK_ARG(tile >= 0, "mlp: expected a tile of at least 0 tokens, got ", tile);
  const at::Tensor rows = x.reshape({-1, x.size(-1)});
  const bool keep = tile == 0 && at::GradMode::is_enabled();
  const at::Tensor y = Mlp::apply(rows, gate, up, down, tile == 0 ? kMlpRun : tile, keep);
  std::vector<int64_t> sizes = x.sizes().vec();
  sizes.back() = down.size(0);
  return y.view(sizes);
}

}  // namespace mtraining::model
