// ParameterClient over one gRPC channel to one server.

#ifndef TFSWITCH_CC_RPC_CLIENT_GRPC_CLIENT_H_
#define TFSWITCH_CC_RPC_CLIENT_GRPC_CLIENT_H_

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "cc/access/client_token.h"
#include "cc/client/parameter_client.h"
#include "cc/rpc/client/server_places.h"
#include "cc/rpc/tls.h"
#include "cc/wire/codec.h"

namespace tfswitch {

struct GrpcClientOptions {
  // "host:port" or "unix:/path".
  std::string address;
  // The present addresses of the cluster's servers; this one is number
  // `shard_index`. Null: the server stays at `address`.
  std::shared_ptr<const ServerPlaces> places;
  // The shard index that the server must have.
  uint32_t shard_index = 0;
  uint32_t num_shards = 1;
  // Longest time that any call may take, retries included.
  absl::Duration timeout = absl::Seconds(30);
  // The same for calls that take time in proportion to a table: Export,
  // SaveShard, CommitCheckpoint, StageRestore, CommitRestore. If the server is
  // away, they still fail within `timeout`.
  absl::Duration bulk_timeout = absl::Hours(1);
  // How long to wait for the server at first, if that is less.
  absl::Duration connect_timeout = absl::InfiniteDuration();
  ClientTls tls;
  std::shared_ptr<ClientToken> token;  // Null: none.
  // Sent in the handshake; another value is for tests.
  uint32_t protocol_version = kProtocolVersion;
};

// Connects and makes a handshake. Unavailable or DeadlineExceeded if the server
// does not answer within the timeout, FailedPrecondition if it has another
// protocol version or another place in the cluster.
//
// The client retries calls that fail with UNAVAILABLE until its timeout. So a
// server that comes back is used again without a new client, also at another
// address, if `places` has it. Calls to the former address are then given up.
absl::StatusOr<std::unique_ptr<ParameterClient>> NewGrpcClient(
    const GrpcClientOptions& options);

}  // namespace tfswitch

#endif  // TFSWITCH_CC_RPC_CLIENT_GRPC_CLIENT_H_
