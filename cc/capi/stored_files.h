// Reads files of tables without a server: says what they hold, and compares
// them.

#ifndef TFSWITCH_CC_CAPI_STORED_FILES_H_
#define TFSWITCH_CC_CAPI_STORED_FILES_H_

#include "absl/status/status.h"
#include "tfswitch/v1/control.pb.h"

namespace tfswitch {

// Damage is part of the response. NotFound if there is nothing at the path,
// InvalidArgument if it is of no known kind, Aborted if a server uses the data
// folder, Cancelled if the user interrupts the call. Thread-safe.
absl::Status InspectFiles(const v1::InspectFilesRequest& request,
                          v1::InspectFilesResponse* response);

// Errors are those of InspectFiles(), and DataLoss if files are damaged. The
// rows of checkpoints are in memory in parts of about 256 MiB; exports are
// mapped. Thread-safe.
absl::Status DiffFiles(const v1::DiffFilesRequest& request,
                       v1::DiffFilesResponse* response);

}  // namespace tfswitch

#endif  // TFSWITCH_CC_CAPI_STORED_FILES_H_
