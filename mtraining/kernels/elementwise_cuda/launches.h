// Launches: what lies behind elementwise.h's checks, RMSNorm one set a dtype. In: their structs. Out: enqueued kernels. Next: elementwise.cc.
#pragma once

#include "mtraining/kernels/elementwise_cuda/elementwise.h"

namespace mtraining::kernels::elementwise_cuda {

void rms_norm_bf16(const RmsNormForward& params);
void rms_norm_backward_bf16(const RmsNormBackward& params);
int64_t rms_norm_partial_rows_bf16(int64_t rows, int64_t width);
void rms_norm_float32(const RmsNormForward& params);
void rms_norm_backward_float32(const RmsNormBackward& params);
int64_t rms_norm_partial_rows_float32(int64_t rows, int64_t width);
void rope_launch(const Rope& params);
void rope_backward_launch(const RopeBackward& params);
void swiglu_launch(const Swiglu& params);
void swiglu_backward_launch(const SwigluBackward& params);
void cross_entropy_launch(const CrossEntropy& params);

}  // namespace mtraining::kernels::elementwise_cuda
