// Prepares a batch of keys and gradients for the table: finds the distinct
// keys, sums gradients by key, and searches for NaN and Inf.

#ifndef TFSWITCH_CC_BASE_KEY_BATCH_H_
#define TFSWITCH_CC_BASE_KEY_BATCH_H_

#include <cstdint>
#include <vector>

#include "absl/types/span.h"
#include "cc/base/hash.h"
#include "cc/base/keyed_hash.h"
#include "cc/base/parallel.h"

namespace tfswitch {

// Finds the distinct keys of a batch. Keeps its memory from call to call. Its
// time does not depend on which keys they are.
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

  // The longest run of filled slots for the last batch: at most so many keys
  // were compared with one of its keys. For tests.
  size_t LongestRun() const;

 private:
  // Makes room for `capacity` slots, a power of two, and enters `unique`.
  void Rebuild(size_t capacity, absl::Span<const Key> unique);

  size_t HomeOf(Key key) const {
    return static_cast<size_t>(hash_(key) >> shift_);
  }

  const KeyedHash hash_ = KeyedHash::Draw();
  std::vector<int32_t> slots_;  // Open addressing: place in `unique`, or -1.
  int shift_ = 0;          // The shift that makes a place in slots_ of a hash.
  size_t last_count_ = 0;  // The number of distinct keys in the last batch.
};

// A thread's own UniqueKeys.
UniqueKeys& ThreadUniqueKeys();

// Copies row inverse[i] of `unique_rows` to row i of `rows`, for all i.
// `threads` may be null.
void ScatterRows(absl::Span<const int32_t> inverse, int dim,
                 const float* unique_rows, float* rows,
                 const LentThreads* threads = nullptr);

// Sums rows of `gradients` (inverse.size() x dim) into `sums` (num_unique x
// dim): row i is added to row inverse[i]. Overwrites `sums`.
//
// REQUIRES: `inverse` is from UniqueKeys::Run: its values first appear in the
// order 0, 1, ..., and num_unique of them differ.
void SumByInverse(absl::Span<const int32_t> inverse, int dim,
                  absl::Span<const float> gradients, absl::Span<float> sums);

// Adds factor x values[i] to sums[i].
//
// REQUIRES: both have the same size.
void AddScaled(absl::Span<const float> values, float factor,
               absl::Span<float> sums);

// The place of the first NaN or Inf, or -1.
int64_t FindNonFinite(absl::Span<const float> values);

}  // namespace tfswitch

#endif  // TFSWITCH_CC_BASE_KEY_BATCH_H_
