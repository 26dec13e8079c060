// ReadUsage and Shrink over servers: how many calls go out, and what happens to
// them on the way.

#include <grpcpp/grpcpp.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "cc/base/mutex.h"
#include "cc/wire/table_config_conversion.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/cc/rpc/server_under_test.h"
#include "tfswitch/v1/parameter_server.grpc.pb.h"

namespace tfswitch {
namespace {

using testing::AllOf;
using testing::Each;
using testing::HasSubstr;

TableConfig CountedTable() {
  TableConfig config = SmallTable("t");
  config.statistics.kind = StatisticsKind::kUsage;
  return config;
}

std::vector<Key> KeysFrom(Key first, int count) {
  std::vector<Key> keys(count);
  for (int i = 0; i < count; ++i) keys[i] = first + i;
  return keys;
}

// --- ReadUsage --------------------------------------------------------------

struct Usage {
  std::vector<UsageOfRow> rows;
  std::vector<KeyState> states;
};

absl::StatusOr<Usage> ReadUsage(ParameterClient& client,
                                const std::vector<Key>& keys) {
  Usage usage;
  usage.rows.resize(keys.size());
  usage.states.resize(keys.size());
  absl::Status status =
      client.ReadUsage("t", keys, 5.0f, absl::MakeSpan(usage.rows),
                       absl::MakeSpan(usage.states));
  if (!status.ok()) return status;
  return usage;
}

TEST(RowLifeCallsTest, UsageOfMoreIdsThanAMessageHoldsIsReadInParts) {
  for (const uint64_t limit : {uint64_t{1024}, uint64_t{20000}}) {
    GrpcServerOptions options;
    options.max_message_bytes = limit;
    const auto server = StartServer(options);
    auto client = Connect(server->address()).value();
    ASSERT_TRUE(client->CreateTable(CountedTable()).ok());
    // Ids of which the usage tells which it is, nearly.
    const std::vector<Key> keys = KeysFrom(100, 3000);
    const auto pushes_to = [](int i) { return i % 7 == 0 ? i / 7 % 5 : 0; };
    for (int push = 1; push < 5; ++push) {
      for (int i = 0; i < 3000; ++i) {
        if (pushes_to(i) < push) continue;
        ASSERT_TRUE(PushOnes(*client, "t", 2, {keys[i]}).ok());
      }
    }

    const auto usage = ReadUsage(*client, keys);

    ASSERT_TRUE(usage.ok()) << usage.status();
    for (int i = 0; i < 3000; ++i) {
      ASSERT_EQ(usage->states[i],
                pushes_to(i) > 0 ? KeyState::kRow : KeyState::kUnknown)
          << i;
      ASSERT_EQ(usage->rows[i].count, static_cast<float>(pushes_to(i))) << i;
    }
  }
}

TEST(RowLifeCallsTest, UsageOfNoIdsStillLooksForTheTable) {
  const auto server = StartServer();
  auto client = Connect(server->address()).value();
  EXPECT_EQ(ReadUsage(*client, {}).status().code(),
            absl::StatusCode::kNotFound);
  ASSERT_TRUE(client->CreateTable(CountedTable()).ok());
  EXPECT_TRUE(ReadUsage(*client, {}).ok());
}

// --- Shrink -----------------------------------------------------------------

// Where the calls of all servers wait for each other.
class Meeting {
 public:
  explicit Meeting(int expected) : expected_(expected) {}

  void Arrive(const grpc::ServerContext& call) {
    MutexLock lock(&mutex_);
    ++arrived_;
    changed_.NotifyAll();
    while (arrived_ < expected_ && !call.IsCancelled()) {
      changed_.WaitFor(&mutex_, absl::Milliseconds(10));
    }
  }

 private:
  const int expected_;
  Mutex mutex_;
  CondVar changed_;
  int arrived_ ABSL_GUARDED_BY(mutex_) = 0;
};

// Answers a Shrink when those of all servers have come.
class MeetingServer final : public v1::ParameterServer::Service {
 public:
  MeetingServer(uint32_t shard_index, uint32_t num_shards, Meeting* meeting)
      : shard_index_(shard_index), num_shards_(num_shards), meeting_(meeting) {
    grpc::ServerBuilder builder;
    int port = 0;
    builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(),
                             &port);
    builder.RegisterService(this);
    server_ = builder.BuildAndStart();
    address_ = absl::StrCat("127.0.0.1:", port);
  }
  ~MeetingServer() override { server_->Shutdown(); }

  const std::string& address() const { return address_; }

  grpc::Status Handshake(grpc::ServerContext*, const v1::HandshakeRequest*,
                         v1::HandshakeResponse* response) override {
    response->set_protocol_version(1);
    response->set_shard_index(shard_index_);
    response->set_num_shards(num_shards_);
    response->set_max_message_bytes(1 << 20);
    return grpc::Status::OK;
  }
  grpc::Status ListTables(grpc::ServerContext*, const v1::ListTablesRequest*,
                          v1::ListTablesResponse* response) override {
    *response->add_tables()->mutable_config() = ToProto(CountedTable());
    return grpc::Status::OK;
  }
  grpc::Status Shrink(grpc::ServerContext* context, const v1::ShrinkRequest*,
                      v1::ShrinkResponse* response) override {
    meeting_->Arrive(*context);
    if (fails_next_.exchange(false)) {
      return {grpc::StatusCode::UNAVAILABLE, "away for a moment"};
    }
    absl::SleepFor(pause_);
    response->set_evicted_rows(shard_index_ + 1);
    return grpc::Status::OK;
  }

  void FailNext() { fails_next_ = true; }
  // From now on each answer takes so long.
  void Pause(absl::Duration pause) { pause_ = pause; }

 private:
  absl::Duration pause_ = absl::ZeroDuration();  // Constant during calls.
  std::atomic<bool> fails_next_{false};
  const uint32_t shard_index_;
  const uint32_t num_shards_;
  Meeting* const meeting_;
  std::string address_;
  std::unique_ptr<grpc::Server> server_;
};

std::unique_ptr<ParameterClient> ConnectAll(
    const std::vector<std::string>& addresses, absl::Duration timeout) {
  std::vector<std::unique_ptr<ParameterClient>> clients;
  for (const std::string& address : addresses) {
    GrpcClientOptions options;
    options.address = address;
    options.shard_index = static_cast<uint32_t>(clients.size());
    options.num_shards = static_cast<uint32_t>(addresses.size());
    options.timeout = timeout;
    options.bulk_timeout = absl::Seconds(30);
    auto client = NewGrpcClient(options);
    EXPECT_TRUE(client.ok()) << client.status();
    clients.push_back(std::move(client).value());
  }
  return NewShardedClient(std::move(clients));
}

TEST(RowLifeCallsTest, ServersShrinkTogether) {
  Meeting meeting(3);
  std::vector<std::unique_ptr<MeetingServer>> servers;
  std::vector<std::string> addresses;
  for (uint32_t i = 0; i < 3; ++i) {
    servers.push_back(std::make_unique<MeetingServer>(i, 3, &meeting));
    addresses.push_back(servers.back()->address());
  }
  const auto client = ConnectAll(addresses, absl::Seconds(30));
  v1::ShrinkRequest args;
  args.set_table("t");

  const auto report = ShrinkOf(*client, args);

  ASSERT_TRUE(report.ok()) << report.status();
  EXPECT_EQ(report->evicted_rows(), 1 + 2 + 3);
}

// Also if another one has kept the client waiting for longer since than it
// waits for servers.
TEST(RowLifeCallsTest, AServerThatWasAwayForAMomentIsTriedAgain) {
  constexpr absl::Duration kTimeout = absl::Milliseconds(500);
  Meeting meeting(2);
  MeetingServer slow(0, 2, &meeting);
  MeetingServer away(1, 2, &meeting);
  slow.Pause(kTimeout + absl::Milliseconds(100));
  away.FailNext();
  const auto client = ConnectAll({slow.address(), away.address()}, kTimeout);
  v1::ShrinkRequest args;
  args.set_table("t");

  const auto report = ShrinkOf(*client, args);

  ASSERT_TRUE(report.ok()) << report.status();
  EXPECT_EQ(report->evicted_rows(), 1 + 2);
}

// Two real servers with a table "t" of 1,000 rows.
class ShrinkTest : public testing::Test {
 protected:
  ShrinkTest() {
    for (uint32_t i = 0; i < 2; ++i) {
      servers_.push_back(StartServer({}, ShardOptions{i, 2}));
    }
    client_ = ConnectAll({servers_[0]->address(), servers_[1]->address()},
                         absl::Seconds(1));
    EXPECT_TRUE(client_->CreateTable(CountedTable()).ok());
    EXPECT_TRUE(PushOnes(*client_, "t", 2, KeysFrom(0, 1000)).ok());
    args_.set_table("t");
  }

  int64_t NumRows() { return client_->ListTables("t")->at(0).stats.num_rows; }

  std::vector<std::unique_ptr<GrpcServer>> servers_;
  std::unique_ptr<ParameterClient> client_;
  v1::ShrinkRequest args_;
};

TEST_F(ShrinkTest, MaxRowsIsOfTheWholeTable) {
  args_.mutable_rules()->set_max_rows(300);

  const auto report = ShrinkOf(*client_, args_);

  ASSERT_TRUE(report.ok()) << report.status();
  EXPECT_EQ(report->evicted_rows(), 700);
  EXPECT_EQ(report->by_max_rows(), 700);
  EXPECT_EQ(report->remaining_rows(), 300);
  EXPECT_EQ(NumRows(), 300);
}

TEST_F(ShrinkTest, TheErrorOfAServerIsNamedAndTheOthersShrinkAllTheSame) {
  args_.mutable_rules()->set_max_rows(0);
  const std::string gone = servers_[0]->address();
  servers_[0].reset();

  const absl::Status status = ShrinkOf(*client_, args_).status();

  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
  EXPECT_THAT(std::string(status.message()),
              HasSubstr(absl::StrCat("shard 0 (", gone, ")")));
  GrpcClientOptions options;
  options.address = servers_[1]->address();
  options.shard_index = 1;
  options.num_shards = 2;
  EXPECT_EQ(
      NewGrpcClient(options).value()->ListTables("t")->at(0).stats.num_rows, 0);
}

TEST_F(ShrinkTest, ServersWithoutRulesSayWhatIsMissing) {
  args_.clear_rules();

  const absl::Status status = ShrinkOf(*client_, args_).status();

  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(status.message()),
              AllOf(HasSubstr("'t'"), HasSubstr("eviction")));
  EXPECT_EQ(NumRows(), 1000);
}

}  // namespace
}  // namespace tfswitch
