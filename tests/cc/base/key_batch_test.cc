#include "cc/base/key_batch.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <unordered_map>
#include <vector>

#include "cc/base/thread_pool.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tfswitch {
namespace {

TEST(UniqueKeysTest, KeepsTheOrderOfFirstAppearance) {
  const std::vector<Key> keys = {7, -1, 7, 0, -1, 9};
  std::vector<Key> unique(keys.size());
  std::vector<int32_t> inverse(keys.size());

  const size_t count =
      UniqueKeys().Run(keys, absl::MakeSpan(unique), absl::MakeSpan(inverse));

  unique.resize(count);
  EXPECT_THAT(unique, testing::ElementsAre(7, -1, 0, 9));
  EXPECT_THAT(inverse, testing::ElementsAre(0, 1, 0, 2, 1, 3));
}

TEST(UniqueKeysTest, AgreesWithAMapOnRandomBatchesOfAnySize) {
  std::mt19937_64 random(11);
  UniqueKeys unique_keys;  // Reused: what a batch leaves must not show.
  for (const size_t size : {0u, 1u, 2u, 63u, 64u, 65u, 5000u, 10u, 40000u}) {
    std::vector<Key> keys(size);
    for (Key& key : keys) {
      key = static_cast<Key>(random() % (size / 2 + 1)) - 3;
    }
    std::vector<Key> unique(size);
    std::vector<int32_t> inverse(size);

    const size_t count =
        unique_keys.Run(keys, absl::MakeSpan(unique), absl::MakeSpan(inverse));

    std::unordered_map<Key, int32_t> expected;
    for (size_t i = 0; i < size; ++i) {
      const auto [it, is_new] =
          expected.emplace(keys[i], static_cast<int32_t>(expected.size()));
      ASSERT_EQ(inverse[i], it->second);
      ASSERT_EQ(unique[inverse[i]], keys[i]);
    }
    EXPECT_EQ(count, expected.size());
  }
}

TEST(UniqueKeysTest, KeysThatWereChosenByTheirPublicHashAreFoundAtOnce) {
  UniqueKeys unique_keys;
  // The bits of the hash that are equal in all of them are the high or the low
  // ones.
  for (const int shift : {0, 44}) {
    for (const size_t size : {1000u, 1'000'000u}) {
      std::vector<Key> keys(size);
      for (size_t i = 0; i < size; ++i) keys[i] = KeyOfHash(i << shift);
      std::vector<Key> unique(size);
      std::vector<int32_t> inverse(size);

      ASSERT_EQ(unique_keys.Run(keys, absl::MakeSpan(unique),
                                absl::MakeSpan(inverse)),
                size);
      // A million random keys in at least twice as many slots have runs of 25.
      ASSERT_LT(unique_keys.LongestRun(), 200u);
    }
  }
}

TEST(SumByInverseTest, AddsRepeatedRowsAndOverwritesWhatWasThere) {
  const std::vector<int32_t> inverse = {0, 1, 0, 2, 0};
  const std::vector<float> gradients = {1, 2, 3, 4, 10, 20, 5, 6, 100, 200};
  std::vector<float> sums(6, std::nanf(""));

  SumByInverse(inverse, 2, gradients, absl::MakeSpan(sums));

  EXPECT_THAT(sums, testing::ElementsAre(111, 222, 3, 4, 5, 6));
}

TEST(RowsByInverseTest, SumAndScatterAreRightForEveryDim) {
  std::mt19937_64 random(3);
  const ThreadPool pool(2);
  for (const int dim : {1, 3, 8, 16, 17, 32, 64, 100}) {
    std::vector<Key> keys(3000);
    for (Key& key : keys) key = static_cast<Key>(random() % 500);
    std::vector<Key> unique(keys.size());
    std::vector<int32_t> inverse(keys.size());
    const size_t count =
        UniqueKeys().Run(keys, absl::MakeSpan(unique), absl::MakeSpan(inverse));
    std::vector<float> gradients(keys.size() * dim);
    for (float& value : gradients) value = static_cast<float>(random() % 1000);
    std::vector<float> sums(count * dim);
    SumByInverse(inverse, dim, gradients, absl::MakeSpan(sums));
    std::vector<float> expected(count * dim);
    for (size_t i = 0; i < gradients.size(); ++i) {
      expected[inverse[i / dim] * dim + i % dim] += gradients[i];
    }
    ASSERT_EQ(sums, expected) << dim;

    for (const LentThreads* threads :
         {static_cast<const LentThreads*>(nullptr),
          static_cast<const LentThreads*>(&pool)}) {
      std::vector<float> rows(gradients.size(), -1.0f);
      ScatterRows(inverse, dim, sums.data(), rows.data(), threads);
      for (size_t i = 0; i < rows.size(); ++i) {
        ASSERT_EQ(rows[i], sums[inverse[i / dim] * dim + i % dim]);
      }
    }
  }
}

TEST(FindNonFiniteTest, FindsTheFirstWhereverItIs) {
  for (const float bad : {std::numeric_limits<float>::quiet_NaN(),
                          std::numeric_limits<float>::infinity(),
                          -std::numeric_limits<float>::infinity()}) {
    for (const size_t place : {0u, 1u, 4095u, 4096u, 9999u}) {
      std::vector<float> values(10000, std::numeric_limits<float>::max());
      values[place] = bad;
      values[9999] = bad;
      EXPECT_EQ(FindNonFinite(values), static_cast<int64_t>(place));
    }
  }
  EXPECT_EQ(FindNonFinite({}), -1);
  EXPECT_EQ(FindNonFinite(std::vector<float>{0.0f, -0.0f, 1e-45f, -3e38f}), -1);
}

TEST(AddScaledTest, AddsTheProductToEverySum) {
  for (const size_t size : {0u, 1u, 7u, 8u, 33u, 1000u}) {
    std::vector<float> values(size);
    std::vector<float> sums(size);
    std::vector<float> expected(size);
    for (size_t i = 0; i < size; ++i) {
      values[i] = 0.1f * static_cast<float>(i);
      sums[i] = 1.0f / static_cast<float>(i + 1);
      const float product = -0.3f * values[i];
      expected[i] = sums[i] + product;
    }

    AddScaled(values, -0.3f, absl::MakeSpan(sums));

    EXPECT_EQ(sums, expected) << size;
  }
}

}  // namespace
}  // namespace tfswitch
