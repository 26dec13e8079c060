// ExportWriter holds the folder's lock from Begin() to its end and writes into
// a hidden folder. Publish() writes the manifest last and renames that folder.
// The remains of a crash have the same prefix, and the next Begin() removes
// them under the lock. RemoveOldExports() renames first and removes then, so
// that no reader finds half an export.
//
// The checksum of a manifest is that of its content as compact JSON, so that
// line breaks in the file do not matter. ReadExport() looks at the version
// before it looks at the checksum, so that a newer version is named as such.

#include "cc/serving/export_folder.h"

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <limits>
#include <system_error>
#include <utility>

#include "absl/memory/memory.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/strip.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "cc/base/checked_math.h"
#include "cc/base/checksum.h"
#include "cc/base/log_writer.h"
#include "cc/base/random_id.h"
#include "cc/base/status_macros.h"
#include "cc/serving/object_reader.h"

namespace tfswitch {
namespace {

namespace fs = std::filesystem;

constexpr char kFormatName[] = "tfswitch-export";
constexpr char kTemporaryPrefix[] = ".writing-";
constexpr size_t kMaxManifestBytes = size_t{64} << 20;

std::string Hex(uint64_t number) { return absl::StrFormat("%016x", number); }

// The checksum of a manifest.
std::string ChecksumOf(const Json& content) {
  const std::string compact =
      content.dump(-1, ' ', true, Json::error_handler_t::replace);
  return Hex(Checksum(compact.data(), compact.size()));
}

// A field with the 16 digits of Hex().
void ReadHex(const char* field, ObjectReader* reader, uint64_t* value) {
  std::string text;
  reader->Read(field, &text);
  const Json* const json = reader->Find(field);
  if (text.size() == 16 && absl::SimpleHexAtoi(text, value)) return;
  reader->Fail(field, "16 hexadecimal digits",
               json == nullptr ? Json() : *json);
}

// A field that must be there, with an integer from 0 to the largest T.
template <typename T>
void ReadCount(const char* field, ObjectReader* reader, T* value) {
  uint64_t number = 0;
  if (reader->Find(field) == nullptr) {
    reader->Fail(field, "a number", Json());
  }
  reader->Read(field, uint64_t{std::numeric_limits<T>::max()}, &number);
  *value = static_cast<T>(number);
}

Json ToJson(const ExportedTable& table) {
  Json cursors = Json::array();
  for (const ChangeCursor& cursor : table.cursors) {
    cursors.push_back(
        {{"log_id", Hex(cursor.log_id)}, {"epoch", cursor.epoch}});
  }
  return {{"dim", table.dim},
          {"row_format", std::string(NameOf(table.format))},
          {"file", table.file},
          {"bytes", table.info.bytes},
          {"num_rows", table.info.num_rows},
          {"num_removed", table.info.num_removed},
          {"header_checksum", Hex(table.info.header_checksum)},
          {"cursors", std::move(cursors)}};
}

absl::Status FromJson(const Json& json, const std::string& path,
                      absl::string_view document, ExportedTable* table) {
  ObjectReader reader(json, path, document);
  ReadCount("dim", &reader, &table->dim);
  std::string format;
  reader.Read("row_format", &format);
  reader.Read("file", &table->file);
  ReadCount("bytes", &reader, &table->info.bytes);
  ReadCount("num_rows", &reader, &table->info.num_rows);
  ReadCount("num_removed", &reader, &table->info.num_removed);
  ReadHex("header_checksum", &reader, &table->info.header_checksum);
  const Json* const cursors = reader.Find("cursors");
  if (cursors == nullptr || !cursors->is_array()) {
    reader.Fail("cursors", "a list", cursors == nullptr ? Json() : *cursors);
  }
  TFSWITCH_RETURN_IF_ERROR(reader.Finish());
  for (const Json& each : *cursors) {
    ObjectReader cursor_reader(each, absl::StrCat(path, ".cursors"), document);
    ChangeCursor cursor;
    ReadHex("log_id", &cursor_reader, &cursor.log_id);
    ReadCount("epoch", &cursor_reader, &cursor.epoch);
    TFSWITCH_RETURN_IF_ERROR(cursor_reader.Finish());
    table->cursors.push_back(cursor);
  }
  TFSWITCH_ASSIGN_OR_RETURN(table->format, RowFormatOf(format));
  if (table->file.empty() || table->file.find('/') != std::string::npos ||
      table->file[0] == '.') {
    return absl::InvalidArgumentError(
        absl::StrCat(document, ": ", path, ".file: expected a name, got '",
                     table->file, "'"));
  }
  return absl::OkStatus();
}

Json ToJson(const ScoreRule& rule) {
  return {{"base_threshold", rule.base_threshold},
          {"delta_threshold", rule.delta_threshold},
          {"delta_keep_days", rule.delta_keep_days}};
}

absl::Status FromJson(const Json& json, absl::string_view document,
                      ScoreRule* rule) {
  ObjectReader reader(json, "rule", document);
  reader.Read("base_threshold", &rule->base_threshold);
  reader.Read("delta_threshold", &rule->delta_threshold);
  reader.Read("delta_keep_days", &rule->delta_keep_days);
  return reader.Finish();
}

absl::StatusOr<ExportManifest> ParseManifest(const Json& content,
                                             const ExportName& name) {
  constexpr absl::string_view kDocument = "manifest";
  ExportManifest manifest;
  manifest.name = name;
  ObjectReader reader(content, "", kDocument);
  std::string format;
  std::string kind;
  int64_t number = 0;
  int64_t version = 0;
  reader.Read("format", &format);
  ReadCount("version", &reader, &version);
  reader.Read("kind", &kind);
  ReadCount("number", &reader, &number);
  reader.Read("id", &manifest.id);
  reader.Read("previous_id", &manifest.previous_id);
  ReadCount("created_ms", &reader, &manifest.created_ms);
  const Json* const tables = reader.Find("tables");
  if (tables == nullptr || !tables->is_object()) {
    reader.Fail("tables", "an object", tables == nullptr ? Json() : *tables);
  }
  const Json* const rule = reader.Find("rule");
  TFSWITCH_RETURN_IF_ERROR(reader.Finish());
  if (format != kFormatName) {
    return absl::InvalidArgumentError(
        absl::StrCat("format: expected ", kFormatName, ", got '", format, "'"));
  }
  if (manifest.id.empty() || (name.is_delta && manifest.previous_id.empty())) {
    return absl::InvalidArgumentError(absl::StrCat(
        manifest.id.empty() ? "id" : "previous_id", ": it has none"));
  }
  if (rule != nullptr) {
    TFSWITCH_RETURN_IF_ERROR(
        FromJson(*rule, kDocument, &manifest.rule.emplace()));
  }
  if (kind != (name.is_delta ? "delta" : "base") || number != name.number) {
    return absl::InvalidArgumentError(
        absl::StrCat("it is of the ", kind, " number ", number));
  }
  for (const auto& [table, entry] : tables->items()) {
    TFSWITCH_RETURN_IF_ERROR(FromJson(entry, absl::StrCat("tables.", table),
                                      kDocument, &manifest.tables[table]));
  }
  return manifest;
}

}  // namespace

std::string ExportName::ToString() const {
  return absl::StrFormat("%s-%08d", is_delta ? "delta" : "base", number);
}

absl::StatusOr<std::vector<ExportName>> ListExports(const std::string& path) {
  std::vector<ExportName> names;
  TFSWITCH_ASSIGN_OR_RETURN(const std::vector<std::string> files,
                            ListFolder(path));
  for (const std::string& file : files) {
    absl::string_view rest = file;
    ExportName name;
    name.is_delta = absl::ConsumePrefix(&rest, "delta-");
    if (!name.is_delta && !absl::ConsumePrefix(&rest, "base-")) continue;
    if (!absl::SimpleAtoi(rest, &name.number) || name.number <= 0 ||
        name.ToString() != file) {
      continue;
    }
    std::error_code error;
    if (fs::is_directory(absl::StrCat(path, "/", file), error)) {
      names.push_back(name);
    }
  }
  std::sort(names.begin(), names.end(),
            [](const ExportName& a, const ExportName& b) {
              return a.number < b.number;
            });
  return names;
}

absl::StatusOr<ExportManifest> ReadExport(const std::string& path,
                                          const ExportName& name) {
  const std::string file =
      absl::StrCat(path, "/", name.ToString(), "/", kExportManifestName);
  TFSWITCH_ASSIGN_OR_RETURN(const std::string text,
                            ReadWholeFile(file, kMaxManifestBytes));
  const auto damaged = [&file](absl::string_view why) {
    return absl::DataLossError(
        absl::StrCat("export manifest '", file, "' is damaged: ", why,
                     ". Copy the export again, or publish a new base."));
  };
  const absl::StatusOr<Json> parsed = ParseJson(text);
  if (!parsed.ok()) return damaged(parsed.status().message());
  const Json& json = *parsed;
  if (!json.is_object() || !json.contains("content") ||
      !json["content"].is_object() || !json.contains("checksum") ||
      !json["checksum"].is_string()) {
    return damaged("it is no manifest");
  }
  const Json& content = json["content"];
  const auto version = content.find("version");
  if (version != content.end() && version->is_number_integer() &&
      *version != kExportVersion) {
    return absl::FailedPreconditionError(absl::StrCat(
        "export '", file, "' is of format version ", version->dump(),
        ", this tfswitch reads version ", kExportVersion,
        ". Serve it with the tfswitch that wrote it, or export again."));
  }
  if (ChecksumOf(content) != json["checksum"].get<std::string>()) {
    return damaged("its checksum does not fit");
  }
  auto manifest = ParseManifest(content, name);
  if (!manifest.ok()) return damaged(manifest.status().message());
  return manifest;
}

absl::StatusOr<std::vector<ExportManifest>> ReadChain(
    const std::string& path, const ExportManifest& last) {
  TFSWITCH_ASSIGN_OR_RETURN(const std::vector<ExportName> names,
                            ListExports(path));
  std::vector<ExportManifest> chain = {last};
  for (auto name = names.rbegin(); name != names.rend(); ++name) {
    if (!chain.back().name.is_delta) break;
    if (name->number >= chain.back().name.number) continue;
    TFSWITCH_ASSIGN_OR_RETURN(ExportManifest before, ReadExport(path, *name));
    if (before.id != chain.back().previous_id) break;
    chain.push_back(std::move(before));
  }
  if (chain.back().name.is_delta) {
    return absl::FailedPreconditionError(
        absl::StrCat("the export that ", chain.back().name.ToString(),
                     " follows is not in '", path, "'. Export a base."));
  }
  std::reverse(chain.begin(), chain.end());
  return chain;
}

std::string RowFilePath(const std::string& path, const ExportName& name,
                        const ExportedTable& table) {
  return absl::StrCat(path, "/", name.ToString(), "/", table.file);
}

ExportWriter::ExportWriter(std::string path, std::unique_ptr<FolderLock> lock)
    : path_(std::move(path)), lock_(std::move(lock)) {}

absl::StatusOr<std::unique_ptr<ExportWriter>> ExportWriter::Begin(
    const std::string& path, bool is_delta) {
  TFSWITCH_RETURN_IF_ERROR(CreateFolders(path));
  // Aborted is not as where a delta cannot follow, for which a base is the
  // remedy.
  TFSWITCH_ASSIGN_OR_RETURN(std::unique_ptr<FolderLock> lock,
                            FolderLock::Take(path, absl::ZeroDuration(),
                                             [] { return absl::OkStatus(); }));
  auto writer = absl::WrapUnique(new ExportWriter(path, std::move(lock)));
  TFSWITCH_ASSIGN_OR_RETURN(const std::vector<std::string> files,
                            ListFolder(path));
  std::error_code error;
  for (const std::string& file : files) {
    // Files that cannot be removed are only garbage.
    if (absl::StartsWith(file, kTemporaryPrefix)) {
      fs::remove_all(absl::StrCat(path, "/", file), error);
    }
  }

  TFSWITCH_ASSIGN_OR_RETURN(const std::vector<ExportName> names,
                            ListExports(path));
  ExportManifest& manifest = writer->manifest_;
  if (!names.empty()) {
    manifest.name.number = names.back().number;
    auto previous = ReadExport(path, names.back());
    // A base can follow anything.
    if (previous.ok()) {
      writer->previous_ = *std::move(previous);
    } else if (is_delta) {
      return previous.status();
    }
  }
  if (is_delta && writer->previous_.name.number == 0) {
    return absl::FailedPreconditionError(
        absl::StrCat("there is no export in '", path,
                     "' that a delta could follow. Export a base first."));
  }
  if (!CheckedAdd(manifest.name.number, int64_t{1}, &manifest.name.number)) {
    return absl::FailedPreconditionError(absl::StrCat(
        "there is no number after export ", names.back().ToString(), " in '",
        path, "'. Remove that, or export to another folder."));
  }
  manifest.name.is_delta = is_delta;
  manifest.id = Hex(DrawId());
  if (is_delta) manifest.previous_id = writer->previous_.id;
  manifest.created_ms = absl::ToUnixMillis(absl::Now());
  writer->temporary_ =
      absl::StrCat(path, "/", kTemporaryPrefix, manifest.name.ToString());
  fs::create_directory(writer->temporary_, error);
  if (error) {
    return ErrnoStatus("create folder", writer->temporary_, error.value());
  }
  return writer;
}

ExportWriter::~ExportWriter() {
  std::error_code error;  // Files that stay are only garbage.
  if (!is_published_ && !temporary_.empty()) {
    fs::remove_all(temporary_, error);
  }
}

absl::StatusOr<std::unique_ptr<RowFileWriter>> ExportWriter::AddTable(
    const RowFileKind& kind) {
  ExportedTable& table = manifest_.tables[kind.table];
  table.dim = kind.dim;
  table.format = kind.format;
  table.file = FileNameOf(kind.table) + ".safetensors";
  return RowFileWriter::Create(absl::StrCat(temporary_, "/", table.file), kind);
}

void ExportWriter::FinishTable(const std::string& table,
                               const RowFileInfo& info,
                               std::vector<ChangeCursor> cursors) {
  ExportedTable& exported = manifest_.tables[table];
  exported.info = info;
  exported.cursors = std::move(cursors);
}

absl::Status ExportWriter::Publish() {
  Json tables = Json::object();
  for (const auto& [name, table] : manifest_.tables) {
    tables[name] = ToJson(table);
  }
  Json content = {{"format", kFormatName},
                  {"version", kExportVersion},
                  {"kind", manifest_.name.is_delta ? "delta" : "base"},
                  {"number", manifest_.name.number},
                  {"id", manifest_.id},
                  {"created_ms", manifest_.created_ms},
                  {"tables", std::move(tables)}};
  if (manifest_.name.is_delta) content["previous_id"] = manifest_.previous_id;
  if (manifest_.rule.has_value()) content["rule"] = ToJson(*manifest_.rule);
  std::string checksum = ChecksumOf(content);
  const Json json = {{"checksum", std::move(checksum)},
                     {"content", std::move(content)}};
  TFSWITCH_RETURN_IF_ERROR(WriteFileAtomically(
      absl::StrCat(temporary_, "/", kExportManifestName),
      json.dump(1, ' ', true, Json::error_handler_t::replace) + "\n"));
  const std::string name = absl::StrCat(path_, "/", manifest_.name.ToString());
  if (rename(temporary_.c_str(), name.c_str()) != 0) {
    return ErrnoStatus("publish", name, errno);
  }
  is_published_ = true;
  // Readers see it, so there is no way back: an error now is for callers that
  // mind that a power cut may undo it.
  const absl::Status synced = SyncFolder(path_);
  if (!synced.ok()) {
    LogMessage(
        LogLevel::kError, {"export_not_flushed"},
        absl::StrCat(name, " is published, and perhaps not safe on its disk: ",
                     synced.message()));
  }
  return absl::OkStatus();
}

absl::Status RemoveOldExports(const std::string& path, int keep_bases) {
  TFSWITCH_ASSIGN_OR_RETURN(const std::vector<ExportName> names,
                            ListExports(path));
  int num_bases = 0;
  size_t first_kept = names.size();
  while (first_kept > 0 && num_bases < keep_bases) {
    if (!names[--first_kept].is_delta) ++num_bases;
  }
  if (num_bases < keep_bases) return absl::OkStatus();
  // The oldest first, so that a failure leaves no hole: the newest exports that
  // are left are whole chains.
  for (size_t i = 0; i < first_kept; ++i) {
    const std::string folder = absl::StrCat(path, "/", names[i].ToString());
    const std::string hidden =
        absl::StrCat(path, "/", kTemporaryPrefix, names[i].ToString());
    // A reader that lists the folder sees it whole or not at all.
    if (rename(folder.c_str(), hidden.c_str()) != 0) {
      return ErrnoStatus("remove", folder, errno);
    }
    std::error_code error;
    fs::remove_all(hidden, error);
    if (error) return ErrnoStatus("remove", hidden, error.value());
  }
  return absl::OkStatus();
}

}  // namespace tfswitch
