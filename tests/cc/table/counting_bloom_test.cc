#include "cc/table/counting_bloom.h"

#include <random>
#include <thread>
#include <vector>

#include "gtest/gtest.h"

namespace tfswitch {
namespace {

TEST(CountingBloomTest, SizesAreThoseOfTheFormula) {
  // 2^30 keys at 1 %: 10.29e9 cells and 7 hashes.
  const BloomMinCountAdmission config = {3, uint64_t{1} << 30, 0.01f};
  EXPECT_NEAR(CountingBloom::SizeBytes(config, 1024), 10.29e9, 0.01e9);
  EXPECT_EQ(CountingBloom({3, 1000, 0.01f}, 1).num_hashes(), 7);
  EXPECT_EQ(CountingBloom({3, 1000, 0.5f}, 1).num_hashes(), 1);
  // Prime seeds run out at 25 hashes elsewhere.
  EXPECT_EQ(CountingBloom({3, 1000, 1e-9f}, 1).num_hashes(), 30);
  // Two bytes where one does not hold the limit.
  EXPECT_EQ(
      CountingBloom({255, 100'000, 0.01f}, 1).bytes_per_virtual_shard() * 2,
      CountingBloom({256, 100'000, 0.01f}, 1).bytes_per_virtual_shard());
}

TEST(CountingBloomTest, CountsUpToTheLimitAndNoFurther) {
  for (const uint32_t limit : {1u, 3u, 255u, 256u, 65535u}) {
    CountingBloom bloom({limit, 1000, 0.01f}, 16);
    EXPECT_EQ(bloom.Add(7, 0), 0u);
    EXPECT_EQ(bloom.Add(7, limit - 1), limit - 1);
    EXPECT_EQ(bloom.Add(7, 1), limit);
    // A cell that overflows would count from 0 again.
    EXPECT_EQ(bloom.Add(7, 1000), limit);
    EXPECT_EQ(bloom.Add(7, 0xffffffffu), limit);
    EXPECT_EQ(bloom.Add(7, 0), limit);
  }
}

TEST(CountingBloomTest, FalsePositivesAreAsFewAsAsked) {
  const int kKeys = 200'000;
  CountingBloom bloom({2, kKeys, 0.01f}, 64);
  std::mt19937_64 random(5);
  int too_high = 0;
  for (int i = 0; i < kKeys; ++i) {
    too_high += bloom.Add(static_cast<Key>(random()), 1) > 1 ? 1 : 0;
  }
  // While it fills, fewer than when it is full.
  EXPECT_LE(too_high, kKeys / 100);
  EXPECT_GT(too_high, 0);
}

TEST(CountingBloomTest, SavedVirtualShardsCountOn) {
  const BloomMinCountAdmission config = {5, 10'000, 0.01f};
  CountingBloom saved(config, 8);
  CountingBloom loaded(config, 8);
  for (Key key = 0; key < 100; ++key) saved.Add(key, 3);
  for (uint32_t shard = 0; shard < 8; ++shard) {
    EXPECT_TRUE(saved.IsTouched(shard));
    EXPECT_FALSE(loaded.IsTouched(shard));
    loaded.Load(shard, saved.Cells(shard));
  }
  for (Key key = 0; key < 100; ++key) EXPECT_EQ(loaded.Add(key, 0), 3u);
}

TEST(CountingBloomTest, ThreadsThatCountOtherKeysDoNotLoseAny) {
  CountingBloom bloom({1000, 100'000, 1e-4f}, 4);
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&bloom, t] {
      for (int round = 0; round < 20; ++round) {
        for (Key key = 0; key < 500; ++key) bloom.Add(4 * key + t, 1);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (Key key = 0; key < 2000; ++key) EXPECT_GE(bloom.Add(key, 0), 20u) << key;
}

}  // namespace
}  // namespace tfswitch
