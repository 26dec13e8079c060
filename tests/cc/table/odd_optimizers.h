// Optimizers none of whose fields has its default, for tests of conversions.

#ifndef TFSWITCH_TESTS_CC_TABLE_ODD_OPTIMIZERS_H_
#define TFSWITCH_TESTS_CC_TABLE_ODD_OPTIMIZERS_H_

#include <string>
#include <type_traits>
#include <vector>

#include "cc/optimizer/optimizer_config.h"

namespace tfswitch {

// Sets each field to another value. Valid ones only for rules.
template <typename Struct>
Struct WithOddFields(Struct config) {
  float odd = 0.25f;
  ForEachField(config, [&odd](const std::string&, auto& value) {
    using Value = std::decay_t<decltype(value)>;
    if constexpr (std::is_same_v<Value, bool>) {
      value = !value;
    } else if constexpr (std::is_same_v<typename Value::Value, float>) {
      value = Value::range.max == 0.0 ? -odd : odd;
      odd += 1.0f / 64.0f;
    } else {
      value = 12345;
    }
  });
  return config;
}

// Each rule, with and without options, and one of segments.
inline std::vector<OptimizerConfig> OddOptimizers() {
  const StepOptions options = WithOddFields(StepOptions{});
  std::vector<OptimizerConfig> configs;
  std::vector<SegmentConfig> segments;
  ForEachKind<RuleConfig>([&](const auto& rule) {
    configs.emplace_back(rule);
    configs.emplace_back(WithOddFields(rule));
    StepOptions fitting = options;
    if (std::is_same_v<std::decay_t<decltype(rule)>, AdamWConfig>) {
      fitting.weight_decay = 0.0f;
    }
    configs.emplace_back(WithOddFields(rule), fitting);
    segments.push_back({1, 1.5f, WithOddFields(rule), fitting});
  });
  segments.push_back({0, 1.0f, SgdConfig{}, {}});
  configs.emplace_back(segments);
  configs.emplace_back(std::vector<SegmentConfig>{{0, 2.0f, SgdConfig{}, {}}});
  return configs;
}

}  // namespace tfswitch

#endif  // TFSWITCH_TESTS_CC_TABLE_ODD_OPTIMIZERS_H_
