#include "cc/rpc/grpc_server.h"

#include <grpcpp/ext/proto_server_reflection_plugin.h>
#include <grpcpp/grpcpp.h>
#include <grpcpp/resource_quota.h>
#include <netdb.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <thread>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "cc/base/memory_region.h"
#include "cc/base/mutex.h"
#include "cc/base/random_id.h"
#include "cc/base/status_macros.h"
#include "cc/base/thread_pool.h"
#include "cc/rpc/address.h"
#include "cc/rpc/channel_settings.h"
#include "cc/rpc/coordination_service.h"
#include "cc/rpc/data_plane.h"
#include "cc/rpc/health_service.h"
#include "cc/rpc/process_settings.h"
#include "cc/rpc/service.h"

namespace tfswitch {
namespace {

constexpr int kMaxThreads = 1024;
constexpr absl::Duration kFlushTime = absl::Milliseconds(100);

uint64_t LeastBufferBytes(const GrpcServerOptions& options) {
  return 2 * options.max_message_bytes;
}

uint64_t BufferBytes(const GrpcServerOptions& options) {
  if (options.max_buffer_bytes != 0) return options.max_buffer_bytes;
  return std::max<uint64_t>(PhysicalMemoryBytes() / 2,
                            LeastBufferBytes(options));
}

absl::Status Validate(const GrpcServerOptions& options) {
  if (options.num_threads < 0 || options.num_threads > kMaxThreads) {
    return absl::InvalidArgumentError(
        absl::StrCat("num_threads must be 0 (one per core) to ", kMaxThreads,
                     ", got ", options.num_threads));
  }
  if (options.max_message_bytes < kSmallestMessageLimit ||
      options.max_message_bytes > kLargestMessageLimit) {
    return absl::InvalidArgumentError(absl::StrCat(
        "max_message_bytes must be ", kSmallestMessageLimit, " to ",
        kLargestMessageLimit, ", got ", options.max_message_bytes));
  }
  if (BufferBytes(options) < LeastBufferBytes(options)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "max_buffer_bytes must be 0 (half of the memory) or at least ",
        LeastBufferBytes(options), ", which is twice max_message_bytes, got ",
        options.max_buffer_bytes));
  }
  return absl::OkStatus();
}

// gRPC removes a socket that lies in its way, used or not.
bool SomeoneAnswersOn(const std::string& unix_path) {
  const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (fd < 0) return false;
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path, unix_path.data(), unix_path.size());
  const bool answered =
      connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0;
  close(fd);
  return answered;
}

// Says why an address cannot be bound, which gRPC only writes to its log. OK if
// any of the host's addresses can be.
absl::Status TryToBind(const Address& address) {
  const auto cannot = [&address](absl::string_view why) {
    return absl::UnavailableError(
        absl::StrCat("cannot listen on ", address.ToString(), ": ", why));
  };
  if (address.is_unix) {
    return SomeoneAnswersOn(address.path)
               ? cannot("another server is running there")
               : absl::OkStatus();
  }
  absl::string_view host = address.host;
  if (absl::ConsumePrefix(&host, "[")) absl::ConsumeSuffix(&host, "]");
  addrinfo hints = {};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_PASSIVE | AI_NUMERICSERV;
  addrinfo* found = nullptr;
  const int failure =
      getaddrinfo(std::string(host).c_str(), absl::StrCat(address.port).c_str(),
                  &hints, &found);
  if (failure != 0) return cannot(gai_strerror(failure));
  int error = 0;
  bool bound = false;
  for (const addrinfo* at = found; at != nullptr && !bound; at = at->ai_next) {
    const int fd = socket(at->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
    const int yes = 1;
    bound = fd >= 0 &&
            setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof(yes)) == 0 &&
            bind(fd, at->ai_addr, at->ai_addrlen) == 0;
    if (!bound) error = errno;
    if (fd >= 0) close(fd);
  }
  freeaddrinfo(found);
  if (bound) return absl::OkStatus();
  return cannot(error == EADDRINUSE
                    ? "another server is running there; stop it or take "
                      "another port"
                    : std::strerror(error));
}

void EnableReflection() {
  static const bool enabled = [] {
    grpc::reflection::InitProtoReflectionServerBuilderPlugin();
    return true;
  }();
  (void)enabled;
}

class RunningServer final : public GrpcServer {
 public:
  RunningServer(const GrpcServerOptions& options, std::shared_ptr<Shard> shard)
      : num_threads_(NumThreads(options)),
        helpers_(num_threads_ - 1),
        service_(
            {options.protocol_version, DrawId(), options.max_message_bytes},
            shard, &gate_, &helpers_),
        coordination_(shard, &gate_),
        shard_(std::move(shard)) {}

  ~RunningServer() override { Stop(absl::ZeroDuration()); }

  absl::Status Listen(const GrpcServerOptions& options);

  const std::string& address() const override { return address_; }

  void Stop(absl::Duration grace) override {
    MutexLock lock(&stop_mutex_);  // A second caller waits for the first.
    if (stopped_) return;
    stopped_ = true;
    if (server_ != nullptr) {
      health_.StopServing();
      // A grace of hours would overflow the clock's arithmetic if infinite.
      const absl::Duration bounded =
          std::clamp(grace, absl::ZeroDuration(), absl::Hours(24));
      // A worker that waits for others would wait until the grace is over.
      shard_->EndWaits();
      gate_.Close(bounded);
      // For the last answers to go out; connections need not close.
      server_->Shutdown(std::chrono::system_clock::now() +
                        absl::ToChronoMicroseconds(
                            std::min<absl::Duration>(bounded, kFlushTime)));
    }
    if (data_plane_ != nullptr) data_plane_->Shutdown();
  }

 private:
  static int NumThreads(const GrpcServerOptions& options) {
    if (options.num_threads > 0) return options.num_threads;
    return static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
  }

  // Constant once listening.
  std::string address_;
  const int num_threads_;
  const ThreadPool helpers_;
  CallGate gate_;  // Has its own lock.
  Service service_;
  CoordinationService coordination_;
  HealthService health_{v1::ParameterServer::service_full_name()};
  const std::shared_ptr<Shard> shard_;
  std::unique_ptr<DataPlane> data_plane_;
  std::unique_ptr<grpc::Server> server_;  // Goes before what it uses.

  Mutex stop_mutex_;
  bool stopped_ ABSL_GUARDED_BY(stop_mutex_) = false;
};

absl::Status RunningServer::Listen(const GrpcServerOptions& options) {
  TFSWITCH_RETURN_IF_ERROR(Validate(options));
  TFSWITCH_ASSIGN_OR_RETURN(Address address, ParseAddress(options.address));
  TFSWITCH_RETURN_IF_ERROR(TryToBind(address));

  grpc::ServerBuilder builder;
  int bound_port = 0;
  builder.AddListeningPort(address.ToString(),
                           grpc::InsecureServerCredentials(), &bound_port);
  builder.SetMaxReceiveMessageSize(static_cast<int>(options.max_message_bytes));
  builder.SetMaxSendMessageSize(static_cast<int>(options.max_message_bytes));
  // Limits are for what arrives, and inflated it could be a thousand times as
  // long. By the first two gRPC refuses it; by the third it does not inflate it
  // before.
  builder.SetCompressionAlgorithmSupportStatus(GRPC_COMPRESS_DEFLATE, false);
  builder.SetCompressionAlgorithmSupportStatus(GRPC_COMPRESS_GZIP, false);
  builder.AddChannelArgument(GRPC_ARG_ENABLE_PER_MESSAGE_DECOMPRESSION, 0);
  // When it is used up, gRPC closes connections without calls and ends calls
  // with RESOURCE_EXHAUSTED.
  grpc::ResourceQuota quota("tfswitch-server");
  quota.Resize(BufferBytes(options));
  builder.SetResourceQuota(quota);
  // Or a second server would silently take every other connection.
  builder.AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MAX_FRAME_SIZE, kMaxFrameBytes);
  builder.AddChannelArgument(GRPC_ARG_TCP_READ_CHUNK_SIZE, kReadChunkBytes);
  builder.AddChannelArgument(GRPC_ARG_TCP_MIN_READ_CHUNK_SIZE, kReadChunkBytes);
  builder.AddChannelArgument(GRPC_ARG_TCP_MAX_READ_CHUNK_SIZE,
                             kMaxReadChunkBytes);
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIME_MS, kKeepaliveTimeMs);
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIMEOUT_MS,
                             kKeepaliveTimeoutMs);
  builder.AddChannelArgument(
      GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS,
      kMinPingIntervalMs);
  builder.AddChannelArgument(GRPC_ARG_ENABLE_CHANNELZ, 0);
  // The polling is done by the data plane; these only run control methods.
  builder.SetSyncServerOption(grpc::ServerBuilder::SyncServerOption::NUM_CQS,
                              1);
  builder.SetSyncServerOption(
      grpc::ServerBuilder::SyncServerOption::MIN_POLLERS, 1);
  builder.SetSyncServerOption(
      grpc::ServerBuilder::SyncServerOption::MAX_POLLERS, 2);
  builder.RegisterService(&service_);
  builder.RegisterService(&coordination_);
  builder.RegisterService(&health_);
  data_plane_ = std::make_unique<DataPlane>(
      num_threads_, options.max_message_bytes, BufferBytes(options), &service_,
      shard_, &gate_, &helpers_, &builder);
  server_ = builder.BuildAndStart();
  if (server_ == nullptr) {
    return absl::UnavailableError(
        absl::StrCat("cannot listen on ", address.ToString(),
                     ": another program has just taken it"));
  }
  if (!address.is_unix) address.port = bound_port;
  address_ = address.ToString();
  data_plane_->Start();
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::unique_ptr<GrpcServer>> GrpcServer::Start(
    const GrpcServerOptions& options, std::shared_ptr<Shard> shard) {
  PrepareProcess();
  EnableReflection();
  auto server = std::make_unique<RunningServer>(options, std::move(shard));
  TFSWITCH_RETURN_IF_ERROR(server->Listen(options));
  return server;
}

}  // namespace tfswitch
