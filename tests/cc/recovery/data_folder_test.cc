#include "cc/recovery/data_folder.h"

#include <filesystem>
#include <fstream>
#include <memory>
#include <string>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/cc/testing/scoped_folder.h"

namespace tfswitch {
namespace {

using testing::AllOf;
using testing::HasSubstr;

void Write(const std::string& path, const std::string& text) {
  std::ofstream(path) << text;
}

TEST(DataFolderTest, BelongsToOneServerOfOneCluster) {
  const ScopedFolder scoped;
  const std::string path = scoped.path() + "/new/data";
  ASSERT_TRUE(DataFolder::Open(path, {"ads", 1, 3}).ok());
  EXPECT_TRUE(DataFolder::Open(path, {"ads", 1, 3}).ok());

  for (const ServerIdentity& other :
       {ServerIdentity{"ads", 2, 3}, ServerIdentity{"ads", 1, 4},
        ServerIdentity{"shop", 1, 3}}) {
    const absl::Status status = DataFolder::Open(path, other).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_THAT(
        std::string(status.message()),
        AllOf(HasSubstr(path), HasSubstr("shard 1 of 3"), HasSubstr("'ads'"),
              HasSubstr(absl::StrCat("shard ", other.shard_index, " of ",
                                     other.num_shards, " of cluster '",
                                     other.cluster, "'"))));
  }
}

TEST(DataFolderTest, IsHeldByOneProcessAtATime) {
  const ScopedFolder scoped;
  auto first = DataFolder::Open(scoped.path(), {});
  ASSERT_TRUE(first.ok()) << first.status();

  EXPECT_EQ(DataFolder::Open(scoped.path(), {}).status().code(),
            absl::StatusCode::kAborted);

  first->reset();
  EXPECT_TRUE(DataFolder::Open(scoped.path(), {}).ok());
}

TEST(DataFolderTest, AFolderOfSomethingElseIsLeftAlone) {
  const ScopedFolder scoped;
  Write(scoped.path() + "/thesis.tex", "");

  const absl::Status status = DataFolder::Open(scoped.path(), {}).status();

  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(status.message()), HasSubstr("'thesis.tex'"));
  EXPECT_FALSE(std::filesystem::exists(scoped.path() + "/identity.json"));
}

TEST(DataFolderTest, AnIdentityThatCannotBeReadIsAnError) {
  const ScopedFolder scoped;
  Write(scoped.path() + "/identity.json", "{}");

  const absl::Status status = DataFolder::Open(scoped.path(), {}).status();

  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(std::string(status.message()), HasSubstr(scoped.path()));
}

TEST(DataFolderTest, TheCountOfWritesStays) {
  const ScopedFolder scoped;
  auto folder = DataFolder::Open(scoped.path(), {});
  (*folder)->NoteRecovery();
  *(*folder)->num_writes() += 5;
  folder->reset();

  folder = DataFolder::Open(scoped.path(), {});

  EXPECT_EQ(*(*folder)->num_writes(), 5u);
  EXPECT_TRUE((*folder)->is_counter_exact());
}

TEST(DataFolderTest, AfterTheMachineWentDownTheCountIsALeast) {
  const ScopedFolder scoped;
  auto folder = DataFolder::Open(scoped.path(), {});
  (*folder)->NoteRecovery();
  *(*folder)->num_writes() += 5;
  folder->reset();
  // The id of the boot comes after the count.
  std::fstream file(scoped.path() + "/writes",
                    std::ios::in | std::ios::out | std::ios::binary);
  file.seekp(8);
  file << "another";
  file.close();

  // Also if a start is killed before it has recovered.
  for (int i = 0; i < 2; ++i) {
    folder->reset();
    folder = DataFolder::Open(scoped.path(), {});

    EXPECT_EQ(*(*folder)->num_writes(), 5u);
    EXPECT_FALSE((*folder)->is_counter_exact());
    EXPECT_TRUE((*folder)->has_machine_gone_down());
  }
}

}  // namespace
}  // namespace tfswitch
