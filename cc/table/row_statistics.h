// The statistics of a row's use: floats in an array of their own. Each push
// updates them. In checkpoints and exports they are the last slots of a row.
//
//   usage        | count | last_seen_day |
//   show_click   | count | last_seen_day | show | click | delta_score |
//
// Shows and clicks are multiplied by a decay factor each day. A row applies the
// factors of the missed days when it is next used, with the same result as if
// all rows were updated each day. The rules and the names of their numbers are
// those of Paddle's CTR accessor.

#ifndef TFSWITCH_CC_TABLE_ROW_STATISTICS_H_
#define TFSWITCH_CC_TABLE_ROW_STATISTICS_H_

#include <cmath>

#include "cc/table/table_config.h"

namespace tfswitch {

// Returns the current time in the unit of statistics: days since 1970. As a
// float32 it distinguishes times that are three minutes apart.
float DayOfWallClock();

// Makes DayOfWallClock() return `day`, while earlier writes are replayed. A
// value below 0 makes it return the clock's day again.
void SetDayOfWallClock(float day);

// A row's statistics, as of a day.
struct UsageOfRow {
  float count = 0.0f;  // Occurrences, exact up to 2^24.
  float last_seen_day = 0.0f;
  float show = 0.0f;
  float click = 0.0f;
  float delta_score = 0.0f;  // Score gained since the last delta model.
};

// Thread-safe: objects never change.
class RowStatistics {
 public:
  explicit RowStatistics(const StatisticsConfig& config) : config_(config) {}

  // The number of floats: 0, 2 or 5. The layout of 5 begins with that of 2.
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

  // Initialises the statistics of a new row: no occurrences, last seen on
  // `day`.
  void Init(float day, float* statistics) const;

  // Adds a push's observations of the row. (Always inlined, because files that
  // are compiled for AVX2 call it too.)
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

  // Returns the statistics as of `day`. Shows and clicks are 0 if they are not
  // counted.
  UsageOfRow Read(const float* statistics, float day) const;

  // Subtracts a score that a delta model contains from the row's delta score.
  void SubtractDeltaScore(float delta_score, float* statistics) const {
    if (config_.kind != StatisticsKind::kShowClick) return;
    statistics[kDeltaScore] =
        std::fmax(statistics[kDeltaScore] - delta_score, 0.0f);
  }

  // The score (show - click) * nonclk_coeff + click * click_coeff.
  [[gnu::always_inline]] float Score(float show, float click) const {
    return (show - click) * config_.nonclk_coeff + click * config_.click_coeff;
  }

 private:
  enum Place { kCount, kLastSeenDay, kShow, kClick, kDeltaScore };

  // Multiplies show and click by the decay from the last day to `day`, which is
  // later.
  void Decay(float day, float* statistics) const;

  const StatisticsConfig config_;
};

}  // namespace tfswitch

#endif  // TFSWITCH_CC_TABLE_ROW_STATISTICS_H_
