// TileOps for any processor of the target; see tile_ops_impl.h.
#define MT_VECTOR_BYTES 16
#define MT_PRODUCT_ROWS 4
#include "mtraining/kernels/ref/tile_ops_impl.h"

namespace mtraining::kernels::ref {

extern const TileOps<float> kFloatOpsBaseline;
extern const TileOps<double> kDoubleOpsBaseline;
constinit const TileOps<float> kFloatOpsBaseline = make_ops<float>("baseline");
constinit const TileOps<double> kDoubleOpsBaseline = make_ops<double>("baseline");

}  // namespace mtraining::kernels::ref
