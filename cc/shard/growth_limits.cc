#include "cc/shard/growth_limits.h"

#include <algorithm>
#include <limits>
#include <string>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "cc/base/log_writer.h"
#include "cc/base/status_macros.h"
#include "cc/base/steady_clock.h"
#include "cc/base/write_gate.h"
#include "tfswitch/v1/parameter_server.pb.h"

namespace tfswitch {
namespace {

// The memory that the table needs, without what it has touched ahead.
int64_t NeededBytes(const TableStats& stats) {
  return stats.index_bytes + stats.row_bytes + stats.admission_bytes +
         stats.change_bytes + stats.cold_memory_bytes;
}

}  // namespace

int64_t GrowthLimits::UsedBytes(bool with_loading) const {
  int64_t bytes = 0;
  for (const auto& table :
       with_loading ? tables_.WithLoading() : tables_.All()) {
    const TableStats stats = table->stats();
    bytes += NeededBytes(stats) + stats.reserved_bytes;
  }
  return bytes;
}

bool GrowthLimits::is_on(const EmbeddingTable& table) const {
  // A model's variables are always kept.
  return (max_bytes_ != 0 || table.config().eviction.max_rows.has_value()) &&
         !journal_.is_recovering() && table.config().layout.empty();
}

int64_t GrowthLimits::MaxRowsOf(const EmbeddingTable& table) const {
  const auto& max_rows = table.config().eviction.max_rows;
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max() / 2;
  if (!max_rows.has_value()) return kMost;
  const uint64_t share = options_.ShareOf(table.config(), *max_rows);
  return static_cast<int64_t>(std::min(share, static_cast<uint64_t>(kMost)));
}

GrowthLimits::Room GrowthLimits::Take(EmbeddingTable& table, Room wanted) {
  // Reads the claims first: a row that another call has made since then counts
  // twice, and none is forgotten.
  const int64_t claimed = table.claimed_rows().fetch_add(wanted.rows);
  const int64_t free = MaxRowsOf(table) - claimed - table.SizeAtMost();
  const int64_t claims = std::clamp<int64_t>(free, 0, wanted.rows);
  table.claimed_rows() -= wanted.rows - claims;
  wanted.rows = claims;
  if (max_bytes_ == 0) return wanted;
  Room taken;
  const absl::Cleanup give_back = [&] {
    table.claimed_rows() -= claims - taken.rows;
  };
  taken = TakeBytes(table, wanted);
  return taken;
}

int64_t GrowthLimits::BytesForCandidates(const EmbeddingTable& table,
                                         const TableStats& stats) const {
  const TableConfig& config = table.config();
  // A table whose rows make room for others keeps a share of the memory for ids
  // that wait for admission. Otherwise none could ever wait.
  const bool needs_share =
      table.bytes_per_candidate() != 0 &&
      (config.evicts_when_full() || config.demotes_when_full());
  return needs_share
             ? std::max<int64_t>(0, max_bytes_ / 16 - stats.admission_bytes)
             : 0;
}

int64_t GrowthLimits::BytesForRows(const EmbeddingTable& table,
                                   const TableStats& stats) const {
  return max_bytes_ - UsedBytes() - BytesForCandidates(table, stats) +
         stats.reserved_bytes;
}

GrowthLimits::Room GrowthLimits::TakeBytes(const EmbeddingTable& table,
                                           Room wanted) {
  const auto row_bytes = static_cast<int64_t>(table.bytes_per_row());
  const auto candidate_bytes =
      std::max<int64_t>(1, static_cast<int64_t>(table.bytes_per_candidate()));
  const int64_t bytes =
      wanted.rows * row_bytes + wanted.candidates * candidate_bytes;
  for (int64_t credit = credit_; credit >= bytes;) {
    if (credit_.compare_exchange_weak(credit, credit - bytes)) return wanted;
  }
  MutexLock lock(&mutex_);
  // Memory that this table has touched ahead is for its own rows and records
  // only.
  const TableStats stats = table.stats();
  const int64_t for_rows = BytesForRows(table, stats);
  Room taken;
  taken.rows = std::clamp<int64_t>(for_rows / row_bytes, 0, wanted.rows);
  const int64_t left =
      max_bytes_ - UsedBytes() -
      std::max<int64_t>(0, taken.rows * row_bytes - stats.reserved_bytes);
  const int64_t free_records = std::max<int64_t>(0, stats.free_candidates);
  // Rows on disk need more and more memory for their filters, which rows in
  // memory give back later.
  const int64_t for_candidates =
      table.config().demotes_when_full()
          ? std::max(left, BytesForCandidates(table, stats))
          : left;
  taken.candidates = std::clamp<int64_t>(
      free_records + for_candidates / candidate_bytes, 0, wanted.candidates);
  // Memory may also grow without this function, so it is counted again soon.
  credit_ = std::max<int64_t>(0, left / 8);
  return taken;
}

int64_t GrowthLimits::SurplusRows(const EmbeddingTable& table,
                                  int64_t missing) const {
  const TableStats stats = table.stats();
  // A row that leaves memory gives it to the table's new rows, but its share of
  // the index stays.
  const int64_t missing_bytes =
      missing * static_cast<int64_t>(table.bytes_per_row()) -
      BytesForRows(table, stats);
  const int64_t rows = std::max<int64_t>(
      1, missing_bytes / std::max<int64_t>(1, stats.row_stride_bytes) + 1);
  const int64_t in_memory = stats.num_rows - stats.cold_rows;
  if (rows <= in_memory) return rows;
  // Without this, other tables that take its memory would empty the table. Rows
  // on disk are not lost.
  return table.config().demotes_when_full() ? in_memory : 0;
}

bool GrowthLimits::Demote(EmbeddingTable& table, int64_t missing,
                          absl::Span<const Key> kept) {
  if (!MayDemote()) return false;
  const int64_t rows = SurplusRows(table, missing);
  if (rows == 0) return false;
  const TableStats stats = table.stats();
  const int64_t in_memory = stats.num_rows - stats.cold_rows;
  // Moves more than is missing, to write larger files.
  int64_t reserve = in_memory / 32;
  // The memory that finds rows on disk grows. Rows in memory make room for it.
  const bool is_above = UsedBytes() > max_bytes_ + max_bytes_ / 64;
  if (is_above) reserve = std::max(reserve, in_memory / 16);
  const absl::StatusOr<int64_t> moved =
      NoteDemotion(table, table.Demote(rows + reserve, kept));
  if (is_above) table.ReleaseFreeRows();
  return moved.value_or(0) > 0;
}

absl::StatusOr<std::vector<Key>> GrowthLimits::Promote(
    EmbeddingTable& table, absl::Span<const Key> keys,
    absl::Span<const Key> kept) {
  if (!table.config().demotes_when_full() || !is_on(table)) {
    return std::vector<Key>();
  }
  return PromoteCold(table, table.FindColdKeys(keys), kept);
}

absl::StatusOr<std::vector<Key>> GrowthLimits::PromoteCold(
    EmbeddingTable& table, std::vector<Key> cold, absl::Span<const Key> kept) {
  std::vector<Key> refused;
  if (cold.empty()) return refused;
  Claim claim(this, &table);
  refused = claim.TakeFor({cold, {}}, kept);
  cold.resize(cold.size() - refused.size());  // These are its last ones.
  TFSWITCH_RETURN_IF_ERROR(table.Promote(cold));
  return refused;
}

absl::Status GrowthLimits::Relieve(EmbeddingTable& table) {
  if (max_bytes_ == 0 || !table.config().demotes_when_full()) {
    return absl::OkStatus();
  }
  // Does not lock evict_mutex_, because the caller may be inside the gate.
  MutexLock lock(&relieve_mutex_);
  const bool is_present = tables_.IsPresent(table);
  for (;;) {
    const TableStats stats = table.stats();
    // Memory that the table has touched is there for its own rows.
    const int64_t surplus = UsedBytes(/*with_loading=*/!is_present) -
                            stats.reserved_bytes - max_bytes_;
    const int64_t in_memory = stats.num_rows - stats.cold_rows;
    if (surplus <= 0 || in_memory == 0) return absl::OkStatus();
    if (is_present && !MayDemote()) return absl::OkStatus();
    const int64_t rows =
        surplus / std::max<int64_t>(1, stats.row_stride_bytes) + in_memory / 32;
    TFSWITCH_ASSIGN_OR_RETURN(
        const int64_t moved,
        NoteDemotion(table, table.Demote(std::min(rows + 1, in_memory), {})));
    if (moved == 0) return absl::OkStatus();
  }
}

bool GrowthLimits::MayDemote() const {
  return absl::ToUnixMillis(SteadyNow()) >= next_demotion_ms_;
}

absl::StatusOr<int64_t> GrowthLimits::NoteDemotion(
    const EmbeddingTable& table, absl::StatusOr<int64_t> moved) {
  if (moved.ok()) {
    has_told_of_disk_ = false;
    return moved;
  }
  next_demotion_ms_ = absl::ToUnixMillis(SteadyNow() + absl::Seconds(2));
  if (has_told_of_disk_.exchange(true)) return moved;
  LogMessageInOrder(
      LogLevel::kError, {"not_demoted"},
      absl::StrCat(moved.status().message(), ". No rows of table '",
                   table.config().name, "'", options_.OnShard(),
                   " can move to disk. Until they can, new ids get no rows, "
                   "and ids on disk do not learn. This message is not "
                   "repeated before rows have moved"));
  return moved;
}

bool GrowthLimits::Evict(EmbeddingTable& table, Room missing,
                         TableCounter reason, absl::Span<const Key> kept) {
  // Evicts more than is missing, so that not each call must wait for the gate,
  // but only for some milliseconds.
  const auto with_reserve = [](int64_t count, int64_t of) {
    constexpr int64_t kMost = 32768;
    return count == 0 ? 0 : count + std::min(of / 32, kMost);
  };
  const TableStats stats = table.stats();
  if (reason == TableCounter::evicted_by_max_memory && missing.rows > 0) {
    missing.rows = SurplusRows(table, missing.rows);
  }
  std::vector<Key> sorted(kept.begin(), kept.end());
  std::sort(sorted.begin(), sorted.end());
  const KeysByKind chosen = table.ChooseLeastUsed(
      with_reserve(missing.rows, stats.num_rows),
      with_reserve(missing.candidates, stats.num_candidates), sorted);
  if (chosen.rows.empty() && chosen.candidates.empty()) return false;
  const WriteGate::Closed closed(journal_.gate());
  v1::EraseRequest request;
  request.set_table(table.config().name);
  request.set_table_incarnation(table.incarnation());
  request.mutable_keys()->Add(chosen.rows.begin(), chosen.rows.end());
  // Some may have a row by now.
  const auto candidates = KeysWithoutRows(table, chosen.candidates);
  if (!candidates.ok()) return false;
  request.mutable_keys()->Add(candidates->rows.begin(), candidates->rows.end());
  // No other write runs meanwhile, so a replay has the same rows.
  if (journal_.log() != nullptr) {
    if (!tables_.IsPresent(table) ||
        !journal_.Log(RecordType::kErase, request).ok()) {
      return false;
    }
    journal_.CountWrite();  // As a replay does.
  }
  const absl::StatusOr<int64_t> num_erased = table.Erase(
      absl::MakeConstSpan(request.keys().data(), request.keys().size()));
  table.counters().Add(reason, num_erased.value_or(0));
  return num_erased.ok();
}

bool GrowthLimits::Claim::TakeAll(size_t num_keys) {
  if (!limits_.is_on(table_)) return true;
  const auto wanted = static_cast<int64_t>(num_keys);
  // Many of the keys may have rows. If there is not much more room than for all
  // of them, other calls need what they do not.
  const int64_t free =
      limits_.MaxRowsOf(table_) - table_.claimed_rows() - table_.size();
  if (free / 16 < wanted) return false;
  const int64_t taken = limits_.Take(table_, {wanted, 0}).rows;
  num_rows_ += taken;
  if (taken == wanted) return true;
  table_.claimed_rows() -= num_rows_;
  num_rows_ = 0;
  return false;
}

std::vector<Key> GrowthLimits::Claim::TakeFor(KeysByKind keys,
                                              absl::Span<const Key> kept) {
  Room missing{static_cast<int64_t>(keys.rows.size()),
               static_cast<int64_t>(keys.candidates.size())};
  const auto is_enough = [&] {
    return missing.rows == 0 && missing.candidates == 0;
  };
  const auto take = [&] {
    const Room taken = limits_.Take(table_, missing);
    num_rows_ += taken.rows;
    missing.rows -= taken.rows;
    missing.candidates -= taken.candidates;
    return is_enough();
  };
  const bool demotes = table_.config().demotes_when_full();
  if (!take() && (demotes || table_.config().evicts_when_full())) {
    MutexLock lock(&limits_.evict_mutex_);
    // Another call may take what was evicted for this one.
    constexpr int kMostTries = 8;
    for (int tries = 0; !take() && tries < kMostTries; ++tries) {
      if (demotes && missing.rows > 0) {
        if (!limits_.Demote(table_, missing.rows, kept)) break;
        continue;
      }
      const bool by_rows =
          limits_.max_bytes_ == 0 ||
          table_.size() + table_.claimed_rows() + missing.rows >
              limits_.MaxRowsOf(table_);
      if (!limits_.Evict(table_, missing,
                         by_rows ? TableCounter::evicted_by_max_rows
                                 : TableCounter::evicted_by_max_memory,
                         kept)) {
        break;
      }
    }
  }
  // The rows of one batch are in memory together, even if they are more than
  // the ceiling allows. Others then go to disk.
  if (demotes && limits_.MayDemote()) missing.rows = 0;
  std::vector<Key> refused;
  const auto refuse = [&refused](std::vector<Key>* all, int64_t count) {
    std::sort(all->begin(), all->end());
    refused.insert(refused.end(), all->end() - count, all->end());
  };
  refuse(&keys.rows, missing.rows);
  refuse(&keys.candidates, missing.candidates);
  std::sort(refused.begin(), refused.end());
  return refused;
}

absl::StatusOr<bool> GrowthLimits::HasRoomFor(EmbeddingTable& table,
                                              absl::Span<const Key> keys) {
  if (!is_on(table)) return true;
  if (table.config().evicts_when_full() || table.config().demotes_when_full()) {
    return CanHold(table, keys);
  }
  Claim claim(this, &table);
  if (claim.TakeAll(keys.size())) return true;
  TFSWITCH_ASSIGN_OR_RETURN(KeysByKind missing, KeysWithoutRows(table, keys));
  return claim.TakeFor(std::move(missing), keys).empty();
}

bool GrowthLimits::CanHold(const EmbeddingTable& table,
                           absl::Span<const Key> keys) const {
  if (!is_on(table)) return true;
  std::vector<Key> distinct(keys.begin(), keys.end());
  std::sort(distinct.begin(), distinct.end());
  const auto end = std::unique(distinct.begin(), distinct.end());
  return end - distinct.begin() <= MaxRowsOf(table);
}

absl::StatusOr<KeysByKind> GrowthLimits::KeysWithoutRows(
    const EmbeddingTable& table, absl::Span<const Key> keys) {
  std::vector<UsageOfRow> usage(keys.size());
  std::vector<KeyState> states(keys.size());
  TFSWITCH_RETURN_IF_ERROR(table.ReadUsage(
      keys, kServersDay, absl::MakeSpan(usage), absl::MakeSpan(states)));
  KeysByKind found;
  for (size_t i = 0; i < keys.size(); ++i) {
    if (states[i] != KeyState::kRow) found.rows.push_back(keys[i]);
  }
  std::sort(found.rows.begin(), found.rows.end());
  found.rows.erase(std::unique(found.rows.begin(), found.rows.end()),
                   found.rows.end());
  return found;
}

absl::Status GrowthLimits::Error(const EmbeddingTable& table) const {
  const auto& max_rows = table.config().eviction.max_rows;
  return absl::ResourceExhaustedError(absl::StrCat(
      "table '", table.config().name, "'", options_.OnShard(),
      ": the new rows do not fit below ",
      max_bytes_ != 0 ? absl::StrCat("max_memory=", max_bytes_.load(), " bytes")
                      : "",
      max_bytes_ != 0 && max_rows ? " or " : "",
      max_rows ? absl::StrCat("max_rows=", *max_rows) : "",
      ". Raise it, add servers, or evict rows",
      MayDemote() ? "" : ". No rows can move to disk at present"));
}

void GrowthLimits::NoteRefused(EmbeddingTable& table,
                               absl::Span<const Key> keys) {
  if (keys.empty()) return;
  table.counters().Add(TableCounter::refused_keys,
                       static_cast<int64_t>(keys.size()));
  if (has_told_.exchange(true)) return;
  LogMessageInOrder(
      LogLevel::kWarning, {"table_full"},
      absl::StrCat(Error(table).message(),
                   ". Until then new ids get no rows, and read as ids without "
                   "a row. This message is not repeated"));
}

int64_t GrowthLimits::Surplus(const EmbeddingTable& table) const {
  if (!is_on(table) || !table.config().evicts_when_full()) return 0;
  return std::max<int64_t>(0, table.size() - MaxRowsOf(table));
}

void GrowthLimits::Trim(EmbeddingTable& table) {
  if (table.config().demotes_when_full()) {
    // Relieve() has logged the error, and the next call tries again.
    Relieve(table).IgnoreError();
    return;
  }
  if (Surplus(table) == 0) return;
  MutexLock lock(&evict_mutex_);
  // Another worker of the round may have done it.
  const int64_t surplus = Surplus(table);
  if (surplus == 0) return;
  Evict(table, {surplus, 0}, TableCounter::evicted_by_max_rows, {});
}

absl::Status GrowthLimits::TrimLoaded(EmbeddingTable& table) const {
  if (Surplus(table) == 0) return absl::OkStatus();
  EvictionConfig rules;
  rules.max_rows = static_cast<uint64_t>(MaxRowsOf(table));
  rules.order = table.config().eviction.order;
  return table.Shrink(rules, kServersDay, /*dry_run=*/false).status();
}

absl::Status GrowthLimits::CheckRestore(
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

void GrowthLimits::ReserveCapacity(EmbeddingTable& table) const {
  const TableConfig& config = table.config();
  uint64_t num_rows = options_.ShareOf(config, config.capacity.num_rows);
  if (num_rows != 0 && max_bytes_ != 0) {
    const int64_t left = std::max<int64_t>(0, max_bytes_ - UsedBytes());
    num_rows =
        std::min(num_rows, static_cast<uint64_t>(left) / table.bytes_per_row());
  }
  num_rows = std::min(num_rows, static_cast<uint64_t>(MaxRowsOf(table)));
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
