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
  // The current addresses of the cluster's servers; this server has number
  // `shard_index`. Null if the server always stays at `address`.
  std::shared_ptr<const ServerPlaces> places;
  // The shard index that the server is expected to have.
  uint32_t shard_index = 0;
  uint32_t num_shards = 1;
  // Whether the server may be any shard of any number of them.
  bool any_shard = false;
  // The longest time that a call may take, including retries.
  absl::Duration timeout = absl::Seconds(30);
  // The timeout of calls that take time in proportion to a table: Export,
  // SaveShard, CommitCheckpoint, StageRestore, CommitRestore. If the server is
  // away, these calls still fail within `timeout`.
  absl::Duration bulk_timeout = absl::Hours(1);
  // How long to wait for the server when connecting, if that is less than
  // `timeout`.
  absl::Duration connect_timeout = absl::InfiniteDuration();
  ClientTls tls;
  // Null if there is no token.
  std::shared_ptr<ClientToken> token;
  // Sent in the handshake; values other than the default are for tests.
  uint32_t protocol_version = kProtocolVersion;
};

// Connects and makes a handshake. Unavailable or DeadlineExceeded if the server
// does not answer within the timeout; FailedPrecondition if its protocol
// version or its shard index is not the expected one.
//
// The client repeats calls that fail with UNAVAILABLE until its timeout. So the
// same client works with a restarted server. If the server gets another address
// in `places`, calls to its former address are cancelled and sent to the new
// one.
absl::StatusOr<std::unique_ptr<ParameterClient>> NewGrpcClient(
    const GrpcClientOptions& options);

}  // namespace tfswitch

#endif  // TFSWITCH_CC_RPC_CLIENT_GRPC_CLIENT_H_
