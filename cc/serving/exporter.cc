// Publish() locks the folder, lists the tables, checks whether a delta can
// follow, writes the tables one by one, and renames the folder. It lists the
// tables first and names their incarnations in each call, so that the export
// fails if a table is replaced meanwhile.
//
// If a server does not know which rows have changed, all rows are compared with
// the exported files (row_difference.h), and the delta gets the differences. If
// a rule chooses the rows, readers then have the same rows as after a base with
// that rule.
//
// If a rule chooses the rows, the servers remember the scores of exported rows.
// So the servers are always told at the end whether the export was published
// (CommitExport). After it was published, errors of later steps are ignored or
// logged. If a delta cannot follow and the request allows it, PublishExport()
// writes a base.

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
#include "cc/wire/report_conversion.h"

namespace tfswitch {
namespace {

// Returns the last readable export of the folder; its number is 0 if there is
// none.
v1::ExportContent LastExport(const ExportWriter& writer,
                             const std::string& path) {
  if (writer.previous().number() != 0) return writer.previous();
  const auto names = ListExports(path);
  for (size_t i = names.ok() ? names->size() : 0; i-- > 0;) {
    auto manifest = ReadExport(path, (*names)[i]);
    if (manifest.ok()) return *std::move(manifest);
  }
  return {};
}

using Tables = std::map<std::string, TableInfo>;

// Lists all tables of a client. DataLoss if a server has lost its part of a
// table: the export would lack these rows.
absl::StatusOr<Tables> ListTables(ParameterClient& client) {
  TFSWITCH_ASSIGN_OR_RETURN(std::vector<TableInfo> infos,
                            client.ListTables(""));
  Tables tables;
  for (TableInfo& info : infos) {
    TFSWITCH_RETURN_IF_ERROR(info.lost);
    // A table that some servers lack is just being created or dropped.
    if (info.num_shards != client.num_shards()) continue;
    const std::string name = info.config.name;
    tables[name] = std::move(info);
  }
  return tables;
}

// Returns the names of the tables to export. All are in `present`.
absl::StatusOr<std::set<std::string>> TablesOf(
    const v1::PublishExportRequest& request, const Tables& present,
    const v1::ExportContent& last) {
  std::set<std::string> tables(request.tables().begin(),
                               request.tables().end());
  if (request.all_tables()) {
    for (const auto& [table, info] : present) {
      // Tables with a layout hold variables, not embeddings.
      if (info.config.layout.empty()) tables.insert(table);
    }
  }
  if (request.all_tables() || (request.delta() && tables.empty())) {
    for (const auto& [table, exported] : last.tables()) tables.insert(table);
  }
  if (tables.empty()) {
    return absl::NotFoundError(absl::StrCat(
        "there are no tables to export to '", request.path(), "'"));
  }
  for (const std::string& table : tables) {
    if (present.count(table) > 0) continue;
    return absl::NotFoundError(
        !last.tables().contains(table)
            ? absl::StrCat("no table '", table, "'")
            : absl::StrCat("no table '", table, "', which ",
                           NameOf(last).ToString(), " in '", request.path(),
                           "' has. Restore or make it, or name the tables of "
                           "a base without it."));
  }
  return tables;
}

// FailedPrecondition if an export of `request` would have other tables or
// settings than the last one.
absl::Status CheckSame(const v1::PublishExportRequest& request,
                       const std::set<std::string>& tables,
                       const v1::ExportContent& last) {
  const auto differs = [&last](absl::string_view what) {
    return absl::FailedPreconditionError(
        absl::StrCat(what, " ", NameOf(last).ToString(), ". Export a base."));
  };
  for (const std::string& table : tables) {
    if (!last.tables().contains(table)) {
      return differs(absl::StrCat("table '", table, "' is not in"));
    }
  }
  for (const auto& [table, exported] : last.tables()) {
    if (tables.count(table) == 0) {
      return differs(
          absl::StrCat("table '", table, "' is not asked for, as in"));
    }
    if (!request.row_format().empty() &&
        exported.row_format() != request.row_format()) {
      return differs(absl::StrCat("rows are to be ", request.row_format(),
                                  ", and are ", exported.row_format(), " in"));
    }
  }
  if (request.all_rows() && last.has_rule()) {
    return differs("all rows are asked for, and a rule chose those of");
  }
  if (request.has_rule() &&
      (!last.has_rule() ||
       request.rule().SerializeAsString() != last.rule().SerializeAsString())) {
    return differs("rows are to be chosen by another rule than in");
  }
  return absl::OkStatus();
}

// Writes the keys that no longer have a row to the file, as removed.
// FailedPrecondition if more than half of the rows are removed: a base is then
// smaller, and the user may have named the wrong table. FailedPrecondition also
// if the default row has changed, because a delta cannot contain that.
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

// Exports one table, and adds its numbers to the report. `args` has the values
// that are the same for all tables. A base is written in `format`.
absl::Status ExportTable(ParameterClient& client, const std::string& path,
                         ExportChangesArgs args, RowFormat format,
                         const TableInfo& listed, ExportWriter* writer,
                         Progress* progress,
                         v1::PublishExportResponse* report) {
  const TableConfig& config = listed.config;
  const std::string& table = config.name;
  RowFileKind kind;
  kind.table = table;
  kind.dim = config.dim;
  kind.format = format;
  kind.default_row = MissingRow(config);
  args.table = table;
  // Names the incarnation from the list of tables, because this process may
  // have used an earlier table of this name.
  args.table_incarnation = listed.identity.incarnation;
  if (writer->name().is_delta) {
    const v1::ExportedTable& before = writer->previous().tables().at(table);
    kind.format = FormatOf(before);
    for (const v1::ChangeCursor& cursor : before.cursors()) {
      args.since.push_back({cursor.log_id(), cursor.epoch()});
    }
    if (before.dim() != config.dim) {
      return absl::FailedPreconditionError(absl::StrCat(
          "table '", table, "' has dim ", config.dim, ", and had ",
          before.dim(), " in export ", NameOf(writer->previous()).ToString(),
          ". Export a base."));
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
    // A server no longer knows which rows have changed. Begins a new file,
    // because the present one may already have changes from other servers.
    TFSWITCH_ASSIGN_OR_RETURN(
        const std::unique_ptr<RowDifference> difference,
        RowDifference::Open(path, writer->previous(), table));
    file.reset();  // The destructor removes the file.
    TFSWITCH_ASSIGN_OR_RETURN(file, writer->AddTable(kind));
    file->LeaveOut(
        [&](Key key, const char* row) { return difference->IsNews(key, row); });
    args.since.clear();
    cursors = client.ExportChanges(args, write_chunk);
    TFSWITCH_RETURN_IF_ERROR(cursors.status());
    TFSWITCH_RETURN_IF_ERROR(FinishDifference(
        *difference, kind, NameOf(writer->previous()), file.get()));
  }
  TFSWITCH_RETURN_IF_ERROR(cursors.status());
  TFSWITCH_ASSIGN_OR_RETURN(const RowFileInfo info, file->Finish());
  report->set_num_rows(report->num_rows() + info.num_rows);
  report->set_num_removed(report->num_removed() + info.num_removed);
  report->set_bytes(report->bytes() + info.bytes);
  writer->FinishTable(table, info, *cursors);
  return absl::OkStatus();
}

absl::StatusOr<v1::PublishExportResponse> Publish(
    ParameterClient& client, const v1::PublishExportRequest& request, float day,
    bool is_delta) {
  TFSWITCH_ASSIGN_OR_RETURN(const std::unique_ptr<ExportWriter> writer,
                            ExportWriter::Begin(request.path(), is_delta));
  // The export that a delta follows.
  const v1::ExportContent last = LastExport(*writer, request.path());
  // Lists all tables before it reads the first, because reading may take long.
  TFSWITCH_ASSIGN_OR_RETURN(const Tables present, ListTables(client));
  TFSWITCH_ASSIGN_OR_RETURN(const std::set<std::string> tables,
                            TablesOf(request, present, last));
  if (is_delta) TFSWITCH_RETURN_IF_ERROR(CheckSame(request, tables, last));
  std::string format = request.row_format();
  if (format.empty()) {
    format = last.tables().empty() ? std::string(NameOf(RowFormat::kFloat32))
                                   : last.tables().begin()->second.row_format();
  }
  ExportChangesArgs args;
  args.day = day;
  args.export_id = writer->id();
  if (!request.all_rows() && (request.has_rule() || last.has_rule())) {
    const v1::ScoreRule& rule =
        request.has_rule() ? request.rule() : last.rule();
    args.rule = ScoreRule{rule.base_threshold(), rule.delta_threshold(),
                          rule.delta_keep_days()};
    writer->SetRule(rule);
  }
  TFSWITCH_ASSIGN_OR_RETURN(const RowFormat row_format, RowFormatOf(format));
  v1::PublishExportResponse report;
  report.set_number(writer->name().number);
  report.set_delta(is_delta);
  absl::Status status;
  int64_t num_rows = 0;  // Unknown for a delta.
  if (!is_delta && !args.rule.has_value()) {
    for (const std::string& table : tables) {
      num_rows += present.at(table).stats.num_rows;
    }
  }
  Progress progress(absl::StrCat("exporting to '", request.path(), "'"),
                    num_rows);
  for (const std::string& table : tables) {
    status = ExportTable(client, request.path(), args, row_format,
                         present.at(table), writer.get(), &progress, &report);
    if (!status.ok()) break;
  }
  const bool is_news =
      !is_delta || report.num_rows() > 0 || report.num_removed() > 0;
  if (status.ok() && is_news) {
    status = writer->Publish();
    report.set_published(status.ok());
  }
  if (args.rule.has_value()) {
    for (const std::string& table : tables) {
      // Ignores errors of CommitExport: their only effect is that the next
      // delta contains these rows once more.
      v1::CommitExportRequest end;
      NameTable({table, present.at(table).identity.incarnation}, &end);
      end.set_export_id(writer->id());
      end.set_commit(report.published());
      v1::CommitExportResponse ended;
      client.Call(end, &ended).IgnoreError();
    }
  }
  TFSWITCH_RETURN_IF_ERROR(status);
  if (!report.published()) {
    report.set_number(writer->previous().number());
    report.set_bytes(0);
  } else if (request.keep_bases() > 0) {
    const absl::Status removed =
        RemoveOldExports(request.path(), request.keep_bases());
    if (!removed.ok()) {
      LogMessage(LogLevel::kError, {"files_left"},
                 absl::StrCat("old exports stay: ", removed.message()));
    }
  }
  return report;
}

}  // namespace

absl::StatusOr<v1::PublishExportResponse> PublishExport(
    ParameterClient& client, const v1::PublishExportRequest& request,
    float day) {
  if (request.path().empty()) {
    return absl::InvalidArgumentError("PublishExport: path: expected a folder");
  }
  if (!request.row_format().empty()) {
    TFSWITCH_RETURN_IF_ERROR(RowFormatOf(request.row_format()).status());
  }
  auto report = Publish(client, request, day, request.delta());
  // A delta cannot follow if there is no export, if the last one is damaged or
  // has other settings, or if the changes are unknown.
  const bool is_broken =
      request.delta() && (absl::IsFailedPrecondition(report.status()) ||
                          absl::IsDataLoss(report.status()));
  if (!is_broken || !request.base_if_broken()) return report;
  const absl::Status why = report.status();
  report = Publish(client, request, day, /*is_delta=*/false);
  if (report.ok()) report->set_why_base(std::string(why.message()));
  return report;
}

}  // namespace tfswitch
