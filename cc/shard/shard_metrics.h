// The metrics and the heat of a shard: its tables, log, and groups of workers.

#ifndef TFSWITCH_CC_SHARD_SHARD_METRICS_H_
#define TFSWITCH_CC_SHARD_SHARD_METRICS_H_

#include "cc/base/metric_list.h"
#include "cc/shard/shard_core.h"
#include "tfswitch/v1/parameter_server.pb.h"

namespace tfswitch {

// At most this many tables, those with the most rows, have a label of their
// own. The rows and bytes of the others are added up under the label
// kOtherTables.
inline constexpr size_t kLabelledTables = 200;
inline constexpr char kOtherTables[] = "(others)";

void AddShardMetrics(const ShardCore& core, MetricList* list);

// Adds the heat of the tables that have labels of their own.
void AddHeats(const ShardCore& core, v1::ServerView* view);

}  // namespace tfswitch

#endif  // TFSWITCH_CC_SHARD_SHARD_METRICS_H_
