// Bench of the passes around attention: ms and bytes a second of each, beside a copy of device memory in the same run.
//
// In:   tokens (default 131072), of the Qwen2.5-3B shape. Out: a JSON line a case. Next: docs/benchmarks/train_gpu.md.
// Bytes: what a pass must read and write, each once; cross entropy reads its logits twice, and says both shares.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <functional>
#include <string>
#include <vector>

#include "mtraining/kernels/elementwise_cuda/elementwise.h"
#include "mtraining/kernels/sm90/device_memory.h"

namespace {

using mtraining::kernels::DType;
using mtraining::kernels::sm90::check_device;
using mtraining::kernels::sm90::DeviceMemory;
namespace elementwise = mtraining::kernels::elementwise_cuda;

constexpr int64_t kHidden = 2048, kFfn = 11008, kQ = 16, kKv = 2, kD = 128, kVocab = 151936;
constexpr int64_t kRow = (kQ + 2 * kKv) * kD;
constexpr int kWarmUp = 2, kRepeats = 9;
// Larger than any cache, so that nothing of one launch is left for the next.
constexpr int64_t kCopied = int64_t{1} << 30;

double median_ms(const std::function<void()>& body) {
  cudaEvent_t begin, end;
  check_device(cudaEventCreate(&begin), "event");
  check_device(cudaEventCreate(&end), "event");
  std::vector<float> times(kRepeats);
  for (int r = -kWarmUp; r < kRepeats; ++r) {
    check_device(cudaEventRecord(begin), "event");
    body();
    check_device(cudaEventRecord(end), "event");
    check_device(cudaEventSynchronize(end), "event");
    if (r >= 0) check_device(cudaEventElapsedTime(&times[r], begin, end), "event");
  }
  cudaEventDestroy(begin);
  cudaEventDestroy(end);
  std::nth_element(times.begin(), times.begin() + kRepeats / 2, times.end());
  return times[kRepeats / 2];
}

class Bench {
 public:
  explicit Bench(int64_t tokens) : tokens_(tokens) {
    const DeviceMemory from(kCopied), to(kCopied);
    const double ms = median_ms([&] {
      check_device(cudaMemcpyAsync(to.get(), from.get(), kCopied, cudaMemcpyDeviceToDevice),
                   "copy");
    });
    copy_ = 2.0 * kCopied / ms * 1e-9;
    std::printf("{\"case\": \"copy\", \"bytes\": %lld, \"ms\": %.4f, \"tb_per_s\": %.3f}\n",
                static_cast<long long>(2 * kCopied), ms, copy_);
  }

  void run(const char* name, double bytes, const std::function<void()>& body) const {
    const double ms = median_ms(body), rate = bytes / ms * 1e-9;
    std::printf(
        "{\"case\": \"%s\", \"tokens\": %lld, \"bytes\": %.0f, \"ms\": %.4f, "
        "\"tb_per_s\": %.3f, \"share_of_copy\": %.3f}\n",
        name, static_cast<long long>(tokens_), bytes, ms, rate, rate / copy_);
    std::fflush(stdout);
  }

 private:
  int64_t tokens_;
  double copy_ = 0;
};

void norms(const Bench& bench, int64_t t) {
  const DeviceMemory x(t * kHidden * 2), added(t * kHidden * 2), out(t * kHidden * 2),
      sum(t * kHidden * 2), weight(kHidden * 2), roots(t * 4), dweight(kHidden * 2);
  const DeviceMemory partials(elementwise::rms_norm_partial_rows(DType::kBFloat16, t, kHidden) *
                              kHidden * 4);
  elementwise::RmsNormForward p{.rows = t,
                                .width = kHidden,
                                .x = x.get(),
                                .weight = weight.get(),
                                .out = out.get(),
                                .inverse_root = roots.get<float>(),
                                .eps = 1e-6};
  const double one = 2.0 * static_cast<double>(t * kHidden);
  bench.run("rms_norm", 2 * one, [&] { elementwise::rms_norm(p); });
  p.added = added.get();
  p.sum = sum.get();
  bench.run("add_rms_norm", 4 * one, [&] { elementwise::rms_norm(p); });
  elementwise::RmsNormBackward b{.rows = t,
                                 .width = kHidden,
                                 .dout = out.get(),
                                 .x = x.get(),
                                 .weight = weight.get(),
                                 .inverse_root = roots.get<float>(),
                                 .dx = sum.get(),
                                 .dweight = dweight.get(),
                                 .partials = partials.get<float>()};
  bench.run("rms_norm_backward", 3 * one, [&] { elementwise::rms_norm_backward(b); });
  b.added = added.get();
  bench.run("add_rms_norm_backward", 4 * one, [&] { elementwise::rms_norm_backward(b); });
}

void ropes(const Bench& bench, int64_t t) {
  const DeviceMemory row(t * kRow * 2), dq(t * kQ * kD * 2), dk(t * kKv * kD * 2),
      dv(t * kKv * kD * 2), cos(t * kD / 2 * 4), sin(t * kD / 2 * 4), dbias(kRow * 2);
  const double table = 2.0 * 4 * static_cast<double>(t * kD / 2);
  const double turned = 2.0 * static_cast<double>(t * (kQ + kKv) * kD);
  elementwise::Rope p{.tokens = t,
                      .rotated_heads = kQ + kKv,
                      .head_dim = kD,
                      .cos = cos.get<float>(),
                      .sin = sin.get<float>(),
                      .table_tokens = t,
                      .x = row.get(),
                      .token_stride = kRow};
  bench.run("rope", 2 * turned + table, [&] { elementwise::rope(p); });
  elementwise::RopeBackward b{.tokens = t,
                              .q_heads = kQ,
                              .kv_heads = kKv,
                              .head_dim = kD,
                              .cos = cos.get<float>(),
                              .sin = sin.get<float>(),
                              .table_tokens = t,
                              .dq = dq.get(),
                              .dk = dk.get(),
                              .dv = dv.get(),
                              .dq_token_stride = kQ * kD,
                              .dk_token_stride = kKv * kD,
                              .dv_token_stride = kKv * kD,
                              .drow = row.get()};
  const double bytes = 2 * 2.0 * static_cast<double>(t * kRow) + table;
  bench.run("rope_backward", bytes, [&] { elementwise::rope_backward(b); });
  const DeviceMemory partials(elementwise::rope_partial_rows(b) * kRow * 4);
  b.dbias = dbias.get();
  b.partials = partials.get<float>();
  bench.run("rope_backward_bias", bytes, [&] { elementwise::rope_backward(b); });
}

void swiglus(const Bench& bench, int64_t t) {
  const DeviceMemory gate_up(t * 2 * kFfn * 2), product(t * kFfn * 2);
  const double one = 2.0 * static_cast<double>(t * kFfn);
  elementwise::Swiglu p{
      .rows = t, .width = kFfn, .gate_up = gate_up.get(), .product = product.get()};
  bench.run("swiglu", 3 * one, [&] { elementwise::swiglu(p); });
  elementwise::SwigluBackward b{.rows = t,
                                .width = kFfn,
                                .gate_up = gate_up.get(),
                                .dproduct = product.get(),
                                .dgate_up = gate_up.get(),
                                .product = product.get()};
  bench.run("swiglu_backward", 6 * one, [&] { elementwise::swiglu_backward(b); });
}

void losses(const Bench& bench, int64_t rows) {
  const DeviceMemory logits(rows * kVocab * 4), loss(rows * 4),
      labels(std::vector<int64_t>(rows, 5));
  const double one = static_cast<double>(rows * kVocab);
  for (const auto& [name, wide, narrow] :
       {std::tuple{"cross_entropy_float32_to_bf16", DType::kFloat32, DType::kBFloat16},
        std::tuple{"cross_entropy_bf16", DType::kBFloat16, DType::kBFloat16}}) {
    elementwise::CrossEntropy p{.logits_dtype = wide,
                                .gradient_dtype = narrow,
                                .rows = rows,
                                .vocab = kVocab,
                                .logits = logits.get(),
                                .row_stride = kVocab,
                                .labels = labels.get<int64_t>(),
                                .ignored = -100,
                                .loss = loss.get<float>()};
    const double in = mtraining::kernels::size_of(wide) * one;
    const double out = mtraining::kernels::size_of(narrow) * one;
    bench.run(name, 2 * in + out, [&] { elementwise::cross_entropy(p); });
    p.gradient = false;
    bench.run((std::string(name) + "_loss_only").c_str(), in,
              [&] { elementwise::cross_entropy(p); });
  }
}

}  // namespace

int main(int argc, char** argv) {
  try {
    const int64_t tokens = argc > 1 ? std::atoll(argv[1]) : 131072;
    const Bench bench(tokens);
    norms(bench, tokens);
    ropes(bench, tokens);
    swiglus(bench, tokens);
    losses(bench, std::min<int64_t>(tokens, 8192));
  } catch (const std::exception& error) {
    std::fprintf(stderr, "elementwise_cuda: error: %s\n", error.what());
    return 1;
  }
  return 0;
}
