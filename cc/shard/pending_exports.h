// Rows that have been exported by their scores, until somebody says that the
// export has been published: only then does their score start anew.

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
    // The one that was exported: another one of the same name is not meant.
    std::weak_ptr<EmbeddingTable> table;
    std::vector<Key> keys;
    std::vector<float> scores;
  };

  // Keeps the last few ids, each with all of its tables: an export of the same
  // table under the same id is replaced. Exports of tables that are gone go,
  // too.
  void Keep(Export exported);
  // Subtracts the scores, if `commit`, and forgets them. An unknown export has
  // been ended before.
  void End(const EmbeddingTable& table, const std::string& id, bool commit);

 private:
  static constexpr size_t kMaxIds = 16;

  Mutex mutex_;
  // In the order in which ids came first; exports of one id are together.
  std::deque<std::vector<Export>> exports_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace tfswitch

#endif  // TFSWITCH_CC_SHARD_PENDING_EXPORTS_H_
