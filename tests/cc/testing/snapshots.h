// A snapshot of one table, for tests.

#ifndef TFSWITCH_TESTS_CC_TESTING_SNAPSHOTS_H_
#define TFSWITCH_TESTS_CC_TESTING_SNAPSHOTS_H_

#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "cc/checkpoint/checkpoint.h"
#include "cc/table/embedding_table.h"

namespace tfswitch {

inline std::unique_ptr<TableSnapshot> SnapshotOf(
    EmbeddingTable& table, const ChangeCursor& since = ChangeCursor()) {
  table.Hold();
  auto snapshot = table.TakeSnapshot(since).value();
  table.Release();
  return snapshot;
}

inline absl::Status AddTable(EmbeddingTable& table,
                             checkpoint::PartWriter& writer) {
  return writer.AddTable(*SnapshotOf(table), [](int64_t) {});
}

}  // namespace tfswitch

#endif  // TFSWITCH_TESTS_CC_TESTING_SNAPSHOTS_H_
