// Rows on disk. Each row is either in memory or live in one segment.
//
// Demote() moves rows to disk while no row changes (ChangeClock::Hold), and so
// never inside a Change. A call that changes rows first moves the rows of its
// keys to memory, inside its Change, and then does what it does in a table
// without rows on disk. Calls that only read do not move rows. They search the
// index and then the disk, and again if a row of the key's stripe has moved
// meanwhile.

#include <algorithm>
#include <cstring>
#include <limits>
#include <new>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "cc/base/log_writer.h"
#include "cc/base/random_id.h"
#include "cc/table/embedding_table_impl.h"

namespace tfswitch {
namespace {

// With more segments, a demotion waits for merges.
constexpr size_t kMaxSegments = 48;
// How many rows Demote() copies or removes while it holds a mutex.
constexpr size_t kRowsAtOnce = 1024;
// The most rows that Demote() moves, because no row can change at its end.
constexpr int64_t kMaxDemotion = 131072;

}  // namespace

EmbeddingTable::Impl::Cold::Cold(
    Impl* table, std::shared_ptr<ColdFolder> folder,
    std::function<absl::Status(EmbeddingTable&)> its_make_room)
    : tier(std::move(folder),
           ColdFormat(table->codec_.num_words(),
                      table->statistics_.num_floats()),
           [table](Key key) { return ColdPlaceOfHash(table->hash_(key)); }),
      make_room(std::move(its_make_room)),
      table_(*table) {}

EmbeddingTable::Impl::Cold::~Cold() {
  stops_ = true;
  {
    MutexLock lock(&merge_mutex_);
    changed_.NotifyAll();
  }
  if (merger_.joinable()) merger_.join();
}

void EmbeddingTable::Impl::Cold::Merge() {
  for (;;) {
    bool compacts = false;
    {
      MutexLock lock(&merge_mutex_);
      is_merging_ = false;
      changed_.NotifyAll();
      while (!must_merge_ && !stops_) changed_.Wait(&merge_mutex_);
      if (stops_) return;
      must_merge_ = false;
      compacts = std::exchange(must_compact_, false);
      is_merging_ = true;
    }
    const absl::Status merged = MergeAll(compacts);
    if (merged.ok() || stops_ || std::exchange(has_told_, true)) continue;
    LogMessageInOrder(
        LogLevel::kWarning, {"cold_merge_failed"},
        absl::StrCat("table '", table_.config().name,
                     "': cannot merge files of rows on disk, so they take more "
                     "space than they need: ",
                     merged.message(), ". This message is not repeated"));
  }
}

absl::Status EmbeddingTable::Impl::Cold::MergeAll(bool compacts) {
  try {
    if (compacts) {
      MutexLock lock(&table_.shrink_mutex_);
      for (Stripe& stripe : table_.stripes_) {
        if (!stops_) table_.Compact(&stripe, /*min_share=*/16);
      }
    }
    for (;;) {
      TFSWITCH_ASSIGN_OR_RETURN(const auto merge, tier.WriteMerge(stops_));
      if (merge == nullptr) return absl::OkStatus();
      table_.MoveMerged(merge.get());
    }
  } catch (const std::bad_alloc&) {
    return absl::ResourceExhaustedError("no memory");
  }
}

void EmbeddingTable::Impl::Cold::StartMerge(bool compacts) {
  MutexLock lock(&merge_mutex_);
  must_merge_ = true;
  must_compact_ |= compacts;
  try {
    if (!merger_.joinable()) merger_ = std::thread([this] { Merge(); });
  } catch (const std::system_error&) {
    must_merge_ = false;  // Nobody must wait for it.
  }
  changed_.NotifyAll();
}

void EmbeddingTable::Impl::Cold::WaitForMerges() {
  MutexLock lock(&merge_mutex_);
  while ((must_merge_ || is_merging_) && !stops_) changed_.Wait(&merge_mutex_);
}

void EmbeddingTable::Impl::Cold::NoteUsed(Key key) {
  // More rows are rarely promoted between two demotions.
  constexpr size_t kMaxKeys = 262144;
  MutexLock lock(&used_mutex_);
  if (used_.size() >= kMaxKeys) used_before_ = std::exchange(used_, {});
  used_.push_back(key);
}

std::vector<Key> EmbeddingTable::Impl::Cold::EndTurn() {
  MutexLock lock(&used_mutex_);
  std::vector<Key> keys = std::exchange(used_before_, std::move(used_));
  used_.clear();
  keys.insert(keys.end(), used_before_.begin(), used_before_.end());
  return keys;
}

void EmbeddingTable::Impl::SetColdFolder(
    std::shared_ptr<ColdFolder> folder,
    std::function<absl::Status(EmbeddingTable&)> make_room) {
  cold_ = std::make_unique<Cold>(this, std::move(folder), std::move(make_room));
}

EmbeddingTable::Impl::Moves EmbeddingTable::Impl::ReadMoves() const {
  Moves moves;
  for (int s = 0; s < kNumStripes; ++s) {
    moves[s] = stripes_[s].num_moves.load(std::memory_order_acquire);
  }
  return moves;
}

void EmbeddingTable::Impl::CopyRecordLocked(Stripe* stripe, Key key,
                                            StripeIndex::Entry entry,
                                            char* record) const {
  const ColdFormat& format = cold_->tier.format();
  float* const words = ColdFormat::MutableWordsOf(record);
  const auto num_counts = static_cast<size_t>(statistics_.num_floats());
  LoadLocked(stripe, entry, [&](const RowPlace& place) {
    ColdFormat::SetHeader(key, RacyLoad(place.stamp), record);
    RacyLoadFloats(words, place.words, format.num_words);
    if (num_counts > 0) {
      RacyLoadFloats(words + format.num_words, place.statistics, num_counts);
    }
  });
}

void EmbeddingTable::Impl::DecodeRecord(const char* record, float* row) const {
  const ColdFormat& format = cold_->tier.format();
  const float* const words = ColdFormat::WordsOf(record);
  if (codec_.is_plain()) {
    std::copy_n(words, format.num_words, row);
  } else {
    codec_.Decode(words, row);
  }
  std::copy_n(format.StatisticsOf(record), statistics_.num_floats(),
              row + codec_.num_floats());
}

absl::Status EmbeddingTable::Impl::ReviveLocked(const KeyPlace& place,
                                                const ColdHit& hit,
                                                ChangeStamp stamp) {
  Stripe* const stripe = place.stripe;
  uint32_t row;
  if (!stripe->rows.Allocate(&row)) return OutOfMemory();
  const RowPlace to = PlaceOf(*stripe, row);
  const ColdFormat& format = cold_->tier.format();
  RacyCopyRow(ColdFormat::WordsOf(hit.record), format.num_words, to.words);
  RacyCopyRow(format.StatisticsOf(hit.record),
              static_cast<size_t>(statistics_.num_floats()), to.statistics);
  const uint32_t its_stamp = ColdFormat::StampOf(hit.record);
  RacyStore(to.stamp, its_stamp);
  // An incremental snapshot has listed the changed rows in memory by their row
  // numbers. This one is not on the list.
  if (snapshot_from_ != 0 && its_stamp < stamp.keeps_below) {
    KeepRow(stripe, place.key, row);
  }
  if (!stripe->index.Insert(place.key, place.position, row)) {
    stripe->rows.Free(row);
    return OutOfMemory();
  }
  // In this order, so that a reader who finds the row dead sees that it moved.
  stripe->num_moves.fetch_add(1, std::memory_order_release);
  hit.segment->EndLife(hit.row);
  --cold_->num_rows;
  stripe->CountInserted();
  cold_->NoteUsed(place.key);
  return absl::OkStatus();
}

absl::Status EmbeddingTable::Impl::Revive(absl::Span<const Key> block,
                                          absl::Span<const uint16_t> chosen,
                                          const ChangeClock::Change& change,
                                          std::vector<uint16_t>* present) {
  std::vector<uint16_t> left(chosen.begin(), chosen.end());
  std::vector<uint16_t> again;
  int64_t num_revived = 0;
  const auto count = absl::MakeCleanup(
      [&] { counters().Add(TableCounter::promoted_rows, num_revived); });
  while (!left.empty()) {
    const Moves before = ReadMoves();
    ColdBatch batch;
    TFSWITCH_RETURN_IF_ERROR(cold_->tier.Find(block, left, &batch));
    std::sort(batch.hits.begin(), batch.hits.end(),
              [](const ColdHit& a, const ColdHit& b) { return a.i < b.i; });
    again.clear();
    const StripeGroups groups(hash_, block.data(),
                              static_cast<uint32_t>(left.size()), left.data());
    TFSWITCH_RETURN_IF_ERROR(ForEachStripe(
        groups,
        [&](Stripe* stripe, absl::Span<const uint16_t> group) -> absl::Status {
          const bool has_moved =
              stripe->num_moves.load(std::memory_order_relaxed) !=
              before[stripe - stripes_.data()];
          for (const uint16_t i : group) {
            const KeyPlace place = PlaceOfKey(stripe, block[i]);
            if (place.has_row()) {
              present->push_back(i);
              continue;
            }
            const auto hit = std::lower_bound(
                batch.hits.begin(), batch.hits.end(), i,
                [](const ColdHit& a, uint16_t index) { return a.i < index; });
            if (hit != batch.hits.end() && hit->i == i &&
                hit->segment->IsLive(hit->row)) {
              TFSWITCH_RETURN_IF_ERROR(
                  ReviveLocked(place, *hit, change.stamp()));
              ++num_revived;
              present->push_back(i);
            } else if (has_moved) {
              again.push_back(i);
            }
          }
          return absl::OkStatus();
        }));
    left.swap(again);
  }
  return absl::OkStatus();
}

std::vector<uint16_t> EmbeddingTable::Impl::FindAbsent(
    absl::Span<const Key> block) const {
  std::vector<uint16_t> absent;
  IndexView views[kNumStripes];
  for (int s = 0; s < kNumStripes; ++s) views[s] = stripes_[s].index.View();
  PatientSink search(this, views);
  const auto prefetch = [&](size_t i) {
    if (i >= block.size()) return;
    const uint64_t hash = hash_(block[i]);
    __builtin_prefetch(
        HomeBucket(views[StripeOfHash(hash)], PositionOfHash(hash)));
  };
  for (size_t i = 0; i < kLockedDistance; ++i) prefetch(i);
  for (size_t i = 0; i < block.size(); ++i) {
    prefetch(i + kLockedDistance);
    if (!search.Has(block[i])) absent.push_back(static_cast<uint16_t>(i));
  }
  return absent;
}

absl::Status EmbeddingTable::Impl::ReviveAbsent(
    absl::Span<const Key> block, const ChangeClock::Change& change) {
  if (!has_cold_rows()) return absl::OkStatus();
  std::vector<uint16_t> present;
  return Revive(block, FindAbsent(block), change, &present);
}

std::vector<Key> EmbeddingTable::Impl::FindColdKeys(
    absl::Span<const Key> keys) const {
  std::vector<Key> cold;
  if (!has_cold_rows()) return cold;
  for (size_t begin = 0; begin < keys.size(); begin += kMaxKernelKeys) {
    const absl::Span<const Key> block = keys.subspan(begin, kMaxKernelKeys);
    for (const uint16_t i :
         cold_->tier.FindCandidates(block, FindAbsent(block))) {
      cold.push_back(block[i]);
    }
  }
  std::sort(cold.begin(), cold.end());
  cold.erase(std::unique(cold.begin(), cold.end()), cold.end());
  return cold;
}

absl::Status EmbeddingTable::Impl::Promote(absl::Span<const Key> keys) {
  for (size_t begin = 0; begin < keys.size(); begin += kMaxKernelKeys) {
    const ChangeClock::Change change(&change_clock_);
    TFSWITCH_RETURN_IF_ERROR(
        ReviveAbsent(keys.subspan(begin, kMaxKernelKeys), change));
  }
  return absl::OkStatus();
}

absl::Status EmbeddingTable::Impl::ReadCold(
    absl::Span<const Key> block, Moves before,
    absl::FunctionRef<void(size_t, const char*)> read_record,
    absl::FunctionRef<void(size_t, const KeyPlace&)> read_place,
    std::vector<uint16_t>* absent) const {
  std::vector<uint16_t> left = std::exchange(*absent, {});
  while (!left.empty()) {
    ColdBatch batch;
    TFSWITCH_RETURN_IF_ERROR(cold_->tier.Find(block, left, &batch));
    std::vector<bool> is_found(block.size());
    for (const ColdHit& hit : batch.hits) {
      read_record(hit.i, hit.record);
      is_found[hit.i] = true;
    }
    const Moves after = ReadMoves();
    size_t num_left = 0;
    for (const uint16_t i : left) {
      if (is_found[i]) continue;
      const uint32_t stripe = StripeOfHash(hash_(block[i]));
      if (after[stripe] == before[stripe]) {
        absent->push_back(i);
      } else {
        left[num_left++] = i;
      }
    }
    left.resize(num_left);
    before = after;
    // Other threads may have moved these rows to memory.
    left.erase(std::remove_if(left.begin(), left.end(),
                              [&](uint16_t i) {
                                Stripe& stripe =
                                    stripes_[StripeOfHash(hash_(block[i]))];
                                MutexLock lock(&stripe.mutex);
                                const KeyPlace place =
                                    PlaceOfKey(&stripe, block[i]);
                                if (place.has_row()) read_place(i, place);
                                return place.has_row();
                              }),
               left.end());
  }
  std::sort(absent->begin(), absent->end());
  return absl::OkStatus();
}

absl::Status EmbeddingTable::Impl::ReadColdEmbeddings(
    absl::Span<const Key> block, const StepHistory& now, const Moves& before,
    uint16_t* missing, uint32_t* num_missing, float* embeddings) const {
  std::vector<uint16_t> absent(missing, missing + *num_missing);
  const size_t dim = static_cast<size_t>(config_.dim);
  TFSWITCH_RETURN_IF_ERROR(ReadCold(
      block, before,
      [&](size_t i, const char* record) {
        RacyLoadEmbedding(ColdFormat::WordsOf(record), now,
                          embeddings + i * dim);
      },
      [&](size_t i, const KeyPlace& place) {
        CopyEmbeddingLocked(place.stripe, place.entry, now,
                            embeddings + i * dim);
      },
      &absent));
  std::copy(absent.begin(), absent.end(), missing);
  *num_missing = static_cast<uint32_t>(absent.size());
  return absl::OkStatus();
}

void EmbeddingTable::Impl::ReleaseFreeRows() {
  if (cold_ != nullptr) cold_->StartMerge(/*compacts=*/true);
}

std::vector<Key> EmbeddingTable::Impl::ChooseLongestUnused(
    int64_t num_rows, absl::Span<const Key> kept) {
  constexpr uint64_t kSample = 1024;  // Per stripe.
  MutexLock lock(&shrink_mutex_);
  EndUseEpoch();
  std::vector<uint32_t> stamps;
  for (Stripe& stripe : stripes_) {
    MutexLock stripe_lock(&stripe.mutex);
    stripe.rows.SampleStamps(kSample, &stamps);
  }
  std::vector<Key> chosen;
  if (stamps.empty()) return chosen;
  std::sort(stamps.begin(), stamps.end());
  const auto num_stamps = static_cast<double>(stamps.size());
  const auto in_memory =
      static_cast<double>(std::max<int64_t>(1, size() - cold_->num_rows));
  const double wanted =
      std::min(1.0, static_cast<double>(num_rows) / in_memory);
  // A little more than is wanted, because the sample is not exact.
  const double share = std::min(1.0, 1.25 * wanted);
  const uint32_t limit = stamps[static_cast<size_t>(share * (num_stamps - 1))];
  const auto num_old = static_cast<double>(
      std::upper_bound(stamps.begin(), stamps.end(), limit) - stamps.begin());
  // Takes rows from everywhere: if parts of the index became empty, others
  // would become too full, because new keys go to all parts.
  const double taken = std::min(1.0, wanted * num_stamps / num_old);
  const auto max_hash = static_cast<uint64_t>(
      taken * static_cast<double>(std::numeric_limits<uint32_t>::max()));
  const uint64_t salt = DrawId();
  for (Stripe& stripe : stripes_) {
    std::vector<bool> old;
    for (uint64_t begin = 0; begin < kEndOfPositions;) {
      MutexLock stripe_lock(&stripe.mutex);
      if (begin == 0) old = stripe.rows.RowsWithStamps(0, limit);
      if (old.empty()) break;
      begin = stripe.index.VisitEntries(
          begin, kMaxBucketsPerVisit,
          [&](Key key, StripeIndex::Entry) {
            if (HashKey(static_cast<Key>(salt ^ static_cast<uint64_t>(key))) >>
                    32 <= max_hash &&
                !std::binary_search(kept.begin(), kept.end(), key)) {
              chosen.push_back(key);
            }
          },
          &old);
    }
  }
  return chosen;
}

absl::StatusOr<int64_t> EmbeddingTable::Impl::Demote(
    int64_t num_rows, absl::Span<const Key> kept) {
  if (cold_ == nullptr) {
    return absl::FailedPreconditionError(absl::StrCat(
        "table '", config_.name, "' has no folder for rows on disk"));
  }
  num_rows = std::min(num_rows, kMaxDemotion);
  MutexLock lock(&cold_->demote_mutex);
  ColdTier& tier = cold_->tier;
  if (tier.segments()->size() > kMaxSegments) cold_->WaitForMerges();
  // A lookup moves rows to memory, and a push that marks them as used follows
  // later. In between they should not go back.
  std::vector<Key> sorted = cold_->EndTurn();
  sorted.insert(sorted.end(), kept.begin(), kept.end());
  std::sort(sorted.begin(), sorted.end());
  std::vector<Key> chosen = ChooseLongestUnused(num_rows, sorted);
  if (static_cast<int64_t>(chosen.size()) < num_rows / 2) {
    sorted.assign(kept.begin(), kept.end());
    std::sort(sorted.begin(), sorted.end());
    chosen = ChooseLongestUnused(num_rows, sorted);
  }
  struct Row {
    ColdPlace place;
    Key key;
  };
  std::vector<Row> rows;
  rows.reserve(chosen.size());
  for (const Key key : chosen) {
    rows.push_back({ColdPlaceOfHash(hash_(key)), key});
  }
  std::sort(rows.begin(), rows.end(), [](const Row& a, const Row& b) {
    return std::make_pair(a.place, a.key) < std::make_pair(b.place, b.key);
  });
  // Calls visit(place, n) for each row n that is in memory.
  const auto for_each_row = [&](const auto& visit) {
    for (size_t n = 0; n < rows.size();) {
      Stripe& stripe = stripes_[rows[n].place >> 32];
      MutexLock stripe_lock(&stripe.mutex);
      for (const size_t end = std::min(rows.size(), n + kRowsAtOnce);
           n < end && &stripes_[rows[n].place >> 32] == &stripe; ++n) {
        if (n + kLockedDistance < rows.size()) {
          __builtin_prefetch(stripe.index.Home(
              static_cast<uint32_t>(rows[n + kLockedDistance].place)));
        }
        const KeyPlace place = PlaceOfKey(&stripe, rows[n].key);
        if (place.has_row()) visit(place, n);
      }
    }
  };
  const size_t record_bytes = tier.format().record_bytes;
  std::vector<char> records(rows.size() * record_bytes);
  std::vector<Row> copied;
  for_each_row([&](const KeyPlace& place, size_t n) {
    CopyRecordLocked(place.stripe, place.key, place.entry,
                     records.data() + copied.size() * record_bytes);
    copied.push_back(rows[n]);
  });
  rows.swap(copied);
  if (rows.empty()) return 0;
  TFSWITCH_ASSIGN_OR_RETURN(const auto writer, tier.NewSegment(rows.size()));
  for (size_t n = 0; n < rows.size(); ++n) {
    TFSWITCH_RETURN_IF_ERROR(
        writer->Add(rows[n].place, records.data() + n * record_bytes));
  }
  TFSWITCH_ASSIGN_OR_RETURN(const std::shared_ptr<ColdSegment> segment,
                            writer->Finish());
  tier.Add(segment);
  int64_t num_demoted = 0;
  std::vector<char> record(record_bytes);
  change_clock_.Hold();
  const auto end = absl::MakeCleanup([&] {
    change_clock_.Release();
    counters().Add(TableCounter::demoted_rows, num_demoted);
  });
  for_each_row([&](const KeyPlace& place, size_t n) {
    CopyRecordLocked(place.stripe, place.key, place.entry, record.data());
    // Leaves a row in memory that has changed since it was copied.
    if (std::memcmp(record.data(), records.data() + n * record_bytes,
                    record_bytes) != 0) {
      return;
    }
    Stripe* const stripe = place.stripe;
    stripe->rows.Free(place.entry.row());  // First, because it may throw.
    segment->SetLive(n);
    ++cold_->num_rows;
    stripe->num_moves.fetch_add(1, std::memory_order_release);
    stripe->index.Erase(place.entry, place.position);
    stripe->CountErased();
    ++num_demoted;
  });
  cold_->StartMerge();
  return num_demoted;
}

ColdRange EmbeddingTable::Impl::CollectCold(int stripe, uint64_t begin,
                                            uint64_t end,
                                            uint32_t min_stamp) const {
  if (!has_cold_rows()) return {};
  const ColdPlace first = ColdPlace{static_cast<uint32_t>(stripe)} << 32;
  return cold_->tier.Collect(first + begin, first + end, min_stamp);
}

absl::Status EmbeddingTable::Impl::VisitCold(
    const ColdRange& range,
    absl::FunctionRef<absl::Status(const ColdHit& hit)> visit) const {
  return range.parts.empty() ? absl::OkStatus()
                             : cold_->tier.Visit(range, visit);
}

void EmbeddingTable::Impl::MoveMerged(ColdMerge* merge) {
  cold_->tier.BeginMove(*merge);
  for (int s = 0; s < kNumStripes && merge->target != nullptr; ++s) {
    MutexLock lock(&stripes_[s].mutex);
    stripes_[s].num_moves.fetch_add(1, std::memory_order_release);
    ColdTier::MoveStripe(s, merge);
    stripes_[s].num_moves.fetch_add(1, std::memory_order_release);
  }
  cold_->tier.EndMove(*merge);
}

}  // namespace tfswitch
