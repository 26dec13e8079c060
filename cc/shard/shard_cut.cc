// A save has the rows of one round on all shards, in three steps. All shards
// hold their rounds. Then the coordinator says which round has closed last: no
// shard can be past it. Then each shard applies the rounds up to this one that
// it lacks, as workers would. So a save waits for no worker, dead or alive.
//
// A table has one snapshot at a time, so a save waits until the previous one is
// written. Rounds must not wait that long: while a shard is still being saved,
// it does not hold rounds for the next save, and answers that it waits.
//
// A round may have passed the hold just before that began, and may still be
// being applied. It had closed, so it is one of the cut's rounds. Applying
// those takes the lock of the group, and so waits for it.

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "cc/base/files.h"
#include "cc/base/status_macros.h"
#include "cc/shard/shard.h"

namespace tfswitch {

absl::StatusOr<v1::PauseRoundsResponse> Shard::PauseRounds(
    const v1::PauseRoundsRequest& request) {
  const std::string& save_id = request.save_id();
  TFSWITCH_RETURN_IF_ERROR(CheckId("save_id", save_id));
  TFSWITCH_RETURN_IF_ERROR(CheckNotSaving());
  v1::PauseRoundsResponse response;
  if (request.hold_ms() <= 0) {
    round_hold_.End(save_id);
    return response;
  }
  const bool is_held =
      round_hold_.Begin(save_id, absl::Milliseconds(request.hold_ms()));
  // Saves that begin after this wait until the hold has ended.
  if (!is_held || !saving_.TryLock()) {
    if (is_held) round_hold_.End(save_id);
    response.set_waiting_for(
        absl::StrCat("another save on shard ", options_.shard_index));
    return response;
  }
  saving_.Unlock();
  for (v1::CommittedRound& each : stage_.LastRounds()) {
    *response.add_committed() = std::move(each);
  }
  return response;
}

absl::StatusOr<v1::ChooseSnapshotRoundResponse> Shard::ChooseSnapshotRound(
    const v1::ChooseSnapshotRoundRequest& request) {
  TFSWITCH_ASSIGN_OR_RETURN(const auto coordinator, FindCoordinator());
  std::optional<v1::SavedWorkQueues> work_queues;
  if (request.with_work_queues()) work_queues.emplace();
  v1::ChooseSnapshotRoundResponse response;
  *response.mutable_cut() = coordinator->ChooseSnapshotRound(
      request, options_.num_shards,
      work_queues.has_value() ? &*work_queues : nullptr);
  if (!round_hold_.SetWorkQueues(request.save_id(), std::move(work_queues))) {
    return NotHeld(request.save_id());
  }
  return response;
}

absl::Status Shard::ApplyRoundsUpTo(const v1::Cut& cut,
                                    const Interrupt& interrupt) {
  for (int i = 0; i < cut.rounds_size(); ++i) {
    TFSWITCH_RETURN_IF_ERROR(interrupt());
    const std::string& group = cut.rounds(i).group();
    const Round& round = cut.rounds(i).round();
    absl::StatusOr<int64_t> committed =
        CommitHeldRound(group, round, /*threads=*/nullptr);
    if (IsErrorOfAppliedRound(committed.status())) committed = round.number();
    if (absl::IsAborted(committed.status())) {
      return absl::AbortedError(absl::StrCat(
          "shard ", options_.shard_index,
          " cannot save: ", committed.status().message(), ". Save again"));
    }
    TFSWITCH_RETURN_IF_ERROR(committed.status());
    const bool is_last =
        i + 1 == cut.rounds_size() || cut.rounds(i + 1).group() != group;
    if (!is_last || *committed == round.number()) continue;
    return absl::AbortedError(absl::StrCat(
        "group '", group, "': shard ", options_.shard_index,
        " has applied round ", *committed, ", and the save is of round ",
        round.number(), ". Save again"));
  }
  return absl::OkStatus();
}

absl::Status Shard::NotHeld(const std::string& save_id) const {
  return absl::AbortedError(
      absl::StrCat("save '", save_id, "' does not hold the rounds of shard ",
                   options_.shard_index,
                   " (any more): the calls from its beginning to this "
                   "one took longer than ",
                   absl::FormatDuration(RoundHold::kLongest),
                   ", or the server was restarted. Save again"));
}

}  // namespace tfswitch
