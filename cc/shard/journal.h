// The writes of a shard: their records in the push log, the gate that stops
// them while the state is saved, and the ledger of those that were applied.

#ifndef TFSWITCH_CC_SHARD_JOURNAL_H_
#define TFSWITCH_CC_SHARD_JOURNAL_H_

#include <atomic>
#include <cstdint>
#include <initializer_list>
#include <string>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "cc/base/log_writer.h"
#include "cc/base/write_gate.h"
#include "cc/log/push_log.h"
#include "cc/shard/shard_options.h"
#include "cc/shard/write_ledger.h"
#include "cc/wire/row_calls.h"
#include "google/protobuf/message_lite.h"

namespace tfswitch {

// Types of the records of a push log. The payload is the present day, as a
// float, and then the message of the call.
enum class RecordType : uint32_t {
  kPush = 1,
  kPull = 2,  // A pull that has made rows.
  kAssign = 3,
  kCreateTable = 4,
  kDropTable = 5,
  kErase = 6,
  kShrink = 7,
  kCommitRound = 8,
  // A restore has replaced rows. No record has the restored rows.
  kRestore = 9,
  // The restored rows have been saved.
  kRestoreSaved = 10,
  // The server was killed before they were saved, and has continued with the
  // rows from before the restore.
  kRestoreUndone = 11,
  // A change of a group of workers or of a work queue; see
  // Coordinator::StartLog.
  kCoordination = 12,
};

// Logs an event when the disk of a folder has become full, and when writes
// succeed again. Thread-safe.
class DiskEvents {
 public:
  // Notes the result of a write to `folder`.
  void Note(const absl::Status& status, const std::string& folder);

 private:
  std::atomic<bool> is_full_{false};
};

// Thread-safe, apart from the methods that say otherwise.
class Journal {
 public:
  explicit Journal(const ShardOptions& options) : options_(options) {}
  Journal(const Journal&) = delete;
  Journal& operator=(const Journal&) = delete;

  WriteGate* gate() { return &gate_; }
  WriteLedger* ledger() { return &ledger_; }
  // Null if there is no log.
  PushLog* log() const { return log_; }

  // Does a write that is no push (CreateTable, DropTable, Assign, Erase) once,
  // also if it is repeated: calls `write` unless it has returned OK under the
  // same `id` before. With client_id 0 it is always called. First calls `log`,
  // which writes the record. With a log, `is_alone` keeps other writes out
  // meanwhile, so that a replay has the same order. FailedPrecondition as for
  // Shard::Push().
  absl::StatusOr<WriteResult> WriteOnce(
      const PushId& id, absl::FunctionRef<absl::StatusOr<uint64_t>()> log,
      absl::FunctionRef<absl::StatusOr<int64_t>()> write,
      bool is_alone = false);

  // Appends the record of a call, and returns its number. Without a log returns
  // 0, or in a replay the number of the replayed record.
  absl::StatusOr<uint64_t> Log(RecordType type,
                               const google::protobuf::MessageLite& request) {
    if (log_ == nullptr) return replayed_number_;
    return Log(type, {request.SerializeAsString()});
  }
  absl::StatusOr<uint64_t> Log(RecordType type,
                               std::initializer_list<absl::string_view> pieces);
  absl::StatusOr<uint64_t> LogPush(const PushRequest& push);
  absl::StatusOr<uint64_t> LogPull(const PullRequest& pull);
  absl::StatusOr<uint64_t> LogAssign(const AssignRequest& request);

  // Counts an applied write in options.num_writes.
  void CountWrite() {
    if (options_.num_writes != nullptr) {
      options_.num_writes->fetch_add(1, std::memory_order_relaxed);
    }
  }

  // Logs an event of the server; does nothing in a recovery.
  void Tell(absl::string_view event,
            std::initializer_list<LogField> fields) const {
    if (!is_recovering_) LogServerEvent(LogLevel::kInfo, event, fields);
  }

  // The last record that has been written, or applied by the recovery.
  uint64_t last_record() const {
    return log_ == nullptr ? last_record_ : log_->last();
  }

  // The methods below require that no other thread uses the shard.

  void BeginRecovery() { is_recovering_ = true; }
  // Called when a state has been recovered that has the records up to this one.
  void SetLastRecord(uint64_t number) { last_record_ = number; }
  bool is_recovering() const { return is_recovering_; }
  // Begins to replay a record, and removes the day from `*payload`. False if
  // the record is of no call. DataLoss for an invalid record.
  absl::StatusOr<bool> BeginReplay(uint64_t number, RecordType type,
                                   absl::string_view* payload);
  void EndRecovery();

  // From now on writes a record to `log` before each write takes effect. `log`
  // must outlive the shard, or its replacement by null. If the replay ended
  // with a restore, writes a record that undoes it.
  absl::Status Start(PushLog* log);

 private:
  const ShardOptions& options_;

  // Constant before the first call of a client.
  PushLog* log_ = nullptr;
  uint64_t last_record_ = 0;
  uint64_t replayed_number_ = 0;  // The number of the replayed record.
  uint64_t restored_at_ = 0;      // The last restore's record in a replay.

  // Synchronised by themselves.
  std::atomic<bool> is_recovering_{false};
  DiskEvents disk_events_;
  WriteGate gate_;
  WriteLedger ledger_;
};

}  // namespace tfswitch

#endif  // TFSWITCH_CC_SHARD_JOURNAL_H_
