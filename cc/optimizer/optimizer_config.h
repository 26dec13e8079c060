// What an optimizer is told once, when its table is created. The learning rate
// is not here: it comes with each push, so that schedules work.

#ifndef TFSWITCH_CC_OPTIMIZER_OPTIMIZER_CONFIG_H_
#define TFSWITCH_CC_OPTIMIZER_OPTIMIZER_CONFIG_H_

#include <string>
#include <variant>

#include "absl/status/status.h"

namespace tfswitch {

// Names and defaults are those of keras.optimizers.
struct SgdConfig {
  float momentum = 0.0f;
  bool nesterov = false;

  bool operator==(const SgdConfig& o) const {
    return momentum == o.momentum && nesterov == o.nesterov;
  }
};

struct AdagradConfig {
  float initial_accumulator_value = 0.1f;
  float epsilon = 1e-7f;

  bool operator==(const AdagradConfig& o) const {
    return initial_accumulator_value == o.initial_accumulator_value &&
           epsilon == o.epsilon;
  }
};

struct AdamConfig {
  float beta_1 = 0.9f;
  float beta_2 = 0.999f;
  float epsilon = 1e-7f;

  bool operator==(const AdamConfig& o) const {
    return beta_1 == o.beta_1 && beta_2 == o.beta_2 && epsilon == o.epsilon;
  }
};

// Adam with weight decay beside the gradient (Loshchilov and Hutter, 2019).
struct AdamWConfig {
  float weight_decay = 0.004f;
  float beta_1 = 0.9f;
  float beta_2 = 0.999f;
  float epsilon = 1e-7f;

  bool operator==(const AdamWConfig& o) const {
    return weight_decay == o.weight_decay && beta_1 == o.beta_1 &&
           beta_2 == o.beta_2 && epsilon == o.epsilon;
  }
};

using OptimizerConfig =
    std::variant<SgdConfig, AdagradConfig, AdamConfig, AdamWConfig>;

// "sgd", "adagrad", "adam" or "adamw": the name in protos, checkpoints and
// messages.
std::string OptimizerName(const OptimizerConfig& config);

// InvalidArgument naming the field, its value and its range.
absl::Status ValidateOptimizerConfig(const OptimizerConfig& config);

}  // namespace tfswitch

#endif  // TFSWITCH_CC_OPTIMIZER_OPTIMIZER_CONFIG_H_
