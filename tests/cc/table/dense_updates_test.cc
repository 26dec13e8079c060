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
        ASSERT_EQ(rows[k * kVariableDim + i], expected)
            << "key " << keys[k] << ", element " << i;
      }
    }
  }

 private:
  const Optimizer optimizer_;
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
        table->ApplyGradients(keys, gradients, learning_rate, true).ok());
  }

  const int seed_ = static_cast<int>(std::random_device()() % 1000000);
  std::mt19937 random_;
};

TEST_P(DenseUpdatesTest, RowsAreThoseOfAVariable) {
  SCOPED_TRACE(testing::Message() << "seed " << seed_);
  const auto table = MakeTable(kVariableDim, DenseOf(GetParam().optimizer));
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
  Variable variable(GetParam().optimizer);
  for (int round = 0; round < 6; ++round) {
    for (int step = 0; step < 20; ++step) {
      ASSERT_NO_FATAL_FAILURE(Push(table.get(), &variable, SomeKeys(0.15),
                                   0.01f / static_cast<float>(round + 1)));
    }
    auto next = MakeTable(config);
    ASSERT_TRUE(next->RestoreSteps(table->SaveSteps()).ok());
    ASSERT_TRUE(
        table
            ->ForEachRow(
                5,
                [&](const RowChunk& chunk) {
                  variable.ExpectEqual(
                      {chunk.keys.begin(), chunk.keys.end()},
                      {chunk.embeddings.begin(), chunk.embeddings.end()});
                  return next
                      ->AssignRows(chunk.keys, chunk.embeddings, chunk.slots)
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
                  ->ApplyGradients(absl::MakeConstSpan(keys).first(1),
                                   std::vector<float>(kVariableDim, 1.0f), 0.1f,
                                   false)
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
                  ->ApplyGradients(absl::MakeConstSpan(keys).subspan(1, 1),
                                   std::vector<float>(kVariableDim, 1.0f), 0.1f,
                                   false)
                  .ok());
  const std::map<Key, float> changed = changes(&cursor);

  EXPECT_EQ(changed.size(), 2);
  EXPECT_TRUE(changes(&cursor).empty());
  EXPECT_EQ(changed.at(0), FindAll(*table, {0})[0]);
}

TEST(DenseUpdates, AScheduleOfManyRatesStaysWithinItsLog) {
  const OptimizerConfig rule = AdamConfig{};
  const auto table = MakeTable(kVariableDim, DenseOf(rule));
  Variable variable(rule);
  const std::vector<float> gradient(kVariableDim, 0.1f);
  for (size_t step = 0; step < StepLog::kMaxRuns + 100; ++step) {
    const float rate = 0.01f / (1.0f + static_cast<float>(step) * 1e-4f);
    const std::vector<Key> keys = {static_cast<Key>(step % 2)};
    variable.Step(keys, gradient, rate);
    ASSERT_TRUE(table->ApplyGradients(keys, gradient, rate, true).ok());
  }
  EXPECT_LE(table->SaveSteps().runs.size(), StepLog::kMaxRuns);
  EXPECT_EQ(table->stats().num_steps,
            static_cast<int64_t>(StepLog::kMaxRuns + 100));
  EXPECT_TRUE(StepLog::Validate(table->SaveSteps()).ok());
  variable.ExpectEqual({0, 1}, FindAll(*table, {0, 1}));
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
            table->ApplyGradients({static_cast<Key>(t)}, gradient, 0.1f, true)
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
  ASSERT_TRUE(table->AssignRows({7}, {1.0f}, slots).ok());
  ASSERT_TRUE(table->ApplyGradients({8}, {1.0f}, 0.1f, true).ok());
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

TEST(DenseUpdates, AdmissionAndShortRowsAreRefused) {
  TableConfig config = MakeConfig(kVariableDim, DenseOf(AdamConfig{}));
  EXPECT_TRUE(config.Validate().ok());
  config.storage_dtype.embeddings = FloatType::kBfloat16;
  EXPECT_THAT(std::string(config.Validate().message()),
              testing::HasSubstr("storage_dtype"));
  config = MakeConfig(kVariableDim, DenseOf(AdamConfig{}));
  config.admission.policy = MinCountAdmission{};
  EXPECT_THAT(std::string(config.Validate().message()),
              testing::HasSubstr("admission"));
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
           {60000, std::vector<StepRun>(StepLog::kMaxRuns + 1)}}) {
    EXPECT_FALSE(StepLog::Validate(damaged).ok()) << damaged.last_step;
  }
}

}  // namespace
}  // namespace tfswitch
