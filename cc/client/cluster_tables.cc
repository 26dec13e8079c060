// mutex_ guards only known_, and is not held during calls to servers. Make()
// and Reset() call the shards from the last to the first. Each call gets the
// incarnation that the shard before it has answered. So if two processes make
// the same table at once, the last shard decides which incarnation counts.
//
// If a shard has no part of a table, Join() compares two runs of its server:
// the run when the table was made, and the present run. If they are the same, a
// process is just making or dropping the part. If not, the server was restarted
// and has lost the part. Survey() also lists tables that only this client
// knows, because all servers may have lost them.

#include "cc/client/cluster_tables.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "cc/base/log_writer.h"
#include "cc/base/random_id.h"
#include "cc/base/status_macros.h"

namespace tfswitch {
namespace {

void Warn(const std::vector<ResetTable>& changed) {
  for (const ResetTable& table : changed) {
    LogMessageInOrder(
        LogLevel::kWarning, {"table_reset"},
        absl::StrCat(
            "table '", table.name, "' ",
            table.shards.empty()
                ? "had lost rows, or was made again, and goes on as other "
                  "processes have left it"
                : absl::StrCat("goes on with empty rows on shard ",
                               absl::StrJoin(table.shards, ", "),
                               ", which had lost ",
                               table.num_lost_rows < 0
                                   ? "it"
                                   : absl::StrCat(table.num_lost_rows,
                                                  " rows, as last counted,"),
                               " in a restart")));
  }
}

}  // namespace

absl::StatusOr<uint64_t> ClusterTables::Make(const TableConfig& config,
                                             uint64_t incarnation) {
  const uint64_t known = KnownIncarnation(config.name);
  TFSWITCH_ASSIGN_OR_RETURN(const Parts parts, PartsOf(config.name));
  if (FirstOf(parts) != nullptr) {
    TFSWITCH_ASSIGN_OR_RETURN(const TableInfo info, Join(config.name, parts));
    TFSWITCH_RETURN_IF_ERROR(info.lost);
    incarnation = info.identity.incarnation;
  }
  if (known != 0) {
    // The error of this call says whether the table was dropped or lost.
    const absl::Status status =
        shards_[0]->ListTables({config.name, known}).status();
    if (!absl::IsNotFound(status)) TFSWITCH_RETURN_IF_ERROR(status);
  }
  TFSWITCH_ASSIGN_OR_RETURN(std::vector<uint64_t> instances, ShardInstances());
  TableIdentity identity{incarnation, std::move(instances)};
  for (size_t i = shards_.size(); i-- > 0;) {
    TFSWITCH_ASSIGN_OR_RETURN(identity.incarnation,
                              shards_[i]->MakeTable(config, identity, 0));
  }
  // The table may exist already, with an optimizer.
  if (config.optimizer.is_open) {
    TFSWITCH_RETURN_IF_ERROR(
        List({config.name, identity.incarnation}).status());
  } else {
    Remember(config.name, {config, identity.incarnation, {}});
  }
  return identity.incarnation;
}

absl::Status ClusterTables::Drop(const std::string& table) {
  // Calls every shard, also after an error, so that as many parts as possible
  // are dropped. A shard that has lost its part has nothing to drop.
  absl::Status first;
  bool is_dropped = false;
  for (const auto& shard : shards_) {
    absl::Status status = shard->DropTable(table);
    is_dropped = is_dropped || status.ok();
    if (first.ok() || absl::IsNotFound(first)) first = std::move(status);
  }
  if (is_dropped && absl::IsNotFound(first)) first = absl::OkStatus();
  if (first.ok() || absl::IsNotFound(first)) Forget({table});
  return first;
}

absl::StatusOr<TableInfo> ClusterTables::List(const TableRef& table) {
  TableRef known = table;
  if (known.incarnation == 0) known.incarnation = KnownIncarnation(table.name);
  TFSWITCH_ASSIGN_OR_RETURN(const Parts parts, PartsOf(known));
  TFSWITCH_ASSIGN_OR_RETURN(TableInfo info, Join(known.name, parts));
  TFSWITCH_RETURN_IF_ERROR(info.lost);
  Remember(info, parts);
  return info;
}

absl::StatusOr<std::vector<TableInfo>> ClusterTables::ListAll() {
  TFSWITCH_ASSIGN_OR_RETURN(const auto tables, Survey());
  std::vector<TableInfo> infos;
  for (const auto& [name, table] : tables) {
    // If this client knew another incarnation, GoOn() must report the change
    // first.
    if (table.info.lost.ok() && !table.is_other()) {
      Remember(table.info, table.parts);
    }
    infos.push_back(table.info);
  }
  return infos;
}

absl::StatusOr<std::vector<uint64_t>> ClusterTables::ShardInstances() const {
  std::vector<uint64_t> instances;
  for (const auto& shard : shards_) {
    TFSWITCH_ASSIGN_OR_RETURN(const std::vector<uint64_t> own,
                              shard->ShardInstances());
    instances.insert(instances.end(), own.begin(), own.end());
  }
  return instances;
}

absl::StatusOr<std::vector<ResetTable>> ClusterTables::ResetLost() {
  std::vector<ResetTable> changed;
  const absl::Status status = GoOn(/*may_reset=*/true, &changed);
  if (status.ok()) return changed;
  Warn(changed);
  return status;
}

absl::Status ClusterTables::Recover() {
  std::vector<ResetTable> changed;
  absl::Status status =
      GoOn(on_lost_tables_ == OnLostTables::kRecreate, &changed);
  Warn(changed);
  return status;
}

absl::StatusOr<ClusterTables::TableRouting> ClusterTables::RoutingOf(
    const std::string& table) {
  for (bool has_asked = false;; has_asked = true) {
    {
      MutexLock lock(&mutex_);
      const auto it = known_.find(table);
      if (it != known_.end()) {
        return TableRouting{it->second.config.num_virtual_shards,
                            it->second.incarnation,
                            it->second.config.optimizer.is_dense};
      }
    }
    if (has_asked) {
      return absl::UnavailableError(absl::StrCat(
          "table '", table,
          "' is not on all servers: another process is making or dropping it. "
          "Try again, or make it with this process, too"));
    }
    TFSWITCH_RETURN_IF_ERROR(List(table).status());
  }
}

uint64_t ClusterTables::KnownIncarnation(const std::string& table) {
  MutexLock lock(&mutex_);
  const auto it = known_.find(table);
  return it == known_.end() ? 0 : it->second.incarnation;
}

void ClusterTables::Forget(const std::vector<std::string>& tables) {
  MutexLock lock(&mutex_);
  for (const std::string& table : tables) known_.erase(table);
}

const TableInfo* ClusterTables::FirstOf(const Parts& parts) {
  for (const std::optional<TableInfo>& part : parts) {
    if (part.has_value()) return &*part;
  }
  return nullptr;
}

absl::StatusOr<ClusterTables::Parts> ClusterTables::PartsOf(
    const TableRef& table) const {
  Parts parts(shards_.size());
  for (size_t i = 0; i < shards_.size(); ++i) {
    auto infos = shards_[i]->ListTables(table);
    if (absl::IsNotFound(infos.status())) continue;
    TFSWITCH_RETURN_IF_ERROR(infos.status());
    if (infos->size() == 1) parts[i] = std::move(infos->front());
  }
  return parts;
}

absl::StatusOr<TableInfo> ClusterTables::Join(const std::string& name,
                                              const Parts& parts) const {
  const TableInfo* const first = FirstOf(parts);
  if (first == nullptr) {
    // Asks the shard, because its error names the tables that exist.
    const absl::Status status = shards_[0]->ListTables(name).status();
    if (!status.ok()) return status;
    return absl::NotFoundError(absl::StrCat("no table '", name, "' yet"));
  }
  TableInfo sum;
  sum.config = first->config;
  sum.slot_floats = first->slot_floats;
  sum.stats.row_stride_bytes = first->stats.row_stride_bytes;
  sum.identity = first->identity;
  sum.num_shards = 0;
  for (const std::optional<TableInfo>& part : parts) {
    if (!part.has_value()) continue;
    ++sum.num_shards;
    // Another process is setting the table's optimizer, shard by shard.
    if (sum.config.optimizer.is_open && !part->config.optimizer.is_open) {
      sum.config = part->config;
      sum.slot_floats = part->slot_floats;
      sum.stats.row_stride_bytes = part->stats.row_stride_bytes;
    }
#define TFSWITCH_ADD(name) sum.stats.name += part->stats.name;
    TFSWITCH_TABLE_SIZES(TFSWITCH_ADD)
    TFSWITCH_TABLE_COUNTERS(TFSWITCH_ADD)
#undef TFSWITCH_ADD
    // Each server counts all steps of the table, so the counts are not added.
    sum.stats.num_steps = std::max(sum.stats.num_steps, part->stats.num_steps);
  }
  const std::vector<uint64_t>& born = sum.identity.shard_instances;
  for (size_t i = 0; i < parts.size() && sum.lost.ok(); ++i) {
    if (!parts[i].has_value()) {
      // If the server still runs since the table was made, it has not made its
      // part yet, or has just dropped it. If it was restarted, it has lost the
      // part.
      TFSWITCH_ASSIGN_OR_RETURN(const std::vector<uint64_t> now,
                                shards_[i]->ShardInstances());
      if (born.size() == parts.size() && now[0] == born[i]) continue;
    } else if (parts[i]->identity.incarnation == sum.identity.incarnation) {
      continue;
    }
    sum.lost =
        shards_[i]->ListTables({name, sum.identity.incarnation}).status();
  }
  return sum;
}

absl::Status ClusterTables::LostEverywhere(const TableRef& table) {
  absl::Status lost;
  for (const auto& shard : shards_) {
    absl::Status status = shard->ListTables(table).status();
    if (absl::IsDataLoss(status)) {
      lost.Update(std::move(status));
      continue;
    }
    if (!status.ok() && !absl::IsNotFound(status)) return status;
    Forget({table.name});
    return absl::OkStatus();
  }
  return lost;
}

absl::StatusOr<std::map<std::string, ClusterTables::Surveyed>>
ClusterTables::Survey() {
  std::map<std::string, Surveyed> tables;
  for (size_t i = 0; i < shards_.size(); ++i) {
    TFSWITCH_ASSIGN_OR_RETURN(std::vector<TableInfo> infos,
                              shards_[i]->ListTables(""));
    for (TableInfo& info : infos) {
      Parts& parts = tables[info.config.name].parts;
      parts.resize(shards_.size());
      parts[i] = std::move(info);
    }
  }
  {
    MutexLock lock(&mutex_);
    for (const auto& [name, known] : known_) tables[name].known = known;
  }
  for (auto it = tables.begin(); it != tables.end();) {
    auto& [name, table] = *it;
    if (!table.parts.empty()) {
      TFSWITCH_ASSIGN_OR_RETURN(table.info, Join(name, table.parts));
    } else {
      table.parts.resize(shards_.size());
      table.info.config = table.known->config;
      table.info.num_shards = 0;
      table.info.lost = LostEverywhere({name, table.known->incarnation});
      if (table.info.lost.ok()) {  // The table was dropped.
        it = tables.erase(it);
        continue;
      }
      if (!absl::IsDataLoss(table.info.lost)) return table.info.lost;
    }
    ++it;
  }
  return tables;
}

absl::Status ClusterTables::GoOn(bool may_reset,
                                 std::vector<ResetTable>* changed) {
  TFSWITCH_ASSIGN_OR_RETURN(const auto tables, Survey());
  for (const auto& [name, table] : tables) {
    if (table.info.lost.ok()) {
      if (!table.is_other()) continue;
      changed->push_back({name, {}, -1});
      Remember(table.info, table.parts);
      // The table was made again by a process that only reads, so it has no
      // optimizer yet. Sets the one that this client knows.
      if (table.info.config.optimizer.is_open && table.known.has_value()) {
        TFSWITCH_RETURN_IF_ERROR(
            Make(table.known->config, table.info.identity.incarnation)
                .status());
      }
    } else if (may_reset) {
      TFSWITCH_ASSIGN_OR_RETURN(ResetTable reset, Reset(name, table));
      changed->push_back(std::move(reset));
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<ResetTable> ClusterTables::Reset(const std::string& name,
                                                const Surveyed& table) {
  const Parts& parts = table.parts;
  const TableInfo* const present = FirstOf(parts);
  ResetTable reset;
  reset.name = name;
  const bool is_counted =
      table.known.has_value() && table.known->num_rows.size() == shards_.size();
  if (is_counted) reset.num_lost_rows = 0;
  TFSWITCH_ASSIGN_OR_RETURN(std::vector<uint64_t> instances, ShardInstances());
  TableIdentity identity{DrawId(), std::move(instances)};
  const std::optional<TableInfo>& last = parts.back();
  if (last.has_value() &&
      last->identity.incarnation != present->identity.incarnation) {
    // Another process is resetting the table too, and has begun with the last
    // shard.
    identity.incarnation = last->identity.incarnation;
  }
  for (size_t i = shards_.size(); i-- > 0;) {
    if (!parts[i].has_value()) {
      reset.shards.insert(reset.shards.begin(), static_cast<int>(i));
      if (is_counted) reset.num_lost_rows += table.known->num_rows[i];
    }
    // If another process resets the table too, both take the incarnation that
    // the last shard answers.
    TFSWITCH_ASSIGN_OR_RETURN(
        identity.incarnation,
        shards_[i]->MakeTable(
            table.info.config, identity,
            parts[i].has_value() ? parts[i]->identity.incarnation : 0));
  }
  Remember(name, {table.info.config, identity.incarnation, {}});
  return reset;
}

void ClusterTables::Remember(const TableInfo& info, const Parts& parts) {
  Known known{info.config, info.identity.incarnation, {}};
  for (const std::optional<TableInfo>& part : parts) {
    if (!part.has_value()) return;
    known.num_rows.push_back(part->stats.num_rows);
  }
  // The count of 0 says nothing: rows of a table that was just made are not
  // counted yet.
  if (info.stats.num_rows == 0) known.num_rows.clear();
  Remember(info.config.name, std::move(known));
}

void ClusterTables::Remember(const std::string& name, Known known) {
  MutexLock lock(&mutex_);
  known_[name] = std::move(known);
}

}  // namespace tfswitch
