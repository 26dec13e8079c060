// Repairs a data folder whose push log has lost acknowledged writes, so that a
// server can start from it again.

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
  kCut,     // Cuts the log at the first damage, if there is one.
  kToSave,  // Returns to the newest whole save, without the log.
};

// Prints what is whole in the data folder at `path`, and then repairs it. Moves
// the removed records to a folder beside the log. The next server to start
// reports how many writes are lost.
//
// Loads the rows, as a server does: only a replay shows which records can be
// replayed, and how many writes they have. `limits` are those of the server.
//
// NotFound if `path` is no data folder; Aborted if a server has it; DataLoss if
// there are saves and none is whole.
//
// Thread-safe: the folder is locked.
absl::Status Repair(const std::string& path, RepairKind kind,
                    const ShardOptions& limits,
                    absl::FunctionRef<void(absl::string_view line)> print);

}  // namespace tfswitch

#endif  // TFSWITCH_CC_RECOVERY_REPAIR_H_
