#include "cc/shard/memory_ceiling.h"

#include <algorithm>
#include <unordered_set>

#include "absl/strings/str_cat.h"
#include "cc/base/log_writer.h"

namespace tfswitch {
namespace {

std::vector<KeyState> StatesOf(const EmbeddingTable& table,
                               absl::Span<const Key> keys) {
  std::vector<UsageOfRow> usage(keys.size());
  std::vector<KeyState> states(keys.size());
  table.ReadUsage(keys, kServersDay, absl::MakeSpan(usage),
                  absl::MakeSpan(states));
  return states;
}

// The distinct keys that have no row, in the order of `keys`.
std::vector<Key> MissingOf(const EmbeddingTable& table,
                           absl::Span<const Key> keys) {
  const std::vector<KeyState> states = StatesOf(table, keys);
  std::vector<Key> missing;
  std::unordered_set<Key> seen;
  for (size_t i = 0; i < keys.size(); ++i) {
    if (states[i] != KeyState::kRow && seen.insert(keys[i]).second) {
      missing.push_back(keys[i]);
    }
  }
  return missing;
}

}  // namespace

uint64_t MemoryCeiling::BytesOf(const EmbeddingTable& table) {
  const TableStats stats = table.stats();
  return static_cast<uint64_t>(stats.index_bytes + stats.row_bytes +
                               stats.reserved_bytes + stats.admission_bytes +
                               stats.change_bytes);
}

uint64_t MemoryCeiling::UsedBytes() const {
  uint64_t bytes = 0;
  for (const auto& table : tables_.All()) bytes += BytesOf(*table);
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
  const int64_t left = static_cast<int64_t>(max_bytes_.load()) -
                       static_cast<int64_t>(UsedBytes());
  // What this table has touched ahead is not for others.
  const int64_t own = table.stats().reserved_bytes;
  const int64_t taken =
      std::clamp<int64_t>((left + own) / row_bytes, 0, num_rows);
  credit_ = std::max<int64_t>(0, left - taken * row_bytes);
  return taken;
}

bool MemoryCeiling::HasRoom(const EmbeddingTable& table,
                            absl::Span<const Key> keys) {
  const auto num_keys = static_cast<int64_t>(keys.size());
  return !is_on(table) || Take(table, num_keys) == num_keys;
}

std::vector<Key> MemoryCeiling::Admit(EmbeddingTable& table,
                                      absl::Span<const Key> keys) {
  std::vector<Key> missing = MissingOf(table, keys);
  const auto num_missing = static_cast<int64_t>(missing.size());
  const int64_t admitted = missing.empty() ? 0 : Take(table, num_missing);
  missing.resize(static_cast<size_t>(admitted));
  if (admitted == num_missing) return missing;
  table.counters().Add(TableCounter::refused_keys, num_missing - admitted);
  if (!has_told_.exchange(true)) {
    LogWriter::Get().WriteInOrder(
        {"max_memory"},
        absl::StrCat("tfswitch: warning: the tables", options_.OnShard(),
                     " have reached max_memory=", max_bytes_.load(),
                     " bytes; new ids of table '", table.config().name,
                     "' and others get no rows, and read as unknown ids. Raise "
                     "it, add servers, or evict rows"));
    journal_.Tell("memory_ceiling", {{"table", table.config().name},
                                     {"bytes", max_bytes_.load()}});
  }
  return missing;
}

absl::Status MemoryCeiling::CheckRoom(const EmbeddingTable& table,
                                      absl::Span<const Key> keys) {
  if (HasRoom(table, keys)) return absl::OkStatus();
  const auto missing = static_cast<int64_t>(MissingOf(table, keys).size());
  if (missing == 0 || Take(table, missing) == missing) return absl::OkStatus();
  return absl::ResourceExhaustedError(absl::StrCat(
      "table '", table.config().name, "'", options_.OnShard(), ": ", missing,
      " new rows do not fit below max_memory=", max_bytes_.load(),
      " bytes. Raise it, add servers, or evict rows"));
}

absl::Status MemoryCeiling::CheckRestore(uint64_t bytes) const {
  if (max_bytes_ == 0 || bytes <= max_bytes_) return absl::OkStatus();
  return absl::ResourceExhaustedError(
      absl::StrCat("the saved tables", options_.OnShard(), " need at least ",
                   bytes, " bytes, and max_memory is ", max_bytes_.load(),
                   ". Raise it, or add servers"));
}

PartOfPush::PartOfPush(const EmbeddingTable& table, const PushRequest& push,
                       const GradientBatch& batch,
                       absl::Span<const Key> admitted)
    : push_(push) {
  const auto dim = static_cast<size_t>(table.dim());
  const std::unordered_set<Key> gets_row(admitted.begin(), admitted.end());
  const std::vector<KeyState> states = StatesOf(table, batch.keys);
  std::vector<int32_t> places;
  for (size_t i = 0; i < batch.keys.size(); ++i) {
    if (states[i] != KeyState::kRow && gets_row.count(batch.keys[i]) == 0) {
      continue;
    }
    places.push_back(static_cast<int32_t>(i));
    keys_.push_back(batch.keys[i]);
    const auto gradient = batch.gradients.subspan(i * dim, dim);
    gradients_.insert(gradients_.end(), gradient.begin(), gradient.end());
  }
  observations_ = OwnedObservations(batch.observations, places);
  push_.keys = keys_;
  push_.gradients = gradients_;
  push_.observations = observations_.view();
  push_.keys_are_unique = true;
}

}  // namespace tfswitch
