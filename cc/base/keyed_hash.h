// A hash that nobody can predict, for the places of keys in memory.
//
// HashKey() is public and can be inverted, so a client that chooses ids can
// choose a million whose hashes begin with the same bits. In a table placed by
// these bits, a search for one of them would pass all the others. So the
// classes that look keys up in memory use this hash: EmbeddingTable, UniqueKeys
// and RowCache. Each object draws its own secrets, which never leave the
// process.
//
// Claim: keys that are chosen without the secrets collide no more than random
// keys do. It rests on two steps:
//
//   * The key, under a secret mask, is multiplied by a secret factor, and the
//     high half of the product is folded into the low one. Any pattern of keys
//     that a multiplication alone would keep, such as multiples of one number
//     or numbers that differ in their high bits only, is lost there, for the
//     halves follow different patterns. That is not proven. It was tried with a
//     dozen families of keys that are bad for one step or the other.
//   * The result is multiplied by a secret odd number, of which the high
//     bits are used. For two numbers that differ the top b bits of that are
//     equal with a chance of at most 2 / 2^b (Dietzfelbinger, Hagerup,
//     Katajainen and Penttonen, 1997). So pairs of keys come together at most
//     twice as often as random ones, whatever keys are chosen.
//
// Not claimed: protection against an attacker that measures single calls so
// precisely that they show which keys share a bucket.
//
// Results of this hash differ from process to process. So values, the order in
// which they are summed, random draws, files and messages use HashKey().

#ifndef TFSWITCH_CC_BASE_KEYED_HASH_H_
#define TFSWITCH_CC_BASE_KEYED_HASH_H_

#include <cstdint>

#include "cc/base/hash.h"
#include "cc/base/racy_memory.h"
#include "cc/base/random_id.h"

namespace tfswitch {

// Immutable, so thread-safe.
class KeyedHash {
 public:
  // Draws new secrets.
  static KeyedHash Draw() { return {DrawId(), DrawId(), DrawId()}; }

  // Uses known secrets, for tests.
  KeyedHash(uint64_t mask, uint64_t factor, uint64_t multiplier)
      : mask_(mask), factor_(factor), multiplier_(multiplier | 1) {}

  // The high bits are good; bit i depends only on bits 0 to i of the folded
  // product.
  TFSWITCH_ALWAYS_INLINE uint64_t operator()(Key key) const {
    const unsigned __int128 product =
        static_cast<unsigned __int128>(static_cast<uint64_t>(key) ^ mask_) *
        factor_;
    const uint64_t folded =
        static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
    return folded * multiplier_;
  }

 private:
  const uint64_t mask_;
  const uint64_t factor_;
  const uint64_t multiplier_;
};

}  // namespace tfswitch

#endif  // TFSWITCH_CC_BASE_KEYED_HASH_H_
