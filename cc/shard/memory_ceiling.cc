#include "cc/shard/memory_ceiling.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "cc/base/log_writer.h"

namespace tfswitch {
namespace {

// The distinct keys that have no row, sorted.
std::vector<Key> MissingOf(const EmbeddingTable& table,
                           absl::Span<const Key> keys) {
  std::vector<UsageOfRow> usage(keys.size());
  std::vector<KeyState> states(keys.size());
  table.ReadUsage(keys, kServersDay, absl::MakeSpan(usage),
                  absl::MakeSpan(states));
  std::vector<Key> missing;
  for (size_t i = 0; i < keys.size(); ++i) {
    if (states[i] != KeyState::kRow) missing.push_back(keys[i]);
  }
  std::sort(missing.begin(), missing.end());
  missing.erase(std::unique(missing.begin(), missing.end()), missing.end());
  return missing;
}

// The memory that the table needs, without what it has touched ahead.
int64_t NeededBytes(const TableStats& stats) {
  return stats.index_bytes + stats.row_bytes + stats.admission_bytes +
         stats.change_bytes;
}

}  // namespace

int64_t MemoryCeiling::UsedBytes() const {
  int64_t bytes = 0;
  for (const auto& table : tables_.All()) {
    const TableStats stats = table->stats();
    bytes += NeededBytes(stats) + stats.reserved_bytes;
  }
  return bytes;
}

bool MemoryCeiling::is_on(const EmbeddingTable& table) const {
  // A model's variables are always kept.
  return max_bytes_ != 0 && !journal_.is_recovering() &&
         table.config().layout.empty();
}

int64_t MemoryCeiling::Take(const EmbeddingTable& table, int64_t num_rows) {
  const auto row_bytes = static_cast<int64_t>(table.bytes_per_row());
  const int64_t wanted = num_rows * row_bytes;
  for (int64_t credit = credit_; credit >= wanted;) {
    if (credit_.compare_exchange_weak(credit, credit - wanted)) return num_rows;
  }
  MutexLock lock(&mutex_);
  const int64_t left = max_bytes_ - UsedBytes();
  // Memory that this table has touched ahead is for its own rows only.
  const int64_t own = table.stats().reserved_bytes;
  const int64_t taken =
      std::clamp<int64_t>((left + own) / row_bytes, 0, num_rows);
  // Memory may also grow without this function, so it is counted again soon.
  credit_ = std::clamp<int64_t>(left - taken * row_bytes, 0,
                                std::max<int64_t>(0, left / 8));
  return taken;
}

bool MemoryCeiling::HasRoom(const EmbeddingTable& table,
                            absl::Span<const Key> keys) {
  const auto num_keys = static_cast<int64_t>(keys.size());
  return !is_on(table) || Take(table, num_keys) == num_keys;
}

bool MemoryCeiling::HasRoomForMissing(const EmbeddingTable& table,
                                      absl::Span<const Key> keys) {
  return HasRoom(table, keys) || HasRoom(table, MissingOf(table, keys));
}

MemoryCeiling::Decision MemoryCeiling::Decide(EmbeddingTable& table,
                                              absl::Span<const Key> keys) {
  Decision decision{MissingOf(table, keys), {}};
  std::vector<Key>& missing = decision.admitted;
  if (missing.empty()) return decision;
  const auto end =
      missing.begin() + Take(table, static_cast<int64_t>(missing.size()));
  decision.refused.assign(end, missing.end());
  missing.erase(end, missing.end());
  if (decision.refused.empty()) return decision;
  table.counters().Add(TableCounter::refused_keys,
                       static_cast<int64_t>(decision.refused.size()));
  if (!has_told_.exchange(true)) {
    LogMessageInOrder(
        LogLevel::kWarning, {"max_memory"},
        absl::StrCat("the tables", options_.OnShard(),
                     " have reached max_memory=", max_bytes_.load(),
                     " bytes; new ids of table '", table.config().name,
                     "' and others get no rows, and read as ids without a row. "
                     "Raise it, add servers, or evict rows"));
  }
  return decision;
}

absl::Status MemoryCeiling::CheckRoom(const EmbeddingTable& table,
                                      absl::Span<const Key> keys) {
  if (HasRoomForMissing(table, keys)) return absl::OkStatus();
  return absl::ResourceExhaustedError(absl::StrCat(
      "table '", table.config().name, "'", options_.OnShard(),
      ": the new rows do not fit below max_memory=", max_bytes_.load(),
      " bytes. Raise it, add servers, or evict rows"));
}

absl::Status MemoryCeiling::CheckRestore(
    const TableCatalogue::TableMap& coming) const {
  if (max_bytes_ == 0 || journal_.is_recovering()) return absl::OkStatus();
  int64_t bytes = 0;
  for (const auto& [name, table] : coming) bytes += NeededBytes(table->stats());
  for (const auto& table : tables_.All()) {
    if (coming.count(table->config().name) == 0) {
      bytes += NeededBytes(table->stats());
    }
  }
  // A table that was full has an index of another size when it is restored.
  if (bytes <= max_bytes_ + max_bytes_ / 20) return absl::OkStatus();
  return absl::ResourceExhaustedError(
      absl::StrCat("with the saved tables", options_.OnShard(),
                   " there are at least ", bytes, " bytes, and max_memory is ",
                   max_bytes_.load(), ". Raise it, or add servers"));
}

void MemoryCeiling::ReserveCapacity(EmbeddingTable& table) const {
  const TableConfig& config = table.config();
  uint64_t num_rows = options_.ShareOf(config, config.capacity.num_rows);
  if (num_rows != 0 && max_bytes_ != 0) {
    const int64_t left = std::max<int64_t>(0, max_bytes_ - UsedBytes());
    num_rows =
        std::min(num_rows, static_cast<uint64_t>(left) / table.bytes_per_row());
  }
  table.Reserve(num_rows);
}

PartOfPush::PartOfPush(int dim, const PushRequest& push,
                       const GradientBatch& batch,
                       absl::Span<const Key> refused)
    : push_(push) {
  const auto width = static_cast<size_t>(dim);
  std::vector<int32_t> places;
  for (size_t i = 0; i < batch.keys.size(); ++i) {
    if (std::binary_search(refused.begin(), refused.end(), batch.keys[i])) {
      continue;
    }
    places.push_back(static_cast<int32_t>(i));
    keys_.push_back(batch.keys[i]);
    const auto gradient = batch.gradients.subspan(i * width, width);
    gradients_.insert(gradients_.end(), gradient.begin(), gradient.end());
  }
  observations_ = OwnedObservations(batch.observations, places);
  push_.keys = keys_;
  push_.gradients = gradients_;
  push_.observations = observations_.view();
  push_.keys_are_unique = true;
}

}  // namespace tfswitch
