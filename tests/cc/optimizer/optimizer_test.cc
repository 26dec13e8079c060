#include "cc/optimizer/optimizer.h"

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tfswitch {
namespace {

using ::testing::Each;
using ::testing::FloatNear;
using ::testing::HasSubstr;
using ::testing::Pointwise;

// The golden numbers come from a NumPy float64 program that was written from
// the formulas alone: three steps, with a learning rate that changes. Keras 3
// gives the same to the tolerance, which is float32's over three steps.
constexpr float kTolerance = 2e-6f;
constexpr int kDim = 5;
const std::vector<float> kStart = {0.5f, -1.0f, 2.0f, 0.0f, 0.25f};
const std::vector<std::vector<float>> kGradients = {
    {0.1f, -0.2f, 0.3f, 1.5f, -0.01f},
    {-0.4f, 0.2f, 0.0f, -2.5f, 0.02f},
    {0.05f, 0.7f, -0.6f, 0.5f, 0.03f}};
const std::vector<float> kLearningRates = {0.1f, 0.05f, 0.2f};

class OptimizerTest : public ::testing::TestWithParam<SimdLevel> {
 protected:
  void SetUp() override {
    if (GetParam() == SimdLevel::kAvx2 && BestSimdLevel() != SimdLevel::kAvx2) {
      GTEST_SKIP() << "no AVX2 here";
    }
  }

  // The row after the three steps.
  std::vector<float> Run(const OptimizerConfig& config) {
    const Optimizer optimizer(config, kDim, GetParam());
    std::vector<float> row = kStart;
    row.resize(kDim + optimizer.slot_floats());
    optimizer.InitSlots(row.data() + kDim);
    for (size_t i = 0; i < kGradients.size(); ++i) {
      optimizer.Step(row.data(), kGradients[i].data(), {kLearningRates[i]});
    }
    return row;
  }
};

TEST_P(OptimizerTest, SgdEqualsTheReference) {
  EXPECT_THAT(
      Run(SgdConfig{}),
      Pointwise(FloatNear(kTolerance), {0.5f, -1.13f, 2.09f, -0.125f, 0.244f}));
}

TEST_P(OptimizerTest, MomentumEqualsTheReference) {
  EXPECT_THAT(Run(SgdConfig{0.9f, false}),
              Pointwise(FloatNear(kTolerance),
                        {0.5009f, -1.1048f, 2.0387f, -0.269f, 0.24481f,
                         -0.0001f, -0.1328f, 0.0957f, -0.109f, -0.00609f}));
}

TEST_P(OptimizerTest, NesterovEqualsTheReference) {
  EXPECT_THAT(Run(SgdConfig{0.9f, true}),
              Pointwise(FloatNear(kTolerance),
                        {0.50081f, -1.22432f, 2.12483f, -0.3671f, 0.239329f,
                         -0.0001f, -0.1328f, 0.0957f, -0.109f, -0.00609f}));
}

TEST_P(OptimizerTest, AdagradEqualsTheReference) {
  EXPECT_THAT(Run(AdagradConfig{}),
              Pointwise(FloatNear(kTolerance),
                        {0.489182368f, -1.1411552f, 2.09298325f, -0.088839195f,
                         0.231164077f, 0.2725f, 0.67f, 0.55f, 8.85f, 0.1014f}));
}

TEST_P(OptimizerTest, AdamEqualsTheReference) {
  EXPECT_THAT(
      Run(AdamConfig{}),
      Pointwise(FloatNear(kTolerance),
                {0.49845854f, -1.02414957f, 1.93450507f, -0.0622000147f,
                 0.195405486f, -0.0229f, 0.0718f, -0.0357f, -0.0535f, 0.00399f,
                 0.00017232001f, 0.00056988004f, 0.00044982009f, 0.00873925225f,
                 1.3994001e-06f, 3.0f}));
}

TEST_P(OptimizerTest, AdamWEqualsTheReference) {
  // The decay comes before the step, and only weights decay, not moments.
  EXPECT_THAT(
      Run(AdamWConfig{0.1f}),
      Pointwise(FloatNear(kTolerance),
                {0.483063462f, -0.991935904f, 1.86836309f, -0.0600035808f,
                 0.184619575f, -0.0229f, 0.0718f, -0.0357f, -0.0535f, 0.00399f,
                 0.00017232001f, 0.00056988004f, 0.00044982009f, 0.00873925225f,
                 1.3994001e-06f, 3.0f}));
}

TEST_P(OptimizerTest, AdamWWithoutDecayIsAdam) {
  EXPECT_EQ(Run(AdamWConfig{0.0f, 0.8f, 0.99f, 1e-6f}),
            Run(AdamConfig{0.8f, 0.99f, 1e-6f}));
}

TEST_P(OptimizerTest, AdamCorrectsBeyondItsTableOfCorrections) {
  const Optimizer optimizer(AdamConfig{}, 1, GetParam());
  // w, m, v, t: with m / sqrt(v) = 1 the step is the learning rate times the
  // correction, which has gone from 0.316 to about 1.
  for (const float steps : {0.0f, 4094.0f, 4095.0f, 5000.0f, 16777216.0f}) {
    std::vector<float> row = {0.0f, 1.0f, 1.0f, steps};
    const float gradient = 1.0f;
    optimizer.Step(row.data(), &gradient, {1.0f});

    const double t = static_cast<double>(steps) + 1.0;
    const double correction =
        std::sqrt(1.0 - std::pow(static_cast<double>(0.999f), t)) /
        (1.0 - std::pow(static_cast<double>(0.9f), t));
    EXPECT_NEAR(row[0], -correction, 1e-5) << steps;
    EXPECT_EQ(row[3], steps + 1.0f);
  }
}

INSTANTIATE_TEST_SUITE_P(Levels, OptimizerTest,
                         ::testing::Values(SimdLevel::kScalar,
                                           SimdLevel::kAvx2),
                         [](const auto& info) {
                           return std::string(SimdLevelName(info.param));
                         });

TEST(OptimizerLayoutTest, SlotFloatsAreAsDocumented) {
  EXPECT_EQ(SlotFloats(SgdConfig{}, 16), 0);
  EXPECT_EQ(SlotFloats(SgdConfig{0.5f, false}, 16), 16);
  EXPECT_EQ(SlotFloats(SgdConfig{0.5f, true}, 16), 16);
  EXPECT_EQ(SlotFloats(AdagradConfig{}, 16), 16);
  EXPECT_EQ(SlotFloats(AdamConfig{}, 16), 33);
  EXPECT_EQ(SlotFloats(AdamWConfig{}, 16), 33);
}

TEST(OptimizerLayoutTest, SlotsStartWithTheirInitialValues) {
  std::vector<float> slots(16, -1.0f);
  Optimizer(AdagradConfig{0.25f, 1e-7f}, 16).InitSlots(slots.data());
  EXPECT_THAT(slots, Each(0.25f));

  slots.assign(33, -1.0f);
  Optimizer(AdamConfig{}, 16).InitSlots(slots.data());
  EXPECT_THAT(slots, Each(0.0f));

  slots.assign(33, -1.0f);
  Optimizer(AdamWConfig{}, 16).InitSlots(slots.data());
  EXPECT_THAT(slots, Each(0.0f));
}

TEST(OptimizerConfigTest, ErrorsNameFieldRangeAndValue) {
  const absl::Status status =
      ValidateOptimizerConfig(AdamConfig{1.5f, 0.999f, 1e-7f}, 16);

  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(status.message(),
            "optimizer adam.beta_1: expected a number in [0, 1), got 1.5");
  EXPECT_EQ(ValidateOptimizerConfig(AdamWConfig{-1.0f}, 16).message(),
            "optimizer adamw.weight_decay: expected a finite number >= 0, got "
            "-1");
}

TEST(OptimizerConfigTest, DefaultsAreValidAndNanIsNot) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  EXPECT_TRUE(ValidateOptimizerConfig(SgdConfig{}, 16).ok());
  EXPECT_TRUE(ValidateOptimizerConfig(SgdConfig{1.0f, true}, 16).ok());
  EXPECT_TRUE(ValidateOptimizerConfig(AdagradConfig{}, 16).ok());
  EXPECT_TRUE(ValidateOptimizerConfig(AdamConfig{}, 16).ok());
  EXPECT_TRUE(ValidateOptimizerConfig(AdamWConfig{}, 16).ok());
  EXPECT_TRUE(ValidateOptimizerConfig(AdamWConfig{0.0f}, 16).ok());
  EXPECT_THAT(ValidateOptimizerConfig(SgdConfig{nan, false}, 16).message(),
              HasSubstr("sgd.momentum"));
  EXPECT_THAT(ValidateOptimizerConfig(AdagradConfig{nan, 1e-7f}, 16).message(),
              HasSubstr("adagrad.initial_accumulator_value"));
  EXPECT_THAT(
      ValidateOptimizerConfig(AdamConfig{0.9f, nan, 1e-7f}, 16).message(),
      HasSubstr("adam.beta_2"));
  EXPECT_THAT(ValidateOptimizerConfig(AdamWConfig{nan}, 16).message(),
              HasSubstr("adamw.weight_decay"));
  EXPECT_THAT(ValidateOptimizerConfig(AdamWConfig{0.1f, nan, 0.999f, 1e-7f}, 16)
                  .message(),
              HasSubstr("adamw.beta_1"));
  EXPECT_THAT(ValidateOptimizerConfig(AdamWConfig{0.1f, 0.9f, 1.0f, 1e-7f}, 16)
                  .message(),
              HasSubstr("adamw.beta_2"));
  EXPECT_THAT(ValidateOptimizerConfig(AdamWConfig{0.1f, 0.9f, 0.999f, nan}, 16)
                  .message(),
              HasSubstr("adamw.epsilon"));
}

}  // namespace
}  // namespace tfswitch
