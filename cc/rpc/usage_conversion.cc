#include "cc/rpc/usage_conversion.h"

#include "absl/strings/str_cat.h"

namespace tfswitch {

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

ShrinkReport FromProto(const v1::ShrinkResponse& proto) {
  ShrinkReport report;
  report.evicted_rows = proto.evicted_rows();
  report.evicted_bytes = proto.evicted_bytes();
  report.by_ttl = proto.by_ttl();
  report.by_show_click_score = proto.by_show_click_score();
  report.by_l2_norm = proto.by_l2_norm();
  report.by_max_rows = proto.by_max_rows();
  report.evicted_candidates = proto.evicted_candidates();
  report.remaining_rows = proto.remaining_rows();
  report.remaining_count = proto.remaining_count();
  report.remaining_show = proto.remaining_show();
  report.remaining_click = proto.remaining_click();
  return report;
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
