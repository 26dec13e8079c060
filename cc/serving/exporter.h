// Writes base and delta exports of tables, in this process or on servers.

#ifndef TFSWITCH_CC_SERVING_EXPORTER_H_
#define TFSWITCH_CC_SERVING_EXPORTER_H_

#include "absl/status/statusor.h"
#include "cc/client/parameter_client.h"
#include "tfswitch/v1/control.pb.h"

namespace tfswitch {

// Exports to the folder `path` of this machine. After an error no part of an
// export remains. A delta may take as long as a base if a server does not know
// the changes: then all rows are read and compared with the files. A rule
// chooses rows by their state on `day`; see EmbeddingTable::last_day.
//
// NotFound if a table does not exist. FailedPrecondition if a delta cannot
// follow: there is no base, the last export had other settings, or more than
// half of the rows have disappeared and no server knows why. Aborted if another
// process is exporting to the folder.
absl::StatusOr<v1::PublishExportResponse> PublishExport(
    ParameterClient& client, const v1::PublishExportRequest& request,
    float day = kServersDay);

}  // namespace tfswitch

#endif  // TFSWITCH_CC_SERVING_EXPORTER_H_
