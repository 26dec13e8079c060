// The limits of a server, listed by name for command-line flags and for
// programs that contain a server.

#ifndef TFSWITCH_CC_RPC_SERVER_SERVER_LIMITS_H_
#define TFSWITCH_CC_RPC_SERVER_SERVER_LIMITS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "cc/rpc/server/grpc_server.h"
#include "cc/shard/shard.h"

namespace tfswitch {

struct ServerLimit {
  const char* name;
  const char* help;
  uint64_t least;
  uint64_t most;
  uint64_t* value;  // A pointer to the limit in the options, which contain its
                    // default.
};

// Lists all limits. Their `value` points into `server` or `shard`.
std::vector<ServerLimit> ListServerLimits(GrpcServerOptions* server,
                                          ShardOptions* shard);

// InvalidArgument, naming the limit and the value, if no limit has this name,
// or if the value is not a number in its range.
absl::Status SetServerLimit(absl::string_view name, absl::string_view value,
                            GrpcServerOptions* server, ShardOptions* shard);

}  // namespace tfswitch

#endif  // TFSWITCH_CC_RPC_SERVER_SERVER_LIMITS_H_
