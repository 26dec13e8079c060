// The rules and options that Keras does not define bit by bit: golden vectors,
// segments, and equality of the instruction sets.

#include <cmath>
#include <cstring>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "cc/optimizer/optimizer.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tfswitch {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::FloatNear;
using ::testing::Pointwise;

using Floats = std::vector<float>;

struct Push {
  Floats gradient;
  StepInput input;
};

struct Golden {
  std::string name;
  OptimizerConfig config;
  Floats start;
  std::vector<Push> pushes;
  Floats expected;  // The row: embedding and slots.
  float tolerance;
};

std::ostream& operator<<(std::ostream& os, const Golden& golden) {
  return os << golden.name;
}

StepInput Input(float learning_rate, float count = 1.0f, float shows = 1.0f,
                int64_t global_step = 0) {
  StepInput input;
  input.learning_rate = learning_rate;
  input.count = count;
  input.shows = shows;
  input.global_step = global_step;
  return input;
}

// The published formulas on w = [0.01, -0.02] with two gradients, to the seven
// decimals that were noted.
constexpr float kNoted = 1e-6f;
const Floats kSmallStart = {0.01f, -0.02f};
const Floats kFirst = {0.4f, -0.2f};
const Floats kSecond = {0.3f, 0.6f};

template <typename Config>
Config Ftrl(float l1, float l2, float shrinkage = 0.0f, float beta = 0.0f,
            float power = -0.5f) {
  Config config;
  config.learning_rate_power = power;
  config.l1_regularization_strength = l1;
  config.l2_regularization_strength = l2;
  config.l2_shrinkage_regularization_strength = shrinkage;
  config.beta = beta;
  return config;
}

std::vector<Golden> PublishedGoldens() {
  const auto shown = [](int n) {
    std::vector<Push> pushes = {{kFirst, Input(0.05f, 1.0f, 2.0f)},
                                {kSecond, Input(0.05f, 1.0f, 1.0f)}};
    pushes.resize(n);
    return pushes;
  };
  const auto plain = [](int n, float learning_rate) {
    std::vector<Push> pushes = {{kFirst, Input(learning_rate)},
                                {kSecond, Input(learning_rate)}};
    pushes.resize(n);
    return pushes;
  };
  const auto decaying = [](int n) {
    std::vector<Push> pushes = {{kFirst, Input(0.1f, 1.0f, 1.0f, 1)},
                                {kSecond, Input(0.1f, 1.0f, 1.0f, 35)}};
    for (const int64_t step : {36, 37, 38}) {
      pushes.push_back({{0.1f, 0.1f}, Input(0.1f, 1.0f, 1.0f, step)});
    }
    pushes.resize(n);
    return pushes;
  };
  const AdagradDecayConfig compat{0.1f, 10, 0.9f, true};
  const AdagradDecayConfig closed{0.1f, 10, 0.9f, false};
  const FtrlConfig ftrl = Ftrl<FtrlConfig>(0.05f, 0.01f);
  const GroupFtrlConfig group = Ftrl<GroupFtrlConfig>(0.05f, 0.01f);
  return {
      {"PaddleAdagrad1",
       PaddleAdagradConfig{},
       kSmallStart,
       shown(1),
       {0.0f, -0.015f, 0.025f},
       kNoted},
      {"PaddleAdagrad2",
       PaddleAdagradConfig{},
       kSmallStart,
       shown(2),
       {-0.0149379f, -0.0448758f, 0.25f},
       kNoted},
      {"PaddleStdAdagrad1",
       PaddleStdAdagradConfig{},
       kSmallStart,
       shown(1),
       {0.0f, -0.015f, 0.04f, 0.01f},
       kNoted},
      {"PaddleStdAdagrad2",
       PaddleStdAdagradConfig{},
       kSmallStart,
       shown(2),
       {-0.0149010f, -0.0449501f, 0.13f, 0.37f},
       kNoted},
      // Paddle's Adam is Keras's with another epsilon: powers of the row.
      {"PaddleAdam1",
       AdamConfig{0.9f, 0.999f, 1e-8f},
       kSmallStart,
       plain(1, 0.001f),
       {0.009f, -0.019f, 0.04f, -0.02f, 1.6e-4f, 4e-5f, 1.0f},
       kNoted},
      {"PaddleAdam2",
       AdamConfig{0.9f, 0.999f, 1e-8f},
       kSmallStart,
       plain(2, 0.001f),
       {0.0080174f, -0.0194942f, 0.066f, 0.042f, 2.4984e-4f, 3.9996e-4f, 2.0f},
       kNoted},
      {"PaddleSharedAdam1",
       PaddleSharedAdamConfig{},
       kSmallStart,
       plain(1, 0.001f),
       {0.009f, -0.019f, 0.01f, 1e-4f, 1.0f},
       kNoted},
      {"PaddleSharedAdam2",
       PaddleSharedAdamConfig{},
       kSmallStart,
       plain(2, 0.001f),
       {0.0083340f, -0.0197571f, 0.054f, 3.249e-4f, 2.0f},
       kNoted},
      {"Ftrl1",
       ftrl,
       kSmallStart,
       plain(1, 0.1f),
       {-0.0645890f, 0.0367956f, 0.26f, 0.14f, 0.3806326f, -0.1884124f},
       kNoted},
      {"Ftrl2",
       ftrl,
       kSmallStart,
       plain(2, 0.1f),
       {-0.1151274f, -0.0337157f, 0.35f, 0.5f, 0.7334057f, 0.2890800f},
       kNoted},
      {"GroupFtrl1",
       group,
       kSmallStart,
       plain(1, 0.1f),
       {-0.0656028f, 0.0441910f, 0.26f, 0.14f, 0.3806326f, -0.1884124f},
       kNoted},
      {"GroupFtrl2",
       group,
       kSmallStart,
       plain(2, 0.1f),
       {-0.1157654f, -0.0349051f, 0.35f, 0.5f, 0.7342340f, 0.2644578f},
       kNoted},
      {"AdagradDecayCompat1",
       compat,
       kSmallStart,
       decaying(1),
       {-0.0684465f, 0.0334522f, 0.26f, 0.14f, 0.0f},
       kNoted},
      {"AdagradDecayCompat2",
       compat,
       kSmallStart,
       decaying(2),
       {-0.1211511f, -0.0526140f, 0.324f, 0.486f, 1.0f},
       kNoted},
      // One decay per step of the row, until it has caught up.
      {"AdagradDecayCompat3",
       compat,
       kSmallStart,
       decaying(3),
       {-0.1393600f, -0.0675644f, 0.3016f, 0.4474f, 2.0f},
       kNoted},
      {"AdagradDecayCompat4",
       compat,
       kSmallStart,
       decaying(4),
       {-0.1582098f, -0.0831314f, 0.28144f, 0.41266f, 3.0f},
       kNoted},
      {"AdagradDecayCompat5",
       compat,
       kSmallStart,
       decaying(5),
       {-0.1767334f, -0.0985131f, 0.29144f, 0.42266f, 3.0f},
       kNoted},
      {"AdagradDecayClosed2",
       closed,
       kSmallStart,
       decaying(2),
       {-0.1251878f, -0.0548155f, 0.27954f, 0.46206f, 3.0f},
       kNoted},
      {"AdagradDecayClosed5",
       closed,
       kSmallStart,
       decaying(5),
       {-0.1800173f, -0.0980288f, 0.30954f, 0.49206f, 3.0f},
       kNoted},
  };
}

// From a NumPy float64 program that was written from the formulas alone: three
// steps, with a learning rate that changes.
constexpr float kRounding = 3e-6f;

std::vector<Golden> NumpyGoldens() {
  const Floats start = {0.5f, -1.0f, 2.0f, 0.0f, 0.25f};
  const std::vector<Push> pushes = {
      {{0.1f, -0.2f, 0.3f, 1.5f, -0.01f}, Input(0.1f, 1.0f, 2.0f, 3)},
      {{-0.4f, 0.2f, 0.0f, -2.5f, 0.02f}, Input(0.05f, 2.0f, 1.0f, 25)},
      {{0.05f, 0.7f, -0.6f, 0.5f, 0.03f}, Input(0.2f, 3.0f, 0.0f, 47)}};
  std::vector<Golden> goldens;
  const auto add = [&](const char* name, const OptimizerConfig& config,
                       const Floats& expected) {
    goldens.push_back({name, config, start, pushes, expected, kRounding});
  };
  add("RowwiseAdagrad", RowwiseAdagradConfig{},
      {0.494560607f, -1.07787852f, 2.04357063f, -0.175032804f, 0.246432169f,
       2.08878f});
  add("AdagradDecay", AdagradDecayConfig{0.1f, 10, 0.9f, false},
      {0.487409608f, -1.15070975f, 2.10354584f, -0.0922689713f, 0.231115869f,
       0.2131f, 0.614254f, 0.484659f, 6.854335f, 0.1009f, 4.0f});
  add("AdagradDecayCompat", AdagradDecayConfig{0.1f, 10, 0.9f, true},
      {0.48850919f, -1.14617388f, 2.09857007f, -0.0904851731f, 0.231115869f,
       0.2365f, 0.6394f, 0.5139f, 7.7785f, 0.1009f, 2.0f});
  add("AmsGrad", AmsGradConfig{},
      {0.49845854f,    -1.02414957f,   1.93452182f,
       -0.0622000147f, 0.195405486f,   -0.0229f,
       0.0718f,        -0.0357f,       -0.0535f,
       0.00399f,       0.00017232001f, 0.00056988004f,
       0.00044982009f, 0.00873925225f, 1.3994001e-06f,
       0.00017232001f, 0.00056988004f, 0.00044982009f,
       0.00873925225f, 1.3994001e-06f, 3.0f});
  const Floats v = {0.01546f, 0.05584f, 0.04329f, 0.76975f, 0.0001341f};
  const Floats q = {-0.0229f, 0.0718f, -0.0357f, -0.0535f, 0.00399f};
  const auto join = [](Floats a, const Floats& b, const Floats& c = {}) {
    a.insert(a.end(), b.begin(), b.end());
    a.insert(a.end(), c.begin(), c.end());
    return a;
  };
  add("Rmsprop", RmspropConfig{},
      join({0.257208228f, -1.39093772f, 2.26052313f, -0.29279435f,
            -0.0959878863f},
           v));
  add("RmspropCentered", RmspropConfig{0.9f, 0.0f, 1e-7f, true},
      join({0.243275586f, -1.40326329f, 2.25209999f, -0.309001016f,
            -0.11469731f},
           v, q));
  add("RmspropMomentum", RmspropConfig{0.9f, 0.9f, 1e-7f, false},
      join({-0.145053088f, -0.953431397f, 1.71977665f, -0.709872533f,
            0.313637523f},
           v,
           {0.19809607f, 0.43954953f, -0.320606067f, 0.24645233f,
            0.391501821f}));
  add("RmspropCenteredMomentum", RmspropConfig{0.9f, 0.9f, 1e-7f, true},
      join(join({-0.18411866f, -0.936534786f, 1.6821035f, -0.754329444f,
                 0.322109255f},
                v,
                {0.209236164f, 0.455122013f, -0.315432928f, 0.259520079f,
                 0.413231373f}),
           q));
  add("Adadelta", AdadeltaConfig{},
      {0.499887236f, -1.00038492f, 2.00021534f, -0.000146600211f, 0.249620681f,
       0.00817625f, 0.028205f, 0.02206125f, 0.41090625f, 6.85125e-05f,
       2.75429714e-07f, 4.46143072e-07f, 2.4934805e-07f, 2.42295173e-07f,
       4.71104724e-07f});
  const Floats n = {0.2725f, 0.67f, 0.55f, 8.85f, 0.1014f};
  add("Ftrl", Ftrl<FtrlConfig>(0.05f, 0.01f, 0.02f, 0.1f),
      join({0.0819406921f, -0.292359498f, 0.666681572f, -0.125565663f, 0.0f}, n,
           {-0.306480645f, 1.39855975f, -2.86879585f, 1.98301743f,
            0.0496048141f}));
  add("FtrlPower", Ftrl<FtrlConfig>(0.05f, 0.01f, 0.02f, 0.1f, -0.3f),
      join({0.0645526695f, -0.246354186f, 0.515022176f, -0.0715143293f, 0.0f},
           n,
           {-0.302088883f, 1.27043048f, -2.47012112f, 0.774961929f,
            0.0496242411f}));
  add("GroupFtrl", Ftrl<GroupFtrlConfig>(0.05f, 0.01f, 0.02f, 0.1f),
      join({0.0852680409f, -0.302926371f, 0.669918259f, -0.129361632f,
            -0.0231415303f},
           n,
           {-0.270460145f, 1.41596361f, -2.87031136f, 2.01805215f,
            0.0495316303f}));
  add("GroupFtrlPower", Ftrl<GroupFtrlConfig>(0.05f, 0.01f, 0.02f, 0.1f, -0.3f),
      join({0.07007772f, -0.253954433f, 0.516660028f, -0.0766467011f,
            -0.0160453812f},
           n,
           {-0.278455793f, 1.28010532f, -2.47031788f, 0.790591978f,
            0.0495732338f}));
  add("PaddleAdagrad", PaddleAdagradConfig{},
      {0.50636492f, -1.11528207f, 2.08397899f, -0.034900182f, 0.244570392f,
       1.630265f});
  add("PaddleStdAdagrad", PaddleStdAdagradConfig{},
      {0.505251977f, -1.13883109f, 2.10455252f, -0.0155852144f, 0.243500429f,
       0.165f, 0.54f, 0.3825f, 7.0625f, 0.001325f});
  add("PaddleSharedAdam", PaddleSharedAdamConfig{},
      {0.419704147f, -0.967875871f, 1.95447837f, -0.0947217563f, 0.349717784f,
       -0.007262f, 0.00198653436f, 3.0f});
  add("Lion", LionConfig{},
      {0.25f, -1.15f, 2.05f, -0.25f, 0.1f, -0.0024799f, 0.0070198f, -0.0030597f,
       -0.0050485f, 0.00039999f});

  const auto option = [](auto StepOptions::*field, float value) {
    StepOptions options;
    options.*field = value;
    return options;
  };
  const auto adagrad = [&](const char* name, const StepOptions& options,
                           const Floats& expected) {
    add(name, {AdagradConfig{}, options}, expected);
  };
  adagrad(
      "L2", option(&StepOptions::l2, 0.1f),
      {0.453615063f, -1.10377619f, 2.01017174f, -0.0883413738f, 0.205090322f,
       0.257873151f, 0.568286321f, 0.55478401f, 8.89353288f, 0.105105231f});
  StepOptions cowclip = option(&StepOptions::cowclip_r, 0.2f);
  cowclip.cowclip_zeta = 0.1f;
  adagrad("CowClip", cowclip,
          {0.482749394f, -1.17326439f, 2.14819195f, -0.125046915f, 0.230928054f,
           0.123889579f, 0.59868146f, 0.468001757f, 1.3508445f, 0.100960142f});
  adagrad("ClipValue", option(&StepOptions::clip_value, 0.3f),
          {0.481167674f, -1.08558802f, 2.04456462f, -0.139116751f, 0.231164077f,
           0.2025f, 0.27f, 0.28f, 0.37f, 0.1014f});
  adagrad(
      "ClipNorm", option(&StepOptions::clip_norm, 0.4f),
      {0.489831377f, -1.11628254f, 2.09103931f, -0.103897137f, 0.243100355f,
       0.10500069f, 0.174723007f, 0.158227136f, 0.441902044f, 0.100147122f});
  adagrad("WeightDecay", option(&StepOptions::weight_decay, 0.05f),
          {0.48046729f, -1.12417369f, 2.05901659f, -0.0880447726f, 0.226803035f,
           0.2725f, 0.67f, 0.55f, 8.85f, 0.1014f});
  adagrad("MinWeight", option(&StepOptions::min_weight, -0.95f),
          {0.489182368f, -0.95f, 2.09298325f, -0.088839195f, 0.231164077f,
           0.2725f, 0.67f, 0.55f, 8.85f, 0.1014f});
  adagrad("MaxWeight", option(&StepOptions::max_weight, 1.9f),
          {0.489182368f, -1.1411552f, 1.9f, -0.088839195f, 0.231164077f,
           0.2725f, 0.67f, 0.55f, 8.85f, 0.1014f});
  StepOptions all;
  all.l2 = 0.1f;
  all.cowclip_r = 0.5f;
  all.cowclip_zeta = 1e-3f;
  all.clip_value = 0.3f;
  all.clip_norm = 0.4f;
  all.weight_decay = 0.05f;
  all.min_weight = -0.95f;
  all.max_weight = 1.9f;
  adagrad(
      "AllOptions", all,
      {0.459975962f, -0.95f, 1.9f, -0.119467294f, 0.212428501f, 0.179879724f,
       0.187832379f, 0.23138305f, 0.278086553f, 0.102818294f});
  return goldens;
}

// w' = w - g' with SGD at a learning rate of 1.
std::vector<Golden> CowClipGoldens() {
  StepOptions options;
  options.cowclip_r = 1.0f;
  const OptimizerConfig config(SgdConfig{}, options);
  constexpr float kExact = 1e-9f;
  return {
      {"CowClipByTheRowsNorm",
       config,
       {0.003f, 0.004f},
       {{{0.3f, 0.4f}, Input(1.0f, 2.0f)}},
       {0.003f - 0.006f, 0.004f - 0.008f},
       kExact},
      {"CowClipBelowTheThreshold",
       config,
       {0.003f, 0.004f},
       {{{0.003f, 0.004f}, Input(1.0f, 2.0f)}},
       {0.0f, 0.0f},
       kExact},
      {"CowClipByTheFloor",
       config,
       {0.0f, 0.0f},
       {{{0.3f, 0.4f}, Input(1.0f, 3.0f)}},
       {-2.5456e-5f, -3.3941e-5f},
       kExact},
      {"CowClipOfAZeroGradient",
       config,
       {0.003f, 0.004f},
       {{{0.0f, 0.0f}, Input(1.0f, 2.0f)}},
       {0.003f, 0.004f},
       kExact},
      // A count that nobody sent is not a threshold of 0.
      {"CowClipWithoutACount",
       config,
       {0.003f, 0.004f},
       {{{0.3f, 0.4f}, Input(1.0f, 0.0f)}},
       {0.0f, 0.0f},
       kExact},
  };
}

class GoldenTest
    : public ::testing::TestWithParam<std::tuple<SimdLevel, Golden>> {};

TEST_P(GoldenTest, RowIsAsTheFormulaSays) {
  const auto& [level, golden] = GetParam();
  if (level == SimdLevel::kAvx2 && BestSimdLevel() != SimdLevel::kAvx2) {
    GTEST_SKIP() << "no AVX2 here";
  }
  const int dim = static_cast<int>(golden.start.size());
  ASSERT_TRUE(ValidateOptimizerConfig(golden.config, dim).ok());
  const Optimizer optimizer(golden.config, dim, level);
  Floats row = golden.start;
  row.resize(dim + optimizer.slot_floats());
  optimizer.InitSlots(row.data() + dim);

  for (const Push& push : golden.pushes) {
    optimizer.Step(row.data(), push.gradient.data(), push.input);
  }

  EXPECT_THAT(row, Pointwise(FloatNear(golden.tolerance), golden.expected));
}

const auto kName = [](const auto& info) {
  return std::get<1>(info.param).name +
         (std::get<0>(info.param) == SimdLevel::kAvx2 ? "Avx2" : "Scalar");
};
const auto kLevels = ::testing::Values(SimdLevel::kScalar, SimdLevel::kAvx2);
INSTANTIATE_TEST_SUITE_P(
    Published, GoldenTest,
    ::testing::Combine(kLevels, ::testing::ValuesIn(PublishedGoldens())),
    kName);
INSTANTIATE_TEST_SUITE_P(
    Numpy, GoldenTest,
    ::testing::Combine(kLevels, ::testing::ValuesIn(NumpyGoldens())), kName);
INSTANTIATE_TEST_SUITE_P(
    CowClip, GoldenTest,
    ::testing::Combine(kLevels, ::testing::ValuesIn(CowClipGoldens())), kName);

// Each rule with its defaults, and the variants that have other kernels.
std::vector<OptimizerConfig> AllRules() {
  std::vector<OptimizerConfig> configs;
  ForEachKind<RuleConfig>(
      [&](const auto& rule) { configs.emplace_back(rule); });
  configs.emplace_back(SgdConfig{0.9f, false});
  configs.emplace_back(SgdConfig{0.9f, true});
  configs.emplace_back(AdagradDecayConfig{0.1f, 3, 0.5f, true});
  configs.emplace_back(AdagradDecayConfig{0.1f, 3, 0.5f, false});
  configs.emplace_back(RmspropConfig{0.9f, 0.9f, 1e-7f, false});
  configs.emplace_back(RmspropConfig{0.9f, 0.0f, 1e-7f, true});
  configs.emplace_back(RmspropConfig{0.9f, 0.9f, 1e-7f, true});
  configs.emplace_back(Ftrl<FtrlConfig>(0.5f, 0.1f, 0.1f, 0.1f));
  configs.emplace_back(Ftrl<FtrlConfig>(0.5f, 0.1f, 0.1f, 0.1f, -0.3f));
  configs.emplace_back(Ftrl<GroupFtrlConfig>(0.5f, 0.1f, 0.1f, 0.1f));
  configs.emplace_back(Ftrl<GroupFtrlConfig>(0.5f, 0.1f, 0.1f, 0.1f, -0.3f));
  return configs;
}

// Each option by itself, and all together.
std::vector<StepOptions> AllOptions() {
  std::vector<StepOptions> result;
  StepOptions all;
  all.l2 = 0.01f;
  all.cowclip_r = 0.5f;
  all.cowclip_zeta = 1e-3f;
  all.clip_value = 0.8f;
  all.clip_norm = 2.0f;
  all.weight_decay = 0.05f;
  all.min_weight = -0.9f;
  all.max_weight = 0.9f;
  all.min_norm = 1.2f;
  all.max_norm = 1.5f;
  ForEachField(all, [&](const std::string& name, const auto& value) {
    StepOptions one;
    ForEachField(one, [&](const std::string& its_name, auto& field) {
      if (its_name == name) field = value.value;
    });
    result.push_back(one);
  });
  result.push_back(all);
  return result;
}

std::vector<OptimizerConfig> AllRulesAndOptions() {
  std::vector<OptimizerConfig> configs = AllRules();
  for (const OptimizerConfig& rule : AllRules()) {
    StepOptions options = AllOptions().back();
    if (std::holds_alternative<AdamWConfig>(rule.segments[0].rule)) {
      options.weight_decay = 0.0f;
    }
    configs.push_back(rule);
    configs.back().segments[0].options = options;
  }
  for (const StepOptions& options : AllOptions()) {
    configs.emplace_back(SgdConfig{}, options);
  }
  return configs;
}

// Both rows after `steps` random steps.
std::pair<Floats, Floats> RunBoth(const OptimizerConfig& config, int dim,
                                  int steps, std::mt19937* random) {
  std::normal_distribution<float> normal;
  const Optimizer scalar(config, dim, SimdLevel::kScalar);
  const Optimizer avx2(config, dim, SimdLevel::kAvx2);
  Floats row(dim + scalar.slot_floats());
  for (int i = 0; i < dim; ++i) row[i] = normal(*random);
  scalar.InitSlots(row.data() + dim);
  Floats other = row;
  Floats gradient(dim);
  for (int step = 0; step < steps; ++step) {
    for (float& g : gradient) g = normal(*random);
    const float count = static_cast<float>(1 + step % 3);
    const StepInput input = Input(0.05f, count, count, 2 * step);
    scalar.Step(row.data(), gradient.data(), input);
    avx2.Step(other.data(), gradient.data(), input);
  }
  return {row, other};
}

TEST(OptimizerLevelsTest, ScalarAndAvx2GiveTheSameBitsForEveryDim) {
  if (BestSimdLevel() != SimdLevel::kAvx2) GTEST_SKIP() << "no AVX2 here";
  const uint32_t seed = std::random_device()();
  SCOPED_TRACE(::testing::Message() << "seed " << seed);
  std::mt19937 random(seed);
  const std::vector<OptimizerConfig> configs = AllRulesAndOptions();
  for (size_t i = 0; i < configs.size(); ++i) {
    for (int dim = 1; dim <= 67; ++dim) {
      const auto [row, other] = RunBoth(configs[i], dim, 12, &random);
      for (const float x : row) ASSERT_TRUE(std::isfinite(x)) << i;
      ASSERT_EQ(
          std::memcmp(row.data(), other.data(), row.size() * sizeof(float)), 0)
          << OptimizerName(configs[i]) << " (config " << i << ") dim " << dim;
    }
  }
}

TEST(OptimizerLevelsTest, SegmentsGiveTheSameBits) {
  if (BestSimdLevel() != SimdLevel::kAvx2) GTEST_SKIP() << "no AVX2 here";
  const uint32_t seed = std::random_device()();
  SCOPED_TRACE(::testing::Message() << "seed " << seed);
  std::mt19937 random(seed);
  const OptimizerConfig config(std::vector<SegmentConfig>{
      {3, 0.5f, FtrlConfig{}, {}},
      {16, 1.0f, AdagradConfig{}, AllOptions().back()},
      {0, 2.0f, RowwiseAdagradConfig{}, {}}});
  for (int dim = 20; dim <= 67; ++dim) {
    ASSERT_TRUE(ValidateOptimizerConfig(config, dim).ok());
    const auto [row, other] = RunBoth(config, dim, 12, &random);
    ASSERT_EQ(std::memcmp(row.data(), other.data(), row.size() * sizeof(float)),
              0)
        << "dim " << dim;
  }
}

TEST(OptimizerSegmentsTest, EachSegmentLearnsAsIfAlone) {
  StepOptions clipped;
  clipped.clip_norm = 0.5f;
  const OptimizerConfig config(std::vector<SegmentConfig>{
      {1, 0.25f, FtrlConfig{}, {}},
      {4, 1.0f, AdamConfig{}, clipped},
      {0, 2.0f, RowwiseAdagradConfig{{0.5f, 1e-7f}}, {}}});
  constexpr int kDim = 8;
  const Optimizer together(config, kDim);
  std::mt19937 random(7);
  std::normal_distribution<float> normal;
  Floats row(kDim + together.slot_floats());
  for (int i = 0; i < kDim; ++i) row[i] = normal(random);
  together.InitSlots(row.data() + kDim);
  struct Part {
    Optimizer optimizer;
    int begin;
    float scale;
    Floats row;
  };
  Part parts[] = {{{FtrlConfig{}, 1}, 0, 0.25f, {}},
                  {{{AdamConfig{}, clipped}, 4}, 1, 1.0f, {}},
                  {{RowwiseAdagradConfig{{0.5f, 1e-7f}}, 3}, 5, 2.0f, {}}};
  for (Part& part : parts) {
    const int dim = part.optimizer.dim();
    part.row.assign(row.begin() + part.begin, row.begin() + part.begin + dim);
    part.row.resize(dim + part.optimizer.slot_floats());
    part.optimizer.InitSlots(part.row.data() + dim);
  }

  for (int step = 0; step < 5; ++step) {
    Floats gradient(kDim);
    for (float& g : gradient) g = normal(random);
    together.Step(row.data(), gradient.data(), Input(0.1f));
    for (Part& part : parts) {
      part.optimizer.Step(part.row.data(), gradient.data() + part.begin,
                          Input(0.1f * part.scale));
    }
  }

  Floats embedding;
  Floats slots;
  for (const Part& part : parts) {
    const auto middle = part.row.begin() + part.optimizer.dim();
    embedding.insert(embedding.end(), part.row.begin(), middle);
    slots.insert(slots.end(), middle, part.row.end());
  }
  embedding.insert(embedding.end(), slots.begin(), slots.end());
  EXPECT_EQ(row, embedding);
}

TEST(OptimizerLayoutTest, EachRuleHasTheSlotsOfTheManual) {
  std::vector<std::pair<std::string, int>> found;
  ForEachKind<RuleConfig>([&](const auto& rule) {
    found.emplace_back(rule.kName, SlotFloats(rule, 16));
  });
  EXPECT_THAT(
      found,
      ElementsAre(
          std::pair("sgd", 0), std::pair("adagrad", 16), std::pair("adam", 33),
          std::pair("adamw", 33), std::pair("rowwise_adagrad", 1),
          std::pair("adagrad_decay", 17), std::pair("amsgrad", 49),
          std::pair("rmsprop", 16), std::pair("adadelta", 32),
          std::pair("ftrl", 32), std::pair("group_ftrl", 32),
          std::pair("paddle_adagrad", 1), std::pair("paddle_std_adagrad", 16),
          std::pair("paddle_shared_adam", 3), std::pair("lion", 16)));
  EXPECT_EQ(SlotFloats(RmspropConfig{0.9f, 0.5f, 1e-7f, true}, 16), 48);
  EXPECT_EQ(SlotFloats(OptimizerConfig(std::vector<SegmentConfig>{
                           {1, 1.0f, FtrlConfig{}, {}},
                           {0, 1.0f, RowwiseAdagradConfig{}, {}}}),
                       16),
            3);
}

TEST(OptimizerLayoutTest, OnlyAccumulatorsStartWithTheInitialValue) {
  const auto slots_of = [](const OptimizerConfig& config) {
    const Optimizer optimizer(config, 2);
    Floats slots(optimizer.slot_floats(), -1.0f);
    optimizer.InitSlots(slots.data());
    return slots;
  };
  EXPECT_THAT(slots_of(FtrlConfig{}), ElementsAre(0.1f, 0.1f, 0.0f, 0.0f));
  EXPECT_THAT(slots_of(AdagradDecayConfig{}), ElementsAre(0.1f, 0.1f, 0.0f));
  EXPECT_THAT(slots_of(RowwiseAdagradConfig{{0.5f, 0.0f}}), ElementsAre(0.5f));
  EXPECT_THAT(slots_of(PaddleAdagradConfig{}), ElementsAre(0.0f));
  EXPECT_THAT(slots_of(AmsGradConfig{}), Each(0.0f));
  EXPECT_THAT(
      slots_of(OptimizerConfig(std::vector<SegmentConfig>{
          {1, 1.0f, RowwiseAdagradConfig{}, {}}, {0, 1.0f, FtrlConfig{}, {}}})),
      ElementsAre(0.1f, 0.1f, 0.0f));
}

TEST(OptimizerLayoutTest, NoRuleTouchesAnythingBehindTheRow) {
  const std::vector<OptimizerConfig> configs = AllRulesAndOptions();
  for (const OptimizerConfig& config : configs) {
    for (const int dim : {1, 5, 8, 16, 19}) {
      const Optimizer optimizer(config, dim);
      const size_t row_floats = dim + optimizer.slot_floats();
      Floats memory(row_floats + 16, 7.0f);
      const Floats gradient(dim, 1.0f);
      optimizer.Step(memory.data(), gradient.data(), Input(0.1f));
      for (size_t i = row_floats; i < memory.size(); ++i) {
        ASSERT_EQ(memory[i], 7.0f) << OptimizerName(config) << " dim " << dim;
      }
    }
  }
}

TEST(OptimizerRulesTest, ScaleOfNoShowsIsOne) {
  for (const OptimizerConfig& config : std::vector<OptimizerConfig>{
           PaddleAdagradConfig{}, PaddleStdAdagradConfig{}}) {
    const Optimizer optimizer(config, 2);
    const auto run = [&](float shows) {
      Floats row = {0.5f, -0.5f};
      row.resize(2 + optimizer.slot_floats());
      optimizer.InitSlots(row.data() + 2);
      const Floats gradient = {1.0f, 2.0f};
      optimizer.Step(row.data(), gradient.data(), Input(0.1f, 1.0f, shows));
      return row;
    };
    EXPECT_EQ(run(0.0f), run(1.0f));
    EXPECT_EQ(run(-3.0f), run(1.0f));
    EXPECT_NE(run(2.0f), run(1.0f));
  }
  EXPECT_FALSE(Optimizer(PaddleAdagradConfig{3.0f, false}, 2).reads_shows());
}

TEST(OptimizerRulesTest, FtrlRestsWhenTheLearningRateIsZero) {
  for (const OptimizerConfig& config : std::vector<OptimizerConfig>{
           FtrlConfig{}, Ftrl<GroupFtrlConfig>(0.1f, 0.1f, 0.1f, 0.1f)}) {
    const Optimizer optimizer(config, 2);
    Floats row = {0.5f, -0.5f};
    row.resize(2 + optimizer.slot_floats());
    optimizer.InitSlots(row.data() + 2);
    const Floats before = row;
    const Floats gradient = {1.0f, 2.0f};
    optimizer.Step(row.data(), gradient.data(), Input(0.0f));
    EXPECT_EQ(row, before);
  }
}

TEST(OptimizerRulesTest, FtrlSetsCoordinatesToZeroAndGroupFtrlRows) {
  const Floats gradient = {0.01f, 1.0f};
  Floats row = {0.0f, 0.0f, 0.1f, 0.1f, 0.0f, 0.0f};
  Optimizer(Ftrl<FtrlConfig>(0.5f, 0.0f), 2)
      .Step(row.data(), gradient.data(), Input(0.1f));
  EXPECT_EQ(row[0], 0.0f);
  EXPECT_LT(row[1], 0.0f);

  row = {0.0f, 0.0f, 0.1f, 0.1f, 0.0f, 0.0f};
  Optimizer(Ftrl<GroupFtrlConfig>(0.5f, 0.0f), 2)
      .Step(row.data(), gradient.data(), Input(0.1f));
  EXPECT_LT(row[0], 0.0f);
  row = {0.5f, 0.5f, 0.1f, 0.1f, 0.0f, 0.0f};
  Optimizer(Ftrl<GroupFtrlConfig>(50.0f, 0.0f), 2)
      .Step(row.data(), gradient.data(), Input(0.1f));
  EXPECT_EQ(row[0], 0.0f);
  EXPECT_EQ(row[1], 0.0f);
}

TEST(OptimizerRulesTest, CenteredRmspropStaysFiniteWithConstantGradients) {
  const Optimizer optimizer(RmspropConfig{0.9f, 0.0f, 1e-7f, true}, 1);
  for (const float gradient : {0.7f, 10.0f, 333.3f}) {
    Floats row = {0.0f, 0.0f, 0.0f};
    for (int step = 0; step < 1000; ++step) {
      optimizer.Step(row.data(), &gradient, Input(1e-4f));
      ASSERT_TRUE(std::isfinite(row[0])) << gradient << " step " << step;
    }
  }
}

TEST(OptimizerRulesTest, AdagradDecayTakesAnyStep) {
  const Optimizer optimizer(AdagradDecayConfig{0.1f, 1, 0.9f, false}, 1);
  Floats row = {1.0f, 4.0f, 0.0f};
  const float gradient = 1.0f;
  for (const int64_t step :
       {std::numeric_limits<int64_t>::max(), int64_t{-5}, int64_t{0}}) {
    optimizer.Step(row.data(), &gradient, Input(0.1f, 1.0f, 1.0f, step));
    ASSERT_TRUE(std::isfinite(row[0])) << step;
    ASSERT_GT(row[1], 0.0f) << step;
  }
  // Steps of another worker that is behind undo nothing.
  row = {1.0f, 4.0f, 9.0f};
  optimizer.Step(row.data(), &gradient, Input(0.1f, 1.0f, 1.0f, 3));
  EXPECT_EQ(row[1], 5.0f);
  EXPECT_EQ(row[2], 9.0f);
}

TEST(OptimizerRulesTest, KnowsWhatItReads) {
  StepOptions cowclip;
  cowclip.cowclip_r = 1.0f;
  ForEachKind<RuleConfig>([](const auto& rule) {
    const Optimizer optimizer(rule, 4);
    const std::string name = rule.kName;
    EXPECT_FALSE(optimizer.reads_counts()) << name;
    EXPECT_EQ(optimizer.reads_shows(),
              name == "paddle_adagrad" || name == "paddle_std_adagrad")
        << name;
    EXPECT_EQ(optimizer.reads_steps(), name == "adagrad_decay") << name;
  });
  const Optimizer segments(OptimizerConfig(std::vector<SegmentConfig>{
                               {1, 1.0f, AdagradDecayConfig{}, cowclip},
                               {0, 1.0f, PaddleAdagradConfig{}, {}}}),
                           4);
  EXPECT_TRUE(segments.reads_counts());
  EXPECT_TRUE(segments.reads_shows());
  EXPECT_TRUE(segments.reads_steps());
}

TEST(OptimizerStateTest, EqualStateIsThatOfEqualSlots) {
  StepOptions options;
  options.l2 = 0.1f;
  const auto split = [](const RuleConfig& rule, int dim) {
    return OptimizerConfig(std::vector<SegmentConfig>{
        {dim, 1.0f, rule, {}}, {0, 1.0f, SgdConfig{}, {}}});
  };
  EXPECT_TRUE(HaveEqualState(AdamConfig{}, AdamWConfig{}, 8));
  EXPECT_TRUE(
      HaveEqualState(AdagradConfig{}, {AdagradConfig{0.5f}, options}, 8));
  EXPECT_TRUE(HaveEqualState(FtrlConfig{}, GroupFtrlConfig{}, 8));
  EXPECT_TRUE(HaveEqualState(SgdConfig{0.5f, false}, SgdConfig{0.9f, true}, 8));
  EXPECT_TRUE(
      HaveEqualState(split(AdamConfig{}, 2), split(AdamConfig{}, 2), 8));
  EXPECT_FALSE(HaveEqualState(SgdConfig{}, SgdConfig{0.9f}, 8));
  EXPECT_FALSE(HaveEqualState(AdagradConfig{}, SgdConfig{0.9f}, 8));
  EXPECT_FALSE(HaveEqualState(AdagradConfig{}, LionConfig{}, 8));
  EXPECT_FALSE(
      HaveEqualState(RowwiseAdagradConfig{}, PaddleAdagradConfig{}, 8));
  EXPECT_FALSE(HaveEqualState(AdamConfig{}, split(AdamConfig{}, 2), 8));
  EXPECT_FALSE(
      HaveEqualState(split(AdamConfig{}, 2), split(AdamConfig{}, 3), 8));
}

}  // namespace
}  // namespace tfswitch
