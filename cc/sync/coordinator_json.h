// Parts of a coordinator as JSON, for its records and its saved state.

#ifndef TFSWITCH_CC_SYNC_COORDINATOR_JSON_H_
#define TFSWITCH_CC_SYNC_COORDINATOR_JSON_H_

#include "cc/base/json.h"
#include "cc/sync/work_queue.h"
#include "cc/sync/worker_group.h"

namespace tfswitch {

Json ToJson(const WorkerGroupOptions& options);
Json ToJson(const WorkQueueOptions& options);
Json ToJson(const WorkProgress& progress);

// The way back. They throw Json::exception for a text that is none.
WorkerGroupOptions GroupOptionsOf(const Json& json);
WorkQueueOptions QueueOptionsOf(const Json& json);
WorkProgress ProgressOf(const Json& json);

}  // namespace tfswitch

#endif  // TFSWITCH_CC_SYNC_COORDINATOR_JSON_H_
