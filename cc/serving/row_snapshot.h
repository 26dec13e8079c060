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

// The row files of one table, the newest first: of a key that several have, the
// first counts.
struct RowLayers {
  std::string table;
  int dim = 0;
  std::vector<std::shared_ptr<const RowFile>> files;

  // Writes keys.size() x dim floats; a key without a row reads as the newest
  // file's default row. DataLoss if a file turns out to be damaged where it is
  // read, or is changed while it is served.
  absl::Status Lookup(absl::Span<const Key> keys, float* embeddings) const;

  // DataLoss if one of the files is changed while it is served.
  absl::Status CheckUnchanged() const;

  // Makes the two newest files one, in memory.
  absl::Status MergeNewest();
  // Whether that pays: it is done so that there are never many files, and no
  // row is copied often. The last file, the base, stays as it is.
  bool IsWorthMerging() const;
};

// Immutable, so thread-safe. A holder reads the same rows for as long as it
// likes.
class RowSnapshot {
 public:
  RowSnapshot(int64_t number, std::string id, int64_t created_ms,
              std::vector<RowLayers> tables)
      : number_(number),
        id_(std::move(id)),
        created_ms_(created_ms),
        tables_(std::move(tables)) {}

  // The export that it ends with.
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
