#include "cc/serving/row_cache.h"

#include <chrono>
#include <cstdint>
#include <thread>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tfswitch {
namespace {

using testing::ElementsAre;

constexpr RowCache::Time kStart{};

RowCache::Time After(int64_t ms) {
  return kStart + std::chrono::milliseconds(ms);
}

class RowCacheTest : public testing::Test {
 protected:
  static RowCacheOptions Options(size_t max_rows) {
    RowCacheOptions options;
    options.max_rows = max_rows;
    options.lifetime = absl::Milliseconds(100);
    options.dims = {1, 2};
    return options;
  }

  // The row of a key of table 0, or -1 if it is not there.
  static float Read(RowCache* cache, Key key, RowCache::Time now = kStart) {
    float row = -1.0f;
    std::vector<size_t> missing;
    cache->Read(0, {key}, now, &row, &missing);
    return missing.empty() ? row : -1.0f;
  }
  static void Write(RowCache* cache, Key key, float value,
                    RowCache::Time asked_at = kStart) {
    cache->Write(0, {key}, &value, asked_at);
  }
};

TEST_F(RowCacheTest, KeysThatWereChosenByTheirPublicHashFillAllShards) {
  RowCache cache(Options(64 * 64));  // In 64 shards.
  for (uint64_t i = 0; i < 2000; ++i) {
    // HashKey() of table and key is i.
    Write(&cache, KeyOfHash(i) ^ static_cast<Key>(HashKey(1)), 1.0f);
  }
  EXPECT_GT(cache.size(), 1900);
}

TEST_F(RowCacheTest, GivesWhatWasWrittenAndThePlacesOfTheRest) {
  RowCache cache(Options(100));
  const std::vector<float> rows = {1, 2, 3, 4};
  cache.Write(1, {7, -8}, rows.data(), kStart);

  std::vector<float> read(8, 0.0f);
  std::vector<size_t> missing = {9};
  cache.Read(1, {5, -8, 7, 6}, kStart, read.data(), &missing);

  EXPECT_THAT(read, ElementsAre(0, 0, 3, 4, 1, 2, 0, 0));
  EXPECT_THAT(missing, ElementsAre(9, 0, 3));
  EXPECT_EQ(cache.num_hits(), 2);
  EXPECT_EQ(cache.num_misses(), 2);
  EXPECT_EQ(cache.size(), 2);
}

TEST_F(RowCacheTest, TablesHaveKeysOfTheirOwn) {
  RowCache cache(Options(100));
  const std::vector<float> rows = {1, 2};
  cache.Write(1, {7}, rows.data(), kStart);
  EXPECT_EQ(Read(&cache, 7), -1.0f);
}

TEST_F(RowCacheTest, ForgetsARowAtTheEndOfItsTime) {
  RowCache cache(Options(100));
  Write(&cache, 1, 5.0f, After(10));
  EXPECT_EQ(Read(&cache, 1, After(109)), 5.0f);
  EXPECT_EQ(Read(&cache, 1, After(110)), -1.0f);

  Write(&cache, 1, 6.0f, After(110));
  EXPECT_EQ(Read(&cache, 1, After(110)), 6.0f);
  EXPECT_EQ(cache.size(), 1);
}

TEST_F(RowCacheTest, AnEarlierAnswerDoesNotReplaceALaterOne) {
  RowCache cache(Options(100));
  Write(&cache, 1, 2.0f, After(20));
  Write(&cache, 1, 1.0f, After(10));
  EXPECT_EQ(Read(&cache, 1, After(50)), 2.0f);
}

TEST_F(RowCacheTest, NeverHasMoreRowsThanAllowed) {
  for (const size_t max_rows : {1, 2, 63, 1000, 4097}) {
    RowCache cache(Options(max_rows));
    for (Key key = 0; key < 10'000; ++key) Write(&cache, key, 1.0f);
    EXPECT_LE(cache.size(), max_rows);
    EXPECT_GE(cache.size(), max_rows - max_rows / 10);
  }
}

TEST_F(RowCacheTest, KeysThatComeOnceDoNotDriveOutThoseThatComeOften) {
  RowCache cache(Options(50));
  for (Key key = 0; key < 20; ++key) Write(&cache, key, 1.0f);
  for (Key once = 1000; once < 2000; once += 10) {
    for (Key key = 0; key < 20; ++key) EXPECT_EQ(Read(&cache, key), 1.0f);
    for (Key key = once; key < once + 10; ++key) Write(&cache, key, 2.0f);
  }
  EXPECT_EQ(cache.size(), 50);
}

TEST_F(RowCacheTest, WhatIsOverGoesFirst) {
  RowCache cache(Options(2));
  Write(&cache, 1, 1.0f, After(0));
  Write(&cache, 2, 2.0f, After(90));
  EXPECT_EQ(Read(&cache, 1, After(50)), 1.0f);
  Write(&cache, 3, 3.0f, After(120));
  EXPECT_EQ(Read(&cache, 2, After(120)), 2.0f);
  EXPECT_EQ(Read(&cache, 3, After(120)), 3.0f);
}

TEST_F(RowCacheTest, ThreadsReadWholeRows) {
  RowCacheOptions options = Options(200);
  options.dims = {16};
  RowCache cache(options);
  std::vector<std::thread> threads;
  threads.reserve(4);
  for (int seed = 0; seed < 4; ++seed) {
    threads.emplace_back([&cache, seed] {
      std::vector<float> row(16);
      std::vector<size_t> missing;
      for (int i = 0; i < 20'000; ++i) {
        const Key key = (i * 7 + seed) % 500;
        missing.clear();
        cache.Read(0, {key}, kStart, row.data(), &missing);
        const auto value = static_cast<float>(key);
        if (missing.empty()) {
          ASSERT_THAT(row, testing::Each(value));
        } else {
          row.assign(16, value);
          cache.Write(0, {key}, row.data(), kStart);
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_LE(cache.size(), 200);
  EXPECT_EQ(cache.num_hits() + cache.num_misses(), 80'000);
}

}  // namespace
}  // namespace tfswitch
