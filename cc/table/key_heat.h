// Estimates which keys and virtual shards of a table are looked up most.

#ifndef TFSWITCH_CC_TABLE_KEY_HEAT_H_
#define TFSWITCH_CC_TABLE_KEY_HEAT_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "cc/base/hash.h"
#include "cc/base/mutex.h"

namespace tfswitch {

// Samples one key in kSampleEvery. Each kHalfLife the counts are halved, so
// they describe the last minutes. The hottest keys are found with the
// Space-Saving algorithm (Metwally et al. 2005, "Efficient Computation of
// Frequent and Top-k Elements in Data Streams"), which runs for each of kSets
// sets of keys by itself, so that a sample looks at few entries.
//
// Thread-safe.
class KeyHeat {
 public:
  static constexpr uint32_t kSampleEvery = 256;
  static constexpr size_t kSets = 16;
  static constexpr size_t kEntriesOfSet = 8;
  static constexpr size_t kHotKeys = kSets * kEntriesOfSet;
  static constexpr absl::Duration kHalfLife = absl::Minutes(1);

  // `num_virtual_shards` is that of the table.
  explicit KeyHeat(uint32_t num_virtual_shards)
      : num_virtual_shards_(num_virtual_shards) {}

  // Samples the keys of a lookup. Never waits: leaves them out while another
  // thread counts its own.
  void Note(absl::Span<const Key> keys) ABSL_LOCKS_EXCLUDED(mutex_);

  struct HotKey {
    Key key;
    // The share of all lookups since the key has its entry, from 0 to 1. So
    // only the sample can make it too high, and a key that is not hot has a
    // share near 0.
    double share;
  };
  struct Report {
    double sampled_keys = 0;
    // Lookups of the virtual shards `first` to `end`, over their mean. Empty
    // without a sample.
    std::vector<float> virtual_shards;
    std::vector<HotKey> hot_keys;  // The hottest first.
  };
  Report Read(uint32_t first, uint32_t end) ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  struct Entry {
    Key key = 0;
    double count = 0;  // 0: the entry is free.
    // The part of the count that other keys may have, which had the entry
    // before.
    double error = 0;
  };
  // Halves the counts for the time since the last call.
  void Decay() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Count(Key key) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const uint32_t num_virtual_shards_;
  Mutex mutex_;
  std::vector<float> shards_ ABSL_GUARDED_BY(mutex_);  // Empty before a sample.
  // The sets one after the other.
  std::array<Entry, kHotKeys> entries_ ABSL_GUARDED_BY(mutex_);
  double total_ ABSL_GUARDED_BY(mutex_) = 0;
  absl::Time next_halving_ ABSL_GUARDED_BY(mutex_) = absl::InfinitePast();
};

}  // namespace tfswitch

#endif  // TFSWITCH_CC_TABLE_KEY_HEAT_H_
