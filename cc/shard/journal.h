// The writes of a shard. The push log has a record of each write. The gate
// stops writes while the state is saved. The ledger remembers which writes were
// applied, to recognise repeated ones.

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

// Types of the records in a push log. A record contains the present day, as a
// float, and then the message of the call.
enum class RecordType : uint32_t {
  kPush = 1,
  kPull = 2,  // A pull that has added rows.
  kAssign = 3,
  kCreateTable = 4,
  kDropTable = 5,
  kErase = 6,
  kShrink = 7,
  kCommitRound = 8,
  // A restore has replaced rows. The log does not have the restored rows.
  kRestore = 9,
  // The rows of that restore are now in a save.
  kRestoreSaved = 10,
  // The server was killed before the restored rows were saved. It has continued
  // with the rows from before the restore.
  kRestoreUndone = 11,
  // A group of workers or a work queue has changed; see Coordinator::StartLog.
  kCoordination = 12,
};

// Logs an event when the disk of a folder is full, and another event when
// writes succeed again. Thread-safe.
class DiskEvents {
 public:
  // Called with the result of each write to `folder`.
  void Note(const absl::Status& status, const std::string& folder);
  // Whether the last write failed for lack of room.
  bool is_full() const { return is_full_; }

 private:
  std::atomic<bool> is_full_{false};
};

// Thread-safe, except for the methods below that say so.
class Journal {
 public:
  explicit Journal(const ShardOptions& options) : options_(options) {}
  Journal(const Journal&) = delete;
  Journal& operator=(const Journal&) = delete;

  WriteGate* gate() { return &gate_; }
  WriteLedger* ledger() { return &ledger_; }
  // Null if there is no log.
  PushLog* log() const { return log_; }
  // Whether the log has refused its last record, or has failed since.
  bool refuses_writes() const {
    return disk_events_.is_full() || (log_ != nullptr && log_->has_failed());
  }

  // Does a write that is no push (CreateTable, DropTable, Assign, Erase), and
  // only once if it is repeated: does not call `write` if an earlier call under
  // the same `id` has returned OK. With client_id 0 always calls it. Calls
  // `log` first, which writes the record. If there is a log, `is_alone` stops
  // all other writes during the call, so that a replay has the same order.
  // FailedPrecondition as for Shard::Push().
  absl::StatusOr<WriteResult> WriteOnce(
      const PushId& id, absl::FunctionRef<absl::StatusOr<uint64_t>()> log,
      absl::FunctionRef<absl::StatusOr<int64_t>()> write,
      bool is_alone = false);

  // Appends the record of a call to the log, and returns the record's number.
  // If there is no log, returns 0, or in a replay the number of the replayed
  // record.
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

  // Increments options.num_writes, which counts applied writes.
  void CountWrite() {
    if (options_.num_writes != nullptr) {
      options_.num_writes->fetch_add(1, std::memory_order_relaxed);
    }
  }

  // Logs an event of the server. Does nothing during a recovery.
  void Tell(absl::string_view event,
            std::initializer_list<LogField> fields) const {
    if (!is_recovering_) LogServerEvent(LogLevel::kInfo, event, fields);
  }

  // The number of the last record that was written, or that the recovery has
  // applied.
  uint64_t last_record() const {
    return log_ == nullptr ? last_record_ : log_->last();
  }

  // The methods below must not be called while another thread uses the shard.

  void BeginRecovery() { is_recovering_ = true; }
  // Called after a recovery. `last_record` is the last record whose write is in
  // the recovered state.
  void SetLastRecord(uint64_t number) { last_record_ = number; }
  bool is_recovering() const { return is_recovering_; }
  // Begins the replay of a record, and removes the day from `*payload`. Returns
  // false if the record does not belong to a call. DataLoss if the record is
  // invalid.
  absl::StatusOr<bool> BeginReplay(uint64_t number, RecordType type,
                                   absl::string_view* payload);
  void EndRecovery();

  // From now on writes a record to `log` before each write is applied. `log`
  // must outlive the shard, or be replaced by null. If the replay ended with a
  // restore, writes a record that undoes the restore.
  absl::Status Start(PushLog* log);

 private:
  const ShardOptions& options_;

  // Constant before the first call of a client.
  PushLog* log_ = nullptr;
  uint64_t last_record_ = 0;
  uint64_t replayed_number_ = 0;  // The record in replay.
  uint64_t restored_at_ = 0;      // The last restore's record.

  // Synchronised by themselves.
  std::atomic<bool> is_recovering_{false};
  DiskEvents disk_events_;
  WriteGate gate_;
  WriteLedger ledger_;
};

}  // namespace tfswitch

#endif  // TFSWITCH_CC_SHARD_JOURNAL_H_
