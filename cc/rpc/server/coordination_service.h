// The methods of the Coordination service, over the coordinator of shard 0.

#ifndef TFSWITCH_CC_RPC_SERVER_COORDINATION_SERVICE_H_
#define TFSWITCH_CC_RPC_SERVER_COORDINATION_SERVICE_H_

#include <grpcpp/grpcpp.h>

#include <memory>
#include <utility>

#include "cc/rpc/server/gated.h"
#include "cc/shard/control_calls.h"
#include "tfswitch/v1/coordination.grpc.pb.h"

namespace tfswitch {

#define TFSWITCH_STREAMED(name) \
  , v1::Coordination::WithStreamedUnaryMethod_##name
using StreamedCoordination =
    WrapIn<v1::Coordination::Service,
           v1::Coordination::WithStreamedUnaryMethod_Beat
               TFSWITCH_COORDINATION_CALLS(TFSWITCH_STREAMED)>::Type;
#undef TFSWITCH_STREAMED

// Ordinary synchronous methods: each worker that waits holds one of gRPC's
// threads, of which the gate keeps some free.
//
// Thread-safe.
class CoordinationService final : public StreamedCoordination {
 public:
  CoordinationService(std::shared_ptr<Shard> shard, const Door& door)
      : shard_(std::move(shard)), door_(door) {}

  TFSWITCH_COORDINATION_CALLS(TFSWITCH_GATED_METHOD)
  TFSWITCH_GATED_METHOD_AS(Beat, Heartbeat)

 private:
  ShardCall CallOf(const grpc::ServerContext&, const Visit&) const {
    return {*shard_, nullptr};
  }

  // Constant after construction; the shard has its own locks.
  const std::shared_ptr<Shard> shard_;
  const Door door_;
};

}  // namespace tfswitch

#endif  // TFSWITCH_CC_RPC_SERVER_COORDINATION_SERVICE_H_
