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

// Ordinary synchronous methods: each worker that waits holds one of gRPC's
// threads, of which the gate keeps some free.
//
// Thread-safe.
class CoordinationService final : public v1::Coordination::Service {
 public:
  CoordinationService(std::shared_ptr<Shard> shard, const Door& door)
      : shard_(std::move(shard)), door_(door) {}

  TFSWITCH_COORDINATION_CALLS(TFSWITCH_GATED_METHOD)
  grpc::Status Beat(grpc::ServerContext* context,
                    const v1::HeartbeatRequest* request,
                    v1::HeartbeatResponse* response) override {
    return Heartbeat(context, request, response);
  }

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
