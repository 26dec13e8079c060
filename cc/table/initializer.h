// The initial values of a row, as a pure function of seed, key and position.
//
// The generator has no state: each float is computed by mixing the seed, the
// key and the float's position. So a key gets the same initial row on any
// server, in any thread and in any order of arrival.

#ifndef TFSWITCH_CC_TABLE_INITIALIZER_H_
#define TFSWITCH_CC_TABLE_INITIALIZER_H_

#include <cstddef>
#include <cstdint>

#include "cc/base/hash.h"
#include "cc/table/table_config.h"

namespace tfswitch {

// Immutable, so thread-safe.
class Initializer {
 public:
  Initializer(const InitializerConfig& config, uint64_t seed, int dim);

  // Writes the initial embeddings of the keys, `dim` floats each.
  void Fill(const Key* keys, size_t num_keys, float* embeddings) const;

 private:
  const InitializerConfig config_;
  // Calls fill(stream, embedding) for each key.
  template <typename FillRow>
  void FillEach(const Key* keys, size_t num_keys, float* embeddings,
                const FillRow& fill) const;

  const uint64_t mixed_seed_;
  const int dim_;
  const bool use_avx2_;
};

}  // namespace tfswitch

#endif  // TFSWITCH_CC_TABLE_INITIALIZER_H_
