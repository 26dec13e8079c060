#include "cc/shard/journal.h"

#include <cstring>
#include <new>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "cc/base/status_macros.h"
#include "cc/table/row_statistics.h"
#include "cc/wire/codec.h"

namespace tfswitch {

void DiskEvents::Note(const absl::Status& status, const std::string& folder) {
  const bool is_full_now = absl::IsResourceExhausted(status);
  if (!status.ok() && !is_full_now) return;  // The error has another cause.
  if (is_full_ == is_full_now ||
      is_full_.exchange(is_full_now) == is_full_now) {
    return;
  }
  if (is_full_now) {
    LogServerEvent(LogLevel::kError, "disk_full",
                   {{"path", folder}, {"message", status.message()}});
  } else {
    LogServerEvent(LogLevel::kInfo, "disk_well", {{"path", folder}});
  }
}

absl::StatusOr<WriteResult> Journal::WriteOnce(
    const PushId& id, absl::FunctionRef<absl::StatusOr<uint64_t>()> log,
    absl::FunctionRef<absl::StatusOr<int64_t>()> write, bool is_alone) {
  WriteResult written;
  const bool is_protected = id.client_id != 0;
  if (is_protected) {
    TFSWITCH_ASSIGN_OR_RETURN(const WriteLedger::Verdict verdict,
                              ledger_.Begin(id, &written.num_rows));
    if (verdict == WriteLedger::Verdict::kDuplicate) {
      written.duplicate = true;
      return written;
    }
  }
  const WriteGate::Pass pass(is_alone ? nullptr : &gate_);
  const WriteGate::Closed closed(is_alone ? &gate_ : nullptr);
  absl::StatusOr<int64_t> count;
  // Tells the ledger the result, even after an exception.
  try {
    const absl::Status logged = log().status();
    count = logged.ok() ? write() : logged;
  } catch (const std::bad_alloc&) {
    count = absl::ResourceExhaustedError("no memory for a write");
  }
  written.num_rows = count.value_or(0);
  if (is_protected) {
    ledger_.End(id, count.ok(), written.num_rows);
  }
  TFSWITCH_RETURN_IF_ERROR(count.status());
  CountWrite();
  return written;
}

absl::StatusOr<uint64_t> Journal::Log(
    RecordType type, std::initializer_list<absl::string_view> pieces) {
  if (log_ == nullptr) return replayed_number_;
  const float day = DayOfWallClock();
  std::vector<absl::string_view> all = {
      {reinterpret_cast<const char*>(&day), sizeof(day)}};
  all.insert(all.end(), pieces);
  absl::StatusOr<uint64_t> number =
      log_->Append(static_cast<uint32_t>(type), all);
  disk_events_.Note(number.status(), options_.log_folder);
  return number;
}

absl::StatusOr<uint64_t> Journal::LogPush(const PushRequest& push) {
  if (log_ == nullptr) return replayed_number_;
  std::string head(PushRequestHeadBytes(push), '\0');
  WritePushRequestHead(push, head.data());
  const absl::string_view gradients(
      reinterpret_cast<const char*>(push.gradients.data()),
      push.gradients.size() * sizeof(float));
  return Log(RecordType::kPush, {head, gradients, PushRequestTail(push)});
}

absl::StatusOr<uint64_t> Journal::LogPull(const PullRequest& pull) {
  if (log_ == nullptr) return replayed_number_;
  std::string bytes(PullRequestBytes(pull), '\0');
  WritePullRequest(pull, bytes.data());
  return Log(RecordType::kPull, {bytes});
}

absl::StatusOr<uint64_t> Journal::LogAssign(const AssignRequest& request) {
  if (log_ == nullptr) return replayed_number_;
  std::string bytes(AssignRequestBytes(request), '\0');
  WriteAssignRequest(request, bytes.data());
  return Log(RecordType::kAssign, {bytes});
}

absl::Status Journal::Start(PushLog* log) {
  if (log_ != nullptr) last_record_ = log_->last();
  log_ = log;
  if (log_ == nullptr || std::exchange(restored_at_, 0) == 0) {
    return absl::OkStatus();
  }
  return Log(RecordType::kRestoreUndone, {}).status();
}

absl::StatusOr<bool> Journal::BeginReplay(uint64_t number, RecordType type,
                                          absl::string_view* payload) {
  if (type == RecordType::kRestoreUndone) {
    restored_at_ = 0;
    return false;
  }
  if (restored_at_ != 0) {
    return absl::DataLossError(absl::StrCat(
        "record ", restored_at_,
        ": rows were restored here, and the save that has them is damaged"));
  }
  if (type == RecordType::kRestore) {
    restored_at_ = number;
    return false;
  }
  // The save from which this replay started contains the restored rows.
  if (type == RecordType::kRestoreSaved) return false;
  float day = 0.0f;
  if (payload->size() < sizeof(day)) {
    return absl::DataLossError("a record is no write");
  }
  std::memcpy(&day, payload->data(), sizeof(day));
  payload->remove_prefix(sizeof(day));
  SetDayOfWallClock(day);
  replayed_number_ = number;
  return true;
}

void Journal::EndRecovery() {
  SetDayOfWallClock(kServersDay);
  replayed_number_ = 0;
  is_recovering_ = false;
}

}  // namespace tfswitch
