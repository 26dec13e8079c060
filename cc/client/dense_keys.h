// Where the blocks of a dense table lie.

#ifndef TFSWITCH_CC_CLIENT_DENSE_KEYS_H_
#define TFSWITCH_CC_CLIENT_DENSE_KEYS_H_

#include <cstdint>

#include "absl/types/span.h"
#include "cc/base/hash.h"

namespace tfswitch {

// A dense table is a long vector, cut into blocks that are the rows of a table.
// Writes the key of each block. The keys are chosen by their hashes, so that
// block b lies in virtual shard floor(b * V / B): every server of any number
// has a contiguous run of blocks, and none has more than one block more than
// its even share, rounded to virtual shards.
//
// REQUIRES: num_virtual_shards is a power of two.
void DenseKeys(uint32_t num_virtual_shards, absl::Span<Key> keys);

}  // namespace tfswitch

#endif  // TFSWITCH_CC_CLIENT_DENSE_KEYS_H_
