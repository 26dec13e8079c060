#include "cc/base/copy_bytes.h"

#include <string>

#include "gtest/gtest.h"

namespace tfswitch {
namespace {

// Bytes that differ from those at a distance of any power of two.
std::string SomeBytes(size_t size) {
  std::string bytes(size, 0);
  for (size_t i = 0; i < size; ++i) bytes[i] = static_cast<char>(1 + i % 251);
  return bytes;
}

TEST(CopyBytesTest, CopiesEverySizeFromEveryOffsetAndNoByteMore) {
  const std::string from = SomeBytes(700);
  for (size_t offset = 0; offset < 20; ++offset) {
    for (size_t size = 0; size <= 600; ++size) {
      std::string to(size + 2, 0);

      CopyBytes(to.data() + 1, from.data() + offset, size);

      ASSERT_EQ(to, '\0' + from.substr(offset, size) + '\0')
          << size << " bytes from " << offset;
    }
  }
}

TEST(CopyBytesTest, NoBytesMayLieNowhere) {
  char to = 1;

  CopyBytes(&to, nullptr, 0);
  CopyBytes(nullptr, &to, 0);

  EXPECT_EQ(to, 1);
}

}  // namespace
}  // namespace tfswitch
