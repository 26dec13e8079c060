// PilotSearch places large buckets first, because they need many free slots at
// once. Place() looks for a pilot whose slots are all free. If there is none,
// it takes the pilot with the least CostOf() and removes the buckets in its
// way, which PlaceAll() then places again. A recently placed bucket is not
// removed, so that two buckets do not displace each other without end.
//
// The number of moves is limited, so that an unlucky seed fails quickly. The
// random numbers always start from the same state, so that the same keys and
// seed give the same pilots.

#include "cc/serving/perfect_hash.h"

#include <algorithm>
#include <limits>
#include <random>
#include <vector>

namespace tfswitch {
namespace {

constexpr uint64_t kKeysPerPart = 100'000;
// The average number of keys that share a pilot. With a smaller number pilots
// are found faster; with a larger one files are smaller. Measured: 10M keys in
// about 1.5 s, with 3.5 bits of pilots per key.
constexpr double kKeysPerPilot = 2.3;
constexpr double kLoad = 0.97;

constexpr int kNumPilots = 256;
constexpr uint32_t kNobody = std::numeric_limits<uint32_t>::max();
// The largest bucket size. Evenly distributed keys give buckets of at most
// about a dozen.
constexpr size_t kMaxKeysPerBucket = 64;
// This many of the buckets that were placed last are not moved, so that two
// buckets do not displace each other again and again.
constexpr size_t kNumRecent = 16;

// Searches the pilots of one part.
class PilotSearch {
 public:
  PilotSearch(const PerfectHash& hash, absl::Span<const uint64_t> points,
              uint8_t* pilots)
      : hash_(hash),
        points_(points),
        pilots_(pilots),
        begins_(hash.pilots_per_part + 1),
        taken_(hash.slots_per_part / 64 + 1),
        owners_(hash.slots_per_part, kNobody) {
    std::fill(pilots, pilots + hash.pilots_per_part, uint8_t{0});
    if (points.empty()) return;
    const uint64_t first = hash.PartOf(points.front()) * hash.pilots_per_part;
    for (const uint64_t point : points) {
      ++begins_[hash.PilotOf(point) - first + 1];
    }
    for (size_t i = 1; i < begins_.size(); ++i) begins_[i] += begins_[i - 1];
  }

  bool Run() {
    std::vector<std::vector<uint32_t>> by_size(1);
    for (uint32_t bucket = 0; bucket < hash_.pilots_per_part; ++bucket) {
      const size_t size = SizeOf(bucket);
      if (size > kMaxKeysPerBucket) return false;
      if (size >= by_size.size()) by_size.resize(size + 1);
      by_size[size].push_back(bucket);
    }
    for (size_t size = by_size.size() - 1; size >= 1; --size) {
      for (const uint32_t bucket : by_size[size]) {
        if (!PlaceAll(bucket)) return false;
      }
    }
    return true;
  }

 private:
  uint32_t SizeOf(uint32_t bucket) const {
    return begins_[bucket + 1] - begins_[bucket];
  }
  absl::Span<const uint64_t> PointsOf(uint32_t bucket) const {
    return points_.subspan(begins_[bucket], SizeOf(bucket));
  }

  // Places a bucket, and then the buckets that it has displaced.
  bool PlaceAll(uint32_t bucket) {
    recent_.assign(kNumRecent, kNobody);
    size_t num_placed = 0;
    homeless_.assign(1, bucket);
    while (!homeless_.empty()) {
      // Takes the largest waiting bucket, because it is the hardest to place.
      const auto next = std::max_element(
          homeless_.begin(), homeless_.end(),
          [this](uint32_t a, uint32_t b) { return SizeOf(a) < SizeOf(b); });
      const uint32_t placed = *next;
      *next = homeless_.back();
      homeless_.pop_back();
      if (!Place(placed)) return false;
      recent_[num_placed++ % kNumRecent] = placed;
      // With a good seed so many moves are never needed. So the search for this
      // seed fails, and the caller tries another seed.
      if (++num_moves_ > 16 * hash_.pilots_per_part) return false;
    }
    return true;
  }

  // Places a bucket on free slots or, if that is impossible, at the least cost.
  bool Place(uint32_t bucket) {
    const absl::Span<const uint64_t> points = PointsOf(bucket);
    const auto start = static_cast<uint8_t>(random_());
    uint64_t least = std::numeric_limits<uint64_t>::max();
    uint8_t best = 0;
    for (int i = 0; i < kNumPilots && least > 0; ++i) {
      const auto pilot = static_cast<uint8_t>(start + i);
      if (!IsFree(points, pilot)) continue;
      least = 0;
      best = pilot;
    }
    for (int i = 0; i < kNumPilots && least > 0; ++i) {
      const auto pilot = static_cast<uint8_t>(start + i);
      const uint64_t cost = CostOf(points, pilot, least);
      if (cost >= least) continue;
      least = cost;
      best = pilot;
    }
    if (least == std::numeric_limits<uint64_t>::max()) return false;
    pilots_[bucket] = best;
    for (const uint64_t point : points) {
      const uint64_t slot = hash_.SlotInPart(point, best);
      if (IsTaken(slot)) TurnOut(owners_[slot]);
      Take(slot, bucket);
    }
    return true;
  }

  bool IsTaken(uint64_t slot) const {
    return (taken_[slot / 64] >> (slot % 64) & 1) != 0;
  }
  void Take(uint64_t slot, uint32_t bucket) {
    taken_[slot / 64] |= uint64_t{1} << (slot % 64);
    owners_[slot] = bucket;
  }

  // Whether all slots differ. Two keys of a bucket must not share a slot.
  static bool AreDistinct(const uint64_t* slots, size_t size) {
    for (size_t i = 1; i < size; ++i) {
      if (std::find(slots, slots + i, slots[i]) != slots + i) return false;
    }
    return true;
  }

  bool IsFree(absl::Span<const uint64_t> points, uint8_t pilot) const {
    uint64_t slots[kMaxKeysPerBucket];
    for (size_t i = 0; i < points.size(); ++i) {
      slots[i] = hash_.SlotInPart(points[i], pilot);
      if (IsTaken(slots[i])) return false;
    }
    return AreDistinct(slots, points.size());
  }

  // The cost of a pilot: the sum of the squared sizes of the buckets that it
  // would displace. Returns at least `limit` if the pilot is too expensive or
  // impossible.
  uint64_t CostOf(absl::Span<const uint64_t> points, uint8_t pilot,
                  uint64_t limit) const {
    uint64_t slots[kMaxKeysPerBucket];
    uint64_t cost = 0;
    for (size_t i = 0; i < points.size(); ++i) {
      slots[i] = hash_.SlotInPart(points[i], pilot);
      if (!IsTaken(slots[i])) continue;
      const uint32_t owner = owners_[slots[i]];
      if (std::find(recent_.begin(), recent_.end(), owner) != recent_.end()) {
        return limit;
      }
      cost += uint64_t{SizeOf(owner)} * SizeOf(owner);
      if (cost >= limit) return limit;
    }
    return AreDistinct(slots, points.size()) ? cost : limit;
  }

  void TurnOut(uint32_t bucket) {
    for (const uint64_t point : PointsOf(bucket)) {
      const uint64_t slot = hash_.SlotInPart(point, pilots_[bucket]);
      // Skips a slot that another bucket has taken meanwhile.
      if (owners_[slot] != bucket) continue;
      taken_[slot / 64] &= ~(uint64_t{1} << (slot % 64));
    }
    homeless_.push_back(bucket);
  }

  const PerfectHash& hash_;
  const absl::Span<const uint64_t> points_;
  uint8_t* const pilots_;
  std::vector<uint32_t> begins_;  // Where each bucket's points begin.
  std::vector<uint64_t> taken_;   // One bit per slot.
  std::vector<uint32_t> owners_;  // The bucket of each taken slot.
  std::vector<uint32_t> recent_;
  std::vector<uint32_t> homeless_;
  uint64_t num_moves_ = 0;
  std::minstd_rand random_;  // The fixed seed gives the same pilots each time.
};

}  // namespace

uint64_t NumPerfectHashParts(uint64_t num_keys) {
  return num_keys / kKeysPerPart + 1;
}

void SizePerfectHash(uint64_t max_keys_per_part, PerfectHash* hash) {
  const auto num_keys = static_cast<double>(max_keys_per_part);
  hash->pilots_per_part = static_cast<uint64_t>(num_keys / kKeysPerPilot) + 1;
  hash->slots_per_part = static_cast<uint64_t>(num_keys / kLoad) + 1;
}

bool FindPilots(const PerfectHash& hash, absl::Span<const uint64_t> points,
                uint8_t* pilots) {
  return PilotSearch(hash, points, pilots).Run();
}

}  // namespace tfswitch
