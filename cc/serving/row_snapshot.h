// The rows of a model at one moment: a base and the deltas after it.

#ifndef TFSWITCH_CC_SERVING_ROW_SNAPSHOT_H_
#define TFSWITCH_CC_SERVING_ROW_SNAPSHOT_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "cc/base/hash.h"
#include "cc/serving/row_file.h"

namespace tfswitch {

// The row files of one table, the newest first. If several files have a key,
// the first one counts.
struct RowLayers {
  std::string table;
  int dim = 0;
  std::vector<std::shared_ptr<const RowFile>> files;

  // Writes keys.size() x dim floats. For a key without a row, writes the newest
  // file's default row. DataLoss if a block that it reads is damaged, or if a
  // file was changed since it was opened.
  absl::Status Lookup(absl::Span<const Key> keys, float* embeddings) const;

  // DataLoss if one of the files was changed since it was opened.
  absl::Status CheckUnchanged() const;

  // Merges the two newest files into one, in memory.
  absl::Status MergeNewest();
  // Whether it is time to call MergeNewest(). If it is called at these times,
  // the number of files stays small, and each row is copied only a few times.
  // The last file, the base, is never merged.
  bool IsWorthMerging() const;
};

// Immutable, and so thread-safe. Reads of one snapshot always give the same
// rows.
class RowSnapshot {
 public:
  RowSnapshot(int64_t number, std::string id, int64_t created_ms,
              std::vector<RowLayers> tables)
      : number_(number),
        id_(std::move(id)),
        created_ms_(created_ms),
        tables_(std::move(tables)) {}

  // The number of its last export.
  int64_t number() const { return number_; }
  const std::string& id() const { return id_; }
  int64_t created_ms() const { return created_ms_; }
  const std::vector<RowLayers>& tables() const { return tables_; }

 private:
  const int64_t number_;
  const std::string id_;
  const int64_t created_ms_;
  const std::vector<RowLayers> tables_;  // In order of their names.
};

}  // namespace tfswitch

#endif  // TFSWITCH_CC_SERVING_ROW_SNAPSHOT_H_
