#include "cc/base/watched_file.h"

#include <sys/stat.h>

#include <filesystem>
#include <fstream>
#include <optional>
#include <string>

#include "gtest/gtest.h"
#include "tests/cc/testing/scoped_folder.h"

namespace tfswitch {
namespace {

void Write(const std::string& path, const std::string& text) {
  std::ofstream(path) << text;
}

TEST(WatchedFileTest, TheContentsComeOnceForEachChange) {
  const ScopedFolder folder;
  const std::string path = folder.path() + "/file";
  Write(path, "one");
  WatchedFile file(path, 100);

  EXPECT_EQ(*file.ReadIfChanged(), "one");
  EXPECT_EQ(*file.ReadIfChanged(/*now=*/true), std::nullopt);
  Write(path, "second");
  EXPECT_EQ(*file.ReadIfChanged(/*now=*/true), "second");
}

TEST(WatchedFileTest, AFileThatCannotBeReadIsTriedAgain) {
  const ScopedFolder folder;
  const std::string path = folder.path() + "/file";
  WatchedFile file(path, 3);
  EXPECT_EQ(file.ReadIfChanged(true).status().code(),
            absl::StatusCode::kNotFound);
  Write(path, "too long");
  for (int i = 0; i < 2; ++i) {
    EXPECT_EQ(file.ReadIfChanged(true).status().code(),
              absl::StatusCode::kResourceExhausted);
  }
  Write(path, "ok");
  EXPECT_EQ(*file.ReadIfChanged(true), "ok");
}

TEST(WatchedFileTest, APipeInPlaceOfTheFileIsAnErrorAndHoldsNobody) {
  const ScopedFolder folder;
  const std::string path = folder.path() + "/file";
  ASSERT_EQ(mkfifo(path.c_str(), 0600), 0);
  WatchedFile file(path, 100);

  EXPECT_EQ(file.ReadIfChanged(true).status().code(),
            absl::StatusCode::kFailedPrecondition);
  std::filesystem::remove(path);
  Write(path, "one");
  EXPECT_EQ(*file.ReadIfChanged(true), "one");
}

}  // namespace
}  // namespace tfswitch
