// The rules, which determine how a gradient changes weights. This file has for
// each rule its config, the slots that it needs in a row, and the kernel of its
// step. The kernels are in step_kernels.inc, the formulas in
// docs/optimizers.md.
//
// If keras.optimizers has a rule, the names and defaults are the same here.
// kName is the rule's name in protos, checkpoints and messages.

#ifndef TFSWITCH_CC_OPTIMIZER_RULES_H_
#define TFSWITCH_CC_OPTIMIZER_RULES_H_

#include <cstdint>
#include <tuple>
#include <variant>

#include "cc/base/config_fields.h"

namespace tfswitch {

enum class StepKind {
  kSgd,
  kMomentum,
  kNesterov,
  kAdagrad,
  kRowwiseAdagrad,
  kAdagradDecay,
  kAdam,
  kAdamW,
  kAmsGrad,
  kRmsprop,
  kRmspropMomentum,
  kRmspropCentered,
  kRmspropCenteredMomentum,
  kAdadelta,
  kFtrl,       // learning_rate_power is -0.5.
  kFtrlPower,  // Any other learning_rate_power.
  kGroupFtrl,
  kGroupFtrlPower,
  kPaddleAdagrad,
  kPaddleStdAdagrad,
  kPaddleSharedAdam,
  kLion,
  // The last two are not rules. kWithOptions calls the kernel of a rule, and
  // applies options before and after it. kSegments steps all segments, one
  // after another.
  kWithOptions,
  kSegments,
};

// Which slots, in addition to weights, a step with a gradient of zero changes.
// Set only for rules that dense tables may have.
enum class Averages : uint8_t {
  kNone,
  kShrinking,          // All of them, by rho.
  kVelocity,           // v[D]
  kMoments,            // m[D], v[D], t
  kMomentsAndLargest,  // m[D], v[D], v_hat[D], t
};

// The numbers of a rule that its kernel uses.
struct RuleParams {
  float momentum = 0.0f;  // sgd, rmsprop
  float epsilon = 0.0f;
  float beta_1 = 0.0f;  // Adam's relatives, lion
  float beta_2 = 0.0f;
  float one_minus_beta_1 = 0.0f;
  float one_minus_beta_2 = 0.0f;
  float rho = 0.0f;  // rmsprop, adadelta
  float one_minus_rho = 0.0f;
  float weight_decay = 0.0f;   // adamw
  float initial_value = 0.0f;  // adagrad_decay, Paddle's Adagrads
  uint32_t decay_step = 1;     // adagrad_decay
  float decay_rate = 1.0f;
  bool compat = false;
  bool show_scale = false;  // Paddle's Adagrads
  float power = 0.5f;       // ftrl, group_ftrl: -learning_rate_power
  float l1 = 0.0f;
  float l2 = 0.0f;
  float l2_shrinkage = 0.0f;
  float beta = 0.0f;
  // For so many steps, from the first on, Adam's correction is precomputed.
  int num_corrections = 0;
};

// A rule's kernel, slots and numbers.
struct RulePlan {
  StepKind kind = StepKind::kSgd;
  // The slots are vectors of the segment's size, followed by single floats.
  // Rules with the same `state` have slots with the same meaning.
  const char* state = "";
  int num_vectors = 0;
  int num_floats = 0;
  // The initial value of all elements of the first vector, or of the first
  // float if there are no vectors. All other slots start with 0.
  float initial_slot = 0.0f;
  RuleParams params{};
  Averages averages = Averages::kNone;
};

// Returns 1 - beta as Keras computes it, from a Python float such as 0.999.
// With the float32 nearest to beta, the fifth digit would be wrong.
float OneMinus(float beta);

// Adam's corrections are computed in advance for so many steps of a row. Most
// rows take fewer. Each step beyond this costs two calls of pow().
inline constexpr int kNumCorrections = 4096;

struct SgdConfig {
  static constexpr char kName[] = "sgd";
  Unit momentum = 0.0f;
  bool nesterov = false;

  TFSWITCH_FIELDS(momentum, nesterov)
  RulePlan Plan() const {
    if (momentum == 0.0f) return {};
    RulePlan plan{nesterov ? StepKind::kNesterov : StepKind::kMomentum,
                  "momentum", 1};
    plan.params.momentum = momentum;
    plan.averages = Averages::kVelocity;
    return plan;
  }
};

struct AdagradConfig {
  static constexpr char kName[] = "adagrad";
  NonNegative initial_accumulator_value = 0.1f;
  NonNegative epsilon = 1e-7f;

  TFSWITCH_FIELDS(initial_accumulator_value, epsilon)
  RulePlan Plan() const {
    RulePlan plan{StepKind::kAdagrad, "adagrad", 1};
    plan.initial_slot = initial_accumulator_value;
    plan.params.epsilon = epsilon;
    return plan;
  }
};

// Adagrad with one accumulator for the row.
struct RowwiseAdagradConfig : AdagradConfig {
  static constexpr char kName[] = "rowwise_adagrad";

  RulePlan Plan() const {
    RulePlan plan{StepKind::kRowwiseAdagrad, "rowwise_adagrad", 0, 1};
    plan.initial_slot = initial_accumulator_value;
    plan.params.epsilon = epsilon;
    return plan;
  }
};

// Adagrad whose accumulator decays, but never below the initial value.
struct AdagradDecayConfig {
  static constexpr char kName[] = "adagrad_decay";
  Positive initial_accumulator_value = 0.1f;
  Ranged<uint32_t, ranges::kSteps> decay_step = 100000;
  Rate decay_rate = 0.9f;
  // Decays at most once per step of the row, as in DeepRec.
  bool compat = false;

  TFSWITCH_FIELDS(initial_accumulator_value, decay_step, decay_rate, compat)
  // The float counts the periods for which the row has decayed.
  RulePlan Plan() const {
    RulePlan plan{StepKind::kAdagradDecay, "adagrad_decay", 1, 1};
    plan.initial_slot = initial_accumulator_value;
    plan.params.initial_value = initial_accumulator_value;
    plan.params.decay_step = decay_step;
    plan.params.decay_rate = decay_rate;
    plan.params.compat = compat;
    return plan;
  }
};

struct AdamConfig {
  static constexpr char kName[] = "adam";
  Decay beta_1 = 0.9f;
  Decay beta_2 = 0.999f;
  NonNegative epsilon = 1e-7f;

  TFSWITCH_FIELDS(beta_1, beta_2, epsilon)
  // m[D], v[D], t.
  RulePlan Plan() const {
    RulePlan plan{StepKind::kAdam, "adam", 2, 1};
    plan.params.beta_1 = beta_1;
    plan.params.beta_2 = beta_2;
    plan.params.epsilon = epsilon;
    plan.params.one_minus_beta_1 = OneMinus(beta_1);
    plan.params.one_minus_beta_2 = OneMinus(beta_2);
    plan.params.num_corrections = kNumCorrections;
    plan.averages = Averages::kMoments;
    return plan;
  }
};

// Adam with decoupled weight decay (Loshchilov and Hutter, 2019).
struct AdamWConfig {
  static constexpr char kName[] = "adamw";
  NonNegative weight_decay = 0.004f;
  Decay beta_1 = 0.9f;
  Decay beta_2 = 0.999f;
  NonNegative epsilon = 1e-7f;

  TFSWITCH_FIELDS(weight_decay, beta_1, beta_2, epsilon)
  RulePlan Plan() const {
    RulePlan plan = AdamConfig{beta_1, beta_2, epsilon}.Plan();
    plan.kind = StepKind::kAdamW;
    plan.params.weight_decay = weight_decay;
    return plan;
  }
};

// Adam whose second moment never shrinks (Reddi et al., 2018).
struct AmsGradConfig : AdamConfig {
  static constexpr char kName[] = "amsgrad";

  // m[D], v[D], v_hat[D], t.
  RulePlan Plan() const {
    RulePlan plan = AdamConfig::Plan();
    plan.kind = StepKind::kAmsGrad;
    plan.state = "amsgrad";
    plan.num_vectors = 3;
    plan.averages = Averages::kMomentsAndLargest;
    return plan;
  }
};

struct RmspropConfig {
  static constexpr char kName[] = "rmsprop";
  Decay rho = 0.9f;
  Unit momentum = 0.0f;
  Positive epsilon = 1e-7f;
  bool centered = false;

  TFSWITCH_FIELDS(rho, momentum, epsilon, centered)
  // v[D], with momentum p[D], centered also q[D].
  RulePlan Plan() const {
    RulePlan plan;
    if (momentum == 0.0f) {
      plan = centered
                 ? RulePlan{StepKind::kRmspropCentered, "rmsprop_centered", 2}
                 : RulePlan{StepKind::kRmsprop, "rmsprop", 1};
    } else {
      plan = centered
                 ? RulePlan{StepKind::kRmspropCenteredMomentum,
                            "rmsprop_centered_momentum", 3}
                 : RulePlan{StepKind::kRmspropMomentum, "rmsprop_momentum", 2};
    }
    plan.params.rho = rho;
    plan.params.one_minus_rho = OneMinus(rho);
    plan.params.momentum = momentum;
    plan.params.epsilon = epsilon;
    plan.averages = Averages::kShrinking;
    return plan;
  }
};

struct AdadeltaConfig {
  static constexpr char kName[] = "adadelta";
  Decay rho = 0.95f;
  Positive epsilon = 1e-7f;

  TFSWITCH_FIELDS(rho, epsilon)
  // a[D], d[D].
  RulePlan Plan() const {
    RulePlan plan{StepKind::kAdadelta, "adadelta", 2};
    plan.params.rho = rho;
    plan.params.one_minus_rho = OneMinus(rho);
    plan.params.epsilon = epsilon;
    plan.averages = Averages::kShrinking;
    return plan;
  }
};

// Follow the regularised leader, per coordinate (McMahan et al., 2013).
struct FtrlConfig {
  static constexpr char kName[] = "ftrl";
  NonPositive learning_rate_power = -0.5f;
  Positive initial_accumulator_value = 0.1f;
  NonNegative l1_regularization_strength = 0.0f;
  NonNegative l2_regularization_strength = 0.0f;
  NonNegative l2_shrinkage_regularization_strength = 0.0f;
  NonNegative beta = 0.0f;

  TFSWITCH_FIELDS(learning_rate_power, initial_accumulator_value,
                  l1_regularization_strength, l2_regularization_strength,
                  l2_shrinkage_regularization_strength, beta)
  // n[D], z[D].
  RulePlan Plan() const { return Plan(StepKind::kFtrl, StepKind::kFtrlPower); }

 protected:
  RulePlan Plan(StepKind root, StepKind power) const {
    RulePlan plan{learning_rate_power == -0.5f ? root : power, "ftrl", 2};
    plan.initial_slot = initial_accumulator_value;
    plan.params.power = -learning_rate_power;
    plan.params.l1 = l1_regularization_strength;
    plan.params.l2 = l2_regularization_strength;
    plan.params.l2_shrinkage = l2_shrinkage_regularization_strength;
    plan.params.beta = beta;
    return plan;
  }
};

// FTRL with an L1 term on the norm of the row, so that whole rows become 0.
struct GroupFtrlConfig : FtrlConfig {
  static constexpr char kName[] = "group_ftrl";

  RulePlan Plan() const {
    return FtrlConfig::Plan(StepKind::kGroupFtrl, StepKind::kGroupFtrlPower);
  }
};

// The next three rules are those of Paddle's CTR accessor.
struct PaddleAdagradConfig {
  static constexpr char kName[] = "paddle_adagrad";
  Positive initial_g2sum = 3.0f;
  bool show_scale = true;  // Whether gradients are divided by the shows.

  TFSWITCH_FIELDS(initial_g2sum, show_scale)
  RulePlan Plan() const {
    RulePlan plan{StepKind::kPaddleAdagrad, "paddle_adagrad", 0, 1};
    plan.params.initial_value = initial_g2sum;
    plan.params.show_scale = show_scale;
    return plan;
  }
};

struct PaddleStdAdagradConfig : PaddleAdagradConfig {
  static constexpr char kName[] = "paddle_std_adagrad";

  RulePlan Plan() const {
    RulePlan plan{StepKind::kPaddleStdAdagrad, "paddle_std_adagrad", 1};
    plan.params.initial_value = initial_g2sum;
    plan.params.show_scale = show_scale;
    return plan;
  }
};

struct PaddleSharedAdamConfig : AdamConfig {
  static constexpr char kName[] = "paddle_shared_adam";
  PaddleSharedAdamConfig() { epsilon = 1e-8f; }

  // m, v, t.
  RulePlan Plan() const {
    RulePlan plan = AdamConfig::Plan();
    plan.kind = StepKind::kPaddleSharedAdam;
    plan.state = "paddle_shared_adam";
    plan.num_vectors = 0;
    plan.num_floats = 3;
    plan.averages = Averages::kNone;
    return plan;
  }
};

// Moves weights by the sign of a moving average (Chen et al., 2023).
struct LionConfig {
  static constexpr char kName[] = "lion";
  Decay beta_1 = 0.9f;
  Decay beta_2 = 0.99f;

  TFSWITCH_FIELDS(beta_1, beta_2)
  RulePlan Plan() const {
    RulePlan plan{StepKind::kLion, "lion", 1};
    plan.params.beta_1 = beta_1;
    plan.params.beta_2 = beta_2;
    // Unlike for Adam, Keras computes 1 - beta in float32 here.
    plan.params.one_minus_beta_1 = 1.0f - beta_1;
    plan.params.one_minus_beta_2 = 1.0f - beta_2;
    return plan;
  }
};

using RuleConfig =
    std::variant<SgdConfig, AdagradConfig, AdamConfig, AdamWConfig,
                 RowwiseAdagradConfig, AdagradDecayConfig, AmsGradConfig,
                 RmspropConfig, AdadeltaConfig, FtrlConfig, GroupFtrlConfig,
                 PaddleAdagradConfig, PaddleStdAdagradConfig,
                 PaddleSharedAdamConfig, LionConfig>;

inline RulePlan PlanOf(const RuleConfig& rule) {
  return std::visit([](const auto& config) { return config.Plan(); }, rule);
}

}  // namespace tfswitch

#endif  // TFSWITCH_CC_OPTIMIZER_RULES_H_
