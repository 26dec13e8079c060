// The steps that a table with dense updates has taken, and their learning
// rates. Rows need them to catch up with steps that they have missed.

#ifndef TFSWITCH_CC_TABLE_STEP_LOG_H_
#define TFSWITCH_CC_TABLE_STEP_LOG_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "cc/base/mutex.h"
#include "cc/optimizer/missed_steps.h"
#include "cc/optimizer/optimizer.h"

namespace tfswitch {

// The log as it is saved.
struct SavedSteps {
  uint32_t last_step = 0;
  std::vector<StepRun> runs;
};

// Consecutive steps with the same learning rate are one run of 8 bytes, so a
// log is short unless a schedule changes the rate at each step. When there are
// kMaxRuns runs, each pair of runs in the older half is merged into one run
// with their mean rate. Only rows that have missed at least half a million
// changes of the rate are stepped with such means.
//
// The log also keeps the sums of missed_sums.h.
//
// Thread-safe.
class StepLog {
 public:
  static constexpr size_t kMaxRuns = size_t{1} << 20;  // 8 MiB.

  // The optimizer must outlive the log.
  explicit StepLog(const Optimizer* optimizer);

  // The log of all steps before the oldest step that is still in progress. If
  // no step is in progress, the whole log.
  std::shared_ptr<const StepHistory> Now() const;

  // Begins the next step, and returns the log of the steps before it. Returns
  // null if the table has already taken kMaxDenseStep steps. Several steps may
  // be in progress.
  std::shared_ptr<const StepHistory> Begin(float learning_rate);
  void End(const StepHistory& before);
  // Waits until no step is in progress. REQUIRES: no step begins meanwhile.
  void WaitForSteps() const;

  SavedSteps Save() const;
  // REQUIRES: Validate(saved) is OK.
  void Restore(const SavedSteps& saved);
  // InvalidArgument that names the error.
  static absl::Status Validate(const SavedSteps& saved);

 private:
  // A history, and the data that it points to. Other threads may append runs to
  // the vector; the history does not use these.
  struct Moment : StepHistory {
    std::shared_ptr<const std::vector<StepRun>> owned_runs;
    std::vector<MissedMoment> sums;
  };

  // Puts the next run behind the others.
  void AddRun(const StepRun& run) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void SetLatest(uint32_t step) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  // False if steps without a gradient do not change rows; then sums_ stays
  // empty.
  const bool keeps_sums_;
  mutable Mutex mutex_;
  MissedSums sums_ ABSL_GUARDED_BY(mutex_);
  std::shared_ptr<std::vector<StepRun>> runs_ ABSL_GUARDED_BY(mutex_);
  size_t num_runs_ ABSL_GUARDED_BY(mutex_) = 0;
  std::shared_ptr<const StepHistory> latest_ ABSL_GUARDED_BY(mutex_);
  // For each step in progress, the log of the steps before it. Sorted by step.
  std::vector<std::shared_ptr<const StepHistory>> at_work_
      ABSL_GUARDED_BY(mutex_);
};

}  // namespace tfswitch

#endif  // TFSWITCH_CC_TABLE_STEP_LOG_H_
