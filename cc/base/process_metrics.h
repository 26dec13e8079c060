// The metrics of a process that Prometheus's clients of all languages have.

#ifndef TFSWITCH_CC_BASE_PROCESS_METRICS_H_
#define TFSWITCH_CC_BASE_PROCESS_METRICS_H_

#include "cc/base/metric_list.h"

namespace tfswitch {

// Reads them from /proc. Leaves out those that cannot be read.
void AddProcessMetrics(MetricList* list);

}  // namespace tfswitch

#endif  // TFSWITCH_CC_BASE_PROCESS_METRICS_H_
