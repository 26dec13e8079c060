// A replay calls the same functions as the logged calls did, but without a log.
// Each record has the message, and the other values on which the result
// depends: the day, and the number of the push, which seeds random choices.
//
// Some logged calls had no effect: their arguments were wrong, their table was
// dropped, or their round was over. The replay gets the same errors and ignores
// them. Any other error ends the replay, for example if there is no memory for
// the rows.

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

// Repeats a logged control call.
template <typename Request, typename Response>
absl::Status RunAgain(Shard& shard, absl::string_view payload) {
  Request request;
  if (!request.ParseFromArray(payload.data(),
                              static_cast<int>(payload.size()))) {
    return Malformed(Request::descriptor()->name());
  }
  Response response;
  ShardCall call{shard, [] { return absl::OkStatus(); }};
  call.is_replay = true;
  if constexpr (std::is_same_v<Request, v1::CreateTableRequest>) {
    call.protocol_version =
        request.protocol_version();  // The logged call had this version.
  }
  const absl::Status status = Run(call, request, &response);
  // A logged call that got one of these errors had no effect: there were too
  // many tables or groups, or the table had been replaced.
  return absl::IsResourceExhausted(status) || absl::IsDataLoss(status)
             ? absl::FailedPreconditionError(status.message())
             : status;
}

// Whether a logged call that got this error had no effect.
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
  // Here Find() may return DataLoss, because the name now belongs to a
  // different table. For the replay the push's table is gone.
  if (!table.ok()) return absl::NotFoundError("its table is gone");
  const absl::Status status = Push(**table, push).status();
  core_.limits.Trim(**table);  // A replay has no limits.
  // ResourceExhausted for a staged push means too many groups, or too many
  // pushes in the step. The logged push was refused for the same reason. For
  // any other push it means that memory for its rows is missing, which is an
  // error.
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
  TFSWITCH_RETURN_IF_ERROR(
      Pull(**table, pull.keys, IfMissing::kInsert, absl::MakeSpan(rows)));
  core_.limits.Trim(**table);
  return absl::OkStatus();
}

absl::Status Shard::ReplayAssign(absl::string_view payload) {
  DecodeScratch scratch;
  AssignRequest assign;
  if (!ReadAssignRequest({payload}, &scratch, &assign).ok()) {
    return Malformed("assignment");
  }
  const auto table =
      core_.tables.Find({assign.table, assign.table_incarnation});
  if (!table.ok()) return absl::NotFoundError("its table is gone");
  absl::Status status = AssignOnce(assign).status();
  core_.limits.Trim(**table);
  return status;
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
