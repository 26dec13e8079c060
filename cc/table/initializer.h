// The initial values of a row, as a pure function of seed, key and position.
//
// The generator has no state: each float is computed by mixing the seed, the
// key and the float's position. So a key gets the same initial row on any
// server, in any thread and in any order of arrival.

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

  // Writes the initial embedding of `key`, which has `dim` floats.
  void Fill(Key key, float* embedding) const;

 private:
  const InitializerConfig config_;
  const uint64_t seed_;
  const int dim_;
};

}  // namespace tfswitch

#endif  // TFSWITCH_CC_TABLE_INITIALIZER_H_
