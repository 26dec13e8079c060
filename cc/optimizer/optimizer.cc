#include "cc/optimizer/optimizer.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <utility>

#include "cc/optimizer/rules.h"
#include "cc/optimizer/step_kernels.h"

namespace tfswitch {
namespace {

// The largest step number for which Adam's correction is computed in advance
// for dense tables. All their rows take all steps. With Keras's beta_2 the
// correction is 1 from step 17,400 on.
constexpr int kNumDenseCorrections = 32768;

}  // namespace

float OneMinus(float beta) {
  char decimal[32];
  snprintf(decimal, sizeof(decimal), "%.6g", static_cast<double>(beta));
  double exact = strtod(decimal, nullptr);
  if (static_cast<float>(exact) != beta) exact = static_cast<double>(beta);
  return static_cast<float>(1.0 - exact);
}

// Takes powers of the betas as float32, because Keras also casts the betas.
float AdamCorrection(const OptimizerParams& params, float steps) {
  // The correction grows until it is 1, and then stays 1. So if the last one
  // computed in advance is 1, later ones are, too.
  if (params.corrections[params.num_corrections - 1] == 1.0f) return 1.0f;
  const auto n = static_cast<uint32_t>(steps);
  const double power_1 = Power(static_cast<double>(params.beta_1), n);
  const double power_2 = Power(static_cast<double>(params.beta_2), n);
  return static_cast<float>(std::sqrt(1.0 - power_2) / (1.0 - power_1));
}

std::vector<SlotRun> SlotRuns(const OptimizerConfig& config, int dim) {
  const std::vector<int> dims = SegmentDims(config, dim);
  std::vector<SlotRun> runs;
  for (size_t i = 0; i < dims.size(); ++i) {
    const RulePlan plan = PlanOf(config.segments[i].rule);
    runs.push_back({plan.num_vectors * dims[i], true});
    runs.push_back({plan.num_floats, false});
  }
  if (config.is_dense) runs.push_back({1, false});
  return runs;
}

int SlotFloats(const OptimizerConfig& config, int dim) {
  int slot_floats = 0;
  for (const SlotRun& run : SlotRuns(config, dim)) slot_floats += run.count;
  return slot_floats;
}

bool HaveEqualState(const OptimizerConfig& a, const OptimizerConfig& b,
                    int dim) {
  if (a.is_dense != b.is_dense || a.segments.size() != b.segments.size() ||
      SegmentDims(a, dim) != SegmentDims(b, dim)) {
    return false;
  }
  for (size_t i = 0; i < a.segments.size(); ++i) {
    if (std::string(PlanOf(a.segments[i].rule).state) !=
        PlanOf(b.segments[i].rule).state) {
      return false;
    }
  }
  return true;
}

Optimizer::Optimizer(const OptimizerConfig& config, int dim, SimdLevel level)
    : dim_(dim) {
  const auto find = [level](StepKind kind, int size) {
    return level == SimdLevel::kAvx2 ? avx2::FindStepKernel(kind, size)
                                     : scalar::FindStepKernel(kind, size);
  };
  const std::vector<int> dims = SegmentDims(config, dim);
  int begin = 0;
  segments_.reserve(dims.size());  // Params point into them.
  for (size_t i = 0; i < dims.size(); ++i) {
    const SegmentConfig& from = config.segments[i];
    const RulePlan plan = PlanOf(from.rule);
    SegmentStep& segment = segments_.emplace_back();
    segment.begin = begin;
    segment.slots_begin = slot_floats_;
    segment.learning_rate_scale = from.learning_rate_scale;
    segment.num_initial = plan.num_vectors > 0 ? dims[i] : plan.num_floats;
    segment.initial_slot = plan.initial_slot;
    begin += dims[i];
    segment.num_slots = plan.num_vectors * dims[i] + plan.num_floats;
    segment.averages = plan.averages;
    slot_floats_ += segment.num_slots;

    OptimizerParams& params = segment.params;
    static_cast<RuleParams&>(params) = plan.params;
    params.dim = dims[i];
    if (params.num_corrections > 0) {
      if (config.is_dense) params.num_corrections = kNumDenseCorrections;
      segment.corrections.resize(params.num_corrections);
      params.corrections = segment.corrections.data();
      for (int t = 1; t < params.num_corrections; ++t) {
        segment.corrections[t] = AdamCorrection(params, static_cast<float>(t));
      }
    }
    params.options = from.options;
    params.cowclip_floor =
        std::sqrt(static_cast<float>(dims[i])) * from.options.cowclip_zeta;
    params.rule = find(plan.kind, dims[i]);
    StepOptions off;
    off.cowclip_zeta = from.options.cowclip_zeta;  // No effect without r.
    segment.step = from.options == off ? params.rule
                                       : find(StepKind::kWithOptions, dims[i]);

    reads_counts_ |= from.options.cowclip_r != 0.0f;
    reads_shows_ |= params.show_scale;
    reads_steps_ |= plan.kind == StepKind::kAdagradDecay;
    if (!config.is_dense) continue;
    PlanMissedSteps(plan.kind == StepKind::kNesterov, &segment);
    segment.miss = level == SimdLevel::kAvx2
                       ? avx2::FindMissedKernel(segment)
                       : scalar::FindMissedKernel(segment);
    moves_idle_rows_ |= segment.missed.way != MissedPlan::Way::kNothing;
    takes_missed_steps_ |= segment.missed.way == MissedPlan::Way::kSteps;
  }
  const int step_slot = slot_floats_;
  if (config.is_dense) ++slot_floats_;
  if (!moves_idle_rows_ && segments_.size() == 1 &&
      segments_[0].learning_rate_scale == 1.0f) {
    params_ = segments_[0].params;
    step_ = segments_[0].step;
    return;
  }
  params_.segments = segments_.data();
  params_.num_segments = static_cast<int>(segments_.size());
  params_.rule = find(StepKind::kSegments, dim);
  step_ = moves_idle_rows_ ? StepDense : params_.rule;
  params_.step_slot = step_slot;
}

void Optimizer::InitSlots(float* slots, uint32_t step) const {
  std::fill_n(slots, slot_floats_, 0.0f);
  for (const SegmentStep& segment : segments_) {
    std::fill_n(slots + segment.slots_begin, segment.num_initial,
                segment.initial_slot);
    // Adam counts the steps of the table.
    if (segment.params.num_corrections > 0) {
      slots[segment.slots_begin + segment.num_slots - 1] =
          std::min(static_cast<float>(step), 0x1p24f);
    }
  }
  if (moves_idle_rows_) SetDenseStepOfSlot(step, slots + params_.step_slot);
}

}  // namespace tfswitch
