// The parts of EmbeddingTable, for the files that implement it:
//
//   embedding_table.cc             reading, stepping and setting rows
//   embedding_table_admission.cc   keys that wait for a row
//   embedding_table_changes.cc     changes since a cursor
//   embedding_table_cold.cc        rows on disk
//   embedding_table_dense.cc       steps that rows have missed
//   embedding_table_shrink.cc      eviction, and giving memory back
//   embedding_table_snapshot.cc    the table as it was at one moment

#ifndef TFSWITCH_CC_TABLE_EMBEDDING_TABLE_IMPL_H_
#define TFSWITCH_CC_TABLE_EMBEDDING_TABLE_IMPL_H_

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <thread>
#include <unordered_set>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/inlined_vector.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "cc/base/keyed_hash.h"
#include "cc/base/memory_region.h"
#include "cc/base/mutex.h"
#include "cc/base/racy_memory.h"
#include "cc/base/spin_wait.h"
#include "cc/base/status_macros.h"
#include "cc/optimizer/optimizer.h"
#include "cc/table/batch_kernels.h"
#include "cc/table/candidates.h"
#include "cc/table/change_log.h"
#include "cc/table/cold_tier.h"
#include "cc/table/embedding_table.h"
#include "cc/table/initializer.h"
#include "cc/table/row_codec.h"
#include "cc/table/row_store.h"
#include "cc/table/row_undo_log.h"
#include "cc/table/stripe_index.h"

namespace tfswitch {

// While a stripe is locked, the data of a key is prefetched this many keys
// before it is used.
inline constexpr uint32_t kLockedDistance = 12;

// How many rows are made before their keys are inserted into the index.
inline constexpr size_t kInsertBlock = 32;
// After a block of a batch in which many keys had no row, the next ones have
// this size: so many rows and buckets stay in the second-level cache.
inline constexpr size_t kInsertingBlock = 2048;

// The most buckets that ForEachRow visits at a time. It limits how long a
// stripe is locked.
inline constexpr uint64_t kMaxBucketsPerVisit = 1024;

// Above all stamps.
inline constexpr uint32_t kAnyStamp = std::numeric_limits<uint32_t>::max();

// A row of one table. It is on the stack unless it is long.
using RowBuffer = absl::InlinedVector<float, 256>;

// Inlined, because a call of memcpy() would take longer than the copy.
inline void RacyCopyRow(const float* from, size_t count, float* to) {
  size_t i = 0;
  for (; i + 8 <= count; i += 8) RacyStoreFloats(to + i, from + i, 8);
  for (; i < count; ++i) RacyStore(to + i, from[i]);
}

struct Stripe {
  Mutex mutex;
  // The mutex guards the members that are thread-compatible. There is no
  // GUARDED_BY, because readers follow the rules of bucket.h instead.
  StripeIndex index;
  RowStore rows;
  // Written under the mutex and read by any thread. A thread that reads a count
  // here also sees the counted rows.
  std::atomic<int64_t> inserted_rows{0};
  std::atomic<int64_t> erased_rows{0};
  // Counts moves of rows between memory and disk, and between files. Changes
  // before a row is missing in the place that it leaves.
  std::atomic<uint32_t> num_moves{0};
  // If the admission policy needs no records, this is unused and takes no
  // memory.
  Candidates candidates;
  // Guarded by the mutex.
  KeyChanges key_changes;
  // For a snapshot, guarded by the mutex. changed_candidates has the
  // candidates' keys that have changed since it was taken. former_candidates
  // has their former records, each with a flag that is 0 if the key was not a
  // candidate.
  RowUndoLog undo_log;
  RowUndoLog former_candidates;
  std::unordered_set<Key> changed_candidates;

  void CountInserted() {
    inserted_rows.store(inserted_rows.load(std::memory_order_relaxed) + 1,
                        std::memory_order_release);
  }
  void CountErased() {
    erased_rows.store(erased_rows.load(std::memory_order_relaxed) + 1,
                      std::memory_order_release);
  }
};

inline ColdPlace ColdPlaceOfHash(uint64_t hash) {
  return uint64_t{StripeOfHash(hash)} << 32 | PositionOfHash(hash);
}

// A key and its place in the table. The mutex of its stripe must be held.
struct KeyPlace {
  bool has_row() const { return entry.bucket != nullptr; }

  Stripe* stripe;
  Key key;
  uint32_t position;
  StripeIndex::Entry entry;
};

// The indices of a block of keys, grouped by stripe. Within a stripe they are
// in the order of the batch.
class StripeGroups {
 public:
  // Uses the indices in `chosen`, or all if it is null. hash(key) determines
  // the stripe.
  template <typename Hash>
  StripeGroups(const Hash& hash, const Key* keys, uint32_t num_keys,
               const uint16_t* chosen) {
    uint32_t counts[kNumStripes] = {};
    for (uint32_t i = 0; i < num_keys; ++i) {
      ++counts[StripeOfHash(hash(keys[chosen ? chosen[i] : i]))];
    }
    begins_[0] = 0;
    uint32_t ends[kNumStripes];
    for (int s = 0; s < kNumStripes; ++s) {
      ends[s] = begins_[s];
      begins_[s + 1] = begins_[s] + counts[s];
    }
    for (uint32_t i = 0; i < num_keys; ++i) {
      const uint32_t position = chosen ? chosen[i] : i;
      positions_[ends[StripeOfHash(hash(keys[position]))]++] =
          static_cast<uint16_t>(position);
    }
  }

  size_t size() const { return begins_[kNumStripes]; }

  absl::Span<const uint16_t> operator[](int stripe) const {
    return {positions_ + begins_[stripe],
            begins_[stripe + 1] - begins_[stripe]};
  }

 private:
  uint32_t begins_[kNumStripes + 1];
  uint16_t positions_[kMaxKernelKeys];
};

class EmbeddingTable::Impl final : public EmbeddingTable {
 public:
  static absl::StatusOr<std::unique_ptr<Impl>> Create(const TableConfig& config,
                                                      const KeyedHash& hash);

  absl::StatusOr<int64_t> Find(absl::Span<const Key> keys,
                               absl::Span<float> embeddings) const override {
    return Read(keys, /*marks=*/false, /*marks_cold=*/false, embeddings);
  }
  absl::StatusOr<int64_t> FindAndMark(absl::Span<const Key> keys,
                                      absl::Span<float> embeddings,
                                      bool marks_cold) const override {
    return Read(keys, /*marks=*/config_.admission.is_always(), marks_cold,
                embeddings);
  }
  absl::StatusOr<int64_t> FindOrInsert(absl::Span<const Key> keys,
                                       absl::Span<float> embeddings) override;
  void NoteDay(float day) override;
  float last_day() const override {
    return last_day_.load(std::memory_order_relaxed);
  }
  KeysByKind FindNewKeys(const GradientBatch& batch) const override;
  absl::StatusOr<int64_t> ApplyGradients(const GradientBatch& batch) override;
  absl::Status TakeStep(
      float learning_rate,
      absl::FunctionRef<absl::Status(const StepHistory*)> apply) override;
  absl::Status RestoreSteps(const SavedSteps& saved) override;
  absl::StatusOr<int64_t> AssignRows(const RowChunk& rows,
                                     AssignMode mode) override;
  void Reserve(uint64_t num_rows) override;
  absl::StatusOr<int64_t> Erase(absl::Span<const Key> keys) override;
  absl::StatusOr<ShrinkReport> Shrink(const EvictionConfig& rules, float day,
                                      bool dry_run) override;
  KeysByKind ChooseLeastUsed(int64_t num_rows, int64_t num_candidates,
                             absl::Span<const Key> kept) override;
  void SetColdFolder(
      std::shared_ptr<ColdFolder> folder,
      std::function<absl::Status(EmbeddingTable&)> make_room) override;
  void ReleaseFreeRows() override;
  std::vector<Key> FindColdKeys(absl::Span<const Key> keys) const override;
  absl::Status Promote(absl::Span<const Key> keys) override;
  absl::StatusOr<int64_t> Demote(int64_t num_rows,
                                 absl::Span<const Key> kept) override;
  absl::Status ReadUsage(absl::Span<const Key> keys, float day,
                         absl::Span<UsageOfRow> usage,
                         absl::Span<KeyState> states) const override;
  absl::Status ReadRows(
      absl::Span<const Key> keys,
      const std::function<absl::Status(const RowChunk&)>& visit) const override;
  absl::Status ForEachCandidate(
      int64_t max_keys,
      const std::function<absl::Status(const CandidateChunk&)>& visit)
      const override {
    return ForEachCandidate(max_keys, visit, /*since=*/0,
                            /*snapshot=*/nullptr);
  }
  absl::Status AssignCandidates(absl::Span<const Key> keys,
                                absl::Span<const float> records) override;
  CountingBloom* bloom() const override { return bloom_.get(); }
  absl::Status ForEachRow(int64_t max_rows,
                          const std::function<absl::Status(const RowChunk&)>&
                              visit) const override {
    return ForEachRow(max_rows, visit, /*snapshot=*/nullptr);
  }
  absl::StatusOr<ChangeCursor> ForEachChange(
      const ChangeFilter& filter, int64_t max_keys,
      const std::function<absl::Status(const ChangeChunk&)>& visit) override;
  ChangeCursor EndEpoch() override {
    notes_losses_ = true;
    return {change_log_id_, change_clock_.EndEpoch()};
  }
  void Hold() override;
  void Release() override;
  absl::StatusOr<std::unique_ptr<TableSnapshot>> TakeSnapshot(
      const ChangeCursor& since) override;
  absl::Status SubtractDeltaScores(absl::Span<const Key> keys,
                                   absl::Span<const float> scores) override;
  int64_t size() const override;
  int64_t SizeAtMost() const override;
  TableStats stats() const override;
  int slot_floats() const override { return row_floats() - dim(); }
  size_t bytes_per_row() const override {
    return stride_ + statistics_stride_ + kMaxIndexBytesPerKey +
           (ranks_uses() ? sizeof(uint32_t) : 0);
  }
  size_t bytes_per_candidate() const override {
    return candidate_floats_ == 0
               ? 0
               : RowStride(candidate_floats_) + kMaxIndexBytesPerKey;
  }

 private:
  // Does the kernels' work for single keys, and waits for locks.
  class PatientSink;
  class Snapshot;
  class Cold;
  class RowGatherer;
  class ChangeVisit;
  class ShrinkRules;

  Impl(const TableConfig& config, const KeyedHash& hash,
       MemoryReservation reservation);

  bool Init();
  bool InitCandidates();

  // InvalidArgument unless `got` floats are num_keys x width.
  absl::Status CheckFloats(const char* what, size_t num_keys,
                           const char* width_name, int width, size_t got) const;

  // Embedding, slots and statistics.
  int row_floats() const {
    return codec_.num_floats() + statistics_.num_floats();
  }

  // Visits the current rows, or those of `snapshot`.
  absl::Status ForEachRow(
      int64_t max_rows,
      const std::function<absl::Status(const RowChunk&)>& visit,
      const Snapshot* snapshot) const;
  // Visits the current candidates, or those of `snapshot`. If `since` is not 0,
  // visits only those whose value has changed after that epoch; only candidates
  // with weights change their value.
  absl::Status ForEachCandidate(
      int64_t max_keys,
      const std::function<absl::Status(const CandidateChunk&)>& visit,
      uint32_t since, const Snapshot* snapshot) const;

  uint32_t PositionOf(Key key) const { return PositionOfHash(hash_(key)); }

  KernelBatch MakeBatch(absl::Span<const Key> block, IndexView* views,
                        PatientSink* retry, uint16_t* missing) const;

  // REQUIRES: the stripe's mutex is held.
  KeyPlace PlaceOfKey(Stripe* stripe, Key key) const {
    const uint32_t position = PositionOf(key);
    return {stripe, key, position, stripe->index.Find(key, position)};
  }
  // Calls work(stripe, group), which returns a Status, for each group that is
  // not empty, under the mutex of its stripe.
  template <typename Work>
  absl::Status ForEachStripe(const StripeGroups& groups,
                             const Work& work) const;
  // Calls work(place, i), which returns a Status, for each index i of the
  // groups under the mutex of its stripe, and prefetches the places of later
  // keys.
  template <typename Work>
  absl::Status ForEachLocked(const Key* keys, const StripeGroups& groups,
                             const Work& work) const;
  // The same for all keys.
  template <typename Work>
  absl::Status ForEachLocked(absl::Span<const Key> keys,
                             const Work& work) const;

  // Whether the table must know which rows were used later than others.
  bool ranks_uses() const {
    return config_.evicts_when_full() || config_.demotes_when_full();
  }

  bool is_dense() const { return config_.optimizer.is_dense; }
  // All steps that the table has taken; empty if a step without a gradient for
  // a row does not change the row.
  std::shared_ptr<const StepHistory> Now() const {
    static constexpr StepHistory kNoSteps;
    // The pointer owns nothing, so it has no reference count. All lookups would
    // have to write such a count.
    return optimizer_.moves_idle_rows()
               ? step_log_.Now()
               : std::shared_ptr<const StepHistory>(std::shared_ptr<void>(),
                                                    &kNoSteps);
  }
  // Makes an empty table continue after the last step that these slots contain.
  // Rows of new ids then begin with that step, as in the table from which the
  // slots come.
  void GoOnAfterStepOf(absl::Span<const float> slots);
  // Reads the rows of a block as if they had taken all steps of the table. The
  // rows in the table change only if missed steps must be taken one by one.
  uint32_t ReadBlock(absl::Span<const Key> block, const StepHistory& now,
                     IndexView* views, PatientSink* retry, uint16_t* missing,
                     float* embeddings) const;
  // With dense updates, these bring the rows of `keys`, or all rows, up to
  // date. `unused` is any memory of that many embeddings.
  void CatchUp(absl::Span<const Key> keys, const StepHistory& now,
               const float* unused) const;
  void CatchUpAll() const;

  // The slots and statistics of rows that are inserted on `day` and are up to
  // date with step `step`. They are the same for all rows of a call.
  RowBuffer InitialState(float day, uint32_t step) const;

  // Calls modify(place, i) for each key of the groups that has a row by now.
  // Gives the others a row with the initial embedding and `state`, and calls
  // complete(place, row place, initial embedding, i) before other threads can
  // see the row. For a key that is there twice, may call both. The mutex of the
  // key's stripe is held meanwhile.
  template <typename Modify, typename Complete>
  absl::Status ModifyOrInsert(const Key* keys, const StripeGroups& groups,
                              const RowBuffer& state,
                              const ChangeClock::Change& change,
                              const Modify& modify, const Complete& complete);
  // Rows that are made before their keys are inserted into the index.
  struct InsertBlock {
    InsertBlock(size_t num_keys, size_t dim)
        : embeddings(std::min(num_keys, kInsertBlock) * dim) {}

    struct NewRow {
      KeyPlace place;
      uint32_t i;
      uint32_t row;
    };
    Key keys[kInsertBlock];
    NewRow rows[kInsertBlock];
    // The initial embeddings.
    absl::InlinedVector<float, kInsertBlock * 16> embeddings;
  };
  // Does this for the keys of one stripe. REQUIRES: its mutex is held.
  template <typename Modify, typename Complete>
  absl::Status InsertGroup(Stripe* stripe, const Key* keys,
                           absl::Span<const uint16_t> group,
                           const RowBuffer& state, ChangeStamp stamp,
                           const Modify& modify, const Complete& complete,
                           InsertBlock* block);

  // Inserts a row for an absent key, with the initial embedding and `state`.
  // Calls fill(row floats) before other threads can see the row.
  template <typename Fill>
  absl::Status InsertLocked(const KeyPlace& place, const RowBuffer& state,
                            const RowRounding& rounding, ChangeStamp stamp,
                            const Fill& fill);

  // Calls modify(row floats) on an existing row while its bucket is locked.
  template <typename Modify>
  void ModifyLocked(const KeyPlace& place, const RowRounding& rounding,
                    ChangeStamp stamp, const Modify& modify);

  // Where a row is in memory. Other threads may be reading the row.
  struct RowPlace {
    float* words = nullptr;
    float* statistics = nullptr;  // Null if rows have none.
    uint32_t* stamp = nullptr;
  };
  // Writes the initial embedding and `state` to a new row.
  void InitRow(const float* embedding, const RowBuffer& state,
               ChangeStamp stamp, const RowPlace& to) const;
  RowPlace PlaceOf(const Stripe& stripe, uint32_t row) const {
    return {stripe.rows.At(row), stripe.rows.StatisticsAt(row),
            stripe.rows.stamps() + row};
  }

  // Calls modify(row floats) on a row that no other thread is writing, and
  // stamps the row.
  template <typename Modify>
  void ModifyRow(const RowPlace& place, const RowRounding& rounding,
                 ChangeStamp stamp, const Modify& modify) const;

  // Whether a snapshot exists and the row has not changed since it was taken.
  // If so, call KeepRow() before the row changes. The row's bucket must be
  // locked.
  bool MustKeep(const Stripe& stripe, uint32_t row, ChangeStamp stamp) const {
    return RacyLoad(stripe.rows.stamps() + row) < stamp.keeps_below;
  }
  // REQUIRES: MustKeep().
  void KeepRow(Stripe* stripe, Key key, uint32_t row) const;
  // Copies the record of a key for the snapshot, or notes that the key has
  // none. REQUIRES: the stripe's mutex is held.
  void KeepCandidateLocked(Stripe* stripe, Key key, uint32_t position,
                           ChangeStamp stamp) const;

  // Calls load(place), and calls it again if another thread has changed the row
  // meanwhile. REQUIRES: the stripe's mutex is held.
  template <typename Load>
  void LoadLocked(Stripe* stripe, StripeIndex::Entry entry,
                  const Load& load) const;
  // Copies row_floats() floats of the row. If `limit` is not kAnyStamp and the
  // row's stamp is not below it, copies nothing and returns false.
  bool CopyRowLocked(Stripe* stripe, StripeIndex::Entry entry, uint32_t limit,
                     float* row) const;
  // These copy a part of a row. The embedding includes all steps of `now`.
  void CopyEmbeddingLocked(Stripe* stripe, StripeIndex::Entry entry,
                           const StepHistory& now, float* embedding) const;
  void CopyStatisticsLocked(Stripe* stripe, StripeIndex::Entry entry,
                            float* row_statistics) const;
  // Copies the embedding as it is after all steps of `now`. Another thread may
  // be writing the row meanwhile; the caller must check for that afterwards.
  void RacyLoadEmbedding(const float* words, const StepHistory& now,
                         float* embedding) const;

  // Removes the record of a key without a row.
  void ForgetLocked(const KeyPlace& place, ChangeStamp stamp) {
    if (!config_.admission.has_candidates()) return;
    KeepCandidateLocked(place.stripe, place.key, place.position, stamp);
    Candidates& candidates = place.stripe->candidates;
    if (has_weights() &&
        candidates.Find(place.key, place.position) != nullptr) {
      NoteLossLocked(place.stripe, place.key, stamp);
    }
    candidates.Erase(place.key, place.position);
  }
  // Records that a key loses its row or its record. A list of these keys is
  // needed, because nothing else is left that could have a stamp. Call it
  // before the loss, because later there may be no memory for this. REQUIRES:
  // the stripe's mutex is held.
  void NoteLossLocked(Stripe* stripe, Key key, ChangeStamp stamp) const {
    if (stamp.epoch != 0 && notes_losses_) {
      stripe->key_changes.Add(key, stamp.epoch);
    }
  }
  // Stamps a candidate whose value changes. REQUIRES: the stripe's mutex is
  // held.
  void StampCandidateLocked(Stripe* stripe, const float* record,
                            ChangeStamp stamp) const {
    if (stamp.epoch != 0 && has_weights()) {
      stripe->candidates.StampOf(record) = stamp.epoch;
    }
  }

  // Removes a present row.
  void EraseLocked(const KeyPlace& place, ChangeStamp stamp);

  // Records gradient i of a push for its key, which is or becomes a candidate.
  // If the admission policy admits the key now, inserts its row, with `state`,
  // and takes the step. Returns whether it did.
  absl::StatusOr<bool> AdmitCandidateLocked(const KeyPlace& place,
                                            const RowBuffer& state,
                                            const StepBatch& batch, uint32_t i,
                                            ChangeStamp stamp);
  // Whether a candidate must get its row.
  bool IsAdmitted(const float* record, float day) const;

  // Find() and FindAndMark().
  absl::StatusOr<int64_t> Read(absl::Span<const Key> keys, bool marks,
                               bool marks_cold,
                               absl::Span<float> embeddings) const;

  // How many rows have ever been inserted into each stripe.
  using InsertedRows = std::array<int64_t, kNumStripes>;
  InsertedRows ReadInsertedRows() const;

  // Writes the values that lookups give for keys without a row. The caller
  // reads `before` before it searches for the keys.
  void FillMissing(absl::Span<const Key> block, const StepHistory& now,
                   const uint16_t* missing, uint32_t num_missing,
                   const InsertedRows& before, float* embeddings) const;

  // Calls visit(key, embedding, statistics) for each row while the stripe's
  // mutex is held. Erases the row if visit() returns true. Without
  // `with_embeddings`, visit() gets null as the embedding.
  absl::Status SiftRows(
      bool with_embeddings,
      const std::function<bool(Key, const float*, const float*)>& visit);
  // The same for rows on disk, without the mutex.
  absl::Status SiftCold(
      const ColdRange& range, bool with_embeddings,
      const std::function<bool(Key, const float*, const float*)>& visit);
  // The same for the candidates.
  void SiftCandidates(const std::function<bool(const float*)>& visit);
  // Where the next sample begins: the first stripe, and a position in each.
  struct SampleHand {
    int stripe = 0;
    std::array<uint64_t, kNumStripes> positions = {};
  };
  // Counts rows that are about to be used, and ends an epoch at times, so that
  // ChooseLeastUsed() knows which rows were used later than others. The calling
  // thread must not be inside a Change.
  void NoteUses(size_t num_rows);
  void EndUseEpoch();
  // Visits a random sample of at least `num_entries` of the rows, or of the
  // candidates, or all of them. visit(stripe, begin) visits a part of a stripe
  // from a position on, and returns the end of the part and how many entries it
  // had.
  void VisitSample(int64_t num_entries, SampleHand* hand,
                   absl::FunctionRef<std::pair<uint64_t, int64_t>(
                       Stripe* stripe, uint64_t begin)>
                       visit);
  // Moves a stripe's rows to the lowest row numbers, and gives memory back, if
  // one in `min_share` rows is free.
  void Compact(Stripe* stripe, uint64_t min_share);

  // Whether rows may be on disk.
  bool has_cold_rows() const;
  // Where the stripes' counters of moves stood at some time.
  using Moves = std::array<uint32_t, kNumStripes>;
  Moves ReadMoves() const;
  // Copies a row as a record for a segment. REQUIRES: the stripe's mutex is
  // held.
  void CopyRecordLocked(Stripe* stripe, Key key, StripeIndex::Entry entry,
                        char* record) const;
  // Writes the record's row_floats() floats.
  void DecodeRecord(const char* record, float* row) const;
  // Moves a row to memory. REQUIRES: the record is live, and the stripe's mutex
  // is held.
  absl::Status ReviveLocked(const KeyPlace& place, const ColdHit& hit,
                            ChangeStamp stamp);
  // Moves the rows of the chosen keys of a block to memory, where they stay
  // until `change` ends. Adds the keys that have a row now to `present`.
  absl::Status Revive(absl::Span<const Key> block,
                      absl::Span<const uint16_t> chosen,
                      const ChangeClock::Change& change,
                      std::vector<uint16_t>* present);
  // The same for all keys of a block that have no row in memory.
  absl::Status ReviveAbsent(absl::Span<const Key> block,
                            const ChangeClock::Change& change);
  // The keys of a block that have no row in memory.
  std::vector<uint16_t> FindAbsent(absl::Span<const Key> block) const;
  // Looks for rows of keys that an earlier search, after ReadMoves() had given
  // `before`, did not find in memory. Calls one of the functions for each row
  // that it finds: read_record(i, record), or read_place(i, place) under the
  // mutex of the stripe. Removes these keys from `absent`.
  absl::Status ReadCold(
      absl::Span<const Key> block, Moves before,
      absl::FunctionRef<void(size_t, const char*)> read_record,
      absl::FunctionRef<void(size_t, const KeyPlace&)> read_place,
      std::vector<uint16_t>* absent) const;
  absl::Status ReadColdEmbeddings(absl::Span<const Key> block,
                                  const StepHistory& now, const Moves& before,
                                  uint16_t* missing, uint32_t* num_missing,
                                  float* embeddings) const;
  // Calls visit() for the records of a range.
  absl::Status VisitCold(
      const ColdRange& range,
      absl::FunctionRef<absl::Status(const ColdHit& hit)> visit) const;
  // Notes which rows of a stripe at positions [begin, end) are on disk, except
  // in segments whose stamps are all below `min_stamp`. REQUIRES: the stripe's
  // mutex is held.
  ColdRange CollectCold(int stripe, uint64_t begin, uint64_t end,
                        uint32_t min_stamp) const;
  // Chooses rows in memory, but none of `kept`, which is sorted: rows of those
  // that changed longest ago.
  std::vector<Key> ChooseLongestUnused(int64_t num_rows,
                                       absl::Span<const Key> kept);
  // Moves rows from the sources of a merge to its target.
  void MoveMerged(ColdMerge* merge);

  bool has_weights() const {
    return config_.admission.not_admitted.kind == NotAdmittedKind::kWeight;
  }
  // How the steps of a push are rounded; `number` is the number of the push.
  RowRounding RoundingOf(const GradientBatch& batch, uint64_t number) const;
  // Counts the missing keys of a push by the admission policy, unless it has
  // candidates. Moves the indices of the keys that it admits to the front of
  // `missing`, and returns their number.
  uint32_t AdmitMissing(absl::Span<const Key> block, const StepBatch& batch,
                        uint16_t* missing, uint32_t num_missing);
  uint32_t AdmitByBloom(absl::Span<const Key> block, const StepBatch& batch,
                        uint16_t* missing, uint32_t num_missing);

  // The day of a call; if the call gives none (`day` < 0), the server's day.
  float DayOf(float day) const { return day < 0.0f ? Today() : day; }
  float Today() const;

  absl::Status OutOfMemory() const;

  const Optimizer optimizer_;
  const RowStatistics statistics_;
  const RowCodec codec_;
  StepLog step_log_;  // Stays empty unless there are dense updates.
  std::unique_ptr<CountingBloom> bloom_;  // Constant after Create().
  const KeyedHash hash_;
  const Initializer initializer_;
  const size_t stride_;
  const size_t statistics_stride_;
  // Constant after Create().
  std::array<char*, kNumStripes> statistics_data_;
  std::array<uint32_t*, kNumStripes> stamps_;
  const BatchKernels kernels_;
  // Declared before the stripes, which use its memory until they are destroyed.
  const MemoryReservation reservation_;
  const RowStatistics candidate_statistics_;
  // The optimizer for the weights of candidates, which is that of the row's
  // first segment. Empty unless not_admitted is kWeight.
  //
  // Constant after construction.
  std::optional<Optimizer> weight_optimizer_;
  // A candidate's record: | statistics | weight | slots of the weight |
  const int candidate_floats_;
  // Constant after construction.
  std::vector<float> missing_row_;
  // Constant after Create().
  MemoryReservation candidate_reservation_;
  // The last day that a call has given.
  std::atomic<float> last_day_{kServersDay};
  // Numbers pushes, for random draws.
  std::atomic<uint64_t> num_pushes_{0};
  // HashKey() of a key selects the mutex that a thread must hold to count it.
  std::array<Mutex, kNumStripes> bloom_mutexes_;
  // One shrink, or one choice of the least used rows, at a time.
  Mutex shrink_mutex_;
  SampleHand row_hand_ ABSL_GUARDED_BY(shrink_mutex_);
  SampleHand candidate_hand_ ABSL_GUARDED_BY(shrink_mutex_);
  // The epoch of the last call of ChooseLeastUsed().
  uint32_t last_choice_epoch_ ABSL_GUARDED_BY(shrink_mutex_) = 0;
  // The number of uses in this epoch.
  std::atomic<size_t> num_uses_{0};
  // When NoteUses() last ended an epoch, in seconds.
  std::atomic<int64_t> last_use_end_{0};
  // Held by a thread that begins a step, or that prevents new steps.
  Mutex step_mutex_;
  // The mutable members change even in reads: these lock stripes and, with
  // dense updates, may bring rows up to date.
  mutable ChangeClock change_clock_;
  const uint64_t change_log_id_;
  // Whether a reader may ask which keys have lost their rows. Set before the
  // epoch ends from which on the reader wants to know.
  std::atomic<bool> notes_losses_{false};
  // The lowest stamp of the rows that a snapshot visits. Changes only when
  // there is no snapshot.
  std::atomic<uint32_t> snapshot_from_{0};
  mutable std::array<Stripe, kNumStripes> stripes_;
  // Null if the table has no rows on disk. Constant after SetColdFolder().
  // Declared last, because its thread uses the other members.
  std::unique_ptr<Cold> cold_;
};

// The rows on disk, and a thread that merges their files.
//
// Thread-safe.
class EmbeddingTable::Impl::Cold {
 public:
  Cold(Impl* table, std::shared_ptr<ColdFolder> folder,
       std::function<absl::Status(EmbeddingTable&)> its_make_room);
  ~Cold();

  // Wakes the thread. With `compacts`, it also calls Compact() for all stripes.
  void StartMerge(bool compacts = false);
  void WaitForMerges();
  // Notes that a row has been moved to memory.
  void NoteUsed(Key key);
  // The rows that were moved to memory since the last call but one.
  std::vector<Key> EndTurn();

  ColdTier tier;
  const std::function<absl::Status(EmbeddingTable&)> make_room;
  std::atomic<int64_t> num_rows{0};
  Mutex demote_mutex;  // One demotion at a time.

 private:
  // The thread.
  void Merge();
  // Merges until there is nothing to do.
  absl::Status MergeAll(bool compacts);

  Impl& table_;
  std::atomic<bool> stops_{false};
  bool has_told_ = false;  // Used by the thread only.
  Mutex merge_mutex_;
  CondVar changed_;
  bool must_merge_ ABSL_GUARDED_BY(merge_mutex_) = false;
  bool must_compact_ ABSL_GUARDED_BY(merge_mutex_) = false;
  bool is_merging_ ABSL_GUARDED_BY(merge_mutex_) = false;
  Mutex used_mutex_;
  std::vector<Key> used_ ABSL_GUARDED_BY(used_mutex_);
  std::vector<Key> used_before_ ABSL_GUARDED_BY(used_mutex_);
  std::thread merger_;
};

inline bool EmbeddingTable::Impl::has_cold_rows() const {
  return cold_ != nullptr && !cold_->tier.segments()->empty();
}

class EmbeddingTable::Impl::Snapshot final : public TableSnapshot {
 public:
  explicit Snapshot(const Impl* table);
  ~Snapshot() override;

  absl::Status ForEachRow(
      int64_t max_rows,
      const std::function<absl::Status(const RowChunk&)>& visit) override;
  absl::Status ForEachCandidate(
      int64_t max_keys,
      const std::function<absl::Status(const CandidateChunk&)>& visit) override;
  int64_t kept_bytes() const override;

  const Impl& impl;
  std::shared_ptr<const StepHistory> now;
};

class EmbeddingTable::Impl::PatientSink final : public RetrySink {
 public:
  // Read() gives rows as they are after all steps of `now`.
  PatientSink(const Impl* table, IndexView* views,
              const StepHistory& now = StepHistory())
      : table_(table), views_(views), now_(now) {}

  // Sets the steps for Step(). They must outlive this object.
  void SetSteps(const StepBatch* steps, ChangeStamp stamp) {
    steps_ = steps;
    stamp_ = stamp;
  }

  const uint32_t& num_refreshes() const { return num_refreshes_; }

  void Keep(Key key, uint32_t row) override {
    table_->KeepRow(&table_->stripes_[StripeOfHash(table_->hash_(key))], key,
                    row);
  }

  bool Read(Key key, float* embedding) override {
    return Retry(key, [&](Bucket* bucket, uint32_t meta, int, float* row) {
      table_->RacyLoadEmbedding(row, now_, embedding);
      return IsUnchanged(bucket, meta);
    });
  }

  bool Has(Key key) {
    return Retry(key, [](Bucket* bucket, uint32_t meta, int, float*) {
      return IsUnchanged(bucket, meta);
    });
  }

  bool Step(Key key, uint32_t i) override {
    return Retry(key, [&](Bucket* bucket, uint32_t meta, int entry, float*) {
      if (!TryLockBucket(bucket, meta)) return false;
      const bool is_ours = RacyLoad(&bucket->keys[entry]) == key;
      if (is_ours) {
        const Stripe& stripe =
            table_->stripes_[StripeOfHash(table_->hash_(key))];
        const uint32_t number = RacyLoad(&bucket->rows[entry]);
        if (table_->MustKeep(stripe, number, stamp_)) Keep(key, number);
        table_->ModifyRow(table_->PlaceOf(stripe, number),
                          steps_->RoundingOf(key), stamp_,
                          [&](const RowFloats& floats) {
                            steps_->StepAndObserve(table_->dim(), floats, i);
                          });
      }
      UnlockBucket(bucket, meta);
      return is_ours;
    });
  }

 private:
  // Searches until use(bucket, meta, entry, row) returns true, or it is certain
  // that the key is absent. Also refreshes the view of the stripe for later
  // keys.
  template <typename Use>
  bool Retry(Key key, const Use& use) {
    const uint64_t hash = table_->hash_(key);
    const uint32_t stripe = StripeOfHash(hash);
    IndexView& view = views_[stripe];
    SpinWait wait;
    for (;; wait.Pause()) {
      view = table_->stripes_[stripe].index.View();
      ++num_refreshes_;
      Bucket* bucket = HomeBucket(view, PositionOfHash(hash));
      for (;; ++bucket) {
        const uint32_t meta = LoadMeta(bucket);
        if (!IsReadable(meta)) break;
        const int entry = FindEntry(bucket, meta, key);
        if (entry >= 0) {
          float* const row = reinterpret_cast<float*>(
              view.rows + RacyLoad(&bucket->rows[entry]) * table_->stride_);
          if (use(bucket, meta, entry, row)) return true;
          break;
        }
        if (!IsUnchanged(bucket, meta)) break;
        if (!HasOverflow(meta)) {
          if (IsPhase(view, view.phase)) return false;
          break;
        }
      }
    }
  }

  static int FindEntry(const Bucket* bucket, uint32_t meta, Key key) {
    for (int i = 0; i < static_cast<int>(UsedOf(meta)); ++i) {
      if (RacyLoad(&bucket->keys[i]) == key) return i;
    }
    return -1;
  }

  const Impl* const table_;
  IndexView* const views_;
  const StepHistory now_;
  uint32_t num_refreshes_ = 0;
  const StepBatch* steps_ = nullptr;
  ChangeStamp stamp_;
};

template <typename Work>
absl::Status EmbeddingTable::Impl::ForEachStripe(const StripeGroups& groups,
                                                 const Work& work) const {
  // Takes the stripes first that no other thread has locked, because threads
  // that work on parts of one batch would wait for each other at every stripe.
  absl::InlinedVector<int, kNumStripes> locked;
  for (int s = 0; s < kNumStripes; ++s) {
    if (groups[s].empty()) continue;
    if (!stripes_[s].mutex.TryLock()) {
      locked.push_back(s);
      continue;
    }
    const MutexLock lock(&stripes_[s].mutex, MutexLock::AlreadyLocked());
    TFSWITCH_RETURN_IF_ERROR(work(&stripes_[s], groups[s]));
  }
  for (const int s : locked) {
    MutexLock lock(&stripes_[s].mutex);
    TFSWITCH_RETURN_IF_ERROR(work(&stripes_[s], groups[s]));
  }
  return absl::OkStatus();
}

template <typename Work>
absl::Status EmbeddingTable::Impl::ForEachLocked(const Key* keys,
                                                 const StripeGroups& groups,
                                                 const Work& work) const {
  return ForEachStripe(
      groups,
      [&](Stripe* stripe, absl::Span<const uint16_t> group) -> absl::Status {
        const auto prefetch = [&](size_t i) {
          if (i >= group.size()) return;
          __builtin_prefetch(stripe->index.Home(PositionOf(keys[group[i]])));
        };
        for (size_t i = 0; i < kLockedDistance; ++i) prefetch(i);
        for (size_t i = 0; i < group.size(); ++i) {
          prefetch(i + kLockedDistance);
          TFSWITCH_RETURN_IF_ERROR(
              work(PlaceOfKey(stripe, keys[group[i]]), uint32_t{group[i]}));
        }
        return absl::OkStatus();
      });
}

template <typename Modify, typename Complete>
absl::Status EmbeddingTable::Impl::ModifyOrInsert(
    const Key* keys, const StripeGroups& groups, const RowBuffer& state,
    const ChangeClock::Change& change, const Modify& modify,
    const Complete& complete) {
  InsertBlock block(groups.size(), static_cast<size_t>(config_.dim));
  return ForEachStripe(
      groups, [&](Stripe* stripe, absl::Span<const uint16_t> group) {
        return InsertGroup(stripe, keys, group, state, change.stamp(), modify,
                           complete, &block);
      });
}

template <typename Modify, typename Complete>
absl::Status EmbeddingTable::Impl::InsertGroup(
    Stripe* stripe, const Key* keys, absl::Span<const uint16_t> group,
    const RowBuffer& state, ChangeStamp stamp, const Modify& modify,
    const Complete& complete, InsertBlock* block) {
  const auto prefetch = [&](size_t begin) {
    for (const uint16_t i : group.subspan(begin, kInsertBlock)) {
      __builtin_prefetch(stripe->index.Home(PositionOf(keys[i])), /*rw=*/1);
    }
  };
  prefetch(0);
  for (size_t begin = 0; begin < group.size(); begin += kInsertBlock) {
    if (begin + kInsertBlock < group.size()) prefetch(begin + kInsertBlock);
    size_t num_absent = 0;
    for (const uint16_t i : group.subspan(begin, kInsertBlock)) {
      const KeyPlace place = PlaceOfKey(stripe, keys[i]);
      if (place.has_row()) {
        modify(place, uint32_t{i});
      } else {
        block->keys[num_absent] = keys[i];
        block->rows[num_absent++] = {place, i, 0};
      }
    }
    initializer_.Fill(block->keys, num_absent, block->embeddings.data());
    size_t num_made = 0;
    for (; num_made < num_absent; ++num_made) {
      auto& [place, i, row] = block->rows[num_made];
      if (!stripe->rows.Allocate(&row)) break;
      const float* const embedding =
          block->embeddings.data() + num_made * config_.dim;
      const RowPlace to = PlaceOf(*stripe, row);
      InitRow(embedding, state, stamp, to);
      complete(place, to, embedding, i);
    }
    // The index is changed in a loop of its own, because locking a bucket waits
    // for all earlier writes, and the rows are written to memory that is in no
    // cache.
    bool has_memory = num_made == num_absent;
    for (size_t n = 0; n < num_made; ++n) {
      auto& [place, i, row] = block->rows[n];
      const bool is_indexed =
          stripe->index.Insert(place.key, place.position, row, &place.entry);
      if (is_indexed && !place.has_row()) {
        stripe->CountInserted();
        continue;
      }
      has_memory = has_memory && is_indexed;
      stripe->rows.Free(row);
      // The key is in the block twice.
      if (is_indexed) modify(place, i);
    }
    if (!has_memory) return OutOfMemory();
  }
  return absl::OkStatus();
}

template <typename Work>
absl::Status EmbeddingTable::Impl::ForEachLocked(absl::Span<const Key> keys,
                                                 const Work& work) const {
  for (size_t begin = 0; begin < keys.size(); begin += kMaxKernelKeys) {
    const absl::Span<const Key> block = keys.subspan(begin, kMaxKernelKeys);
    const StripeGroups groups(hash_, block.data(),
                              static_cast<uint32_t>(block.size()), nullptr);
    TFSWITCH_RETURN_IF_ERROR(ForEachLocked(
        block.data(), groups, [&](const KeyPlace& place, uint32_t i) {
          return work(place, begin + i);
        }));
  }
  return absl::OkStatus();
}

inline void EmbeddingTable::Impl::InitRow(const float* embedding,
                                          const RowBuffer& state,
                                          ChangeStamp stamp,
                                          const RowPlace& to) const {
  const size_t dim = static_cast<size_t>(config_.dim);
  const auto num_slots = static_cast<size_t>(optimizer_.slot_floats());
  const auto num_statistics = static_cast<size_t>(statistics_.num_floats());
  RacyCopyRow(state.data() + num_slots, num_statistics, to.statistics);
  if (codec_.is_plain()) {
    if (stamp.epoch != 0) RaiseStamp(to.stamp, stamp.epoch);
    RacyCopyRow(embedding, dim, to.words);
    RacyCopyRow(state.data(), num_slots, to.words + dim);
    return;
  }
  ModifyRow(to, RowRounding(), stamp, [&](const RowFloats& floats) {
    std::copy_n(embedding, dim, floats.embedding);
    std::copy_n(state.data(), num_slots, floats.slots);
  });
}

template <typename Fill>
absl::Status EmbeddingTable::Impl::InsertLocked(const KeyPlace& place,
                                                const RowBuffer& state,
                                                const RowRounding& rounding,
                                                ChangeStamp stamp,
                                                const Fill& fill) {
  Stripe* const stripe = place.stripe;
  uint32_t row;
  if (!stripe->rows.Allocate(&row)) return OutOfMemory();
  const RowPlace to = PlaceOf(*stripe, row);
  RowBuffer embedding(static_cast<size_t>(config_.dim));
  initializer_.Fill(&place.key, 1, embedding.data());
  InitRow(embedding.data(), state, stamp, to);
  // The row has been rounded to its storage type already, so that a step starts
  // from the same values as after an earlier lookup.
  ModifyRow(to, rounding, stamp, fill);
  if (!stripe->index.Insert(place.key, place.position, row)) {
    stripe->rows.Free(row);
    return OutOfMemory();
  }
  stripe->CountInserted();
  return absl::OkStatus();
}

template <typename Modify>
void EmbeddingTable::Impl::ModifyLocked(const KeyPlace& place,
                                        const RowRounding& rounding,
                                        ChangeStamp stamp,
                                        const Modify& modify) {
  const uint32_t meta = LockBucket(place.entry.bucket);
  const uint32_t row = place.entry.row();
  if (MustKeep(*place.stripe, row, stamp)) {
    KeepRow(place.stripe, place.key, row);
  }
  ModifyRow(PlaceOf(*place.stripe, row), rounding, stamp, modify);
  UnlockBucket(place.entry.bucket, meta);
}

template <typename Modify>
void EmbeddingTable::Impl::ModifyRow(const RowPlace& place,
                                     const RowRounding& rounding,
                                     ChangeStamp stamp,
                                     const Modify& modify) const {
  if (stamp.epoch != 0) RaiseStamp(place.stamp, stamp.epoch);
  RowBuffer scratch(codec_.is_plain() ? 0 : codec_.num_floats());
  RacyModifyFloats(place.words, codec_.num_words(), [&](float* words) {
    RacyModifyFloats(
        place.statistics, statistics_.num_floats(), [&](float* counts) {
          codec_.ModifyFloats(words, scratch.data(), rounding,
                              [&](float* embedding, float* slots) {
                                modify(RowFloats{embedding, slots, counts});
                              });
        });
  });
}

template <typename Load>
void EmbeddingTable::Impl::LoadLocked(Stripe* stripe, StripeIndex::Entry entry,
                                      const Load& load) const {
  const RowPlace place = PlaceOf(*stripe, entry.row());
  SpinWait wait;
  for (;; wait.Pause()) {
    const uint32_t meta = LoadMeta(entry.bucket);
    if ((meta & kMetaLocked) != 0) continue;
    load(place);
    if (IsUnchanged(entry.bucket, meta)) return;
  }
}

}  // namespace tfswitch

#endif  // TFSWITCH_CC_TABLE_EMBEDDING_TABLE_IMPL_H_
