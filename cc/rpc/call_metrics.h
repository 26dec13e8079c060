// Counts the calls of a server, and measures how long they take.

#ifndef TFSWITCH_CC_RPC_CALL_METRICS_H_
#define TFSWITCH_CC_RPC_CALL_METRICS_H_

#include <array>
#include <atomic>
#include <cstddef>
#include <memory>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/time/time.h"
#include "cc/base/latency_histogram.h"
#include "cc/base/metric_list.h"
#include "cc/base/mutex.h"
#include "cc/base/striped_counters.h"

namespace tfswitch {

// Thread-safe.
class CallMetrics {
 public:
  // Counts a call that has ended. `method` is always the same pointer for a
  // method, and is never freed. A refused call may have no duration: the
  // histogram has only calls with a duration above 0.
  void Record(const char* method, absl::StatusCode code,
              absl::Duration duration);

  // Adds the sizes of a call's messages.
  void RecordBytes(const char* method, size_t received, size_t sent);

  void AddTo(MetricList* list) const;

 private:
  static constexpr size_t kNumCodes = 17;
  static constexpr size_t kMaxMethods = 64;

  struct Method {
    const char* name;
    StripedCounters<kNumCodes> codes;
    LatencyHistogram durations;
    StripedCounters<2> bytes;  // Received, sent.
  };
  // Returns null if there are too many methods.
  Method* Find(const char* name) ABSL_LOCKS_EXCLUDED(mutex_);

  // Each pointer is set once, in order.
  std::array<std::atomic<Method*>, kMaxMethods> methods_ = {};
  Mutex mutex_;
  std::vector<std::unique_ptr<Method>> owned_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace tfswitch

#endif  // TFSWITCH_CC_RPC_CALL_METRICS_H_
