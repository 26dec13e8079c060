#include "cc/base/memory_region.h"

#include <sched.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <thread>
#include <vector>

#include "cc/base/page_keeper.h"
#include "cc/base/racy_memory.h"
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

#if !TFSWITCH_THREAD_SANITIZER && !defined(__SANITIZE_ADDRESS__)
// Sanitizers leave programs less of their address space.
TEST(MemoryReservationTest, LeavesRoomForOthersHoweverManyAskForALot) {
  constexpr size_t kWish = size_t{3} << 40;
  constexpr size_t kLeast = size_t{1} << 30;
  std::vector<MemoryReservation> reservations;
  for (int i = 0; i < 300; ++i) {
    auto reservation = MemoryReservation::Create(kWish, kLeast);
    ASSERT_TRUE(reservation.ok()) << i << ": " << reservation.status();
    reservations.push_back(*std::move(reservation));
  }

  EXPECT_GE(reservations.front().size(), size_t{1} << 40);
  EXPECT_GE(reservations.back().size(), size_t{16} << 30);
  reservations.clear();
  const auto after = MemoryReservation::Create(size_t{1} << 40, kLeast);
  ASSERT_TRUE(after.ok()) << after.status();
  EXPECT_EQ(after->size(), size_t{1} << 40);
}

TEST(MemoryReservationTest, ReservingUntilNothingIsLeftLeavesRoomForOthers) {
  std::vector<MemoryReservation> reservations;
  for (int i = 0; i < 3000; ++i) {
    auto reservation =
        MemoryReservation::Create(size_t{3} << 40, size_t{4} << 30);
    if (!reservation.ok()) break;  // Large processors have more than all these.
    reservations.push_back(*std::move(reservation));
  }

  void* const map = mmap(nullptr, size_t{32} << 30, PROT_NONE,
                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  ASSERT_NE(map, MAP_FAILED) << "after " << reservations.size();
  munmap(map, size_t{32} << 30);
}
#endif

TEST(MemorySpanTest, GrowsInPlaceUpToItsCapacity) {
  const MemoryReservation reservation = Reserve(64 * kMiB);
  MemorySpan span(reservation.data(), 64 * kMiB, 0);

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
  MemorySpan span(reservation.data(), 8 * kMiB, 0);
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

TEST(PageKeeperTest, TouchesWhatIsAskedAndKeepsWhatIsThere) {
  const MemoryReservation reservation = Reserve(8 * kMiB);
  MemorySpan span(reservation.data(), 8 * kMiB, 0);
  ASSERT_TRUE(span.Extend(8 * kMiB));
  span.data()[2 * kHugePageBytes + 5] = 'x';

  PageKeeper::Get().Touch(span.data() + kHugePageBytes, 2 * kHugePageBytes);
  PageKeeper::Get().WaitUntilIdle();

  EXPECT_EQ(NumResidentPages(span.data(), kHugePageBytes), 0);
  EXPECT_EQ(NumResidentPages(span.data() + kHugePageBytes, 2 * kHugePageBytes),
            1024);
  EXPECT_EQ(span.data()[2 * kHugePageBytes + 5], 'x');
  EXPECT_EQ(span.data()[2 * kHugePageBytes + 6], 0);
}

TEST(PageKeeperTest, AfterCancelTheMemoryMayGo) {
  for (int round = 0; round < 20; ++round) {
    const MemoryReservation reservation = Reserve(32 * kMiB);
    MemorySpan span(reservation.data(), 32 * kMiB, 0);
    ASSERT_TRUE(span.Extend(32 * kMiB));
    for (size_t at = 0; at < 32 * kMiB; at += kHugePageBytes) {
      PageKeeper::Get().Touch(span.data() + at, kHugePageBytes);
    }
    PageKeeper::Get().Cancel(span);
  }
}

TEST(PageKeeperTest, GivesBackWhatIsReleasedAndReset) {
  const MemoryReservation reservation = Reserve(8 * kMiB);
  MemorySpan span = reservation.Span(0, 8 * kMiB);
  ASSERT_TRUE(span.Extend(8 * kMiB));
  std::fill_n(span.data(), 8 * kMiB, 'x');

  PageKeeper::Get().Release(span, kMiB, 3 * kMiB);
  PageKeeper::Get().WaitUntilIdle();
  EXPECT_EQ(NumResidentPages(span.data() + kMiB, 2 * kMiB), 0);
  EXPECT_EQ(span.data()[kMiB - 1], 'x');

  PageKeeper::Get().Reset(span);
  while (PageKeeper::Get().IsBusy(span)) sched_yield();
  EXPECT_EQ(NumResidentPages(span.data(), 8 * kMiB), 0);
  EXPECT_EQ(span.data()[0], 0);
}

TEST(PageKeeperTest, ResetComesInsteadOfWhatWasToBeTouched) {
  const MemoryReservation reservation = Reserve(64 * kMiB);
  MemorySpan span = reservation.Span(0, 64 * kMiB);
  ASSERT_TRUE(span.Extend(64 * kMiB));
  PageKeeper::Get().Touch(span.data(), 64 * kMiB);
  PageKeeper::Get().Reset(span);
  PageKeeper::Get().WaitUntilIdle();
  EXPECT_EQ(NumResidentPages(span.data(), 64 * kMiB), 0);
  EXPECT_FALSE(PageKeeper::Get().IsBusy(span));
}

TEST(PageKeeperTest, WritersLoseNothingWhilePagesAreTouched) {
  const MemoryReservation reservation = Reserve(8 * kMiB);
  MemorySpan span(reservation.data(), 8 * kMiB, 0);
  ASSERT_TRUE(span.Extend(8 * kMiB));

  PageKeeper::Get().Touch(span.data(), 8 * kMiB);
  for (size_t at = 0; at < 8 * kMiB; at += 4) {
    __atomic_store_n(reinterpret_cast<uint32_t*>(span.data() + at),
                     static_cast<uint32_t>(at + 1), __ATOMIC_RELAXED);
  }
  PageKeeper::Get().WaitUntilIdle();

  for (size_t at = 0; at < 8 * kMiB; at += 4) {
    ASSERT_EQ(*reinterpret_cast<uint32_t*>(span.data() + at), at + 1);
  }
}

}  // namespace
}  // namespace tfswitch
