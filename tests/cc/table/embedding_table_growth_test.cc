// Growth of a table: no key is lost, and memory is bounded.

#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <fstream>
#include <vector>

#include "cc/base/page_keeper.h"
#include "cc/table/stripe_index.h"
#include "gtest/gtest.h"
#include "tests/cc/table/table_testing.h"

namespace tfswitch {
namespace {

int64_t ResidentBytes() {
  std::ifstream statm("/proc/self/statm");
  int64_t total = 0;
  int64_t resident = 0;
  statm >> total >> resident;
  return resident * sysconf(_SC_PAGESIZE);
}

TEST(EmbeddingTableGrowthTest, IndexStaysWithin26BytesPerKeyWhileGrowing) {
  auto table = MakeTable(/*dim=*/1);
  const int64_t first = 1000000 / kSlowdown;
  const int64_t last = 3 * first;
  const int64_t step = first / 500;
  double worst = 0.0;

  FindOrInsertAll(table.get(), KeyRange(0, first));
  for (int64_t size = first; size < last; size += step) {
    FindOrInsertAll(table.get(), KeyRange(size, step));
    const TableStats stats = table->stats();
    ASSERT_EQ(stats.num_rows, size + step);
    worst = std::max(worst, static_cast<double>(stats.index_bytes) /
                                static_cast<double>(stats.num_rows));
  }

  RecordProperty("worst_bytes_per_key", std::to_string(worst));
  // A tenth of the keys has ten times the rounding to pages per key.
  EXPECT_LE(worst, static_cast<double>(kMaxIndexBytesPerKey) +
                       (kSlowdown > 1 ? 6.0 : 0.0));
  for (Key key = 0; key < last; key += 997) {
    std::vector<float> out(1);
    ASSERT_EQ(table->Find({key}, absl::MakeSpan(out)).value(), 1) << key;
  }
}

TEST(EmbeddingTableGrowthTest, NoKeyIsLostAtAnySize) {
  auto table = MakeTable(/*dim=*/1);
  const int64_t last = 300000 / kSlowdown;
  const std::vector<Key> all = KeyRange(0, last);
  std::vector<float> values;
  for (int64_t i = 0; i < last; ++i) values.push_back(static_cast<float>(i));

  for (int64_t size = 0; size < last;) {
    const int64_t step = std::min<int64_t>(last - size, 1 + size / 7);
    ASSERT_TRUE(Assign(*table, absl::MakeConstSpan(all).subspan(size, step),
                       absl::MakeConstSpan(values).subspan(size, step))
                    .ok());
    size += step;
    const std::vector<float> out = FindAll(*table, all);
    for (int64_t i = 0; i < last; ++i) {
      ASSERT_EQ(out[i], i < size ? static_cast<float>(i) : 0.0f) << size;
    }
  }
}

TEST(EmbeddingTableGrowthTest, SmallTableStaysSmall) {
  // The process's own start-up allocations are behind us with the first one.
  auto first = MakeTable(/*dim=*/16, AdagradConfig{});
  FindOrInsertAll(first.get(), KeyRange(0, 100));
  [[maybe_unused]] const int64_t before = ResidentBytes();

  constexpr int kNumTables = 8;
  std::vector<std::unique_ptr<EmbeddingTable>> tables;
  for (int i = 0; i < kNumTables; ++i) {
    tables.push_back(MakeTable(/*dim=*/16, AdagradConfig{}));
    FindOrInsertAll(tables.back().get(), KeyRange(0, 100));
  }

  const TableStats stats = first->stats();
  EXPECT_LT(stats.index_bytes + stats.row_bytes + stats.reserved_bytes,
            1 << 20);
#if !TFSWITCH_THREAD_SANITIZER  // Its shadow memory counts.
  EXPECT_LT((ResidentBytes() - before) / kNumTables, 1 << 20);
#endif
}

TEST(EmbeddingTableGrowthTest, BookkeepingAgreesWithTheResidentSize) {
#if TFSWITCH_THREAD_SANITIZER || defined(__SANITIZE_ADDRESS__)
  GTEST_SKIP() << "the sanitizer's own memory counts";
#endif
  const int64_t num_keys = 1000000;
  const int64_t step = 50000;
  std::vector<Key> keys(step);
  std::vector<float> out(step * 16);
  const int64_t before = ResidentBytes();
  auto table = MakeTable(/*dim=*/16, AdagradConfig{});
  for (int64_t size = 0; size < num_keys; size += step) {
    for (int64_t i = 0; i < step; ++i) keys[i] = size + i;
    ASSERT_TRUE(table->FindOrInsert(keys, absl::MakeSpan(out)).ok());
  }
  PageKeeper::Get().WaitUntilIdle();

  const int64_t resident = ResidentBytes() - before;
  const TableStats stats = table->stats();
  const int64_t counted =
      stats.index_bytes + stats.row_bytes + stats.reserved_bytes;
  EXPECT_NEAR(static_cast<double>(resident), static_cast<double>(counted),
              0.05 * static_cast<double>(counted));
  RecordProperty("bytes_per_key", std::to_string(resident / num_keys));
}

TEST(EmbeddingTableGrowthTest, ReservedTableKeepsItsRowsAndGrowsNoMore) {
  auto table = MakeTable(/*dim=*/1);
  const int64_t last = 200000 / kSlowdown;
  const std::vector<Key> before = KeyRange(0, last / 10);
  const std::vector<float> values(before.size(), 7.0f);
  ASSERT_TRUE(Assign(*table, before, values).ok());

  table->Reserve(static_cast<uint64_t>(last));
  const int64_t index_bytes = table->stats().index_bytes;
  EXPECT_EQ(FindAll(*table, before), values);
  FindOrInsertAll(table.get(), KeyRange(0, last));

  EXPECT_EQ(table->stats().index_bytes, index_bytes);
  EXPECT_EQ(table->size(), last);
  EXPECT_EQ(FindAll(*table, before), values);
  // There are more rows than these already.
  table->Reserve(1);
  EXPECT_EQ(table->stats().index_bytes, index_bytes);
}

TEST(EmbeddingTableGrowthTest, TableMayBeDestroyedWhilePagesAreBeingTouched) {
  std::vector<Key> keys;
  std::vector<float> out;
  for (int round = 0; round < 10; ++round) {
    auto table = MakeTable(/*dim=*/64, AdagradConfig{});
    if (round % 2 == 1) table->Reserve(1000000 / kSlowdown);
    keys = KeyRange(0, (30000 + 5000 * round) / kSlowdown);
    out.resize(keys.size() * 64);
    ASSERT_TRUE(table->FindOrInsert(keys, absl::MakeSpan(out)).ok());
  }
}

}  // namespace
}  // namespace tfswitch
