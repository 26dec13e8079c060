// Serves the newest readable rows of a folder of exports. New exports replace
// the rows while requests run.

#ifndef TFSWITCH_CC_SERVING_SERVED_ROWS_H_
#define TFSWITCH_CC_SERVING_SERVED_ROWS_H_

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "cc/base/files.h"
#include "cc/base/mutex.h"
#include "cc/serving/export_folder.h"
#include "cc/serving/row_snapshot.h"

namespace tfswitch {

struct ServedRowsOptions {
  std::string path;
  // The tables that the model looks up: their names and dims.
  std::map<std::string, int> tables;
  // Whether all rows are checked before they are served. If not, opening is
  // fast: each block is checked when it is first used, and a thread checks all
  // others meanwhile. If the thread finds damage, an older, undamaged base is
  // served. Later exports are always checked before they are served.
  bool verify_first = false;
};

// Thread-safe.
class ServedRows {
 public:
  struct State {
    int64_t number = 0;  // The export that is served.
    int64_t base_number = 0;
    int64_t created_ms = 0;  // When the export was written, since 1970.
    int64_t served_since_ms = 0;
    bool is_held = false;  // Whether RollBack() keeps newer exports away.
    int64_t num_refused = 0;
    absl::Status error;  // Why a newer export is not served; else OK.
  };

  // Serves the newest export that can be read. NotFound if there is no export,
  // FailedPrecondition if the export lacks a table or a table has another dim,
  // DataLoss if the export's files are damaged and there is no older, undamaged
  // base.
  static absl::StatusOr<std::shared_ptr<ServedRows>> Open(
      const ServedRowsOptions& options);
  ~ServedRows();

  // The rows that are served now.
  std::shared_ptr<const RowSnapshot> Pin() const;

  // Looks for newer exports and serves undamaged ones. After an error the
  // served rows do not change.
  absl::Status Refresh();
  // From now on calls Refresh() every `interval`; zero stops this.
  void Watch(absl::Duration interval);

  // Serves an earlier export until Resume().
  absl::Status RollBack(int64_t number);
  absl::Status Resume();

  State state() const;

 private:
  // A base and its deltas, in order.
  using Chain = std::vector<v1::ExportContent>;

  // The result of Build(): opened rows, the number of their base, and why newer
  // rows were not opened.
  struct Built {
    std::shared_ptr<const RowSnapshot> snapshot;
    int64_t base_number = 0;
    absl::Status newer;
  };
  struct Refused {
    FileStamp stamp;
    absl::Status status;
  };

  explicit ServedRows(const ServedRowsOptions& options) : options_(options) {}

  // Opens the rows of export `number`; 0 means the newest export. Uses only
  // bases whose number is above `after`.
  absl::StatusOr<Built> Build(int64_t number, int64_t after, bool verify)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(update_mutex_);
  // Finds the base and the deltas that lead to export `number`. If a delta
  // cannot be used, the chain ends before it, and *stop receives the reason.
  absl::StatusOr<Chain> FindChain(const std::vector<ExportName>& names,
                                  size_t base, int64_t number,
                                  absl::Status* stop) const;
  absl::Status AddExport(const v1::ExportContent& manifest, bool verify,
                         std::vector<RowLayers>* tables)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(update_mutex_);
  // Opens a row file, or returns it if it is open already. If the file was
  // found damaged before and has not changed since, returns the error without
  // reading it.
  absl::StatusOr<std::shared_ptr<const RowFile>> OpenFile(
      const std::string& path, const RowFileInfo& info, bool verify)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(update_mutex_);
  void Refuse(const RowFile& file, const absl::Status& status)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(update_mutex_);
  // Forgets files that are closed or do not exist any more.
  void ForgetFiles() ABSL_EXCLUSIVE_LOCKS_REQUIRED(update_mutex_);
  absl::Status RefreshLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(update_mutex_);
  // Serves the deltas that follow the served export.
  absl::Status FollowLocked(const std::vector<ExportName>& names)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(update_mutex_);
  // Merges deltas, so that the number of files stays small.
  void MergeLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(update_mutex_);
  void Serve(std::shared_ptr<const RowSnapshot> snapshot, int64_t base_number);
  void NoteError(const absl::Status& error);
  void RunWatch();
  // Checks served rows that were opened without a check.
  void RunVerify(const Built& built);
  void VerifyBuilt(const Built& built);
  // Returns an error if damage of the served base was found, or a served file
  // was changed.
  absl::Status DamageLocked() const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(update_mutex_);
  bool IsEnding() const;

  const ServedRowsOptions options_;

  // Held during an update. Taken before mutex_.
  Mutex update_mutex_;

  mutable Mutex mutex_;
  std::shared_ptr<const RowSnapshot> snapshot_ ABSL_GUARDED_BY(mutex_);
  State state_ ABSL_GUARDED_BY(mutex_);
  absl::Duration interval_ ABSL_GUARDED_BY(mutex_);
  bool is_ending_ ABSL_GUARDED_BY(mutex_) = false;
  CondVar changed_;
  std::thread watcher_ ABSL_GUARDED_BY(mutex_);
  std::thread verifier_;  // Constant after Open().

  // By path: the row files in use, and those that were found damaged.
  std::map<std::string, std::weak_ptr<const RowFile>> open_
      ABSL_GUARDED_BY(update_mutex_);
  std::map<std::string, Refused> refused_ ABSL_GUARDED_BY(update_mutex_);
};

}  // namespace tfswitch

#endif  // TFSWITCH_CC_SERVING_SERVED_ROWS_H_
