// One optimizer step on one row, in place.
//
//   row = | embedding: dim floats | slots: slot_floats() |
//
//   sgd       no slots, or velocity[dim] with momentum
//   adagrad   accumulator[dim]
//   adam, adamw   m[dim], v[dim], steps[1]
//
// The formulas are those of Keras 3, operation by operation in float32. Adam
// counts the steps of each row, where Keras counts those of the variable: a row
// that is seldom in a batch is corrected for its own history.

#ifndef TFSWITCH_CC_OPTIMIZER_OPTIMIZER_H_
#define TFSWITCH_CC_OPTIMIZER_OPTIMIZER_H_

#include <cstdint>
#include <vector>

#include "cc/base/cpu_features.h"
#include "cc/optimizer/optimizer_config.h"

namespace tfswitch {

// What a kernel reads besides the row and the gradient.
struct OptimizerParams {
  int dim = 0;
  float momentum = 0.0f;  // sgd
  float epsilon = 0.0f;   // adagrad, adam, adamw
  float beta_1 = 0.0f;    // adam, adamw
  float beta_2 = 0.0f;
  float one_minus_beta_1 = 0.0f;
  float one_minus_beta_2 = 0.0f;
  float weight_decay = 0.0f;  // adamw
  // Adam's sqrt(1 - beta_2^t) / (1 - beta_1^t) for t < num_corrections.
  const float* corrections = nullptr;
  int num_corrections = 0;
};

// What comes with a gradient.
struct StepInput {
  float learning_rate = 0.0f;
  float count = 1.0f;       // Occurrences of the key in the batch.
  float shows = 1.0f;       // What Paddle's rules scale by.
  int64_t global_step = 0;  // Of the training; 0: not known.
};

// Immutable after construction, so thread-safe; two threads must not step the
// same row at the same time.
class Optimizer {
 public:
  // REQUIRES: ValidateOptimizerConfig(config) is OK and dim > 0.
  Optimizer(const OptimizerConfig& config, int dim,
            SimdLevel level = ActiveSimdLevel());

  Optimizer(const Optimizer&) = delete;
  Optimizer& operator=(const Optimizer&) = delete;

  int dim() const { return params_.dim; }
  int slot_floats() const { return slot_floats_; }

  // Writes what the slots of a new row start with.
  void InitSlots(float* slots) const;

  // One step. Both levels of SIMD give the same bits. (Inlined in any case, as
  // it is also called from files compiled for AVX2.)
  [[gnu::always_inline]] void Step(float* row, const float* gradient,
                                   const StepInput& input) const {
    step_(params_, row, gradient, input.learning_rate);
  }

 private:
  using StepFunction = void (*)(const OptimizerParams&, float* row,
                                const float* gradient, float learning_rate);

  OptimizerParams params_;
  int slot_floats_ = 0;
  float initial_slot_ = 0.0f;
  std::vector<float> corrections_;
  StepFunction step_ = nullptr;
};

// The number of slot floats of a row, without building an Optimizer.
int SlotFloats(const OptimizerConfig& config, int dim);

}  // namespace tfswitch

#endif  // TFSWITCH_CC_OPTIMIZER_OPTIMIZER_H_
