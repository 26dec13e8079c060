// The arguments of saves and restores, for clients and shards alike.

#ifndef TFSWITCH_CC_SHARD_CHECKPOINT_CALLS_H_
#define TFSWITCH_CC_SHARD_CHECKPOINT_CALLS_H_

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "cc/base/progress.h"
#include "cc/table/table_config.h"

namespace tfswitch {

struct SaveShardArgs {
  std::string path;
  std::vector<TableRef> tables;  // Empty: all that the shard has.
  std::string save_id;           // See CheckId().
  // `tables` are all that there are: the save has work queues, too, and its
  // commit drops tables that only the former save had.
  bool all_tables = false;
  Progress* progress = nullptr;  // In this process; servers get none.
};

struct CommitCheckpointArgs {
  std::string path;
  std::string save_id;
  std::vector<std::string> manifest_parts;  // From all shards.
  int keep = 2;                             // See checkpoint::CommitOptions.
  std::vector<std::string> dropped_tables;
};

struct StageRestoreArgs {
  std::string path;
  std::vector<std::string> tables;  // Empty: all of the checkpoint.
  std::string restore_id;           // See CheckId().
  int64_t save = 0;                 // Its number; 0: see `newer_than`.
  int newer_than = 0;               // The newest save but so many.
  // The tables' new identities; see TableIdentity. A table that is not among
  // `incarnations` gets that of the checkpoint, or else `new_incarnation`.
  std::map<std::string, uint64_t> incarnations;
  uint64_t new_incarnation = 0;
  std::vector<uint64_t> shard_instances;
};

struct StagedRestore {
  std::vector<std::string> tables;
  int64_t num_rows = 0;
  int64_t save = 0;  // Its number; 0 if it has none.
};

}  // namespace tfswitch

#endif  // TFSWITCH_CC_SHARD_CHECKPOINT_CALLS_H_
