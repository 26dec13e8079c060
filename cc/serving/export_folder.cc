// ExportWriter holds the folder's lock from Begin() until it is destroyed, and
// writes to a hidden folder. Publish() writes the manifest last and renames
// that folder. After a crash the next Begin() finds hidden folders by their
// prefix and removes them under the lock. RemoveOldExports() renames an export
// before it removes the files, so that readers never find half an export.
//
// The checksum of a manifest is computed from its content as a message, so that
// line breaks and the order of fields in the file do not matter.

#include "cc/serving/export_folder.h"

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <system_error>
#include <utility>

#include "absl/memory/memory.h"
#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
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
#include "cc/wire/json.h"
#include "google/protobuf/io/coded_stream.h"
#include "google/protobuf/io/zero_copy_stream_impl_lite.h"

namespace tfswitch {
namespace {

namespace fs = std::filesystem;

constexpr char kTemporaryPrefix[] = ".writing-";
constexpr size_t kMaxManifestBytes = size_t{64} << 20;

// Equal contents are serialised to equal bytes.
uint64_t ChecksumOf(const v1::ExportContent& content) {
  std::string bytes;
  {
    google::protobuf::io::StringOutputStream stream(&bytes);
    google::protobuf::io::CodedOutputStream coded(&stream);
    coded.SetSerializationDeterministic(true);
    content.SerializeToCodedStream(&coded);
  }
  return Checksum(bytes.data(), bytes.size());
}

// Checks what the field rules in export.proto cannot express.
absl::Status CheckContent(const v1::ExportContent& content,
                          const ExportName& name) {
  if (NameOf(content).ToString() != name.ToString()) {
    return absl::InvalidArgumentError(
        absl::StrCat("it is that of ", NameOf(content).ToString()));
  }
  if (name.is_delta && !content.has_previous_id()) {
    return absl::InvalidArgumentError("field 'content.previous_id' is missing");
  }
  for (const auto& [name_of_table, table] : content.tables()) {
    const std::string where =
        absl::StrCat("content.tables.", absl::CHexEscape(name_of_table));
    TFSWITCH_RETURN_IF_ERROR(RowFormatOf(table.row_format()).status());
    if (table.file()[0] == '.' || absl::StrContains(table.file(), '/')) {
      return absl::InvalidArgumentError(
          absl::StrCat(where, ".file: expected a name, got '",
                       absl::CHexEscape(table.file()), "'"));
    }
  }
  return absl::OkStatus();
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

ExportName NameOf(const v1::ExportContent& manifest) {
  return {manifest.number(), manifest.is_delta()};
}

RowFormat FormatOf(const v1::ExportedTable& table) {
  return RowFormatOf(table.row_format()).value();
}

RowFileInfo InfoOf(const v1::ExportedTable& table) {
  return {table.bytes(), table.num_rows(), table.num_removed(),
          table.header_checksum()};
}

absl::StatusOr<v1::ExportContent> ReadExport(const std::string& path,
                                             const ExportName& name) {
  const std::string file =
      absl::StrCat(path, "/", name.ToString(), "/", kExportManifestName);
  v1::ExportManifest manifest;
  TFSWITCH_RETURN_IF_ERROR(ReadMessageFile(file, kMaxManifestBytes, &manifest));
  if (ChecksumOf(manifest.content()) != manifest.checksum()) {
    return DamagedFile(manifest, file, "its checksum does not fit");
  }
  const absl::Status status = CheckContent(manifest.content(), name);
  if (!status.ok()) return DamagedFile(manifest, file, status.message());
  return std::move(*manifest.mutable_content());
}

absl::StatusOr<std::vector<v1::ExportContent>> ReadChain(
    const std::string& path, const v1::ExportContent& last) {
  TFSWITCH_ASSIGN_OR_RETURN(const std::vector<ExportName> names,
                            ListExports(path));
  std::vector<v1::ExportContent> chain = {last};
  for (auto name = names.rbegin(); name != names.rend(); ++name) {
    if (!chain.back().is_delta()) break;
    if (name->number >= chain.back().number()) continue;
    TFSWITCH_ASSIGN_OR_RETURN(v1::ExportContent before,
                              ReadExport(path, *name));
    if (before.id() != chain.back().previous_id()) break;
    chain.push_back(std::move(before));
  }
  if (chain.back().is_delta()) {
    return absl::FailedPreconditionError(
        absl::StrCat("the export that ", NameOf(chain.back()).ToString(),
                     " follows is not in '", path, "'. Export a base."));
  }
  std::reverse(chain.begin(), chain.end());
  return chain;
}

std::string RowFilePath(const std::string& path, const ExportName& name,
                        const v1::ExportedTable& table) {
  return absl::StrCat(path, "/", name.ToString(), "/", table.file());
}

ExportWriter::ExportWriter(std::string path, std::unique_ptr<FolderLock> lock)
    : path_(std::move(path)), lock_(std::move(lock)) {}

absl::StatusOr<std::unique_ptr<ExportWriter>> ExportWriter::Begin(
    const std::string& path, bool is_delta) {
  TFSWITCH_RETURN_IF_ERROR(CreateFolders(path));
  // Returns Aborted only if another process holds the lock. For a delta that
  // cannot follow, Begin() returns another code, because callers then write a
  // base instead.
  TFSWITCH_ASSIGN_OR_RETURN(std::unique_ptr<FolderLock> lock,
                            FolderLock::Take(path, absl::ZeroDuration(),
                                             [] { return absl::OkStatus(); }));
  auto writer = absl::WrapUnique(new ExportWriter(path, std::move(lock)));
  TFSWITCH_ASSIGN_OR_RETURN(const std::vector<std::string> files,
                            ListFolder(path));
  std::error_code error;
  for (const std::string& file : files) {
    // Ignores errors, because a file that remains does no harm.
    if (absl::StartsWith(file, kTemporaryPrefix)) {
      fs::remove_all(absl::StrCat(path, "/", file), error);
    }
  }

  TFSWITCH_ASSIGN_OR_RETURN(const std::vector<ExportName> names,
                            ListExports(path));
  if (!names.empty()) {
    auto previous = ReadExport(path, names.back());
    // If the last export is damaged, a delta cannot follow it, but a base can.
    if (previous.ok()) {
      writer->previous_ = *std::move(previous);
    } else if (is_delta) {
      return previous.status();
    }
  }
  if (is_delta && writer->previous_.number() == 0) {
    return absl::FailedPreconditionError(
        absl::StrCat("there is no export in '", path,
                     "' that a delta could follow. Export a base first."));
  }
  int64_t number = names.empty() ? 0 : names.back().number;
  if (!CheckedAdd(number, int64_t{1}, &number)) {
    return absl::FailedPreconditionError(absl::StrCat(
        "there is no number after export ", names.back().ToString(), " in '",
        path, "'. Remove that, or export to another folder."));
  }
  v1::ExportContent& manifest = writer->manifest_;
  manifest.set_number(number);
  manifest.set_is_delta(is_delta);
  manifest.set_id(absl::StrFormat("%016x", DrawId()));
  if (is_delta) manifest.set_previous_id(writer->previous_.id());
  manifest.set_created_ms(absl::ToUnixMillis(absl::Now()));
  writer->temporary_ =
      absl::StrCat(path, "/", kTemporaryPrefix, writer->name().ToString());
  fs::create_directory(writer->temporary_, error);
  if (error) {
    return ErrnoStatus("create folder", writer->temporary_, error.value());
  }
  return writer;
}

ExportWriter::~ExportWriter() {
  std::error_code error;  // Files that stay do no harm.
  if (!is_published_ && !temporary_.empty()) {
    fs::remove_all(temporary_, error);
  }
}

absl::StatusOr<std::unique_ptr<RowFileWriter>> ExportWriter::AddTable(
    const RowFileKind& kind) {
  v1::ExportedTable& table = (*manifest_.mutable_tables())[kind.table];
  table.set_dim(kind.dim);
  table.set_row_format(std::string(NameOf(kind.format)));
  table.set_file(FileNameOf(kind.table) + ".safetensors");
  return RowFileWriter::Create(absl::StrCat(temporary_, "/", table.file()),
                               kind);
}

void ExportWriter::FinishTable(const std::string& table,
                               const RowFileInfo& info,
                               const std::vector<ChangeCursor>& cursors) {
  v1::ExportedTable& exported = (*manifest_.mutable_tables())[table];
  exported.set_bytes(info.bytes);
  exported.set_num_rows(info.num_rows);
  exported.set_num_removed(info.num_removed);
  exported.set_header_checksum(info.header_checksum);
  exported.clear_cursors();
  for (const ChangeCursor& cursor : cursors) {
    v1::ChangeCursor* const to = exported.add_cursors();
    to->set_log_id(cursor.log_id);
    to->set_epoch(cursor.epoch);
  }
}

absl::Status ExportWriter::Publish() {
  v1::ExportManifest manifest;
  *manifest.mutable_content() = manifest_;
  manifest.set_checksum(ChecksumOf(manifest_));
  TFSWITCH_RETURN_IF_ERROR(
      WriteMessageFile(absl::StrCat(temporary_, "/", kExportManifestName),
                       kMaxManifestBytes, &manifest));
  const std::string name = absl::StrCat(path_, "/", this->name().ToString());
  if (rename(temporary_.c_str(), name.c_str()) != 0) {
    return ErrnoStatus("publish", name, errno);
  }
  is_published_ = true;
  // The export counts as published in spite of this error, because readers can
  // see it already. The error only means that a power cut may undo the export.
  const absl::Status synced = SyncFolder(path_);
  if (!synced.ok()) {
    LogMessage(
        LogLevel::kError, {"export_not_flushed"},
        absl::StrCat(name, " is published, and perhaps not safe on its disk: ",
                     synced.message()));
  }
  return absl::OkStatus();
}

absl::Status RemoveOldExports(const std::string& path, uint32_t keep_bases) {
  TFSWITCH_ASSIGN_OR_RETURN(const std::vector<ExportName> names,
                            ListExports(path));
  uint32_t num_bases = 0;
  size_t first_kept = names.size();
  while (first_kept > 0 && num_bases < keep_bases) {
    if (!names[--first_kept].is_delta) ++num_bases;
  }
  if (num_bases < keep_bases) return absl::OkStatus();
  // Removes the oldest first, so that after a failure the remaining exports
  // still have the bases that they need.
  for (size_t i = 0; i < first_kept; ++i) {
    const std::string folder = absl::StrCat(path, "/", names[i].ToString());
    const std::string hidden =
        absl::StrCat(path, "/", kTemporaryPrefix, names[i].ToString());
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
