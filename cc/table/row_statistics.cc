#include "cc/table/row_statistics.h"

#include <algorithm>
#include <atomic>
#include <chrono>

namespace tfswitch {

namespace {
std::atomic<float> replayed_day{-1.0f};  // Below 0: there is no replay.
}  // namespace

void SetDayOfWallClock(float day) { replayed_day = day; }

float DayOfWallClock() {
  if (const float day = replayed_day; day >= 0.0f) return day;
  using Days = std::chrono::duration<double, std::ratio<86400>>;
  return static_cast<float>(
      Days(std::chrono::system_clock::now().time_since_epoch()).count());
}

void RowStatistics::Init(float day, float* statistics) const {
  std::fill_n(statistics, num_floats(), 0.0f);
  if (num_floats() > 0) statistics[kLastSeenDay] = day;
}

void RowStatistics::Decay(float day, float* statistics) const {
  const float days = std::floor(day) - std::floor(statistics[kLastSeenDay]);
  const float rest = std::pow(config_.show_click_decay_rate.value, days);
  statistics[kShow] *= rest;
  statistics[kClick] *= rest;
}

UsageOfRow RowStatistics::Read(const float* statistics, float day) const {
  UsageOfRow usage;
  const int size = num_floats();
  if (size == 0) return usage;
  float now[5] = {};
  std::copy_n(statistics, size, now);
  if (config_.kind == StatisticsKind::kShowClick &&
      std::floor(day) > std::floor(now[kLastSeenDay])) {
    Decay(day, now);
  }
  usage.count = now[kCount];
  usage.last_seen_day = now[kLastSeenDay];
  usage.show = now[kShow];
  usage.click = now[kClick];
  usage.delta_score = now[kDeltaScore];
  return usage;
}

}  // namespace tfswitch
