// Tells of most keys that a set does not have them, from a few bits.

#ifndef TFSWITCH_CC_SERVING_KEY_FILTER_H_
#define TFSWITCH_CC_SERVING_KEY_FILTER_H_

#include <cstddef>
#include <cstdint>
#include <vector>

namespace tfswitch {

// A Bloom filter whose bits of a key are in one word: Putze, Sanders, Singler,
// "Cache-, Hash- and Space-Efficient Bloom Filters", 2007. With 16 bits per
// key and 3 set it takes about 1 key in 100 for one that it has.
//
// Add() before others read; then immutable, so thread-safe.
class KeyFilter {
 public:
  explicit KeyFilter(size_t num_keys)
      : words_(num_keys * kBitsPerKey / kBitsPerWord + 1) {}

  void Add(uint64_t hash) { words_[Place(hash)] |= Bits(hash); }

  // Where the bits of a key are; prefetching is up to the caller.
  const uint64_t* Word(uint64_t hash) const { return &words_[Place(hash)]; }
  // Whether a key may be one of those that were added.
  static bool MayHave(uint64_t word, uint64_t hash) {
    const uint64_t bits = Bits(hash);
    return (word & bits) == bits;
  }

 private:
  static constexpr size_t kBitsPerKey = 16;
  static constexpr size_t kBitsPerWord = 64;

  // From the high bits of the hash; the bits in the word from low ones.
  size_t Place(uint64_t hash) const {
    return static_cast<size_t>(
        (static_cast<unsigned __int128>(hash) * words_.size()) >> 64);
  }
  static uint64_t Bits(uint64_t hash) {
    return uint64_t{1} << (hash & 63) | uint64_t{1} << (hash >> 6 & 63) |
           uint64_t{1} << (hash >> 12 & 63);
  }

  std::vector<uint64_t> words_;
};

}  // namespace tfswitch

#endif  // TFSWITCH_CC_SERVING_KEY_FILTER_H_
