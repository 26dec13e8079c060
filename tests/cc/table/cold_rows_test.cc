// A table with rows on disk is equal to one that has all rows in memory.

#include <fcntl.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "cc/table/cold_tier.h"
#include "gtest/gtest.h"
#include "tests/cc/table/odd_optimizers.h"
#include "tests/cc/table/row_lives.h"
#include "tests/cc/table/table_testing.h"
#include "tests/cc/testing/deadlines.h"
#include "tests/cc/testing/scoped_folder.h"

namespace tfswitch {
namespace {

constexpr Key kKeys = 2000 / kSlowdown;

using Rows = std::map<Key, std::vector<float>>;

Rows RowsOf(const EmbeddingTable& table) {
  Rows rows;
  const auto dim = static_cast<size_t>(table.dim());
  const auto width = static_cast<size_t>(table.slot_floats());
  EXPECT_TRUE(
      table
          .ForEachRow(100,
                      [&](const RowChunk& chunk) {
                        for (size_t i = 0; i < chunk.keys.size(); ++i) {
                          std::vector<float> row(
                              chunk.embeddings.begin() + i * dim,
                              chunk.embeddings.begin() + (i + 1) * dim);
                          row.insert(row.end(), chunk.slots.begin() + i * width,
                                     chunk.slots.begin() + (i + 1) * width);
                          EXPECT_TRUE(rows.emplace(chunk.keys[i], row).second);
                        }
                        return absl::OkStatus();
                      })
          .ok());
  return rows;
}

std::vector<char> CandidatesOf(const EmbeddingTable& table) {
  std::map<Key, std::vector<float>> records;
  const auto width = static_cast<size_t>(CandidateFloats(table.config()));
  EXPECT_TRUE(
      table
          .ForEachCandidate(100,
                            [&](const CandidateChunk& chunk) {
                              for (size_t i = 0; i < chunk.keys.size(); ++i) {
                                records[chunk.keys[i]] = {
                                    chunk.records.begin() + i * width,
                                    chunk.records.begin() + (i + 1) * width};
                              }
                              return absl::OkStatus();
                            })
          .ok());
  std::vector<char> bytes;
  for (const auto& [key, record] : records) {
    const char* const from = reinterpret_cast<const char*>(record.data());
    bytes.insert(bytes.end(), from, from + width * sizeof(float));
  }
  return bytes;
}

// Each optimizer, kind of statistics, admission and eviction, and dense updates
// with and without a short form.
std::vector<TableConfig> AllConfigs() {
  std::vector<TableConfig> configs;
  for (const OptimizerConfig& optimizer : OddOptimizers()) {
    configs.push_back(MakeConfig(20, optimizer));
  }
  for (TableConfig config : RowLives(MakeConfig(4, AdagradConfig{}))) {
    if (config.eviction.max_rows.has_value()) continue;
    if (std::holds_alternative<MinCountAdmission>(config.admission.policy)) {
      config.admission.policy = MinCountAdmission{3};
    }
    if (std::holds_alternative<BloomMinCountAdmission>(
            config.admission.policy)) {
      config.admission.policy = BloomMinCountAdmission{3, 10'000, 0.01f};
    }
    configs.push_back(config);
  }
  for (const OptimizerConfig& optimizer :
       {OptimizerConfig(AdamConfig{}), OptimizerConfig(AdadeltaConfig{})}) {
    configs.push_back(MakeConfig(4, optimizer));
    configs.back().optimizer.is_dense = true;
  }
  configs.push_back(MakeConfig(300, AdamConfig{}));
  configs.push_back(MakeConfig(4, AdamConfig{}));
  configs.back().storage_dtype = {FloatType::kBfloat16, FloatType::kFloat16,
                                  Rounding::kStochastic};
  return configs;
}

class ColdRowsTest : public testing::Test {
 protected:
  std::unique_ptr<EmbeddingTable> MakeTiered(TableConfig config) {
    config.when_full = WhenFull::kDisk;
    auto table = MakeTable(config);
    if (folder_ == nullptr) {
      const auto folder = ColdFolder::Open(path_.path());
      EXPECT_TRUE(folder.ok()) << folder.status();
      folder_ = *folder;
    }
    table->SetColdFolder(folder_,
                         [](EmbeddingTable&) { return absl::OkStatus(); });
    return table;
  }

  std::vector<std::filesystem::path> Files() const {
    std::vector<std::filesystem::path> files;
    for (const auto& file : std::filesystem::directory_iterator(path_.path())) {
      if (file.path().extension() == ".cold") files.push_back(file.path());
    }
    return files;
  }

  ScopedFolder path_;
  std::shared_ptr<ColdFolder> folder_;
};

// Makes the same random calls to two tables, and compares all answers.
class Twins {
 public:
  Twins(EmbeddingTable* tiered, EmbeddingTable* plain, uint32_t seed)
      : tiered_(*tiered), plain_(*plain), random_(seed) {}

  void Call() {
    std::vector<Key> keys;
    for (size_t i = random_() % 300; i > 0; --i) {
      // The low keys are used more often.
      keys.push_back(static_cast<Key>(random_() % (1 + random_() % kKeys)));
    }
    std::sort(keys.begin(), keys.end());
    keys.erase(std::unique(keys.begin(), keys.end()), keys.end());
    const size_t dim = static_cast<size_t>(plain_.dim());
    std::vector<float> values(keys.size() * dim);
    for (float& value : values) {
      value = static_cast<float>(random_() % 64) / 64 - 0.4f;
    }
    std::vector<float> other(values.size());
    switch (random_() % 12) {
      case 0:
        ASSERT_TRUE(Assign(tiered_, keys, values).ok());
        ASSERT_TRUE(Assign(plain_, keys, values).ok());
        break;
      case 1:
        ASSERT_EQ(tiered_.Erase(keys).value(), plain_.Erase(keys).value());
        break;
      case 2:
        ASSERT_EQ(tiered_.FindOrInsert(keys, absl::MakeSpan(values)).value(),
                  plain_.FindOrInsert(keys, absl::MakeSpan(other)).value());
        ASSERT_EQ(values, other);
        break;
      case 3:
        ASSERT_EQ(tiered_.Find(keys, absl::MakeSpan(values)).value(),
                  plain_.Find(keys, absl::MakeSpan(other)).value());
        ASSERT_EQ(values, other);
        break;
      case 4:
        CompareUsage(keys);
        break;
      case 5:
        Shrink();
        break;
      case 6:
      case 7:
        ASSERT_TRUE(tiered_.Demote(kKeys / 3, {}).ok());
        break;
      default: {
        GradientBatch batch;
        batch.keys = keys;
        batch.gradients = values;
        batch.learning_rate = 0.125f;
        batch.day = day_ += 0.01f;
        batch.insert_missing = true;
        batch.number = ++number_;
        ASSERT_EQ(tiered_.ApplyGradients(batch).value(),
                  plain_.ApplyGradients(batch).value());
      }
    }
    ASSERT_EQ(tiered_.size(), plain_.size());
  }

  void CompareAll() {
    EXPECT_EQ(RowsOf(tiered_), RowsOf(plain_));
    EXPECT_EQ(CandidatesOf(tiered_), CandidatesOf(plain_));
    EXPECT_EQ(tiered_.stats().inserted_rows, plain_.stats().inserted_rows);
    EXPECT_EQ(tiered_.stats().erased_rows, plain_.stats().erased_rows);
  }

 private:
  void CompareUsage(const std::vector<Key>& keys) {
    std::vector<UsageOfRow> usage[2];
    std::vector<KeyState> states[2];
    int n = 0;
    for (const EmbeddingTable* table : {&tiered_, &plain_}) {
      usage[n].resize(keys.size());
      states[n].resize(keys.size());
      ASSERT_TRUE(table
                      ->ReadUsage(keys, day_, absl::MakeSpan(usage[n]),
                                  absl::MakeSpan(states[n]))
                      .ok());
      ++n;
    }
    ASSERT_EQ(states[0], states[1]);
    for (size_t i = 0; i < keys.size(); ++i) {
      ASSERT_EQ(usage[0][i].count, usage[1][i].count);
      ASSERT_EQ(usage[0][i].show, usage[1][i].show);
      ASSERT_EQ(usage[0][i].last_seen_day, usage[1][i].last_seen_day);
    }
    Rows rows[2];
    n = 0;
    for (const EmbeddingTable* table : {&tiered_, &plain_}) {
      ASSERT_TRUE(
          table
              ->ReadRows(keys,
                         [&](const RowChunk& chunk) {
                           for (size_t i = 0; i < chunk.keys.size(); ++i) {
                             rows[n][chunk.keys[i]].assign(
                                 chunk.embeddings.begin() + i * table->dim(),
                                 chunk.embeddings.begin() +
                                     (i + 1) * table->dim());
                           }
                           return absl::OkStatus();
                         })
              .ok());
      ++n;
    }
    ASSERT_EQ(rows[0], rows[1]);
  }

  void Shrink() {
    EvictionConfig rules;
    const auto kind = plain_.config().statistics.kind;
    if (kind == StatisticsKind::kNone || random_() % 4 == 0) {
      // Under a rule with a short form, a shrink by norm lets the rows in
      // memory catch up in two parts, which rounds differently.
      if (plain_.config().optimizer.is_dense) return;
      rules.min_l2_norm = 0.01f;
    } else if (random_() % 2 == 0) {
      rules.delete_after_unseen_days = 0.2f;
    } else {
      rules.max_rows = static_cast<uint64_t>(kKeys / 2);
    }
    const auto tiered = tiered_.Shrink(rules, day_, /*dry_run=*/false);
    const auto plain = plain_.Shrink(rules, day_, /*dry_run=*/false);
    ASSERT_TRUE(tiered.ok() && plain.ok()) << tiered.status();
    ASSERT_EQ(tiered->evicted_rows, plain->evicted_rows);
    ASSERT_EQ(tiered->remaining_rows, plain->remaining_rows);
  }

  EmbeddingTable& tiered_;
  EmbeddingTable& plain_;
  std::mt19937 random_;
  float day_ = 10.0f;
  uint64_t number_ = 0;
};

TEST_F(ColdRowsTest, EqualsATableInMemoryToTheBit) {
  uint32_t seed = 0;
  for (const TableConfig& config : AllConfigs()) {
    SCOPED_TRACE(seed);
    const auto tiered = MakeTiered(config);
    const auto plain = MakeTable(config);
    Twins twins(tiered.get(), plain.get(), ++seed);
    for (int i = 0; i < 60 && !HasFatalFailure(); ++i) twins.Call();
    ASSERT_NO_FATAL_FAILURE(twins.CompareAll());
    if (HasFailure()) return;
    EXPECT_GT(tiered->stats().demoted_rows, 0);
  }
}

TEST_F(ColdRowsTest, ChangesSinceACursorIncludeRowsThatHaveMovedToDisk) {
  const auto table = MakeTiered(MakeConfig(2));
  const auto visit = [&](ChangeCursor since, std::vector<Key>* keys) {
    ChangeFilter filter;
    filter.since = since;
    return *table->ForEachChange(filter, 100, [&](const ChangeChunk& chunk) {
      keys->insert(keys->end(), chunk.keys.begin(), chunk.keys.end());
      keys->insert(keys->end(), chunk.removed.begin(), chunk.removed.end());
      return absl::OkStatus();
    });
  };
  const auto all = KeyRange(0, 100);
  FindOrInsertAll(table.get(), all);
  std::vector<Key> seen;
  ChangeCursor cursor = visit({}, &seen);
  EXPECT_EQ(seen.size(), 100u);
  ASSERT_EQ(table->Demote(100, {}).value(), 100);
  seen.clear();
  cursor = visit(cursor, &seen);
  EXPECT_TRUE(seen.empty());  // A move is no change.
  const auto some = KeyRange(10, 20);
  ASSERT_TRUE(Assign(*table, some, std::vector<float>(40, 1.0f)).ok());
  ASSERT_EQ(table->Erase(std::vector<Key>{50, 51}).value(), 2);
  ASSERT_EQ(table->Demote(100, {}).value(), 20);
  cursor = visit(cursor, &seen);
  std::sort(seen.begin(), seen.end());
  std::vector<Key> expected = some;
  expected.insert(expected.end(), {50, 51});
  EXPECT_EQ(seen, expected);
}

TEST_F(ColdRowsTest, NoGradientIsLostWhileRowsMove) {
  TableConfig config = MakeConfig(4, SgdConfig{}, ConstantInitializer{});
  const auto table = MakeTiered(config);
  const auto all = KeyRange(0, kKeys);
  FindOrInsertAll(table.get(), all);
  constexpr int kThreads = 3;
  const int rounds = 300 / kSlowdown;
  std::atomic<bool> is_over{false};
  std::vector<std::thread> helpers;
  helpers.emplace_back([&] {
    while (!is_over) ASSERT_TRUE(table->Demote(kKeys / 8, {}).ok());
  });
  helpers.emplace_back([&] {
    // Every key has a row at any time.
    std::vector<float> rows(all.size() * 4);
    while (!is_over) {
      ASSERT_EQ(table->Find(all, absl::MakeSpan(rows)).value(), kKeys);
      ASSERT_EQ(RowsOf(*table).size(), all.size());
    }
  });
  std::vector<std::thread> workers;
  for (int t = 0; t < kThreads; ++t) {
    workers.emplace_back([&, t] {
      std::mt19937 random(static_cast<uint32_t>(t));
      for (int i = 0; i < rounds; ++i) {
        const Key step = 1 + static_cast<Key>(random() % 4);
        for (Key first = 0; first < step; ++first) {
          std::vector<Key> keys;
          for (Key key = first; key < kKeys; key += step) keys.push_back(key);
          const std::vector<float> gradients(keys.size() * 4, -1.0f);
          const auto updated =
              table->ApplyGradients({keys, gradients, 1.0f, true});
          ASSERT_EQ(updated.value(), static_cast<int64_t>(keys.size()));
        }
      }
    });
  }
  for (std::thread& worker : workers) worker.join();
  is_over = true;
  for (std::thread& helper : helpers) helper.join();
  const float expected = static_cast<float>(kThreads * rounds);
  for (const auto& [key, row] : RowsOf(*table)) {
    ASSERT_EQ(row, std::vector<float>(4, expected)) << key;
  }
  const TableStats stats = table->stats();
  EXPECT_GT(stats.promoted_rows, 0);
  EXPECT_EQ(stats.inserted_rows, kKeys);
  EXPECT_EQ(stats.erased_rows, 0);
}

TEST_F(ColdRowsTest, MergesKeepFewFilesAndLittleMemory) {
  const auto table = MakeTiered(MakeConfig(8, AdagradConfig{}));
  constexpr int64_t kAtOnce = 2000;
  constexpr int64_t kTimes = 100;
  for (int64_t i = 0; i < kTimes; ++i) {
    FindOrInsertAll(table.get(), KeyRange(i * kAtOnce, kAtOnce));
    ASSERT_EQ(table->Demote(kAtOnce, {}).value(), kAtOnce);
  }
  for (const absl::Time end = Soon();
       Files().size() > 24 && SteadyNow() < end;) {
    std::this_thread::yield();
  }
  const TableStats stats = table->stats();
  EXPECT_EQ(stats.cold_rows, kTimes * kAtOnce);
  EXPECT_LE(Files().size(), 24u);
  // Without the index and rows of memory.
  EXPECT_LT(static_cast<double>(stats.cold_memory_bytes) / stats.cold_rows,
            2.5);
  EXPECT_LT(stats.cold_written_bytes, 5 * stats.cold_file_bytes);
  EXPECT_EQ(RowsOf(*table).size(), static_cast<size_t>(kTimes * kAtOnce));
}

TEST_F(ColdRowsTest, FilesEndWithTheTableOrAtTheNextStart) {
  {
    const auto table = MakeTiered(MakeConfig(2));
    FindOrInsertAll(table.get(), KeyRange(0, 100));
    ASSERT_TRUE(table->Demote(100, {}).ok());
    EXPECT_EQ(Files().size(), 1u);
    // Another process must not use the folder meanwhile.
    EXPECT_EQ(ColdFolder::Open(path_.path()).status().code(),
              absl::StatusCode::kAborted);
  }
  EXPECT_TRUE(Files().empty());
  folder_.reset();
  std::ofstream(path_.path() + "/7.cold") << "left by a killed process";
  std::ofstream(path_.path() + "/notes.txt") << "of somebody else";
  ASSERT_TRUE(ColdFolder::Open(path_.path()).ok());
  EXPECT_TRUE(Files().empty());
  EXPECT_TRUE(std::filesystem::exists(path_.path() + "/notes.txt"));
}

TEST_F(ColdRowsTest, ADamagedBlockIsAnErrorAndNeverAValue) {
  const auto table = MakeTiered(MakeConfig(16));
  const auto all = KeyRange(0, 1000);
  FindOrInsertAll(table.get(), all);
  ASSERT_EQ(table->Demote(1000, {}).value(), 1000);
  ASSERT_EQ(Files().size(), 1u);
  const std::string file = Files()[0].string();
  {
    std::fstream damaged(file, std::ios::in | std::ios::out);
    damaged.seekp(4096 * 3 + 100);
    damaged.put('\x5a');
  }
  std::vector<float> rows(all.size() * 16);
  const auto expect_damage = [&](const absl::Status& status) {
    EXPECT_EQ(status.code(), absl::StatusCode::kInternal);
    EXPECT_NE(status.message().find(file), absl::string_view::npos) << status;
  };
  expect_damage(table->Find(all, absl::MakeSpan(rows)).status());
  expect_damage(table->Promote(all));
  expect_damage(table->Erase(all).status());
  expect_damage(
      table->ForEachRow(100, [](const RowChunk&) { return absl::OkStatus(); }));
  const std::vector<float> gradients(rows.size(), 1.0f);
  expect_damage(table->ApplyGradients({all, gradients, 1.0f, true}).status());
  // The other blocks can be read.
  int64_t num_found = 0;
  for (const Key key : all) {
    std::vector<float> row(16);
    const auto found = table->Find({&key, 1}, absl::MakeSpan(row));
    if (found.ok()) num_found += *found;
  }
  EXPECT_GT(num_found, 900);
  EXPECT_LT(num_found, 1000);
}

}  // namespace
}  // namespace tfswitch
