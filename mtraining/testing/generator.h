// Generator: structured q, k, v whose attention really is vertical-slash: RoPE over shared means, sink keys, noise; heads uneven.
//
// In:   sizes and a seed. Out: float arrays, the same on every machine. Next: tests and benches.
#pragma once

#include <cstdint>
#include <vector>

namespace mtraining::testing {

struct QkvOptions {
  int64_t batch = 1, seq_len = 512, num_q_heads = 4, num_kv_heads = 2, head_dim = 64;
  uint64_t seed = 1;
  double theta = 10000.0;  ///< RoPE base
  int sink_keys = 4;       ///< outlier keys at the start
  int vertical_keys = 8;   ///< outlier keys elsewhere, per kv head
  double noise = 1.0;
  double outlier_channel = 0;  ///< > 0: a few channels multiplied by it
};
struct Qkv {
  std::vector<float> q;     ///< [B, S, H, D]
  std::vector<float> k, v;  ///< [B, S, Hk, D]
  std::vector<float> dout;  ///< [B, S, H, D]
};
Qkv make_qkv(const QkvOptions& options);

}  // namespace mtraining::testing
