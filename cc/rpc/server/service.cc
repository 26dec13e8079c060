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

}  // namespace

Service::Service(const ServiceIdentity& identity, std::shared_ptr<Shard> shard,
                 CallGate* gate, const LentThreads* helpers)
    : identity_(identity),
      shard_(std::move(shard)),
      gate_(gate),
      helpers_(helpers) {}

grpc::Status Service::Handshake(grpc::ServerContext* context,
                                const v1::HandshakeRequest* request,
                                v1::HandshakeResponse* response) {
  return Gated(gate_, [&]() -> absl::Status {
    response->set_protocol_version(identity_.protocol_version);
    response->set_shard_index(shard_->shard_index());
    response->set_num_shards(shard_->num_shards());
    response->set_instance_id(shard_->instance_id());
    response->set_max_message_bytes(identity_.max_message_bytes);
    if (const auto recovery = shard_->recovery(); recovery.has_value()) {
      *response->mutable_recovery() = *recovery;
    }
    return CheckVersion(CallOf(*context), request->protocol_version());
  });
}

absl::Status Service::ExportRows(
    const v1::ExportRequest& request, const grpc::ServerContext& context,
    grpc::ServerWriter<v1::ExportResponse>* writer) const {
  TFSWITCH_ASSIGN_OR_RETURN(std::shared_ptr<EmbeddingTable> table,
                            shard_->FindTable(TableOf(request)));
  const int64_t row_bytes =
      sizeof(Key) +
      sizeof(float) *
          (table->dim() + (request.with_slots() ? table->slot_floats() : 0));
  const int64_t chunk_bytes =
      std::min<int64_t>(kExportChunkBytes, identity_.max_message_bytes / 2);
  v1::ExportResponse response;
  return table->ForEachRow(
      std::max<int64_t>(1, chunk_bytes / row_bytes),
      [&](const RowChunk& chunk) -> absl::Status {
        response.Clear();
        response.mutable_keys()->Add(chunk.keys.begin(), chunk.keys.end());
        response.mutable_values()->Add(chunk.embeddings.begin(),
                                       chunk.embeddings.end());
        if (request.with_slots()) {
          response.mutable_slots()->Add(chunk.slots.begin(), chunk.slots.end());
        }
        if (context.IsCancelled() || !writer->Write(response)) {
          return absl::CancelledError("the client has gone");
        }
        return absl::OkStatus();
      });
}

grpc::Status Service::Export(grpc::ServerContext* context,
                             const v1::ExportRequest* request,
                             grpc::ServerWriter<v1::ExportResponse>* writer) {
  return Gated(gate_, [&]() -> absl::Status {
    return ExportRows(*request, *context, writer);
  });
}

absl::Status Service::WriteChanges(
    const v1::ExportChangesRequest& request, const grpc::ServerContext& context,
    grpc::ServerWriter<v1::ExportChangesResponse>* writer) const {
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
  const int64_t row_bytes =
      static_cast<int64_t>(sizeof(Key) + sizeof(float) * table->dim());
  const int64_t chunk_bytes =
      std::min<int64_t>(kExportChunkBytes, identity_.max_message_bytes / 2);
  v1::ExportChangesResponse response;
  const auto write = [&]() -> absl::Status {
    if (context.IsCancelled() || !writer->Write(response)) {
      return absl::CancelledError("the client has gone");
    }
    return absl::OkStatus();
  };
  TFSWITCH_ASSIGN_OR_RETURN(
      const ChangeCursor cursor,
      shard_->ExportChanges(
          table, filter, request.export_id(),
          std::max<int64_t>(1, chunk_bytes / row_bytes),
          [&](const ChangeChunk& chunk) -> absl::Status {
            response.Clear();
            response.mutable_keys()->Add(chunk.keys.begin(), chunk.keys.end());
            response.mutable_values()->Add(chunk.embeddings.begin(),
                                           chunk.embeddings.end());
            response.mutable_removed()->Add(chunk.removed.begin(),
                                            chunk.removed.end());
            return write();
          }));
  response.Clear();
  response.mutable_cursor()->set_log_id(cursor.log_id);
  response.mutable_cursor()->set_epoch(cursor.epoch);
  return write();
}

grpc::Status Service::ExportChanges(
    grpc::ServerContext* context, const v1::ExportChangesRequest* request,
    grpc::ServerWriter<v1::ExportChangesResponse>* writer) {
  return Gated(gate_, [&]() -> absl::Status {
    return WriteChanges(*request, *context, writer);
  });
}

ShardCall Service::CallOf(const grpc::ServerContext& context) const {
  ShardCall call{*shard_, [this, &context]() -> absl::Status {
                   if (gate_->is_closed()) {
                     return absl::UnavailableError("the server is stopping");
                   }
                   if (context.IsCancelled()) {
                     return absl::CancelledError("the client has gone");
                   }
                   return absl::OkStatus();
                 }};
  call.threads = helpers_;
  call.protocol_version = identity_.protocol_version;
  return call;
}

}  // namespace tfswitch
