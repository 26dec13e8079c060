// TableInfo describes a table in lists of tables.

#ifndef TFSWITCH_CC_TABLE_TABLE_INFO_H_
#define TFSWITCH_CC_TABLE_TABLE_INFO_H_

#include "absl/status/status.h"
#include "cc/table/embedding_table.h"
#include "cc/table/table_config.h"

namespace tfswitch {

// A table as its owner describes it. Counts of a sharded client are sums.
struct TableInfo {
  TableConfig config;
  TableStats stats;
  int slot_floats = 0;
  int num_shards = 1;  // How many shards have it.
  TableIdentity identity;
  // Why the table is not whole, if a server has lost its part. A table that is
  // being made or dropped does not count as lost.
  absl::Status lost;
};

inline TableInfo DescribeTable(const EmbeddingTable& table) {
  TableInfo info;
  info.config = table.config();
  info.stats = table.stats();
  info.slot_floats = table.slot_floats();
  info.identity = table.identity();
  return info;
}

}  // namespace tfswitch

#endif  // TFSWITCH_CC_TABLE_TABLE_INFO_H_
