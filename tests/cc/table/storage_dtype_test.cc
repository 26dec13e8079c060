// Rows that keep their floats in 16 bits.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <map>
#include <random>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "cc/base/half_floats.h"
#include "cc/optimizer/optimizer.h"
#include "cc/table/embedding_table.h"
#include "cc/table/row_codec.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/cc/table/table_testing.h"

namespace tfswitch {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;

float Round(FloatType type, float value) {
  switch (type) {
    case FloatType::kFloat32:
      return value;
    case FloatType::kFloat16:
      return FloatOfFloat16(Float16OfFloat<false>(value, 0));
    case FloatType::kBfloat16:
      return FloatOfBfloat16(Bfloat16OfFloat<false>(value, 0));
  }
  return value;
}

TableConfig TypedConfig(int dim, FloatType embeddings, FloatType slots,
                        Rounding rounding,
                        OptimizerConfig optimizer = AdagradConfig{}) {
  TableConfig config = MakeConfig(dim, optimizer);
  config.storage_dtype = {embeddings, slots, rounding};
  return config;
}

// The rows with their slots, as ForEachRow gives them.
std::map<Key, std::vector<float>> RowsOf(const EmbeddingTable& table) {
  std::map<Key, std::vector<float>> rows;
  const auto visit = [&](const RowChunk& chunk) {
    const auto dim = static_cast<size_t>(table.dim());
    const auto slots = static_cast<size_t>(table.slot_floats());
    for (size_t i = 0; i < chunk.keys.size(); ++i) {
      std::vector<float>& row = rows[chunk.keys[i]];
      const float* at = chunk.embeddings.data() + i * dim;
      row.assign(at, at + dim);
      at = chunk.slots.data() + i * slots;
      row.insert(row.end(), at, at + slots);
    }
    return absl::OkStatus();
  };
  EXPECT_TRUE(table.ForEachRow(100, visit).ok());
  return rows;
}

class StorageDtypeTest
    : public ::testing::TestWithParam<std::tuple<FloatType, FloatType>> {
 protected:
  FloatType embeddings() const { return std::get<0>(GetParam()); }
  FloatType slots() const { return std::get<1>(GetParam()); }
};

TEST_P(StorageDtypeTest, StepsAreThoseOfFloatsRoundedToNearestForEachDim) {
  std::mt19937 random(3);
  std::normal_distribution<float> normal;
  for (int dim = 1; dim <= 67; ++dim) {
    const OptimizerConfig optimizers[] = {AdagradConfig{}, AdamConfig{},
                                          RowwiseAdagradConfig{}};
    for (const OptimizerConfig& rule : optimizers) {
      TableConfig config =
          TypedConfig(dim, embeddings(), slots(), Rounding::kNearest, rule);
      config.statistics.kind = StatisticsKind::kUsage;
      auto table = MakeTable(config);
      const Optimizer optimizer(rule, dim, SimdLevel::kScalar);
      const std::vector<SlotRun> runs = SlotRuns(rule, dim);
      const std::vector<Key> keys = KeyRange(0, 40);
      const std::vector<float> first = FindOrInsertAll(table.get(), keys);

      // The expected rows; the table gets the same calls.
      std::vector<std::vector<float>> rows(keys.size());
      const auto round = [&](std::vector<float>* row) {
        size_t at = 0;
        for (; at < static_cast<size_t>(dim); ++at) {
          (*row)[at] = Round(embeddings(), (*row)[at]);
        }
        for (const SlotRun& run : runs) {
          for (int i = 0; i < run.count; ++i, ++at) {
            if (run.is_per_coordinate) {
              (*row)[at] = Round(slots(), (*row)[at]);
            }
          }
        }
      };
      for (size_t i = 0; i < keys.size(); ++i) {
        rows[i].assign(first.begin() + i * dim, first.begin() + (i + 1) * dim);
        rows[i].resize(static_cast<size_t>(dim + optimizer.slot_floats()));
        optimizer.InitSlots(rows[i].data() + dim);
        const std::vector<float> before = rows[i];
        round(&rows[i]);
        // The table keeps exactly the values that were read.
        ASSERT_TRUE(
            std::equal(before.begin(), before.begin() + dim, rows[i].begin()));
      }
      std::vector<float> gradients(keys.size() * static_cast<size_t>(dim));
      for (int step = 0; step < 3; ++step) {
        for (float& gradient : gradients) gradient = normal(random);
        ASSERT_EQ(table->ApplyGradients({keys, gradients, 0.1f, false}).value(),
                  static_cast<int64_t>(keys.size()));
        for (size_t i = 0; i < keys.size(); ++i) {
          optimizer.Step(rows[i].data(), gradients.data() + i * dim,
                         StepInput{0.1f});
          round(&rows[i]);
        }
      }
      const std::vector<float> found = FindAll(*table, keys);
      auto kept = RowsOf(*table);
      ASSERT_EQ(kept.size(), keys.size());
      for (size_t i = 0; i < keys.size(); ++i) {
        std::vector<float>& row = kept[keys[i]];
        EXPECT_EQ(row[row.size() - 2], 3.0f);  // The count of its statistics.
        row.resize(row.size() - 2);
        ASSERT_EQ(row, rows[i]) << "dim " << dim << " row " << i;
        ASSERT_TRUE(std::equal(row.begin(), row.begin() + dim,
                               found.begin() + i * dim));
      }
    }
  }
}

TEST_P(StorageDtypeTest, PushBeforeTheFirstLookupIsPushAfterIt) {
  const TableConfig config =
      TypedConfig(5, embeddings(), slots(), Rounding::kStochastic);
  auto read_first = MakeTable(config);
  auto pushed_first = MakeTable(config);
  const std::vector<Key> keys = KeyRange(-20, 40);
  FindOrInsertAll(read_first.get(), keys);
  const std::vector<float> gradients(keys.size() * 5, 0.37f);
  for (auto* table : {read_first.get(), pushed_first.get()}) {
    ASSERT_TRUE(table->ApplyGradients({keys, gradients, 0.1f, true}).ok());
  }

  EXPECT_EQ(FindAll(*read_first, keys), FindAll(*pushed_first, keys));
}

TEST_P(StorageDtypeTest, NumberedStepsAreRoundedTheSameWayInAnyOrderOfKeys) {
  const TableConfig config =
      TypedConfig(7, embeddings(), slots(), Rounding::kStochastic);
  auto forward = MakeTable(config);
  auto backward = MakeTable(config);
  std::vector<Key> keys = KeyRange(0, 1000);
  std::vector<Key> reversed(keys.rbegin(), keys.rend());
  const std::vector<float> gradients(keys.size() * 7, 0.37f);
  for (int64_t step = 1; step <= 20; ++step) {
    GradientBatch batch;
    batch.keys = keys;
    batch.gradients = gradients;
    batch.learning_rate = 0.01f;
    batch.global_step = step;
    batch.insert_missing = true;
    ASSERT_TRUE(forward->ApplyGradients(batch).ok());
    // In two pushes, the other way around.
    batch.keys = absl::MakeConstSpan(reversed).subspan(0, 300);
    batch.gradients = absl::MakeConstSpan(gradients).subspan(0, 300 * 7);
    ASSERT_TRUE(backward->ApplyGradients(batch).ok());
    batch.keys = absl::MakeConstSpan(reversed).subspan(300);
    batch.gradients = absl::MakeConstSpan(gradients).subspan(300 * 7);
    ASSERT_TRUE(backward->ApplyGradients(batch).ok());
  }

  EXPECT_EQ(FindAll(*forward, keys), FindAll(*backward, keys));
}

TEST_P(StorageDtypeTest, RowsThatAreExportedAndAssignedAreTheSame) {
  TableConfig config = TypedConfig(9, embeddings(), slots(),
                                   Rounding::kStochastic, AdamConfig{});
  config.statistics.kind = StatisticsKind::kShowClick;
  auto table = MakeTable(config);
  auto copy = MakeTable(config);
  const std::vector<Key> keys = KeyRange(0, 500);
  const std::vector<float> gradients(keys.size() * 9, 0.1f);
  for (int i = 0; i < 3; ++i) {
    ASSERT_TRUE(table->ApplyGradients({keys, gradients, 0.1f, true}).ok());
  }
  ASSERT_TRUE(table
                  ->ForEachRow(64,
                               [&](const RowChunk& chunk) {
                                 return copy
                                     ->AssignRows({chunk.keys, chunk.embeddings,
                                                   chunk.slots},
                                                  AssignMode::kSaved)
                                     .status();
                               })
                  .ok());

  EXPECT_EQ(RowsOf(*table).size(), keys.size());
  EXPECT_EQ(RowsOf(*copy), RowsOf(*table));
}

TEST_P(StorageDtypeTest, RowsAreFoundAfterAShrinkHasMovedThem) {
  TableConfig config =
      TypedConfig(64, embeddings(), slots(), Rounding::kNearest);
  config.statistics.kind = StatisticsKind::kUsage;
  auto table = MakeTable(config);
  const auto slot_floats = static_cast<size_t>(table->slot_floats());
  const auto value_of = [](Key key) {
    return static_cast<float>(key % 251);  // Exact in each type.
  };
  const int64_t num_rows = 400'000 / kSlowdown;
  for (Key begin = 0; begin < num_rows; begin += 1000) {
    const std::vector<Key> keys = KeyRange(begin, 1000);
    std::vector<float> values;
    std::vector<float> slots;
    for (const Key key : keys) {
      values.insert(values.end(), 64, value_of(key));
      slots.insert(slots.end(), slot_floats, value_of(key));
    }
    ASSERT_TRUE(
        table->AssignRows({keys, values, slots}, AssignMode::kSaved).ok());
  }
  const int64_t before =
      table->stats().row_bytes + table->stats().reserved_bytes;
  // Nine of ten go.
  EvictionConfig rules;
  rules.min_l2_norm = 8.0f * 226.0f;
  const auto report = table->Shrink(rules, 1.0f, /*dry_run=*/false);

  ASSERT_TRUE(report.ok()) << report.status();
  EXPECT_GT(report->evicted_rows, num_rows * 8 / 10);
  if (kSlowdown == 1) {  // Else it is all in the pages that stay.
    EXPECT_LT(table->stats().row_bytes + table->stats().reserved_bytes,
              before / 2);
  }
  for (Key key = 0; key < num_rows; key += 97) {
    const float value = value_of(key);
    const float expected = value >= 226.0f ? value : 0.0f;
    ASSERT_THAT(FindAll(*table, {key}), Each(expected)) << key;
    UsageOfRow usage;
    KeyState state;
    EXPECT_TRUE(table
                    ->ReadUsage({key}, 300.0f, absl::MakeSpan(&usage, 1),
                                absl::MakeSpan(&state, 1))
                    .ok());
    EXPECT_EQ(usage.count, expected);
    EXPECT_EQ(usage.last_seen_day, expected);
  }
}

std::string NameOfTypes(
    const ::testing::TestParamInfo<StorageDtypeTest::ParamType>& info) {
  const auto name = [](FloatType type) {
    switch (type) {
      case FloatType::kFloat32:
        return "Float32";
      case FloatType::kFloat16:
        return "Float16";
      case FloatType::kBfloat16:
        return "Bfloat16";
    }
    return "";
  };
  return std::string(name(std::get<0>(info.param))) + "With" +
         name(std::get<1>(info.param)) + "Slots";
}

INSTANTIATE_TEST_SUITE_P(
    Types, StorageDtypeTest,
    ::testing::Values(std::tuple(FloatType::kFloat16, FloatType::kFloat32),
                      std::tuple(FloatType::kFloat16, FloatType::kFloat16),
                      std::tuple(FloatType::kBfloat16, FloatType::kFloat32),
                      std::tuple(FloatType::kBfloat16, FloatType::kBfloat16),
                      std::tuple(FloatType::kFloat32, FloatType::kBfloat16)),
    NameOfTypes);

TEST(RowCodecTest, MemoryOfARowIsThatOfItsParts) {
  const auto words = [](int dim, FloatType embeddings, FloatType slots,
                        OptimizerConfig optimizer) {
    TableConfig config =
        TypedConfig(dim, embeddings, slots, Rounding::kStochastic, optimizer);
    config.statistics.kind = StatisticsKind::kShowClick;  // Kept elsewhere.
    return RowCodec(config).num_words();
  };
  constexpr auto kF32 = FloatType::kFloat32;
  constexpr auto kF16 = FloatType::kFloat16;
  constexpr auto kBf16 = FloatType::kBfloat16;
  EXPECT_EQ(words(16, kF32, kF32, AdagradConfig{}), 32);
  EXPECT_EQ(words(16, kBf16, kF32, AdagradConfig{}), 24);
  EXPECT_EQ(words(16, kBf16, kBf16, AdagradConfig{}), 16);
  // Adam's count of steps stays a float.
  EXPECT_EQ(words(16, kF16, kBf16, AdamConfig{}), 8 + 16 + 1);
  EXPECT_EQ(words(3, kF16, kF16, AdagradConfig{}), 2 + 2);
  EXPECT_EQ(words(1, kF16, kF16, RowwiseAdagradConfig{}), 1 + 1);
}

TEST(RowCodecTest, PartsOfARowDrawApart) {
  TableConfig config =
      TypedConfig(64, FloatType::kBfloat16, FloatType::kFloat32,
                  Rounding::kStochastic, AdagradConfig{});
  config.storage_dtype.slots = FloatType::kFloat16;
  const RowCodec codec(config);
  int num_equal = 0;
  constexpr int kRows = 200;
  for (uint32_t seed = 0; seed < kRows; ++seed) {
    std::vector<float> words(static_cast<size_t>(codec.num_words()));
    std::vector<float> floats(static_cast<size_t>(codec.num_floats()));
    codec.ModifyFloats(words.data(), floats.data(), {true, seed * 977},
                       [](float* embedding, float* slots) {
                         // Half of a last bit above 1.
                         std::fill_n(embedding, 64, 1.0f + 0x1p-8f);
                         std::fill_n(slots, 64, 1.0f + 0x1p-11f);
                       });
    codec.Decode(words.data(), floats.data());
    for (int i = 0; i < 64; ++i) {
      num_equal += (floats[i] == 1.0f) == (floats[64 + i] == 1.0f) ? 1 : 0;
    }
  }
  EXPECT_NEAR(static_cast<double>(num_equal) / (64.0 * kRows), 0.5, 0.02);
}

TEST(StorageDtypeOfTableTest, SixteenBitsTakeLessMemory) {
  const auto stride = [](FloatType embeddings, FloatType slots) {
    return MakeTable(TypedConfig(16, embeddings, slots, Rounding::kStochastic))
        ->stats()
        .row_stride_bytes;
  };
  EXPECT_EQ(stride(FloatType::kFloat32, FloatType::kFloat32), 128);
  EXPECT_EQ(stride(FloatType::kBfloat16, FloatType::kFloat32), 96);
  EXPECT_EQ(stride(FloatType::kBfloat16, FloatType::kBfloat16), 64);
}

TEST(StorageDtypeOfTableTest, SmallStepsAddUpByChanceAndAreLostToNearest) {
  // 1 - n x 2^-12: a bfloat16 below 1 has steps of 2^-8.
  const std::vector<Key> keys = KeyRange(0, 400);
  const std::vector<float> ones(keys.size() * 4, 1.0f);
  for (const Rounding rounding : {Rounding::kStochastic, Rounding::kNearest}) {
    auto table = MakeTable(TypedConfig(
        4, FloatType::kBfloat16, FloatType::kFloat32, rounding, SgdConfig{}));
    ASSERT_TRUE(Assign(*table, keys, ones).ok());
    for (int step = 0; step < 1024; ++step) {
      ASSERT_TRUE(table->ApplyGradients({keys, ones, 0x1p-12f, false}).ok());
    }
    const std::vector<float> values = FindAll(*table, keys);
    double sum = 0.0;
    for (const float value : values) sum += static_cast<double>(value);
    const double mean = sum / static_cast<double>(values.size());
    if (rounding == Rounding::kNearest) {
      EXPECT_EQ(mean, 1.0);
    } else {
      // The standard error of the mean is 0.0008.
      EXPECT_NEAR(mean, 0.75, 0.005);
    }
  }
}

TEST(StorageDtypeOfTableTest, DrawsAreIndependentFromKeyToKeyAndStepToStep) {
  // Half of a step of bfloat16 is taken by half of the floats.
  auto table =
      MakeTable(TypedConfig(64, FloatType::kBfloat16, FloatType::kFloat32,
                            Rounding::kStochastic, SgdConfig{}));
  const std::vector<Key> keys = KeyRange(0, 1000);
  const std::vector<float> ones(keys.size() * 64, 1.0f);
  std::vector<std::vector<float>> after;
  for (int step = 0; step < 2; ++step) {
    ASSERT_TRUE(Assign(*table, keys, ones).ok());
    ASSERT_TRUE(table->ApplyGradients({keys, ones, 0x1p-9f, false}).ok());
    after.push_back(FindAll(*table, keys));
  }
  const auto share_equal = [](const std::vector<float>& a, size_t offset_a,
                              const std::vector<float>& b, size_t offset_b) {
    size_t num_equal = 0;
    const size_t n = a.size() - std::max(offset_a, offset_b);
    for (size_t i = 0; i < n; ++i) {
      num_equal += a[i + offset_a] == b[i + offset_b] ? 1 : 0;
    }
    return static_cast<double>(num_equal) / static_cast<double>(n);
  };
  const auto down = std::count(after[0].begin(), after[0].end(), 1.0f);
  EXPECT_NEAR(static_cast<double>(down) / 64000.0, 0.5, 0.01);
  EXPECT_NEAR(share_equal(after[0], 0, after[1], 0), 0.5, 0.01);   // Steps.
  EXPECT_NEAR(share_equal(after[0], 0, after[0], 64), 0.5, 0.01);  // Keys.
  EXPECT_NEAR(share_equal(after[0], 0, after[0], 1), 0.5, 0.01);   // Places.
}

TEST(StorageDtypeOfTableTest, NoReadIsTornByAStep) {
  auto table =
      MakeTable(TypedConfig(33, FloatType::kFloat16, FloatType::kBfloat16,
                            Rounding::kNearest, SgdConfig{}));
  const std::vector<Key> keys = KeyRange(0, 8);
  ASSERT_TRUE(Assign(*table, keys, std::vector<float>(8 * 33, 0.0f)).ok());
  const std::vector<float> gradients(8 * 33, -1.0f);
  std::atomic<bool> is_done{false};
  std::thread writer([&] {
    for (int i = 0; i < 2000 / kSlowdown; ++i) {
      EXPECT_TRUE(table->ApplyGradients({keys, gradients, 1.0f, false}).ok());
    }
    is_done = true;
  });
  while (!is_done) {
    const std::vector<float> found = FindAll(*table, keys);
    for (size_t i = 0; i < found.size(); ++i) {
      EXPECT_EQ(found[i], found[i / 33 * 33]);
    }
    if (HasFailure()) break;
  }
  writer.join();
  EXPECT_THAT(FindAll(*table, keys),
              Each(static_cast<float>(2000 / kSlowdown)));
}

TEST(StorageDtypeOfTableTest, WhatIsTooLargeForFloat16IsItsLargest) {
  auto table = MakeTable(TypedConfig(2, FloatType::kFloat16,
                                     FloatType::kFloat32, Rounding::kNearest));
  ASSERT_TRUE(Assign(*table, {1}, {1e6f, -1e6f}).ok());
  EXPECT_THAT(FindAll(*table, {1}), ElementsAre(65504.0f, -65504.0f));
}

TEST(StorageDtypeOfTableTest, LongRowsAreStepped) {
  auto table =
      MakeTable(TypedConfig(kMaxDim, FloatType::kBfloat16, FloatType::kBfloat16,
                            Rounding::kNearest, AmsGradConfig{}));
  const std::vector<float> gradients(kMaxDim, 1.0f);
  ASSERT_TRUE(table->ApplyGradients({{1}, gradients, 0.5f, true}).ok());
  ASSERT_TRUE(table->ApplyGradients({{1}, gradients, 0.5f, true}).ok());
  for (const float value : FindAll(*table, {1})) {
    EXPECT_NEAR(value, -1.0f, 0.06f);
  }
}

}  // namespace
}  // namespace tfswitch
