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

// Finds the distinct keys of a batch. Keeps its memory from call to call. The
// time depends on the number of keys, not on their values.
//
// Not thread-safe: one per thread.
class UniqueKeys {
 public:
  // Writes the distinct keys to `unique`, in order of first appearance, and to
  // inverse[i] the index of keys[i] in `unique`. Returns the number of distinct
  // keys.
  //
  // REQUIRES: unique.size() >= keys.size(), inverse.size() == keys.size(), and
  // keys.size() < 2^31.
  size_t Run(absl::Span<const Key> keys, absl::Span<Key> unique,
             absl::Span<int32_t> inverse);

  // The length of the longest run of adjacent filled slots after the last
  // batch: no key was compared with more keys than that. For tests.
  size_t LongestRun() const;

 private:
  // Makes a table of `capacity` slots, a power of two, and inserts the keys of
  // `unique`.
  void Rebuild(size_t capacity, absl::Span<const Key> unique);

  size_t HomeOf(Key key) const {
    return static_cast<size_t>(hash_(key) >> shift_);
  }

  const KeyedHash hash_ = KeyedHash::Draw();
  std::vector<int32_t> slots_;  // Open addressing: place in `unique`, or -1.
  int shift_ = 0;               // hash >> shift_ is an index in slots_.
  size_t last_count_ = 0;  // The number of distinct keys in the last batch.
};

// A thread's own UniqueKeys.
UniqueKeys& ThreadUniqueKeys();

// Copies row inverse[i] of `unique_rows` to row i of `rows`, for all i.
// `threads` may be null.
void ScatterRows(absl::Span<const int32_t> inverse, int dim,
                 const float* unique_rows, float* rows,
                 const LentThreads* threads = nullptr);

// Copies row i of `from`, which may have any address, to row places[i] of
// `rows`, for all i.
void PlaceRows(absl::Span<const int32_t> places, int dim, const char* from,
               float* rows);

// Sums rows of `gradients` (inverse.size() x dim) into `sums` (num_unique x
// dim): row i is added to row inverse[i]. Overwrites `sums`.
//
// REQUIRES: `inverse` is a result of UniqueKeys::Run: it contains `num_unique`
// different numbers, which first appear in the order 0, 1, ...
void SumByInverse(absl::Span<const int32_t> inverse, int dim,
                  absl::Span<const float> gradients, absl::Span<float> sums);

// Adds factor x values[i] to sums[i].
//
// REQUIRES: both have the same size.
void AddScaled(absl::Span<const float> values, float factor,
               absl::Span<float> sums);

// The index of the first NaN or Inf; -1 if there is none.
int64_t FindNonFinite(absl::Span<const float> values);

}  // namespace tfswitch

#endif  // TFSWITCH_CC_BASE_KEY_BATCH_H_
