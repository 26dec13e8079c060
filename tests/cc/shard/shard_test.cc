#include "cc/shard/shard.h"

#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tfswitch {
namespace {

using testing::HasSubstr;

TableConfig Config(const std::string& name) {
  TableConfig config;
  config.name = name;
  config.dim = 2;
  return config;
}

TEST(ShardOptionsTest, PlaceMustBeInTheCluster) {
  EXPECT_TRUE((ShardOptions{1, 2}).Validate().ok());
  EXPECT_THAT(std::string((ShardOptions{2, 2}).Validate().message()),
              HasSubstr("shard_index"));
  EXPECT_THAT(std::string((ShardOptions{0, 0}).Validate().message()),
              HasSubstr("num_shards"));
}

TEST(ShardTest, KeyOfAnotherShardIsRefusedAndItsOwnerNamed) {
  Shard shard(ShardOptions{0, 2});
  ASSERT_TRUE(shard.CreateTable(Config("t")).ok());
  const auto table = shard.FindTable("t").value();
  Key foreign = 0;
  while (OwnerOfVirtualShard(VirtualShardOf(foreign, 1024), 1024, 2) != 1) {
    ++foreign;
  }
  std::vector<float> out(2);

  const absl::Status status =
      shard.Pull(*table, {foreign}, true, absl::MakeSpan(out));

  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), HasSubstr("shard 1 of 2"));
  EXPECT_EQ(table->size(), 0);
}

TEST(ShardTest, EveryKeyHasOneOwner) {
  for (const uint32_t num_shards : {1u, 2u, 3u, 7u, 1024u}) {
    std::vector<int> owned(num_shards, 0);
    for (uint32_t v = 0; v < 1024; ++v) {
      const uint32_t owner = OwnerOfVirtualShard(v, 1024, num_shards);
      ASSERT_LT(owner, num_shards);
      ++owned[owner];
    }
    for (const int count : owned) EXPECT_NEAR(count, 1024.0 / num_shards, 1.0);
  }
}

TEST(ShardTest, MoreServersThanVirtualShardsIsRefused) {
  Shard shard(ShardOptions{0, 4});
  TableConfig config = Config("t");
  config.num_virtual_shards = 2;

  EXPECT_EQ(shard.CreateTable(config).status().code(),
            absl::StatusCode::kInvalidArgument);
}

TEST(ShardTest, ADroppedTableLivesWhileItIsUsed) {
  Shard shard(ShardOptions{});
  ASSERT_TRUE(shard.CreateTable(Config("t")).ok());
  const auto table = shard.FindTable("t").value();

  EXPECT_TRUE(shard.DropTable("t"));
  EXPECT_FALSE(shard.DropTable("t"));

  std::vector<float> out(2);
  EXPECT_TRUE(shard.Pull(*table, {1}, true, absl::MakeSpan(out)).ok());
}

TEST(ShardTest, CommitOfARestoreThatIsNotStagedIsNotFound) {
  Shard shard(ShardOptions{});

  EXPECT_EQ(shard.CommitRestore("x", false).code(),
            absl::StatusCode::kNotFound);
  EXPECT_TRUE(shard.CommitRestore("x", true).ok());
}

}  // namespace
}  // namespace tfswitch
