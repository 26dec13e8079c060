// What the benchmarks have in common: clocks, medians, and ending on an error.

#ifndef TFSWITCH_BENCHMARKS_BENCH_SUPPORT_H_
#define TFSWITCH_BENCHMARKS_BENCH_SUPPORT_H_

#include <errno.h>
#include <time.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "absl/status/status.h"

namespace tfswitch {

inline double Seconds(clockid_t clock) {
  timespec now;
  clock_gettime(clock, &now);
  return static_cast<double>(now.tv_sec) +
         static_cast<double>(now.tv_nsec) * 1e-9;
}
inline double WallSeconds() { return Seconds(CLOCK_MONOTONIC); }

inline double Median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

// A benchmark has nobody to hand an error to.
[[noreturn]] inline void Die(const std::string& what) {
  std::fprintf(stderr, "%s: %s\n", program_invocation_short_name, what.c_str());
  std::exit(1);
}

inline void Check(const absl::Status& status) {
  if (!status.ok()) Die(status.ToString());
}

}  // namespace tfswitch

#endif  // TFSWITCH_BENCHMARKS_BENCH_SUPPORT_H_
