// The config of an optimizer, which is fixed when its table is created. The
// learning rate is not a part of it, because each push has its own, so that
// schedules work.
//
// A row consists of one or more segments. Each segment has a rule, which
// determines how a gradient changes weights, and options, which work with any
// rule.

#ifndef TFSWITCH_CC_OPTIMIZER_OPTIMIZER_CONFIG_H_
#define TFSWITCH_CC_OPTIMIZER_OPTIMIZER_CONFIG_H_

#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "cc/base/config_fields.h"
#include "cc/optimizer/rules.h"

namespace tfswitch {

// The longest segment, and so the longest embedding.
inline constexpr int kMaxSegmentDim = 4096;

// Operations on the gradient and the weights before and after any rule; see
// optimizer.h for their order. With the defaults all are off.
struct StepOptions {
  NonNegative l2 = 0.0f;
  NonNegative cowclip_r = 0.0f;
  NonNegative cowclip_zeta = 1e-5f;  // Only with cowclip_r.
  NonNegative clip_value = 0.0f;
  NonNegative clip_norm = 0.0f;
  NonNegative weight_decay = 0.0f;
  Ranged<float, ranges::kLowerBound> min_weight =
      -std::numeric_limits<float>::infinity();
  Ranged<float, ranges::kUpperBound> max_weight =
      std::numeric_limits<float>::infinity();
  NonNegative min_norm = 0.0f;
  Ranged<float, ranges::kPositiveBound> max_norm =
      std::numeric_limits<float>::infinity();

  TFSWITCH_FIELDS(l2, cowclip_r, cowclip_zeta, clip_value, clip_norm,
                  weight_decay, min_weight, max_weight, min_norm, max_norm)
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

// A part of the row with its own rule and options.
struct SegmentConfig {
  int dim = 0;  // 0: the rest of the row. Only the last segment may have 0.
  // A factor of the push's learning rate.
  NonNegative learning_rate_scale = 1.0f;
  RuleConfig rule = SgdConfig{};
  StepOptions options;

  TFSWITCH_FIELDS(dim, learning_rate_scale, rule, options)
};

struct OptimizerConfig {
  // The segments of the row; usually one for the whole row.
  std::vector<SegmentConfig> segments;
  // Whether each step changes all rows, like the step of a dense variable, or
  // only the rows of the batch; see missed_steps.h.
  bool is_dense = false;
  // True if the optimizer is not chosen yet ("open"). The table refuses pushes
  // until a caller opens it with a chosen optimizer.
  bool is_open = false;

  OptimizerConfig() : segments(1) {}
  // One rule for the whole row.
  template <typename Rule, std::enable_if_t<kIsRule<Rule>, int> = 0>
  OptimizerConfig(const Rule& rule,  // NOLINT(google-explicit-constructor)
                  const StepOptions& options = {})
      : segments{SegmentConfig{0, 1.0f, rule, options}} {}
  explicit OptimizerConfig(std::vector<SegmentConfig> parts)
      : segments(std::move(parts)) {}

  TFSWITCH_FIELDS(segments, is_dense, is_open)
  // Whether it is one rule for the whole row.
  bool IsSimple() const {
    return segments.size() == 1 && segments[0].dim == 0 &&
           segments[0].learning_rate_scale == 1.0f;
  }
};

// kName of the rule; for several segments, for example "segments(adagrad,
// adam)". If is_dense, for example "adam with dense updates".
std::string OptimizerName(const OptimizerConfig& config);

// InvalidArgument, naming the field, its value and its range, if the config is
// invalid for rows of `dim` floats. The segments must fill the row.
absl::Status ValidateOptimizerConfig(const OptimizerConfig& config, int dim);

// Whether a step depends on the count or the shows of its key in the batch.
bool ReadsCounts(const OptimizerConfig& config);

// The dims of the segments. If the last one is 0 in the config, it is computed.
// REQUIRES: ValidateOptimizerConfig(config, dim) is OK.
std::vector<int> SegmentDims(const OptimizerConfig& config, int dim);

}  // namespace tfswitch

#endif  // TFSWITCH_CC_OPTIMIZER_OPTIMIZER_CONFIG_H_
