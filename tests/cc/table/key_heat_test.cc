#include "cc/table/key_heat.h"

#include <random>
#include <vector>

#include "absl/algorithm/container.h"
#include "gtest/gtest.h"

namespace tfswitch {
namespace {

constexpr uint32_t kVirtual = 64;

TEST(KeyHeatTest, FindsTheHotKeyAndItsShareAmongManyKeys) {
  KeyHeat heat(kVirtual);
  EXPECT_EQ(heat.Read(0, kVirtual).sampled_keys, 0);
  std::mt19937_64 random(7);
  constexpr Key kHot = 42;
  int64_t num_keys = 0;
  // One key in four is hot. Batches are shorter and longer than the distance
  // of samples.
  for (int i = 0; i < 4000; ++i) {
    std::vector<Key> keys(1 + random() % 600);
    for (Key& key : keys) {
      key = random() % 4 == 0 ? kHot : static_cast<Key>(random() >> 1);
    }
    num_keys += static_cast<int64_t>(keys.size());
    heat.Note(keys);
  }
  const KeyHeat::Report report = heat.Read(0, kVirtual);
  const double expected = static_cast<double>(num_keys) / KeyHeat::kSampleEvery;
  EXPECT_NEAR(report.sampled_keys, expected, 0.1 * expected);
  ASSERT_EQ(report.hot_keys.size(), KeyHeat::kHotKeys);
  EXPECT_EQ(report.hot_keys[0].key, kHot);
  EXPECT_NEAR(report.hot_keys[0].share, 0.25, 0.03);
  EXPECT_LT(report.hot_keys[1].share, 0.05);
  // The hot key's virtual shard has a quarter of all lookups, and its part of
  // the others.
  EXPECT_NEAR(*absl::c_max_element(report.virtual_shards),
              kVirtual * 0.25 + 0.75, 3);
}

TEST(KeyHeatTest, EvenKeysHaveNoHottestShard) {
  KeyHeat heat(kVirtual);
  std::mt19937_64 random(8);
  std::vector<Key> keys(1 << 21);
  for (Key& key : keys) key = static_cast<Key>(random() >> 1);
  heat.Note(keys);
  const KeyHeat::Report report = heat.Read(0, kVirtual);
  EXPECT_LT(*absl::c_max_element(report.virtual_shards), 1.5);
  EXPECT_LT(report.hot_keys[0].share, 0.002);
}

}  // namespace
}  // namespace tfswitch
