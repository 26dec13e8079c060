// A replay calls the same functions as the calls did, but without a log. Each
// record has the message, and the other values that the result depends on: the
// day, and the number of the push, which seeds random choices.
//
// A call that had no effect has none again: its arguments were wrong, its table
// was dropped, or its round was over. So the replay ignores these errors. It
// fails for others, such as no memory for rows that existed.

#include <cstdint>
#include <string>
#include <type_traits>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "cc/base/status_macros.h"
#include "cc/shard/control_calls.h"
#include "cc/shard/row_work.h"
#include "cc/shard/shard.h"
#include "cc/wire/codec.h"

namespace tfswitch {
namespace {

absl::Status Malformed(absl::string_view what) {
  return absl::DataLossError(absl::StrCat("a record is no ", what));
}

// Runs a control call again.
template <typename Request, typename Response>
absl::Status RunAgain(Shard& shard, absl::string_view payload) {
  Request request;
  if (!request.ParseFromArray(payload.data(),
                              static_cast<int>(payload.size()))) {
    return Malformed(Request::descriptor()->name());
  }
  Response response;
  ShardCall call{shard, [] { return absl::OkStatus(); }};
  if constexpr (std::is_same_v<Request, v1::CreateTableRequest>) {
    call.protocol_version =
        request.protocol_version();  // It was the same then.
  }
  const absl::Status status = Run(call, request, &response);
  // These errors had no effect the first time either: too many tables or
  // groups, or a table that had been replaced.
  return absl::IsResourceExhausted(status) || absl::IsDataLoss(status)
             ? absl::FailedPreconditionError(status.message())
             : status;
}

// Errors of calls that had no effect the first time either.
bool HadNoEffect(const absl::Status& status) {
  return absl::IsNotFound(status) || absl::IsAlreadyExists(status) ||
         absl::IsFailedPrecondition(status) || absl::IsAborted(status) ||
         absl::IsInvalidArgument(status);
}

}  // namespace

absl::Status Shard::ReplayPush(absl::string_view payload) {
  DecodeScratch scratch;
  PushRequest push;
  if (!ReadPushRequest({payload}, &scratch, &push).ok()) {
    return Malformed("push");
  }
  const auto table = core_.tables.Find({push.table, push.table_incarnation});
  // Find() returns DataLoss if another table has the name by now.
  if (!table.ok()) return absl::NotFoundError("its table is gone");
  const absl::Status status = Push(**table, push).status();
  // If the push is staged, ResourceExhausted means a step with too many pushes,
  // or too many groups: it was refused the first time, too. Otherwise memory
  // for rows that existed is missing, which is an error.
  const bool is_staged =
      (*table)->config().consistency.kind == ConsistencyKind::kBsp;
  return is_staged && absl::IsResourceExhausted(status)
             ? absl::FailedPreconditionError(status.message())
             : status;
}

absl::Status Shard::ReplayPull(absl::string_view payload) {
  DecodeScratch scratch;
  PullRequest pull;
  if (!ReadPullRequest({payload}, &scratch, &pull).ok()) {
    return Malformed("pull");
  }
  const auto table = core_.tables.Find({pull.table, pull.table_incarnation});
  if (!table.ok()) return absl::NotFoundError("its table is gone");
  TFSWITCH_RETURN_IF_ERROR(NoteDay(**table, pull.day));
  std::vector<float> rows(pull.keys.size() * (*table)->dim());
  return Pull(**table, pull.keys, /*insert_missing=*/true,
              absl::MakeSpan(rows));
}

absl::Status Shard::ReplayAssign(absl::string_view payload) {
  DecodeScratch scratch;
  AssignRequest assign;
  if (!ReadAssignRequest({payload}, &scratch, &assign).ok()) {
    return Malformed("assignment");
  }
  if (!core_.tables.Find({assign.table, assign.table_incarnation}).ok()) {
    return absl::NotFoundError("its table is gone");
  }
  return AssignOnce(assign).status();
}

absl::Status Shard::ReplayCall(RecordType type, absl::string_view payload) {
  switch (type) {
    case RecordType::kPush:
      return ReplayPush(payload);
    case RecordType::kPull:
      return ReplayPull(payload);
    case RecordType::kAssign:
      return ReplayAssign(payload);
    case RecordType::kCreateTable:
      return RunAgain<v1::CreateTableRequest, v1::CreateTableResponse>(*this,
                                                                       payload);
    case RecordType::kDropTable:
      return RunAgain<v1::DropTableRequest, v1::DropTableResponse>(*this,
                                                                   payload);
    case RecordType::kCommitRound:
      return RunAgain<v1::CommitRoundRequest, v1::CommitRoundResponse>(*this,
                                                                       payload);
    case RecordType::kErase:
      return RunAgain<v1::EraseRequest, v1::EraseResponse>(*this, payload);
    case RecordType::kShrink:
      return RunAgain<v1::ShrinkRequest, v1::ShrinkResponse>(*this, payload);
    case RecordType::kCoordination:
      return core_.coordinator->Replay(payload);
    default:
      return Malformed(
          absl::StrCat("write of a known type: ", static_cast<uint32_t>(type),
                       "; it was written by a newer version"));
  }
}

absl::Status Shard::Replay(uint64_t number, uint32_t type,
                           absl::string_view payload) {
  const auto record = static_cast<RecordType>(type);
  TFSWITCH_ASSIGN_OR_RETURN(
      const bool is_call, core_.journal.BeginReplay(number, record, &payload));
  if (!is_call) return absl::OkStatus();
  const absl::Status status = ReplayCall(record, payload);
  if (status.ok() || HadNoEffect(status)) return absl::OkStatus();
  return absl::Status(status.code(),
                      absl::StrCat("record ", number, ": ", status.message()));
}

}  // namespace tfswitch
