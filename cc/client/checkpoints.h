// Saves and restores the tables of a cluster. If a step fails, the tables and
// the earlier saves stay as they were.

#ifndef TFSWITCH_CC_CLIENT_CHECKPOINTS_H_
#define TFSWITCH_CC_CLIENT_CHECKPOINTS_H_

#include "absl/status/statusor.h"
#include "cc/client/parameter_client.h"
#include "tfswitch/v1/control.pb.h"

namespace tfswitch {

// Saves tables. Earlier saves stay complete until the new save is published. If
// the request names `tables`, the new save takes all other tables from the save
// before it. Returns DataLoss, and saves nothing, if a server has lost a part
// of a table. The files of a failed save are removed.
absl::StatusOr<v1::CheckpointReport> SaveCheckpoint(
    ParameterClient& client, const v1::SaveRequest& asked);

// Replaces tables by their saved rows. All servers read and verify the saved
// rows before any server changes a table. If the newest save is damaged and the
// request names no save, tries the save before it. Returns InvalidArgument if
// the request names a save below 0.
absl::StatusOr<v1::CheckpointReport> RestoreCheckpoint(
    ParameterClient& client, const v1::RestoreRequest& asked);

}  // namespace tfswitch

#endif  // TFSWITCH_CC_CLIENT_CHECKPOINTS_H_
