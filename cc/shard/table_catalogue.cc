#include "cc/shard/table_catalogue.h"

#include <algorithm>
#include <utility>
#include <variant>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/types/span.h"
#include "cc/base/files.h"
#include "cc/base/log_writer.h"
#include "cc/base/memory_region.h"
#include "cc/base/status_macros.h"
#include "cc/table/counting_bloom.h"
#include "cc/wire/table_config_conversion.h"

namespace tfswitch {
namespace {

std::vector<std::shared_ptr<EmbeddingTable>> Values(
    const TableCatalogue::TableMap& tables) {
  std::vector<std::shared_ptr<EmbeddingTable>> values;
  values.reserve(tables.size());
  for (const auto& [name, table] : tables) values.push_back(table);
  return values;
}

// How many incarnations of dropped tables are remembered.
constexpr size_t kMaxDropped = 4096;

// The bytes of the Bloom filter of the table's admission; 0 if it has none.
double BloomBytes(const TableConfig& config, const ShardOptions& options) {
  const auto* bloom =
      std::get_if<BloomMinCountAdmission>(&config.admission.policy);
  if (bloom == nullptr) return 0.0;
  return CountingBloom::SizeBytes(*bloom, config.num_virtual_shards) /
         options.num_shards;
}

}  // namespace

absl::Status TableCatalogue::CheckRoomLocked(const TableConfig& config,
                                             const TableMap& coming) const {
  size_t num_tables = tables_.size();
  double others = 0.0;
  for (const auto& [name, table] : tables_) {
    others += BloomBytes(table->config(), options_);
  }
  for (const auto& [name, table] : coming) {
    if (tables_.count(name) > 0) continue;
    ++num_tables;
    others += BloomBytes(table->config(), options_);
  }
  if (num_tables >= options_.max_tables) {
    return absl::ResourceExhaustedError(absl::StrCat(
        "no room for table '", config.name, "': there are ", num_tables,
        options_.OnShard(),
        ", as many as --max_tables allows; drop some, or start the server with "
        "a larger one"));
  }
  const double bytes = BloomBytes(config, options_);
  if (bytes == 0.0) return absl::OkStatus();
  const double limit = options_.max_bloom_bytes != 0
                           ? static_cast<double>(options_.max_bloom_bytes)
                           : static_cast<double>(PhysicalMemoryBytes()) / 2;
  const std::string limit_text = absl::StrCat(
      limit / 1e9, " GB (",
      options_.max_bloom_bytes != 0 ? "" : "half of this machine's memory; ",
      "--max_bloom_bytes)");
  if (bytes > limit) {
    const auto& bloom =
        std::get<BloomMinCountAdmission>(config.admission.policy);
    return absl::InvalidArgumentError(absl::StrCat(
        "table '", config.name, "': admission.bloom_min_count.capacity: ",
        bloom.capacity.value, " ids with a false_positive_rate of ",
        bloom.false_positive_rate.value, " take ", bytes / 1e9,
        " GB of cells on each server, and the limit is ", limit_text,
        "; lower the capacity, raise the rate, or use more servers"));
  }
  if (others + bytes <= limit) return absl::OkStatus();
  return absl::ResourceExhaustedError(absl::StrCat(
      "table '", config.name, "': the cells of its admission take ",
      bytes / 1e9, " GB on each server, beside ", others / 1e9,
      " GB of other tables, and the limit is ", limit_text,
      "; lower the capacity, raise the rate, or use more servers"));
}

absl::StatusOr<TableCatalogue::Handle> TableCatalogue::Create(
    const TableConfig& config, const TableIdentity& identity,
    uint64_t replaced_incarnation) {
  TFSWITCH_RETURN_IF_ERROR(config.ValidateNew());
  if (options_.num_shards > config.num_virtual_shards) {
    return absl::InvalidArgumentError(absl::StrCat(
        "table '", config.name, "': num_virtual_shards (",
        config.num_virtual_shards, ") must be at least the number of servers (",
        options_.num_shards, ")"));
  }
  TFSWITCH_RETURN_IF_ERROR(CloseOptimizer(config));
  std::shared_ptr<EmbeddingTable> table;
  for (;;) {
    {
      MutexLock lock(&mutex_);
      const auto it = tables_.find(config.name);
      if (it != tables_.end()) {
        return AttachExisting(it->second.get(), config, identity,
                              replaced_incarnation);
      }
      TFSWITCH_RETURN_IF_ERROR(CheckRoomLocked(config, {}));
      if (table != nullptr) {
        const Handle made{true, table->incarnation()};
        WarnOfReleased("it is made again, without rows", config.name);
        EndLoading(*table);
        tables_.emplace(config.name, std::move(table));
        shrink_timer_.Set(config.name,
                          absl::Seconds(config.eviction.every_secs.value));
        journal_.Tell("table_made",
                      {{"table", config.name}, {"dim", config.dim}});
        return made;
      }
    }
    // Makes the table before it locks the mutex, which all calls need.
    // Reserving addresses takes a millisecond, and longer with many threads.
    TFSWITCH_ASSIGN_OR_RETURN(table, Make(config));
    if (identity.incarnation != 0) table->set_identity(identity);
  }
}

absl::StatusOr<std::shared_ptr<EmbeddingTable>> TableCatalogue::Make(
    const TableConfig& config) const {
  std::shared_ptr<ColdFolder> folder;
  if (config.demotes_when_full()) {
    MutexLock lock(&mutex_);
    folder = cold_folder_;
    if (folder == nullptr) {
      const std::string message = absl::StrCat(
          "table '", config.name,
          "' has when_full='disk', and there is no "
          "folder for its rows",
          options_.OnShard(),
          ". Start servers with --cold_dir, or connect(\"local://\", "
          "cold_dir=...)");
      // A replay must not skip the call that made the table.
      return journal_.is_recovering() ? absl::UnavailableError(message)
                                      : absl::FailedPreconditionError(message);
    }
  }
  TFSWITCH_ASSIGN_OR_RETURN(std::shared_ptr<EmbeddingTable> table,
                            EmbeddingTable::Create(config));
  if (folder != nullptr) table->SetColdFolder(std::move(folder), make_room_);
  MutexLock lock(&mutex_);
  loading_.push_back(table);
  return table;
}

absl::Status TableCatalogue::OpenColdFolder(const std::string& path) {
  if (path.empty()) return absl::OkStatus();
  MutexLock lock(&mutex_);
  if (cold_folder_ == nullptr) {
    TFSWITCH_ASSIGN_OR_RETURN(cold_folder_, ColdFolder::Open(path));
    return absl::OkStatus();
  }
  if (cold_folder_->path() == AbsolutePath(path)) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat("cold_dir: '", path, "' was given, and rows are in '",
                   cold_folder_->path(), "' already"));
}

std::vector<std::shared_ptr<EmbeddingTable>> TableCatalogue::WithLoading()
    const {
  // Freed after the unlock.
  std::vector<std::shared_ptr<EmbeddingTable>> loading;
  MutexLock lock(&mutex_);
  TableMap tables = tables_;
  for (const auto& each : loading_) {
    if (auto table = each.lock()) {
      loading.push_back(table);
      tables[table->config().name] = std::move(table);
    }
  }
  return Values(tables);
}

void TableCatalogue::EndLoading(const EmbeddingTable& table) {
  loading_.erase(std::remove_if(loading_.begin(), loading_.end(),
                                [&table](const auto& each) {
                                  const auto other = each.lock();
                                  return other == nullptr ||
                                         other.get() == &table;
                                }),
                 loading_.end());
}

absl::Status TableCatalogue::CheckCapacity(const TableConfig& config) const {
  if (config.capacity.num_rows == 0 || Find(config.name).ok()) {
    return absl::OkStatus();
  }
  TFSWITCH_RETURN_IF_ERROR(config.Validate());
  const uint64_t num_rows = options_.ShareOf(config, config.capacity.num_rows);
  const double bytes =
      static_cast<double>(num_rows) * static_cast<double>(RowBytes(config));
  const auto limit = static_cast<double>(
      options_.max_reserved_bytes != 0 ? options_.max_reserved_bytes
      : options_.max_memory != 0       ? options_.max_memory
                                       : MemoryLimitBytes());
  if (bytes <= limit) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      "table '", config.name, "': capacity: ", config.capacity.num_rows,
      " rows take ", bytes / 1e9, " GB, and there are ", limit / 1e9,
      " GB of memory", options_.OnShard(), "; lower it, or use more servers"));
}

absl::Status TableCatalogue::CloseOptimizer(const TableConfig& config) {
  if (config.optimizer.is_open) return absl::OkStatus();
  std::shared_ptr<EmbeddingTable> open;
  {
    MutexLock lock(&mutex_);
    const auto it = tables_.find(config.name);
    if (it == tables_.end()) return absl::OkStatus();
    open = it->second;
  }
  TableConfig former = config;
  former.optimizer = open->config().optimizer;
  if (!former.optimizer.is_open || former != open->config()) {
    return absl::OkStatus();  // AttachExisting() returns the error.
  }
  TableConfig closed = config;
  closed.capacity = open->config().capacity;
  TFSWITCH_ASSIGN_OR_RETURN(std::shared_ptr<EmbeddingTable> table,
                            Make(closed));
  table->set_identity(open->identity());
  table->NoteDay(open->last_day());
  const bool keeps_state =
      HaveEqualState(former.optimizer, config.optimizer, config.dim);
  constexpr int64_t kMaxRows = 4096;
  TFSWITCH_RETURN_IF_ERROR(
      open->ForEachRow(kMaxRows, [&](const RowChunk& rows) -> absl::Status {
        TFSWITCH_RETURN_IF_ERROR(make_room_(*table));
        return table
            ->AssignRows({rows.keys, rows.embeddings,
                          keeps_state ? rows.slots : absl::Span<const float>()},
                         AssignMode::kNow)
            .status();
      }));
  MutexLock lock(&mutex_);
  const auto it = tables_.find(config.name);
  if (it == tables_.end() || it->second != open) {
    return absl::UnavailableError(absl::StrCat(
        "table '", config.name, "' was dropped during the call. Try again"));
  }
  EndLoading(*table);
  it->second.swap(table);
  journal_.Tell("table_changed",
                {{"table", config.name}, {"what", "optimizer"}});
  return absl::OkStatus();
}

absl::StatusOr<TableCatalogue::Handle> TableCatalogue::Open(
    const TableConfig& config) const {
  TFSWITCH_ASSIGN_OR_RETURN(const auto table, Find(config.name));
  return AttachExisting(table.get(), config, TableIdentity(), 0);
}

absl::StatusOr<TableCatalogue::Handle> TableCatalogue::AttachExisting(
    EmbeddingTable* table, const TableConfig& config,
    const TableIdentity& identity, uint64_t replaced_incarnation) const {
  TableConfig wanted = config;
  if (wanted.optimizer.is_open) wanted.optimizer = table->config().optimizer;
  if (table->config() != wanted) {
    return absl::AlreadyExistsError(absl::StrCat(
        "table '", config.name, "' exists", options_.OnShard(),
        " with another config: ", DescribeDifference(table->config(), wanted),
        "; use the same settings or another name"));
  }
  if (identity.incarnation != 0 &&
      table->incarnation() == replaced_incarnation) {
    table->set_identity(identity);
    journal_.Tell("table_changed",
                  {{"table", config.name}, {"what", "identity"}});
  }
  return Handle{false, table->incarnation()};
}

std::shared_ptr<EmbeddingTable> TableCatalogue::Remove(
    const std::string& name) {
  released_rows_.erase(name);
  const auto it = tables_.find(name);
  if (it == tables_.end()) return nullptr;
  std::shared_ptr<EmbeddingTable> table = std::move(it->second);
  tables_.erase(it);
  dropped_incarnations_.push_back(table->incarnation());
  if (dropped_incarnations_.size() > kMaxDropped) {
    dropped_incarnations_.pop_front();
  }
  shrink_timer_.Set(name, absl::ZeroDuration());
  journal_.Tell("table_dropped", {{"table", name}, {"rows", table->size()}});
  return table;
}

bool TableCatalogue::Drop(const std::string& name) {
  stage_.DropTable(name);
  std::shared_ptr<EmbeddingTable> dropped;  // Freed after the unlock.
  MutexLock lock(&mutex_);
  dropped = Remove(name);
  return dropped != nullptr;
}

absl::Status TableCatalogue::Hold(const std::string& name) {
  MutexLock lock(&mutex_);
  if (tables_.count(name) == 0) {
    return absl::NotFoundError(absl::StrCat("no table '", name, "'"));
  }
  ++holds_[name];
  return absl::OkStatus();
}

void TableCatalogue::Release(const std::string& name) {
  std::shared_ptr<EmbeddingTable> dropped;  // Freed after the unlock.
  {
    MutexLock lock(&mutex_);
    if (--holds_[name] > 0) return;
    holds_.erase(name);
    dropped = Remove(name);
    if (dropped == nullptr) return;
    if (dropped->size() > 0) released_rows_[name] = dropped->size();
  }
  // The staged pushes may be dropped after the table, because no holder of the
  // table is left to push more.
  stage_.DropTable(name);
}

void TableCatalogue::WarnOfReleased(absl::string_view what,
                                    const std::string& name) {
  for (auto it = released_rows_.begin(); it != released_rows_.end();) {
    if (!name.empty() && it->first != name) {
      ++it;
      continue;
    }
    LogMessage(
        LogLevel::kWarning, {"rows_freed"},
        absl::StrCat(
            "table '", it->first, "' had ", it->second,
            " rows, which were freed when the last layer or EmbeddingTable of "
            "it was collected: ",
            what,
            ". To go on with rows, keep one of these objects, or save and "
            "restore them"));
    it = released_rows_.erase(it);
  }
}

absl::StatusOr<std::shared_ptr<EmbeddingTable>> TableCatalogue::Find(
    const TableRef& table) const {
  MutexLock lock(&mutex_);
  const auto it = tables_.find(table.name);
  if (it != tables_.end()) {
    if (table.incarnation == 0 ||
        table.incarnation == it->second->incarnation()) {
      return it->second;
    }
    return absl::DataLossError(absl::StrCat(
        "table '", table.name, "' on shard ", options_.shard_index,
        " is not the one that this process has used: that one was dropped, or "
        "was lost when a server was restarted, and it was made again. Call "
        "`cluster.reset_lost_tables()` to go on with the rows that are there, "
        "or restore a checkpoint"));
  }
  if (table.incarnation != 0 &&
      std::find(dropped_incarnations_.begin(), dropped_incarnations_.end(),
                table.incarnation) == dropped_incarnations_.end()) {
    return absl::DataLossError(absl::StrCat(
        "shard ", options_.shard_index, " has lost table '", table.name,
        "' since ",
        absl::FormatTime("%Y-%m-%d %H:%M:%S", started_, absl::UTCTimeZone()),
        " UTC: it was restarted. Restore a checkpoint, or call "
        "`cluster.reset_lost_tables()` to go on with empty rows"));
  }
  return absl::NotFoundError(absl::StrCat(
      "no table '", table.name, "'", options_.OnShard(),
      tables_.empty()
          ? "; it has none"
          : absl::StrCat("; it has: ",
                         absl::StrJoin(tables_, ", ",
                                       [](std::string* out, const auto& entry) {
                                         absl::StrAppend(out, "'", entry.first,
                                                         "'");
                                       }))));
}

std::vector<std::shared_ptr<EmbeddingTable>> TableCatalogue::All() const {
  MutexLock lock(&mutex_);
  return Values(tables_);
}

bool TableCatalogue::IsPresent(const EmbeddingTable& table) const {
  MutexLock lock(&mutex_);
  const auto it = tables_.find(table.config().name);
  return it != tables_.end() && it->second.get() == &table;
}

void TableCatalogue::Install(TableMap* tables) {
  for (const auto& [name, table] : *tables) stage_.DropTable(name);
  MutexLock lock(&mutex_);
  for (auto& [name, table] : *tables) {
    shrink_timer_.Set(name,
                      absl::Seconds(table->config().eviction.every_secs.value));
    EndLoading(*table);
    std::swap(tables_[name], table);
    released_rows_.erase(name);
  }
}

void TableCatalogue::WarnOfUnsaved() {
  MutexLock lock(&mutex_);
  WarnOfReleased("it is not saved");
}

}  // namespace tfswitch
