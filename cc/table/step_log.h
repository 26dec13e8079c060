// The steps that a table with dense updates has taken, and their learning
// rates. Its rows need them to make up for missed steps.

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

// Steps with one learning rate are one run of 8 bytes, so a log is short unless
// a schedule changes the rate at each step. At kMaxRuns, each pair of runs in
// the older half is merged into one run with the mean of their rates. Only rows
// that have missed half a million changes of the rate or more learn by such
// means.
//
// The sums of missed_sums.h are kept beside the runs.
//
// Thread-safe.
class StepLog {
 public:
  static constexpr size_t kMaxRuns = size_t{1} << 20;  // 8 MiB.

  // The optimizer must outlive the log.
  explicit StepLog(const Optimizer* optimizer);

  // The log before the oldest step that is still in progress; if there is none,
  // after the last step.
  std::shared_ptr<const StepHistory> Now() const;

  // Begins the next step, and returns the log before it; null after
  // kMaxDenseStep steps. Steps may overlap.
  std::shared_ptr<const StepHistory> Begin(float learning_rate);
  void End(const StepHistory& before);
  // Waits until no step is in progress. REQUIRES: none begins.
  void WaitForSteps() const;

  SavedSteps Save() const;
  // REQUIRES: Validate(saved) is OK.
  void Restore(const SavedSteps& saved);
  // InvalidArgument that names the error.
  static absl::Status Validate(const SavedSteps& saved);

 private:
  // A history and what it points to. Elements of the runs behind those of the
  // history are written meanwhile.
  struct Moment : StepHistory {
    std::shared_ptr<const std::vector<StepRun>> owned_runs;
    std::vector<MissedMoment> sums;
  };

  // Puts the next run behind the others.
  void AddRun(const StepRun& run) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void SetLatest(uint32_t step) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  // Stays empty if idle rows do not move.
  const bool keeps_sums_;
  mutable Mutex mutex_;
  MissedSums sums_ ABSL_GUARDED_BY(mutex_);
  std::shared_ptr<std::vector<StepRun>> runs_ ABSL_GUARDED_BY(mutex_);
  size_t num_runs_ ABSL_GUARDED_BY(mutex_) = 0;
  std::shared_ptr<const StepHistory> latest_ ABSL_GUARDED_BY(mutex_);
  // Before the steps that have begun and not ended, in their order.
  std::vector<std::shared_ptr<const StepHistory>> at_work_
      ABSL_GUARDED_BY(mutex_);
};

}  // namespace tfswitch

#endif  // TFSWITCH_CC_TABLE_STEP_LOG_H_
