// The versions of tables' rows that the answers of one server have told.

#ifndef TFSWITCH_CC_RPC_CLIENT_SEEN_ROWS_H_
#define TFSWITCH_CC_RPC_CLIENT_SEEN_ROWS_H_

#include <algorithm>
#include <cstdint>
#include <map>
#include <string>

#include "cc/base/mutex.h"
#include "cc/client/parameter_client.h"
#include "cc/wire/row_calls.h"

namespace tfswitch {

// Thread-safe.
class SeenRows {
 public:
  // Notes an answer with this version. Pass the number of this client's own
  // pushes in the answer.
  void Note(const std::string& table, const RowsVersion& version,
            int64_t own_pushes) {
    if (version.generation == 0) return;  // An older server.
    MutexLock lock(&mutex_);
    Table& seen = tables_[table];
    const auto pushes = static_cast<int64_t>(version.num_pushes);
    seen.own_pushes += own_pushes;
    if (seen.generation != version.generation) {
      if (seen.generation != 0) ++seen.num_changes;
      seen.generation = version.generation;
      seen.pushes = pushes;  // Fewer if the server was restarted.
    }
    // Answers may come in another order than the server gave them.
    seen.pushes = std::max(seen.pushes, pushes);
  }

  RowChanges ChangesOf(const std::string& table) const {
    MutexLock lock(&mutex_);
    const auto found = tables_.find(table);
    if (found == tables_.end()) return {};
    const Table& seen = found->second;
    return {seen.num_changes, seen.pushes - seen.own_pushes};
  }

 private:
  struct Table {
    uint64_t generation = 0;  // 0: not known yet.
    int64_t num_changes = 0;
    int64_t pushes = 0;
    int64_t own_pushes = 0;
  };

  mutable Mutex mutex_;
  std::map<std::string, Table> tables_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace tfswitch

#endif  // TFSWITCH_CC_RPC_CLIENT_SEEN_ROWS_H_
