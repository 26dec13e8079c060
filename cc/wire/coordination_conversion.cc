#include "cc/wire/coordination_conversion.h"

#include "absl/time/time.h"

namespace tfswitch {

v1::Round ToProto(const Round& round) {
  v1::Round proto;
  proto.set_number(round.number);
  for (const Contribution& each : round.contributions) {
    v1::Contribution& to = *proto.add_contributions();
    to.set_worker(each.worker);
    to.set_incarnation(each.incarnation);
    to.set_clock(each.clock);
    to.set_weight(each.weight);
  }
  proto.set_total_weight(round.total_weight);
  proto.set_group_instance(round.group_instance);
  proto.mutable_active()->Add(round.active.begin(), round.active.end());
  proto.set_next_incarnation(round.next_incarnation);
  proto.set_first_kept(round.first_kept);
  return proto;
}

Round FromProto(const v1::Round& proto) {
  Round round;
  round.number = proto.number();
  round.contributions.reserve(static_cast<size_t>(proto.contributions_size()));
  for (const v1::Contribution& each : proto.contributions()) {
    round.contributions.push_back(
        {each.worker(), each.incarnation(), each.clock(), each.weight()});
  }
  round.total_weight = proto.total_weight();
  round.group_instance = proto.group_instance();
  round.active.assign(proto.active().begin(), proto.active().end());
  round.next_incarnation = proto.next_incarnation();
  round.first_kept = proto.first_kept();
  return round;
}

v1::GroupOptions ToProto(const WorkerGroupOptions& options) {
  v1::GroupOptions proto;
  proto.set_lease_ms(absl::ToInt64Milliseconds(options.lease));
  proto.set_num_workers(options.num_workers);
  proto.set_join_timeout_ms(absl::ToInt64Milliseconds(options.join_timeout));
  proto.set_contributions_per_round(options.contributions_per_round);
  proto.set_carries_late_contributions(options.carries_late_contributions);
  proto.set_settings(options.settings);
  return proto;
}

WorkerGroupOptions FromProto(const v1::GroupOptions& proto) {
  WorkerGroupOptions options;
  options.lease = absl::Milliseconds(proto.lease_ms());
  options.num_workers = proto.num_workers();
  options.join_timeout = absl::Milliseconds(proto.join_timeout_ms());
  options.contributions_per_round = proto.contributions_per_round();
  options.carries_late_contributions = proto.carries_late_contributions();
  options.settings = proto.settings();
  return options;
}

v1::GetGroupStatsResponse ToProto(const WorkerGroup::Stats& stats) {
  v1::GetGroupStatsResponse proto;
  proto.set_num_active(stats.num_active);
  proto.set_num_waiting(stats.num_waiting);
  proto.set_rounds(stats.rounds);
  proto.set_contributions(stats.contributions);
  proto.set_samples(stats.samples);
  proto.set_dropped(stats.dropped);
  proto.set_carried(stats.carried);
  proto.set_expired(stats.expired);
  proto.set_rejoined(stats.rejoined);
  proto.mutable_staleness()->Add(stats.staleness.begin(),
                                 stats.staleness.end());
  for (const auto& [worker, count] : stats.num_steps) {
    (*proto.mutable_num_steps())[worker] = count;
  }
  proto.set_num_losses(stats.num_losses);
  for (const auto& [worker, loss] : stats.losses) {
    v1::GetGroupStatsResponse::Loss& each = (*proto.mutable_losses())[worker];
    each.set_number(loss.number);
    each.set_num_steps(loss.num_steps);
    each.set_has_joined(loss.has_joined);
    each.set_is_back(loss.is_back);
  }
  for (const auto& [queue, items] : stats.unfinished) {
    (*proto.mutable_unfinished())[queue].mutable_values()->Add(items.begin(),
                                                               items.end());
  }
  return proto;
}

v1::WorkQueueOptions ToProto(const WorkQueueOptions& options) {
  v1::WorkQueueOptions proto;
  for (const std::string& item : options.items) proto.add_items(item);
  proto.set_num_epochs(options.num_epochs);
  proto.set_shuffle(options.shuffles);
  proto.set_seed(options.seed);
  return proto;
}

WorkQueueOptions FromProto(const v1::WorkQueueOptions& proto) {
  WorkQueueOptions options;
  options.items.assign(proto.items().begin(), proto.items().end());
  options.num_epochs = proto.num_epochs();
  options.shuffles = proto.shuffle();
  options.seed = proto.seed();
  return options;
}

v1::WorkItem ToProto(const WorkItem& item) {
  v1::WorkItem proto;
  proto.set_epoch(item.epoch);
  proto.set_index(item.index);
  proto.set_value(item.value);
  proto.set_offset(item.offset);
  return proto;
}

WorkItem FromProto(const v1::WorkItem& proto) {
  return {proto.epoch(), proto.index(), proto.value(), proto.offset()};
}

v1::GetWorkQueueStatsResponse ToProto(const WorkQueue::Stats& stats) {
  v1::GetWorkQueueStatsResponse proto;
  proto.set_epoch(stats.epoch);
  proto.set_num_epochs(stats.num_epochs);
  proto.set_num_items(stats.num_items);
  proto.set_num_finished(stats.num_finished);
  proto.set_num_leased(stats.num_leased);
  proto.set_num_returned(stats.num_returned);
  proto.set_reissued(stats.reissued);
  return proto;
}

}  // namespace tfswitch
