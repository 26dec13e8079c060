// Tables with dense updates against variables whose rows all take each step.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "cc/optimizer/optimizer.h"
#include "cc/table/embedding_table.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/cc/table/table_testing.h"
#include "tests/cc/testing/snapshots.h"

namespace tfswitch {
namespace {

constexpr int kVariableDim = 5;
constexpr int kVariableRows = 12;

OptimizerConfig DenseOf(OptimizerConfig config) {
  config.is_dense = true;
  return config;
}

StepOptions StepOptionsOf(float l2, float weight_decay = 0.0f) {
  StepOptions options;
  options.l2 = l2;
  options.weight_decay = weight_decay;
  return options;
}

struct DenseCase {
  std::string name;
  OptimizerConfig optimizer;
};

std::vector<DenseCase> DenseCases() {
  std::vector<DenseCase> cases;
  const auto add = [&](const std::string& name, const auto& rule) {
    cases.push_back({name, rule});
    cases.push_back({name + "L2", {rule, StepOptionsOf(0.05f)}});
    cases.push_back({name + "SmallL2", {rule, StepOptionsOf(1e-6f)}});
    if constexpr (!std::is_same_v<std::decay_t<decltype(rule)>, AdamWConfig>) {
      cases.push_back({name + "Decay", {rule, StepOptionsOf(0.0f, 0.02f)}});
    }
    StepOptions clipped = StepOptionsOf(0.1f);
    clipped.clip_value = 0.004f;
    clipped.clip_norm = 0.006f;
    cases.push_back({name + "Clipped", {rule, clipped}});
    StepOptions bounded;
    bounded.min_weight = -0.03f;
    bounded.max_weight = 0.03f;
    cases.push_back({name + "Bounded", {rule, bounded}});
    StepOptions norms;
    norms.min_norm = 0.04f;
    norms.max_norm = 0.05f;
    cases.push_back({name + "Norms", {rule, norms}});
  };
  add("Sgd", SgdConfig{});
  add("Momentum", SgdConfig{0.9f});
  add("Nesterov", SgdConfig{0.9f, true});
  add("Adagrad", AdagradConfig{});
  add("Adam", AdamConfig{});
  add("AdamOddBetas", AdamConfig{0.95f, 0.9f, 1e-3f});
  add("AdamW", AdamWConfig{});
  add("AmsGrad", AmsGradConfig{});
  std::vector<SegmentConfig> segments(2);
  segments[0].dim = 2;
  segments[0].rule = SgdConfig{0.5f};
  segments[0].learning_rate_scale = 0.25f;
  segments[1].rule = AdamConfig{};
  cases.push_back({"Segments", OptimizerConfig(segments)});
  return cases;
}

// A variable with kVariableRows rows, each of which takes each step.
class Variable {
 public:
  explicit Variable(const OptimizerConfig& config)
      : optimizer_(config, kVariableDim),
        slots_(static_cast<size_t>(kVariableRows) * optimizer_.slot_floats()) {
    const Optimizer dense(DenseOf(config), kVariableDim);
    for (const SegmentStep& segment : dense.segments()) {
      has_same_bits_ &= segment.missed.way == MissedPlan::Way::kNothing ||
                        (segment.missed.way == MissedPlan::Way::kSteps &&
                         segment.missed.settled_after > 10000);
    }
    // The first values, by way of a table that steps nothing.
    weights_ = FindOrInsertAll(MakeTable(kVariableDim, config).get(),
                               KeyRange(0, kVariableRows));
    for (int key = 0; key < kVariableRows; ++key) {
      optimizer_.InitSlots(slots_.data() + key * optimizer_.slot_floats());
    }
  }

  void Step(const std::vector<Key>& keys, const std::vector<float>& gradients,
            float learning_rate) {
    std::vector<float> all(weights_.size(), 0.0f);
    for (size_t i = 0; i < keys.size(); ++i) {
      std::copy_n(gradients.data() + i * kVariableDim, kVariableDim,
                  all.data() + keys[i] * kVariableDim);
    }
    StepInput input;
    input.learning_rate = learning_rate;
    for (int key = 0; key < kVariableRows; ++key) {
      optimizer_.Step(weights_.data() + key * kVariableDim,
                      slots_.data() + key * optimizer_.slot_floats(),
                      all.data() + key * kVariableDim, input);
    }
  }

  float weight(Key key, int i) const {
    return weights_[key * kVariableDim + i];
  }

  void ExpectEqual(const std::vector<Key>& keys,
                   const std::vector<float>& rows) const {
    for (size_t k = 0; k < keys.size(); ++k) {
      for (int i = 0; i < kVariableDim; ++i) {
        const float expected = weight(keys[k], i);
        ASSERT_NEAR(rows[k * kVariableDim + i], expected,
                    has_same_bits_ ? 0.0f : 5e-5f + 1e-4f * std::fabs(expected))
            << "key " << keys[k] << ", element " << i;
      }
    }
  }

 private:
  const Optimizer optimizer_;
  // Else there are sums, which are closer to the exact ones than thousands of
  // steps in float32: missed_sums_test.cc.
  bool has_same_bits_ = true;
  std::vector<float> weights_;
  std::vector<float> slots_;
};

class DenseUpdatesTest : public testing::TestWithParam<DenseCase> {
 protected:
  DenseUpdatesTest() : random_(seed_) { RecordProperty("seed", seed_); }

  std::vector<Key> SomeKeys(double share) {
    std::vector<Key> keys;
    for (Key key = 0; key < kVariableRows; ++key) {
      if (std::bernoulli_distribution(share)(random_)) keys.push_back(key);
    }
    std::shuffle(keys.begin(), keys.end(), random_);
    return keys;
  }

  // One push to both.
  void Push(EmbeddingTable* table, Variable* variable,
            const std::vector<Key>& keys, float learning_rate) {
    std::normal_distribution<float> normal(0.0f, 0.3f);
    std::vector<float> gradients(keys.size() * kVariableDim);
    for (float& g : gradients) g = normal(random_);
    variable->Step(keys, gradients, learning_rate);
    ASSERT_TRUE(
        table->ApplyGradients({keys, gradients, learning_rate, true}).ok());
  }

  const int seed_ = static_cast<int>(std::random_device()() % 1000000);
  std::mt19937 random_;
};

TEST_P(DenseUpdatesTest, RowsAreThoseOfAVariable) {
  SCOPED_TRACE(testing::Message() << "seed " << seed_);
  const auto table = MakeTable(kVariableDim, DenseOf(GetParam().optimizer));
  FindOrInsertAll(table.get(), KeyRange(0, kVariableRows));
  Variable variable(GetParam().optimizer);
  float learning_rate = 0.01f;
  for (int round = 0; round < 60; ++round) {
    if (std::bernoulli_distribution(0.3)(random_)) {
      learning_rate =
          std::uniform_real_distribution<float>(0.0f, 0.02f)(random_);
    }
    ASSERT_NO_FATAL_FAILURE(
        Push(table.get(), &variable, SomeKeys(0.2), learning_rate));
    const int gap = std::uniform_int_distribution<int>(0, 40)(random_) *
                    (round % 10 == 9 ? 40 : 1);
    for (int step = 0; step < gap; ++step) {
      ASSERT_NO_FATAL_FAILURE(Push(table.get(), &variable, {0}, learning_rate));
    }
    const std::vector<Key> keys = SomeKeys(0.3);
    ASSERT_NO_FATAL_FAILURE(
        variable.ExpectEqual(keys, FindOrInsertAll(table.get(), keys)));
  }
  ASSERT_NO_FATAL_FAILURE(variable.ExpectEqual(
      KeyRange(0, kVariableRows),
      FindOrInsertAll(table.get(), KeyRange(0, kVariableRows))));
}

TEST_P(DenseUpdatesTest, RowsThatAreSavedGoOnElsewhere) {
  SCOPED_TRACE(testing::Message() << "seed " << seed_);
  const TableConfig config =
      MakeConfig(kVariableDim, DenseOf(GetParam().optimizer));
  auto table = MakeTable(config);
  FindOrInsertAll(table.get(), KeyRange(0, kVariableRows));
  Variable variable(GetParam().optimizer);
  for (int round = 0; round < 6; ++round) {
    for (int step = 0; step < 20; ++step) {
      ASSERT_NO_FATAL_FAILURE(Push(table.get(), &variable, SomeKeys(0.15),
                                   0.01f / static_cast<float>(round + 1)));
    }
    auto next = MakeTable(config);
    ASSERT_TRUE(next->RestoreSteps(SnapshotOf(*table)->steps).ok());
    ASSERT_TRUE(
        table
            ->ForEachRow(
                5,
                [&](const RowChunk& chunk) {
                  variable.ExpectEqual(
                      {chunk.keys.begin(), chunk.keys.end()},
                      {chunk.embeddings.begin(), chunk.embeddings.end()});
                  return next
                      ->AssignRows({chunk.keys, chunk.embeddings, chunk.slots},
                                   AssignMode::kSaved)
                      .status();
                })
            .ok());
    table = std::move(next);
  }
  ASSERT_NO_FATAL_FAILURE(variable.ExpectEqual(
      KeyRange(0, kVariableRows),
      FindOrInsertAll(table.get(), KeyRange(0, kVariableRows))));
}

INSTANTIATE_TEST_SUITE_P(Rules, DenseUpdatesTest,
                         testing::ValuesIn(DenseCases()),
                         [](const testing::TestParamInfo<DenseCase>& info) {
                           return info.param.name;
                         });

TEST(DenseUpdates, ChangesAreTheRowsThatMovedWithoutAPush) {
  const auto table = MakeTable(kVariableDim, DenseOf(SgdConfig{0.9f}));
  const std::vector<Key> keys = KeyRange(0, 3);
  FindOrInsertAll(table.get(), keys);
  ASSERT_TRUE(table
                  ->ApplyGradients({absl::MakeConstSpan(keys).first(1),
                                    std::vector<float>(kVariableDim, 1.0f),
                                    0.1f, false})
                  .ok());
  const auto changes = [&](ChangeCursor* cursor) {
    std::map<Key, float> found;
    ChangeFilter filter;
    filter.since = *cursor;
    const auto next =
        table->ForEachChange(filter, 100, [&](const ChangeChunk& chunk) {
          for (size_t i = 0; i < chunk.keys.size(); ++i) {
            found[chunk.keys[i]] = chunk.embeddings[i * kVariableDim];
          }
          return absl::OkStatus();
        });
    EXPECT_TRUE(next.ok()) << next.status();
    *cursor = *next;
    return found;
  };
  ChangeCursor cursor;
  EXPECT_EQ(changes(&cursor).size(), 3);

  // Key 0 goes on moving while only key 1 is pushed to; key 2 rests.
  ASSERT_TRUE(table
                  ->ApplyGradients({absl::MakeConstSpan(keys).subspan(1, 1),
                                    std::vector<float>(kVariableDim, 1.0f),
                                    0.1f, false})
                  .ok());
  const std::map<Key, float> changed = changes(&cursor);

  EXPECT_EQ(changed.size(), 2);
  EXPECT_TRUE(changes(&cursor).empty());
  EXPECT_EQ(changed.at(0), FindAll(*table, {0})[0]);
}

TEST(DenseUpdates, AScheduleMayChangeTheRateWithEachStep) {
  const OptimizerConfig rule = AdamConfig{};
  const auto table = MakeTable(kVariableDim, DenseOf(rule));
  FindOrInsertAll(table.get(), KeyRange(0, kVariableRows));
  Variable variable(rule);
  const std::vector<float> gradient(kVariableDim, 0.1f);
  constexpr int kSteps = 20000 / kSlowdown;
  for (int step = 0; step < kSteps; ++step) {
    const float rate = 0.01f / (1.0f + static_cast<float>(step) * 1e-4f);
    const std::vector<Key> keys = {step < 20 ? 2 : Key{step % 2}};
    variable.Step(keys, gradient, rate);
    ASSERT_TRUE(table->ApplyGradients({keys, gradient, rate, true}).ok());
  }
  EXPECT_EQ(SnapshotOf(*table)->steps.runs.size(), size_t{kSteps});
  variable.ExpectEqual({0, 1, 2}, FindAll(*table, {0, 1, 2}));
}

TEST(DenseUpdates, ANewIdBeginsAtTheStepOfTheTable) {
  StepOptions l2 = StepOptionsOf(0.05f);
  for (const OptimizerConfig& rule :
       {OptimizerConfig(AdamWConfig{0.5f}), OptimizerConfig(SgdConfig{}, l2)}) {
    const auto table = MakeTable(kVariableDim, DenseOf(rule));
    const std::vector<float> gradient(kVariableDim, 0.1f);
    for (int step = 0; step < 40; ++step) {
      ASSERT_TRUE(table->ApplyGradients({{1}, gradient, 0.1f, true}).ok());
    }
    const std::vector<float> first =
        FindOrInsertAll(MakeTable(kVariableDim, rule).get(), {7});

    EXPECT_EQ(FindOrInsertAll(table.get(), {7}), first);

    ASSERT_TRUE(table->ApplyGradients({{1}, gradient, 0.1f, true}).ok());
    EXPECT_LT(std::fabs(FindAll(*table, {7})[0]), std::fabs(first[0]));
  }
}

TEST(DenseUpdates, LookupsLeaveRowsAsTheyAreWhereStepsHaveASum) {
  const auto run = [](const OptimizerConfig& rule, bool reads) {
    const auto table = MakeTable(kVariableDim, DenseOf(rule));
    const std::vector<float> gradient(kVariableDim, 0.1f);
    for (int step = 0; step < 300; ++step) {
      EXPECT_TRUE(
          table->ApplyGradients({{Key{step % 7}}, gradient, 0.1f, true}).ok());
      if (reads) FindOrInsertAll(table.get(), KeyRange(0, step % 7));
    }
    return FindAll(*table, KeyRange(0, 7));
  };
  for (const OptimizerConfig& rule :
       {OptimizerConfig(AdamWConfig{}), OptimizerConfig(SgdConfig{0.9f}),
        OptimizerConfig(AdamConfig{}, StepOptionsOf(0.01f))}) {
    EXPECT_EQ(run(rule, false), run(rule, true));
  }
}

TEST(DenseUpdates, PushesAtOnceApplyEachGradientOnce) {
  // Each gradient moves a row by twice the rate, in whatever order.
  const auto table = MakeTable(1, DenseOf(SgdConfig{0.5f}));
  const std::vector<Key> keys = KeyRange(0, 64);
  const std::vector<float> first = FindOrInsertAll(table.get(), keys);
  constexpr int kThreads = 4;
  constexpr int kSteps = 1000 / kSlowdown;
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&] {
      const std::vector<float> gradients(keys.size(), 1.0f);
      for (int i = 0; i < kSteps; ++i) {
        EXPECT_TRUE(
            table->ApplyGradients({keys, gradients, 0x1p-14f, false}).ok());
        FindAll(*table, keys);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(table->stats().num_steps, kThreads * kSteps);
  // So many that the velocity comes to rest.
  for (int i = 0; i < 60; ++i) {
    ASSERT_TRUE(table->ApplyGradients({{}, {}, 0.0f, false}).ok());
  }
  const std::vector<float> last = FindAll(*table, keys);
  for (size_t i = 0; i < keys.size(); ++i) {
    EXPECT_NEAR(last[i], first[i] - 2.0f * 0x1p-14f * kThreads * kSteps, 1e-3f);
  }
}

TEST(DenseUpdates, ReadersAndPushesAtOnceLeaveTheRowsOfAVariable) {
  const OptimizerConfig rule = SgdConfig{0.9f};
  const auto table = MakeTable(kVariableDim, DenseOf(rule));
  const std::vector<Key> keys = KeyRange(0, kVariableRows);
  FindOrInsertAll(table.get(), keys);
  constexpr int kSteps = 400 / kSlowdown;
  std::vector<std::thread> threads;
  for (int t = 0; t < 2; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < kSteps; ++i) FindAll(*table, keys);
    });
    threads.emplace_back([&, t] {
      const std::vector<float> gradient(kVariableDim, 0.01f);
      for (int i = 0; i < kSteps; ++i) {
        EXPECT_TRUE(
            table->ApplyGradients({{static_cast<Key>(t)}, gradient, 0.1f, true})
                .ok());
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(table->stats().num_steps, 2 * kSteps);
  // Without gradients and decay they have never moved.
  const std::vector<Key> idle = KeyRange(2, kVariableRows - 2);
  EXPECT_EQ(FindAll(*table, idle),
            FindOrInsertAll(MakeTable(kVariableDim, rule).get(), idle));
}

TEST(DenseUpdates, AStepNumberThatTheTableHasNotComeToIsCutOff) {
  const auto table = MakeTable(1, DenseOf(SgdConfig{0.9f}));
  const std::vector<float> slots = {0.5f, 1e30f};  // Velocity, bits of a step.
  ASSERT_TRUE(table->AssignRows({{7}, {1.0f}, slots}, AssignMode::kSaved).ok());
  ASSERT_TRUE(table->ApplyGradients({{8}, {1.0f}, 0.1f, true}).ok());
  EXPECT_FLOAT_EQ(FindAll(*table, {7})[0], 1.45f);
}

TEST(DenseUpdates, RulesWithoutThemAreRefusedByName) {
  const absl::Status status =
      MakeConfig(kVariableDim, DenseOf(FtrlConfig{})).Validate();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(
      std::string(status.message()),
      testing::AllOf(testing::HasSubstr("ftrl"), testing::HasSubstr("amsgrad"),
                     testing::HasSubstr("sparse")));
}

TEST(DenseUpdates, ShortRowsAreRefusedWhereStepsAreTaken) {
  TableConfig config = MakeConfig(kVariableDim, DenseOf(AdamConfig{}));
  config.storage_dtype.embeddings = FloatType::kBfloat16;
  EXPECT_TRUE(config.Validate().ok());
  config.optimizer.segments[0].options.l2 = 0.1f;
  EXPECT_THAT(std::string(config.Validate().message()),
              testing::HasSubstr("storage_dtype"));
  config = MakeConfig(1, DenseOf(AdamConfig{}));
  config.admission.policy = MinCountAdmission{};
  EXPECT_TRUE(config.Validate().ok());
  config.optimizer.segments[0].dim = 1;
  config.admission.not_admitted.kind = NotAdmittedKind::kWeight;
  EXPECT_THAT(std::string(config.Validate().message()),
              testing::HasSubstr("not_admitted"));
}

TEST(DenseUpdates, ShortRowsFollowAVariableByChance) {
  TableConfig config = MakeConfig(8, DenseOf(AdamWConfig{0.1f}));
  config.storage_dtype.embeddings = FloatType::kBfloat16;
  const auto rounded = MakeTable(config);
  const auto exact = MakeTable(8, config.optimizer);
  const std::vector<Key> keys = KeyRange(0, 500);
  FindOrInsertAll(rounded.get(), keys);
  FindOrInsertAll(exact.get(), keys);
  const std::vector<float> gradients(keys.size() * 8, 0.01f);
  for (int round = 0; round < 50; ++round) {
    for (EmbeddingTable* table : {rounded.get(), exact.get()}) {
      ASSERT_TRUE(table->ApplyGradients({keys, gradients, 1e-4f, false}).ok());
      for (int idle = 0; idle < 9; ++idle) {
        ASSERT_TRUE(table->ApplyGradients({{}, {}, 1e-4f, false}).ok());
      }
    }
  }
  const std::vector<float> a = FindAll(*rounded, keys);
  const std::vector<float> b = FindAll(*exact, keys);
  double sum = 0.0;
  double moved = 0.0;
  for (size_t i = 0; i < a.size(); ++i) {
    sum += double{a[i]} - double{b[i]};
    moved += std::fabs(double{b[i]});
  }
  EXPECT_LT(std::fabs(sum) / moved, 0.01);
}

TEST(DenseUpdates, TheFirstStepOfAnIdIsThatOfItsAdmission) {
  TableConfig config = MakeConfig(2, DenseOf(AdamWConfig{0.5f}));
  config.admission.policy = MinCountAdmission{2};
  const auto table = MakeTable(config);
  const std::vector<float> gradient = {1.0f, -1.0f};
  for (int step = 0; step < 10; ++step) {
    ASSERT_TRUE(table->ApplyGradients({{}, {}, 0.1f, false}).ok());
  }
  ASSERT_TRUE(table->ApplyGradients({{7}, gradient, 0.1f, false}).ok());
  EXPECT_EQ(FindAll(*table, {7})[0], 0.0f);

  ASSERT_TRUE(table->ApplyGradients({{7}, gradient, 0.1f, false}).ok());

  // Its only gradient came with step 12, before which nothing happened to it.
  config.admission = AdmissionConfig();
  const auto other = MakeTable(config);
  for (int step = 0; step < 11; ++step) {
    ASSERT_TRUE(other->ApplyGradients({{}, {}, 0.1f, false}).ok());
  }
  ASSERT_TRUE(other->ApplyGradients({{7}, gradient, 0.1f, true}).ok());
  EXPECT_EQ(FindAll(*table, {7}), FindAll(*other, {7}));
}

TEST(StepLog, HasTheSameSumsWhenItIsRestored) {
  OptimizerConfig config = AdamWConfig{0.5f};
  config.is_dense = true;
  const Optimizer optimizer(config, 1);
  StepLog log(&optimizer);
  for (int step = 0; step < 5000; ++step) {
    log.End(*log.Begin(0.001f * static_cast<float>(1 + step % 3)));
  }
  StepLog restored(&optimizer);
  restored.Restore(log.Save());
  for (const uint32_t step : {0u, 10u, 4000u, 4900u, 4999u}) {
    const auto row_of = [&](const StepLog& of) {
      std::vector<float> row = {0.5f, 0.01f, 0.0001f, 1.0f, 0.0f};
      SetDenseStepOfSlot(step, &row.back());
      optimizer.CatchUp(*of.Now(), row.data(), row.data() + 1);
      return row;
    };
    EXPECT_EQ(row_of(log), row_of(restored));
  }
}

TEST(StepLog, IsShortenedAtItsEndOfMemory) {
  OptimizerConfig config = SgdConfig{};
  const Optimizer optimizer(config, 1);
  StepLog log(&optimizer);
  for (uint32_t step = 0; step < StepLog::kMaxRuns + 100; ++step) {
    const auto before = log.Begin(static_cast<float>(step % 2));
    ASSERT_EQ(before->last_step, step);
    log.End(*before);
  }
  const SavedSteps saved = log.Save();
  EXPECT_EQ(saved.runs.size(), StepLog::kMaxRuns / 4 * 3 + 100);
  EXPECT_EQ(saved.runs[1].first, 3);
  EXPECT_EQ(saved.runs[1].learning_rate, 0.5f);
  EXPECT_EQ(saved.runs.back().first, StepLog::kMaxRuns + 100);
  EXPECT_TRUE(StepLog::Validate(saved).ok());
  log.Restore(saved);
  EXPECT_EQ(log.Save().runs.size(), saved.runs.size());
}

TEST(StepLog, DamagedLogsAreRefused) {
  EXPECT_TRUE(StepLog::Validate({}).ok());
  EXPECT_TRUE(StepLog::Validate({9, {{1, 0.1f}, {4, 0.2f}}}).ok());
  for (const SavedSteps& damaged : std::vector<SavedSteps>{
           {3, {}},
           {0, {{1, 0.1f}}},
           {3, {{2, 0.1f}}},
           {3, {{1, 0.1f}, {1, 0.2f}}},
           {3, {{1, 0.1f}, {4, 0.2f}}},
           {3, {{1, -0.1f}}},
           {3, {{1, NAN}}},
           {kMaxDenseStep + 1, {{1, 0.1f}}},
           {2000000, std::vector<StepRun>(StepLog::kMaxRuns + 1)}}) {
    EXPECT_FALSE(StepLog::Validate(damaged).ok()) << damaged.last_step;
  }
}

}  // namespace
}  // namespace tfswitch
