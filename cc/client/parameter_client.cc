// Makes the messages of control calls, for tables in this process and on
// servers. If a caller wants another type than the response message,
// MessageCall keeps the response and converts it.

#include "cc/client/parameter_client.h"

#include <functional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "cc/base/status_macros.h"
#include "cc/client/done_call.h"
#include "cc/shard/gradient_accumulator.h"
#include "cc/wire/codec.h"
#include "cc/wire/report_conversion.h"
#include "cc/wire/table_config_conversion.h"
#include "tfswitch/v1/parameter_server.pb.h"

namespace tfswitch {
namespace {

// A call in flight that passes its response to `read`.
template <typename Response>
class MessageCall final : public PendingCall {
 public:
  using Read = std::function<absl::Status(const Response&)>;

  MessageCall(ParameterClient* client, const google::protobuf::Message& request,
              absl::Duration timeout, Read read)
      : read_(std::move(read)),
        call_(client->StartCall(request, &response_, timeout)) {}

  absl::Status Wait() override {
    TFSWITCH_RETURN_IF_ERROR(call_->Wait());
    return read_(response_);
  }

 private:
  const Read read_;
  Response response_;
  // Declared last and so destroyed first, because the call fills response_.
  const std::unique_ptr<PendingCall> call_;
};

template <typename Request>
void Identify(const PushId& id, Request* request) {
  request->set_client_id(id.client_id);
  request->set_sequence(id.sequence);
}

}  // namespace

absl::StatusOr<uint64_t> ParameterClient::MakeTable(
    const TableConfig& config, const TableIdentity& identity,
    uint64_t replaced_incarnation) {
  TFSWITCH_RETURN_IF_ERROR(config.Validate());
  v1::CreateTableRequest request;
  request.set_protocol_version(kProtocolVersion);
  *request.mutable_config() = ToProto(config);
  request.set_table_incarnation(identity.incarnation);
  request.mutable_shard_instances()->Add(identity.shard_instances.begin(),
                                         identity.shard_instances.end());
  request.set_replaced_incarnation(replaced_incarnation);
  Identify(NextWriteId(), &request);
  v1::CreateTableResponse response;
  TFSWITCH_RETURN_IF_ERROR(Call(request, &response));
  return response.table_incarnation();
}

absl::Status ParameterClient::DropTable(const std::string& table) {
  v1::DropTableRequest request;
  request.set_table(table);
  Identify(NextWriteId(), &request);
  v1::DropTableResponse response;
  TFSWITCH_RETURN_IF_ERROR(Call(request, &response));
  if (response.dropped()) return absl::OkStatus();
  // Asks for the table, because this error names the tables that exist.
  absl::Status missing = ListTables(table).status();
  if (absl::IsNotFound(missing)) return missing;
  return absl::NotFoundError(absl::StrCat("no table '", table, "'"));
}

absl::StatusOr<std::vector<TableInfo>> ParameterClient::ListTables(
    const TableRef& table) {
  v1::ListTablesRequest request;
  NameTable(table, &request);
  v1::ListTablesResponse response;
  TFSWITCH_RETURN_IF_ERROR(Call(request, &response));
  std::vector<TableInfo> tables;
  for (const v1::TableInfo& info : response.tables()) {
    tables.push_back(FromProto(info));
  }
  return tables;
}

std::unique_ptr<PendingCall> ParameterClient::StartPush(
    absl::Span<const PushPart> parts) {
  for (const PushPart& part : parts) {
    absl::Status status = CheckPush(part.args, part.args.dim);
    if (!status.ok()) return Done(std::move(status));
  }
  return StartCheckedPush(parts);
}

absl::StatusOr<WriteResult> ParameterClient::Push(const PushArgs& args) {
  WriteResult result;
  TFSWITCH_RETURN_IF_ERROR(StartPush({{args, &result}})->Wait());
  return result;
}

absl::StatusOr<WriteResult> ParameterClient::Assign(const AssignArgs& args) {
  WriteResult result;
  TFSWITCH_RETURN_IF_ERROR(StartAssign(args, &result)->Wait());
  return result;
}

std::unique_ptr<PendingCall> ParameterClient::StartCommitRound(
    int, const std::string& group, const Round& round, int64_t* committed,
    const std::vector<TableRef>& staged) {
  v1::CommitRoundRequest request;
  request.set_group(group);
  *request.mutable_round() = round;
  for (const TableRef& table : staged) {
    (*request.mutable_table_incarnations())[table.name] = table.incarnation;
  }
  return std::make_unique<MessageCall<v1::CommitRoundResponse>>(
      this, request, absl::InfiniteDuration(),
      [committed](const v1::CommitRoundResponse& response) {
        *committed = response.committed_round();
        absl::Status error(static_cast<absl::StatusCode>(response.error_code()),
                           response.error_message());
        const uint64_t newer = response.newer_group_instance();
        return newer != 0 ? ErrorOfOlderGroup(std::move(error), newer)
                          : ErrorOfAppliedRound(std::move(error));
      });
}

absl::StatusOr<int64_t> ParameterClient::Erase(const TableRef& table,
                                               absl::Span<const Key> keys) {
  v1::EraseRequest request;
  NameTable(table, &request);
  request.mutable_keys()->Add(keys.begin(), keys.end());
  Identify(NextWriteId(), &request);
  v1::EraseResponse response;
  TFSWITCH_RETURN_IF_ERROR(Call(request, &response));
  return response.erased_rows();
}

std::unique_ptr<PendingCall> ParameterClient::StartReadUsage(
    const TableRef& table, absl::Span<const Key> keys, float day,
    absl::Span<UsageOfRow> usage, absl::Span<KeyState> states,
    absl::Duration timeout) {
  v1::ReadUsageRequest request;
  NameTable(table, &request);
  request.mutable_keys()->Add(keys.begin(), keys.end());
  if (day >= 0.0f) request.set_day(day);
  return std::make_unique<MessageCall<v1::ReadUsageResponse>>(
      this, request, timeout,
      [this, usage, states](const v1::ReadUsageResponse& response) {
        return AsServerFault(FromProto(response, usage, states));
      });
}

absl::Status ParameterClient::ReadUsage(const TableRef& table,
                                        absl::Span<const Key> keys, float day,
                                        absl::Span<UsageOfRow> usage,
                                        absl::Span<KeyState> states) {
  return StartReadUsage(table, keys, day, usage, states,
                        absl::InfiniteDuration())
      ->Wait();
}

absl::StatusOr<v1::SaveShardResponse> ParameterClient::SaveShard(
    const v1::SaveShardRequest& request, Progress*) {
  v1::SaveShardResponse response;
  TFSWITCH_RETURN_IF_ERROR(Call(request, &response));
  return response;
}

absl::StatusOr<v1::StageRestoreResponse> ParameterClient::StageRestore(
    const v1::StageRestoreRequest& request, Progress*) {
  v1::StageRestoreResponse response;
  TFSWITCH_RETURN_IF_ERROR(Call(request, &response));
  return response;
}

absl::Status ParameterClient::CommitRestore(const std::string& restore_id,
                                            bool abort) {
  v1::CommitRestoreRequest request;
  request.set_restore_id(restore_id);
  request.set_abort(abort);
  v1::CommitRestoreResponse response;
  return Call(request, &response);
}

}  // namespace tfswitch
