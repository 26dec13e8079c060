// GroupClient over one gRPC channel to server 0.

#ifndef TFSWITCH_CC_RPC_CLIENT_GRPC_GROUP_CLIENT_H_
#define TFSWITCH_CC_RPC_CLIENT_GRPC_GROUP_CLIENT_H_

#include <memory>

#include "cc/client/group_client.h"
#include "cc/rpc/client/connection.h"

namespace tfswitch {

std::unique_ptr<GroupClient> NewGrpcGroupClient(
    std::shared_ptr<Connection> connection);

}  // namespace tfswitch

#endif  // TFSWITCH_CC_RPC_CLIENT_GRPC_GROUP_CLIENT_H_
