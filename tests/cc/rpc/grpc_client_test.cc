// The client when things go wrong: servers that are away, restarted, frozen, of
// another version, in another place.

#include "cc/rpc/client/grpc_client.h"

#include <arpa/inet.h>
#include <grpcpp/grpcpp.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <cmath>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/cc/rpc/server_under_test.h"
#include "tests/cc/rpc/tcp_proxy.h"
#include "tfswitch/v1/parameter_server.grpc.pb.h"

namespace tfswitch {
namespace {

using testing::AllOf;
using testing::Each;
using testing::EndsWith;
using testing::HasSubstr;
using testing::Not;

// Where nobody listens.
std::string FreeAddress() {
  const auto server = StartServer();
  return server->address();
}

std::unique_ptr<GrpcServer> StartAt(const std::string& address) {
  GrpcServerOptions options;
  options.address = address;
  return StartServer(options);
}

TEST(GrpcClientTest, MissingServerIsNamedWithinTheTimeout) {
  GrpcClientOptions options;
  options.address = FreeAddress();
  options.shard_index = 1;
  options.num_shards = 2;
  options.timeout = absl::Milliseconds(200);

  const absl::Status status = NewGrpcClient(options).status();

  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(status.message(),
            absl::StrCat("shard 1 (", options.address,
                         ") did not answer within 200ms: connection refused; "
                         "is the server running?"));
}

TEST(GrpcClientTest, WaitsForAServerThatStartsLater) {
  const std::string address = FreeAddress();
  std::thread connecting([&] { EXPECT_TRUE(Connect(address).ok()); });
  const auto server = StartAt(address);
  connecting.join();
}

TEST(GrpcClientTest, BadOptionsAreRefusedAndNamed) {
  EXPECT_EQ(Connect("nowhere").status().code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(Connect("127.0.0.1:0").status().ToString(), HasSubstr("port 0"));
  EXPECT_THAT(Connect("127.0.0.1:1", absl::ZeroDuration()).status().ToString(),
              AllOf(HasSubstr("INVALID_ARGUMENT"), HasSubstr("timeout")));
}

TEST(GrpcClientTest, OtherProtocolVersionIsRefusedNamingBoth) {
  GrpcServerOptions server_options;
  server_options.protocol_version = 2;
  const auto server = StartServer(server_options);

  const absl::Status status = Connect(server->address()).status();

  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(status.message()),
              AllOf(HasSubstr(server->address()), HasSubstr("version 1"),
                    HasSubstr("speaks 2"), HasSubstr("install")));
}

TEST(GrpcClientTest, CompressedAnswersAreRefused) {
  class Compressing final : public v1::ParameterServer::Service {
    grpc::Status Handshake(grpc::ServerContext* context,
                           const v1::HandshakeRequest*,
                           v1::HandshakeResponse* response) override {
      context->set_compression_algorithm(GRPC_COMPRESS_GZIP);
      response->set_protocol_version(1);
      response->set_num_shards(1);
      // gRPC does not compress what would only become longer.
      response->GetReflection()
          ->MutableUnknownFields(response)
          ->AddLengthDelimited(1000, std::string(size_t{1} << 20, 'x'));
      return grpc::Status::OK;
    }
  } service;
  int port = 0;
  grpc::ServerBuilder builder;
  builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(),
                           &port);
  builder.RegisterService(&service);
  const std::unique_ptr<grpc::Server> server = builder.BuildAndStart();

  const absl::Status status =
      Connect(absl::StrCat("127.0.0.1:", port)).status();

  // gRPC refuses it, unless the end of the call has come with it. Then it is
  // read as it is.
  EXPECT_TRUE(absl::IsUnimplemented(status) || absl::IsInternal(status))
      << status;
}

TEST(GrpcClientTest, ServerWithoutRoomForARequestIsNamedWithTheRemedy) {
  const int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in at = {};
  at.sin_family = AF_INET;
  at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof(at);
  ASSERT_EQ(bind(listener, reinterpret_cast<sockaddr*>(&at), size), 0);
  ASSERT_EQ(listen(listener, 1), 0);
  ASSERT_EQ(getsockname(listener, reinterpret_cast<sockaddr*>(&at), &size), 0);
  std::thread server([listener] {
    const int fd = accept4(listener, nullptr, nullptr, SOCK_CLOEXEC);
    // SETTINGS, and RST_STREAM of stream 1 with ENHANCE_YOUR_CALM, with which
    // gRPC ends a call if its quota is used up.
    const std::string settings("\0\0\0\4\0\0\0\0\0", 9);
    const std::string reset("\0\0\4\3\0\0\0\0\1\0\0\0\x0b", 13);
    EXPECT_EQ(send(fd, settings.data(), settings.size(), 0), 9);
    std::string arrived;
    char buffer[4096];
    while (arrived.find("Handshake") == arrived.npos) {
      const ssize_t got = recv(fd, buffer, sizeof(buffer), 0);
      if (got <= 0) break;
      arrived.append(buffer, static_cast<size_t>(got));
    }
    EXPECT_EQ(send(fd, reset.data(), reset.size(), MSG_NOSIGNAL), 13);
    while (recv(fd, buffer, sizeof(buffer), 0) > 0) {
    }
    close(fd);
  });

  const absl::Status status =
      Connect(absl::StrCat("127.0.0.1:", ntohs(at.sin_port))).status();
  server.join();
  close(listener);

  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("--max_buffer_bytes"));
}

TEST(GrpcClientTest, OtherPlaceInTheClusterIsRefusedNamingBoth) {
  const auto server = StartServer({}, ShardOptions{0, 2});
  GrpcClientOptions options;
  options.address = server->address();
  options.shard_index = 1;
  options.num_shards = 2;

  const absl::Status status = NewGrpcClient(options).status();

  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(status.message()),
              AllOf(HasSubstr(server->address()), HasSubstr("shard 0 of 2"),
                    HasSubstr("shard 1 of 2"),
                    HasSubstr("--shard_index 1 --num_shards 2")));
}

TEST(GrpcClientTest, OversizedMessagesAreNotSent) {
  GrpcServerOptions options;
  options.max_message_bytes = 4096;
  const auto server = StartServer(options);
  auto client = Connect(server->address()).value();
  ASSERT_TRUE(client->CreateTable(SmallTable("t", 64)).ok());
  const std::vector<Key> keys = RandomKeys(17);
  const std::vector<float> values(17 * 64, 1.0f);

  AssignArgs assign;
  assign.table = "t";
  assign.dim = 64;
  assign.keys = keys;
  assign.embeddings = values;
  for (const absl::Status& status :
       {PullRows(*client, "t", 64, keys).status(),
        PushOnes(*client, "t", 64, keys).status(),
        client->Assign(assign).status(),
        client->Erase("t", RandomKeys(1000)).status()}) {
    EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
    EXPECT_THAT(std::string(status.message()),
                AllOf(HasSubstr(server->address()), HasSubstr("4096"),
                      HasSubstr("--max_message_bytes")));
  }
  EXPECT_EQ(client->ListTables("t")->at(0).stats.num_rows, 0);
  EXPECT_TRUE(PushOnes(*client, "t", 64, RandomKeys(10)).ok());
}

TEST(GrpcClientTest, DimOfAnotherTableIsRefusedAndNothingIsOverrun) {
  const auto server = StartServer();
  auto client = Connect(server->address()).value();
  ASSERT_TRUE(client->CreateTable(SmallTable("t", 8)).ok());

  for (int dim : {4, 16}) {
    const absl::Status status = PullRows(*client, "t", dim, {1, 2}).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(status.message()),
                AllOf(HasSubstr("'t'"), HasSubstr(absl::StrCat(2 * dim)),
                      HasSubstr("16")));
  }
}

TEST(GrpcClientTest, ServerThatComesBackIsUsedAgain) {
  auto server = StartServer();
  const std::string address = server->address();
  auto client = Connect(address).value();
  ASSERT_TRUE(client->CreateTable(SmallTable("a")).ok());

  server.reset();
  server = StartAt(address);

  EXPECT_TRUE(client->ListTables("")->empty());
  ASSERT_TRUE(client->CreateTable(SmallTable("a")).ok());
  EXPECT_EQ(PushOnes(*client, "a", 2, {1}, {5, 2})->num_rows, 1);
}

TEST(GrpcClientTest, StoppedServerIsNamedWhenTheTimeoutEnds) {
  auto server = StartServer();
  auto client = Connect(server->address(), absl::Milliseconds(300)).value();
  ASSERT_TRUE(client->CreateTable(SmallTable("t")).ok());
  const std::string address = server->address();
  server.reset();

  for (const absl::Status& status :
       {PullRows(*client, "t", 2, {1}).status(),
        PushOnes(*client, "t", 2, {1}, {1, 1}).status(),
        client->CreateTable(SmallTable("u")),
        client->Export("t", true,
                       [](const RowChunk&) { return absl::OkStatus(); }),
        client->SaveShard({}, nullptr).status()}) {
    EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
    EXPECT_THAT(std::string(status.message()),
                AllOf(HasSubstr(absl::StrCat("shard 0 (", address, ")")),
                      HasSubstr("is the server running?")));
  }
}

TEST(GrpcClientTest, FrozenServerIsNamedWhenTheTimeoutEnds) {
  const auto server = StartServer();
  TcpProxy proxy(server->address());
  auto client = Connect(proxy.address(), absl::Seconds(1)).value();
  ASSERT_TRUE(client->CreateTable(SmallTable("t", 64)).ok());
  proxy.Freeze(true);

  // Far more than socket buffers hold: the call ends in the middle of a write.
  const std::vector<Key> keys = RandomKeys(200000);
  absl::Status status = PushOnes(*client, "t", 64, keys, {1, 1}).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_THAT(
      std::string(status.message()),
      AllOf(HasSubstr(proxy.address()), HasSubstr("did not answer within")));
  // Without an id, too.
  status = PushOnes(*client, "t", 64, {1}).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded);

  proxy.CutConnections();
  proxy.Freeze(false);
  // On a machine with other work an answer may take longer than a timeout.
  while (!PullRows(*client, "t", 64, {1}).ok()) {
  }
}

TEST(GrpcClientTest, OwnedGradientsAreKeptUntilTheyAreSent) {
  const auto server = StartServer();
  TcpProxy proxy(server->address());
  auto client = Connect(proxy.address(), absl::Milliseconds(300)).value();
  ASSERT_TRUE(client->CreateTable(SmallTable("t", 64)).ok());
  const std::vector<Key> keys = RandomKeys(100000);
  auto owned = std::make_shared<std::vector<float>>(keys.size() * 64, 1.0f);
  const std::weak_ptr<std::vector<float>> alive = owned;
  PushArgs args;
  args.table = "t";
  args.dim = 64;
  args.keys = keys;
  args.gradients = *owned;
  args.gradients_owner = std::move(owned);
  args.learning_rate = 1.0f;
  args.insert_missing = true;
  args.keys_are_unique = true;
  args.id = {1, 1};

  // The call ends in the middle of a write; the write goes on.
  proxy.Freeze(true);
  EXPECT_EQ(client->Push(args).status().code(),
            absl::StatusCode::kDeadlineExceeded);
  args.gradients_owner.reset();
  EXPECT_FALSE(alive.expired());
  proxy.CutConnections();
  proxy.Freeze(false);

  // Polling this thread's queue lets gRPC notice, and let go.
  while (!alive.expired()) {
    EXPECT_TRUE(PullRows(*client, "t", 64, {1}).ok());
  }
}

TEST(GrpcClientTest, OwnedGradientsAreApplied) {
  const auto server = StartServer();
  auto client = Connect(server->address()).value();
  ASSERT_TRUE(client->CreateTable(SmallTable("t", 3)).ok());
  const std::vector<Key> keys = RandomKeys(1000);
  auto owned = std::make_shared<std::vector<float>>(keys.size() * 3, 2.0f);
  PushArgs args;
  args.table = "t";
  args.dim = 3;
  args.keys = keys;
  args.gradients = *owned;
  args.gradients_owner = owned;
  args.learning_rate = 1.0f;
  args.insert_missing = true;

  ASSERT_TRUE(client->Push(args).ok());

  EXPECT_THAT(PullRows(*client, "t", 3, keys).value(), Each(-1.0f));
}

// As many as are sent in several parts, the last one shorter.
constexpr int kManyRows = 1025;
constexpr int kWideDim = 2048;

PushArgs LongPush(const std::vector<Key>& keys,
                  const std::vector<float>& gradients) {
  PushArgs args;
  args.table = "t";
  args.dim = kWideDim;
  args.keys = keys;
  args.gradients = gradients;
  args.learning_rate = 1.0f;
  args.insert_missing = true;
  args.keys_are_unique = true;
  args.id = {77, 1};
  return args;
}

TEST(GrpcClientTest, LongCallsGoInPartsAndEveryPartIsAppliedOnce) {
  const auto server = StartServer();
  TcpProxy proxy(server->address());
  auto client = Connect(proxy.address()).value();
  ASSERT_TRUE(client->CreateTable(SmallTable("t", kWideDim)).ok());
  auto direct = Connect(server->address()).value();
  const std::vector<Key> keys = RandomKeys(kManyRows);
  std::vector<float> gradients(keys.size() * kWideDim);
  for (size_t i = 0; i < gradients.size(); ++i) {
    gradients[i] = static_cast<float>(i / kWideDim);
  }
  proxy.HoldAnswers(true);

  std::thread pushing([&] {
    const auto result = client->Push(LongPush(keys, gradients));
    ASSERT_TRUE(result.ok()) << result.status();
    EXPECT_TRUE(result->duplicate);
  });
  while (direct->ListTables("t")->at(0).stats.num_rows < kManyRows) {
  }
  proxy.CutConnections();
  proxy.HoldAnswers(false);
  pushing.join();
  const auto repeated = client->Push(LongPush(keys, gradients));
  PushArgs next = LongPush(keys, gradients);
  next.id.sequence = 2;
  const auto applied = client->Push(next);

  ASSERT_TRUE(repeated.ok()) << repeated.status();
  EXPECT_TRUE(repeated->duplicate);
  EXPECT_EQ(repeated->num_rows, kManyRows);
  ASSERT_TRUE(applied.ok()) << applied.status();
  EXPECT_FALSE(applied->duplicate);
  EXPECT_EQ(applied->num_rows, kManyRows);
  const std::vector<float> rows =
      PullRows(*client, "t", kWideDim, keys).value();
  for (size_t i = 0; i < rows.size(); ++i) {
    ASSERT_EQ(rows[i], 1.0f - 2.0f * gradients[i]) << "row " << i / kWideDim;
  }
}

TEST(GrpcClientTest, LongPushWithABadGradientIsNotHalfApplied) {
  const auto server = StartServer();
  auto client = Connect(server->address()).value();
  ASSERT_TRUE(client->CreateTable(SmallTable("t", kWideDim)).ok());
  const std::vector<Key> keys = RandomKeys(kManyRows);
  std::vector<float> gradients(keys.size() * kWideDim, 1.0f);
  gradients.back() = std::nanf("");

  const absl::Status status = client->Push(LongPush(keys, gradients)).status();

  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()),
              AllOf(HasSubstr(absl::StrCat("id ", keys.back(), " is NaN")),
                    HasSubstr("nothing was applied")));
  EXPECT_EQ(client->ListTables("t")->at(0).stats.num_rows, 0);
}

TEST(GrpcClientTest, PushLongerThanAMessageGoesInPartsThatFit) {
  GrpcServerOptions options;
  options.max_message_bytes = 3 << 20;
  const auto server = StartServer(options);
  auto client = Connect(server->address()).value();
  ASSERT_TRUE(client->CreateTable(SmallTable("t", kWideDim)).ok());
  const std::vector<Key> keys = RandomKeys(500);  // 4 MB of gradients.
  const std::vector<float> gradients(keys.size() * kWideDim, 1.0f);

  const auto result = client->Push(LongPush(keys, gradients));

  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->num_rows, 500);
}

TEST(GrpcClientTest, LongPushWithAPartThatDoesNotFitIsNotHalfApplied) {
  GrpcServerOptions options;
  options.max_message_bytes = 1 << 20;
  const auto server = StartServer(options);
  auto client = Connect(server->address()).value();
  ASSERT_TRUE(client->CreateTable(SmallTable("t", kWideDim)).ok());
  const std::vector<Key> keys = RandomKeys(kManyRows);
  const std::vector<float> gradients(keys.size() * kWideDim, 1.0f);

  const absl::Status status = client->Push(LongPush(keys, gradients)).status();

  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(client->ListTables("t")->at(0).stats.num_rows, 0);
}

TEST(GrpcClientTest, LongPushOfRepeatedKeysTakesOneStepPerKey) {
  const auto server = StartServer();
  auto client = Connect(server->address()).value();
  TableConfig config = SmallTable("t", kWideDim);
  config.optimizer = AdagradConfig{};
  ASSERT_TRUE(client->CreateTable(config).ok());
  const std::vector<float> gradients(size_t{kManyRows} * kWideDim, 1.0f);
  const std::vector<Key> repeated(kManyRows, 5);
  PushArgs args = LongPush(repeated, gradients);
  args.keys_are_unique = false;

  const auto result = client->Push(args);

  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->num_rows, 1);
}

TEST(GrpcClientTest, PullInterruptedByARestartIsAnsweredByTheNewServer) {
  auto server = StartServer();
  TcpProxy proxy(server->address());
  auto client = Connect(proxy.address()).value();
  ASSERT_TRUE(client->CreateTable(SmallTable("t")).ok());
  auto direct = Connect(server->address()).value();
  proxy.HoldAnswers(true);

  std::thread pulling([&] {
    EXPECT_EQ(PullRows(*client, "t", 2, {1, 2}, true).status().code(),
              absl::StatusCode::kNotFound);
  });
  // The server has answered; the answer is on its way.
  while (direct->ListTables("t")->at(0).stats.num_rows < 2) {
  }
  const auto new_server = StartServer();
  proxy.SetTarget(new_server->address());
  server.reset();
  proxy.CutConnections();
  proxy.HoldAnswers(false);
  pulling.join();
}

TEST(GrpcClientTest, ServerThatMovesIsFollowedByCallsThatAreUnderWay) {
  auto server = StartServer();
  TcpProxy proxy(server->address());
  auto places = std::make_shared<ServerPlaces>(
      std::vector<std::string>{"127.0.0.1:1", proxy.address()});
  GrpcServerOptions second;
  ShardOptions shard;
  shard.shard_index = 1;
  shard.num_shards = 2;
  server = StartServer(second, shard);
  proxy.SetTarget(server->address());
  GrpcClientOptions options;
  options.address = proxy.address();
  options.shard_index = 1;
  options.num_shards = 2;
  options.places = places;
  auto client = NewGrpcClient(options).value();
  ASSERT_TRUE(client->CreateTable(SmallTable("t")).ok());
  // The host of the server vanishes without a word.
  proxy.Freeze(true);

  std::thread pulling([&] {
    EXPECT_EQ(PullRows(*client, "t", 2, {1, 2}, true).status().code(),
              absl::StatusCode::kNotFound);
  });
  const auto moved = StartServer(second, shard);
  places->Move({"127.0.0.1:1", moved->address()});
  pulling.join();

  ASSERT_TRUE(client->CreateTable(SmallTable("t")).ok());
  EXPECT_EQ(PushOnes(*client, "t", 2, {1})->num_rows, 1);
}

TEST(GrpcClientTest, PushWhoseAnswerIsLostIsAppliedOnce) {
  const auto server = StartServer();
  TcpProxy proxy(server->address());
  auto client = Connect(proxy.address()).value();
  ASSERT_TRUE(client->CreateTable(SmallTable("t")).ok());
  auto direct = Connect(server->address()).value();
  proxy.HoldAnswers(true);

  std::thread pushing([&] {
    const auto result = PushOnes(*client, "t", 2, {1, 2}, {77, 1});
    ASSERT_TRUE(result.ok()) << result.status();
    EXPECT_TRUE(result->duplicate);
  });
  while (direct->ListTables("t")->at(0).stats.num_rows < 2) {
  }
  proxy.CutConnections();
  proxy.HoldAnswers(false);
  pushing.join();

  EXPECT_THAT(PullRows(*direct, "t", 2, {1, 2}).value(), Each(0.0f));
  EXPECT_GE(proxy.num_accepted(), 2);
}

TEST(GrpcClientTest, PushWithoutAnIdIsNotRepeated) {
  const auto server = StartServer();
  TcpProxy proxy(server->address());
  auto client = Connect(proxy.address()).value();
  ASSERT_TRUE(client->CreateTable(SmallTable("t")).ok());
  auto direct = Connect(server->address()).value();
  proxy.HoldAnswers(true);

  std::thread pushing([&] {
    const absl::Status status = PushOnes(*client, "t", 2, {1, 2}).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
    EXPECT_THAT(
        std::string(status.message()),
        AllOf(HasSubstr(proxy.address()), HasSubstr("was lost during"),
              HasSubstr("push to table 't' may have been applied on shard 0")));
  });
  while (direct->ListTables("t")->at(0).stats.num_rows < 2) {
  }
  proxy.CutConnections();
  proxy.HoldAnswers(false);
  pushing.join();

  EXPECT_THAT(PullRows(*direct, "t", 2, {1, 2}).value(), Each(0.0f));
}

absl::StatusOr<WriteResult> AssignAll(ParameterClient& client,
                                      const std::vector<Key>& keys,
                                      float value) {
  const std::vector<float> values(keys.size() * 2, value);
  AssignArgs args;
  args.table = "t";
  args.dim = 2;
  args.keys = keys;
  args.embeddings = values;
  return client.Assign(args);
}

// The answers to one worker's writes are lost, and before it repeats them
// another worker has written.
TEST(GrpcClientTest, WritesWhoseAnswerIsLostDoNotUndoLaterOnes) {
  const auto server = StartServer();
  TcpProxy proxy(server->address());
  auto client = Connect(proxy.address()).value();
  ASSERT_TRUE(client->CreateTable(SmallTable("t")).ok());
  auto direct = Connect(server->address()).value();
  const auto lose_answer = [&](const std::function<void()>& write,
                               const std::function<bool()>& is_applied,
                               const std::function<void()>& write_later) {
    proxy.HoldAnswers(true);
    std::thread writing(write);
    while (!is_applied()) {
    }
    write_later();
    proxy.CutConnections();
    proxy.HoldAnswers(false);
    writing.join();
  };
  const auto num_rows = [&] {
    return direct->ListTables("t")->at(0).stats.num_rows;
  };
  const std::vector<Key> keys = {1, 2};

  lose_answer(
      [&] {
        const auto assigned = AssignAll(*client, keys, 5.0f);
        ASSERT_TRUE(assigned.ok()) << assigned.status();
        EXPECT_TRUE(assigned->duplicate);
        EXPECT_EQ(assigned->num_rows, 2);
      },
      [&] { return num_rows() == 2; },
      [&] { EXPECT_TRUE(AssignAll(*direct, keys, 6.0f).ok()); });
  EXPECT_THAT(PullRows(*direct, "t", 2, keys).value(), Each(6.0f));

  lose_answer([&] { EXPECT_EQ(client->Erase("t", keys).value(), 2); },
              [&] { return num_rows() == 0; },
              [&] { EXPECT_TRUE(AssignAll(*direct, keys, 7.0f).ok()); });
  EXPECT_THAT(PullRows(*direct, "t", 2, keys).value(), Each(7.0f));

  lose_answer([&] { EXPECT_TRUE(client->DropTable("t").ok()); },
              [&] { return direct->ListTables("")->empty(); },
              [&] { EXPECT_TRUE(direct->CreateTable(SmallTable("t")).ok()); });
  EXPECT_EQ(direct->ListTables("")->size(), 1u);
}

TEST(GrpcClientTest, AWriteWithoutAnAnswerSaysThatItMayHaveBeenApplied) {
  const auto server = StartServer();
  TcpProxy proxy(server->address());
  GrpcClientOptions options;
  options.address = proxy.address();
  options.timeout = absl::Milliseconds(300);
  options.bulk_timeout = options.timeout;
  auto client = NewGrpcClient(options).value();
  ASSERT_TRUE(client->CreateTable(SmallTable("t")).ok());
  v1::ShrinkRequest shrink;
  shrink.set_table("t");
  proxy.HoldAnswers(true);

  const auto expect_unclear = [](const std::string& write, bool is_bulk,
                                 const absl::Status& status) {
    EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded);
    EXPECT_THAT(
        std::string(status.message()),
        AllOf(HasSubstr("did not answer within 300ms"),
              EndsWith(absl::StrCat(
                  "? The ", write,
                  " may have been applied on shard 0. Repeat it only if "
                  "applying it twice does no harm",
                  is_bulk ? ""
                          : ", or raise `timeout_secs` in tfswitch.connect"))));
  };
  expect_unclear("push to table 't'", false,
                 PushOnes(*client, "t", 2, {1}, {9, 1}).status());
  expect_unclear("assignment to table 't'", false,
                 AssignAll(*client, {1}, 2.0f).status());
  expect_unclear("erasure from table 't'", false,
                 client->Erase("t", {1}).status());
  expect_unclear("shrink of table 't'", true,
                 ShrinkOf(*client, shrink).status());
  expect_unclear("restore", true, client->CommitRestore("id", false));
  shrink.set_dry_run(true);
  for (const absl::Status& read :
       {PullRows(*client, "t", 2, {1}).status(),
        ShrinkOf(*client, shrink).status(),
        client->CommitRestore("id", /*abort=*/true)}) {
    EXPECT_EQ(read.code(), absl::StatusCode::kDeadlineExceeded);
    EXPECT_THAT(std::string(read.message()), Not(HasSubstr("applied")));
  }
  expect_unclear("drop of table 't'", false, client->DropTable("t"));

  // The push had been: only its answer was missing.
  auto direct = Connect(server->address()).value();
  ASSERT_TRUE(direct->CreateTable(SmallTable("t")).ok());
  EXPECT_TRUE(PushOnes(*direct, "t", 2, {1}, {9, 1})->duplicate);
}

TEST(GrpcClientTest, APushOfManyTablesThatMayHaveBeenAppliedNamesThem) {
  const auto server = StartServer();
  TcpProxy proxy(server->address());
  auto client = Connect(proxy.address(), absl::Milliseconds(300)).value();
  const std::vector<Key> keys = RandomKeys(20000);
  const std::vector<float> gradients(keys.size() * 16, 1.0f);
  std::vector<PushPart> pushes;
  std::vector<WriteResult> results(6);
  for (const char* table : {"a", "b", "a", "c", "d", "e"}) {
    ASSERT_TRUE(client->CreateTable(SmallTable(table, 16)).ok());
    PushPart push;
    push.args.table = table;
    push.args.dim = 16;
    push.args.keys = absl::MakeConstSpan(keys).first(1);
    push.args.gradients = absl::MakeConstSpan(gradients).first(16);
    push.args.id = {9, pushes.size() + 1};
    push.result = &results[pushes.size()];
    pushes.push_back(std::move(push));
  }
  proxy.HoldAnswers(true);

  absl::Status status = client->StartPush(pushes)->Wait();
  EXPECT_THAT(std::string(status.message()),
              HasSubstr("? The push to tables 'a', 'b', 'c' and 2 more may "
                        "have been applied on shard 0"));

  // A call in several messages may apply only a part.
  for (size_t i = 0; i < pushes.size(); ++i) {
    pushes[i].args.keys = keys;
    pushes[i].args.gradients = gradients;
    pushes[i].args.id.sequence += pushes.size();
  }
  status = client->StartPush(pushes)->Wait();
  EXPECT_THAT(std::string(status.message()),
              HasSubstr("? A part of the push to table"));
}

TEST(GrpcClientTest, AWriteThatWasSentOnceMayHaveBeenAppliedWhateverFollows) {
  auto server = StartServer();
  TcpProxy proxy(server->address());
  auto client = Connect(proxy.address(), absl::Seconds(1)).value();
  ASSERT_TRUE(client->CreateTable(SmallTable("t")).ok());
  auto direct = Connect(server->address()).value();
  proxy.HoldAnswers(true);

  std::thread pushing([&] {
    const absl::Status status =
        PushOnes(*client, "t", 2, {1, 2}, {77, 1}).status();
    EXPECT_THAT(std::string(status.message()),
                HasSubstr("may have been applied on shard 0. Repeat it only"));
  });
  while (direct->ListTables("t")->at(0).stats.num_rows < 2) {
  }
  // All attempts after the first are refused a connection.
  proxy.SetTarget(FreeAddress());
  proxy.CutConnections();
  pushing.join();
}

TEST(GrpcClientTest, AWriteThatWasNeverSentSaysThatItWasNotApplied) {
  auto server = StartServer();
  auto client = Connect(server->address(), absl::Milliseconds(200)).value();
  ASSERT_TRUE(client->CreateTable(SmallTable("t")).ok());
  server.reset();
  // From here on the client knows that it has no connection.
  ASSERT_FALSE(PullRows(*client, "t", 2, {1}).ok());

  // An attempt that begins just before the deadline may end unclear.
  std::string message;
  for (uint64_t i = 1; i <= 20 && !absl::EndsWith(message,
                                                  "not applied on "
                                                  "shard 0");
       ++i) {
    const absl::Status status = PushOnes(*client, "t", 2, {1}, {1, i}).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
    message = std::string(status.message());
  }
  EXPECT_THAT(message,
              HasSubstr("connection refused; is the server running? The push "
                        "to table 't' was not applied on shard 0"));
}

TEST(GrpcClientTest, CallsThroughUnreliableConnectionsLoseAndRepeatNothing) {
  const auto server = StartServer();
  TcpProxy proxy(server->address());
  auto client = Connect(proxy.address()).value();
  constexpr int kThreads = 3;
  constexpr int kSteps = 30;
  constexpr int kDim = 4;
  ASSERT_TRUE(client->CreateTable(SmallTable("t", kDim)).ok());
  const std::vector<Key> keys = RandomKeys(3000);
  std::atomic<int> running{kThreads};

  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      for (int step = 1; step <= kSteps; ++step) {
        const auto pushed = PushOnes(
            *client, "t", kDim, keys,
            {static_cast<uint64_t>(t + 1), static_cast<uint64_t>(step)});
        EXPECT_TRUE(pushed.ok()) << pushed.status();
        EXPECT_TRUE(PullRows(*client, "t", kDim, keys).ok());
      }
      --running;
    });
  }
  // Each cut waits for a connection to cut, so that there is progress.
  for (int cuts = 0; running > 0 && cuts < 20; ++cuts) {
    const int accepted = proxy.num_accepted();
    proxy.CutConnections();
    while (running > 0 && proxy.num_accepted() == accepted) {
      std::this_thread::yield();
    }
  }
  for (std::thread& thread : threads) thread.join();

  auto direct = Connect(server->address()).value();
  EXPECT_THAT(PullRows(*direct, "t", kDim, keys).value(),
              Each(1.0f - kThreads * kSteps));
}

TEST(GrpcClientTest, CallsOfOneThreadMayBeInFlightTogetherAndEndInAnyOrder) {
  const auto server = StartServer();
  auto client = Connect(server->address()).value();
  ASSERT_TRUE(client->CreateTable(SmallTable("t")).ok());
  std::vector<std::vector<Key>> keys;
  std::vector<std::vector<float>> rows;
  for (int i = 0; i < 20; ++i) {
    keys.push_back(RandomKeys(i % 5 * 1000 + 1, i));
    rows.emplace_back(keys.back().size() * 2, -1.0f);
  }
  std::vector<std::unique_ptr<PendingCall>> calls;
  for (int i = 0; i < 20; ++i) {
    PullArgs args;
    args.table = "t";
    args.dim = 2;
    args.keys = keys[i];
    args.insert_missing = true;
    calls.push_back(client->StartPull({{args, absl::MakeSpan(rows[i])}}));
  }

  for (int i = 19; i >= 0; --i) {
    EXPECT_TRUE(calls[i]->Wait().ok());
    EXPECT_THAT(rows[i], Each(1.0f));
  }
}

TEST(GrpcClientTest, CallThatNobodyWaitsForIsCancelled) {
  const auto server = StartServer();
  auto client = Connect(server->address()).value();
  ASSERT_TRUE(client->CreateTable(SmallTable("t")).ok());
  std::vector<float> row(2);
  const std::vector<Key> keys = {1};
  PullArgs args;
  args.table = "t";
  args.dim = 2;
  args.keys = keys;
  for (int i = 0; i < 10; ++i) client->StartPull({{args, absl::MakeSpan(row)}});

  EXPECT_TRUE(PullRows(*client, "t", 2, {1}).ok());
}

TEST(GrpcClientTest, ClientMayGoAfterManyThreadsHaveUsedIt) {
  const auto server = StartServer();
  for (int round = 0; round < 5; ++round) {
    auto client = Connect(server->address()).value();
    ASSERT_TRUE(client->CreateTable(SmallTable("t")).ok());
    std::vector<std::thread> threads;
    for (int t = 0; t < 6; ++t) {
      threads.emplace_back([&, t] {
        const std::vector<Key> keys = RandomKeys(300, t);
        for (int i = 0; i < 5; ++i) {
          EXPECT_TRUE(PullRows(*client, "t", 2, keys, true).ok());
          EXPECT_TRUE(PushOnes(*client, "t", 2, keys).ok());
        }
      });
    }
    // Each thread's completion queue has ended before the client does.
    for (std::thread& thread : threads) thread.join();
  }
}

}  // namespace
}  // namespace tfswitch
