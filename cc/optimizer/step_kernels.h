// The step functions of each instruction set. See optimizer.h for the layout
// of a row.

#ifndef TFSWITCH_CC_OPTIMIZER_STEP_KERNELS_H_
#define TFSWITCH_CC_OPTIMIZER_STEP_KERNELS_H_

#include "cc/optimizer/optimizer.h"

namespace tfswitch {

enum class StepKind { kSgd, kMomentum, kNesterov, kAdagrad, kAdam, kAdamW };

using StepKernel = void (*)(const OptimizerParams&, float* row,
                            const float* gradient, float learning_rate);

// sqrt(1 - beta_2^t) / (1 - beta_1^t), in double and then rounded.
float AdamCorrection(const OptimizerParams& params, float steps);

namespace scalar {
StepKernel FindStepKernel(StepKind kind, int dim);
}
namespace avx2 {
StepKernel FindStepKernel(StepKind kind, int dim);
}

}  // namespace tfswitch

#endif  // TFSWITCH_CC_OPTIMIZER_STEP_KERNELS_H_
