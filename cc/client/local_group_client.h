// GroupClient over a shard in this process.

#ifndef TFSWITCH_CC_CLIENT_LOCAL_GROUP_CLIENT_H_
#define TFSWITCH_CC_CLIENT_LOCAL_GROUP_CLIENT_H_

#include <memory>

#include "cc/client/group_client.h"
#include "cc/shard/shard.h"

namespace tfswitch {

// `shard` must be shard 0: calls fail with FailedPrecondition otherwise.
std::unique_ptr<GroupClient> NewLocalGroupClient(std::shared_ptr<Shard> shard);

}  // namespace tfswitch

#endif  // TFSWITCH_CC_CLIENT_LOCAL_GROUP_CLIENT_H_
