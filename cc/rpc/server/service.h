// The methods of the ParameterServer service, over one Shard.

#ifndef TFSWITCH_CC_RPC_SERVER_SERVICE_H_
#define TFSWITCH_CC_RPC_SERVER_SERVICE_H_

#include <grpcpp/grpcpp.h>

#include <cstdint>
#include <memory>

#include "absl/time/time.h"
#include "cc/base/parallel.h"
#include "cc/base/steady_clock.h"
#include "cc/rpc/server/gated.h"
#include "cc/shard/control_calls.h"
#include "cc/wire/codec.h"
#include "tfswitch/v1/parameter_server.grpc.pb.h"

namespace tfswitch {

// The identity that the service reports.
struct ServiceIdentity {
  uint32_t protocol_version = kProtocolVersion;
  uint64_t max_message_bytes = 0;
  v1::ServerSecurity security;
};

// The methods that move rows are raw: the DataPlane receives them as bytes on
// its own completion queues.
using ServiceWithRawMethods = v1::ParameterServer::WithRawMethod_Pull<
    v1::ParameterServer::WithRawMethod_Push<
        v1::ParameterServer::WithRawMethod_PullMany<
            v1::ParameterServer::WithRawMethod_PushMany<
                v1::ParameterServer::WithRawMethod_Assign<
                    v1::ParameterServer::Service>>>>>;

// Control methods are synchronous. Their handlers read the requests themselves.
class Service final : public ServiceWithRawMethods {
 public:
  // The thread that commits a round works together with `helpers`, which must
  // outlive the service.
  Service(const ServiceIdentity& identity, std::shared_ptr<Shard> shard,
          const CallContext& call_context, const LentThreads* helpers);

 private:
  template <typename Request, typename Response>
  using Streams = absl::Status (Service::*)(
      const grpc::ServerContext& context, const Request& request,
      grpc::ServerSplitStreamer<grpc::ByteBuffer, Response>* stream) const;

  // Registers a control call or a stream, whose request Gated() reads.
  template <typename Request, typename Response>
  void Add(const char* method);
  template <typename Request, typename Response>
  void AddStream(const char* method, Streams<Request, Response> run);

  absl::Status Handshake(const ShardCall& call,
                         const v1::HandshakeRequest& request,
                         v1::HandshakeResponse* response) const;
  absl::Status Export(
      const grpc::ServerContext& context, const v1::ExportRequest& request,
      grpc::ServerSplitStreamer<grpc::ByteBuffer, v1::ExportResponse>* stream)
      const;
  absl::Status ExportChanges(
      const grpc::ServerContext& context,
      const v1::ExportChangesRequest& request,
      grpc::ServerSplitStreamer<grpc::ByteBuffer, v1::ExportChangesResponse>*
          stream) const;
  // Whether a long call should end: the client has disconnected, or the server
  // stops.
  ShardCall CallOf(const grpc::ServerContext& context,
                   const Caller& caller) const;
  // How many rows one message of a stream has.
  int64_t RowsPerChunk(int64_t floats_per_row) const;

  // Constant after construction; the shard synchronises itself.
  const ServiceIdentity identity_;
  const std::shared_ptr<Shard> shard_;
  const CallContext call_context_;
  const LentThreads* const helpers_;
  const absl::Time started_ = SteadyNow();
};

}  // namespace tfswitch

#endif  // TFSWITCH_CC_RPC_SERVER_SERVICE_H_
