#include "cc/optimizer/missed_sums.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "cc/optimizer/optimizer.h"

namespace tfswitch {
namespace {

// A longer window would cost more than 10 us a step.
constexpr uint32_t kMaxWindow = 4096;

// The part of the largest sum that is left out behind the window.
constexpr double kLeftOut = 1e-9;

// The largest error of the polynomials over a sum.
constexpr double kMaxTermError = 1e-7;

constexpr uint32_t kNever = std::numeric_limits<uint32_t>::max();

// How many of the terms 1, ratio, ratio^2, ... weigh; kNever if too many.
uint32_t WindowOf(double ratio) {
  uint32_t window = 0;
  for (double term = 1.0; term > kLeftOut * (1.0 - ratio); term *= ratio) {
    if (++window > kMaxWindow) return kNever;
  }
  return ratio < 1.0 ? window : kNever;
}

// The cosines of the Chebyshev points of 4 and of 8 terms. Those of libm may
// differ in the last bit from processor to processor.
constexpr double kPoints4[] = {0.92387953251128674, 0.38268343236508977};
constexpr double kPoints8[] = {0.98078528040323045, 0.83146961230254524,
                               0.55557023301960222, 0.19509032201612827};

// Turns values at Chebyshev points into coefficients of 1, z, z^2, ...
class Interpolation {
 public:
  explicit Interpolation(int num_terms) : n_(num_terms) {
    const double* const half = n_ == 4 ? kPoints4 : kPoints8;
    for (int i = 0; i < n_; ++i) {
      points_[i] = i < n_ / 2 ? half[i] : -half[n_ - 1 - i];
    }
    // T_k = 2 z T_(k-1) - T_(k-2), as coefficients and at the points.
    double before[kMaxMissedTerms] = {};
    double now[kMaxMissedTerms] = {1.0};
    for (int k = 0; k < n_; ++k) {
      for (int i = 0; i < n_; ++i) {
        double value = 0.0;
        for (int r = k; r >= 0; --r) value = value * points_[i] + now[r];
        for (int r = 0; r <= k; ++r) {
          matrix_[r][i] += now[r] * value * (k == 0 ? 1.0 : 2.0) / n_;
        }
      }
      double next[kMaxMissedTerms] = {};
      for (int r = 0; r + 1 < n_; ++r) {
        next[r + 1] = (k == 0 ? 1.0 : 2.0) * now[r];
      }
      for (int r = 0; r < n_ && k > 0; ++r) next[r] -= before[r];
      std::copy(now, now + n_, before);
      std::copy(next, next + n_, now);
    }
  }

  template <typename Function>
  void Coefficients(const Function& function, double* to) const {
    std::fill_n(to, n_, 0.0);
    for (int i = 0; i < n_; ++i) {
      const double value = function((points_[i] + 1.0) / 2.0);
      for (int r = 0; r < n_; ++r) to[r] += matrix_[r][i] * value;
    }
  }

 private:
  const int n_;
  double points_[kMaxMissedTerms];
  double matrix_[kMaxMissedTerms][kMaxMissedTerms] = {};
};

double Polynomial(const double* coefficients, int n, double z) {
  double value = 0.0;
  for (int r = n - 1; r >= 0; --r) value = value * z + coefficients[r];
  return value;
}

// Fills in the weights of Adam with so many terms. False if they would not be
// exact enough for some p.
bool PlanAdam(double keep_1, double root_2, int num_terms, MissedPlan* plan) {
  constexpr int kTests = 48;
  const Interpolation interpolation(num_terms);
  plan->num_terms = num_terms;
  plan->weights.assign(size_t{plan->window} * num_terms, 0.0);
  double sums[kTests + 1] = {};
  double errors[kTests + 1] = {};
  double power_1 = 1.0;
  double power_2 = 1.0;
  for (uint32_t j = 1; j <= plan->window; ++j) {
    power_1 *= keep_1;
    power_2 *= root_2;
    const auto weight = [&](double p) {
      return power_1 / (power_2 * (1.0 - p) + p);
    };
    double* const to =
        plan->weights.data() + size_t{plan->window - j} * num_terms;
    interpolation.Coefficients(weight, to);
    for (int test = 0; test <= kTests; ++test) {
      // Closer to each other near 0, where w_j bends most.
      const double x = static_cast<double>(test) / kTests;
      const double p = x * x * x;
      sums[test] += weight(p);
      errors[test] +=
          std::fabs(Polynomial(to, num_terms, 2.0 * p - 1.0) - weight(p));
    }
  }
  for (int test = 0; test <= kTests; ++test) {
    if (errors[test] > kMaxTermError * sums[test]) return false;
  }
  return true;
}

// c_j of step number `step` of the table.
double RateOf(const SegmentStep& segment, float learning_rate, uint32_t step) {
  if (!segment.missed.has_corrections) return 1.0;
  return static_cast<double>(learning_rate * segment.learning_rate_scale) *
         (std::sqrt(1.0 - segment.missed.beta_2(step)) /
          (1.0 - segment.missed.beta_1(step)));
}

double DecayOf(const SegmentStep& segment, float learning_rate) {
  return 1.0 -
         segment.missed.weight_decay *
             static_cast<double>(learning_rate * segment.learning_rate_scale);
}

// The product of the decays of the steps after `from`, up to `to`.
double DecayByRuns(const SegmentStep& segment, const StepHistory& history,
                   uint32_t from, uint32_t to) {
  double product = 1.0;
  for (const StepRun* run = history.RunOf(from + 1); from < to; ++run) {
    const uint32_t last = std::min(to, history.LastOf(run));
    double factor = DecayOf(segment, run->learning_rate);
    for (uint32_t n = last - from; n > 0; n /= 2) {
      if (n % 2 == 1) product *= factor;
      factor *= factor;
    }
    from = last;
  }
  return product;
}

// Null if there are no final sums of this step.
const MissedBlock* BlockOf(const MissedMoment& moment, uint32_t step) {
  const MissedBlocks* const blocks = moment.blocks.get();
  if (blocks == nullptr || step < blocks->first_step) return nullptr;
  return blocks
      ->blocks[step / MissedBlock::kSteps -
               blocks->first_step / MissedBlock::kSteps]
      .get();
}

// The product of the decays of all steps after `step`.
double DecaySince(const SegmentStep& segment, const MissedMoment& moment,
                  const StepHistory& history, uint32_t step) {
  if (const MissedBlock* const block = BlockOf(moment, step)) {
    return moment.decay.Over(block->decays[step % MissedBlock::kSteps]);
  }
  // By the product up to the first step of a later block, if there is one.
  if (const MissedBlocks* const blocks = moment.blocks.get()) {
    const uint32_t first = blocks->first_step / MissedBlock::kSteps;
    const uint32_t next = std::max(step / MissedBlock::kSteps, first) + 1;
    if (next - first < blocks->decays.size()) {
      return DecayByRuns(segment, history, step, next * MissedBlock::kSteps) *
             moment.decay.Over(blocks->decays[next - first]);
    }
  }
  return DecayByRuns(segment, history, step, history.last_step);
}

// The sums of a step that has no block, as MissedSums::Add() makes them.
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

}  // namespace

Powers::Powers(double base) : low_(kSize), high_(kSize) {
  const auto fill = [](double factor, std::vector<double>* powers) {
    double power = 1.0;
    for (double& each : *powers) {
      each = power;
      power *= factor;
    }
    return power;
  };
  all_ = fill(fill(base, &low_), &high_);
}

void Product::Multiply(double factor) {
  value *= factor;
  if (value >= 0x1p-512) return;
  value *= 0x1p512;
  ++shifts;
}

double Product::Over(const Product& earlier) const {
  double quotient = value / earlier.value;
  for (uint32_t n = shifts - earlier.shifts; n > 0 && quotient > 0.0; --n) {
    quotient *= 0x1p-512;
  }
  return quotient;
}

void PlanMissedSteps(bool is_nesterov, SegmentStep* segment) {
  MissedPlan& plan = segment->missed;
  const OptimizerParams& p = segment->params;
  const StepOptions& options = p.options;
  const Averages averages = segment->averages;
  // One of the two is 0.
  plan.weight_decay =
      static_cast<double>(std::max(options.weight_decay, p.weight_decay));
  const bool is_bounded = HasNormBounds(options) ||
                          std::isfinite(options.min_weight) ||
                          std::isfinite(options.max_weight);
  double keep_1 = 0.0;
  double keep_2 = 0.0;
  double ratio = 0.0;  // By which moves shrink at least.
  switch (averages) {
    case Averages::kNone:
      if (plan.weight_decay == 0.0 && options.l2 == 0.0f && !is_bounded) return;
      break;
    case Averages::kShrinking:
      keep_1 = static_cast<double>(p.rho);
      break;
    case Averages::kVelocity:
      keep_1 = static_cast<double>(p.momentum);
      ratio = keep_1;
      break;
    case Averages::kMoments:
    case Averages::kMomentsAndLargest:
      keep_1 = 1.0 - static_cast<double>(p.one_minus_beta_1);
      keep_2 = 1.0 - static_cast<double>(p.one_minus_beta_2);
      ratio =
          averages == Averages::kMoments ? keep_1 / std::sqrt(keep_2) : keep_1;
      plan.has_corrections = true;
      plan.beta_1 = Powers(static_cast<double>(p.beta_1));
      plan.beta_2 = Powers(static_cast<double>(p.beta_2));
      break;
  }
  plan.keep_1 = Powers(keep_1);
  plan.keep_2 = Powers(keep_2);
  plan.window = WindowOf(ratio);
  // With L2 gradients are not zero, and each step may round a norm otherwise.
  if (options.l2 == 0.0f && !HasNormBounds(options) &&
      plan.weight_decay == 0.0) {
    plan.settled_after = plan.window;
  }
  if (averages == Averages::kVelocity && plan.weight_decay == 0.0 &&
      ratio < 1.0) {
    plan.all_moves = (is_nesterov ? ratio : 1.0) * ratio / (1.0 - ratio);
  }
  constexpr uint32_t kNumKept = 1024;
  std::vector<MissedPlan::Kept> kept;
  for (uint32_t n = 0; n < kNumKept; ++n) kept.push_back(plan.KeptAfter(n));
  plan.kept = std::move(kept);
  plan.way = MissedPlan::Way::kSteps;
  if (options.l2 != 0.0f || is_bounded || ratio >= 1.0) return;
  if (averages == Averages::kNone || averages == Averages::kShrinking ||
      plan.all_moves != 0.0) {
    plan.way = MissedPlan::Way::kSum;
    return;
  }
  if (plan.window == kNever) return;
  if (averages == Averages::kMoments) {
    if (!PlanAdam(keep_1, std::sqrt(keep_2), 4, &plan) &&
        !PlanAdam(keep_1, std::sqrt(keep_2), 8, &plan)) {
      plan.num_terms = 0;
      return;
    }
  } else {
    plan.num_terms = 1;
    plan.weights.resize(plan.window);
    double power = is_nesterov ? keep_1 : 1.0;
    for (uint32_t j = 1; j <= plan.window; ++j) {
      power *= keep_1;
      plan.weights[plan.window - j] = power;
    }
  }
  plan.way = MissedPlan::Way::kSum;
}

void SumMissedSteps(const SegmentStep& segment, const MissedMoment& moment,
                    const StepHistory& history, uint32_t step,
                    MissedInput* input) {
  const MissedPlan& plan = segment.missed;
  const uint32_t count = history.last_step - step;
  input->count = static_cast<float>(count);
  const MissedPlan::Kept kept = plan.KeptAfter(count);
  input->keep_1 = kept.keep_1;
  input->keep_2 = kept.keep_2;
  input->terms = input->own_terms;
  input->own_terms[0] = kept.moves;
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
  const MissedBlock* const block = BlockOf(moment, step);
  if (block != nullptr) {
    input->terms = block->terms.data() + step % MissedBlock::kSteps * num_terms;
  } else {
    SumByRuns(segment, history, step, input->own_terms);
  }
  // Steps behind the window only let the row decay.
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
    has_sums_ |= plan.way == MissedPlan::Way::kSum;
    segment.now = MissedMoment();
    segment.blocks = nullptr;
    segment.begin = 0;
    segment.sums.clear();
  }
}

void MissedSums::Add(float learning_rate) {
  ++step_;
  for (Segment& segment : segments_) {
    const MissedPlan& plan = segment.step->missed;
    if (plan.way != MissedPlan::Way::kSum) continue;
    // Products of other factors could become 0. Then all steps are taken.
    has_sums_ &= DecayOf(*segment.step, learning_rate) >= 0.5;
    if (plan.num_terms > 0 || plan.weight_decay != 0.0) {
      Add(learning_rate, &segment);
    }
  }
}

void MissedSums::Add(float learning_rate, Segment* segment) const {
  const MissedPlan& plan = segment->step->missed;
  const size_t num_terms = static_cast<size_t>(plan.num_terms);
  const bool has_decay = plan.weight_decay != 0.0;
  MissedMoment& now = segment->now;
  constexpr uint32_t kSteps = MissedBlock::kSteps;
  const auto add_block = [&](uint32_t first_step) {
    auto blocks = segment->blocks != nullptr
                      ? std::make_shared<MissedBlocks>(*segment->blocks)
                      : std::make_shared<MissedBlocks>();
    if (blocks->blocks.empty()) blocks->first_step = first_step;
    auto block = std::make_shared<MissedBlock>();
    block->terms.resize(kSteps * num_terms);
    if (has_decay) block->decays.resize(kSteps);
    blocks->blocks.push_back(std::move(block));
    blocks->decays.push_back(now.decay);
    const size_t size = blocks->blocks.size();
    if (size > MissedBlocks::kMaxKept) {
      blocks->blocks[size - 1 - MissedBlocks::kMaxKept] = nullptr;
    }
    segment->blocks = std::move(blocks);
    now.blocks = segment->blocks;
  };
  const auto block_of = [&](uint32_t step) -> MissedBlock& {
    return *segment->blocks
                ->blocks[step / kSteps - segment->blocks->first_step / kSteps];
  };
  if (segment->blocks == nullptr) {
    add_block(step_ - 1);
    if (has_decay) block_of(step_ - 1).decays[(step_ - 1) % kSteps] = now.decay;
  }
  const double decay = has_decay ? DecayOf(*segment->step, learning_rate) : 1.0;
  now.decay.Multiply(decay);
  if (step_ % kSteps == 0) add_block(step_);
  if (has_decay) block_of(step_).decays[step_ % kSteps] = now.decay;
  if (num_terms == 0) return;

  const size_t full = plan.weights.size();
  std::vector<double>& sums = segment->sums;
  if (segment->begin == full) {
    sums.erase(sums.begin(), sums.begin() + full);
    segment->begin = 0;
  }
  sums.resize(sums.size() + num_terms);
  const size_t size = sums.size() - segment->begin;
  now.recent.resize(size);
  double* const sum = sums.data() + segment->begin;
  const double* const weight = plan.weights.data() + (full - size);
  const double rate = RateOf(*segment->step, learning_rate, step_);
  float* const recent = now.recent.data();
  for (size_t i = 0; i < size; ++i) {
    sum[i] = sum[i] * decay + rate * weight[i];
    recent[i] = static_cast<float>(sum[i]);
  }
  if (size < full) return;
  const uint32_t first = step_ - plan.window;
  std::copy_n(recent, num_terms,
              block_of(first).terms.data() + first % kSteps * num_terms);
  segment->begin += num_terms;
}

std::vector<MissedMoment> MissedSums::Now() const {
  std::vector<MissedMoment> now;
  if (!has_sums_) return now;
  for (const Segment& segment : segments_) now.push_back(segment.now);
  return now;
}

}  // namespace tfswitch
