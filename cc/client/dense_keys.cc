#include "cc/client/dense_keys.h"

#include <cstddef>

namespace tfswitch {
namespace {

// The multiplicative inverse modulo 2^64 of an odd number, by Newton's
// iteration: each turn doubles the number of right bits.
constexpr uint64_t Inverse(uint64_t odd) {
  uint64_t inverse = odd;  // Right in 3 bits.
  for (int i = 0; i < 5; ++i) inverse *= 2 - odd * inverse;
  return inverse;
}

// The key that HashKey() takes to `hash`: its steps backwards.
Key KeyOfHash(uint64_t hash) {
  uint64_t h = hash;
  h ^= h >> 33;
  h *= Inverse(0xc4ceb9fe1a85ec53ULL);
  h ^= h >> 33;
  h *= Inverse(0xff51afd7ed558ccdULL);
  h ^= h >> 33;
  return static_cast<Key>(h);
}

}  // namespace

void DenseKeys(uint32_t num_virtual_shards, absl::Span<Key> keys) {
  const uint64_t num_blocks = keys.size();
  for (uint64_t block = 0; block < num_blocks; ++block) {
    const uint64_t virtual_shard = block * num_virtual_shards / num_blocks;
    // The low bits are the virtual shard. The rest sets the blocks apart, also
    // in the bits that pick stripe and bucket of the table.
    const uint64_t spread = HashKey(static_cast<Key>(block)) &
                            ~static_cast<uint64_t>(num_virtual_shards - 1);
    keys[block] = KeyOfHash(spread | virtual_shard);
  }
}

}  // namespace tfswitch
