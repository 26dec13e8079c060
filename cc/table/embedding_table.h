// The table: int64 keys to rows of float32, read and updated in batches by many
// threads.
//
//   key --hash--> stripe (16) --> bucket (64 B) --> row (fixed address)
//                 mutex for       5 keys, 5 row      | embedding | slots |
//                 insert, erase   numbers, version
//                 and growth
//
// Reads take no lock: they copy a row and check that the version of its bucket
// did not change (table/bucket.h). An update locks the one bucket. The index
// grows a few buckets with each insert (table/stripe_index.h), and rows never
// move (table/row_store.h). Batches run through a prefetching pipeline
// (table/batch_kernels.h).

#ifndef TFSWITCH_CC_TABLE_EMBEDDING_TABLE_H_
#define TFSWITCH_CC_TABLE_EMBEDDING_TABLE_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "cc/base/hash.h"
#include "cc/table/table_config.h"

namespace tfswitch {

// Bytes are resident (touched) bytes, counted from the table's own bookkeeping.
struct TableStats {
  int64_t num_rows = 0;
  int64_t index_bytes = 0;     // Hash index, the part of it that is touched.
  int64_t row_bytes = 0;       // Rows in use: num_rows x row stride.
  int64_t reserved_bytes = 0;  // Touched ahead of use, and freed rows.
  int64_t row_stride_bytes = 0;
  int64_t inserted_rows = 0;  // Since creation.
  int64_t erased_rows = 0;    // Since creation.
};

// A run of rows handed out by EmbeddingTable::ForEachRow. Valid only during
// the callback.
struct RowChunk {
  absl::Span<const Key> keys;
  absl::Span<const float> embeddings;  // keys.size() x dim, row-major.
  absl::Span<const float> slots;       // keys.size() x slot_floats, row-major.
};

// Maps keys to rows. A row is one embedding followed by its optimizer slots,
// all float32 and contiguous:
//
//   | embedding: dim floats | slots: slot_floats |
//
// Thread-safe. A batch is not a snapshot of the table, but each row is read
// and written whole: a reader never sees half an update, and concurrent
// updates of one row are applied one after the other.
class EmbeddingTable {
 public:
  // InvalidArgument for a bad config, ResourceExhausted if address space or
  // memory cannot be had.
  static absl::StatusOr<std::unique_ptr<EmbeddingTable>> Create(
      const TableConfig& config);

  ~EmbeddingTable();
  EmbeddingTable(const EmbeddingTable&) = delete;
  EmbeddingTable& operator=(const EmbeddingTable&) = delete;

  // Writes the embedding of keys[i] to embeddings[i * dim, (i + 1) * dim). A
  // key without a row reads as zeros and stays absent. Keys may repeat.
  // Returns how many of `keys` had a row.
  //
  // REQUIRES: embeddings.size() == keys.size() * dim(), else InvalidArgument.
  absl::StatusOr<int64_t> Find(absl::Span<const Key> keys,
                               absl::Span<float> embeddings) const;

  // Like Find(), but a missing key first gets a row from the initializer. This
  // is the training read.
  absl::Status FindOrInsert(absl::Span<const Key> keys,
                            absl::Span<float> embeddings);

  // Applies one optimizer step with gradients[i * dim, (i + 1) * dim) to the
  // row of keys[i]. A key without a row is skipped, or, with `insert_missing`,
  // gets its initial row first. Returns how many rows were updated.
  //
  // REQUIRES: keys are unique; a repeated key would take several steps.
  // REQUIRES: gradients.size() == keys.size() * dim(), else InvalidArgument.
  // REQUIRES: gradients are finite (the shard checks); nothing is checked here.
  absl::StatusOr<int64_t> ApplyGradients(absl::Span<const Key> keys,
                                         absl::Span<const float> gradients,
                                         float learning_rate,
                                         bool insert_missing);

  // Sets embeddings. A row that exists keeps its slots; a missing one is
  // created with initial slots. Of repeated keys the last one stays.
  absl::Status Assign(absl::Span<const Key> keys,
                      absl::Span<const float> embeddings);

  // Sets whole rows, slots included: the way back from ForEachRow. Without
  // `slots` as Assign(). With `only_missing` rows that are there stay as they
  // are. Returns how many were set.
  absl::StatusOr<int64_t> AssignRows(absl::Span<const Key> keys,
                                     absl::Span<const float> embeddings,
                                     absl::Span<const float> slots,
                                     bool only_missing = false);

  // Removes rows; absent and repeated keys are skipped. Returns how many rows
  // went. Their memory is reused by later inserts.
  int64_t Erase(absl::Span<const Key> keys);

  // Visits every row that is in the table from begin to end of the call once,
  // in no particular order, in chunks of at most `max_rows` rows. Rows inserted
  // or erased meanwhile may or may not be seen. No lock is held while `visit`
  // runs. Stops at the first error of `visit` and returns it.
  absl::Status ForEachRow(
      int64_t max_rows,
      const std::function<absl::Status(const RowChunk&)>& visit) const;

  // Rows now in the table. Exact only while no other thread is writing.
  int64_t size() const;
  TableStats stats() const;

  const TableConfig& config() const;
  int dim() const;
  int slot_floats() const;

 private:
  class Impl;
  explicit EmbeddingTable(std::unique_ptr<Impl> impl);
  const std::unique_ptr<Impl> impl_;
};

}  // namespace tfswitch

#endif  // TFSWITCH_CC_TABLE_EMBEDDING_TABLE_H_
