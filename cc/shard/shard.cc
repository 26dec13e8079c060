// mutex_ guards the map of tables and the states of saves and restores. A call
// holds it to find its table, and then works on a shared pointer without it. So
// no row is read or written under mutex_. GradientAccumulator holds its own
// lock while it calls ApplyRound(), which takes mutex_; so stage_ must not be
// called under mutex_.
//
// Prepare() checks a push and sums its repeated keys before ApplyPush() asks
// the ledger, so that a refused push leaves no trace. Saves and restores read
// and write files without mutex_. At the end they take it and check whether
// they have been given up meanwhile.

#include "cc/shard/shard.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <filesystem>
#include <new>
#include <numeric>
#include <optional>
#include <set>
#include <system_error>
#include <utility>
#include <variant>

#include "absl/cleanup/cleanup.h"
#include "absl/functional/function_ref.h"
#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/time.h"
#include "cc/base/files.h"
#include "cc/base/key_batch.h"
#include "cc/base/key_observations.h"
#include "cc/base/log_writer.h"
#include "cc/base/memory_region.h"
#include "cc/base/status_macros.h"
#include "cc/base/steady_clock.h"
#include "cc/wire/codec.h"
#include "cc/wire/json.h"
#include "cc/wire/table_config_conversion.h"

namespace tfswitch {
namespace {

// Checks that each table of a client's request gets a name of its own.
absl::Status CheckNames(const v1::StageRestoreRequest& request) {
  if (!v1::StageRestoreRequest::State_IsValid(request.state())) {
    return absl::InvalidArgumentError(
        absl::StrCat("state of a restore: expected 0, 1 or 2, got ",
                     static_cast<int>(request.state())));
  }
  std::set<absl::string_view> names;
  int num_renamed = 0;
  for (const std::string& saved_name : request.tables()) {
    absl::string_view name = saved_name;
    if (const auto renamed = request.new_names().find(saved_name);
        renamed != request.new_names().end()) {
      name = renamed->second;
      ++num_renamed;
    }
    if (!names.insert(name).second) {
      return absl::InvalidArgumentError(absl::StrCat(
          "two tables of a restore would get the name '", name, "'"));
    }
  }
  if (num_renamed != request.new_names_size()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "new names of a restore: expected those of some of its ",
        request.tables_size(), " tables, got ", request.new_names_size(),
        " names, ", num_renamed, " of these"));
  }
  return absl::OkStatus();
}

// How many dropped tables are remembered.
constexpr size_t kMaxDropped = 4096;

std::string ShardPrefix(const ShardOptions& options) {
  if (options.num_shards == 1) return "";
  return absl::StrCat(" on shard ", options.shard_index);
}

// The bytes of the admission's Bloom filter; 0 if it has none.
double BloomBytes(const TableConfig& config, const ShardOptions& options) {
  const auto* bloom =
      std::get_if<BloomMinCountAdmission>(&config.admission.policy);
  if (bloom == nullptr) return 0.0;
  return CountingBloom::SizeBytes(*bloom, config.num_virtual_shards) /
         options.num_shards;
}

// Calls work(begin, size) for ranges of keys, on several threads if they are
// lent and there are enough keys. Returns the first error.
absl::Status RunKeyRanges(
    const LentThreads* threads, size_t num_keys, size_t dim,
    absl::FunctionRef<absl::Status(size_t, size_t)> work) {
  // Ranges have about the same number of floats for all lengths of rows.
  const size_t min_keys_per_range = std::max<size_t>(16, 16384 / dim);
  Mutex mutex;
  absl::Status first;
  RunRanges(threads, num_keys, min_keys_per_range,
            [&](size_t begin, size_t end) {
              absl::Status status = work(begin, end - begin);
              if (status.ok()) return;
              MutexLock lock(&mutex);
              first.Update(std::move(status));
            });
  return first;
}

}  // namespace

absl::Status ShardOptions::Validate() const {
  if (num_shards < 1 || num_shards > 65536) {
    return absl::InvalidArgumentError(absl::StrCat(
        "num_shards must be in [1, 65536]. Received: ", num_shards));
  }
  std::error_code error;
  if (checkpoint_root.has_value() && !checkpoint_root->empty() &&
      !std::filesystem::is_directory(*checkpoint_root, error)) {
    return absl::InvalidArgumentError(
        absl::StrCat("checkpoint_root must be a folder. Received: '",
                     *checkpoint_root, "'"));
  }
  if (shard_index >= num_shards) {
    return absl::InvalidArgumentError(
        absl::StrCat("shard_index must be below num_shards (", num_shards,
                     "). Received: ", shard_index));
  }
  return absl::OkStatus();
}

Shard::Shard(const ShardOptions& options) : options_(options) {}

absl::Status Shard::CheckRoom(const TableConfig& config,
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
        ShardPrefix(options_),
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
        bloom.capacity, " ids with a false_positive_rate of ",
        bloom.false_positive_rate, " take ", bytes / 1e9,
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

absl::StatusOr<WriteResult> Shard::WriteOnce(
    const PushId& id, absl::FunctionRef<absl::StatusOr<uint64_t>()> log,
    absl::FunctionRef<absl::StatusOr<int64_t>()> write, bool is_alone) {
  WriteResult written;
  const bool is_protected = id.client_id != 0;
  if (is_protected) {
    TFSWITCH_ASSIGN_OR_RETURN(const WriteLedger::Verdict verdict,
                              ledger_.Begin(id, &written.num_rows));
    if (verdict == WriteLedger::Verdict::kDuplicate) {
      written.duplicate = true;
      return written;
    }
  }
  const WriteGate::Pass pass(is_alone ? nullptr : gate());
  const WriteGate::Closed closed(is_alone ? gate() : nullptr);
  absl::StatusOr<int64_t> count;
  // The ledger must be told the result, also after an exception.
  try {
    const absl::Status logged = log().status();
    count = logged.ok() ? write() : logged;
  } catch (const std::bad_alloc&) {
    count = absl::ResourceExhaustedError("no memory for a write");
  }
  written.num_rows = count.value_or(0);
  if (is_protected) {
    ledger_.End(id, count.ok(), written.num_rows);
  }
  TFSWITCH_RETURN_IF_ERROR(count.status());
  CountWrite();
  return written;
}

absl::StatusOr<Shard::TableHandle> Shard::CreateTable(
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
      TFSWITCH_RETURN_IF_ERROR(CheckRoom(config));
      if (table != nullptr) {
        const TableHandle made{true, table->incarnation()};
        WarnOfReleased("it is made again, without rows", config.name);
        tables_.emplace(config.name, std::move(table));
        shrink_timer_.Set(config.name,
                          absl::Seconds(config.eviction.every_secs));
        Tell("table_made", {{"table", config.name}, {"dim", config.dim}});
        return made;
      }
    }
    TFSWITCH_ASSIGN_OR_RETURN(table, MakeTable(config));
    if (identity.incarnation != 0) table->set_identity(identity);
  }
}

absl::Status Shard::CloseOptimizer(const TableConfig& config) {
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
  TFSWITCH_ASSIGN_OR_RETURN(std::shared_ptr<EmbeddingTable> table,
                            MakeTable(config));
  table->set_identity(open->identity());
  table->NoteDay(open->last_day());
  const bool keeps_state =
      HaveEqualState(former.optimizer, config.optimizer, config.dim);
  constexpr int64_t kMaxRows = 4096;
  TFSWITCH_RETURN_IF_ERROR(
      open->ForEachRow(kMaxRows, [&](const RowChunk& rows) {
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
  it->second.swap(table);
  Tell("table_changed", {{"table", config.name}, {"what", "optimizer"}});
  return absl::OkStatus();
}

void Shard::Tell(absl::string_view event,
                 std::initializer_list<LogField> fields) const {
  if (!is_recovering_) LogServerEvent(LogLevel::kInfo, event, fields);
}

void Shard::NoteDisk(const absl::Status& status, const std::string& folder,
                     std::atomic<bool>* is_full) {
  const bool is_full_now = absl::IsResourceExhausted(status);
  if (!status.ok() && !is_full_now) return;  // The error has another cause.
  if (*is_full == is_full_now ||
      is_full->exchange(is_full_now) == is_full_now) {
    return;
  }
  if (is_full_now) {
    LogServerEvent(LogLevel::kError, "disk_full",
                   {{"path", folder}, {"message", status.message()}});
  } else {
    LogServerEvent(LogLevel::kInfo, "disk_well", {{"path", folder}});
  }
}

absl::StatusOr<Shard::TableHandle> Shard::OpenTable(
    const TableConfig& config) const {
  TFSWITCH_ASSIGN_OR_RETURN(const auto table, FindTable(config.name));
  return AttachExisting(table.get(), config, TableIdentity(), 0);
}

absl::StatusOr<std::shared_ptr<EmbeddingTable>> Shard::MakeTable(
    const TableConfig& config) {
  return EmbeddingTable::Create(config);
}

absl::StatusOr<Shard::TableHandle> Shard::AttachExisting(
    EmbeddingTable* table, const TableConfig& config,
    const TableIdentity& identity, uint64_t replaced_incarnation) const {
  TableConfig wanted = config;
  if (wanted.optimizer.is_open) wanted.optimizer = table->config().optimizer;
  if (table->config() != wanted) {
    return absl::AlreadyExistsError(absl::StrCat(
        "table '", config.name, "' exists", ShardPrefix(options_),
        " with another config: ", DescribeDifference(table->config(), wanted),
        "; use the same settings or another name"));
  }
  if (identity.incarnation != 0 &&
      table->incarnation() == replaced_incarnation) {
    table->set_identity(identity);
    Tell("table_changed", {{"table", config.name}, {"what", "identity"}});
  }
  return TableHandle{false, table->incarnation()};
}

absl::StatusOr<std::shared_ptr<Coordinator>> Shard::FindCoordinator() const {
  if (options_.shard_index == 0) return coordinator_;
  return absl::FailedPreconditionError(
      absl::StrCat("shard ", options_.shard_index,
                   " does not coordinate workers; shard 0 does"));
}

std::shared_ptr<EmbeddingTable> Shard::RemoveTable(const std::string& name) {
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
  Tell("table_dropped", {{"table", name}, {"rows", table->size()}});
  return table;
}

bool Shard::DropTable(const std::string& name) {
  stage_.DropTable(name);
  std::shared_ptr<EmbeddingTable> dropped;  // Freed outside the lock.
  MutexLock lock(&mutex_);
  dropped = RemoveTable(name);
  return dropped != nullptr;
}

absl::Status Shard::HoldTable(const std::string& name) {
  MutexLock lock(&mutex_);
  if (tables_.count(name) == 0) {
    return absl::NotFoundError(absl::StrCat("no table '", name, "'"));
  }
  ++holds_[name];
  return absl::OkStatus();
}

void Shard::ReleaseTable(const std::string& name) {
  std::shared_ptr<EmbeddingTable> dropped;  // Freed outside the lock.
  {
    MutexLock lock(&mutex_);
    if (--holds_[name] > 0) return;
    holds_.erase(name);
    dropped = RemoveTable(name);
    if (dropped == nullptr) return;
    if (dropped->size() > 0) released_rows_[name] = dropped->size();
  }
  // Called without mutex_, which is taken while a round is applied. This may
  // come late, because no holder of the table is left to push.
  stage_.DropTable(name);
}

void Shard::WarnOfReleased(absl::string_view what, const std::string& name) {
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

absl::StatusOr<std::shared_ptr<EmbeddingTable>> Shard::FindTable(
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
      "no table '", table.name, "'", ShardPrefix(options_),
      tables_.empty()
          ? "; it has none"
          : absl::StrCat("; it has: ",
                         absl::StrJoin(tables_, ", ",
                                       [](std::string* out, const auto& entry) {
                                         absl::StrAppend(out, "'", entry.first,
                                                         "'");
                                       }))));
}

std::vector<std::shared_ptr<EmbeddingTable>> Shard::Tables() const {
  MutexLock lock(&mutex_);
  std::vector<std::shared_ptr<EmbeddingTable>> tables;
  tables.reserve(tables_.size());
  for (const auto& [name, table] : tables_) tables.push_back(table);
  return tables;
}

absl::Status Shard::CheckOwnership(const EmbeddingTable& table,
                                   absl::Span<const Key> keys) const {
  if (options_.num_shards == 1) return absl::OkStatus();
  const uint32_t num_virtual = table.config().num_virtual_shards;
  for (const Key key : keys) {
    const uint32_t owner = OwnerOfVirtualShard(
        VirtualShardOf(key, num_virtual), num_virtual, options_.num_shards);
    if (owner != options_.shard_index) {
      return absl::InvalidArgumentError(
          absl::StrCat("table '", table.config().name, "': key ", key,
                       " belongs to shard ", owner, " of ", options_.num_shards,
                       ", this is shard ", options_.shard_index,
                       "; list the servers in shard order when connecting"));
    }
  }
  return absl::OkStatus();
}

absl::Status Shard::NoteDay(EmbeddingTable& table, float day) {
  TFSWITCH_RETURN_IF_ERROR(CheckDay(table.config().name, day));
  table.NoteDay(day);
  return absl::OkStatus();
}

absl::Status Shard::Pull(EmbeddingTable& table, absl::Span<const Key> keys,
                         bool insert_missing, absl::Span<float> embeddings,
                         const LentThreads* threads) const {
  TFSWITCH_RETURN_IF_ERROR(CheckSize(table.config().name, "embedding",
                                     keys.size(), table.dim(),
                                     embeddings.size()));
  TFSWITCH_RETURN_IF_ERROR(CheckOwnership(table, keys));
  const size_t dim = static_cast<size_t>(table.dim());
  std::atomic<int64_t> num_found{0};
  const auto run = [&](bool inserts) {
    num_found = 0;
    return RunKeyRanges(threads, keys.size(), dim,
                        [&](size_t begin, size_t size) -> absl::Status {
                          const absl::Span<const Key> range =
                              keys.subspan(begin, size);
                          float* const to = embeddings.data() + begin * dim;
                          const absl::Span<float> rows(to, size * dim);
                          if (inserts) return table.FindOrInsert(range, rows);
                          TFSWITCH_ASSIGN_OR_RETURN(const int64_t found,
                                                    table.Find(range, rows));
                          num_found += found;
                          return absl::OkStatus();
                        });
  };
  if (log_ == nullptr || !insert_missing) {
    TFSWITCH_RETURN_IF_ERROR(run(insert_missing));
  } else {
    // Most pulls find all their rows, and need no record.
    TFSWITCH_RETURN_IF_ERROR(run(false));
    if (num_found < static_cast<int64_t>(keys.size()) &&
        table.config().admission.is_always()) {
      const WriteGate::Pass pass(gate());
      TFSWITCH_RETURN_IF_ERROR(CheckPresent(table));
      PullRequest pull;
      pull.table = table.config().name;
      pull.table_incarnation = table.incarnation();
      pull.keys = keys;
      pull.day = table.last_day();
      std::string bytes(PullRequestBytes(pull), '\0');
      WritePullRequest(pull, bytes.data());
      TFSWITCH_RETURN_IF_ERROR(Log(RecordType::kPull, {bytes}).status());
      TFSWITCH_RETURN_IF_ERROR(run(true));
    }
  }
  const auto num_missing = static_cast<int64_t>(keys.size()) - num_found;
  if (insert_missing || table.config().layout.empty() || num_missing == 0) {
    return absl::OkStatus();
  }
  // Zeros would look like values of the model's variables.
  return absl::FailedPreconditionError(absl::StrCat(
      "dense table '", table.config().name, "'", ShardPrefix(options_),
      " has no values for ", num_missing, " of ", keys.size(),
      " blocks: it has not been initialised, or the server was started again. "
      "Restore a checkpoint, or initialise it"));
}

absl::StatusOr<WriteResult> Shard::Push(EmbeddingTable& table,
                                        const PushRequest& push,
                                        const LentThreads* threads) {
  TFSWITCH_RETURN_IF_ERROR(CheckPush(push, table.dim()));
  PreparedPush prepared;
  TFSWITCH_RETURN_IF_ERROR(Prepare(table, push, &prepared));
  return ApplyPush(table, push, prepared.batch, threads);
}

absl::Status Shard::PushMany(absl::Span<const TablePush> pushes,
                             absl::Span<WriteResult> results,
                             const LentThreads* threads) {
  TFSWITCH_RETURN_IF_ERROR(RunEach(threads, pushes.size(), [&](size_t i) {
    return CheckPush(*pushes[i].push, pushes[i].table->dim());
  }));
  return PushChecked(pushes, results, threads);
}

absl::Status Shard::PushChecked(absl::Span<const TablePush> pushes,
                                absl::Span<WriteResult> results,
                                const LentThreads* threads) {
  std::vector<PreparedPush> prepared(pushes.size());
  TFSWITCH_RETURN_IF_ERROR(RunEach(threads, pushes.size(), [&](size_t i) {
    return Prepare(*pushes[i].table, *pushes[i].push, &prepared[i]);
  }));
  std::map<const EmbeddingTable*, std::vector<size_t>> places;
  for (size_t i = 0; i < pushes.size(); ++i) {
    places[pushes[i].table.get()].push_back(i);
  }
  std::vector<const std::vector<size_t>*> by_table;
  by_table.reserve(places.size());
  for (const auto& [table, of_table] : places) by_table.push_back(&of_table);
  std::vector<absl::Status> statuses(pushes.size());
  RunRanges(threads, by_table.size(), 1, [&](size_t begin, size_t end) {
    for (size_t t = begin; t < end; ++t) {
      for (const size_t i : *by_table[t]) {
        absl::StatusOr<WriteResult> result = ApplyPush(
            *pushes[i].table, *pushes[i].push, prepared[i].batch, threads);
        statuses[i] = result.status();
        if (result.ok()) results[i] = *result;
      }
    }
  });
  absl::Status first;
  for (const absl::Status& status : statuses) first.Update(status);
  return first;
}

absl::Status Shard::Prepare(const EmbeddingTable& table,
                            const PushRequest& push,
                            PreparedPush* prepared) const {
  const std::string& name = table.config().name;
  const int dim = table.dim();
  if (table.config().optimizer.is_open) {
    return absl::FailedPreconditionError(
        absl::StrCat("table '", name, "'", ShardPrefix(options_),
                     " has no optimizer yet. Make it with one before the first "
                     "push"));
  }
  // The table may have been replaced by one of another dim since the client
  // checked this.
  TFSWITCH_RETURN_IF_ERROR(CheckSize(name, "gradient", push.keys.size(), dim,
                                     push.gradients.size()));
  TFSWITCH_RETURN_IF_ERROR(CheckDay(name, push.day));
  TFSWITCH_RETURN_IF_ERROR(CheckOwnership(table, push.keys));

  GradientBatch& batch = prepared->batch;
  batch = push;
  std::vector<Key>& unique = prepared->unique;
  std::vector<float>& sums = prepared->sums;
  const size_t num_keys = push.keys.size();
  if (!push.keys_are_unique && num_keys > 1) {
    if (num_keys > size_t{INT32_MAX}) {
      return absl::InvalidArgumentError(
          absl::StrCat("table '", name, "': a push of ", num_keys,
                       " keys is too large; split the batch"));
    }
    unique.resize(num_keys);
    std::vector<int32_t> inverse(num_keys);
    unique.resize(ThreadUniqueKeys().Run(push.keys, absl::MakeSpan(unique),
                                         absl::MakeSpan(inverse)));
    if (unique.size() < num_keys) {
      sums.resize(unique.size() * dim);
      SumByInverse(inverse, dim, push.gradients, absl::MakeSpan(sums));
      prepared->summed =
          OwnedObservations(inverse, unique.size(), push.observations,
                            table.config().NeedsCounts());
      batch.keys = unique;
      batch.gradients = sums;
      batch.observations = prepared->summed.view();
      // The sum of finite numbers may be infinite.
      TFSWITCH_RETURN_IF_ERROR(
          CheckObservations(name, batch.keys, batch.observations));
      TFSWITCH_RETURN_IF_ERROR(
          CheckFinite(name, "gradient", batch.keys, batch.gradients));
    }
  }
  if (table.config().consistency.kind == ConsistencyKind::kBsp &&
      push.step.group.empty()) {
    return absl::FailedPreconditionError(absl::StrCat(
        "table '", name, "' has consistency ",
        table.config().consistency.ToString(),
        ", so it is trained by a group of workers, and this push is of none. "
        "Join one first, with tfswitch.train.Worker"));
  }
  return absl::OkStatus();
}

absl::StatusOr<WriteResult> Shard::ApplyPush(EmbeddingTable& table,
                                             const PushRequest& push,
                                             const GradientBatch& batch,
                                             const LentThreads* threads) {
  const bool is_staged =
      table.config().consistency.kind == ConsistencyKind::kBsp;
  WriteResult result;
  const bool protected_push = push.id.client_id != 0;
  if (protected_push) {
    const absl::StatusOr<WriteLedger::Verdict> verdict =
        ledger_.Begin(push.id, &result.num_rows);
    if (!verdict.ok()) {
      return absl::Status(verdict.status().code(),
                          absl::StrCat("table '", table.config().name,
                                       "': ", verdict.status().message()));
    }
    if (*verdict == WriteLedger::Verdict::kDuplicate) {
      result.duplicate = true;
      return result;
    }
  }
  const WriteGate::Pass pass(gate());
  absl::StatusOr<uint64_t> number;
  absl::Status applied;
  // The ledger must be told the result, also after an exception.
  try {
    const absl::Status present = CheckPresent(table);
    number = present.ok() ? LogPush(push) : present;
    GradientBatch numbered = batch;
    numbered.number = number.value_or(0);
    if (!number.ok()) {
      applied = number.status();
    } else if (is_staged) {
      applied =
          stage_.Add(push.step, table.config().name, StagedPush(numbered));
    } else {
      const absl::StatusOr<int64_t> updated = Apply(table, numbered, threads);
      applied = updated.status();
      result.num_rows = updated.value_or(0);
    }
  } catch (const std::bad_alloc&) {
    applied = absl::ResourceExhaustedError(absl::StrCat(
        "table '", table.config().name, "': no memory for a push of ",
        push.keys.size(), " keys", is_staged ? " until its round closes" : ""));
  }
  if (protected_push) {
    // Counts as applied even if memory ran out: present rows have taken their
    // step.
    ledger_.End(push.id,
                /*applied=*/number.ok() && (!is_staged || applied.ok()),
                result.num_rows);
  }
  TFSWITCH_RETURN_IF_ERROR(applied);
  CountWrite();
  return result;
}

absl::StatusOr<int64_t> Shard::Apply(EmbeddingTable& table,
                                     const GradientBatch& batch,
                                     const LentThreads* threads) const {
  const size_t dim = static_cast<size_t>(table.dim());
  std::atomic<int64_t> updated_rows{0};
  TFSWITCH_RETURN_IF_ERROR(
      table.TakeStep(batch.learning_rate, [&](const StepHistory* history) {
        return RunKeyRanges(
            threads, batch.keys.size(), dim,
            [&](size_t begin, size_t size) -> absl::Status {
              GradientBatch part = batch;
              part.history = history;
              part.keys = batch.keys.subspan(begin, size);
              part.gradients = batch.gradients.subspan(begin * dim, size * dim);
              part.observations = batch.observations.subspan(begin, size);
              TFSWITCH_ASSIGN_OR_RETURN(const int64_t updated,
                                        table.ApplyGradients(part));
              updated_rows += updated;
              return absl::OkStatus();
            });
      }));
  return updated_rows.load();
}

absl::StatusOr<int64_t> Shard::CommitRound(const std::string& group,
                                           const Round& round,
                                           const std::vector<TableRef>& staged,
                                           const LentThreads* threads,
                                           const Interrupt& interrupt) {
  for (const TableRef& table : staged) {
    const absl::Status found = FindTable(table).status();
    if (absl::IsDataLoss(found)) return found;
  }
  if (round.number() != WorkerGroup::kNoRound &&
      !stage_.HasCommitted(group, round)) {
    TFSWITCH_RETURN_IF_ERROR(round_hold_.Wait(interrupt));
  }
  return CommitHeldRound(group, round, threads);
}

absl::StatusOr<int64_t> Shard::CommitHeldRound(const std::string& group,
                                               const Round& round,
                                               const LentThreads* threads) {
  v1::CommitRoundRequest request;
  if (log_ != nullptr) {
    request.set_group(group);
    *request.mutable_round() = round;
  }
  const WriteGate::Pass pass(gate());
  TFSWITCH_ASSIGN_OR_RETURN(const uint64_t record,
                            Log(RecordType::kCommitRound, request));
  // Each worker commits the round, with its own record. The round's number is
  // the same in all of them.
  const uint64_t number =
      record == 0 ? 0 : static_cast<uint64_t>(round.number()) + 1;
  return stage_.Commit(
      group, round,
      [&](const std::string& table, const std::vector<WeightedPush>& pushes,
          double total_weight) {
        return ApplyRound(table, pushes, total_weight, number, threads);
      });
}

absl::Status Shard::ApplyRound(const std::string& name,
                               const std::vector<WeightedPush>& pushes,
                               double total_weight, uint64_t number,
                               const LentThreads* threads) {
  TFSWITCH_ASSIGN_OR_RETURN(const std::shared_ptr<EmbeddingTable> table,
                            FindTable(name));
  const bool is_mean =
      table->config().consistency.reduction == Reduction::kMean;
  // A round without samples has no mean.
  if (is_mean && total_weight == 0.0) return absl::OkStatus();
  const auto scale_of = [&](const WeightedPush& each) {
    return is_mean ? static_cast<float>(each.weight / total_weight) : 1.0f;
  };
  const size_t dim = static_cast<size_t>(table->dim());
  // Workers should have the same learning rate. If not, the first one counts.
  const StagedPush& first = *pushes[0].push;
  const bool have_same_keys =
      std::all_of(pushes.begin(), pushes.end(), [&](const WeightedPush& each) {
        return each.push->keys == first.keys &&
               each.push->gradients.size() == each.push->keys.size() * dim;
      });
  GradientBatch batch;
  static_cast<StepSettings&>(batch) = first;
  for (const WeightedPush& each : pushes) {
    const StagedPush& push = *each.push;
    batch.insert_missing = batch.insert_missing || push.insert_missing;
    batch.JoinRound(push);
    batch.day = std::max(batch.day, push.day);
  }
  std::vector<Key> keys;
  std::vector<float> sums;
  OwnedObservations summed;
  // Every push has all blocks of a dense table, so there is nothing to count.
  const bool needs_counts =
      table->config().NeedsCounts() && table->config().layout.empty();
  if (have_same_keys && !needs_counts) {  // Always so for a dense table.
    keys.assign(first.keys.begin(), first.keys.end());
    sums.assign(keys.size() * dim, 0.0f);
    for (const WeightedPush& each : pushes) {
      AddScaled(each.push->gradients, scale_of(each), absl::MakeSpan(sums));
    }
  } else {
    std::vector<Key> all;
    std::vector<float> scaled;
    OwnedObservations observations;
    for (const WeightedPush& each : pushes) {
      const StagedPush& push = *each.push;
      // The table may have been replaced by one of another shape meanwhile.
      TFSWITCH_RETURN_IF_ERROR(CheckSize(name, "gradient", push.keys.size(),
                                         table->dim(), push.gradients.size()));
      all.insert(all.end(), push.keys.begin(), push.keys.end());
      const size_t begin = scaled.size();
      scaled.resize(begin + push.gradients.size(), 0.0f);
      AddScaled(push.gradients, scale_of(each),
                absl::MakeSpan(scaled).subspan(begin));
      observations.Append(push.observations, push.keys.size());
    }
    if (all.size() > size_t{INT32_MAX}) {
      return absl::InvalidArgumentError(
          absl::StrCat("table '", name, "': a round of ", all.size(),
                       " keys is too large; split the batches"));
    }
    keys.resize(all.size());
    std::vector<int32_t> inverse(all.size());
    keys.resize(ThreadUniqueKeys().Run(all, absl::MakeSpan(keys),
                                       absl::MakeSpan(inverse)));
    sums.resize(keys.size() * dim);
    SumByInverse(inverse, static_cast<int>(dim), scaled, absl::MakeSpan(sums));
    summed = OwnedObservations(inverse, keys.size(), observations.view(),
                               needs_counts);
  }
  TFSWITCH_RETURN_IF_ERROR(
      CheckFinite(name, "the round's gradient", keys, sums));
  batch.keys = keys;
  batch.gradients = sums;
  batch.observations = summed.view();
  TFSWITCH_RETURN_IF_ERROR(CheckObservations(name, keys, batch.observations));
  batch.number = number;
  return Apply(*table, batch, threads).status();
}

absl::StatusOr<int64_t> Shard::Assign(EmbeddingTable& table,
                                      absl::Span<const Key> keys,
                                      absl::Span<const float> embeddings,
                                      absl::Span<const float> slots,
                                      bool only_missing) const {
  TFSWITCH_RETURN_IF_ERROR(CheckSize(table.config().name, "embedding",
                                     keys.size(), table.dim(),
                                     embeddings.size()));
  if (!slots.empty()) {
    TFSWITCH_RETURN_IF_ERROR(CheckSize(table.config().name, "slot", keys.size(),
                                       table.slot_floats(), slots.size()));
  }
  TFSWITCH_RETURN_IF_ERROR(CheckOwnership(table, keys));
  TFSWITCH_RETURN_IF_ERROR(
      CheckFinite(table.config().name, "embedding", keys, embeddings));
  TFSWITCH_RETURN_IF_ERROR(
      CheckFinite(table.config().name, "slot", keys, slots));
  return table.AssignRows(
      {keys, embeddings, slots},
      only_missing ? AssignMode::kNowIfMissing : AssignMode::kNow);
}

absl::StatusOr<WriteResult> Shard::AssignOnce(const AssignRequest& request) {
  TFSWITCH_ASSIGN_OR_RETURN(
      const std::shared_ptr<EmbeddingTable> table,
      FindTable({request.table, request.table_incarnation}));
  return WriteOnce(
      request.id,
      [&]() -> absl::StatusOr<uint64_t> {
        TFSWITCH_RETURN_IF_ERROR(CheckPresent(*table));
        return LogAssign(request);
      },
      [&]() -> absl::StatusOr<int64_t> {
        TFSWITCH_RETURN_IF_ERROR(NoteDay(*table, request.day));
        return Assign(*table, request.keys, request.embeddings, request.slots,
                      request.only_missing);
      });
}

absl::StatusOr<int64_t> Shard::Erase(EmbeddingTable& table,
                                     absl::Span<const Key> keys) const {
  TFSWITCH_RETURN_IF_ERROR(CheckOwnership(table, keys));
  return table.Erase(keys);
}

absl::StatusOr<ShrinkReport> Shard::Shrink(
    EmbeddingTable& table, const std::optional<EvictionConfig>& rules,
    float day, bool dry_run) const {
  const TableConfig& config = table.config();
  TFSWITCH_RETURN_IF_ERROR(CheckDay(config.name, day));
  if (!config.layout.empty()) {
    return absl::FailedPreconditionError(
        absl::StrCat("dense table '", config.name,
                     "' holds a model's variables; nothing of it is evicted"));
  }
  EvictionConfig own_rules = rules.value_or(config.eviction);
  if (!own_rules.has_rules()) {
    return absl::FailedPreconditionError(
        absl::StrCat("table '", config.name,
                     "' has no eviction rules; pass some with the call, or "
                     "make the table with `eviction`"));
  }
  // The rules compare all rows. A replay must find the same rows, so no other
  // write may run meanwhile.
  const WriteGate::Closed closed(dry_run ? nullptr : gate());
  if (!dry_run) TFSWITCH_RETURN_IF_ERROR(CheckPresent(table));
  if (!dry_run && log_ != nullptr) {
    v1::ShrinkRequest request;
    request.set_table(config.name);
    request.set_table_incarnation(table.incarnation());
    *request.mutable_rules() = ToProto(own_rules);
    if (day >= 0.0f) request.set_day(day);
    TFSWITCH_RETURN_IF_ERROR(Log(RecordType::kShrink, request).status());
  }
  if (own_rules.max_rows.has_value()) {
    const uint32_t num_virtual = config.num_virtual_shards;
    const uint64_t owned =
        FirstVirtualShardOf(options_.shard_index + 1, num_virtual,
                            options_.num_shards) -
        FirstVirtualShardOf(options_.shard_index, num_virtual,
                            options_.num_shards);
    // Rounds up. The product may not fit into 64 bits.
    own_rules.max_rows = static_cast<uint64_t>(
        (static_cast<unsigned __int128>(*own_rules.max_rows) * owned +
         num_virtual - 1) /
        num_virtual);
  }
  const absl::Time begin = SteadyNow();
  TFSWITCH_ASSIGN_OR_RETURN(const ShrinkReport report,
                            table.Shrink(own_rules, day, dry_run));
  if (dry_run || report.evicted_rows == 0) return report;
  std::vector<std::string> rules_used;
  for (const auto& [rule, rows] :
       {std::pair<const char*, int64_t>{"ttl", report.by_ttl},
        {"show_click_score", report.by_show_click_score},
        {"l2_norm", report.by_l2_norm},
        {"max_rows", report.by_max_rows}}) {
    if (rows > 0) rules_used.push_back(absl::StrCat(rule, ":", rows));
  }
  Tell("evicted", {{"table", config.name},
                   {"rows", report.evicted_rows},
                   {"rules", absl::StrJoin(rules_used, ",")},
                   {"rows_left", report.remaining_rows},
                   {"seconds", SecondsSince(begin)}});
  return report;
}

absl::StatusOr<ChangeCursor> Shard::ExportChanges(
    const std::shared_ptr<EmbeddingTable>& table, const ChangeFilter& filter,
    const std::string& export_id, int64_t max_keys,
    const std::function<absl::Status(const ChangeChunk&)>& visit) {
  const std::string& name = table->config().name;
  TFSWITCH_RETURN_IF_ERROR(CheckDay(name, filter.day));
  const ScoreRule rule = filter.rule.value_or(ScoreRule());
  for (const auto& [knob, value] :
       {std::pair<const char*, float>{"base_threshold", rule.base_threshold},
        {"delta_threshold", rule.delta_threshold},
        {"delta_keep_days", rule.delta_keep_days}}) {
    if (!(value >= 0.0f) || std::isinf(value)) {
      return absl::InvalidArgumentError(absl::StrCat(
          "table '", name, "': ", knob,
          ": expected a finite number of at least 0, got ", value));
    }
  }
  PendingExports::Export exported;
  exported.id = export_id;
  exported.table = table;
  const absl::Time begin = SteadyNow();
  size_t num_rows = 0;
  size_t num_removed = 0;
  auto cursor = table->ForEachChange(
      filter, max_keys, [&](const ChangeChunk& chunk) -> absl::Status {
        num_rows += chunk.keys.size();
        num_removed += chunk.removed.size();
        if (!filter.rule.has_value()) return visit(chunk);
        exported.keys.insert(exported.keys.end(), chunk.keys.begin(),
                             chunk.keys.end());
        exported.scores.insert(exported.scores.end(),
                               chunk.delta_scores.begin(),
                               chunk.delta_scores.end());
        return visit(chunk);
      });
  if (!cursor.ok()) return cursor;
  if (filter.rule.has_value()) pending_exports_.Keep(std::move(exported));
  if (num_rows + num_removed > 0) {
    Tell("exported", {{"table", name},
                      {"kind", filter.since.log_id == 0 ? "base" : "delta"},
                      {"rows", num_rows},
                      {"removed", num_removed},
                      {"seconds", SecondsSince(begin)}});
  }
  return cursor;
}

void Shard::ShrinkOnTime(const std::string& name) const {
  if (is_recovering_) return;
  const auto table = FindTable(name);
  if (!table.ok()) return;  // The table was just dropped.
  absl::Status status;
  try {
    status =
        Shrink(**table, std::nullopt, kServersDay, /*dry_run=*/false).status();
  } catch (const std::bad_alloc&) {
    status = absl::ResourceExhaustedError(
        absl::StrCat("table '", name, "': no memory to shrink it"));
  }
  // No caller waits for the error. The next time may succeed.
  if (!status.ok()) {
    LogMessage(LogLevel::kError, {"not_evicted"}, status.message());
  }
}

absl::Status Shard::ReadUsage(const EmbeddingTable& table,
                              absl::Span<const Key> keys, float day,
                              absl::Span<UsageOfRow> usage,
                              absl::Span<KeyState> states) const {
  TFSWITCH_RETURN_IF_ERROR(CheckDay(table.config().name, day));
  TFSWITCH_RETURN_IF_ERROR(CheckOwnership(table, keys));
  table.ReadUsage(keys, day, usage, states);
  return absl::OkStatus();
}

absl::StatusOr<std::string> Shard::ResolvePath(const std::string& path) const {
  if (!options_.checkpoint_root.has_value()) return path;
  if (absl::StartsWith(path, "/") && !options_.data_folder.empty()) {
    absl::StatusOr<std::string> resolved =
        ResolveBelow(options_.data_folder, path);
    for (const std::string& own : {options_.own_folder, options_.log_folder}) {
      if (!resolved.ok() || !ResolveBelow(own, *resolved).ok()) continue;
      return absl::PermissionDeniedError(absl::StrCat(
          "path '", path, "' is in '", own,
          "', where the server keeps its own state; use a path below '",
          *options_.checkpoint_root, "'"));
    }
    if (resolved.ok()) return resolved;
  }
  if (options_.checkpoint_root->empty()) {
    return absl::FailedPreconditionError(absl::StrCat(
        "shard ", options_.shard_index,
        " has no folder for checkpoints; start it with --checkpoint_root "
        "FOLDER"));
  }
  absl::StatusOr<std::string> resolved =
      ResolveBelow(*options_.checkpoint_root, path);
  if (absl::IsPermissionDenied(resolved.status())) {
    return absl::PermissionDeniedError(
        absl::StrCat(resolved.status().message(),
                     "; use a path below it, or start the server with another "
                     "--checkpoint_root"));
  }
  return resolved;
}

Shard::Save& Shard::SaveOf(const std::string& save_id) {
  for (Save& save : saves_) {
    if (save.save_id == save_id) return save;
  }
  if (saves_.size() == kMaxSaves) saves_.pop_front();
  saves_.emplace_back();
  saves_.back().save_id = save_id;
  return saves_.back();
}

absl::StatusOr<std::vector<std::shared_ptr<EmbeddingTable>>>
Shard::TablesToSave(const v1::SaveShardRequest& request) {
  std::vector<std::shared_ptr<EmbeddingTable>> tables;
  if (request.tables().empty()) tables = Tables();
  for (int i = 0; i < request.tables_size(); ++i) {
    const bool has_incarnation = i < request.table_incarnations_size();
    TFSWITCH_ASSIGN_OR_RETURN(
        auto table,
        FindTable({request.tables(i),
                   has_incarnation ? request.table_incarnations(i) : 0}));
    if (std::find(tables.begin(), tables.end(), table) != tables.end()) {
      return absl::InvalidArgumentError(absl::StrCat(
          "save '", absl::CHexEscape(request.save_id()), "' names table '",
          table->config().name, "' twice; name each table once"));
    }
    tables.push_back(std::move(table));
  }
  if (request.all_tables() || request.tables().empty()) {
    MutexLock lock(&mutex_);
    WarnOfReleased("it is not saved");
  }
  return tables;
}

absl::StatusOr<v1::CheckpointPart> Shard::SaveShard(
    const v1::SaveShardRequest& request, const Interrupt& interrupt,
    Progress* progress) {
  TFSWITCH_RETURN_IF_ERROR(CheckId("save_id", request.save_id()));
  TFSWITCH_ASSIGN_OR_RETURN(const std::string path,
                            ResolvePath(request.path()));
  EndExpiredSaves(interrupt);
  TFSWITCH_ASSIGN_OR_RETURN(const auto to_save, TablesToSave(request));
  const bool all_tables = request.all_tables() || request.tables().empty();
  const auto given_up = [&request] {
    return absl::AbortedError(
        absl::StrCat("save '", request.save_id(), "' was given up"));
  };
  {
    MutexLock lock(&mutex_);
    const Save& save = SaveOf(request.save_id());
    if (save.is_given_up) return given_up();
    // The call is repeated because its first answer was lost.
    if (save.part.has_value() && save.folder == path) return *save.part;
  }
  std::optional<Progress> own_progress;
  if (progress == nullptr) {
    progress = &own_progress.emplace(
        absl::StrCat("saving to '", absl::CHexEscape(request.path()), "'"),
        std::accumulate(to_save.begin(), to_save.end(), int64_t{0},
                        [](int64_t sum, const auto& table) {
                          return sum + table->size();
                        }));
  }
  {
    MutexLock lock(&mutex_);
    SaveOf(request.save_id()).counts = progress->counts();
  }
  const auto check = [&]() -> absl::Status {
    {
      MutexLock lock(&mutex_);
      if (SaveOf(request.save_id()).is_given_up) return given_up();
    }
    return interrupt();
  };
  const absl::Time begin = SteadyNow();
  std::atomic<bool> stops{false};
  checkpoint::PartWriter writer(path, request.save_id(), options_.shard_index,
                                options_.num_shards, all_tables,
                                [&] { return stops ? given_up() : Never(); });
  TFSWITCH_RETURN_IF_ERROR(LockSaves(request.save_id(), check));
  const absl::Cleanup unlock = [this] { UnlockSaves(); };
  // No round is applied while `kept` has a value.
  std::optional<RoundHold::Kept> kept;
  if (request.has_cut()) {
    kept.emplace(&round_hold_, request.save_id());
    if (!kept->is_held()) {
      MutexLock lock(&mutex_);
      const Save& save = SaveOf(request.save_id());
      // The call is a repetition, and the first one has ended meanwhile.
      if (save.part.has_value() && save.folder == path) return *save.part;
      return NotHeld(request.save_id());
    }
    TFSWITCH_RETURN_IF_ERROR(ApplyRoundsUpTo(request.cut(), check));
  }
  std::optional<WriteGate::Closed> closed(gate());
  for (const auto& table : to_save) {
    const auto present = FindTable(table->config().name);
    if (present.ok() && *present == table) continue;
    return absl::AbortedError(
        absl::StrCat("table '", table->config().name,
                     "' was dropped or restored while the save waited for "
                     "another one. Save again"));
  }
  if (all_tables && options_.shard_index == 0) {
    const std::optional<v1::SavedWorkQueues> work_queues =
        kept.has_value() ? kept->work_queues() : coordinator_->SaveWorkQueues();
    // The hold has ended, and another one has begun.
    if (!work_queues.has_value()) return NotHeld(request.save_id());
    writer.SetWorkQueues(*work_queues);
  }
  TFSWITCH_ASSIGN_OR_RETURN(const Snapshots snapshots,
                            TakeSnapshots(to_save, /*since=*/{}));
  closed.reset();
  kept.reset();
  const auto write = [&]() -> absl::Status {
    for (const auto& snapshot : snapshots) {
      TFSWITCH_RETURN_IF_ERROR(writer.AddTable(
          *snapshot, [&](int64_t rows) { progress->Add(rows); }));
    }
    return absl::OkStatus();
  };
  const absl::Status written =
      WriteSnapshots(snapshots, check, write, /*may_close_gate=*/true, &stops);
  NoteDisk(written, path, &is_save_disk_full_);
  TFSWITCH_RETURN_IF_ERROR(written);
  TFSWITCH_RETURN_IF_ERROR(interrupt());
  TellOfSave(snapshots, path, writer.files(), begin);
  MutexLock lock(&mutex_);
  Save& save = SaveOf(request.save_id());
  // If this returns before Finish(), the writer removes its files.
  if (save.is_given_up) return given_up();
  if (save.part.has_value() && save.folder == path) return *save.part;
  save.folder = path;
  save.files = writer.files();
  save.part = writer.Finish();
  save.expiry = SteadyNow() + options_.save_expiry;
  return *save.part;
}

absl::StatusOr<int64_t> Shard::CommitCheckpoint(
    const v1::CommitCheckpointRequest& request, const Interrupt& interrupt) {
  TFSWITCH_ASSIGN_OR_RETURN(const std::string path,
                            ResolvePath(request.path()));
  checkpoint::CommitOptions options;
  if (request.keep() != 0) {
    options.keep =
        static_cast<int>(std::min<uint32_t>(request.keep(), INT32_MAX));
  }
  options.dropped_tables = {request.dropped_tables().begin(),
                            request.dropped_tables().end()};
  options.interrupt = interrupt;
  options.own_part.emplace();
  {
    MutexLock lock(&mutex_);
    for (const Save& save : saves_) {
      if (save.save_id == request.save_id() && save.folder == path &&
          !save.is_given_up) {
        options.own_part = save.part.value_or(v1::CheckpointPart());
      }
    }
  }
  absl::StatusOr<int64_t> number = checkpoint::Commit(
      path, request.save_id(),
      {request.manifest_parts().begin(), request.manifest_parts().end()},
      options);
  if (number.ok()) {
    MutexLock lock(&mutex_);
    SaveOf(request.save_id()).files.clear();  // They are published.
    Tell("save_published", {{"path", path}, {"number", *number}});
  }
  return number;
}

absl::Status Shard::AbortSave(const std::string& path,
                              const std::string& save_id,
                              const Interrupt& interrupt) {
  TFSWITCH_RETURN_IF_ERROR(CheckId("save_id", save_id));
  round_hold_.End(save_id);
  TFSWITCH_RETURN_IF_ERROR(ResolvePath(path).status());
  return EndSave(save_id, interrupt);
}

absl::Status Shard::EndSave(const std::string& save_id,
                            const Interrupt& interrupt) {
  std::string folder;
  std::vector<std::string> files;
  {
    MutexLock lock(&mutex_);
    Save& save = SaveOf(save_id);
    save.is_given_up = true;
    // The folder of the save, even if the caller names another one now.
    folder = save.folder;
    files = save.files;
  }
  TFSWITCH_RETURN_IF_ERROR(
      checkpoint::RemoveUnpublished(folder, files, interrupt));
  MutexLock lock(&mutex_);
  SaveOf(save_id).files.clear();
  return absl::OkStatus();
}

void Shard::EndExpiredSaves(const Interrupt& interrupt) {
  std::vector<std::string> expired;
  {
    MutexLock lock(&mutex_);
    for (const Save& save : saves_) {
      if (!save.files.empty() && save.expiry <= SteadyNow()) {
        expired.push_back(save.save_id);
      }
    }
  }
  for (const std::string& save_id : expired) {
    const absl::Status status = EndSave(save_id, interrupt);
    if (status.ok()) continue;
    // The present save continues. A later one tries this again.
    {
      MutexLock lock(&mutex_);
      SaveOf(save_id).expiry = SteadyNow() + options_.save_expiry;
    }
    LogMessage(
        LogLevel::kWarning, {"files_left"},
        absl::StrCat("files of save '", save_id, "' stay: ", status.message()));
  }
}

void Shard::AddProgressTo(const std::string& id,
                          v1::GetProgressResponse* response) const {
  const auto add = [&](const std::string& other, const auto& counts) {
    if (counts == nullptr || !absl::StartsWith(other, id)) return;
    response->set_num_rows(response->num_rows() + counts->done);
    response->set_total_rows(response->total_rows() + counts->total);
  };
  MutexLock lock(&mutex_);
  for (const Save& save : saves_) add(save.save_id, save.counts);
  for (const auto& [restore_id, restore] : restores_) {
    add(restore_id, restore->counts);
  }
}

absl::StatusOr<v1::StageRestoreResponse> Shard::StageRestore(
    const v1::StageRestoreRequest& request, const Interrupt& interrupt,
    Progress* progress) {
  TFSWITCH_RETURN_IF_ERROR(CheckId("restore_id", request.restore_id()));
  TFSWITCH_RETURN_IF_ERROR(CheckNames(request));
  const auto restore = std::make_shared<Restore>();
  const auto given_up = [&] {
    return absl::AbortedError(absl::StrCat(
        "restore '", request.restore_id(), "' was given up",
        ShardPrefix(options_), ", or another one has begun since"));
  };
  std::map<std::string, std::shared_ptr<Restore>> left_behind;
  {
    MutexLock lock(&mutex_);
    for (;;) {
      const auto it = restores_.find(request.restore_id());
      if (std::find(ended_restores_.begin(), ended_restores_.end(),
                    request.restore_id()) != ended_restores_.end()) {
        return given_up();
      }
      if (it == restores_.end()) break;
      // The call is a repetition: an id has one restore.
      const std::shared_ptr<Restore> first = it->second;
      if (!first->is_loading) {
        if (!first->result.ok()) break;
        restore_timer_.Set(request.restore_id(),
                           options_.staged_restore_expiry);
        return first->result;
      }
      TFSWITCH_RETURN_IF_ERROR(interrupt());
      restore_loaded_.WaitFor(&mutex_, absl::Milliseconds(100));
    }
    for (const auto& [id, other] : restores_) {
      EndRestore(id);
      other->is_given_up = true;
      restore_timer_.Set(id, absl::ZeroDuration());
    }
    left_behind.swap(restores_);  // Freed outside the lock.
    restores_.emplace(request.restore_id(), restore);
  }
  left_behind.clear();
  std::optional<Progress> own_progress;
  if (progress == nullptr) {
    progress = &own_progress.emplace(
        absl::StrCat("restoring from '", absl::CHexEscape(request.path()), "'"),
        /*total_rows=*/0);
  }
  {
    MutexLock lock(&mutex_);
    restore->counts = progress->counts();
  }
  const auto check = [&]() -> absl::Status {
    return restore->is_given_up ? given_up() : interrupt();
  };
  const absl::Time begin = SteadyNow();
  Loaded loaded;
  const auto load = [&]() -> absl::StatusOr<v1::StageRestoreResponse> {
    TFSWITCH_ASSIGN_OR_RETURN(const std::string path,
                              ResolvePath(request.path()));
    TFSWITCH_ASSIGN_OR_RETURN(
        const v1::CheckpointManifest manifest,
        checkpoint::ReadManifest(path, request.save(),
                                 static_cast<int>(std::min<uint32_t>(
                                     request.newer_than(), INT32_MAX))));
    return Load(path, manifest, request, check, &loaded, progress);
  };
  absl::StatusOr<v1::StageRestoreResponse> result = load();
  // Called before the lock is taken, because it may run Python.
  if (absl::Status end = check(); result.ok() && !end.ok()) result = end;
  MutexLock lock(&mutex_);
  if (restore->is_given_up && result.ok()) result = given_up();
  restore->is_loading = false;
  restore->result = result;
  if (result.ok()) {
    std::swap(restore->loaded, loaded);
    restore->seconds = SecondsSince(begin);
    restore_timer_.Set(request.restore_id(), options_.staged_restore_expiry);
  } else if (const auto it = restores_.find(request.restore_id());
             it != restores_.end() && it->second == restore) {
    restores_.erase(it);
  }
  restore_loaded_.NotifyAll();
  return result;
}

namespace {

// The tables to restore, by their new names. NotFound if the checkpoint lacks
// one.
absl::StatusOr<std::map<std::string, const v1::CheckpointTable*>>
TablesToRestore(const std::string& path, const v1::CheckpointManifest& manifest,
                const v1::StageRestoreRequest& request) {
  std::map<std::string, const v1::CheckpointTable*> tables;
  for (const auto& [name, saved] : manifest.tables()) {
    if (request.tables().empty()) tables.emplace(name, &saved);
  }
  for (const std::string& name : request.tables()) {
    const auto saved = manifest.tables().find(name);
    if (saved == manifest.tables().end()) {
      std::set<std::string> names;
      for (const auto& [other, table] : manifest.tables()) {
        names.insert(absl::StrCat("'", other, "'"));
      }
      return absl::NotFoundError(
          absl::StrCat("checkpoint '", path, "' has no table '", name,
                       "'; it has: ", absl::StrJoin(names, ", ")));
    }
    const auto new_name = request.new_names().find(name);
    const bool is_renamed = new_name != request.new_names().end();
    tables.emplace(is_renamed ? new_name->second : name, &saved->second);
  }
  return tables;
}

// The identity that a saved table gets under this name.
TableIdentity RestoredIdentity(const std::string& name,
                               const v1::CheckpointTable& saved,
                               const v1::StageRestoreRequest& request) {
  const auto& instances = request.shard_instances().empty()
                              ? saved.shard_instances()
                              : request.shard_instances();
  TableIdentity identity{saved.incarnation(),
                         {instances.begin(), instances.end()}};
  const auto given = request.table_incarnations().find(name);
  if (given != request.table_incarnations().end()) {
    identity.incarnation = given->second;
  } else if (identity.incarnation == 0 || name != saved.config().name()) {
    identity.incarnation = request.new_incarnation();
  }
  return identity;
}

absl::Status WithCheckpoint(const std::string& path,
                            const absl::Status& status) {
  return absl::Status(status.code(), absl::StrCat("checkpoint '", path,
                                                  "': ", status.message()));
}

}  // namespace

// An existing table keeps its settings for the restored rows, if the rows fit
// them.
absl::StatusOr<TableConfig> Shard::RestoredConfig(
    const std::string& path, const std::string& name, const TableConfig& saved,
    const TableMap& loaded) const {
  TableConfig config = saved;
  config.name = name;
  if (name != saved.name) TFSWITCH_RETURN_IF_ERROR(config.ValidateNew());
  const auto present = FindTable(name);
  if (!present.ok()) {
    MutexLock lock(&mutex_);
    const absl::Status room = CheckRoom(config, loaded);
    if (!room.ok()) return WithCheckpoint(path, room);
    return config;
  }
  config = (*present)->config();
  if (config.optimizer.is_open) config.optimizer = saved.optimizer;
  if (config.layout == saved.layout) return config;
  return absl::InvalidArgumentError(absl::StrCat(
      "dense table '", saved.name, "' of checkpoint '", path,
      "' holds other variables: ", DescribeDifference(config, saved),
      "; restore it before another model is built, or under another name"));
}

absl::StatusOr<v1::StageRestoreResponse> Shard::Load(
    const std::string& path, const v1::CheckpointManifest& manifest,
    const v1::StageRestoreRequest& request, const Interrupt& interrupt,
    Loaded* loaded, Progress* progress) const {
  v1::StageRestoreResponse staged;
  staged.set_save(manifest.save());
  TFSWITCH_ASSIGN_OR_RETURN(const auto tables,
                            TablesToRestore(path, manifest, request));
  for (const auto& [name, saved] : tables) {
    const checkpoint::RowsToRead to_read = checkpoint::FindRowsToRead(
        *saved, options_.shard_index, options_.num_shards);
    progress->AddTotal(to_read.num_rows);
    loaded->bytes += to_read.bytes;
  }
  loaded->path = path;
  loaded->is_whole = request.tables().empty();
  if (request.tables().empty() && options_.shard_index == 0) {
    loaded->work_queues = manifest.work_queues();
    TFSWITCH_RETURN_IF_ERROR(
        WithCheckpoint(path, coordinator_->CheckRestore(loaded->work_queues)));
  }
  using checkpoint::LoadedState;
  static_assert(static_cast<int>(LoadedState::kResetIfDifferent) ==
                v1::StageRestoreRequest::RESET_IF_DIFFERENT);
  static_assert(static_cast<int>(LoadedState::kReset) ==
                v1::StageRestoreRequest::RESET);
  const auto state = static_cast<LoadedState>(request.state());
  for (const auto& [name, saved] : tables) {
    staged.add_tables(name);
    TFSWITCH_ASSIGN_OR_RETURN(
        const TableConfig config,
        RestoredConfig(path, name, FromProto(saved->config()), loaded->tables));
    TFSWITCH_ASSIGN_OR_RETURN(std::shared_ptr<EmbeddingTable> table,
                              EmbeddingTable::Create(config));
    TableIdentity identity = RestoredIdentity(name, *saved, request);
    if (identity.incarnation != 0) table->set_identity(std::move(identity));
    if (const auto present = FindTable(name); present.ok()) {
      table->NoteDay((*present)->last_day());
    }
    TFSWITCH_RETURN_IF_ERROR(checkpoint::LoadTable(
        path, *saved, options_.shard_index, options_.num_shards, interrupt,
        *table, progress, state));
    if (state != LoadedState::kSaved &&
        (state == LoadedState::kReset ||
         !checkpoint::HasStateOf(*saved, *table))) {
      staged.add_reset_tables(name);
    }
    staged.set_num_rows(staged.num_rows() + table->size());
    loaded->tables.emplace(name, std::move(table));
  }
  return staged;
}

void Shard::EndRestore(const std::string& restore_id) {
  if (ended_restores_.size() == kMaxSaves) ended_restores_.pop_front();
  ended_restores_.push_back(restore_id);
}

void Shard::DropStagedRestore(const std::string& restore_id) {
  std::shared_ptr<Restore> dropped;  // Freed outside the lock.
  MutexLock lock(&mutex_);
  restore_timer_.Set(restore_id, absl::ZeroDuration());
  const auto it = restores_.find(restore_id);
  if (it == restores_.end()) return;
  EndRestore(restore_id);
  dropped = std::move(it->second);
  restores_.erase(it);
}

void Shard::DropStagedPushes(const std::string& restore_id) {
  std::vector<std::string> names;
  {
    MutexLock lock(&mutex_);
    const auto it = restores_.find(restore_id);
    if (it == restores_.end()) return;
    for (const auto& [name, table] : it->second->loaded.tables) {
      names.push_back(name);
    }
  }
  // mutex_ is not held here, because applying a round takes it.
  for (const std::string& name : names) stage_.DropTable(name);
}

absl::Status Shard::CommitRestore(const std::string& restore_id, bool abort,
                                  const Interrupt& interrupt) {
  std::shared_ptr<Restore> restore;  // Freed outside the lock.
  if (abort) return TakeRestore(restore_id, abort, &restore).status();
  // Waits for a running save, and keeps other saves from beginning.
  TFSWITCH_RETURN_IF_ERROR(LockSaves(restore_id, interrupt));
  const absl::Cleanup unlock = [this] { UnlockSaves(); };
  saving_.AssertHeld();
  const WriteGate::Closed closed(gate());
  DropStagedPushes(restore_id);
  TFSWITCH_ASSIGN_OR_RETURN(const bool is_taken,
                            TakeRestore(restore_id, abort, &restore));
  if (log_ == nullptr) return absl::OkStatus();
  // No record has the restored rows, so they are saved before other writes. If
  // that has failed, a repetition of this call saves them.
  if (is_taken) {
    TFSWITCH_RETURN_IF_ERROR(log_->BeginBreak(
        static_cast<uint32_t>(RecordType::kRestore),
        absl::FailedPreconditionError(
            "rows that were restored have not been saved yet")));
  } else if (!log_->has_failed()) {
    return absl::OkStatus();
  }
  TFSWITCH_RETURN_IF_ERROR(
      SaveClosedState(options_.own_folder, Never, nullptr).status());
  log_->EndBreak();
  // A record after the restore marks that the restore is complete.
  return Log(RecordType::kRestoreSaved, {""}).status();
}

absl::Status Shard::CheckPresent(const EmbeddingTable& table) const {
  if (log_ == nullptr && !table.config().optimizer.is_open) {
    return absl::OkStatus();
  }
  const auto present = FindTable(table.config().name);
  if (present.ok() && present->get() == &table) return absl::OkStatus();
  return absl::UnavailableError(
      absl::StrCat("table '", table.config().name,
                   "' was dropped, restored or given its optimizer during the "
                   "call; nothing was applied. Try again"));
}

absl::StatusOr<bool> Shard::TakeRestore(const std::string& restore_id,
                                        bool abort,
                                        std::shared_ptr<Restore>* taken) {
  MutexLock lock(&mutex_);
  const auto it = restores_.find(restore_id);
  if (it == restores_.end() || (!abort && it->second->is_loading)) {
    // The call is repeated because its first answer was lost.
    if (abort || restore_id == last_restore_id_) return false;
    return absl::NotFoundError(absl::StrCat(
        "restore '", restore_id, "' is not staged", ShardPrefix(options_),
        "; another restore has begun since, its time was over, or the server "
        "was restarted. Restore again"));
  }
  *taken = std::move(it->second);
  restores_.erase(it);
  restore_timer_.Set(restore_id, absl::ZeroDuration());
  (*taken)->is_given_up = abort;
  EndRestore(restore_id);
  if (abort) return false;
  last_restore_id_ = restore_id;
  const Loaded& loaded = (*taken)->loaded;
  Tell("restored", {{"path", loaded.path},
                    {"tables", loaded.tables.size()},
                    {"rows", (*taken)->result->num_rows()},
                    {"bytes", loaded.bytes},
                    {"seconds", (*taken)->seconds}});
  InstallRestored(&(*taken)->loaded);
  return true;
}

void Shard::InstallRestored(Loaded* loaded) {
  for (auto& [name, table] : loaded->tables) {
    shrink_timer_.Set(name, absl::Seconds(table->config().eviction.every_secs));
    std::swap(tables_[name], table);
    released_rows_.erase(name);
  }
  coordinator_->RestoreWorkQueues(loaded->work_queues,
                                  /*voids_open_steps=*/loaded->is_whole);
}

}  // namespace tfswitch
