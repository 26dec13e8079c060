// The metrics of a shard: its tables, its log, and the groups of workers.

#ifndef TFSWITCH_CC_SHARD_SHARD_METRICS_H_
#define TFSWITCH_CC_SHARD_SHARD_METRICS_H_

#include "cc/base/metric_list.h"
#include "cc/shard/shard_core.h"

namespace tfswitch {

// At most this many tables, those with the most rows, have a label of their
// own. The rows and bytes of the others are added up under the label
// kOtherTables.
inline constexpr size_t kLabelledTables = 200;
inline constexpr char kOtherTables[] = "(others)";

void AddShardMetrics(const ShardCore& core, MetricList* list);

}  // namespace tfswitch

#endif  // TFSWITCH_CC_SHARD_SHARD_METRICS_H_
