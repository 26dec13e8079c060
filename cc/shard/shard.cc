// PreparePush() checks a push and sums its repeated keys before ApplyPush()
// tells the ledger of it. So a push that is refused changes nothing.

#include "cc/shard/shard.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <initializer_list>
#include <map>
#include <new>
#include <utility>
#include <vector>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "cc/base/log_writer.h"
#include "cc/base/status_macros.h"
#include "cc/base/steady_clock.h"
#include "cc/shard/row_work.h"
#include "cc/wire/table_config_conversion.h"

namespace tfswitch {

absl::StatusOr<std::shared_ptr<Coordinator>> Shard::FindCoordinator() const {
  TFSWITCH_RETURN_IF_ERROR(core_.options.CheckCoordinates());
  return core_.coordinator;
}

void Shard::Describe(v1::ServerView* view) const {
  view->set_shard_index(options().shard_index);
  view->set_num_shards(options().num_shards);
  view->set_metrics(MetricsText());
  AddHeats(core_, view);
  for (std::string& event : RecentEvents()) {
    view->add_events(std::move(event));
  }
}

absl::Status Shard::Pull(EmbeddingTable& table, absl::Span<const Key> keys,
                         IfMissing if_missing, absl::Span<float> embeddings,
                         const LentThreads* threads) {
  TFSWITCH_RETURN_IF_ERROR(CheckSize(table.config().name, "embedding",
                                     keys.size(), table.dim(),
                                     embeddings.size()));
  TFSWITCH_RETURN_IF_ERROR(CheckOwnership(core_.options, table, keys));
  const size_t dim = static_cast<size_t>(table.dim());
  std::atomic<int64_t> num_found{0};
  GrowthLimits::Claim claim(&core_.limits, &table);
  const bool is_limited = if_missing == IfMissing::kInsert &&
                          table.config().admission.is_always() &&
                          !claim.TakeAll(keys.size());
  // Whether rows on disk move to memory, as far as there is room. If there is
  // much room, FindOrInsert() does that.
  const bool promotes = table.config().demotes_when_full() &&
                        if_missing != IfMissing::kValue &&
                        (is_limited || if_missing == IfMissing::kMark ||
                         !table.config().admission.is_always());
  if (is_limited || promotes) if_missing = IfMissing::kMark;
  // A prefetch does not count on a row that would be refused.
  if (if_missing == IfMissing::kMark && !is_limited) {
    TFSWITCH_ASSIGN_OR_RETURN(const bool has_room,
                              core_.limits.HasRoomFor(table, keys));
    if (!has_room) if_missing = IfMissing::kValue;
  }
  const bool insert_missing = if_missing == IfMissing::kInsert;
  const auto run = [&](bool inserts) {
    num_found = 0;
    return RunKeyRanges(threads, keys.size(), dim,
                        [&](size_t begin, size_t size) -> absl::Status {
                          const absl::Span<const Key> range =
                              keys.subspan(begin, size);
                          float* const to = embeddings.data() + begin * dim;
                          const absl::Span<float> rows(to, size * dim);
                          TFSWITCH_ASSIGN_OR_RETURN(
                              const int64_t found,
                              inserts ? table.FindOrInsert(range, rows)
                              : if_missing == IfMissing::kMark
                                  ? table.FindAndMark(range, rows, promotes)
                                  : table.Find(range, rows));
                          num_found += found;
                          return absl::OkStatus();
                        });
  };
  if (core_.journal.log() == nullptr || !insert_missing) {
    TFSWITCH_RETURN_IF_ERROR(run(insert_missing));
  } else {
    // Most pulls find rows for all their keys. They change nothing, so they
    // need no record.
    TFSWITCH_RETURN_IF_ERROR(run(false));
    if (num_found < static_cast<int64_t>(keys.size()) &&
        table.config().admission.is_always()) {
      const WriteGate::Pass pass(core_.journal.gate());
      TFSWITCH_RETURN_IF_ERROR(LogInsertion(table, keys));
      TFSWITCH_RETURN_IF_ERROR(run(true));
    }
  }
  if ((is_limited || promotes) &&
      num_found < static_cast<int64_t>(keys.size())) {
    TFSWITCH_ASSIGN_OR_RETURN(
        const int64_t found, is_limited
                                 ? InsertMarked(table, keys, &claim, embeddings)
                                 : PromoteMarked(table, keys, embeddings));
    num_found += found;
  }
  const int64_t num_missing = static_cast<int64_t>(keys.size()) - num_found;
  TableCounters& counters = table.counters();
  counters.Add(TableCounter::num_pulls, 1);
  counters.Add(TableCounter::pulled_keys, keys.size());
  counters.Add(TableCounter::missing_keys, num_missing);
  table.heat().Note(keys);
  if (insert_missing || table.config().layout.empty() || num_missing == 0) {
    return absl::OkStatus();
  }
  // Returns an error instead of zeros, because zeros would look like values of
  // the model's variables.
  return absl::FailedPreconditionError(absl::StrCat(
      "dense table '", table.config().name, "'", core_.options.OnShard(),
      " has no values for ", num_missing, " of ", keys.size(),
      " blocks: it has not been initialised, or the server was started again. "
      "Restore a checkpoint, or initialise it"));
}

absl::Status Shard::LogInsertion(const EmbeddingTable& table,
                                 absl::Span<const Key> keys) {
  TFSWITCH_RETURN_IF_ERROR(CheckPresent(table));
  if (core_.journal.log() == nullptr) return absl::OkStatus();
  PullRequest pull;
  pull.table = table.config().name;
  pull.table_incarnation = table.incarnation();
  pull.keys = keys;
  pull.day = table.last_day();
  return core_.journal.LogPull(pull).status();
}

namespace {

// The indices of embeddings of `dim` floats that are marked with one of `bits`.
std::vector<size_t> FindMarked(absl::Span<const float> embeddings, size_t dim,
                               std::initializer_list<uint32_t> bits) {
  std::vector<size_t> marked;
  for (size_t i = 0; i < embeddings.size() / dim; ++i) {
    uint32_t first;
    std::memcpy(&first, embeddings.data() + i * dim, sizeof(first));
    if (std::find(bits.begin(), bits.end(), first) != bits.end()) {
      marked.push_back(i);
    }
  }
  return marked;
}

}  // namespace

absl::StatusOr<int64_t> Shard::PromoteMarked(EmbeddingTable& table,
                                             absl::Span<const Key> keys,
                                             absl::Span<float> embeddings) {
  const auto dim = static_cast<size_t>(table.dim());
  const std::vector<size_t> marked = FindMarked(embeddings, dim, {kColdMark});
  std::vector<Key> cold;
  cold.reserve(marked.size());
  for (const size_t i : marked) cold.push_back(keys[i]);
  std::vector<Key> sorted = cold;
  std::sort(sorted.begin(), sorted.end());
  sorted.erase(std::unique(sorted.begin(), sorted.end()), sorted.end());
  TFSWITCH_RETURN_IF_ERROR(
      core_.limits.PromoteCold(table, std::move(sorted), keys).status());
  // Reads a row for which there is no room from the disk.
  std::vector<float> rows(cold.size() * dim);
  TFSWITCH_ASSIGN_OR_RETURN(const int64_t num_found,
                            table.FindAndMark(cold, absl::MakeSpan(rows),
                                              /*marks_cold=*/false));
  for (size_t n = 0; n < marked.size(); ++n) {
    std::copy_n(rows.data() + n * dim, dim,
                embeddings.data() + marked[n] * dim);
  }
  return num_found;
}

absl::StatusOr<int64_t> Shard::InsertMarked(EmbeddingTable& table,
                                            absl::Span<const Key> keys,
                                            GrowthLimits::Claim* claim,
                                            absl::Span<float> embeddings) {
  const auto dim = static_cast<size_t>(table.dim());
  const std::vector<size_t> marked =
      FindMarked(embeddings, dim, {kMissingMark, kColdMark});
  std::vector<Key> made;
  made.reserve(marked.size());
  for (const size_t i : marked) made.push_back(keys[i]);
  std::sort(made.begin(), made.end());
  made.erase(std::unique(made.begin(), made.end()), made.end());
  KeysByKind missing;
  missing.rows = made;
  const std::vector<Key> refused = claim->TakeFor(std::move(missing), keys);
  core_.limits.NoteRefused(table, refused);
  // The first keys are made.
  made.resize(made.size() - refused.size());
  int64_t num_found = 0;
  const auto fill = [&](const std::vector<Key>& filled,
                        const auto& read) -> absl::Status {
    if (filled.empty()) return absl::OkStatus();
    std::vector<float> rows(filled.size() * dim);
    TFSWITCH_ASSIGN_OR_RETURN(const int64_t found, read(absl::MakeSpan(rows)));
    num_found += found;
    for (const size_t i : marked) {
      const auto at = std::lower_bound(filled.begin(), filled.end(), keys[i]);
      if (at == filled.end() || *at != keys[i]) continue;
      std::copy_n(rows.data() + static_cast<size_t>(at - filled.begin()) * dim,
                  dim, embeddings.data() + i * dim);
    }
    return absl::OkStatus();
  };
  TFSWITCH_RETURN_IF_ERROR(
      fill(made, [&](absl::Span<float> rows) -> absl::StatusOr<int64_t> {
        const WriteGate::Pass pass(core_.journal.gate());
        TFSWITCH_RETURN_IF_ERROR(LogInsertion(table, made));
        return table.FindOrInsert(made, rows);
      }));
  // Some may have rows on disk.
  TFSWITCH_RETURN_IF_ERROR(fill(refused, [&](absl::Span<float> rows) {
    return table.Find(refused, rows);
  }));
  return num_found;
}

absl::StatusOr<std::vector<Key>> Shard::EnterGate(
    EmbeddingTable& table, const GradientBatch& batch,
    std::optional<GrowthLimits::Claim>* claim,
    std::optional<WriteGate::Pass>* pass) {
  TFSWITCH_ASSIGN_OR_RETURN(
      const std::vector<Key> on_disk,
      core_.limits.Promote(table, batch.keys, batch.keys));
  const bool may_insert =
      batch.insert_missing || !table.config().admission.is_always();
  constexpr int kMostTries = 8;
  for (int tries = 1;; ++tries) {
    const uint64_t generation = table.generation();
    claim->emplace(&core_.limits, &table);
    std::vector<Key> refused = on_disk;
    const bool has_all = !may_insert || (*claim)->TakeAll(batch.keys.size());
    if (!has_all) {
      const std::vector<Key> more =
          (*claim)->TakeFor(table.FindNewKeys(batch), batch.keys);
      refused.insert(refused.end(), more.begin(), more.end());
      std::sort(refused.begin(), refused.end());
      refused.erase(std::unique(refused.begin(), refused.end()), refused.end());
    }
    pass->emplace(core_.journal.gate());
    // Keys that had rows may have lost them. Inside the gate only a client can
    // still erase them.
    if (has_all || table.generation() == generation || tries == kMostTries) {
      core_.limits.NoteRefused(table, refused);
      return refused;
    }
    pass->reset();
  }
}

absl::StatusOr<WriteResult> Shard::Push(EmbeddingTable& table,
                                        const PushRequest& push,
                                        const LentThreads* threads) {
  TFSWITCH_RETURN_IF_ERROR(CheckPush(push, table.dim()));
  PreparedPush prepared;
  TFSWITCH_RETURN_IF_ERROR(PreparePush(core_.options, table, push, &prepared));
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
    return PreparePush(core_.options, *pushes[i].table, *pushes[i].push,
                       &prepared[i]);
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
        core_.journal.ledger()->Begin(push.id, &result.num_rows);
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
  std::optional<GrowthLimits::Claim> claim;
  // Held until the ledger knows the result, so that a save has both or none.
  std::optional<WriteGate::Pass> pass;
  absl::StatusOr<uint64_t> number;
  absl::Status applied;
  // Tells the ledger the result, even after an exception.
  try {
    const absl::StatusOr<std::vector<Key>> refused =
        EnterGate(table, batch, &claim, &pass);
    std::optional<PartOfPush> part;
    if (refused.ok() && !refused->empty()) {
      part.emplace(table.dim(), push, batch, *refused);
    }
    const absl::Status present =
        refused.ok() ? CheckPresent(table) : refused.status();
    number = present.ok()
                 ? core_.journal.LogPush(part.has_value() ? part->push() : push)
                 : present;
    GradientBatch numbered = part.has_value() ? part->push() : batch;
    numbered.number = number.value_or(0);
    if (!number.ok()) {
      applied = number.status();
    } else if (is_staged) {
      applied =
          core_.stage.Add(push.step, table.config().name, StagedPush(numbered));
    } else {
      const absl::StatusOr<int64_t> updated =
          ApplyBatch(table, numbered, threads);
      applied = updated.status();
      result.num_rows = updated.value_or(0);
    }
  } catch (const std::bad_alloc&) {
    applied = absl::ResourceExhaustedError(absl::StrCat(
        "table '", table.config().name, "': no memory for a push of ",
        push.keys.size(), " keys", is_staged ? " until its round closes" : ""));
  }
  if (protected_push) {
    // A push counts as applied even if memory ran out, because the rows that
    // exist have been updated.
    core_.journal.ledger()->End(
        push.id,
        /*applied=*/number.ok() && (!is_staged || applied.ok()),
        result.num_rows);
  }
  TFSWITCH_RETURN_IF_ERROR(applied);
  table.counters().Add(TableCounter::num_pushes, 1);
  table.counters().Add(TableCounter::pushed_keys, batch.keys.size());
  core_.journal.CountWrite();
  return result;
}

absl::Status Shard::CheckAssign(const EmbeddingTable& table,
                                absl::Span<const Key> keys,
                                absl::Span<const float> embeddings,
                                absl::Span<const float> slots) const {
  TFSWITCH_RETURN_IF_ERROR(CheckSize(table.config().name, "embedding",
                                     keys.size(), table.dim(),
                                     embeddings.size()));
  if (!slots.empty()) {
    TFSWITCH_RETURN_IF_ERROR(CheckSize(table.config().name, "slot", keys.size(),
                                       table.slot_floats(), slots.size()));
  }
  TFSWITCH_RETURN_IF_ERROR(CheckOwnership(core_.options, table, keys));
  TFSWITCH_RETURN_IF_ERROR(
      CheckFinite(table.config().name, "embedding", keys, embeddings));
  return CheckFinite(table.config().name, "slot", keys, slots);
}

absl::StatusOr<WriteResult> Shard::AssignOnce(const AssignRequest& request) {
  TFSWITCH_ASSIGN_OR_RETURN(
      const std::shared_ptr<EmbeddingTable> table,
      core_.tables.Find({request.table, request.table_incarnation}));
  TFSWITCH_RETURN_IF_ERROR(CheckDay(request.table, request.day));
  TFSWITCH_RETURN_IF_ERROR(
      CheckAssign(*table, request.keys, request.embeddings, request.slots));
  // Evicts nothing for a call that cannot succeed.
  const uint64_t generation = table->generation();
  GrowthLimits::Claim claim(&core_.limits, table.get());
  const bool has_all = claim.TakeAll(request.keys.size());
  const auto missing = [&] {
    return GrowthLimits::KeysWithoutRows(*table, request.keys);
  };
  TFSWITCH_ASSIGN_OR_RETURN(
      const std::vector<Key> on_disk,
      core_.limits.Promote(*table, request.keys, request.keys));
  bool is_possible = on_disk.empty();
  if (!has_all && is_possible) {
    TFSWITCH_ASSIGN_OR_RETURN(KeysByKind new_keys, missing());
    is_possible = core_.limits.CanHold(*table, request.keys) &&
                  claim.TakeFor(std::move(new_keys), request.keys).empty();
  }
  return core_.journal.WriteOnce(
      request.id,
      [&]() -> absl::StatusOr<uint64_t> {
        TFSWITCH_RETURN_IF_ERROR(CheckPresent(*table));
        if (!is_possible) return core_.limits.Error(*table);
        if (!has_all && !table->config().demotes_when_full() &&
            table->generation() != generation) {
          TFSWITCH_ASSIGN_OR_RETURN(const KeysByKind new_keys, missing());
          if (static_cast<int64_t>(new_keys.rows.size()) > claim.num_rows()) {
            return absl::UnavailableError(
                absl::StrCat("table '", request.table,
                             "': rows that the call was to set were evicted "
                             "meanwhile; nothing was applied. Try again"));
          }
        }
        return core_.journal.LogAssign(request);
      },
      [&]() -> absl::StatusOr<int64_t> {
        table->NoteDay(request.day);
        return table->AssignRows(
            {request.keys, request.embeddings, request.slots},
            request.only_missing ? AssignMode::kNowIfMissing
                                 : AssignMode::kNow);
      });
}

absl::StatusOr<int64_t> Shard::Erase(EmbeddingTable& table,
                                     absl::Span<const Key> keys) const {
  TFSWITCH_RETURN_IF_ERROR(CheckOwnership(core_.options, table, keys));
  return table.Erase(keys);
}

absl::StatusOr<ShrinkReport> Shard::Shrink(
    EmbeddingTable& table, const std::optional<EvictionConfig>& rules,
    float day, bool dry_run) {
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
  // The rules compare all rows. No other write may run at the same time,
  // because a replay must find the same rows.
  const WriteGate::Closed closed(dry_run ? nullptr : core_.journal.gate());
  if (!dry_run) TFSWITCH_RETURN_IF_ERROR(CheckPresent(table));
  if (!dry_run && core_.journal.log() != nullptr) {
    v1::ShrinkRequest request;
    request.set_table(config.name);
    request.set_table_incarnation(table.incarnation());
    *request.mutable_rules() = ToProto(own_rules);
    if (day >= 0.0f) request.set_day(day);
    TFSWITCH_RETURN_IF_ERROR(
        core_.journal.Log(RecordType::kShrink, request).status());
  }
  if (own_rules.max_rows.has_value()) {
    own_rules.max_rows = core_.options.ShareOf(config, *own_rules.max_rows);
  }
  const absl::Time begin = SteadyNow();
  TFSWITCH_ASSIGN_OR_RETURN(const ShrinkReport report,
                            table.Shrink(own_rules, day, dry_run));
  if (dry_run || report.evicted_rows == 0) return report;
  std::vector<std::string> rules_used;
  for (const EvictionRule& rule : kEvictionRules) {
    if (rule.evicted == nullptr) continue;
    const int64_t rows = report.*rule.evicted;
    table.counters().Add(rule.counter, rows);
    if (rows > 0) rules_used.push_back(absl::StrCat(rule.name, ":", rows));
  }
  core_.journal.Tell("evicted", {{"table", config.name},
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
  core_.last_export_ms = absl::ToUnixMillis(absl::Now());
  if (filter.rule.has_value()) pending_exports_.Keep(std::move(exported));
  if (num_rows + num_removed > 0) {
    core_.journal.Tell("exported",
                       {{"table", name},
                        {"kind", filter.since.log_id == 0 ? "base" : "delta"},
                        {"rows", num_rows},
                        {"removed", num_removed},
                        {"seconds", SecondsSince(begin)}});
  }
  return cursor;
}

void Shard::ShrinkOnTime(const std::string& name) {
  if (core_.journal.is_recovering()) return;
  const auto table = core_.tables.Find(name);
  if (!table.ok()) return;  // The table was just dropped.
  absl::Status status;
  try {
    status =
        Shrink(**table, std::nullopt, kServersDay, /*dry_run=*/false).status();
  } catch (const std::bad_alloc&) {
    status = absl::ResourceExhaustedError(
        absl::StrCat("table '", name, "': no memory to shrink it"));
  }
  // No caller waits for this error. The next attempt may succeed.
  if (!status.ok()) {
    LogMessage(LogLevel::kError, {"not_evicted"}, status.message());
  }
}

absl::Status Shard::ReadUsage(const EmbeddingTable& table,
                              absl::Span<const Key> keys, float day,
                              absl::Span<UsageOfRow> usage,
                              absl::Span<KeyState> states) const {
  TFSWITCH_RETURN_IF_ERROR(CheckDay(table.config().name, day));
  TFSWITCH_RETURN_IF_ERROR(CheckOwnership(core_.options, table, keys));
  return table.ReadUsage(keys, day, usage, states);
}

absl::Status Shard::CheckPresent(const EmbeddingTable& table) const {
  if (core_.journal.log() == nullptr && !table.config().optimizer.is_open) {
    return absl::OkStatus();
  }
  if (core_.tables.IsPresent(table)) return absl::OkStatus();
  return absl::UnavailableError(
      absl::StrCat("table '", table.config().name,
                   "' was dropped, restored or given its optimizer during the "
                   "call; nothing was applied. Try again"));
}

absl::Status Shard::CommitRestore(const std::string& restore_id, bool abort,
                                  const Interrupt& interrupt) {
  if (abort) {
    restores_.Abort(restore_id);
    return absl::OkStatus();
  }
  // Freed after the gate opens.
  LoadedRows former;
  // Waits for a running save, and stops other saves from beginning.
  // The staged rows must not expire meanwhile.
  TFSWITCH_RETURN_IF_ERROR(core_.turn.Take(restore_id, [&] {
    restores_.Keep(restore_id);
    return interrupt();
  }));
  const absl::Cleanup end_turn = [this] { core_.turn.Return(); };
  const WriteGate::Closed closed(core_.journal.gate());
  TFSWITCH_ASSIGN_OR_RETURN(const bool is_installed,
                            restores_.Commit(restore_id, &former));
  PushLog* const log = core_.journal.log();
  if (log == nullptr) return absl::OkStatus();
  // The log does not have the restored rows, so they are saved before other
  // writes are allowed. If that save fails, a repeated call saves them.
  if (is_installed) {
    TFSWITCH_RETURN_IF_ERROR(log->BeginBreak(
        static_cast<uint32_t>(RecordType::kRestore),
        absl::FailedPreconditionError(
            "rows that were restored have not been saved yet")));
  } else if (!log->has_failed()) {
    return absl::OkStatus();
  }
  TFSWITCH_RETURN_IF_ERROR(
      own_state_.SaveClosed(core_.options.own_folder, Never, nullptr).status());
  log->EndBreak();
  // This record says that the restored rows are in a save.
  return core_.journal.Log(RecordType::kRestoreSaved, {""}).status();
}

}  // namespace tfswitch
