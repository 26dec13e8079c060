// A diff visits the rows of the first path and finds each key in the second. To
// bound the memory, it loads a checkpoint as a server of many would do: only
// the rows of some virtual shards, one part after the other.

#include "cc/capi/stored_files.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "absl/types/span.h"
#include "cc/base/checked_math.h"
#include "cc/base/files.h"
#include "cc/base/interrupt.h"
#include "cc/base/status_macros.h"
#include "cc/checkpoint/checkpoint.h"
#include "cc/checkpoint/safetensors.h"
#include "cc/log/push_log.h"
#include "cc/recovery/data_folder.h"
#include "cc/serving/export_folder.h"
#include "cc/serving/model_file.h"
#include "cc/serving/row_file.h"
#include "cc/table/embedding_table.h"
#include "cc/wire/table_config_conversion.h"

namespace tfswitch {
namespace {

namespace fs = std::filesystem;

constexpr int64_t kPartBytes = int64_t{256} << 20;
constexpr int64_t kChunkRows = 4096;
constexpr int64_t kFloatBytes = sizeof(float);

enum class FilesKind { kCheckpoint, kData, kLog, kExports, kModel };

// The folder, and the save or export in it, that a path names.
struct StoredPlace {
  FilesKind kind;
  std::string folder;
  int64_t number = 0;  // The save or the export that it names; 0: none.
};

bool IsInterrupted() { return !CheckInterrupt().ok(); }

bool Exists(const std::string& path) {
  std::error_code error;
  return fs::exists(path, error);
}

absl::StatusOr<int64_t> FirstRecordOf(const std::string& folder) {
  int64_t first = -1;
  TFSWITCH_ASSIGN_OR_RETURN(const auto names, ListFolder(folder));
  for (absl::string_view name : names) {
    int64_t number;
    if (absl::ConsumeSuffix(&name, ".log") && name.size() == 20 &&
        absl::SimpleAtoi(name, &number) && (first < 0 || number < first)) {
      first = number;
    }
  }
  return first;
}

absl::StatusOr<StoredPlace> Find(const std::string& given) {
  if (!Exists(given)) {
    return absl::NotFoundError(
        absl::StrCat("there is nothing at '", given, "'; check the path"));
  }
  fs::path path = fs::path(AbsolutePath(given)).lexically_normal();
  if (!path.has_filename()) path = path.parent_path();
  const std::string name = path.filename();
  const std::string parent = path.parent_path();
  absl::string_view rest = name;
  int64_t number = 0;
  if (absl::ConsumePrefix(&rest, "manifest-") &&
      absl::ConsumeSuffix(&rest, ".json") && absl::SimpleAtoi(rest, &number)) {
    return StoredPlace{FilesKind::kCheckpoint, parent, number};
  }
  if (name == checkpoint::kManifestName) return Find(parent);
  std::error_code error;
  if (fs::is_directory(path, error)) {
    if (Exists(path / "identity.json"))
      return StoredPlace{FilesKind::kData, path};
    if (Exists(path / "saved_model.pb"))
      return StoredPlace{FilesKind::kModel, path};
    TFSWITCH_ASSIGN_OR_RETURN(const auto siblings, ListExports(parent));
    for (const ExportName& each : siblings) {
      if (each.ToString() == name) {
        return StoredPlace{FilesKind::kExports, parent, each.number};
      }
    }
    TFSWITCH_ASSIGN_OR_RETURN(const auto exports, ListExports(path));
    if (!exports.empty()) return StoredPlace{FilesKind::kExports, path};
    if (!absl::IsNotFound(checkpoint::ReadManifest(path).status())) {
      return StoredPlace{FilesKind::kCheckpoint, path};
    }
    TFSWITCH_ASSIGN_OR_RETURN(const int64_t first, FirstRecordOf(path));
    if (first >= 0) return StoredPlace{FilesKind::kLog, path};
  }
  return absl::InvalidArgumentError(absl::StrCat(
      "'", given,
      "' is none of: a checkpoint, a data folder, a push log, a folder of "
      "exports, an export, a SavedModel; give the path of one"));
}

// --- InspectFiles -----------------------------------------------------------

void NoteDamage(const absl::Status& status, v1::StoredPart* part) {
  if (status.ok()) return;
  absl::StrAppend(part->mutable_damage(), part->damage().empty() ? "" : "; ",
                  status.message());
}

// Compares files with their checksums, each only once.
class Verifier {
 public:
  absl::Status Check(const std::string& path, const v1::CheckpointFile& file) {
    const auto [it, is_new] = checked_.try_emplace(path + "/" + file.name());
    if (!is_new) return it->second;
    TFSWITCH_RETURN_IF_ERROR(CheckInterrupt());
    auto read = checkpoint::ReadSafetensors(it->first, file.bytes(),
                                            file.crc32(), std::move(former_));
    if (read.ok()) {
      former_ = *std::move(read);
    } else {
      former_ = {};
      it->second = read.status();
    }
    return it->second;
  }

 private:
  std::map<std::string, absl::Status> checked_;
  checkpoint::SafetensorsFile former_;
};

void DescribeSave(const std::string& path,
                  const v1::CheckpointManifest& manifest, Verifier* verifier,
                  v1::StoredPart* part) {
  part->set_name(absl::StrCat("save ", manifest.save()));
  // A save_id begins with its time: 12 hexadecimal digits from clients, and 16
  // in a server's own state, which has the time in a field of its own.
  int64_t created = 0;
  if (!manifest.has_server()) {
    (void)absl::SimpleHexAtoi(manifest.save_id().substr(0, 12), &created);
  }
  part->set_created_ms(manifest.has_server() ? manifest.server().saved_at_ms()
                                             : created);
  std::vector<const v1::CheckpointFile*> files;
  const std::map<std::string, v1::CheckpointTable> tables(
      manifest.tables().begin(), manifest.tables().end());
  for (const auto& [name, saved] : tables) {
    v1::StoredTable& table = *part->add_tables();
    table.set_name(name);
    table.set_dim(static_cast<int32_t>(saved.config().dim()));
    table.set_num_rows(static_cast<int64_t>(saved.num_rows()));
    table.set_row_format("float32");
    for (const v1::CheckpointFile& file : saved.files()) {
      table.set_bytes(table.bytes() + file.bytes());
      if (verifier != nullptr) NoteDamage(verifier->Check(path, file), part);
    }
    part->set_bytes(part->bytes() + table.bytes());
  }
  for (const v1::CheckpointFile& file : manifest.server().files()) {
    part->set_bytes(part->bytes() + file.bytes());
    if (verifier != nullptr) NoteDamage(verifier->Check(path, file), part);
  }
}

// Adds the saves, or only the save `number`. Returns the newest one that can be
// read.
absl::StatusOr<v1::CheckpointManifest> DescribeSaves(
    const std::string& path, int64_t number, bool verify,
    v1::InspectFilesResponse* response) {
  v1::CheckpointManifest newest;
  Verifier verifier;
  std::vector<v1::StoredPart> parts;
  for (int i = 0;; ++i) {
    TFSWITCH_RETURN_IF_ERROR(CheckInterrupt());
    const auto manifest =
        checkpoint::ReadManifest(path, number, number == 0 ? i : 0);
    if (absl::IsNotFound(manifest.status())) break;
    if (!manifest.ok() && !absl::IsDataLoss(manifest.status()) &&
        !absl::IsFailedPrecondition(manifest.status())) {
      return manifest.status();  // No file can be read.
    }
    v1::StoredPart part;
    if (manifest.ok()) {
      DescribeSave(path, *manifest, verify ? &verifier : nullptr, &part);
      if (newest.save() == 0) newest = *manifest;
    } else {
      part.set_name("a save");
      NoteDamage(manifest.status(), &part);
    }
    parts.push_back(std::move(part));
    if (number != 0) break;
  }
  response->mutable_parts()->Add(parts.rbegin(), parts.rend());
  return newest;
}

// Reads all records, because their number is not written elsewhere.
absl::Status DescribeLog(const std::string& path, int64_t first,
                         uint64_t must_reach,
                         v1::InspectFilesResponse* response) {
  PushLogOptions options;
  options.folder = path;
  options.must_reach = must_reach;
  const auto number = static_cast<uint64_t>(std::max<int64_t>(first, 1));
  TFSWITCH_ASSIGN_OR_RETURN(
      const LogContents log,
      PushLog::Read(options, number, number - 1,
                    [](uint64_t, uint32_t, absl::string_view) {
                      return CheckInterrupt();
                    }));
  for (const auto& [begin, segment] : log.segments) {
    v1::StoredPart& part = *response->add_parts();
    part.set_name(fs::path(segment.path).filename());
    part.set_num_records(static_cast<int64_t>(segment.num_records));
    std::error_code error;
    part.set_bytes(static_cast<int64_t>(fs::file_size(segment.path, error)));
  }
  if (log.damage.ok()) return absl::OkStatus();
  if (response->parts().empty()) response->add_parts()->set_name("push log");
  NoteDamage(log.damage, response->mutable_parts(response->parts_size() - 1));
  return absl::OkStatus();
}

absl::Status DescribeExports(const StoredPlace& place, bool verify,
                             v1::InspectFilesResponse* response) {
  TFSWITCH_ASSIGN_OR_RETURN(const auto names, ListExports(place.folder));
  for (const ExportName& name : names) {
    if (place.number != 0 && name.number != place.number) continue;
    v1::StoredPart& part = *response->add_parts();
    part.set_name(name.ToString());
    const auto content = ReadExport(place.folder, name);
    NoteDamage(content.status(), &part);
    if (!content.ok()) continue;
    part.set_created_ms(content->created_ms());
    const std::map<std::string, v1::ExportedTable> tables(
        content->tables().begin(), content->tables().end());
    for (const auto& [table_name, exported] : tables) {
      v1::StoredTable& table = *part.add_tables();
      table.set_name(table_name);
      table.set_dim(exported.dim());
      table.set_num_rows(exported.num_rows());
      table.set_num_removed(exported.num_removed());
      table.set_bytes(exported.bytes());
      table.set_row_format(exported.row_format());
      part.set_bytes(part.bytes() + exported.bytes());
      if (!verify) continue;
      const auto file = RowFile::Open(RowFilePath(place.folder, name, exported),
                                      InfoOf(exported));
      NoteDamage(file.ok() ? (*file)->Verify(IsInterrupted) : file.status(),
                 &part);
    }
  }
  return absl::OkStatus();
}

// The folder of a model's exports; empty if its rows are elsewhere.
absl::StatusOr<std::string> ExportsOf(const std::string& model,
                                      std::string* note) {
  const fs::path file = fs::path(model) / kModelFilePath;
  const auto read = ReadModelFile(file);
  if (absl::IsNotFound(read.status())) {
    *note = "it has no rows of tfswitch";
    return "";
  }
  TFSWITCH_RETURN_IF_ERROR(read.status());
  const std::map<std::string, int> tables(read->tables().begin(),
                                          read->tables().end());
  for (const auto& [name, dim] : tables) {
    absl::StrAppend(note, note->empty() ? "looks up " : ", ", "table '", name,
                    "' of dim ", dim);
  }
  if (read->has_remote()) {
    absl::StrAppend(note, ", on servers at ", read->remote().addresses());
    return "";
  }
  return (file.parent_path() / read->embedded().rows()).lexically_normal();
}

}  // namespace

absl::Status InspectFiles(const v1::InspectFilesRequest& request,
                          v1::InspectFilesResponse* response) {
  TFSWITCH_ASSIGN_OR_RETURN(StoredPlace place, Find(request.path()));
  switch (place.kind) {
    case FilesKind::kCheckpoint:
      response->set_kind("checkpoint");
      TFSWITCH_RETURN_IF_ERROR(
          DescribeSaves(place.folder, place.number, request.verify(), response)
              .status());
      break;
    case FilesKind::kData: {
      response->set_kind("data folder");
      TFSWITCH_ASSIGN_OR_RETURN(const auto folder,
                                DataFolder::OpenToRepair(place.folder));
      response->set_note(absl::StrCat(
          "shard ", folder->identity().shard_index, " of ",
          folder->identity().num_shards, ", ", folder->num_writes()->load(),
          " writes",
          folder->is_counter_lost() ? "; its file `writes` is damaged" : ""));
      TFSWITCH_ASSIGN_OR_RETURN(const v1::CheckpointManifest newest,
                                DescribeSaves(DataFolder::StateOf(place.folder),
                                              0, request.verify(), response));
      const std::string log = DataFolder::LogOf(place.folder);
      if (!Exists(log)) break;
      TFSWITCH_RETURN_IF_ERROR(DescribeLog(
          log, static_cast<int64_t>(newest.server().last_record()) + 1,
          folder->last_needed_record(), response));
      break;
    }
    case FilesKind::kLog: {
      response->set_kind("push log");
      TFSWITCH_ASSIGN_OR_RETURN(const int64_t first,
                                FirstRecordOf(place.folder));
      TFSWITCH_RETURN_IF_ERROR(
          DescribeLog(place.folder, first, /*must_reach=*/0, response));
      break;
    }
    case FilesKind::kExports:
      response->set_kind(place.number == 0 ? "exports" : "export");
      TFSWITCH_RETURN_IF_ERROR(
          DescribeExports(place, request.verify(), response));
      break;
    case FilesKind::kModel: {
      response->set_kind("SavedModel");
      TFSWITCH_ASSIGN_OR_RETURN(
          place.folder, ExportsOf(place.folder, response->mutable_note()));
      if (place.folder.empty()) break;
      TFSWITCH_RETURN_IF_ERROR(
          DescribeExports(place, request.verify(), response));
      break;
    }
  }
  return CheckInterrupt();
}

// --- DiffFiles --------------------------------------------------------------

namespace {

// The files of one table: of a save, or of a base and the deltas after it.
struct TableFiles {
  TableConfig config;
  int64_t bytes = 0;
  std::string path;
  v1::CheckpointTable saved;
  std::vector<std::shared_ptr<const RowFile>> exported;  // Else empty.
};

// Adds the rows of a file to those of older files.
absl::Status AddRows(const RowFile& file, uint32_t part, uint32_t num_parts,
                     EmbeddingTable* table) {
  const auto dim = static_cast<size_t>(table->dim());
  const uint32_t num_virtual = table->config().num_virtual_shards;
  std::vector<Key> keys;
  std::vector<float> rows;
  std::vector<Key> removed;
  const auto flush = [&]() -> absl::Status {
    TFSWITCH_RETURN_IF_ERROR(CheckInterrupt());
    TFSWITCH_RETURN_IF_ERROR(
        table->AssignRows({keys, rows, {}}, AssignMode::kNow).status());
    TFSWITCH_RETURN_IF_ERROR(table->Erase(removed).status());
    keys.clear();
    rows.clear();
    removed.clear();
    return absl::OkStatus();
  };
  TFSWITCH_RETURN_IF_ERROR(
      file.ForEachKey([&](Key key, const char* row) -> absl::Status {
        if (OwnerOfVirtualShard(VirtualShardOf(key, num_virtual), num_virtual,
                                num_parts) != part) {
          return absl::OkStatus();
        }
        if (row == nullptr) {
          removed.push_back(key);
        } else {
          keys.push_back(key);
          rows.resize(rows.size() + dim);
          file.decoder()(row, table->dim(), rows.data() + rows.size() - dim);
        }
        const size_t count = keys.size() + removed.size();
        return count < kChunkRows ? absl::OkStatus() : flush();
      }));
  return flush();
}

absl::StatusOr<std::unique_ptr<EmbeddingTable>> LoadPart(
    const TableFiles& files, uint32_t part, uint32_t num_parts) {
  TFSWITCH_ASSIGN_OR_RETURN(auto table, EmbeddingTable::Create(files.config));
  if (!files.path.empty()) {
    TFSWITCH_RETURN_IF_ERROR(checkpoint::LoadTable(
        files.path, files.saved, part, num_parts, CheckInterrupt, *table));
  }
  for (const auto& file : files.exported) {
    TFSWITCH_RETURN_IF_ERROR(AddRows(*file, part, num_parts, table.get()));
  }
  return table;
}

absl::Status OpenExports(const StoredPlace& place,
                         std::map<std::string, TableFiles>* tables) {
  TFSWITCH_ASSIGN_OR_RETURN(auto names, ListExports(place.folder));
  while (place.number != 0 && !names.empty() &&
         names.back().number > place.number) {
    names.pop_back();
  }
  if (names.empty()) {
    return absl::NotFoundError(
        absl::StrCat("there is no export in '", place.folder, "'"));
  }
  TFSWITCH_ASSIGN_OR_RETURN(const auto newest,
                            ReadExport(place.folder, names.back()));
  TFSWITCH_ASSIGN_OR_RETURN(const auto chain, ReadChain(place.folder, newest));
  for (const auto& [name, table] : newest.tables()) {
    TableFiles& files = (*tables)[name];
    files.config.name = name;
    files.config.dim = table.dim();
    for (const v1::ExportContent& each : chain) {
      const auto found = each.tables().find(name);
      if (found == each.tables().end()) {
        return absl::FailedPreconditionError(absl::StrCat(
            "table '", name, "' is not in ", NameOf(each).ToString(), " of '",
            place.folder, "', on which the newest export builds"));
      }
      TFSWITCH_ASSIGN_OR_RETURN(
          const auto file,
          RowFile::Open(RowFilePath(place.folder, NameOf(each), found->second),
                        InfoOf(found->second)));
      if (file->kind().dim != table.dim()) {
        return absl::DataLossError(absl::StrCat(
            "table '", name, "' has dim ", table.dim(), " in ",
            NameOf(newest).ToString(), " of '", place.folder, "', and dim ",
            file->kind().dim, " in ", NameOf(each).ToString()));
      }
      TFSWITCH_RETURN_IF_ERROR(file->Verify(IsInterrupted));
      int64_t bytes = 0;
      if (!CheckedMultiply<int64_t>(found->second.num_rows(),
                                    table.dim() * kFloatBytes, &bytes) ||
          !CheckedAdd(files.bytes, bytes, &files.bytes)) {
        return absl::DataLossError(absl::StrCat(
            "table '", name, "' has too many rows in '", place.folder, "'"));
      }
      files.exported.push_back(file);
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<std::map<std::string, TableFiles>> OpenTables(
    const std::string& path) {
  TFSWITCH_ASSIGN_OR_RETURN(StoredPlace place, Find(path));
  std::map<std::string, TableFiles> tables;
  if (place.kind == FilesKind::kData) {
    place = {FilesKind::kCheckpoint, DataFolder::StateOf(place.folder)};
  }
  if (place.kind == FilesKind::kModel) {
    std::string note;
    TFSWITCH_ASSIGN_OR_RETURN(place.folder, ExportsOf(place.folder, &note));
  }
  if (place.kind == FilesKind::kLog || place.folder.empty()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "'", path, "' has no rows to compare; give a checkpoint or an export"));
  }
  if (place.kind != FilesKind::kCheckpoint) {
    TFSWITCH_RETURN_IF_ERROR(OpenExports(place, &tables));
    return tables;
  }
  TFSWITCH_ASSIGN_OR_RETURN(
      const auto save, checkpoint::ReadManifest(place.folder, place.number));
  for (const auto& [name, saved] : save.tables()) {
    tables[name] = {FromProto(saved.config()),
                    checkpoint::FindRowsToRead(saved, 0, 1).bytes,
                    place.folder,
                    saved,
                    {}};
  }
  return tables;
}

// Adds the differences of two parts to `diff`, and the squares of the changes
// to `squares`.
absl::Status Compare(const EmbeddingTable& before, const EmbeddingTable& after,
                     v1::TableDiff* diff, double* squares) {
  const auto dim = static_cast<size_t>(before.dim());
  std::vector<float> row(dim);
  int64_t common = 0;
  TFSWITCH_RETURN_IF_ERROR(
      before.ForEachRow(kChunkRows, [&](const RowChunk& chunk) -> absl::Status {
        TFSWITCH_RETURN_IF_ERROR(CheckInterrupt());
        for (size_t i = 0; i < chunk.keys.size(); ++i) {
          TFSWITCH_ASSIGN_OR_RETURN(
              const int64_t found,
              after.Find(chunk.keys.subspan(i, 1), absl::MakeSpan(row)));
          if (found == 0) continue;
          ++common;
          double sum = 0.0;
          for (size_t j = 0; j < dim; ++j) {
            const double change =
                double{row[j]} - double{chunk.embeddings[i * dim + j]};
            sum += change * change;
          }
          diff->set_changed(diff->changed() + (sum != 0.0 ? 1 : 0));
          *squares += sum;
        }
        return absl::OkStatus();
      }));
  diff->set_removed(diff->removed() + before.size() - common);
  diff->set_added(diff->added() + after.size() - common);
  diff->set_same(diff->same() + common);
  return absl::OkStatus();
}

absl::Status DiffTable(TableFiles before, TableFiles after,
                       v1::TableDiff* diff) {
  if (before.config.dim != after.config.dim) {
    diff->set_note(absl::StrCat("dim ", before.config.dim, " and dim ",
                                after.config.dim, ": not compared"));
    return absl::OkStatus();
  }
  // Exports do not have the number of virtual shards.
  if (before.path.empty()) {
    before.config.num_virtual_shards = after.config.num_virtual_shards;
  } else if (after.path.empty()) {
    after.config.num_virtual_shards = before.config.num_virtual_shards;
  }
  const uint32_t num_virtual =
      std::max<uint32_t>(before.config.num_virtual_shards, 1);
  // Parts have the same keys only if keys have the same virtual shards.
  const auto num_parts =
      num_virtual != after.config.num_virtual_shards
          ? 1
          : static_cast<uint32_t>(std::min<int64_t>(
                std::max(before.bytes, after.bytes) / kPartBytes + 1,
                num_virtual));
  double squares = 0.0;
  for (uint32_t part = 0; part < num_parts; ++part) {
    TFSWITCH_ASSIGN_OR_RETURN(const auto from,
                              LoadPart(before, part, num_parts));
    TFSWITCH_ASSIGN_OR_RETURN(const auto to, LoadPart(after, part, num_parts));
    TFSWITCH_RETURN_IF_ERROR(Compare(*from, *to, diff, &squares));
  }
  diff->set_same(diff->same() - diff->changed());
  diff->set_norm(std::sqrt(squares));
  return absl::OkStatus();
}

}  // namespace

absl::Status DiffFiles(const v1::DiffFilesRequest& request,
                       v1::DiffFilesResponse* response) {
  TFSWITCH_ASSIGN_OR_RETURN(auto before, OpenTables(request.before()));
  TFSWITCH_ASSIGN_OR_RETURN(auto after, OpenTables(request.after()));
  // A table that one side lacks is compared with an empty one.
  for (auto* tables : {&before, &after}) {
    for (const auto& [name, files] : tables == &before ? after : before) {
      TableFiles& own = (*tables)[name];
      if (own.config.dim == 0) own.config = files.config;
    }
  }
  for (const auto& [name, files] : before) {
    v1::TableDiff& diff = *response->add_tables();
    diff.set_name(name);
    TFSWITCH_RETURN_IF_ERROR(DiffTable(files, after[name], &diff));
  }
  return absl::OkStatus();
}

}  // namespace tfswitch
