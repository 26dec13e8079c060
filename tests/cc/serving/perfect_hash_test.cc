#include "cc/serving/perfect_hash.h"

#include <algorithm>
#include <random>
#include <vector>

#include "cc/base/hash.h"
#include "gtest/gtest.h"

namespace tfswitch {
namespace {

// The points of random keys, all in one part.
std::vector<uint64_t> PointsFor(const PerfectHash& hash, size_t num_keys) {
  std::mt19937_64 random(num_keys);
  std::vector<uint64_t> points(num_keys);
  for (uint64_t& point : points) point = hash.PointOf(random());
  std::sort(points.begin(), points.end());
  return points;
}

TEST(PerfectHashTest, EachPointHasASlotOfItsOwn) {
  for (const size_t num_keys : {0, 1, 2, 3, 10, 1000, 99'999}) {
    PerfectHash hash;
    hash.num_parts = 1;
    SizePerfectHash(num_keys, &hash);
    // Few are left over, and pilots are small.
    EXPECT_LT(hash.num_slots(), num_keys * 1.04 + 2);
    EXPECT_LT(hash.num_pilots() * 8, num_keys * 3.6 + 9);
    const std::vector<uint64_t> points = PointsFor(hash, num_keys);
    std::vector<uint8_t> pilots(hash.num_pilots());
    ASSERT_TRUE(FindPilots(hash, points, pilots.data())) << num_keys;
    std::vector<bool> taken(hash.num_slots());
    for (const uint64_t point : points) {
      ASSERT_LT(hash.PilotOf(point), hash.num_pilots());
      const uint64_t slot = hash.SlotOf(point, pilots[hash.PilotOf(point)]);
      ASSERT_LT(slot, hash.num_slots());
      ASSERT_FALSE(taken[slot]);
      taken[slot] = true;
    }
  }
}

TEST(PerfectHashTest, PlacesAreInBoundsWhateverPilotsSay) {
  PerfectHash hash;
  hash.num_parts = 3;
  hash.pilots_per_part = 5;
  for (const uint64_t slots : {uint64_t{1}, uint64_t{7}, ~uint64_t{0} >> 32}) {
    hash.slots_per_part = slots;
    std::mt19937_64 random(slots);
    for (int i = 0; i < 10'000; ++i) {
      const uint64_t point = i == 0 ? ~uint64_t{0} : i == 1 ? 0 : random();
      ASSERT_LT(hash.PilotOf(point), hash.num_pilots());
      ASSERT_EQ(hash.PilotOf(point) / 5, hash.PartOf(point));
      ASSERT_LT(hash.SlotOf(point, static_cast<uint8_t>(random())),
                hash.num_slots());
    }
  }
}

TEST(PerfectHashTest, ABucketThatIsTooLargeIsRefused) {
  // All keys are in one bucket.
  PerfectHash hash;
  hash.num_parts = 1;
  SizePerfectHash(1000, &hash);
  std::vector<uint64_t> points(1000);
  for (size_t i = 0; i < points.size(); ++i) points[i] = i;
  std::vector<uint8_t> pilots(hash.num_pilots());
  EXPECT_FALSE(FindPilots(hash, points, pilots.data()));
}

TEST(PerfectHashTest, PartsStaySmall) {
  EXPECT_EQ(NumPerfectHashParts(0), 1);
  EXPECT_EQ(NumPerfectHashParts(50'000), 1);
  EXPECT_EQ(NumPerfectHashParts(10'000'000), 101);
}

}  // namespace
}  // namespace tfswitch
