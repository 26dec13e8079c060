#include "cc/base/hash.h"

#include <cstdint>
#include <limits>
#include <set>
#include <vector>

#include "gtest/gtest.h"

namespace tfswitch {
namespace {

TEST(HashTest, ValuesAreFixedForAllTime) {
  // Clients and checkpoints rely on these.
  EXPECT_EQ(HashKey(0), 0u);
  EXPECT_EQ(HashKey(1), 0xb456bcfc34c2cb2cULL);
  EXPECT_EQ(HashKey(-1), 0x64b5720b4b825f21ULL);
}

TEST(HashTest, EachHashHasItsKey) {
  for (Key key = -1000; key < 1000; ++key) {
    ASSERT_EQ(KeyOfHash(HashKey(key)), key);
    ASSERT_EQ(HashKey(KeyOfHash(static_cast<uint64_t>(key))),
              static_cast<uint64_t>(key));
  }
}

TEST(HashTest, OwnersAreContiguousAndEven) {
  for (const uint32_t num_servers : {1u, 2u, 3u, 7u, 16u}) {
    std::vector<int> counts(num_servers);
    uint32_t last = 0;
    for (uint32_t shard = 0; shard < 1024; ++shard) {
      const uint32_t owner = OwnerOfVirtualShard(shard, 1024, num_servers);
      ASSERT_LT(owner, num_servers);
      ASSERT_GE(owner, last);
      last = owner;
      ++counts[owner];
    }
    for (const int count : counts) {
      EXPECT_NEAR(count, 1024.0 / num_servers, 1.0);
    }
  }
}

TEST(HashTest, NeighbouringKeysSpreadOverTheVirtualShards) {
  std::vector<int> counts(64);
  for (Key key = -32000; key < 32000; ++key) ++counts[VirtualShardOf(key, 64)];
  for (const int count : counts) EXPECT_NEAR(count, 1000, 160);
}

}  // namespace
}  // namespace tfswitch
