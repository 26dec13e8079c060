// Keeps the scores of exported rows until the export is published. Only then
// are they subtracted from the rows' scores.

#ifndef TFSWITCH_CC_SHARD_PENDING_EXPORTS_H_
#define TFSWITCH_CC_SHARD_PENDING_EXPORTS_H_

#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "cc/base/hash.h"
#include "cc/base/mutex.h"
#include "cc/table/embedding_table.h"

namespace tfswitch {

// Thread-safe.
class PendingExports {
 public:
  struct Export {
    std::string id;
    // The exported table itself, not another one of the same name.
    std::weak_ptr<EmbeddingTable> table;
    std::vector<Key> keys;
    std::vector<float> scores;
  };

  // Keeps an export. Replaces an export of the same table under the same id.
  // Drops exports of tables that are gone, and of all but the last few ids.
  void Keep(Export exported);
  // Subtracts the scores if `commit`, and forgets the export. An unknown export
  // has been ended before, so nothing is done.
  void End(const EmbeddingTable& table, const std::string& id, bool commit);

 private:
  static constexpr size_t kMaxIds = 16;

  Mutex mutex_;
  // The exports of each id, in the order in which ids were first seen.
  std::deque<std::vector<Export>> exports_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace tfswitch

#endif  // TFSWITCH_CC_SHARD_PENDING_EXPORTS_H_
