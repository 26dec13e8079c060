#include "cc/table/candidates.h"

#include <cstring>
#include <vector>

#include "cc/base/racy_memory.h"

namespace tfswitch {
namespace {

constexpr uint64_t kFirstBuckets = 16;

}  // namespace

bool Candidates::Init(MemorySpan index_0, MemorySpan index_1,
                      MemorySpan records, int record_floats,
                      const KeyedHash* hash) {
  record_floats_ = static_cast<size_t>(record_floats);
  records_.Init(records, RowStride(record_floats));
  return index_.Init(index_0, index_1, kFirstBuckets, records_.data(), hash);
}

float* Candidates::Find(Key key, uint32_t position) const {
  const StripeIndex::Entry entry = index_.Find(key, position);
  if (entry.bucket == nullptr) return nullptr;
  return records_.At(entry.row());
}

void Candidates::FindMany(const Key* keys, const uint32_t* positions,
                          size_t count, const float** records) const {
  for (size_t i = 0; i < count; ++i) {
    __builtin_prefetch(index_.Home(positions[i]));
  }
  for (size_t i = 0; i < count; ++i) {
    records[i] = Find(keys[i], positions[i]);
    if (records[i] != nullptr) __builtin_prefetch(records[i]);
  }
}

float* Candidates::Insert(Key key, uint32_t position) {
  uint32_t record;
  if (!records_.Allocate(&record)) return nullptr;
  if (!index_.Insert(key, position, record)) {
    records_.Free(record);
    return nullptr;
  }
  ++size_;
  return records_.At(record);
}

void Candidates::Erase(Key key, uint32_t position) {
  const StripeIndex::Entry entry = index_.Find(key, position);
  if (entry.bucket == nullptr) return;
  const uint32_t record = entry.row();
  index_.Erase(entry, position);
  records_.Free(record);
  --size_;
}

void Candidates::Compact(bool with_stamps) {
  if (!records_.IsWorthCompacting(/*min_share=*/4)) return;
  const uint64_t limit = records_.SortFreeRows();
  std::vector<uint32_t> left;
  index_.VisitEntries(0, kMaxBuckets, [&](Key, StripeIndex::Entry entry) {
    uint32_t* const row = &entry.bucket->rows[entry.at];
    const uint32_t record = RacyLoad(row);
    uint32_t free_record;
    if (record < limit || !records_.AllocateBelow(limit, &free_record)) return;
    std::memcpy(records_.At(free_record), records_.At(record),
                record_floats_ * sizeof(float));
    if (with_stamps) {
      records_.stamps()[free_record] = records_.stamps()[record];
    }
    RacyStore(row, free_record);
    left.push_back(record);
  });
  for (const uint32_t record : left) records_.Free(record);
  records_.SortFreeRows();
  while (records_.ReleaseTail()) {
  }
}

uint64_t Candidates::Visit(
    uint64_t begin, uint64_t num_buckets,
    const std::function<void(Key, const float*)>& visit) const {
  return index_.VisitEntries(begin, num_buckets,
                             [&](Key key, StripeIndex::Entry entry) {
                               visit(key, records_.At(entry.row()));
                             });
}

}  // namespace tfswitch
