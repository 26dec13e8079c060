#include "cc/table/candidates.h"

#include "cc/base/racy_memory.h"

namespace tfswitch {
namespace {

constexpr uint64_t kFirstBuckets = 16;

}  // namespace

bool Candidates::Init(MemorySpan index_0, MemorySpan index_1,
                      MemorySpan records, int record_floats) {
  records_.Init(records, RowStride(record_floats));
  return index_.Init(index_0, index_1, kFirstBuckets, records_.data());
}

float* Candidates::Find(Key key, uint32_t position) const {
  const StripeIndex::Entry entry = index_.Find(key, position);
  if (entry.bucket == nullptr) return nullptr;
  return records_.At(RacyLoad(&entry.bucket->rows[entry.at]));
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

bool Candidates::Erase(Key key, uint32_t position) {
  const StripeIndex::Entry entry = index_.Find(key, position);
  if (entry.bucket == nullptr) return false;
  records_.Free(RacyLoad(&entry.bucket->rows[entry.at]));
  index_.Erase(entry, position);
  --size_;
  return true;
}

uint64_t Candidates::Visit(
    uint64_t begin, uint64_t num_buckets,
    const std::function<void(Key, const float*)>& visit) const {
  const uint64_t end = index_.RangeEnd(begin, num_buckets);
  index_.VisitBuckets(begin, end, [&](Bucket* bucket) {
    const int used = static_cast<int>(UsedOf(LoadMeta(bucket)));
    for (int i = 0; i < used; ++i) {
      const Key key = RacyLoad(&bucket->keys[i]);
      const uint32_t position = PositionOfHash(HashKey(key));
      if (position < begin || position >= end) continue;
      visit(key, records_.At(RacyLoad(&bucket->rows[i])));
    }
  });
  return end;
}

}  // namespace tfswitch
