// ParameterClient over the shards of a cluster.

#ifndef TFSWITCH_CC_CLIENT_SHARDED_CLIENT_H_
#define TFSWITCH_CC_CLIENT_SHARDED_CLIENT_H_

#include <memory>
#include <vector>

#include "cc/client/parameter_client.h"

namespace tfswitch {

// Sends each key to the shard that owns it, and joins the answers. `shards` are
// in shard order. Calls to several shards run at the same time. With one shard,
// calls are passed on without a copy of their rows.
//
// If a server was restarted without its part of a table, or has another table
// of that name, calls give DataLoss (see ClusterTables). `on_lost_tables` says
// whether the client then recovers and repeats the call. A repeated write keeps
// its identity, so that no shard applies it twice. Writes are checked for NaN
// and Inf before any shard gets a part.
//
// Thread-safe.
std::unique_ptr<ParameterClient> NewShardedClient(
    std::vector<std::unique_ptr<ParameterClient>> shards,
    OnLostTables on_lost_tables = OnLostTables::kFail);

}  // namespace tfswitch

#endif  // TFSWITCH_CC_CLIENT_SHARDED_CLIENT_H_
