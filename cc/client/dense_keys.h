// Chooses the keys under which the blocks of a dense table are stored.

#ifndef TFSWITCH_CC_CLIENT_DENSE_KEYS_H_
#define TFSWITCH_CC_CLIENT_DENSE_KEYS_H_

#include <cstdint>

#include "absl/types/span.h"
#include "cc/base/hash.h"

namespace tfswitch {

// Writes the key of each block to `keys`. A dense table is a long vector that
// is cut into B blocks. The blocks are the rows of a table with V virtual
// shards. The hash of block b's key places it in virtual shard floor(b * V /
// B). So each server has a contiguous range of blocks, for any number of
// servers. No server has more than one block above its equal share, rounded to
// virtual shards.
//
// REQUIRES: num_virtual_shards is a power of two.
void DenseKeys(uint32_t num_virtual_shards, absl::Span<Key> keys);

}  // namespace tfswitch

#endif  // TFSWITCH_CC_CLIENT_DENSE_KEYS_H_
