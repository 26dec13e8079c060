// Writes base and delta exports of tables, wherever these are.

#ifndef TFSWITCH_CC_SERVING_EXPORTER_H_
#define TFSWITCH_CC_SERVING_EXPORTER_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "cc/client/parameter_client.h"
#include "cc/serving/row_format.h"

namespace tfswitch {

struct ExportOptions {
  std::string path;
  bool is_delta = false;
  // A delta is of the tables, and in the format, of the export before it.
  std::vector<std::string> tables;
  RowFormat format = RowFormat::kFloat32;
  std::optional<ScoreRule> rule;  // Absent: all that has changed.
  float day = kServersDay;
  int keep_bases = 0;  // Remove what is older than so many; 0: nothing.
};

struct ExportReport {
  int64_t number = 0;  // Of the export, or of the last one if there is no news.
  bool is_published = false;  // False: a delta without changes.
  int64_t num_rows = 0;
  int64_t num_removed = 0;
  int64_t bytes = 0;
};

// Exports to the folder `path` of this machine, whole or not at all. NotFound
// for a table that is not there, FailedPrecondition if a delta cannot follow:
// there is no base, or what has changed since is not known.
absl::StatusOr<ExportReport> PublishExport(ParameterClient& client,
                                           const ExportOptions& options);

}  // namespace tfswitch

#endif  // TFSWITCH_CC_SERVING_EXPORTER_H_
