// Counts what is done with a table, for metrics.

#ifndef TFSWITCH_CC_TABLE_TABLE_COUNTERS_H_
#define TFSWITCH_CC_TABLE_TABLE_COUNTERS_H_

#include <cstddef>

#include "cc/base/striped_counters.h"

// Lists the counters. V(name) stands for a counter, for the field of TableStats
// and the field of the message TableInfo with its value.
//
// pulled_keys counts the keys of all pulls; missing_keys counts those that had
// no row when the pull came; refused_keys counts new keys of pulls and pushes
// that got no row because the table was full. An evicted row counts for one
// rule. Rows are demoted to disk, and promoted to memory.
#define TFSWITCH_TABLE_COUNTERS(V) \
  V(num_pulls)                     \
  V(pulled_keys)                   \
  V(missing_keys)                  \
  V(refused_keys)                  \
  V(num_pushes)                    \
  V(pushed_keys)                   \
  V(evicted_by_ttl)                \
  V(evicted_by_show_click_score)   \
  V(evicted_by_l2_norm)            \
  V(evicted_by_max_rows)           \
  V(evicted_by_max_memory)         \
  V(promoted_rows)                 \
  V(demoted_rows)

namespace tfswitch {

enum class TableCounter : size_t {
#define TFSWITCH_NAME(name) name,
  TFSWITCH_TABLE_COUNTERS(TFSWITCH_NAME)
#undef TFSWITCH_NAME
      kSize
};

// Thread-safe.
class TableCounters {
 public:
  void Add(TableCounter counter, int64_t value) {
    counters_.Add(static_cast<size_t>(counter), static_cast<uint64_t>(value));
  }
  int64_t Sum(TableCounter counter) const {
    return static_cast<int64_t>(counters_.Sum(static_cast<size_t>(counter)));
  }

 private:
  StripedCounters<static_cast<size_t>(TableCounter::kSize)> counters_;
};

}  // namespace tfswitch

#endif  // TFSWITCH_CC_TABLE_TABLE_COUNTERS_H_
