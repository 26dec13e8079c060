// A replay goes through the same functions as the calls did, without a log, so
// that nothing about a write is said twice. What they read besides their
// message comes from the record: the day of the clock, and the number of the
// push, by which chance is drawn.
//
// A call that had no effect has none again: its table was dropped, or its round
// was over. So such errors are passed over. Others are not.

#include <cstdint>
#include <cstring>
#include <string>
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

// Runs a control call as it was.
template <typename Request, typename Response>
absl::Status RunAgain(Shard& shard, absl::string_view payload) {
  Request request;
  if (!request.ParseFromArray(payload.data(),
                              static_cast<int>(payload.size()))) {
    return Malformed(Request::descriptor()->name());
  }
  Response response;
  const ShardCall call{shard, [] { return absl::OkStatus(); }};
  return Run(call, request, &response);
}

// Errors of calls that had no effect the first time either.
bool HadNoEffect(const absl::Status& status) {
  return absl::IsNotFound(status) || absl::IsAlreadyExists(status) ||
         absl::IsFailedPrecondition(status) || absl::IsAborted(status);
}

}  // namespace

absl::StatusOr<uint64_t> Shard::Log(
    RecordType type, std::initializer_list<absl::string_view> pieces) const {
  if (log_ == nullptr) return replayed_number_;
  const float day = DayOfWallClock();
  std::vector<absl::string_view> all = {
      {reinterpret_cast<const char*>(&day), sizeof(day)}};
  all.insert(all.end(), pieces);
  return log_->Append(static_cast<uint32_t>(type), all);
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

absl::Status Shard::ReplayPush(absl::string_view payload, bool is_saved) {
  DecodeScratch scratch;
  PushRequest push;
  if (!ReadPushRequest({payload}, &scratch, &push).ok()) {
    return Malformed("push");
  }
  const auto table = FindTable({push.table, push.table_incarnation});
  // DataLoss says that another table has its name.
  if (!table.ok()) return absl::NotFoundError("its table is gone");
  if (!is_saved) return Push(**table, push).status();
  if ((*table)->config().consistency.kind != ConsistencyKind::kBsp) {
    return absl::OkStatus();
  }
  CheckedPush checked;
  TFSWITCH_RETURN_IF_ERROR(CheckPush(**table, push, &checked));
  checked.batch.number = replayed_number_;
  return stage_.Add(push.step, push.table, StagedPush(checked.batch));
}

absl::Status Shard::Replay(uint64_t number, uint32_t type,
                           absl::string_view payload, bool is_saved) {
  float day = 0.0f;
  if (payload.size() < sizeof(day)) return Malformed("write");
  std::memcpy(&day, payload.data(), sizeof(day));
  payload.remove_prefix(sizeof(day));
  SetDayOfWallClock(day);
  replayed_number_ = number;
  const auto replay = [&]() -> absl::Status {
    switch (static_cast<RecordType>(type)) {
      case RecordType::kPush:
        return ReplayPush(payload, is_saved);
      case RecordType::kDropTable: {
        if (!is_saved) {
          return RunAgain<v1::DropTableRequest, v1::DropTableResponse>(*this,
                                                                       payload);
        }
        v1::DropTableRequest request;
        if (!request.ParseFromArray(payload.data(),
                                    static_cast<int>(payload.size()))) {
          return Malformed("drop");
        }
        stage_.DropTable(request.table());
        return absl::OkStatus();
      }
      default:
        break;
    }
    if (is_saved) return absl::OkStatus();
    switch (static_cast<RecordType>(type)) {
      case RecordType::kPull: {
        DecodeScratch scratch;
        PullRequest pull;
        if (!ReadPullRequest({payload}, &scratch, &pull).ok()) {
          return Malformed("pull");
        }
        TFSWITCH_ASSIGN_OR_RETURN(const auto table, FindTable(pull.table));
        TFSWITCH_RETURN_IF_ERROR(NoteDay(*table, pull.day));
        std::vector<float> rows(pull.keys.size() * table->dim());
        return Pull(*table, pull.keys, /*insert_missing=*/true,
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
      case RecordType::kRestore:
        return absl::OkStatus();
      case RecordType::kCreateTable:
        return RunAgain<v1::CreateTableRequest, v1::CreateTableResponse>(
            *this, payload);
      case RecordType::kCommitRound:
        return RunAgain<v1::CommitRoundRequest, v1::CommitRoundResponse>(
            *this, payload);
      case RecordType::kErase:
        return RunAgain<v1::EraseRequest, v1::EraseResponse>(*this, payload);
      case RecordType::kShrink:
        return RunAgain<v1::ShrinkRequest, v1::ShrinkResponse>(*this, payload);
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
  is_recovering_ = false;
}

}  // namespace tfswitch
