// A replay calls the same functions as the calls did, but without a log. Each
// record has the message, and the other values that the result depends on: the
// day, and the number of the push, which seeds random choices.
//
// A call that had no effect has none again: its arguments were wrong, its table
// was dropped, or its round was over. So the replay ignores these errors. It
// fails for others, such as no memory for rows that existed.

#include <cstdint>
#include <cstring>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "cc/base/status_macros.h"
#include "cc/shard/control_calls.h"
#include "cc/shard/shard.h"
#include "cc/table/row_statistics.h"
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

absl::Status Shard::StartLog(PushLog* log) {
  if (log_ != nullptr) last_record_ = log_->last();
  log_ = log;
  Coordinator::Log of_groups;
  if (log_ != nullptr) {
    of_groups = [this](absl::string_view event) {
      return Log(RecordType::kCoordination, {event}).status();
    };
  }
  coordinator_->StartLog(std::move(of_groups), gate());
  if (log_ == nullptr || std::exchange(restored_at_, 0) == 0) {
    return absl::OkStatus();
  }
  return Log(RecordType::kRestoreUndone, {}).status();
}

absl::StatusOr<uint64_t> Shard::Log(
    RecordType type, std::initializer_list<absl::string_view> pieces) const {
  if (log_ == nullptr) return replayed_number_;
  const float day = DayOfWallClock();
  std::vector<absl::string_view> all = {
      {reinterpret_cast<const char*>(&day), sizeof(day)}};
  all.insert(all.end(), pieces);
  absl::StatusOr<uint64_t> number =
      log_->Append(static_cast<uint32_t>(type), all);
  NoteDisk(number.status(), options_.log_folder, &is_log_disk_full_);
  return number;
}

absl::StatusOr<uint64_t> Shard::LogPush(const PushRequest& push) const {
  if (log_ == nullptr) return replayed_number_;
  std::string head(PushRequestHeadBytes(push), '\0');
  WritePushRequestHead(push, head.data());
  const absl::string_view gradients(
      reinterpret_cast<const char*>(push.gradients.data()),
      push.gradients.size() * sizeof(float));
  return Log(RecordType::kPush, {head, gradients, PushRequestTail(push)});
}

absl::StatusOr<uint64_t> Shard::LogAssign(const AssignRequest& request) const {
  if (log_ == nullptr) return replayed_number_;
  std::string bytes(AssignRequestBytes(request), '\0');
  WriteAssignRequest(request, bytes.data());
  return Log(RecordType::kAssign, {bytes});
}

absl::Status Shard::ReplayPush(absl::string_view payload) {
  DecodeScratch scratch;
  PushRequest push;
  if (!ReadPushRequest({payload}, &scratch, &push).ok()) {
    return Malformed("push");
  }
  const auto table = FindTable({push.table, push.table_incarnation});
  // FindTable() returns DataLoss if another table has the name by now.
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

absl::Status Shard::StageAgain(const checkpoint::StagedMessage& message) {
  DecodeScratch scratch;
  PushRequest push;
  if (!ReadPushRequest({message.bytes}, &scratch, &push).ok()) {
    return Malformed("push");
  }
  const auto table = FindTable(push.table);
  if (!table.ok()) return absl::OkStatus();  // The table was dropped.
  TFSWITCH_RETURN_IF_ERROR(CheckPush(push, (*table)->dim()));
  PreparedPush prepared;
  TFSWITCH_RETURN_IF_ERROR(Prepare(**table, push, &prepared));
  prepared.batch.number = message.number;
  return stage_.Add(push.step, push.table, StagedPush(prepared.batch));
}

absl::Status Shard::Replay(uint64_t number, uint32_t type,
                           absl::string_view payload) {
  float day = 0.0f;
  const auto record = static_cast<RecordType>(type);
  if (record == RecordType::kRestoreUndone) {
    restored_at_ = 0;
    return absl::OkStatus();
  }
  if (restored_at_ != 0) {
    return absl::DataLossError(absl::StrCat(
        "record ", restored_at_,
        ": rows were restored here, and the save that has them is damaged"));
  }
  if (record == RecordType::kRestore) {
    restored_at_ = number;
    return absl::OkStatus();
  }
  // The save from which this replay started has the restored rows.
  if (record == RecordType::kRestoreSaved) return absl::OkStatus();
  if (payload.size() < sizeof(day)) return Malformed("write");
  std::memcpy(&day, payload.data(), sizeof(day));
  payload.remove_prefix(sizeof(day));
  SetDayOfWallClock(day);
  replayed_number_ = number;
  const auto replay = [&]() -> absl::Status {
    switch (record) {
      case RecordType::kPush:
        return ReplayPush(payload);
      case RecordType::kPull: {
        DecodeScratch scratch;
        PullRequest pull;
        if (!ReadPullRequest({payload}, &scratch, &pull).ok()) {
          return Malformed("pull");
        }
        const auto table = FindTable({pull.table, pull.table_incarnation});
        if (!table.ok()) return absl::NotFoundError("its table is gone");
        TFSWITCH_RETURN_IF_ERROR(NoteDay(**table, pull.day));
        std::vector<float> rows(pull.keys.size() * (*table)->dim());
        return Pull(**table, pull.keys, /*insert_missing=*/true,
                    absl::MakeSpan(rows));
      }
      case RecordType::kAssign: {
        DecodeScratch scratch;
        AssignRequest assign;
        if (!ReadAssignRequest({payload}, &scratch, &assign).ok()) {
          return Malformed("assignment");
        }
        if (!FindTable({assign.table, assign.table_incarnation}).ok()) {
          return absl::NotFoundError("its table is gone");
        }
        return AssignOnce(assign).status();
      }
      case RecordType::kCreateTable:
        return RunAgain<v1::CreateTableRequest, v1::CreateTableResponse>(
            *this, payload);
      case RecordType::kDropTable:
        return RunAgain<v1::DropTableRequest, v1::DropTableResponse>(*this,
                                                                     payload);
      case RecordType::kCommitRound:
        return RunAgain<v1::CommitRoundRequest, v1::CommitRoundResponse>(
            *this, payload);
      case RecordType::kErase:
        return RunAgain<v1::EraseRequest, v1::EraseResponse>(*this, payload);
      case RecordType::kShrink:
        return RunAgain<v1::ShrinkRequest, v1::ShrinkResponse>(*this, payload);
      case RecordType::kCoordination:
        return coordinator_->Replay(payload);
      default:
        return Malformed(absl::StrCat("write of a known type: ", type,
                                      "; it was written by a newer version"));
    }
  };
  const absl::Status status = replay();
  if (status.ok() || HadNoEffect(status)) return absl::OkStatus();
  return absl::Status(status.code(),
                      absl::StrCat("record ", number, ": ", status.message()));
}

void Shard::EndRecovery() {
  SetDayOfWallClock(kServersDay);
  replayed_number_ = 0;
  coordinator_->RenewLeases();
  is_recovering_ = false;
}

}  // namespace tfswitch
