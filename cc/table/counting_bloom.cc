#include "cc/table/counting_bloom.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace tfswitch {
namespace {

constexpr int kMaxHashes = 64;
// Below it, one virtual shard by chance has far more keys than another.
constexpr size_t kMinCellsPerBlock = 64;

// The 64-bit finaliser of MurmurHash3 with another start, so that cells do not
// depend on what chose the virtual shard.
uint64_t HashForCells(Key key) {
  return HashKey(static_cast<Key>(static_cast<uint64_t>(HashKey(key)) ^
                                  0x9e3779b97f4a7c15u));
}

}  // namespace

size_t CountingBloom::CellsPerBlock(const BloomMinCountAdmission& config,
                                    uint32_t num_virtual_shards) {
  // n |ln p| / (ln 2)^2 cells for n keys.
  const double ln2 = std::log(2.0);
  const double cells = std::ceil(
      static_cast<double>(config.capacity) *
      -std::log(static_cast<double>(config.false_positive_rate)) / (ln2 * ln2));
  return std::max(kMinCellsPerBlock,
                  static_cast<size_t>(std::ceil(cells / num_virtual_shards)));
}

size_t CountingBloom::CellBytes(const BloomMinCountAdmission& config) {
  return config.min_count <= UINT8_MAX ? sizeof(uint8_t) : sizeof(uint16_t);
}

double CountingBloom::SizeBytes(const BloomMinCountAdmission& config,
                                uint32_t num_virtual_shards) {
  return static_cast<double>(CellsPerBlock(config, num_virtual_shards)) *
         num_virtual_shards * static_cast<double>(CellBytes(config));
}

CountingBloom::CountingBloom(const BloomMinCountAdmission& config,
                             uint32_t num_virtual_shards)
    : limit_(config.min_count),
      num_virtual_shards_(num_virtual_shards),
      num_hashes_(std::clamp(
          static_cast<int>(std::ceil(
              -std::log2(static_cast<double>(config.false_positive_rate)))),
          1, kMaxHashes)),
      cells_per_block_(CellsPerBlock(config, num_virtual_shards)),
      cell_bytes_(CellBytes(config)),
      cells_(std::calloc(cells_per_block_ * num_virtual_shards, cell_bytes_)) {}

uint32_t CountingBloom::Add(Key key, uint32_t count) {
  return cell_bytes_ == 1 ? AddTo<uint8_t>(key, count)
                          : AddTo<uint16_t>(key, count);
}

template <typename Cell>
uint32_t CountingBloom::AddTo(Key key, uint32_t count) {
  Cell* const block =
      static_cast<Cell*>(cells_.get()) +
      VirtualShardOf(key, num_virtual_shards_) * cells_per_block_;
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

void CountingBloom::Save(uint32_t virtual_shard, absl::Span<char> bytes) const {
  const char* const block = static_cast<const char*>(cells_.get()) +
                            virtual_shard * bytes_per_virtual_shard();
  for (size_t i = 0; i < bytes.size(); ++i) {
    bytes[i] = __atomic_load_n(block + i, __ATOMIC_RELAXED);
  }
}

void CountingBloom::Load(uint32_t virtual_shard, absl::Span<const char> bytes) {
  std::memcpy(static_cast<char*>(cells_.get()) +
                  virtual_shard * bytes_per_virtual_shard(),
              bytes.data(), bytes.size());
}

bool CountingBloom::IsTouched(uint32_t virtual_shard) const {
  const char* const block = static_cast<const char*>(cells_.get()) +
                            virtual_shard * bytes_per_virtual_shard();
  return std::any_of(block, block + bytes_per_virtual_shard(),
                     [](char cell) { return cell != 0; });
}

}  // namespace tfswitch
