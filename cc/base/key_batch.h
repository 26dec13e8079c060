// What is done to a batch of keys and gradients on its way to the table: the
// distinct keys, sums of gradients by key, the search for NaN and Inf.

#ifndef TFSWITCH_CC_BASE_KEY_BATCH_H_
#define TFSWITCH_CC_BASE_KEY_BATCH_H_

#include <cstdint>
#include <vector>

#include "absl/types/span.h"
#include "cc/base/hash.h"

namespace tfswitch {

// Finds the distinct keys of a batch. Keeps its memory from call to call.
//
// Not thread-safe: one per thread.
class UniqueKeys {
 public:
  // Writes the distinct keys in order of first appearance to `unique` and the
  // place of keys[i] in it to inverse[i]. Returns how many are distinct.
  //
  // REQUIRES: unique.size() >= keys.size(), inverse.size() == keys.size(), and
  // keys.size() < 2^31.
  size_t Run(absl::Span<const Key> keys, absl::Span<Key> unique,
             absl::Span<int32_t> inverse);

 private:
  std::vector<int32_t> slots_;  // Open addressing: place in `unique`, or -1.
};

// A thread's own UniqueKeys.
UniqueKeys& ThreadUniqueKeys();

// Sums rows of `gradients` (inverse.size() x dim) into `sums` (num_unique x
// dim): row i is added to row inverse[i]. Overwrites `sums`.
//
// REQUIRES: `inverse` is of UniqueKeys::Run: values appear in order, 0, 1, ...
void SumByInverse(absl::Span<const int32_t> inverse, int dim,
                  absl::Span<const float> gradients, absl::Span<float> sums);

// Multiplies all values.
void Scale(float factor, absl::Span<float> values);

// The place of the first NaN or Inf, or -1.
int64_t FindNonFinite(absl::Span<const float> values);

}  // namespace tfswitch

#endif  // TFSWITCH_CC_BASE_KEY_BATCH_H_
