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
  // "host:port" or "unix:/path". Port 0 means any free port.
  std::string address = "127.0.0.1:0";
  // Threads that answer Pull and Push, each with its own completion queue.
  // 0: one per core.
  int num_threads = 0;
  // Longest message in either direction.
  uint64_t max_message_bytes = uint64_t{1} << 30;
  // Memory for arriving requests of all connections; gRPC counts 1 MiB for each
  // connection. The same amount is available for answers that peers have not
  // read. 0: half of the machine's memory, but at least two messages of the
  // maximal length.
  uint64_t max_buffer_bytes = 0;
  // Further connections are closed at once.
  uint64_t max_connections = 10'000;
  // The most calls in progress on one connection; further calls wait in the
  // client.
  uint64_t max_calls_per_connection = 1024;
  // The largest number of calls in progress that do not move rows. Each holds a
  // thread. Three quarters of them may be waiting for other workers.
  uint64_t max_control_calls = 4096;
  SecurityOptions security;
  // Turns gRPC's reflection service on, which tells callers which services and
  // methods the server has.
  bool has_reflection = false;
  // Values other than the default are for tests.
  uint32_t protocol_version = 1;
  // Until Open() the server's health is NOT_SERVING, and the server answers
  // calls with UNAVAILABLE, after which clients try again.
  bool starts_closed = false;
};

// A running server, with the standard health service.
//
// Thread-safe.
class GrpcServer {
 public:
  // Starts to listen. InvalidArgument for a bad address, option or file, also
  // from AccessControl::Open(); Unavailable if the address cannot be bound. A
  // shard cannot be served again: when its server stops, workers can no longer
  // wait in its groups.
  static absl::StatusOr<std::unique_ptr<GrpcServer>> Start(
      const GrpcServerOptions& options, std::shared_ptr<Shard> shard);

  virtual ~GrpcServer() = default;  // Stops, with a grace of 0.

  // The bound address, with the actual port, such as "127.0.0.1:40123".
  virtual const std::string& address() const = 0;

  // Begins to serve, if `starts_closed` was set.
  virtual void Open() = 0;

  // Refuses new calls, waits at most `grace` until those in progress have
  // ended, then cancels them. Returns when all threads have ended. Further
  // calls do nothing.
  virtual void Stop(absl::Duration grace) = 0;
};

}  // namespace tfswitch

#endif  // TFSWITCH_CC_RPC_SERVER_GRPC_SERVER_H_
