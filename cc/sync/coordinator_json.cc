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
  return absl::Seconds(GetIntegers<int64_t>(json.at(0))) +
         absl::Nanoseconds(GetIntegers<int64_t>(json.at(1)));
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
    contributions.push_back({GetIntegers<uint32_t>(each.at(0)),
                             GetIntegers<uint64_t>(each.at(1)),
                             GetIntegers<int64_t>(each.at(2)),
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
  options.num_workers = GetIntegers<uint32_t>(json.at(1));
  options.join_timeout = DurationOf(json.at(2));
  options.contributions_per_round = GetIntegers<uint32_t>(json.at(3));
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
  options.num_epochs = GetIntegers<int64_t>(json.at(1));
  options.shuffles = json.at(2).get<bool>();
  options.seed = GetIntegers<uint64_t>(json.at(3));
  return options;
}

Json ToJson(const WorkProgress& progress) {
  return Json::array(
      {progress.queue, progress.epoch, progress.index, progress.offset});
}

WorkProgress ProgressOf(const Json& json) {
  return {json.at(0).get<std::string>(), GetIntegers<int64_t>(json.at(1)),
          GetIntegers<int64_t>(json.at(2)), GetIntegers<int64_t>(json.at(3))};
}

Json WorkerGroup::Save() const {
  Json workers = Json::array();
  for (const auto& [id, each] : workers_) {
    workers.push_back(Json::array({id, each.incarnation, each.clock,
                                   each.last_round, each.barrier, each.visits,
                                   each.opening, each.missing_steps}));
  }
  Json closed = Json::array();
  for (const Round& round : closed_) {
    closed.push_back(
        Json::array({ToJson(round.contributions), round.total_weight,
                     round.active, round.next_incarnation}));
  }
  Json losses = Json::array();
  for (const auto& [id, each] : stats_.losses) {
    losses.push_back(Json::array(
        {id, each.number, each.num_steps, each.has_joined, each.is_back}));
  }
  Json positions = Json::array();
  for (const auto& [id, each] : positions_) {
    positions.push_back(
        Json::array({id, each.mark, each.steps, each.has_left}));
  }
  return {{"instance", group_instance_},
          {"workers", std::move(workers)},
          {"ever_joined", ever_joined_},
          {"seen", seen_},
          {"left", left_},
          {"next_incarnation", next_incarnation_},
          {"first_of_present_run", first_of_present_run_},
          {"openings", num_openings_},
          {"departures", num_departures_},
          {"num_awaited", num_awaited_},
          {"waits_for_joins", waits_for_joins_},
          {"has_begun", has_begun_},
          {"last_clock", last_clock_},
          {"first_clock", first_clock_},
          {"num_steps", num_steps_},
          {"open_round", open_round_},
          {"open", ToJson(open_)},
          {"closed", std::move(closed)},
          {"stats",
           Json::array({stats_.rounds, stats_.contributions, stats_.samples,
                        stats_.dropped, stats_.carried, stats_.expired,
                        stats_.rejoined, stats_.staleness})},
          {"losses", std::move(losses)},
          {"num_losses", stats_.num_losses},
          {"job", job_},
          {"positions", std::move(positions)}};
}

absl::Status WorkerGroup::Restore(const Json& saved) {
  try {
    group_instance_ = GetIntegers<uint64_t>(saved.at("instance"));
    for (const Json& each : saved.at("workers")) {
      Worker& worker = workers_[GetIntegers<uint32_t>(each.at(0))];
      worker.incarnation = GetIntegers<uint64_t>(each.at(1));
      worker.clock = GetIntegers<int64_t>(each.at(2));
      worker.last_round = GetIntegers<int64_t>(each.at(3));
      worker.barrier = each.at(4).get<std::string>();
      worker.visits = GetIntegers<int64_t>(each.at(5));
      worker.opening = GetIntegers<int64_t>(each.at(6));
      worker.missing_steps = GetIntegers<uint32_t>(each.at(7));
    }
    ever_joined_ = GetIntegers<std::set<uint32_t>>(saved.at("ever_joined"));
    seen_ = GetIntegers<std::set<uint32_t>>(saved.at("seen"));
    left_ = GetIntegers<std::set<uint32_t>>(saved.at("left"));
    next_incarnation_ = GetIntegers<uint64_t>(saved.at("next_incarnation"));
    first_of_present_run_ =
        GetIntegers<uint64_t>(saved.at("first_of_present_run"));
    num_openings_ = GetIntegers<int64_t>(saved.at("openings"));
    num_departures_ = GetIntegers<int64_t>(saved.at("departures"));
    num_awaited_ = GetIntegers<uint32_t>(saved.at("num_awaited"));
    waits_for_joins_ = saved.at("waits_for_joins").get<bool>();
    has_begun_ = saved.at("has_begun").get<bool>();
    last_clock_ = GetIntegers<int64_t>(saved.at("last_clock"));
    first_clock_ = GetIntegers<int64_t>(saved.at("first_clock"));
    num_steps_ =
        GetIntegers<std::map<uint32_t, int64_t>>(saved.at("num_steps"));
    open_round_ = GetIntegers<int64_t>(saved.at("open_round"));
    open_ = ContributionsOf(saved.at("open"));
    const Json& closed = saved.at("closed");
    int64_t number = open_round_ - static_cast<int64_t>(closed.size());
    for (const Json& each : closed) {
      Round& round = closed_.emplace_back();
      round.number = number++;
      round.contributions = ContributionsOf(each.at(0));
      round.total_weight = each.at(1).get<double>();
      round.active = GetIntegers<std::vector<uint64_t>>(each.at(2));
      round.next_incarnation = GetIntegers<uint64_t>(each.at(3));
      round.group_instance = group_instance_;
    }
    const Json& stats = saved.at("stats");
    stats_.rounds = GetIntegers<int64_t>(stats.at(0));
    stats_.contributions = GetIntegers<int64_t>(stats.at(1));
    stats_.samples = stats.at(2).get<double>();
    stats_.dropped = GetIntegers<int64_t>(stats.at(3));
    stats_.carried = GetIntegers<int64_t>(stats.at(4));
    stats_.expired = GetIntegers<int64_t>(stats.at(5));
    stats_.rejoined = GetIntegers<int64_t>(stats.at(6));
    stats_.staleness = GetIntegers<std::vector<int64_t>>(stats.at(7));
    // Older files end here.
    if (saved.contains("losses")) {
      stats_.num_losses = GetIntegers<int64_t>(saved.at("num_losses"));
      for (const Json& each : saved.at("losses")) {
        stats_.losses[GetIntegers<uint32_t>(each.at(0))] = {
            GetIntegers<int64_t>(each.at(1)), GetIntegers<int64_t>(each.at(2)),
            each.at(3).get<bool>(), each.at(4).get<bool>()};
      }
      job_ = saved.at("job").get<std::string>();
      for (const Json& each : saved.at("positions")) {
        positions_[GetIntegers<uint32_t>(each.at(0))] = {
            GetIntegers<int64_t>(each.at(1)), GetIntegers<int64_t>(each.at(2)),
            each.at(3).get<bool>()};
      }
    }
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
      leases[GetIntegers<uint32_t>(each.at(0))] = {
          GetIntegers<uint64_t>(each.at(1)), GetIntegers<int64_t>(each.at(2)),
          GetIntegers<int64_t>(each.at(3)), GetIntegers<int64_t>(each.at(4))};
    }
    return leases;
  };
  try {
    State state;
    state.epoch = GetIntegers<int64_t>(saved.at(0));
    state.num_taken = GetIntegers<int64_t>(saved.at(1));
    state.unfinished = GetIntegers<std::map<int64_t, int64_t>>(saved.at(2));
    TFSWITCH_RETURN_IF_ERROR(Restore(state));
    leases_ = leases_of(saved.at(3));
    last_finished_ = leases_of(saved.at(4));
    reissued_ = GetIntegers<int64_t>(saved.at(5));
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
