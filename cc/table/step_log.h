// The steps that a table with dense updates has taken, and with which learning
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

namespace tfswitch {

// The log as it is saved.
struct SavedSteps {
  uint32_t last_step = 0;
  std::vector<StepRun> runs;
};

// Steps with one learning rate are one run, so that a log is short unless a
// schedule changes the rate with each step. There are at most kMaxRuns: a
// table that comes to them brings all its rows up to date and calls Coarsen(),
// after which only rows that are not there yet need the older runs.
//
// Thread-safe.
class StepLog {
 public:
  static constexpr size_t kMaxRuns = 16384;  // 128 KiB.

  // The log at one moment; valid while it is kept.
  class Moment {
   public:
    const StepHistory& history() const { return history_; }

   private:
    friend class StepLog;
    std::shared_ptr<const std::vector<StepRun>> runs_;
    StepHistory history_;
  };

  StepLog() : runs_(NewRuns()) {}

  // The log of the steps that have ended.
  Moment Now() const;

  // Notes the learning rate of the next step, to which EndStep() counts up.
  // False, and nothing is noted, if there must be a Coarsen() before.
  // REQUIRES: one step at a time.
  bool BeginStep(float learning_rate);
  void EndStep();

  // Halves the number of runs before the last one: two become one with the mean
  // of their rates, by the numbers of their steps.
  void Coarsen();

  SavedSteps Save() const;
  // REQUIRES: Validate(saved) is OK.
  void Restore(const SavedSteps& saved);
  // InvalidArgument that names the error.
  static absl::Status Validate(const SavedSteps& saved);

 private:
  // With the capacity that it keeps: elements behind those that a Moment knows
  // are written while it is being read.
  static std::shared_ptr<std::vector<StepRun>> NewRuns();

  mutable Mutex mutex_;
  std::shared_ptr<std::vector<StepRun>> runs_ ABSL_GUARDED_BY(mutex_);
  size_t num_runs_ ABSL_GUARDED_BY(mutex_) = 0;
  uint32_t last_step_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace tfswitch

#endif  // TFSWITCH_CC_TABLE_STEP_LOG_H_
