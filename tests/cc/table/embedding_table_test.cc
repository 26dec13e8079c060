#include "cc/table/embedding_table.h"

#include <algorithm>
#include <cstdint>
#include <limits>
#include <map>
#include <random>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include "cc/table/bucket.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/cc/table/table_testing.h"

namespace tfswitch {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

TEST(EmbeddingTableTest, FindOfMissingKeyReadsZerosAndInsertsNothing) {
  auto table = MakeTable(/*dim=*/2);
  std::vector<float> out(2, -1.0f);

  EXPECT_EQ(table->Find({7}, absl::MakeSpan(out)).value(), 0);
  EXPECT_THAT(out, Each(0.0f));
  EXPECT_EQ(table->size(), 0);
}

TEST(EmbeddingTableTest, FindCountsRepeatedKeysEachTime) {
  auto table = MakeTable(/*dim=*/2);
  ASSERT_TRUE(Assign(*table, {7, 8}, {1.0f, 2.0f, 3.0f, 4.0f}).ok());
  std::vector<float> out(8);

  EXPECT_EQ(table->Find({8, 7, 9, 8}, absl::MakeSpan(out)).value(), 3);
  EXPECT_THAT(out, ElementsAre(3, 4, 1, 2, 0, 0, 3, 4));
}

TEST(EmbeddingTableTest, FindOrInsertOfRepeatedMissingKeyInsertsOneRow) {
  auto table = MakeTable(/*dim=*/3);

  const std::vector<float> out = FindOrInsertAll(table.get(), {5, 5, 6, 5});

  EXPECT_EQ(table->size(), 2);
  EXPECT_TRUE(std::equal(out.begin(), out.begin() + 3, out.begin() + 3));
  EXPECT_TRUE(std::equal(out.begin(), out.begin() + 3, out.begin() + 9));
  EXPECT_EQ(out, FindAll(*table, {5, 5, 6, 5}));
}

TEST(EmbeddingTableTest, EveryInt64IsAnOrdinaryKey) {
  constexpr Key kMin = std::numeric_limits<Key>::min();
  constexpr Key kMax = std::numeric_limits<Key>::max();
  const std::vector<Key> keys = {kMin, kMin + 1, -2,       -1,  0,
                                 1,    2,        kMax - 1, kMax};
  auto table = MakeTable(/*dim=*/1);
  EXPECT_THAT(FindAll(*table, keys), Each(0.0f));
  std::vector<float> values;
  for (size_t i = 0; i < keys.size(); ++i) {
    values.push_back(1.0f + static_cast<float>(i));
  }

  for (size_t i = 0; i < keys.size(); ++i) {
    EXPECT_THAT(FindAll(*table, {keys[i]}), ElementsAre(0.0f)) << keys[i];
    ASSERT_TRUE(Assign(*table, {keys[i]}, {values[i]}).ok());
  }
  EXPECT_EQ(table->size(), static_cast<int64_t>(keys.size()));
  EXPECT_EQ(FindAll(*table, keys), values);
  EXPECT_EQ(table->ApplyGradients({keys, values, 1.0f, false}).value(),
            static_cast<int64_t>(keys.size()));
  EXPECT_THAT(FindAll(*table, keys), Each(0.0f));
  EXPECT_EQ(table->Erase(keys).value(), static_cast<int64_t>(keys.size()));
  EXPECT_EQ(table->size(), 0);
}

TEST(EmbeddingTableTest, KeysOfOneBucketOverflowAndAreAllFound) {
  // All 2000 keys have the same stripe and the same home bucket, whatever the
  // size of the table: the last one of the stripe, and the first one.
  for (const uint64_t base : {0xfffffffff0000000ULL, 0x0ULL}) {
    auto table = MakeTable(MakeConfig(/*dim=*/1), PlacesByTheirBits());
    std::vector<Key> keys;
    std::vector<float> values;
    for (uint64_t i = 0; i < 2000; ++i) {
      keys.push_back(static_cast<Key>(base + i));
      values.push_back(1.0f + static_cast<float>(i));
    }

    ASSERT_TRUE(Assign(*table, keys, values).ok());
    EXPECT_EQ(FindAll(*table, keys), values);
    std::vector<Key> spread;  // The table grows over the crowd.
    for (uint64_t i = 1; i <= 50000; ++i) {
      spread.push_back(static_cast<Key>(i * 0x9e3779b97f4a7c15));
    }
    FindOrInsertAll(table.get(), spread);
    EXPECT_EQ(FindAll(*table, keys), values);

    std::vector<Key> even;
    for (size_t i = 0; i < keys.size(); i += 2) even.push_back(keys[i]);
    EXPECT_EQ(table->Erase(even).value(), 1000);
    for (size_t i = 0; i < keys.size(); i += 2) values[i] = 0.0f;
    EXPECT_EQ(FindAll(*table, keys), values);
  }
}

TEST(EmbeddingTableTest, KeysThatWereChosenByTheirPublicHashDoNotCrowd) {
  // All have the same place by HashKey(). Rows are visited in ranges of places
  // of 1000 buckets, which have room for 5000 keys and where all is well about
  // 3750; if more came together, they would come in chunks of 5000.
  constexpr int64_t kRoom = 1000 * kKeysPerBucket;
  const int64_t last = 1'000'000 / kSlowdown;
  auto table = MakeTable(/*dim=*/1);
  for (int64_t size = 0; size < last;) {
    std::vector<Key> keys;
    const int64_t step = std::min(last - size, 20'000 + size);
    for (int64_t i = 0; i < step; ++i) {
      keys.push_back(KeyOfHash(static_cast<uint64_t>(size + i)));
    }
    FindOrInsertAll(table.get(), keys);
    size += step;
    int64_t num_rows = 0;
    int64_t most = 0;
    ASSERT_TRUE(table
                    ->ForEachRow(kRoom,
                                 [&](const RowChunk& chunk) {
                                   const auto count =
                                       static_cast<int64_t>(chunk.keys.size());
                                   num_rows += count;
                                   most = std::max(most, count);
                                   return absl::OkStatus();
                                 })
                    .ok());
    ASSERT_EQ(num_rows, size);
    ASSERT_LT(most, kRoom);
  }
}

TEST(EmbeddingTableTest, ApplyGradientsSkipsKeysWithoutARow) {
  auto table = MakeTable(/*dim=*/1);
  ASSERT_TRUE(Assign(*table, {1}, {1.0f}).ok());

  EXPECT_EQ(table->ApplyGradients({{1, 2}, {2.0f, 2.0f}, 0.25f, false}).value(),
            1);
  EXPECT_THAT(FindAll(*table, {1, 2}), ElementsAre(0.5f, 0.0f));
  EXPECT_EQ(table->size(), 1);
}

TEST(EmbeddingTableTest, ApplyGradientsWithInsertMissingStepsTheInitialRow) {
  auto table =
      MakeTable(/*dim=*/2, SgdConfig{}, ConstantInitializer{/*value=*/3.0f});

  EXPECT_EQ(
      table->ApplyGradients({{1, 2}, {2.0f, 0.0f, 4.0f, 0.0f}, 0.25f, true})
          .value(),
      2);
  EXPECT_THAT(FindAll(*table, {1, 2}), ElementsAre(2.5f, 3.0f, 2.0f, 3.0f));
}

TEST(EmbeddingTableTest, AssignKeepsSlotsOfAnExistingRow) {
  auto table = MakeTable(/*dim=*/1, AdagradConfig{1.0f, 0.0f});
  ASSERT_TRUE(Assign(*table, {1}, {0.0f}).ok());
  ASSERT_TRUE(table->ApplyGradients({{1}, {4.0f}, 1.0f, false}).ok());

  ASSERT_TRUE(Assign(*table, {1, 2}, {7.0f, 8.0f}).ok());

  std::map<Key, std::pair<float, float>> rows;
  ASSERT_TRUE(
      table
          ->ForEachRow(
              10,
              [&](const RowChunk& chunk) {
                for (size_t i = 0; i < chunk.keys.size(); ++i)
                  rows[chunk.keys[i]] = {chunk.embeddings[i], chunk.slots[i]};
                return absl::OkStatus();
              })
          .ok());
  EXPECT_EQ(rows[1], std::make_pair(7.0f, 17.0f));
  EXPECT_EQ(rows[2], std::make_pair(8.0f, 1.0f));
}

TEST(EmbeddingTableTest, AssignOfRepeatedKeyKeepsTheLast) {
  auto table = MakeTable(/*dim=*/1);

  ASSERT_TRUE(Assign(*table, {1, 2, 1}, {1.0f, 2.0f, 3.0f}).ok());

  EXPECT_THAT(FindAll(*table, {1, 2}), ElementsAre(3.0f, 2.0f));
}

TEST(EmbeddingTableTest, EraseSkipsAbsentAndRepeatedKeys) {
  auto table = MakeTable(/*dim=*/1);
  ASSERT_TRUE(Assign(*table, {1, 2}, {1.0f, 2.0f}).ok());

  EXPECT_EQ(table->Erase({2, 3, 2}).value(), 1);
  EXPECT_EQ(table->size(), 1);
  EXPECT_THAT(FindAll(*table, {1, 2}), ElementsAre(1.0f, 0.0f));
}

TEST(EmbeddingTableTest, ErasedRowsAreReusedAndStartAfresh) {
  auto table = MakeTable(/*dim=*/8, AdagradConfig{});
  const std::vector<Key> keys = KeyRange(0, 20000);
  const std::vector<float> first = FindOrInsertAll(table.get(), keys);
  const std::vector<float> gradients(keys.size() * 8, 1.0f);
  ASSERT_TRUE(table->ApplyGradients({keys, gradients, 0.1f, false}).ok());
  const TableStats before = table->stats();

  for (int round = 0; round < 3; ++round) {
    EXPECT_EQ(table->Erase(keys).value(), 20000);
    EXPECT_EQ(FindOrInsertAll(table.get(), keys), first);
  }

  const TableStats after = table->stats();
  EXPECT_EQ(after.row_bytes + after.reserved_bytes,
            before.row_bytes + before.reserved_bytes);
  // A growth that was under way may have been completed, but none was begun.
  EXPECT_LE(after.index_bytes, before.index_bytes * 5 / 4);
  EXPECT_EQ(after.num_rows, 20000);
  EXPECT_EQ(after.inserted_rows, 80000);
  EXPECT_EQ(after.erased_rows, 60000);
}

TEST(EmbeddingTableTest, EmptyBatchesDoNothing) {
  auto table = MakeTable(/*dim=*/4);

  EXPECT_EQ(table->Find({}, {}).value(), 0);
  EXPECT_TRUE(table->FindOrInsert({}, {}).ok());
  EXPECT_EQ(table->ApplyGradients({{}, {}, 0.1f, true}).value(), 0);
  EXPECT_TRUE(Assign(*table, {}, {}).ok());
  EXPECT_TRUE(table->AssignRows({{}, {}, {}}, AssignMode::kSaved).ok());
  EXPECT_EQ(table->Erase({}).value(), 0);
  EXPECT_TRUE(
      table
          ->ForEachRow(
              1, [](const RowChunk&) { return absl::InternalError("no rows"); })
          .ok());
  EXPECT_EQ(table->size(), 0);
}

TEST(EmbeddingTableTest, WrongLengthNamesTheTableAndBothSizes) {
  auto table = MakeTable(/*dim=*/4, AdagradConfig{});
  std::vector<float> seven(7);
  const std::vector<float> eight(8);
  const std::vector<Key> keys = {1, 2};

  for (const absl::Status& status :
       {table->Find(keys, absl::MakeSpan(seven)).status(),
        table->FindOrInsert(keys, absl::MakeSpan(seven)).status(),
        table->ApplyGradients({keys, seven, 0.1f, true}).status(),
        Assign(*table, keys, seven),
        table->AssignRows({keys, seven, eight}, AssignMode::kSaved).status(),
        table->AssignRows({keys, eight, seven}, AssignMode::kSaved).status()}) {
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(status.message(), HasSubstr("table 'user': expected 8 floats"));
    EXPECT_THAT(status.message(), HasSubstr("got 7"));
  }
  EXPECT_EQ(table->size(), 0);
}

TEST(EmbeddingTableTest, CreateRejectsABadConfig) {
  EXPECT_EQ(EmbeddingTable::Create(MakeConfig(0)).status().code(),
            absl::StatusCode::kInvalidArgument);
}

TEST(EmbeddingTableTest, LargestRowsWork) {
  auto table = MakeTable(kMaxDim, AdamConfig{}, ConstantInitializer{1.0f});
  const std::vector<Key> keys = {1, 2, 3};

  EXPECT_THAT(FindOrInsertAll(table.get(), keys), Each(1.0f));
  const std::vector<float> gradients(keys.size() * kMaxDim, 1.0f);
  EXPECT_EQ(table->ApplyGradients({keys, gradients, 0.5f, false}).value(), 3);
  for (const float value : FindAll(*table, keys)) {
    ASSERT_NEAR(value, 0.5f, 1e-5f);
  }
  EXPECT_EQ(table->slot_floats(), 2 * kMaxDim + 1);
}

TEST(EmbeddingTableTest, StridesWasteAtMostAnEighthOrFifteenBytes) {
  for (const auto& [dim, optimizer, stride] :
       std::vector<std::tuple<int, OptimizerConfig, int64_t>>{
           {1, SgdConfig{}, 16},
           {4, SgdConfig{}, 16},
           {16, SgdConfig{}, 64},
           {16, AdagradConfig{}, 128},
           {15, AdagradConfig{}, 128},
           {16, AdamConfig{}, 208},
           {64, AdamConfig{}, 832},
           {64, AdamWConfig{}, 832}}) {
    EXPECT_EQ(MakeTable(dim, optimizer)->stats().row_stride_bytes, stride)
        << dim << " " << OptimizerName(optimizer);
  }
}

TEST(EmbeddingTableTest, ForEachRowVisitsEachRowOnceInBoundedChunks) {
  for (const int64_t max_rows : {1, 7, 1000, 1000000}) {
    auto table = MakeTable(/*dim=*/2, AdagradConfig{0.5f, 0.0f});
    const std::vector<Key> keys = KeyRange(-5000, 10000);
    const std::vector<float> embeddings = FindOrInsertAll(table.get(), keys);
    std::map<Key, std::vector<float>> seen;

    ASSERT_TRUE(
        table
            ->ForEachRow(
                max_rows,
                [&](const RowChunk& chunk) {
                  EXPECT_GT(chunk.keys.size(), 0u);
                  EXPECT_LE(static_cast<int64_t>(chunk.keys.size()), max_rows);
                  EXPECT_EQ(chunk.embeddings.size(), chunk.keys.size() * 2);
                  EXPECT_EQ(chunk.slots.size(), chunk.keys.size() * 2);
                  EXPECT_THAT(chunk.slots, Each(0.5f));
                  for (size_t i = 0; i < chunk.keys.size(); ++i) {
                    const bool is_new =
                        seen.emplace(
                                chunk.keys[i],
                                std::vector<float>{chunk.embeddings[2 * i],
                                                   chunk.embeddings[2 * i + 1]})
                            .second;
                    EXPECT_TRUE(is_new) << chunk.keys[i];
                  }
                  return absl::OkStatus();
                })
            .ok());

    ASSERT_EQ(seen.size(), keys.size());
    for (size_t i = 0; i < keys.size(); ++i) {
      ASSERT_THAT(seen[keys[i]],
                  ElementsAre(embeddings[2 * i], embeddings[2 * i + 1]));
    }
  }
}

TEST(EmbeddingTableTest, ReadRowsLeavesOutKeysWithoutARow) {
  auto table = MakeTable(/*dim=*/2);
  ASSERT_TRUE(Assign(*table, {7, 8}, {1.0f, 2.0f, 3.0f, 4.0f}).ok());
  std::map<Key, float> first_floats;

  ASSERT_TRUE(table
                  ->ReadRows(std::vector<Key>{8, 9, 7},
                             [&](const RowChunk& rows) {
                               for (size_t i = 0; i < rows.keys.size(); ++i) {
                                 first_floats[rows.keys[i]] =
                                     rows.embeddings[2 * i];
                               }
                               return absl::OkStatus();
                             })
                  .ok());

  EXPECT_EQ(first_floats, (std::map<Key, float>{{7, 1.0f}, {8, 3.0f}}));
}

TEST(EmbeddingTableTest, ForEachRowReturnsTheFirstErrorOfTheVisitor) {
  auto table = MakeTable(/*dim=*/1);
  FindOrInsertAll(table.get(), KeyRange(0, 1000));
  int num_calls = 0;

  const absl::Status status = table->ForEachRow(10, [&](const RowChunk&) {
    return ++num_calls == 3 ? absl::DataLossError("disk full")
                            : absl::OkStatus();
  });

  EXPECT_EQ(status, absl::DataLossError("disk full"));
  EXPECT_EQ(num_calls, 3);
  EXPECT_EQ(
      table->ForEachRow(0, [](const RowChunk&) { return absl::OkStatus(); })
          .code(),
      absl::StatusCode::kInvalidArgument);
}

TEST(EmbeddingTableTest, AssignRowsBringsAnExportedTableBack) {
  auto from = MakeTable(/*dim=*/4, AdamConfig{});
  const std::vector<Key> keys = KeyRange(100, 3000);
  std::vector<float> gradients(keys.size() * 4);
  for (size_t i = 0; i < gradients.size(); ++i) {
    gradients[i] = static_cast<float>(i % 17) - 8.0f;
  }
  FindOrInsertAll(from.get(), keys);
  ASSERT_TRUE(from->ApplyGradients({keys, gradients, 0.1f, false}).ok());

  auto to = MakeTable(/*dim=*/4, AdamConfig{});
  FindOrInsertAll(to.get(), KeyRange(0, 500));  // Some are overwritten.
  ASSERT_TRUE(from->ForEachRow(64,
                               [&](const RowChunk& chunk) {
                                 return to
                                     ->AssignRows({chunk.keys, chunk.embeddings,
                                                   chunk.slots},
                                                  AssignMode::kSaved)
                                     .status();
                               })
                  .ok());

  EXPECT_EQ(FindAll(*to, keys), FindAll(*from, keys));
  // Slots came along: the next step is the same, too.
  ASSERT_TRUE(from->ApplyGradients({keys, gradients, 0.1f, false}).ok());
  ASSERT_TRUE(to->ApplyGradients({keys, gradients, 0.1f, false}).ok());
  EXPECT_EQ(FindAll(*to, keys), FindAll(*from, keys));
}

TEST(EmbeddingTableTest, AFindAndAnUpdateOfOneBatchMayExceedTheKernelSize) {
  auto table = MakeTable(/*dim=*/1, SgdConfig{}, ConstantInitializer{0.0f});
  const std::vector<Key> keys = KeyRange(0, 100000);
  std::vector<float> gradients(keys.size());
  for (size_t i = 0; i < keys.size(); ++i) {
    gradients[i] = -static_cast<float>(i);
  }

  FindOrInsertAll(table.get(), keys);
  EXPECT_EQ(table->ApplyGradients({keys, gradients, 1.0f, false}).value(),
            100000);

  const std::vector<float> out = FindAll(*table, keys);
  for (size_t i = 0; i < keys.size(); ++i) {
    ASSERT_EQ(out[i], static_cast<float>(i));
  }
}

// Compares the table with a plain map through a random sequence of calls.
class EmbeddingTableModelTest : public ::testing::TestWithParam<int> {};

TEST_P(EmbeddingTableModelTest, BehavesLikeAnUnorderedMap) {
  const int dim = GetParam();
  const uint32_t seed = std::random_device()();
  SCOPED_TRACE(::testing::Message() << "seed " << seed);
  std::mt19937_64 random(seed);
  auto table = MakeTable(dim, SgdConfig{}, ConstantInitializer{0.25f});
  std::unordered_map<Key, std::vector<float>> model;
  const auto pick_keys = [&](size_t count, Key span) {
    std::vector<Key> keys(count);
    // Neighbours, negative ones, and some that share a bucket.
    for (Key& key : keys) {
      const Key k = static_cast<Key>(random() % span);
      switch (random() % 4) {
        case 0:
          key = KeyOfHash(0x7000000000000000ULL + static_cast<uint64_t>(k));
          break;
        case 1:
          key = std::numeric_limits<Key>::min() + k;
          break;
        default:
          key = k;
      }
    }
    return keys;
  };
  const auto unique = [](std::vector<Key> keys) {
    std::sort(keys.begin(), keys.end());
    keys.erase(std::unique(keys.begin(), keys.end()), keys.end());
    return keys;
  };
  const auto pick_floats = [&](size_t count) {
    std::vector<float> floats(count);
    for (float& f : floats) f = static_cast<float>(random() % 64);
    return floats;
  };
  const std::vector<float> initial(dim, 0.25f);
  Key span = 16;

  for (int step = 0; step < 600 / kSlowdown; ++step) {
    if (step % 40 == 39) span *= 2;
    std::vector<Key> keys = pick_keys(1 + random() % 400, span);
    const size_t floats = keys.size() * dim;
    switch (random() % 6) {
      case 0: {
        int64_t num_found = 0;
        std::vector<float> expected;
        for (const Key key : keys) {
          const auto it = model.find(key);
          num_found += it != model.end();
          const std::vector<float> row =
              it != model.end() ? it->second : std::vector<float>(dim);
          expected.insert(expected.end(), row.begin(), row.end());
        }
        std::vector<float> out(floats, -1.0f);
        ASSERT_EQ(table->Find(keys, absl::MakeSpan(out)).value(), num_found);
        ASSERT_EQ(out, expected);
        break;
      }
      case 1: {
        std::vector<float> expected;
        for (const Key key : keys) {
          const auto& row = model.try_emplace(key, initial).first->second;
          expected.insert(expected.end(), row.begin(), row.end());
        }
        ASSERT_EQ(FindOrInsertAll(table.get(), keys), expected);
        break;
      }
      case 2:
      case 3: {
        keys = unique(keys);
        const bool insert_missing = random() % 2 == 0;
        const std::vector<float> gradients = pick_floats(keys.size() * dim);
        int64_t num_updated = 0;
        for (size_t i = 0; i < keys.size(); ++i) {
          if (insert_missing) model.try_emplace(keys[i], initial);
          const auto it = model.find(keys[i]);
          if (it == model.end()) continue;
          ++num_updated;
          for (int j = 0; j < dim; ++j) {
            it->second[j] -= 0.5f * gradients[i * dim + j];
          }
        }
        ASSERT_EQ(table->ApplyGradients({keys, gradients, 0.5f, insert_missing})
                      .value(),
                  num_updated);
        break;
      }
      case 4: {
        const std::vector<float> values = pick_floats(floats);
        for (size_t i = 0; i < keys.size(); ++i) {
          model[keys[i]].assign(values.begin() + i * dim,
                                values.begin() + (i + 1) * dim);
        }
        ASSERT_TRUE(Assign(*table, keys, values).ok());
        break;
      }
      case 5: {
        int64_t num_erased = 0;
        for (const Key key : keys) num_erased += model.erase(key);
        ASSERT_EQ(table->Erase(keys).value(), num_erased);
        break;
      }
    }
    ASSERT_EQ(table->size(), static_cast<int64_t>(model.size()));
  }

  size_t num_rows = 0;
  ASSERT_TRUE(table
                  ->ForEachRow(
                      100,
                      [&](const RowChunk& chunk) {
                        num_rows += chunk.keys.size();
                        for (size_t i = 0; i < chunk.keys.size(); ++i) {
                          const auto it = model.find(chunk.keys[i]);
                          if (it == model.end() ||
                              !std::equal(it->second.begin(), it->second.end(),
                                          chunk.embeddings.begin() + i * dim)) {
                            return absl::InternalError(
                                std::to_string(chunk.keys[i]));
                          }
                        }
                        return absl::OkStatus();
                      })
                  .ok());
  EXPECT_EQ(num_rows, model.size());
}

INSTANTIATE_TEST_SUITE_P(Dims, EmbeddingTableModelTest,
                         ::testing::Values(1, 3, 8, 16, 33));

}  // namespace
}  // namespace tfswitch
