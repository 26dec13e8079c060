// The JSON calls of the C API on exports and on models that serve them.

#ifndef TFSWITCH_CC_CAPI_SERVING_H_
#define TFSWITCH_CC_CAPI_SERVING_H_

#include <string>

#include "absl/status/statusor.h"
#include "cc/serving/exporter.h"

namespace tfswitch {

// See publish_export of cc/capi/tfswitch.h. InvalidArgument naming what is
// missing or wrong.
absl::StatusOr<ExportOptions> ExportOptionsFromJson(const std::string& json);
std::string ExportReportToJson(const ExportReport& report);

// See served_model_call there.
absl::StatusOr<std::string> CallServedModel(const std::string& path,
                                            const std::string& request_json);

}  // namespace tfswitch

#endif  // TFSWITCH_CC_CAPI_SERVING_H_
