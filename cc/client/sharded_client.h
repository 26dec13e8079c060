// ParameterClient over the shards of a cluster.

#ifndef TFSWITCH_CC_CLIENT_SHARDED_CLIENT_H_
#define TFSWITCH_CC_CLIENT_SHARDED_CLIENT_H_

#include <memory>
#include <vector>

#include "cc/client/parameter_client.h"

namespace tfswitch {

// Sends each key to the shard that owns it and joins the answers. `shards` are
// in shard order. Calls to several shards are in flight together; with one
// shard it hands calls through without a copy of their rows.
//
// A server that was restarted without a part of a table, or with another table
// of that name, answers with DataLoss (see ClusterTables), and `on_lost_tables`
// says how it goes on. A write that is repeated then has the same identity, so
// that shards that have applied it do not apply it twice. A write is checked
// for NaN and Inf before any shard gets a part of it.
//
// Thread-safe.
std::unique_ptr<ParameterClient> NewShardedClient(
    std::vector<std::unique_ptr<ParameterClient>> shards,
    OnLostTables on_lost_tables = OnLostTables::kFail);

}  // namespace tfswitch

#endif  // TFSWITCH_CC_CLIENT_SHARDED_CLIENT_H_
