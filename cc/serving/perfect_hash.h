// Assigns each key of a fixed set its own slot. To find a key's slot, a search
// reads one byte of memory.

#ifndef TFSWITCH_CC_SERVING_PERFECT_HASH_H_
#define TFSWITCH_CC_SERVING_PERFECT_HASH_H_

#include <cstdint>

#include "absl/types/span.h"

namespace tfswitch {

// Uses PtrHash: R. Groot Koerkamp, "PtrHash: Minimal Perfect Hashing at RAM
// Throughput", SEA 2025. This variant has buckets of equal expected size, and
// leaves a few slots empty. Keys are split into parts, and parts into buckets
// of a few keys. Each bucket has a pilot: a byte that sends its keys to free
// slots of their part. A key outside the set also gets a slot, where a search
// finds another key.
//
// Whatever the pilots are, all indices are below num_pilots() and num_slots().
struct PerfectHash {
  uint64_t seed = 0;
  uint64_t num_parts = 0;
  uint64_t pilots_per_part = 0;
  uint64_t slots_per_part = 0;  // Below 2^32.

  uint64_t num_pilots() const { return num_parts * pilots_per_part; }
  uint64_t num_slots() const { return num_parts * slots_per_part; }

  // A key's number, made from its HashKey(). Other functions call it `point`.
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
  // Maps the high bits of a number to an index below `size`.
  static uint64_t Scale(uint64_t number, uint64_t size) {
    return static_cast<uint64_t>(
        (static_cast<unsigned __int128>(number) * size) >> 64);
  }
};

// The number of parts for `num_keys` keys. The data to build one part fits into
// the second level of the cache.
uint64_t NumPerfectHashParts(uint64_t num_keys);

// Sets the sizes of all parts. Each gets room for `max_keys_per_part` keys.
void SizePerfectHash(uint64_t max_keys_per_part, PerfectHash* hash);

// Finds the pilots of one part. `points` are the numbers (PointOf) of the keys
// in the part, ascending and without duplicates. *pilots has room for
// pilots_per_part. False if there are no such pilots, which is very rare: try
// another seed.
bool FindPilots(const PerfectHash& hash, absl::Span<const uint64_t> points,
                uint8_t* pilots);

}  // namespace tfswitch

#endif  // TFSWITCH_CC_SERVING_PERFECT_HASH_H_
