// Saving and restoring the tables of a cluster, in the steps that leave the
// former state in place when something fails half-way.

#ifndef TFSWITCH_CC_CLIENT_CHECKPOINTS_H_
#define TFSWITCH_CC_CLIENT_CHECKPOINTS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "cc/client/parameter_client.h"

namespace tfswitch {

struct CheckpointReport {
  std::vector<std::string> tables;
  int64_t num_rows = 0;
};

// Saves `tables`, or all of them if empty, to the folder `path`, which every
// server must be able to write. A checkpoint that is there stays whole until
// the new one is published; with `tables` named, its other tables are kept.
absl::StatusOr<CheckpointReport> SaveCheckpoint(
    ParameterClient& client, const std::string& path,
    const std::vector<std::string>& tables);

// Replaces `tables` (empty: all tables of the checkpoint) by their saved rows.
// Every server has read and verified its rows before any server changes.
absl::StatusOr<CheckpointReport> RestoreCheckpoint(
    ParameterClient& client, const std::string& path,
    const std::vector<std::string>& tables);

}  // namespace tfswitch

#endif  // TFSWITCH_CC_CLIENT_CHECKPOINTS_H_
