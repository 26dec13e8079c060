// Tables of which a server that was restarted has lost its part.

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "cc/client/worker_session.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/cc/rpc/server_under_test.h"

namespace tfswitch {
namespace {

using testing::AllOf;
using testing::Each;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

constexpr int kRows = 2000;

class LostTablesTest : public testing::Test {
 protected:
  void Restart(uint32_t shard, const ShardOptions& options = {}) {
    cluster_.Restart(shard, options);
  }
  std::unique_ptr<ParameterClient> ConnectTo(uint32_t shard) const {
    return cluster_.ConnectTo(shard);
  }
  // A process that uses the cluster.
  std::shared_ptr<ParameterClient> ConnectToAll(
      OnLostTables on_lost_tables = OnLostTables::kFail) const {
    return cluster_.Connect(on_lost_tables);
  }

  // With kRows rows of 0.
  static std::shared_ptr<ParameterClient> WithTable(
      std::shared_ptr<ParameterClient> client, const std::string& table = "t") {
    EXPECT_TRUE(client->CreateTable(SmallTable(table)).ok());
    EXPECT_TRUE(PushOnes(*client, table, 2, RandomKeys(kRows), {9, 1}).ok());
    return client;
  }

  static absl::Status Pull(ParameterClient& client) {
    return PullRows(client, "t", 2, RandomKeys(kRows)).status();
  }

  static int64_t RowsOf(ParameterClient& client) {
    const auto infos = client.ListTables("t");
    EXPECT_TRUE(infos.ok()) << infos.status();
    return infos.ok() ? infos->at(0).stats.num_rows : -1;
  }

  int64_t RowsOn(uint32_t shard) const {
    return ConnectTo(shard)->ListTables("t")->at(0).stats.num_rows;
  }

  ClusterUnderTest cluster_{2};
};

TEST_F(LostTablesTest, EveryCallSaysWhichServerHasLostTheTable) {
  auto client = WithTable(ConnectToAll());
  Restart(1);

  const std::vector<Key> keys = RandomKeys(100);
  const std::vector<float> values(keys.size() * 2, 1.0f);
  std::vector<float> rows(values.size());
  std::vector<UsageOfRow> usage(keys.size());
  std::vector<KeyState> states(keys.size());
  PullArgs pull;
  pull.table = "t";
  pull.dim = 2;
  pull.keys = keys;
  pull.insert_missing = true;
  PushArgs push;
  push.table = "t";
  push.dim = 2;
  push.keys = keys;
  push.gradients = values;
  push.id = {5, 1};
  WriteResult pushed;
  AssignArgs assign;
  assign.table = "t";
  assign.dim = 2;
  assign.keys = keys;
  assign.embeddings = values;
  v1::ShrinkRequest shrink;
  shrink.set_table("t");
  shrink.mutable_rules()->set_min_l2_norm(1.0f);
  ExportChangesArgs changes;
  changes.table = "t";
  const std::map<std::string, std::function<absl::Status()>> calls = {
      {"pull", [&] { return client->Pull(pull, absl::MakeSpan(rows)); }},
      {"pulls",
       [&] {
         return client->StartPull({{pull, absl::MakeSpan(rows)}})->Wait();
       }},
      {"push", [&] { return client->Push(push).status(); }},
      {"pushes",
       [&] {
         return client->StartPush({{push, &pushed}})->Wait();
       }},
      {"assign", [&] { return client->Assign(assign).status(); }},
      {"erase", [&] { return client->Erase("t", keys).status(); }},
      {"shrink", [&] { return ShrinkOf(*client, shrink).status(); }},
      {"usage",
       [&] {
         return client->ReadUsage("t", keys, kServersDay, absl::MakeSpan(usage),
                                  absl::MakeSpan(states));
       }},
      {"export",
       [&] {
         return client->Export(
             "t", false, [](const RowChunk&) { return absl::OkStatus(); });
       }},
      {"changes",
       [&] {
         return client
             ->ExportChanges(
                 changes, [](const ChangeChunk&) { return absl::OkStatus(); })
             .status();
       }},
      {"list", [&] { return client->ListTables("t").status(); }},
      {"make", [&] { return client->CreateTable(SmallTable("t")); }},
  };
  for (const auto& [name, call] : calls) {
    const absl::Status status = call();
    EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss) << name << status;
    EXPECT_THAT(
        std::string(status.message()),
        AllOf(HasSubstr("shard 1 has lost table 't' since 20"),
              HasSubstr("it was restarted"), HasSubstr("reset_lost_tables()")))
        << name;
  }
  EXPECT_THAT(ConnectTo(1)->ListTables("").value(), IsEmpty());
}

TEST_F(LostTablesTest, AProcessThatStartsLaterHearsOfTheLossToo) {
  auto client = WithTable(ConnectToAll());
  for (const uint32_t shard : {0u, 1u}) {
    Restart(shard);
    auto later = ConnectToAll();

    for (const absl::Status& status :
         {Pull(*later), later->CreateTable(SmallTable("t")),
          later->ListTables("")->at(0).lost}) {
      EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss) << status;
      EXPECT_THAT(std::string(status.message()),
                  HasSubstr(absl::StrCat("shard ", shard, " has lost")));
    }
    EXPECT_THAT(ConnectTo(shard)->ListTables("").value(), IsEmpty());
    ASSERT_TRUE(client->ResetLostTables().ok());
  }
}

TEST_F(LostTablesTest, ResettingKeepsTheRowsOfOtherServers) {
  auto client = WithTable(ConnectToAll());
  auto other = ConnectToAll();
  ASSERT_EQ(RowsOf(*other), kRows);
  ASSERT_EQ(RowsOf(*client), kRows);
  const int64_t kept = RowsOn(0);
  Restart(1);

  const auto reset = client->ResetLostTables();

  ASSERT_TRUE(reset.ok()) << reset.status();
  ASSERT_EQ(reset->size(), 1u);
  EXPECT_EQ(reset->at(0).name, "t");
  EXPECT_THAT(reset->at(0).shards, ElementsAre(1));
  EXPECT_EQ(reset->at(0).num_lost_rows, kRows - kept);
  EXPECT_EQ(RowsOf(*client), kept);
  EXPECT_TRUE(Pull(*client).ok());
  EXPECT_THAT(client->ResetLostTables().value(), IsEmpty());

  // Others hear that rows are gone before they go on.
  EXPECT_TRUE(other->ListTables("")->at(0).lost.ok());
  const absl::Status unknown = Pull(*other);
  EXPECT_EQ(unknown.code(), absl::StatusCode::kDataLoss) << unknown;
  EXPECT_THAT(std::string(unknown.message()),
              HasSubstr("is not the one that this process has used"));
  const auto adopted = other->ResetLostTables();
  ASSERT_TRUE(adopted.ok()) << adopted.status();
  ASSERT_EQ(adopted->size(), 1u);
  EXPECT_THAT(adopted->at(0).shards, IsEmpty());
  EXPECT_TRUE(Pull(*other).ok());
  EXPECT_EQ(RowsOf(*other), kept);
}

TEST_F(LostTablesTest, ATableThatAllServersHaveLostIsNotTakenForANewOne) {
  auto client = WithTable(ConnectToAll());
  Restart(0);
  Restart(1);
  const absl::Status lost = client->CreateTable(SmallTable("t"));
  // Who knew nothing of it makes it, without a choice of its optimizer.
  auto other = ConnectToAll();
  TableConfig open = SmallTable("t");
  open.optimizer.is_open = true;
  ASSERT_TRUE(other->CreateTable(open).ok());
  const absl::Status taken = Pull(*client);

  EXPECT_EQ(lost.code(), absl::StatusCode::kDataLoss) << lost;
  EXPECT_EQ(taken.code(), absl::StatusCode::kDataLoss) << taken;
  EXPECT_THAT(client->ResetLostTables()->at(0).shards, IsEmpty());
  EXPECT_TRUE(Pull(*client).ok());
  EXPECT_TRUE(PushOnes(*client, "t", 2, RandomKeys(kRows), {9, 2}).ok());
}

TEST_F(LostTablesTest, RecreatingGoesOnAndSaysSoOnce) {
  auto client = WithTable(ConnectToAll(OnLostTables::kRecreate));
  ASSERT_EQ(RowsOf(*client), kRows);
  const int64_t kept = RowsOn(0);
  Restart(1);
  testing::internal::CaptureStderr();

  EXPECT_TRUE(Pull(*client).ok());
  const auto pushed = PushOnes(*client, "t", 2, RandomKeys(kRows), {9, 2});
  EXPECT_TRUE(Pull(*client).ok());

  EXPECT_EQ(
      testing::internal::GetCapturedStderr(),
      absl::StrCat("tfswitch: warning: table 't' goes on with empty rows "
                   "on shard 1, which had lost ",
                   kRows - kept, " rows, as last counted, in a restart\n"));
  ASSERT_TRUE(pushed.ok()) << pushed.status();
  EXPECT_EQ(pushed->num_rows, kRows);
  EXPECT_EQ(RowsOf(*client), kRows);
}

TEST_F(LostTablesTest, APushThatGoesOnIsAppliedOnceEverywhere) {
  auto client = WithTable(ConnectToAll(OnLostTables::kRecreate));
  Restart(1);
  testing::internal::CaptureStderr();

  // Shard 0 has applied its part when shard 1 says that it cannot.
  ASSERT_TRUE(PushOnes(*client, "t", 2, RandomKeys(kRows), {9, 2}).ok());

  testing::internal::GetCapturedStderr();
  const auto rows = ConnectTo(0)->Export(
      "t", false, [](const RowChunk& chunk) -> absl::Status {
        EXPECT_THAT(chunk.embeddings, Each(-1.0f));
        return absl::OkStatus();
      });
  EXPECT_TRUE(rows.ok()) << rows;
}

TEST_F(LostTablesTest, WritesThatGoOnCountEachRowOnce) {
  auto client = WithTable(ConnectToAll(OnLostTables::kRecreate));
  const std::vector<Key> keys = RandomKeys(kRows);
  const std::vector<float> values(keys.size() * 2, 1.0f);
  AssignArgs assign;
  assign.table = "t";
  assign.dim = 2;
  assign.keys = keys;
  assign.embeddings = values;
  assign.only_missing = true;
  const int64_t kept = RowsOn(0);
  testing::internal::CaptureStderr();

  Restart(1);
  EXPECT_EQ(client->Erase("t", keys).value(), kept);
  Restart(1);
  EXPECT_EQ(client->Assign(assign)->num_rows, kRows);

  testing::internal::GetCapturedStderr();
}

TEST_F(LostTablesTest, RecreatingProcessesMayBeginWithAnExport) {
  WithTable(ConnectToAll());
  Restart(1);
  testing::internal::CaptureStderr();

  const absl::Status status = ConnectToAll(OnLostTables::kRecreate)
                                  ->Export("t", false, [](const RowChunk&) {
                                    return absl::OkStatus();
                                  });

  EXPECT_TRUE(status.ok()) << status;
  EXPECT_THAT(testing::internal::GetCapturedStderr(), HasSubstr("shard 1"));
}

TEST_F(LostTablesTest, AResetThatFailsNamesTheTablesThatWereReset) {
  auto client = WithTable(WithTable(ConnectToAll()), "u");
  ShardOptions options;
  options.max_tables = 1;
  Restart(1, options);
  testing::internal::CaptureStderr();

  const absl::Status reset = client->ResetLostTables().status();

  EXPECT_EQ(reset.code(), absl::StatusCode::kResourceExhausted) << reset;
  EXPECT_THAT(testing::internal::GetCapturedStderr(),
              HasSubstr("table 't' goes on with empty rows on shard 1"));
  EXPECT_TRUE(Pull(*client).ok());
}

TEST_F(LostTablesTest, ListingAnEmptyTableCountsNoRows) {
  auto client = ConnectToAll();
  ASSERT_TRUE(client->CreateTable(SmallTable("t")).ok());
  ASSERT_EQ(RowsOf(*client), 0);
  WithTable(client);
  Restart(1);

  EXPECT_EQ(client->ResetLostTables()->at(0).num_lost_rows, -1);
}

TEST_F(LostTablesTest, ProcessesThatResetAtTheSameTimeAgree) {
  constexpr int kProcesses = 4;
  for (int round = 0; round < 10; ++round) {
    const std::string table = absl::StrCat("t", round);
    std::vector<std::shared_ptr<ParameterClient>> clients;
    for (int i = 0; i < kProcesses; ++i) {
      clients.push_back(WithTable(ConnectToAll(), table));
    }
    Restart(static_cast<uint32_t>(round) % 2);

    std::vector<std::thread> threads;
    for (const auto& client : clients) {
      threads.emplace_back([&client] {
        const auto reset = client->ResetLostTables();
        EXPECT_TRUE(reset.ok()) << reset.status();
      });
    }
    for (std::thread& thread : threads) thread.join();

    EXPECT_EQ(ConnectTo(0)->ListTables(table)->at(0).identity.incarnation,
              ConnectTo(1)->ListTables(table)->at(0).identity.incarnation);
    EXPECT_TRUE(ConnectToAll()->ListTables(table).ok());
  }
}

TEST_F(LostTablesTest, AStepWhoseGradientsAreLostDoesNotEndWithOk) {
  const ConsistencyConfig bsp = {ConsistencyKind::kBsp, 0, Reduction::kMean};
  const std::shared_ptr<ParameterClient> client = ConnectToAll();
  TableConfig config = SmallTable("t");
  config.consistency = bsp;
  ASSERT_TRUE(client->CreateTable(config).ok());
  WorkerOptions options;
  options.group = "g";
  options.group_options.num_workers = 1;
  options.group_options.settings = bsp.ToString();
  options.consistency = bsp;
  const auto session = WorkerSession::Join(client, options).value();
  const std::vector<Key> keys = RandomKeys(100);
  const std::vector<float> gradients(keys.size() * 2, 1.0f);
  PushArgs push;
  push.table = "t";
  push.dim = 2;
  push.keys = keys;
  push.gradients = gradients;
  push.learning_rate = 1.0f;
  push.insert_missing = true;
  push.step = session->CurrentStep("t").value();
  ASSERT_TRUE(client->Push(push).ok());
  Restart(1);

  for (int i = 0; i < 2; ++i) {
    const absl::Status ended = session->EndStep(1.0);
    EXPECT_EQ(ended.code(), absl::StatusCode::kDataLoss) << ended;
  }
  // Who goes on without the lost rows goes on without the gradients.
  ASSERT_TRUE(client->ResetLostTables().ok());
  const absl::Status ended = session->EndStep(1.0);
  EXPECT_TRUE(ended.ok()) << ended;
  const int64_t rows = RowsOf(*client);
  EXPECT_GT(rows, 0);
  EXPECT_LT(rows, 100);
}

TEST_F(LostTablesTest, ReadersFollowWhenOthersHaveMadeTheTableWhole) {
  auto trainer = WithTable(ConnectToAll());
  auto reader = ConnectToAll(OnLostTables::kFollow);
  ASSERT_TRUE(Pull(*reader).ok());
  Restart(1);

  EXPECT_EQ(Pull(*reader).code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(ConnectTo(1)->ListTables("").value(), IsEmpty());
  ASSERT_TRUE(trainer->ResetLostTables().ok());
  testing::internal::CaptureStderr();
  EXPECT_TRUE(Pull(*reader).ok());
  EXPECT_THAT(testing::internal::GetCapturedStderr(), HasSubstr("'t'"));
}

TEST_F(LostTablesTest, ADroppedTableIsNotLost) {
  auto client = WithTable(ConnectToAll());
  auto other = ConnectToAll();
  ASSERT_TRUE(other->DropTable("t").ok());

  EXPECT_EQ(Pull(*client).code(), absl::StatusCode::kNotFound);
  EXPECT_TRUE(client->CreateTable(SmallTable("t")).ok());
  EXPECT_EQ(RowsOf(*client), 0);

  // The remaining parts of a lost table can be dropped.
  Restart(0);
  EXPECT_TRUE(client->DropTable("t").ok());
  EXPECT_TRUE(client->CreateTable(SmallTable("t")).ok());
}

TEST_F(LostTablesTest, ATableWhoseMakingWasInterruptedIsNotLost) {
  const auto begun = ConnectTo(1)->MakeTable(
      SmallTable("t"), {77, ConnectToAll()->ShardInstances().value()}, 0);
  ASSERT_TRUE(begun.ok()) << begun.status();

  auto client = ConnectToAll();
  EXPECT_EQ(Pull(*client).code(), absl::StatusCode::kUnavailable);
  ASSERT_TRUE(client->CreateTable(SmallTable("t")).ok());

  const TableInfo info = client->ListTables("t")->at(0);
  EXPECT_EQ(info.identity.incarnation, 77u);
  EXPECT_EQ(info.num_shards, 2);
}

}  // namespace
}  // namespace tfswitch
