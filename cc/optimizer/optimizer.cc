#include "cc/optimizer/optimizer.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>

#include "cc/optimizer/step_kernels.h"

namespace tfswitch {
namespace {

// Rows see few steps; a longer history costs two pow() a step.
constexpr int kNumCorrections = 4096;

StepKind KindOf(const OptimizerConfig& config) {
  if (const auto* sgd = std::get_if<SgdConfig>(&config)) {
    if (sgd->momentum == 0.0f) return StepKind::kSgd;
    return sgd->nesterov ? StepKind::kNesterov : StepKind::kMomentum;
  }
  if (std::holds_alternative<AdagradConfig>(config)) return StepKind::kAdagrad;
  if (std::holds_alternative<AdamConfig>(config)) return StepKind::kAdam;
  return StepKind::kAdamW;
}

// 1 - beta, as Keras has it: there beta is a Python float, 0.999 and not the
// float32 next to it, which would make 1 - beta wrong in the fifth digit.
float OneMinus(float beta) {
  char decimal[32];
  snprintf(decimal, sizeof(decimal), "%.6g", static_cast<double>(beta));
  double exact = strtod(decimal, nullptr);
  if (static_cast<float>(exact) != beta) exact = static_cast<double>(beta);
  return static_cast<float>(1.0 - exact);
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

int SlotFloats(const OptimizerConfig& config, int dim) {
  switch (KindOf(config)) {
    case StepKind::kSgd:
      return 0;
    case StepKind::kMomentum:
    case StepKind::kNesterov:
    case StepKind::kAdagrad:
      return dim;
    case StepKind::kAdam:
    case StepKind::kAdamW:
      return 2 * dim + 1;
  }
  return 0;
}

Optimizer::Optimizer(const OptimizerConfig& config, int dim, SimdLevel level)
    : slot_floats_(SlotFloats(config, dim)) {
  params_.dim = dim;
  if (const auto* sgd = std::get_if<SgdConfig>(&config)) {
    params_.momentum = sgd->momentum;
  } else if (const auto* adagrad = std::get_if<AdagradConfig>(&config)) {
    params_.epsilon = adagrad->epsilon;
    initial_slot_ = adagrad->initial_accumulator_value;
  } else {
    AdamConfig adam;
    if (const auto* adamw = std::get_if<AdamWConfig>(&config)) {
      adam = {adamw->beta_1, adamw->beta_2, adamw->epsilon};
      params_.weight_decay = adamw->weight_decay;
    } else {
      adam = std::get<AdamConfig>(config);
    }
    params_.beta_1 = adam.beta_1;
    params_.beta_2 = adam.beta_2;
    params_.epsilon = adam.epsilon;
    params_.one_minus_beta_1 = OneMinus(adam.beta_1);
    params_.one_minus_beta_2 = OneMinus(adam.beta_2);
    corrections_.resize(kNumCorrections);
    for (int t = 1; t < kNumCorrections; ++t) {
      corrections_[t] = AdamCorrection(params_, static_cast<float>(t));
    }
    params_.corrections = corrections_.data();
    params_.num_corrections = kNumCorrections;
  }
  const StepKind kind = KindOf(config);
  step_ = level == SimdLevel::kAvx2 ? avx2::FindStepKernel(kind, dim)
                                    : scalar::FindStepKernel(kind, dim);
}

void Optimizer::InitSlots(float* slots) const {
  std::fill_n(slots, slot_floats_, initial_slot_);
}

}  // namespace tfswitch
