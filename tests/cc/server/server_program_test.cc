// tfswitch-server as a process: its flags, its one line, its end.

#include <arpa/inet.h>
#include <fcntl.h>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>
#include <netinet/in.h>
#include <signal.h>
#include <spawn.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "cc/rpc/address.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/cc/rpc/server_under_test.h"
#include "tests/cc/testing/scoped_folder.h"

extern char** environ;

namespace tfswitch {
namespace {

using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::StartsWith;

// A run of the program with its two outputs on pipes.
class Program {
 public:
  explicit Program(std::vector<std::string> arguments) {
    arguments.insert(arguments.begin(), TFSWITCH_SERVER_PROGRAM);
    std::vector<char*> argv;
    for (std::string& argument : arguments) argv.push_back(argument.data());
    argv.push_back(nullptr);
    int out[2];
    int err[2];
    EXPECT_EQ(pipe2(out, O_CLOEXEC), 0);
    EXPECT_EQ(pipe2(err, O_CLOEXEC), 0);
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, out[1], STDOUT_FILENO);
    posix_spawn_file_actions_adddup2(&actions, err[1], STDERR_FILENO);
    EXPECT_EQ(
        posix_spawn(&pid_, argv[0], &actions, nullptr, argv.data(), environ),
        0);
    posix_spawn_file_actions_destroy(&actions);
    close(out[1]);
    close(err[1]);
    out_ = out[0];
    err_ = err[0];
  }
  ~Program() {
    if (pid_ > 0) {
      kill(pid_, SIGKILL);
      waitpid(pid_, nullptr, 0);
    }
    close(out_);
    close(err_);
  }
  Program(const Program&) = delete;
  Program& operator=(const Program&) = delete;

  std::string ReadLine() { return Read(out_, '\n'); }
  std::string ReadText() { return Read(out_, '\0'); }
  std::string ReadErrorLine() { return Read(err_, '\n'); }
  std::string ReadErrors() { return Read(err_, '\0'); }
  void Send(int signal_number) { kill(pid_, signal_number); }

  // Stops it as SIGSTOP does, and waits until it stands still.
  void Freeze() {
    Send(SIGSTOP);
    siginfo_t info;
    EXPECT_EQ(waitid(P_PID, static_cast<id_t>(pid_), &info, WSTOPPED), 0);
  }

  // How many files it may open, and may allow itself to open.
  rlimit FileLimit() const {
    rlimit files = {};
    EXPECT_EQ(prlimit(pid_, RLIMIT_NOFILE, nullptr, &files), 0);
    return files;
  }

  // Leaves it room for a few files more than it has open.
  void LimitFiles(rlim_t more) const {
    rlimit files = {};
    const std::filesystem::directory_iterator open(
        absl::StrCat("/proc/", pid_, "/fd"));
    files.rlim_cur =
        more + static_cast<rlim_t>(std::distance(begin(open), end(open)));
    files.rlim_max = files.rlim_cur;
    EXPECT_EQ(prlimit(pid_, RLIMIT_NOFILE, &files, nullptr), 0);
  }

  // The most memory that it has ever had resident.
  int64_t PeakBytes() const {
    std::ifstream status(absl::StrCat("/proc/", pid_, "/status"));
    for (std::string word; status >> word;) {
      int64_t kib = 0;
      if (word == "VmHWM:" && status >> kib) return kib << 10;
    }
    ADD_FAILURE() << "no peak of process " << pid_;
    return 0;
  }

  // The exit code, or minus the signal that ended it.
  int Wait() {
    int status = 0;
    waitpid(pid_, &status, 0);
    pid_ = -1;
    return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
  }

 private:
  static std::string Read(int fd, char end) {
    std::string text;
    char byte;
    while (read(fd, &byte, 1) == 1) {
      text.push_back(byte);
      if (byte == end) break;
    }
    return text;
  }

  pid_t pid_ = -1;
  int out_ = -1;
  int err_ = -1;
};

// From the line that the program prints when it is ready.
std::string AddressOf(Program& program) {
  const std::vector<std::string> words =
      absl::StrSplit(program.ReadLine(), absl::ByAnyChar(" \n"));
  EXPECT_EQ(words.size(), 10u);
  return words.size() == 10 ? words[8] : "";
}

// The names in the log of a program that has ended.
std::vector<std::string> EventsOf(Program& program) {
  std::vector<std::string> names;
  const std::string errors = program.ReadErrors();
  for (absl::string_view line : absl::StrSplit(errors, '\n')) {
    const std::vector<std::string> words = absl::StrSplit(line, ' ');
    if (words.size() > 2) names.push_back(words[2]);
  }
  return names;
}

TEST(ServerProgramTest, PrintsOneLineWhenReadyAndStopsOnSignals) {
  for (int signal_number : {SIGTERM, SIGINT}) {
    Program program(
        {"--address", "127.0.0.1:0", "--shard_index=1", "--num_shards", "2"});
    const std::string line = program.ReadLine();
    EXPECT_THAT(line, AllOf(StartsWith("tfswitch-server "),
                            HasSubstr(": shard 1 of 2 serving on 127.0.0.1:")));

    program.Send(signal_number);

    EXPECT_EQ(program.Wait(), 0);
    EXPECT_THAT(EventsOf(program), ElementsAre("started", "stopped"));
  }
}

TEST(ServerProgramTest, ServesTheClient) {
  Program program({"--address=127.0.0.1:0"});
  auto client = Connect(AddressOf(program)).value();

  ASSERT_TRUE(client->CreateTable(SmallTable("t")).ok());
  EXPECT_EQ(PushOnes(*client, "t", 2, {1, 2, 3}, {1, 1})->num_rows, 3);

  // Nothing was said meanwhile, by gRPC about its settings for example.
  program.Send(SIGTERM);
  EXPECT_EQ(program.Wait(), 0);
  EXPECT_THAT(EventsOf(program),
              ElementsAre("started", "table_made", "stopped"));
}

TEST(ServerProgramTest, KilledInMidCallAndStartedAgainItIsUsedAgain) {
  auto program = std::make_unique<Program>(
      std::vector<std::string>{"--address=127.0.0.1:0"});
  const std::string address = AddressOf(*program);
  std::vector<std::unique_ptr<ParameterClient>> clients;
  clients.push_back(Connect(address).value());
  const auto client =
      NewShardedClient(std::move(clients), OnLostTables::kRecreate);
  ASSERT_TRUE(client->CreateTable(SmallTable("t", 64)).ok());
  const std::vector<Key> keys = RandomKeys(20000);
  std::atomic<bool> restarted{false};
  std::thread pushing([&] {
    // One of these is in flight when the server goes, one comes after it.
    bool last = false;
    for (uint64_t i = 1; !last; ++i) {
      last = restarted;
      const auto result = PushOnes(*client, "t", 64, keys, {9, i});
      EXPECT_TRUE(result.ok()) << result.status();
    }
  });
  while (client->ListTables("t")->at(0).stats.num_rows == 0) {
  }
  program->Send(SIGKILL);
  EXPECT_EQ(program->Wait(), -SIGKILL);
  program = std::make_unique<Program>(
      std::vector<std::string>{absl::StrCat("--address=", address)});
  EXPECT_EQ(AddressOf(*program), address);
  restarted = true;
  pushing.join();

  EXPECT_EQ(client->ListTables("t")->at(0).stats.num_rows, 20000);
}

TEST(ServerProgramTest, KilledItComesBackWithItsLastSave) {
  const ScopedFolder folder;
  const std::vector<std::string> flags = {"--address=127.0.0.1:0", "--data_dir",
                                          folder.path() + "/data",
                                          "--checkpoint_every=1s"};
  auto program = std::make_unique<Program>(flags);
  const std::string address = AddressOf(*program);
  const auto client = Connect(address).value();
  ASSERT_TRUE(client->CreateTable(SmallTable("t")).ok());
  ASSERT_TRUE(PushOnes(*client, "t", 2, {1, 2}, {9, 1}).ok());
  const std::string second = folder.path() + "/data/state/manifest-000001.json";
  while (!std::filesystem::exists(second)) {
    absl::SleepFor(absl::Milliseconds(10));
  }
  program->Send(SIGKILL);
  EXPECT_EQ(program->Wait(), -SIGKILL);
  std::vector<std::string> again = flags;
  again[0] = absl::StrCat("--address=", address);
  again[3] = "--checkpoint_every=inf";

  program = std::make_unique<Program>(again);

  EXPECT_EQ(AddressOf(*program), address);
  EXPECT_THAT(program->ReadErrorLine(), HasSubstr(" started "));
  EXPECT_THAT(program->ReadErrorLine(),
              AllOf(HasSubstr(" info recovered tables=1 rows=2 saved="),
                    HasSubstr(" lost_writes=0 ")));
  testing::internal::CaptureStderr();
  // The same push: its mark was saved with the rows.
  EXPECT_TRUE(PushOnes(*client, "t", 2, {1, 2}, {9, 1})->duplicate);
  EXPECT_THAT(testing::internal::GetCapturedStderr(),
              AllOf(HasSubstr(address),
                    HasSubstr("was started again, and no write is lost")));
  EXPECT_THAT(*PullRows(*client, "t", 2, {1, 3}),
              testing::ElementsAre(0.0f, 0.0f, 0.0f, 0.0f));

  // A server that is stopped saves before it ends.
  ASSERT_TRUE(PushOnes(*client, "t", 2, {1}, {9, 2}).ok());
  program->Send(SIGTERM);
  EXPECT_EQ(program->Wait(), 0);
  program = std::make_unique<Program>(again);
  EXPECT_EQ(AddressOf(*program), address);
  EXPECT_THAT(*PullRows(*client, "t", 2, {1}),
              testing::ElementsAre(-1.0f, -1.0f));
}

TEST(ServerProgramTest, AFolderThatCannotBeUsedEndsItWithCodeOne) {
  const ScopedFolder folder;
  Program first({"--address=127.0.0.1:0", "--data_dir", folder.path()});
  AddressOf(first);
  Program second({"--address=127.0.0.1:0", "--data_dir", folder.path()});

  EXPECT_EQ(second.Wait(), 1);
  EXPECT_THAT(second.ReadErrors(), HasSubstr(folder.path()));

  std::ofstream(folder.path() + "/state/manifest.json") << "{}";
  first.Send(SIGKILL);
  first.Wait();
  Program damaged({"--address=127.0.0.1:0", "--data_dir", folder.path()});
  EXPECT_EQ(damaged.Wait(), 1);
  EXPECT_THAT(damaged.ReadErrors(), HasSubstr("manifest.json' is damaged"));
}

TEST(ServerProgramTest, StoppedProcessGivesAnErrorInTime) {
  Program program({"--address=127.0.0.1:0"});
  auto client = Connect(AddressOf(program), absl::Milliseconds(300)).value();
  ASSERT_TRUE(client->CreateTable(SmallTable("t")).ok());
  program.Freeze();

  EXPECT_EQ(PullRows(*client, "t", 2, {1}).status().code(),
            absl::StatusCode::kDeadlineExceeded);

  program.Send(SIGCONT);
  EXPECT_TRUE(PullRows(*client, "t", 2, {1}).ok());
}

TEST(ServerProgramTest, TakesAllFilesThatItMay) {
  rlimit own = {};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &own), 0);
  rlimit low = own;
  low.rlim_cur = 256;
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &low), 0);
  Program program({"--address=127.0.0.1:0"});
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &own), 0);
  AddressOf(program);

  EXPECT_EQ(program.FileLimit().rlim_cur, own.rlim_max);
}

TEST(ServerProgramTest, ListensAgainAfterItHadNoFilesLeft) {
  Program program({"--address=127.0.0.1:0"});
  const std::string address = AddressOf(program);
  program.LimitFiles(2);
  std::vector<int> connections;
  sockaddr_in to = {};
  to.sin_family = AF_INET;
  to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  to.sin_port = htons(ParseAddress(address)->port);
  for (int i = 0; i < 5; ++i) {
    connections.push_back(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    ASSERT_EQ(connect(connections.back(), reinterpret_cast<sockaddr*>(&to),
                      sizeof(to)),
              0);
  }
  EXPECT_THAT(program.ReadErrorLine(), HasSubstr(" started "));
  EXPECT_THAT(program.ReadErrorLine(), HasSubstr("Too many open files"));

  for (const int connection : connections) close(connection);

  EXPECT_TRUE(Connect(address).ok());
}

TEST(ServerProgramTest, CompressedMessagesAreRefusedAndNotInflated) {
  Program program({"--address=127.0.0.1:0"});
  const std::string address = AddressOf(program);
  ASSERT_TRUE(Connect(address).ok());  // Allocates what a first call needs.
  const grpc::Slice piece(std::string(size_t{1} << 20, '\0'));
  const int64_t before = program.PeakBytes();

  for (const auto algorithm : {GRPC_COMPRESS_GZIP, GRPC_COMPRESS_DEFLATE}) {
    // Both kinds of calls, and messages of one packet and of several.
    for (const auto& [method, size] :
         {std::pair<const char*, size_t>{"Push", 1},
          {"Push", 128},
          {"Erase", 1},
          {"Erase", 128}}) {
      const std::vector<grpc::Slice> zeros(size, piece);
      grpc::GenericStub stub(
          grpc::CreateChannel(address, grpc::InsecureChannelCredentials()));
      grpc::CompletionQueue queue;
      grpc::ClientContext context;
      context.set_deadline(std::chrono::system_clock::now() +
                           std::chrono::seconds(60));
      context.set_compression_algorithm(algorithm);
      grpc::ByteBuffer answer;
      grpc::Status status;
      const auto call = stub.PrepareUnaryCall(
          &context, absl::StrCat("/tfswitch.v1.ParameterServer/", method),
          grpc::ByteBuffer(zeros.data(), zeros.size()), &queue);
      call->StartCall();
      call->Finish(&answer, &status, nullptr);
      void* tag;
      bool ok;
      ASSERT_TRUE(queue.Next(&tag, &ok));
      EXPECT_EQ(status.error_code(), grpc::StatusCode::UNIMPLEMENTED)
          << status.error_message();
      EXPECT_THAT(status.error_message(), HasSubstr("ompression"));
    }
  }

  EXPECT_LT(program.PeakBytes() - before, int64_t{32} << 20);
  EXPECT_TRUE(Connect(address).ok());
}

TEST(ServerProgramTest, BadFlagsEndItWithCodeTwoAndOneLine) {
  const std::vector<std::pair<std::vector<std::string>, std::string>> cases = {
      {{"--bogus"}, "--bogus"},
      {{"--bogus=1"}, "--bogus"},
      {{"7077"}, "'7077'"},
      {{"--num_shards"}, "--num_shards needs a value"},
      {{"--num_shards=many"}, "'many'"},
      {{"--num_shards", "-1"}, "'-1'"},
      {{"--num_shards", "0"}, "num_shards"},
      {{"--shard_index", "3", "--num_shards", "3"}, "3"},
      {{"--address", "nowhere"}, "'nowhere'"},
      {{"--max_message_bytes", "1"}, "max_message_bytes"},
      {{"--num_threads", "-2"}, "num_threads"},
      {{"--max_buffer_bytes", "-1"}, "--max_buffer_bytes"},
      {{"--max_connections=0"}, "--max_connections must be 1 to "},
      {{"--max_buffer_bytes=5"}, "max_buffer_bytes"},
      {{"--max_memory=16GB"}, "such as '16GiB', got '16GB'"},
      {{"--max_memory=16777216TiB"}, "got '16777216TiB'"},
      {{"--grace_period", "soon"}, "'soon'"},
      {{"--grace_period", "-1s"}, "grace_period"},
      {{"--checkpoint_every=1m"}, "--checkpoint_every needs --data_dir"},
      {{"--cluster_name", "a"}, "--cluster_name needs --data_dir"},
      {{"--data_dir=x", "--checkpoint_every=0"}, "at least 1s, got 0"},
  };
  for (const auto& [arguments, named] : cases) {
    Program program(arguments);
    EXPECT_EQ(program.Wait(), 2) << named;
    const std::string errors = program.ReadErrors();
    EXPECT_THAT(errors, AllOf(StartsWith("tfswitch-server: "), HasSubstr(named),
                              testing::EndsWith("\n")));
    EXPECT_EQ(std::count(errors.begin(), errors.end(), '\n'), 1) << errors;
  }
}

TEST(ServerProgramTest, AddressInUseEndsItWithCodeOneAndNamesIt) {
  const auto server = StartServer();
  Program program({absl::StrCat("--address=", server->address())});

  EXPECT_EQ(program.Wait(), 1);
  EXPECT_THAT(program.ReadErrors(),
              AllOf(HasSubstr(server->address()), HasSubstr("another server")));
}

TEST(ServerProgramTest, HelpAndVersionGoToStandardOutput) {
  Program version({"--version"});
  EXPECT_THAT(version.ReadLine(), StartsWith("tfswitch-server "));
  EXPECT_EQ(version.Wait(), 0);

  EXPECT_EQ(Program({"--push_log", "--check_flags"}).Wait(), 2);
  EXPECT_EQ(Program({"--num_shards=2", "--check_flags"}).Wait(), 0);
  Program help({"--help"});
  EXPECT_EQ(help.Wait(), 0);
  EXPECT_THAT(help.ReadText(), AllOf(StartsWith("tfswitch-server: "),
                                     HasSubstr("  --num_shards "),
                                     HasSubstr("  --max_buffer_bytes ")));
}

}  // namespace
}  // namespace tfswitch
