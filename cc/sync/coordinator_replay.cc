// The state of a coordinator in a log and in a save.
//
// A record is the change that a call has made, in the order in which calls have
// got mutex_: the change goes through the same functions again. Nothing in it
// depends on time. A lease that has ended is a change of its own, and so is an
// incarnation that was drawn.

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "cc/base/awake_clock.h"
#include "cc/base/json.h"
#include "cc/base/status_macros.h"
#include "cc/sync/coordinator.h"
#include "cc/sync/coordinator_json.h"

namespace tfswitch {
namespace {

// Files may have been written by somebody else.
template <typename Options>
absl::Status CheckSaved(const Options& options) {
  const absl::Status valid = options.Validate();
  return valid.ok() ? valid : absl::DataLossError(valid.message());
}

}  // namespace

void Coordinator::StartLog(Log log, WriteGate* gate) {
  log_ = std::move(log);
  gate_ = gate;
}

absl::Status Coordinator::Replay(absl::string_view event) {
  TFSWITCH_ASSIGN_OR_RETURN(const Json json, ParseJson(event));
  MutexLock lock(&mutex_);
  try {
    const auto kind = json.at(0).get<std::string>();
    if (kind == "forget") {
      Forget();
      return absl::OkStatus();
    }
    const auto name = json.at(1).get<std::string>();
    if (kind == "create_group") {
      const WorkerGroupOptions options = GroupOptionsOf(json.at(2));
      TFSWITCH_RETURN_IF_ERROR(CheckSaved(options));
      MakeGroup(name, options, GetIntegers<uint64_t>(json.at(3)));
      return absl::OkStatus();
    }
    TFSWITCH_ASSIGN_OR_RETURN(Group * group, Find(name));
    if (kind == "expire") {
      Expire(group, {GetIntegers<std::vector<uint32_t>>(json.at(2)),
                     json.at(3).get<bool>()});
      return absl::OkStatus();
    }
    if (kind == "create_queue") {
      const WorkQueueOptions options = QueueOptionsOf(json.at(3));
      TFSWITCH_RETURN_IF_ERROR(CheckSaved(options));
      MakeWorkQueue(group, json.at(2).get<std::string>(), options);
      return absl::OkStatus();
    }
    if (kind == "join") {
      Join(group, GetIntegers<uint32_t>(json.at(2)),
           GetIntegers<uint64_t>(json.at(3)), GetIntegers<uint64_t>(json.at(4)),
           GetIntegers<int64_t>(json.at(5)),
           json.size() > 6 ? json.at(6).get<std::string>() : "");
      return absl::OkStatus();
    }
    GroupMember member = {name, GetIntegers<uint32_t>(json.at(2)),
                          GetIntegers<uint64_t>(json.at(3))};
    const size_t mark = kind == "leave" ? 4 : 8;  // Older records have none.
    if ((kind == "leave" || kind == "arrive") && json.size() > mark) {
      member.mark = GetIntegers<int64_t>(json.at(mark));
    }
    if (kind == "leave") {
      Leave(group, member);
      return absl::OkStatus();
    }
    if (kind == "arrive") {
      std::vector<WorkProgress> progress;
      for (const Json& each : json.at(7)) progress.push_back(ProgressOf(each));
      return Arrive(group, member, GetIntegers<int64_t>(json.at(4)),
                    GetIntegers<int64_t>(json.at(5)), json.at(6).get<double>(),
                    progress);
    }
    if (kind == "enter") {
      return Enter(group, member, json.at(4).get<std::string>(),
                   GetIntegers<int64_t>(json.at(5)));
    }
    const bool is_take = kind == "take";
    if (is_take || kind == "finish") {
      TFSWITCH_ASSIGN_OR_RETURN(WorkQueue * queue,
                                FindQueue(name, json.at(4).get<std::string>()));
      if (!is_take) {
        return Finish(group, member, queue, GetIntegers<int64_t>(json.at(5)),
                      GetIntegers<int64_t>(json.at(6)));
      }
      Take(group, member, queue);
      return absl::OkStatus();
    }
    return absl::DataLossError(
        absl::StrCat("a change of a group of a kind that is not known: '", kind,
                     "'; it was written by a newer version"));
  } catch (const Json::exception&) {
    return absl::DataLossError("a record is no change of a group");
  }
}

std::string Coordinator::SaveGroups() {
  MutexLock lock(&mutex_);
  Json groups = Json::array();
  for (const auto& [name, group] : groups_) {
    Json advances = Json::array();
    for (const OpenAdvance& each : group->advances) {
      advances.push_back(Json::array(
          {each.round, each.incarnation, each.clock, ToJson(each.before)}));
    }
    Json queues = Json::object();
    for (const auto& [queue_name, queue] : *group->queues) {
      queues[queue_name] = queue.Save();
    }
    groups.push_back({{"name", name},
                      {"options", ToJson(group->options)},
                      {"state", group->state.Save()},
                      {"departures", group->num_departures},
                      {"advances", std::move(advances)},
                      {"queues", std::move(queues)}});
  }
  return DumpJson(groups);
}

absl::Status Coordinator::RestoreGroups(absl::string_view saved) {
  TFSWITCH_ASSIGN_OR_RETURN(const Json groups, ParseJson(saved));
  MutexLock lock(&mutex_);
  try {
    for (const Json& each : groups) {
      const auto name = each.at("name").get<std::string>();
      const Json& state = each.at("state");
      const WorkerGroupOptions options = GroupOptionsOf(each.at("options"));
      TFSWITCH_RETURN_IF_ERROR(CheckSaved(options));
      MakeGroup(name, options, GetIntegers<uint64_t>(state.at("instance")));
      Group& group = *groups_.at(name);
      TFSWITCH_RETURN_IF_ERROR(group.state.Restore(state));
      group.num_departures = GetIntegers<int64_t>(each.at("departures"));
      for (const Json& advance : each.at("advances")) {
        group.advances.push_back({GetIntegers<int64_t>(advance.at(0)),
                                  GetIntegers<uint64_t>(advance.at(1)),
                                  GetIntegers<int64_t>(advance.at(2)),
                                  ProgressOf(advance.at(3))});
      }
      for (const auto& [queue_name, queue] : each.at("queues").items()) {
        TFSWITCH_ASSIGN_OR_RETURN(WorkQueue * restored,
                                  FindQueue(name, queue_name));
        TFSWITCH_RETURN_IF_ERROR(restored->RestoreSaved(queue));
      }
    }
  } catch (const Json::exception&) {
    return absl::DataLossError("the saved state of groups is damaged");
  }
  return absl::OkStatus();
}

absl::Status Coordinator::ForgetGroups() {
  MutexLock lock(&mutex_);
  if (groups_.empty()) return absl::OkStatus();
  if (log_ != nullptr) {
    TFSWITCH_RETURN_IF_ERROR(log_(DumpJson(Json::array({"forget"}))));
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
