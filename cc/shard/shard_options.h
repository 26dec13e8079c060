// The settings that all parts of a shard share.

#ifndef TFSWITCH_CC_SHARD_SHARD_OPTIONS_H_
#define TFSWITCH_CC_SHARD_SHARD_OPTIONS_H_

#include <atomic>
#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "cc/checkpoint/checkpoint.h"
#include "cc/sync/coordinator.h"

namespace tfswitch {

// Saves, restores and waits for a save call an Interrupt at intervals. If it
// returns an error, they end with that error.
using checkpoint::Interrupt;
inline absl::Status Never() { return absl::OkStatus(); }

struct ShardOptions {
  uint32_t shard_index = 0;
  uint32_t num_shards = 1;
  // The folder below which clients may save and restore. If empty, they may
  // save and restore nowhere. If not set, clients of this process may do so
  // anywhere.
  std::optional<std::string> checkpoint_root = std::nullopt;
  // The server's data folder; may be empty. Clients may also give absolute
  // paths below it, except below `own_folder` and `log_folder`, which are in
  // it.
  std::string data_folder = {};
  std::string own_folder = {};
  std::string log_folder = {};
  // For rows that move to disk; see GrowthLimits. Empty: none may.
  std::string cold_folder = {};
  // If not null, is incremented for each applied write. Must outlive the shard.
  std::atomic<uint64_t>* num_writes = nullptr;
  absl::Duration staged_restore_expiry = absl::Minutes(5);
  // An unpublished save of this age is aborted when a later save begins.
  absl::Duration save_expiry = absl::Hours(1);

  // Limits on the state that clients may create. A table without rows takes
  // about 0.2 MiB.
  // More tables do not fit into the 47 bits of user addresses.
  uint64_t max_tables = 2000;
  // The most bytes for all tables; see GrowthLimits. 0 means no ceiling.
  uint64_t max_memory = 0;
  // The most bytes for the Bloom filters of all tables. 0 means half of the
  // machine's memory.
  uint64_t max_bloom_bytes = 0;
  // The most bytes that the capacity of a table may reserve. 0 means the memory
  // of the machine or of this process's control group, or max_memory.
  uint64_t max_reserved_bytes = 0;
  // The most bytes for copies of rows that change during a save. 0 means half
  // of the memory that is available when the save begins.
  uint64_t max_save_bytes = 0;
  CoordinatorLimits coordinator = {};

  absl::Status Validate() const;

  // Returns the absolute path for a client's path. PermissionDenied if the path
  // is not below `checkpoint_root`. FailedPrecondition if `checkpoint_root` is
  // empty.
  absl::StatusOr<std::string> ResolvePath(const std::string& path) const;

  // FailedPrecondition unless this is shard 0, which has the coordinator.
  absl::Status CheckCoordinates() const;

  // The share of this shard in `num_rows` rows of the whole table, rounded up.
  uint64_t ShareOf(const TableConfig& config, uint64_t num_rows) const;

  // A text for errors: " on shard 2", or "" if there is only one shard.
  std::string OnShard() const;
};

}  // namespace tfswitch

#endif  // TFSWITCH_CC_SHARD_SHARD_OPTIONS_H_
