#include "cc/shard/pending_exports.h"

#include <algorithm>
#include <iterator>
#include <utility>

namespace tfswitch {

void PendingExports::Keep(Export exported) {
  std::vector<Export> dropped;  // Freed after the unlock.
  MutexLock lock(&mutex_);
  const std::shared_ptr<EmbeddingTable> table = exported.table.lock();
  for (std::vector<Export>& of_id : exports_) {
    const auto first_dropped = std::stable_partition(
        of_id.begin(), of_id.end(), [&](const Export& each) {
          return !each.table.expired() &&
                 !(each.id == exported.id && each.table.lock() == table);
        });
    std::move(first_dropped, of_id.end(), std::back_inserter(dropped));
    of_id.erase(first_dropped, of_id.end());
  }
  exports_.erase(std::remove_if(exports_.begin(), exports_.end(),
                                [](const std::vector<Export>& of_id) {
                                  return of_id.empty();
                                }),
                 exports_.end());
  auto found = std::find_if(exports_.begin(), exports_.end(),
                            [&](const std::vector<Export>& of_id) {
                              return of_id[0].id == exported.id;
                            });
  if (found == exports_.end()) {
    found = exports_.emplace(exports_.end());
  }
  found->push_back(std::move(exported));
  if (exports_.size() > kMaxIds) {
    std::move(exports_.front().begin(), exports_.front().end(),
              std::back_inserter(dropped));
    exports_.pop_front();
  }
}

absl::Status PendingExports::End(const EmbeddingTable& table,
                                 const std::string& id, bool commit) {
  Export ended;
  {
    MutexLock lock(&mutex_);
    for (auto of_id = exports_.begin(); of_id != exports_.end(); ++of_id) {
      const auto found =
          std::find_if(of_id->begin(), of_id->end(), [&](const Export& each) {
            return each.id == id && each.table.lock().get() == &table;
          });
      if (found == of_id->end()) continue;
      ended = std::move(*found);
      of_id->erase(found);
      if (of_id->empty()) exports_.erase(of_id);
      break;
    }
  }
  // If the export was not found, it has no table, and nothing is subtracted.
  const std::shared_ptr<EmbeddingTable> exported = ended.table.lock();
  if (!commit || exported == nullptr) return absl::OkStatus();
  constexpr size_t kAtOnce = 8192;
  for (size_t begin = 0; begin < ended.keys.size(); begin += kAtOnce) {
    absl::Status subtracted = exported->SubtractDeltaScores(
        absl::MakeConstSpan(ended.keys).subspan(begin, kAtOnce),
        absl::MakeConstSpan(ended.scores).subspan(begin, kAtOnce));
    if (subtracted.ok()) continue;
    // A repeated call goes on here.
    const auto done = static_cast<std::ptrdiff_t>(begin);
    ended.keys.erase(ended.keys.begin(), ended.keys.begin() + done);
    ended.scores.erase(ended.scores.begin(), ended.scores.begin() + done);
    Keep(std::move(ended));
    return subtracted;
  }
  return absl::OkStatus();
}

}  // namespace tfswitch
