// Listen() binds the address before it builds the server, so that the error for
// an address in use is tfswitch's own. It begins to accept connections last,
// when the data plane runs.
//
// Stop() first ends calls that wait for other workers, because they could last
// for the whole grace period. Then it closes the gate and waits for the calls
// inside. Then it shuts gRPC down, and leaves a moment for the last answers;
// gRPC's own graceful shutdown would wait for connections instead of calls.
// gRPC does not close a connection to which it still writes, so ShutDownGrpc()
// cuts the connections of peers that read slowly or not at all. The data plane
// ends last, because its queues send these answers.

#include "cc/rpc/server/grpc_server.h"

#include <grpcpp/grpcpp.h>
#include <grpcpp/resource_quota.h>

#include <algorithm>
#include <system_error>
#include <thread>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "cc/base/memory_region.h"
#include "cc/base/mutex.h"
#include "cc/base/status_macros.h"
#include "cc/base/steady_clock.h"
#include "cc/base/thread_pool.h"
#include "cc/rpc/access_control.h"
#include "cc/rpc/address.h"
#include "cc/rpc/channel_settings.h"
#include "cc/rpc/deadlines.h"
#include "cc/rpc/edge/edge.h"
#include "cc/rpc/edge/listener.h"
#include "cc/rpc/process_settings.h"
#include "cc/rpc/server/coordination_service.h"
#include "cc/rpc/server/data_plane.h"
#include "cc/rpc/server/health_service.h"
#include "cc/rpc/server/service.h"
#include "cc/rpc/server_settings.h"
#include "cc/rpc/tls.h"

namespace tfswitch {
namespace {

constexpr int kMaxThreads = 1024;
// Threads for polling, health checks and reflection, not for control calls.
constexpr uint64_t kOtherThreads = 64;
constexpr absl::Duration kFlushTime = absl::Milliseconds(100);
// When the server stops, connections that remain after this time are cut.
constexpr absl::Duration kTimeToClose = absl::Seconds(1);

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

bool HasTls(const SecurityOptions& security) {
  return !(security.tls == TlsFiles());
}

ServiceIdentity IdentityOf(const GrpcServerOptions& options) {
  ServiceIdentity identity;
  identity.protocol_version = options.protocol_version;
  identity.max_message_bytes = options.max_message_bytes;
  const SecurityOptions& security = options.security;
  identity.security.set_has_tls(HasTls(security));
  identity.security.set_has_client_certificates(!security.tls.ca.empty());
  identity.security.set_has_tokens(!security.token_file.empty());
  identity.security.set_is_insecure(security.is_insecure);
  return identity;
}

class RunningServer final : public GrpcServer {
 public:
  RunningServer(const GrpcServerOptions& options,
                std::unique_ptr<AccessControl> access,
                std::shared_ptr<Shard> shard)
      : num_threads_(NumThreads(options)),
        helpers_(num_threads_ - 1),
        gate_(options.max_control_calls, /*is_open=*/false),
        access_(std::move(access)),
        shard_(std::move(shard)),
        service_(IdentityOf(options), shard_, call_context_, &helpers_),
        coordination_(shard_, call_context_),
        listener_({options.max_connections, options.max_calls_per_connection,
                   HasTls(options.security)}),
        tls_(options.security.tls) {}

  ~RunningServer() override {
    shard_->metrics().Remove(metrics_key_);
    Stop(absl::ZeroDuration());
  }

  absl::Status Listen(const GrpcServerOptions& options);

  const std::string& address() const override { return address_; }

  void Open() override {
    gate_.Open();
    health_.StartServing();
  }

  void Stop(absl::Duration grace) override {
    MutexLock lock(&stop_mutex_);  // A second caller waits for the first.
    if (stopped_) return;
    stopped_ = true;
    if (server_ != nullptr) {
      health_.StopServing();
      // Limits the grace period, because an infinite one would overflow.
      const absl::Duration bounded =
          std::clamp(grace, absl::ZeroDuration(), absl::Hours(24));
      shard_->EndWaits();
      gate_.Close(bounded);
      listener_.Stop();
      data_plane_->StopAsking();
      ShutDownGrpc(std::min<absl::Duration>(bounded, kFlushTime));
    }
    if (data_plane_ != nullptr) data_plane_->Shutdown();
  }

 private:
  void AddMetrics(MetricList* list) const;

  // Leaves `time` for the last answers.
  void ShutDownGrpc(absl::Duration time) {
    Mutex mutex;
    CondVar ended;
    bool has_ended = false;
    const auto cut = [&] {
      const absl::Time deadline = SteadyNow() + time + kTimeToClose;
      MutexLock lock(&mutex);
      while (!has_ended && SteadyNow() < deadline) {
        ended.WaitFor(&mutex, deadline - SteadyNow());
      }
      if (!has_ended) listener_.CutConnections();
    };
    std::thread cutter;
    try {
      cutter = std::thread(cut);
    } catch (const std::system_error&) {
      // Without this thread, a peer that does not read can delay the shutdown.
    }
    server_->Shutdown(ToDeadline(SteadyNow() + time));
    {
      MutexLock lock(&mutex);
      has_ended = true;
    }
    ended.NotifyOne();
    if (cutter.joinable()) cutter.join();
  }

  static int NumThreads(const GrpcServerOptions& options) {
    if (options.num_threads > 0) return options.num_threads;
    return static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
  }

  // Constant once listening.
  std::string address_;
  const int num_threads_;
  const ThreadPool helpers_;
  CallGate gate_;  // Has its own lock.
  const std::unique_ptr<AccessControl> access_;
  const std::shared_ptr<Shard> shard_;
  const CallContext call_context_{&gate_, access_.get(), shard_.get()};
  Service service_;
  CoordinationService coordination_;
  HealthService health_{v1::ParameterServer::service_full_name()};
  std::unique_ptr<DataPlane> data_plane_;
  // Deleted before the members that it uses.
  std::unique_ptr<grpc::Server> server_;
  Listener listener_;  // Stop() also stops it.

  int metrics_key_ = 0;  // Constant once listening.
  const TlsFiles tls_;
  Mutex stop_mutex_;
  bool stopped_ ABSL_GUARDED_BY(stop_mutex_) = false;
};

void RunningServer::AddMetrics(MetricList* list) const {
  access_->calls().AddTo(list);
  Edge& edge = Edge::Get();
  list->Gauge("tfswitch_connections", "Open gRPC connections of the process.",
              static_cast<double>(edge.num_connections()));
  list->Counter("tfswitch_ended_connections_total",
                "Connections that were ended because they broke a limit.",
                static_cast<double>(edge.num_ended()));
  if (const auto expiry = CertificateExpiry(tls_); expiry.has_value()) {
    list->Gauge("tfswitch_certificate_expiry_timestamp_seconds",
                "End of the validity of --tls_cert, in seconds since 1970.",
                static_cast<double>(absl::ToUnixSeconds(*expiry)));
  }
}

absl::Status RunningServer::Listen(const GrpcServerOptions& options) {
  TFSWITCH_ASSIGN_OR_RETURN(Address address, ParseAddress(options.address));
  TFSWITCH_ASSIGN_OR_RETURN(auto credentials,
                            MakeServerTls(options.security.tls));
  TFSWITCH_RETURN_IF_ERROR(listener_.Open(&address));

  grpc::ServerBuilder builder;
  auto acceptor = builder.experimental().AddExternalConnectionAcceptor(
      grpc::ServerBuilder::experimental_type::ExternalConnectionType::FROM_FD,
      credentials);
  SetMessageLimits(options.max_message_bytes, &builder);
  // When the quota is used up, gRPC closes connections without calls and ends
  // calls with RESOURCE_EXHAUSTED.
  grpc::ResourceQuota quota("tfswitch-server");
  quota.Resize(BufferBytes(options));
  quota.SetMaxThreads(
      static_cast<int>(options.max_control_calls + kOtherThreads));
  builder.SetResourceQuota(quota);
  builder.AddChannelArgument(
      GRPC_ARG_MAX_CONCURRENT_STREAMS,
      static_cast<int>(options.max_calls_per_connection));
  for (const auto& [name, value] : kChannelArguments) {
    builder.AddChannelArgument(name, value);
  }
  builder.AddChannelArgument(
      GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS,
      kMinPingIntervalMs);
  // One polling thread is enough: it only serves control methods. The data
  // plane polls its own queues.
  builder.SetSyncServerOption(grpc::ServerBuilder::SyncServerOption::NUM_CQS,
                              1);
  builder.SetSyncServerOption(
      grpc::ServerBuilder::SyncServerOption::MIN_POLLERS, 1);
  builder.SetSyncServerOption(
      grpc::ServerBuilder::SyncServerOption::MAX_POLLERS, 2);
  SetReflection(options.has_reflection, &builder);
  builder.RegisterService(&service_);
  builder.RegisterService(&coordination_);
  builder.RegisterService(&health_);
  data_plane_ = std::make_unique<DataPlane>(
      num_threads_, options.max_message_bytes, BufferBytes(options), &service_,
      shard_, call_context_, &helpers_, &builder);
  server_ = builder.BuildAndStart();
  if (server_ == nullptr) {
    return absl::InternalError("gRPC cannot build a server");
  }
  address_ = address.ToString();
  metrics_key_ =
      shard_->metrics().Add([this](MetricList* list) { AddMetrics(list); });
  data_plane_->Start();
  listener_.Start(std::move(acceptor));
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::unique_ptr<GrpcServer>> GrpcServer::Start(
    const GrpcServerOptions& options, std::shared_ptr<Shard> shard) {
  PrepareProcess();
  TFSWITCH_RETURN_IF_ERROR(Validate(options));
  TFSWITCH_ASSIGN_OR_RETURN(const Address address,
                            ParseAddress(options.address));
  TFSWITCH_ASSIGN_OR_RETURN(auto access,
                            AccessControl::Open(address, options.security));
  auto server = std::make_unique<RunningServer>(options, std::move(access),
                                                std::move(shard));
  TFSWITCH_RETURN_IF_ERROR(server->Listen(options));
  if (!options.starts_closed) server->Open();
  return server;
}

}  // namespace tfswitch
