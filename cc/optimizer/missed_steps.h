// Steps of a dense variable that a row has missed, made up for later.
//
// The step of a dense variable changes every row: momentum goes on moving it,
// averages shrink, L2 and weight decay pull at it. A table whose config says
// `is_dense` counts its steps, notes their learning rates, and steps only the
// rows of the batch. Each row has the number of the step that it is up to date
// with, as the bits of its last slot:
//
//   row = | embedding | slots of the rules | step: uint32 |
//
// Catching up takes the missed steps with a gradient of zero, by the kernels
// that take every other step, so that the floats are those of a variable that
// was stepped each time. It stops stepping where the rest is known: where the
// rule leaves the row as it is, or where all later updates together round to
// nothing and only averages shrink (CatchUpSegment in missed_steps.cc).

#ifndef TFSWITCH_CC_OPTIMIZER_MISSED_STEPS_H_
#define TFSWITCH_CC_OPTIMIZER_MISSED_STEPS_H_

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace tfswitch {

// Steps from `first` on, up to those of the next run, had one learning rate.
struct StepRun {
  uint32_t first = 1;
  float learning_rate = 0.0f;
};

// The steps 1 to `last_step` of a table. Does not own the runs.
struct StepHistory {
  const StepRun* runs = nullptr;  // In order; the first is of step 1.
  size_t num_runs = 0;
  uint32_t last_step = 0;
};

// Larger numbers would be the bits of Inf and NaN, which no slot may have.
inline constexpr uint32_t kMaxDenseStep = 0x7f7fffff;

inline uint32_t DenseStepOfSlot(const float* slot) {
  uint32_t step;
  memcpy(&step, slot, sizeof(step));
  return step;
}
inline void SetDenseStepOfSlot(uint32_t step, float* slot) {
  memcpy(slot, &step, sizeof(step));
}

struct OptimizerParams;
struct StepInput;

// Brings a row of a dense table up to date with input.history, and if
// input.is_gradient_step takes the step after it, with the gradient. A kernel:
// see OptimizerParams. Not thread-safe for one row.
void StepDense(const OptimizerParams& params, float* row, float* slots,
               const float* gradient, const StepInput& input);

}  // namespace tfswitch

#endif  // TFSWITCH_CC_OPTIMIZER_MISSED_STEPS_H_
