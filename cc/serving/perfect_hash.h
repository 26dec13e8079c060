// A slot of its own for each of a fixed set of keys, found with one byte of
// memory.

#ifndef TFSWITCH_CC_SERVING_PERFECT_HASH_H_
#define TFSWITCH_CC_SERVING_PERFECT_HASH_H_

#include <cstdint>

#include "absl/types/span.h"

namespace tfswitch {

// PtrHash: R. Groot Koerkamp, "PtrHash: Minimal Perfect Hashing at RAM
// Throughput", SEA 2025, with buckets that are all alike, and with the few
// slots that stay empty left where they are. The keys are cut into parts, and a
// part into buckets of a few keys, each of which has a pilot: a byte that sends
// its keys to free slots of their part. A key that is not one of the set has a
// slot too, where it finds another one.
//
// Whatever pilots hold, places are below num_pilots() and num_slots().
struct PerfectHash {
  uint64_t seed = 0;
  uint64_t num_parts = 0;
  uint64_t pilots_per_part = 0;
  uint64_t slots_per_part = 0;  // Below 2^32.

  uint64_t num_pilots() const { return num_parts * pilots_per_part; }
  uint64_t num_slots() const { return num_parts * slots_per_part; }

  // The argument of the other functions: one number per key, of its HashKey().
  uint64_t PointOf(uint64_t hash) const {
    return (hash ^ seed) * 0x9e3779b97f4a7c15ULL;
  }
  uint64_t PartOf(uint64_t point) const { return Scale(point, num_parts); }
  // The index of the key's pilot.
  uint64_t PilotOf(uint64_t point) const { return Scale(point, num_pilots()); }
  uint64_t SlotInPart(uint64_t point, uint8_t pilot) const {
    const uint64_t mixed =
        (point ^ (pilot * 0xa0761d6478bd642fULL)) * 0xe7037ed1a0b428dbULL;
    return (mixed >> 32) * slots_per_part >> 32;
  }
  uint64_t SlotOf(uint64_t point, uint8_t pilot) const {
    return PartOf(point) * slots_per_part + SlotInPart(point, pilot);
  }

 private:
  // The high bits of a number, as a place among `size`.
  static uint64_t Scale(uint64_t number, uint64_t size) {
    return static_cast<uint64_t>(
        (static_cast<unsigned __int128>(number) * size) >> 64);
  }
};

// Parts that `num_keys` are cut into: the data of one fits into the second
// level of the cache while it is built.
uint64_t NumPerfectHashParts(uint64_t num_keys);

// Sets the sizes of parts, of which the largest has so many keys.
void SizePerfectHash(uint64_t max_keys_per_part, PerfectHash* hash);

// Finds the pilots of one part: `points` are those of its keys, ascending and
// without duplicates, and *pilots has room for pilots_per_part. False if there
// are none, as happens for one seed in very many: take another one.
bool FindPilots(const PerfectHash& hash, absl::Span<const uint64_t> points,
                uint8_t* pilots);

}  // namespace tfswitch

#endif  // TFSWITCH_CC_SERVING_PERFECT_HASH_H_
