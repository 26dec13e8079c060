// Converts the arguments and answers of Coordination to its protobuf messages
// and back.

#ifndef TFSWITCH_CC_WIRE_COORDINATION_CONVERSION_H_
#define TFSWITCH_CC_WIRE_COORDINATION_CONVERSION_H_

#include "cc/sync/work_queue.h"
#include "cc/sync/worker_group.h"
#include "tfswitch/v1/coordination.pb.h"

namespace tfswitch {

v1::Round ToProto(const Round& round);
Round FromProto(const v1::Round& proto);

v1::GroupOptions ToProto(const WorkerGroupOptions& options);
WorkerGroupOptions FromProto(const v1::GroupOptions& proto);

v1::GetGroupStatsResponse ToProto(const WorkerGroup::Stats& stats);

v1::WorkQueueOptions ToProto(const WorkQueueOptions& options);
WorkQueueOptions FromProto(const v1::WorkQueueOptions& proto);

v1::WorkItem ToProto(const WorkItem& item);
WorkItem FromProto(const v1::WorkItem& proto);

v1::GetWorkQueueStatsResponse ToProto(const WorkQueue::Stats& stats);

}  // namespace tfswitch

#endif  // TFSWITCH_CC_WIRE_COORDINATION_CONVERSION_H_
