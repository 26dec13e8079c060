// A folder of exports as it is served: the newest rows that can be reached,
// exchanged without a pause as new ones appear.

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
  // The tables that the model looks up, by name, with their dims.
  std::map<std::string, int> tables;
  // Check all rows before they are served. Without it each block is checked
  // when it is first used, and a thread checks the others meanwhile, so that
  // opening takes no time; if it finds damage, an older base that is whole is
  // served. Rows exchanged later are checked before in any case.
  bool verify_first = false;
};

// Thread-safe.
class ServedRows {
 public:
  struct State {
    int64_t number = 0;  // The export that is served.
    int64_t base_number = 0;
    int64_t created_ms = 0;  // When that was written, since 1970.
    int64_t served_since_ms = 0;
    bool is_held = false;  // By RollBack().
    int64_t num_refused = 0;
    absl::Status error;  // Why something newer is not served; else OK.
  };

  // Serves the newest export that can be reached. NotFound if there is none,
  // FailedPrecondition if it lacks a table or has one with another dim,
  // DataLoss if files are damaged and no older base is whole.
  static absl::StatusOr<std::shared_ptr<ServedRows>> Open(
      const ServedRowsOptions& options);
  ~ServedRows();

  // The rows that are served now.
  std::shared_ptr<const RowSnapshot> Pin() const;

  // Looks for newer exports and serves those that are whole. On error all stays
  // as it is.
  absl::Status Refresh();
  // Does so every `interval` from now on; zero: no longer.
  void Watch(absl::Duration interval);

  // Serves the rows as of an earlier export, and stays there until Resume().
  absl::Status RollBack(int64_t number);
  absl::Status Resume();

  State state() const;

 private:
  // A base and its deltas, in order.
  using Chain = std::vector<v1::ExportContent>;

  // Rows that were opened, with the number of their base, and why not newer
  // ones.
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

  // Opens the rows as of export `number`, or the newest if that is 0, from a
  // base behind number `after`.
  absl::StatusOr<Built> Build(int64_t number, int64_t after, bool verify)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(update_mutex_);
  // The chain that begins with a base and ends with `number`, or as late as can
  // be, with the reason why not later in *stop.
  absl::StatusOr<Chain> FindChain(const std::vector<ExportName>& names,
                                  size_t base, int64_t number,
                                  absl::Status* stop) const;
  absl::Status AddExport(const v1::ExportContent& manifest, bool verify,
                         std::vector<RowLayers>* tables)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(update_mutex_);
  // Opens a row file, or finds it open. A file that was damaged and is as it
  // was then is refused without being read again.
  absl::StatusOr<std::shared_ptr<const RowFile>> OpenFile(
      const std::string& path, const RowFileInfo& info, bool verify)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(update_mutex_);
  void Refuse(const RowFile& file, const absl::Status& status)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(update_mutex_);
  // Forgets files that are closed or gone.
  void ForgetFiles() ABSL_EXCLUSIVE_LOCKS_REQUIRED(update_mutex_);
  absl::Status RefreshLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(update_mutex_);
  // Serves the deltas that follow the served export.
  absl::Status FollowLocked(const std::vector<ExportName>& names)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(update_mutex_);
  // Makes the overlays few again.
  void MergeLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(update_mutex_);
  void Serve(std::shared_ptr<const RowSnapshot> snapshot, int64_t base_number);
  void NoteError(const absl::Status& error);
  void RunWatch();
  // Checks the served rows, which nobody has checked.
  void RunVerify(const Built& built);
  void VerifyBuilt(const Built& built);
  // The damage of the served base, found while it is served, or the change of
  // a served file.
  absl::Status DamageLocked() const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(update_mutex_);
  bool IsEnding() const;

  const ServedRowsOptions options_;

  // One update at a time; taken before mutex_.
  Mutex update_mutex_;

  mutable Mutex mutex_;
  std::shared_ptr<const RowSnapshot> snapshot_ ABSL_GUARDED_BY(mutex_);
  State state_ ABSL_GUARDED_BY(mutex_);
  absl::Duration interval_ ABSL_GUARDED_BY(mutex_);
  bool is_ending_ ABSL_GUARDED_BY(mutex_) = false;
  CondVar changed_;
  std::thread watcher_ ABSL_GUARDED_BY(mutex_);
  std::thread verifier_;  // Constant after Open().

  // Row files by their paths: those in use, and those that were damaged.
  std::map<std::string, std::weak_ptr<const RowFile>> open_
      ABSL_GUARDED_BY(update_mutex_);
  std::map<std::string, Refused> refused_ ABSL_GUARDED_BY(update_mutex_);
};

}  // namespace tfswitch

#endif  // TFSWITCH_CC_SERVING_SERVED_ROWS_H_
