#include "cc/table/change_log.h"

#include <algorithm>
#include <atomic>
#include <map>
#include <set>
#include <thread>
#include <vector>

#include "cc/table/embedding_table.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/cc/table/table_testing.h"

namespace tfswitch {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::UnorderedElementsAre;

TableConfig Config() {
  TableConfig config;
  config.name = "t";
  config.dim = 2;
  config.optimizer = SgdConfig{};
  config.initializer = ConstantInitializer{0.0f};
  return config;
}

// With weights for keys that wait for their third push.
TableConfig CandidateConfig() {
  TableConfig config = Config();
  config.statistics.kind = StatisticsKind::kUsage;
  config.optimizer = OptimizerConfig(std::vector<SegmentConfig>{
      {1, 1.0f, SgdConfig{}, {}}, {0, 1.0f, SgdConfig{}, {}}});
  config.admission = {MinCountAdmission{3}, {NotAdmittedKind::kWeight, 0.0f}};
  return config;
}

void Assign(EmbeddingTable* table, const std::vector<Key>& keys, float value) {
  ASSERT_TRUE(
      Assign(*table, keys, std::vector<float>(keys.size() * 2, value)).ok());
}

// One step that adds 1 to each float.
void Push(EmbeddingTable* table, const std::vector<Key>& keys,
          KeyObservations observations = {}) {
  const std::vector<float> gradients(keys.size() * 2, -1.0f);
  GradientBatch batch;
  batch.keys = keys;
  batch.gradients = gradients;
  batch.learning_rate = 1.0f;
  batch.insert_missing = true;
  batch.observations = observations;
  batch.day = 100.0f;
  ASSERT_TRUE(table->ApplyGradients(batch).ok());
}

// The changes that a visit of a table has shown.
struct Changes {
  std::map<Key, std::vector<float>> rows;
  std::vector<Key> score_keys;
  std::vector<float> scores;
  std::set<Key> removed;
  ChangeCursor cursor;
};

Changes Visit(EmbeddingTable* table, const ChangeFilter& filter) {
  Changes changes;
  const auto cursor = table->ForEachChange(
      filter, 64, [&](const ChangeChunk& chunk) -> absl::Status {
        for (size_t i = 0; i < chunk.keys.size(); ++i) {
          changes.rows[chunk.keys[i]] = {chunk.embeddings[2 * i],
                                         chunk.embeddings[2 * i + 1]};
          changes.removed.erase(chunk.keys[i]);
        }
        for (const Key key : chunk.removed) {
          changes.rows.erase(key);
          changes.removed.insert(key);
        }
        if (filter.rule.has_value()) {
          EXPECT_EQ(chunk.delta_scores.size(), chunk.keys.size());
          changes.score_keys.insert(changes.score_keys.end(),
                                    chunk.keys.begin(), chunk.keys.end());
          changes.scores.insert(changes.scores.end(),
                                chunk.delta_scores.begin(),
                                chunk.delta_scores.end());
        }
        return absl::OkStatus();
      });
  EXPECT_TRUE(cursor.ok()) << cursor.status();
  changes.cursor = cursor.value_or(ChangeCursor{});
  return changes;
}

Changes VisitAll(EmbeddingTable* table) { return Visit(table, {}); }

Changes VisitSince(EmbeddingTable* table, const ChangeCursor& cursor) {
  ChangeFilter filter;
  filter.since = cursor;
  return Visit(table, filter);
}

std::vector<Key> KeysOf(const Changes& changes) {
  std::vector<Key> keys;
  for (const auto& [key, row] : changes.rows) keys.push_back(key);
  return keys;
}

TEST(ChangeLogTest, EachVisitSeesWhatHasChangedSinceTheOneBefore) {
  const auto table = MakeTable(Config());
  Assign(table.get(), {1, 2, 3, -4}, 0.5f);
  const Changes all = VisitAll(table.get());
  EXPECT_THAT(KeysOf(all), ElementsAre(-4, 1, 2, 3));
  EXPECT_THAT(all.rows.at(2), ElementsAre(0.5f, 0.5f));

  EXPECT_THAT(KeysOf(VisitSince(table.get(), all.cursor)), IsEmpty());

  Push(table.get(), {2});
  std::vector<float> out(4);
  ASSERT_TRUE(
      table->FindOrInsert(std::vector<Key>{3, 9}, absl::MakeSpan(out)).ok());
  Assign(table.get(), {-4}, 7.0f);
  const Changes first = VisitSince(table.get(), all.cursor);
  EXPECT_THAT(KeysOf(first), ElementsAre(-4, 2, 9));
  EXPECT_THAT(first.rows.at(2), ElementsAre(1.5f, 1.5f));
  EXPECT_THAT(first.rows.at(9), ElementsAre(0.0f, 0.0f));

  Push(table.get(), {1});
  EXPECT_THAT(KeysOf(VisitSince(table.get(), first.cursor)), ElementsAre(1));
  // Another reader, who comes later.
  EXPECT_THAT(KeysOf(VisitSince(table.get(), all.cursor)),
              ElementsAre(-4, 1, 2, 9));
}

TEST(ChangeLogTest, RowsThatGoAreTold) {
  const auto table = MakeTable(Config());
  Assign(table.get(), {1, 2, 3}, 1.0f);
  const ChangeCursor cursor = VisitAll(table.get()).cursor;
  EXPECT_EQ(table->Erase(std::vector<Key>{1, 2, 5}).value(), 2);
  Assign(table.get(), {2}, 4.0f);  // It has come back.
  const Changes changes = VisitSince(table.get(), cursor);
  EXPECT_THAT(changes.removed, ElementsAre(1));
  EXPECT_THAT(KeysOf(changes), ElementsAre(2));
  EXPECT_THAT(VisitSince(table.get(), changes.cursor).removed, IsEmpty());
}

TEST(ChangeLogTest, EvictedRowsAreTold) {
  TableConfig config = Config();
  config.statistics.kind = StatisticsKind::kUsage;
  const auto table = MakeTable(config);
  table->NoteDay(100.0f);
  Assign(table.get(), {1, 2}, 1.0f);
  const ChangeCursor cursor = VisitAll(table.get()).cursor;
  Push(table.get(), {2});
  EvictionConfig rules;
  rules.max_rows = 1;
  rules.order = EvictionOrder::kLfu;
  ASSERT_TRUE(table->Shrink(rules, 100.0f, /*dry_run=*/true).ok());
  EXPECT_THAT(VisitSince(table.get(), cursor).removed, IsEmpty());
  ASSERT_TRUE(table->Shrink(rules, 100.0f, /*dry_run=*/false).ok());
  EXPECT_THAT(VisitSince(table.get(), cursor).removed, ElementsAre(1));
}

// The same, where there are so many that only the keys are wanted, sorted.
struct ManyChanges {
  std::vector<Key> keys;
  size_t num_removed = 0;
  ChangeCursor cursor;
};

ManyChanges VisitMany(EmbeddingTable* table, const ChangeFilter& filter) {
  ManyChanges changes;
  const auto cursor = table->ForEachChange(
      filter, 8192, [&](const ChangeChunk& chunk) -> absl::Status {
        changes.keys.insert(changes.keys.end(), chunk.keys.begin(),
                            chunk.keys.end());
        changes.num_removed += chunk.removed.size();
        return absl::OkStatus();
      });
  EXPECT_TRUE(cursor.ok()) << cursor.status();
  changes.cursor = cursor.value_or(ChangeCursor{});
  std::sort(changes.keys.begin(), changes.keys.end());
  return changes;
}

TEST(ChangeLogTest, StampsMoveWithTheirRows) {
  TableConfig config = Config();
  config.dim = 16;
  config.statistics.kind = StatisticsKind::kUsage;
  const auto table = MakeTable(config);
  constexpr int kRows = (1 << 20) / kSlowdown;
  constexpr int kLast = 1000;
  std::vector<Key> keys(kRows);
  for (int i = 0; i < kRows; ++i) keys[i] = i;
  const std::vector<float> rows(keys.size() * 16, 1.0f);
  ASSERT_TRUE(Assign(*table, keys, rows).ok());
  ChangeFilter filter;
  filter.since = VisitMany(table.get(), filter).cursor;
  // The last ones, which move when the others have gone.
  const std::vector<Key> last(keys.end() - kLast, keys.end());
  GradientBatch batch;
  batch.keys = last;
  batch.gradients = absl::MakeConstSpan(rows).first(last.size() * 16);
  batch.learning_rate = 1.0f;
  batch.day = 100.0f;
  ASSERT_TRUE(table->ApplyGradients(batch).ok());
  EvictionConfig rules;
  rules.max_rows = 2 * kLast;
  rules.order = EvictionOrder::kLfu;
  const TableStats before = table->stats();
  ASSERT_TRUE(table->Shrink(rules, 100.0f, false).ok());

  const TableStats after = table->stats();
  EXPECT_EQ(after.num_rows, 2 * kLast);
  if (kSlowdown == 1) {  // Else it is all in the pages that stay.
    // They have moved, or the memory behind them would still be there.
    EXPECT_GT(before.row_bytes, int64_t{64} * kRows);
    EXPECT_LT(after.row_bytes + after.reserved_bytes,
              (before.row_bytes + before.reserved_bytes) / 2);
  }
  const ManyChanges changes = VisitMany(table.get(), filter);
  EXPECT_EQ(changes.keys, last);
  EXPECT_EQ(changes.num_removed, kRows - 2 * kLast);
}

// They are as many as those that wait, whatever happens to them.
TEST(ChangeLogTest, PushesToCandidatesAreNotForgotten) {
  TableConfig config = CandidateConfig();
  config.admission.policy = MinCountAdmission{1000};
  const auto table = MakeTable(config);
  constexpr int kCandidates = 50000;
  std::vector<Key> keys(kCandidates);
  for (int i = 0; i < kCandidates; ++i) keys[i] = i;
  Push(table.get(), keys);
  const ChangeCursor cursor = VisitAll(table.get()).cursor;
  Push(table.get(), keys);
  const int64_t bytes = table->stats().change_bytes;
  EXPECT_GE(bytes, 4 * kCandidates);
  for (int i = 0; i < 10; ++i) Push(table.get(), keys);
  EXPECT_EQ(table->stats().change_bytes, bytes);
  const Changes changes = VisitSince(table.get(), cursor);
  EXPECT_EQ(changes.rows.size(), kCandidates);
  EXPECT_THAT(changes.rows.at(3), ElementsAre(12.0f, 0.0f));
  Push(table.get(), {5});
  EXPECT_THAT(KeysOf(VisitSince(table.get(), changes.cursor)), ElementsAre(5));
}

TEST(ChangeLogTest, StampsMoveWithTheirCandidates) {
  TableConfig config = CandidateConfig();
  config.statistics.kind = StatisticsKind::kShowClick;
  config.admission.policy = ShowClickAdmission{1e6f};
  const auto table = MakeTable(config);
  constexpr int kCandidates = (1 << 21) / kSlowdown;
  std::vector<Key> keys(kCandidates);
  for (int i = 0; i < kCandidates; ++i) keys[i] = i;
  Push(table.get(), keys);
  ChangeFilter filter;
  filter.since = VisitMany(table.get(), filter).cursor;
  const std::vector<Key> last(keys.end() - 1000, keys.end());
  const std::vector<float> many(last.size(), 100.0f);
  const std::vector<float> none(last.size(), 0.0f);
  Push(table.get(), last, {many, many, none});
  const int64_t before = table->stats().admission_bytes;
  EvictionConfig rules;
  rules.delete_threshold = 1.0f;
  ASSERT_TRUE(table->Shrink(rules, 100.0f, false).ok());
  EXPECT_EQ(table->stats().num_candidates, 1000);
  if (kSlowdown == 1) {  // As above.
    EXPECT_LT(table->stats().admission_bytes, before - (16 << 20));
  }
  const ManyChanges changes = VisitMany(table.get(), filter);
  EXPECT_EQ(changes.keys, last);
  EXPECT_EQ(changes.num_removed, kCandidates - 1000);
}

TEST(ChangeLogTest, MemoryIsCountedFromTheFirstVisitOn) {
  const auto table = MakeTable(Config());
  std::vector<Key> keys(100000);
  for (size_t i = 0; i < keys.size(); ++i) keys[i] = static_cast<Key>(i);
  Assign(table.get(), keys, 1.0f);
  EXPECT_EQ(table->stats().change_bytes, 0);
  VisitAll(table.get());
  const int64_t stamps = table->stats().change_bytes;
  EXPECT_GE(stamps, 4 * 100000);
  EXPECT_LT(stamps, 4 * 100000 + 16 * 4096);
  EXPECT_TRUE(table->Erase(keys).ok());
  EXPECT_GE(table->stats().change_bytes, stamps + 16 * 100000);
}

TEST(ChangeLogTest, WeightsOfCandidatesCountAsWhatTheirKeysReadAs) {
  const auto table = MakeTable(CandidateConfig());
  Push(table.get(), {1});
  const Changes all = VisitAll(table.get());
  EXPECT_THAT(all.rows.at(1), ElementsAre(1.0f, 0.0f));

  Push(table.get(), {1, 2});
  const Changes more = VisitSince(table.get(), all.cursor);
  EXPECT_THAT(more.rows.at(1), ElementsAre(2.0f, 0.0f));
  EXPECT_THAT(more.rows.at(2), ElementsAre(1.0f, 0.0f));

  Push(table.get(), {1});  // Its third: now it has a row.
  EXPECT_TRUE(table->Erase(std::vector<Key>{2}).ok());
  const Changes last = VisitSince(table.get(), more.cursor);
  EXPECT_THAT(last.rows.at(1), ElementsAre(3.0f, 1.0f));
  EXPECT_THAT(last.removed, ElementsAre(2));
}

TEST(ChangeLogTest, ARuleChoosesByScoreAndStartsAnewWhenItsModelIsWritten) {
  TableConfig config = Config();
  config.statistics.kind = StatisticsKind::kShowClick;
  config.statistics.nonclk_coeff = 0.1f;
  config.statistics.click_coeff = 1.0f;
  const auto table = MakeTable(config);
  const std::vector<float> counts = {1, 1, 1};
  const std::vector<float> shows = {10, 10, 2};
  const std::vector<float> clicks = {5, 1, 0};  // Scores 5.5, 1.9, 0.2.
  Push(table.get(), {1, 2, 3}, {counts, shows, clicks});

  ChangeFilter base;
  base.rule = ScoreRule{1.5f, 3.0f, 16.0f};
  base.day = 100.0f;
  const Changes saved = Visit(table.get(), base);
  EXPECT_THAT(KeysOf(saved), ElementsAre(1, 2));
  ASSERT_TRUE(table->SubtractDeltaScores(saved.score_keys, saved.scores).ok());

  ChangeFilter delta = base;
  delta.since = saved.cursor;
  EXPECT_THAT(KeysOf(Visit(table.get(), delta)), IsEmpty());
  const std::vector<float> more = {40};
  const std::vector<float> none = {0};
  const std::vector<float> one = {1};
  Push(table.get(), {2}, {one, more, none});
  const Changes changed = Visit(table.get(), delta);
  EXPECT_THAT(KeysOf(changed), ElementsAre(2));
  EXPECT_FLOAT_EQ(changed.scores[0], 4.0f);
  // Pushes that come while the model is written are not lost.
  Push(table.get(), {2}, {one, more, none});
  ASSERT_TRUE(
      table->SubtractDeltaScores(changed.score_keys, changed.scores).ok());
  EXPECT_THAT(KeysOf(Visit(table.get(), delta)), ElementsAre(2));

  delta.day = 117.0f;
  EXPECT_THAT(KeysOf(Visit(table.get(), delta)), IsEmpty());
}

TEST(ChangeLogTest, WhatTheRuleLeavesOutAfterALossIsRemoved) {
  TableConfig config = CandidateConfig();
  config.statistics.kind = StatisticsKind::kShowClick;
  config.statistics.nonclk_coeff = 1.0f;
  config.admission.policy = ShowClickAdmission{5.0f};
  const auto table = MakeTable(config);
  const auto push = [&](const std::vector<Key>& keys, float shows) {
    const std::vector<float> counts(keys.size(), 1.0f);
    const std::vector<float> all_shows(keys.size(), shows);
    const std::vector<float> clicks(keys.size(), 0.0f);
    Push(table.get(), keys, {counts, all_shows, clicks});
  };
  push({1, 2, 3, 4, 8}, 8.0f);  // Rows.
  push({5, 6, 7}, 3.0f);        // Candidates.
  ChangeFilter filter;
  filter.rule = ScoreRule{2.0f, 2.0f, 16.0f};
  filter.day = 100.0f;
  const Changes base = Visit(table.get(), filter);
  EXPECT_THAT(KeysOf(base), ElementsAre(1, 2, 3, 4, 5, 6, 7, 8));
  ASSERT_TRUE(table->SubtractDeltaScores(base.score_keys, base.scores).ok());

  EXPECT_TRUE(table->Erase(std::vector<Key>{1, 2, 3, 5, 6, 8}).ok());
  Assign(table.get(), {1}, 9.0f);  // A row without a score.
  push({2}, 1.0f);                 // A candidate below the threshold,
  push({3}, 3.0f);                 // one above it,
  push({5}, 6.0f);                 // and a row.
  push({7}, 1.0f);
  push({8}, 6.0f);  // A row that has gained nothing since it was exported.
  ASSERT_TRUE(table->SubtractDeltaScores({8}, {6.0f}).ok());
  filter.since = base.cursor;
  const Changes delta = Visit(table.get(), filter);
  EXPECT_THAT(KeysOf(delta), ElementsAre(3, 5, 7, 8));
  EXPECT_THAT(delta.removed, ElementsAre(1, 2, 6));
}

TEST(ChangeLogTest, ACursorOfAnotherTableIsRefused) {
  const auto table = MakeTable(Config());
  const auto other = MakeTable(Config());
  const ChangeCursor cursor = VisitAll(other.get()).cursor;
  ChangeFilter filter;
  filter.since = cursor;
  const absl::Status refused =
      table
          ->ForEachChange(filter, 64,
                          [](const ChangeChunk&) { return absl::OkStatus(); })
          .status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(refused.message()), HasSubstr("Export a base"));
  filter = {};
  filter.rule = ScoreRule{};
  EXPECT_THAT(std::string(table
                              ->ForEachChange(filter, 64,
                                              [](const ChangeChunk&) {
                                                return absl::OkStatus();
                                              })
                              .status()
                              .message()),
              HasSubstr("show_click"));
}

TEST(ChangeClockTest, AChangeHasTheStampOfTheMomentAtWhichItComesToAKey) {
  ChangeClock clock;
  clock.EndEpoch();
  std::thread reader;
  {
    const ChangeClock::Change early(&clock);
    const uint32_t begun = early.stamp().epoch;
    reader = std::thread([&] { clock.EndEpoch(); });  // Waits for `early`.
    // One that takes a row from a key to which `early` then gives a new one.
    uint32_t later = begun;
    while (later == begun) later = ChangeClock::Change(&clock).stamp().epoch;
    EXPECT_EQ(early.stamp().epoch, later);
  }
  reader.join();
}

TEST(KeyChangesTest, ForgetsTheOldestAndKnowsIt) {
  KeyChanges changes(/*max_keys=*/8);
  for (uint32_t stamp = 1; stamp <= 6; ++stamp) changes.Add(1, stamp);
  for (Key key = 2; key < 5; ++key) changes.Add(key, 6 + key);
  // The repeated ones have made room.
  EXPECT_TRUE(changes.Knows(0));
  EXPECT_THAT(changes.Since(6), UnorderedElementsAre(2, 3, 4));
  for (Key key = 10; key < 18; ++key) changes.Add(key, 100 + key);
  EXPECT_FALSE(changes.Knows(0));
  EXPECT_TRUE(changes.Knows(117));
  EXPECT_THAT(changes.Since(116), ElementsAre(17));
}

// Whatever threads do meanwhile, the visits together tell the last value of
// each row.
// Whether the table evicts when it is full: then writers end epochs, too.
class ChangeLogStressTest : public testing::TestWithParam<bool> {};

INSTANTIATE_TEST_SUITE_P(Tables, ChangeLogStressTest, testing::Bool());

TEST_P(ChangeLogStressTest, NothingIsMissedWhileRowsChange) {
  TableConfig config = Config();
  if (GetParam()) config.when_full = WhenFull::kEvict;
  const auto table = MakeTable(config);
  std::atomic<bool> is_over{false};
  std::vector<std::thread> threads;
  for (int t = 0; t < 2; ++t) {
    threads.emplace_back([&, t] {
      for (int round = 0; round < 300; ++round) {
        std::vector<Key> keys;
        for (Key i = 0; i < 50; ++i) keys.push_back((round * 7 + i * 3) % 400);
        std::sort(keys.begin(), keys.end());
        keys.erase(std::unique(keys.begin(), keys.end()), keys.end());
        Push(table.get(), keys);
        if (t == 0 && round % 10 == 0) {
          EXPECT_TRUE(
              table->Erase(std::vector<Key>{round % 400, (round + 1) % 400})
                  .ok());
        }
      }
      is_over = true;
    });
  }
  std::map<Key, std::vector<float>> known;
  ChangeCursor cursor;
  const auto follow = [&] {
    const Changes changes = VisitSince(table.get(), cursor);
    for (const Key key : changes.removed) known.erase(key);
    for (const auto& [key, row] : changes.rows) known[key] = row;
    cursor = changes.cursor;
  };
  while (!is_over) follow();
  for (std::thread& thread : threads) thread.join();
  follow();
  const Changes all = VisitAll(table.get());
  EXPECT_EQ(known, all.rows);
}

}  // namespace
}  // namespace tfswitch
