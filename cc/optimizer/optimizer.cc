#include "cc/optimizer/optimizer.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <utility>

#include "cc/optimizer/step_kernels.h"

namespace tfswitch {
namespace {

// Rows see few steps; a longer history costs two pow() a step.
constexpr int kNumCorrections = 4096;
// Rows of dense tables see all steps. With Keras's beta_2 it is 1 from 17,400
// on.
constexpr int kNumDenseCorrections = 32768;

// 1 - beta, as Keras has it: there beta is a Python float, 0.999 and not the
// float32 next to it, which would make 1 - beta wrong in the fifth digit.
float OneMinus(float beta) {
  char decimal[32];
  snprintf(decimal, sizeof(decimal), "%.6g", static_cast<double>(beta));
  double exact = strtod(decimal, nullptr);
  if (static_cast<float>(exact) != beta) exact = static_cast<double>(beta);
  return static_cast<float>(1.0 - exact);
}

// What a rule comes to.
struct Plan {
  StepKind kind = StepKind::kSgd;
  // The slots: so many vectors of the segment's size, then so many floats.
  // Rules with the same text have slots of the same meaning.
  const char* state = "";
  int num_vectors = 0;
  int num_floats = 0;
  // What the first vector starts with, or the first float if there is none.
  float initial_slot = 0.0f;
  OptimizerParams params{};
};

Plan PlanOfAdam(StepKind kind, const AdamConfig& config) {
  Plan plan{kind, "adam", 2, 1};
  plan.params.beta_1 = config.beta_1;
  plan.params.beta_2 = config.beta_2;
  plan.params.epsilon = config.epsilon;
  plan.params.one_minus_beta_1 = OneMinus(config.beta_1);
  plan.params.one_minus_beta_2 = OneMinus(config.beta_2);
  plan.params.num_corrections = kNumCorrections;
  return plan;
}

template <typename Config>
Plan PlanOfFtrl(StepKind root, StepKind power, const Config& config) {
  Plan plan{config.learning_rate_power == -0.5f ? root : power, "ftrl", 2};
  plan.initial_slot = config.initial_accumulator_value;
  plan.params.power = -config.learning_rate_power;
  plan.params.l1 = config.l1_regularization_strength;
  plan.params.l2 = config.l2_regularization_strength;
  plan.params.l2_shrinkage = config.l2_shrinkage_regularization_strength;
  plan.params.beta = config.beta;
  return plan;
}

Plan PlanOf(const SgdConfig& config) {
  if (config.momentum == 0.0f) return {};
  Plan plan{config.nesterov ? StepKind::kNesterov : StepKind::kMomentum,
            "momentum", 1};
  plan.params.momentum = config.momentum;
  return plan;
}

Plan PlanOf(const AdagradConfig& config) {
  Plan plan{StepKind::kAdagrad, "adagrad", 1};
  plan.initial_slot = config.initial_accumulator_value;
  plan.params.epsilon = config.epsilon;
  return plan;
}

Plan PlanOf(const RowwiseAdagradConfig& config) {
  Plan plan{StepKind::kRowwiseAdagrad, "rowwise_adagrad", 0, 1};
  plan.initial_slot = config.initial_accumulator_value;
  plan.params.epsilon = config.epsilon;
  return plan;
}

Plan PlanOf(const AdagradDecayConfig& config) {
  Plan plan{StepKind::kAdagradDecay, "adagrad_decay", 1, 1};
  plan.initial_slot = config.initial_accumulator_value;
  plan.params.initial_value = config.initial_accumulator_value;
  plan.params.decay_step = config.decay_step;
  plan.params.decay_rate = config.decay_rate;
  plan.params.compat = config.compat;
  return plan;
}

Plan PlanOf(const AdamConfig& config) {
  return PlanOfAdam(StepKind::kAdam, config);
}

Plan PlanOf(const AdamWConfig& config) {
  Plan plan = PlanOfAdam(StepKind::kAdamW,
                         {config.beta_1, config.beta_2, config.epsilon});
  plan.params.weight_decay = config.weight_decay;
  return plan;
}

Plan PlanOf(const AmsGradConfig& config) {
  Plan plan = PlanOfAdam(StepKind::kAmsGrad,
                         {config.beta_1, config.beta_2, config.epsilon});
  plan.state = "amsgrad";
  plan.num_vectors = 3;
  return plan;
}

Plan PlanOf(const RmspropConfig& config) {
  Plan plan;
  if (config.momentum == 0.0f) {
    plan = config.centered
               ? Plan{StepKind::kRmspropCentered, "rmsprop_centered", 2}
               : Plan{StepKind::kRmsprop, "rmsprop", 1};
  } else {
    plan = config.centered
               ? Plan{StepKind::kRmspropCenteredMomentum,
                      "rmsprop_centered_momentum", 3}
               : Plan{StepKind::kRmspropMomentum, "rmsprop_momentum", 2};
  }
  plan.params.rho = config.rho;
  plan.params.one_minus_rho = OneMinus(config.rho);
  plan.params.momentum = config.momentum;
  plan.params.epsilon = config.epsilon;
  return plan;
}

Plan PlanOf(const AdadeltaConfig& config) {
  Plan plan{StepKind::kAdadelta, "adadelta", 2};
  plan.params.rho = config.rho;
  plan.params.one_minus_rho = OneMinus(config.rho);
  plan.params.epsilon = config.epsilon;
  return plan;
}

Plan PlanOf(const FtrlConfig& config) {
  return PlanOfFtrl(StepKind::kFtrl, StepKind::kFtrlPower, config);
}

Plan PlanOf(const GroupFtrlConfig& config) {
  return PlanOfFtrl(StepKind::kGroupFtrl, StepKind::kGroupFtrlPower, config);
}

Plan PlanOf(const PaddleAdagradConfig& config) {
  Plan plan{StepKind::kPaddleAdagrad, "paddle_adagrad", 0, 1};
  plan.params.initial_value = config.initial_g2sum;
  plan.params.show_scale = config.show_scale;
  return plan;
}

Plan PlanOf(const PaddleStdAdagradConfig& config) {
  Plan plan{StepKind::kPaddleStdAdagrad, "paddle_std_adagrad", 1};
  plan.params.initial_value = config.initial_g2sum;
  plan.params.show_scale = config.show_scale;
  return plan;
}

Plan PlanOf(const PaddleSharedAdamConfig& config) {
  Plan plan = PlanOfAdam(StepKind::kPaddleSharedAdam,
                         {config.beta_1, config.beta_2, config.epsilon});
  plan.state = "paddle_shared_adam";
  plan.num_vectors = 0;
  plan.num_floats = 3;
  return plan;
}

Plan PlanOf(const LionConfig& config) {
  Plan plan{StepKind::kLion, "lion", 1};
  plan.params.beta_1 = config.beta_1;
  plan.params.beta_2 = config.beta_2;
  // Keras subtracts these in float32, unlike Adam's.
  plan.params.one_minus_beta_1 = 1.0f - config.beta_1;
  plan.params.one_minus_beta_2 = 1.0f - config.beta_2;
  return plan;
}

Plan PlanOf(const RuleConfig& rule) {
  return std::visit([](const auto& config) { return PlanOf(config); }, rule);
}

Averages AveragesOf(StepKind kind) {
  switch (kind) {
    case StepKind::kMomentum:
    case StepKind::kNesterov:
      return Averages::kVelocity;
    case StepKind::kAdam:
    case StepKind::kAdamW:
      return Averages::kMoments;
    case StepKind::kAmsGrad:
      return Averages::kMomentsAndLargest;
    default:
      return Averages::kNone;
  }
}

int SlotFloatsOf(const Plan& plan, int dim) {
  return plan.num_vectors * dim + plan.num_floats;
}

}  // namespace

// The powers are those of the float32 betas: Keras casts them first.
float AdamCorrection(const OptimizerParams& params, float steps) {
  const double power_1 =
      std::pow(static_cast<double>(params.beta_1), static_cast<double>(steps));
  const double power_2 =
      std::pow(static_cast<double>(params.beta_2), static_cast<double>(steps));
  return static_cast<float>(std::sqrt(1.0 - power_2) / (1.0 - power_1));
}

std::vector<SlotRun> SlotRuns(const OptimizerConfig& config, int dim) {
  const std::vector<int> dims = SegmentDims(config, dim);
  std::vector<SlotRun> runs;
  for (size_t i = 0; i < dims.size(); ++i) {
    const Plan plan = PlanOf(config.segments[i].rule);
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
    Plan plan = PlanOf(from.rule);
    SegmentStep& segment = segments_.emplace_back();
    segment.begin = begin;
    segment.slots_begin = slot_floats_;
    segment.learning_rate_scale = from.learning_rate_scale;
    segment.num_initial = plan.num_vectors > 0 ? dims[i] : plan.num_floats;
    segment.initial_slot = plan.initial_slot;
    begin += dims[i];
    segment.num_slots = SlotFloatsOf(plan, dims[i]);
    segment.averages = AveragesOf(plan.kind);
    slot_floats_ += segment.num_slots;

    OptimizerParams& params = segment.params;
    params = plan.params;
    params.dim = dims[i];
    if (params.num_corrections > 0) {
      if (config.is_dense) params.num_corrections = kNumDenseCorrections;
      segment.corrections.resize(params.num_corrections);
      for (int t = 1; t < params.num_corrections; ++t) {
        segment.corrections[t] = AdamCorrection(params, static_cast<float>(t));
      }
      params.corrections = segment.corrections.data();
    }
    params.options = from.options;
    params.cowclip_floor =
        std::sqrt(static_cast<float>(dims[i])) * from.options.cowclip_zeta;
    params.rule = find(plan.kind, dims[i]);
    StepOptions off;
    off.cowclip_zeta = from.options.cowclip_zeta;  // Without r it is nothing.
    segment.step = from.options == off ? params.rule
                                       : find(StepKind::kWithOptions, dims[i]);

    reads_counts_ |= from.options.cowclip_r != 0.0f;
    reads_shows_ |= params.show_scale;
    reads_steps_ |= plan.kind == StepKind::kAdagradDecay;
  }
  if (config.is_dense) {
    params_.segments = segments_.data();
    params_.num_segments = static_cast<int>(segments_.size());
    params_.step_slot = slot_floats_++;
    step_ = StepDense;
    return;
  }
  if (segments_.size() == 1 && segments_[0].learning_rate_scale == 1.0f) {
    params_ = segments_[0].params;
    step_ = segments_[0].step;
    return;
  }
  params_.segments = segments_.data();
  params_.num_segments = static_cast<int>(segments_.size());
  step_ = find(StepKind::kSegments, dim);
}

void Optimizer::InitSlots(float* slots) const {
  std::fill_n(slots, slot_floats_, 0.0f);
  for (const SegmentStep& segment : segments_) {
    std::fill_n(slots + segment.slots_begin, segment.num_initial,
                segment.initial_slot);
  }
}

}  // namespace tfswitch
