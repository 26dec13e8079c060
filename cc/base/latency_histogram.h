// Counts durations in buckets.

#ifndef TFSWITCH_CC_BASE_LATENCY_HISTOGRAM_H_
#define TFSWITCH_CC_BASE_LATENCY_HISTOGRAM_H_

#include <array>
#include <cstddef>
#include <cstdint>

#include "absl/time/time.h"
#include "cc/base/striped_counters.h"

namespace tfswitch {

// Thread-safe.
class LatencyHistogram {
 public:
  // The upper bounds of the buckets, in seconds. A last bucket has no bound.
  static constexpr std::array<double, 18> kBounds = {
      50e-6, 100e-6, 200e-6, 500e-6, 1e-3, 2e-3, 5e-3, 10e-3, 20e-3,
      50e-3, 100e-3, 200e-3, 500e-3, 1.0,  2.0,  5.0,  10.0,  60.0};

  void Record(absl::Duration duration) {
    const int64_t nanoseconds = absl::ToInt64Nanoseconds(duration);
    const double seconds = static_cast<double>(nanoseconds) * 1e-9;
    size_t bucket = 0;
    while (bucket < kBounds.size() && seconds > kBounds[bucket]) ++bucket;
    counters_.Add(bucket, 1);
    counters_.Add(kSum, static_cast<uint64_t>(nanoseconds));
  }

  // The number of durations in a bucket alone; the last is kBounds.size().
  uint64_t InBucket(size_t bucket) const { return counters_.Sum(bucket); }
  double SumSeconds() const {
    return static_cast<double>(counters_.Sum(kSum)) * 1e-9;
  }

 private:
  static constexpr size_t kSum = kBounds.size() + 1;
  StripedCounters<kSum + 1> counters_;
};

}  // namespace tfswitch

#endif  // TFSWITCH_CC_BASE_LATENCY_HISTOGRAM_H_
