// ParameterClient for tables that are divided among the shards of a cluster.

#ifndef TFSWITCH_CC_CLIENT_SHARDED_CLIENT_H_
#define TFSWITCH_CC_CLIENT_SHARDED_CLIENT_H_

#include <memory>
#include <vector>

#include "cc/client/parameter_client.h"

namespace tfswitch {

// Sends each key to the shard that owns it, and puts the answers together.
// `shards` are in the order of their shard index. Calls to several shards run
// at the same time. With one shard, calls are passed on without copying their
// rows.
//
// If a server was restarted without its part of a table, or has a different
// table of that name, calls return DataLoss (see ClusterTables). Depending on
// `on_lost_tables`, the client instead recovers the table and repeats the call.
// A repeated write keeps its id, so no shard applies it twice. Writes are
// checked for NaN and Inf before any shard gets a part of them.
//
// Thread-safe.
std::unique_ptr<ParameterClient> NewShardedClient(
    std::vector<std::unique_ptr<ParameterClient>> shards,
    OnLostTables on_lost_tables = OnLostTables::kFail);

}  // namespace tfswitch

#endif  // TFSWITCH_CC_CLIENT_SHARDED_CLIENT_H_
