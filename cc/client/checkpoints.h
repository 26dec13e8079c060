// Saving and restoring the tables of a cluster, in the steps that leave the
// former state in place when something fails half-way.

#ifndef TFSWITCH_CC_CLIENT_CHECKPOINTS_H_
#define TFSWITCH_CC_CLIENT_CHECKPOINTS_H_

#include "absl/status/statusor.h"
#include "cc/client/parameter_client.h"
#include "tfswitch/v1/control.pb.h"

namespace tfswitch {

// Saves tables. The saves that are there stay whole until the new one is
// published; with `tables` named, their other tables are kept in it. DataLoss
// if a server has lost a part of a table: nothing is saved then. A save that
// fails is removed.
absl::StatusOr<v1::CheckpointReport> SaveCheckpoint(
    ParameterClient& client, const v1::SaveRequest& asked);

// Replaces tables by their saved rows. Every server has read and verified its
// rows before any server changes. If they are damaged and no save is asked for,
// the one before is tried. InvalidArgument if the number of the save is below
// 0.
absl::StatusOr<v1::CheckpointReport> RestoreCheckpoint(
    ParameterClient& client, const v1::RestoreRequest& asked);

}  // namespace tfswitch

#endif  // TFSWITCH_CC_CLIENT_CHECKPOINTS_H_
