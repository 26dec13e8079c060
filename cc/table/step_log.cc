#include "cc/table/step_log.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"

namespace tfswitch {

std::shared_ptr<std::vector<StepRun>> StepLog::NewRuns() {
  return std::make_shared<std::vector<StepRun>>(kMaxRuns);
}

StepLog::Moment StepLog::Now() const {
  Moment moment;
  MutexLock lock(&mutex_);
  moment.runs_ = runs_;
  moment.history_ = {runs_->data(), num_runs_, last_step_};
  return moment;
}

bool StepLog::BeginStep(float learning_rate) {
  MutexLock lock(&mutex_);
  std::vector<StepRun>& runs = *runs_;
  if (num_runs_ > 0 && runs[num_runs_ - 1].learning_rate == learning_rate) {
    return true;
  }
  if (num_runs_ == kMaxRuns) return false;
  runs[num_runs_++] = {last_step_ + 1, learning_rate};
  return true;
}

void StepLog::EndStep() {
  MutexLock lock(&mutex_);
  ++last_step_;
}

void StepLog::Coarsen() {
  MutexLock lock(&mutex_);
  std::shared_ptr<std::vector<StepRun>> coarse = NewRuns();
  size_t count = 0;
  size_t i = 0;
  for (; i + 2 < num_runs_; i += 2) {
    const StepRun& a = (*runs_)[i];
    const StepRun& b = (*runs_)[i + 1];
    const double steps_a = b.first - a.first;
    const double steps_b = (*runs_)[i + 2].first - b.first;
    const double mean = (static_cast<double>(a.learning_rate) * steps_a +
                         static_cast<double>(b.learning_rate) * steps_b) /
                        (steps_a + steps_b);
    (*coarse)[count++] = {a.first, static_cast<float>(mean)};
  }
  for (; i < num_runs_; ++i) (*coarse)[count++] = (*runs_)[i];
  runs_ = std::move(coarse);
  num_runs_ = count;
}

SavedSteps StepLog::Save() const {
  const Moment now = Now();
  const StepHistory& history = now.history();
  SavedSteps saved;
  saved.last_step = history.last_step;
  for (size_t i = 0; i < history.num_runs; ++i) {
    // The run of a step that has begun is none yet.
    if (history.runs[i].first > history.last_step) break;
    saved.runs.push_back(history.runs[i]);
  }
  return saved;
}

void StepLog::Restore(const SavedSteps& saved) {
  MutexLock lock(&mutex_);
  runs_ = NewRuns();
  std::copy(saved.runs.begin(), saved.runs.end(), runs_->begin());
  num_runs_ = saved.runs.size();
  last_step_ = saved.last_step;
}

absl::Status StepLog::Validate(const SavedSteps& saved) {
  if (saved.last_step > kMaxDenseStep) {
    return absl::InvalidArgumentError(
        absl::StrCat("last_step: expected at most ", kMaxDenseStep, ", got ",
                     saved.last_step));
  }
  if (saved.runs.size() > kMaxRuns) {
    return absl::InvalidArgumentError(absl::StrCat(
        "expected at most ", kMaxRuns, " runs, got ", saved.runs.size()));
  }
  if (saved.runs.empty() != (saved.last_step == 0)) {
    return absl::InvalidArgumentError(
        absl::StrCat(saved.runs.size(), " runs of learning rates for ",
                     saved.last_step, " steps"));
  }
  uint32_t next = 1;
  for (size_t i = 0; i < saved.runs.size(); ++i) {
    const StepRun& run = saved.runs[i];
    if ((i == 0 ? run.first != 1 : run.first < next) ||
        run.first > saved.last_step) {
      return absl::InvalidArgumentError(
          absl::StrCat("run ", i, ": expected a first step from ", next, " to ",
                       i == 0 ? 1 : saved.last_step, ", got ", run.first));
    }
    if (!std::isfinite(run.learning_rate) || run.learning_rate < 0.0f) {
      return absl::InvalidArgumentError(absl::StrCat(
          "run ", i, ": expected a finite learning rate >= 0, got ",
          run.learning_rate));
    }
    next = run.first + 1;
  }
  return absl::OkStatus();
}

}  // namespace tfswitch
