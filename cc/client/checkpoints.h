// Saves and restores the tables of a cluster. If a step fails, the former state
// stays.

#ifndef TFSWITCH_CC_CLIENT_CHECKPOINTS_H_
#define TFSWITCH_CC_CLIENT_CHECKPOINTS_H_

#include "absl/status/statusor.h"
#include "cc/client/parameter_client.h"
#include "tfswitch/v1/control.pb.h"

namespace tfswitch {

// Saves tables. Present saves stay whole until the new one is published. If the
// request names `tables`, the new save keeps the other tables of the save
// before. Returns DataLoss, and saves nothing, if a server has lost a part of a
// table. A failed save is removed.
absl::StatusOr<v1::CheckpointReport> SaveCheckpoint(
    ParameterClient& client, const v1::SaveRequest& asked);

// Replaces tables by their saved rows. All servers read and verify their rows
// before any server changes. If the save is damaged and the request names none,
// the save before it is tried. Returns InvalidArgument if the number of the
// save is below 0.
absl::StatusOr<v1::CheckpointReport> RestoreCheckpoint(
    ParameterClient& client, const v1::RestoreRequest& asked);

}  // namespace tfswitch

#endif  // TFSWITCH_CC_CLIENT_CHECKPOINTS_H_
