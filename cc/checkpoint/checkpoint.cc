// PartWriter takes no lock, because each attempt of a save has file names of
// its own. Commit() takes the folder's lock before it reads the former manifest
// and keeps it until old saves are removed. It checks all files, gives the
// former manifest its numbered name, and then replaces manifest.json. A crash
// between these two leaves one save under both names, which ReadManifest()
// expects.

#include "cc/checkpoint/checkpoint.h"

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <filesystem>
#include <iterator>
#include <limits>
#include <random>
#include <set>
#include <system_error>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"
#include "cc/base/files.h"
#include "cc/base/json.h"
#include "cc/base/log_writer.h"
#include "cc/base/random_id.h"
#include "cc/base/status_macros.h"
#include "cc/checkpoint/parts.h"
#include "cc/checkpoint/safetensors.h"
#include "cc/optimizer/optimizer.h"
#include "cc/wire/table_config_conversion.h"

namespace tfswitch::checkpoint {
namespace {

namespace fs = std::filesystem;

constexpr char kFormatName[] = "tfswitch-checkpoint";
// Rows are gathered in memory up to this size before a file is written.
constexpr int64_t kBytesPerFile = int64_t{128} << 20;
// A manifest has about 200 bytes for each 128 MiB of rows. Only items of work
// queues make it long.
constexpr size_t kMaxManifestBytes = size_t{256} << 20;
constexpr int64_t kMaxSaveNumber = 1'000'000'000'000;
// The folder of the files of no table: FileNameOf() gives no such name.
constexpr char kServerFolder[] = "%server";

template <typename Values>
absl::Span<const char> BytesOf(const Values& values) {
  return absl::MakeConstSpan(reinterpret_cast<const char*>(values.data()),
                             values.size() * sizeof(values[0]));
}

const char* NameOf(FileKind kind) {
  switch (kind) {
    case FileKind::kRows:
      return "rows";
    case FileKind::kCandidates:
      return "candidates";
    case FileKind::kBloom:
      return "bloom";
    case FileKind::kRemoved:
      return "removed";
    case FileKind::kMarks:
      return "marks";
    case FileKind::kStaged:
      return "staged";
  }
  return "";
}

Json FileToJson(const RowFile& file) {
  Json json = {
      {"name", file.name},
      {"virtual_shards", {file.virtual_shards_begin, file.virtual_shards_end}},
      {"num_rows", file.num_rows},
      {"bytes", file.bytes},
      {"crc32", absl::StrFormat("%08x", file.crc32)}};
  if (file.kind != FileKind::kRows) json["kind"] = NameOf(file.kind);
  return json;
}

int64_t RowBytes(const EmbeddingTable& table) {
  return static_cast<int64_t>(
      sizeof(Key) + sizeof(float) * (table.dim() + table.slot_floats()));
}

// Whether a file is taken over when only changes are saved.
bool HasRows(const RowFile& file) {
  return file.kind == FileKind::kRows || file.kind == FileKind::kRemoved;
}

uint64_t RowsOf(const SavedTable& table) {
  if (table.num_rows.has_value()) return *table.num_rows;
  uint64_t num_rows = 0;
  for (const RowFile& file : table.files) {
    if (file.kind == FileKind::kRows) {
      num_rows += static_cast<uint64_t>(file.num_rows);
    }
  }
  return num_rows;
}

Json FilesToJson(const std::vector<RowFile>& files) {
  Json json = Json::array();
  for (const RowFile& file : files) json.push_back(FileToJson(file));
  return json;
}

Json TablesToJson(const std::map<std::string, SavedTable>& tables) {
  Json json = Json::object();
  for (const auto& [name, table] : tables) {
    Json instances = Json::array();
    for (const uint64_t instance : table.identity.shard_instances) {
      instances.push_back(absl::StrFormat("%016x", instance));
    }
    json[name] = {
        {"config", Json::parse(TableConfigToJson(table.config))},
        {"incarnation", absl::StrFormat("%016x", table.identity.incarnation)},
        {"shard_instances", std::move(instances)},
        {"slot_floats", table.slot_floats},
        {"num_rows", RowsOf(table)},
        {"files", FilesToJson(table.files)}};
    if (table.last_day >= 0.0f) json[name]["last_day"] = table.last_day;
    if (table.config.optimizer.is_dense) {
      Json runs = Json::array();
      for (const StepRun& run : table.steps.runs) {
        runs.push_back({run.first, run.learning_rate});
      }
      json[name]["steps"] = {{"last_step", table.steps.last_step},
                             {"learning_rates", std::move(runs)}};
    }
  }
  return json;
}

// False unless it is an integer from 0 to the largest T.
template <typename T>
bool GetNumber(const Json& json, T* value) {
  if (!json.is_number_unsigned() ||
      json.get<uint64_t>() > uint64_t{std::numeric_limits<T>::max()}) {
    return false;
  }
  *value = json.get<T>();
  return true;
}

// nlohmann's checked accessors throw; this reads one field without.
template <typename T>
bool Get(const Json& json, const char* field, T* value) {
  if (!json.is_object() || !json.contains(field)) return false;
  const Json& member = json[field];
  if constexpr (std::is_same_v<T, std::string>) {
    if (!member.is_string()) return false;
  } else if constexpr (std::is_same_v<T, bool>) {
    if (!member.is_boolean()) return false;
  } else {
    return GetNumber(member, value);
  }
  *value = member.get<T>();
  return true;
}

// Whether a name is one that PartWriter gives a file in `folder`.
bool IsFileNameIn(const std::string& folder, absl::string_view name) {
  return absl::ConsumePrefix(&name, folder + "/") &&
         absl::ConsumeSuffix(&name, ".safetensors") && !name.empty() &&
         std::all_of(name.begin(), name.end(), [](unsigned char c) {
           return std::isalnum(c) != 0 || c == '-' || c == '_';
         });
}

absl::StatusOr<RowFile> FileFromJson(const Json& json,
                                     const std::string& folder,
                                     const std::string& what,
                                     uint32_t num_virtual_shards) {
  RowFile file;
  std::string crc32;
  if (!Get(json, "name", &file.name) ||
      !Get(json, "num_rows", &file.num_rows) ||
      !Get(json, "bytes", &file.bytes) || !Get(json, "crc32", &crc32) ||
      !absl::SimpleHexAtoi(crc32, &file.crc32)) {
    return Damaged(what, "entry of a file");
  }
  // Each row and candidate has a key of 8 bytes, all others have more.
  if (file.num_rows > file.bytes / static_cast<int64_t>(sizeof(Key))) {
    return Damaged(
        what, absl::StrCat("num_rows of '", file.name, "': ", file.num_rows,
                           " do not fit in its ", file.bytes, " bytes"));
  }
  // Any JSON type: a file taken for rows by mistake would be loaded as such.
  if (const auto kind = json.find("kind"); kind != json.end()) {
    for (const FileKind each :
         {FileKind::kCandidates, FileKind::kBloom, FileKind::kRemoved,
          FileKind::kMarks, FileKind::kStaged}) {
      if (*kind == NameOf(each)) file.kind = each;
    }
    if (file.kind == FileKind::kRows) {
      return Damaged(what, absl::StrCat("kind of '", file.name,
                                        "': expected candidates, bloom, "
                                        "removed, marks, staged or none, got ",
                                        DumpJson(*kind)));
    }
  }
  const bool is_of_server =
      file.kind == FileKind::kMarks || file.kind == FileKind::kStaged;
  if (is_of_server != (folder == kServerFolder)) {
    return Damaged(what, absl::StrCat("kind of '", file.name, "'"));
  }
  if (!IsFileNameIn(folder, file.name)) {
    return Damaged(what, absl::StrCat("file name '", file.name, "'"));
  }
  if (!json.contains("virtual_shards") || !json["virtual_shards"].is_array() ||
      json["virtual_shards"].size() != 2 ||
      !GetNumber(json["virtual_shards"][0], &file.virtual_shards_begin) ||
      !GetNumber(json["virtual_shards"][1], &file.virtual_shards_end) ||
      file.virtual_shards_begin > file.virtual_shards_end ||
      file.virtual_shards_end > num_virtual_shards) {
    return Damaged(what, absl::StrCat("virtual_shards of '", file.name, "'"));
  }
  return file;
}

// The text of the field "work_queues", which need not be there.
std::string WorkQueuesFromJson(const Json& json) {
  const auto it = json.find("work_queues");
  return it == json.end() ? "" : it->dump();
}

// Adds that field, if there is something in it.
void AddWorkQueues(const std::string& work_queues, Json* json) {
  if (work_queues.empty()) return;
  (*json)["work_queues"] = ParseJson(work_queues).value();
}

absl::Status StepsFromJson(const Json& json, SavedSteps* steps) {
  const auto runs = json.find("learning_rates");
  if (!Get(json, "last_step", &steps->last_step) || runs == json.end() ||
      !runs->is_array() || runs->size() > StepLog::kMaxRuns) {
    return absl::InvalidArgumentError("expected last_step and learning_rates");
  }
  for (const Json& run : *runs) {
    StepRun& to = steps->runs.emplace_back();
    if (!run.is_array() || run.size() != 2 || !GetNumber(run[0], &to.first) ||
        !run[1].is_number()) {
      return absl::InvalidArgumentError(
          "learning_rates: expected pairs of a step and a number");
    }
    to.learning_rate = static_cast<float>(run[1].get<double>());
  }
  return StepLog::Validate(*steps);
}

absl::Status FilesFromJson(const Json& json, const std::string& folder,
                           const std::string& what, uint32_t num_virtual_shards,
                           std::vector<RowFile>* files) {
  for (const Json& file : json) {
    TFSWITCH_ASSIGN_OR_RETURN(
        RowFile row_file, FileFromJson(file, folder, what, num_virtual_shards));
    files->push_back(std::move(row_file));
  }
  return absl::OkStatus();
}

// The field "server", which is only in a server's own state.
absl::Status ServerFromJson(const Json& json, const std::string& what,
                            std::optional<SavedServer>* server) {
  const auto it = json.find("server");
  if (it == json.end()) return absl::OkStatus();
  server->emplace();
  if (!Get(*it, "num_writes", &(*server)->num_writes) ||
      !Get(*it, "saved_at_ms", &(*server)->saved_at_ms) ||
      !Get(*it, "last_record", &(*server)->last_record) ||
      !it->contains("rounds") || !it->contains("files") ||
      !(*it)["files"].is_array()) {
    return Damaged(what, "field 'server'");
  }
  (*server)->rounds = DumpJson((*it)["rounds"]);
  if (it->contains("groups")) (*server)->groups = DumpJson((*it)["groups"]);
  return FilesFromJson((*it)["files"], kServerFolder, what,
                       /*num_virtual_shards=*/0, &(*server)->files);
}

void AddServerTo(const std::optional<SavedServer>& server, Json* json) {
  if (!server.has_value()) return;
  (*json)["server"] = {{"num_writes", server->num_writes},
                       {"saved_at_ms", server->saved_at_ms},
                       {"last_record", server->last_record},
                       {"rounds", ParseJson(server->rounds).value()},
                       {"groups", ParseJson(server->groups).value()},
                       {"files", FilesToJson(server->files)}};
}

absl::Status TablesFromJson(const Json& json, const std::string& what,
                            std::map<std::string, SavedTable>* tables) {
  if (!json.is_object()) return Damaged(what, "field 'tables'");
  for (const auto& [name, entry] : json.items()) {
    SavedTable table;
    if (!Get(entry, "slot_floats", &table.slot_floats) ||
        !entry.contains("config") || !entry.contains("files") ||
        !entry["files"].is_array()) {
      return Damaged(what, absl::StrCat("entry of table '", name, "'"));
    }
    absl::Status status =
        TableConfigFromJson(entry["config"].dump(), &table.config);
    if (status.ok()) status = table.config.Validate();
    if (!status.ok()) {
      return Damaged(what, absl::StrCat("config of table '", name,
                                        "': ", status.message()));
    }
    if (table.config.name != name) {
      return Damaged(what, absl::StrCat("config of table '", name, "' is of '",
                                        table.config.name, "'"));
    }
    TableIdentity& identity = table.identity;
    std::string incarnation;
    if (entry.contains("incarnation") &&
        (!Get(entry, "incarnation", &incarnation) ||
         !absl::SimpleHexAtoi(incarnation, &identity.incarnation))) {
      return Damaged(what, absl::StrCat("incarnation of table '", name, "'"));
    }
    if (const auto instances = entry.find("shard_instances");
        instances != entry.end()) {
      for (const Json& instance : *instances) {
        if (!instance.is_string() ||
            !absl::SimpleHexAtoi(instance.get<std::string>(),
                                 &identity.shard_instances.emplace_back())) {
          return Damaged(what,
                         absl::StrCat("shard_instances of table '", name, "'"));
        }
      }
    }
    if (const auto day = entry.find("last_day"); day != entry.end()) {
      if (!day->is_number() ||
          !CheckDay(name, static_cast<float>(day->get<double>())).ok()) {
        return Damaged(what, absl::StrCat("last_day of table '", name, "'"));
      }
      table.last_day = static_cast<float>(day->get<double>());
    }
    if (table.config.optimizer.is_dense) {
      const auto steps = entry.find("steps");
      status = steps == entry.end() ? absl::NotFoundError("it has none")
                                    : StepsFromJson(*steps, &table.steps);
      if (!status.ok()) {
        return Damaged(what, absl::StrCat("steps of table '", name,
                                          "': ", status.message()));
      }
    }
    TFSWITCH_RETURN_IF_ERROR(
        FilesFromJson(entry["files"], FileNameOf(name), what,
                      table.config.num_virtual_shards, &table.files));
    // Files may have a row more than once.
    uint64_t num_rows = 0;
    if (Get(entry, "num_rows", &num_rows) && num_rows <= RowsOf(table)) {
      table.num_rows = num_rows;
    }
    tables->emplace(name, std::move(table));
  }
  return absl::OkStatus();
}

std::string ManifestPath(const std::string& path, int64_t number) {
  return number == 0 ? absl::StrCat(path, "/", kManifestName)
                     : absl::StrFormat("%s/manifest-%06d.json", path, number);
}

// NotFound if there is no such file.
absl::StatusOr<Manifest> ReadManifestFile(const std::string& file_name) {
  const std::string what =
      absl::StrCat("checkpoint manifest '", file_name, "'");
  absl::StatusOr<std::string> contents =
      ReadWholeFile(file_name, kMaxManifestBytes);
  if (absl::IsResourceExhausted(contents.status())) {
    return Damaged(what, contents.status().message());
  }
  TFSWITCH_RETURN_IF_ERROR(contents.status());
  const absl::StatusOr<Json> parsed = ParseJson(*contents);
  if (!parsed.ok()) return Damaged(what, parsed.status().message());
  const Json& json = *parsed;
  std::string format;
  int version = 0;
  if (!Get(json, "format", &format) || format != kFormatName ||
      !Get(json, "version", &version)) {
    return Damaged(what, "it is not JSON of a tfswitch checkpoint");
  }
  if (version != kFormatVersion) {
    return absl::FailedPreconditionError(absl::StrCat(
        what, " has format version ", version, "; this tfswitch reads version ",
        kFormatVersion, ". Use the tfswitch that wrote it"));
  }
  Manifest manifest;
  if (!Get(json, "save_id", &manifest.save_id) || !json.contains("tables")) {
    return Damaged(what, "fields 'save_id' and 'tables'");
  }
  if (json.contains("save") && (!Get(json, "save", &manifest.number) ||
                                manifest.number > kMaxSaveNumber)) {
    return Damaged(what, "field 'save'");
  }
  TFSWITCH_RETURN_IF_ERROR(
      TablesFromJson(json["tables"], what, &manifest.tables));
  manifest.work_queues = WorkQueuesFromJson(json);
  TFSWITCH_RETURN_IF_ERROR(ServerFromJson(json, what, &manifest.server));
  return manifest;
}

// The save of that number among the former ones; 0: the newest.
absl::StatusOr<Manifest> ReadSave(const std::string& path, int64_t number) {
  absl::StatusOr<Manifest> save = ReadManifestFile(ManifestPath(path, number));
  if (save.ok() && number != 0) save->number = number;
  return save;
}

void AddFileNames(const Manifest& save, std::set<std::string>* names) {
  for (const auto& [table, saved] : save.tables) {
    for (const RowFile& file : saved.files) names->insert(file.name);
  }
  if (!save.server.has_value()) return;
  for (const RowFile& file : save.server->files) names->insert(file.name);
}

// The numbers of the saves before the newest, newest first.
absl::StatusOr<std::vector<int64_t>> FormerSaves(const std::string& path) {
  TFSWITCH_ASSIGN_OR_RETURN(const std::vector<std::string> files,
                            ListFolder(path));
  std::vector<int64_t> numbers;
  for (absl::string_view file : files) {
    int64_t number = 0;
    if (absl::ConsumePrefix(&file, "manifest-") &&
        absl::ConsumeSuffix(&file, ".json") &&
        absl::SimpleAtoi(file, &number) && number > 0 &&
        number <= kMaxSaveNumber) {
      numbers.push_back(number);
    }
  }
  std::sort(numbers.rbegin(), numbers.rend());
  return numbers;
}

// Whether `save` has rows of an incarnation of a table of `newest` that none of
// the saves that are kept has.
bool HasLastRowsOf(const Manifest& save, const Manifest& newest,
                   const std::vector<Manifest>& kept) {
  return std::any_of(save.tables.begin(), save.tables.end(),
                     [&](const auto& entry) {
                       if (newest.tables.count(entry.first) == 0) return false;
                       return std::none_of(
                           kept.begin(), kept.end(), [&](const Manifest& each) {
                             const auto it = each.tables.find(entry.first);
                             return it != each.tables.end() &&
                                    it->second.identity.incarnation ==
                                        entry.second.identity.incarnation;
                           });
                     });
}

// Removes the saves that are not kept. The newest is published: a file that
// cannot be removed stays, and is only garbage; the error is the first of those
// that say why.
//
// `is_own`: saves have files in common, of which one may be damaged one day. So
// the newest save that has none of the newest one stays, too.
absl::Status RemoveOldSaves(const std::string& path, const Manifest& newest,
                            int keep, bool is_own) {
  TFSWITCH_ASSIGN_OR_RETURN(const std::vector<int64_t> numbers,
                            FormerSaves(path));
  std::vector<Manifest> kept = {newest};
  std::vector<Manifest> old;
  for (const int64_t number : numbers) {
    // If it cannot be read, it is not known which files it needs.
    TFSWITCH_ASSIGN_OR_RETURN(Manifest save, ReadSave(path, number));
    if (number >= newest.number) continue;
    if (kept.size() < static_cast<size_t>(keep)) {
      kept.push_back(std::move(save));
    } else {
      old.push_back(std::move(save));
    }
  }
  // For rows that were lost, or belong to another training, two saves stay: the
  // newest, and the one with most rows.
  size_t last = old.size();
  size_t largest = old.size();
  for (size_t i = 0; i < old.size(); ++i) {
    if (!HasLastRowsOf(old[i], newest, kept)) continue;
    if (last == old.size()) last = i;
    if (largest == old.size() || RowsOf(old[i]) > RowsOf(old[largest])) {
      largest = i;
    }
  }
  size_t apart = old.size();
  if (is_own) {
    std::set<std::string> files;
    AddFileNames(newest, &files);
    const auto is_apart = [&files](const Manifest& save) {
      std::set<std::string> its_files;
      AddFileNames(save, &its_files);
      return std::none_of(
          its_files.begin(), its_files.end(),
          [&](const std::string& file) { return files.count(file) > 0; });
    };
    // Newest first.
    if (std::none_of(kept.begin(), kept.end(), is_apart)) {
      apart = static_cast<size_t>(
          std::find_if(old.begin(), old.end(), is_apart) - old.begin());
    }
  }
  std::set<std::string> named;
  for (const Manifest& save : kept) AddFileNames(save, &named);
  for (const size_t i : {last, largest, apart}) {
    if (i < old.size()) AddFileNames(old[i], &named);
  }
  absl::Status status;
  const auto remove = [&status](const std::string& file) {
    std::error_code error;
    fs::remove(file, error);
    if (error) status.Update(ErrnoStatus("remove", file, error.value()));
    return !error;
  };
  for (size_t i = 0; i < old.size(); ++i) {
    if (i == last || i == largest || i == apart) continue;
    // First, so that no manifest names a file that is gone.
    if (!remove(ManifestPath(path, old[i].number))) {
      AddFileNames(old[i], &named);
      continue;
    }
    std::set<std::string> files;
    AddFileNames(old[i], &files);
    for (const std::string& file : files) {
      if (named.count(file) == 0) remove(fs::path(path) / file);
    }
  }
  return status;
}

// The newest save, and whether it is manifest.json: if somebody has removed
// that, it is the newest of the others. NotFound if there is none.
absl::StatusOr<Manifest> NewestSave(const std::string& path,
                                    const std::vector<int64_t>& former,
                                    bool* is_current) {
  *is_current = true;
  absl::StatusOr<Manifest> newest = ReadSave(path, 0);
  if (!absl::IsNotFound(newest.status()) || former.empty()) return newest;
  *is_current = false;
  return ReadSave(path, former.front());
}

}  // namespace

bool IsWorthExtending(const TableBase& base, const EmbeddingTable& table) {
  int64_t bytes = 0;
  for (const RowFile& file : base.files) {
    if (HasRows(file)) bytes += file.bytes;
  }
  // Where there are few rows, headers count.
  constexpr int64_t kAnyway = int64_t{1} << 20;
  return bytes <= kAnyway + table.size() * RowBytes(table) * 3 / 2;
}

uint64_t RowsOf(const Manifest& save) {
  uint64_t num_rows = 0;
  for (const auto& [name, table] : save.tables) num_rows += RowsOf(table);
  return num_rows;
}

struct PartWriter::Data {
  std::string path;
  std::string save_id;
  uint32_t shard_index = 0;
  uint32_t num_shards = 1;
  bool all_tables = false;
  // A save that is repeated while the first is still writing must not share
  // its files.
  uint32_t attempt = std::random_device()();
  std::map<std::string, SavedTable> tables;
  std::string work_queues;
  std::optional<SavedServer> server;
  Interrupt interrupt;
  std::vector<std::string> written;  // Relative to `path`.
  bool is_finished = false;

  // Writes `file`, of which the kind and the counts are set, into `folder` and
  // adds it to `files`, those that are there already.
  absl::Status Write(const std::string& folder, RowFile file,
                     const std::vector<TensorToWrite>& tensors,
                     std::map<std::string, std::string> metadata,
                     std::vector<RowFile>* files) {
    TFSWITCH_RETURN_IF_ERROR(interrupt());
    if (files->empty()) {
      TFSWITCH_RETURN_IF_ERROR(CreateFolders(absl::StrCat(path, "/", folder)));
    }
    file.name = absl::StrFormat("%s/%s-s%05d-%05d-%08x.safetensors", folder,
                                save_id, shard_index, files->size(), attempt);
    metadata.insert({{"format", kFormatName},
                     {"kind", NameOf(file.kind)},
                     {"save_id", save_id}});
    TFSWITCH_ASSIGN_OR_RETURN(
        const WrittenFile on_disk,
        WriteSafetensors(absl::StrCat(path, "/", file.name), tensors,
                         metadata));
    written.push_back(file.name);
    file.bytes = on_disk.bytes;
    file.crc32 = on_disk.crc32;
    files->push_back(std::move(file));
    return absl::OkStatus();
  }
};

PartWriter::PartWriter(std::string path, std::string save_id,
                       uint32_t shard_index, uint32_t num_shards,
                       bool all_tables, Interrupt interrupt)
    : data_(std::make_unique<Data>()) {
  data_->path = std::move(path);
  data_->save_id = std::move(save_id);
  data_->shard_index = shard_index;
  data_->num_shards = num_shards;
  data_->all_tables = all_tables;
  data_->interrupt = std::move(interrupt);
}

PartWriter::~PartWriter() {
  if (data_->is_finished) return;
  for (const std::string& file : data_->written) {
    std::error_code error;  // A file that stays is only garbage.
    fs::remove(fs::path(data_->path) / file, error);
  }
}

absl::Status PartWriter::AddTable(TableSnapshot& snapshot,
                                  absl::FunctionRef<void(int64_t)> report,
                                  const TableBase& base) {
  const EmbeddingTable& table = snapshot.table;
  SavedTable& saved = data_->tables[table.config().name];
  saved.config = table.config();
  saved.identity = table.identity();
  saved.slot_floats = table.slot_floats();
  saved.last_day = snapshot.last_day;
  saved.steps = snapshot.steps;
  saved.num_rows = static_cast<uint64_t>(snapshot.num_rows);
  if (!snapshot.is_whole) {
    std::copy_if(base.files.begin(), base.files.end(),
                 std::back_inserter(saved.files), HasRows);
  }
  const int dim = table.dim();
  const int slot_floats = table.slot_floats();
  const auto write = [&](FileKind kind, int64_t num_rows,
                         const std::vector<TensorToWrite>& tensors) {
    RowFile file;
    file.kind = kind;
    file.num_rows = num_rows;
    file.virtual_shards_begin = FirstVirtualShardOf(
        data_->shard_index, saved.config.num_virtual_shards, data_->num_shards);
    file.virtual_shards_end =
        FirstVirtualShardOf(data_->shard_index + 1,
                            saved.config.num_virtual_shards, data_->num_shards);
    return data_->Write(FileNameOf(saved.config.name), std::move(file), tensors,
                        {{"table", saved.config.name},
                         {"optimizer", OptimizerName(saved.config.optimizer)}},
                        &saved.files);
  };

  const int64_t rows_per_file =
      std::max<int64_t>(1, kBytesPerFile / RowBytes(table));
  std::vector<Key> keys = std::move(snapshot.lost_rows);
  std::sort(keys.begin(), keys.end());
  keys.erase(std::unique(keys.begin(), keys.end()), keys.end());
  constexpr auto kKeysPerFile =
      static_cast<size_t>(kBytesPerFile) / sizeof(Key);
  for (size_t begin = 0; begin < keys.size(); begin += kKeysPerFile) {
    const auto some = absl::MakeConstSpan(keys).subspan(begin, kKeysPerFile);
    const auto num_keys = static_cast<int64_t>(some.size());
    TFSWITCH_RETURN_IF_ERROR(
        write(FileKind::kRemoved, num_keys,
              {{"keys", "I64", {num_keys}, BytesOf(some)}}));
  }
  keys.clear();
  if (const int width = table.candidate_floats(); width > 0) {
    std::vector<float> records;
    const auto flush_candidates = [&]() -> absl::Status {
      const auto num_keys = static_cast<int64_t>(keys.size());
      TFSWITCH_RETURN_IF_ERROR(
          write(FileKind::kCandidates, num_keys,
                {{"keys", "I64", {num_keys}, BytesOf(keys)},
                 {"records", "F32", {num_keys, width}, BytesOf(records)}}));
      keys.clear();
      records.clear();
      return absl::OkStatus();
    };
    const int64_t keys_per_file =
        kBytesPerFile /
        static_cast<int64_t>(sizeof(Key) + sizeof(float) * width);
    TFSWITCH_RETURN_IF_ERROR(snapshot.ForEachCandidate(
        8192, [&](const CandidateChunk& chunk) -> absl::Status {
          TFSWITCH_RETURN_IF_ERROR(data_->interrupt());
          keys.insert(keys.end(), chunk.keys.begin(), chunk.keys.end());
          records.insert(records.end(), chunk.records.begin(),
                         chunk.records.end());
          if (static_cast<int64_t>(keys.size()) < keys_per_file) {
            return absl::OkStatus();
          }
          return flush_candidates();
        }));
    if (!keys.empty()) TFSWITCH_RETURN_IF_ERROR(flush_candidates());
  }
  if (const CountingBloom* bloom = snapshot.bloom.get(); bloom != nullptr) {
    const size_t width = bloom->bytes_per_virtual_shard();
    std::vector<int64_t> shards;
    std::vector<char> cells;
    const auto flush_bloom = [&]() -> absl::Status {
      const auto num_shards = static_cast<int64_t>(shards.size());
      TFSWITCH_RETURN_IF_ERROR(
          write(FileKind::kBloom, num_shards,
                {{"virtual_shards", "I64", {num_shards}, BytesOf(shards)},
                 {"cells",
                  "U8",
                  {num_shards, static_cast<int64_t>(width)},
                  BytesOf(cells)}}));
      shards.clear();
      cells.clear();
      return absl::OkStatus();
    };
    for (uint32_t shard = 0; shard < saved.config.num_virtual_shards; ++shard) {
      if (!bloom->IsTouched(shard)) continue;
      shards.push_back(shard);
      const absl::Span<const char> some = bloom->Cells(shard);
      cells.insert(cells.end(), some.begin(), some.end());
      if (static_cast<int64_t>(cells.size()) >= kBytesPerFile) {
        TFSWITCH_RETURN_IF_ERROR(flush_bloom());
      }
    }
    if (!shards.empty()) TFSWITCH_RETURN_IF_ERROR(flush_bloom());
  }
  const auto write_rows = [&](const RowChunk& chunk) -> absl::Status {
    const auto num_rows = static_cast<int64_t>(chunk.keys.size());
    std::vector<TensorToWrite> tensors = {
        {"keys", "I64", {num_rows}, BytesOf(chunk.keys)},
        {"embeddings", "F32", {num_rows, dim}, BytesOf(chunk.embeddings)}};
    if (slot_floats > 0) {
      tensors.push_back(
          {"slots", "F32", {num_rows, slot_floats}, BytesOf(chunk.slots)});
    }
    TFSWITCH_RETURN_IF_ERROR(write(FileKind::kRows, num_rows, tensors));
    report(num_rows);
    return absl::OkStatus();
  };
  return snapshot.ForEachRow(rows_per_file, write_rows);
}

std::vector<RowFile> PartWriter::FilesOf(const EmbeddingTable& table) const {
  return data_->tables.at(table.config().name).files;
}

void PartWriter::SetWorkQueues(std::string json) {
  data_->work_queues = std::move(json);
}

absl::Status PartWriter::AddServer(SavedServer server,
                                   const std::vector<WriteMark>& marks,
                                   const std::vector<StagedMessage>& staged) {
  const auto marks_per_file =
      static_cast<size_t>(kBytesPerFile / (kMarkWidth * sizeof(int64_t)));
  for (size_t begin = 0; begin < marks.size(); begin += marks_per_file) {
    const auto some = absl::MakeSpan(marks).subspan(begin, marks_per_file);
    std::vector<int64_t> numbers;
    numbers.reserve(some.size() * kMarkWidth);
    for (const WriteMark& mark : some) {
      numbers.push_back(static_cast<int64_t>(mark.client_id));
      numbers.push_back(static_cast<int64_t>(mark.sequence));
      numbers.push_back(mark.count);
    }
    RowFile file;
    file.kind = FileKind::kMarks;
    file.num_rows = static_cast<int64_t>(some.size());
    TFSWITCH_RETURN_IF_ERROR(data_->Write(
        kServerFolder, file,
        {{"marks", "I64", {file.num_rows, kMarkWidth}, BytesOf(numbers)}}, {},
        &server.files));
  }
  for (size_t next = 0; next < staged.size();) {
    std::vector<int64_t> numbers;
    std::vector<int64_t> sizes;
    std::vector<char> bytes;
    for (;
         next < staged.size() &&
         (bytes.empty() || static_cast<int64_t>(bytes.size()) < kBytesPerFile);
         ++next) {
      numbers.push_back(static_cast<int64_t>(staged[next].number));
      sizes.push_back(static_cast<int64_t>(staged[next].bytes.size()));
      bytes.insert(bytes.end(), staged[next].bytes.begin(),
                   staged[next].bytes.end());
    }
    RowFile file;
    file.kind = FileKind::kStaged;
    file.num_rows = static_cast<int64_t>(sizes.size());
    const auto num_bytes = static_cast<int64_t>(bytes.size());
    TFSWITCH_RETURN_IF_ERROR(
        data_->Write(kServerFolder, file,
                     {{"numbers", "I64", {file.num_rows}, BytesOf(numbers)},
                      {"sizes", "I64", {file.num_rows}, BytesOf(sizes)},
                      {"bytes", "U8", {num_bytes}, BytesOf(bytes)}},
                     {}, &server.files));
  }
  data_->server = std::move(server);
  return absl::OkStatus();
}

const std::vector<std::string>& PartWriter::files() const {
  return data_->written;
}

std::string PartWriter::Finish() {
  data_->is_finished = true;
  Json json = {{"save_id", data_->save_id},
               {"shard_index", data_->shard_index},
               {"num_shards", data_->num_shards},
               {"all_tables", data_->all_tables},
               {"tables", TablesToJson(data_->tables)}};
  AddWorkQueues(data_->work_queues, &json);
  AddServerTo(data_->server, &json);
  return DumpJson(json);
}

namespace {

// How long a commit waits for one of another process, which takes moments.
constexpr absl::Duration kLockTimeout = absl::Seconds(30);

absl::StatusOr<Manifest> JoinParts(
    const std::string& save_id, const std::vector<std::string>& manifest_parts,
    bool is_own, bool* all_tables) {
  const std::string what = absl::StrCat("save '", save_id, "'");
  Manifest manifest;
  manifest.save_id = save_id;
  *all_tables = true;
  std::set<uint32_t> shards;
  std::map<std::string, size_t> num_parts;
  for (const std::string& part : manifest_parts) {
    const absl::StatusOr<Json> parsed = ParseJson(part);
    if (!parsed.ok()) {
      return absl::InvalidArgumentError(
          absl::StrCat(what, ": a part of the manifest is malformed: ",
                       parsed.status().message()));
    }
    const Json& json = *parsed;
    std::string part_save_id;
    uint32_t shard_index = 0;
    uint32_t num_shards = 0;
    bool part_all_tables = false;
    if (!Get(json, "save_id", &part_save_id) ||
        !Get(json, "shard_index", &shard_index) ||
        !Get(json, "num_shards", &num_shards) ||
        !Get(json, "all_tables", &part_all_tables) ||
        !json.contains("tables")) {
      return absl::InvalidArgumentError(
          absl::StrCat(what, ": a part of the manifest is malformed"));
    }
    if (part_save_id != save_id ||
        manifest_parts.size() != (is_own ? 1 : num_shards) ||
        !shards.insert(shard_index).second || shard_index >= num_shards) {
      return absl::FailedPreconditionError(absl::StrCat(
          what, ": got ", manifest_parts.size(), " parts; one is of shard ",
          shard_index, " of ", num_shards, " and save '", part_save_id,
          "'. Every shard must save once under the same save_id"));
    }
    *all_tables = *all_tables && part_all_tables;
    if (manifest.work_queues.empty()) {
      manifest.work_queues = WorkQueuesFromJson(json);
    }
    std::map<std::string, SavedTable> tables;
    absl::Status read = TablesFromJson(json["tables"], what, &tables);
    // A client that brings parts says nothing of the server.
    if (is_own) read.Update(ServerFromJson(json, what, &manifest.server));
    if (!read.ok()) return absl::InvalidArgumentError(read.message());
    for (auto& [name, table] : tables) {
      ++num_parts[name];
      const auto [it, is_new] = manifest.tables.emplace(name, table);
      if (is_new) continue;
      if (it->second.config != table.config) {
        return absl::FailedPreconditionError(
            absl::StrCat(what, ": table '", name, "' differs between shards: ",
                         DescribeDifference(it->second.config, table.config)));
      }
      if (it->second.identity.incarnation != table.identity.incarnation) {
        return absl::FailedPreconditionError(absl::StrCat(
            what, ": table '", name,
            "' is not the same table on all shards: it was made again on some "
            "of them while it was saved. Save again"));
      }
      it->second.last_day = std::max(it->second.last_day, table.last_day);
      // A shard that a push had not reached yet has the first of these steps.
      if (table.steps.last_step > it->second.steps.last_step) {
        it->second.steps = table.steps;
      }
      it->second.num_rows = RowsOf(it->second) + RowsOf(table);
      it->second.files.insert(it->second.files.end(), table.files.begin(),
                              table.files.end());
    }
  }
  for (const auto& [name, count] : num_parts) {
    if (count == manifest_parts.size()) continue;
    return absl::FailedPreconditionError(absl::StrCat(
        what, ": table '", name, "' is on ", count, " of ",
        manifest_parts.size(),
        " shards: the others have lost it, or it was made or dropped while it "
        "was saved"));
  }
  return manifest;
}

// Checks that each file that the parts name is there, and that this save has
// written it. The files that a manifest names are removed with it, one day.
// Those of `former` are of a save before.
absl::Status CheckFiles(const std::string& path, const Manifest& manifest,
                        const std::set<std::string>& former,
                        const Interrupt& interrupt) {
  for (const auto& [name, table] : manifest.tables) {
    for (const RowFile& file : table.files) {
      TFSWITCH_RETURN_IF_ERROR(interrupt());
      auto metadata =
          ReadMetadata((fs::path(path) / file.name).string(), file.bytes);
      if (!metadata.ok()) {
        return absl::FailedPreconditionError(
            absl::StrCat("save '", manifest.save_id, "': file '", file.name,
                         "' is not visible in '", path,
                         "' from the server that writes the manifest (",
                         metadata.status().message(),
                         "); save to a folder that all servers share"));
      }
      if (((*metadata)["save_id"] != manifest.save_id &&
           former.count(file.name) == 0) ||
          (*metadata)["table"] != name) {
        return absl::InvalidArgumentError(
            absl::StrCat("save '", manifest.save_id, "': file '", file.name,
                         "' in '", path, "' was not written by it"));
      }
    }
  }
  return absl::OkStatus();
}

absl::Status CheckDropped(const std::string& path, const Manifest& manifest,
                          const Manifest& former,
                          const std::vector<std::string>& dropped_tables) {
  std::vector<std::string> missing;
  for (const auto& [name, table] : former.tables) {
    if (manifest.tables.count(name) == 0 &&
        std::find(dropped_tables.begin(), dropped_tables.end(), name) ==
            dropped_tables.end()) {
      missing.push_back(absl::StrCat("'", name, "'"));
    }
  }
  if (missing.empty()) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(
      "checkpoint '", path,
      "' has tables that the servers have not: ", absl::StrJoin(missing, ", "),
      ". Restore them, save to another path, or name them in `drop` to save "
      "without them"));
}

// Gives the newest save the name of a former one.
absl::Status Retire(const std::string& path, const Manifest& former) {
  const std::string from = ManifestPath(path, 0);
  const std::string to = ManifestPath(path, former.number);
  std::error_code error;
  fs::create_hard_link(from, to, error);
  if (!error || error.value() == EEXIST) return absl::OkStatus();
  // Where there are no links.
  TFSWITCH_ASSIGN_OR_RETURN(const std::string contents,
                            ReadWholeFile(from, kMaxManifestBytes));
  return WriteFileAtomically(to, contents);
}

}  // namespace

absl::StatusOr<int64_t> Commit(const std::string& path,
                               const std::string& save_id,
                               const std::vector<std::string>& manifest_parts,
                               const CommitOptions& options) {
  TFSWITCH_RETURN_IF_ERROR(CheckId("save_id", save_id));
  if (options.keep < 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("keep must be at least 1. Received: ", options.keep));
  }
  bool all_tables = true;
  TFSWITCH_ASSIGN_OR_RETURN(
      Manifest manifest,
      JoinParts(save_id, manifest_parts, options.is_own, &all_tables));
  TFSWITCH_RETURN_IF_ERROR(CreateFolders(path));
  TFSWITCH_ASSIGN_OR_RETURN(
      const std::unique_ptr<FolderLock> lock,
      FolderLock::Take(path, kLockTimeout, options.interrupt));
  TFSWITCH_ASSIGN_OR_RETURN(const std::vector<int64_t> older,
                            FormerSaves(path));
  Manifest former;
  bool is_current = true;
  absl::StatusOr<Manifest> read = NewestSave(path, older, &is_current);
  const bool is_first = absl::IsNotFound(read.status());
  if (read.ok()) {
    former = *std::move(read);
  } else if (!is_first) {
    // Overwriting would hide the damage.
    return absl::Status(
        read.status().code(),
        absl::StrCat(read.status().message(),
                     "; remove it to go on with the save before, or save to "
                     "another path"));
  }
  // A repetition, because the first answer was lost.
  if (former.save_id == save_id) return former.number;
  for (const int64_t number : older) {
    const auto save = ReadSave(path, number);
    if (save.ok() && save->save_id == save_id) return number;
  }
  if (options.own_part.has_value() &&
      std::find(manifest_parts.begin(), manifest_parts.end(),
                *options.own_part) == manifest_parts.end()) {
    return absl::FailedPreconditionError(absl::StrCat(
        "save '", save_id, "': none of the ", manifest_parts.size(),
        " parts is the one that this server has written to '", path,
        "'. If it was restarted meanwhile, save again"));
  }
  std::set<std::string> former_files;
  if (options.is_own) AddFileNames(former, &former_files);
  TFSWITCH_RETURN_IF_ERROR(
      CheckFiles(path, manifest, former_files, options.interrupt));
  if (!all_tables) {
    for (const auto& [name, table] : former.tables) {
      manifest.tables.emplace(name, table);
    }
    manifest.work_queues = former.work_queues;
  }
  if (!options.is_own) {
    TFSWITCH_RETURN_IF_ERROR(
        CheckDropped(path, manifest, former, options.dropped_tables));
  }
  const int64_t last_older = older.empty() ? 0 : older.front();
  // A save without a number is of a version that had none.
  if (!is_first && former.number == 0) former.number = last_older + 1;
  manifest.number = std::max(former.number, last_older) + 1;
  if (manifest.number > kMaxSaveNumber) {
    return absl::FailedPreconditionError(
        absl::StrCat("there is no number after save ", manifest.number - 1,
                     " in '", path, "'. Save to another path"));
  }
  Json json = {{"format", kFormatName},
               {"version", kFormatVersion},
               {"save", manifest.number},
               {"save_id", save_id},
               {"tables", TablesToJson(manifest.tables)}};
  AddWorkQueues(manifest.work_queues, &json);
  AddServerTo(manifest.server, &json);
  const std::string text = json.dump(2) + "\n";
  if (text.size() > kMaxManifestBytes) {  // ReadManifest() would refuse it.
    return absl::ResourceExhaustedError(
        absl::StrCat("save '", save_id, "': the manifest has ", text.size(),
                     " bytes, and at most ", kMaxManifestBytes,
                     " are read again; give work queues fewer items"));
  }
  if (!is_first && is_current) {
    TFSWITCH_RETURN_IF_ERROR(Retire(path, former));
  }
  TFSWITCH_RETURN_IF_ERROR(WriteFileAtomically(ManifestPath(path, 0), text));
  if (const absl::Status status =
          RemoveOldSaves(path, manifest, options.keep, options.is_own);
      !status.ok()) {
    LogMessage(
        LogLevel::kWarning, {"files_left"},
        absl::StrCat("old saves stay in '", path, "': ", status.message()));
  }
  return manifest.number;
}

absl::Status RemoveUnpublished(const std::string& path,
                               const std::vector<std::string>& files,
                               const Interrupt& interrupt) {
  if (files.empty()) return absl::OkStatus();
  const auto lock = FolderLock::Take(path, kLockTimeout, interrupt);
  if (absl::IsNotFound(lock.status())) return absl::OkStatus();  // All gone.
  TFSWITCH_RETURN_IF_ERROR(lock.status());
  std::set<std::string> named;
  const auto keep = [&](int64_t number) -> absl::Status {
    const absl::StatusOr<Manifest> save = ReadSave(path, number);
    if (absl::IsNotFound(save.status())) return absl::OkStatus();
    TFSWITCH_RETURN_IF_ERROR(save.status());
    AddFileNames(*save, &named);
    return absl::OkStatus();
  };
  // First the newest: where there are no locks it may become a former one now.
  TFSWITCH_RETURN_IF_ERROR(keep(0));
  TFSWITCH_ASSIGN_OR_RETURN(const std::vector<int64_t> numbers,
                            FormerSaves(path));
  for (const int64_t number : numbers) TFSWITCH_RETURN_IF_ERROR(keep(number));
  for (const std::string& file : files) {
    if (named.count(file) > 0) continue;
    std::error_code error;
    fs::remove(fs::path(path) / file, error);
    if (error) return ErrnoStatus("remove", file, error.value());
  }
  return absl::OkStatus();
}

absl::Status RemoveUnpublished(const std::string& path,
                               const std::string& save_id) {
  std::vector<std::string> files;
  TFSWITCH_ASSIGN_OR_RETURN(const std::vector<std::string> folders,
                            ListFolder(path));
  for (const std::string& folder : folders) {
    const std::string folder_path = absl::StrCat(path, "/", folder);
    std::error_code error;
    if (!fs::is_directory(folder_path, error)) continue;
    TFSWITCH_ASSIGN_OR_RETURN(const std::vector<std::string> names,
                              ListFolder(folder_path));
    for (const std::string& name : names) {
      if (!absl::StartsWith(name, save_id)) continue;
      files.push_back(absl::StrCat(folder, "/", name));
    }
  }
  return RemoveUnpublished(path, files, [] { return absl::OkStatus(); });
}

namespace {

absl::Status SetAside(const std::string& path, const std::string& manifest) {
  std::error_code error;
  fs::rename(manifest,
             absl::StrCat(manifest, ".", absl::Hex(DrawId()), ".damaged"),
             error);
  if (error) return ErrnoStatus("rename", manifest, error.value());
  return SyncFolder(path);
}

// The checkpoints in the folder that one at `path` would be in.
std::string DescribeNeighbours(absl::string_view path) {
  while (absl::ConsumeSuffix(&path, "/")) {
  }
  std::string folder = fs::path(std::string(path)).parent_path();
  if (folder.empty()) folder = ".";
  std::vector<std::string> names =
      ListFolder(folder).value_or(std::vector<std::string>());
  const auto is_none = [&](const std::string& name) {
    std::error_code error;
    return !fs::exists(absl::StrCat(folder, "/", name, "/", kManifestName),
                       error);
  };
  names.erase(std::remove_if(names.begin(), names.end(), is_none), names.end());
  if (names.empty()) return "";
  std::sort(names.begin(), names.end());
  constexpr size_t kMaxNamed = 10;
  const std::string others =
      names.size() > kMaxNamed
          ? absl::StrCat(" and ", names.size() - kMaxNamed, " others")
          : "";
  names.resize(std::min(names.size(), kMaxNamed));
  return absl::StrCat("; '", folder, "' has '", absl::StrJoin(names, "', '"),
                      "'", others);
}

}  // namespace

absl::Status SetNewestAside(const std::string& path) {
  TFSWITCH_ASSIGN_OR_RETURN(const std::vector<int64_t> former,
                            FormerSaves(path));
  std::string manifest = ManifestPath(path, 0);
  std::error_code error;
  if (!fs::exists(manifest, error) && !former.empty()) {
    manifest = ManifestPath(path, former.front());
  }
  return SetAside(path, manifest);
}

absl::StatusOr<std::vector<std::string>> SetDamagedAside(
    const std::string& path) {
  TFSWITCH_ASSIGN_OR_RETURN(const std::vector<int64_t> former,
                            FormerSaves(path));
  std::vector<std::string> damaged;
  for (const int64_t number : former) {
    const absl::Status status = ReadSave(path, number).status();
    if (!absl::IsDataLoss(status)) continue;
    TFSWITCH_RETURN_IF_ERROR(SetAside(path, ManifestPath(path, number)));
    damaged.emplace_back(status.message());
  }
  return damaged;
}

absl::StatusOr<Manifest> ReadManifest(const std::string& path, int64_t number,
                                      int newer_than) {
  const absl::StatusOr<std::vector<int64_t>> former = FormerSaves(path);
  bool is_current = true;
  absl::StatusOr<Manifest> newest =
      former.ok() ? NewestSave(path, *former, &is_current)
                  : absl::StatusOr<Manifest>(former.status());
  if (absl::IsNotFound(newest.status())) {
    return absl::NotFoundError(
        absl::StrCat("no checkpoint at '", path, "': there is no ",
                     kManifestName, " in it", DescribeNeighbours(path)));
  }
  if (number == 0 && newer_than == 0) return newest;
  TFSWITCH_RETURN_IF_ERROR(former.status());
  // A crash may have left the newest under both names.
  std::vector<int64_t> numbers;
  for (const int64_t each : *former) {
    if (!newest.ok() || each != newest->number) numbers.push_back(each);
  }
  if (number == 0) {
    if (static_cast<size_t>(newer_than) <= numbers.size()) {
      number = numbers[static_cast<size_t>(newer_than) - 1];
    }
  } else if (newest.ok() && newest->number == number) {
    return newest;
  } else if (std::find(numbers.begin(), numbers.end(), number) ==
             numbers.end()) {
    if (newest.ok()) numbers.insert(numbers.begin(), newest->number);
    return absl::NotFoundError(
        absl::StrCat("checkpoint '", path, "' has no save ", number,
                     "; it has: ", absl::StrJoin(numbers, ", ")));
  }
  if (number == 0) {
    return absl::NotFoundError(absl::StrCat("checkpoint '", path, "' has ",
                                            numbers.size() + 1, " saves"));
  }
  return ReadSave(path, number);
}

}  // namespace tfswitch::checkpoint
