// A save of one step of all workers. All shards hold their rounds; then the
// coordinator says which one has closed last, which no shard can be past; then
// each shard applies the rounds up to it that it has not applied yet, as the
// workers would. So it waits for nobody, and workers that have died do not
// matter.
//
// A table has one snapshot at a time, so that a save waits for the one before
// to be written. Rounds must not wait for that: a shard that is being saved
// holds nothing, and says so.
//
// A round that has passed the hold before it began is not looked for: it had
// closed, so that it is among those of the cut, and the lock of its group is
// taken once more for these.

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
  // Saves that begin after this let the hold end first.
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
