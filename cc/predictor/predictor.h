// Serves the newest version of a model from C++ and exchanges it while requests
// run.
//
//   PredictorOptions options;
//   options.model_dir = "/models/ranking";  // Holds 1/, 2/, ...
//   options.op_library = ".../tfswitch/libtfswitch_ops.so";
//   auto predictor = Predictor::Load(options);
//   auto scores = (*predictor)->Predict({{"ids", {Integers{3, 5}}}});

#ifndef CC_PREDICTOR_PREDICTOR_H_
#define CC_PREDICTOR_PREDICTOR_H_

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "cc/predictor/model_version.h"
#include "cc/predictor/rows_api.h"

namespace tfswitch {

struct PredictorOptions {
  // A SavedModel, which is version 0, or a folder of SavedModels whose names
  // are their versions, as TensorFlow Serving has it. Other names are passed
  // over: copy a version under such a name, then rename it.
  std::string model_dir;
  // For models with ops of their own; empty: none. Loaded for the process.
  std::string op_library;
  // Serve this version and no other, until Unpin. -1: the newest.
  int64_t version = -1;
  // How often the folder is looked at for versions. Zero: only by Load and Pin.
  absl::Duration poll_interval = absl::Seconds(1);
  // How often newer rows are looked for, if the model has rows of its own; see
  // WatchRows. Zero: as TFSWITCH_SERVING_WATCH_SECONDS says, else never.
  absl::Duration watch_rows_interval = absl::Seconds(1);
  ModelOptions model;
};

// A version is taken when it has been the same for two looks, so one that is
// being copied is left alone. It is loaded and warmed up beside the one that
// serves, so both need memory for a while. Requests under way end on the old
// one, which goes after the last of them.
//
// A version that cannot be loaded is refused: the running one keeps serving.
// The refused one is tried again when its files change. If the running
// version's folder is gone, the newest of the others is taken, even if it is
// older; if there is none, it keeps serving.
//
// Rows of a model of tfswitch.saved_model.save change without a new version:
// tfswitch.export puts bases and deltas into its folder, and they are exchanged
// beside requests, each of which sees the rows of one moment.
//
// Thread-safe.
class Predictor {
 public:
  struct State {
    int64_t version = -1;                     // That serves.
    int64_t loading = -1;                     // -1: none.
    std::map<int64_t, absl::Status> refused;  // And why.
    absl::Status folder;                      // Of the last look at the folder.
    // The rows that the version serves, as of the last look; an error if it has
    // no rows of its own.
    absl::StatusOr<ServedState> rows = absl::UnknownError("not looked at yet");
  };

  // Loads the newest version that can be loaded, or the one of the options. If
  // there is none, the error is that of the newest.
  static absl::StatusOr<std::unique_ptr<Predictor>> Load(
      const PredictorOptions& options);

  // Waits for a version that is being loaded. REQUIRES: no other call is
  // running.
  ~Predictor();

  Predictor(const Predictor&) = delete;
  Predictor& operator=(const Predictor&) = delete;

  // See ModelVersion for both. They run on the version that serves when they
  // begin.
  absl::StatusOr<Response> Predict(const Request& request) const {
    return current()->Predict(request);
  }
  absl::StatusOr<NamedValues> Predict(
      const NamedValues& inputs,
      const std::vector<std::string>& outputs = {}) const {
    return current()->Predict(inputs, outputs);
  }

  // The version that serves now. It is freed when the last holder lets it go.
  std::shared_ptr<const ModelVersion> current() const;

  // Serves this version, an older one too, until Unpin. On an error the version
  // that serves stays, pinned or not as it was.
  absl::Status Pin(int64_t version);

  // From the next look on, the newest version is served again.
  void Unpin();

  // Never waits for a version that is being loaded.
  State state() const;

  // The rows of the version that serves; the next version begins with its own
  // newest ones. See RowsApi for all five: an error leaves what is served.
  absl::StatusOr<ServedState> RowsState() const;
  absl::Status RefreshRows();
  absl::Status RollBackRows(int64_t number);
  absl::Status ResumeRows();
  // Holds for later versions too, even if the one that serves has no rows.
  absl::Status WatchRows(absl::Duration interval);

 private:
  explicit Predictor(const PredictorOptions& options)
      : options_(options), watch_interval_(options.watch_rows_interval) {}

  // Has the rows of a version watched, and no longer those of the one that
  // served before, if there was one.
  void WatchRowsOf(const ModelVersion& model, const ModelVersion* before);
  // Keeps the state of the rows for state(), and logs what is new in it.
  void NoteRows();

  // Loads and serves a version, or notes why it is refused.
  absl::Status Take(int64_t version, const std::string& folder)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(load_mutex_);
  // Takes the newest version of the folder that can be loaded, or the pinned
  // one, if it does not serve already. `at_once`: without waiting until its
  // files stay the same. An error of the folder, or, as long as no version
  // serves, of the newest version.
  absl::Status Look(bool at_once) ABSL_EXCLUSIVE_LOCKS_REQUIRED(load_mutex_);
  void Watch();

  const PredictorOptions options_;
  // Constant after Load. Why rows cannot be steered, if they cannot.
  absl::StatusOr<RowsApi> rows_api_ = absl::UnknownError("not loaded");

  // Held while a version is loaded. Before `mutex_`.
  absl::Mutex load_mutex_ ABSL_ACQUIRED_BEFORE(mutex_);
  // The state of the versions' files at the last look, and when they were
  // refused.
  std::map<int64_t, std::string> seen_ ABSL_GUARDED_BY(load_mutex_);
  std::map<int64_t, std::string> refused_files_ ABSL_GUARDED_BY(load_mutex_);
  // Versions that are freed here when their last request has ended, so that no
  // request has to do it.
  std::vector<std::shared_ptr<const ModelVersion>> retired_
      ABSL_GUARDED_BY(load_mutex_);
  int64_t pinned_ ABSL_GUARDED_BY(load_mutex_) = -1;

  // Held while the interval is told to a version, so that the last one stays.
  // After `load_mutex_`, before `mutex_`.
  absl::Mutex watch_mutex_ ABSL_ACQUIRED_AFTER(load_mutex_);
  absl::Duration watch_interval_ ABSL_GUARDED_BY(watch_mutex_);
  bool is_watch_set_ ABSL_GUARDED_BY(watch_mutex_) = false;  // By WatchRows.

  mutable absl::Mutex mutex_;
  std::shared_ptr<const ModelVersion> current_ ABSL_GUARDED_BY(mutex_);
  State state_ ABSL_GUARDED_BY(mutex_);
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;

  std::thread watcher_;  // Constant after Load.
};

}  // namespace tfswitch

#endif  // CC_PREDICTOR_PREDICTOR_H_
