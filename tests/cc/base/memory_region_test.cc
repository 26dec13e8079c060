#include "cc/base/memory_region.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <thread>
#include <vector>

#include "cc/base/page_toucher.h"
#include "gtest/gtest.h"

namespace tfswitch {
namespace {

constexpr size_t kMiB = size_t{1} << 20;

int NumResidentPages(char* begin, size_t bytes) {
  std::vector<unsigned char> resident(bytes / kSmallPageBytes);
  EXPECT_EQ(mincore(begin, bytes, resident.data()), 0);
  return static_cast<int>(
      std::count_if(resident.begin(), resident.end(),
                    [](unsigned char r) { return (r & 1) != 0; }));
}

MemoryReservation Reserve(size_t bytes) {
  auto reservation = MemoryReservation::Create(bytes, bytes);
  EXPECT_TRUE(reservation.ok()) << reservation.status();
  return std::move(reservation).value();
}

TEST(MemoryReservationTest, IsAlignedAndCostsNoMemory) {
  const MemoryReservation reservation = Reserve(size_t{8} << 30);

  EXPECT_EQ(reinterpret_cast<uintptr_t>(reservation.data()) % kHugePageBytes,
            0u);
  EXPECT_EQ(reservation.size(), size_t{8} << 30);
  EXPECT_EQ(NumResidentPages(reservation.data(), 64 * kMiB), 0);
}

TEST(MemoryReservationTest, TakesLessWhereTheWishCannotBeHad) {
  const size_t impossible = size_t{1} << 60;

  auto reservation = MemoryReservation::Create(impossible, kMiB);
  ASSERT_TRUE(reservation.ok());
  EXPECT_LT(reservation->size(), impossible);
  EXPECT_GE(reservation->size(), kMiB);

  EXPECT_EQ(
      MemoryReservation::Create(impossible, impossible / 2 + 1).status().code(),
      absl::StatusCode::kResourceExhausted);
}

TEST(MemorySpanTest, GrowsInPlaceUpToItsCapacity) {
  const MemoryReservation reservation = Reserve(64 * kMiB);
  MemorySpan span(reservation.data(), 64 * kMiB);

  ASSERT_TRUE(span.Extend(1));
  span.data()[0] = 'a';
  ASSERT_TRUE(span.Extend(64 * kMiB));
  span.data()[64 * kMiB - 1] = 'z';
  EXPECT_EQ(span.data()[0], 'a');
  EXPECT_TRUE(span.Extend(5));
  EXPECT_FALSE(span.Extend(64 * kMiB + 1));
}

TEST(MemorySpanTest, ReleasedMemoryIsGivenBackAndReadsAsZeros) {
  const MemoryReservation reservation = Reserve(8 * kMiB);
  MemorySpan span(reservation.data(), 8 * kMiB);
  ASSERT_TRUE(span.Extend(8 * kMiB));
  std::fill_n(span.data(), 8 * kMiB, 'x');

  span.Release(kMiB, 3 * kMiB);
  EXPECT_EQ(NumResidentPages(span.data() + kMiB, 2 * kMiB), 0);
  EXPECT_EQ(span.data()[kMiB - 1], 'x');
  EXPECT_EQ(span.data()[kMiB], 0);
  EXPECT_EQ(span.data()[3 * kMiB], 'x');

  span.Reset();
  EXPECT_EQ(NumResidentPages(span.data(), 8 * kMiB), 0);
  EXPECT_EQ(span.data()[0], 0);
  span.data()[8 * kMiB - 1] = 'y';
}

TEST(PageToucherTest, TouchesWhatIsAskedAndKeepsWhatIsThere) {
  const MemoryReservation reservation = Reserve(8 * kMiB);
  MemorySpan span(reservation.data(), 8 * kMiB);
  ASSERT_TRUE(span.Extend(8 * kMiB));
  span.data()[2 * kHugePageBytes + 5] = 'x';

  PageToucher::Get().Request(span.data() + kHugePageBytes, 2 * kHugePageBytes);
  PageToucher::Get().WaitUntilIdle();

  EXPECT_EQ(NumResidentPages(span.data(), kHugePageBytes), 0);
  EXPECT_EQ(NumResidentPages(span.data() + kHugePageBytes, 2 * kHugePageBytes),
            1024);
  EXPECT_EQ(span.data()[2 * kHugePageBytes + 5], 'x');
  EXPECT_EQ(span.data()[2 * kHugePageBytes + 6], 0);
}

TEST(PageToucherTest, AfterCancelTheMemoryMayGo) {
  for (int round = 0; round < 20; ++round) {
    const MemoryReservation reservation = Reserve(32 * kMiB);
    MemorySpan span(reservation.data(), 32 * kMiB);
    ASSERT_TRUE(span.Extend(32 * kMiB));
    for (size_t at = 0; at < 32 * kMiB; at += kHugePageBytes) {
      PageToucher::Get().Request(span.data() + at, kHugePageBytes);
    }
    PageToucher::Get().Cancel(span.data(), span.capacity());
  }
}

TEST(PageToucherTest, WritersLoseNothingWhilePagesAreTouched) {
  const MemoryReservation reservation = Reserve(8 * kMiB);
  MemorySpan span(reservation.data(), 8 * kMiB);
  ASSERT_TRUE(span.Extend(8 * kMiB));

  PageToucher::Get().Request(span.data(), 8 * kMiB);
  for (size_t at = 0; at < 8 * kMiB; at += 4) {
    __atomic_store_n(reinterpret_cast<uint32_t*>(span.data() + at),
                     static_cast<uint32_t>(at + 1), __ATOMIC_RELAXED);
  }
  PageToucher::Get().WaitUntilIdle();

  for (size_t at = 0; at < 8 * kMiB; at += 4) {
    ASSERT_EQ(*reinterpret_cast<uint32_t*>(span.data() + at), at + 1);
  }
}

}  // namespace
}  // namespace tfswitch
