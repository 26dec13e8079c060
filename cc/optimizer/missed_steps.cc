// StepDense() goes through the missed steps in runs of one learning rate,
// segment by segment. CatchUpSegment() takes real steps with a gradient of zero
// and asks every kStepsPerLook steps whether the rest is known. IsSettled() may
// say no where it is yes, which costs only time; it never says yes where a
// weight would still move. Then ShrinkAverages() changes the averages alone.
//
// Within a run a step that changes no bit changes none later, unless the rule
// counts its steps, as Adam does. The step number of the row is set when all
// segments have been stepped.

#include "cc/optimizer/missed_steps.h"

#include <algorithm>
#include <cmath>

#include "cc/optimizer/optimizer.h"

namespace tfswitch {
namespace {

// Steps between two looks at whether the rest is known. A look costs as much as
// a step.
constexpr uint32_t kStepsPerLook = 16;

// So many steps of an average are rounded each, as the kernels do. The product
// of more differs by some parts in 100,000; with a beta of 0.999 nothing is
// left by then.
constexpr uint32_t kRoundedSteps = 1 << 16;

const float kZeroGradient[kMaxSegmentDim] = {};

// Whether adding x, or less of the same sign, leaves w. Half the distance
// between w and its neighbour is at least |w| 2^-25; the other half is for the
// rounding of x. No w but 0 plus 0 is true where |w| 2^-26 underflows.
bool IsLost(float x, float w) {
  return std::fabs(x) <= std::fabs(w) * 0x1p-26f;
}

// Whether no later step with a learning rate of `rate` and a gradient of zero
// moves the weights of a segment, so that only its averages change.
bool IsSettled(const SegmentStep& segment, float rate, const float* w,
               const float* slots) {
  const OptimizerParams& p = segment.params;
  const int dim = p.dim;
  const StepOptions& options = p.options;
  // Then the gradient is not zero.
  if (options.l2 != 0.0f) return false;
  // Each step may round the norm otherwise.
  if (HasNormBounds(options)) return false;
  // One of the two is 0.
  const float decay = std::max(options.weight_decay, p.weight_decay);
  for (int i = 0; i < dim; ++i) {
    // As the kernels write it: a step that leaves w leaves it each time.
    if (decay != 0.0f && w[i] - w[i] * decay * rate != w[i]) return false;
    if (w[i] < options.min_weight || w[i] > options.max_weight) return false;
  }
  switch (segment.averages) {
    case Averages::kNone:
      return true;
    case Averages::kVelocity:
      // The velocity shrinks with each step, and the next one is the largest.
      if (!(p.momentum < 1.0f)) return false;
      for (int i = 0; i < dim; ++i) {
        if (!IsLost(slots[i], w[i])) return false;
      }
      return true;
    case Averages::kMoments:
    case Averages::kMomentsAndLargest: {
      const bool is_largest = segment.averages == Averages::kMomentsAndLargest;
      const double keep_1 = 1.0 - static_cast<double>(p.one_minus_beta_1);
      const double keep_2 = 1.0 - static_cast<double>(p.one_minus_beta_2);
      // m shrinks by keep_1 and sqrt(v) by sqrt(keep_2), so that their quotient
      // shrinks, too. (The largest v stays as it is.)
      if (!is_largest && keep_1 * keep_1 > keep_2) return false;
      // The correction of step t is at most 1 / (1 - beta_1^t), which falls.
      const float* const m = slots;
      const float* const v = slots + (is_largest ? 2 : 1) * dim;
      const float t = slots[(is_largest ? 3 : 2) * dim] + 1.0f;
      const double bound = static_cast<double>(rate) /
                           (1.0 - std::pow(static_cast<double>(p.beta_1),
                                           static_cast<double>(t)));
      const auto largest_rate = static_cast<float>(bound);
      for (int i = 0; i < dim; ++i) {
        if (!IsLost(m[i] * largest_rate / (std::sqrt(v[i]) + p.epsilon),
                    w[i])) {
          return false;
        }
      }
      return true;
    }
  }
  return false;
}

// Takes `count` steps x = step(x) of each of `dim` numbers, which shrink by a
// factor of `keep` but for rounding.
template <typename Step>
void Shrink(const Step& step, double keep, uint32_t count, int dim, float* x) {
  for (uint32_t n = std::min(count, kRoundedSteps); n > 0; --n, --count) {
    bool has_changed = false;
    for (int i = 0; i < dim; ++i) {
      const float next = step(x[i]);
      has_changed = has_changed || next != x[i];
      x[i] = next;
    }
    if (!has_changed) return;
  }
  if (count == 0) return;
  const double factor = std::pow(keep, static_cast<double>(count));
  for (int i = 0; i < dim; ++i) {
    x[i] = static_cast<float>(static_cast<double>(x[i]) * factor);
  }
}

// Applies `count` steps with a gradient of zero to the averages, in the
// arithmetic of the kernels.
void ShrinkAverages(const SegmentStep& segment, uint32_t count, float* slots) {
  const OptimizerParams& p = segment.params;
  const int dim = p.dim;
  if (segment.averages == Averages::kNone) return;
  if (segment.averages == Averages::kVelocity) {
    const float momentum = p.momentum;
    Shrink([momentum](float x) { return x * momentum; },
           static_cast<double>(momentum), count, dim, slots);
    return;
  }
  const auto shrink = [count, dim](float rate, float* x) {
    Shrink([rate](float y) { return y + (0.0f - y) * rate; },
           1.0 - static_cast<double>(rate), count, dim, x);
  };
  shrink(p.one_minus_beta_1, slots);
  shrink(p.one_minus_beta_2, slots + dim);
  // The largest v has been at least v, which has not grown.
  float* const t =
      slots + (segment.averages == Averages::kMomentsAndLargest ? 3 : 2) * dim;
  // Where counting in floats ends by itself.
  *t = std::min(*t + static_cast<float>(count), 0x1p24f);
}

// Takes `count` steps with one learning rate and a gradient of zero.
void CatchUpSegment(const SegmentStep& segment, const StepInput& input,
                    uint32_t count, float* w, float* slots) {
  const OptimizerParams& p = segment.params;
  const auto dim = static_cast<size_t>(p.dim);
  // With L2 a row comes to rest where the pull is lost in rounding: a step that
  // has changed no bit will change none later. Adam's steps differ by their
  // number, so that this says nothing of them.
  const bool may_rest = segment.averages == Averages::kNone ||
                        segment.averages == Averages::kVelocity;
  const auto num_slots = static_cast<size_t>(segment.num_slots);
  float before[2 * kMaxSegmentDim];
  while (count > 0) {
    if (IsSettled(segment, input.learning_rate, w, slots)) {
      ShrinkAverages(segment, count, slots);
      return;
    }
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

}  // namespace

void StepDense(const OptimizerParams& params, float* row, float* slots,
               const float* gradient, const StepInput& input) {
  const StepHistory& history = *input.history;
  float* const slot = slots + params.step_slot;
  uint32_t step = DenseStepOfSlot(slot);
  StepInput missed;
  missed.learning_rate = 0.0f;
  if (step < history.last_step) {
    // The run that has the first missed step.
    const StepRun* run =
        std::upper_bound(history.runs, history.runs + history.num_runs,
                         step + 1,
                         [](uint32_t wanted, const StepRun& each) {
                           return wanted < each.first;
                         }) -
        1;
    const StepRun* const end = history.runs + history.num_runs;
    while (step < history.last_step) {
      const uint32_t last = run + 1 == end
                                ? history.last_step
                                : std::min(history.last_step, run[1].first - 1);
      for (int s = 0; s < params.num_segments; ++s) {
        const SegmentStep& segment = params.segments[s];
        missed.learning_rate = run->learning_rate * segment.learning_rate_scale;
        CatchUpSegment(segment, missed, last - step, row + segment.begin,
                       slots + segment.slots_begin);
      }
      step = last;
      ++run;
    }
    SetDenseStepOfSlot(step, slot);
  }
  if (!input.is_gradient_step) return;
  for (int s = 0; s < params.num_segments; ++s) {
    const SegmentStep& segment = params.segments[s];
    StepInput scaled = input;
    scaled.learning_rate *= segment.learning_rate_scale;
    segment.step(segment.params, row + segment.begin,
                 slots + segment.slots_begin, gradient + segment.begin, scaled);
  }
  SetDenseStepOfSlot(step + 1, slot);
}

}  // namespace tfswitch
