#include "cc/rpc/server/call_rules.h"

#include <cstdint>
#include <string>

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

absl::Status CheckRowQuota(const Visit& visit, const Shard& shard) {
  if (visit.token() == nullptr) return absl::OkStatus();
  const TokenRecord& record = visit.token()->record;
  const uint64_t limit = record.quota.max_rows;
  if (limit == TokenQuota::kNone) return absl::OkStatus();
  const int64_t count = visit.token()->use->CountRows([&] {
    int64_t rows = 0;
    for (const auto& table : shard.Tables()) {
      if (record.MayUse(table->config().name)) rows += table->size();
    }
    return rows;
  });
  if (static_cast<uint64_t>(count) < limit) return absl::OkStatus();
  return OverQuota(record, count, "rows in the tables", limit, "max_rows");
}

absl::Status CheckCall(const Visit& visit, const Shard& shard,
                       const v1::CreateTableRequest& request) {
  if (visit.token() == nullptr) return absl::OkStatus();
  const TokenRecord& record = visit.token()->record;
  int64_t count = 0;
  bool is_there = false;
  for (const auto& table : shard.Tables()) {
    const std::string& name = table->config().name;
    if (name == request.config().name()) is_there = true;
    if (record.MayUse(name)) ++count;
  }
  if (is_there && request.replaced_incarnation() == 0) return absl::OkStatus();
  TFSWITCH_RETURN_IF_ERROR(
      visit.CheckRole(v1::ROLE_TRAIN, "to make a table that is not there"));
  const uint64_t limit = record.quota.max_tables;
  if (is_there || static_cast<uint64_t>(count) < limit) {
    return absl::OkStatus();
  }
  return OverQuota(record, count, "tables", limit, "max_tables");
}

absl::Status CheckCall(const Visit& visit, const Shard& shard,
                       const v1::CreateWorkQueueRequest& request) {
  if (visit.May(v1::ROLE_ADMIN)) return absl::OkStatus();
  TFSWITCH_ASSIGN_OR_RETURN(const auto coordinator, shard.FindCoordinator());
  if (coordinator->WorkQueueStats(request.group(), request.queue()).ok()) {
    return absl::OkStatus();
  }
  return visit.CheckRole(v1::ROLE_ADMIN,
                         "to make a work queue that is not there");
}

}  // namespace tfswitch
