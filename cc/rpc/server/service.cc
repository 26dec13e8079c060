// Control calls run inside Gated() by the functions of
// cc/shard/control_calls.h. Streams send one message for each chunk and end
// when the client has gone.

#include "cc/rpc/server/service.h"

#include <algorithm>
#include <cstdint>
#include <utility>

#include "cc/base/status_macros.h"
#include "cc/wire/report_conversion.h"

namespace tfswitch {
namespace {

// Large enough to stream at full speed, small enough for any peer's limit.
constexpr int64_t kExportChunkBytes = 1 << 20;

// Cancelled if nobody reads it any more.
template <typename Request, typename Response>
absl::Status Send(const grpc::ServerContext& context, const Response& response,
                  grpc::ServerSplitStreamer<Request, Response>* stream) {
  if (context.IsCancelled() || !stream->Write(response, grpc::WriteOptions())) {
    return absl::CancelledError("the client has gone");
  }
  return absl::OkStatus();
}

}  // namespace

Service::Service(const ServiceIdentity& identity, std::shared_ptr<Shard> shard,
                 const Door& door, const LentThreads* helpers)
    : identity_(identity),
      shard_(std::move(shard)),
      door_(door),
      helpers_(helpers) {}

grpc::Status Service::StreamedHandshake(
    grpc::ServerContext* context,
    grpc::ServerUnaryStreamer<v1::HandshakeRequest, v1::HandshakeResponse>*
        stream) {
  return Gated(
      door_, context, stream,
      [&](const Visit& visit, const v1::HandshakeRequest& request) {
        v1::HandshakeResponse response;
        response.set_protocol_version(identity_.protocol_version);
        response.set_shard_index(shard_->shard_index());
        response.set_num_shards(shard_->num_shards());
        response.set_instance_id(shard_->instance_id());
        response.set_max_message_bytes(identity_.max_message_bytes);
        *response.mutable_security() = identity_.security;
        if (const auto recovery = shard_->recovery(); recovery.has_value()) {
          *response.mutable_recovery() = *recovery;
        }
        absl::Status status =
            CheckVersion(CallOf(*context, visit), request.protocol_version());
        if (status.ok()) stream->Write(response, grpc::WriteOptions());
        return status;
      });
}

int64_t Service::RowsPerChunk(int64_t floats_per_row) const {
  const auto row_bytes =
      static_cast<int64_t>(sizeof(Key) + sizeof(float) * floats_per_row);
  const int64_t chunk_bytes =
      std::min<int64_t>(kExportChunkBytes, identity_.max_message_bytes / 2);
  return std::max<int64_t>(1, chunk_bytes / row_bytes);
}

grpc::Status Service::StreamedExport(
    grpc::ServerContext* context,
    grpc::ServerSplitStreamer<v1::ExportRequest, v1::ExportResponse>* stream) {
  return Gated(
      door_, context, stream,
      [&](const Visit&, const v1::ExportRequest& request) -> absl::Status {
        TFSWITCH_ASSIGN_OR_RETURN(std::shared_ptr<EmbeddingTable> table,
                                  shard_->FindTable(TableOf(request)));
        const bool with_slots = request.with_slots();
        v1::ExportResponse response;
        return table->ForEachRow(
            RowsPerChunk(table->dim() +
                         (with_slots ? table->slot_floats() : 0)),
            [&](const RowChunk& chunk) {
              response.Clear();
              response.mutable_keys()->Add(chunk.keys.begin(),
                                           chunk.keys.end());
              response.mutable_values()->Add(chunk.embeddings.begin(),
                                             chunk.embeddings.end());
              if (with_slots) {
                response.mutable_slots()->Add(chunk.slots.begin(),
                                              chunk.slots.end());
              }
              return Send(*context, response, stream);
            });
      });
}

grpc::Status Service::StreamedExportChanges(
    grpc::ServerContext* context,
    grpc::ServerSplitStreamer<v1::ExportChangesRequest,
                              v1::ExportChangesResponse>* stream) {
  return Gated(
      door_, context, stream,
      [&](const Visit&,
          const v1::ExportChangesRequest& request) -> absl::Status {
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
                  response.mutable_keys()->Add(chunk.keys.begin(),
                                               chunk.keys.end());
                  response.mutable_values()->Add(chunk.embeddings.begin(),
                                                 chunk.embeddings.end());
                  response.mutable_removed()->Add(chunk.removed.begin(),
                                                  chunk.removed.end());
                  return Send(*context, response, stream);
                }));
        response.Clear();
        response.mutable_cursor()->set_log_id(cursor.log_id);
        response.mutable_cursor()->set_epoch(cursor.epoch);
        return Send(*context, response, stream);
      });
}

ShardCall Service::CallOf(const grpc::ServerContext& context,
                          const Visit& visit) const {
  ShardCall call{*shard_, [this, &context]() -> absl::Status {
                   if (door_.gate->is_closed()) {
                     return absl::UnavailableError("the server is stopping");
                   }
                   if (context.IsCancelled()) {
                     return absl::CancelledError("the client has gone");
                   }
                   return absl::OkStatus();
                 }};
  call.threads = helpers_;
  call.protocol_version = identity_.protocol_version;
  call.only_reads = !visit.May(v1::ROLE_TRAIN);
  call.check_new_table = [&visit, this] {
    return CheckTableQuota(visit, *shard_);
  };
  call.may_see = [&visit](absl::string_view table) {
    return visit.MayUse(table);
  };
  return call;
}

}  // namespace tfswitch
