// Remembers the scores of exported rows until the export is published. Only
// then the scores are subtracted from those of the rows.

#ifndef TFSWITCH_CC_SHARD_PENDING_EXPORTS_H_
#define TFSWITCH_CC_SHARD_PENDING_EXPORTS_H_

#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "cc/base/hash.h"
#include "cc/base/mutex.h"
#include "cc/table/embedding_table.h"

namespace tfswitch {

// Thread-safe.
class PendingExports {
 public:
  struct Export {
    std::string id;
    // The exported table; a later table of the same name is a different object.
    std::weak_ptr<EmbeddingTable> table;
    std::vector<Key> keys;
    std::vector<float> scores;
  };

  // Remembers an export. Replaces an earlier export of the same table and id.
  // Drops exports of tables that no longer exist, and all but the kMaxIds
  // newest ids.
  void Keep(Export exported);
  // Subtracts the scores if `commit`, and drops the export. If there is no such
  // export, a former call has ended it, and this call does nothing.
  absl::Status End(const EmbeddingTable& table, const std::string& id,
                   bool commit);

 private:
  static constexpr size_t kMaxIds = 16;

  Mutex mutex_;
  // The exports of each id, in the order in which the ids were first used.
  std::deque<std::vector<Export>> exports_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace tfswitch

#endif  // TFSWITCH_CC_SHARD_PENDING_EXPORTS_H_
