// Work queues as JSON, as checkpoints have them.

#ifndef TFSWITCH_CC_SYNC_WORK_QUEUE_JSON_H_
#define TFSWITCH_CC_SYNC_WORK_QUEUE_JSON_H_

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "cc/sync/coordinator.h"
#include "cc/sync/work_queue.h"

namespace tfswitch {

// A list; docs/checkpoint_format.md describes each field. DataLoss if the text
// is damaged; an empty one is an empty list.
std::string SavedWorkQueuesToJson(const std::vector<SavedWorkQueue>& saved);
absl::StatusOr<std::vector<SavedWorkQueue>> SavedWorkQueuesFromJson(
    const std::string& json);

}  // namespace tfswitch

#endif  // TFSWITCH_CC_SYNC_WORK_QUEUE_JSON_H_
