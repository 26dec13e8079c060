// The statistics of a row's use: floats in an array beside the rows, updated
// with each push. Where rows leave the table they are the last slots.
//
//   usage        | count | last_seen_day |
//   show_click   | count | last_seen_day | show | click | delta_score |
//
// Shows and clicks lose a part with each day that passes, when they are touched
// next: the same as touching all rows once a day, without doing it. The rules
// and the names of their numbers are those of Paddle's CTR accessor.

#ifndef TFSWITCH_CC_TABLE_ROW_STATISTICS_H_
#define TFSWITCH_CC_TABLE_ROW_STATISTICS_H_

#include <cmath>

#include "cc/table/table_config.h"

namespace tfswitch {

// The time as statistics have it: days since 1970, so that a float32 tells
// three minutes apart.
float DayOfWallClock();

// From now on DayOfWallClock() is `day`, for a replay of former writes; below
// 0: the day of the clock again.
void SetDayOfWallClock(float day);

// A row's statistics, as of a day.
struct UsageOfRow {
  float count = 0.0f;  // Occurrences, exact up to 2^24.
  float last_seen_day = 0.0f;
  float show = 0.0f;
  float click = 0.0f;
  float delta_score = 0.0f;  // Score gained since the last delta model.
};

// Immutable, so thread-safe.
class RowStatistics {
 public:
  explicit RowStatistics(const StatisticsConfig& config) : config_(config) {}

  // 0, 2 or 5. The longer layouts begin with the shorter ones.
  int num_floats() const {
    switch (config_.kind) {
      case StatisticsKind::kNone:
        return 0;
      case StatisticsKind::kUsage:
        return 2;
      case StatisticsKind::kShowClick:
        return 5;
    }
    return 0;
  }

  // A new row: no occurrences, seen on `day`.
  void Init(float day, float* statistics) const;

  // Adds a push's observations of the row. (Inlined in any case, as it is also
  // called from files compiled for AVX2.)
  //
  // REQUIRES: num_floats() > 0.
  [[gnu::always_inline]] void Observe(float count, float shows, float clicks,
                                      float day, float* statistics) const {
    statistics[kCount] += count;
    if (config_.kind == StatisticsKind::kShowClick) {
      if (std::floor(day) > std::floor(statistics[kLastSeenDay])) {
        Decay(day, statistics);
      }
      statistics[kShow] += shows;
      statistics[kClick] += clicks;
      statistics[kDeltaScore] += Score(shows, clicks);
    }
    if (day > statistics[kLastSeenDay]) statistics[kLastSeenDay] = day;
  }

  // The statistics on `day`. Shows and clicks are 0 without them.
  UsageOfRow Read(const float* statistics, float day) const;

  // A delta model has been written with `delta_score` of the row's.
  void SubtractDeltaScore(float delta_score, float* statistics) const {
    if (config_.kind != StatisticsKind::kShowClick) return;
    statistics[kDeltaScore] =
        std::fmax(statistics[kDeltaScore] - delta_score, 0.0f);
  }

  // (show - click) * nonclk_coeff + click * click_coeff
  [[gnu::always_inline]] float Score(float show, float click) const {
    return (show - click) * config_.nonclk_coeff + click * config_.click_coeff;
  }

 private:
  enum Place { kCount, kLastSeenDay, kShow, kClick, kDeltaScore };

  // Brings show and click to `day`, which is a later one.
  void Decay(float day, float* statistics) const;

  const StatisticsConfig config_;
};

}  // namespace tfswitch

#endif  // TFSWITCH_CC_TABLE_ROW_STATISTICS_H_
