// TileOps for x86-64-v4 (AVX-512); see tile_ops_impl.h.
#define MT_VECTOR_BYTES 64
#define MT_PRODUCT_ROWS 8
#include "mtraining/kernels/ref/tile_ops_impl.h"

namespace mtraining::kernels::ref {

extern const TileOps<float> kFloatOpsV4;
extern const TileOps<double> kDoubleOpsV4;
constinit const TileOps<float> kFloatOpsV4 = make_ops<float>("v4");
constinit const TileOps<double> kDoubleOpsV4 = make_ops<double>("v4");

}  // namespace mtraining::kernels::ref
