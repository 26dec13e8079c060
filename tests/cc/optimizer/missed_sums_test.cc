// Missed steps as one sum against the same steps in doubles.

#include "cc/optimizer/missed_sums.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "cc/optimizer/optimizer.h"
#include "gtest/gtest.h"

namespace tfswitch {
namespace {

constexpr int kSumDim = 16;

// The log of a table that steps alone.
class Log {
 public:
  explicit Log(const Optimizer* optimizer) : sums_(optimizer) {}

  void Add(float learning_rate) {
    ++last_step_;
    if (runs_.empty() || runs_.back().learning_rate != learning_rate) {
      runs_.push_back({last_step_, learning_rate});
    }
    sums_.Add(learning_rate);
  }
  // Forgets the sums, as a restart does.
  void Forget() { sums_.Reset(last_step_); }

  StepHistory Now() {
    now_ = sums_.Now();
    return {runs_.data(), runs_.size(), last_step_,
            now_.empty() ? nullptr : now_.data()};
  }
  uint32_t last_step() const { return last_step_; }

 private:
  MissedSums sums_;
  std::vector<StepRun> runs_;
  std::vector<MissedMoment> now_;
  uint32_t last_step_ = 0;
};

// A row in doubles; m is the velocity of momentum.
struct Row {
  std::vector<double> w, m, v, largest;
};

// Takes the steps after `step` with a gradient of zero.
void TakeSteps(const SegmentStep& segment, bool is_nesterov,
               const StepHistory& history, uint32_t step, Row* row) {
  const OptimizerParams& p = segment.params;
  const double keep_1 = 1.0 - static_cast<double>(p.one_minus_beta_1);
  const double keep_2 = 1.0 - static_cast<double>(p.one_minus_beta_2);
  const double wd = segment.missed.weight_decay;
  for (uint32_t t = step + 1; t <= history.last_step; ++t) {
    const auto rate = static_cast<double>(history.RunOf(t)->learning_rate);
    const double alpha = rate * std::sqrt(1.0 - std::pow(double{p.beta_2}, t)) /
                         (1.0 - std::pow(double{p.beta_1}, t));
    for (int i = 0; i < kSumDim; ++i) {
      row->w[i] -= row->w[i] * wd * rate;
      switch (segment.averages) {
        case Averages::kNone:
          break;
        case Averages::kShrinking:
          row->m[i] *= static_cast<double>(p.rho);
          break;
        case Averages::kVelocity:
          row->m[i] *= static_cast<double>(p.momentum);
          row->w[i] +=
              row->m[i] * (is_nesterov ? static_cast<double>(p.momentum) : 1.0);
          break;
        case Averages::kMoments:
        case Averages::kMomentsAndLargest: {
          row->m[i] *= keep_1;
          row->v[i] *= keep_2;
          const double v = segment.averages == Averages::kMoments
                               ? row->v[i]
                               : row->largest[i];
          row->w[i] -= row->m[i] * alpha / (std::sqrt(v) + double{p.epsilon});
          break;
        }
      }
    }
  }
}

double Norm(const std::vector<double>& x, const std::vector<double>& y) {
  double sum = 0.0;
  for (size_t i = 0; i < x.size(); ++i) sum += (x[i] - y[i]) * (x[i] - y[i]);
  return std::sqrt(sum);
}

struct SumCase {
  std::string name;
  OptimizerConfig optimizer;
};

class MissedSumsTest : public testing::TestWithParam<SumCase> {
 protected:
  MissedSumsTest() : random_(seed_) { RecordProperty("seed", seed_); }

  double LogUniform(double low, double high) {
    return std::exp(std::uniform_real_distribution<double>(
        std::log(low), std::log(high))(random_));
  }

  // Rates of one kind, from the first step on.
  float RateOf(int kind, uint32_t step) {
    switch (kind) {
      case 0:
        return 0.001f;
      case 1:
        return step / 37 % 2 == 0 ? 0.001f : 0.01f;
      case 2:
        return 0.01f * static_cast<float>(std::min(step, 200u)) / 200.0f;
      default:
        return 0.001f *
               (0.5f + 0.5f * std::cos(static_cast<float>(step) / 997.0f));
    }
  }

  // Draws a row at step `step`, and expects the history's rest of it.
  void ExpectSum(const Optimizer& optimizer, const StepHistory& history,
                 uint32_t step) {
    const SegmentStep& segment = optimizer.segments()[0];
    std::normal_distribution<double> normal;
    std::uniform_real_distribution<double> uniform(0.02, 1.5);
    const double scale = LogUniform(1e-6, 1.0);
    std::vector<float> floats(
        static_cast<size_t>(kSumDim + optimizer.slot_floats()));
    optimizer.InitSlots(floats.data() + kSumDim, step);
    Row row;
    for (int i = 0; i < kSumDim; ++i) {
      const double g = normal(random_) * scale;
      const int moments = segment.num_slots / kSumDim;
      float* const w = floats.data() + i;
      w[0] = static_cast<float>(normal(random_) * 0.05);
      if (moments > 0) {
        w[kSumDim] = static_cast<float>(g * std::min(1.0, uniform(random_)));
      }
      for (int k = 2; k <= moments; ++k) {
        // The largest v is at least v.
        const double root = g * uniform(random_) * (k - 1);
        w[k * kSumDim] = static_cast<float>(root * root);
      }
      row.w.push_back(double{w[0]});
      row.m.push_back(double{moments > 0 ? w[kSumDim] : 0.0f});
      row.v.push_back(double{moments > 1 ? w[2 * kSumDim] : 0.0f});
      if (moments > 2)
        w[3 * kSumDim] = std::max(w[2 * kSumDim], w[3 * kSumDim]);
      row.largest.push_back(double{moments > 2 ? w[3 * kSumDim] : 0.0f});
    }
    const std::vector<double> before = row.w;
    const auto* const sgd =
        std::get_if<SgdConfig>(&GetParam().optimizer.segments[0].rule);
    TakeSteps(segment, sgd != nullptr && sgd->nesterov, history, step, &row);
    const std::vector<float> before_floats = floats;
    std::vector<float> read = floats;

    optimizer.CatchUp(history, floats.data(), floats.data() + kSumDim);
    optimizer.CatchUp(history, read.data(), read.data() + kSumDim,
                      /*writes_slots=*/false);

    EXPECT_TRUE(
        std::equal(read.begin(), read.begin() + kSumDim, floats.begin()));
    const double size =
        Norm(before, std::vector<double>(kSumDim)) + Norm(row.w, before);
    const double error = Norm(
        row.w, std::vector<double>(floats.begin(), floats.begin() + kSumDim));
    worst_ = std::max(worst_, error / size);
    EXPECT_LE(error, 1e-6 * size)
        << "scale " << scale << ", steps " << step << " to "
        << history.last_step << ", epsilon " << segment.params.epsilon;
    const auto expect_slots = [&](int k, const std::vector<double>& slots) {
      for (int i = 0; i < kSumDim; ++i) {
        EXPECT_NEAR(double{floats[k * kSumDim + i]}, slots[i],
                    2e-5 * std::fabs(slots[i]) + 1e-29);
      }
    };
    if (segment.num_slots >= kSumDim) expect_slots(1, row.m);
    if (segment.num_slots >= 2 * kSumDim &&
        segment.averages != Averages::kShrinking) {
      expect_slots(2, row.v);
    }
    if (segment.params.num_corrections > 0) {
      EXPECT_EQ(floats[kSumDim + segment.num_slots - 1],
                static_cast<float>(history.last_step));
    }
    EXPECT_EQ(DenseStepOfSlot(&floats.back()), history.last_step);
  }

  const int seed_ = static_cast<int>(std::random_device()() % 1000000);
  std::mt19937 random_;
  double worst_ = 0.0;
  std::unique_ptr<Optimizer> scalar_;
};

TEST_P(MissedSumsTest, EqualTheStepsInDoubles) {
  SCOPED_TRACE(testing::Message() << "seed " << seed_);
  for (int kind = 0; kind < 4; ++kind) {
    OptimizerConfig config = GetParam().optimizer;
    config.is_dense = true;
    const auto epsilon = static_cast<float>(LogUniform(1e-8, 1e-3));
    std::visit(
        [&](auto& rule) {
          using Rule = std::decay_t<decltype(rule)>;
          if constexpr (std::is_base_of_v<AdamConfig, Rule> ||
                        std::is_same_v<Rule, AdamWConfig>) {
            rule.epsilon = epsilon;
            if (GetParam().name == "AdamRandomBetas") {
              rule.beta_1 = 1.0f - static_cast<float>(LogUniform(0.01, 1.0));
              rule.beta_2 = 1.0f - static_cast<float>(LogUniform(1e-4, 0.5));
            }
          }
        },
        config.segments[0].rule);
    const Optimizer optimizer(config, kSumDim);
    const MissedPlan& plan = optimizer.segments()[0].missed;
    if (GetParam().name == "AdamRandomBetas" &&
        plan.way == MissedPlan::Way::kSteps) {
      continue;
    }
    ASSERT_EQ(plan.way, MissedPlan::Way::kSum);
    scalar_ = std::make_unique<Optimizer>(config, kSumDim, SimdLevel::kScalar);
    Log log(&optimizer);
    const auto last = static_cast<uint32_t>(LogUniform(1.0, 30000.0));
    const uint32_t forgotten =
        std::uniform_int_distribution<uint32_t>(0, 2 * last)(random_);
    while (log.last_step() < last) {
      log.Add(RateOf(kind, log.last_step() + 1));
      if (log.last_step() == forgotten) log.Forget();
    }
    const StepHistory history = log.Now();
    for (int row = 0; row < 40; ++row) {
      const auto gap = static_cast<uint32_t>(LogUniform(1.0, 10001.0));
      ASSERT_NO_FATAL_FAILURE(
          ExpectSum(optimizer, history, last - std::min(last, gap)));
    }
  }
  std::printf("largest error over the size of row and move: %.1e\n", worst_);
}

TEST_P(MissedSumsTest, AreMadeAgainForStepsOfLongAgo) {
  SCOPED_TRACE(testing::Message() << "seed " << seed_);
  OptimizerConfig config = GetParam().optimizer;
  config.is_dense = true;
  const Optimizer optimizer(config, kSumDim);
  Log log(&optimizer);
  constexpr uint32_t kLast =
      MissedSums::kKeptSteps + 6 * MissedBlock::kSteps + 5;
  while (log.last_step() < kLast) log.Add(RateOf(3, log.last_step() + 1));
  const StepHistory history = log.Now();
  for (const uint32_t step : {0u, 1u, 1023u, 1024u, 2500u, 3583u, 3584u}) {
    ASSERT_NO_FATAL_FAILURE(ExpectSum(optimizer, history, step));
  }
}

std::vector<SumCase> SumCases() {
  StepOptions decay;
  decay.weight_decay = 0.3f;
  return {
      {"SgdDecay", {SgdConfig{}, decay}},
      {"AdagradDecay", {AdagradConfig{}, decay}},
      {"Rmsprop", RmspropConfig{}},
      {"RmspropCentered", RmspropConfig{0.9f, 0.0f, 1e-7f, true}},
      {"AdadeltaDecay", {AdadeltaConfig{}, decay}},
      {"Momentum", SgdConfig{0.9f}},
      {"LongMomentum", SgdConfig{0.9995f}},
      {"Nesterov", SgdConfig{0.95f, true}},
      {"MomentumDecay", {SgdConfig{0.9f}, decay}},
      {"NesterovDecay", {SgdConfig{0.9f, true}, decay}},
      {"Adam", AdamConfig{}},
      {"AdamDecay", {AdamConfig{}, decay}},
      {"AdamBetas9_99", AdamConfig{0.9f, 0.99f}},
      {"AdamBetas95_999", AdamConfig{0.95f, 0.999f}},
      {"AdamBetas99_999", AdamConfig{0.99f, 0.999f}},
      {"AdamBetas5_9", AdamConfig{0.5f, 0.9f}},
      {"AdamBetas0_99", AdamConfig{0.0f, 0.99f}},
      {"AdamRandomBetas", AdamConfig{}},
      {"AdamW", AdamWConfig{}},
      {"AdamWFast", AdamWConfig{0.5f}},
      {"AmsGrad", AmsGradConfig{}},
      {"AmsGradDecay", {AmsGradConfig{}, decay}},
  };
}

INSTANTIATE_TEST_SUITE_P(Rules, MissedSumsTest, testing::ValuesIn(SumCases()),
                         [](const testing::TestParamInfo<SumCase>& info) {
                           return info.param.name;
                         });

TEST(MissedSums, ARateThatWouldUndoTheRowsEndsThem) {
  OptimizerConfig config = AdamWConfig{0.5f};
  config.is_dense = true;
  const Optimizer optimizer(config, kSumDim);
  Log log(&optimizer);
  log.Add(0.1f);
  EXPECT_NE(log.Now().moments, nullptr);
  log.Add(2.0f);
  log.Add(0.1f);

  const StepHistory history = log.Now();

  EXPECT_EQ(history.moments, nullptr);
  std::vector<float> row(kSumDim + optimizer.slot_floats(), 0.0f);
  row[0] = 1.0f;
  optimizer.CatchUp(history, row.data(), row.data() + kSumDim);
  EXPECT_EQ(row[0], 0.0f);  // As the step with the factor of 0 leaves it.
}

MissedPlan::Way WayOf(OptimizerConfig config) {
  config.is_dense = true;
  return Optimizer(config, kSumDim).segments()[0].missed.way;
}

TEST(MissedSums, RulesThatNeedTheirStepsTakeThem) {
  StepOptions options;
  EXPECT_EQ(WayOf({SgdConfig{}, options}), MissedPlan::Way::kNothing);
  EXPECT_EQ(WayOf({AdagradConfig{}, options}), MissedPlan::Way::kNothing);
  EXPECT_EQ(WayOf(AdamConfig{0.9f, 0.95f}), MissedPlan::Way::kSteps);
  EXPECT_EQ(WayOf(AdamConfig{0.95f, 0.9f}), MissedPlan::Way::kSteps);
  EXPECT_EQ(WayOf(SgdConfig{1.0f}), MissedPlan::Way::kSteps);
  options.l2 = 0.1f;
  EXPECT_EQ(WayOf({AdamConfig{}, options}), MissedPlan::Way::kSteps);
  options = StepOptions();
  options.max_norm = 1.0f;
  EXPECT_EQ(WayOf({SgdConfig{0.9f}, options}), MissedPlan::Way::kSteps);
  options = StepOptions();
  options.min_weight = -1.0f;
  EXPECT_EQ(WayOf({AdamConfig{}, options}), MissedPlan::Way::kSteps);
  options = StepOptions();
  options.clip_norm = 1.0f;
  EXPECT_EQ(WayOf({AdamConfig{}, options}), MissedPlan::Way::kSum);
}

}  // namespace
}  // namespace tfswitch
