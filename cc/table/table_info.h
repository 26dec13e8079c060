// TableInfo is the description of a table in lists of tables.

#ifndef TFSWITCH_CC_TABLE_TABLE_INFO_H_
#define TFSWITCH_CC_TABLE_TABLE_INFO_H_

#include "absl/status/status.h"
#include "cc/table/embedding_table.h"
#include "cc/table/table_config.h"

namespace tfswitch {

// Lists the fields of TableStats whose sums over shards describe the whole
// table, besides TFSWITCH_TABLE_COUNTERS. TableInfo of the protocol has the
// same ones.
#define TFSWITCH_TABLE_SIZES(V) \
  V(num_rows)                   \
  V(index_bytes)                \
  V(row_bytes)                  \
  V(reserved_bytes)             \
  V(inserted_rows)              \
  V(erased_rows)                \
  V(num_candidates)             \
  V(admission_bytes)            \
  V(change_bytes)               \
  V(cold_rows)                  \
  V(cold_file_bytes)            \
  V(cold_memory_bytes)          \
  V(cold_written_bytes)         \
  V(cold_block_reads)

// The description of a table by the server that has it. In a sharded client,
// the counts are sums over servers.
struct TableInfo {
  TableConfig config;
  TableStats stats;
  int slot_floats = 0;
  int num_shards = 1;  // How many shards have it.
  TableIdentity identity;
  // Empty if the table is complete. Otherwise tells which server has lost its
  // part. A table that is just being made or dropped does not count as lost.
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
