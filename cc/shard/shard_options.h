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

// Saves, restores and waits for a save call an Interrupt between chunks and
// while they wait. If it returns an error, they end early with that error.
using checkpoint::Interrupt;
inline absl::Status Never() { return absl::OkStatus(); }

struct ShardOptions {
  uint32_t shard_index = 0;
  uint32_t num_shards = 1;
  // The folder below which clients may save and restore. Empty means that they
  // may not. If not set, clients of this process may do so anywhere.
  std::optional<std::string> checkpoint_root = std::nullopt;
  // A folder below which clients may also give absolute paths, except below
  // `own_folder` and `log_folder`, which are in it. Empty if there is none.
  std::string data_folder = {};
  std::string own_folder = {};
  std::string log_folder = {};
  // Counts applied writes, if not null. Must outlive the shard.
  std::atomic<uint64_t>* num_writes = nullptr;
  absl::Duration staged_restore_expiry = absl::Minutes(5);
  // A later save aborts unpublished saves older than this.
  absl::Duration save_expiry = absl::Hours(1);

  // Limits on the state that clients may create. A table without rows takes
  // about 0.2 MiB.
  uint64_t max_tables = 2000;  // More do not fit into 47 bits of addresses.
  // Bytes for the Bloom filters of all tables. 0 means half of the machine's
  // memory.
  uint64_t max_bloom_bytes = 0;
  // Bytes for copies of rows that change during a save. 0 means half of the
  // memory that is available when the save begins.
  uint64_t max_save_bytes = 0;
  CoordinatorLimits coordinator = {};

  absl::Status Validate() const;

  // Returns the absolute path for a client's path. Paths must lie below
  // `checkpoint_root`, else PermissionDenied; FailedPrecondition if that is
  // empty.
  absl::StatusOr<std::string> ResolvePath(const std::string& path) const;

  // FailedPrecondition unless this is shard 0, which coordinates for all.
  absl::Status CheckCoordinates() const;

  // " on shard 2" for errors, or "" if there is only one shard.
  std::string OnShard() const;
};

}  // namespace tfswitch

#endif  // TFSWITCH_CC_SHARD_SHARD_OPTIONS_H_
