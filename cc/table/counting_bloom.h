// Counts occurrences of keys, and needs less memory than the keys themselves.
//
// The hash of a key selects k cells, and the key's count is the smallest of
// them. Other keys may have raised all of them. So a count is never too low,
// and it is too high for about one key in 1 / false_positive_rate. Add() raises
// only the smallest of the cells (Estan and Varghese, 2002), and none above the
// limit, so that no count overflows.
//
// The cells of a virtual shard are adjacent, so that checkpoints can be divided
// between virtual shards, and a server uses memory only for its own virtual
// shards.

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
  // How many cells a virtual shard has, and how many bytes all cells take. The
  // type is double, because a config may ask for more than an integer type can
  // hold.
  static double CellsPerVirtualShard(const BloomMinCountAdmission& config,
                                     uint32_t num_virtual_shards);
  static double SizeBytes(const BloomMinCountAdmission& config,
                          uint32_t num_virtual_shards);

  // REQUIRES: the config is valid.
  CountingBloom(const BloomMinCountAdmission& config,
                uint32_t num_virtual_shards);

  // False if there is no memory; then no other function may be called.
  bool is_allocated() const { return cells_ != nullptr; }

  int num_hashes() const { return num_hashes_; }

  // Whether a filter with this config has the same cells. Its limit may differ.
  bool HasCellsOf(const BloomMinCountAdmission& config) const;

  // Adds `count` occurrences of a key. Returns the key's new count, which is at
  // most min_count.
  uint32_t Add(Key key, uint32_t count);
  // The key's count.
  uint32_t Count(Key key) { return Add(key, 0); }

  // Copies the filter. Null if there is no memory. REQUIRES: no calls of Add()
  // meanwhile.
  std::unique_ptr<CountingBloom> Copy() const;

  // The cells of a virtual shard, for checkpoints. REQUIRES: no calls of Add()
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
  // The bytes of the virtual shards whose memory is in use.
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
  // 1 or 2.
  const size_t cell_bytes_;
  // Cells take memory only when they are touched; until then they read as zero.
  const std::unique_ptr<void, Free> cells_;
  // For each virtual shard.
  const std::unique_ptr<std::atomic<bool>[]> touched_;
};

}  // namespace tfswitch

#endif  // TFSWITCH_CC_TABLE_COUNTING_BLOOM_H_
