#include "cc/optimizer/missed_steps.h"

#include <algorithm>

#include "cc/optimizer/optimizer.h"

namespace tfswitch {
namespace {

// After so many steps, checks whether they still change the row. A check costs
// as much as a step.
constexpr uint32_t kStepsPerLook = 16;

const float kZeroGradient[kMaxSegmentDim] = {};

// Takes `count` steps with a gradient of zero, all at the same learning rate.
void TakeSteps(const SegmentStep& segment, float learning_rate, uint32_t count,
               float* w, float* slots) {
  const OptimizerParams& p = segment.params;
  const auto dim = static_cast<size_t>(p.dim);
  StepInput input;
  input.learning_rate = learning_rate * segment.learning_rate_scale;
  // With L2 a row stops changing when the change of a step is lost in rounding:
  // once a step has changed no bit, later steps change none either. This is not
  // true for Adam, whose steps also depend on their number.
  const bool may_rest = p.num_corrections == 0;
  const auto num_slots = static_cast<size_t>(segment.num_slots);
  float before[3 * kMaxSegmentDim];
  while (count > 0) {
    for (uint32_t n = std::min(count, kStepsPerLook) - 1; n > 0; --n, --count) {
      segment.step(p, w, slots, kZeroGradient, input);
    }
    if (may_rest) std::copy_n(slots, num_slots, std::copy_n(w, dim, before));
    segment.step(p, w, slots, kZeroGradient, input);
    --count;
    if (may_rest && memcmp(before, w, dim * sizeof(float)) == 0 &&
        memcmp(before + dim, slots, num_slots * sizeof(float)) == 0) {
      return;
    }
  }
}

// Takes the steps after `step` one by one, until steps no longer change
// weights. Computes the remaining steps, which only change averages, at once.
void CatchUpBySteps(const SegmentStep& segment, const StepHistory& history,
                    uint32_t step, float* w, float* slots) {
  const MissedPlan& plan = segment.missed;
  const uint32_t last =
      step + std::min(history.last_step - step, plan.settled_after);
  for (const StepRun* run = history.RunOf(step + 1); step < last; ++run) {
    const uint32_t end = std::min(last, history.LastOf(run));
    TakeSteps(segment, run->learning_rate, end - step, w, slots);
    step = end;
  }
  if (last == history.last_step) return;
  const uint32_t rest = history.last_step - last;
  MissedInput input;
  input.count = static_cast<float>(rest);
  input.kept = plan.KeptAfter(rest);
  segment.miss(segment, w, slots, input);
}

}  // namespace

void CatchUpRow(const OptimizerParams& params, const StepHistory& history,
                bool writes_slots, float* row, float* slots) {
  float* const slot = slots + params.step_slot;
  const uint32_t step = DenseStepOfSlot(slot);
  if (step >= history.last_step) return;
  for (int s = 0; s < params.num_segments; ++s) {
    const SegmentStep& segment = params.segments[s];
    float* const w = row + segment.begin;
    float* const own_slots = slots + segment.slots_begin;
    if (segment.missed.way == MissedPlan::Way::kNothing) continue;
    if (segment.missed.way == MissedPlan::Way::kSum &&
        history.moments != nullptr) {
      MissedInput input;
      input.writes_slots = writes_slots;
      SumMissedSteps(segment, history.moments[s], history, step, &input);
      segment.miss(segment, w, own_slots, input);
    } else {
      CatchUpBySteps(segment, history, step, w, own_slots);
    }
  }
  SetDenseStepOfSlot(history.last_step, slot);
}

void StepDense(const OptimizerParams& params, float* row, float* slots,
               const float* gradient, const StepInput& input) {
  CatchUpRow(params, *input.history, /*writes_slots=*/true, row, slots);
  if (!input.is_gradient_step) return;
  params.rule(params, row, slots, gradient, input);
  float* const slot = slots + params.step_slot;
  SetDenseStepOfSlot(std::min(DenseStepOfSlot(slot) + 1, kMaxDenseStep), slot);
}

}  // namespace tfswitch
