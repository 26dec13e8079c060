// How the rows of a table differ from those in a folder of exports: for a delta
// where nobody remembers what has changed.

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

// Is shown all rows of the table, in any order, and then names the keys that it
// was not shown. It needs a bit of memory for each exported row, and the size
// of the deltas, which it merges as readers do; the base is mapped.
//
// Not thread-safe.
class RowDifference {
 public:
  // Opens the rows of `table` as of the export `last`, and verifies them.
  // DataLoss if files are damaged, FailedPrecondition if the chain of exports
  // that leads there is not whole.
  static absl::StatusOr<std::unique_ptr<RowDifference>> Open(
      const std::string& path, const v1::ExportContent& last,
      const std::string& table);

  // Whether the exports have another row, or none. `row` is encoded in their
  // format. True for a key that was shown before: the later row counts.
  bool IsNews(Key key, const char* row);

  // Calls visit(key) for keys that have a row in the exports and were not
  // shown. DataLoss if somebody has changed the files meanwhile.
  absl::Status ForEachGone(const std::function<void(Key)>& visit) const;

  // How many rows of the exports were shown, changed or not.
  int64_t num_found() const { return num_found_; }

  // The value of an id without a row.
  const std::vector<float>& default_row() const {
    return layers_.files.front()->kind().default_row;
  }

 private:
  explicit RowDifference(RowLayers layers);

  const RowLayers layers_;
  // For each file a bit for each slot, set once its key was shown.
  std::vector<std::vector<bool>> shown_;
  int64_t num_found_ = 0;
};

}  // namespace tfswitch

#endif  // TFSWITCH_CC_SERVING_ROW_DIFFERENCE_H_
