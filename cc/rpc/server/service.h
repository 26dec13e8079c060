// The methods of the ParameterServer service, over one Shard.

#ifndef TFSWITCH_CC_RPC_SERVER_SERVICE_H_
#define TFSWITCH_CC_RPC_SERVER_SERVICE_H_

#include <grpcpp/grpcpp.h>

#include <cstdint>
#include <memory>

#include "cc/base/parallel.h"
#include "cc/rpc/server/gated.h"
#include "cc/shard/control_calls.h"
#include "cc/wire/codec.h"
#include "tfswitch/v1/parameter_server.grpc.pb.h"

namespace tfswitch {

// The service's description of itself.
struct ServiceIdentity {
  uint32_t protocol_version = kProtocolVersion;
  uint64_t max_message_bytes = 0;
  v1::ServerSecurity security;
};

// The methods that move rows are raw: DataPlane asks for them as bytes on its
// own completion queues.
using ServiceWithRawMethods = v1::ParameterServer::WithRawMethod_Pull<
    v1::ParameterServer::WithRawMethod_Push<
        v1::ParameterServer::WithRawMethod_PullMany<
            v1::ParameterServer::WithRawMethod_PushMany<
                v1::ParameterServer::WithRawMethod_Assign<
                    v1::ParameterServer::Service>>>>>;

#define TFSWITCH_STREAMED(name) \
  , v1::ParameterServer::WithStreamedUnaryMethod_##name
using StreamedService =
    WrapIn<ServiceWithRawMethods,
           v1::ParameterServer::WithSplitStreamingMethod_Export,
           v1::ParameterServer::WithSplitStreamingMethod_ExportChanges,
           v1::ParameterServer::WithStreamedUnaryMethod_Handshake,
           v1::ParameterServer::WithStreamedUnaryMethod_SettleExport
               TFSWITCH_PARAMETER_SERVER_CALLS(TFSWITCH_STREAMED)>::Type;
#undef TFSWITCH_STREAMED

// Control methods are synchronous ones.
class Service final : public StreamedService {
 public:
  // `helpers` work on a round together with the thread that commits it, and
  // must outlive the service.
  Service(const ServiceIdentity& identity, std::shared_ptr<Shard> shard,
          const Door& door, const LentThreads* helpers);

  grpc::Status StreamedHandshake(
      grpc::ServerContext* context,
      grpc::ServerUnaryStreamer<v1::HandshakeRequest, v1::HandshakeResponse>*
          stream) override;
  grpc::Status StreamedExport(
      grpc::ServerContext* context,
      grpc::ServerSplitStreamer<v1::ExportRequest, v1::ExportResponse>* stream)
      override;
  grpc::Status StreamedExportChanges(
      grpc::ServerContext* context,
      grpc::ServerSplitStreamer<v1::ExportChangesRequest,
                                v1::ExportChangesResponse>* stream) override;
  TFSWITCH_PARAMETER_SERVER_CALLS(TFSWITCH_GATED_METHOD)
  TFSWITCH_GATED_METHOD_AS(SettleExport, CommitExport)

 private:
  // Long calls end when the client has gone, or the server stops.
  ShardCall CallOf(const grpc::ServerContext& context,
                   const Visit& visit) const;
  // How many rows of a stream go in one message.
  int64_t RowsPerChunk(int64_t floats_per_row) const;

  // Constant after construction; the shard has its own locks.
  const ServiceIdentity identity_;
  const std::shared_ptr<Shard> shard_;
  const Door door_;
  const LentThreads* const helpers_;
};

}  // namespace tfswitch

#endif  // TFSWITCH_CC_RPC_SERVER_SERVICE_H_
