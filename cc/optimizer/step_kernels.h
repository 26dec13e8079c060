// The step functions of each instruction set. See optimizer.h for the layout
// of a row.

#ifndef TFSWITCH_CC_OPTIMIZER_STEP_KERNELS_H_
#define TFSWITCH_CC_OPTIMIZER_STEP_KERNELS_H_

#include "cc/optimizer/optimizer.h"

namespace tfswitch {

enum class StepKind {
  kSgd,
  kMomentum,
  kNesterov,
  kAdagrad,
  kRowwiseAdagrad,
  kAdagradDecay,
  kAdam,
  kAdamW,
  kAmsGrad,
  kRmsprop,
  kRmspropMomentum,
  kRmspropCentered,
  kRmspropCenteredMomentum,
  kAdadelta,
  kFtrl,       // Of learning_rate_power -0.5.
  kFtrlPower,  // Of any.
  kGroupFtrl,
  kGroupFtrlPower,
  kPaddleAdagrad,
  kPaddleStdAdagrad,
  kPaddleSharedAdam,
  kLion,
  // Not rules: options around params.rule, and params.segments in turn.
  kWithOptions,
  kSegments,
};

using StepKernel = OptimizerParams::Kernel;

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
