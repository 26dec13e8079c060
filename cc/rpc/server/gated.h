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

// Whether a call may wait for other workers.
template <typename Request>
auto Waits(const Request& request, int) -> decltype(request.wait_ms() > 0) {
  return request.wait_ms() > 0;
}
template <typename Request>
bool Waits(const Request&, long) {
  return false;
}

// A control call, as a method of a service that has a gate_ and CallOf().
#define TFSWITCH_GATED_METHOD(name)                                       \
  grpc::Status name(grpc::ServerContext* context,                         \
                    const v1::name##Request* request,                     \
                    v1::name##Response* response) override {              \
    return Gated(                                                         \
        gate_, [&] { return Run(CallOf(*context), *request, response); }, \
        Waits(*request, 0));                                              \
  }

}  // namespace tfswitch

#endif  // TFSWITCH_CC_RPC_SERVER_GATED_H_
