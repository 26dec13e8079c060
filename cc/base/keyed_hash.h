// A hash that nobody can predict, for the places of keys in memory.
//
// HashKey() is public and can be inverted, so a client that chooses ids can
// choose a million whose hashes begin with the same bits. If a table placed its
// keys by these bits, a search for one of these ids would have to pass all the
// others. So classes with a hash table in memory use this hash instead:
// EmbeddingTable, UniqueKeys and RowCache. Each object draws its own secrets,
// which never leave the process.
//
// Claim: keys chosen by somebody who does not know the secrets collide no more
// often than random keys. Two steps achieve this:
//
// * The key, under a secret mask, is multiplied by a secret factor, and the
//   high half of the product is folded into the low one. A multiplication alone
//   would keep some patterns of keys, for example multiples of one number, or
//   numbers that differ in their high bits only. Folding destroys these
//   patterns, because the two halves have different ones. This is not proven,
//   but tested with a dozen families of keys that are bad for one of the steps.
// * The result is multiplied by a secret odd number, and the high bits of the
//   product are used. For two different numbers the top b bits of the products
//   are equal with a probability of at most 2 / 2^b (Dietzfelbinger, Hagerup,
//   Katajainen and Penttonen, 1997). So any two keys collide at most twice as
//   often as random ones.
//
// The hash does not protect against an attacker who can measure the time of
// single calls so precisely that it shows which keys share a bucket.
//
// The same key has another hash in each process. So HashKey() is used for
// everything that must be the same in all processes: values, the order in which
// they are summed, random draws, files and messages.

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

  // Callers should use the high bits. Bit i of the hash depends only on bits 0
  // to i of the folded product, so its low bits are weak.
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
