// Metrics of each program: its version, its age, and those that Prometheus's
// clients of all languages have.

#ifndef TFSWITCH_CC_BASE_PROCESS_METRICS_H_
#define TFSWITCH_CC_BASE_PROCESS_METRICS_H_

#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "cc/base/metric_list.h"

namespace tfswitch {

// Adds the version of the program, the time since `started`, and what /proc
// says of the process. Leaves out files that cannot be read.
void AddProcessMetrics(absl::string_view version, absl::Time started,
                       MetricList* list);

}  // namespace tfswitch

#endif  // TFSWITCH_CC_BASE_PROCESS_METRICS_H_
