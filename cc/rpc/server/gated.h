// Gated runs a control call of the server for a caller that may make it,
// between the gate's two ends.

#ifndef TFSWITCH_CC_RPC_SERVER_GATED_H_
#define TFSWITCH_CC_RPC_SERVER_GATED_H_

#include <grpcpp/server_context.h>
#include <grpcpp/support/sync_stream.h>

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
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

// Base in each of the templates, which are those of gRPC for methods that read
// their requests themselves.
template <typename Base, template <typename> class... Wraps>
struct WrapIn {
  using Type = Base;
};
template <typename Base, template <typename> class First,
          template <typename> class... Rest>
struct WrapIn<Base, First, Rest...> {
  using Type = First<typename WrapIn<Base, Rest...>::Type>;
};

// Runs work(visit, request) if the caller may make this call, for the tables
// that it names. The request is read when the caller is known: those who are
// not must not have the server parse it, which may take many times its length.
template <template <typename, typename> class Stream, typename Request,
          typename Response, typename Work>
grpc::Status Gated(const Door& door, grpc::ServerContext* context,
                   Stream<Request, Response>* stream, const Work& work) {
  const MethodRule& rule = RuleFor<Request>();
  Visit visit;
  Request request;
  std::vector<std::string> tables;
  absl::Status status = door.access->Admit(context, rule, &visit);
  if (status.ok() && !stream->Read(&request)) {
    status = absl::InvalidArgumentError(absl::StrCat(
        "the message is not a ", Request::descriptor()->full_name()));
  }
  if (status.ok()) status = visit.AddRequest(context, request.ByteSizeLong());
  if (status.ok()) tables = TablesIn(request);
  for (const std::string& table : tables) {
    if (status.ok()) status = visit.CheckTable(table);
  }
  if (status.ok()) status = CheckCall(visit, *door.shard, request);
  if (status.ok()) {
    const GatePass pass(door.gate, Waits(request, 0));
    status = pass.status().ok() ? work(visit, request) : pass.status();
  }
  door.access->NoteEnd(*context, visit, rule, tables, status);
  return ToGrpcStatus(status);
}

// A control call NAME, as the method METHOD of a service that has a door_ and
// CallOf().
#define TFSWITCH_GATED_METHOD_AS(method, name)                               \
  grpc::Status Streamed##method(                                             \
      grpc::ServerContext* context,                                          \
      grpc::ServerUnaryStreamer<v1::name##Request, v1::name##Response>*      \
          stream) override {                                                 \
    return Gated(door_, context, stream,                                     \
                 [&](const Visit& visit, const v1::name##Request& request) { \
                   v1::name##Response response;                              \
                   absl::Status status =                                     \
                       Run(CallOf(*context, visit), request, &response);     \
                   if (status.ok()) {                                        \
                     stream->Write(response, grpc::WriteOptions());          \
                   }                                                         \
                   return status;                                            \
                 });                                                         \
  }
#define TFSWITCH_GATED_METHOD(name) TFSWITCH_GATED_METHOD_AS(name, name)

}  // namespace tfswitch

#endif  // TFSWITCH_CC_RPC_SERVER_GATED_H_
