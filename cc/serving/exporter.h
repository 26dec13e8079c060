// Writes base and delta exports of tables, wherever these are.

#ifndef TFSWITCH_CC_SERVING_EXPORTER_H_
#define TFSWITCH_CC_SERVING_EXPORTER_H_

#include "absl/status/statusor.h"
#include "cc/client/parameter_client.h"
#include "tfswitch/v1/control.pb.h"

namespace tfswitch {

// Exports to the folder `path` of this machine, whole or not at all. NotFound
// for a table that is not there, FailedPrecondition if a delta cannot follow:
// there is no base, it is another one than is asked for, or most rows have
// gone and no server knows why. Aborted if another process is exporting to the
// folder. Where a server does not know what has changed, a delta takes up
// to the time of a base: all rows are read and compared with the files.
//
// `day`: by which a rule chooses rows; see EmbeddingTable::last_day.
absl::StatusOr<v1::PublishExportResponse> PublishExport(
    ParameterClient& client, const v1::PublishExportRequest& request,
    float day = kServersDay);

}  // namespace tfswitch

#endif  // TFSWITCH_CC_SERVING_EXPORTER_H_
