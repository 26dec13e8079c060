// Common parts of the benchmarks: clocks, medians, figures, and ending with an
// error.

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

// a[i] / b[i].
inline std::vector<double> Ratios(const std::vector<double>& a,
                                  const std::vector<double>& b) {
  std::vector<double> ratios(a.size());
  for (size_t i = 0; i < a.size(); ++i) ratios[i] = a[i] / b[i];
  return ratios;
}

// A benchmark cannot return an error to a caller, so it prints the error and
// ends.
[[noreturn]] inline void Die(const std::string& what) {
  std::fprintf(stderr, "%s: %s\n", program_invocation_short_name, what.c_str());
  std::exit(1);
}

inline void Check(const absl::Status& status) {
  if (!status.ok()) Die(status.ToString());
}

// Adds a figure to the file that run.py reads, whose path is in the
// environment; without it there is no file. `name` is the place on a page,
// "table | row | column". There is a value for each round, and `to_reach` is a
// target such as "at most 2".
inline void Report(const std::string& name, const char* unit,
                   const std::vector<double>& values,
                   const char* to_reach = "") {
  const char* const path = std::getenv("TFSWITCH_FIGURES");
  if (path == nullptr) return;
  std::FILE* const file = std::fopen(path, "a");
  if (file == nullptr) Die(std::string("cannot write ") + path);
  std::fprintf(file, "%s\t%s\t%s", name.c_str(), unit, to_reach);
  for (const double value : values) std::fprintf(file, "\t%.9g", value);
  std::fprintf(file, "\n");
  std::fclose(file);
}

}  // namespace tfswitch

#endif  // TFSWITCH_BENCHMARKS_BENCH_SUPPORT_H_
