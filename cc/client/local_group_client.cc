#include "cc/client/local_group_client.h"

#include <utility>

#include "cc/base/status_macros.h"

namespace tfswitch {
namespace {

class LocalGroupClient final : public GroupClient {
 public:
  explicit LocalGroupClient(std::shared_ptr<Shard> shard)
      : shard_(std::move(shard)) {}

  absl::Status CreateGroup(const std::string& group,
                           const WorkerGroupOptions& options) override {
    TFSWITCH_ASSIGN_OR_RETURN(const auto groups, shard_->FindCoordinator());
    return groups->CreateGroup(group, options);
  }

  absl::StatusOr<WorkerGroup::Place> Join(const std::string& group,
                                          uint32_t worker, uint64_t previous,
                                          uint64_t newer_instance) override {
    TFSWITCH_ASSIGN_OR_RETURN(const auto groups, shard_->FindCoordinator());
    return groups->Join(group, worker, previous, newer_instance);
  }

  absl::Status Beat(const GroupMember& member,
                    absl::Duration /*timeout*/) override {
    TFSWITCH_ASSIGN_OR_RETURN(const auto groups, shard_->FindCoordinator());
    return groups->Beat(member.group, member.worker, member.incarnation);
  }

  absl::StatusOr<int64_t> Arrive(
      const GroupMember& member, int64_t clock, int64_t round, double weight,
      const std::vector<WorkProgress>& progress) override {
    TFSWITCH_ASSIGN_OR_RETURN(const auto groups, shard_->FindCoordinator());
    return groups->Arrive(member.group, member.worker, member.incarnation,
                          clock, round, weight, progress);
  }

  absl::StatusOr<Arrival> ArriveAndWait(
      const GroupMember& member, int64_t clock, int64_t round, double weight,
      const std::vector<WorkProgress>& progress, int64_t /*staleness*/,
      absl::Time /*deadline*/) override {
    TFSWITCH_ASSIGN_OR_RETURN(const auto groups, shard_->FindCoordinator());
    Arrival arrival;
    TFSWITCH_ASSIGN_OR_RETURN(
        arrival.open_round,
        groups->Arrive(member.group, member.worker, member.incarnation, clock,
                       round, weight, progress));
    // There is no way to save: WaitForRound() and WaitForTurn() come next.
    return arrival;
  }

  absl::Status Leave(const GroupMember& member,
                     absl::Duration /*timeout*/) override {
    TFSWITCH_ASSIGN_OR_RETURN(const auto groups, shard_->FindCoordinator());
    return groups->Leave(member.group, member.worker, member.incarnation);
  }

  absl::StatusOr<Round> WaitForRound(const GroupMember& member, int64_t number,
                                     absl::Time deadline) override {
    TFSWITCH_ASSIGN_OR_RETURN(const auto groups, shard_->FindCoordinator());
    return groups->WaitForRound(member.group, member.worker, member.incarnation,
                                number, deadline);
  }

  absl::Status WaitForTurn(const GroupMember& member, int64_t clock,
                           int64_t staleness, absl::Time deadline) override {
    TFSWITCH_ASSIGN_OR_RETURN(const auto groups, shard_->FindCoordinator());
    return groups->WaitForTurn(member.group, member.worker, member.incarnation,
                               clock, staleness, deadline);
  }

  absl::StatusOr<WorkerGroup::Place> WaitAtBarrier(
      const GroupMember& member, const std::string& barrier, int64_t visit,
      absl::Time deadline) override {
    TFSWITCH_ASSIGN_OR_RETURN(const auto groups, shard_->FindCoordinator());
    return groups->WaitAtBarrier(member.group, member.worker,
                                 member.incarnation, barrier, visit, deadline);
  }

  absl::StatusOr<WorkerGroup::Stats> GroupStats(
      const std::string& group) override {
    TFSWITCH_ASSIGN_OR_RETURN(const auto groups, shard_->FindCoordinator());
    return groups->GroupStats(group);
  }

  absl::Status CreateWorkQueue(const std::string& group,
                               const std::string& queue,
                               const WorkQueueOptions& options) override {
    TFSWITCH_ASSIGN_OR_RETURN(const auto groups, shard_->FindCoordinator());
    return groups->CreateWorkQueue(group, queue, options);
  }

  absl::StatusOr<std::optional<WorkItem>> TakeWorkItem(
      const GroupMember& member, const std::string& queue) override {
    TFSWITCH_ASSIGN_OR_RETURN(const auto groups, shard_->FindCoordinator());
    return groups->TakeWorkItem(member.group, member.worker, member.incarnation,
                                queue);
  }

  absl::Status FinishWorkItem(const GroupMember& member,
                              const std::string& queue, int64_t epoch,
                              int64_t index) override {
    TFSWITCH_ASSIGN_OR_RETURN(const auto groups, shard_->FindCoordinator());
    return groups->FinishWorkItem(member.group, member.worker,
                                  member.incarnation, queue, epoch, index);
  }

  absl::StatusOr<WorkQueue::Stats> WorkQueueStats(
      const std::string& group, const std::string& queue) override {
    TFSWITCH_ASSIGN_OR_RETURN(const auto groups, shard_->FindCoordinator());
    return groups->WorkQueueStats(group, queue);
  }

 private:
  const std::shared_ptr<Shard> shard_;
};

}  // namespace

std::unique_ptr<GroupClient> NewLocalGroupClient(std::shared_ptr<Shard> shard) {
  return std::make_unique<LocalGroupClient>(std::move(shard));
}

}  // namespace tfswitch
