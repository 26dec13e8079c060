// JSON texts that cross the C API; "there" is cc/capi/tfswitch.h.

#ifndef TFSWITCH_CC_CAPI_JSON_REPORTS_H_
#define TFSWITCH_CC_CAPI_JSON_REPORTS_H_

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "cc/client/checkpoints.h"
#include "cc/client/parameter_client.h"
#include "cc/client/worker_session.h"

namespace tfswitch {

// See list_tables there.
std::string TableInfosToJson(const std::vector<TableInfo>& infos);

// {"tables": [...], "num_rows": n}
std::string ShrinkReportToJson(const ShrinkReport& report);

// See reset_lost_tables there.
std::string ResetTablesToJson(const std::vector<ResetTable>& tables);

// See save and restore there.
std::string CheckpointReportToJson(const CheckpointReport& report);
absl::StatusOr<SaveOptions> SaveOptionsFromJson(const std::string& json);
absl::StatusOr<RestoreOptions> RestoreOptionsFromJson(const std::string& json);

// See join_group and worker_report there.
absl::StatusOr<WorkerOptions> WorkerOptionsFromJson(const std::string& json);
std::string WorkerReportToJson(const WorkerSession::Report& report);
// Its "workers".
std::string GroupStatsToJson(const WorkerGroup::Stats& stats);

// See take_work_item and work_queue_stats there.
std::string WorkItemToJson(const WorkItem& item);
std::string WorkQueueStatsToJson(const WorkQueue::Stats& stats);

}  // namespace tfswitch

#endif  // TFSWITCH_CC_CAPI_JSON_REPORTS_H_
