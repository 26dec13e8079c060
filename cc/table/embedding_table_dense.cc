// Steps that rows have missed, of tables with dense updates.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "absl/strings/str_cat.h"
#include "cc/table/embedding_table_impl.h"

namespace tfswitch {

absl::Status EmbeddingTable::Impl::TakeStep(
    float learning_rate,
    absl::FunctionRef<absl::Status(const StepHistory*)> apply) {
  if (!is_dense()) return apply(nullptr);
  // A row takes its steps in their order. Without the lock one push could find
  // a row that had passed its step, with a gradient of zero, for the next one.
  MutexLock lock(&step_mutex_);
  if (step_log_.Now().history().last_step == kMaxDenseStep) {
    return absl::ResourceExhaustedError(absl::StrCat(
        "table '", config_.name, "' has taken ", kMaxDenseStep,
        " steps, as many as dense updates can count; export its rows, and "
        "assign them to a new table"));
  }
  if (!step_log_.BeginStep(learning_rate)) {
    CatchUpAll();
    step_log_.Coarsen();
    step_log_.BeginStep(learning_rate);
  }
  // Whatever happens: rows that were there have taken it.
  struct End {
    StepLog* log;
    ~End() { log->EndStep(); }
  } const end{&step_log_};
  const StepLog::Moment before = step_log_.Now();
  return apply(&before.history());
}

void EmbeddingTable::Impl::CatchUp(absl::Span<const Key> keys,
                                   const float* unused) const {
  if (!is_dense()) return;
  IndexView views[kNumStripes];
  uint16_t missing[kMaxKernelKeys];
  PatientSink retry(this, views);
  const StepLog::Moment now = step_log_.Now();
  StepBatch steps;
  steps.optimizer = &optimizer_;
  steps.gradients = unused;
  steps.input.history = &now.history();
  steps.input.is_gradient_step = false;
  const ChangeClock::Change change(&change_clock_);
  retry.SetSteps(&steps, change.stamp());
  for (size_t begin = 0; begin < keys.size(); begin += kMaxKernelKeys) {
    KernelBatch batch =
        MakeBatch(keys.subspan(begin, kMaxKernelKeys), views, &retry, missing);
    batch.stamp = change.stamp();
    kernels_.step(batch, steps);
  }
}

void EmbeddingTable::Impl::CatchUpAll() const {
  if (!is_dense()) return;
  const StepLog::Moment now = step_log_.Now();
  const size_t bytes = static_cast<size_t>(config_.dim) * sizeof(float);
  std::vector<float> before(static_cast<size_t>(config_.dim));
  for (Stripe& stripe : stripes_) {
    for (uint64_t begin = 0; begin < kEndOfPositions;) {
      const ChangeClock::Change change(&change_clock_);
      MutexLock lock(&stripe.mutex);
      const ChangeStamp stamp = change.stamp();
      const auto catch_up = [&](Key key, StripeIndex::Entry entry) {
        const uint32_t meta = LockBucket(entry.bucket);
        const RowPlace place = PlaceOf(stripe, entry.row());
        // The slots change in any case.
        bool has_changed = MustKeep(stripe, entry.row(), stamp);
        if (has_changed) {
          KeepRow(&stripe, key, entry.row());
        }
        const auto step = [&](const RowFloats& row) {
          memcpy(before.data(), row.embedding, bytes);
          optimizer_.CatchUp(now.history(), row.embedding, row.slots);
          has_changed |= memcmp(before.data(), row.embedding, bytes) != 0;
        };
        ModifyRow(place, RowRounding(), ChangeStamp(), step);
        if (has_changed && stamp.epoch != 0) {
          RaiseStamp(place.stamp, stamp.epoch);
        }
        UnlockBucket(entry.bucket, meta);
      };
      begin = stripe.index.VisitEntries(begin, kMaxBucketsPerVisit, catch_up);
    }
  }
}

}  // namespace tfswitch
