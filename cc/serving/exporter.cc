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

// How all tables of an export are exported.
struct Manner {
  RowFormat format = RowFormat::kFloat32;  // Of a base.
  std::optional<ScoreRule> rule;
};

// What the last export in the folder that can be read says; of the first one
// the defaults.
Manner LastManner(const ExportWriter& writer, const std::string& path) {
  ExportManifest last = writer.previous();
  if (last.name.number == 0) {
    const auto names = ListExports(path);
    for (size_t i = names.ok() ? names->size() : 0; i-- > 0;) {
      auto manifest = ReadExport(path, (*names)[i]);
      if (!manifest.ok()) continue;
      last = *std::move(manifest);
      break;
    }
  }
  Manner manner;
  manner.rule = last.rule;
  if (!last.tables.empty()) manner.format = last.tables.begin()->second.format;
  return manner;
}

// Exports one table; adds to the report.
absl::Status ExportTable(ParameterClient& client, const Manner& manner,
                         float day, const std::string& table,
                         ExportWriter* writer, ExportReport* report) {
  TFSWITCH_ASSIGN_OR_RETURN(const std::vector<TableInfo> infos,
                            client.ListTables(table));
  const TableConfig& config = infos[0].config;
  RowFileKind kind;
  kind.table = table;
  kind.dim = config.dim;
  kind.format = manner.format;
  kind.default_row = MissingRow(config);
  ExportChangesArgs args;
  args.table = table;
  args.rule = manner.rule;
  args.day = day;
  args.export_id = writer->id();
  if (writer->name().is_delta) {
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

absl::StatusOr<ExportReport> Publish(ParameterClient& client,
                                     const ExportOptions& options,
                                     bool is_delta) {
  TFSWITCH_ASSIGN_OR_RETURN(const std::unique_ptr<ExportWriter> writer,
                            ExportWriter::Begin(options.path, is_delta));
  Manner manner = LastManner(*writer, options.path);
  std::vector<std::string> tables = options.tables;
  if (!is_delta) {
    if (options.format.has_value()) manner.format = *options.format;
    if (options.rule.has_value()) manner.rule = options.rule;
    if (options.all_rows) manner.rule.reset();
  } else {
    tables.clear();
    for (const auto& [table, exported] : writer->previous().tables) {
      tables.push_back(table);
    }
  }
  writer->SetRule(manner.rule);
  ExportReport report;
  report.number = writer->name().number;
  report.is_delta = is_delta;
  absl::Status status;
  for (const std::string& table : tables) {
    status =
        ExportTable(client, manner, options.day, table, writer.get(), &report);
    if (!status.ok()) break;
  }
  const bool is_news =
      !is_delta || report.num_rows > 0 || report.num_removed > 0;
  if (status.ok() && is_news) {
    status = writer->Publish();
    report.is_published = status.ok();
  }
  if (manner.rule.has_value()) {
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

}  // namespace

absl::StatusOr<ExportReport> PublishExport(ParameterClient& client,
                                           const ExportOptions& options) {
  auto report = Publish(client, options, options.is_delta);
  // No export to follow, or a damaged one, or what has changed is not known.
  const bool is_broken =
      options.is_delta && (absl::IsFailedPrecondition(report.status()) ||
                           absl::IsDataLoss(report.status()));
  if (!is_broken || !options.base_if_broken) return report;
  const absl::Status why = report.status();
  report = Publish(client, options, /*is_delta=*/false);
  if (report.ok()) report->why_base = std::string(why.message());
  return report;
}

}  // namespace tfswitch
