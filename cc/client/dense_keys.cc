#include "cc/client/dense_keys.h"

namespace tfswitch {

void DenseKeys(uint32_t num_virtual_shards, absl::Span<Key> keys) {
  const uint64_t num_blocks = keys.size();
  for (uint64_t block = 0; block < num_blocks; ++block) {
    const uint64_t virtual_shard = block * num_virtual_shards / num_blocks;
    // The low bits of the hash are the virtual shard. The other bits make the
    // keys differ.
    const uint64_t spread = HashKey(static_cast<Key>(block)) &
                            ~static_cast<uint64_t>(num_virtual_shards - 1);
    keys[block] = KeyOfHash(spread | virtual_shard);
  }
}

}  // namespace tfswitch
