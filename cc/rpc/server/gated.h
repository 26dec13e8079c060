// Runs a control call if the caller is allowed to make it. Meanwhile the gate
// counts the call.

#ifndef TFSWITCH_CC_RPC_SERVER_GATED_H_
#define TFSWITCH_CC_RPC_SERVER_GATED_H_

#include <grpcpp/server_context.h>
#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/method_handler.h>
#include <grpcpp/support/sync_stream.h>

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "cc/rpc/access_control.h"
#include "cc/rpc/server/call_gate.h"
#include "cc/rpc/server/call_rules.h"
#include "cc/rpc/server/server_times.h"
#include "cc/rpc/status_conversion.h"
#include "cc/shard/shard.h"
#include "grpcpp/support/status.h"

namespace tfswitch {

// The checks that each call passes. All members must outlive the services.
struct CallContext {
  CallGate* gate;
  AccessControl* access;
  const Shard* shard;
};

// Whether a call of this type may wait for other workers.
template <typename Request>
auto Waits(const Request& request, int) -> decltype(request.wait_ms() > 0) {
  return request.wait_ms() > 0;
}
template <typename Request>
bool Waits(const Request&, long) {
  return false;
}

// Runs work(caller, request) if the caller may make this call for the tables
// that it names. First authenticates the caller, then reads the request, checks
// its length, and parses it.
template <typename Request, typename Stream, typename Work>
grpc::Status Gated(const CallContext& call_context,
                   grpc::ServerContext* context, Stream* stream,
                   const Work& work) {
  ServerTimes times(*context);
  const MethodRule& rule = RuleFor<Request>();
  Caller caller;
  grpc::ByteBuffer bytes;
  Request request;
  std::vector<std::string> tables;
  absl::Status status = call_context.access->Admit(context, rule, &caller);
  if (status.ok()) {
    const ReadingPass reading(call_context.gate);
    status = reading.status();
    if (status.ok() && !stream->Read(&bytes)) {
      status = absl::CancelledError("the call has no message");
    }
    times.Begin();
  }
  if (status.ok()) status = caller.ParseRequest(context, &bytes, &request);
  if (status.ok()) tables = TablesIn(request);
  for (const std::string& table : tables) {
    if (status.ok()) status = caller.CheckTable(table);
  }
  if (status.ok()) {
    const AdmissionTicket pass(call_context.gate, Waits(request, 0));
    status = pass.status();
    if (status.ok()) status = CheckCall(caller, *call_context.shard, request);
    if (status.ok()) status = work(caller, request);
  }
  call_context.access->NoteEnd(*context, caller, rule, tables, PathIn(request),
                               status);
  times.Tell(context);
  return ToGrpcStatus(caller.WithoutNames(status));
}

// Makes a handler of a control call from a function run(context, caller,
// request, &response).
template <typename Request, typename Response, typename Run>
grpc::internal::MethodHandler* GatedHandler(const CallContext& call_context,
                                            const Run& run) {
  using Stream = grpc::ServerUnaryStreamer<grpc::ByteBuffer, Response>;
  return new grpc::internal::StreamedUnaryHandler<grpc::ByteBuffer, Response>(
      [&call_context, run](grpc::ServerContext* context, Stream* stream) {
        return Gated<Request>(
            call_context, context, stream,
            [&](const Caller& caller, const Request& request) {
              Response response;
              absl::Status status = run(*context, caller, request, &response);
              if (status.ok()) stream->Write(response, grpc::WriteOptions());
              return status;
            });
      });
}

}  // namespace tfswitch

#endif  // TFSWITCH_CC_RPC_SERVER_GATED_H_
