// The tables of a cluster as a client knows them.

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

// Caches for each table its number of virtual shards and its incarnation (the
// id that a table gets each time it is made). Most calls must send both. Tables
// that this client has made or listed are in the cache; for any other table the
// servers are asked once. A cached incarnation is replaced only in ways that
// the caller notices: in a call that makes, lists or resets tables, or with a
// warning.
//
// Thread-safe.
class ClusterTables {
 public:
  using Shards = std::vector<std::unique_ptr<ParameterClient>>;

  // Says where a table's keys are. Calls for the table need it.
  struct TableRouting {
    uint32_t num_virtual_shards = 0;
    uint64_t incarnation = 0;
    bool is_dense = false;  // Each push goes to all shards.
  };

  // REQUIRES: `shards` does not change, and outlives this object.
  ClusterTables(const Shards& shards, OnLostTables on_lost_tables)
      : shards_(shards), on_lost_tables_(on_lost_tables) {}

  // The calls of ParameterClient, sent to all shards. If a shard has lost its
  // part of a table, they return DataLoss; ListAll() puts that error in
  // TableInfo::lost.
  absl::StatusOr<uint64_t> Make(const TableConfig& config,
                                uint64_t incarnation);
  absl::Status Drop(const std::string& table);
  absl::StatusOr<TableInfo> List(const TableRef& table);
  absl::StatusOr<std::vector<TableInfo>> ListAll();
  absl::StatusOr<std::vector<uint64_t>> ShardInstances() const;
  absl::StatusOr<std::vector<ResetTable>> ResetLost();

  // NotFound if there is no such table; Unavailable while a process is making
  // the table on the shards.
  absl::StatusOr<TableRouting> RoutingOf(const std::string& table);
  // 0 if the cache does not have the table.
  uint64_t KnownIncarnation(const std::string& table);
  // Removes tables that may have been replaced from the cache.
  void Forget(const std::vector<std::string>& tables);

  void set_on_lost_tables(OnLostTables on_lost_tables) {
    on_lost_tables_ = on_lost_tables;
  }
  bool recovers() const { return on_lost_tables_ != OnLostTables::kFail; }
  // Called after a call returned DataLoss: does what `on_lost_tables` says, and
  // writes a warning to stderr.
  absl::Status Recover();

 private:
  // A table as it was when this client last asked the servers.
  struct Known {
    TableConfig config;
    uint64_t incarnation = 0;
    std::vector<int64_t> num_rows;  // By shard; may be empty.
  };
  // Each shard's part of one table; nullopt if the shard has no such table.
  using Parts = std::vector<std::optional<TableInfo>>;
  struct Surveyed {
    std::optional<Known> known;
    Parts parts;
    TableInfo info;  // num_shards is 0 if all have lost it.

    bool is_other() const {
      return known.has_value() &&
             known->incarnation != info.identity.incarnation;
    }
  };

  static const TableInfo* FirstOf(const Parts& parts);
  absl::StatusOr<Parts> PartsOf(const TableRef& table) const;
  // Sums up the parts, and finds out whether a server has lost its part.
  // NotFound if no shard has a part.
  absl::StatusOr<TableInfo> Join(const std::string& name,
                                 const Parts& parts) const;
  // For a table that no shard has. Returns DataLoss if the table is lost. If a
  // shard knows that the table was dropped, removes it from the cache and
  // returns OK.
  absl::Status LostEverywhere(const TableRef& table);
  // Returns, by name, all tables of which a shard has a part, and the tables of
  // the cache that all shards have lost.
  absl::StatusOr<std::map<std::string, Surveyed>> Survey();
  // Accepts tables whose incarnation is not the cached one. Whole tables are
  // accepted as they are. Tables with lost parts are reset if `may_reset`.
  // `changed` lists the accepted tables, also after an error.
  absl::Status GoOn(bool may_reset, std::vector<ResetTable>* changed);
  // Makes the missing parts of a table. All parts get a new incarnation: so
  // other processes notice the reset, and older checkpoints are seen to be of
  // the former table.
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
