// Measures how much an exchange with a server costs, compared with moving the
// same bytes.
//
//   exchange_bench [--keys=N] [--dim=D] [--rows=R] [--reps=R] [--steps=S]
//                  [--threads=T] [--small_calls=C] [--unix] [--sgd]
//                  [--secure=FOLDER]
// A step is a pull and a push of the same keys. Client and servers are separate
// processes; CPU time is the sum of all threads of both processes. The variants
// take turns within each repetition, in reversed order every second time.
// Figures are medians, and medians of ratios within a repetition.
//
//   raw          blocking sockets moving the same bytes; the server reads what
//                it gets and sends from a hot buffer
//   raw + table  the same with a shard behind the socket, so that the table is
//                met in the state that an exchange leaves the caches in
//   table        the same pull and push on a shard in this process
//   exchange     the same over gRPC
//   token        the same with a token (with --secure)
//   TLS, token   the same over TLS
//
// FOLDER has server.pem, server.key, ca.pem, a file of tokens, and a token;
// security_bench.py makes it. The bar: TLS costs at most 1.6 times the CPU.
// The target: the CPU time of exchange is at most 1.8 times raw, plus the table
// work, which is (raw + table) - raw.
//
// A dense table of a million parameters is 977 rows of 1024 floats:
//   exchange_bench --keys=977 --rows=977 --dim=1024
// Its bar is the time of exchange / raw, table work included: at most 1.8.

#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <openssl/crypto.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "benchmarks/bench_support.h"
#include "cc/access/client_token.h"
#include "cc/base/malloc_tuning.h"
#include "cc/client/local_client.h"
#include "cc/rpc/client/grpc_client.h"
#include "cc/rpc/process_settings.h"
#include "cc/rpc/server/grpc_server.h"
#include "cc/rpc/tls.h"
#include "cc/shard/shard.h"

namespace tfswitch {
namespace {

constexpr int kNumBatches = 8;
constexpr int kSmallKeys = 64;

int64_t num_keys = 53248;
int dim = 16;
int64_t num_rows = 1000000;
int reps = 9;
int steps = 20;
int num_threads = 1;
int small_calls = 1000;  // Per repetition.
bool unix_sockets = false;
bool with_sgd = false;
std::string secure_folder;

double CpuSeconds() { return Seconds(CLOCK_PROCESS_CPUTIME_ID); }

void SendAll(int fd, const void* data, size_t size) {
  const char* from = static_cast<const char*>(data);
  while (size > 0) {
    const ssize_t sent = send(fd, from, size, MSG_NOSIGNAL);
    if (sent <= 0) Die("send failed");
    from += sent;
    size -= sent;
  }
}

bool ReceiveAll(int fd, void* data, size_t size) {
  char* to = static_cast<char*>(data);
  while (size > 0) {
    const ssize_t received = recv(fd, to, size, 0);
    if (received <= 0) return false;
    to += received;
    size -= received;
  }
  return true;
}

// A server process, and a pipe. On it the server sends its address, and its CPU
// time each time it gets a byte.
class Child {
 public:
  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;

  explicit Child(const std::function<std::string()>& start) {
    int sockets[2];
    if (socketpair(AF_UNIX, SOCK_STREAM, 0, sockets) != 0) Die("socketpair");
    if (fork() == 0) {
      close(sockets[0]);
      char address[128] = {};
      const std::string bound = start();
      bound.copy(address, sizeof(address) - 1);
      SendAll(sockets[1], address, sizeof(address));
      char byte;
      while (ReceiveAll(sockets[1], &byte, 1)) {
        const double cpu = CpuSeconds();
        SendAll(sockets[1], &cpu, sizeof(cpu));
      }
      std::_Exit(0);  // The parent has gone.
    }
    close(sockets[1]);
    control_ = sockets[0];
    char address[128];
    if (!ReceiveAll(control_, address, sizeof(address))) Die("no server");
    address_ = address;
  }
  ~Child() { close(control_); }

  const std::string& address() const { return address_; }

  double Cpu() const {
    const char byte = 0;
    double cpu = 0;
    SendAll(control_, &byte, 1);
    if (!ReceiveAll(control_, &cpu, sizeof(cpu))) Die("server died");
    return cpu;
  }

 private:
  int control_ = -1;
  std::string address_;
};

TableConfig BenchTable() {
  TableConfig config;
  config.name = "bench";
  config.dim = dim;
  if (with_sgd) {
    config.optimizer = SgdConfig{};
  } else {
    config.optimizer = AdagradConfig{};
  }
  return config;
}

using Gradients = std::shared_ptr<const std::vector<float>>;

struct RawHeader {
  uint64_t num_keys;
  uint64_t is_push;
};

void ServeRaw(int listener, Shard* shard) {
  const int fd = accept(listener, nullptr, nullptr);
  const int yes = 1;
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof(yes));
  std::shared_ptr<EmbeddingTable> table;
  if (shard != nullptr) {
    Check(shard->tables().Create(BenchTable()).status());
    table = shard->FindTable(BenchTable().name).value();
  }
  std::vector<Key> keys(num_keys);
  std::vector<float> values(num_keys * dim, 1.0f);
  RawHeader header;
  while (ReceiveAll(fd, &header, sizeof(header))) {
    if (!ReceiveAll(fd, keys.data(), header.num_keys * sizeof(Key))) break;
    const size_t bytes = header.num_keys * dim * sizeof(float);
    const auto some_keys = absl::MakeConstSpan(keys.data(), header.num_keys);
    const auto some = absl::MakeSpan(values.data(), header.num_keys * dim);
    if (header.is_push == 0) {
      if (table)
        Check(shard->Pull(*table, some_keys, IfMissing::kInsert, some));
      SendAll(fd, values.data(), bytes);
      continue;
    }
    if (!ReceiveAll(fd, values.data(), bytes)) break;
    if (table) {
      PushRequest push;
      push.keys = some_keys;
      push.gradients = some;
      push.learning_rate = 0.05f;
      push.keys_are_unique = true;
      Check(shard->Push(*table, push).status());
    }
    SendAll(fd, &header, sizeof(header));
  }
}

std::string SocketPath(const char* name) {
  return absl::StrCat("/tmp/exchange_bench_", getppid(), "_", name);
}

std::string StartRaw(bool with_table) {
  const int listener = socket(unix_sockets ? AF_UNIX : AF_INET, SOCK_STREAM, 0);
  std::string address;
  if (unix_sockets) {
    sockaddr_un to = {};
    to.sun_family = AF_UNIX;
    address = SocketPath(with_table ? "raw_table" : "raw");
    address.copy(to.sun_path, sizeof(to.sun_path) - 1);
    if (bind(listener, reinterpret_cast<sockaddr*>(&to), sizeof(to)) != 0) {
      Die("bind");
    }
  } else {
    sockaddr_in to = {};
    to.sin_family = AF_INET;
    to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof(to);
    if (bind(listener, reinterpret_cast<sockaddr*>(&to), size) != 0 ||
        getsockname(listener, reinterpret_cast<sockaddr*>(&to), &size) != 0) {
      Die("bind");
    }
    address = absl::StrCat(ntohs(to.sin_port));
  }
  listen(listener, 1);
  // Lives until the process ends.
  Shard* shard = with_table ? new Shard(ShardOptions{}) : nullptr;
  std::thread(ServeRaw, listener, shard).detach();
  return address;
}

std::string Secure(const char* file) {
  return absl::StrCat(secure_folder, "/", file);
}

std::string StartGrpc(bool has_token, bool has_tls) {
  PrepareServerProgram();
  GrpcServerOptions options;
  if (has_token) options.security.token_file = Secure("tokens");
  if (has_tls) {
    options.security.tls.cert = Secure("server.pem");
    options.security.tls.key = Secure("server.key");
  }
  options.num_threads = num_threads;
  if (unix_sockets) options.address = absl::StrCat("unix:", SocketPath("grpc"));
  auto server =
      GrpcServer::Start(options, std::make_shared<Shard>(ShardOptions{}));
  Check(server.status());
  return server->release()->address();  // Serves until the process ends.
}

std::unique_ptr<ParameterClient> ConnectGrpc(const Child& server,
                                             bool has_token, bool has_tls) {
  GrpcClientOptions options;
  options.address = server.address();
  if (has_token) {
    auto token = ClientToken::Open({"", Secure("token")});
    Check(token.status());
    options.token = *std::move(token);
  }
  if (has_tls) {
    TlsFiles files;
    files.ca = Secure("ca.pem");
    auto tls = MakeClientTls(files);
    Check(tls.status());
    options.tls = *std::move(tls);
  }
  auto connected = NewGrpcClient(options);
  Check(connected.status());
  return *std::move(connected);
}

class RawClient {
 public:
  explicit RawClient(const std::string& address) {
    fd_ = socket(unix_sockets ? AF_UNIX : AF_INET, SOCK_STREAM, 0);
    int failed;
    if (unix_sockets) {
      sockaddr_un to = {};
      to.sun_family = AF_UNIX;
      address.copy(to.sun_path, sizeof(to.sun_path) - 1);
      failed = connect(fd_, reinterpret_cast<sockaddr*>(&to), sizeof(to));
    } else {
      sockaddr_in to = {};
      to.sin_family = AF_INET;
      to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
      to.sin_port = htons(std::stoi(address));
      failed = connect(fd_, reinterpret_cast<sockaddr*>(&to), sizeof(to));
      const int yes = 1;
      setsockopt(fd_, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof(yes));
    }
    if (failed != 0) Die("connect");
  }

  void Pull(const std::vector<Key>& keys, std::vector<float>* values) {
    const RawHeader header = {keys.size(), 0};
    SendAll(fd_, &header, sizeof(header));
    SendAll(fd_, keys.data(), keys.size() * sizeof(Key));
    if (!ReceiveAll(fd_, values->data(), values->size() * sizeof(float))) {
      Die("raw server died");
    }
  }
  void Push(const std::vector<Key>& keys, const Gradients& gradients) {
    RawHeader header = {keys.size(), 1};
    SendAll(fd_, &header, sizeof(header));
    SendAll(fd_, keys.data(), keys.size() * sizeof(Key));
    SendAll(fd_, gradients->data(), gradients->size() * sizeof(float));
    if (!ReceiveAll(fd_, &header, sizeof(header))) Die("raw server died");
  }

 private:
  int fd_;
};

class TableClient {
 public:
  explicit TableClient(std::unique_ptr<ParameterClient> client)
      : client_(std::move(client)) {
    Check(client_->CreateTable(BenchTable()));
  }

  void Pull(const std::vector<Key>& keys, std::vector<float>* values) {
    PullArgs args;
    args.table = "bench";
    args.dim = dim;
    args.keys = keys;
    args.insert_missing = true;
    Check(client_->Pull(args, absl::MakeSpan(*values)));
  }
  void Push(const std::vector<Key>& keys, const Gradients& gradients) {
    PushArgs args;
    args.table = "bench";
    args.dim = dim;
    args.keys = keys;
    args.gradients = *gradients;
    args.gradients_owner = gradients;
    args.learning_rate = 0.05f;
    args.keys_are_unique = true;
    args.id = {1, ++sequence_};
    Check(client_->Push(args).status());
  }

 private:
  std::unique_ptr<ParameterClient> client_;
  uint64_t sequence_ = 0;
};

struct Variant {
  const char* name;
  const Child* server;  // Null: in this process.
  std::function<void(const std::vector<Key>&, std::vector<float>*)> pull;
  std::function<void(const std::vector<Key>&, const Gradients&)> push;
  // Per repetition.
  std::vector<double> client_cpu_ms;
  std::vector<double> server_cpu_ms;
  std::vector<double> wall_ms;
  std::vector<double> small_pull_us;
};

void Measure(Variant* variant, const std::vector<std::vector<Key>>& batches,
             std::vector<float>* values, const Gradients& gradients) {
  const auto server_cpu = [variant] {
    return variant->server == nullptr ? 0.0 : variant->server->Cpu();
  };
  const double server_before = server_cpu();
  const double cpu_before = CpuSeconds();
  const double wall_before = WallSeconds();
  for (int step = 0; step < steps; ++step) {
    variant->pull(batches[step % kNumBatches], values);
    variant->push(batches[step % kNumBatches], gradients);
  }
  const double wall_after = WallSeconds();
  const double cpu_after = CpuSeconds();
  const double server_after = server_cpu();
  variant->wall_ms.push_back((wall_after - wall_before) * 1e3 / steps);
  variant->client_cpu_ms.push_back((cpu_after - cpu_before) * 1e3 / steps);
  variant->server_cpu_ms.push_back((server_after - server_before) * 1e3 /
                                   steps);

  const std::vector<Key> few(batches[0].begin(),
                             batches[0].begin() + kSmallKeys);
  std::vector<float> few_values(kSmallKeys * dim);
  std::vector<double> times;
  for (int i = 0; i < small_calls; ++i) {
    const double before = WallSeconds();
    variant->pull(few, &few_values);
    times.push_back((WallSeconds() - before) * 1e6);
  }
  variant->small_pull_us.push_back(Median(times));
}

void Run() {
  // Must come before any thread, because the servers are forks of this process.
  const Child raw_server([] { return StartRaw(false); });
  const Child raw_table_server([] { return StartRaw(true); });
  const Child grpc_server([] { return StartGrpc(false, false); });
  std::optional<Child> token_server, tls_server;
  const bool is_secure = !secure_folder.empty();
  if (is_secure) {
    token_server.emplace([] { return StartGrpc(true, false); });
    tls_server.emplace([] { return StartGrpc(true, true); });
  }
  TuneMalloc();

  std::mt19937_64 random(20240601);
  std::vector<Key> all(num_rows);
  for (Key& key : all) key = static_cast<Key>(random());
  std::vector<std::vector<Key>> batches(kNumBatches);
  for (std::vector<Key>& batch : batches) {
    for (int64_t i = 0; i < num_keys; ++i) {
      std::swap(all[i], all[i + random() % (num_rows - i)]);
    }
    batch.assign(all.begin(), all.begin() + num_keys);
  }
  std::vector<float> values(num_keys * dim);
  const Gradients gradients =
      std::make_shared<std::vector<float>>(num_keys * dim, 0.01f);

  RawClient raw(raw_server.address());
  RawClient raw_table(raw_table_server.address());
  TableClient exchange(ConnectGrpc(grpc_server, false, false));
  std::optional<TableClient> token, tls;
  if (is_secure) {
    token.emplace(ConnectGrpc(*token_server, true, false));
    tls.emplace(ConnectGrpc(*tls_server, true, true));
  }
  TableClient table(NewLocalClient(std::make_shared<Shard>(ShardOptions{})));
  const auto fill = [&all](auto* client) {
    for (int64_t i = 0; i < num_rows; i += num_keys) {
      const std::vector<Key> part(
          all.begin() + i, all.begin() + std::min(num_rows, i + num_keys));
      std::vector<float> ignored(part.size() * dim);
      client->Pull(part, &ignored);
    }
  };
  fill(&raw_table);
  fill(&exchange);
  fill(&table);
  if (is_secure) {
    fill(&*token);
    fill(&*tls);
  }

  const auto variant = [](const char* name, const Child* server, auto* client) {
    Variant made;
    made.name = name;
    made.server = server;
    made.pull = [client](const std::vector<Key>& keys, std::vector<float>* to) {
      client->Pull(keys, to);
    };
    made.push = [client](const std::vector<Key>& keys, const Gradients& from) {
      client->Push(keys, from);
    };
    return made;
  };
  std::vector<Variant> variants = {
      variant("raw", &raw_server, &raw),
      variant("raw + table", &raw_table_server, &raw_table),
      variant("table", nullptr, &table),
      variant("exchange", &grpc_server, &exchange)};
  if (is_secure) {
    variants.push_back(variant("token", &*token_server, &*token));
    variants.push_back(variant("TLS, token", &*tls_server, &*tls));
  }
  for (int rep = -1; rep < reps; ++rep) {
    std::vector<Variant*> order;
    for (Variant& one : variants) order.push_back(&one);
    if (rep % 2 != 0) std::reverse(order.begin(), order.end());
    for (Variant* one : order) {
      Measure(one, batches, &values, gradients);
      if (rep >= 0) continue;
      one->wall_ms.clear();  // To warm up.
      one->client_cpu_ms.clear();
      one->server_cpu_ms.clear();
      one->small_pull_us.clear();
    }
  }

  const double megabytes =
      static_cast<double>(num_keys) * (2 * sizeof(Key) + 2 * dim * 4) / 1e6;
  std::printf(
      "pull and push of %ld keys, dim %d, %ld rows, %.2f MB per step, %s, "
      "%d server thread(s), %d repetitions of %d steps\n",
      static_cast<long>(num_keys), dim, static_cast<long>(num_rows), megabytes,
      unix_sockets ? "unix sockets" : "TCP on loopback", num_threads, reps,
      steps);
  const std::string shape =
      absl::StrCat(num_keys, " x ", dim, unix_sockets ? ", unix sockets" : "",
                   with_sgd ? ", SGD" : "");
  std::printf("%-12s %12s %12s %12s %10s %18s\n", "", "client ms", "server ms",
              "CPU sum ms", "wall ms", "64-key pull us");
  for (const Variant& one : variants) {
    std::vector<double> sums;
    for (int rep = 0; rep < reps; ++rep) {
      sums.push_back(one.client_cpu_ms[rep] + one.server_cpu_ms[rep]);
    }
    std::printf("%-12s %12.2f %12.2f %12.2f %10.2f %18.1f\n", one.name,
                Median(one.client_cpu_ms), Median(one.server_cpu_ms),
                Median(sums), Median(one.wall_ms), Median(one.small_pull_us));
    const std::string row =
        absl::StrCat("times of ", shape, " | ", one.name, " | ");
    Report(row + "client CPU", "ms", one.client_cpu_ms);
    Report(row + "server CPU", "ms", one.server_cpu_ms);
    Report(row + "sum", "ms", sums);
    Report(row + "wall", "ms", one.wall_ms);
    Report(row + "pull of 64 keys", "us", one.small_pull_us);
  }
  std::vector<double> ratios;
  std::vector<double> ratios_to_this_process;
  std::vector<double> whole_ratios;
  std::vector<double> wall_ratios;
  std::vector<double> token_ratios, tls_ratios;
  for (int rep = 0; rep < reps; ++rep) {
    const auto cpu = [rep, &variants](int which) {
      return variants[which].client_cpu_ms[rep] +
             variants[which].server_cpu_ms[rep];
    };
    const double raw_cpu = cpu(0);
    ratios.push_back((cpu(3) - (cpu(1) - raw_cpu)) / raw_cpu);
    ratios_to_this_process.push_back((cpu(3) - cpu(2)) / raw_cpu);
    whole_ratios.push_back(cpu(3) / raw_cpu);
    wall_ratios.push_back(variants[3].wall_ms[rep] / variants[0].wall_ms[rep]);
    if (is_secure) {
      token_ratios.push_back(cpu(4) / cpu(3));
      tls_ratios.push_back(cpu(5) / cpu(3));
    }
  }
  if (is_secure) {
    std::printf(
        "CPU with a token / without: %.2f; with TLS: %.2f (bar: 1.60)\n",
        Median(token_ratios), Median(tls_ratios));
    Report("security | exchange with a token / without, CPU | figure", "",
           token_ratios);
    // OpenSSL is a library of the system, and its AES causes most of the cost,
    // so its version is printed.
    const std::string library = OpenSSL_version(OPENSSL_VERSION_STRING);
    Report(absl::StrCat("security | exchange with TLS (OpenSSL ", library,
                        ") and a token / without, CPU | figure"),
           "", tls_ratios, "at most 1.6");
  }
  std::printf(
      "CPU of (exchange - table work) / raw: %.2f (bar: 1.80); with the table "
      "work of this process: %.2f\n",
      Median(ratios), Median(ratios_to_this_process));
  std::printf("exchange / raw, table work included: %.2f CPU, %.2f wall\n",
              Median(whole_ratios), Median(wall_ratios));
  const bool is_dense = num_keys == num_rows;
  const char* const bar = unix_sockets ? "" : "at most 1.8";
  const std::string row = absl::StrCat("ratios | ", shape, " | ");
  Report(row + "CPU less table work", "", ratios, bar);
  Report(row + "CPU less warm table work", "", ratios_to_this_process,
         is_dense ? "" : bar);
  Report(row + "CPU", "", whole_ratios);
  Report(row + "time", "", wall_ratios, is_dense ? bar : "");
  if (unix_sockets) {
    unlink(raw_server.address().c_str());
    unlink(raw_table_server.address().c_str());
    unlink(grpc_server.address().substr(5).c_str());
  }
}

bool ReadFlag(const char* argument, const char* name, int64_t* value) {
  const size_t length = std::strlen(name);
  if (std::strncmp(argument, name, length) != 0) return false;
  *value = std::atoll(argument + length);
  return true;
}

int Main(int argc, char** argv) {
  for (int i = 1; i < argc; ++i) {
    int64_t value = 0;
    if (ReadFlag(argv[i], "--keys=", &value)) {
      num_keys = value;
    } else if (ReadFlag(argv[i], "--dim=", &value)) {
      dim = static_cast<int>(value);
    } else if (ReadFlag(argv[i], "--rows=", &value)) {
      num_rows = value;
    } else if (ReadFlag(argv[i], "--reps=", &value)) {
      reps = static_cast<int>(value);
    } else if (ReadFlag(argv[i], "--steps=", &value)) {
      steps = static_cast<int>(value);
    } else if (ReadFlag(argv[i], "--threads=", &value)) {
      num_threads = static_cast<int>(value);
    } else if (ReadFlag(argv[i], "--small_calls=", &value)) {
      small_calls = static_cast<int>(value);
    } else if (std::strcmp(argv[i], "--unix") == 0) {
      unix_sockets = true;
    } else if (std::strcmp(argv[i], "--sgd") == 0) {
      with_sgd = true;
    } else if (std::strncmp(argv[i], "--secure=", 9) == 0) {
      secure_folder = argv[i] + 9;
    } else {
      Die(absl::StrCat("unknown flag ", argv[i]));
    }
  }
  if (num_keys < kSmallKeys || num_rows < num_keys || dim < 1 || reps < 1 ||
      steps < 1 || small_calls < 1) {
    Die("a flag is out of range");
  }
  Run();
  return 0;
}

}  // namespace
}  // namespace tfswitch

int main(int argc, char** argv) { return tfswitch::Main(argc, argv); }
