// Takes and writes snapshots of tables, for the saves of clients and for a
// server's own saves.

#ifndef TFSWITCH_CC_SHARD_SNAPSHOTS_H_
#define TFSWITCH_CC_SHARD_SNAPSHOTS_H_

#include <atomic>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "cc/base/mutex.h"
#include "cc/base/progress.h"
#include "cc/base/write_gate.h"
#include "cc/shard/journal.h"
#include "cc/shard/round_hold.h"
#include "cc/shard/shard_options.h"
#include "cc/table/embedding_table.h"
#include "tfswitch/v1/parameter_server.pb.h"

namespace tfswitch {

// Lets only one save at a time take snapshots, because a table can have only
// one. Taken before the gate is closed.
//
// Thread-safe.
class ABSL_LOCKABLE SaveTurn {
 public:
  explicit SaveTurn(RoundHold* hold) : hold_(*hold) {}

  // Waits until no other save has the turn or holds rounds. Calls `interrupt`
  // at intervals; if that fails, returns its error. FailedPrecondition in the
  // case of CheckNotSaving().
  absl::Status Take(const std::string& save,
                    const Interrupt& interrupt) ABSL_NO_THREAD_SAFETY_ANALYSIS;
  void Return() ABSL_NO_THREAD_SAFETY_ANALYSIS;
  // Tells clang's thread-safety analysis that this thread has the turn. Checks
  // nothing at run time.
  void AssertTaken() const ABSL_ASSERT_EXCLUSIVE_LOCK() {}

  // Whether a save had the turn when this was called.
  bool IsTaken();
  // FailedPrecondition if this thread has the turn.
  absl::Status CheckNotSaving() const;

 private:
  RoundHold& hold_;
  Mutex mutex_;  // Locked while a save has the turn.
  std::atomic<std::thread::id> saver_{};
};

// Returns an Interrupt that ends the writing of files once `stops` is set.
inline Interrupt StopsIf(const std::atomic<bool>& stops) {
  return [&stops]() -> absl::Status {
    if (stops) return absl::CancelledError("the save was given up");
    return absl::OkStatus();
  };
}

// Adds the progress of one save or restore to the response.
inline void AddCounts(const RowCounts& counts,
                      v1::GetProgressResponse* response) {
  response->set_num_rows(response->num_rows() + counts.done);
  response->set_total_rows(response->total_rows() + counts.total);
}

using Snapshots = std::vector<std::unique_ptr<TableSnapshot>>;

// Takes snapshots of all tables at the same moment. For a table in `since`, the
// snapshot has only the changes after that cursor.
//
// REQUIRES: the gate is closed.
absl::StatusOr<Snapshots> TakeSnapshots(
    const std::vector<std::shared_ptr<EmbeddingTable>>& tables,
    const std::map<std::string, ChangeCursor>& since);

// Calls write() on a thread of low priority, and `interrupt` at short
// intervals. If `interrupt` fails, sets `*stops`, and write() must then end. If
// copies of rows need more than options.max_save_bytes and `gate` is not null,
// closes the gate.
absl::Status WriteSnapshots(const ShardOptions& options,
                            const Snapshots& snapshots,
                            const Interrupt& interrupt,
                            absl::FunctionRef<absl::Status()> write,
                            WriteGate* gate, std::atomic<bool>* stops);

// The number of rows in all snapshots.
int64_t RowsOf(const Snapshots& snapshots);

// Logs that a save, which began at `begin`, has written the snapshots to
// `files`.
void TellOfSave(const Journal& journal, const Snapshots& snapshots,
                const std::string& folder,
                const std::vector<std::string>& files, absl::Time begin);

}  // namespace tfswitch

#endif  // TFSWITCH_CC_SHARD_SNAPSHOTS_H_
