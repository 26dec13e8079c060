// PullMany and PushMany: how many messages go out, and what happens to them on
// the way.

#include "tests/cc/testing/many_calls.h"

#include <grpcpp/grpcpp.h>

#include <atomic>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "cc/base/mutex.h"
#include "cc/wire/codec.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/cc/rpc/server_under_test.h"
#include "tests/cc/rpc/tcp_proxy.h"
#include "tests/cc/testing/coordination.h"
#include "tfswitch/v1/parameter_server.grpc.pb.h"

namespace tfswitch {
namespace {

using testing::AllOf;
using testing::Contains;
using testing::Each;
using testing::HasSubstr;

constexpr int kRowDim = 16;

// Counts the calls that reach it; its rows are zeros.
class CountingServer final : public v1::ParameterServer::Service {
 public:
  CountingServer(uint32_t shard_index, uint32_t num_shards,
                 uint64_t max_message_bytes = 1 << 30)
      : shard_index_(shard_index),
        num_shards_(num_shards),
        max_message_bytes_(max_message_bytes) {
    grpc::ServerBuilder builder;
    int port = 0;
    builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(),
                             &port);
    builder.RegisterService(this);
    server_ = builder.BuildAndStart();
    address_ = absl::StrCat("127.0.0.1:", port);
  }
  ~CountingServer() override { server_->Shutdown(); }

  std::unique_ptr<ParameterClient> Connect() const {
    GrpcClientOptions options;
    options.address = address_;
    options.shard_index = shard_index_;
    options.num_shards = num_shards_;
    auto client = NewGrpcClient(options);
    EXPECT_TRUE(client.ok()) << client.status();
    return std::move(client).value();
  }

  grpc::Status Handshake(grpc::ServerContext*, const v1::HandshakeRequest*,
                         v1::HandshakeResponse* response) override {
    response->set_protocol_version(1);
    response->set_shard_index(shard_index_);
    response->set_num_shards(num_shards_);
    response->set_max_message_bytes(max_message_bytes_);
    return grpc::Status::OK;
  }
  grpc::Status CreateTable(grpc::ServerContext*, const v1::CreateTableRequest*,
                           v1::CreateTableResponse*) override {
    return grpc::Status::OK;
  }
  grpc::Status ListTables(grpc::ServerContext*, const v1::ListTablesRequest*,
                          v1::ListTablesResponse*) override {
    return {grpc::StatusCode::NOT_FOUND, "not made yet"};
  }
  grpc::Status PullMany(grpc::ServerContext*,
                        const v1::PullManyRequest* request,
                        v1::PullManyResponse* response) override {
    ++many_pulls;
    for (const v1::PullRequest& each : request->requests()) {
      Answer(each, response->add_responses());
    }
    return grpc::Status::OK;
  }
  grpc::Status PushMany(grpc::ServerContext*,
                        const v1::PushManyRequest* request,
                        v1::PushManyResponse* response) override {
    ++many_pushes;
    for (const v1::PushRequest& each : request->requests()) {
      response->add_responses()->set_updated_rows(each.keys_size());
    }
    return grpc::Status::OK;
  }

  std::atomic<int> many_pulls{0};
  std::atomic<int> many_pushes{0};

 private:
  static void Answer(const v1::PullRequest& request,
                     v1::PullResponse* response) {
    response->mutable_values()->Resize(request.keys_size() * kRowDim, 0.0f);
  }

  const uint32_t shard_index_;
  const uint32_t num_shards_;
  const uint64_t max_message_bytes_;
  std::string address_;
  std::unique_ptr<grpc::Server> server_;
};

class Cluster {
 public:
  explicit Cluster(uint32_t num_servers) {
    std::vector<std::unique_ptr<ParameterClient>> clients;
    for (uint32_t i = 0; i < num_servers; ++i) {
      servers.push_back(std::make_unique<CountingServer>(i, num_servers));
      clients.push_back(servers.back()->Connect());
    }
    client = NewShardedClient(std::move(clients));
  }

  std::vector<std::unique_ptr<CountingServer>> servers;
  std::unique_ptr<ParameterClient> client;
};

// One step of `num_tables` features with `num_keys` keys each.
ManyCalls MakeStep(ParameterClient& client, int num_tables, int num_keys) {
  ManyCalls calls;
  for (int i = 0; i < num_tables; ++i) {
    const std::string table = absl::StrCat("t", i);
    EXPECT_TRUE(client.CreateTable(SmallTable(table, kRowDim)).ok());
    calls.AddPull(table, kRowDim, RandomKeys(num_keys, i), true);
  }
  for (int i = 0; i < num_tables; ++i) {
    calls
        .AddPush(absl::StrCat("t", i), kRowDim, RandomKeys(num_keys, i), 1.0f,
                 {1, static_cast<uint64_t>(i + 1)})
        .keys_are_unique = true;
  }
  return calls;
}

TEST(ManyCallsTest, AStepOfManyFeaturesIsOnePullAndOnePushPerServer) {
  for (const uint32_t num_servers : {1u, 3u}) {
    Cluster cluster(num_servers);
    ManyCalls step = MakeStep(*cluster.client, 26, 300);

    ASSERT_TRUE(cluster.client->StartPull(step.pulls)->Wait().ok());
    ASSERT_TRUE(cluster.client->StartPush(step.pushes)->Wait().ok());

    for (const auto& server : cluster.servers) {
      EXPECT_EQ(server->many_pulls, 1);
      EXPECT_EQ(server->many_pushes, 1);
    }
    for (int i = 0; i < 26; ++i) {
      EXPECT_THAT(step.floats(i), Each(0.0f));
      EXPECT_EQ(step.result(26 + i).num_rows, 300);
    }
  }
}

TEST(ManyCallsTest, LongStepsGoInAFewMessages) {
  Cluster cluster(1);
  // 26 x 128 KB: 3.3 MB in messages of at least 1.25 MB, but for the last.
  ManyCalls step = MakeStep(*cluster.client, 26, 2048);

  ASSERT_TRUE(cluster.client->StartPull(step.pulls)->Wait().ok());
  ASSERT_TRUE(cluster.client->StartPush(step.pushes)->Wait().ok());

  EXPECT_EQ(cluster.servers[0]->many_pulls, 3);
  EXPECT_EQ(cluster.servers[0]->many_pushes, 3);
  for (int i = 0; i < 26; ++i) {
    EXPECT_EQ(step.result(26 + i).num_rows, 2048);
  }
}

TEST(ManyCallsTest, PushesWhoseAnswerIsLostAreEachAppliedOnce) {
  const auto server = StartServer();
  TcpProxy proxy(server->address());
  auto client = Connect(proxy.address()).value();
  auto direct = Connect(server->address()).value();
  ManyCalls calls;
  for (const char* table : {"a", "b"}) {
    TableConfig config = SmallTable(table, 1);
    config.optimizer = SgdConfig{};
    ASSERT_TRUE(client->CreateTable(config).ok());
    calls.AddPush(table, 1, {1, 2}, 1.0f,
                  {77, table[0] == 'a' ? uint64_t{1} : uint64_t{2}});
  }
  proxy.HoldAnswers(true);

  std::thread pushing([&] {
    const absl::Status status = client->StartPush(calls.pushes)->Wait();
    ASSERT_TRUE(status.ok()) << status;
  });
  for (const char* table : {"a", "b"}) {
    while (direct->ListTables(table)->at(0).stats.num_rows < 2) {
    }
  }
  proxy.CutConnections();
  proxy.HoldAnswers(false);
  pushing.join();

  EXPECT_TRUE(calls.result(0).duplicate);
  EXPECT_TRUE(calls.result(1).duplicate);
  EXPECT_THAT(*PullRows(*direct, "a", 1, {1, 2}), Each(0.0f));
  EXPECT_THAT(*PullRows(*direct, "b", 1, {1, 2}), Each(0.0f));
}

TEST(ManyCallsTest, WhatFitsOneMessageToTheByteIsOneMessage) {
  for (const int less : {0, 1}) {
    ManyCalls calls;
    v1::PushManyRequest pushes;
    uint64_t pull_answers = 0;
    for (int i = 0; i < 2; ++i) {
      const std::string table = absl::StrCat("t", i);
      calls.AddPull(table, kRowDim, RandomKeys(300, i));
      pull_answers += PartBytes(PullResponseBytes(300 * kRowDim));
    }
    for (int i = 0; i < 2; ++i) {
      const std::string table = absl::StrCat("t", i);
      PushArgs& args = calls.AddPush(table, kRowDim, RandomKeys(300, i), 1.0f,
                                     {1, uint64_t{1} + i});
      const std::vector<float>& ones = calls.floats(2 + i);
      args.observations = {absl::MakeConstSpan(ones).first(300),
                           absl::MakeConstSpan(ones).first(300),
                           absl::MakeConstSpan(ones).first(300)};
      v1::PushRequest* push = pushes.add_requests();
      push->set_table(table);
      push->mutable_keys()->Resize(300, 1);
      push->mutable_gradients()->Resize(300 * kRowDim, 1.0f);
      push->mutable_counts()->Resize(300, 1.0f);
      push->mutable_shows()->Resize(300, 1.0f);
      push->mutable_clicks()->Resize(300, 1.0f);
      push->set_learning_rate(1.0f);
      push->set_insert_missing(true);
      push->set_client_id(1);
      push->set_sequence((i + 1) * 8);
    }

    CountingServer pulled(0, 1, pull_answers - less);
    auto client = pulled.Connect();
    ASSERT_TRUE(client->StartPull(calls.pulls)->Wait().ok());
    CountingServer pushed(0, 1, pushes.ByteSizeLong() - less);
    client = pushed.Connect();
    ASSERT_TRUE(client->StartPush(calls.pushes)->Wait().ok());

    EXPECT_EQ(pulled.many_pulls, 1 + less);
    EXPECT_EQ(pushed.many_pushes, 1 + less);
  }
}

TEST(ManyCallsTest, APushThatFitsOnlyWithoutItsHeaderIsCut) {
  ManyCalls calls;
  PushArgs& args =
      calls.AddPush("t", kRowDim, RandomKeys(50'000), 1.0f, {1, 1});
  args.keys_are_unique = true;
  CountingServer server(0, 1, PushRequestBytes(args) + 2);
  auto client = server.Connect();

  const absl::Status status = client->StartPush(calls.pushes)->Wait();

  EXPECT_TRUE(status.ok()) << status;
  EXPECT_EQ(server.many_pushes, 2);
}

TEST(ManyCallsTest, AStepOverTheLimitGoesInMessagesThatFit) {
  GrpcServerOptions options;
  options.max_message_bytes = 64 << 10;
  const auto server = StartServer(options);
  auto client = Connect(server->address()).value();
  // Rows are a sixth of what is pushed, and a third of what is pulled.
  ManyCalls step;
  for (int i = 0; i < 40; ++i) {
    const std::string table = absl::StrCat("t", i);
    TableConfig config = SmallTable(table, 1);
    config.statistics.kind = StatisticsKind::kShowClick;
    ASSERT_TRUE(client->CreateTable(config).ok());
    step.AddPull(table, 1, RandomKeys(300, i), true);
  }
  const std::vector<float> ones(300, 1.0f);
  for (int i = 0; i < 40; ++i) {
    step.AddPush(absl::StrCat("t", i), 1, RandomKeys(300, i), 1.0f,
                 {1, uint64_t{1} + i})
        .observations = {ones, ones, ones};
  }

  absl::Status status = client->StartPull(step.pulls)->Wait();
  EXPECT_TRUE(status.ok()) << status;
  status = client->StartPush(step.pushes)->Wait();
  EXPECT_TRUE(status.ok()) << status;

  for (int i = 0; i < 40; ++i) {
    EXPECT_THAT(step.floats(i), Each(1.0f));
    EXPECT_EQ(step.result(40 + i).num_rows, 300);
  }
}

TEST(ManyCallsTest, APieceOverTheLimitIsNotSentAndNamesItsTable) {
  GrpcServerOptions options;
  options.max_message_bytes = 4096;
  const auto server = StartServer(options);
  auto client = Connect(server->address()).value();
  ManyCalls step = MakeStep(*client, 3, 40);
  step.AddPull("t1", kRowDim, RandomKeys(70), true);
  step.AddPush("t1", kRowDim, RandomKeys(70), 1.0f, {1, 9});

  const absl::Status pushed = client->StartPush(step.pushes)->Wait();
  const int64_t num_rows = client->ListTables("t0")->at(0).stats.num_rows;
  const absl::Status pulled = client->StartPull(step.pulls)->Wait();

  for (const absl::Status& status : {pulled, pushed}) {
    EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
    EXPECT_THAT(std::string(status.message()),
                AllOf(HasSubstr("70 keys"), HasSubstr("'t1'"),
                      HasSubstr("--max_message_bytes")));
  }
  // Not the pushes that would have fit, either.
  EXPECT_EQ(num_rows, 0);
}

TEST(ManyCallsTest, ADimOfAnotherTableIsRefusedAndNamed) {
  const auto server = StartServer();
  auto client = Connect(server->address()).value();
  ASSERT_TRUE(client->CreateTable(SmallTable("a", 2)).ok());
  ASSERT_TRUE(client->CreateTable(SmallTable("b", 3)).ok());
  ManyCalls calls;
  calls.AddPull("a", 2, {1, 2});
  calls.AddPull("b", 2, {1, 2});

  const absl::Status status = client->StartPull(calls.pulls)->Wait();

  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(
      std::string(status.message()),
      AllOf(HasSubstr("'b'"), HasSubstr("expected 4"), HasSubstr("sent 6")));
}

TEST(ManyCallsTest, OneOfSeveralMessagesFailsByItself) {
  const auto server = StartServer();
  auto client = Connect(server->address()).value();
  auto other = Connect(server->address()).value();
  // A message is full with "a" and "b", of 0.75 MB each; so is one with "gone"
  // and "d", and "e" and "f" are the last.
  constexpr int kKeys = 750;
  constexpr int kWide = 256;
  std::vector<std::string> tables = {"a", "b", "gone", "d", "e", "f"};
  for (const std::string& table : tables) {
    ASSERT_TRUE(client->CreateTable(SmallTable(table, kWide)).ok());
  }
  ASSERT_TRUE(other->DropTable("gone").ok());
  const auto push = [&](ManyCalls* calls) {
    for (size_t i = 0; i < tables.size(); ++i) {
      calls->AddPush(tables[i], kWide, RandomKeys(kKeys), 1.0f, {8, 1 + i});
    }
    return client->StartPush(calls->pushes)->Wait();
  };
  const auto num_rows = [&](const std::string& table) {
    return other->ListTables(table)->at(0).stats.num_rows;
  };

  ManyCalls calls;
  const absl::Status status = push(&calls);

  EXPECT_EQ(status.code(), absl::StatusCode::kNotFound) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("no table 'gone'"));
  for (const char* table : {"a", "b", "e", "f"}) {
    EXPECT_EQ(num_rows(table), kKeys) << table;
  }
  EXPECT_EQ(num_rows("d"), 0) << "of the message that failed";

  // A repetition applies the missing parts, and nothing twice.
  ASSERT_TRUE(client->CreateTable(SmallTable("gone", kWide)).ok());
  ManyCalls again;
  ASSERT_TRUE(push(&again).ok());

  for (size_t i = 0; i < tables.size(); ++i) {
    const bool is_missing = i == 2 || i == 3;
    EXPECT_EQ(again.result(i).duplicate, !is_missing) << tables[i];
    EXPECT_EQ(again.result(i).num_rows, kKeys);
    EXPECT_THAT(*PullRows(*client, tables[i], kWide, RandomKeys(1)),
                Each(0.0f));
  }
}

TEST(ManyCallsTest, APushThatCannotBeAppliedLeavesTheOthersAppliedOnce) {
  const auto server = StartServer();
  auto client = Connect(server->address()).value();
  for (const char* table : {"a", "bsp", "z"}) {
    TableConfig config = SmallTable(table, 1);
    config.optimizer = SgdConfig{};
    if (table == std::string("bsp")) {
      config.consistency.kind = ConsistencyKind::kBsp;
    }
    ASSERT_TRUE(client->CreateTable(config).ok());
    ASSERT_TRUE(PullRows(*client, table, 1, {1}, true).ok());
  }
  // The round of clock 0 is over.
  const Round round = RoundOf(0, {ContributionOf(0, 1, 0, 1.0)});
  int64_t committed = 0;
  ASSERT_TRUE(
      client->StartCommitRound(0, "g", round, &committed, {})->Wait().ok());
  const auto push = [&] {
    ManyCalls calls;
    calls.AddPush("a", 1, {1}, 0.5f, {6, 1});
    calls.AddPush("bsp", 1, {1}, 0.5f, {6, 2}).step = {"g", 0, 1, 0};
    calls.AddPush("z", 1, {1}, 0.5f, {6, 3});
    return client->StartPush(calls.pushes)->Wait();
  };

  for (int i = 0; i < 2; ++i) {
    const absl::Status status = push();
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
    EXPECT_THAT(*PullRows(*client, "a", 1, {1}), Each(0.5f));
    EXPECT_THAT(std::string(status.message()), HasSubstr("'bsp'"));
    EXPECT_THAT(*PullRows(*client, "z", 1, {1}), Each(0.5f));
  }
}

}  // namespace
}  // namespace tfswitch
