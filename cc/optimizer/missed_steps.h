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
// Catching up takes the missed steps with a gradient of zero. Most rules have a
// sum for them (missed_sums.h), which costs as much for a million steps as for
// one. Others take the steps one by one, by the kernels that take every other
// step, until the rest is known: where the rule leaves the row as it is, or
// where only averages shrink.
//
// Pushes may run at once. A row that another push has caught up past the step
// of a gradient takes it as its next step: each gradient is one step, and a row
// has taken as many steps as its number says. Its number may be ahead of the
// table's by as many pushes as run at once.

#ifndef TFSWITCH_CC_OPTIMIZER_MISSED_STEPS_H_
#define TFSWITCH_CC_OPTIMIZER_MISSED_STEPS_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace tfswitch {

struct MissedMoment;

// The steps from `first` to the next run had one learning rate.
struct StepRun {
  uint32_t first = 1;
  float learning_rate = 0.0f;
};

// The steps 1 to `last_step` of a table. Does not own the runs.
struct StepHistory {
  const StepRun* runs = nullptr;  // In order; the first is of step 1.
  size_t num_runs = 0;
  uint32_t last_step = 0;
  // One for each segment; null: there are none, and steps are taken one by one.
  const MissedMoment* moments = nullptr;

  // The run of a step. REQUIRES: 0 < step <= last_step.
  const StepRun* RunOf(uint32_t step) const {
    return std::upper_bound(runs, runs + num_runs, step,
                            [](uint32_t wanted, const StepRun& run) {
                              return wanted < run.first;
                            }) -
           1;
  }
  // The last step of a run.
  uint32_t LastOf(const StepRun* run) const {
    return run + 1 == runs + num_runs ? last_step
                                      : std::min(last_step, run[1].first - 1);
  }
};

// Larger numbers would be the bits of Inf and NaN, which slots must not
// contain.
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

// Brings a row of a dense table up to date with `history`. Without
// `writes_slots` the slots are undefined afterwards, for callers that only want
// the weights. Not thread-safe for one row.
void CatchUpRow(const OptimizerParams& params, const StepHistory& history,
                bool writes_slots, float* row, float* slots);

// CatchUpRow() with input.history, and, if input.is_gradient_step, a step with
// the gradient. A kernel: see OptimizerParams.
void StepDense(const OptimizerParams& params, float* row, float* slots,
               const float* gradient, const StepInput& input);

}  // namespace tfswitch

#endif  // TFSWITCH_CC_OPTIMIZER_MISSED_STEPS_H_
