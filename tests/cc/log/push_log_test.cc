#include "cc/log/push_log.h"

#include <signal.h>
#include <sys/resource.h>

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/cc/testing/scoped_folder.h"

namespace tfswitch {
namespace {

using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
namespace fs = std::filesystem;

// "number:type:payload" of each record.
using Records = std::vector<std::string>;

class PushLogTest : public testing::Test {
 protected:
  absl::StatusOr<std::unique_ptr<PushLog>> Open(uint64_t first = 1,
                                                uint64_t last = 0) {
    records_.clear();
    return PushLog::Open(
        options_, first, last,
        [this](uint64_t number, uint32_t type, absl::string_view payload) {
          records_.push_back(absl::StrCat(number, ":", type, ":", payload));
          return absl::OkStatus();
        });
  }

  // Opens, appends payloads and closes.
  void Append(const std::vector<std::string>& payloads) {
    const auto log = Open(1);
    ASSERT_TRUE(log.ok()) << log.status();
    for (const std::string& payload : payloads) {
      ASSERT_TRUE((*log)->Append(7, {payload}).ok());
    }
  }

  std::vector<fs::path> Segments() const {
    std::vector<fs::path> paths;
    for (const auto& entry : fs::directory_iterator(options_.folder)) {
      paths.push_back(entry.path());
    }
    std::sort(paths.begin(), paths.end());
    return paths;
  }

  static std::string Read(const fs::path& path) {
    std::ifstream file(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
  }
  static void Write(const fs::path& path, const std::string& bytes) {
    std::ofstream(path, std::ios::binary) << bytes;
  }

  const ScopedFolder scoped_;
  PushLogOptions options_ = [this] {
    PushLogOptions options;
    options.folder = scoped_.path() + "/log";
    return options;
  }();
  Records records_;
};

TEST_F(PushLogTest, RecordsComeBackInOrderAndGoOn) {
  {
    const auto log = Open();
    ASSERT_TRUE(log.ok()) << log.status();
    EXPECT_EQ((*log)->Append(1, {"a", "", "bc"}).value(), 1u);
    EXPECT_EQ((*log)->Append(2, {}).value(), 2u);
    EXPECT_EQ((*log)->last(), 2u);
  }
  {
    const auto log = Open();
    ASSERT_TRUE(log.ok()) << log.status();
    EXPECT_THAT(records_, ElementsAre("1:1:abc", "2:2:"));
    EXPECT_EQ((*log)->Append(3, {"d"}).value(), 3u);
  }
  ASSERT_TRUE(Open(2).ok());
  EXPECT_THAT(records_, ElementsAre("2:2:", "3:3:d"));
  // As after a save that knows more than has reached the disk.
  {
    const auto log = Open(10, 9);
    ASSERT_TRUE(log.ok()) << log.status();
    EXPECT_THAT(records_, ElementsAre());
    EXPECT_EQ((*log)->Append(1, {"e"}).value(), 10u);
  }
  ASSERT_TRUE(Open(10, 9).ok());
  EXPECT_THAT(records_, ElementsAre("10:1:e"));
}

TEST_F(PushLogTest, SegmentsThatASaveCoversGo) {
  options_.segment_bytes = 100;
  const auto log = Open();
  for (int i = 0; i < 10; ++i) {
    ASSERT_TRUE((*log)->Append(1, {std::string(50, 'x')}).ok());
  }
  const size_t before = Segments().size();
  EXPECT_GE(before, 4u);

  ASSERT_TRUE((*log)->StartAfterSave(6).ok());

  EXPECT_LT(Segments().size(), before);
  ASSERT_TRUE((*log)->Append(1, {"last"}).ok());
  Records numbers;
  ASSERT_TRUE(Open(6).ok());
  EXPECT_EQ(records_.size(), 6u);
  EXPECT_EQ(records_.back(), "11:1:last");

  ASSERT_TRUE((*log)->StartAfterSave(12).ok());
  EXPECT_EQ(Segments().size(), 0u);
  EXPECT_EQ((*log)->num_bytes(), 0u);
  EXPECT_EQ((*log)->Append(1, {"on"}).value(), 12u);
}

TEST_F(PushLogTest, AnyEndIsCutAndNothingElse) {
  Append({"first", "second", "third record"});
  const fs::path path = Segments()[0];
  const std::string whole = Read(path);
  for (size_t size = 0; size < whole.size(); ++size) {
    Write(path, whole.substr(0, size));

    const auto log = Open();

    ASSERT_TRUE(log.ok()) << size << log.status();
    const size_t num = records_.size();
    EXPECT_LT(num, 3u);
    const Records all = {"1:7:first", "2:7:second", "3:7:third record"};
    EXPECT_EQ(records_, Records(all.begin(), all.begin() + num));
    EXPECT_EQ((*log)->Append(7, {"new"}).value(), num + 1);
    ASSERT_TRUE(Open().ok());
    EXPECT_EQ(records_.back(), absl::StrCat(num + 1, ":7:new"));
    for (const fs::path& each : Segments()) fs::remove(each);
  }
}

TEST_F(PushLogTest, EachDamagedByteIsRefusedOrCutNeverRead) {
  // Flushed, so that each record but the last is known to be on the disk.
  options_.sync_every = absl::ZeroDuration();
  Append({"first", "second", "third record"});
  const fs::path path = Segments()[0];
  const std::string whole = Read(path);
  const Records all = {"1:7:first", "2:7:second", "3:7:third record"};
  const size_t third = whole.size() - 40 - 16;
  int num_refused = 0;
  for (size_t at = 0; at < whole.size(); ++at) {
    std::string bytes = whole;
    bytes[at] = static_cast<char>(bytes[at] ^ 0x20);
    Write(path, bytes);

    const auto log = Open();

    // Bytes that fill up mean nothing.
    const bool is_filling = records_ == all;
    EXPECT_EQ(records_, Records(all.begin(), all.begin() + records_.size()));
    if (at < third && !is_filling) {
      ++num_refused;
      EXPECT_EQ(log.status().code(), absl::StatusCode::kDataLoss) << at;
      EXPECT_THAT(std::string(log.status().message()),
                  AllOf(HasSubstr(path.string()), HasSubstr("at offset")));
    } else {
      EXPECT_TRUE(log.ok()) << at << log.status();
    }
  }
  EXPECT_GT(num_refused, 80);
}

TEST_F(PushLogTest, DamageBeforeTheFirstRecordThatIsNeededIsOnlyTold) {
  options_.sync_every = absl::ZeroDuration();
  Append({"first", "second", "third record"});
  const fs::path path = Segments()[0];
  const std::string whole = Read(path);
  const size_t third = whole.size() - 40 - 16;
  for (size_t at = 8; at < third; ++at) {
    std::string bytes = whole;
    bytes[at] = static_cast<char>(bytes[at] ^ 0x20);
    Write(path, bytes);

    EXPECT_TRUE(Open(/*first=*/3, /*last=*/2).ok()) << at;

    EXPECT_THAT(records_, ElementsAre("3:7:third record"));
    EXPECT_EQ(Read(path), bytes);
  }
}

TEST_F(PushLogTest, RecordsThatReachedTheDiskOutOfOrderAreCutTogether) {
  options_.segment_bytes = 100;
  options_.sync_every = absl::Hours(1);
  {
    const auto log = Open();
    for (int i = 0; i < 6; ++i) {
      ASSERT_TRUE((*log)->Append(1, {std::string(50, 'x')}).ok());
    }
    // The second record has not reached the disk, though all after it have.
    std::string bytes = Read(Segments()[1]);
    bytes[60] ^= 1;
    Write(Segments()[1], bytes);
    const auto again = Open();
    ASSERT_TRUE(again.ok()) << again.status();
    EXPECT_EQ(records_.size(), 1u);
    EXPECT_EQ((*again)->Append(1, {"2nd"}).value(), 2u);
  }
  ASSERT_TRUE(Open().ok());
  EXPECT_EQ(records_.size(), 2u);
}

TEST_F(PushLogTest, MissingRecordsAreAnError) {
  options_.segment_bytes = 100;
  Append(std::vector<std::string>(6, std::string(50, 'x')));
  EXPECT_TRUE(Open(1).ok());
  fs::remove(Segments()[1]);

  const absl::Status status = Open(1).status();

  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(std::string(status.message()), HasSubstr("are missing"));
  fs::remove(Segments()[0]);
  EXPECT_EQ(Open(1).status().code(), absl::StatusCode::kDataLoss);
}

TEST_F(PushLogTest, AFullLogRefusesAndTakesRecordsAgainAfterASave) {
  options_.max_bytes = 300;
  const auto log = Open();
  ASSERT_TRUE((*log)->Append(1, {std::string(200, 'x')}).ok());

  const absl::Status full = (*log)->Append(1, {std::string(200, 'x')}).status();

  EXPECT_EQ(full.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(full.message()),
              AllOf(HasSubstr("nothing was applied"),
                    HasSubstr("--push_log_max_bytes (300)")));
  ASSERT_TRUE((*log)->StartAfterSave(2).ok());
  EXPECT_EQ((*log)->Append(1, {std::string(200, 'x')}).value(), 2u);
}

TEST_F(PushLogTest, AFullDiskRefusesAndTheLogStaysWhole) {
  const auto log = Open();
  ASSERT_TRUE((*log)->Append(1, {"before"}).ok());
  // A limit on the length of files stands for the disk.
  rlimit own = {};
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &own), 0);
  rlimit low = own;
  low.rlim_cur = 200;
  signal(SIGXFSZ, SIG_IGN);
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &low), 0);
  const absl::Status full = (*log)->Append(1, {std::string(900, 'x')}).status();
  const auto small = (*log)->Append(1, {"small"});
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &own), 0);

  EXPECT_EQ(full.code(), absl::StatusCode::kResourceExhausted) << full;
  // A record that fits is accepted, without a restart.
  EXPECT_EQ(small.value(), 2u);
  EXPECT_EQ((*log)->Append(1, {std::string(900, 'y')}).value(), 3u);
  ASSERT_TRUE(Open().ok());
  EXPECT_THAT(records_,
              ElementsAre("1:1:before", "2:1:small",
                          absl::StrCat("3:1:", std::string(900, 'y'))));
}

TEST_F(PushLogTest, NothingIsWrittenToASegmentThatWasRemoved) {
  const auto log = Open();
  ASSERT_TRUE((*log)->Append(1, {"before"}).ok());
  const fs::path segment = Segments()[0];
  fs::rename(segment, segment.string() + ".moved");
  EXPECT_TRUE((*log)->Append(1, {"behind"}).ok());
  fs::remove_all(options_.folder);

  const absl::Status removed = (*log)->Append(1, {"lost"}).status();

  EXPECT_TRUE(absl::IsDataLoss(removed)) << removed;
  EXPECT_THAT(std::string(removed.message()), HasSubstr(segment.string()));
}

TEST_F(PushLogTest, ThreadsAppendAtOnce) {
  options_.segment_bytes = 1000;
  for (const absl::Duration sync_every :
       {absl::ZeroDuration(), absl::Milliseconds(1)}) {
    options_.sync_every = sync_every;
    const auto log = Open();
    ASSERT_TRUE(log.ok()) << log.status();
    std::vector<std::thread> threads;
    for (int t = 0; t < 4; ++t) {
      threads.emplace_back([&] {
        for (int i = 0; i < 50; ++i) {
          EXPECT_TRUE((*log)->Append(1, {std::string(i, 'x')}).ok());
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
  }

  ASSERT_TRUE(Open().ok());
  EXPECT_EQ(records_.size(), 400u);
}

}  // namespace
}  // namespace tfswitch
