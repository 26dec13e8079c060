// Control calls run functions of cc/shard/control_calls.h through Gated().
// Streams send one message per chunk, and stop when the client has
// disconnected.

#include "cc/rpc/server/service.h"

#include <algorithm>
#include <cstdint>
#include <utility>

#include "cc/base/status_macros.h"
#include "cc/wire/report_conversion.h"

namespace tfswitch {
namespace {

// The size of a chunk: large enough for full speed, and small enough for any
// client's message limit.
constexpr int64_t kExportChunkBytes = 1 << 20;

// Sends a message of a stream. Cancelled if the client has disconnected.
template <typename Response>
absl::Status Send(
    const grpc::ServerContext& context, const Response& response,
    grpc::ServerSplitStreamer<grpc::ByteBuffer, Response>* stream) {
  if (context.IsCancelled() || !stream->Write(response, grpc::WriteOptions())) {
    return absl::CancelledError("the client has gone");
  }
  return absl::OkStatus();
}

}  // namespace

template <typename Request, typename Response>
void Service::Add(const char* method) {
  MarkMethodStreamed(
      IndexOf<Request>("ParameterServer", method),
      GatedHandler<Request, Response>(
          call_context_,
          [this](const grpc::ServerContext& context, const Caller& caller,
                 const Request& request, Response* response) {
            return Run(CallOf(context, caller), request, response);
          }));
}

Service::Service(const ServiceIdentity& identity, std::shared_ptr<Shard> shard,
                 const CallContext& call_context, const LentThreads* helpers)
    : identity_(identity),
      shard_(std::move(shard)),
      call_context_(call_context),
      helpers_(helpers) {
#define TFSWITCH_ADD(name) Add<v1::name##Request, v1::name##Response>(#name);
  TFSWITCH_PARAMETER_SERVER_CALLS(TFSWITCH_ADD)
#undef TFSWITCH_ADD
  MarkMethodStreamed(
      IndexOf<v1::HandshakeRequest>("ParameterServer", "Handshake"),
      GatedHandler<v1::HandshakeRequest, v1::HandshakeResponse>(
          call_context_,
          [this](const grpc::ServerContext& context, const Caller& caller,
                 const v1::HandshakeRequest& request,
                 v1::HandshakeResponse* response) {
            return Handshake(CallOf(context, caller), request, response);
          }));
  AddStream<v1::ExportRequest, v1::ExportResponse>("Export", &Service::Export);
  AddStream<v1::ExportChangesRequest, v1::ExportChangesResponse>(
      "ExportChanges", &Service::ExportChanges);
}

template <typename Request, typename Response>
void Service::AddStream(const char* method, Streams<Request, Response> run) {
  using Stream = grpc::ServerSplitStreamer<grpc::ByteBuffer, Response>;
  MarkMethodStreamed(
      IndexOf<Request>("ParameterServer", method),
      new grpc::internal::SplitServerStreamingHandler<grpc::ByteBuffer,
                                                      Response>(
          [this, run](grpc::ServerContext* context, Stream* stream) {
            return Gated<Request>(call_context_, context, stream,
                                  [&](const Caller&, const Request& request) {
                                    return (this->*run)(*context, request,
                                                        stream);
                                  });
          }));
}

absl::Status Service::Handshake(const ShardCall& call,
                                const v1::HandshakeRequest& request,
                                v1::HandshakeResponse* response) const {
  response->set_protocol_version(identity_.protocol_version);
  response->set_shard_index(shard_->options().shard_index);
  response->set_num_shards(shard_->options().num_shards);
  response->set_instance_id(shard_->instance_id());
  response->set_max_message_bytes(identity_.max_message_bytes);
  response->set_marks_missing(true);
  response->set_max_memory(shard_->max_memory());
  response->set_knows_wire_dtype(true);
  *response->mutable_security() = identity_.security;
  response->set_version(TFSWITCH_VERSION);
  response->set_uptime_ms(absl::ToInt64Milliseconds(SteadyNow() - started_));
  response->set_last_save_ms(shard_->last_save_ms());
  response->set_num_workers(shard_->num_workers());
  if (const auto recovery = shard_->own_state().report();
      recovery.has_value()) {
    *response->mutable_recovery() = *recovery;
  }
  return CheckVersion(call, request.protocol_version());
}

int64_t Service::RowsPerChunk(int64_t floats_per_row) const {
  const auto row_bytes =
      static_cast<int64_t>(sizeof(Key) + sizeof(float) * floats_per_row);
  const int64_t chunk_bytes =
      std::min<int64_t>(kExportChunkBytes, identity_.max_message_bytes / 2);
  return std::max<int64_t>(1, chunk_bytes / row_bytes);
}

absl::Status Service::Export(
    const grpc::ServerContext& context, const v1::ExportRequest& request,
    grpc::ServerSplitStreamer<grpc::ByteBuffer, v1::ExportResponse>* stream)
    const {
  TFSWITCH_ASSIGN_OR_RETURN(std::shared_ptr<EmbeddingTable> table,
                            shard_->FindTable(TableOf(request)));
  const bool with_slots = request.with_slots();
  v1::ExportResponse response;
  return table->ForEachRow(
      RowsPerChunk(table->dim() + (with_slots ? table->slot_floats() : 0)),
      [&](const RowChunk& chunk) {
        response.Clear();
        response.mutable_keys()->Add(chunk.keys.begin(), chunk.keys.end());
        response.mutable_values()->Add(chunk.embeddings.begin(),
                                       chunk.embeddings.end());
        if (with_slots) {
          response.mutable_slots()->Add(chunk.slots.begin(), chunk.slots.end());
        }
        return Send(context, response, stream);
      });
}

absl::Status Service::ExportChanges(
    const grpc::ServerContext& context, const v1::ExportChangesRequest& request,
    grpc::ServerSplitStreamer<grpc::ByteBuffer, v1::ExportChangesResponse>*
        stream) const {
  TFSWITCH_ASSIGN_OR_RETURN(std::shared_ptr<EmbeddingTable> table,
                            shard_->FindTable(TableOf(request)));
  ChangeFilter filter;
  if (request.has_since()) {
    filter.since = {request.since().log_id(), request.since().epoch()};
    if (filter.since.log_id == 0) {
      return absl::InvalidArgumentError("since: a log_id is never 0");
    }
  }
  if (request.has_rule()) {
    filter.rule = ScoreRule{request.rule().base_threshold(),
                            request.rule().delta_threshold(),
                            request.rule().delta_keep_days()};
  }
  if (request.has_day()) filter.day = request.day();
  v1::ExportChangesResponse response;
  TFSWITCH_ASSIGN_OR_RETURN(
      const ChangeCursor cursor,
      shard_->ExportChanges(
          table, filter, request.export_id(), RowsPerChunk(table->dim()),
          [&](const ChangeChunk& chunk) {
            response.Clear();
            response.mutable_keys()->Add(chunk.keys.begin(), chunk.keys.end());
            response.mutable_values()->Add(chunk.embeddings.begin(),
                                           chunk.embeddings.end());
            response.mutable_removed()->Add(chunk.removed.begin(),
                                            chunk.removed.end());
            return Send(context, response, stream);
          }));
  response.Clear();
  response.mutable_cursor()->set_log_id(cursor.log_id);
  response.mutable_cursor()->set_epoch(cursor.epoch);
  return Send(context, response, stream);
}

ShardCall Service::CallOf(const grpc::ServerContext& context,
                          const Caller& caller) const {
  ShardCall call{*shard_, [this, &context]() -> absl::Status {
                   if (call_context_.gate->is_closed()) {
                     return absl::UnavailableError("the server is stopping");
                   }
                   if (context.IsCancelled()) {
                     return absl::CancelledError("the client has gone");
                   }
                   return absl::OkStatus();
                 }};
  call.threads = helpers_;
  call.protocol_version = identity_.protocol_version;
  call.caller = caller.CallerId(context);
  call.only_reads = !caller.May(v1::ROLE_TRAIN);
  call.check_new_table = [&caller, this] {
    return CheckTableQuota(caller, *shard_);
  };
  call.may_see = [&caller](absl::string_view table) {
    return caller.MayUse(table);
  };
  return call;
}

}  // namespace tfswitch
