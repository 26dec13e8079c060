// A save has the rows after one and the same round on all shards. It gets them
// in three steps. First, all shards stop applying rounds. Then the coordinator
// chooses the round that has closed last; no shard can have passed it. Then
// each shard applies the rounds that it still lacks up to this one, as workers
// would. So a save waits for no worker, dead or alive.
//
// A table has only one snapshot at a time, so a save must wait until the
// previous save is written. Rounds must not wait that long. So while an earlier
// save is still being written, a shard does not stop applying rounds for the
// next save. It answers that the next save must wait.
//
// When a hold begins, a round may be in the middle of being applied. This round
// has closed, so it is one of the rounds of the save. To apply these, the shard
// must lock the group, and so it waits until the running round is applied.

#include "cc/shard/rounds.h"

#include <algorithm>
#include <cstddef>
#include <memory>
#include <optional>
#include <utility>

#include "absl/functional/function_ref.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "cc/base/files.h"
#include "cc/base/key_batch.h"
#include "cc/base/key_observations.h"
#include "cc/base/status_macros.h"
#include "cc/shard/row_work.h"

namespace tfswitch {
namespace {

// The summed gradients of all pushes of a round to one table.
struct RoundSums {
  std::vector<Key> keys;
  std::vector<float> sums;
  OwnedObservations summed;
};

// Sums the pushes by key. Used if the workers have different keys.
absl::Status SumByKey(const EmbeddingTable& table,
                      const std::vector<WeightedPush>& pushes,
                      absl::FunctionRef<float(const WeightedPush&)> scale_of,
                      bool needs_counts, RoundSums* round) {
  const std::string& name = table.config().name;
  std::vector<Key> all;
  std::vector<float> scaled;
  OwnedObservations observations;
  for (const WeightedPush& each : pushes) {
    const StagedPush& push = *each.push;
    // The table may have been replaced by one of a different shape since the
    // push was staged.
    TFSWITCH_RETURN_IF_ERROR(CheckSize(name, "gradient", push.keys.size(),
                                       table.dim(), push.gradients.size()));
    all.insert(all.end(), push.keys.begin(), push.keys.end());
    const size_t begin = scaled.size();
    scaled.resize(begin + push.gradients.size(), 0.0f);
    AddScaled(push.gradients, scale_of(each),
              absl::MakeSpan(scaled).subspan(begin));
    observations.Append(push.observations, push.keys.size());
  }
  if (all.size() > size_t{INT32_MAX}) {
    return absl::InvalidArgumentError(
        absl::StrCat("table '", name, "': a round of ", all.size(),
                     " keys is too large; split the batches"));
  }
  std::vector<Key>& keys = round->keys;
  keys.resize(all.size());
  std::vector<int32_t> inverse(all.size());
  keys.resize(ThreadUniqueKeys().Run(all, absl::MakeSpan(keys),
                                     absl::MakeSpan(inverse)));
  round->sums.resize(keys.size() * static_cast<size_t>(table.dim()));
  SumByInverse(inverse, table.dim(), scaled, absl::MakeSpan(round->sums));
  round->summed = OwnedObservations(inverse, keys.size(), observations.view(),
                                    needs_counts);
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<int64_t> Rounds::Commit(const std::string& group,
                                       const Round& round,
                                       const std::vector<TableRef>& staged,
                                       const LentThreads* threads,
                                       const Interrupt& interrupt) {
  for (const TableRef& table : staged) {
    const absl::Status found = core_.tables.Find(table).status();
    if (absl::IsDataLoss(found)) return found;
  }
  if (round.number() != WorkerGroup::kNoRound &&
      !core_.stage.HasCommitted(group, round)) {
    TFSWITCH_RETURN_IF_ERROR(core_.round_hold.Wait(interrupt));
  }
  absl::StatusOr<int64_t> committed = CommitHeld(group, round, threads);
  for (const auto& table : core_.tables.All()) core_.limits.Trim(*table);
  return committed;
}

absl::StatusOr<int64_t> Rounds::CommitHeld(const std::string& group,
                                           const Round& round,
                                           const LentThreads* threads) {
  v1::CommitRoundRequest request;
  if (core_.journal.log() != nullptr) {
    request.set_group(group);
    *request.mutable_round() = round;
  }
  const WriteGate::Pass pass(core_.journal.gate());
  TFSWITCH_ASSIGN_OR_RETURN(
      const uint64_t record,
      core_.journal.Log(RecordType::kCommitRound, request));
  // Each worker commits the round, and each commit has a record of its own. The
  // number of the round seeds random choices, because it is the same for all.
  const uint64_t number =
      record == 0 ? 0 : static_cast<uint64_t>(round.number()) + 1;
  return core_.stage.Commit(
      group, round,
      [&](const std::string& table, const std::vector<WeightedPush>& pushes,
          double total_weight) {
        return Apply(table, pushes, total_weight, number, threads);
      });
}

absl::Status Rounds::Apply(const std::string& name,
                           const std::vector<WeightedPush>& pushes,
                           double total_weight, uint64_t number,
                           const LentThreads* threads) {
  TFSWITCH_ASSIGN_OR_RETURN(const std::shared_ptr<EmbeddingTable> table,
                            core_.tables.Find(name));
  const bool is_mean =
      table->config().consistency.reduction == Reduction::kMean;
  // A round without samples has no mean.
  if (is_mean && total_weight == 0.0) return absl::OkStatus();
  const auto scale_of = [&](const WeightedPush& each) {
    return is_mean ? static_cast<float>(each.weight / total_weight) : 1.0f;
  };
  const size_t dim = static_cast<size_t>(table->dim());
  // All workers should have the same learning rate. If not, the first push
  // counts.
  const StagedPush& first = *pushes[0].push;
  const bool have_same_keys =
      std::all_of(pushes.begin(), pushes.end(), [&](const WeightedPush& each) {
        return each.push->keys == first.keys &&
               each.push->gradients.size() == each.push->keys.size() * dim;
      });
  GradientBatch batch;
  static_cast<StepSettings&>(batch) = first;
  for (const WeightedPush& each : pushes) {
    const StagedPush& push = *each.push;
    batch.insert_missing = batch.insert_missing || push.insert_missing;
    batch.JoinRound(push);
    batch.day = std::max(batch.day, push.day);
  }
  RoundSums round;
  // Counts are not needed for a dense table, because every push has all its
  // blocks.
  const bool needs_counts =
      table->config().NeedsCounts() && table->config().layout.empty();
  if (have_same_keys && !needs_counts) {  // True for dense tables.
    round.keys.assign(first.keys.begin(), first.keys.end());
    round.sums.assign(round.keys.size() * dim, 0.0f);
    for (const WeightedPush& each : pushes) {
      AddScaled(each.push->gradients, scale_of(each),
                absl::MakeSpan(round.sums));
    }
  } else {
    TFSWITCH_RETURN_IF_ERROR(
        SumByKey(*table, pushes, scale_of, needs_counts, &round));
  }
  TFSWITCH_RETURN_IF_ERROR(
      CheckFinite(name, "the round's gradient", round.keys, round.sums));
  batch.keys = round.keys;
  batch.gradients = round.sums;
  batch.observations = round.summed.view();
  TFSWITCH_RETURN_IF_ERROR(
      CheckObservations(name, batch.keys, batch.observations));
  batch.number = number;
  return ApplyBatch(*table, batch, threads).status();
}

absl::StatusOr<v1::PauseRoundsResponse> Rounds::Pause(
    const v1::PauseRoundsRequest& request) {
  const std::string& save_id = request.save_id();
  TFSWITCH_RETURN_IF_ERROR(CheckId("save_id", save_id));
  TFSWITCH_RETURN_IF_ERROR(core_.turn.CheckNotSaving());
  v1::PauseRoundsResponse response;
  if (request.hold_ms() <= 0) {
    core_.round_hold.End(save_id);
    return response;
  }
  const bool is_held =
      core_.round_hold.Begin(save_id, absl::Milliseconds(request.hold_ms()));
  // If no save is being written now, saves that begin later wait until the hold
  // has ended.
  if (!is_held || core_.turn.IsTaken()) {
    if (is_held) core_.round_hold.End(save_id);
    response.set_waiting_for(
        absl::StrCat("another save on shard ", core_.options.shard_index));
    return response;
  }
  for (v1::CommittedRound& each : core_.stage.LastRounds()) {
    *response.add_committed() = std::move(each);
  }
  return response;
}

absl::StatusOr<v1::ChooseSnapshotRoundResponse> Rounds::ChooseSnapshotRound(
    const v1::ChooseSnapshotRoundRequest& request) {
  TFSWITCH_RETURN_IF_ERROR(core_.options.CheckCoordinates());
  std::optional<v1::SavedWorkQueues> work_queues;
  if (request.with_work_queues()) work_queues.emplace();
  v1::ChooseSnapshotRoundResponse response;
  *response.mutable_cut() = core_.coordinator->ChooseSnapshotRound(
      request, core_.options.num_shards,
      work_queues.has_value() ? &*work_queues : nullptr);
  if (!core_.round_hold.SetWorkQueues(request.save_id(),
                                      std::move(work_queues))) {
    return NotHeld(request.save_id());
  }
  return response;
}

absl::Status Rounds::ApplyUpTo(const v1::Cut& cut, const Interrupt& interrupt) {
  for (int i = 0; i < cut.rounds_size(); ++i) {
    TFSWITCH_RETURN_IF_ERROR(interrupt());
    const std::string& group = cut.rounds(i).group();
    const Round& round = cut.rounds(i).round();
    absl::StatusOr<int64_t> committed =
        CommitHeld(group, round, /*threads=*/nullptr);
    if (IsErrorOfAppliedRound(committed.status())) committed = round.number();
    if (absl::IsAborted(committed.status())) {
      return absl::AbortedError(absl::StrCat(
          "shard ", core_.options.shard_index,
          " cannot save: ", committed.status().message(), ". Save again"));
    }
    TFSWITCH_RETURN_IF_ERROR(committed.status());
    const bool is_last =
        i + 1 == cut.rounds_size() || cut.rounds(i + 1).group() != group;
    if (!is_last || *committed == round.number()) continue;
    return absl::AbortedError(absl::StrCat(
        "group '", group, "': shard ", core_.options.shard_index,
        " has applied round ", *committed, ", and the save is of round ",
        round.number(), ". Save again"));
  }
  return absl::OkStatus();
}

absl::Status Rounds::NotHeld(const std::string& save_id) const {
  return absl::AbortedError(
      absl::StrCat("save '", save_id, "' does not hold the rounds of shard ",
                   core_.options.shard_index,
                   " (any more): the calls from its beginning to this "
                   "one took longer than ",
                   absl::FormatDuration(RoundHold::kLongest),
                   ", or the server was restarted. Save again"));
}

}  // namespace tfswitch
