// Runs a control call of the server, if its caller may make it, and counts it
// in the gate.

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
#include "cc/rpc/status_conversion.h"
#include "cc/shard/shard.h"
#include "grpcpp/support/status.h"

namespace tfswitch {

// The entrance for calls. All members must outlive the services.
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

// Runs work(visit, request) if the caller may make this call for the tables
// that it names. Authenticates the caller, reads the bytes, checks the length,
// then parses.
template <typename Request, typename Stream, typename Work>
grpc::Status Gated(const Door& door, grpc::ServerContext* context,
                   Stream* stream, const Work& work) {
  const MethodRule& rule = RuleFor<Request>();
  Visit visit;
  grpc::ByteBuffer bytes;
  Request request;
  std::vector<std::string> tables;
  absl::Status status = door.access->Admit(context, rule, &visit);
  if (status.ok()) {
    const ReadingPass reading(door.gate);
    status = reading.status();
    if (status.ok() && !stream->Read(&bytes)) {
      status = absl::CancelledError("the call has no message");
    }
  }
  if (status.ok()) status = visit.ParseRequest(context, &bytes, &request);
  if (status.ok()) tables = TablesIn(request);
  for (const std::string& table : tables) {
    if (status.ok()) status = visit.CheckTable(table);
  }
  if (status.ok()) {
    const GatePass pass(door.gate, Waits(request, 0));
    status = pass.status();
    if (status.ok()) status = CheckCall(visit, *door.shard, request);
    if (status.ok()) status = work(visit, request);
  }
  door.access->NoteEnd(*context, visit, rule, tables, PathIn(request), status);
  return ToGrpcStatus(visit.WithoutNames(status));
}

// A handler of a control call: run(context, visit, request, &response).
template <typename Request, typename Response, typename Run>
grpc::internal::MethodHandler* GatedHandler(const Door& door, const Run& run) {
  using Stream = grpc::ServerUnaryStreamer<grpc::ByteBuffer, Response>;
  return new grpc::internal::StreamedUnaryHandler<grpc::ByteBuffer, Response>(
      [&door, run](grpc::ServerContext* context, Stream* stream) {
        return Gated<Request>(door, context, stream,
                              [&](const Visit& visit, const Request& request) {
                                Response response;
                                absl::Status status =
                                    run(*context, visit, request, &response);
                                if (status.ok())
                                  stream->Write(response, grpc::WriteOptions());
                                return status;
                              });
      });
}

}  // namespace tfswitch

#endif  // TFSWITCH_CC_RPC_SERVER_GATED_H_
