// Measures the pulls and pushes that this process makes, to tables on servers
// and in the process itself, for metrics and traces.

#ifndef TFSWITCH_CC_CAPI_CLIENT_METRICS_H_
#define TFSWITCH_CC_CAPI_CLIENT_METRICS_H_

#include <cstddef>
#include <cstdint>
#include <string>

#include "absl/time/time.h"
#include "cc/base/metric_list.h"
#include "cc/base/steady_clock.h"
#include "cc/client/trace_log.h"

namespace tfswitch {

enum class ClientCall : uint8_t { kPull, kPush, kSize };

// Measures one call, and counts it when it goes out of scope.
//
// Not thread-safe. Calls of several threads may be measured at the same time.
class MeasuredCall {
 public:
  explicit MeasuredCall(ClientCall call);
  ~MeasuredCall();
  MeasuredCall(const MeasuredCall&) = delete;
  MeasuredCall& operator=(const MeasuredCall&) = delete;

  // Counts the ids of a batch, and the keys that are sent for them.
  void AddBatch(const std::string& table, size_t ids, size_t keys) {
    ids_ += ids;
    keys_ += keys;
    if (trace_.span() != nullptr) trace_.span()->add_tables(table);
  }
  // Without it, the call counts as failed.
  void Succeed() { has_succeeded_ = true; }

 private:
  const ClientCall call_;
  const absl::Time begin_ = SteadyNow();
  size_t ids_ = 0;
  size_t keys_ = 0;
  bool has_succeeded_ = false;
  TraceScope trace_;
};

// Adds the metrics of all calls of this process so far.
void AddClientMetrics(MetricList* list);

}  // namespace tfswitch

#endif  // TFSWITCH_CC_CAPI_CLIENT_METRICS_H_
