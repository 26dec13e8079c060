// The state of a table at one moment. A row's stamp shows whether the row has
// changed since. If it has not, the snapshot reads it from the table. Otherwise
// it reads the copy that was made before the first change.

#include <algorithm>
#include <cstdint>
#include <memory>
#include <new>
#include <utility>
#include <vector>

#include "absl/memory/memory.h"
#include "cc/table/embedding_table_impl.h"

namespace tfswitch {
namespace {

// An estimate of the memory that a key takes in a set.
constexpr size_t kBytesPerNode = 48;

}  // namespace

EmbeddingTable::Impl::Snapshot::Snapshot(const Impl* table)
    : TableSnapshot(*table), impl(*table) {}

EmbeddingTable::Impl::Snapshot::~Snapshot() {
  impl.change_clock_.EndSnapshot();
  for (Stripe& stripe : impl.stripes_) {
    stripe.undo_log.Discard();
    stripe.former_candidates.Discard();
    MutexLock lock(&stripe.mutex);
    stripe.changed_candidates.clear();
  }
}

absl::Status EmbeddingTable::Impl::Snapshot::ForEachRow(
    int64_t max_rows,
    const std::function<absl::Status(const RowChunk&)>& visit) {
  return impl.ForEachRow(max_rows, visit, this);
}

absl::Status EmbeddingTable::Impl::Snapshot::ForEachCandidate(
    int64_t max_keys,
    const std::function<absl::Status(const CandidateChunk&)>& visit) {
  return impl.ForEachCandidate(max_keys, visit, /*since=*/0, this);
}

int64_t EmbeddingTable::Impl::Snapshot::kept_bytes() const {
  int64_t bytes = 0;
  for (const Stripe& stripe : impl.stripes_) {
    bytes += stripe.undo_log.bytes() + stripe.former_candidates.bytes();
  }
  return bytes;
}

// Waits until all dense steps that have begun have changed all their rows.
void EmbeddingTable::Impl::Hold() ABSL_NO_THREAD_SAFETY_ANALYSIS {
  if (is_dense()) {
    step_mutex_.Lock();
    step_log_.WaitForSteps();
  }
  change_clock_.Hold();
}

void EmbeddingTable::Impl::Release() ABSL_NO_THREAD_SAFETY_ANALYSIS {
  change_clock_.Release();
  if (is_dense()) step_mutex_.Unlock();
}

absl::StatusOr<std::unique_ptr<TableSnapshot>>
EmbeddingTable::Impl::TakeSnapshot(const ChangeCursor& since) {
  auto snapshot = std::make_unique<Snapshot>(this);
  if (bloom_ != nullptr) {
    snapshot->bloom = bloom_->Copy();
    if (snapshot->bloom == nullptr) return OutOfMemory();
  }
  snapshot->last_day = last_day();
  snapshot->steps = step_log_.Save();
  snapshot->now = Now();
  snapshot->num_rows = size();
  snapshot->is_whole = since.log_id != change_log_id_;
  for (Stripe& stripe : stripes_) {
    if (snapshot->is_whole) break;
    MutexLock lock(&stripe.mutex);
    snapshot->is_whole = !stripe.key_changes.Knows(since.epoch);
    const std::vector<Key> lost = stripe.key_changes.Since(since.epoch);
    snapshot->lost_rows.insert(snapshot->lost_rows.end(), lost.begin(),
                               lost.end());
  }
  if (snapshot->is_whole) snapshot->lost_rows.clear();
  snapshot_from_ = snapshot->is_whole ? 0 : since.epoch + 1;
  const auto num_words = static_cast<size_t>(codec_.num_words());
  for (Stripe& stripe : stripes_) {
    stripe.undo_log.Begin(
        num_words + static_cast<size_t>(statistics_.num_floats()), 0);
    stripe.former_candidates.Begin(1 + static_cast<size_t>(candidate_floats_),
                                   kBytesPerNode);
  }
  notes_losses_ = true;
  snapshot->moment = {change_log_id_, change_clock_.BeginSnapshot()};
  return snapshot;
}

void EmbeddingTable::Impl::KeepRow(Stripe* stripe, Key key,
                                   uint32_t row) const {
  const RowPlace place = PlaceOf(*stripe, row);
  if (RacyLoad(place.stamp) < snapshot_from_) return;  // A save has it.
  stripe->undo_log.Keep(key, PositionOf(key), [&](float* floats) {
    const auto num_words = static_cast<size_t>(codec_.num_words());
    RacyLoadFloats(floats, place.words, num_words);
    const auto num_counts = static_cast<size_t>(statistics_.num_floats());
    if (num_counts > 0) {
      RacyLoadFloats(floats + num_words, place.statistics, num_counts);
    }
  });
}

void EmbeddingTable::Impl::KeepCandidateLocked(Stripe* stripe, Key key,
                                               uint32_t position,
                                               ChangeStamp stamp) const {
  if (stamp.keeps_below == 0 || stripe->former_candidates.IsVisited(position)) {
    return;
  }
  try {
    if (!stripe->changed_candidates.insert(key).second) return;
  } catch (const std::bad_alloc&) {
    return stripe->former_candidates.Fail();
  }
  const float* const record = stripe->candidates.Find(key, position);
  stripe->former_candidates.Keep(key, position, [&](float* floats) {
    floats[0] = record != nullptr ? 1.0f : 0.0f;
    if (record != nullptr) {
      std::copy_n(record, candidate_floats_, floats + 1);
    }
  });
}

}  // namespace tfswitch
