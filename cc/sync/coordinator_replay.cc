// Logs, replays, saves and restores the state of a coordinator.
//
// A record is the change that a call has made. Records have the order in which
// the calls locked mutex_, and a replay calls the same functions in this order.
// A change does not depend on the time of the replay: the end of a lease has a
// record of its own, and a drawn incarnation is part of the record.

#include <cstdint>
#include <string>
#include <utility>

#include "cc/base/awake_clock.h"
#include "cc/base/status_macros.h"
#include "cc/sync/coordinator.h"

namespace tfswitch {
namespace {

// The contents of a file may be damaged, so an invalid value is DataLoss.
absl::Status AsDataLoss(const absl::Status& valid) {
  return valid.ok() ? valid : absl::DataLossError(valid.message());
}

}  // namespace

void Coordinator::StartLog(Log log, WriteGate* gate) {
  log_ = std::move(log);
  gate_ = gate;
}

absl::Status Coordinator::Replay(absl::string_view bytes) {
  v1::CoordinationRecord record;
  if (!record.ParseFromArray(bytes.data(), static_cast<int>(bytes.size()))) {
    return absl::DataLossError("a record is no change of a group");
  }
  MutexLock lock(&mutex_);
  switch (record.change_case()) {
    case v1::CoordinationRecord::kForget:
      Forget();
      return absl::OkStatus();
    case v1::CoordinationRecord::kCreateGroup: {
      const auto options = FromProto(record.create_group().options());
      TFSWITCH_RETURN_IF_ERROR(AsDataLoss(options.Validate()));
      MakeGroup(record.create_group().group(), options,
                record.first_incarnation());
      return absl::OkStatus();
    }
    case v1::CoordinationRecord::kJoin: {
      TFSWITCH_ASSIGN_OR_RETURN(Group * group, Find(record.join().group()));
      Join(group, record.join(), record.first_incarnation());
      return absl::OkStatus();
    }
    case v1::CoordinationRecord::kArrive: {
      TFSWITCH_ASSIGN_OR_RETURN(Group * group,
                                Find(record.arrive().member().group()));
      return Arrive(group, record.arrive());
    }
    case v1::CoordinationRecord::kEnter: {
      TFSWITCH_ASSIGN_OR_RETURN(Group * group,
                                Find(record.enter().member().group()));
      return Enter(group, record.enter());
    }
    case v1::CoordinationRecord::kLeave: {
      const GroupMember& member = record.leave().member();
      TFSWITCH_ASSIGN_OR_RETURN(Group * group, Find(member.group()));
      Leave(group, member);
      return absl::OkStatus();
    }
    case v1::CoordinationRecord::kCreateWorkQueue: {
      const v1::CreateWorkQueueRequest& request = record.create_work_queue();
      TFSWITCH_RETURN_IF_ERROR(AsDataLoss(Validate(request.options())));
      TFSWITCH_ASSIGN_OR_RETURN(Group * group, Find(request.group()));
      MakeWorkQueue(group, request);
      return absl::OkStatus();
    }
    case v1::CoordinationRecord::kTake: {
      const GroupMember& member = record.take().member();
      TFSWITCH_ASSIGN_OR_RETURN(Group * group, Find(member.group()));
      TFSWITCH_ASSIGN_OR_RETURN(
          WorkQueue * queue, FindQueue(member.group(), record.take().queue()));
      Take(group, member, queue);
      return absl::OkStatus();
    }
    case v1::CoordinationRecord::kFinish: {
      const std::string& name = record.finish().member().group();
      TFSWITCH_ASSIGN_OR_RETURN(Group * group, Find(name));
      TFSWITCH_ASSIGN_OR_RETURN(WorkQueue * queue,
                                FindQueue(name, record.finish().queue()));
      return Finish(group, record.finish(), queue);
    }
    case v1::CoordinationRecord::kExpire: {
      TFSWITCH_ASSIGN_OR_RETURN(Group * group, Find(record.expire().group()));
      Expire(group, record.expire());
      return absl::OkStatus();
    }
    case v1::CoordinationRecord::CHANGE_NOT_SET:
      break;
  }
  return absl::DataLossError(
      "a change of a group of a kind that is not known; it was written by a "
      "newer version");
}

v1::SavedGroups Coordinator::SaveGroups() {
  MutexLock lock(&mutex_);
  v1::SavedGroups saved;
  for (const auto& [name, group] : groups_) {
    v1::SavedGroup& each = *saved.add_groups();
    each.set_group(name);
    *each.mutable_options() = ToProto(group->options);
    group->state.Save(&each);
    each.mutable_advances()->Add(group->advances.begin(),
                                 group->advances.end());
    for (const auto& [queue_name, queue] : *group->queues) {
      *each.add_queues() = queue.Save();
    }
  }
  return saved;
}

absl::Status Coordinator::RestoreGroups(const v1::SavedGroups& saved) {
  MutexLock lock(&mutex_);
  for (const v1::SavedGroup& each : saved.groups()) {
    const WorkerGroupOptions options = FromProto(each.options());
    TFSWITCH_RETURN_IF_ERROR(AsDataLoss(options.Validate()));
    MakeGroup(each.group(), options, each.group_instance());
    Group& group = *groups_.at(each.group());
    TFSWITCH_RETURN_IF_ERROR(group.state.Restore(each));
    group.advances = {each.advances().begin(), each.advances().end()};
    for (const v1::SavedGroup::Queue& queue : each.queues()) {
      TFSWITCH_ASSIGN_OR_RETURN(WorkQueue * restored,
                                FindQueue(each.group(), queue.state().queue()));
      TFSWITCH_RETURN_IF_ERROR(restored->RestoreSaved(queue));
    }
  }
  return absl::OkStatus();
}

absl::Status Coordinator::ForgetGroups() {
  MutexLock lock(&mutex_);
  if (groups_.empty()) return absl::OkStatus();
  if (log_ != nullptr) {
    v1::CoordinationRecord record;
    record.mutable_forget();
    TFSWITCH_RETURN_IF_ERROR(log_(record.SerializeAsString()));
  }
  Forget();
  return absl::OkStatus();
}

void Coordinator::Forget() {
  for (const auto& [name, group] : groups_) {
    RevokeOpenAdvances(group.get());
    for (auto& [queue_name, queue] : *group->queues) {
      queue.ReturnItems([](uint32_t, uint64_t) { return false; });
    }
  }
  groups_.clear();
}

void Coordinator::RenewLeases() {
  MutexLock lock(&mutex_);
  for (const auto& [name, group] : groups_) {
    group->state.RenewLeases(AwakeNow());
  }
}

}  // namespace tfswitch
