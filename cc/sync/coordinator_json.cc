// Groups and work queues as JSON, with all that workers have been told. Lists
// of numbers stand for structs, in the order in which they are written here:
// there is one for each contribution of the rounds that are kept.
//
// Times are not in it: leases begin anew when a server has come back.

#include "cc/sync/coordinator_json.h"

#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "cc/base/status_macros.h"

namespace tfswitch {
namespace {

absl::Status Damaged(const std::string& what) {
  return absl::DataLossError("the saved state of " + what + " is damaged");
}

Json ToJson(absl::Duration duration) {
  const int64_t seconds = absl::ToInt64Seconds(duration);
  return Json::array(
      {seconds, absl::ToInt64Nanoseconds(duration - absl::Seconds(seconds))});
}

absl::Duration DurationOf(const Json& json) {
  return absl::Seconds(json.at(0).get<int64_t>()) +
         absl::Nanoseconds(json.at(1).get<int64_t>());
}

Json ToJson(const std::vector<Contribution>& contributions) {
  Json list = Json::array();
  for (const Contribution& each : contributions) {
    list.push_back(Json::array(
        {each.worker, each.incarnation, each.clock, each.weight, each.stands}));
  }
  return list;
}

std::vector<Contribution> ContributionsOf(const Json& json) {
  std::vector<Contribution> contributions;
  for (const Json& each : json) {
    contributions.push_back({each.at(0).get<uint32_t>(),
                             each.at(1).get<uint64_t>(),
                             each.at(2).get<int64_t>(),
                             each.at(3).get<double>(), each.at(4).get<bool>()});
  }
  return contributions;
}

}  // namespace

Json ToJson(const WorkerGroupOptions& options) {
  return Json::array({ToJson(options.lease), options.num_workers,
                      ToJson(options.join_timeout),
                      options.contributions_per_round,
                      options.carries_late_contributions, options.settings});
}

WorkerGroupOptions GroupOptionsOf(const Json& json) {
  WorkerGroupOptions options;
  options.lease = DurationOf(json.at(0));
  options.num_workers = json.at(1).get<uint32_t>();
  options.join_timeout = DurationOf(json.at(2));
  options.contributions_per_round = json.at(3).get<uint32_t>();
  options.carries_late_contributions = json.at(4).get<bool>();
  options.settings = json.at(5).get<std::string>();
  return options;
}

Json ToJson(const WorkQueueOptions& options) {
  return Json::array(
      {options.items, options.num_epochs, options.shuffles, options.seed});
}

WorkQueueOptions QueueOptionsOf(const Json& json) {
  WorkQueueOptions options;
  options.items = json.at(0).get<std::vector<std::string>>();
  options.num_epochs = json.at(1).get<int64_t>();
  options.shuffles = json.at(2).get<bool>();
  options.seed = json.at(3).get<uint64_t>();
  return options;
}

Json ToJson(const WorkProgress& progress) {
  return Json::array(
      {progress.queue, progress.epoch, progress.index, progress.offset});
}

WorkProgress ProgressOf(const Json& json) {
  return {json.at(0).get<std::string>(), json.at(1).get<int64_t>(),
          json.at(2).get<int64_t>(), json.at(3).get<int64_t>()};
}

Json WorkerGroup::Save() const {
  Json workers = Json::array();
  for (const auto& [id, each] : workers_) {
    workers.push_back(
        Json::array({id, each.incarnation, each.clock, each.last_round,
                     each.barrier, each.visits, each.opening}));
  }
  Json closed = Json::array();
  for (const Round& round : closed_) {
    closed.push_back(
        Json::array({ToJson(round.contributions), round.total_weight,
                     round.active, round.next_incarnation}));
  }
  return {{"instance", group_instance_},
          {"workers", std::move(workers)},
          {"ever_joined", ever_joined_},
          {"seen", seen_},
          {"next_incarnation", next_incarnation_},
          {"first_of_present_run", first_of_present_run_},
          {"openings", num_openings_},
          {"departures", num_departures_},
          {"waits_for_joins", waits_for_joins_},
          {"last_clock", last_clock_},
          {"num_steps", num_steps_},
          {"open_round", open_round_},
          {"open", ToJson(open_)},
          {"closed", std::move(closed)},
          {"stats",
           Json::array({stats_.rounds, stats_.contributions, stats_.samples,
                        stats_.dropped, stats_.carried, stats_.expired,
                        stats_.rejoined, stats_.staleness})}};
}

absl::Status WorkerGroup::Restore(const Json& saved) {
  try {
    group_instance_ = saved.at("instance").get<uint64_t>();
    for (const Json& each : saved.at("workers")) {
      Worker& worker = workers_[each.at(0).get<uint32_t>()];
      worker.incarnation = each.at(1).get<uint64_t>();
      worker.clock = each.at(2).get<int64_t>();
      worker.last_round = each.at(3).get<int64_t>();
      worker.barrier = each.at(4).get<std::string>();
      worker.visits = each.at(5).get<int64_t>();
      worker.opening = each.at(6).get<int64_t>();
    }
    ever_joined_ = saved.at("ever_joined").get<std::set<uint32_t>>();
    seen_ = saved.at("seen").get<std::set<uint32_t>>();
    next_incarnation_ = saved.at("next_incarnation").get<uint64_t>();
    first_of_present_run_ = saved.at("first_of_present_run").get<uint64_t>();
    num_openings_ = saved.at("openings").get<int64_t>();
    num_departures_ = saved.at("departures").get<int64_t>();
    waits_for_joins_ = saved.at("waits_for_joins").get<bool>();
    last_clock_ = saved.at("last_clock").get<int64_t>();
    num_steps_ = saved.at("num_steps").get<std::map<uint32_t, int64_t>>();
    open_round_ = saved.at("open_round").get<int64_t>();
    open_ = ContributionsOf(saved.at("open"));
    const Json& closed = saved.at("closed");
    int64_t number = open_round_ - static_cast<int64_t>(closed.size());
    for (const Json& each : closed) {
      Round& round = closed_.emplace_back();
      round.number = number++;
      round.contributions = ContributionsOf(each.at(0));
      round.total_weight = each.at(1).get<double>();
      round.active = each.at(2).get<std::vector<uint64_t>>();
      round.next_incarnation = each.at(3).get<uint64_t>();
      round.group_instance = group_instance_;
    }
    const Json& stats = saved.at("stats");
    stats_.rounds = stats.at(0).get<int64_t>();
    stats_.contributions = stats.at(1).get<int64_t>();
    stats_.samples = stats.at(2).get<double>();
    stats_.dropped = stats.at(3).get<int64_t>();
    stats_.carried = stats.at(4).get<int64_t>();
    stats_.expired = stats.at(5).get<int64_t>();
    stats_.rejoined = stats.at(6).get<int64_t>();
    stats_.staleness = stats.at(7).get<std::vector<int64_t>>();
  } catch (const Json::exception&) {
    return Damaged("a group");
  }
  if (open_round_ < 0 || stats_.staleness.size() != kStalenessBuckets) {
    return Damaged("a group");
  }
  return absl::OkStatus();
}

Json WorkQueue::Save() const {
  const auto list_of = [](const std::map<uint32_t, Lease>& leases) {
    Json list = Json::array();
    for (const auto& [worker, lease] : leases) {
      list.push_back(Json::array(
          {worker, lease.incarnation, lease.epoch, lease.index, lease.offset}));
    }
    return list;
  };
  return Json::array({epoch_, num_taken_, returned_, list_of(leases_),
                      list_of(last_finished_), reissued_});
}

absl::Status WorkQueue::RestoreSaved(const Json& saved) {
  const auto leases_of = [](const Json& list) {
    std::map<uint32_t, Lease> leases;
    for (const Json& each : list) {
      leases[each.at(0).get<uint32_t>()] = {
          each.at(1).get<uint64_t>(), each.at(2).get<int64_t>(),
          each.at(3).get<int64_t>(), each.at(4).get<int64_t>()};
    }
    return leases;
  };
  try {
    State state;
    state.epoch = saved.at(0).get<int64_t>();
    state.num_taken = saved.at(1).get<int64_t>();
    state.unfinished = saved.at(2).get<std::map<int64_t, int64_t>>();
    TFSWITCH_RETURN_IF_ERROR(Restore(state));
    leases_ = leases_of(saved.at(3));
    last_finished_ = leases_of(saved.at(4));
    reissued_ = saved.at(5).get<int64_t>();
  } catch (const Json::exception&) {
    return Damaged("a work queue");
  }
  for (const auto& [worker, lease] : leases_) {
    if (lease.index < 0 || lease.index >= num_items()) {
      return Damaged("a work queue");
    }
  }
  return absl::OkStatus();
}

}  // namespace tfswitch
