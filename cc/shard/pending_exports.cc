#include "cc/shard/pending_exports.h"

#include <algorithm>
#include <utility>

namespace tfswitch {

void PendingExports::Keep(Export exported) {
  std::deque<Export> dropped;  // Freed outside the lock.
  MutexLock lock(&mutex_);
  const std::shared_ptr<EmbeddingTable> table = exported.table.lock();
  const auto former =
      std::find_if(exports_.begin(), exports_.end(), [&](const Export& each) {
        return each.id == exported.id && each.table.lock() == table;
      });
  if (former != exports_.end()) {
    dropped.push_back(std::move(*former));
    exports_.erase(former);
  }
  exports_.push_back(std::move(exported));
  if (exports_.size() > kMaxExports) {
    dropped.push_back(std::move(exports_.front()));
    exports_.pop_front();
  }
}

void PendingExports::Settle(const EmbeddingTable& table, const std::string& id,
                            bool is_published) {
  Export settled;
  {
    MutexLock lock(&mutex_);
    const auto found =
        std::find_if(exports_.begin(), exports_.end(), [&](const Export& each) {
          return each.id == id && each.table.lock().get() == &table;
        });
    if (found == exports_.end()) return;
    settled = std::move(*found);
    exports_.erase(found);
  }
  const std::shared_ptr<EmbeddingTable> exported = settled.table.lock();
  if (is_published && exported != nullptr) {
    exported->SubtractDeltaScores(settled.keys, settled.scores);
  }
}

}  // namespace tfswitch
