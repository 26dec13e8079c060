// Admission, statistics and eviction of one table, with threads. tests/python
// tests the interface of users.

#include <atomic>
#include <map>
#include <random>
#include <set>
#include <thread>
#include <vector>

#include "gtest/gtest.h"
#include "tests/cc/table/table_testing.h"

namespace tfswitch {
namespace {

TableConfig ConfigWith(AdmissionPolicy policy, int dim = 4) {
  TableConfig config = MakeConfig(dim, SgdConfig{}, ConstantInitializer{1.0f});
  config.admission.policy = policy;
  config.statistics.kind = StatisticsKind::kShowClick;
  return config;
}

int64_t Push(EmbeddingTable* table, const std::vector<Key>& keys, float day,
             const std::vector<float>& counts = {}, float gradient = -1.0f) {
  const std::vector<float> gradients(keys.size() * table->dim(), gradient);
  GradientBatch batch;
  batch.keys = keys;
  batch.gradients = gradients;
  batch.observations.counts = counts;
  batch.learning_rate = 1.0f;
  batch.day = day;
  batch.insert_missing = true;
  const auto updated = table->ApplyGradients(batch);
  EXPECT_TRUE(updated.ok()) << updated.status();
  return updated.value_or(-1);
}

std::set<Key> KeysOf(const EmbeddingTable& table) {
  std::set<Key> keys;
  EXPECT_TRUE(table
                  .ForEachRow(1000,
                              [&](const RowChunk& chunk) {
                                keys.insert(chunk.keys.begin(),
                                            chunk.keys.end());
                                return absl::OkStatus();
                              })
                  .ok());
  return keys;
}

TEST(RowLifeTest, ThreadsCountTheOccurrencesOfCandidatesTogether) {
  constexpr int kThreads = 4;
  constexpr int kRounds = 5;
  const auto table =
      MakeTable(ConfigWith(MinCountAdmission{kThreads * kRounds}));
  const std::vector<Key> keys = KeyRange(-500, 20'000 / kSlowdown);
  std::atomic<int64_t> updated{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < kRounds; ++i)
        updated += Push(table.get(), keys, 1.0f);
    });
  }
  for (std::thread& thread : threads) thread.join();

  // Each key had its row from the last of its pushes, which stepped it.
  EXPECT_EQ(updated, static_cast<int64_t>(keys.size()));
  EXPECT_EQ(table->size(), static_cast<int64_t>(keys.size()));
  EXPECT_EQ(table->stats().num_candidates, 0);
  for (const float value : FindAll(*table, keys)) ASSERT_EQ(value, 2.0f);
}

TEST(RowLifeTest, AMillionCandidatesAreKeptAndFound) {
  const int64_t count = 1'000'000 / (10 * kSlowdown);
  const auto table = MakeTable(ConfigWith(MinCountAdmission{2}));
  const std::vector<Key> keys = KeyRange(0, count);
  EXPECT_EQ(Push(table.get(), keys, 1.0f), 0);
  EXPECT_EQ(table->stats().num_candidates, count);
  std::set<Key> seen;
  ASSERT_TRUE(table
                  ->ForEachCandidate(
                      1000,
                      [&](const CandidateChunk& chunk) {
                        seen.insert(chunk.keys.begin(), chunk.keys.end());
                        EXPECT_EQ(chunk.records.size(), 5 * chunk.keys.size());
                        EXPECT_EQ(chunk.records[0], 1.0f);
                        return absl::OkStatus();
                      })
                  .ok());
  EXPECT_EQ(static_cast<int64_t>(seen.size()), count);
  EXPECT_EQ(Push(table.get(), keys, 1.0f), count);
  EXPECT_EQ(table->stats().num_candidates, 0);
}

TEST(RowLifeTest, ScalarAndVectorKernelsCountAlike) {
  for (const int dim : {1, 3, 8, 16, 17}) {
    const auto table = MakeTable(ConfigWith(AlwaysAdmission{}, dim));
    const std::vector<Key> keys = KeyRange(0, 3000);
    std::vector<float> counts;
    for (const Key key : keys) counts.push_back(static_cast<float>(key % 7));
    Push(table.get(), keys, 3.0f, counts);
    Push(table.get(), keys, 3.0f, counts);
    std::vector<UsageOfRow> usage(keys.size());
    std::vector<KeyState> states(keys.size());
    EXPECT_TRUE(table
                    ->ReadUsage(keys, 4.0f, absl::MakeSpan(usage),
                                absl::MakeSpan(states))
                    .ok());
    for (size_t i = 0; i < keys.size(); ++i) {
      ASSERT_EQ(states[i], KeyState::kRow);
      ASSERT_EQ(usage[i].count, 2 * counts[i]);
      // Shows that are not given are the counts; a day has passed.
      ASSERT_FLOAT_EQ(usage[i].show, 0.98f * 2 * counts[i]);
      ASSERT_EQ(usage[i].last_seen_day, 3.0f);
    }
    for (const float value : FindAll(*table, keys)) ASSERT_EQ(value, 3.0f);
  }
}

TEST(RowLifeTest, NoRowDependsOnWhereKeysLie) {
  // Some of these choose by chance, by cells that keys share, or among rows
  // that were seen on the same day.
  for (const AdmissionPolicy& policy :
       {AdmissionPolicy(AlwaysAdmission{}),
        AdmissionPolicy(MinCountAdmission{3}),
        AdmissionPolicy(BloomMinCountAdmission{3, 500, 0.3f}),
        AdmissionPolicy(ProbabilityAdmission{0.3f})}) {
    TableConfig config = ConfigWith(policy);
    config.num_virtual_shards = 1;  // Each has cells of its own.
    config.storage_dtype = {FloatType::kFloat16, FloatType::kFloat16,
                            Rounding::kStochastic};
    std::map<Key, std::vector<float>> expected;
    for (int t = 0; t < 3; ++t) {
      const auto table =
          MakeTable(config, t == 0 ? PlacesByTheirBits() : KeyedHash::Draw());
      std::mt19937 random(7);
      for (int step = 0; step < 50; ++step) {
        std::set<Key> keys;
        for (int i = 0; i < 100; ++i) keys.insert(random() % 1000);
        Push(table.get(), {keys.begin(), keys.end()}, 1.0f, {}, 0.01f);
      }
      EvictionConfig rules;
      rules.max_rows = table->size() / 2;
      ASSERT_TRUE(table->Shrink(rules, 1.0f, /*dry_run=*/false).ok());
      ASSERT_GT(table->size(), 50);
      std::map<Key, std::vector<float>> rows;
      for (const Key key : KeysOf(*table)) rows[key] = FindAll(*table, {key});
      if (t == 0) expected = rows;
      EXPECT_EQ(rows, expected) << "policy " << policy.index();
    }
  }
}

TEST(RowLifeTest, ReadersSeeWholeRowsWhileRowsAreEvictedAndMoved) {
  // Long rows, so that enough memory is free for rows to be moved; see
  // kMinReleaseBytes of cc/table/row_store.cc.
  constexpr int kDim = kSlowdown == 1 ? 1024 : 64;
  TableConfig config = MakeConfig(kDim, SgdConfig{}, ConstantInitializer{0.0f});
  config.statistics.kind = StatisticsKind::kUsage;
  const auto table = MakeTable(config);
  const std::vector<Key> staying = KeyRange(0, 200);
  const int64_t num_going = 20'000;
  EvictionConfig rules;
  rules.delete_after_unseen_days = 1.0f;

  std::atomic<bool> ends{false};
  std::atomic<int64_t> steps{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 2; ++t) {
    threads.emplace_back([&, t] {
      std::vector<float> out(staying.size() * kDim);
      while (!ends) {
        if (t == 0) {
          // The day of their last push, whatever the other threads do.
          EXPECT_EQ(Push(table.get(), staying, 1000.0f),
                    static_cast<int64_t>(staying.size()));
          ++steps;
          continue;
        }
        ASSERT_TRUE(table->Find(staying, absl::MakeSpan(out)).ok());
        for (size_t i = 0; i < staying.size(); ++i) {
          for (int d = 1; d < kDim; ++d) {
            ASSERT_EQ(out[i * kDim + d], out[i * kDim]);
          }
        }
      }
    });
  }
  for (int round = 0; round < 5; ++round) {
    Push(table.get(), KeyRange(1'000'000 + round, num_going / 2), 1.0f);
    // These come to lie behind rows that go, and have to move.
    Push(table.get(), KeyRange(-200 * (round + 1), 200), 1000.0f);
    Push(table.get(), KeyRange(2'000'000 + round, num_going / 2), 1.0f);
    const int64_t before = table->stats().reserved_bytes;
    const auto report = table->Shrink(rules, 1000.0f, /*dry_run=*/false);
    ASSERT_TRUE(report.ok());
    EXPECT_GE(report->by_ttl, num_going);
    // Not merely put on the free list. (A huge page of each stripe stays.)
    if (kSlowdown == 1) {
      EXPECT_LT(table->stats().reserved_bytes - before,
                report->evicted_bytes / 2);
    }
    for (int i = 0; i <= round; ++i) {
      for (const float value : FindAll(*table, KeyRange(-200 * (i + 1), 200))) {
        ASSERT_EQ(value, 1.0f);
      }
    }
  }
  ends = true;
  for (std::thread& thread : threads) thread.join();
  const auto last = table->Shrink(rules, 1000.0f, /*dry_run=*/false);
  ASSERT_TRUE(last.ok());
  EXPECT_EQ(KeysOf(*table).size(), staying.size() + 1000);
  for (const float value : FindAll(*table, staying)) {
    ASSERT_EQ(value, static_cast<float>(steps.load()));
  }
}

TEST(RowLifeTest, StatisticsAreReadWholeWhileTheyAreCounted) {
  TableConfig config = ConfigWith(AlwaysAdmission{});
  config.statistics.show_click_decay_rate = 1.0f;
  const auto table = MakeTable(config);
  const std::vector<Key> keys = KeyRange(0, 8);
  Push(table.get(), keys, 1.0f);
  std::atomic<bool> is_done{false};
  std::thread pusher([&] {
    for (int i = 0; i < 20'000 / kSlowdown; ++i) Push(table.get(), keys, 1.0f);
    is_done = true;
  });
  std::vector<UsageOfRow> usage(keys.size());
  std::vector<KeyState> states(keys.size());
  while (!is_done && !HasFailure()) {
    EXPECT_TRUE(table
                    ->ReadUsage(keys, 1.0f, absl::MakeSpan(usage),
                                absl::MakeSpan(states))
                    .ok());
    // A push without observations is one occurrence and one show.
    for (const UsageOfRow& row : usage) EXPECT_EQ(row.count, row.show);
  }
  pusher.join();
  EXPECT_TRUE(
      table
          ->ReadUsage(keys, 1.0f, absl::MakeSpan(usage), absl::MakeSpan(states))
          .ok());
  for (const UsageOfRow& row : usage) {
    EXPECT_EQ(row.count, 1.0f + static_cast<float>(20'000 / kSlowdown));
  }
}

TEST(RowLifeTest, WeightsAreNeverLostToReadersWhileKeysAreAdmitted) {
  TableConfig config = ConfigWith(MinCountAdmission{2}, /*dim=*/2);
  config.optimizer =
      OptimizerConfig({{1, 1.0f, SgdConfig{}, {}}, {0, 1.0f, SgdConfig{}, {}}});
  config.admission.not_admitted.kind = NotAdmittedKind::kWeight;
  const auto table = MakeTable(config);
  constexpr int64_t kKeys = 64;
  const int64_t num_rounds = 400 / kSlowdown;
  // Each round has its own keys, which become candidates and then rows.
  std::atomic<int64_t> candidates{0};
  std::thread admitter([&] {
    for (int64_t round = 0; round < num_rounds; ++round) {
      const std::vector<Key> keys = KeyRange(round * kKeys, kKeys);
      Push(table.get(), keys, 1.0f);  // From 1 to 2, and to 3.
      candidates.store(round + 1);
      Push(table.get(), keys, 1.0f);
    }
  });
  while (candidates.load() < num_rounds && !HasFailure()) {
    const int64_t round = candidates.load() - 1;
    if (round < 0) continue;
    const std::vector<float> found =
        FindAll(*table, KeyRange(round * kKeys, kKeys));
    for (size_t i = 0; i < found.size(); i += 2) EXPECT_GE(found[i], 2.0f);
  }
  admitter.join();
  EXPECT_EQ(table->size(), num_rounds * kKeys);
}

TEST(RowLifeTest, CountsDoWithoutStatistics) {
  TableConfig config = ConfigWith(BloomMinCountAdmission{2, 1000, 0.01f});
  config.statistics.kind = StatisticsKind::kNone;
  const auto table = MakeTable(config);
  EXPECT_EQ(Push(table.get(), {1, 2}, 1.0f, {2.0f, 1.0f}), 1);
  EXPECT_EQ(Push(table.get(), {1, 2}, 1.0f, {2.0f, 1.0f}), 2);
  EXPECT_EQ(FindAll(*table, {1})[0], 3.0f);
}

TEST(RowLifeTest, RowsWithoutStatisticsAreMovedTogether) {
  const auto table = MakeTable(MakeConfig(64));
  const int64_t num_rows = 600'000 / kSlowdown;
  const std::vector<Key> keys = KeyRange(0, num_rows);
  std::vector<float> values(keys.size() * 64, 0.0f);
  for (size_t i = 0; i < values.size(); ++i) {
    values[i] = i / 64 % 10 == 0 ? 1.0f : 0.0f;
  }
  ASSERT_TRUE(Assign(*table, keys, values).ok());
  EvictionConfig rules;
  rules.min_l2_norm = 1.0f;
  ASSERT_TRUE(table->Shrink(rules, 1.0f, /*dry_run=*/false).ok());
  EXPECT_EQ(table->size(), num_rows / 10);
  for (int64_t key = 0; key < num_rows; key += 310) {
    EXPECT_EQ(FindAll(*table, {key}), std::vector<float>(64, 1.0f));
  }
}

TEST(RowLifeTest, StatisticsOfASmallTableTakeLittleMemory) {
  const auto table = MakeTable(ConfigWith(AlwaysAdmission{}, /*dim=*/16));
  const std::vector<Key> keys = KeyRange(0, 150'000);
  FindOrInsertAll(table.get(), keys);
  const TableStats stats = table->stats();
  EXPECT_EQ(stats.row_stride_bytes, 64 + 20);
  // Beside rows and statistics no more than a page of each stripe.
  EXPECT_LT(stats.reserved_bytes, 16 * 2 * 4096);
}

TEST(RowLifeTest, ShrunkTablesAgreeWithAModel) {
  const unsigned seed = std::random_device()();
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  std::mt19937 random(seed);
  TableConfig config = MakeConfig(8, SgdConfig{}, ConstantInitializer{0.0f});
  config.statistics.kind = StatisticsKind::kUsage;
  const auto table = MakeTable(config);
  struct Row {
    float value = 0.0f;
    float day = 0.0f;
  };
  std::map<Key, Row> model;
  for (int round = 0; round < 60; ++round) {
    const auto day = static_cast<float>(round);
    const auto first = static_cast<Key>(random() % (60'000 / kSlowdown));
    const std::vector<Key> keys =
        KeyRange(first, 1 + random() % (20'000 / kSlowdown));
    Push(table.get(), keys, day);
    for (const Key key : keys) {
      model[key].value += 1.0f;
      model[key].day = day;
    }
    if (round % 5 != 4) continue;
    EvictionConfig rules;
    rules.delete_after_unseen_days = static_cast<float>(random() % 8);
    const auto report = table->Shrink(rules, day, /*dry_run=*/false);
    ASSERT_TRUE(report.ok());
    const size_t before = model.size();
    for (auto it = model.begin(); it != model.end();) {
      const bool goes = day - it->second.day > *rules.delete_after_unseen_days;
      it = goes ? model.erase(it) : std::next(it);
    }
    ASSERT_EQ(report->by_ttl, static_cast<int64_t>(before - model.size()));
    ASSERT_EQ(table->size(), static_cast<int64_t>(model.size()));
    for (const auto& [key, row] : model) {
      ASSERT_EQ(FindAll(*table, {key})[0], row.value) << key;
    }
  }
}

}  // namespace
}  // namespace tfswitch
