// The key hash. It is part of the wire contract: clients place keys on servers
// by it, and checkpoints are divided by it, so it never changes within a
// protocol version.

#ifndef TFSWITCH_CC_BASE_HASH_H_
#define TFSWITCH_CC_BASE_HASH_H_

#include <cstdint>

namespace tfswitch {

// An id as the table and the wire see it. Every int64 is an ordinary key.
using Key = int64_t;

// The 64-bit finaliser of MurmurHash3 (Appleby, public domain): a bijection
// whose output bits each depend on all input bits.
//
// The low bits of the hash select the virtual shard. For the places of keys in
// memory, tables use another hash (base/keyed_hash.h), because anyone can
// choose keys whose values of this hash collide.
inline uint64_t HashKey(Key key) {
  uint64_t h = static_cast<uint64_t>(key);
  h ^= h >> 33;
  h *= 0xff51afd7ed558ccdULL;
  h ^= h >> 33;
  h *= 0xc4ceb9fe1a85ec53ULL;
  h ^= h >> 33;
  return h;
}

// The inverse of HashKey(): the key that has this hash. Takes the steps of
// HashKey() backwards, with the inverses of its multipliers modulo 2^64.
inline Key KeyOfHash(uint64_t hash) {
  uint64_t h = hash;
  h ^= h >> 33;
  h *= 0x9cb4b2f8129337dbULL;
  h ^= h >> 33;
  h *= 0x4f74430c22a54005ULL;
  h ^= h >> 33;
  return static_cast<Key>(h);
}

// The virtual shard of a key: hash mod `num_virtual_shards`.
//
// REQUIRES: num_virtual_shards is a power of two.
inline uint32_t VirtualShardOf(Key key, uint32_t num_virtual_shards) {
  return static_cast<uint32_t>(HashKey(key)) & (num_virtual_shards - 1);
}

// The server that owns a virtual shard. Each server owns a contiguous range,
// and all ranges are about equally long.
//
// REQUIRES: num_virtual_shards is a power of two.
inline uint32_t OwnerOfVirtualShard(uint32_t virtual_shard,
                                    uint32_t num_virtual_shards,
                                    uint32_t num_servers) {
  return static_cast<uint32_t>(static_cast<uint64_t>(virtual_shard) *
                                   num_servers >>
                               __builtin_ctz(num_virtual_shards));
}

// The first virtual shard of a server; for `server` = `num_servers` the number
// of virtual shards.
inline uint32_t FirstVirtualShardOf(uint32_t server,
                                    uint32_t num_virtual_shards,
                                    uint32_t num_servers) {
  // The smallest v for which floor(v * N / V), its server, is at least i. V is
  // the number of virtual shards, N that of servers, and i the server.
  return static_cast<uint32_t>(
      (static_cast<uint64_t>(server) * num_virtual_shards + num_servers - 1) /
      num_servers);
}

}  // namespace tfswitch

#endif  // TFSWITCH_CC_BASE_HASH_H_
