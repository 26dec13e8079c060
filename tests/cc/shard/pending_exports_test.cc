#include "cc/shard/pending_exports.h"

#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"

namespace tfswitch {
namespace {

constexpr Key kKey = 7;

// A table whose one row has gained a score of 8.
std::shared_ptr<EmbeddingTable> MakeTable() {
  TableConfig config;
  config.name = "t";
  config.dim = 1;
  config.optimizer = SgdConfig{};
  config.statistics.kind = StatisticsKind::kShowClick;
  config.statistics.nonclk_coeff = 1.0f;
  std::shared_ptr<EmbeddingTable> table =
      EmbeddingTable::Create(config).value();
  const std::vector<Key> keys = {kKey};
  const std::vector<float> gradients = {0.0f};
  const std::vector<float> shows = {8.0f};
  const std::vector<float> others = {0.0f};
  const std::vector<float> counts = {1.0f};
  GradientBatch batch;
  batch.keys = keys;
  batch.gradients = gradients;
  batch.insert_missing = true;
  batch.observations = {counts, shows, others};
  EXPECT_TRUE(table->ApplyGradients(batch).ok());
  return table;
}

float ScoreOf(const EmbeddingTable& table) {
  std::vector<UsageOfRow> usage(1);
  std::vector<KeyState> states(1);
  EXPECT_TRUE(table
                  .ReadUsage(std::vector<Key>{kKey}, kServersDay,
                             absl::MakeSpan(usage), absl::MakeSpan(states))
                  .ok());
  return usage[0].delta_score;
}

// An export of the row with a score of 8.
PendingExports::Export ExportOf(const std::shared_ptr<EmbeddingTable>& table,
                                const std::string& id, float score = 8.0f) {
  return {id, table, {kKey}, {score}};
}

TEST(PendingExportsTest, EachOfManyTablesOfAnExportIsCommitted) {
  PendingExports exports;
  std::vector<std::shared_ptr<EmbeddingTable>> tables;
  for (int i = 0; i < 40; ++i) {
    tables.push_back(MakeTable());
    exports.Keep(ExportOf(tables.back(), "a"));
  }
  for (const auto& table : tables) {
    ASSERT_EQ(ScoreOf(*table), 8.0f);
    EXPECT_TRUE(exports.End(*table, "a", /*commit=*/true).ok());
    EXPECT_EQ(ScoreOf(*table), 0.0f);
  }
}

TEST(PendingExportsTest, ScoresStayOfWhatIsNotPublishedOrNotKnown) {
  PendingExports exports;
  const auto table = MakeTable();
  exports.Keep(ExportOf(table, "a", 1.0f));
  EXPECT_TRUE(exports.End(*table, "b", true).ok());
  EXPECT_TRUE(exports.End(*MakeTable(), "a", true).ok());
  EXPECT_TRUE(exports.End(*table, "a", false).ok());
  EXPECT_TRUE(exports.End(*table, "a", true).ok());  // It is committed already.
  EXPECT_EQ(ScoreOf(*table), 8.0f);
}

TEST(PendingExportsTest, AnExportUnderTheSameIdIsReplaced) {
  PendingExports exports;
  const auto table = MakeTable();
  exports.Keep(ExportOf(table, "a", 1.0f));
  exports.Keep(ExportOf(table, "a", 2.0f));
  EXPECT_TRUE(exports.End(*table, "a", true).ok());
  EXPECT_TRUE(exports.End(*table, "a", true).ok());
  EXPECT_EQ(ScoreOf(*table), 6.0f);
}

TEST(PendingExportsTest, OnlyTheLastIdsAreKept) {
  PendingExports exports;
  const auto table = MakeTable();
  for (int i = 0; i < 17; ++i) {
    exports.Keep(ExportOf(table, absl::StrCat(i), 1.0f));
  }
  EXPECT_TRUE(exports.End(*table, "0", true).ok());
  EXPECT_EQ(ScoreOf(*table), 8.0f);
  EXPECT_TRUE(exports.End(*table, "1", true).ok());
  EXPECT_EQ(ScoreOf(*table), 7.0f);
}

TEST(PendingExportsTest, ThoseOfTablesThatAreGoneTakeNoPlace) {
  PendingExports exports;
  const auto table = MakeTable();
  exports.Keep(ExportOf(table, "first", 1.0f));
  for (int i = 0; i < 40; ++i) exports.Keep(ExportOf(MakeTable(), "gone"));
  for (int i = 0; i < 40; ++i) {
    exports.Keep(ExportOf(MakeTable(), absl::StrCat(i)));
  }
  EXPECT_TRUE(exports.End(*table, "first", true).ok());
  EXPECT_EQ(ScoreOf(*table), 7.0f);
}

}  // namespace
}  // namespace tfswitch
