// TileOps for x86-64-v3 (AVX2 and FMA); see tile_ops_impl.h.
#define MT_VECTOR_BYTES 32
#define MT_PRODUCT_ROWS 4
#include "mtraining/kernels/ref/tile_ops_impl.h"

namespace mtraining::kernels::ref {

extern const TileOps<float> kFloatOpsV3;
extern const TileOps<double> kDoubleOpsV3;
constinit const TileOps<float> kFloatOpsV3 = make_ops<float>("v3");
constinit const TileOps<double> kDoubleOpsV3 = make_ops<double>("v3");

}  // namespace mtraining::kernels::ref
