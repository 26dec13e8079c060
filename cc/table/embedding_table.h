// The table: int64 keys to rows of floats, read and updated in batches by many
// threads.
//
//   key --hash--> stripe (16) --> bucket (64 B) --> row (fixed address)
//                 mutex for       5 keys, 5 row      | embedding | slots |
//                 insert, erase   numbers, version
//                 and growth
//
// Reads take no lock: they copy a row and check that the version of its bucket
// did not change (table/bucket.h). An update locks the one bucket. The index
// grows a few buckets with each insert (table/stripe_index.h), and rows only
// move, with their bucket locked, when a shrink gives memory back
// (table/row_store.h). Batches run through a prefetching pipeline
// (table/batch_kernels.h).

#ifndef TFSWITCH_CC_TABLE_EMBEDDING_TABLE_H_
#define TFSWITCH_CC_TABLE_EMBEDDING_TABLE_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "cc/base/hash.h"
#include "cc/base/key_observations.h"
#include "cc/base/keyed_hash.h"
#include "cc/base/mutex.h"
#include "cc/base/random_id.h"
#include "cc/optimizer/optimizer.h"
#include "cc/table/change_log.h"
#include "cc/table/counting_bloom.h"
#include "cc/table/row_statistics.h"
#include "cc/table/step_log.h"
#include "cc/table/table_config.h"

namespace tfswitch {

// Bytes are resident (touched) bytes, by the table's own count.
struct TableStats {
  int64_t num_rows = 0;
  int64_t index_bytes = 0;     // Hash index, the part of it that is touched.
  int64_t row_bytes = 0;       // Rows in use: num_rows x row stride.
  int64_t reserved_bytes = 0;  // Touched ahead of use, and freed rows.
  int64_t row_stride_bytes = 0;
  int64_t inserted_rows = 0;    // Since creation.
  int64_t erased_rows = 0;      // Since creation.
  int64_t num_candidates = 0;   // Ids that wait for admission.
  int64_t admission_bytes = 0;  // The memory of their records.
  // The memory that tracks changes, from the first visit of changes on.
  int64_t change_bytes = 0;
  int64_t num_steps = 0;  // With dense updates: the number of applied pushes.
};

// A push, in the form that the table takes.
struct GradientBatch : StepSettings {
  absl::Span<const Key> keys;         // Unique.
  absl::Span<const float> gradients;  // keys.size() x dim.
  KeyObservations observations;
  float day = kServersDay;  // See row_statistics.h.
  bool insert_missing = false;
  // The push's number in the log, for random draws; 0: the table numbers it.
  uint64_t number = 0;
  // With dense updates, the history of EmbeddingTable::TakeStep(); null: the
  // call is a step by itself.
  const StepHistory* history = nullptr;
};

// The state of a key in the table.
enum class KeyState : uint8_t {
  kUnknown,    // It has no row and no record.
  kCandidate,  // It has no row yet: it waits for admission.
  kRow,
};

// The result of a shrink, or of one with dry_run.
struct ShrinkReport {
  int64_t evicted_rows = 0;
  int64_t evicted_bytes = 0;  // The rows' bytes.
  // Counted for the first rule that applied.
  int64_t by_ttl = 0;
  int64_t by_show_click_score = 0;
  int64_t by_l2_norm = 0;
  int64_t by_max_rows = 0;
  int64_t evicted_candidates = 0;
  int64_t remaining_rows = 0;
  // Sums over the remaining rows, as of the day; 0 if not counted.
  double remaining_count = 0.0;
  double remaining_show = 0.0;
  double remaining_click = 0.0;
};

// Candidates handed out by EmbeddingTable::ForEachCandidate, as RowChunk.
struct CandidateChunk {
  absl::Span<const Key> keys;
  absl::Span<const float> records;  // keys.size() x candidate_floats.
};

// Chooses the rows of a base or delta model by their show and click statistics,
// as Paddle's CTR accessor does.
struct ScoreRule {
  float base_threshold = 0.0f;   // Least score.
  float delta_threshold = 0.0f;  // Least score gained since the last model.
  float delta_keep_days = 0.0f;  // Most days since it was seen.
};

// The changes that EmbeddingTable::ForEachChange visits.
struct ChangeFilter {
  // The end of the last visit. Without a log: every key whose value differs
  // from that of a key without a row.
  ChangeCursor since;
  // Chooses rows in place of `since`. A key that it does not choose keeps its
  // last exported value, unless its row was erased. The score of a visited row
  // may be subtracted afterwards.
  std::optional<ScoreRule> rule;
  float day = kServersDay;
};

// Handed out by EmbeddingTable::ForEachChange. If a key occurs twice, the later
// value counts.
struct ChangeChunk {
  absl::Span<const Key> keys;          // With these values:
  absl::Span<const float> embeddings;  // keys.size() x dim.
  absl::Span<const float>
      delta_scores;  // keys.size(), or empty without a rule.
  // These read as keys without a row. The chunk has no others.
  absl::Span<const Key> removed;
};

// A run of rows handed out by EmbeddingTable::ForEachRow. Valid only during
// the callback.
struct RowChunk {
  absl::Span<const Key> keys;
  absl::Span<const float> embeddings;  // keys.size() x dim, row-major.
  absl::Span<const float> slots;       // keys.size() x slot_floats, row-major.
};

// Whether the rows given to AssignRows() have missed steps.
enum class AssignMode {
  // They come from a save: with dense updates they take the later steps.
  kSaved,
  // They are up to date, whatever steps they have taken elsewhere. With dense
  // updates an empty table continues after the last of their steps.
  kNow,
  // The same, but present rows stay as they are.
  kNowIfMissing,
};

class EmbeddingTable;

// A table as it was at one moment. The table goes on to change: a thread that
// changes a row that the snapshot has not reached keeps a copy first.
//
// Not thread-safe, apart from kept_bytes(). The table must outlive it.
class TableSnapshot {
 public:
  virtual ~TableSnapshot() = default;
  TableSnapshot(const TableSnapshot&) = delete;
  TableSnapshot& operator=(const TableSnapshot&) = delete;

  // Visits all rows, or with `since` the changed ones, in chunks of at most
  // `max_rows`. A row that changes at the same time may be visited twice, with
  // equal values. Call it once.
  virtual absl::Status ForEachRow(
      int64_t max_rows,
      const std::function<absl::Status(const RowChunk&)>& visit) = 0;
  // Visits all keys that wait for admission. Call it once.
  virtual absl::Status ForEachCandidate(
      int64_t max_keys,
      const std::function<absl::Status(const CandidateChunk&)>& visit) = 0;
  // The memory of copies of rows.
  virtual int64_t kept_bytes() const = 0;

  const EmbeddingTable& table;
  ChangeCursor moment;
  int64_t num_rows = 0;  // In the table.
  float last_day = kServersDay;
  SavedSteps steps;
  std::unique_ptr<CountingBloom> bloom;  // Null if the table has none.
  // Whether ForEachRow() visits all rows. If not, the next field has the keys
  // that have lost their rows. Some may have a row again, and some may repeat.
  bool is_whole = true;
  std::vector<Key> lost_rows;

 protected:
  explicit TableSnapshot(const EmbeddingTable& table) : table(table) {}
};

// The value of keys without a row, unless the table has a weight for them.
//
// REQUIRES: config.Validate() is OK.
std::vector<float> MissingRow(const TableConfig& config);

// Maps keys to rows. A row is one embedding followed by its slots: the state of
// the optimizer and, if the config asks for them, statistics of its use
// (row_statistics.h). Calls use float32 for all of it:
//
//   | embedding: dim floats | slots: slot_floats, statistics last |
//
// In memory statistics are separate, and config().storage_dtype may keep parts
// of a row in 16 bits (row_codec.h).
//
// With an admission policy a key gets its row from a push, when the policy says
// so. Until then the table keeps records for the decision (candidates, or the
// cells of a Bloom filter), and the key reads as the config's not_admitted.
//
// With dense updates (OptimizerConfig::is_dense) every call that reads, saves
// or visits rows brings them up to date with the steps that have ended before.
//
// Thread-safe. A batch is not a snapshot of the table, but each row is read and
// written whole: a reader never sees half an update, and concurrent updates of
// one row are applied one after the other.
class EmbeddingTable {
 public:
  // InvalidArgument for a bad config, ResourceExhausted if there is no address
  // space or memory. `hash` decides where keys lie in memory, and so the order
  // in which rows are visited, and nothing else; tests may choose it.
  static absl::StatusOr<std::unique_ptr<EmbeddingTable>> Create(
      const TableConfig& config, const KeyedHash& hash = KeyedHash::Draw());

  virtual ~EmbeddingTable() = default;
  EmbeddingTable(const EmbeddingTable&) = delete;
  EmbeddingTable& operator=(const EmbeddingTable&) = delete;

  // Writes the embedding of keys[i] to embeddings[i * dim, (i + 1) * dim). A
  // key without a row reads as zeros, or the config's value for it, and stays
  // absent. Keys may repeat. Returns how many of `keys` had a row.
  //
  // REQUIRES: embeddings.size() == keys.size() * dim(), else InvalidArgument.
  virtual absl::StatusOr<int64_t> Find(absl::Span<const Key> keys,
                                       absl::Span<float> embeddings) const = 0;

  // Like Find(), but a missing key first gets a row from the initializer,
  // unless there is an admission policy. This is the training read.
  virtual absl::Status FindOrInsert(absl::Span<const Key> keys,
                                    absl::Span<float> embeddings) = 0;

  // Sets the day of calls that give none; no effect below 0.
  virtual void NoteDay(float day) = 0;
  // The last noted day; kServersDay if there is none.
  virtual float last_day() const = 0;

  // Applies one optimizer step with gradients[i * dim, (i + 1) * dim) to the
  // row of keys[i]. A key without a row is skipped, or, with `insert_missing`,
  // gets its initial row first; an admission policy decides in place of
  // `insert_missing`. Returns how many rows were updated.
  //
  // REQUIRES: keys are unique; a repeated key would take several steps.
  // REQUIRES: gradients.size() == keys.size() * dim(), else InvalidArgument.
  // REQUIRES: gradients are finite, and CheckObservations() accepts the
  // observations. The shard checks this; here nothing is checked.
  virtual absl::StatusOr<int64_t> ApplyGradients(
      const GradientBatch& batch) = 0;
  // The same, for a batch without observations.
  absl::StatusOr<int64_t> ApplyGradients(absl::Span<const Key> keys,
                                         absl::Span<const float> gradients,
                                         float learning_rate,
                                         bool insert_missing);

  // Makes the calls of ApplyGradients() in `apply` one step of a table with
  // dense updates; their `history` is the argument. Steps may overlap
  // (missed_steps.h). Other tables call apply(nullptr). ResourceExhausted after
  // kMaxDenseStep steps.
  virtual absl::Status TakeStep(
      float learning_rate,
      absl::FunctionRef<absl::Status(const StepHistory*)> apply) = 0;

  // The steps so far; empty without dense updates.
  virtual SavedSteps SaveSteps() const = 0;
  // Restores a result of SaveSteps(), before there are rows. InvalidArgument if
  // `saved` is not a valid log.
  virtual absl::Status RestoreSteps(const SavedSteps& saved) = 0;

  // Sets embeddings. A present row keeps its slots; a missing one is created
  // with initial slots. If a key repeats, its last row stays.
  absl::Status Assign(absl::Span<const Key> keys,
                      absl::Span<const float> embeddings) {
    return AssignRows(keys, embeddings, /*slots=*/{}).status();
  }

  // Sets whole rows, slots included: the reverse of ForEachRow. Without `slots`
  // like Assign(). Returns how many were set.
  absl::StatusOr<int64_t> AssignRows(absl::Span<const Key> keys,
                                     absl::Span<const float> embeddings,
                                     absl::Span<const float> slots) {
    return AssignRows(keys, embeddings, slots, AssignMode::kSaved);
  }
  virtual absl::StatusOr<int64_t> AssignRows(absl::Span<const Key> keys,
                                             absl::Span<const float> embeddings,
                                             absl::Span<const float> slots,
                                             AssignMode mode) = 0;

  // Removes rows, and the records of waiting keys. Absent and repeated keys are
  // skipped. Returns how many rows were removed. Later inserts use their
  // memory.
  virtual int64_t Erase(absl::Span<const Key> keys) = 0;

  // Removes the rows and candidates to which one of `rules` applies on `day`,
  // and gives their memory back; with `dry_run` only counts them. Other calls
  // continue meanwhile. max_rows is the limit of this table. FailedPrecondition
  // if the config lacks the statistics of a rule.
  virtual absl::StatusOr<ShrinkReport> Shrink(const EvictionConfig& rules,
                                              float day, bool dry_run) = 0;

  // Reads the usage of keys[i], as of `day`, for rows and candidates.
  virtual void ReadUsage(absl::Span<const Key> keys, float day,
                         absl::Span<UsageOfRow> usage,
                         absl::Span<KeyState> states) const = 0;

  // Like ForEachRow(), for the keys that wait for admission.
  virtual absl::Status ForEachCandidate(
      int64_t max_keys,
      const std::function<absl::Status(const CandidateChunk&)>& visit)
      const = 0;

  // The reverse. A key that has a row is skipped.
  virtual absl::Status AssignCandidates(absl::Span<const Key> keys,
                                        absl::Span<const float> records) = 0;

  // Null unless the table's admission uses a Bloom filter.
  virtual CountingBloom* bloom() const = 0;

  // Visits every row that is in the table from begin to end of the call once,
  // in no particular order, in chunks of at most `max_rows` rows. Rows inserted
  // or erased meanwhile may or may not be seen. No lock is held while `visit`
  // runs. Stops at the first error of `visit` and returns it.
  virtual absl::Status ForEachRow(
      int64_t max_rows,
      const std::function<absl::Status(const RowChunk&)>& visit) const = 0;

  // Visits, in chunks of at most about `max_keys`, the keys that have changed
  // since a cursor, and returns the next cursor. The first visit starts
  // tracking. Changes during the visit may be visited now, and will be visited
  // next time in any case. FailedPrecondition if the changes since the cursor
  // are not known any more, or the rule needs statistics that are not counted.
  virtual absl::StatusOr<ChangeCursor> ForEachChange(
      const ChangeFilter& filter, int64_t max_keys,
      const std::function<absl::Status(const ChangeChunk&)>& visit) = 0;

  // Ends an epoch, and returns its end. The first call starts tracking.
  virtual ChangeCursor EndEpoch() = 0;

  // Subtracts published delta scores from rows.
  virtual void SubtractDeltaScores(absl::Span<const Key> keys,
                                   absl::Span<const float> scores) = 0;

  // No row changes from the end of Hold() to Release(), which the same thread
  // must call: changes in progress end first, and others wait.
  virtual void Hold() = 0;
  virtual void Release() = 0;
  // Takes a snapshot of the table. With a moment `since` of this table it has
  // only the later changes, if they are still known. ResourceExhausted if there
  // is no memory for a copy of the Bloom filter.
  //
  // REQUIRES: between Hold() and Release(), in their thread, while there is no
  // other snapshot of the table.
  virtual absl::StatusOr<std::unique_ptr<TableSnapshot>> TakeSnapshot(
      const ChangeCursor& since) = 0;

  // The present number of rows. Exact only while no other thread writes.
  virtual int64_t size() const = 0;
  virtual TableStats stats() const = 0;

  // Drawn, unless another one is set.
  uint64_t incarnation() const { return incarnation_; }
  TableIdentity identity() const {
    MutexLock lock(&identity_mutex_);
    return {incarnation_, shard_instances_};
  }
  void set_identity(TableIdentity identity) {
    MutexLock lock(&identity_mutex_);
    incarnation_ = identity.incarnation;
    shard_instances_ = std::move(identity.shard_instances);
  }

  const TableConfig& config() const { return config_; }
  int dim() const { return config_.dim; }
  // Optimizer state and statistics.
  virtual int slot_floats() const = 0;
  // Their last ones are the statistics.
  virtual int statistics_floats() const = 0;
  // The floats of a candidate's record; 0 without candidates.
  virtual int candidate_floats() const = 0;

 private:
  // The only implementation: virtual functions keep its parts out of this
  // header.
  class Impl;
  explicit EmbeddingTable(const TableConfig& config) : config_(config) {}

  const TableConfig config_;
  std::atomic<uint64_t> incarnation_{DrawId()};
  mutable Mutex identity_mutex_;
  std::vector<uint64_t> shard_instances_ ABSL_GUARDED_BY(identity_mutex_);
};

}  // namespace tfswitch

#endif  // TFSWITCH_CC_TABLE_EMBEDDING_TABLE_H_
