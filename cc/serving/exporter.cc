// Publish() locks the folder, lists the tables, checks whether a delta can
// follow, writes the tables one by one, and renames the folder. It lists the
// tables first and names their incarnations in each call, so that a table which
// another one replaces meanwhile ends the export.
//
// Where a server does not know what has changed, a delta is the difference of
// all rows to those in the files (row_difference.h). With a rule, a reader then
// has what a base by it would have.
//
// With a rule the servers hear at the end in any case whether the export is
// there (CommitExport), because they have kept the scores of its rows. An
// export that is published stays so: errors of later steps are ignored or
// logged. A delta that cannot follow becomes a base in PublishExport(), if the
// options say so.

#include "cc/serving/exporter.h"

#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "cc/base/interrupt.h"
#include "cc/base/log_writer.h"
#include "cc/base/progress.h"
#include "cc/base/status_macros.h"
#include "cc/serving/export_folder.h"
#include "cc/serving/row_difference.h"
#include "cc/serving/row_file_writer.h"

namespace tfswitch {
namespace {

// The last export in the folder that can be read; number 0 if there is none.
ExportManifest LastExport(const ExportWriter& writer, const std::string& path) {
  if (writer.previous().name.number != 0) return writer.previous();
  const auto names = ListExports(path);
  for (size_t i = names.ok() ? names->size() : 0; i-- > 0;) {
    auto manifest = ReadExport(path, (*names)[i]);
    if (manifest.ok()) return *std::move(manifest);
  }
  return {};
}

using Tables = std::map<std::string, TableInfo>;

// All tables of a client. DataLoss if a server has lost its part of one: the
// export would have only the rest of its rows.
absl::StatusOr<Tables> ListTables(ParameterClient& client) {
  TFSWITCH_ASSIGN_OR_RETURN(std::vector<TableInfo> infos,
                            client.ListTables(""));
  Tables tables;
  for (TableInfo& info : infos) {
    TFSWITCH_RETURN_IF_ERROR(info.lost);
    // Else one server has yet to make it, or has just dropped it.
    if (info.num_shards != client.num_shards()) continue;
    const std::string name = info.config.name;
    tables[name] = std::move(info);
  }
  return tables;
}

// The names of the exported tables, each of which is in `present`.
absl::StatusOr<std::set<std::string>> TablesOf(const ExportOptions& options,
                                               const Tables& present,
                                               const ExportManifest& last) {
  std::set<std::string> tables(options.tables.begin(), options.tables.end());
  if (options.all_tables) {
    for (const auto& [table, info] : present) {
      // One with a layout has no vectors.
      if (info.config.layout.empty()) tables.insert(table);
    }
  }
  if (options.all_tables || (options.is_delta && tables.empty())) {
    for (const auto& [table, exported] : last.tables) tables.insert(table);
  }
  if (tables.empty()) {
    return absl::NotFoundError(
        absl::StrCat("there are no tables to export to '", options.path, "'"));
  }
  for (const std::string& table : tables) {
    if (present.count(table) > 0) continue;
    return absl::NotFoundError(
        last.tables.count(table) == 0
            ? absl::StrCat("no table '", table, "'")
            : absl::StrCat("no table '", table, "', which ",
                           last.name.ToString(), " in '", options.path,
                           "' has. Restore or make it, or name the tables of "
                           "a base without it."));
  }
  return tables;
}

bool IsSame(const ScoreRule& a, const ScoreRule& b) {
  return a.base_threshold == b.base_threshold &&
         a.delta_threshold == b.delta_threshold &&
         a.delta_keep_days == b.delta_keep_days;
}

// FailedPrecondition if an export of `options` would not be as the last one.
absl::Status CheckSame(const ExportOptions& options,
                       const std::set<std::string>& tables,
                       const ExportManifest& last) {
  const auto differs = [&last](absl::string_view what) {
    return absl::FailedPreconditionError(
        absl::StrCat(what, " ", last.name.ToString(), ". Export a base."));
  };
  for (const std::string& table : tables) {
    if (last.tables.count(table) == 0) {
      return differs(absl::StrCat("table '", table, "' is not in"));
    }
  }
  for (const auto& [table, exported] : last.tables) {
    if (tables.count(table) == 0) {
      return differs(
          absl::StrCat("table '", table, "' is not asked for, as in"));
    }
    if (options.format.has_value() && exported.format != *options.format) {
      return differs(absl::StrCat("rows are to be ", NameOf(*options.format),
                                  ", and are ", NameOf(exported.format),
                                  " in"));
    }
  }
  if (options.all_rows && last.rule.has_value()) {
    return differs("all rows are asked for, and a rule chose those of");
  }
  if (options.rule.has_value() &&
      !(last.rule.has_value() && IsSame(*last.rule, *options.rule))) {
    return differs("rows are to be chosen by another rule than in");
  }
  return absl::OkStatus();
}

// Removes the rows that have gone. FailedPrecondition if these are most of
// them, because then a base is smaller, and the table is likely to be another
// one than its user believes; or if a delta cannot tell what an id without a
// row reads.
absl::Status FinishDifference(const RowDifference& difference,
                              const RowFileKind& kind, const ExportName& last,
                              RowFileWriter* file) {
  if (difference.default_row() != kind.default_row) {
    return absl::FailedPreconditionError(absl::StrCat(
        "table '", kind.table, "' has another value for an id without a row ",
        "than in ", last.ToString(), ". Export a base."));
  }
  int64_t num_gone = 0;
  TFSWITCH_RETURN_IF_ERROR(difference.ForEachGone([&](Key key) {
    file->Remove({&key, 1});
    ++num_gone;
  }));
  if (num_gone <= difference.num_found()) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(
      "table '", kind.table, "' has only ", difference.num_found(), " of the ",
      difference.num_found() + num_gone, " ids that have rows as of ",
      last.ToString(),
      ", and what has removed the others is not known. Load "
      "the model, or restore the table, before a delta. Export a base if the "
      "rows are meant to go."));
}

// Exports one table; adds to the report. `args` have what is the same of all
// tables, and `format` is that of a base.
absl::Status ExportTable(ParameterClient& client, const std::string& path,
                         ExportChangesArgs args, RowFormat format,
                         const TableInfo& listed, ExportWriter* writer,
                         Progress* progress, ExportReport* report) {
  const TableConfig& config = listed.config;
  const std::string& table = config.name;
  RowFileKind kind;
  kind.table = table;
  kind.dim = config.dim;
  kind.format = format;
  kind.default_row = MissingRow(config);
  args.table = table;
  // As it is listed, which may be another one than this process has used.
  args.table_incarnation = listed.identity.incarnation;
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
  TFSWITCH_ASSIGN_OR_RETURN(std::unique_ptr<RowFileWriter> file,
                            writer->AddTable(kind));
  const auto write_chunk = [&](const ChangeChunk& chunk) {
    TFSWITCH_RETURN_IF_ERROR(CheckInterrupt());
    progress->Add(static_cast<int64_t>(chunk.keys.size()));
    file->Remove(chunk.removed);
    return file->Add(chunk.keys, chunk.embeddings);
  };
  auto cursors = client.ExportChanges(args, write_chunk);
  if (!args.since.empty() && absl::IsFailedPrecondition(cursors.status())) {
    // They do not know the changes. A new file, as some may have told theirs.
    TFSWITCH_ASSIGN_OR_RETURN(
        const std::unique_ptr<RowDifference> difference,
        RowDifference::Open(path, writer->previous(), table));
    file.reset();  // It removes its file.
    TFSWITCH_ASSIGN_OR_RETURN(file, writer->AddTable(kind));
    file->LeaveOut(
        [&](Key key, const char* row) { return difference->IsNews(key, row); });
    args.since.clear();
    cursors = client.ExportChanges(args, write_chunk);
    TFSWITCH_RETURN_IF_ERROR(cursors.status());
    TFSWITCH_RETURN_IF_ERROR(FinishDifference(
        *difference, kind, writer->previous().name, file.get()));
  }
  TFSWITCH_RETURN_IF_ERROR(cursors.status());
  TFSWITCH_ASSIGN_OR_RETURN(const RowFileInfo info, file->Finish());
  report->num_rows += info.num_rows;
  report->num_removed += info.num_removed;
  report->bytes += info.bytes;
  writer->FinishTable(table, info, *std::move(cursors));
  return absl::OkStatus();
}

absl::StatusOr<ExportReport> Publish(ParameterClient& client,
                                     const ExportOptions& options,
                                     bool is_delta) {
  TFSWITCH_ASSIGN_OR_RETURN(const std::unique_ptr<ExportWriter> writer,
                            ExportWriter::Begin(options.path, is_delta));
  // A delta follows it.
  const ExportManifest last = LastExport(*writer, options.path);
  // Before the first table is read, which takes a while.
  TFSWITCH_ASSIGN_OR_RETURN(const Tables present, ListTables(client));
  TFSWITCH_ASSIGN_OR_RETURN(const std::set<std::string> tables,
                            TablesOf(options, present, last));
  if (is_delta) TFSWITCH_RETURN_IF_ERROR(CheckSame(options, tables, last));
  RowFormat format = RowFormat::kFloat32;
  if (!last.tables.empty()) format = last.tables.begin()->second.format;
  if (options.format.has_value()) format = *options.format;
  ExportChangesArgs args;
  args.rule = options.rule.has_value() ? options.rule : last.rule;
  if (options.all_rows) args.rule.reset();
  args.day = options.day;
  args.export_id = writer->id();
  writer->SetRule(args.rule);
  ExportReport report;
  report.number = writer->name().number;
  report.is_delta = is_delta;
  absl::Status status;
  int64_t num_rows = 0;  // Not known for a delta.
  if (!is_delta && !args.rule.has_value()) {
    for (const std::string& table : tables) {
      num_rows += present.at(table).stats.num_rows;
    }
  }
  Progress progress(absl::StrCat("exporting to '", options.path, "'"),
                    num_rows);
  for (const std::string& table : tables) {
    status = ExportTable(client, options.path, args, format, present.at(table),
                         writer.get(), &progress, &report);
    if (!status.ok()) break;
  }
  const bool is_news =
      !is_delta || report.num_rows > 0 || report.num_removed > 0;
  if (status.ok() && is_news) {
    status = writer->Publish();
    report.is_published = status.ok();
  }
  if (args.rule.has_value()) {
    for (const std::string& table : tables) {
      // If a server does not hear of it, its rows come once more, which is no
      // harm; a published export stays so.
      client
          .CommitExport({table, present.at(table).identity.incarnation},
                        writer->id(), report.is_published)
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
      LogMessage(LogLevel::kError, {"files_left"},
                 absl::StrCat("old exports stay: ", removed.message()));
    }
  }
  return report;
}

}  // namespace

absl::StatusOr<ExportReport> PublishExport(ParameterClient& client,
                                           const ExportOptions& options) {
  auto report = Publish(client, options, options.is_delta);
  // There is no export to follow, it is damaged or another than is asked for,
  // or the changes are not known.
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
