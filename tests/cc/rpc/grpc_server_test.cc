// The server as peers see it that are not our client: plain stubs, standard
// services, sockets with garbage. And its life: start, stop, addresses.

#include "cc/rpc/server/grpc_server.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <filesystem>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "cc/client/checkpoints.h"
#include "cc/rpc/address.h"
#include "cc/rpc/byte_buffers.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/cc/rpc/server_under_test.h"
#include "tests/cc/testing/deadlines.h"
#include "tests/cc/testing/saves.h"
#include "tests/cc/testing/scoped_folder.h"
#include "tfswitch/v1/coordination.grpc.pb.h"
#include "tfswitch/v1/parameter_server.grpc.pb.h"

namespace tfswitch {
namespace {

using testing::AllOf;
using testing::HasSubstr;

// A peer in another language, but for the language.
class PlainPeer {
 public:
  explicit PlainPeer(const std::string& address)
      : channel_(Channel(address)),
        stub_(v1::ParameterServer::NewStub(channel_)) {}

  static std::shared_ptr<grpc::Channel> Channel(const std::string& address) {
    grpc::ChannelArguments arguments;
    arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
    arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
    return grpc::CreateCustomChannel(
        address, grpc::InsecureChannelCredentials(), arguments);
  }

  template <typename Method, typename Request, typename Response>
  grpc::Status Call(Method method, const Request& request, Response* response) {
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() +
                         std::chrono::seconds(30));
    return ((*stub_).*method)(&context, request, response);
  }

  grpc::Status CallBytes(const std::string& method, const std::string& request,
                         std::string* response) {
    grpc::GenericStub stub(channel_);
    grpc::CompletionQueue queue;
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() +
                         std::chrono::seconds(30));
    grpc::ByteBuffer answer;
    grpc::Status status;
    auto call =
        stub.PrepareUnaryCall(&context, method, ToByteBuffer(request), &queue);
    call->StartCall();
    call->Finish(&answer, &status, nullptr);
    void* tag;
    bool ok;
    EXPECT_TRUE(queue.Next(&tag, &ok));
    std::vector<absl::string_view> pieces;
    ListPieces(&answer, &pieces);
    response->clear();
    for (absl::string_view piece : pieces) absl::StrAppend(response, piece);
    return status;
  }

  std::shared_ptr<grpc::Channel> channel() { return channel_; }

 private:
  const std::shared_ptr<grpc::Channel> channel_;
  const std::unique_ptr<v1::ParameterServer::Stub> stub_;
};

using Stub = v1::ParameterServer::Stub;

template <typename Request, typename Response>
using Unary = grpc::Status (Stub::*)(grpc::ClientContext*, const Request&,
                                     Response*);

constexpr Unary<v1::CreateTableRequest, v1::CreateTableResponse> kCreateTable =
    &Stub::CreateTable;
constexpr Unary<v1::PullRequest, v1::PullResponse> kPull = &Stub::Pull;
constexpr Unary<v1::PushRequest, v1::PushResponse> kPush = &Stub::Push;
constexpr Unary<v1::AssignRequest, v1::AssignResponse> kAssign = &Stub::Assign;
constexpr Unary<v1::HandshakeRequest, v1::HandshakeResponse> kHandshake =
    &Stub::Handshake;

// A short path: socket names have 107 characters at most.
class SocketFolder {
 public:
  SocketFolder() {
    std::string pattern = "/tmp/tfswitch_XXXXXX";
    path_ = mkdtemp(pattern.data());
  }
  ~SocketFolder() { std::filesystem::remove_all(path_); }

  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

int ConnectTo(const std::string& address) {
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const timeval longest = {20, 0};  // For connecting, and for one send.
  EXPECT_EQ(setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &longest, sizeof(longest)),
            0);
  sockaddr_in to = {};
  to.sin_family = AF_INET;
  to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  to.sin_port = htons(ParseAddress(address)->port);
  EXPECT_EQ(connect(fd, reinterpret_cast<sockaddr*>(&to), sizeof(to)), 0);
  return fd;
}

// A peer that sends what it likes and reads nothing unless it is told to.
class RawPeer {
 public:
  explicit RawPeer(const std::string& address) : fd_(ConnectTo(address)) {
    Send("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n");
    SendFrame(kSettings, 0, 0, "");
  }
  ~RawPeer() { close(fd_); }
  RawPeer(const RawPeer&) = delete;
  RawPeer& operator=(const RawPeer&) = delete;

  // Begins a call whose message is `size` bytes long, and sends some of them.
  void Call(absl::string_view method, uint32_t size, absl::string_view bytes) {
    std::string headers;
    for (const auto& [name, value] :
         {std::pair<std::string, std::string>{":method", "POST"},
          {":scheme", "http"},
          {":path", absl::StrCat("/tfswitch.v1.ParameterServer/", method)},
          {":authority", "x"},
          {"te", "trailers"},
          {"content-type", "application/grpc"}}) {
      // Literals that no table gets, without Huffman's code.
      absl::StrAppend(&headers, std::string(1, '\0'),
                      std::string(1, static_cast<char>(name.size())), name,
                      std::string(1, static_cast<char>(value.size())), value);
    }
    SendFrame(kHeaders, kEndHeaders, stream_, headers);
    const std::string message =
        absl::StrCat(std::string(1, '\0'), BigEndian(size, 4), bytes);
    for (size_t at = 0; at < message.size(); at += kFrameBytes) {
      const bool is_last = at + kFrameBytes >= message.size();
      SendFrame(kData, is_last && bytes.size() == size ? kEndStream : 0,
                stream_, message.substr(at, kFrameBytes));
    }
    stream_ += 2;
  }

  // Waits for the server's first word. False if it hangs up instead.
  bool IsWelcome() {
    char first;
    return recv(fd_, &first, 1, MSG_PEEK) == 1;
  }

  // Says that the server's settings hold.
  void TakeSettings() { SendFrame(kSettings, kAck, 0, ""); }

  // Whether the server has ended the connection or a call, or takes no more;
  // reads what has come.
  bool IsTurnedAway() {
    if (!takes_all_) return true;
    char buffer[4096];
    ssize_t got;
    while ((got = recv(fd_, buffer, sizeof(buffer), MSG_DONTWAIT)) > 0) {
      arrived_.append(buffer, static_cast<size_t>(got));
    }
    if (got == 0 || (errno != EAGAIN && errno != EWOULDBLOCK)) return true;
    size_t at = 0;
    while (at + 9 <= arrived_.size()) {
      const auto byte = [&](size_t i) {
        return static_cast<size_t>(static_cast<uint8_t>(arrived_[at + i]));
      };
      const char type = arrived_[at + 3];
      if (type == kReset || type == kGoAway || type == kHeaders) return true;
      at += 9 + (byte(0) << 16 | byte(1) << 8 | byte(2));
    }
    return false;
  }

 private:
  static constexpr char kData = 0;
  static constexpr char kHeaders = 1;
  static constexpr char kReset = 3;
  static constexpr char kSettings = 4;
  static constexpr char kGoAway = 7;
  static constexpr char kAck = 1;
  static constexpr char kEndStream = 1;
  static constexpr char kEndHeaders = 4;
  static constexpr size_t kFrameBytes = 16384;

  static std::string BigEndian(uint64_t number, int bytes) {
    std::string text;
    for (int i = bytes - 1; i >= 0; --i) {
      text.push_back(static_cast<char>(number >> (8 * i)));
    }
    return text;
  }

  void SendFrame(char type, char flags, uint32_t stream,
                 const std::string& payload) {
    Send(absl::StrCat(BigEndian(payload.size(), 3), std::string(1, type),
                      std::string(1, flags), BigEndian(stream, 4), payload));
  }

  // A server may have hung up already, or read nothing for long.
  void Send(const std::string& bytes) {
    const ssize_t sent = send(fd_, bytes.data(), bytes.size(), MSG_NOSIGNAL);
    if (sent != static_cast<ssize_t>(bytes.size())) takes_all_ = false;
  }

  const int fd_;
  bool takes_all_ = true;
  uint32_t stream_ = 1;
  std::string arrived_;
};

TEST(GrpcServerTest, PortZeroIsReportedBack) {
  const auto a = StartServer();
  const auto b = StartServer();

  EXPECT_THAT(a->address(), testing::StartsWith("127.0.0.1:"));
  EXPECT_GT(ParseAddress(a->address())->port, 0);
  EXPECT_NE(a->address(), b->address());
}

TEST(GrpcServerTest, WildcardAndNamesOfHostsAreListenedOn) {
  for (const char* host : {"0.0.0.0", "localhost"}) {
    GrpcServerOptions options;
    options.address = absl::StrCat(host, ":0");
    options.security.is_insecure = true;
    const auto server = StartServer(options);

    const int port = ParseAddress(server->address())->port;
    EXPECT_EQ(server->address(), absl::StrCat(host, ":", port));
    EXPECT_TRUE(Connect(absl::StrCat("127.0.0.1:", port)).ok());
  }
}

TEST(GrpcServerTest, SecondServerOnAPortFailsAndNamesIt) {
  const auto first = StartServer();
  GrpcServerOptions options;
  options.address = first->address();

  const absl::Status status =
      GrpcServer::Start(options, std::make_shared<Shard>(ShardOptions{}))
          .status();

  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(status.message()),
              AllOf(HasSubstr(first->address()), HasSubstr("another server")));
  EXPECT_TRUE(Connect(first->address()).ok());
}

TEST(GrpcServerTest, SecondServerOnAUnixSocketFailsAndTheFirstGoesOn) {
  const SocketFolder folder;
  GrpcServerOptions options;
  options.address = absl::StrCat("unix:", folder.path(), "/socket");
  const auto first = StartServer(options);
  EXPECT_EQ(first->address(), options.address);

  EXPECT_EQ(GrpcServer::Start(options, std::make_shared<Shard>(ShardOptions{}))
                .status()
                .code(),
            absl::StatusCode::kUnavailable);
  EXPECT_TRUE(Connect(options.address).ok());
}

TEST(GrpcServerTest, UnixSocketLeftByADeadServerIsTakenOver) {
  const SocketFolder folder;
  const std::string path = absl::StrCat(folder.path(), "/socket");
  const int fd = socket(AF_UNIX, SOCK_STREAM, 0);
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  path.copy(address.sun_path, sizeof(address.sun_path) - 1);
  ASSERT_EQ(bind(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)),
            0);
  close(fd);
  ASSERT_TRUE(std::filesystem::exists(path));
  GrpcServerOptions options;
  options.address = absl::StrCat("unix:", path);

  const auto server = StartServer(options);

  EXPECT_TRUE(Connect(options.address).ok());
  server->Stop(absl::ZeroDuration());
  EXPECT_FALSE(std::filesystem::exists(path));
}

TEST(GrpcServerTest, BadOptionsAreRefusedAndNamed) {
  const auto start = [](const GrpcServerOptions& options) {
    return GrpcServer::Start(options, std::make_shared<Shard>(ShardOptions{}))
        .status();
  };
  GrpcServerOptions options;
  options.address = "nowhere";
  EXPECT_EQ(start(options).code(), absl::StatusCode::kInvalidArgument);
  options = {};
  options.num_threads = -1;
  EXPECT_THAT(start(options).ToString(),
              AllOf(HasSubstr("INVALID_ARGUMENT"), HasSubstr("num_threads")));
  options = {};
  for (uint64_t bytes : {uint64_t{0}, uint64_t{1} << 31}) {
    options.max_message_bytes = bytes;
    EXPECT_THAT(
        start(options).ToString(),
        AllOf(HasSubstr("INVALID_ARGUMENT"), HasSubstr(absl::StrCat(bytes))));
  }
  options = {};
  options.max_message_bytes = 4096;
  options.max_buffer_bytes = 8191;
  EXPECT_THAT(
      start(options).ToString(),
      AllOf(HasSubstr("INVALID_ARGUMENT"), HasSubstr("max_buffer_bytes"),
            HasSubstr("at least 8192"), HasSubstr("8191")));
}

TEST(GrpcServerTest, StopIsIdempotentAndFreesThePort) {
  GrpcServerOptions options;
  {
    const auto server = StartServer();
    options.address = server->address();
    ASSERT_TRUE(Connect(options.address).ok());
    std::thread other([&] { server->Stop(absl::Seconds(5)); });
    server->Stop(absl::Seconds(5));
    server->Stop(absl::ZeroDuration());
    other.join();
  }
  const auto again = StartServer(options);
  EXPECT_EQ(again->address(), options.address);
}

TEST(GrpcServerTest, StopsWhileClientsKeepCalling) {
  auto server = StartServer();
  auto client = Connect(server->address(), absl::Milliseconds(300)).value();
  ASSERT_TRUE(client->CreateTable(SmallTable("t")).ok());
  std::vector<std::thread> threads;
  for (int t = 0; t < 3; ++t) {
    threads.emplace_back([&] {
      const std::vector<Key> keys = RandomKeys(2000);
      while (PullRows(*client, "t", 2, keys, true).ok()) {
      }
    });
  }
  // The threads are in full swing once the rows are there.
  while (client->ListTables("t")->at(0).stats.num_rows < 2000) {
  }

  server->Stop(absl::ZeroDuration());
  for (std::thread& thread : threads) thread.join();
}

TEST(GrpcServerTest, PlainStubCreatesPullsPushesAndAssigns) {
  const auto server = StartServer();
  PlainPeer peer(server->address());
  v1::CreateTableRequest create;
  create.set_protocol_version(1);
  create.mutable_config()->set_name("user");
  create.mutable_config()->set_dim(2);
  create.mutable_config()->mutable_initializer()->mutable_constant()->set_value(
      3.0f);
  v1::CreateTableResponse created;
  ASSERT_TRUE(peer.Call(kCreateTable, create, &created).ok());
  EXPECT_TRUE(created.created());

  v1::AssignRequest assign;
  assign.set_table("user");
  assign.add_keys(-7);
  assign.add_values(10.0f);
  assign.add_values(20.0f);
  v1::AssignResponse assigned;
  ASSERT_TRUE(peer.Call(kAssign, assign, &assigned).ok());

  v1::PushRequest push;
  push.set_table("user");
  push.add_keys(-7);
  push.add_keys(8);
  for (float gradient : {1.0f, 2.0f, 3.0f, 4.0f}) push.add_gradients(gradient);
  push.set_learning_rate(0.5f);
  v1::PushResponse pushed;
  ASSERT_TRUE(peer.Call(kPush, push, &pushed).ok());
  EXPECT_EQ(pushed.updated_rows(), 1);

  v1::PullRequest pull;
  pull.set_table("user");
  pull.add_keys(8);
  pull.add_keys(-7);
  pull.set_insert_missing(true);
  v1::PullResponse pulled;
  ASSERT_TRUE(peer.Call(kPull, pull, &pulled).ok());
  EXPECT_THAT(pulled.values(), testing::ElementsAre(3.0f, 3.0f, 9.5f, 19.0f));
}

TEST(GrpcServerTest, MalformedMessageIsRefusedAndNamed) {
  const auto server = StartServer();
  PlainPeer peer(server->address());
  std::string response;

  for (const char* method : {"Pull", "Push", "Assign"}) {
    const grpc::Status status =
        peer.CallBytes(absl::StrCat("/tfswitch.v1.ParameterServer/", method),
                       std::string("\x0a\x01t\x12\x07", 5), &response);
    EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
    EXPECT_THAT(status.error_message(),
                AllOf(HasSubstr(method), HasSubstr("byte 3 of 5")));
  }
}

TEST(GrpcServerTest, ProtocolVersionMismatchIsRefusedNamingBoth) {
  const auto server = StartServer();
  PlainPeer peer(server->address());
  v1::HandshakeRequest handshake;
  v1::HandshakeResponse who;
  v1::CreateTableRequest create;
  v1::CreateTableResponse created;
  for (uint32_t version : {0u, 2u}) {
    handshake.set_protocol_version(version);
    create.set_protocol_version(version);
    for (const grpc::Status& status :
         {peer.Call(kHandshake, handshake, &who),
          peer.Call(kCreateTable, create, &created)}) {
      EXPECT_EQ(status.error_code(), grpc::StatusCode::FAILED_PRECONDITION);
      EXPECT_THAT(status.error_message(),
                  AllOf(HasSubstr(absl::StrCat("version ", version)),
                        HasSubstr("speaks 1"), HasSubstr("install")));
    }
  }
}

TEST(GrpcServerTest, HandshakeTellsPlaceLimitAndInstance) {
  GrpcServerOptions options;
  options.max_message_bytes = 12345;
  const auto server = StartServer(options, ShardOptions{1, 3});
  const auto other = StartServer();
  v1::HandshakeRequest request;
  request.set_protocol_version(1);
  v1::HandshakeResponse who;
  v1::HandshakeResponse who_else;

  ASSERT_TRUE(
      PlainPeer(server->address()).Call(kHandshake, request, &who).ok());
  ASSERT_TRUE(
      PlainPeer(other->address()).Call(kHandshake, request, &who_else).ok());

  EXPECT_EQ(who.shard_index(), 1u);
  EXPECT_EQ(who.num_shards(), 3u);
  EXPECT_EQ(who.max_message_bytes(), 12345u);
  EXPECT_NE(who.instance_id(), 0u);
  EXPECT_NE(who.instance_id(), who_else.instance_id());
}

TEST(GrpcServerTest, OversizedMessagesAreRefusedBothWays) {
  GrpcServerOptions options;
  options.max_message_bytes = 4096;
  const auto server = StartServer(options);
  PlainPeer peer(server->address());
  v1::CreateTableRequest create;
  create.set_protocol_version(1);
  create.mutable_config()->set_name("t");
  create.mutable_config()->set_dim(64);
  v1::CreateTableResponse created;
  ASSERT_TRUE(peer.Call(kCreateTable, create, &created).ok());
  v1::PullRequest pull;
  v1::PullResponse pulled;
  pull.set_table("t");
  for (int i = 0; i < 20; ++i) pull.add_keys(i);

  // 20 keys are few, their 20 x 64 floats are not.
  const grpc::Status answer_too_long = peer.Call(kPull, pull, &pulled);
  for (int i = 0; i < 1000; ++i) pull.add_keys(i);
  const grpc::Status request_too_long = peer.Call(kPull, pull, &pulled);

  EXPECT_EQ(answer_too_long.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_THAT(answer_too_long.error_message(),
              AllOf(HasSubstr("'t'"), HasSubstr("5123 bytes"),
                    HasSubstr("4096"), HasSubstr("--max_message_bytes")));
  EXPECT_EQ(request_too_long.error_code(),
            grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_THAT(request_too_long.error_message(), HasSubstr("4096"));
}

TEST(GrpcServerTest, ConnectionsOverTheLimitAreClosedUntilOthersHaveGone) {
  GrpcServerOptions options;
  options.max_connections = 3;
  const auto server = StartServer(options);
  std::vector<std::unique_ptr<RawPeer>> peers;
  for (int i = 0; i < 3; ++i) {
    peers.push_back(std::make_unique<RawPeer>(server->address()));
    ASSERT_TRUE(peers.back()->IsWelcome()) << i;
  }

  EXPECT_FALSE(RawPeer(server->address()).IsWelcome());
  EXPECT_FALSE(peers[0]->IsTurnedAway());
  EXPECT_THAT(
      Connect(server->address(), absl::Milliseconds(300)).status().ToString(),
      AllOf(HasSubstr("UNAVAILABLE"), HasSubstr("--max_connections")));

  peers.pop_back();
  const absl::Time deadline = absl::Now() + absl::Seconds(30);
  while (!RawPeer(server->address()).IsWelcome()) {
    ASSERT_LT(absl::Now(), deadline) << "what has gone still counts";
  }
}

TEST(GrpcServerTest, AConnectionHasOnlySoManyCalls) {
  GrpcServerOptions options;
  options.max_calls_per_connection = 3;
  const auto server = StartServer(options);
  RawPeer peer(server->address());
  ASSERT_TRUE(peer.IsWelcome());
  peer.TakeSettings();
  for (int i = 0; i < 3; ++i) peer.Call("Push", 1000, "");
  EXPECT_FALSE(peer.IsTurnedAway());

  peer.Call("Push", 1000, "");

  const absl::Time deadline = absl::Now() + absl::Seconds(30);
  while (!peer.IsTurnedAway()) ASSERT_LT(absl::Now(), deadline);
}

TEST(GrpcServerTest, WorkersThatWaitLeaveThreadsForOthers) {
  GrpcServerOptions options;
  options.max_control_calls = 8;
  const auto server = StartServer(options);
  const auto client = Connect(server->address()).value();
  WorkerGroupOptions group;
  group.num_workers = 100;
  ASSERT_TRUE(client->groups().CreateGroup("g", group).ok());
  PlainPeer peer(server->address());
  const auto stub = v1::Coordination::NewStub(peer.channel());
  std::vector<uint64_t> incarnations;
  for (uint32_t worker = 0; worker < 7; ++worker) {
    incarnations.push_back(
        client->groups().Join("g", worker, 0, 0, 0, "")->incarnation());
  }
  const auto wait = [&](uint32_t worker, int64_t milliseconds) {
    v1::WaitAtBarrierRequest request;
    request.mutable_member()->set_group("g");
    request.mutable_member()->set_worker(worker);
    request.mutable_member()->set_incarnation(incarnations[worker]);
    request.set_barrier("b");
    request.set_wait_ms(milliseconds);
    v1::WaitAtBarrierResponse response;
    grpc::ClientContext context;
    return stub->WaitAtBarrier(&context, request, &response);
  };
  std::vector<std::thread> waiting;
  std::atomic<bool> ends{false};
  for (uint32_t worker = 0; worker < 6; ++worker) {
    // A server ends a wait after some seconds, and is asked again.
    waiting.emplace_back([&wait, &ends, worker] {
      while (!ends) wait(worker, 60'000);
    });
  }
  const absl::Time deadline = absl::Now() + absl::Seconds(30);
  grpc::Status status;
  do {
    status = wait(6, 1);
  } while (status.ok() && absl::Now() < deadline);

  EXPECT_EQ(status.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_THAT(status.error_message(), AllOf(HasSubstr("6 calls wait"),
                                            HasSubstr("--max_control_calls")));
  EXPECT_TRUE(client->CreateTable(SmallTable("t")).ok());
  EXPECT_TRUE(Connect(server->address()).ok());
  ends = true;
  server->Stop(absl::ZeroDuration());
  for (std::thread& thread : waiting) thread.join();
}

TEST(GrpcServerTest, ARestoreEndsWhenItsClientHasGone) {
  const ScopedFolder folder;
  GrpcServerOptions options;
  options.max_control_calls = 4;
  ShardOptions shard;
  shard.checkpoint_root = folder.path();
  const auto server = StartServer(options, shard);
  const auto client = *Connect(server->address());
  ASSERT_TRUE(client->CreateTable(SmallTable("t")).ok());
  ASSERT_TRUE(PushOnes(*client, "t", 2, {1}).ok());
  ASSERT_TRUE(SaveCheckpoint(*client, SaveTo(folder.path())).ok());
  std::string rows;
  for (const auto& entry :
       std::filesystem::recursive_directory_iterator(folder.path())) {
    if (entry.path().extension() == ".safetensors") rows = entry.path();
  }
  // A reader of a FIFO waits for the other end.
  ASSERT_EQ(unlink(rows.c_str()), 0);
  ASSERT_EQ(mkfifo(rows.c_str(), 0600), 0);
  const auto end_reading = absl::MakeCleanup([&rows] {
    const int fd = open(rows.c_str(), O_RDWR | O_NONBLOCK);
    unlink(rows.c_str());  // Nobody begins to read it any more.
    close(fd);
  });
  PlainPeer peer(server->address());
  const auto stub = v1::ParameterServer::NewStub(peer.channel());
  // The first reads, and the others wait for it.
  std::vector<std::thread> clients;
  for (int i = 0; i < 4; ++i) {
    clients.emplace_back([&stub] {
      v1::StageRestoreRequest request;
      request.set_path(".");
      request.set_restore_id("r");
      v1::StageRestoreResponse response;
      grpc::ClientContext context;
      context.set_deadline(std::chrono::system_clock::now() +
                           std::chrono::milliseconds(200));
      EXPECT_FALSE(stub->StageRestore(&context, request, &response).ok());
    });
  }
  for (std::thread& client : clients) client.join();

  const absl::Time deadline = Soon();
  const auto list = [&peer] {
    v1::ListTablesRequest request;
    v1::ListTablesResponse response;
    return peer.Call(&v1::ParameterServer::Stub::ListTables, request,
                     &response);
  };
  while (!list().ok()) {
    ASSERT_LT(SteadyNow(), deadline) << "their threads are not free again";
  }
}

TEST(GrpcServerTest, StreamsOfReflectionDoNotTakeThreadsWithoutBound) {
  GrpcServerOptions options;
  options.max_control_calls = 4;
  options.has_reflection = true;
  const auto server = StartServer(options);
  struct Stream {
    grpc::ClientContext context;
    std::unique_ptr<grpc::GenericClientAsyncReaderWriter> call;
    grpc::ByteBuffer answer;
  };
  PlainPeer peer(server->address());
  grpc::GenericStub stub(peer.channel());
  grpc::CompletionQueue queue;
  std::vector<std::unique_ptr<Stream>> streams;
  int num_refused = 0;
  for (int i = 0; i < 200; ++i) {
    streams.push_back(std::make_unique<Stream>());
    Stream& stream = *streams.back();
    stream.context.set_deadline(std::chrono::system_clock::now() +
                                std::chrono::seconds(30));
    stream.call = stub.PrepareCall(
        &stream.context,
        "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
        &queue);
    void* tag;
    bool is_ok = false;
    stream.call->StartCall(nullptr);
    ASSERT_TRUE(queue.Next(&tag, &is_ok));
    stream.call->Write(ToByteBuffer("\x3a\x01*"), nullptr);
    ASSERT_TRUE(queue.Next(&tag, &is_ok));
    stream.call->Read(&stream.answer, nullptr);
    ASSERT_TRUE(queue.Next(&tag, &is_ok));
    num_refused += is_ok ? 0 : 1;
  }

  EXPECT_GT(num_refused, 100);
  for (const auto& stream : streams) stream->context.TryCancel();
}

TEST(GrpcServerTest, RequestsThatDoNotEndTakeBoundedMemory) {
  GrpcServerOptions options;
  options.max_message_bytes = uint64_t{1} << 20;
  options.max_buffer_bytes = uint64_t{8} << 20;
  const auto server = StartServer(options);
  {
    std::vector<std::unique_ptr<RawPeer>> peers;
    bool is_any_turned_away = false;
    while (!is_any_turned_away) {
      ASSERT_LT(peers.size(), 1000u) << "all are being served";
      peers.push_back(std::make_unique<RawPeer>(server->address()));
      peers.back()->Call("Push", 1 << 20, std::string(60000, '\x01'));
      for (const auto& peer : peers) {
        is_any_turned_away = is_any_turned_away || peer->IsTurnedAway();
      }
    }
  }

  // Once it has seen them go.
  auto client = Connect(server->address()).value();
  const absl::Time deadline = absl::Now() + absl::Seconds(30);
  absl::Status status;
  do {
    status = client->CreateTable(SmallTable("t"));
  } while (absl::IsResourceExhausted(status) && absl::Now() < deadline);
  EXPECT_TRUE(status.ok()) << status;
  EXPECT_TRUE(PushOnes(*client, "t", 2, {1}).ok());
}

TEST(GrpcServerTest, AnswersThatNobodyReadsTakeBoundedMemory) {
  GrpcServerOptions options;
  options.max_message_bytes = uint64_t{1} << 20;
  options.max_buffer_bytes = uint64_t{8} << 20;
  const auto server = StartServer(options);
  auto client = Connect(server->address()).value();
  constexpr int kDim = 1000;
  ASSERT_TRUE(client->CreateTable(SmallTable("t", kDim)).ok());
  v1::PullRequest pull;
  pull.set_table("t");
  for (int key = 0; key < 200; ++key) pull.add_keys(key);
  const std::string request = pull.SerializeAsString();
  absl::Status status;
  {
    RawPeer peer(server->address());
    const absl::Time deadline = absl::Now() + absl::Seconds(30);
    do {
      peer.Call("Pull", static_cast<uint32_t>(request.size()), request);
      status = PullRows(*client, "t", kDim, std::vector<Key>(200, 1)).status();
    } while (status.ok() && absl::Now() < deadline);
  }

  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
  EXPECT_THAT(std::string(status.message()),
              AllOf(HasSubstr(server->address()), HasSubstr("8388608"),
                    HasSubstr("--max_buffer_bytes")));
  const absl::Time deadline = absl::Now() + absl::Seconds(30);
  while (!PullRows(*client, "t", kDim, std::vector<Key>(200, 1)).ok()) {
    ASSERT_LT(absl::Now(), deadline) << "what has gone still counts";
  }
}

TEST(GrpcServerTest, GarbageOnThePortLeavesItServing) {
  const auto server = StartServer();
  auto client = Connect(server->address()).value();
  ASSERT_TRUE(client->CreateTable(SmallTable("t")).ok());
  const auto before = PullRows(*client, "t", 2, {1, 2, 3}, true);
  const uint32_t seed = std::random_device()();
  SCOPED_TRACE(absl::StrCat("seed ", seed));
  std::mt19937 random(seed);
  for (int i = 0; i < 20; ++i) {
    std::string bytes(random() % 5000, '\0');
    for (char& byte : bytes) byte = static_cast<char>(random());
    // Every other one starts as HTTP/2 does.
    if (i % 2 == 0) bytes.insert(0, "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n");
    const int fd = ConnectTo(server->address());
    EXPECT_GE(send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL), 0);
    close(fd);
  }

  EXPECT_EQ(PullRows(*client, "t", 2, {1, 2, 3}).value(), before.value());
  EXPECT_TRUE(Connect(server->address()).ok());
}

TEST(GrpcServerTest, HealthServiceAnswers) {
  const auto server = StartServer();
  PlainPeer peer(server->address());
  std::string response;
  // HealthCheckRequest{service}, HealthCheckResponse{status: SERVING = 1}.
  for (const std::string& service :
       {std::string(), std::string("tfswitch.v1.ParameterServer")}) {
    std::string request;
    if (!service.empty()) {
      request = absl::StrCat("\x0a", std::string(1, service.size()), service);
    }
    const grpc::Status status =
        peer.CallBytes("/grpc.health.v1.Health/Check", request, &response);
    EXPECT_TRUE(status.ok()) << status.error_message();
    EXPECT_EQ(response, "\x08\x01") << service;
  }
  EXPECT_EQ(
      peer.CallBytes("/grpc.health.v1.Health/Check", "\x0a\x01x", &response)
          .error_code(),
      grpc::StatusCode::NOT_FOUND);
}

TEST(GrpcServerTest, HealthRequestsThatAreLongAreNotParsed) {
  const auto server = StartServer();
  PlainPeer peer(server->address());
  std::string request, response;
  while (request.size() < 5000) request += std::string("\x7a\x00", 2);

  for (const char* method : {"Check", "Watch"}) {
    const grpc::Status status = peer.CallBytes(
        absl::StrCat("/grpc.health.v1.Health/", method), request, &response);
    EXPECT_EQ(status.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
    EXPECT_THAT(status.error_message(), HasSubstr("5000 bytes"));
  }
}

TEST(GrpcServerTest, PeersThatDoNotReadTheirAnswersAreInNobodysWay) {
  constexpr int kNumUnread = 100;
  GrpcServerOptions options;
  options.num_threads = 1;
  const auto server = StartServer(options);
  const auto client = Connect(server->address()).value();
  ASSERT_TRUE(client->CreateTable(SmallTable("t", 64)).ok());
  v1::PullRequest pull;
  pull.set_table("t");
  // More than a peer takes without reading.
  for (Key key = 0; key < 1000; ++key) pull.add_keys(key);
  grpc::GenericStub stub(PlainPeer::Channel(server->address()));
  grpc::CompletionQueue queue;
  void* tag;
  bool ok;
  std::vector<std::unique_ptr<grpc::ClientContext>> contexts;
  std::vector<std::unique_ptr<grpc::GenericClientAsyncReaderWriter>> calls;
  for (int i = 0; i < kNumUnread; ++i) {
    contexts.push_back(std::make_unique<grpc::ClientContext>());
    calls.push_back(stub.PrepareCall(
        contexts.back().get(), "/tfswitch.v1.ParameterServer/Pull", &queue));
    calls.back()->StartCall(nullptr);
    ASSERT_TRUE(queue.Next(&tag, &ok));
    calls.back()->WriteLast(ToByteBuffer(pull.SerializeAsString()),
                            grpc::WriteOptions(), nullptr);
    ASSERT_TRUE(queue.Next(&tag, &ok));
    EXPECT_TRUE(ok);
  }

  EXPECT_TRUE(PullRows(*client, "t", 64, {1, 2, 3}).ok());

  std::vector<grpc::Status> statuses(kNumUnread);
  for (int i = 0; i < kNumUnread; ++i) {
    contexts[i]->TryCancel();
    calls[i]->Finish(&statuses[i], nullptr);
    ASSERT_TRUE(queue.Next(&tag, &ok));
  }
}

TEST(GrpcServerTest, UntilItIsOpenedItDoesNotServeAndClientsWait) {
  GrpcServerOptions options;
  options.starts_closed = true;
  const auto server = StartServer(options);
  PlainPeer peer(server->address());
  std::string response;
  ASSERT_TRUE(
      peer.CallBytes("/grpc.health.v1.Health/Check", "", &response).ok());
  EXPECT_EQ(response, "\x08\x02");  // NOT_SERVING.
  const absl::Status refused =
      Connect(server->address(), absl::Milliseconds(50)).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(refused.message()), HasSubstr("recovering"));
  std::thread opening([&server] {
    absl::SleepFor(absl::Milliseconds(100));
    server->Open();
  });

  EXPECT_TRUE(Connect(server->address()).ok());

  opening.join();
  ASSERT_TRUE(
      peer.CallBytes("/grpc.health.v1.Health/Check", "", &response).ok());
  EXPECT_EQ(response, "\x08\x01");
}

TEST(GrpcServerTest, ReflectionNamesTheService) {
  GrpcServerOptions options;
  options.has_reflection = true;
  const auto server = StartServer(options);
  PlainPeer peer(server->address());
  grpc::GenericStub stub(peer.channel());
  grpc::CompletionQueue queue;
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() +
                       std::chrono::seconds(30));
  const auto next = [&queue] {
    void* tag;
    bool ok = false;
    return queue.Next(&tag, &ok) && ok;
  };
  auto call = stub.PrepareCall(
      &context,
      "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", &queue);
  call->StartCall(nullptr);
  ASSERT_TRUE(next());
  // ServerReflectionRequest{list_services: "*"}.
  call->Write(ToByteBuffer("\x3a\x01*"), nullptr);
  ASSERT_TRUE(next());
  grpc::ByteBuffer answer;
  call->Read(&answer, nullptr);
  ASSERT_TRUE(next());

  std::vector<absl::string_view> pieces;
  ListPieces(&answer, &pieces);
  std::string text;
  for (absl::string_view piece : pieces) absl::StrAppend(&text, piece);
  EXPECT_THAT(text, AllOf(HasSubstr("tfswitch.v1.ParameterServer"),
                          HasSubstr("grpc.health.v1.Health")));
  context.TryCancel();
  grpc::Status status;
  call->Finish(&status, nullptr);
  next();
}

}  // namespace
}  // namespace tfswitch
