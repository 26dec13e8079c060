// The methods of the Coordination service, on the coordinator of shard 0.

#ifndef TFSWITCH_CC_RPC_SERVER_COORDINATION_SERVICE_H_
#define TFSWITCH_CC_RPC_SERVER_COORDINATION_SERVICE_H_

#include <grpcpp/grpcpp.h>

#include <memory>
#include <utility>

#include "cc/rpc/server/gated.h"
#include "cc/shard/control_calls.h"
#include "tfswitch/v1/coordination.grpc.pb.h"

namespace tfswitch {

// The methods are synchronous and read their requests themselves. Each waiting
// worker holds one of gRPC's threads; the gate keeps some threads free.
//
// Thread-safe.
class CoordinationService final : public v1::Coordination::Service {
 public:
  CoordinationService(std::shared_ptr<Shard> shard,
                      const CallContext& call_context)
      : shard_(std::move(shard)), call_context_(call_context) {
#define TFSWITCH_ADD(name) Add<v1::name##Request, v1::name##Response>(#name);
    TFSWITCH_COORDINATION_CALLS(TFSWITCH_ADD)
#undef TFSWITCH_ADD
  }

 private:
  template <typename Request, typename Response>
  void Add(const char* method) {
    MarkMethodStreamed(
        IndexOf<Request>("Coordination", method),
        GatedHandler<Request, Response>(
            call_context_, [this](const grpc::ServerContext&, const Caller&,
                                  const Request& request, Response* response) {
              return Run({*shard_, nullptr}, request, response);
            }));
  }

  // Constant after construction; the shard synchronises itself.
  const std::shared_ptr<Shard> shard_;
  const CallContext call_context_;
};

}  // namespace tfswitch

#endif  // TFSWITCH_CC_RPC_SERVER_COORDINATION_SERVICE_H_
