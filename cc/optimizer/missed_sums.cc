#include "cc/optimizer/missed_sums.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "cc/optimizer/optimizer.h"
#include "cc/optimizer/step_kernels.h"

namespace tfswitch {
namespace {

// The most steps in the window of steps that matter. With more, each step of
// the table would cost over 10 us.
constexpr uint32_t kMaxWindow = 4096;

// The window ends where all further steps together add at most this fraction of
// the largest possible sum.
constexpr double kLeftOut = 1e-9;

// The largest relative error that the polynomials may cause in a sum.
constexpr double kMaxTermError = 1e-7;

constexpr uint32_t kNever = std::numeric_limits<uint32_t>::max();

// Returns how many of the terms 1, ratio, ratio^2, ... are large enough to
// matter. Returns kNever if there are too many.
uint32_t WindowOf(double ratio) {
  uint32_t window = 0;
  for (double term = 1.0; term > kLeftOut * (1.0 - ratio); term *= ratio) {
    if (++window > kMaxWindow) return kNever;
  }
  return ratio < 1.0 ? window : kNever;
}

// The positive Chebyshev points for 1, 4 and 8 terms. They are constants,
// because cos() of libm may differ in the last bit from processor to processor.
constexpr double kPoints1[] = {0.0};
constexpr double kPoints4[] = {0.92387953251128674, 0.38268343236508977};
constexpr double kPoints8[] = {0.98078528040323045, 0.83146961230254524,
                               0.55557023301960222, 0.19509032201612827};

// Computes a polynomial from its values at the Chebyshev points.
struct Interpolation {
  explicit Interpolation(int n) {
    const double* const half = n == 8 ? kPoints8 : n == 4 ? kPoints4 : kPoints1;
    for (int i = 0; i < n; ++i) {
      points[i] = i < n / 2 ? half[i] : -half[n - 1 - i];
    }
    for (int i = 0; i < n; ++i) {
      basis[i][0] = 1.0;
      for (int k = 0; k < n; ++k) {
        if (k == i) continue;
        for (int r = n - 1; r >= 0; --r) {
          basis[i][r] =
              ((r > 0 ? basis[i][r - 1] : 0.0) - points[k] * basis[i][r]) /
              (points[i] - points[k]);
        }
      }
    }
  }

  double points[kMaxMissedTerms];
  // For each point, the coefficients of the polynomial that is 1 there and 0 at
  // all other points.
  double basis[kMaxMissedTerms][kMaxMissedTerms] = {};
};

// Computes the plan's weights, which are first b1^j / (q^j (1 - p) + p), as
// polynomials in p with `num_terms` terms. Returns false if the polynomials are
// not exact enough for some p.
bool PlanTerms(double first, double root_2, int num_terms, MissedPlan* plan) {
  constexpr int kTests = 48;
  const Interpolation interpolation(num_terms);
  plan->num_terms = num_terms;
  plan->weights.assign(size_t{plan->window} * num_terms, 0.0);
  double sums[kTests + 1] = {};
  double errors[kTests + 1] = {};
  double power_1 = first;
  double power_2 = 1.0;
  for (uint32_t j = 1; j <= plan->window; ++j) {
    power_1 *= plan->keep_1;
    power_2 *= root_2;
    const auto weight = [&](double p) {
      return power_1 / (power_2 * (1.0 - p) + p);
    };
    double* const to =
        plan->weights.data() + size_t{plan->window - j} * num_terms;
    for (int i = 0; i < num_terms; ++i) {
      const double value = weight((interpolation.points[i] + 1.0) / 2.0);
      for (int r = 0; r < num_terms; ++r) {
        to[r] += interpolation.basis[i][r] * value;
      }
    }
    for (int test = 0; test <= kTests; ++test) {
      // There are more test points near 0, because w_j is most curved there.
      const double x = static_cast<double>(test) / kTests;
      const double p = x * x * x;
      double value = 0.0;
      for (int r = num_terms - 1; r >= 0; --r) {
        value = value * (2.0 * p - 1.0) + to[r];
      }
      sums[test] += weight(p);
      errors[test] += std::fabs(value - weight(p));
    }
  }
  for (int test = 0; test <= kTests; ++test) {
    if (errors[test] > kMaxTermError * sums[test]) return false;
  }
  return true;
}

// The factor c_j of missed_sums.h for step number `step` of the table.
double RateOf(const SegmentStep& segment, float learning_rate, uint32_t step) {
  const OptimizerParams& p = segment.params;
  if (p.num_corrections == 0) return 1.0;
  const float correction = step < static_cast<uint32_t>(p.num_corrections)
                               ? p.corrections[step]
                               : AdamCorrection(p, static_cast<float>(step));
  return static_cast<double>(learning_rate * segment.learning_rate_scale) *
         static_cast<double>(correction);
}

double DecayOf(const SegmentStep& segment, float learning_rate) {
  return 1.0 -
         segment.missed.weight_decay *
             static_cast<double>(learning_rate * segment.learning_rate_scale);
}

// The product of the decay factors of all steps after `step`.
double DecaySince(const SegmentStep& segment, const MissedMoment& moment,
                  const StepHistory& history, uint32_t step) {
  double product = moment.decay;
  if (step >= moment.first_step) {
    const uint32_t i = step - moment.first_step;
    const MissedBlock& block = (*moment.blocks)[i / MissedBlock::kSteps];
    return product * (block.decay / block.decays[i % MissedBlock::kSteps]);
  }
  product *= moment.blocks->front().decay;
  for (const StepRun* run = history.RunOf(step + 1); step < moment.first_step;
       ++run) {
    const uint32_t last = std::min(moment.first_step, history.LastOf(run));
    product *= Power(DecayOf(segment, run->learning_rate), last - step);
    step = last;
  }
  return product;
}

// Computes the sums for a row whose last step is earlier than all kept blocks.
// MissedSums::Add() computes the same numbers for later steps.
void SumByRuns(const SegmentStep& segment, const StepHistory& history,
               uint32_t step, float* terms) {
  const MissedPlan& plan = segment.missed;
  const auto num_terms = static_cast<size_t>(plan.num_terms);
  const uint32_t count = std::min(history.last_step - step, plan.window);
  double sums[kMaxMissedTerms] = {};
  const StepRun* run = history.RunOf(step + 1);
  for (uint32_t j = 1; j <= count; ++j) {
    if (step + j > history.LastOf(run)) ++run;
    const double decay = DecayOf(segment, run->learning_rate);
    const double rate = RateOf(segment, run->learning_rate, step + j);
    const double* const weights =
        plan.weights.data() + (plan.window - j) * num_terms;
    for (size_t k = 0; k < num_terms; ++k) {
      sums[k] = sums[k] * decay + rate * weights[k];
    }
  }
  for (size_t k = 0; k < num_terms; ++k) terms[k] = static_cast<float>(sums[k]);
}

// Begins a block with the moment's step.
void AddBlock(const MissedPlan& plan, MissedMoment* moment) {
  auto blocks = std::make_shared<std::vector<MissedBlock>>();
  if (moment->blocks != nullptr) *blocks = *moment->blocks;
  constexpr uint32_t kSteps = MissedBlock::kSteps;
  if (blocks->size() == MissedSums::kKeptSteps / kSteps) {
    blocks->erase(blocks->begin());
    moment->first_step += kSteps;
  }
  for (MissedBlock& block : *blocks) block.decay *= moment->decay;
  moment->decay = 1.0;
  MissedBlock& block = blocks->emplace_back();
  block.terms.reset(new float[size_t{kSteps} * plan.num_terms]);
  if (plan.weight_decay != 0.0) {
    block.decays.reset(new double[kSteps]);
    block.decays[0] = 1.0;
  }
  moment->blocks = std::move(blocks);
}

}  // namespace

double Power(double base, uint32_t n) {
  constexpr double kLeast = 1e-30;
  double power = 1.0;
  for (; n > 0; n /= 2) {
    if (base < kLeast) return 0.0;
    if (n % 2 == 1) power *= base;
    base *= base;
  }
  return power < kLeast ? 0.0 : power;
}

void PlanMissedSteps(bool is_nesterov, SegmentStep* segment) {
  MissedPlan& plan = segment->missed;
  const OptimizerParams& p = segment->params;
  const StepOptions& options = p.options;
  const Averages averages = segment->averages;
  // One of the two is 0.
  plan.weight_decay =
      static_cast<double>(std::max(options.weight_decay.value, p.weight_decay));
  const bool is_bounded = HasNormBounds(options) ||
                          std::isfinite(options.min_weight.value) ||
                          std::isfinite(options.max_weight.value);
  // Each move is at most this fraction of the move before it.
  double ratio = 0.0;
  double root_2 = 1.0;
  switch (averages) {
    case Averages::kNone:
      if (plan.weight_decay == 0.0 && options.l2 == 0.0f && !is_bounded) return;
      break;
    case Averages::kShrinking:
      plan.keep_1 = static_cast<double>(p.rho);
      break;
    case Averages::kVelocity:
      plan.keep_1 = static_cast<double>(p.momentum);
      ratio = plan.keep_1;
      break;
    case Averages::kMoments:
    case Averages::kMomentsAndLargest:
      plan.keep_1 = 1.0 - static_cast<double>(p.one_minus_beta_1);
      plan.keep_2 = 1.0 - static_cast<double>(p.one_minus_beta_2);
      if (averages == Averages::kMoments) root_2 = std::sqrt(plan.keep_2);
      ratio = plan.keep_1 / root_2;
      break;
  }
  plan.window = WindowOf(ratio);
  // A row never stops changing if there is L2, because its gradients are then
  // not zero. It also never stops with bounds of the norm, because each step
  // may round the norm differently.
  if (options.l2 == 0.0f && !HasNormBounds(options) &&
      plan.weight_decay == 0.0) {
    plan.settled_after = plan.window;
  }
  const double first = is_nesterov ? ratio : 1.0;
  if (averages == Averages::kVelocity && plan.weight_decay == 0.0 &&
      ratio < 1.0) {
    plan.all_moves = first * ratio / (1.0 - ratio);
  }
  constexpr uint32_t kNumKept = 1024;
  std::vector<MissedPlan::Kept> kept;
  for (uint32_t n = 0; n < kNumKept; ++n) kept.push_back(plan.KeptAfter(n));
  plan.kept = std::move(kept);
  plan.way = MissedPlan::Way::kSteps;
  if (options.l2 != 0.0f || is_bounded || ratio >= 1.0) return;
  const bool has_terms = averages != Averages::kNone &&
                         averages != Averages::kShrinking &&
                         plan.all_moves == 0.0;
  const bool is_adam = averages == Averages::kMoments;
  if (!has_terms || (plan.window != kNever &&
                     (PlanTerms(first, root_2, is_adam ? 4 : 1, &plan) ||
                      (is_adam && PlanTerms(first, root_2, 8, &plan))))) {
    plan.way = MissedPlan::Way::kSum;
  }
}

void SumMissedSteps(const SegmentStep& segment, const MissedMoment& moment,
                    const StepHistory& history, uint32_t step,
                    MissedInput* input) {
  const MissedPlan& plan = segment.missed;
  const uint32_t count = history.last_step - step;
  input->count = static_cast<float>(count);
  input->kept = plan.KeptAfter(count);
  input->own_terms[0] = input->kept.moves;
  if (plan.all_moves != 0.0) return;
  const bool has_decay = plan.weight_decay != 0.0;
  if (has_decay) {
    input->decay =
        static_cast<float>(DecaySince(segment, moment, history, step));
  }
  const size_t num_terms = static_cast<size_t>(plan.num_terms);
  if (num_terms == 0) return;
  const size_t num_last = count * num_terms;
  if (num_last <= moment.recent.size()) {
    input->terms = moment.recent.data() + (moment.recent.size() - num_last);
    return;
  }
  if (step >= moment.first_step) {
    const uint32_t i = step - moment.first_step;
    input->terms = (*moment.blocks)[i / MissedBlock::kSteps].terms.get() +
                   i % MissedBlock::kSteps * num_terms;
  } else {
    SumByRuns(segment, history, step, input->own_terms);
  }
  // Steps after the window only multiply the row by the decay factor.
  if (!has_decay || count <= plan.window) return;
  const auto rest = static_cast<float>(
      DecaySince(segment, moment, history, step + plan.window));
  for (size_t k = 0; k < num_terms; ++k) {
    input->own_terms[k] = input->terms[k] * rest;
  }
  input->terms = input->own_terms;
}

MissedSums::MissedSums(const Optimizer* optimizer) {
  for (const SegmentStep& step : optimizer->segments()) {
    segments_.emplace_back().step = &step;
  }
  Reset(0);
}

void MissedSums::Reset(uint32_t step) {
  step_ = step;
  has_sums_ = false;
  for (Segment& segment : segments_) {
    const MissedPlan& plan = segment.step->missed;
    segment.sums.clear();
    segment.now = MissedMoment();
    if (plan.way != MissedPlan::Way::kSum) continue;
    has_sums_ = true;
    segment.now.first_step = step;
    AddBlock(plan, &segment.now);
  }
}

void MissedSums::Add(float learning_rate) {
  ++step_;
  for (Segment& segment : segments_) {
    if (segment.step->missed.way != MissedPlan::Way::kSum) continue;
    // Each factor must be at least 0.5, because the products could otherwise
    // become 0. If a factor is smaller, there are no sums, and rows take all
    // missed steps one by one.
    has_sums_ &= DecayOf(*segment.step, learning_rate) >= 0.5;
    Add(learning_rate, &segment);
  }
}

void MissedSums::Add(float learning_rate, Segment* segment) const {
  constexpr uint32_t kSteps = MissedBlock::kSteps;
  const MissedPlan& plan = segment->step->missed;
  const size_t num_terms = static_cast<size_t>(plan.num_terms);
  MissedMoment& now = segment->now;
  const double decay = DecayOf(*segment->step, learning_rate);
  now.decay *= decay;
  if (step_ - now.first_step == now.blocks->size() * kSteps) {
    AddBlock(plan, &now);
  }
  if (plan.weight_decay != 0.0) {
    now.blocks->back().decays[(step_ - now.first_step) % kSteps] = now.decay;
  }
  if (num_terms == 0) return;

  const size_t full = plan.weights.size();
  std::vector<double>& sums = segment->sums;
  if (sums.size() == full) sums.erase(sums.begin(), sums.begin() + num_terms);
  sums.resize(sums.size() + num_terms);
  const size_t size = sums.size();
  now.recent.resize(size);
  double* const sum = sums.data();
  float* const recent = now.recent.data();
  const double* const weight = plan.weights.data() + (full - size);
  const double rate = RateOf(*segment->step, learning_rate, step_);
  for (size_t i = 0; i < size; ++i) {
    sum[i] = sum[i] * decay + rate * weight[i];
    recent[i] = static_cast<float>(sum[i]);
  }
  if (size < full) return;
  const uint32_t final = step_ - plan.window - now.first_step;
  std::copy_n(
      recent, num_terms,
      (*now.blocks)[final / kSteps].terms.get() + final % kSteps * num_terms);
}

std::vector<MissedMoment> MissedSums::Now() const {
  std::vector<MissedMoment> now;
  if (!has_sums_) return now;
  for (const Segment& segment : segments_) now.push_back(segment.now);
  return now;
}

}  // namespace tfswitch
