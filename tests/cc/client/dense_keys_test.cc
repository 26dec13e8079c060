#include "cc/client/dense_keys.h"

#include <algorithm>
#include <cstdint>
#include <set>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tfswitch {
namespace {

struct Size {
  uint32_t num_virtual_shards;
  uint64_t num_blocks;
};

// Fewer blocks than virtual shards, as many, and more.
const Size kSizes[] = {{1024, 1},    {1024, 7},    {1024, 977},  {1024, 1024},
                       {1024, 5000}, {16, 1},      {16, 7},      {16, 977},
                       {16, 5000},   {65536, 977}, {65536, 5000}};

std::vector<Key> KeysOf(const Size& size) {
  std::vector<Key> keys(size.num_blocks);
  DenseKeys(size.num_virtual_shards, absl::MakeSpan(keys));
  return keys;
}

TEST(DenseKeysTest, KeysAreDistinctAndLieInTheirVirtualShard) {
  for (const Size& size : kSizes) {
    SCOPED_TRACE(testing::Message()
                 << size.num_blocks << " blocks, " << size.num_virtual_shards);
    const std::vector<Key> keys = KeysOf(size);
    EXPECT_EQ(std::set<Key>(keys.begin(), keys.end()).size(), keys.size());
    for (uint64_t b = 0; b < size.num_blocks; ++b) {
      ASSERT_EQ(VirtualShardOf(keys[b], size.num_virtual_shards),
                b * size.num_virtual_shards / size.num_blocks)
          << "block " << b;
    }
  }
}

TEST(DenseKeysTest, EachServerHasAContiguousRunAndItsEvenShare) {
  for (const Size& size : kSizes) {
    const std::vector<Key> keys = KeysOf(size);
    const uint32_t num_virtual = size.num_virtual_shards;
    for (uint32_t num_servers = 1; num_servers <= 16; ++num_servers) {
      SCOPED_TRACE(testing::Message()
                   << size.num_blocks << " blocks, " << num_virtual
                   << " virtual shards, " << num_servers << " servers");
      std::vector<uint64_t> counts(num_servers, 0);
      uint32_t last = 0;
      for (const Key key : keys) {
        const uint32_t owner = OwnerOfVirtualShard(
            VirtualShardOf(key, num_virtual), num_virtual, num_servers);
        ASSERT_GE(owner, last);
        last = owner;
        ++counts[owner];
      }
      // Blocks of one virtual shard stay together, so a server may have those
      // of one more than others have.
      const uint64_t share = (size.num_blocks + num_servers - 1) / num_servers;
      const uint64_t together =
          (size.num_blocks + num_virtual - 1) / num_virtual;
      EXPECT_LE(*std::max_element(counts.begin(), counts.end()),
                share + together);
      EXPECT_GE(*std::min_element(counts.begin(), counts.end()) + together,
                size.num_blocks / num_servers);
    }
  }
}

TEST(DenseKeysTest, StripesAndBucketsOfTheTableFillEvenly) {
  // The bits of the hash that pick them; see HashKey().
  std::vector<int> stripes(16, 0);
  for (const Key key : KeysOf({1024, 5000})) ++stripes[HashKey(key) >> 60];
  for (const int count : stripes) EXPECT_NEAR(count, 5000 / 16, 100);
}

TEST(DenseKeysTest, NoBlocksAreNoKeys) {
  std::vector<Key> keys;
  DenseKeys(1024, absl::MakeSpan(keys));
  EXPECT_TRUE(keys.empty());
}

}  // namespace
}  // namespace tfswitch
