// Counts how often keys have been seen, in less memory than the keys take.
//
// A key's count is the least of the k cells that its hash names. Other keys may
// have raised all of these, so a count is never too low, and too high for about
// one key in 1 / false_positive_rate. Add() raises only the cells that hold the
// least (Estan and Varghese, 2002), and none beyond the limit, so that no count
// wraps.
//
// The cells of one virtual shard lie together, so that a checkpoint can be cut
// between virtual shards, and a server touches only the memory of its own.

#ifndef TFSWITCH_CC_TABLE_COUNTING_BLOOM_H_
#define TFSWITCH_CC_TABLE_COUNTING_BLOOM_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>

#include "absl/types/span.h"
#include "cc/base/hash.h"
#include "cc/table/table_config.h"

namespace tfswitch {

// Thread-safe. If two threads add to the same key at the same time, one of the
// additions may be lost.
class CountingBloom {
 public:
  // How many cells a virtual shard has, and how many bytes all take. Doubles,
  // because a config may ask for more than fits any integer.
  static double CellsPerVirtualShard(const BloomMinCountAdmission& config,
                                     uint32_t num_virtual_shards);
  static double SizeBytes(const BloomMinCountAdmission& config,
                          uint32_t num_virtual_shards);

  // REQUIRES: the config is valid.
  CountingBloom(const BloomMinCountAdmission& config,
                uint32_t num_virtual_shards);

  // False if there was no memory. Nothing else may be called then.
  bool is_allocated() const { return cells_ != nullptr; }

  int num_hashes() const { return num_hashes_; }

  // Whether a filter with this config has the same cells; limits may differ.
  bool HasCellsOf(const BloomMinCountAdmission& config) const;

  // Counts `count` more occurrences; returns how many there are, at most the
  // limit, min_count.
  uint32_t Add(Key key, uint32_t count);

  // Null if there is no memory. REQUIRES: nothing is added meanwhile.
  std::unique_ptr<CountingBloom> Copy() const;

  // The cells of a virtual shard, for checkpoints. REQUIRES: nothing is added
  // meanwhile.
  size_t bytes_per_virtual_shard() const {
    return cells_per_block_ * cell_bytes_;
  }
  absl::Span<const char> Cells(uint32_t virtual_shard) const {
    return {static_cast<const char*>(cells_.get()) +
                virtual_shard * bytes_per_virtual_shard(),
            bytes_per_virtual_shard()};
  }
  void Load(uint32_t virtual_shard, absl::Span<const char> bytes);
  // Whether anything has been counted in it.
  bool IsTouched(uint32_t virtual_shard) const {
    return touched_[virtual_shard].load(std::memory_order_relaxed);
  }
  // The bytes of the virtual shards that are touched.
  size_t resident_bytes() const;

 private:
  struct Free {
    void operator()(void* memory) const { std::free(memory); }
  };

  static size_t CellBytes(const BloomMinCountAdmission& config);

  template <typename Cell>
  uint32_t AddTo(Key key, uint32_t count);

  const BloomMinCountAdmission config_;
  const uint32_t limit_;
  const uint32_t num_virtual_shards_;
  const int num_hashes_;
  const size_t cells_per_block_;
  const size_t cell_bytes_;  // 1 or 2.
  // Not in memory before they are touched, and zero then.
  const std::unique_ptr<void, Free> cells_;
  // For each virtual shard.
  const std::unique_ptr<std::atomic<bool>[]> touched_;
};

}  // namespace tfswitch

#endif  // TFSWITCH_CC_TABLE_COUNTING_BLOOM_H_
