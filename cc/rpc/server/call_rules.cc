#include "cc/rpc/server/call_rules.h"

#include <cstdint>
#include <set>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "cc/access/token_list.h"
#include "cc/base/status_macros.h"
#include "cc/sync/coordinator.h"

namespace tfswitch {
namespace {

absl::Status OverQuota(const TokenRecord& record, int64_t count,
                       absl::string_view what, uint64_t limit,
                       absl::string_view name) {
  return absl::ResourceExhaustedError(
      absl::StrCat("token ", record.id, ": there are ", count, " ", what,
                   " that it may use on this server, and its ", name, " is ",
                   limit, "; remove some, or use a token that may have more"));
}

}  // namespace

absl::Status CheckRowQuota(const Caller& caller, const Shard& shard,
                           absl::Span<const Insertion> insertions) {
  if (caller.token() == nullptr || insertions.empty()) return absl::OkStatus();
  const TokenRecord& record = caller.token()->record;
  if (record.quota.max_rows == TokenQuota::kNone) return absl::OkStatus();
  const auto count_rows = [&] {
    int64_t rows = 0;
    for (const auto& each : shard.tables().All()) {
      if (!record.MayUse(each->config().name)) continue;
      rows += each->size();
      if (each->config().admission.has_candidates()) {
        rows += each->stats().num_candidates;
      }
    }
    return rows;
  };
  TokenUse& use = *caller.token()->use;
  size_t num_keys = 0;
  for (const Insertion& each : insertions) num_keys += each.keys.size();
  if (use.ReserveRows(record, num_keys, /*now=*/false, count_rows)) {
    return absl::OkStatus();
  }
  std::set<std::pair<const EmbeddingTable*, Key>> missing;
  for (const Insertion& each : insertions) {
    std::vector<UsageOfRow> usage(each.keys.size());
    std::vector<KeyState> states(each.keys.size());
    TFSWITCH_RETURN_IF_ERROR(each.table->ReadUsage(
        each.keys, kServersDay, absl::MakeSpan(usage), absl::MakeSpan(states)));
    for (size_t i = 0; i < states.size(); ++i) {
      if (states[i] == KeyState::kUnknown) {
        missing.emplace(each.table, each.keys[i]);
      }
    }
  }
  if (missing.empty() ||
      use.ReserveRows(record, missing.size(), /*now=*/true, count_rows)) {
    return absl::OkStatus();
  }
  return OverQuota(record, count_rows(),
                   absl::StrCat("rows in the tables, and ", missing.size(),
                                " more to make,"),
                   record.quota.max_rows, "max_rows");
}

absl::Status CheckTableQuota(const Caller& caller, const Shard& shard) {
  if (caller.token() == nullptr) return absl::OkStatus();
  const TokenRecord& record = caller.token()->record;
  const uint64_t limit = record.quota.max_tables;
  int64_t count = 0;
  for (const auto& table : shard.tables().All()) {
    if (record.MayUse(table->config().name)) ++count;
  }
  if (static_cast<uint64_t>(count) < limit) return absl::OkStatus();
  return OverQuota(record, count, "tables", limit, "max_tables");
}

absl::Status CheckCall(const Caller& caller, const Shard& shard,
                       const v1::CreateTableRequest& request) {
  const auto present = shard.FindTable(request.config().name());
  if (!present.ok()) {
    return caller.CheckRole(v1::ROLE_TRAIN,
                            "to make a table that is not there");
  }
  if (request.replaced_incarnation() != 0) {
    return caller.CheckRole(v1::ROLE_TRAIN, "to make a lost table again");
  }
  if ((*present)->config().optimizer.is_open &&
      !request.config().optimizer().is_open()) {
    return caller.CheckRole(v1::ROLE_TRAIN, "to give a table its optimizer");
  }
  return absl::OkStatus();
}

absl::Status CheckCall(const Caller& caller, const Shard& shard,
                       const v1::CreateWorkQueueRequest& request) {
  if (caller.May(v1::ROLE_ADMIN)) return absl::OkStatus();
  TFSWITCH_ASSIGN_OR_RETURN(const auto coordinator, shard.FindCoordinator());
  if (coordinator->WorkQueueStats(request.group(), request.queue()).ok()) {
    return absl::OkStatus();
  }
  return caller.CheckRole(v1::ROLE_ADMIN,
                          "to make a work queue that is not there");
}

}  // namespace tfswitch
