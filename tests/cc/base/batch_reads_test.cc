#include "cc/base/batch_reads.h"

#include <fcntl.h>
#include <unistd.h>

#include <cstdint>
#include <string>
#include <thread>
#include <vector>

#include "gtest/gtest.h"
#include "tests/cc/testing/scoped_folder.h"

namespace tfswitch {
namespace {

constexpr uint32_t kBlock = 512;
constexpr size_t kBlocks = 1000;

class BatchReadsTest : public testing::TestWithParam<bool> {
 protected:
  BatchReadsTest()
      : fd_(open((folder_.path() + "/file").c_str(), O_RDWR | O_CREAT, 0600)) {
    for (size_t i = 0; i < kBlocks; ++i) {
      const std::string block(kBlock, static_cast<char>(i % 251));
      EXPECT_EQ(write(fd_, block.data(), kBlock), ssize_t{kBlock});
    }
  }
  ~BatchReadsTest() override { close(fd_); }

  const ScopedFolder folder_;
  const int fd_;
  BatchReads reads_{GetParam()};
};

TEST_P(BatchReadsTest, ReadsAllBlocksOfSeveralThreads) {
  const auto read_all = [this](size_t step) {
    std::vector<char> bytes(kBlocks * kBlock);
    std::vector<FileRead> reads;
    for (size_t i = 0; i < kBlocks; ++i) {
      reads.push_back({fd_, i * step % kBlocks * kBlock, kBlock,
                       bytes.data() + i * kBlock});
    }
    std::vector<char> is_whole(kBlocks);
    reads_.Run(reads, [&](size_t i, bool whole) { is_whole[i] = whole; });
    for (size_t i = 0; i < kBlocks; ++i) {
      ASSERT_TRUE(is_whole[i]) << i;
      ASSERT_EQ(
          std::string(bytes.data() + i * kBlock, kBlock),
          std::string(kBlock, static_cast<char>(i * step % kBlocks % 251)));
    }
  };
  std::vector<std::thread> threads;
  for (const size_t step : {1, 3, 7, 333}) threads.emplace_back(read_all, step);
  for (std::thread& thread : threads) thread.join();
}

TEST_P(BatchReadsTest, TellsWhichReadsAreShortOrFail) {
  std::vector<char> bytes(4 * kBlock);
  const std::vector<FileRead> reads = {
      {fd_, 0, kBlock, bytes.data()},
      {fd_, kBlocks * kBlock - 10, kBlock, bytes.data() + kBlock},
      {-1, 0, kBlock, bytes.data() + 2 * kBlock},
      {fd_, kBlock, kBlock, bytes.data() + 3 * kBlock}};
  std::vector<char> is_whole(reads.size());
  reads_.Run(reads, [&](size_t i, bool whole) { is_whole[i] = whole; });
  EXPECT_EQ(is_whole, (std::vector<char>{1, 0, 0, 1}));
}

INSTANTIATE_TEST_SUITE_P(Ways, BatchReadsTest, testing::Bool(),
                         [](const auto& info) {
                           return info.param ? "ring" : "threads";
                         });

}  // namespace
}  // namespace tfswitch
