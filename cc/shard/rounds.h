// Commits the rounds of bsp training. Also stops a shard from applying rounds
// while a save brings all shards to the same round.

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

// Thread-safe: it has no state of its own, and uses thread-safe parts.
class Rounds {
 public:
  explicit Rounds(ShardCore* core) : core_(*core) {}

  // Applies the staged pushes of a closed round; see
  // GradientAccumulator::Commit. Waits while a save holds rounds. DataLoss if
  // this shard has lost one of the tables in `staged`, and with it pushes that
  // the caller has staged.
  absl::StatusOr<int64_t> Commit(const std::string& group, const Round& round,
                                 const std::vector<TableRef>& staged = {},
                                 const LentThreads* threads = nullptr,
                                 const Interrupt& interrupt = Never);

  // Makes the rounds of this shard wait for a save; see RoundHold.
  absl::StatusOr<v1::PauseRoundsResponse> Pause(
      const v1::PauseRoundsRequest& request);
  // Chooses the round of a save, after all shards have stopped applying rounds.
  // Aborted if this shard applies rounds again. FailedPrecondition unless this
  // is shard 0.
  absl::StatusOr<v1::ChooseSnapshotRoundResponse> ChooseSnapshotRound(
      const v1::ChooseSnapshotRoundRequest& request);
  // Applies the rounds of the cut that this shard lacks. Aborted if the shard
  // is at a different round afterwards.
  //
  // REQUIRES: the save of the cut holds rounds.
  absl::Status ApplyUpTo(const v1::Cut& cut, const Interrupt& interrupt);
  // The error for a save that does not hold rounds (any more).
  absl::Status NotHeld(const std::string& save_id) const;

 private:
  // Does the work of Commit(), also for the save that holds rounds.
  absl::StatusOr<int64_t> CommitHeld(const std::string& group,
                                     const Round& round,
                                     const LentThreads* threads);
  // Takes one optimizer step with the sum or the mean of `pushes`.
  absl::Status Apply(const std::string& table,
                     const std::vector<WeightedPush>& pushes,
                     double total_weight, uint64_t number,
                     const LentThreads* threads);

  ShardCore& core_;
};

}  // namespace tfswitch

#endif  // TFSWITCH_CC_SHARD_ROUNDS_H_
