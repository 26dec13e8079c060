// Keeps gradients until their round closes.

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
  StagedPush(StagedPush&&) = default;  // Moved vectors keep their data.
  StagedPush& operator=(StagedPush&&) = default;

  std::vector<Key> own_keys;
  std::vector<float> own_gradients;
  OwnedObservations own_observations;
};

// A staged push, and the number of samples of its step.
struct WeightedPush {
  const StagedPush* push = nullptr;
  double weight = 0.0;
};

// Marks an error of applying a round. The round counts as committed, so
// committing it again changes nothing.
absl::Status ErrorOfAppliedRound(absl::Status error);
bool IsErrorOfAppliedRound(const absl::Status& status);

// Marks the error of a round that was refused because a newer instance of its
// group is known.
absl::Status ErrorOfOlderGroup(absl::Status error, uint64_t newer_instance);
// The newer instance of a marked error; 0 if the status has no such mark.
uint64_t NewerInstanceOf(const absl::Status& status);

// Keeps the pushes of workers by step, until a caller commits the round in
// which these steps count. WorkerGroup decides which steps count. This class
// applies them, once, in an order that does not depend on the order of arrival:
// by worker, then clock, then content.
//
// When a round is committed, steps that can no longer count are dropped: steps
// before those of the round, and steps of workers that have gone.
//
// Thread-safe. Groups do not wait for each other.
class GradientAccumulator {
 public:
  // How often a step may push to one table.
  static constexpr size_t kMaxPushesPerStep = 1024;

  explicit GradientAccumulator(
      uint64_t max_groups = std::numeric_limits<uint64_t>::max())
      : max_groups_(max_groups) {}

  // FailedPrecondition if the step's round has been committed.
  // ResourceExhausted if the step has too many pushes, or there are too many
  // groups. Drops pushes of a worker that the group has given up, which learns
  // of that at the end of its step.
  absl::Status Add(const StepTag& tag, const std::string& table,
                   StagedPush push);

  // Calls apply(table, pushes, total_weight) for each table that has pushes of
  // `round`. Returns the group's last committed round afterwards:
  // `round.number`; a later one if the round was committed before, which
  // changes nothing; or an earlier one if rounds between are missing, which the
  // caller must commit first. A group without committed rounds begins with the
  // oldest round that the coordinator still keeps.
  //
  // A round with the number kNoRound commits nothing. If its instance is newer
  // than the known one, the group starts again with no rounds. Each worker
  // sends such a round first, so that rounds of any other instance are late
  // ones. The answer is the last committed round, too.
  //
  // Aborted for rounds of another instance than the known one, marked if the
  // known one is newer. If `apply` has failed, its first error, marked, also
  // for repetitions of the round.
  using Apply = absl::FunctionRef<absl::Status(
      const std::string& table, const std::vector<WeightedPush>& pushes,
      double total_weight)>;
  absl::StatusOr<int64_t> Commit(const std::string& group, const Round& round,
                                 Apply apply);

  // Whether the round has been committed in the known instance of its group.
  bool HasCommitted(const std::string& group, const Round& round);
  // The last committed round of each group. Waits for rounds that are being
  // committed.
  std::vector<v1::CommittedRound> LastRounds();

  // Forgets the pushes staged for a table.
  void DropTable(const std::string& table);

  // Saves which rounds have been committed, without staged pushes, and restores
  // that. REQUIRES: nothing is staged or committed before RestoreGroups().
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
    // The state of the last committed round.
    int64_t committed ABSL_GUARDED_BY(mutex) = WorkerGroup::kNoRound;
    absl::Status status ABSL_GUARDED_BY(mutex);
    uint64_t instance ABSL_GUARDED_BY(mutex) = 0;  // 0 if none is known.
    std::set<uint64_t> active ABSL_GUARDED_BY(mutex);
    uint64_t next_incarnation ABSL_GUARDED_BY(mutex) = 0;
    // The last clock of each incarnation whose round has been committed.
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
