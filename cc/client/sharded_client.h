// ParameterClient over the shards of a cluster.

#ifndef TFSWITCH_CC_CLIENT_SHARDED_CLIENT_H_
#define TFSWITCH_CC_CLIENT_SHARDED_CLIENT_H_

#include <memory>
#include <vector>

#include "cc/client/parameter_client.h"

namespace tfswitch {

// Sends each key to the shard that owns it and joins the answers. `shards` are
// in shard order. Calls to several shards are in flight together; with one
// shard it hands calls through without a copy.
//
// Pulls and pushes need the number of virtual shards of their table: the
// client knows the tables it has created or listed, and asks shard 0 for others
// once.
// A push is checked for NaN and Inf before any shard gets a part of it.
//
// Thread-safe.
std::unique_ptr<ParameterClient> NewShardedClient(
    std::vector<std::unique_ptr<ParameterClient>> shards);

}  // namespace tfswitch

#endif  // TFSWITCH_CC_CLIENT_SHARDED_CLIENT_H_
