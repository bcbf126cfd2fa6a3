#include "mtraining/kernels/ref/tile_ops.h"

#include <cstdlib>
#include <cstring>

#include "mtraining/base/check.h"

namespace mtraining::kernels::ref {

extern const TileOps<float> kFloatOpsBaseline, kFloatOpsV3, kFloatOpsV4;
extern const TileOps<double> kDoubleOpsBaseline, kDoubleOpsV3, kDoubleOpsV4;

namespace {

// 0 baseline, 1 x86-64-v3, 2 x86-64-v4.
int processor_level() {
#ifdef MT_REF_X86
  __builtin_cpu_init();
  const bool v3 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                  __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2");
  const bool v4 = v3 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                  __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
                  __builtin_cpu_supports("avx512vl");
  return v4 ? 2 : v3 ? 1 : 0;
#else
  return 0;
#endif
}

template <typename T>
const TileOps<T>* ops_of_level([[maybe_unused]] int level) {
  constexpr bool kFloat = sizeof(T) == sizeof(float);
#ifdef MT_REF_X86
  if (level == 2) {
    if constexpr (kFloat)
      return &kFloatOpsV4;
    else
      return &kDoubleOpsV4;
  }
  if (level == 1) {
    if constexpr (kFloat)
      return &kFloatOpsV3;
    else
      return &kDoubleOpsV3;
  }
#endif
  if constexpr (kFloat)
    return &kFloatOpsBaseline;
  else
    return &kDoubleOpsBaseline;
}

}  // namespace

template <typename T>
const TileOps<T>* find_tile_ops(const char* isa) {
  const int highest = processor_level();
  for (int level = 0; level <= highest; ++level) {
    const TileOps<T>* ops = ops_of_level<T>(level);
    if (std::strcmp(ops->isa, isa) == 0) return ops;
  }
  return nullptr;
}

template <typename T>
const TileOps<T>& tile_ops() {
  static const TileOps<T>* const chosen = [] {
    const char* asked = std::getenv("MTRAINING_REF_ISA");
    if (asked == nullptr || *asked == 0) return ops_of_level<T>(processor_level());
    const TileOps<T>* ops = find_tile_ops<T>(asked);
    MT_CHECK_ARG(ops != nullptr,
                 "MTRAINING_REF_ISA: expected baseline, v3 or v4 and a processor that has it, got ",
                 asked);
    return ops;
  }();
  return *chosen;
}

template const TileOps<float>* find_tile_ops<float>(const char*);
template const TileOps<double>* find_tile_ops<double>(const char*);
template const TileOps<float>& tile_ops<float>();
template const TileOps<double>& tile_ops<double>();

}  // namespace mtraining::kernels::ref
