// ParameterClient over the shards of a cluster.

#ifndef TFSWITCH_CC_CLIENT_SHARDED_CLIENT_H_
#define TFSWITCH_CC_CLIENT_SHARDED_CLIENT_H_

#include <memory>
#include <vector>

#include "cc/client/parameter_client.h"

namespace tfswitch {

struct ShardedClientOptions {
  OnLostTables on_lost_tables = OnLostTables::kFail;
  // False if the only shard is in this process, and ends with it: calls then go
  // through as they are.
  bool tracks_losses = true;
};

// Sends each key to the shard that owns it and joins the answers. `shards` are
// in shard order. Calls to several shards are in flight together; with one
// shard it hands calls through without a copy.
//
// Calls need the number of virtual shards of their table, and its incarnation:
// the client knows the tables that it has made or listed, and asks for others
// once. A server that was restarted without a part of a table, or with another
// table of that name, then answers with DataLoss, and on_lost_tables says what
// follows. A push that is repeated has the same identity, so that what the
// other shards have applied is not applied twice. A push is checked for NaN and
// Inf before any shard gets a part of it.
//
// Thread-safe.
std::unique_ptr<ParameterClient> NewShardedClient(
    std::vector<std::unique_ptr<ParameterClient>> shards,
    const ShardedClientOptions& options = {});

}  // namespace tfswitch

#endif  // TFSWITCH_CC_CLIENT_SHARDED_CLIENT_H_
