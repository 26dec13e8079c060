// PartWriter needs no lock, because each attempt of a save has its own file
// names. Commit() takes the folder's lock before it reads the previous
// manifest, and keeps the lock until old saves are removed. It checks all
// files, gives the previous manifest a second name with its number, and then
// replaces manifest.json. After a crash between these two steps one save has
// both names; ReadManifest() handles that.

#include "cc/checkpoint/checkpoint.h"

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <filesystem>
#include <iterator>
#include <random>
#include <set>
#include <system_error>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"
#include "cc/base/checked_math.h"
#include "cc/base/files.h"
#include "cc/base/log_writer.h"
#include "cc/base/random_id.h"
#include "cc/base/status_macros.h"
#include "cc/checkpoint/safetensors.h"
#include "cc/optimizer/optimizer.h"
#include "cc/table/counting_bloom.h"
#include "cc/table/row_statistics.h"
#include "cc/table/step_log.h"
#include "cc/wire/json.h"
#include "cc/wire/table_config_conversion.h"
#include "google/protobuf/util/message_differencer.h"

namespace tfswitch::checkpoint {
namespace {

namespace fs = std::filesystem;

// The name of the format in row files.
constexpr char kFormatName[] = "tfswitch-checkpoint";
// Rows are gathered in memory up to this size before a file is written.
constexpr int64_t kBytesPerFile = int64_t{128} << 20;
// A manifest has about 200 bytes for each 128 MiB of rows. Only items of work
// queues make it long.
constexpr size_t kMaxManifestBytes = size_t{256} << 20;
constexpr int64_t kMaxSaveNumber = 1'000'000'000'000;
// The folder of files that belong to no table. FileNameOf() never returns it.
constexpr char kServerFolder[] = "%server";

template <typename Values>
absl::Span<const char> BytesOf(const Values& values) {
  return absl::MakeConstSpan(reinterpret_cast<const char*>(values.data()),
                             values.size() * sizeof(values[0]));
}

int64_t RowBytes(const EmbeddingTable& table) {
  return static_cast<int64_t>(
      sizeof(Key) + sizeof(float) * (table.dim() + table.slot_floats()));
}

// Whether a save that writes only changes takes over this file of its base.
bool HasRows(const v1::CheckpointFile& file) {
  return file.kind() == v1::CheckpointFile::ROWS ||
         file.kind() == v1::CheckpointFile::REMOVED;
}

// Whether `name` has the form of the names that PartWriter gives to files in
// `folder`.
bool IsFileNameIn(const std::string& folder, absl::string_view name) {
  return absl::ConsumePrefix(&name, folder + "/") &&
         absl::ConsumeSuffix(&name, ".safetensors") && !name.empty() &&
         std::all_of(name.begin(), name.end(), [](unsigned char c) {
           return std::isalnum(c) != 0 || c == '-' || c == '_';
         });
}

// Checks what the options of the message's fields cannot express.
// InvalidArgument, naming the field and the file.
absl::Status CheckFile(const v1::CheckpointFile& file,
                       const std::string& folder, uint32_t num_virtual_shards) {
  const auto wrong = [&file](absl::string_view field, absl::string_view why) {
    return absl::InvalidArgumentError(
        absl::StrCat(field, " of '", absl::CHexEscape(file.name()), "'", why));
  };
  // Each row or candidate has a key, so at least 8 bytes. Other entries are
  // longer.
  if (file.num_rows() > file.bytes() / static_cast<int64_t>(sizeof(Key))) {
    return wrong("num_rows",
                 absl::StrCat(": ", file.num_rows(), " do not fit in its ",
                              file.bytes(), " bytes"));
  }
  const bool is_of_server = file.kind() == v1::CheckpointFile::MARKS ||
                            file.kind() == v1::CheckpointFile::STAGED;
  if (is_of_server != (folder == kServerFolder)) return wrong("kind", "");
  if (!IsFileNameIn(folder, file.name())) {
    return wrong("name", absl::StrCat(": expected a file in '", folder, "/'"));
  }
  if (file.virtual_shards_begin() > file.virtual_shards_end() ||
      file.virtual_shards_end() > num_virtual_shards) {
    return wrong("virtual shards", "");
  }
  return absl::OkStatus();
}

absl::Status CheckTable(const std::string& name,
                        const v1::CheckpointTable& table) {
  const auto wrong = [&name](absl::string_view field, absl::string_view why) {
    return absl::InvalidArgumentError(
        absl::StrCat(field, " of table '", absl::CHexEscape(name), "': ", why));
  };
  const TableConfig config = FromProto(table.config());
  if (const absl::Status status = config.Validate(); !status.ok()) {
    return wrong("config", status.message());
  }
  if (config.name != name) {
    return wrong("config", absl::StrCat("it is of '", config.name, "'"));
  }
  if (table.slot_floats() < RowStatistics(config.statistics).num_floats()) {
    return wrong("slot_floats", absl::StrCat(table.slot_floats(),
                                             ", which are less than its "
                                             "statistics have"));
  }
  if (table.has_last_day()) {
    if (const absl::Status status = CheckDay(name, table.last_day());
        !status.ok()) {
      return wrong("last_day", status.message());
    }
  }
  if (config.optimizer.is_dense) {
    const absl::Status status = table.has_steps()
                                    ? StepLog::Validate(StepsOf(table))
                                    : absl::NotFoundError("it has none");
    if (!status.ok()) return wrong("steps", status.message());
  }
  uint64_t num_rows = 0;
  for (const v1::CheckpointFile& file : table.files()) {
    TFSWITCH_RETURN_IF_ERROR(
        CheckFile(file, FileNameOf(name), config.num_virtual_shards));
    if (file.kind() == v1::CheckpointFile::ROWS &&
        !CheckedAdd(num_rows, static_cast<uint64_t>(file.num_rows()),
                    &num_rows)) {
      return wrong("num_rows", "its files have too many");
    }
  }
  // The files may have more rows than the table, because a row may be in
  // several files.
  if (table.num_rows() <= num_rows) return absl::OkStatus();
  return wrong("num_rows", absl::StrCat(table.num_rows(),
                                        ", and its files have ", num_rows));
}

absl::Status CheckManifest(const v1::CheckpointManifest& manifest) {
  for (const auto& [name, table] : manifest.tables()) {
    TFSWITCH_RETURN_IF_ERROR(CheckTable(name, table));
  }
  for (const v1::CheckpointFile& file : manifest.server().files()) {
    TFSWITCH_RETURN_IF_ERROR(
        CheckFile(file, kServerFolder, /*num_virtual_shards=*/0));
  }
  return absl::OkStatus();
}

std::string ManifestPath(const std::string& path, int64_t number) {
  return number == 0 ? absl::StrCat(path, "/", kManifestName)
                     : absl::StrFormat("%s/manifest-%06d.json", path, number);
}

// Reads the earlier save `number`, or the newest save for 0. NotFound if there
// is no manifest of that number.
absl::StatusOr<v1::CheckpointManifest> ReadSave(const std::string& path,
                                                int64_t number) {
  v1::CheckpointManifest save;
  const std::string file = ManifestPath(path, number);
  TFSWITCH_RETURN_IF_ERROR(ReadMessageFile(file, kMaxManifestBytes, &save));
  if (const absl::Status status = CheckManifest(save); !status.ok()) {
    return DamagedFile(save, file, status.message());
  }
  if (number != 0) save.set_save(number);
  return save;
}

void AddFileNames(const v1::CheckpointManifest& save,
                  std::set<std::string>* names) {
  for (const auto& [table, saved] : save.tables()) {
    for (const auto& file : saved.files()) names->insert(file.name());
  }
  for (const auto& file : save.server().files()) names->insert(file.name());
}

// The numbers of the saves before the newest; the highest number is first.
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

// Whether `save` has rows that no kept save has: rows of an incarnation of one
// of the tables in `newest`.
bool HasLastRowsOf(const v1::CheckpointManifest& save,
                   const v1::CheckpointManifest& newest,
                   const std::vector<v1::CheckpointManifest>& kept) {
  const auto is_last = [&](const auto& entry) {
    const auto has_it = [&entry](const v1::CheckpointManifest& each) {
      const auto it = each.tables().find(entry.first);
      return it != each.tables().end() &&
             it->second.incarnation() == entry.second.incarnation();
    };
    return newest.tables().contains(entry.first) &&
           std::none_of(kept.begin(), kept.end(), has_it);
  };
  return std::any_of(save.tables().begin(), save.tables().end(), is_last);
}

bool HaveCommonFiles(const v1::CheckpointManifest& a,
                     const v1::CheckpointManifest& b) {
  std::set<std::string> files;
  AddFileNames(a, &files);
  std::set<std::string> others;
  AddFileNames(b, &others);
  return std::any_of(others.begin(), others.end(),
                     [&](const auto& file) { return files.count(file) > 0; });
}

// Moves saves that must stay from `old` to `kept`, which already has the saves
// that the caller keeps. In both lists the newest save is first.
//
// With `is_own`, saves share files, and a shared file may become damaged. So
// one of the saves that share no file with `newest` stays as well: the newest
// of these.
void KeepSpecial(const v1::CheckpointManifest& newest, bool is_own,
                 std::vector<v1::CheckpointManifest>* old,
                 std::vector<v1::CheckpointManifest>* kept) {
  // Some saves have the last rows of a table that was lost or trained again
  // from nothing. Two of them stay: the newest, and the one with the most rows.
  std::set<size_t> special;
  size_t largest = old->size();
  for (size_t i = 0; i < old->size(); ++i) {
    if (!HasLastRowsOf((*old)[i], newest, *kept)) continue;
    if (largest == old->size()) special.insert(i);
    if (largest == old->size() || RowsOf((*old)[i]) > RowsOf((*old)[largest])) {
      largest = i;
    }
  }
  special.insert(largest);
  const auto is_apart = [&newest](const v1::CheckpointManifest& save) {
    return !HaveCommonFiles(newest, save);
  };
  if (is_own && std::none_of(kept->begin(), kept->end(), is_apart)) {
    special.insert(static_cast<size_t>(
        std::find_if(old->begin(), old->end(), is_apart) - old->begin()));
  }
  for (auto i = special.rbegin(); i != special.rend(); ++i) {
    if (*i == old->size()) continue;
    kept->push_back(std::move((*old)[*i]));
    old->erase(old->begin() + static_cast<ptrdiff_t>(*i));
  }
}

// Removes the saves that are not kept. A file that cannot be removed does no
// harm, because the newest save is published already. Returns the first error.
absl::Status RemoveOldSaves(const std::string& path,
                            const v1::CheckpointManifest& newest, int keep,
                            bool is_own) {
  TFSWITCH_ASSIGN_OR_RETURN(const std::vector<int64_t> numbers,
                            FormerSaves(path));
  std::vector<v1::CheckpointManifest> kept = {newest};
  std::vector<v1::CheckpointManifest> old;
  for (const int64_t number : numbers) {
    // If a save cannot be read, nothing is removed, because it is not known
    // which files that save needs.
    TFSWITCH_ASSIGN_OR_RETURN(v1::CheckpointManifest save,
                              ReadSave(path, number));
    if (number >= newest.save()) continue;
    const bool is_kept = kept.size() < static_cast<size_t>(keep);
    (is_kept ? kept : old).push_back(std::move(save));
  }
  KeepSpecial(newest, is_own, &old, &kept);
  std::set<std::string> named;
  for (const auto& save : kept) AddFileNames(save, &named);
  absl::Status status;
  const auto remove = [&status](const std::string& file) {
    std::error_code error;
    fs::remove(file, error);
    if (error) status.Update(ErrnoStatus("remove", file, error.value()));
    return !error;
  };
  for (const auto& save : old) {
    // Removes the manifest before the files, so that no manifest names a
    // missing file.
    if (!remove(ManifestPath(path, save.save()))) {
      AddFileNames(save, &named);
      continue;
    }
    std::set<std::string> files;
    AddFileNames(save, &files);
    for (const std::string& file : files) {
      if (named.count(file) == 0) remove(fs::path(path) / file);
    }
  }
  return status;
}

// Reads the newest save, and sets `*is_current` to whether its manifest is
// manifest.json. If that file was removed, the newest save is the one with the
// highest number. NotFound if there is no save.
absl::StatusOr<v1::CheckpointManifest> NewestSave(
    const std::string& path, const std::vector<int64_t>& former,
    bool* is_current) {
  *is_current = true;
  absl::StatusOr<v1::CheckpointManifest> newest = ReadSave(path, 0);
  if (!absl::IsNotFound(newest.status()) || former.empty()) return newest;
  *is_current = false;
  return ReadSave(path, former.front());
}

}  // namespace

bool IsWorthExtending(const TableBase& base, const EmbeddingTable& table) {
  int64_t bytes = 0;
  for (const v1::CheckpointFile& file : base.files) {
    if (HasRows(file)) bytes += file.bytes();
  }
  // In a table with few rows most bytes of the files are headers, so small
  // files are always extended.
  constexpr int64_t kAnyway = int64_t{1} << 20;
  return bytes <= kAnyway + table.size() * RowBytes(table) * 3 / 2;
}

uint64_t RowsOf(const v1::CheckpointManifest& save) {
  uint64_t num_rows = 0;
  for (const auto& [name, table] : save.tables()) num_rows += table.num_rows();
  return num_rows;
}

SavedSteps StepsOf(const v1::CheckpointTable& table) {
  SavedSteps steps;
  steps.last_step = table.steps().last_step();
  for (const auto& run : table.steps().runs()) {
    steps.runs.push_back({run.first(), run.learning_rate()});
  }
  return steps;
}

struct PartWriter::Data {
  std::string path;
  v1::CheckpointPart part;
  // A client may repeat a save while the first attempt is still writing. This
  // number is a part of the file names, so that the two attempts share no file.
  uint32_t attempt = std::random_device()();
  Interrupt interrupt;
  std::vector<std::string> written;  // Relative to `path`.
  bool is_finished = false;

  // Writes `file` to `folder` and adds it to `files`. The caller has set its
  // kind and its counts.
  absl::Status Write(const std::string& folder, v1::CheckpointFile file,
                     const std::vector<TensorToWrite>& tensors,
                     std::map<std::string, std::string> metadata,
                     Files* files) {
    TFSWITCH_RETURN_IF_ERROR(interrupt());
    if (files->empty()) {
      TFSWITCH_RETURN_IF_ERROR(CreateFolders(absl::StrCat(path, "/", folder)));
    }
    const std::string& save_id = part.manifest().save_id();
    file.set_name(absl::StrFormat("%s/%s-s%05d-%05d-%08x.safetensors", folder,
                                  save_id, part.shard_index(), files->size(),
                                  attempt));
    metadata.insert({{"format", kFormatName},
                     {"kind", v1::CheckpointFile::Kind_Name(file.kind())},
                     {"save_id", save_id}});
    TFSWITCH_ASSIGN_OR_RETURN(
        const WrittenFile on_disk,
        WriteSafetensors(absl::StrCat(path, "/", file.name()), tensors,
                         metadata));
    written.push_back(file.name());
    file.set_bytes(on_disk.bytes);
    file.set_crc32(on_disk.crc32);
    *files->Add() = std::move(file);
    return absl::OkStatus();
  }
};

PartWriter::PartWriter(std::string path, std::string save_id,
                       uint32_t shard_index, uint32_t num_shards,
                       bool all_tables, Interrupt interrupt)
    : data_(std::make_unique<Data>()) {
  data_->path = std::move(path);
  data_->part.set_shard_index(shard_index);
  data_->part.set_num_shards(num_shards);
  data_->part.set_all_tables(all_tables);
  data_->part.mutable_manifest()->set_save_id(std::move(save_id));
  data_->interrupt = std::move(interrupt);
}

PartWriter::~PartWriter() {
  if (data_->is_finished) return;
  for (const std::string& file : data_->written) {
    std::error_code error;  // Remaining files do no harm.
    fs::remove(fs::path(data_->path) / file, error);
  }
}

// Writes the files of one table: one file for each part of the snapshot.
class PartWriter::TableWriter {
 public:
  TableWriter(Data* data, TableSnapshot* snapshot, v1::CheckpointTable* saved)
      : data_(*data), snapshot_(*snapshot), saved_(*saved) {
    const uint32_t num_virtual = snapshot->table.config().num_virtual_shards;
    const uint32_t shard = data->part.shard_index();
    const uint32_t num_shards = data->part.num_shards();
    begin_ = FirstVirtualShardOf(shard, num_virtual, num_shards);
    end_ = FirstVirtualShardOf(shard + 1, num_virtual, num_shards);
  }

  absl::Status WriteRemoved() {
    std::vector<Key> keys = std::move(snapshot_.lost_rows);
    std::sort(keys.begin(), keys.end());
    keys.erase(std::unique(keys.begin(), keys.end()), keys.end());
    constexpr auto kKeysPerFile =
        static_cast<size_t>(kBytesPerFile) / sizeof(Key);
    for (size_t begin = 0; begin < keys.size(); begin += kKeysPerFile) {
      const auto some = absl::MakeConstSpan(keys).subspan(begin, kKeysPerFile);
      const auto num_keys = static_cast<int64_t>(some.size());
      TFSWITCH_RETURN_IF_ERROR(
          Write(v1::CheckpointFile::REMOVED, num_keys,
                {{"keys", "I64", {num_keys}, BytesOf(some)}}));
    }
    return absl::OkStatus();
  }

  absl::Status WriteCandidates() {
    const int width = CandidateFloats(snapshot_.table.config());
    if (width == 0) return absl::OkStatus();
    std::vector<Key> keys;
    std::vector<float> records;
    const auto flush = [&]() -> absl::Status {
      const auto num_keys = static_cast<int64_t>(keys.size());
      TFSWITCH_RETURN_IF_ERROR(
          Write(v1::CheckpointFile::CANDIDATES, num_keys,
                {{"keys", "I64", {num_keys}, BytesOf(keys)},
                 {"records", "F32", {num_keys, width}, BytesOf(records)}}));
      keys.clear();
      records.clear();
      return absl::OkStatus();
    };
    const int64_t keys_per_file =
        kBytesPerFile /
        static_cast<int64_t>(sizeof(Key) + sizeof(float) * width);
    TFSWITCH_RETURN_IF_ERROR(snapshot_.ForEachCandidate(
        8192, [&](const CandidateChunk& chunk) -> absl::Status {
          TFSWITCH_RETURN_IF_ERROR(data_.interrupt());
          keys.insert(keys.end(), chunk.keys.begin(), chunk.keys.end());
          records.insert(records.end(), chunk.records.begin(),
                         chunk.records.end());
          if (static_cast<int64_t>(keys.size()) < keys_per_file) {
            return absl::OkStatus();
          }
          return flush();
        }));
    return keys.empty() ? absl::OkStatus() : flush();
  }

  absl::Status WriteBloom() {
    const CountingBloom* const bloom = snapshot_.bloom.get();
    if (bloom == nullptr) return absl::OkStatus();
    const auto width = static_cast<int64_t>(bloom->bytes_per_virtual_shard());
    std::vector<int64_t> shards;
    std::vector<char> cells;
    const auto flush = [&]() -> absl::Status {
      const auto num_shards = static_cast<int64_t>(shards.size());
      TFSWITCH_RETURN_IF_ERROR(
          Write(v1::CheckpointFile::BLOOM, num_shards,
                {{"virtual_shards", "I64", {num_shards}, BytesOf(shards)},
                 {"cells", "U8", {num_shards, width}, BytesOf(cells)}}));
      shards.clear();
      cells.clear();
      return absl::OkStatus();
    };
    const uint32_t num_virtual = snapshot_.table.config().num_virtual_shards;
    for (uint32_t shard = 0; shard < num_virtual; ++shard) {
      if (!bloom->IsTouched(shard)) continue;
      shards.push_back(shard);
      const absl::Span<const char> some = bloom->Cells(shard);
      cells.insert(cells.end(), some.begin(), some.end());
      if (static_cast<int64_t>(cells.size()) < kBytesPerFile) continue;
      TFSWITCH_RETURN_IF_ERROR(flush());
    }
    return shards.empty() ? absl::OkStatus() : flush();
  }

  absl::Status WriteRows(absl::FunctionRef<void(int64_t)> report) {
    const int dim = snapshot_.table.dim();
    const int slot_floats = snapshot_.table.slot_floats();
    const auto write = [&](const RowChunk& chunk) -> absl::Status {
      const auto num_rows = static_cast<int64_t>(chunk.keys.size());
      std::vector<TensorToWrite> tensors = {
          {"keys", "I64", {num_rows}, BytesOf(chunk.keys)},
          {"embeddings", "F32", {num_rows, dim}, BytesOf(chunk.embeddings)}};
      if (slot_floats > 0) {
        tensors.push_back(
            {"slots", "F32", {num_rows, slot_floats}, BytesOf(chunk.slots)});
      }
      TFSWITCH_RETURN_IF_ERROR(
          Write(v1::CheckpointFile::ROWS, num_rows, tensors));
      report(num_rows);
      return absl::OkStatus();
    };
    return snapshot_.ForEachRow(
        std::max<int64_t>(1, kBytesPerFile / RowBytes(snapshot_.table)), write);
  }

 private:
  absl::Status Write(v1::CheckpointFile::Kind kind, int64_t num_rows,
                     const std::vector<TensorToWrite>& tensors) {
    const TableConfig& config = snapshot_.table.config();
    v1::CheckpointFile file;
    file.set_kind(kind);
    file.set_num_rows(num_rows);
    file.set_virtual_shards_begin(begin_);
    file.set_virtual_shards_end(end_);
    return data_.Write(FileNameOf(config.name), std::move(file), tensors,
                       {{"table", config.name},
                        {"optimizer", OptimizerName(config.optimizer)}},
                       saved_.mutable_files());
  }

  Data& data_;
  TableSnapshot& snapshot_;
  v1::CheckpointTable& saved_;
  uint32_t begin_ = 0;
  uint32_t end_ = 0;
};

absl::Status PartWriter::AddTable(TableSnapshot& snapshot,
                                  absl::FunctionRef<void(int64_t)> report,
                                  const TableBase& base) {
  const EmbeddingTable& table = snapshot.table;
  v1::CheckpointTable& saved =
      (*data_->part.mutable_manifest()->mutable_tables())[table.config().name];
  *saved.mutable_config() = ToProto(table.config());
  const TableIdentity identity = table.identity();
  saved.set_incarnation(identity.incarnation);
  saved.mutable_shard_instances()->Assign(identity.shard_instances.begin(),
                                          identity.shard_instances.end());
  saved.set_slot_floats(table.slot_floats());
  if (snapshot.last_day >= 0.0f) saved.set_last_day(snapshot.last_day);
  if (table.config().optimizer.is_dense) {
    saved.mutable_steps()->set_last_step(snapshot.steps.last_step);
    for (const StepRun& run : snapshot.steps.runs) {
      v1::CheckpointSteps::Run* const to = saved.mutable_steps()->add_runs();
      to->set_first(run.first);
      to->set_learning_rate(run.learning_rate);
    }
  }
  saved.set_num_rows(static_cast<uint64_t>(snapshot.num_rows));
  if (!snapshot.is_whole) {
    std::copy_if(
        base.files.begin(), base.files.end(),
        google::protobuf::RepeatedPtrFieldBackInserter(saved.mutable_files()),
        HasRows);
  }
  TableWriter writer(data_.get(), &snapshot, &saved);
  TFSWITCH_RETURN_IF_ERROR(writer.WriteRemoved());
  TFSWITCH_RETURN_IF_ERROR(writer.WriteCandidates());
  TFSWITCH_RETURN_IF_ERROR(writer.WriteBloom());
  return writer.WriteRows(report);
}

Files PartWriter::FilesOf(const EmbeddingTable& table) const {
  return data_->part.manifest().tables().at(table.config().name).files();
}

void PartWriter::SetWorkQueues(const v1::SavedWorkQueues& work_queues) {
  *data_->part.mutable_manifest()->mutable_work_queues() = work_queues;
}

absl::Status PartWriter::AddServer(v1::CheckpointServer server,
                                   const std::vector<WriteMark>& marks,
                                   const std::vector<StagedMessage>& staged) {
  v1::CheckpointFile file;
  file.set_kind(v1::CheckpointFile::MARKS);
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
    const auto count = static_cast<int64_t>(some.size());
    file.set_num_rows(count);
    TFSWITCH_RETURN_IF_ERROR(
        data_->Write(kServerFolder, file,
                     {{"marks", "I64", {count, kMarkWidth}, BytesOf(numbers)}},
                     {}, server.mutable_files()));
  }
  file.set_kind(v1::CheckpointFile::STAGED);
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
    const auto count = static_cast<int64_t>(sizes.size());
    file.set_num_rows(count);
    const auto num_bytes = static_cast<int64_t>(bytes.size());
    TFSWITCH_RETURN_IF_ERROR(
        data_->Write(kServerFolder, file,
                     {{"numbers", "I64", {count}, BytesOf(numbers)},
                      {"sizes", "I64", {count}, BytesOf(sizes)},
                      {"bytes", "U8", {num_bytes}, BytesOf(bytes)}},
                     {}, server.mutable_files()));
  }
  *data_->part.mutable_manifest()->mutable_server() = std::move(server);
  return absl::OkStatus();
}

const std::vector<std::string>& PartWriter::files() const {
  return data_->written;
}

v1::CheckpointPart PartWriter::Finish() {
  data_->is_finished = true;
  return data_->part;
}

namespace {

// How long a commit waits for the commit of another process. Commits are short.
constexpr absl::Duration kLockTimeout = absl::Seconds(30);

// Adds the next shard's part of a table to `joined`, which has the parts of the
// shards before it.
absl::Status JoinTable(const std::string& what, const std::string& name,
                       const v1::CheckpointTable& table,
                       v1::CheckpointTable* joined) {
  const TableConfig before = FromProto(joined->config());
  const TableConfig config = FromProto(table.config());
  if (before != config) {
    return absl::FailedPreconditionError(absl::StrCat(
        what, ": table '", name,
        "' differs between shards: ", DescribeDifference(before, config)));
  }
  if (joined->incarnation() != table.incarnation()) {
    return absl::FailedPreconditionError(absl::StrCat(
        what, ": table '", name,
        "' is not the same table on all shards: it was made again on some "
        "of them while it was saved. Save again"));
  }
  if (table.has_last_day() && table.last_day() >= joined->last_day()) {
    joined->set_last_day(table.last_day());
  }
  // If the steps differ, a push had not reached all shards when they were
  // saved. The later step counts.
  if (table.steps().last_step() > joined->steps().last_step()) {
    *joined->mutable_steps() = table.steps();
  }
  joined->set_num_rows(joined->num_rows() + table.num_rows());
  joined->mutable_files()->MergeFrom(table.files());
  return absl::OkStatus();
}

absl::StatusOr<v1::CheckpointManifest> JoinParts(
    const std::string& save_id, const std::vector<v1::CheckpointPart>& parts,
    bool is_own) {
  const std::string what = absl::StrCat("save '", save_id, "'");
  v1::CheckpointManifest joined;
  joined.set_save_id(save_id);
  std::set<uint32_t> shards;
  std::map<std::string, size_t> num_parts;
  for (const v1::CheckpointPart& part : parts) {
    const v1::CheckpointManifest& manifest = part.manifest();
    absl::Status status;
    for (const auto& [name, table] : manifest.tables()) {
      status.Update(CheckRanges(table));
    }
    if (is_own) status.Update(CheckRanges(manifest.server()));
    if (status.ok()) status = CheckManifest(manifest);
    if (!status.ok()) {
      return absl::InvalidArgumentError(absl::StrCat(
          what, ": a part of the manifest is malformed: ", status.message()));
    }
    const uint32_t num_shards = part.num_shards();
    if (manifest.save_id() != save_id ||
        parts.size() != (is_own ? 1 : num_shards) ||
        part.shard_index() >= num_shards ||
        !shards.insert(part.shard_index()).second) {
      return absl::FailedPreconditionError(
          absl::StrCat(what, ": got ", parts.size(), " parts; one is of shard ",
                       part.shard_index(), " of ", num_shards, " and save '",
                       absl::CHexEscape(manifest.save_id()),
                       "'. Every shard must save once under the same save_id"));
    }
    if (manifest.has_work_queues() && !joined.has_work_queues()) {
      *joined.mutable_work_queues() = manifest.work_queues();
    }
    // The state of a server is taken only from the server's own save, because a
    // client's part cannot be trusted to have the right one.
    if (is_own) *joined.mutable_server() = manifest.server();
    for (const auto& [name, table] : manifest.tables()) {
      ++num_parts[name];
      const auto [it, is_new] = joined.mutable_tables()->insert({name, table});
      if (is_new) continue;
      TFSWITCH_RETURN_IF_ERROR(JoinTable(what, name, table, &it->second));
    }
  }
  for (const auto& [name, count] : num_parts) {
    if (count == parts.size()) continue;
    return absl::FailedPreconditionError(absl::StrCat(
        what, ": table '", name, "' is on ", count, " of ", parts.size(),
        " shards: the others have lost it, or it was made or dropped while it "
        "was saved"));
  }
  return joined;
}

// Checks that each file that the parts name exists, and that this save has
// written it. A save must not name files of another save, because its files are
// removed with it. Files in `former` may be of an earlier save.
absl::Status CheckFiles(const std::string& path,
                        const v1::CheckpointManifest& manifest,
                        const std::set<std::string>& former,
                        const Interrupt& interrupt) {
  for (const auto& [name, table] : manifest.tables()) {
    for (const v1::CheckpointFile& file : table.files()) {
      TFSWITCH_RETURN_IF_ERROR(interrupt());
      auto metadata =
          ReadMetadata((fs::path(path) / file.name()).string(), file.bytes());
      if (!metadata.ok()) {
        return absl::FailedPreconditionError(
            absl::StrCat("save '", manifest.save_id(), "': file '", file.name(),
                         "' is not visible in '", path,
                         "' from the server that writes the manifest (",
                         metadata.status().message(),
                         "); save to a folder that all servers share"));
      }
      if (((*metadata)["save_id"] != manifest.save_id() &&
           former.count(file.name()) == 0) ||
          (*metadata)["table"] != name) {
        return absl::InvalidArgumentError(
            absl::StrCat("save '", manifest.save_id(), "': file '", file.name(),
                         "' in '", path, "' was not written by it"));
      }
    }
  }
  return absl::OkStatus();
}

absl::Status CheckDropped(const std::string& path,
                          const v1::CheckpointManifest& manifest,
                          const v1::CheckpointManifest& former,
                          const std::vector<std::string>& dropped_tables) {
  std::set<std::string> missing;
  for (const auto& [name, table] : former.tables()) {
    if (!manifest.tables().contains(name) &&
        std::find(dropped_tables.begin(), dropped_tables.end(), name) ==
            dropped_tables.end()) {
      missing.insert(absl::StrCat("'", name, "'"));
    }
  }
  if (missing.empty()) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(
      "checkpoint '", path,
      "' has tables that the servers have not: ", absl::StrJoin(missing, ", "),
      ". Restore them, save to another path, or name them in `drop` to save "
      "without them"));
}

// Gives the newest save's manifest a second name, with its number.
absl::Status Retire(const std::string& path,
                    const v1::CheckpointManifest& former) {
  const std::string from = ManifestPath(path, 0);
  const std::string to = ManifestPath(path, former.save());
  std::error_code error;
  fs::create_hard_link(from, to, error);
  if (!error || error.value() == EEXIST) return absl::OkStatus();
  // Some file systems have no hard links, so the file is copied instead.
  TFSWITCH_ASSIGN_OR_RETURN(const std::string contents,
                            ReadWholeFile(from, kMaxManifestBytes));
  return WriteFileAtomically(to, contents);
}

// The saves in a folder before a commit.
struct SavesBefore {
  std::vector<int64_t> older;  // The newest first.
  std::optional<v1::CheckpointManifest> newest;
  bool is_current = true;  // Whether it is manifest.json.

  int64_t last_number() const {
    return std::max(newest.has_value() ? newest->save() : 0,
                    older.empty() ? 0 : older.front());
  }
};

absl::StatusOr<SavesBefore> FindSavesBefore(const std::string& path) {
  SavesBefore before;
  TFSWITCH_ASSIGN_OR_RETURN(before.older, FormerSaves(path));
  auto newest = NewestSave(path, before.older, &before.is_current);
  if (newest.ok()) {
    before.newest = *std::move(newest);
  } else if (!absl::IsNotFound(newest.status())) {
    // Refuses the commit, because a new save would hide the damage.
    return absl::Status(
        newest.status().code(),
        absl::StrCat(newest.status().message(),
                     "; remove it to go on with the save before, or save to "
                     "another path"));
  }
  return before;
}

// Returns the number of the save if an earlier commit has published it. A
// client repeats a commit if the answer was lost.
std::optional<int64_t> FindSave(const std::string& path,
                                const std::string& save_id,
                                const SavesBefore& before) {
  if (before.newest.has_value() && before.newest->save_id() == save_id) {
    return before.newest->save();
  }
  for (const int64_t number : before.older) {
    const auto save = ReadSave(path, number);
    if (save.ok() && save->save_id() == save_id) return number;
  }
  return std::nullopt;
}

absl::Status CheckOwnPart(const std::string& path, const std::string& save_id,
                          const std::vector<v1::CheckpointPart>& parts,
                          const CommitOptions& options) {
  const auto is_own = [&options](const v1::CheckpointPart& part) {
    return google::protobuf::util::MessageDifferencer::Equals(
        part, *options.own_part);
  };
  if (!options.own_part.has_value() ||
      std::any_of(parts.begin(), parts.end(), is_own)) {
    return absl::OkStatus();
  }
  return absl::FailedPreconditionError(
      absl::StrCat("save '", save_id, "': none of the ", parts.size(),
                   " parts is the one that this server has written to '", path,
                   "'. If it was restarted meanwhile, save again"));
}

// Gives the previous manifest its second name, and writes the new manifest.
absl::Status Publish(const std::string& path, const SavesBefore& before,
                     v1::CheckpointManifest* manifest) {
  manifest->set_save(before.last_number() + 1);
  if (manifest->save() > kMaxSaveNumber) {
    return absl::FailedPreconditionError(
        absl::StrCat("there is no number after save ", before.last_number(),
                     " in '", path, "'. Save to another path"));
  }
  // If the new manifest then cannot be written, the previous save is still the
  // newest.
  if (before.newest.has_value() && before.is_current) {
    TFSWITCH_RETURN_IF_ERROR(Retire(path, *before.newest));
  }
  absl::Status status =
      WriteMessageFile(ManifestPath(path, 0), kMaxManifestBytes, manifest);
  if (!absl::IsResourceExhausted(status)) return status;
  return absl::ResourceExhaustedError(
      absl::StrCat("save '", manifest->save_id(), "': ", status.message(),
                   "; give work queues fewer items"));
}

}  // namespace

absl::StatusOr<int64_t> Commit(const std::string& path,
                               const std::string& save_id,
                               const std::vector<v1::CheckpointPart>& parts,
                               const CommitOptions& options) {
  TFSWITCH_RETURN_IF_ERROR(CheckId("save_id", save_id));
  if (options.keep < 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("keep must be at least 1. Received: ", options.keep));
  }
  TFSWITCH_ASSIGN_OR_RETURN(v1::CheckpointManifest manifest,
                            JoinParts(save_id, parts, options.is_own));
  TFSWITCH_RETURN_IF_ERROR(CreateFolders(path));
  TFSWITCH_ASSIGN_OR_RETURN(
      const std::unique_ptr<FolderLock> lock,
      FolderLock::Take(path, kLockTimeout, options.interrupt));
  TFSWITCH_ASSIGN_OR_RETURN(const SavesBefore before, FindSavesBefore(path));
  if (const auto number = FindSave(path, save_id, before)) return *number;
  TFSWITCH_RETURN_IF_ERROR(CheckOwnPart(path, save_id, parts, options));
  const v1::CheckpointManifest former =
      before.newest.value_or(v1::CheckpointManifest());
  std::set<std::string> former_files;
  if (options.is_own) AddFileNames(former, &former_files);
  TFSWITCH_RETURN_IF_ERROR(
      CheckFiles(path, manifest, former_files, options.interrupt));
  if (std::any_of(parts.begin(), parts.end(),
                  [](const auto& part) { return !part.all_tables(); })) {
    manifest.mutable_tables()->insert(former.tables().begin(),
                                      former.tables().end());
    manifest.clear_work_queues();
    if (former.has_work_queues()) {
      *manifest.mutable_work_queues() = former.work_queues();
    }
  }
  if (!options.is_own) {
    TFSWITCH_RETURN_IF_ERROR(
        CheckDropped(path, manifest, former, options.dropped_tables));
  }
  TFSWITCH_RETURN_IF_ERROR(Publish(path, before, &manifest));
  if (const absl::Status status =
          RemoveOldSaves(path, manifest, options.keep, options.is_own);
      !status.ok()) {
    LogMessage(
        LogLevel::kWarning, {"files_left"},
        absl::StrCat("old saves stay in '", path, "': ", status.message()));
  }
  return manifest.save();
}

absl::Status RemoveUnpublished(const std::string& path,
                               const std::vector<std::string>& files,
                               const Interrupt& interrupt) {
  if (files.empty()) return absl::OkStatus();
  const auto lock = FolderLock::Take(path, kLockTimeout, interrupt);
  // If there is no folder, there are no files.
  if (absl::IsNotFound(lock.status())) return absl::OkStatus();
  TFSWITCH_RETURN_IF_ERROR(lock.status());
  std::set<std::string> named;
  const auto keep = [&](int64_t number) -> absl::Status {
    const absl::StatusOr<v1::CheckpointManifest> save = ReadSave(path, number);
    if (absl::IsNotFound(save.status())) return absl::OkStatus();
    TFSWITCH_RETURN_IF_ERROR(save.status());
    AddFileNames(*save, &named);
    return absl::OkStatus();
  };
  // Reads manifest.json before the numbered manifests. On file systems without
  // locks another process may be giving it a number at this moment, and it must
  // not be missed.
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

// Says which checkpoints are in the parent folder of `path`.
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

absl::StatusOr<v1::CheckpointManifest> ReadManifest(const std::string& path,
                                                    int64_t number,
                                                    int newer_than) {
  const absl::StatusOr<std::vector<int64_t>> former = FormerSaves(path);
  bool is_current = true;
  absl::StatusOr<v1::CheckpointManifest> newest =
      former.ok() ? NewestSave(path, *former, &is_current)
                  : absl::StatusOr<v1::CheckpointManifest>(former.status());
  if (absl::IsNotFound(newest.status())) {
    return absl::NotFoundError(
        absl::StrCat("no checkpoint at '", path, "': there is no ",
                     kManifestName, " in it", DescribeNeighbours(path)));
  }
  if (number == 0 && newer_than == 0) return newest;
  TFSWITCH_RETURN_IF_ERROR(former.status());
  // After a crash the manifest of the newest save may have both names.
  std::vector<int64_t> numbers;
  for (const int64_t each : *former) {
    if (!newest.ok() || each != newest->save()) numbers.push_back(each);
  }
  if (number == 0) {
    if (static_cast<size_t>(newer_than) <= numbers.size()) {
      number = numbers[static_cast<size_t>(newer_than) - 1];
    }
  } else if (newest.ok() && newest->save() == number) {
    return newest;
  } else if (std::find(numbers.begin(), numbers.end(), number) ==
             numbers.end()) {
    if (newest.ok()) numbers.insert(numbers.begin(), newest->save());
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
