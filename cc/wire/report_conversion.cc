#include "cc/wire/report_conversion.h"

#include <algorithm>
#include <limits>

#include "absl/strings/str_cat.h"
#include "cc/wire/table_config_conversion.h"

namespace tfswitch {

v1::TableInfo ToProto(const TableInfo& info) {
  v1::TableInfo proto;
  *proto.mutable_config() = ToProto(info.config);
  proto.set_row_stride_bytes(info.stats.row_stride_bytes);
  proto.set_slot_floats(static_cast<uint32_t>(info.slot_floats));
  proto.set_num_steps(info.stats.num_steps);
#define TFSWITCH_SET(name) proto.set_##name(info.stats.name);
  TFSWITCH_TABLE_SIZES(TFSWITCH_SET)
  TFSWITCH_TABLE_COUNTERS(TFSWITCH_SET)
#undef TFSWITCH_SET
  proto.set_incarnation(info.identity.incarnation);
  proto.mutable_shard_instances()->Add(info.identity.shard_instances.begin(),
                                       info.identity.shard_instances.end());
  proto.set_lost(std::string(info.lost.message()));
  return proto;
}

TableInfo FromProto(const v1::TableInfo& proto) {
  TableInfo info;
  info.config = FromProto(proto.config());
  info.stats.row_stride_bytes = proto.row_stride_bytes();
  info.slot_floats = static_cast<int>(
      std::min<uint32_t>(proto.slot_floats(), std::numeric_limits<int>::max()));
  info.stats.num_steps = proto.num_steps();
#define TFSWITCH_GET(name) info.stats.name = proto.name();
  TFSWITCH_TABLE_SIZES(TFSWITCH_GET)
  TFSWITCH_TABLE_COUNTERS(TFSWITCH_GET)
#undef TFSWITCH_GET
  info.identity = {
      proto.incarnation(),
      {proto.shard_instances().begin(), proto.shard_instances().end()}};
  return info;
}

v1::ShrinkResponse ToProto(const ShrinkReport& report) {
  v1::ShrinkResponse proto;
  proto.set_evicted_rows(report.evicted_rows);
  proto.set_evicted_bytes(report.evicted_bytes);
  proto.set_by_ttl(report.by_ttl);
  proto.set_by_show_click_score(report.by_show_click_score);
  proto.set_by_l2_norm(report.by_l2_norm);
  proto.set_by_max_rows(report.by_max_rows);
  proto.set_evicted_candidates(report.evicted_candidates);
  proto.set_remaining_rows(report.remaining_rows);
  proto.set_remaining_count(report.remaining_count);
  proto.set_remaining_show(report.remaining_show);
  proto.set_remaining_click(report.remaining_click);
  return proto;
}

v1::ReadUsageResponse ToProto(absl::Span<const UsageOfRow> usage,
                              absl::Span<const KeyState> states) {
  v1::ReadUsageResponse proto;
  for (size_t i = 0; i < usage.size(); ++i) {
    proto.add_states(
        static_cast<v1::ReadUsageResponse::State>(static_cast<int>(states[i])));
    proto.add_counts(usage[i].count);
    proto.add_last_seen_days(usage[i].last_seen_day);
    proto.add_shows(usage[i].show);
    proto.add_clicks(usage[i].click);
    proto.add_delta_scores(usage[i].delta_score);
  }
  return proto;
}

absl::Status FromProto(const v1::ReadUsageResponse& proto,
                       absl::Span<UsageOfRow> usage,
                       absl::Span<KeyState> states) {
  const int size = static_cast<int>(usage.size());
  for (const int got :
       {proto.states_size(), proto.counts_size(), proto.last_seen_days_size(),
        proto.shows_size(), proto.clicks_size(), proto.delta_scores_size()}) {
    if (got == size) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("expected the usage of ", size, " keys, got ", got));
  }
  for (int i = 0; i < size; ++i) {
    const v1::ReadUsageResponse::State state = proto.states(i);
    states[i] = state == v1::ReadUsageResponse::ROW ? KeyState::kRow
                : state == v1::ReadUsageResponse::CANDIDATE
                    ? KeyState::kCandidate
                    : KeyState::kUnknown;
    usage[i] = {proto.counts(i), proto.last_seen_days(i), proto.shows(i),
                proto.clicks(i), proto.delta_scores(i)};
  }
  return absl::OkStatus();
}

}  // namespace tfswitch
