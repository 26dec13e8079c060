// Messages of the Coordination service, from their fields in order.

#ifndef TFSWITCH_TESTS_CC_TESTING_COORDINATION_H_
#define TFSWITCH_TESTS_CC_TESTING_COORDINATION_H_

#include <cstdint>
#include <string>
#include <vector>

#include "tfswitch/v1/coordination.pb.h"

namespace tfswitch {

inline v1::Member MemberOf(const std::string& group, uint32_t worker,
                           uint64_t incarnation) {
  v1::Member member;
  member.set_group(group);
  member.set_worker(worker);
  member.set_incarnation(incarnation);
  return member;
}

inline v1::JoinRequest JoinOf(const std::string& group, uint32_t worker,
                              uint64_t previous = 0,
                              uint64_t newer_instance = 0,
                              int64_t first_step = 0,
                              const std::string& job = "") {
  v1::JoinRequest request;
  request.set_group(group);
  request.set_worker(worker);
  request.set_previous_incarnation(previous);
  request.set_newer_group_instance(newer_instance);
  request.set_first_step(first_step);
  request.set_job(job);
  return request;
}

inline v1::WorkProgress ProgressOf(const std::string& queue, int64_t epoch,
                                   int64_t index, int64_t offset) {
  v1::WorkProgress progress;
  progress.set_queue(queue);
  progress.set_epoch(epoch);
  progress.set_index(index);
  progress.set_offset(offset);
  return progress;
}

inline v1::ArriveRequest ArrivalOf(
    const v1::Member& member, int64_t clock, int64_t round, double weight,
    const std::vector<v1::WorkProgress>& progress = {}) {
  v1::ArriveRequest request;
  *request.mutable_member() = member;
  request.set_clock(clock);
  request.set_round(round);
  request.set_weight(weight);
  request.mutable_progress()->Add(progress.begin(), progress.end());
  return request;
}

inline v1::WaitAtBarrierRequest VisitOf(const v1::Member& member,
                                        const std::string& barrier,
                                        int64_t barrier_generation) {
  v1::WaitAtBarrierRequest request;
  *request.mutable_member() = member;
  request.set_barrier(barrier);
  request.set_barrier_generation(barrier_generation);
  return request;
}

inline v1::WorkQueueOptions ItemsOf(const std::vector<std::string>& items,
                                    int64_t num_epochs = 1) {
  v1::WorkQueueOptions options;
  options.mutable_items()->Add(items.begin(), items.end());
  options.set_num_epochs(num_epochs);
  return options;
}

inline v1::CreateWorkQueueRequest QueueOf(const std::string& group,
                                          const std::string& queue,
                                          const v1::WorkQueueOptions& options) {
  v1::CreateWorkQueueRequest request;
  request.set_group(group);
  request.set_queue(queue);
  *request.mutable_options() = options;
  return request;
}

inline v1::TakeWorkItemRequest TakeOf(const v1::Member& member,
                                      const std::string& queue) {
  v1::TakeWorkItemRequest request;
  *request.mutable_member() = member;
  request.set_queue(queue);
  return request;
}

inline v1::FinishWorkItemRequest FinishOf(const v1::Member& member,
                                          const std::string& queue,
                                          int64_t epoch, int64_t index) {
  v1::FinishWorkItemRequest request;
  *request.mutable_member() = member;
  request.set_queue(queue);
  request.set_epoch(epoch);
  request.set_index(index);
  return request;
}

// A contribution that does not survive its worker.
inline v1::Contribution ContributionOf(uint32_t worker, uint64_t incarnation,
                                       int64_t clock, double weight) {
  v1::Contribution contribution;
  contribution.set_worker(worker);
  contribution.set_incarnation(incarnation);
  contribution.set_clock(clock);
  contribution.set_weight(weight);
  return contribution;
}

// `contributions` are in the order of their incarnations; no others are active.
inline v1::Round RoundOf(int64_t number,
                         const std::vector<v1::Contribution>& contributions,
                         uint64_t group_instance = 1) {
  v1::Round round;
  round.set_number(number);
  round.mutable_contributions()->Add(contributions.begin(),
                                     contributions.end());
  for (const v1::Contribution& each : contributions) {
    round.set_total_weight(round.total_weight() + each.weight());
  }
  round.set_group_instance(group_instance);
  round.set_next_incarnation(1);
  for (const v1::Contribution& each : contributions) {
    if (round.next_incarnation() > each.incarnation()) continue;
    round.add_active(each.incarnation());
    round.set_next_incarnation(each.incarnation() + 1);
  }
  return round;
}

}  // namespace tfswitch

#endif  // TFSWITCH_TESTS_CC_TESTING_COORDINATION_H_
