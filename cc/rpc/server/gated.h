// Gated runs a control call of the server for a caller that may make it,
// between the gate's two ends.

#ifndef TFSWITCH_CC_RPC_SERVER_GATED_H_
#define TFSWITCH_CC_RPC_SERVER_GATED_H_

#include <grpcpp/server_context.h>

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "cc/rpc/access_control.h"
#include "cc/rpc/server/call_gate.h"
#include "cc/rpc/server/call_rules.h"
#include "cc/rpc/status_conversion.h"
#include "cc/shard/shard.h"
#include "grpcpp/support/status.h"

namespace tfswitch {

// Where calls come in. All must outlive the services.
struct Door {
  CallGate* gate;
  AccessControl* access;
  const Shard* shard;
};

// Whether a call may wait for other workers.
template <typename Request>
auto Waits(const Request& request, int) -> decltype(request.wait_ms() > 0) {
  return request.wait_ms() > 0;
}
template <typename Request>
bool Waits(const Request&, long) {
  return false;
}

// Runs work(visit) if the caller may make this call, for the tables that it
// names.
template <typename Request, typename Work>
grpc::Status Gated(const Door& door, grpc::ServerContext& context,
                   const Request& request, const Work& work) {
  const MethodRule& rule = RuleFor<Request>();
  const std::vector<std::string> tables = TablesIn(request);
  Visit visit;
  absl::Status status =
      door.access->Admit(context, rule, request.ByteSizeLong(), &visit);
  for (const std::string& table : tables) {
    if (status.ok()) status = visit.CheckTable(table);
  }
  if (status.ok()) status = CheckCall(visit, *door.shard, request);
  if (status.ok()) {
    const GatePass pass(door.gate, Waits(request, 0));
    status = pass.status().ok() ? work(visit) : pass.status();
  }
  door.access->NoteEnd(context, visit, rule, tables, status);
  return ToGrpcStatus(status);
}

// A control call, as a method of a service that has a door_ and CallOf().
#define TFSWITCH_GATED_METHOD(name)                                   \
  grpc::Status name(grpc::ServerContext* context,                     \
                    const v1::name##Request* request,                 \
                    v1::name##Response* response) override {          \
    return Gated(door_, *context, *request, [&](const Visit& visit) { \
      return Run(CallOf(*context, visit), *request, response);        \
    });                                                               \
  }

}  // namespace tfswitch

#endif  // TFSWITCH_CC_RPC_SERVER_GATED_H_
