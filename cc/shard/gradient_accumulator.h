// Keeps the gradients of bsp tables until their round is committed.

#ifndef TFSWITCH_CC_SHARD_GRADIENT_ACCUMULATOR_H_
#define TFSWITCH_CC_SHARD_GRADIENT_ACCUMULATOR_H_

#include <cstdint>
#include <limits>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "cc/base/hash.h"
#include "cc/base/key_observations.h"
#include "cc/base/mutex.h"
#include "cc/sync/worker_group.h"
#include "cc/table/embedding_table.h"
#include "google/protobuf/map.h"
#include "tfswitch/v1/checkpoint.pb.h"
#include "tfswitch/v1/parameter_server.pb.h"

namespace tfswitch {

// One push to one table, with its own copies of the data.
struct StagedPush : GradientBatch {
  explicit StagedPush(const GradientBatch& batch)
      : GradientBatch(batch),
        own_keys(batch.keys.begin(), batch.keys.end()),
        own_gradients(batch.gradients.begin(), batch.gradients.end()),
        own_observations(batch.observations) {
    keys = own_keys;
    gradients = own_gradients;
    observations = own_observations.view();
  }
  StagedPush(StagedPush&&) = default;  // Moving keeps the data in place.
  StagedPush& operator=(StagedPush&&) = default;

  std::vector<Key> own_keys;
  std::vector<float> own_gradients;
  OwnedObservations own_observations;
};

// A staged push, and how many samples its step has trained.
struct WeightedPush {
  const StagedPush* push = nullptr;
  double weight = 0.0;
};

// Marks an error that came from applying a round. The round counts as committed
// all the same, so committing it again changes nothing.
absl::Status ErrorOfAppliedRound(absl::Status error);
bool IsErrorOfAppliedRound(const absl::Status& status);

// Marks the error of a round that was refused because the shard knows a newer
// instance of the round's group.
absl::Status ErrorOfOlderGroup(absl::Status error, uint64_t newer_instance);
// The newer instance in an error of ErrorOfOlderGroup(); 0 for other statuses.
uint64_t NewerInstanceOf(const absl::Status& status);

// Stages the pushes of workers by step. When a caller commits a round, applies
// the pushes of the steps that count in it. WorkerGroup decides which steps
// count. Each step is applied once. The order does not depend on when pushes
// arrive: they are sorted by worker, then clock, then content.
//
// A commit also drops the steps that can no longer count: steps before those of
// the round, and steps of workers that have left or died.
//
// Thread-safe. A call for one group does not wait for calls for another.
class GradientAccumulator {
 public:
  // How often one step may push to one table.
  static constexpr size_t kMaxPushesPerStep = 1024;

  explicit GradientAccumulator(
      uint64_t max_groups = std::numeric_limits<uint64_t>::max())
      : max_groups_(max_groups) {}

  // FailedPrecondition if the step's round has been committed.
  // ResourceExhausted if the step has too many pushes, or there are too many
  // groups. If the group has given the worker up, drops the push and returns
  // OK; the worker learns of it at the end of its step.
  absl::Status Add(const StepTag& tag, const std::string& table,
                   StagedPush push);

  // Calls apply(table, pushes, total_weight) for each table that has pushes of
  // `round`. Returns the number of the group's last committed round: usually
  // `round.number`. It is higher if the round was committed before; then
  // nothing changes. It is lower if earlier rounds are missing, which the
  // caller must commit first. If the group has no committed round, the oldest
  // round that the coordinator still keeps is its first.
  //
  // A round with the number kNoRound commits nothing. If its instance of the
  // group is newer than the known one, the group starts again without rounds.
  // Each worker sends such a round when it has joined, so that rounds of older
  // instances are refused from then on. The result is the last committed round,
  // too.
  //
  // Aborted if the round has another instance than the known one;
  // NewerInstanceOf() tells the known one if it is newer. If `apply` fails,
  // returns its first error, marked by ErrorOfAppliedRound(), now and whenever
  // the round is committed again.
  using Apply = absl::FunctionRef<absl::Status(
      const std::string& table, const std::vector<WeightedPush>& pushes,
      double total_weight)>;
  absl::StatusOr<int64_t> Commit(const std::string& group, const Round& round,
                                 Apply apply);

  // Whether the round has been committed, and its instance is the known one.
  bool HasCommitted(const std::string& group, const Round& round);
  // The last committed round of each group. Waits while a round is being
  // committed.
  std::vector<v1::CommittedRound> LastRounds();

  // Drops the pushes that are staged for a table.
  void DropTable(const std::string& table);

  // SaveGroups() saves which rounds have been committed, without staged pushes.
  // RestoreGroups() restores that. REQUIRES: nothing is staged or committed
  // before RestoreGroups().
  using SavedGroups = google::protobuf::Map<std::string, v1::CommittedRounds>;
  void SaveGroups(SavedGroups* saved);
  absl::Status RestoreGroups(const SavedGroups& saved);

  // Calls visit(tag, table, push) for all pushes that are staged now.
  void ForEachStaged(absl::FunctionRef<void(const StepTag&, const std::string&,
                                            const StagedPush&)>
                         visit);

  // The number of steps that are staged now, in all groups.
  int64_t num_staged_steps();

 private:
  // A worker's incarnation and clock.
  using Step = std::pair<uint64_t, int64_t>;
  using TablePushes = std::map<std::string, std::vector<StagedPush>>;

  struct Group {
    Mutex mutex;
    std::map<Step, TablePushes> steps ABSL_GUARDED_BY(mutex);
    // The number and the result of the last committed round.
    int64_t committed ABSL_GUARDED_BY(mutex) = WorkerGroup::kNoRound;
    absl::Status status ABSL_GUARDED_BY(mutex);
    uint64_t instance ABSL_GUARDED_BY(mutex) = 0;  // 0 if not known.
    std::set<uint64_t> active ABSL_GUARDED_BY(mutex);
    uint64_t next_incarnation ABSL_GUARDED_BY(mutex) = 0;
    // For each incarnation, the clock of its last step whose round is
    // committed.
    std::map<uint64_t, int64_t> closed_clocks ABSL_GUARDED_BY(mutex);

    bool HasGone(uint64_t incarnation) const
        ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex) {
      return incarnation < next_incarnation && active.count(incarnation) == 0;
    }
    void GiveUp(const Round& round) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex);
  };

  // Makes the group if it does not exist.
  absl::StatusOr<Group*> FindGroup(const std::string& name);

  const uint64_t max_groups_;

  Mutex mutex_;
  // Groups are never removed, so pointers to them stay valid.
  std::map<std::string, std::unique_ptr<Group>> groups_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace tfswitch

#endif  // TFSWITCH_CC_SHARD_GRADIENT_ACCUMULATOR_H_
