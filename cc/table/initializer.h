// The first value of a row, as a pure function of (seed, key, position).
//
// There is no generator state: each float comes from mixing the seed, the key
// and its position, so a key starts the same on any server, in any thread and
// in any order of arrival.

#ifndef TFSWITCH_CC_TABLE_INITIALIZER_H_
#define TFSWITCH_CC_TABLE_INITIALIZER_H_

#include <cstdint>

#include "cc/base/hash.h"
#include "cc/table/table_config.h"

namespace tfswitch {

// Immutable, so thread-safe.
class Initializer {
 public:
  Initializer(const InitializerConfig& config, uint64_t seed, int dim)
      : config_(config), seed_(seed), dim_(dim) {}

  // Writes the `dim` floats that the embedding of `key` starts with.
  void Fill(Key key, float* embedding) const;

 private:
  const InitializerConfig config_;
  const uint64_t seed_;
  const int dim_;
};

}  // namespace tfswitch

#endif  // TFSWITCH_CC_TABLE_INITIALIZER_H_
