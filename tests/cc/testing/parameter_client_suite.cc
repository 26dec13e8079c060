#include "tests/cc/testing/parameter_client_suite.h"

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <limits>
#include <memory>
#include <numeric>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "cc/base/half_floats.h"
#include "cc/base/steady_clock.h"
#include "cc/client/checkpoints.h"
#include "cc/client/parameter_client.h"
#include "cc/wire/codec.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/cc/testing/coordination.h"
#include "tests/cc/testing/many_calls.h"
#include "tests/cc/testing/saves.h"
#include "tests/cc/testing/scoped_folder.h"

namespace tfswitch {
namespace {

absl::Status CommitExport(ParameterClient& client, const std::string& table,
                          const std::string& export_id, bool commit) {
  v1::CommitExportRequest request;
  request.set_table(table);
  request.set_export_id(export_id);
  request.set_commit(commit);
  v1::CommitExportResponse response;
  return client.Call(request, &response);
}

TEST_P(ParameterClientSuite, PullWithoutInsertReadsZerosAndCreatesNothing) {
  ASSERT_TRUE(client().CreateTable(Config("t", 3)).ok());

  EXPECT_THAT(Pull("t", 3, {5, -5}), testing::Each(0.0f));
  EXPECT_EQ(Size("t"), 0);
}

TEST_P(ParameterClientSuite, PullMarksMissingRowsAndCreatesNone) {
  ASSERT_TRUE(client().CreateTable(Config("t", 2)).ok());
  const std::vector<float> present = Pull("t", 2, {1}, /*insert_missing=*/true);
  PullArgs args;
  args.table = "t";
  args.dim = 2;
  const std::vector<Key> keys = {2, 1, 3};
  args.keys = keys;
  args.mark_missing = true;
  std::vector<float> rows(6);
  ASSERT_TRUE(client().Pull(args, absl::MakeSpan(rows)).ok());
  for (const int i : {0, 1, 4, 5}) {
    EXPECT_EQ(BitsOfFloat(rows[i]), kMissingMark);
  }
  EXPECT_EQ(rows[2], present[0]);
  EXPECT_EQ(rows[3], present[1]);
  EXPECT_EQ(Pull("t", 2, {2}), std::vector<float>({0, 0}));
}

TEST_P(ParameterClientSuite, RowsAndGradientsMayTravelAs16BitNumbers) {
  ASSERT_TRUE(client().CreateTable(Config("t", 3)).ok());
  // So many that a call is sent in pieces.
  std::vector<Key> keys(30000);
  std::iota(keys.begin(), keys.end(), Key{-500});
  const std::vector<float> before = Pull("t", 3, keys, /*insert_missing=*/true);
  for (const FloatType type : {FloatType::kFloat16, FloatType::kBfloat16}) {
    std::vector<Key> pulled = keys;
    pulled.push_back(-1000);
    PullArgs pull;
    pull.table = "t";
    pull.dim = 3;
    pull.keys = pulled;
    pull.mark_missing = true;
    pull.wire_dtype = type;
    std::vector<float> rows(pulled.size() * 3);
    ASSERT_TRUE(client().Pull(pull, absl::MakeSpan(rows)).ok());
    std::vector<float> rounded = Pull("t", 3, keys);
    const bool is_remote = !client().AskServers()->empty();
    if (is_remote) RoundRows(type, absl::MakeSpan(rounded));
    EXPECT_EQ(BitsOfFloat(rows.back()), kMissingMark);
    rows.resize(rounded.size());
    EXPECT_EQ(rows, rounded);

    PushArgs push;
    push.table = "t";
    push.dim = 3;
    push.keys = keys;
    const std::vector<float> gradients(
        before.size(), type == FloatType::kFloat16 ? 0.25f : -0.25f);
    push.gradients = gradients;
    push.learning_rate = 1.0f;
    push.keys_are_unique = true;
    push.wire_dtype = type;
    ASSERT_TRUE(client().Push(push).ok());
  }
  const std::vector<float> after = Pull("t", 3, keys);
  for (size_t i = 0; i < before.size(); ++i) {
    ASSERT_NEAR(after[i], before[i], 1e-6f);
  }
}

TEST_P(ParameterClientSuite, PullWithInsertCreatesEachKeyOnce) {
  ASSERT_TRUE(client().CreateTable(Config("t", 3)).ok());

  const std::vector<float> first = Pull("t", 3, {5, 9, 5, -1}, true);

  EXPECT_EQ(Size("t"), 3);
  EXPECT_EQ(Pull("t", 3, {5, 9, 5, -1}), first);
  EXPECT_THAT(first, testing::Not(testing::Each(0.0f)));
}

TEST_P(ParameterClientSuite, EveryInt64IsAnOrdinaryKey) {
  ASSERT_TRUE(client().CreateTable(Config("t", 2)).ok());
  const std::vector<Key> keys = {0,
                                 -1,
                                 1,
                                 std::numeric_limits<Key>::min(),
                                 std::numeric_limits<Key>::max(),
                                 std::numeric_limits<Key>::min() + 1,
                                 std::numeric_limits<Key>::max() - 1};
  std::vector<float> values(keys.size() * 2);
  std::iota(values.begin(), values.end(), 1.0f);

  ASSERT_TRUE(Assign("t", 2, keys, values).ok());

  EXPECT_EQ(Pull("t", 2, keys), values);
  EXPECT_EQ(Size("t"), static_cast<int64_t>(keys.size()));
}

TEST_P(ParameterClientSuite, EmptyBatchesAreFine) {
  ASSERT_TRUE(client().CreateTable(Config("t", 2)).ok());

  EXPECT_TRUE(Pull("t", 2, {}, true).empty());
  EXPECT_TRUE(Push("t", 2, {}, {}).ok());
  EXPECT_TRUE(Assign("t", 2, {}, {}).ok());
  EXPECT_EQ(client().Erase("t", {}).value(), 0);
  EXPECT_EQ(Size("t"), 0);
}

TEST_P(ParameterClientSuite, AnOpenOptimizerIsChosenByTheFirstThatIsNot) {
  TableConfig open = Config("t", 1);
  open.optimizer = AdamConfig();
  open.optimizer.is_open = true;
  TableConfig sgd = Config("t", 1);
  sgd.optimizer = SgdConfig();
  TableConfig adagrad = Config("t", 1);
  adagrad.optimizer = AdagradConfig();
  const std::vector<Key> keys = ManyKeys(5000);
  const std::vector<float> gradients(keys.size(), 1.0f);
  ASSERT_TRUE(client().CreateTable(open).ok());
  std::vector<float> values(keys.size());
  std::iota(values.begin(), values.end(), 1.0f);
  ASSERT_TRUE(Assign("t", 1, keys, values).ok());

  const absl::Status refused = Push("t", 1, keys, gradients).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition) << refused;
  EXPECT_TRUE(client().CreateTable(sgd).ok());
  EXPECT_TRUE(client().CreateTable(open).ok());
  EXPECT_TRUE(absl::IsAlreadyExists(client().CreateTable(adagrad)));

  EXPECT_EQ(Pull("t", 1, keys), values);
  EXPECT_TRUE(Push("t", 1, keys, gradients, 0.5f).ok());
  for (float& value : values) value -= 0.5f;
  EXPECT_EQ(Pull("t", 1, keys), values);
  EXPECT_EQ(client().ListTables("t").value()[0].config.optimizer,
            sgd.optimizer);
}

TEST_P(ParameterClientSuite, PushTakesOneStepPerKeyWithDuplicatesSummed) {
  ASSERT_TRUE(client().CreateTable(Config("t", 2)).ok());
  ASSERT_TRUE(Assign("t", 2, {1, 2}, {10, 20, 30, 40}).ok());

  const auto result = Push("t", 2, {1, 2, 1}, {1, 2, 3, 4, 0.5f, 0.25f}, 2.0f);

  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->num_rows, 2);
  EXPECT_THAT(Pull("t", 2, {1, 2}),
              testing::ElementsAre(10 - 2 * 1.5f, 20 - 2 * 2.25f, 30 - 2 * 3,
                                   40 - 2 * 4));
}

TEST_P(ParameterClientSuite, PushOfMissingKeyIsSkippedUnlessAskedToInsert) {
  ASSERT_TRUE(client().CreateTable(Config("t", 1)).ok());

  EXPECT_EQ(Push("t", 1, {8}, {1.0f}, 1.0f, false)->num_rows, 0);
  EXPECT_EQ(Size("t"), 0);
  EXPECT_EQ(Push("t", 1, {8}, {1.0f}, 1.0f, true)->num_rows, 1);
  EXPECT_EQ(Size("t"), 1);
}

TEST_P(ParameterClientSuite, PushThenPullEqualsPullThenPush) {
  ASSERT_TRUE(client().CreateTable(Config("a", 4)).ok());
  ASSERT_TRUE(client().CreateTable(Config("b", 4)).ok());
  const std::vector<Key> keys = ManyKeys(50);
  const std::vector<float> gradients(50 * 4, 0.5f);

  Pull("a", 4, keys, true);
  ASSERT_TRUE(Push("a", 4, keys, gradients).ok());
  ASSERT_TRUE(Push("b", 4, keys, gradients).ok());

  EXPECT_EQ(Pull("a", 4, keys), Pull("b", 4, keys));
}

TEST_P(ParameterClientSuite, FirstValueDependsOnSeedAndKeyOnly) {
  ASSERT_TRUE(client().CreateTable(Config("a", 4)).ok());
  ASSERT_TRUE(client().CreateTable(Config("b", 4)).ok());
  TableConfig other = Config("c", 4);
  other.seed = 8;
  ASSERT_TRUE(client().CreateTable(other).ok());
  std::vector<Key> keys = ManyKeys(1000);

  const std::vector<float> forward = Pull("a", 4, keys, true);
  std::vector<Key> reversed(keys.rbegin(), keys.rend());
  Pull("b", 4, reversed, true);

  EXPECT_EQ(Pull("b", 4, keys), forward);
  EXPECT_NE(Pull("c", 4, keys, true), forward);
}

TEST_P(ParameterClientSuite, LargeBatchReachesEveryRow) {
  ASSERT_TRUE(client().CreateTable(Config("t", 8)).ok());
  const std::vector<Key> keys = ManyKeys(20000);
  const std::vector<float> before = Pull("t", 8, keys, true);
  std::vector<float> gradients(before.size());
  for (size_t i = 0; i < gradients.size(); ++i) {
    gradients[i] = static_cast<float>(i % 100);
  }

  ASSERT_TRUE(Push("t", 8, keys, gradients).ok());

  const std::vector<float> after = Pull("t", 8, keys);
  for (size_t i = 0; i < after.size(); ++i) {
    ASSERT_EQ(after[i], before[i] - gradients[i]) << "element " << i;
  }
}

TEST_P(ParameterClientSuite, EraseRemovesAndTheKeyStartsAnew) {
  ASSERT_TRUE(client().CreateTable(Config("t", 2)).ok());
  const std::vector<float> first = Pull("t", 2, {1, 2}, true);
  ASSERT_TRUE(Push("t", 2, {1, 2}, {1, 1, 1, 1}).ok());

  EXPECT_EQ(client().Erase("t", {1, 1, 77}).value(), 1);

  EXPECT_EQ(Size("t"), 1);
  EXPECT_THAT(Pull("t", 2, {1}), testing::Each(0.0f));
  EXPECT_EQ(Pull("t", 2, {1}, true),
            std::vector<float>(first.begin(), first.begin() + 2));
}

TEST_P(ParameterClientSuite, ExportShowsEveryRowOnce) {
  TableConfig config = Config("t", 2);
  config.optimizer = AdagradConfig{};
  ASSERT_TRUE(client().CreateTable(config).ok());
  const std::vector<Key> keys = ManyKeys(5000);
  const std::vector<float> values = Pull("t", 2, keys, true);

  const auto rows = Export("t", /*with_slots=*/true);

  ASSERT_EQ(rows.size(), keys.size());
  for (size_t i = 0; i < keys.size(); ++i) {
    ASSERT_THAT(
        rows.at(keys[i]),
        testing::ElementsAre(values[2 * i], values[2 * i + 1], 0.1f, 0.1f));
  }
  EXPECT_EQ(Export("t", /*with_slots=*/false).at(keys[0]).size(), 2u);
}

TEST_P(ParameterClientSuite, ExportStopsAtTheVisitorsError) {
  ASSERT_TRUE(client().CreateTable(Config("t", 2)).ok());
  Pull("t", 2, ManyKeys(100), true);

  const absl::Status status = client().Export(
      "t", false,
      [](const RowChunk& chunk) { return absl::AbortedError("enough"); });

  EXPECT_EQ(status.code(), absl::StatusCode::kAborted);
}

TEST_P(ParameterClientSuite, ChangesAreToldSinceTheLastExport) {
  ASSERT_TRUE(client().CreateTable(Config("t", 2)).ok());
  const std::vector<Key> keys = ManyKeys(5000);
  Pull("t", 2, keys, true);
  const Changes all = ExportChanges({});
  EXPECT_EQ(all.rows.size(), keys.size());
  EXPECT_THAT(all.removed, testing::IsEmpty());

  EXPECT_TRUE(ExportChanges(all.cursors).rows.empty());

  ASSERT_TRUE(Push("t", 2, {keys[1], keys[7]}, {1, 1, 1, 1}).ok());
  ASSERT_TRUE(client().Erase("t", std::vector<Key>{keys[2], keys[3]}).ok());
  const Changes some = ExportChanges(all.cursors);
  EXPECT_EQ(some.rows.size(), 2);
  EXPECT_EQ(some.rows.at(keys[7]), Pull("t", 2, {keys[7]}, false));
  EXPECT_EQ(some.removed, (std::set<Key>{keys[2], keys[3]}));
  EXPECT_TRUE(ExportChanges(some.cursors).removed.empty());
}

TEST_P(ParameterClientSuite, ScoresStartAnewWhenTheirExportIsPublished) {
  TableConfig config = Config("t", 2);
  config.statistics.kind = StatisticsKind::kShowClick;
  config.statistics.nonclk_coeff = 1.0f;
  ASSERT_TRUE(client().CreateTable(config).ok());
  const std::vector<Key> keys = ManyKeys(100);
  ASSERT_TRUE(Push("t", 2, keys, std::vector<float>(200, 1.0f)).ok());
  const ScoreRule rule{1.0f, 0.5f, 16.0f};
  const Changes base = ExportChanges({}, rule, "a");
  EXPECT_EQ(base.rows.size(), 100);
  // Not published: they come again.
  EXPECT_EQ(ExportChanges(base.cursors, rule, "b").rows.size(), 100);
  ASSERT_TRUE(CommitExport(client(), "t", "b", false).ok());
  EXPECT_EQ(ExportChanges(base.cursors, rule, "c").rows.size(), 100);
  for (int repetition = 0; repetition < 2; ++repetition) {
    ASSERT_TRUE(CommitExport(client(), "t", "a", true).ok());
  }
  EXPECT_EQ(ExportChanges(base.cursors, rule, "d").rows.size(), 0);
  ASSERT_TRUE(Push("t", 2, {keys[5]}, {1, 1}).ok());
  EXPECT_EQ(ExportChanges(base.cursors, rule, "e").rows.size(), 1);

  EXPECT_EQ(CommitExport(client(), "u", "a", true).code(),
            absl::StatusCode::kNotFound);
  ExportChangesArgs args;
  args.table = "t";
  args.rule = ScoreRule{-1.0f, 0.5f, 16.0f};
  const absl::Status refused =
      client()
          .ExportChanges(args,
                         [](const ChangeChunk&) { return absl::OkStatus(); })
          .status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(refused.message()),
              testing::HasSubstr("base_threshold"));
}

TEST_P(ParameterClientSuite, ChangesOfATableThatWasReplacedAreNotKnown) {
  ASSERT_TRUE(client().CreateTable(Config("t", 2)).ok());
  Pull("t", 2, ManyKeys(10), true);
  const Changes all = ExportChanges({});
  ASSERT_TRUE(client().DropTable("t").ok());
  ExportChangesArgs args;
  args.table = "t";
  args.since = all.cursors;
  const auto visit = [](const ChangeChunk&) { return absl::OkStatus(); };
  EXPECT_EQ(client().ExportChanges(args, visit).status().code(),
            absl::StatusCode::kNotFound);
  ASSERT_TRUE(client().CreateTable(Config("t", 2)).ok());
  const absl::Status unknown = client().ExportChanges(args, visit).status();
  EXPECT_EQ(unknown.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(unknown.message()),
              testing::HasSubstr("Export a base"));
  args.since.emplace_back(all.cursors[0]);
  EXPECT_EQ(client().ExportChanges(args, visit).status().code(),
            absl::StatusCode::kFailedPrecondition);
}

TEST_P(ParameterClientSuite, NonFiniteGradientIsRefusedWholeAndNamed) {
  ASSERT_TRUE(client().CreateTable(Config("t", 2)).ok());
  const std::vector<Key> keys = ManyKeys(300);
  const std::vector<float> before = Pull("t", 2, keys, true);
  for (const float bad : {std::numeric_limits<float>::quiet_NaN(),
                          std::numeric_limits<float>::infinity(),
                          -std::numeric_limits<float>::infinity()}) {
    std::vector<float> gradients(600, 1.0f);
    gradients[2 * 123 + 1] = bad;

    const absl::Status status = Push("t", 2, keys, gradients).status();

    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(status.message()),
                testing::AllOf(testing::HasSubstr("'t'"),
                               testing::HasSubstr(absl::StrCat(keys[123]))));
  }
  EXPECT_EQ(Pull("t", 2, keys), before);
}

TEST_P(ParameterClientSuite, WrongSizesAndRatesAreRefused) {
  ASSERT_TRUE(client().CreateTable(Config("t", 4)).ok());
  const std::vector<float> before = Pull("t", 4, {1, 2}, true);

  EXPECT_EQ(Push("t", 4, {1, 2}, std::vector<float>(7)).status().code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(Push("t", 4, {1}, std::vector<float>(4), -1.0f).status().code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(
      Push("t", 4, {1}, std::vector<float>(4), std::nanf("")).status().code(),
      absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(Assign("t", 4, {1}, std::vector<float>(3)).code(),
            absl::StatusCode::kInvalidArgument);
  std::vector<float> out(7);
  PullArgs args;
  args.table = "t";
  args.dim = 4;
  const std::vector<Key> keys = {1, 2};
  args.keys = keys;
  EXPECT_EQ(client().Pull(args, absl::MakeSpan(out)).code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(Pull("t", 4, {1, 2}), before);
}

TEST_P(ParameterClientSuite, UnknownTableIsNotFoundAndNamed) {
  ASSERT_TRUE(client().CreateTable(Config("there", 1)).ok());
  std::vector<float> out(1);
  PullArgs args;
  args.table = "missing";
  args.dim = 1;
  const std::vector<Key> keys = {1};
  args.keys = keys;

  const absl::Status status = client().Pull(args, absl::MakeSpan(out));

  EXPECT_EQ(status.code(), absl::StatusCode::kNotFound) << status;
  EXPECT_THAT(std::string(status.message()),
              testing::AllOf(testing::HasSubstr("missing"),
                             testing::HasSubstr("'there'")));
  EXPECT_EQ(Push("missing", 1, {1}, {1.0f}).status().code(),
            absl::StatusCode::kNotFound);
  EXPECT_EQ(client().ListTables("missing").status().code(),
            absl::StatusCode::kNotFound);
  EXPECT_EQ(client().DropTable("missing").code(), absl::StatusCode::kNotFound);
}

TEST_P(ParameterClientSuite, CreatingAgainAttachesOrNamesTheDifference) {
  ASSERT_TRUE(client().CreateTable(Config("t", 4)).ok());
  EXPECT_TRUE(client().CreateTable(Config("t", 4)).ok());

  const absl::Status status = client().CreateTable(Config("t", 8));

  EXPECT_EQ(status.code(), absl::StatusCode::kAlreadyExists);
  EXPECT_THAT(
      std::string(status.message()),
      testing::AllOf(testing::HasSubstr("'t'"), testing::HasSubstr("dim")));
  EXPECT_EQ(client().ListTables("t")->at(0).config.dim, 4);
}

TEST_P(ParameterClientSuite, BadConfigsAreRefused) {
  EXPECT_EQ(client().CreateTable(Config("t", 0)).code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(client().CreateTable(Config("t", kMaxDim + 1)).code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(client().CreateTable(Config("", 4)).code(),
            absl::StatusCode::kInvalidArgument);
  TableConfig odd = Config("t", 4);
  odd.num_virtual_shards = 1000;
  EXPECT_EQ(client().CreateTable(odd).code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_TRUE(client().ListTables("")->empty());
}

TEST_P(ParameterClientSuite, DroppedTableIsGone) {
  ASSERT_TRUE(client().CreateTable(Config("t", 4)).ok());

  EXPECT_TRUE(client().DropTable("t").ok());

  EXPECT_TRUE(client().ListTables("")->empty());
  EXPECT_TRUE(client().CreateTable(Config("t", 8)).ok());
}

TEST_P(ParameterClientSuite, RepeatedPushIdIsAppliedOnce) {
  ASSERT_TRUE(client().CreateTable(Config("t", 1)).ok());
  const std::vector<Key> keys = {1, 2, 3, 4, 5, 6, 7, 8};
  ASSERT_TRUE(Assign("t", 1, keys, std::vector<float>(8, 10.0f)).ok());
  const std::vector<float> ones(8, 1.0f);

  const auto first = Push("t", 1, keys, ones, 1.0f, true, {42, 1});
  const auto again = Push("t", 1, keys, ones, 1.0f, true, {42, 1});
  const auto next = Push("t", 1, keys, ones, 1.0f, true, {42, 2});

  EXPECT_FALSE(first->duplicate);
  EXPECT_TRUE(again->duplicate);
  EXPECT_EQ(again->num_rows, 8);
  EXPECT_FALSE(next->duplicate);
  EXPECT_THAT(Pull("t", 1, keys), testing::Each(8.0f));
}

TEST_P(ParameterClientSuite, RepeatedAssignmentIdDoesNotUndoALaterOne) {
  ASSERT_TRUE(client().CreateTable(Config("t", 1)).ok());
  const std::vector<Key> keys = {1, 2, 3, 4, 5, 6, 7, 8};
  const std::vector<float> ones(8, 1.0f);
  AssignArgs args;
  args.table = "t";
  args.dim = 1;
  args.keys = keys;
  args.embeddings = ones;
  args.id = {42, 1};

  const auto first = client().Assign(args);
  ASSERT_TRUE(Assign("t", 1, keys, std::vector<float>(8, 2.0f)).ok());
  const auto again = client().Assign(args);

  ASSERT_TRUE(first.ok()) << first.status();
  EXPECT_FALSE(first->duplicate);
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_TRUE(again->duplicate);
  EXPECT_EQ(again->num_rows, 8);
  EXPECT_THAT(Pull("t", 1, keys), testing::Each(2.0f));
}

TEST_P(ParameterClientSuite, ARefusedPushMayBeTriedAgainUnderItsId) {
  ASSERT_TRUE(client().CreateTable(Config("t", 1)).ok());
  ASSERT_TRUE(Assign("t", 1, {1}, {10.0f}).ok());

  EXPECT_FALSE(Push("t", 1, {1}, {std::nanf("")}, 1.0f, true, {7, 1}).ok());
  EXPECT_FALSE(Push("t", 1, {1}, {1.0f}, 1.0f, true, {7, 1})->duplicate);

  EXPECT_THAT(Pull("t", 1, {1}), testing::ElementsAre(9.0f));
}

TEST_P(ParameterClientSuite, PullsOfManyTablesAreThoseOfEach) {
  ASSERT_TRUE(client().CreateTable(Config("a", 2)).ok());
  ASSERT_TRUE(client().CreateTable(Config("b", 3)).ok());
  for (const bool insert : {true, false}) {
    ManyCalls calls;
    calls.AddPull("a", 2, ManyKeys(300), insert);
    calls.AddPull("b", 3, ManyKeys(200, 2), insert);
    calls.AddPull("a", 2, {}, insert);
    calls.AddPull("a", 2, {7, 8, 7}, insert);

    const absl::Status status = client().StartPull(calls.pulls)->Wait();

    ASSERT_TRUE(status.ok()) << status;
    EXPECT_EQ(calls.floats(0), Pull("a", 2, ManyKeys(300)));
    EXPECT_EQ(calls.floats(1), Pull("b", 3, ManyKeys(200, 2)));
    EXPECT_EQ(calls.floats(3), Pull("a", 2, {7, 8, 7}));
    EXPECT_EQ(Size("a"), 302);
    EXPECT_EQ(Size("b"), 200);
  }
  EXPECT_TRUE(client().StartPull({})->Wait().ok());
}

TEST_P(ParameterClientSuite, PushesToManyTablesAreEachApplied) {
  ASSERT_TRUE(client().CreateTable(Config("a", 2)).ok());
  ASSERT_TRUE(client().CreateTable(Config("b", 3)).ok());
  const std::vector<Key> keys = ManyKeys(300);
  ASSERT_TRUE(Assign("a", 2, keys, std::vector<float>(600, 10.0f)).ok());
  ASSERT_TRUE(Assign("b", 3, keys, std::vector<float>(900, 10.0f)).ok());
  ManyCalls calls;
  calls.AddPush("a", 2, keys, 1.0f);
  calls.AddPush("b", 3, keys, 2.0f);
  calls.AddPush("a", 2, {}, 2.0f);
  calls.AddPush("a", 2, {keys[0], keys[1], keys[0]}, 3.0f);

  const absl::Status status = client().StartPush(calls.pushes)->Wait();

  ASSERT_TRUE(status.ok()) << status;
  EXPECT_EQ(calls.result(0).num_rows, 300);
  EXPECT_EQ(calls.result(1).num_rows, 300);
  EXPECT_EQ(calls.result(2).num_rows, 0);
  EXPECT_EQ(calls.result(3).num_rows, 2);
  EXPECT_THAT(Pull("a", 2, {keys[0], keys[1], keys[2]}),
              testing::ElementsAre(3.0f, 3.0f, 6.0f, 6.0f, 9.0f, 9.0f));
  EXPECT_THAT(Pull("b", 3, keys), testing::Each(8.0f));
  EXPECT_TRUE(client().StartPush({})->Wait().ok());
}

TEST_P(ParameterClientSuite, OneBadPushOfManyAppliesNone) {
  ASSERT_TRUE(client().CreateTable(Config("a", 1)).ok());
  ASSERT_TRUE(client().CreateTable(Config("b", 1)).ok());
  const std::vector<Key> keys = ManyKeys(40);
  ASSERT_TRUE(Assign("a", 1, keys, std::vector<float>(40, 10.0f)).ok());
  const std::vector<std::pair<std::string, float>> bad = {
      {"b", std::nanf("")},
      {"missing", 1.0f},
  };
  for (const auto& [table, gradient] : bad) {
    ManyCalls calls;
    calls.AddPush("a", 1, keys, 1.0f, {9, 1});
    calls.AddPush(table, 1, keys, gradient, {9, 2});

    const absl::Status status = client().StartPush(calls.pushes)->Wait();

    EXPECT_EQ(status.code(), table == "b" ? absl::StatusCode::kInvalidArgument
                                          : absl::StatusCode::kNotFound);
    EXPECT_THAT(std::string(status.message()),
                testing::HasSubstr(absl::StrCat("'", table, "'")));
    EXPECT_THAT(Pull("a", 1, keys), testing::Each(10.0f));
  }
}

TEST_P(ParameterClientSuite, OfRepeatedPushesEachIsAppliedOnce) {
  ASSERT_TRUE(client().CreateTable(Config("a", 1)).ok());
  ASSERT_TRUE(client().CreateTable(Config("b", 1)).ok());
  const std::vector<Key> keys = ManyKeys(40);
  ASSERT_TRUE(Assign("a", 1, keys, std::vector<float>(40, 10.0f)).ok());
  ASSERT_TRUE(Assign("b", 1, keys, std::vector<float>(40, 10.0f)).ok());
  for (const bool again : {false, true}) {
    ManyCalls calls;
    calls.AddPush("a", 1, keys, 1.0f, {42, 1});
    calls.AddPush("b", 1, keys, 1.0f, {42, 2});
    if (again) calls.AddPush("b", 1, keys, 1.0f, {42, 3});

    ASSERT_TRUE(client().StartPush(calls.pushes)->Wait().ok());

    EXPECT_EQ(calls.result(0).duplicate, again);
    EXPECT_EQ(calls.result(1).duplicate, again);
    if (again) {
      EXPECT_FALSE(calls.result(2).duplicate);
    }
  }
  EXPECT_THAT(Pull("a", 1, keys), testing::Each(9.0f));
  EXPECT_THAT(Pull("b", 1, keys), testing::Each(8.0f));
}

TEST_P(ParameterClientSuite, PushesToOneTableOfOneCallAreStepsInTheirOrder) {
  for (const char* table : {"together", "apart"}) {
    TableConfig config = Config(table, 1);
    config.optimizer = AdagradConfig{};  // Two steps are not one with the sum.
    ASSERT_TRUE(client().CreateTable(config).ok());
  }
  const std::vector<Key> keys = ManyKeys(40);
  std::vector<Key> twice = keys;
  twice.insert(twice.end(), keys.begin(), keys.end());
  ManyCalls calls;
  calls.AddPush("together", 1, keys, 1.0f, {5, 1});
  calls.AddPush("together", 1, twice, 3.0f, {5, 2});
  calls.AddPush("together", 1, {keys[7]}, -2.0f, {5, 3});

  const absl::Status status = client().StartPush(calls.pushes)->Wait();

  ASSERT_TRUE(status.ok()) << status;
  EXPECT_EQ(calls.result(0).num_rows, 40);
  EXPECT_EQ(calls.result(1).num_rows, 40);
  EXPECT_EQ(calls.result(2).num_rows, 1);
  ASSERT_TRUE(Push("apart", 1, keys, std::vector<float>(40, 1.0f)).ok());
  ASSERT_TRUE(Push("apart", 1, keys, std::vector<float>(40, 6.0f)).ok());
  ASSERT_TRUE(Push("apart", 1, {keys[7]}, {-2.0f}).ok());
  EXPECT_EQ(Pull("together", 1, keys), Pull("apart", 1, keys));
}

TEST_P(ParameterClientSuite, AnIdentityTwiceInOneCallIsAppliedOnce) {
  ASSERT_TRUE(client().CreateTable(Config("a", 1)).ok());
  const std::vector<Key> keys = ManyKeys(40);
  ASSERT_TRUE(Assign("a", 1, keys, std::vector<float>(40, 10.0f)).ok());
  ManyCalls calls;
  calls.AddPush("a", 1, keys, 1.0f, {43, 1});
  calls.AddPush("a", 1, keys, 1.0f, {43, 1});

  const absl::Status status = client().StartPush(calls.pushes)->Wait();

  ASSERT_TRUE(status.ok()) << status;
  EXPECT_FALSE(calls.result(0).duplicate);
  EXPECT_EQ(calls.result(0).num_rows, 40);
  EXPECT_TRUE(calls.result(1).duplicate);
  EXPECT_EQ(calls.result(1).num_rows, 40);
  EXPECT_THAT(Pull("a", 1, keys), testing::Each(9.0f));
}

TEST_P(ParameterClientSuite, PushesOfManyToBspTablesCountWithTheirRound) {
  for (const char* table : {"a", "b"}) {
    TableConfig config = Config(table, 2);
    config.consistency.kind = ConsistencyKind::kBsp;
    ASSERT_TRUE(client().CreateTable(config).ok());
    ASSERT_TRUE(
        Assign(table, 2, {1, 2, 3, 4, 5, 6}, std::vector<float>(12, 10.0f))
            .ok());
  }
  ManyCalls calls;
  for (const char* table : {"a", "b"}) {
    calls.AddPush(table, 2, {1, 2, 3, 4, 5, 6}, 4.0f).step = {"g", 0, 1, 0};
  }
  const absl::Status status = client().StartPush(calls.pushes)->Wait();
  ASSERT_TRUE(status.ok()) << status;
  EXPECT_THAT(Pull("a", 2, {1, 2, 3, 4, 5, 6}), testing::Each(10.0f));
  const Round round = RoundOf(0, {ContributionOf(0, 1, 0, 1.0)});

  for (int shard = 0; shard < client().num_shards(); ++shard) {
    int64_t committed = 0;
    ASSERT_TRUE(client()
                    .StartCommitRound(shard, "g", round, &committed, {})
                    ->Wait()
                    .ok());
  }

  EXPECT_THAT(Pull("a", 2, {1, 2, 3, 4, 5, 6}), testing::Each(6.0f));
  EXPECT_THAT(Pull("b", 2, {1, 2, 3, 4, 5, 6}), testing::Each(6.0f));
}

TEST_P(ParameterClientSuite, LongPullsAndPushesOfManyTablesReachEveryRow) {
  constexpr int kDim = 64;
  ASSERT_TRUE(client().CreateTable(Config("a", kDim)).ok());
  ASSERT_TRUE(client().CreateTable(Config("b", kDim)).ok());
  // 1 MB, 5 MB, and many of 60 KB.
  const std::vector<std::pair<std::string, int>> sizes = {
      {"a", 4000}, {"b", 20000}, {"a", 250}, {"b", 250}, {"a", 4000}};
  ManyCalls calls;
  uint64_t seed = 0;
  for (const auto& [table, count] : sizes) {
    calls.AddPull(table, kDim, ManyKeys(count, ++seed), true);
  }
  ASSERT_TRUE(client().StartPull(calls.pulls)->Wait().ok());
  ManyCalls pushes;
  seed = 0;
  for (const auto& [table, count] : sizes) {
    ++seed;
    pushes.AddPush(table, kDim, ManyKeys(count, seed), 1.0f, {3, seed})
        .keys_are_unique = true;
  }

  ASSERT_TRUE(client().StartPush(pushes.pushes)->Wait().ok());

  seed = 0;
  for (const auto& [table, count] : sizes) {
    EXPECT_EQ(pushes.result(seed).num_rows, count);
    const std::vector<float>& before = calls.floats(seed++);
    const std::vector<float> after = Pull(table, kDim, ManyKeys(count, seed));
    for (size_t i = 0; i < after.size(); ++i) {
      ASSERT_EQ(after[i], before[i] - 1.0f) << table << ", element " << i;
    }
  }
}

TEST_P(ParameterClientSuite, ManyThreadsLoseNoStep) {
  ASSERT_TRUE(client().CreateTable(Config("t", 4)).ok());
  const std::vector<Key> keys = ManyKeys(500);
  ASSERT_TRUE(Assign("t", 4, keys, std::vector<float>(2000, 0.0f)).ok());
  constexpr int kThreads = 4;
  constexpr int kSteps = 20;

  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&] {
      for (int step = 0; step < kSteps; ++step) {
        EXPECT_TRUE(Push("t", 4, keys, std::vector<float>(2000, -1.0f)).ok());
        Pull("t", 4, keys);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();

  EXPECT_THAT(Pull("t", 4, keys), testing::Each(float{kThreads * kSteps}));
}

TEST_P(ParameterClientSuite, SaveAndRestoreBringBackRowsAndSlots) {
  TableConfig config = Config("t", 3);
  config.optimizer = AdamConfig{};
  ASSERT_TRUE(client().CreateTable(config).ok());
  const std::vector<Key> keys = ManyKeys(3000);
  Pull("t", 3, keys, true);
  ASSERT_TRUE(Push("t", 3, keys, std::vector<float>(9000, 0.25f)).ok());
  const auto saved = Export("t", true);
  const ScopedFolder folder;

  const auto report = SaveCheckpoint(client(), SaveTo(folder.path()));
  ASSERT_TRUE(report.ok()) << report.status();
  EXPECT_EQ(report->num_rows(), 3000);
  ASSERT_TRUE(Push("t", 3, keys, std::vector<float>(9000, 1.0f)).ok());
  Pull("t", 3, ManyKeys(10, 99), true);
  const auto restored = RestoreCheckpoint(client(), RestoreFrom(folder.path()));

  ASSERT_TRUE(restored.ok()) << restored.status();
  EXPECT_EQ(restored->num_rows(), 3000);
  EXPECT_THAT(restored->tables(), testing::ElementsAre("t"));
  EXPECT_EQ(Export("t", true), saved);
}

TEST_P(ParameterClientSuite, CommittingARestoreTwiceIsTheSameAsOnce) {
  ASSERT_TRUE(client().CreateTable(Config("t", 2)).ok());
  Pull("t", 2, {1, 2, 3}, true);
  const ScopedFolder folder;
  ASSERT_TRUE(SaveCheckpoint(client(), SaveTo(folder.path(), {"t", "t"})).ok());
  Pull("t", 2, {4}, true);
  v1::StageRestoreRequest args;
  args.set_path(folder.path());
  args.set_restore_id("r");
  const auto staged = client().StageRestore(args, nullptr);
  ASSERT_TRUE(staged.ok()) << staged.status();
  EXPECT_EQ(staged->num_rows(), 3);
  EXPECT_EQ(staged->save(), 1);

  EXPECT_TRUE(client().CommitRestore("r", false).ok());
  EXPECT_TRUE(client().CommitRestore("r", false).ok());

  EXPECT_EQ(Size("t"), 3);
  EXPECT_EQ(client().CommitRestore("other", false).code(),
            absl::StatusCode::kNotFound);
}

TEST_P(ParameterClientSuite, SavingOneTableKeepsTheOthersOfTheCheckpoint) {
  ASSERT_TRUE(client().CreateTable(Config("a", 2)).ok());
  ASSERT_TRUE(client().CreateTable(Config("b", 2)).ok());
  Pull("a", 2, {1, 2, 3}, true);
  Pull("b", 2, {4}, true);
  const ScopedFolder folder;
  ASSERT_TRUE(SaveCheckpoint(client(), SaveTo(folder.path())).ok());
  Pull("a", 2, {9}, true);

  ASSERT_TRUE(SaveCheckpoint(client(), SaveTo(folder.path(), {"a"})).ok());
  ASSERT_TRUE(client().DropTable("a").ok());
  ASSERT_TRUE(client().DropTable("b").ok());
  const auto restored = RestoreCheckpoint(client(), RestoreFrom(folder.path()));

  ASSERT_TRUE(restored.ok()) << restored.status();
  EXPECT_EQ(Size("a"), 4);
  EXPECT_EQ(Size("b"), 1);
}

TEST_P(ParameterClientSuite, ASaveIsOfTheLastClosedRoundOnAllServers) {
  TableConfig config = Config("t", 1);
  config.initializer = ConstantInitializer{0.0f};
  config.consistency = {ConsistencyKind::kBsp, 0, Reduction::kSum};
  ASSERT_TRUE(client().CreateTable(config).ok());
  GroupClient& groups = client().groups();
  ASSERT_TRUE(groups.CreateGroup("g", {}).ok());
  const WorkerGroup::Place place = groups.Join("g", 0, 0, 0, 0, "").value();
  const GroupMember worker = MemberOf("g", 0, place.incarnation());
  ASSERT_TRUE(groups.CreateWorkQueue("g", "q", ItemsOf({"item"})).ok());
  ASSERT_TRUE(groups.TakeWorkItem(worker, "q").ok());
  const std::vector<Key> keys = ManyKeys(100);
  const std::vector<float> gradients(keys.size(), -1.0f);
  PushArgs push;
  push.table = "t";
  push.dim = 1;
  push.keys = keys;
  push.gradients = gradients;
  push.learning_rate = 1.0f;
  push.insert_missing = true;
  push.step = {"g", 0, place.incarnation(), place.clock()};
  int64_t committed = WorkerGroup::kNoRound;
  for (int64_t round = 0; round < 3; ++round, ++push.step.clock) {
    ASSERT_TRUE(client().Push(push).ok());
    if (round == 2) break;  // The worker dies in its third step.
    ASSERT_TRUE(groups
                    .Arrive(worker, push.step.clock, round, 1.0,
                            {ProgressOf("q", 0, 0, round + 1)})
                    .ok());
    const auto closed = groups.WaitForRound(worker, round, SteadyNow());
    ASSERT_TRUE(closed.ok()) << closed.status();
    // No other server has heard of the rounds.
    ASSERT_TRUE(client()
                    .StartCommitRound(0, "g", *closed, &committed, {})
                    ->Wait()
                    .ok());
    ASSERT_EQ(committed, round);
  }
  const ScopedFolder folder;

  const auto saved = SaveCheckpoint(client(), SaveTo(folder.path()));

  ASSERT_TRUE(saved.ok()) << saved.status();
  EXPECT_THAT(Pull("t", 1, keys), testing::Each(2.0f));
  ASSERT_TRUE(groups.Leave(worker, absl::InfiniteDuration()).ok());
  ASSERT_TRUE(RestoreCheckpoint(client(), RestoreFrom(folder.path())).ok());
  EXPECT_THAT(Pull("t", 1, keys), testing::Each(2.0f));
  const GroupMember next =
      MemberOf("g", 1, groups.Join("g", 1, 0, 0, 0, "")->incarnation());
  EXPECT_EQ(groups.TakeWorkItem(next, "q").value()->offset(), 2);
  // Nobody is held up any more.
  Round round = groups.WaitForRound(next, 1, SteadyNow()).value();
  for (int shard = 0; shard < client().num_shards(); ++shard) {
    EXPECT_TRUE(client()
                    .StartCommitRound(shard, "g", round, &committed, {})
                    ->Wait()
                    .ok());
    EXPECT_EQ(committed, 1);
  }
}

TEST_P(ParameterClientSuite, DamagedCheckpointChangesNothing) {
  ASSERT_TRUE(client().CreateTable(Config("t", 2)).ok());
  Pull("t", 2, ManyKeys(100), true);
  const ScopedFolder folder;
  ASSERT_TRUE(SaveCheckpoint(client(), SaveTo(folder.path())).ok());
  ASSERT_TRUE(Push("t", 2, ManyKeys(100), std::vector<float>(200, 1.0f)).ok());
  const auto before = Export("t", true);
  // One bit of one row file.
  for (const auto& entry :
       std::filesystem::recursive_directory_iterator(folder.path())) {
    if (entry.path().extension() != ".safetensors") continue;
    std::fstream file(entry.path(),
                      std::ios::in | std::ios::out | std::ios::binary);
    file.seekg(-1, std::ios::end);
    const char last = static_cast<char>(file.get());
    file.seekp(-1, std::ios::end);
    file.put(static_cast<char>(last ^ 1));
    break;
  }

  const absl::Status status =
      RestoreCheckpoint(client(), RestoreFrom(folder.path())).status();

  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss) << status;
  EXPECT_THAT(std::string(status.message()), testing::HasSubstr("checksum"));
  EXPECT_EQ(Export("t", true), before);
}

TEST_P(ParameterClientSuite, TheNewestSaveThatCanBeReadIsRestored) {
  ASSERT_TRUE(client().CreateTable(Config("t", 2)).ok());
  const ScopedFolder folder;
  const auto files = [&folder] {
    std::set<std::filesystem::path> found;
    for (const auto& entry :
         std::filesystem::recursive_directory_iterator(folder.path())) {
      if (entry.path().extension() == ".safetensors") {
        found.insert(entry.path());
      }
    }
    return found;
  };
  Pull("t", 2, ManyKeys(100), true);
  ASSERT_EQ(SaveCheckpoint(client(), SaveTo(folder.path()))->save(), 1);
  const auto of_first = files();
  Pull("t", 2, ManyKeys(200), true);
  ASSERT_EQ(SaveCheckpoint(client(), SaveTo(folder.path()))->save(), 2);
  for (const std::filesystem::path& file : files()) {
    if (of_first.count(file) == 0) std::filesystem::resize_file(file, 8);
  }

  const auto restored = RestoreCheckpoint(client(), RestoreFrom(folder.path()));

  ASSERT_TRUE(restored.ok()) << restored.status();
  EXPECT_EQ(restored->save(), 1);
  EXPECT_EQ(restored->num_rows(), 100);
  ASSERT_EQ(restored->skipped().size(), 1);
  EXPECT_THAT(restored->skipped()[0], testing::HasSubstr("truncated"));
  EXPECT_EQ(Size("t"), 100);
  const auto asked = [&](int64_t save) {
    v1::RestoreRequest request = RestoreFrom(folder.path());
    request.set_save(save);
    return RestoreCheckpoint(client(), request).status().code();
  };
  EXPECT_EQ(asked(1), absl::StatusCode::kOk);
  EXPECT_EQ(asked(2), absl::StatusCode::kDataLoss);
  EXPECT_EQ(asked(3), absl::StatusCode::kNotFound);
  EXPECT_EQ(Size("t"), 100);
}

TEST_P(ParameterClientSuite, ASaveThatIsRefusedLeavesNoFiles) {
  ASSERT_TRUE(client().CreateTable(Config("a", 2)).ok());
  ASSERT_TRUE(client().CreateTable(Config("b", 2)).ok());
  Pull("a", 2, ManyKeys(100), true);
  const ScopedFolder folder;
  ASSERT_TRUE(SaveCheckpoint(client(), SaveTo(folder.path())).ok());
  const auto count = [&folder] {
    return std::distance(
        std::filesystem::recursive_directory_iterator(folder.path()), {});
  };
  const auto before = count();
  ASSERT_TRUE(client().DropTable("b").ok());

  const absl::Status refused =
      SaveCheckpoint(client(), SaveTo(folder.path())).status();

  EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition) << refused;
  EXPECT_EQ(count(), before);
  v1::SaveRequest request = SaveTo(folder.path());
  request.add_dropped_tables("b");
  EXPECT_TRUE(SaveCheckpoint(client(), request).ok());
}

TEST_P(ParameterClientSuite, RestoreOfNothingIsNotFound) {
  const ScopedFolder folder;

  EXPECT_EQ(
      RestoreCheckpoint(client(), RestoreFrom(folder.path())).status().code(),
      absl::StatusCode::kNotFound);
  EXPECT_EQ(
      SaveCheckpoint(client(), SaveTo(folder.path(), {"nope"})).status().code(),
      absl::StatusCode::kNotFound);
}

TEST_P(ParameterClientSuite, OnlyMissingRowsAreAssignedIfAskedAndCounted) {
  ASSERT_TRUE(client().CreateTable(Config("t", 2)).ok());
  const std::vector<Key> keys = ManyKeys(100);
  const std::vector<Key> there(keys.begin(), keys.begin() + 40);
  ASSERT_TRUE(Assign("t", 2, there, std::vector<float>(80, 1.0f)).ok());
  const std::vector<float> twos(200, 2.0f);
  AssignArgs args;
  args.table = "t";
  args.dim = 2;
  args.keys = keys;
  args.embeddings = twos;
  args.only_missing = true;

  const auto first = client().Assign(args);
  const auto again = client().Assign(args);

  ASSERT_TRUE(first.ok()) << first.status();
  EXPECT_EQ(first->num_rows, 60);
  EXPECT_EQ(again->num_rows, 0);
  EXPECT_THAT(Pull("t", 2, there), testing::Each(1.0f));
  EXPECT_THAT(Pull("t", 2, {keys.begin() + 40, keys.end()}),
              testing::Each(2.0f));
  args.only_missing = false;
  EXPECT_EQ(client().Assign(args)->num_rows, 100);
  EXPECT_THAT(Pull("t", 2, keys), testing::Each(2.0f));
}

TEST_P(ParameterClientSuite, PushesToABspTableCountWhenTheirRoundIsCommitted) {
  TableConfig config = Config("t", 2);
  config.consistency.kind = ConsistencyKind::kBsp;
  ASSERT_TRUE(client().CreateTable(config).ok());
  const std::vector<Key> keys = ManyKeys(60);
  ASSERT_TRUE(Assign("t", 2, keys, std::vector<float>(120, 10.0f)).ok());
  const auto push = [&](uint32_t worker, int64_t clock, float gradient) {
    const std::vector<float> gradients(120, gradient);
    PushArgs args;
    args.table = "t";
    args.dim = 2;
    args.keys = keys;
    args.gradients = gradients;
    args.learning_rate = 1.0f;
    args.step = {"g", worker, worker + 1, clock};
    return client().Push(args);
  };
  const auto commit = [&](const Round& round) {
    std::vector<int64_t> committed(client().num_shards(), -7);
    std::vector<std::unique_ptr<PendingCall>> calls;
    for (int shard = 0; shard < client().num_shards(); ++shard) {
      calls.push_back(
          client().StartCommitRound(shard, "g", round, &committed[shard], {}));
    }
    for (const auto& call : calls) {
      const absl::Status status = call->Wait();
      EXPECT_TRUE(status.ok()) << status;
    }
    return committed;
  };
  Round round =
      RoundOf(0, {ContributionOf(0, 1, 0, 1.0), ContributionOf(1, 2, 0, 3.0)});
  const auto pushed = push(0, 0, 4.0f);
  ASSERT_TRUE(pushed.ok()) << pushed.status();
  EXPECT_EQ(pushed->num_rows, 0);
  ASSERT_TRUE(push(1, 0, 8.0f).ok());
  EXPECT_THAT(Pull("t", 2, keys), testing::Each(10.0f));

  EXPECT_THAT(commit(round), testing::Each(0));
  EXPECT_THAT(Pull("t", 2, keys), testing::Each(10.0f - 7.0f));
  EXPECT_THAT(commit(round), testing::Each(0));
  EXPECT_THAT(Pull("t", 2, keys), testing::Each(3.0f));

  // Round 1 is missing for round 2.
  round.set_number(2);
  EXPECT_THAT(commit(round), testing::Each(0));
  EXPECT_EQ(push(0, 0, 1.0f).status().code(),
            absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(Push("t", 2, keys, std::vector<float>(120, 1.0f)).status().code(),
            absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(Pull("t", 2, keys), testing::Each(3.0f));
}

// A table with dense updates beside one whose rows are all in each push.
TEST_P(ParameterClientSuite,
       RowsOfDenseUpdatesAreThoseOfATableThatIsPushedWhole) {
  constexpr int kDim = 3;
  StepOptions l2;
  l2.l2 = 0.05f;
  const std::vector<Key> all = ManyKeys(40);
  const std::vector<OptimizerConfig> rules = {
      SgdConfig{0.9f, true}, AdamConfig{}, {AdamConfig{}, l2}, AdamWConfig{}};
  for (size_t rule = 0; rule < rules.size(); ++rule) {
    SCOPED_TRACE(testing::Message() << "rule " << rule);
    const std::string dense = absl::StrCat("dense", rule);
    const std::string whole = absl::StrCat("whole", rule);
    TableConfig config = Config(whole, kDim);
    config.optimizer = rules[rule];
    ASSERT_TRUE(client().CreateTable(config).ok());
    config.name = dense;
    config.optimizer.is_dense = true;
    ASSERT_TRUE(client().CreateTable(config).ok());
    for (const std::string& table : {dense, whole}) {
      Pull(table, kDim, all, /*insert_missing=*/true);
    }
    std::mt19937 random(static_cast<uint32_t>(rule));
    std::normal_distribution<float> normal;
    constexpr int kSteps = 30;
    for (int step = 0; step < kSteps; ++step) {
      const float rate = step < 10 ? 0.02f : 0.01f;
      std::vector<Key> keys;
      std::vector<float> gradients;
      std::vector<float> of_all(all.size() * kDim, 0.0f);
      // The last ids learn late, and some steps are without any.
      for (size_t i = 0; i < (step < 20 ? 30 : all.size()); ++i) {
        if (random() % 16 != 0) continue;
        keys.push_back(all[i]);
        for (int d = 0; d < kDim; ++d) {
          gradients.push_back(normal(random));
          of_all[i * kDim + d] = gradients.back();
        }
      }
      ASSERT_TRUE(Push(dense, kDim, keys, gradients, rate).ok());
      ASSERT_TRUE(Push(whole, kDim, all, of_all, rate).ok());
      const std::vector<Key> some = {all[step], all[(step * 7) % 40]};
      EXPECT_THAT(Pull(dense, kDim, some, /*insert_missing=*/true),
                  testing::Pointwise(testing::FloatNear(2e-6f),
                                     Pull(whole, kDim, some)));
    }
    EXPECT_EQ(client().ListTables(dense)->at(0).stats.num_steps, kSteps);
    EXPECT_THAT(
        Pull(dense, kDim, all, /*insert_missing=*/true),
        testing::Pointwise(testing::FloatNear(2e-6f), Pull(whole, kDim, all)));
    // TSan has addresses for few tables at once.
    EXPECT_TRUE(client().DropTable(dense).ok());
    EXPECT_TRUE(client().DropTable(whole).ok());
  }
}

TEST_P(ParameterClientSuite, APushIsOneStepOfDenseUpdatesThoughItComesTwice) {
  TableConfig config = Config("t", 1);
  config.optimizer = SgdConfig{0.5f};
  config.optimizer.is_dense = true;
  ASSERT_TRUE(client().CreateTable(config).ok());
  const std::vector<Key> keys = ManyKeys(20);
  ASSERT_TRUE(Assign("t", 1, keys, std::vector<float>(20, 10.0f)).ok());
  ASSERT_TRUE(Push("t", 1, keys, std::vector<float>(20, 1.0f)).ok());

  for (int i = 0; i < 2; ++i) {
    ASSERT_TRUE(Push("t", 1, {}, {}, 1.0f, true, PushId{9, 1}).ok());
  }

  EXPECT_EQ(client().ListTables("t")->at(0).stats.num_steps, 2);
  EXPECT_THAT(Pull("t", 1, keys), testing::Each(10.0f - 1.0f - 0.5f));
}

TEST_P(ParameterClientSuite, ARoundIsOneStepOfDenseUpdatesOnAllShards) {
  TableConfig config = Config("t", 1);
  config.optimizer = SgdConfig{0.5f};
  config.optimizer.is_dense = true;
  config.consistency.kind = ConsistencyKind::kBsp;
  ASSERT_TRUE(client().CreateTable(config).ok());
  const std::vector<Key> keys = ManyKeys(20);
  ASSERT_TRUE(Assign("t", 1, keys, std::vector<float>(20, 10.0f)).ok());
  const auto step = [&](const std::vector<Key>& of_batch, int64_t number) {
    const std::vector<float> gradients(of_batch.size(), 1.0f);
    for (uint32_t worker = 0; worker < 2; ++worker) {
      PushArgs args;
      args.table = "t";
      args.dim = 1;
      args.keys = of_batch;
      args.gradients = gradients;
      args.learning_rate = 1.0f;
      args.step = {"g", worker, worker + 1, number};
      ASSERT_TRUE(client().Push(args).ok());
    }
    const Round round = RoundOf(number, {ContributionOf(0, 1, number, 1.0),
                                         ContributionOf(1, 2, number, 1.0)});
    for (int shard = 0; shard < client().num_shards(); ++shard) {
      int64_t committed = -7;
      ASSERT_TRUE(client()
                      .StartCommitRound(shard, "g", round, &committed, {})
                      ->Wait()
                      .ok());
    }
  };

  step(keys, 0);
  step({keys[0]}, 1);

  EXPECT_EQ(client().ListTables("t")->at(0).stats.num_steps, 2);
  const std::vector<float> rows = Pull("t", 1, keys);
  EXPECT_FLOAT_EQ(rows[0], 10.0f - 1.0f - 1.5f);
  EXPECT_THAT(absl::MakeConstSpan(rows).subspan(1),
              testing::Each(10.0f - 1.0f - 0.5f));
}

TEST_P(ParameterClientSuite, ATableOfAnotherConsistencyIsNotTakenForThisOne) {
  ASSERT_TRUE(client().CreateTable(Config("t", 4)).ok());
  TableConfig config = Config("t", 4);
  config.consistency = {ConsistencyKind::kSsp, 3, Reduction::kMean};

  const absl::Status status = client().CreateTable(config);

  EXPECT_EQ(status.code(), absl::StatusCode::kAlreadyExists);
  EXPECT_THAT(std::string(status.message()),
              testing::HasSubstr("consistency (asp here, ssp(3) asked)"));
  config.name = "other";
  config.layout = "kernel:0 (3, 4)";
  ASSERT_TRUE(client().CreateTable(config).ok());
  EXPECT_EQ(client().ListTables("other")->at(0).config, config);
}

TEST_P(ParameterClientSuite, ADenseTableWithoutValuesIsAnError) {
  TableConfig config = Config("d", 2);
  config.layout = "kernel:0 (3, 4)";
  ASSERT_TRUE(client().CreateTable(config).ok());
  const std::vector<Key> keys = ManyKeys(20);
  std::vector<float> rows(40);
  PullArgs args;
  args.table = "d";
  args.dim = 2;
  args.keys = keys;

  const absl::Status status = client().Pull(args, absl::MakeSpan(rows));
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
  EXPECT_THAT(std::string(status.message()),
              testing::HasSubstr("dense table 'd'"));

  ASSERT_TRUE(Assign("d", 2, keys, std::vector<float>(40, 3.0f)).ok());
  EXPECT_THAT(Pull("d", 2, keys), testing::Each(3.0f));
}

}  // namespace
}  // namespace tfswitch
