// Tables with dense updates: the steps that rows have missed.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "cc/table/embedding_table_impl.h"

namespace tfswitch {

absl::Status EmbeddingTable::Impl::TakeStep(
    float learning_rate,
    absl::FunctionRef<absl::Status(const StepHistory*)> apply) {
  if (!is_dense()) return apply(nullptr);
  std::shared_ptr<const StepHistory> before;
  {
    MutexLock lock(&step_mutex_);
    before = step_log_.Begin(learning_rate);
  }
  if (before == nullptr) {
    return absl::ResourceExhaustedError(absl::StrCat(
        "table '", config_.name, "' has taken ", kMaxDenseStep,
        " steps, as many as dense updates can count; export its rows, and "
        "assign them to a new table"));
  }
  // Ends the step even after an error, because some rows may have taken it.
  const absl::Cleanup end = [&] { step_log_.End(*before); };
  return apply(before.get());
}

void EmbeddingTable::Impl::GoOnAfterStepOf(absl::Span<const float> slots) {
  const auto width = static_cast<size_t>(slot_floats());
  uint32_t step = 0;
  for (size_t i = static_cast<size_t>(optimizer_.slot_floats()) - 1;
       i < slots.size(); i += width) {
    step = std::max(step, DenseStepOfSlot(&slots[i]));
  }
  step = std::min(step, kMaxDenseStep);
  // The learning rate 0 has no effect: all rows begin after these steps, so no
  // row applies them.
  if (step > 0) step_log_.Restore({step, {{1, 0.0f}}});
}

uint32_t EmbeddingTable::Impl::ReadBlock(absl::Span<const Key> block,
                                         const StepHistory& now,
                                         IndexView* views, PatientSink* retry,
                                         uint16_t* missing,
                                         float* embeddings) const {
  if (optimizer_.takes_missed_steps()) CatchUp(block, now, embeddings);
  KernelBatch batch = MakeBatch(block, views, retry, missing);
  if (!optimizer_.moves_idle_rows() || optimizer_.takes_missed_steps()) {
    return kernels_.read(batch, embeddings);
  }
  RowBuffer scratch(2 * static_cast<size_t>(codec_.num_floats()));
  batch.scratch = scratch.data();
  batch.optimizer = &optimizer_;
  batch.history = &now;
  return kernels_.read_caught_up(batch, embeddings);
}

void EmbeddingTable::Impl::CatchUp(absl::Span<const Key> keys,
                                   const StepHistory& now,
                                   const float* unused) const {
  IndexView views[kNumStripes];
  uint16_t missing[kMaxKernelKeys];
  PatientSink retry(this, views);
  StepBatch steps;
  steps.optimizer = &optimizer_;
  steps.gradients = unused;
  steps.input.history = &now;
  steps.input.is_gradient_step = false;
  const ChangeClock::Change change(&change_clock_);
  retry.SetSteps(&steps, change.stamp());
  KernelBatch batch = MakeBatch(keys, views, &retry, missing);
  batch.stamp = change.stamp();
  kernels_.step(batch, steps);
}

void EmbeddingTable::Impl::CatchUpAll() const {
  if (!optimizer_.moves_idle_rows()) return;
  const std::shared_ptr<const StepHistory> now = step_log_.Now();
  StepBatch steps;
  steps.rounding = RoundingOf(GradientBatch(), now->last_step);
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
          optimizer_.CatchUp(*now, row.embedding, row.slots);
          has_changed |= memcmp(before.data(), row.embedding, bytes) != 0;
        };
        ModifyRow(place, steps.RoundingOf(key), ChangeStamp(), step);
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
