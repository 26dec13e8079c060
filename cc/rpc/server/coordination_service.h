// The methods of the Coordination service, over the coordinator of shard 0.

#ifndef TFSWITCH_CC_RPC_SERVER_COORDINATION_SERVICE_H_
#define TFSWITCH_CC_RPC_SERVER_COORDINATION_SERVICE_H_

#include <grpcpp/grpcpp.h>

#include <memory>

#include "cc/rpc/server/call_gate.h"
#include "cc/shard/shard.h"
#include "tfswitch/v1/coordination.grpc.pb.h"

namespace tfswitch {

// Ordinary synchronous methods: each worker that waits holds one of gRPC's
// threads, of which the gate keeps some free.
//
// Thread-safe.
class CoordinationService final : public v1::Coordination::Service {
 public:
  // `gate` must outlive the service.
  CoordinationService(std::shared_ptr<Shard> shard, CallGate* gate);

  grpc::Status CreateGroup(grpc::ServerContext* context,
                           const v1::CreateGroupRequest* request,
                           v1::CreateGroupResponse* response) override;
  grpc::Status Join(grpc::ServerContext* context,
                    const v1::JoinRequest* request,
                    v1::JoinResponse* response) override;
  grpc::Status Beat(grpc::ServerContext* context,
                    const v1::BeatRequest* request,
                    v1::BeatResponse* response) override;
  grpc::Status Arrive(grpc::ServerContext* context,
                      const v1::ArriveRequest* request,
                      v1::ArriveResponse* response) override;
  grpc::Status Leave(grpc::ServerContext* context,
                     const v1::LeaveRequest* request,
                     v1::LeaveResponse* response) override;
  grpc::Status WaitForRound(grpc::ServerContext* context,
                            const v1::WaitForRoundRequest* request,
                            v1::WaitForRoundResponse* response) override;
  grpc::Status WaitForTurn(grpc::ServerContext* context,
                           const v1::WaitForTurnRequest* request,
                           v1::WaitForTurnResponse* response) override;
  grpc::Status WaitAtBarrier(grpc::ServerContext* context,
                             const v1::WaitAtBarrierRequest* request,
                             v1::WaitAtBarrierResponse* response) override;
  grpc::Status GetGroupStats(grpc::ServerContext* context,
                             const v1::GetGroupStatsRequest* request,
                             v1::GetGroupStatsResponse* response) override;
  grpc::Status CreateWorkQueue(grpc::ServerContext* context,
                               const v1::CreateWorkQueueRequest* request,
                               v1::CreateWorkQueueResponse* response) override;
  grpc::Status TakeWorkItem(grpc::ServerContext* context,
                            const v1::TakeWorkItemRequest* request,
                            v1::TakeWorkItemResponse* response) override;
  grpc::Status FinishWorkItem(grpc::ServerContext* context,
                              const v1::FinishWorkItemRequest* request,
                              v1::FinishWorkItemResponse* response) override;
  grpc::Status GetWorkQueueStats(
      grpc::ServerContext* context, const v1::GetWorkQueueStatsRequest* request,
      v1::GetWorkQueueStatsResponse* response) override;

 private:
  // Calls work(coordinator), which returns a status, inside the gate.
  template <typename Work>
  grpc::Status Run(const Work& work, bool waits = false) const;
  // The same for work that may wait for other workers.
  template <typename Work>
  grpc::Status RunWaiting(const Work& work) const {
    return Run(work, /*waits=*/true);
  }

  // Constant after construction; the shard has its own locks.
  const std::shared_ptr<Shard> shard_;
  CallGate* const gate_;
};

}  // namespace tfswitch

#endif  // TFSWITCH_CC_RPC_SERVER_COORDINATION_SERVICE_H_
