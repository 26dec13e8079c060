#include "cc/rpc/round_conversion.h"

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

}  // namespace tfswitch
