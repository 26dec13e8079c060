// Serves one Shard over gRPC.

#ifndef TFSWITCH_CC_RPC_SERVER_GRPC_SERVER_H_
#define TFSWITCH_CC_RPC_SERVER_GRPC_SERVER_H_

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "cc/rpc/access_control.h"
#include "cc/shard/shard.h"

namespace tfswitch {

struct GrpcServerOptions {
  // "host:port" (port 0: any free one) or "unix:/path".
  std::string address = "127.0.0.1:0";
  // Threads that answer Pull and Push, each with its own completion queue.
  // 0: one per core.
  int num_threads = 0;
  // Longest message in either direction.
  uint64_t max_message_bytes = uint64_t{1} << 30;
  // Memory for arriving requests of all connections; gRPC counts each
  // connection as 1 MiB. As much again is for answers that peers have not read.
  // 0: half of the machine's memory, but at least two of the longest messages.
  uint64_t max_buffer_bytes = 0;
  uint64_t max_connections = 10'000;  // More are closed at once.
  // For each connection; more wait in the client.
  uint64_t max_calls_per_connection = 1024;
  // All calls but those that move rows. Each holds a thread; three quarters of
  // them may wait for other workers.
  uint64_t max_control_calls = 4096;
  SecurityOptions security;
  bool has_reflection = false;    // Lists the services to callers.
  uint32_t protocol_version = 1;  // Another value is for tests.
  // Until Open() its health is NOT_SERVING, and it answers calls with
  // UNAVAILABLE, after which clients try again.
  bool starts_closed = false;
};

// A running server, with the standard health service.
//
// Thread-safe.
class GrpcServer {
 public:
  // Starts to listen. InvalidArgument for a bad address, option or file, and
  // for an error of AccessControl::Open(); Unavailable if the address cannot be
  // bound. A shard serves once: when its server stops, waits in its groups of
  // workers end for good.
  static absl::StatusOr<std::unique_ptr<GrpcServer>> Start(
      const GrpcServerOptions& options, std::shared_ptr<Shard> shard);

  virtual ~GrpcServer() = default;  // Stops, with a grace of 0.

  // The bound address, with the real port, such as "127.0.0.1:40123".
  virtual const std::string& address() const = 0;

  // Begins to serve, if it was started closed.
  virtual void Open() = 0;

  // Refuses new calls, lets running ones end for at most `grace`, then cancels
  // them. Idempotent; returns when all threads have ended.
  virtual void Stop(absl::Duration grace) = 0;
};

}  // namespace tfswitch

#endif  // TFSWITCH_CC_RPC_SERVER_GRPC_SERVER_H_
