// Gated runs a control call of the server between the gate's two ends.

#ifndef TFSWITCH_CC_RPC_SERVER_GATED_H_
#define TFSWITCH_CC_RPC_SERVER_GATED_H_

#include "absl/status/status.h"
#include "cc/rpc/server/call_gate.h"
#include "cc/rpc/status_conversion.h"
#include "grpcpp/support/status.h"

namespace tfswitch {

// Runs `work` inside the gate. `waits`: it may wait for other workers.
template <typename Work>
grpc::Status Gated(CallGate* gate, const Work& work, bool waits = false) {
  const GatePass pass(gate, waits);
  return ToGrpcStatus(pass.status().ok() ? work() : pass.status());
}

}  // namespace tfswitch

#endif  // TFSWITCH_CC_RPC_SERVER_GATED_H_
