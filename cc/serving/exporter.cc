#include "cc/serving/exporter.h"

#include <memory>
#include <utility>

#include "absl/base/internal/raw_logging.h"
#include "absl/strings/str_cat.h"
#include "cc/base/status_macros.h"
#include "cc/serving/export_folder.h"
#include "cc/serving/row_file_writer.h"

namespace tfswitch {
namespace {

// Exports one table; adds to the report.
absl::Status ExportTable(ParameterClient& client, const ExportOptions& options,
                         const std::string& table, ExportWriter* writer,
                         ExportReport* report) {
  TFSWITCH_ASSIGN_OR_RETURN(const std::vector<TableInfo> infos,
                            client.ListTables(table));
  const TableConfig& config = infos[0].config;
  RowFileKind kind;
  kind.table = table;
  kind.dim = config.dim;
  kind.format = options.format;
  kind.default_row = MissingRow(config);
  ExportChangesArgs args;
  args.table = table;
  args.rule = options.rule;
  args.day = options.day;
  args.export_id = writer->id();
  if (options.is_delta) {
    const ExportedTable& before = writer->previous().tables.at(table);
    kind.format = before.format;
    args.since = before.cursors;
    if (before.dim != config.dim) {
      return absl::FailedPreconditionError(
          absl::StrCat("table '", table, "' has dim ", config.dim, ", and had ",
                       before.dim, " in export ",
                       writer->previous().name.ToString(), ". Export a base."));
    }
  }
  TFSWITCH_ASSIGN_OR_RETURN(const std::unique_ptr<RowFileWriter> file,
                            writer->AddTable(kind));
  TFSWITCH_ASSIGN_OR_RETURN(
      std::vector<ChangeCursor> cursors,
      client.ExportChanges(args, [&](const ChangeChunk& chunk) {
        file->Remove(chunk.removed);
        return file->Add(chunk.keys, chunk.embeddings);
      }));
  TFSWITCH_ASSIGN_OR_RETURN(const RowFileInfo info, file->Finish());
  report->num_rows += info.num_rows;
  report->num_removed += info.num_removed;
  report->bytes += info.bytes;
  writer->FinishTable(table, info, std::move(cursors));
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<ExportReport> PublishExport(ParameterClient& client,
                                           const ExportOptions& options) {
  TFSWITCH_ASSIGN_OR_RETURN(
      const std::unique_ptr<ExportWriter> writer,
      ExportWriter::Begin(options.path, options.is_delta));
  std::vector<std::string> tables = options.tables;
  if (options.is_delta) {
    tables.clear();
    for (const auto& [table, exported] : writer->previous().tables) {
      tables.push_back(table);
    }
  }
  ExportReport report;
  report.number = writer->name().number;
  absl::Status status;
  for (const std::string& table : tables) {
    status = ExportTable(client, options, table, writer.get(), &report);
    if (!status.ok()) break;
  }
  const bool is_news =
      !options.is_delta || report.num_rows > 0 || report.num_removed > 0;
  if (status.ok() && is_news) {
    status = writer->Publish();
    report.is_published = status.ok();
  }
  if (options.rule.has_value()) {
    for (const std::string& table : tables) {
      // If a server does not hear of it, its rows come once more, which is no
      // harm; what is published stays so.
      client.SettleExport(table, writer->id(), report.is_published)
          .IgnoreError();
    }
  }
  TFSWITCH_RETURN_IF_ERROR(status);
  if (!report.is_published) {
    report.number = writer->previous().name.number;
    report.bytes = 0;
  } else if (options.keep_bases > 0) {
    // The next export tries again; this one is there.
    const absl::Status removed =
        RemoveOldExports(options.path, options.keep_bases);
    if (!removed.ok()) {
      ABSL_RAW_LOG(ERROR, "old exports stay: %s",
                   std::string(removed.message()).c_str());
    }
  }
  return report;
}

}  // namespace tfswitch
