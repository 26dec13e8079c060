// What an optimizer is told once, when its table is created. The learning rate
// is not here: it comes with each push, so that schedules work.
//
// A row has one or more segments. Each has a rule, which says how a gradient
// moves weights, and options, which work with any rule.

#ifndef TFSWITCH_CC_OPTIMIZER_OPTIMIZER_CONFIG_H_
#define TFSWITCH_CC_OPTIMIZER_OPTIMIZER_CONFIG_H_

#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "cc/base/config_fields.h"

namespace tfswitch {

// The longest segment, and so the longest embedding.
inline constexpr int kMaxSegmentDim = 4096;

// The rules. optimizer.h has the formulas. Names and defaults are those of
// keras.optimizers where Keras has the rule. kName is the name in protos,
// checkpoints and messages.

struct SgdConfig {
  static constexpr char kName[] = "sgd";
  float momentum = 0.0f;
  bool nesterov = false;

  static constexpr auto Fields() {
    return std::make_tuple(
        ConfigField{"momentum", &SgdConfig::momentum, ranges::kUnit},
        ConfigField{"nesterov", &SgdConfig::nesterov, ranges::kFlag});
  }
};

struct AdagradConfig {
  static constexpr char kName[] = "adagrad";
  float initial_accumulator_value = 0.1f;
  float epsilon = 1e-7f;

  static constexpr auto Fields() {
    return std::make_tuple(
        ConfigField{"initial_accumulator_value",
                    &AdagradConfig::initial_accumulator_value,
                    ranges::kNonNegative},
        ConfigField{"epsilon", &AdagradConfig::epsilon, ranges::kNonNegative});
  }
};

// Adagrad with one accumulator for the row.
struct RowwiseAdagradConfig {
  static constexpr char kName[] = "rowwise_adagrad";
  float initial_accumulator_value = 0.1f;
  float epsilon = 1e-7f;

  static constexpr auto Fields() {
    return std::make_tuple(
        ConfigField{"initial_accumulator_value",
                    &RowwiseAdagradConfig::initial_accumulator_value,
                    ranges::kNonNegative},
        ConfigField{"epsilon", &RowwiseAdagradConfig::epsilon,
                    ranges::kNonNegative});
  }
};

// Adagrad that forgets. The initial value is the lower bound, too.
struct AdagradDecayConfig {
  static constexpr char kName[] = "adagrad_decay";
  float initial_accumulator_value = 0.1f;
  uint32_t decay_step = 100000;
  float decay_rate = 0.9f;
  bool compat = false;  // One decay per step of the row at most, as DeepRec.

  static constexpr auto Fields() {
    return std::make_tuple(
        ConfigField{"initial_accumulator_value",
                    &AdagradDecayConfig::initial_accumulator_value,
                    ranges::kPositive},
        ConfigField{"decay_step", &AdagradDecayConfig::decay_step,
                    ranges::kSteps},
        ConfigField{"decay_rate", &AdagradDecayConfig::decay_rate,
                    ranges::kRate},
        ConfigField{"compat", &AdagradDecayConfig::compat, ranges::kFlag});
  }
};

struct AdamConfig {
  static constexpr char kName[] = "adam";
  float beta_1 = 0.9f;
  float beta_2 = 0.999f;
  float epsilon = 1e-7f;

  static constexpr auto Fields() {
    return std::make_tuple(
        ConfigField{"beta_1", &AdamConfig::beta_1, ranges::kDecay},
        ConfigField{"beta_2", &AdamConfig::beta_2, ranges::kDecay},
        ConfigField{"epsilon", &AdamConfig::epsilon, ranges::kNonNegative});
  }
};

// Adam with weight decay beside the gradient (Loshchilov and Hutter, 2019).
struct AdamWConfig {
  static constexpr char kName[] = "adamw";
  float weight_decay = 0.004f;
  float beta_1 = 0.9f;
  float beta_2 = 0.999f;
  float epsilon = 1e-7f;

  static constexpr auto Fields() {
    return std::make_tuple(
        ConfigField{"weight_decay", &AdamWConfig::weight_decay,
                    ranges::kNonNegative},
        ConfigField{"beta_1", &AdamWConfig::beta_1, ranges::kDecay},
        ConfigField{"beta_2", &AdamWConfig::beta_2, ranges::kDecay},
        ConfigField{"epsilon", &AdamWConfig::epsilon, ranges::kNonNegative});
  }
};

// Adam whose second moment never shrinks (Reddi et al., 2018).
struct AmsGradConfig {
  static constexpr char kName[] = "amsgrad";
  float beta_1 = 0.9f;
  float beta_2 = 0.999f;
  float epsilon = 1e-7f;

  static constexpr auto Fields() {
    return std::make_tuple(
        ConfigField{"beta_1", &AmsGradConfig::beta_1, ranges::kDecay},
        ConfigField{"beta_2", &AmsGradConfig::beta_2, ranges::kDecay},
        ConfigField{"epsilon", &AmsGradConfig::epsilon, ranges::kNonNegative});
  }
};

struct RmspropConfig {
  static constexpr char kName[] = "rmsprop";
  float rho = 0.9f;
  float momentum = 0.0f;
  float epsilon = 1e-7f;
  bool centered = false;

  static constexpr auto Fields() {
    return std::make_tuple(
        ConfigField{"rho", &RmspropConfig::rho, ranges::kDecay},
        ConfigField{"momentum", &RmspropConfig::momentum, ranges::kUnit},
        ConfigField{"epsilon", &RmspropConfig::epsilon, ranges::kPositive},
        ConfigField{"centered", &RmspropConfig::centered, ranges::kFlag});
  }
};

struct AdadeltaConfig {
  static constexpr char kName[] = "adadelta";
  float rho = 0.95f;
  float epsilon = 1e-7f;

  static constexpr auto Fields() {
    return std::make_tuple(
        ConfigField{"rho", &AdadeltaConfig::rho, ranges::kDecay},
        ConfigField{"epsilon", &AdadeltaConfig::epsilon, ranges::kPositive});
  }
};

// Of both kinds of FTRL.
template <typename Config>
constexpr auto FtrlFields() {
  return std::make_tuple(
      ConfigField{"learning_rate_power", &Config::learning_rate_power,
                  ranges::kNonPositive},
      ConfigField{"initial_accumulator_value",
                  &Config::initial_accumulator_value, ranges::kPositive},
      ConfigField{"l1_regularization_strength",
                  &Config::l1_regularization_strength, ranges::kNonNegative},
      ConfigField{"l2_regularization_strength",
                  &Config::l2_regularization_strength, ranges::kNonNegative},
      ConfigField{"l2_shrinkage_regularization_strength",
                  &Config::l2_shrinkage_regularization_strength,
                  ranges::kNonNegative},
      ConfigField{"beta", &Config::beta, ranges::kNonNegative});
}

// Follow the regularised leader, per coordinate (McMahan et al., 2013).
struct FtrlConfig {
  static constexpr char kName[] = "ftrl";
  float learning_rate_power = -0.5f;
  float initial_accumulator_value = 0.1f;
  float l1_regularization_strength = 0.0f;
  float l2_regularization_strength = 0.0f;
  float l2_shrinkage_regularization_strength = 0.0f;
  float beta = 0.0f;

  static constexpr auto Fields() { return FtrlFields<FtrlConfig>(); }
};

// FTRL whose L1 term is on the norm of the row, so that whole rows become 0.
struct GroupFtrlConfig {
  static constexpr char kName[] = "group_ftrl";
  float learning_rate_power = -0.5f;
  float initial_accumulator_value = 0.1f;
  float l1_regularization_strength = 0.0f;
  float l2_regularization_strength = 0.0f;
  float l2_shrinkage_regularization_strength = 0.0f;
  float beta = 0.0f;

  static constexpr auto Fields() { return FtrlFields<GroupFtrlConfig>(); }
};

// The three rules of Paddle's CTR accessor that have no like elsewhere.
struct PaddleAdagradConfig {
  static constexpr char kName[] = "paddle_adagrad";
  float initial_g2sum = 3.0f;
  bool show_scale = true;  // Whether gradients are divided by the shows.

  static constexpr auto Fields() {
    return std::make_tuple(
        ConfigField{"initial_g2sum", &PaddleAdagradConfig::initial_g2sum,
                    ranges::kPositive},
        ConfigField{"show_scale", &PaddleAdagradConfig::show_scale,
                    ranges::kFlag});
  }
};

struct PaddleStdAdagradConfig {
  static constexpr char kName[] = "paddle_std_adagrad";
  float initial_g2sum = 3.0f;
  bool show_scale = true;

  static constexpr auto Fields() {
    return std::make_tuple(
        ConfigField{"initial_g2sum", &PaddleStdAdagradConfig::initial_g2sum,
                    ranges::kPositive},
        ConfigField{"show_scale", &PaddleStdAdagradConfig::show_scale,
                    ranges::kFlag});
  }
};

struct PaddleSharedAdamConfig {
  static constexpr char kName[] = "paddle_shared_adam";
  float beta_1 = 0.9f;
  float beta_2 = 0.999f;
  float epsilon = 1e-8f;

  static constexpr auto Fields() {
    return std::make_tuple(
        ConfigField{"beta_1", &PaddleSharedAdamConfig::beta_1, ranges::kDecay},
        ConfigField{"beta_2", &PaddleSharedAdamConfig::beta_2, ranges::kDecay},
        ConfigField{"epsilon", &PaddleSharedAdamConfig::epsilon,
                    ranges::kNonNegative});
  }
};

// The sign of a moving average (Chen et al., 2023).
struct LionConfig {
  static constexpr char kName[] = "lion";
  float beta_1 = 0.9f;
  float beta_2 = 0.99f;

  static constexpr auto Fields() {
    return std::make_tuple(
        ConfigField{"beta_1", &LionConfig::beta_1, ranges::kDecay},
        ConfigField{"beta_2", &LionConfig::beta_2, ranges::kDecay});
  }
};

using RuleConfig =
    std::variant<SgdConfig, AdagradConfig, AdamConfig, AdamWConfig,
                 RowwiseAdagradConfig, AdagradDecayConfig, AmsGradConfig,
                 RmspropConfig, AdadeltaConfig, FtrlConfig, GroupFtrlConfig,
                 PaddleAdagradConfig, PaddleStdAdagradConfig,
                 PaddleSharedAdamConfig, LionConfig>;

// What can be done to gradient and weights around any rule, in this order; see
// optimizer.h. Defaults are "off".
struct StepOptions {
  float l2 = 0.0f;
  float cowclip_r = 0.0f;
  float cowclip_zeta = 1e-5f;  // Counts if cowclip_r does.
  float clip_value = 0.0f;
  float clip_norm = 0.0f;
  float weight_decay = 0.0f;
  float min_weight = -std::numeric_limits<float>::infinity();
  float max_weight = std::numeric_limits<float>::infinity();
  float min_norm = 0.0f;
  float max_norm = std::numeric_limits<float>::infinity();

  static constexpr auto Fields() {
    return std::make_tuple(
        ConfigField{"l2", &StepOptions::l2, ranges::kNonNegative},
        ConfigField{"cowclip_r", &StepOptions::cowclip_r, ranges::kNonNegative},
        ConfigField{"cowclip_zeta", &StepOptions::cowclip_zeta,
                    ranges::kNonNegative},
        ConfigField{"clip_value", &StepOptions::clip_value,
                    ranges::kNonNegative},
        ConfigField{"clip_norm", &StepOptions::clip_norm, ranges::kNonNegative},
        ConfigField{"weight_decay", &StepOptions::weight_decay,
                    ranges::kNonNegative},
        ConfigField{"min_weight", &StepOptions::min_weight,
                    ranges::kLowerBound},
        ConfigField{"max_weight", &StepOptions::max_weight,
                    ranges::kUpperBound},
        ConfigField{"min_norm", &StepOptions::min_norm, ranges::kNonNegative},
        ConfigField{"max_norm", &StepOptions::max_norm,
                    ranges::kPositiveBound});
  }
};

inline bool HasNormBounds(const StepOptions& options) {
  return options.min_norm > 0.0f ||
         options.max_norm < std::numeric_limits<float>::infinity();
}

template <typename Struct, typename Variant>
inline constexpr bool kIsAlternative = false;
template <typename Struct, typename... Alternatives>
inline constexpr bool kIsAlternative<Struct, std::variant<Alternatives...>> =
    (std::is_same_v<Struct, Alternatives> || ...);
template <typename Struct>
inline constexpr bool kIsRule = kIsAlternative<Struct, RuleConfig>;

// A part of the row that learns by itself.
struct SegmentConfig {
  int dim = 0;  // 0, which only the last segment may have: the rest of the row.
  float learning_rate_scale = 1.0f;  // Times the push's learning rate.
  RuleConfig rule = SgdConfig{};
  StepOptions options;

  bool operator==(const SegmentConfig& o) const {
    return dim == o.dim && learning_rate_scale == o.learning_rate_scale &&
           rule == o.rule && options == o.options;
  }
};

struct OptimizerConfig {
  // At least one; most often one for the whole row.
  std::vector<SegmentConfig> segments;
  // Whether each step reaches all rows, as that of a dense variable does, and
  // not those of the batch only; see missed_steps.h.
  bool is_dense = false;

  OptimizerConfig() : segments(1) {}
  // One rule for the whole row.
  template <typename Rule, std::enable_if_t<kIsRule<Rule>, int> = 0>
  OptimizerConfig(const Rule& rule,  // NOLINT(google-explicit-constructor)
                  const StepOptions& options = {})
      : segments{SegmentConfig{0, 1.0f, rule, options}} {}
  explicit OptimizerConfig(std::vector<SegmentConfig> parts)
      : segments(std::move(parts)) {}

  bool operator==(const OptimizerConfig& o) const {
    return segments == o.segments && is_dense == o.is_dense;
  }
  // Whether it is one rule for the whole row.
  bool IsSimple() const {
    return segments.size() == 1 && segments[0].dim == 0 &&
           segments[0].learning_rate_scale == 1.0f;
  }
};

// kName of the rule; of several, "segments(adagrad, adam)". With is_dense,
// "adam with dense updates".
std::string OptimizerName(const OptimizerConfig& config);

// InvalidArgument naming the field, its value and its range. `dim` is that of
// the row; segments must fill it.
absl::Status ValidateOptimizerConfig(const OptimizerConfig& config, int dim);

// Whether a step goes by how often its key is in the batch, or was shown.
bool ReadsCounts(const OptimizerConfig& config);

// The dims of the segments, the last one's filled in.
// REQUIRES: ValidateOptimizerConfig(config, dim) is OK.
std::vector<int> SegmentDims(const OptimizerConfig& config, int dim);

}  // namespace tfswitch

#endif  // TFSWITCH_CC_OPTIMIZER_OPTIMIZER_CONFIG_H_
