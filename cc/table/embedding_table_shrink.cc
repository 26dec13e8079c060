// Evicts rows and gives back their memory.

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <utility>
#include <vector>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "cc/base/steady_clock.h"
#include "cc/table/embedding_table_impl.h"

namespace tfswitch {

absl::Status EmbeddingTable::Impl::SiftRows(
    bool with_embeddings,
    const std::function<bool(Key, const float*, const float*)>& visit) {
  std::vector<float> embedding(
      with_embeddings ? static_cast<size_t>(config_.dim) : 0);
  std::vector<float> counts(static_cast<size_t>(statistics_.num_floats()));
  std::vector<Key> chosen;
  // Visits a part of each stripe in turn. If this thread unlocked a mutex and
  // locked it again at once, other threads would hardly get it.
  std::array<uint64_t, kNumStripes> begins = {};
  for (bool is_more = true; is_more;) {
    is_more = false;
    for (int s = 0; s < kNumStripes; ++s) {
      uint64_t& begin = begins[s];
      if (begin >= kEndOfPositions) continue;
      is_more = true;
      Stripe& stripe = stripes_[s];
      ColdRange cold;
      {
        const ChangeClock::Change change(&change_clock_);
        MutexLock lock(&stripe.mutex);
        chosen.clear();
        const uint64_t from = begin;
        begin = stripe.index.VisitEntries(
            begin, kMaxBucketsPerVisit, [&](Key key, StripeIndex::Entry entry) {
              if (with_embeddings) {
                CopyEmbeddingLocked(&stripe, entry, *Now(), embedding.data());
              }
              CopyStatisticsLocked(&stripe, entry, counts.data());
              if (visit(key, with_embeddings ? embedding.data() : nullptr,
                        counts.data())) {
                chosen.push_back(key);
              }
            });
        for (const Key key : chosen) {
          EraseLocked(PlaceOfKey(&stripe, key), change.stamp());
        }
        cold = CollectCold(s, from, begin, /*min_stamp=*/0);
      }
      TFSWITCH_RETURN_IF_ERROR(SiftCold(cold, with_embeddings, visit));
    }
  }
  return absl::OkStatus();
}

absl::Status EmbeddingTable::Impl::SiftCold(
    const ColdRange& range, bool with_embeddings,
    const std::function<bool(Key, const float*, const float*)>& visit) {
  std::vector<float> embedding(
      with_embeddings ? static_cast<size_t>(config_.dim) : 0);
  std::vector<Key> chosen;
  std::vector<uint32_t> stamps;
  TFSWITCH_RETURN_IF_ERROR(VisitCold(range, [&](const ColdHit& hit) {
    const Key key = ColdFormat::KeyOf(hit.record);
    if (with_embeddings) {
      RacyLoadEmbedding(ColdFormat::WordsOf(hit.record), *Now(),
                        embedding.data());
    }
    if (visit(key, with_embeddings ? embedding.data() : nullptr,
              cold_->tier.format().StatisticsOf(hit.record))) {
      chosen.push_back(key);
      stamps.push_back(ColdFormat::StampOf(hit.record));
    }
    return absl::OkStatus();
  }));
  for (size_t begin = 0; begin < chosen.size(); begin += kMaxKernelKeys) {
    const auto block =
        absl::MakeConstSpan(chosen).subspan(begin, kMaxKernelKeys);
    const ChangeClock::Change change(&change_clock_);
    TFSWITCH_RETURN_IF_ERROR(ReviveAbsent(block, change));
    TFSWITCH_RETURN_IF_ERROR(ForEachLocked(block, [&](const KeyPlace& place,
                                                      size_t i) {
      // Keeps a row that was pushed meanwhile.
      if (place.has_row() && RacyLoad(place.stripe->rows.stamps() +
                                      place.entry.row()) == stamps[begin + i]) {
        EraseLocked(place, change.stamp());
      }
      return absl::OkStatus();
    }));
  }
  return absl::OkStatus();
}

void EmbeddingTable::Impl::SiftCandidates(
    const std::function<bool(const float*)>& visit) {
  if (!config_.admission.has_candidates()) return;
  std::vector<Key> chosen;
  for (Stripe& stripe : stripes_) {
    for (uint64_t begin = 0; begin < kEndOfPositions;) {
      const ChangeClock::Change change(&change_clock_);
      MutexLock lock(&stripe.mutex);
      chosen.clear();
      begin = stripe.candidates.Visit(begin, kMaxBucketsPerVisit,
                                      [&](Key key, const float* record) {
                                        if (visit(record)) {
                                          chosen.push_back(key);
                                        }
                                      });
      for (const Key key : chosen) {
        KeepCandidateLocked(&stripe, key, PositionOf(key), change.stamp());
        if (has_weights()) NoteLossLocked(&stripe, key, change.stamp());
        stripe.candidates.Erase(key, PositionOf(key));
      }
    }
  }
}

namespace {

// Returns the element that would be at `place` if the elements were sorted.
template <typename Value>
Value ElementAt(size_t place, std::vector<Value>* values) {
  const auto at = values->begin() + static_cast<std::ptrdiff_t>(place);
  std::nth_element(values->begin(), at, values->end());
  return *at;
}

// Chooses which rows to remove when there are more rows than a limit allows.
// Rows that another rule removes do not count. Rows with the smallest values go
// first. Among equal values, keys with the smallest hashes go first.
class Surplus {
 public:
  // All but `limit` of `values` go.
  Surplus(std::vector<float> values, uint64_t limit) {
    if (values.size() <= limit) return;
    const size_t surplus = values.size() - static_cast<size_t>(limit);
    last_ = ElementAt(surplus - 1, &values);
    const auto count = [&](auto is_counted) {
      return std::count_if(values.begin(), values.end(), is_counted);
    };
    num_equal_ = static_cast<int64_t>(surplus) -
                 count([this](float value) { return value < last_; });
    must_choose_ =
        count([this](float value) { return value == last_; }) > num_equal_;
  }

  // Whether only some of the rows with the largest removed value are removed.
  // If so, Choose() needs the hashes of all rows with that value.
  bool must_choose() const { return must_choose_; }
  bool IsLast(float value) const { return value == last_; }
  void Choose(std::vector<uint64_t> hashes) {
    if (static_cast<int64_t>(hashes.size()) <= num_equal_) return;
    last_hash_ = ElementAt(static_cast<size_t>(num_equal_ - 1), &hashes);
  }

  // Whether a row with this value is removed. For rows with the largest removed
  // value, returns true only until enough rows are removed.
  bool Takes(float value, Key key) {
    if (value < last_) return true;
    return value == last_ && HashKey(key) <= last_hash_ && num_equal_-- > 0;
  }

 private:
  float last_ = -std::numeric_limits<float>::infinity();
  int64_t num_equal_ = 0;
  bool must_choose_ = false;
  uint64_t last_hash_ = std::numeric_limits<uint64_t>::max();
};

double SquaredNorm(const float* row, int dim) {
  double sum = 0.0;
  for (int i = 0; i < dim; ++i) {
    const auto value = static_cast<double>(row[i]);
    sum += value * value;
  }
  return sum;
}

}  // namespace

// Finds the rule that removes a row, and counts the removed rows.
//
// Thread-compatible.
class EmbeddingTable::Impl::ShrinkRules {
 public:
  ShrinkRules(const Impl& table, const EvictionConfig& rules, float day)
      : table_(table), rules_(rules), day_(day) {}

  ShrinkReport& report() { return report_; }
  bool reads_embeddings() const { return rules_.min_l2_norm.has_value(); }

  bool TakesCandidate(const float* record) {
    if (RuleForCounts(table_.candidate_statistics_, record) == nullptr) {
      return false;
    }
    ++report_.evicted_candidates;
    return true;
  }

  // Returns the counter of the first rule that removes the row, or null.
  // max_rows is not one of these rules.
  int64_t* RuleFor(const float* embedding, const float* counts) {
    int64_t* const rule = RuleForCounts(table_.statistics_, counts);
    if (rule != nullptr || !reads_embeddings()) return rule;
    const auto min_norm = static_cast<double>(*rules_.min_l2_norm);
    return SquaredNorm(embedding, table_.config_.dim) < min_norm * min_norm
               ? &report_.by_l2_norm
               : nullptr;
  }

  // The value by which max_rows chooses.
  float OrderOf(const float* counts) const {
    const UsageOfRow usage = table_.statistics_.Read(counts, day_);
    return rules_.order == EvictionOrder::kLfu ? usage.count
                                               : usage.last_seen_day;
  }

  void CountRemaining(const float* counts) {
    ++report_.remaining_rows;
    const UsageOfRow usage = table_.statistics_.Read(counts, day_);
    report_.remaining_count += static_cast<double>(usage.count);
    report_.remaining_show += static_cast<double>(usage.show);
    report_.remaining_click += static_cast<double>(usage.click);
  }

 private:
  int64_t* RuleForCounts(const RowStatistics& counted,
                         const float* row_statistics) {
    const UsageOfRow usage = counted.Read(row_statistics, day_);
    if (rules_.delete_after_unseen_days.has_value() &&
        day_ - usage.last_seen_day > *rules_.delete_after_unseen_days) {
      return &report_.by_ttl;
    }
    if (rules_.delete_threshold.has_value() &&
        counted.Score(usage.show, usage.click) < *rules_.delete_threshold) {
      return &report_.by_show_click_score;
    }
    return nullptr;
  }

  const Impl& table_;
  const EvictionConfig& rules_;
  const float day_;
  ShrinkReport report_;
};

absl::StatusOr<ShrinkReport> EmbeddingTable::Impl::Shrink(
    const EvictionConfig& config, float day, bool dry_run) {
  absl::Status valid = ValidateEviction(config);
  if (valid.ok()) valid = CheckCounted(config, config_.statistics);
  if (!valid.ok()) {
    return absl::Status(valid.code(), absl::StrCat("table '", config_.name,
                                                   "': ", valid.message()));
  }
  if (!dry_run) NoteDay(day);
  MutexLock lock(&shrink_mutex_);
  ShrinkRules rules(*this, config, DayOf(day));
  ShrinkReport& report = rules.report();
  const auto end_generation = absl::MakeCleanup([&] {
    if (!dry_run && report.evicted_rows > 0) EndGeneration();
  });
  if (rules.reads_embeddings()) CatchUpAll();
  // Calls visit(key, value) for rows that no other rule removes. `value`
  // determines the order of removal.
  const auto visit_order = [&](const std::function<void(Key, float)>& visit) {
    return SiftRows(rules.reads_embeddings(),
                    [&](Key key, const float* embedding, const float* counts) {
                      if (rules.RuleFor(embedding, counts) == nullptr) {
                        visit(key, rules.OrderOf(counts));
                      }
                      return false;
                    });
  };
  std::vector<float> order;
  if (config.max_rows.has_value()) {
    order.reserve(static_cast<size_t>(size()));
    TFSWITCH_RETURN_IF_ERROR(
        visit_order([&](Key, float value) { order.push_back(value); }));
  }
  Surplus surplus(std::move(order), config.max_rows.value_or(
                                        std::numeric_limits<uint64_t>::max()));
  if (surplus.must_choose()) {
    std::vector<uint64_t> hashes;
    TFSWITCH_RETURN_IF_ERROR(visit_order([&](Key key, float value) {
      if (surplus.IsLast(value)) hashes.push_back(HashKey(key));
    }));
    surplus.Choose(std::move(hashes));
  }
  TFSWITCH_RETURN_IF_ERROR(
      SiftRows(rules.reads_embeddings(),
               [&](Key key, const float* embedding, const float* counts) {
                 int64_t* rule = rules.RuleFor(embedding, counts);
                 if (rule == nullptr && config.max_rows.has_value() &&
                     surplus.Takes(rules.OrderOf(counts), key)) {
                   rule = &report.by_max_rows;
                 }
                 if (rule == nullptr) {
                   rules.CountRemaining(counts);
                   return false;
                 }
                 ++*rule;
                 ++report.evicted_rows;
                 return !dry_run;
               }));
  report.evicted_bytes =
      report.evicted_rows * static_cast<int64_t>(stride_ + statistics_stride_);
  SiftCandidates([&](const float* record) {
    return rules.TakesCandidate(record) && !dry_run;
  });
  if (!dry_run) {
    for (Stripe& stripe : stripes_) {
      Compact(&stripe, /*min_share=*/4);
      if (!config_.admission.has_candidates()) continue;
      MutexLock stripe_lock(&stripe.mutex);
      stripe.candidates.Compact(has_weights() && change_clock_.is_running());
    }
  }
  return report;
}

namespace {

// How much a row, or a candidate, is used. Smaller ones are evicted first.
struct Use {
  Use(bool is_fresh, float value, uint32_t stamp, Key key) : key(key) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof(bits));
    // Makes the bits of floats have the order of the floats.
    bits ^= (bits >> 31) != 0 ? ~uint32_t{0} : uint32_t{1} << 31;
    order = uint64_t{is_fresh} << 63 | uint64_t{bits} << 31 | stamp;
  }

  bool operator<(const Use& o) const {
    if (order != o.order) return order < o.order;
    return HashKey(key) < HashKey(o.key);
  }

  uint64_t order;  // First by is_fresh, then value, then stamp of 31 bits.
  Key key;
};

}  // namespace

void EmbeddingTable::Impl::NoteUses(size_t num_rows) {
  if (!ranks_uses()) return;
  // Each epoch has the uses of a sixteenth of the rows.
  const size_t num_uses = num_uses_.fetch_add(num_rows) + num_rows;
  if (num_uses >= static_cast<size_t>(size()) / 16) EndUseEpoch();
}

void EmbeddingTable::Impl::EndUseEpoch() {
  // Epochs are 31-bit numbers. In the second half one lasts a second, so that
  // they do not run out within 30 years.
  constexpr uint32_t kManyEpochs = uint32_t{1} << 30;
  if (change_clock_.epoch() >= kManyEpochs) {
    const int64_t now = absl::ToUnixSeconds(SteadyNow());
    if (last_use_end_.exchange(now) == now) return;
  }
  num_uses_ = 0;
  change_clock_.TryEndEpoch();
}

void EmbeddingTable::Impl::VisitSample(
    int64_t num_entries, SampleHand* hand,
    absl::FunctionRef<std::pair<uint64_t, int64_t>(Stripe*, uint64_t)> visit) {
  // Neighbours in an index have nothing in common but their hashes, so parts of
  // the index are a random sample. Takes the parts from all stripes in turn,
  // because each stripe has its own free rows.
  std::array<uint64_t, kNumStripes> left;
  left.fill(kEndOfPositions);
  for (int num_done = 0; num_entries > 0 && num_done < kNumStripes;) {
    const int s = hand->stripe;
    hand->stripe = (s + 1) % kNumStripes;
    if (left[s] == 0) continue;
    uint64_t& position = hand->positions[s];
    const auto [end, visited] = visit(&stripes_[s], position);
    left[s] -= std::min(left[s], end - position);
    if (left[s] == 0) ++num_done;
    num_entries -= visited;
    position = end < kEndOfPositions ? end : 0;
  }
}

KeysByKind EmbeddingTable::Impl::ChooseLeastUsed(int64_t num_rows,
                                                 int64_t num_candidates,
                                                 absl::Span<const Key> kept) {
  constexpr int64_t kMinSample = 1024;
  MutexLock lock(&shrink_mutex_);
  const EvictionConfig& rules = config_.eviction;
  const bool by_score = rules.delete_threshold.has_value();
  const bool by_count = !by_score && rules.order == EvictionOrder::kLfu;
  const uint32_t last_epoch =
      std::exchange(last_choice_epoch_, change_clock_.epoch());
  EndUseEpoch();
  const float day = DayOf(kServersDay);
  std::vector<Use> sample;
  const auto add = [&](Key key, const RowStatistics& counted,
                       const float* counts, uint32_t stamp) {
    float value = 0.0f;
    if (counted.num_floats() > 0) {
      const UsageOfRow usage = counted.Read(counts, day);
      value = by_score   ? counted.Score(usage.show, usage.click)
              : by_count ? usage.count
                         : usage.last_seen_day;
    }
    sample.emplace_back((by_score || by_count) && stamp > last_epoch, value,
                        stamp, key);
  };
  const auto choose = [&](int64_t count) {
    std::vector<Key> chosen;
    for (auto begin = sample.begin(); count > 0 && begin != sample.end();) {
      const auto end = begin + std::min(count, sample.end() - begin);
      if (end != sample.end()) std::nth_element(begin, end, sample.end());
      for (; begin != end; ++begin) {
        if (std::binary_search(kept.begin(), kept.end(), begin->key)) continue;
        chosen.push_back(begin->key);
        --count;
      }
    }
    sample.clear();
    // A sample that is the whole table may have visited a row twice.
    std::sort(chosen.begin(), chosen.end());
    chosen.erase(std::unique(chosen.begin(), chosen.end()), chosen.end());
    return chosen;
  };
  KeysByKind all;
  std::vector<float> counts(static_cast<size_t>(statistics_.num_floats()));
  if (num_rows > 0) {
    VisitSample(
        std::max(8 * num_rows, kMinSample) + static_cast<int64_t>(kept.size()),
        &row_hand_, [&](Stripe* stripe, uint64_t begin) {
          int64_t visited = 0;
          MutexLock stripe_lock(&stripe->mutex);
          const uint64_t end = stripe->index.VisitEntries(
              begin, kMaxBucketsPerVisit,
              [&](Key key, StripeIndex::Entry entry) {
                ++visited;
                CopyStatisticsLocked(stripe, entry, counts.data());
                add(key, statistics_, counts.data(),
                    RacyLoad(stripe->rows.stamps() + entry.row()));
              });
          return std::make_pair(end, visited);
        });
    all.rows = choose(num_rows);
  }
  if (num_candidates > 0 && config_.admission.has_candidates()) {
    VisitSample(std::max(8 * num_candidates, kMinSample), &candidate_hand_,
                [&](Stripe* stripe, uint64_t begin) {
                  int64_t visited = 0;
                  MutexLock stripe_lock(&stripe->mutex);
                  const uint64_t end = stripe->candidates.Visit(
                      begin, kMaxBucketsPerVisit,
                      [&](Key key, const float* record) {
                        ++visited;
                        add(key, candidate_statistics_, record, 0);
                      });
                  return std::make_pair(end, visited);
                });
    all.candidates = choose(num_candidates);
  }
  return all;
}

namespace {

// Moves floats. Other threads may be reading both places, but not writing.
void MoveFloats(const float* from, size_t count, float* to,
                std::vector<float>* buffer) {
  if (count == 0) return;
  buffer->resize(count);
  RacyLoadFloats(buffer->data(), from, count);
  RacyModifyFloats(to, count, [&](float* floats) {
    std::copy(buffer->begin(), buffer->end(), floats);
  });
}

}  // namespace

void EmbeddingTable::Impl::Compact(Stripe* stripe, uint64_t min_share) {
  uint64_t limit = 0;
  {
    MutexLock lock(&stripe->mutex);
    if (!stripe->rows.IsWorthCompacting(min_share)) return;
    limit = stripe->rows.SortFreeRows();
    // Leaves free rows below `limit`, because each row that is inserted
    // meanwhile takes one. If no free row were left, some row above would stay,
    // and only the memory behind that row could be given back.
    limit += limit / 16 + 1024;
  }
  std::vector<StripeIndex::Entry> beyond;
  std::vector<uint32_t> left;
  std::vector<float> buffer;
  bool has_room = true;
  for (uint64_t begin = 0; begin < kEndOfPositions && has_room;) {
    const ChangeClock::Change change(&change_clock_);
    // A snapshot identifies changed rows by their row numbers, so while there
    // is one, no row may move.
    if (change.stamp().keeps_below != 0) break;
    MutexLock lock(&stripe->mutex);
    beyond.clear();
    begin = stripe->index.VisitEntries(begin, kMaxBucketsPerVisit,
                                       [&](Key, StripeIndex::Entry entry) {
                                         if (entry.row() >= limit) {
                                           beyond.push_back(entry);
                                         }
                                       });
    left.reserve(left.size() + beyond.size());
    for (const StripeIndex::Entry& entry : beyond) {
      uint32_t row;
      if (!stripe->rows.AllocateBelow(limit, &row)) {
        // Other threads may have freed rows.
        stripe->rows.SortFreeRows();
        has_room = stripe->rows.AllocateBelow(limit, &row);
        if (!has_room) break;
      }
      // Locks the bucket, because other threads find the row through it.
      const uint32_t meta = LockBucket(entry.bucket);
      const uint32_t old_row = entry.row();
      const RowPlace from = PlaceOf(*stripe, old_row);
      const RowPlace to = PlaceOf(*stripe, row);
      MoveFloats(from.words, static_cast<size_t>(codec_.num_words()), to.words,
                 &buffer);
      MoveFloats(from.statistics, static_cast<size_t>(statistics_.num_floats()),
                 to.statistics, &buffer);
      if (change_clock_.is_running()) {
        RacyStore(to.stamp, RacyLoad(from.stamp));
      }
      RacyStore(&entry.bucket->rows[entry.at], row);
      UnlockBucket(entry.bucket, meta);
      left.push_back(old_row);
    }
  }
  {
    MutexLock lock(&stripe->mutex);
    for (const uint32_t row : left) stripe->rows.Free(row);
    stripe->rows.SortFreeRows();
  }
  for (bool is_more = true; is_more;) {
    MutexLock lock(&stripe->mutex);
    is_more = stripe->rows.ReleaseTail();
  }
}

}  // namespace tfswitch
