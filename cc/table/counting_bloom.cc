#include "cc/table/counting_bloom.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace tfswitch {
namespace {

constexpr int kMaxHashes = 64;
// With fewer cells, the numbers of keys per virtual shard would differ too much
// by chance.
constexpr double kMinCellsPerBlock = 64;

// The 64-bit finaliser of MurmurHash3 with another initial value, so that cells
// do not depend on the bits that select the virtual shard.
uint64_t HashForCells(Key key) {
  return HashKey(static_cast<Key>(static_cast<uint64_t>(HashKey(key)) ^
                                  0x9e3779b97f4a7c15u));
}

}  // namespace

double CountingBloom::CellsPerVirtualShard(const BloomMinCountAdmission& config,
                                           uint32_t num_virtual_shards) {
  // A filter for n keys needs n |ln p| / (ln 2)^2 cells.
  const double ln2 = std::log(2.0);
  const double cells = std::ceil(
      static_cast<double>(config.capacity) *
      -std::log(static_cast<double>(config.false_positive_rate)) / (ln2 * ln2));
  return std::max(kMinCellsPerBlock, std::ceil(cells / num_virtual_shards));
}

size_t CountingBloom::CellBytes(const BloomMinCountAdmission& config) {
  return config.min_count <= UINT8_MAX ? sizeof(uint8_t) : sizeof(uint16_t);
}

double CountingBloom::SizeBytes(const BloomMinCountAdmission& config,
                                uint32_t num_virtual_shards) {
  return CellsPerVirtualShard(config, num_virtual_shards) * num_virtual_shards *
         static_cast<double>(CellBytes(config));
}

namespace {

int NumHashes(const BloomMinCountAdmission& config) {
  return std::clamp(static_cast<int>(std::ceil(-std::log2(
                        static_cast<double>(config.false_positive_rate)))),
                    1, kMaxHashes);
}

}  // namespace

CountingBloom::CountingBloom(const BloomMinCountAdmission& config,
                             uint32_t num_virtual_shards)
    : config_(config),
      limit_(config.min_count),
      num_virtual_shards_(num_virtual_shards),
      num_hashes_(NumHashes(config)),
      cells_per_block_(static_cast<size_t>(
          CellsPerVirtualShard(config, num_virtual_shards))),
      cell_bytes_(CellBytes(config)),
      cells_(std::calloc(cells_per_block_ * num_virtual_shards, cell_bytes_)),
      touched_(new std::atomic<bool>[num_virtual_shards]()) {}

bool CountingBloom::HasCellsOf(const BloomMinCountAdmission& config) const {
  return NumHashes(config) == num_hashes_ && CellBytes(config) == cell_bytes_ &&
         CellsPerVirtualShard(config, num_virtual_shards_) ==
             static_cast<double>(cells_per_block_);
}

size_t CountingBloom::resident_bytes() const {
  size_t num_touched = 0;
  for (uint32_t shard = 0; shard < num_virtual_shards_; ++shard) {
    num_touched += IsTouched(shard) ? 1 : 0;
  }
  return num_touched * bytes_per_virtual_shard();
}

uint32_t CountingBloom::Add(Key key, uint32_t count) {
  return cell_bytes_ == 1 ? AddTo<uint8_t>(key, count)
                          : AddTo<uint16_t>(key, count);
}

template <typename Cell>
uint32_t CountingBloom::AddTo(Key key, uint32_t count) {
  const uint32_t shard = VirtualShardOf(key, num_virtual_shards_);
  if (!IsTouched(shard)) {
    touched_[shard].store(true, std::memory_order_relaxed);
  }
  Cell* const block =
      static_cast<Cell*>(cells_.get()) + shard * cells_per_block_;
  // Double hashing (Kirsch and Mitzenmacher, 2006), with an odd step.
  const uint64_t hash = HashForCells(key);
  const auto step = static_cast<uint32_t>(hash >> 32) | 1u;
  Cell* cells[kMaxHashes];
  uint32_t least = limit_;
  auto position = static_cast<uint32_t>(hash);
  for (int i = 0; i < num_hashes_; ++i, position += step) {
    cells[i] = block + ((position * uint64_t{cells_per_block_}) >> 32);
    least =
        std::min<uint32_t>(least, __atomic_load_n(cells[i], __ATOMIC_RELAXED));
  }
  const auto raised = static_cast<uint32_t>(
      std::min<uint64_t>(limit_, uint64_t{least} + count));
  for (int i = 0; i < num_hashes_; ++i) {
    Cell now = __atomic_load_n(cells[i], __ATOMIC_RELAXED);
    while (now < raised &&
           !__atomic_compare_exchange_n(
               cells[i], &now, static_cast<Cell>(raised),
               /*weak=*/true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
    }
  }
  return raised;
}

std::unique_ptr<CountingBloom> CountingBloom::Copy() const {
  auto copy = std::make_unique<CountingBloom>(config_, num_virtual_shards_);
  if (!copy->is_allocated()) return nullptr;
  for (uint32_t shard = 0; shard < num_virtual_shards_; ++shard) {
    if (IsTouched(shard)) copy->Load(shard, Cells(shard));
  }
  return copy;
}

void CountingBloom::Load(uint32_t virtual_shard, absl::Span<const char> bytes) {
  std::memcpy(static_cast<char*>(cells_.get()) +
                  virtual_shard * bytes_per_virtual_shard(),
              bytes.data(), bytes.size());
  touched_[virtual_shard].store(true, std::memory_order_relaxed);
}

}  // namespace tfswitch
