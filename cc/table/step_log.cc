#include "cc/table/step_log.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "cc/base/spin_wait.h"

namespace tfswitch {

StepLog::StepLog(const Optimizer* optimizer)
    : keeps_sums_(optimizer->moves_idle_rows()),
      sums_(optimizer),
      runs_(std::make_shared<std::vector<StepRun>>(1)) {
  MutexLock lock(&mutex_);
  SetLatest(0);
}

std::shared_ptr<const StepHistory> StepLog::Now() const {
  MutexLock lock(&mutex_);
  return at_work_.empty() ? latest_ : at_work_.front();
}

void StepLog::SetLatest(uint32_t step) {
  auto moment = std::make_shared<Moment>();
  moment->owned_runs = runs_;
  moment->sums = sums_.Now();
  moment->runs = runs_->data();
  moment->num_runs = num_runs_;
  moment->last_step = step;
  if (!moment->sums.empty()) moment->moments = moment->sums.data();
  latest_ = std::move(moment);
}

void StepLog::AddRun(const StepRun& run) {
  if (num_runs_ == runs_->size()) {
    // Others may be reading the earlier list.
    auto next = std::make_shared<std::vector<StepRun>>(
        std::min(2 * num_runs_, kMaxRuns));
    size_t count = 0;
    size_t i = 0;
    for (; num_runs_ == kMaxRuns && i < kMaxRuns / 2; i += 2) {
      const StepRun& a = (*runs_)[i];
      const StepRun& b = (*runs_)[i + 1];
      const double steps_a = b.first - a.first;
      const double steps_b = (*runs_)[i + 2].first - b.first;
      const double mean = (static_cast<double>(a.learning_rate) * steps_a +
                           static_cast<double>(b.learning_rate) * steps_b) /
                          (steps_a + steps_b);
      (*next)[count++] = {a.first, static_cast<float>(mean)};
    }
    for (; i < num_runs_; ++i) (*next)[count++] = (*runs_)[i];
    runs_ = std::move(next);
    num_runs_ = count;
  }
  (*runs_)[num_runs_++] = run;
}

std::shared_ptr<const StepHistory> StepLog::Begin(float learning_rate) {
  MutexLock lock(&mutex_);
  const uint32_t step = latest_->last_step + 1;
  if (step > kMaxDenseStep) return nullptr;
  if (num_runs_ == 0 ||
      (*runs_)[num_runs_ - 1].learning_rate != learning_rate) {
    AddRun({step, learning_rate});
  }
  if (keeps_sums_) sums_.Add(learning_rate);
  at_work_.push_back(latest_);
  SetLatest(step);
  return at_work_.back();
}

void StepLog::End(const StepHistory& before) {
  MutexLock lock(&mutex_);
  at_work_.erase(std::find_if(
      at_work_.begin(), at_work_.end(),
      [&before](const auto& moment) { return moment.get() == &before; }));
}

void StepLog::WaitForSteps() const {
  SpinWait wait;
  for (;; wait.Pause()) {
    MutexLock lock(&mutex_);
    if (at_work_.empty()) return;
  }
}

SavedSteps StepLog::Save() const {
  const std::shared_ptr<const StepHistory> now = Now();
  return {now->last_step, {now->runs, now->runs + now->num_runs}};
}

void StepLog::Restore(const SavedSteps& saved) {
  MutexLock lock(&mutex_);
  runs_ = std::make_shared<std::vector<StepRun>>(saved.runs);
  num_runs_ = saved.runs.size();
  if (runs_->empty()) runs_->resize(1);
  // Computes the sums for the last kKeptSteps steps. Sums for earlier steps are
  // computed when a row needs them.
  uint32_t step = saved.last_step;
  if (keeps_sums_) step -= std::min(step, MissedSums::kKeptSteps);
  sums_.Reset(step);
  SetLatest(saved.last_step);
  while (keeps_sums_ && step < saved.last_step) {
    sums_.Add(latest_->RunOf(++step)->learning_rate);
  }
  SetLatest(saved.last_step);
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
