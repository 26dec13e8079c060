// Repairs a data folder whose push log has lost acknowledged writes, so that a
// server starts from it again.

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
  kToSave,  // Goes back to the newest whole save, without the log.
};

// Prints what is whole in the data folder at `path`, and then repairs it. What
// that removes is in a folder beside the log afterwards. The next server to
// start says how many writes are lost.
//
// Loads the rows, as a server does: only a replay shows which records can be
// replayed, and how many writes they are. `limits` are those of the server.
//
// NotFound if it is no data folder; Aborted if a server has it; DataLoss if
// there are saves and none is whole.
//
// Thread-safe: the folder is locked.
absl::Status Repair(const std::string& path, RepairKind kind,
                    const ShardOptions& limits,
                    absl::FunctionRef<void(absl::string_view line)> print);

}  // namespace tfswitch

#endif  // TFSWITCH_CC_RECOVERY_REPAIR_H_
