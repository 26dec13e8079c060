// The step functions of each instruction set. See optimizer.h for the layout
// of a row.

#ifndef TFSWITCH_CC_OPTIMIZER_STEP_KERNELS_H_
#define TFSWITCH_CC_OPTIMIZER_STEP_KERNELS_H_

#include "cc/optimizer/optimizer.h"
#include "cc/optimizer/rules.h"

namespace tfswitch {

using StepKernel = OptimizerParams::Kernel;

// Adam's correction sqrt(1 - beta_2^t) / (1 - beta_1^t), computed in double and
// then rounded.
float AdamCorrection(const OptimizerParams& params, float steps);

using MissedKernel = decltype(SegmentStep::miss);

namespace scalar {
StepKernel FindStepKernel(StepKind kind, int dim);
// The one that applies a MissedInput.
MissedKernel FindMissedKernel(const SegmentStep& segment);
}  // namespace scalar
namespace avx2 {
StepKernel FindStepKernel(StepKind kind, int dim);
MissedKernel FindMissedKernel(const SegmentStep& segment);
}  // namespace avx2

}  // namespace tfswitch

#endif  // TFSWITCH_CC_OPTIMIZER_STEP_KERNELS_H_
