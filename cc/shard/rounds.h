// Commits the rounds of bsp training, and keeps a shard at one round while a
// save brings all shards to the same round.

#ifndef TFSWITCH_CC_SHARD_ROUNDS_H_
#define TFSWITCH_CC_SHARD_ROUNDS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "cc/base/parallel.h"
#include "cc/shard/shard_core.h"
#include "cc/wire/row_calls.h"
#include "tfswitch/v1/parameter_server.pb.h"

namespace tfswitch {

// Has no state of its own. Thread-safe, as its parts are.
class Rounds {
 public:
  explicit Rounds(ShardCore* core) : core_(*core) {}

  // Applies the staged pushes of a closed round; see
  // GradientAccumulator::Commit. Waits while a save holds rounds. DataLoss if
  // this shard has lost one of the tables `staged`, and with it the caller's
  // staged pushes.
  absl::StatusOr<int64_t> Commit(const std::string& group, const Round& round,
                                 const std::vector<TableRef>& staged = {},
                                 const LentThreads* threads = nullptr,
                                 const Interrupt& interrupt = Never);

  // Makes rounds of this shard wait for a save; see RoundHold.
  absl::StatusOr<v1::PauseRoundsResponse> Pause(
      const v1::PauseRoundsRequest& request);
  // Called when all shards hold their rounds. Aborted if this shard does not
  // hold them (any more), FailedPrecondition unless it is shard 0.
  absl::StatusOr<v1::ChooseSnapshotRoundResponse> ChooseSnapshotRound(
      const v1::ChooseSnapshotRoundRequest& request);
  // Applies the missing rounds of a cut. Aborted if the shard is not at the cut
  // afterwards.
  //
  // REQUIRES: the save of the cut holds rounds.
  absl::Status ApplyUpTo(const v1::Cut& cut, const Interrupt& interrupt);
  // The error of a save that does not hold rounds (any more).
  absl::Status NotHeld(const std::string& save_id) const;

 private:
  // Commit() for the save that holds rounds.
  absl::StatusOr<int64_t> CommitHeld(const std::string& group,
                                     const Round& round,
                                     const LentThreads* threads);
  // One optimizer step with the sum or mean of `pushes`.
  absl::Status Apply(const std::string& table,
                     const std::vector<WeightedPush>& pushes,
                     double total_weight, uint64_t number,
                     const LentThreads* threads);

  ShardCore& core_;
};

}  // namespace tfswitch

#endif  // TFSWITCH_CC_SHARD_ROUNDS_H_
