// Lets a row of a dense variable catch up later with the steps that it has
// missed.
//
// A step of a dense variable changes every row: momentum continues to move the
// row, averages shrink, and L2 and weight decay pull it towards 0. If a table's
// config says `is_dense`, the table counts its steps, records their learning
// rates, and steps only the rows of the batch. The last slot of each row is, as
// a bit pattern, the number of the last step that the row contains:
//
//   row = | embedding | slots of the rules | step: uint32 |
//
// Catching up has the effect of the missed steps with a gradient of zero. For
// most rules a sum gives this effect (missed_sums.h), which costs as much for a
// million steps as for one. For other rules the steps are taken one by one with
// the ordinary kernels, until the rule no longer changes the row or only
// shrinks averages. The rest is computed at once.
//
// Several pushes may run at the same time. Another push may already have made a
// row catch up beyond the step of a gradient. The gradient then becomes the
// row's next step. So each gradient is one step, and a row has taken as many
// steps as its number says. This number may exceed the table's by the number of
// concurrent pushes.

#ifndef TFSWITCH_CC_OPTIMIZER_MISSED_STEPS_H_
#define TFSWITCH_CC_OPTIMIZER_MISSED_STEPS_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace tfswitch {

struct MissedMoment;

// A run of steps with the same learning rate, from step `first` to the next
// run.
struct StepRun {
  uint32_t first = 1;
  float learning_rate = 0.0f;
};

// The learning rates of the steps 1 to `last_step` of a table. Does not own the
// runs.
struct StepHistory {
  // The runs in order. The first one begins with step 1.
  const StepRun* runs = nullptr;
  size_t num_runs = 0;
  uint32_t last_step = 0;
  // The sums for catching up, one object per segment. If this is null, there
  // are no sums, and steps are taken one by one.
  const MissedMoment* moments = nullptr;

  // The run that contains a step. REQUIRES: 0 < step <= last_step.
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

// The largest step number. The bits of a larger one, read as a float, would be
// Inf or NaN, which slots must not contain.
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

// Makes a row of a dense table catch up with all steps of `history`. With
// `writes_slots` false the slots have no meaning afterwards; this saves time if
// only the weights are needed. Two threads must not do this for the same row at
// the same time.
void CatchUpRow(const OptimizerParams& params, const StepHistory& history,
                bool writes_slots, float* row, float* slots);

// A kernel (see OptimizerParams). First makes the row catch up with
// input.history. Then takes a step with the gradient, if
// input.is_gradient_step.
void StepDense(const OptimizerParams& params, float* row, float* slots,
               const float* gradient, const StepInput& input);

}  // namespace tfswitch

#endif  // TFSWITCH_CC_OPTIMIZER_MISSED_STEPS_H_
