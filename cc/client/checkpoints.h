// Saving and restoring the tables of a cluster, in the steps that leave the
// former state in place when something fails half-way.

#ifndef TFSWITCH_CC_CLIENT_CHECKPOINTS_H_
#define TFSWITCH_CC_CLIENT_CHECKPOINTS_H_

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "cc/client/parameter_client.h"
#include "tfswitch/v1/control.pb.h"

namespace tfswitch {

struct SaveOptions {
  // The folder, which every server must be able to write.
  std::string path;
  std::vector<std::string> tables = {};  // Empty: all.
  int keep = 2;                          // See checkpoint::CommitOptions.
  std::vector<std::string> dropped_tables = {};
  // One that GetProgress takes, in place of lines on stderr; drawn for this
  // call, as its save_id. Empty: lines.
  std::string progress_id = {};
};

struct RestoreOptions {
  std::string path;
  std::vector<std::string> tables = {};  // Empty: all of the checkpoint.
  int64_t save = 0;                      // 0: the newest that can be read.
  std::map<std::string, std::string> new_names = {};  // Of some of `tables`.
  v1::StageRestoreRequest::State state = v1::StageRestoreRequest::SAVED;
  std::string progress_id = {};  // As for a save.
};

// Saves tables. The saves that are there stay whole until the new one is
// published; with `tables` named, their other tables are kept in it. DataLoss
// if a server has lost a part of a table: nothing is saved then. A save that
// fails is removed.
absl::StatusOr<v1::CheckpointReport> SaveCheckpoint(ParameterClient& client,
                                                    const SaveOptions& options);

// Replaces tables by their saved rows. Every server has read and verified its
// rows before any server changes. If they are damaged and no save is asked for,
// the one before is tried.
absl::StatusOr<v1::CheckpointReport> RestoreCheckpoint(
    ParameterClient& client, const RestoreOptions& options);

}  // namespace tfswitch

#endif  // TFSWITCH_CC_CLIENT_CHECKPOINTS_H_
