// The stripe's mutex serialises all changes of the index; readers take no lock.
// Publish() makes phase_ odd while it changes published_. View() tries again
// until it has read all fields in one even phase.
//
// MoveBuckets() first gets all memory that it may need, because nothing may
// fail while buckets are locked. It then copies keys to the new array while
// their old buckets are locked, publishes the cursor, marks the old buckets as
// not live, and unlocks them. So a reader finds either a live bucket, or one
// that sends it to the new array, which already has the keys. PrepareGrowth()
// asks for the next array before the current one is full, so that its first
// pages are ready in time.

#include "cc/table/stripe_index.h"

#include <algorithm>

#include "cc/base/page_keeper.h"

namespace tfswitch {
namespace {

// Memory per key: 64 B / (5 x 0.75) = 17.1 B before growth, 23.9 B after it.
// Keys per 4 buckets: load factor 0.75 x 5 keys in a full bucket x 4 buckets.
constexpr uint64_t kLoadNumerator = 15;
constexpr uint64_t kLoadDenominator = 4;
constexpr uint64_t kGrowthNumerator = 7;  // x 1.4
constexpr uint64_t kGrowthDenominator = 5;

// While the index grows, 64 buckets are moved at every eighth insert. So growth
// takes num_buckets / 8 inserts, which add 3 % to the keys.
constexpr uint64_t kInsertsPerMove = 8;
constexpr uint64_t kBucketsPerMove = 64;

// Up to an eighth of an array may be wasted to have all of it on huge pages.
// Small pages take several times as long to get as the same memory in huge
// pages.
constexpr size_t kMaxWaste = 8;

// Memory behind the cursor is given back in steps of this size, or in whole
// huge pages where the array has them.
constexpr size_t kMovedStepBytes = 64 * 1024;

// For a loop that writes to buckets one after the other.
void PrefetchAhead(const Bucket* bucket) {
  __builtin_prefetch(bucket + 16, /*rw=*/1);
}

}  // namespace

size_t StripeIndex::Array::resident_bytes() const {
  const size_t used = RoundUpTo(limit * sizeof(Bucket), kSmallPageBytes);
  return std::max(used, touch_end) - released_bytes;
}

bool StripeIndex::Init(MemorySpan span_0, MemorySpan span_1,
                       uint64_t num_buckets, char* rows,
                       const KeyedHash* hash) {
  hash_ = hash;
  arrays_[0].span = span_0;
  arrays_[1].span = span_1;
  arrays_[0].num_buckets = num_buckets;
  published_.current_phase = &phase_;
  published_.rows = rows;
  if (!ExtendLimit(&arrays_[0], num_buckets)) return false;
  Publish();
  return true;
}

StripeIndex::~StripeIndex() {
  for (Array& array : arrays_) {
    PageKeeper::Get().Cancel(array.span);
  }
}

IndexView StripeIndex::View() const {
  // Each load is an acquire, so that it cannot move behind the check of the
  // phase.
  const auto load = [](const auto* field) {
    return __atomic_load_n(field, __ATOMIC_ACQUIRE);
  };
  SpinWait wait;
  for (;;) {
    IndexView view;
    view.phase = load(&phase_);
    if (view.phase % 2 == 0) {
      view.buckets = load(&published_.buckets);
      view.num_buckets = load(&published_.num_buckets);
      view.next_buckets = load(&published_.next_buckets);
      view.next_num_buckets = load(&published_.next_num_buckets);
      view.cursor = load(&published_.cursor);
      view.current_phase = published_.current_phase;
      view.rows = published_.rows;
      if (IsPhase(view, view.phase)) return view;
    }
    wait.Pause();
  }
}

void StripeIndex::Publish() {
  const auto store = [](auto* field, auto value) {
    __atomic_store_n(field, value, __ATOMIC_RELEASE);
  };
  // First makes the phase odd. Release stores keep their order, so a reader
  // that sees one of the new fields also sees this phase or a later one.
  store(&phase_, phase_ + 1);
  store(&published_.buckets, current().buckets());
  store(&published_.num_buckets, current().num_buckets);
  store(&published_.next_buckets, next().buckets());
  store(&published_.next_num_buckets, next().num_buckets);
  store(&published_.cursor, cursor_);
  store(&phase_, phase_ + 1);
}

const Bucket* StripeIndex::Home(uint32_t position) const {
  const Array& array = IsMoved(position) ? next() : current();
  return array.buckets() + HomeIndex(position, array.num_buckets);
}

StripeIndex::Entry StripeIndex::Find(Key key, uint32_t position) const {
  // No other thread can change entries, because the caller holds the mutex.
  // Another thread may lock a bucket to change a row, which does not change the
  // entry.
  Bucket* bucket = const_cast<Bucket*>(Home(position));
  for (;; ++bucket) {
    const uint32_t meta = LoadMeta(bucket);
    // Compares all keys: the processor could not predict where a loop over the
    // used ones ends.
    uint32_t mask = 0;
    for (int i = 0; i < kKeysPerBucket; ++i) {
      mask |= static_cast<uint32_t>(RacyLoad(&bucket->keys[i]) == key) << i;
    }
    mask &= (1u << UsedOf(meta)) - 1;
    if (mask != 0) return {bucket, __builtin_ctz(mask)};
    if (!HasOverflow(meta)) return {};
  }
}

bool StripeIndex::Insert(Key key, uint32_t position, uint32_t row,
                         Entry* present) {
  if (!is_growing_) {
    const uint64_t full = current().num_buckets * kLoadNumerator;
    const uint64_t load = static_cast<uint64_t>(num_keys_) * kLoadDenominator;
    // Begins before the array is full, so that the first pages of the next
    // array are ready in time.
    if (load >= full - full / 32 && !is_prepared_) {
      PrepareGrowth(
          current().num_buckets * kGrowthNumerator / kGrowthDenominator + 1,
          /*is_urgent=*/load >= full + full / 8);
    }
    // If there is no memory for a larger array, the index does not grow, and
    // its buckets get fuller.
    if (load >= full && is_prepared_) BeginGrowth();
  }
  if (is_growing_ && --inserts_until_move_ == 0) {
    inserts_until_move_ = 1;  // Tries again at the next insert if this fails.
    if (!MoveBuckets()) return false;
    inserts_until_move_ = kInsertsPerMove;
  }
  if (present != nullptr) {
    *present = Find(key, position);
    if (present->bucket != nullptr) return true;
  }
  Array* const array = IsMoved(position) ? &next() : &current();
  if (!InsertInto(array, key, position, row)) return false;
  ++num_keys_;
  return true;
}

bool StripeIndex::InsertInto(Array* array, Key key, uint32_t position,
                             uint32_t row) {
  Bucket* const buckets = array->buckets();
  const uint64_t home = HomeIndex(position, array->num_buckets);
  uint64_t at = home;
  while (UsedOf(LoadMeta(&buckets[at])) == kKeysPerBucket) {
    ++at;
    if (at == array->limit && !ExtendLimit(array, at + 1)) return false;
  }

  Bucket* const bucket = &buckets[at];
  uint32_t meta = LoadMeta(bucket);
  if (UsedOf(meta) == 0) {
    // Needs no lock: this thread has the stripe's mutex, and other threads lock
    // a bucket only if they have found a key in it.
    RacyWriteFence();
  } else {
    meta = LockBucket(bucket);
  }
  RacyStore(&bucket->keys[UsedOf(meta)], key);
  RacyStore(&bucket->rows[UsedOf(meta)], row);
  UnlockBucket(bucket, meta + 1);

  for (uint64_t i = home; i < at; ++i) {
    const uint32_t passed = LockBucket(&buckets[i]);
    const bool is_many = (passed & kMetaOverflowMask) == kMetaOverflowMask;
    UnlockBucket(&buckets[i], is_many ? passed : passed + kMetaOverflowOne);
  }
  return true;
}

void StripeIndex::Erase(Entry entry, uint32_t position) {
  Bucket* const bucket = entry.bucket;
  const uint32_t meta = LockBucket(bucket);
  const int last = static_cast<int>(UsedOf(meta)) - 1;
  if (entry.at != last) {
    RacyStore(&bucket->keys[entry.at], RacyLoad(&bucket->keys[last]));
    RacyStore(&bucket->rows[entry.at], RacyLoad(&bucket->rows[last]));
  }
  UnlockBucket(bucket, meta - 1);

  for (Bucket* passed = const_cast<Bucket*>(Home(position)); passed != bucket;
       ++passed) {
    const uint32_t old_meta = LockBucket(passed);
    const bool is_many = (old_meta & kMetaOverflowMask) == kMetaOverflowMask;
    UnlockBucket(passed, is_many ? old_meta : old_meta - kMetaOverflowOne);
  }
  --num_keys_;
}

bool StripeIndex::ExtendLimit(Array* array, uint64_t limit) {
  if (limit <= array->limit) return true;
  const size_t end = limit * sizeof(Bucket);
  if (!array->span.Extend(end)) return false;
  TouchAhead(array, end);
  // The versions of buckets start at another number for each array that uses
  // the span. Otherwise a reader that was suspended for a whole generation
  // could take a new bucket for an old one.
  const uint32_t meta = kMetaLive | (static_cast<uint32_t>(phase_ * 0x9e3779b1u)
                                     << kMetaVersionShift);
  for (uint64_t i = array->limit; i < limit; ++i) {
    PrefetchAhead(&array->buckets()[i]);
    RacyStore(&array->buckets()[i].meta, meta);
  }
  array->limit = limit;
  return true;
}

void StripeIndex::TouchAhead(Array* array, size_t end) {
  const size_t touch_end = std::min(
      RoundUpTo(end, kHugePageBytes) + kHugePageBytes, array->huge_bytes);
  if (touch_end <= array->touch_end || !array->span.Extend(touch_end)) return;
  PageKeeper::Get().Touch(array->span.data() + array->touch_end,
                          touch_end - array->touch_end);
  array->touch_end = touch_end;
}

void StripeIndex::Reserve(uint64_t num_keys) {
  // A sixteenth more, because the next array is prepared before one is full.
  const uint64_t num_buckets =
      (num_keys + num_keys / 16) * kLoadDenominator / kLoadNumerator + 1;
  if (num_buckets <= (is_growing_ ? next() : current()).num_buckets) return;
  while (is_growing_) {
    if (!MoveBuckets()) return;
  }
  is_prepared_ = false;
  PrepareGrowth(num_buckets, /*is_urgent=*/true);
  if (!is_prepared_) return;
  Array& array = next();
  PageKeeper::Get().Cancel(array.span);
  if (array.span.Extend(array.huge_bytes)) {
    PageKeeper::TouchNow(array.span.data(), array.huge_bytes);
    array.touch_end = array.huge_bytes;
  }
  BeginGrowth();
  while (is_growing_) {
    if (!MoveBuckets()) return;
  }
}

void StripeIndex::PrepareGrowth(uint64_t num_buckets, bool is_urgent) {
  Array& array = next();
  const size_t bytes = num_buckets * sizeof(Bucket);
  // Leaves half of the span for overflow, because an attacker may cause much of
  // it by choosing keys. The span is busy while the PageKeeper has not yet
  // given back the memory of the array that used it before.
  if (PageKeeper::Get().IsBusy(array.span)) {
    if (!is_urgent) return;
    // Gives the memory back now, although other threads wait meanwhile:
    // otherwise full buckets would make every insert slow.
    PageKeeper::Get().Cancel(array.span);
    array.span.Reset();
  }
  if (num_buckets > kMaxBuckets || bytes > array.span.capacity() / 2 ||
      !array.span.Extend(bytes)) {
    return;
  }
  array.num_buckets = num_buckets;
  array.huge_bytes = RoundDownTo(bytes + bytes / kMaxWaste, kHugePageBytes);
  TouchAhead(&array, 0);
  is_prepared_ = true;
}

void StripeIndex::BeginGrowth() {
  is_prepared_ = false;
  is_growing_ = true;
  inserts_until_move_ = 1;
  cursor_ = 0;
  Publish();
}

bool StripeIndex::MoveBuckets() {
  Array& from = current();
  Array& to = next();
  Bucket* const buckets = from.buckets();
  const uint64_t begin = cursor_;
  const uint64_t wanted = std::min(begin + kBucketsPerMove, from.limit);
  uint64_t end = begin;
  bool has_overflow = false;
  // In the worst case each moved key needs a bucket of its own in the new
  // array.
  uint64_t safe_end = wanted;
  while (safe_end < from.limit && HasOverflow(LoadMeta(&buckets[safe_end - 1])))
    ++safe_end;
  const uint64_t homes =
      safe_end >= from.num_buckets
          ? to.num_buckets
          : std::min(to.num_buckets,
                     safe_end * to.num_buckets / from.num_buckets + 2);
  const uint64_t num_moved = (safe_end - begin) * kKeysPerBucket;
  if (!ExtendLimit(&to, homes) ||
      !to.span.Extend((std::max(homes, to.limit) + num_moved) *
                      sizeof(Bucket))) {
    return false;
  }

  while (end < wanted || (has_overflow && end < from.limit)) {
    Key keys[kBucketsPerMove * kKeysPerBucket];
    uint32_t rows[kBucketsPerMove * kKeysPerBucket];
    size_t num_keys = 0;
    for (const uint64_t last = std::min(end + kBucketsPerMove, from.limit);
         end < last && (end < wanted || has_overflow); ++end) {
      Bucket* const bucket = &buckets[end];
      PrefetchAhead(bucket);
      const uint32_t meta = LockBucket(bucket);
      has_overflow = HasOverflow(meta);
      // Copies all places, because a loop over the used ones is slower.
      for (int i = 0; i < kKeysPerBucket; ++i) {
        keys[num_keys + i] = RacyLoad(&bucket->keys[i]);
        rows[num_keys + i] = RacyLoad(&bucket->rows[i]);
      }
      num_keys += UsedOf(meta);
    }
    for (size_t i = 0; i < num_keys; ++i) {
      InsertInto(&to, keys[i], PositionOfHash((*hash_)(keys[i])), rows[i]);
    }
  }
  // The cursor must move before the old buckets send readers to the new array.
  cursor_ = end;
  __atomic_store_n(&published_.cursor, end, __ATOMIC_RELEASE);
  for (uint64_t i = begin; i < end; ++i) {
    const uint32_t meta = LoadMeta(&buckets[i]) & ~kMetaLocked;
    UnlockBucket(&buckets[i], meta & ~(kMetaLive | kMetaUsedMask));
  }
  ReleaseMoved();
  if (cursor_ >= from.limit) EndGrowth();
  return true;
}

void StripeIndex::ReleaseMoved() {
  Array& from = current();
  const size_t moved = cursor_ * sizeof(Bucket);
  const size_t end = RoundDownTo(
      moved, moved <= from.huge_bytes ? kHugePageBytes : kMovedStepBytes);
  if (end <= from.released_bytes) return;
  PageKeeper::Get().Release(from.span, from.released_bytes, end);
  from.released_bytes = end;
}

void StripeIndex::EndGrowth() {
  Array& old = current();
  PageKeeper::Get().Reset(old.span);
  const MemorySpan span = old.span;
  old = Array();
  old.span = span;
  current_ = 1 - current_;
  is_growing_ = false;
  cursor_ = 0;
  Publish();
}

uint64_t StripeIndex::VisitEntries(uint64_t begin, uint64_t num_buckets,
                                   const std::function<void(Key, Entry)>& visit,
                                   const std::vector<bool>* rows) const {
  const uint64_t width =
      std::max<uint64_t>(1, (num_buckets << 32) / current().num_buckets);
  const uint64_t end = std::min(begin + width, kEndOfPositions);
  VisitBuckets(begin, end, [&](Bucket* bucket) {
    const int used = static_cast<int>(UsedOf(LoadMeta(bucket)));
    for (int i = 0; i < used; ++i) {
      if (rows != nullptr) {
        const uint32_t row = RacyLoad(&bucket->rows[i]);
        if (row >= rows->size() || !(*rows)[row]) continue;
      }
      const Key key = RacyLoad(&bucket->keys[i]);
      const uint32_t position = PositionOfHash((*hash_)(key));
      if (position >= begin && position < end) visit(key, {bucket, i});
    }
  });
  return end;
}

void StripeIndex::VisitBuckets(
    uint64_t begin, uint64_t end,
    const std::function<void(Bucket*)>& visit) const {
  const auto visit_array = [&](const Array& array, uint64_t first_bucket) {
    Bucket* const buckets = array.buckets();
    uint64_t i = std::max(first_bucket, HomeIndex(static_cast<uint32_t>(begin),
                                                  array.num_buckets));
    const uint64_t last =
        HomeIndex(static_cast<uint32_t>(end - 1), array.num_buckets);
    bool has_overflow = false;
    for (; i < array.limit && (i <= last || has_overflow); ++i) {
      has_overflow = HasOverflow(LoadMeta(&buckets[i]));
      visit(&buckets[i]);
    }
  };
  visit_array(current(), cursor_);
  if (is_growing_) visit_array(next(), 0);
}

}  // namespace tfswitch
