// Counts, reads and admits keys that have no row yet.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <optional>
#include <variant>
#include <vector>

#include "cc/base/hash.h"
#include "cc/table/embedding_table_impl.h"

namespace tfswitch {
namespace {

// Returns a number in [0, 1) that depends only on the arguments.
double Draw(uint64_t seed, Key key, uint64_t number) {
  const uint64_t mixed = HashKey(static_cast<Key>(
      seed ^ HashKey(static_cast<Key>(HashKey(key) + number))));
  return static_cast<double>(mixed >> 11) * 0x1p-53;
}

}  // namespace

bool EmbeddingTable::Impl::InitCandidates() {
  const size_t stripe_bytes =
      RoundDownTo(candidate_reservation_.size() / kNumStripes, kHugePageBytes);
  // Each of the two index arrays gets a quarter of the address space, and
  // records get the rest: a record is not much longer than an entry of the
  // index.
  const size_t index_bytes = RoundDownTo(stripe_bytes / 4, kHugePageBytes);
  // Room for one stamp per record; a record has at least four floats.
  const size_t stamp_bytes =
      has_weights()
          ? RoundUpTo((stripe_bytes - 2 * index_bytes) / 5, kHugePageBytes)
          : 0;
  const size_t record_bytes = stripe_bytes - 2 * index_bytes - stamp_bytes;
  for (int s = 0; s < kNumStripes; ++s) {
    const size_t at = s * stripe_bytes;
    Stripe& stripe = stripes_[s];
    MutexLock lock(&stripe.mutex);
    if (!stripe.candidates.Init(
            candidate_reservation_.Span(at, index_bytes),
            candidate_reservation_.Span(at + index_bytes, index_bytes),
            candidate_reservation_.Span(at + 2 * index_bytes, record_bytes),
            candidate_floats_, &hash_)) {
      return false;
    }
    if (has_weights()) {
      stripe.candidates.InitStamps(candidate_reservation_.Span(
          at + 2 * index_bytes + record_bytes, stamp_bytes));
    }
  }
  return true;
}

EmbeddingTable::Impl::InsertedRows EmbeddingTable::Impl::ReadInsertedRows()
    const {
  InsertedRows rows;
  for (int s = 0; s < kNumStripes; ++s) {
    rows[s] = stripes_[s].inserted_rows.load(std::memory_order_acquire);
  }
  return rows;
}

void EmbeddingTable::Impl::FillMissing(absl::Span<const Key> block,
                                       const StepHistory& now,
                                       const uint16_t* missing,
                                       uint32_t num_missing,
                                       const InsertedRows& before,
                                       float* embeddings) const {
  const size_t dim = missing_row_.size();
  for (uint32_t i = 0; i < num_missing; ++i) {
    std::copy_n(missing_row_.data(), dim, embeddings + missing[i] * dim);
  }
  if (num_missing == 0 || !has_weights()) return;
  const StripeGroups groups(hash_, block.data(), num_missing, missing);
  constexpr size_t kAtOnce = 32;
  Key keys[kAtOnce];
  uint32_t positions[kAtOnce];
  const float* records[kAtOnce];
  const int weight_at = candidate_statistics_.num_floats();
  for (int s = 0; s < kNumStripes; ++s) {
    if (groups[s].empty()) continue;
    Stripe& stripe = stripes_[s];
    MutexLock lock(&stripe.mutex);
    // Another thread may have admitted the key since the first search.
    const bool is_new_row =
        stripe.inserted_rows.load(std::memory_order_relaxed) != before[s];
    for (size_t begin = 0; begin < groups[s].size(); begin += kAtOnce) {
      const absl::Span<const uint16_t> group =
          groups[s].subspan(begin, kAtOnce);
      for (size_t i = 0; i < group.size(); ++i) {
        keys[i] = block[group[i]];
        positions[i] = PositionOf(keys[i]);
      }
      stripe.candidates.FindMany(keys, positions, group.size(), records);
      for (size_t i = 0; i < group.size(); ++i) {
        float* const embedding = embeddings + group[i] * dim;
        if (records[i] != nullptr) {
          embedding[0] = records[i][weight_at];
        } else if (is_new_row) {
          const StripeIndex::Entry entry =
              stripe.index.Find(keys[i], positions[i]);
          if (entry.bucket != nullptr) {
            CopyEmbeddingLocked(&stripe, entry, now, embedding);
          }
        }
      }
    }
  }
}

uint32_t EmbeddingTable::Impl::AdmitByBloom(absl::Span<const Key> block,
                                            const StepBatch& batch,
                                            uint16_t* missing,
                                            uint32_t num_missing) {
  const uint32_t min_count =
      std::get<BloomMinCountAdmission>(config_.admission.policy).min_count;
  // Several keys share a cell, so the counts depend on the order of the keys.
  // Groups by HashKey(), so that the order does not depend on the places of
  // keys in memory.
  const StripeGroups groups(HashKey, block.data(), num_missing, missing);
  uint32_t num_admitted = 0;
  for (int s = 0; s < kNumStripes; ++s) {
    if (groups[s].empty()) continue;
    MutexLock lock(&bloom_mutexes_[s]);
    for (const uint16_t i : groups[s]) {
      const float count =
          std::min(batch.InputOf(i).count, static_cast<float>(min_count));
      if (bloom_->Add(block[i], static_cast<uint32_t>(count)) >= min_count) {
        missing[num_admitted++] = i;
      }
    }
  }
  return num_admitted;
}

uint32_t EmbeddingTable::Impl::AdmitMissing(absl::Span<const Key> block,
                                            const StepBatch& batch,
                                            uint16_t* missing,
                                            uint32_t num_missing) {
  if (bloom_ != nullptr) {
    return AdmitByBloom(block, batch, missing, num_missing);
  }
  const auto* rule =
      std::get_if<ProbabilityAdmission>(&config_.admission.policy);
  if (rule == nullptr) return num_missing;
  return static_cast<uint32_t>(
      std::remove_if(missing, missing + num_missing,
                     [&](uint16_t i) {
                       const double refused = std::pow(
                           1.0 - static_cast<double>(rule->probability),
                           static_cast<double>(batch.InputOf(i).count));
                       return Draw(config_.seed, block[i], batch.number) <
                              refused;
                     }) -
      missing);
}

KeysByKind EmbeddingTable::Impl::FindNewKeys(const GradientBatch& batch) const {
  KeysByKind found;
  if (config_.admission.is_always() && !batch.insert_missing) return found;
  StepBatch steps;
  static_cast<StepSettings&>(steps.input) = batch;
  steps.observations = batch.observations;
  const float day = DayOf(batch.day);
  std::vector<float> record(static_cast<size_t>(candidate_floats_));
  const auto* by_bloom =
      std::get_if<BloomMinCountAdmission>(&config_.admission.policy);
  ForEachLocked(batch.keys, [&](const KeyPlace& place, size_t i) {
    if (place.has_row()) return absl::OkStatus();
    const StepInput input = steps.InputOf(static_cast<uint32_t>(i));
    if (by_bloom != nullptr) {
      const uint32_t min_count = by_bloom->min_count;
      const float count = std::min(input.count, static_cast<float>(min_count));
      if (bloom_->Count(place.key) + static_cast<uint32_t>(count) < min_count) {
        return absl::OkStatus();
      }
    } else if (config_.admission.has_candidates()) {
      const float* const old =
          place.stripe->candidates.Find(place.key, place.position);
      if (old != nullptr) {
        std::copy_n(old, record.size(), record.begin());
      } else {
        candidate_statistics_.Init(day, record.data());
      }
      candidate_statistics_.Observe(input.count, input.shows,
                                    steps.ClicksOf(static_cast<uint32_t>(i)),
                                    day, record.data());
      if (!IsAdmitted(record.data(), day)) {
        if (old == nullptr) found.candidates.push_back(place.key);
        return absl::OkStatus();
      }
    }
    found.rows.push_back(place.key);
    return absl::OkStatus();
  }).IgnoreError();  // It cannot fail.
  return found;
}

bool EmbeddingTable::Impl::IsAdmitted(const float* record, float day) const {
  const UsageOfRow usage = candidate_statistics_.Read(record, day);
  if (const auto* rule =
          std::get_if<MinCountAdmission>(&config_.admission.policy)) {
    return usage.count >= static_cast<float>(rule->min_count);
  }
  return candidate_statistics_.Score(usage.show, usage.click) >=
         std::get<ShowClickAdmission>(config_.admission.policy)
             .embedx_threshold;
}

absl::StatusOr<bool> EmbeddingTable::Impl::AdmitCandidateLocked(
    const KeyPlace& place, const RowBuffer& state, const StepBatch& batch,
    uint32_t i, ChangeStamp stamp) {
  const int weight_at = candidate_statistics_.num_floats();
  KeepCandidateLocked(place.stripe, place.key, place.position, stamp);
  Candidates& candidates = place.stripe->candidates;
  float* record = candidates.Find(place.key, place.position);
  if (record == nullptr) {
    record = candidates.Insert(place.key, place.position);
    if (record == nullptr) return OutOfMemory();
    candidate_statistics_.Init(batch.day, record);
    if (has_weights()) {
      std::vector<float> row(static_cast<size_t>(config_.dim));
      initializer_.Fill(&place.key, 1, row.data());
      record[weight_at] = row[0];
      weight_optimizer_->InitSlots(record + weight_at + 1);
    }
  }
  // Stamps the record even if the key gets its row now, because there may be no
  // memory for the row.
  StampCandidateLocked(place.stripe, record, stamp);
  const StepInput input = batch.InputOf(i);
  candidate_statistics_.Observe(input.count, input.shows, batch.ClicksOf(i),
                                batch.day, record);
  const float* const gradient =
      batch.gradients + static_cast<size_t>(i) * config_.dim;
  if (!IsAdmitted(record, batch.day)) {
    if (has_weights()) {
      weight_optimizer_->Step(record + weight_at, gradient, input);
    }
    return false;
  }
  TFSWITCH_RETURN_IF_ERROR(InsertLocked(
      place, state, batch.RoundingOf(place.key), stamp,
      [&](const RowFloats& row) {
        if (has_weights()) {
          // The candidate's weight becomes the first value of the embedding,
          // and the weight's slots become the row's first slots.
          row.embedding[0] = record[weight_at];
          std::copy_n(record + weight_at + 1, weight_optimizer_->slot_floats(),
                      row.slots);
        }
        std::copy_n(record, statistics_.num_floats(), row.statistics);
        // The push whose gradient admitted the key also trains the new row.
        optimizer_.Step(row.embedding, row.slots, gradient, input);
      }));
  candidates.Erase(place.key, place.position);
  return true;
}

absl::Status EmbeddingTable::Impl::ForEachCandidate(
    int64_t max_keys,
    const std::function<absl::Status(const CandidateChunk&)>& visit,
    uint32_t since, const Snapshot* snapshot) const {
  if (!config_.admission.has_candidates()) return absl::OkStatus();
  const size_t width = static_cast<size_t>(candidate_floats_);
  const uint64_t buckets_per_visit = std::clamp<uint64_t>(
      static_cast<uint64_t>(max_keys) / kKeysPerBucket, 1, kMaxBucketsPerVisit);
  std::vector<Key> keys;
  std::vector<float> records;
  for (Stripe& stripe : stripes_) {
    for (uint64_t begin = 0; begin < kEndOfPositions;) {
      keys.clear();
      records.clear();
      {
        MutexLock lock(&stripe.mutex);
        begin = stripe.candidates.Visit(
            begin, buckets_per_visit, [&](Key key, const float* record) {
              if (since != 0 && stripe.candidates.StampOf(record) <= since) {
                return;
              }
              if (snapshot != nullptr &&
                  stripe.changed_candidates.count(key) > 0) {
                return;
              }
              keys.push_back(key);
              records.insert(records.end(), record, record + width);
            });
        if (snapshot != nullptr) stripe.former_candidates.SetVisited(begin);
      }
      if (keys.empty()) continue;
      TFSWITCH_RETURN_IF_ERROR(visit({keys, records}));
    }
    if (snapshot == nullptr) continue;
    TFSWITCH_RETURN_IF_ERROR(stripe.former_candidates.End(
        [&](Key key, const float* floats) -> absl::Status {
          if (floats[0] == 0.0f) return absl::OkStatus();
          return visit({{&key, 1}, {floats + 1, width}});
        }));
  }
  return absl::OkStatus();
}

absl::Status EmbeddingTable::Impl::AssignCandidates(
    absl::Span<const Key> keys, absl::Span<const float> records) {
  TFSWITCH_RETURN_IF_ERROR(CheckFloats("records", keys.size(),
                                       "candidate_floats", candidate_floats_,
                                       records.size()));
  const size_t width = static_cast<size_t>(candidate_floats_);
  for (size_t begin = 0; begin < keys.size(); begin += kMaxKernelKeys) {
    const absl::Span<const Key> block = keys.subspan(begin, kMaxKernelKeys);
    const ChangeClock::Change change(&change_clock_);
    TFSWITCH_RETURN_IF_ERROR(ReviveAbsent(block, change));
    TFSWITCH_RETURN_IF_ERROR(
        ForEachLocked(block, [&](const KeyPlace& place, size_t i) {
          if (place.has_row()) return absl::OkStatus();
          KeepCandidateLocked(place.stripe, place.key, place.position,
                              change.stamp());
          Candidates& candidates = place.stripe->candidates;
          float* record = candidates.Find(place.key, place.position);
          if (record == nullptr) {
            record = candidates.Insert(place.key, place.position);
          }
          if (record == nullptr) return OutOfMemory();
          std::copy_n(records.data() + (begin + i) * width, width, record);
          StampCandidateLocked(place.stripe, record, change.stamp());
          return absl::OkStatus();
        }));
  }
  return absl::OkStatus();
}

}  // namespace tfswitch
