// Compares the rows of a table with the exported ones, to make a delta when no
// server knows what has changed.

#ifndef TFSWITCH_CC_SERVING_ROW_DIFFERENCE_H_
#define TFSWITCH_CC_SERVING_ROW_DIFFERENCE_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "cc/base/hash.h"
#include "cc/serving/export_folder.h"
#include "cc/serving/row_snapshot.h"

namespace tfswitch {

// Takes all rows of the table, in any order. Then lists the exported keys that
// the table no longer has. Needs memory for one bit per exported row, and for
// the deltas, which it merges as readers do. The base is only mapped.
//
// Not thread-safe.
class RowDifference {
 public:
  // Opens the rows of `table` in the export `last`, and verifies their
  // checksums. DataLoss if files are damaged, FailedPrecondition if an export
  // that `last` builds on is missing.
  static absl::StatusOr<std::unique_ptr<RowDifference>> Open(
      const std::string& path, const v1::ExportContent& last,
      const std::string& table);

  // Takes one row of the table, encoded in the format of the exports. Returns
  // true if the delta needs the row: the exports have no row of this key, or
  // another one. Also returns true if the key was already given before, because
  // its later row counts.
  bool IsNews(Key key, const char* row);

  // Calls visit(key) for keys that have a row in the exports and were not given
  // to IsNews(). DataLoss if the files have been changed since they were
  // opened.
  absl::Status ForEachGone(const std::function<void(Key)>& visit) const;

  // For how many exported rows IsNews() was called with their key, whether the
  // row has changed or not.
  int64_t num_found() const { return num_found_; }

  // The value that lookups give for a key without a row.
  const std::vector<float>& default_row() const {
    return layers_.files.front()->kind().default_row;
  }

 private:
  explicit RowDifference(RowLayers layers);

  const RowLayers layers_;
  // For each file, one bit per slot: whether IsNews() got the key in the slot.
  std::vector<std::vector<bool>> shown_;
  int64_t num_found_ = 0;
};

}  // namespace tfswitch

#endif  // TFSWITCH_CC_SERVING_ROW_DIFFERENCE_H_
