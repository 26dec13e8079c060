// Repairs a data folder whose push log has lost acknowledged writes. Afterwards
// a server can start from the folder again.

#ifndef TFSWITCH_CC_RECOVERY_REPAIR_H_
#define TFSWITCH_CC_RECOVERY_REPAIR_H_

#include <string>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "cc/shard/shard.h"

namespace tfswitch {

enum class RepairKind {
  kDryRun,  // Changes nothing.
  kCut,     // Cuts the log at its first damage.
  kToSave,  // Returns to the newest undamaged save, without the log.
};

// Prints which saves and records of the data folder at `path` are undamaged,
// and then repairs the folder. Moves the removed records to a folder beside the
// log. The next server that starts from the folder reports how many writes are
// lost.
//
// Loads the rows as a server does, because only a replay shows which records
// can be replayed, and how many writes they have. `limits` are the limits of
// the server.
//
// NotFound if `path` is no data folder. Aborted if a server uses it. DataLoss
// if there are saves and all are damaged.
//
// Thread-safe, because the folder is locked.
absl::Status Repair(const std::string& path, RepairKind kind,
                    const ShardOptions& limits,
                    absl::FunctionRef<void(absl::string_view line)> print);

}  // namespace tfswitch

#endif  // TFSWITCH_CC_RECOVERY_REPAIR_H_
