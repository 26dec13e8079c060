// A group client that passes calls on, for tests to override some of them.

#ifndef TFSWITCH_TESTS_CC_TESTING_FORWARDING_GROUP_CLIENT_H_
#define TFSWITCH_TESTS_CC_TESTING_FORWARDING_GROUP_CLIENT_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "cc/client/group_client.h"

namespace tfswitch {

class ForwardingGroupClient : public GroupClient {
 public:
  // `groups` must outlive this.
  explicit ForwardingGroupClient(GroupClient* groups) : groups_(groups) {}

  absl::Status CreateGroup(const std::string& group,
                           const WorkerGroupOptions& options) override {
    return groups_->CreateGroup(group, options);
  }
  absl::StatusOr<WorkerGroup::Place> Join(const std::string& group,
                                          uint32_t worker, uint64_t previous,
                                          uint64_t newer_instance) override {
    return groups_->Join(group, worker, previous, newer_instance);
  }
  absl::Status Beat(const GroupMember& member,
                    absl::Duration timeout) override {
    return groups_->Beat(member, timeout);
  }
  absl::StatusOr<int64_t> Arrive(
      const GroupMember& member, int64_t clock, int64_t round, double weight,
      const std::vector<WorkProgress>& progress) override {
    return groups_->Arrive(member, clock, round, weight, progress);
  }
  absl::StatusOr<Arrival> ArriveAndWait(
      const GroupMember& member, int64_t clock, int64_t round, double weight,
      const std::vector<WorkProgress>& progress, int64_t staleness,
      absl::Time deadline) override {
    return groups_->ArriveAndWait(member, clock, round, weight, progress,
                                  staleness, deadline);
  }
  absl::Status Leave(const GroupMember& member,
                     absl::Duration timeout) override {
    return groups_->Leave(member, timeout);
  }
  absl::StatusOr<Round> WaitForRound(const GroupMember& member, int64_t number,
                                     absl::Time deadline) override {
    return groups_->WaitForRound(member, number, deadline);
  }
  absl::Status WaitForTurn(const GroupMember& member, int64_t clock,
                           int64_t staleness, absl::Time deadline) override {
    return groups_->WaitForTurn(member, clock, staleness, deadline);
  }
  absl::StatusOr<WorkerGroup::Place> WaitAtBarrier(
      const GroupMember& member, const std::string& barrier, int64_t visit,
      absl::Time deadline) override {
    return groups_->WaitAtBarrier(member, barrier, visit, deadline);
  }
  absl::StatusOr<WorkerGroup::Stats> GroupStats(
      const std::string& group) override {
    return groups_->GroupStats(group);
  }
  absl::Status CreateWorkQueue(const std::string& group,
                               const std::string& queue,
                               const WorkQueueOptions& options) override {
    return groups_->CreateWorkQueue(group, queue, options);
  }
  absl::StatusOr<std::optional<WorkItem>> TakeWorkItem(
      const GroupMember& member, const std::string& queue) override {
    return groups_->TakeWorkItem(member, queue);
  }
  absl::Status FinishWorkItem(const GroupMember& member,
                              const std::string& queue, int64_t epoch,
                              int64_t index) override {
    return groups_->FinishWorkItem(member, queue, epoch, index);
  }
  absl::StatusOr<WorkQueue::Stats> WorkQueueStats(
      const std::string& group, const std::string& queue) override {
    return groups_->WorkQueueStats(group, queue);
  }

 private:
  GroupClient* const groups_;
};

}  // namespace tfswitch

#endif  // TFSWITCH_TESTS_CC_TESTING_FORWARDING_GROUP_CLIENT_H_
