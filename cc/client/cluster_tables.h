// A client's knowledge of the tables of a cluster.

#ifndef TFSWITCH_CC_CLIENT_CLUSTER_TABLES_H_
#define TFSWITCH_CC_CLIENT_CLUSTER_TABLES_H_

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "cc/base/mutex.h"
#include "cc/client/parameter_client.h"

namespace tfswitch {

// Calls need the number of virtual shards of their table, and its incarnation.
// This class knows them for tables that its client has made or listed, and asks
// for others once. It takes another incarnation only if the caller learns of
// it: in a call that makes, lists or resets tables, or by a warning.
//
// Thread-safe.
class ClusterTables {
 public:
  using Shards = std::vector<std::unique_ptr<ParameterClient>>;

  // The routing of a table that a call needs.
  struct TableRouting {
    uint32_t num_virtual_shards = 0;
    uint64_t incarnation = 0;
    bool is_dense = false;  // Each push goes to all shards.
  };

  // REQUIRES: `shards` stay as they are, and outlive it.
  ClusterTables(const Shards& shards, OnLostTables on_lost_tables)
      : shards_(shards), on_lost_tables_(on_lost_tables) {}

  // Calls of ParameterClient, made to all shards. A table that is not whole
  // gives DataLoss; ListAll() puts the error in TableInfo::lost.
  absl::StatusOr<uint64_t> Make(const TableConfig& config,
                                uint64_t incarnation);
  absl::Status Drop(const std::string& table);
  absl::StatusOr<TableInfo> List(const TableRef& table);
  absl::StatusOr<std::vector<TableInfo>> ListAll();
  absl::StatusOr<std::vector<uint64_t>> ShardInstances() const;
  absl::StatusOr<std::vector<ResetTable>> ResetLost();

  // NotFound if there is no such table; Unavailable while a process makes it.
  absl::StatusOr<TableRouting> RoutingOf(const std::string& table);
  // 0 if the table is not known.
  uint64_t KnownIncarnation(const std::string& table);
  // Forgets tables that may have been replaced.
  void Forget(const std::vector<std::string>& tables);

  void set_on_lost_tables(OnLostTables on_lost_tables) {
    on_lost_tables_ = on_lost_tables;
  }
  bool recovers() const { return on_lost_tables_ != OnLostTables::kFail; }
  // Recovers after a DataLoss as `on_lost_tables` says, and warns on stderr.
  // REQUIRES: recovers().
  absl::Status Recover();

 private:
  // A table as this client saw it last.
  struct Known {
    TableConfig config;
    uint64_t incarnation = 0;
    std::vector<int64_t> num_rows;  // By shard; empty if not counted.
  };
  // Each shard's part of one table; nullopt if the shard has no such table.
  using Parts = std::vector<std::optional<TableInfo>>;
  struct Surveyed {
    std::optional<Known> known;
    Parts parts;
    TableInfo info;  // Without shards, if all have lost the table.

    bool is_other() const {
      return known.has_value() &&
             known->incarnation != info.identity.incarnation;
    }
  };

  static const TableInfo* FirstOf(const Parts& parts);
  absl::StatusOr<Parts> PartsOf(const TableRef& table) const;
  // Sums up the parts, and finds out whether a server has lost one. NotFound if
  // there are no parts.
  absl::StatusOr<TableInfo> Join(const std::string& name,
                                 const Parts& parts) const;
  // For a table that no shard has. DataLoss if it is lost. If a shard knows
  // that it was dropped, forgets it and returns OK.
  absl::Status LostEverywhere(const TableRef& table);
  // By name, all tables that are on a shard, and known ones that are lost.
  absl::StatusOr<std::map<std::string, Surveyed>> Survey();
  // Accepts tables that have another incarnation than this client knew. Whole
  // tables are accepted as they are; tables with lost parts are reset if
  // `may_reset`. `changed` lists the accepted ones, also after an error.
  absl::Status GoOn(bool may_reset, std::vector<ResetTable>* changed);
  // Makes the missing parts of a table. All parts get a new incarnation, so
  // that other processes notice it, and older checkpoints can be told apart.
  absl::StatusOr<ResetTable> Reset(const std::string& name,
                                   const Surveyed& table);
  // REQUIRES: every shard has a part of the table.
  void Remember(const TableInfo& info, const Parts& parts);
  void Remember(const std::string& name, Known known);

  const Shards& shards_;
  std::atomic<OnLostTables> on_lost_tables_;
  Mutex mutex_;
  std::map<std::string, Known> known_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace tfswitch

#endif  // TFSWITCH_CC_CLIENT_CLUSTER_TABLES_H_
