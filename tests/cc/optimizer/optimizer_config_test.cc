#include "cc/optimizer/optimizer_config.h"

#include <limits>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tfswitch {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

std::string Error(const OptimizerConfig& config, int dim = 16) {
  const absl::Status status = ValidateOptimizerConfig(config, dim);
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  return std::string(status.message());
}

TEST(OptimizerConfigTest, DefaultsAreValid) {
  ForEachKind<RuleConfig>([](const auto& rule) {
    EXPECT_TRUE(ValidateOptimizerConfig(rule, 1).ok()) << rule.kName;
  });
}

TEST(OptimizerConfigTest, EveryKnobIsCheckedAndNamed) {
  ForEachKind<RuleConfig>([](const auto& defaults) {
    auto config = defaults;
    const auto refused = [&](const std::string& name) {
      EXPECT_THAT(Error(config),
                  AllOf(HasSubstr(absl::StrCat(config.kName, ".", name, ":")),
                        HasSubstr("expected"), HasSubstr("got")));
    };
    ForEachField(config, [&](const std::string& name, auto& value) {
      using Value = std::decay_t<decltype(value)>;
      const Value valid = value;
      if constexpr (std::is_same_v<Value, bool>) {
        return;  // It has no range.
      } else if constexpr (std::is_same_v<typename Value::Value, float>) {
        const bool is_power = name == "learning_rate_power";
        for (const float bad : {is_power ? 0.5f : -0.5f, kNan, kInfinity}) {
          value = bad;
          refused(name);
        }
      } else {
        value = 0;
        refused(name);
      }
      value = valid;
    });
  });
}

TEST(OptimizerConfigTest, EveryOptionIsCheckedAndNamed) {
  StepOptions options;
  ForEachField(options, [&](const std::string& name, auto& value) {
    const float off = value;
    const float bad = name == "min_weight"   ? kInfinity
                      : name == "max_weight" ? -kInfinity
                                             : -1.0f;
    for (const float wrong : {bad, kNan}) {
      value = wrong;
      EXPECT_THAT(Error({AdagradConfig{}, options}),
                  HasSubstr(absl::StrCat("options.", name, ":")));
    }
    value = off;
  });
}

TEST(OptimizerConfigTest, BoundsMustBeInOrder) {
  StepOptions options;
  options.min_weight = 1.0f;
  EXPECT_TRUE(ValidateOptimizerConfig({SgdConfig{}, options}, 4).ok());
  options.max_weight = 0.5f;
  EXPECT_EQ(Error({SgdConfig{}, options}),
            "optimizer options.min_weight: expected at most max_weight, 0.5, "
            "got 1");
  StepOptions norms;
  norms.min_norm = 1.0f;
  norms.max_norm = 0.5f;
  EXPECT_EQ(Error({SgdConfig{}, norms}),
            "optimizer options.min_norm: expected at most max_norm, 0.5, got "
            "1");
}

TEST(OptimizerConfigTest, AdamWHasOneWeightDecay) {
  StepOptions options;
  options.weight_decay = 0.1f;
  EXPECT_THAT(Error({AdamWConfig{}, options}),
              HasSubstr("options.weight_decay"));
  EXPECT_TRUE(ValidateOptimizerConfig({AdamConfig{}, options}, 4).ok());
}

TEST(OptimizerConfigTest, SegmentsMustFillTheRow) {
  const auto segments = [](const std::vector<int>& dims) {
    std::vector<SegmentConfig> result;
    result.reserve(dims.size());
    for (const int dim : dims) result.push_back({dim, 1.0f, SgdConfig{}, {}});
    return OptimizerConfig(result);
  };
  for (const std::vector<int>& dims :
       std::vector<std::vector<int>>{{0}, {16}, {4, 12}, {4, 0}, {1, 1, 0}}) {
    EXPECT_TRUE(ValidateOptimizerConfig(segments(dims), 16).ok());
  }
  EXPECT_THAT(SegmentDims(segments({4, 0}), 16), ElementsAre(4, 12));
  EXPECT_EQ(Error(segments({4, 11})),
            "optimizer segments: expected dims that sum to 16, got 15");
  EXPECT_THAT(Error(segments({4, 13})), HasSubstr("segments[1].dim"));
  EXPECT_THAT(Error(segments({16, 0})), HasSubstr("segments[1].dim"));
  EXPECT_THAT(Error(segments({0, 16})), HasSubstr("segments[0].dim"));
  EXPECT_THAT(Error(segments({-1, 0})), HasSubstr("segments[0].dim"));
  EXPECT_THAT(Error(segments({})), HasSubstr("one rule"));
}

TEST(OptimizerConfigTest, ErrorsOfSegmentsSayWhichOne) {
  std::vector<SegmentConfig> parts = {{1, 1.0f, FtrlConfig{}, {}},
                                      {0, 1.0f, AdamConfig{}, {}}};
  std::get<AdamConfig>(parts[1].rule).beta_1 = 1.5f;
  EXPECT_EQ(Error(OptimizerConfig(parts)),
            "optimizer segments[1].adam.beta_1: expected a number in [0, 1), "
            "got 1.5");
  parts[1].rule = AdamConfig{};
  parts[0].learning_rate_scale = -1.0f;
  EXPECT_THAT(Error(OptimizerConfig(parts)),
              HasSubstr("segments[0].learning_rate_scale"));
}

TEST(OptimizerConfigTest, EqualityIsThatOfAllFields) {
  EXPECT_EQ(OptimizerConfig(AdamConfig{}), OptimizerConfig(AdamConfig{}));
  EXPECT_FALSE(OptimizerConfig(AdamConfig{}) == OptimizerConfig(AdamWConfig{}));
  ForEachKind<RuleConfig>([](const auto& defaults) {
    auto config = defaults;
    ForEachField(config, [&](const std::string& name, auto& value) {
      const auto before = value;
      if constexpr (std::is_same_v<std::decay_t<decltype(value)>, bool>) {
        value = !value;
      } else {
        value.value += 1;
      }
      EXPECT_FALSE(OptimizerConfig(config) == OptimizerConfig(defaults))
          << config.kName << "." << name;
      value = before;
    });
  });
  StepOptions options;
  options.max_weight = 1.0f;
  EXPECT_FALSE(OptimizerConfig(SgdConfig{}, options) ==
               OptimizerConfig(SgdConfig{}));
}

TEST(OptimizerConfigTest, NamesAreThoseOfTheProto) {
  EXPECT_EQ(OptimizerName(SgdConfig{}), "sgd");
  EXPECT_EQ(OptimizerName(AdagradConfig{}), "adagrad");
  EXPECT_EQ(OptimizerName(AdamConfig{}), "adam");
  EXPECT_EQ(OptimizerName(AdamWConfig{}), "adamw");
  EXPECT_EQ(OptimizerName(GroupFtrlConfig{}), "group_ftrl");
  EXPECT_EQ(OptimizerName(OptimizerConfig(std::vector<SegmentConfig>{
                {1, 1.0f, FtrlConfig{}, {}}, {0, 1.0f, AdamConfig{}, {}}})),
            "segments(ftrl, adam)");
}

}  // namespace
}  // namespace tfswitch
