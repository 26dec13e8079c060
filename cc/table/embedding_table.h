// The table: int64 keys to rows of floats, read and updated in batches by many
// threads.
//
//   key --hash--> stripe (16) --> bucket (64 B) --> row (fixed address)
//                 mutex for       5 keys, 5 row      | embedding | slots |
//                 insert, erase   numbers, version
//                 and growth
//
// Reads take no lock: they copy a row and check that the version of its bucket
// did not change (table/bucket.h). An update locks only the bucket of its row.
// With each insert during growth the index moves a few buckets to a larger
// array (table/stripe_index.h). Rows are moved only when a shrink gives memory
// back, and only while their bucket is locked (table/row_store.h). Batches are
// processed by a prefetching pipeline (table/batch_kernels.h).

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
#include "cc/table/key_heat.h"
#include "cc/table/row_statistics.h"
#include "cc/table/step_log.h"
#include "cc/table/table_config.h"
#include "cc/table/table_counters.h"

namespace tfswitch {

// Statistics of a table. Bytes are resident memory, as the table itself counts
// it.
struct TableStats {
  int64_t num_rows = 0;
  int64_t index_bytes = 0;     // The touched part of the hash index.
  int64_t row_bytes = 0;       // Rows in memory x row stride.
  int64_t reserved_bytes = 0;  // Touched ahead of use, and freed rows.
  int64_t row_stride_bytes = 0;
  // Since creation.
  int64_t inserted_rows = 0;
  // Since creation.
  int64_t erased_rows = 0;
  // Ids that wait for admission.
  int64_t num_candidates = 0;
  // The memory of the records of ids that wait for admission.
  int64_t admission_bytes = 0;
  // The memory that tracks changes; 0 before the first visit of changes.
  int64_t change_bytes = 0;
  int64_t num_steps = 0;  // With dense updates: the number of applied pushes.
  // Records for ids that wait for admission, which have memory and no id.
  int64_t free_candidates = 0;
  // Rows on disk, which num_rows includes, with their files, and the memory
  // that finds them.
  int64_t cold_rows = 0;
  int64_t cold_file_bytes = 0;
  int64_t cold_memory_bytes = 0;
  int64_t cold_written_bytes = 0;  // Since creation.
  int64_t cold_block_reads = 0;    // Since creation.
  // Since creation, counted by the callers; see table_counters.h.
#define TFSWITCH_FIELD(name) int64_t name = 0;
  TFSWITCH_TABLE_COUNTERS(TFSWITCH_FIELD)
#undef TFSWITCH_FIELD
};

// A push, in the form that the table expects.
struct GradientBatch : StepSettings {
  GradientBatch() = default;
  // For tests and benchmarks.
  GradientBatch(absl::Span<const Key> its_keys,
                absl::Span<const float> its_gradients, float its_learning_rate,
                bool inserts_missing)
      : keys(its_keys),
        gradients(its_gradients),
        insert_missing(inserts_missing) {
    learning_rate = its_learning_rate;
  }

  absl::Span<const Key> keys;         // Unique.
  absl::Span<const float> gradients;  // keys.size() x dim.
  KeyObservations observations;
  float day = kServersDay;  // See row_statistics.h.
  bool insert_missing = false;
  // The push's number in the log, for random draws. If it is 0, the table
  // chooses one.
  uint64_t number = 0;
  // With dense updates: the history that TakeStep() passes to `apply`. If it is
  // null, the call itself is one step of the table.
  const StepHistory* history = nullptr;
};

// Keys of rows and of candidates, some that exist or some that may be made.
struct KeysByKind {
  std::vector<Key> rows;
  std::vector<Key> candidates;
};

enum class KeyState : uint8_t {
  kUnknown,    // It has no row and no record.
  kCandidate,  // The key has no row yet; it waits for admission.
  kRow,
};

// The result of a shrink. With dry_run, what it would be.
struct ShrinkReport {
  int64_t evicted_rows = 0;
  // The memory of the evicted rows.
  int64_t evicted_bytes = 0;
  // Evicted rows by rule; each row counts for the first rule that applied.
  int64_t by_ttl = 0;
  int64_t by_show_click_score = 0;
  int64_t by_l2_norm = 0;
  int64_t by_max_rows = 0;
  int64_t evicted_candidates = 0;
  int64_t remaining_rows = 0;
  // Sums over the remaining rows, as of `day`; 0 if the table does not count
  // them.
  double remaining_count = 0.0;
  double remaining_show = 0.0;
  double remaining_click = 0.0;
};

// A rule of eviction, and where its evicted rows are counted.
struct EvictionRule {
  const char* name;
  int64_t ShrinkReport::*evicted;  // Null if a shrink does not use the rule.
  TableCounter counter;
  int64_t TableStats::*total;
  bool (*is_set)(const EvictionConfig& rules);
};
inline constexpr EvictionRule kEvictionRules[] = {
    {"ttl", &ShrinkReport::by_ttl, TableCounter::evicted_by_ttl,
     &TableStats::evicted_by_ttl,
     [](const EvictionConfig& rules) {
       return rules.delete_after_unseen_days.has_value();
     }},
    {"show_click_score", &ShrinkReport::by_show_click_score,
     TableCounter::evicted_by_show_click_score,
     &TableStats::evicted_by_show_click_score,
     [](const EvictionConfig& rules) {
       return rules.delete_threshold.has_value();
     }},
    {"l2_norm", &ShrinkReport::by_l2_norm, TableCounter::evicted_by_l2_norm,
     &TableStats::evicted_by_l2_norm,
     [](const EvictionConfig& rules) { return rules.min_l2_norm.has_value(); }},
    {"max_rows", &ShrinkReport::by_max_rows, TableCounter::evicted_by_max_rows,
     &TableStats::evicted_by_max_rows,
     [](const EvictionConfig& rules) { return rules.max_rows.has_value(); }},
    // Not a rule of a shrink; see TableConfig::when_full.
    {"max_memory", nullptr, TableCounter::evicted_by_max_memory,
     &TableStats::evicted_by_max_memory,
     [](const EvictionConfig&) { return false; }}};

// Candidates handed out by EmbeddingTable::ForEachCandidate, as RowChunk.
struct CandidateChunk {
  absl::Span<const Key> keys;
  absl::Span<const float> records;  // keys.size() x candidate_floats.
};

// Chooses the rows of a base or delta model by their show and click statistics,
// like Paddle's CTR accessor.
struct ScoreRule {
  float base_threshold = 0.0f;   // Least score.
  float delta_threshold = 0.0f;  // Least score gained since the last model.
  float delta_keep_days = 0.0f;  // Most days since it was seen.
};

// The changes that EmbeddingTable::ForEachChange visits.
struct ChangeFilter {
  // Visits changes since this moment, normally the end of the last visit. If
  // its log_id is 0, visits every key whose value differs from that of a key
  // without a row.
  ChangeCursor since;
  // If this is set, it chooses the rows, and `since` does not. A key that is
  // not chosen keeps its last exported value, unless its row was erased.
  // SubtractDeltaScores() may later subtract the scores of visited rows.
  std::optional<ScoreRule> rule;
  float day = kServersDay;
};

// A part of what EmbeddingTable::ForEachChange visits. If a key occurs twice,
// the later value counts.
struct ChangeChunk {
  absl::Span<const Key> keys;          // With these values:
  absl::Span<const float> embeddings;  // keys.size() x dim.
  absl::Span<const float>
      delta_scores;  // keys.size(), or empty without a rule.

  // Keys that now read like keys without a row. If there are any, the chunk has
  // no other keys.
  absl::Span<const Key> removed;
};

// A part of a table's rows. If EmbeddingTable::ForEachRow() passes it to a
// callback, it is valid only during the callback.
struct RowChunk {
  absl::Span<const Key> keys;
  absl::Span<const float> embeddings;  // keys.size() x dim, row-major.
  absl::Span<const float> slots;       // keys.size() x slot_floats, row-major.
};

// Whether the rows that AssignRows() gets have missed steps.
enum class AssignMode {
  // The rows come from a save. With dense updates they will catch up with the
  // steps that the table has taken since that save.
  kSaved,
  // The rows are up to date; steps that they have taken in another table count
  // as taken. With dense updates, an empty table continues after the last of
  // these steps.
  kNow,
  // Like kNow, but existing rows do not change.
  kNowIfMissing,
};

class ColdFolder;
class EmbeddingTable;

// The state of a table at one moment. The table itself continues to change:
// before a thread changes a row that the snapshot has not visited yet, it keeps
// a copy.
//
// Not thread-safe, except for kept_bytes(). The table must outlive the
// snapshot.
class TableSnapshot {
 public:
  virtual ~TableSnapshot() = default;
  TableSnapshot(const TableSnapshot&) = delete;
  TableSnapshot& operator=(const TableSnapshot&) = delete;

  // Visits all rows or, if `since` was given, those that have changed, in
  // chunks of at most `max_rows`. A row that changes during the visit may be
  // visited twice, with equal values. Call it at most once.
  virtual absl::Status ForEachRow(
      int64_t max_rows,
      const std::function<absl::Status(const RowChunk&)>& visit) = 0;
  // Visits all keys that wait for admission. Call it at most once.
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
  // Null if the table has none.
  std::unique_ptr<CountingBloom> bloom;
  // Whether ForEachRow() visits all rows. If not, lost_rows has the keys that
  // have lost their rows. Some may have a row again, and some may repeat.
  bool is_whole = true;
  std::vector<Key> lost_rows;

 protected:
  explicit TableSnapshot(const EmbeddingTable& table) : table(table) {}
};

// The value of keys without a row, except for candidates that have a weight.
//
// REQUIRES: config.Validate() is OK.
std::vector<float> MissingRow(const TableConfig& config);

// The bytes of a row in memory: embedding, slots and statistics.
//
// REQUIRES: config.Validate() is OK.
size_t RowBytes(const TableConfig& config);

// The number of floats of a candidate's record; 0 without candidates.
int CandidateFloats(const TableConfig& config);

// A NaN that no row has: arithmetic gives other NaNs, and calls refuse NaN.
inline constexpr uint32_t kMissingMark = 0x7fc7f50d;
// Another one, for keys that may have rows on disk.
inline constexpr uint32_t kColdMark = 0x7fc7f50e;

// Maps keys to rows. A row is an embedding followed by its slots: the state of
// the optimizer and, if the config asks for them, statistics of the row's use
// (row_statistics.h). All values in calls are float32:
//
//   | embedding: dim floats | slots: slot_floats, statistics last |
//
// In memory, statistics are in another array, and parts of a row may have
// 16-bit types (config().storage_dtype, row_codec.h).
//
// If the table has an admission policy, it decides which push gives a key its
// row. Until then the table keeps records for the decision (candidates, or the
// cells of a Bloom filter), and lookups of the key give the config's
// not_admitted.
//
// With dense updates (OptimizerConfig::is_dense), every call that reads, saves
// or visits rows first brings them up to date with the steps that have ended.
//
// Thread-safe. Reading a batch is not atomic, but reading or writing each row
// is: a reader never sees a partial update, and concurrent updates of a row are
// applied one after another.
class EmbeddingTable {
 public:
  // InvalidArgument for a bad config, ResourceExhausted if there is no address
  // space or memory. `hash` only determines where keys are in memory, and so
  // the order in which rows are visited; tests may choose it.
  static absl::StatusOr<std::unique_ptr<EmbeddingTable>> Create(
      const TableConfig& config, const KeyedHash& hash = KeyedHash::Draw());

  virtual ~EmbeddingTable() = default;
  EmbeddingTable(const EmbeddingTable&) = delete;
  EmbeddingTable& operator=(const EmbeddingTable&) = delete;

  // Writes the embedding of keys[i] to embeddings[i * dim, (i + 1) * dim). For
  // a key without a row writes zeros, or the value that the config gives for
  // it, and does not insert a row. Keys may repeat. Returns how many of `keys`
  // had a row.
  //
  // REQUIRES: embeddings.size() == keys.size() * dim(), else InvalidArgument.
  virtual absl::StatusOr<int64_t> Find(absl::Span<const Key> keys,
                                       absl::Span<float> embeddings) const = 0;

  // Like Find(), but marks keys without a row: all their values have the bits
  // kMissingMark. With an admission policy does not mark them, because then it
  // does not matter for the values whether a lookup may insert rows.
  //
  // With `marks_cold` does not read the disk: all values of a key that may have
  // a row there have the bits kColdMark, and it does not count as found.
  virtual absl::StatusOr<int64_t> FindAndMark(absl::Span<const Key> keys,
                                              absl::Span<float> embeddings,
                                              bool marks_cold) const = 0;

  // Like Find(), but first inserts a row from the initializer for a missing
  // key, unless there is an admission policy. This is the read of training.
  // Returns how many keys had a row before.
  virtual absl::StatusOr<int64_t> FindOrInsert(
      absl::Span<const Key> keys, absl::Span<float> embeddings) = 0;

  // Sets the day for calls that do not give one. Values below 0 have no effect.
  virtual void NoteDay(float day) = 0;
  // The day of the last NoteDay(); kServersDay if there was none.
  virtual float last_day() const = 0;

  // Returns which keys of the batch ApplyGradients() may make rows or
  // candidates of. Exact while no other thread writes, except that a random
  // draw counts as won. The batch needs no gradients.
  virtual KeysByKind FindNewKeys(const GradientBatch& batch) const = 0;

  // Takes one optimizer step of the row of keys[i] with gradients[i * dim, (i +
  // 1) * dim). A key without a row is skipped or, if `insert_missing` is set,
  // first gets its initial row; if there is an admission policy, the policy
  // decides that. Returns how many rows were updated.
  //
  // REQUIRES: keys are unique; a repeated key would take several steps.
  // REQUIRES: gradients.size() == keys.size() * dim(), else InvalidArgument.
  // REQUIRES: gradients are finite, and CheckObservations() accepts the
  // observations. The shard checks this; here nothing is checked.
  virtual absl::StatusOr<int64_t> ApplyGradients(
      const GradientBatch& batch) = 0;

  // Counts all calls of ApplyGradients() inside `apply` as one step of a table
  // with dense updates. `apply` must pass its argument on to these calls as
  // their `history`. Steps may overlap (missed_steps.h). For other tables,
  // calls apply(nullptr). ResourceExhausted if the table has already taken
  // kMaxDenseStep steps.
  virtual absl::Status TakeStep(
      float learning_rate,
      absl::FunctionRef<absl::Status(const StepHistory*)> apply) = 0;

  // Restores TableSnapshot::steps. Call it before the table has rows.
  // InvalidArgument if `saved` is not a valid log.
  virtual absl::Status RestoreSteps(const SavedSteps& saved) = 0;

  // Sets whole rows, including slots: the reverse of ForEachRow. If rows.slots
  // is empty, sets only embeddings: an existing row keeps its slots, and a
  // missing row is created with initial slots. If a key repeats, its last row
  // counts. Returns how many rows were set.
  virtual absl::StatusOr<int64_t> AssignRows(const RowChunk& rows,
                                             AssignMode mode) = 0;

  // Prepares memory for `num_rows` rows, so that inserts need not wait for it,
  // but at most half of the memory that is available. The index grows during
  // the call; a background thread prepares the rows' memory. Inserts of further
  // rows take as long as without this call.
  virtual void Reserve(uint64_t num_rows) = 0;

  // Removes rows, and the records of waiting keys. Ignores keys that are absent
  // or repeated. Returns how many rows were removed. Later inserts reuse their
  // memory.
  virtual absl::StatusOr<int64_t> Erase(absl::Span<const Key> keys) = 0;

  // Removes the rows and candidates to which any of `rules` applies on `day`,
  // and gives their memory back; with `dry_run` only counts them. Other calls
  // continue meanwhile. max_rows limits this table alone, not its parts on
  // other servers. FailedPrecondition if the table lacks statistics that a rule
  // needs.
  virtual absl::StatusOr<ShrinkReport> Shrink(const EvictionConfig& rules,
                                              float day, bool dry_run) = 0;

  // Chooses rows to erase for new ones: the least used rows of a random sample
  // of eight times as many rows, and at least 1,024. Chooses candidates to
  // forget in the same way. Does not choose the keys in `kept`, which is
  // sorted. The least used rows are, by the table's eviction rules,
  //   delete_threshold       those with the lowest scores
  //   max_rows, order = lfu  those with the fewest occurrences
  //   otherwise              those that were seen longest ago, in days
  // and among equal ones those that changed longest ago. With the first two
  // rules, rows that changed after the last call are chosen only if there are
  // no others, because a new row has had no time to be used.
  //
  // REQUIRES: config().evicts_when_full().
  virtual KeysByKind ChooseLeastUsed(int64_t num_rows, int64_t num_candidates,
                                     absl::Span<const Key> kept) = 0;

  // Where Demote() puts rows. AssignRows() of saved rows, and
  // SubtractDeltaScores(), call make_room(this table) before each block of
  // rows, because they may bring more rows to memory than fit.
  //
  // REQUIRES: config().demotes_when_full(), and the table is not used yet.
  virtual void SetColdFolder(
      std::shared_ptr<ColdFolder> folder,
      std::function<absl::Status(EmbeddingTable&)> make_room) = 0;
  // Moves `num_rows` rows from memory to disk, but none of `kept`: rows of
  // those that changed longest ago. Returns how many it has moved: less if
  // there are not so many, or if rows change meanwhile. All other calls work as
  // before: they read a row on disk where it is, and a call that changes it
  // moves it to memory first. They may return ResourceExhausted if the disk is
  // full, and Internal if it fails, or does not have what was written.
  // FailedPrecondition without SetColdFolder().
  //
  // The calling thread must not be inside another call of the table.
  virtual absl::StatusOr<int64_t> Demote(int64_t num_rows,
                                         absl::Span<const Key> kept) = 0;
  // Gives the memory of free rows back in the background, if a sixteenth of the
  // rows is free.
  virtual void ReleaseFreeRows() = 0;
  // The distinct keys that may have rows on disk, sorted: all that have one,
  // and a few of those that have no row.
  virtual std::vector<Key> FindColdKeys(absl::Span<const Key> keys) const = 0;
  // Moves the rows of `keys` that are on disk to memory.
  virtual absl::Status Promote(absl::Span<const Key> keys) = 0;

  // Reads the usage counters of keys[i], as of `day`, for rows and candidates.
  virtual absl::Status ReadUsage(absl::Span<const Key> keys, float day,
                                 absl::Span<UsageOfRow> usage,
                                 absl::Span<KeyState> states) const = 0;

  // Visits the rows of `keys` at once. Leaves out keys without a row.
  virtual absl::Status ReadRows(
      absl::Span<const Key> keys,
      const std::function<absl::Status(const RowChunk&)>& visit) const = 0;

  // Visits the keys that wait for admission, like ForEachRow().
  virtual absl::Status ForEachCandidate(
      int64_t max_keys,
      const std::function<absl::Status(const CandidateChunk&)>& visit)
      const = 0;

  // Sets the records of waiting keys, as ForEachCandidate() visits them. Skips
  // keys that have a row.
  virtual absl::Status AssignCandidates(absl::Span<const Key> keys,
                                        absl::Span<const float> records) = 0;

  // Null unless the table's admission uses a Bloom filter.
  virtual CountingBloom* bloom() const = 0;

  // Visits every row that exists from the begin to the end of the call once, in
  // no particular order, in chunks of at most `max_rows` rows. Rows that are
  // inserted or erased meanwhile may or may not be visited. No lock is held
  // while `visit` runs. If `visit` returns an error, stops and returns it.
  virtual absl::Status ForEachRow(
      int64_t max_rows,
      const std::function<absl::Status(const RowChunk&)>& visit) const = 0;

  // Visits the keys that have changed since a cursor, in chunks of at most
  // about `max_keys`. Returns the cursor for the next visit. The first visit
  // starts the tracking of changes. A change during the visit may be visited
  // now, and will in any case be visited next time. FailedPrecondition if the
  // changes since the cursor are no longer known, or if the rule needs
  // statistics that the table does not count.
  virtual absl::StatusOr<ChangeCursor> ForEachChange(
      const ChangeFilter& filter, int64_t max_keys,
      const std::function<absl::Status(const ChangeChunk&)>& visit) = 0;

  // Ends an epoch, and returns the moment of its end. The first call starts the
  // tracking of changes.
  virtual ChangeCursor EndEpoch() = 0;

  // Subtracts published delta scores from rows.
  virtual absl::Status SubtractDeltaScores(absl::Span<const Key> keys,
                                           absl::Span<const float> scores) = 0;

  // From the end of Hold() until Release(), which the same thread must call, no
  // row changes. Hold() waits for changes in progress; new changes wait.
  virtual void Hold() = 0;
  virtual void Release() = 0;
  // Takes a snapshot of the table. If `since` is a moment of this table and the
  // changes after it are still known, the snapshot has only these.
  // ResourceExhausted if there is no memory for a copy of the Bloom filter.
  //
  // REQUIRES: between Hold() and Release(), in their thread, and the table has
  // no other snapshot.
  virtual absl::StatusOr<std::unique_ptr<TableSnapshot>> TakeSnapshot(
      const ChangeCursor& since) = 0;

  // The current number of rows. Exact only while no other thread writes.
  virtual int64_t size() const = 0;
  // The current number of rows, or more while other threads write.
  virtual int64_t SizeAtMost() const = 0;
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

  // Changes at the end of each call that changes rows other than by gradients,
  // or makes rows that do not have their first values.
  uint64_t generation() const { return generation_; }

  // Callers of this class count their work here.
  TableCounters& counters() const { return counters_; }
  KeyHeat& heat() const { return heat_; }
  // Rows that calls in progress may insert.
  std::atomic<int64_t>& claimed_rows() { return claimed_rows_; }

  const TableConfig& config() const { return config_; }
  int dim() const { return config_.dim; }
  // Optimizer state and statistics.
  virtual int slot_floats() const = 0;
  // The most memory that one more row takes, with its share of the index.
  virtual size_t bytes_per_row() const = 0;
  // The same for one more candidate; 0 if there are none.
  virtual size_t bytes_per_candidate() const = 0;

 protected:
  void EndGeneration() { ++generation_; }

 private:
  // The only implementation. It is a derived class, so that its members need
  // not be in this header.
  class Impl;
  explicit EmbeddingTable(const TableConfig& config) : config_(config) {}

  const TableConfig config_;
  std::atomic<uint64_t> incarnation_{DrawId()};
  std::atomic<uint64_t> generation_{DrawId()};
  mutable Mutex identity_mutex_;
  std::vector<uint64_t> shard_instances_ ABSL_GUARDED_BY(identity_mutex_);
  mutable TableCounters counters_;
  std::atomic<int64_t> claimed_rows_{0};
  mutable KeyHeat heat_{config_.num_virtual_shards};
};

}  // namespace tfswitch

#endif  // TFSWITCH_CC_TABLE_EMBEDDING_TABLE_H_
