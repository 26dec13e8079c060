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
  // Publishes a base in place of a delta that cannot follow the last export.
  bool base_if_broken = false;
  // A delta is of the tables, in the formats and by the rule of the export
  // before it; it cannot follow one that differs from these options.
  std::vector<std::string> tables;  // Empty: a delta's are as before.
  // In place of `tables`: all that the client has, and those of the export
  // before, so that none is left out because a server has lost it.
  bool all_tables = false;
  // Absent: as in the export before it; in the first one float32 and all rows.
  std::optional<RowFormat> format;
  std::optional<ScoreRule> rule;
  bool all_rows = false;  // No rule, even if there was one before.
  float day = kServersDay;
  int keep_bases = 0;  // Remove exports older than so many; 0: none.
};

struct ExportReport {
  int64_t number = 0;  // The export's, or the last one's if there is no news.
  bool is_delta = false;
  bool is_published = false;  // False: a delta without changes.
  int64_t num_rows = 0;
  int64_t num_removed = 0;
  int64_t bytes = 0;
  std::string why_base;  // Why no delta could follow, of `base_if_broken`.
};

// Exports to the folder `path` of this machine, whole or not at all. NotFound
// for a table that is not there, FailedPrecondition if a delta cannot follow:
// there is no base, it is another one than `options` have, or most rows have
// gone and no server knows why. Aborted if another process is exporting to the
// folder. Where a server does not know what has changed, a delta takes up
// to the time of a base: all rows are read and compared with the files.
absl::StatusOr<ExportReport> PublishExport(ParameterClient& client,
                                           const ExportOptions& options);

}  // namespace tfswitch

#endif  // TFSWITCH_CC_SERVING_EXPORTER_H_
