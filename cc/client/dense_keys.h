// Chooses the keys of a dense table's blocks.

#ifndef TFSWITCH_CC_CLIENT_DENSE_KEYS_H_
#define TFSWITCH_CC_CLIENT_DENSE_KEYS_H_

#include <cstdint>

#include "absl/types/span.h"
#include "cc/base/hash.h"

namespace tfswitch {

// Writes the key of each block. A dense table is a long vector, cut into B
// blocks that are rows of a table with V virtual shards. The hash of block b's
// key puts it in virtual shard floor(b * V / B). So each server has a
// contiguous run of blocks, for any number of servers, and at most one block
// more than its even share, rounded to virtual shards.
//
// REQUIRES: num_virtual_shards is a power of two.
void DenseKeys(uint32_t num_virtual_shards, absl::Span<Key> keys);

}  // namespace tfswitch

#endif  // TFSWITCH_CC_CLIENT_DENSE_KEYS_H_
