// Visits the changes since a cursor.

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "absl/strings/str_cat.h"
#include "cc/table/embedding_table_impl.h"

namespace tfswitch {
namespace {

// Gathers a chunk for a visitor.
class Chunk {
 public:
  explicit Chunk(int dim) : dim_(static_cast<size_t>(dim)) {}

  void Add(Key key, const float* embedding, size_t num_floats) {
    keys_.push_back(key);
    embeddings_.insert(embeddings_.end(), embedding, embedding + num_floats);
    embeddings_.resize(keys_.size() * dim_);
  }
  void AddScore(float score) { delta_scores_.push_back(score); }
  void Remove(Key key) { removed_.push_back(key); }

  absl::Status Emit(
      size_t min_keys,
      const std::function<absl::Status(const ChangeChunk&)>& visit) {
    const size_t num_keys = keys_.size() + removed_.size();
    if (num_keys == 0 || num_keys < min_keys) return absl::OkStatus();
    absl::Status status = visit({keys_, embeddings_, delta_scores_, removed_});
    keys_.clear();
    embeddings_.clear();
    delta_scores_.clear();
    removed_.clear();
    return status;
  }

 private:
  const size_t dim_;
  std::vector<Key> keys_;
  std::vector<float> embeddings_;
  std::vector<float> delta_scores_;
  std::vector<Key> removed_;
};

}  // namespace

absl::StatusOr<ChangeCursor> EmbeddingTable::Impl::ForEachChange(
    const ChangeFilter& filter, int64_t max_keys,
    const std::function<absl::Status(const ChangeChunk&)>& visit) {
  if (filter.rule.has_value() &&
      config_.statistics.kind != StatisticsKind::kShowClick) {
    return absl::FailedPreconditionError(absl::StrCat(
        "table '", config_.name,
        "' does not count shows and clicks, by which its rows are to be "
        "chosen. Make it with show_click statistics_, or export what has "
        "changed without conditions."));
  }
  const auto unknown = [this](absl::string_view why) {
    return absl::FailedPreconditionError(
        absl::StrCat("table '", config_.name,
                     "': what changed since the last export is not "
                     "known any more, because ",
                     why, ". Export a base."));
  };
  CatchUpAll();  // In the epoch that ends: its changes are to be visited.
  const ChangeCursor cursor{change_log_id_, change_clock_.EndEpoch()};
  const bool is_all = filter.since.log_id == 0;
  if (!is_all && (filter.since.log_id != change_log_id_ ||
                  filter.since.epoch > cursor.epoch)) {
    return unknown("it has been made, restored or moved since then");
  }
  const uint32_t since = filter.since.epoch;
  const float day = DayOf(filter.day);
  const auto is_chosen = [&](const UsageOfRow& usage,
                             const RowStatistics& counted,
                             float delta_threshold) {
    return counted.Score(usage.show, usage.click) >=
               filter.rule->base_threshold &&
           usage.delta_score >= delta_threshold &&
           day - usage.last_seen_day <= filter.rule->delta_keep_days;
  };
  const uint64_t buckets_per_visit = std::clamp<uint64_t>(
      static_cast<uint64_t>(max_keys) / kKeysPerBucket, 1, kMaxBucketsPerVisit);
  const auto min_keys = static_cast<size_t>(std::max<int64_t>(
      1, max_keys - static_cast<int64_t>(buckets_per_visit) * kKeysPerBucket));
  const int weight_at = candidate_statistics_.num_floats();
  Chunk chunk(config_.dim);

  // Losses first, then keys without a row: a key's value since then comes
  // later. One that has come back and is not chosen stays lost; a gain it needs
  // not, as an export may have taken its new row before this told of the loss.
  std::array<std::vector<Key>, kNumStripes> lost;
  for (int s = 0; s < kNumStripes && !is_all; ++s) {
    Stripe& stripe = stripes_[s];
    std::vector<Key>& keys = lost[s];
    {
      MutexLock lock(&stripe.mutex);
      if (!stripe.key_changes.Knows(since)) {
        return unknown(
            "more rows and waiting keys have gone since then than the table "
            "remembers");
      }
      keys = stripe.key_changes.Since(since);
    }
    std::sort(keys.begin(), keys.end());
    keys.erase(std::unique(keys.begin(), keys.end()), keys.end());
    const auto step = static_cast<size_t>(
        std::clamp<int64_t>(max_keys, 1, int64_t{kMaxKernelKeys}));
    for (size_t begin = 0; begin < keys.size(); begin += step) {
      for (const Key key : absl::MakeConstSpan(keys).subspan(begin, step)) {
        chunk.Remove(key);
      }
      TFSWITCH_RETURN_IF_ERROR(chunk.Emit(min_keys, visit));
    }
    if (!filter.rule.has_value()) keys = {};
  }
  TFSWITCH_RETURN_IF_ERROR(chunk.Emit(1, visit));
  const auto add_candidates =
      [&](const CandidateChunk& candidates) -> absl::Status {
    for (size_t i = 0; i < candidates.keys.size(); ++i) {
      const float* const record = candidates.records.data() +
                                  i * static_cast<size_t>(candidate_floats_);
      if (filter.rule.has_value() &&
          !is_chosen(candidate_statistics_.Read(record, day),
                     candidate_statistics_, 0.0f)) {
        continue;
      }
      chunk.Add(candidates.keys[i], record + weight_at, 1);
      // The score is kept when the key gets a row.
      if (filter.rule.has_value()) chunk.AddScore(0.0f);
    }
    return chunk.Emit(min_keys, visit);
  };
  if (has_weights()) {
    TFSWITCH_RETURN_IF_ERROR(ForEachCandidate(
        max_keys, add_candidates, is_all ? 0 : since, /*snapshot=*/nullptr));
  }

  std::vector<float> embedding(static_cast<size_t>(config_.dim));
  std::vector<float> counts(static_cast<size_t>(statistics_.num_floats()));
  for (int s = 0; s < kNumStripes; ++s) {
    Stripe& stripe = stripes_[s];
    for (uint64_t begin = 0; begin < kEndOfPositions;) {
      {
        MutexLock lock(&stripe.mutex);
        begin = stripe.index.VisitEntries(
            begin, buckets_per_visit, [&](Key key, StripeIndex::Entry entry) {
              if (filter.rule.has_value()) {
                CopyStatisticsLocked(&stripe, entry, counts.data());
                const UsageOfRow usage = statistics_.Read(counts.data(), day);
                const bool needs_gain =
                    !is_all &&
                    !std::binary_search(lost[s].begin(), lost[s].end(), key);
                if (!is_chosen(
                        usage, statistics_,
                        needs_gain ? filter.rule->delta_threshold : 0.0f)) {
                  return;
                }
                chunk.AddScore(usage.delta_score);
              } else if (!is_all && RacyLoad(stripe.rows.stamps() +
                                             entry.row()) <= since) {
                return;
              }
              CopyEmbeddingLocked(&stripe, entry, StepHistory(),
                                  embedding.data());
              chunk.Add(key, embedding.data(), embedding.size());
            });
      }
      TFSWITCH_RETURN_IF_ERROR(chunk.Emit(min_keys, visit));
    }
  }
  TFSWITCH_RETURN_IF_ERROR(chunk.Emit(1, visit));
  return cursor;
}

void EmbeddingTable::Impl::SubtractDeltaScores(absl::Span<const Key> keys,
                                               absl::Span<const float> scores) {
  const ChangeClock::Change change(&change_clock_);
  const auto subtract = [&](const KeyPlace& place, size_t i) {
    if (!place.has_row()) return absl::OkStatus();
    ModifyLocked(place, RowRounding(), change.stamp(),
                 [&](const RowFloats& row) {
                   statistics_.SubtractDeltaScore(scores[i], row.statistics);
                 });
    return absl::OkStatus();
  };
  ForEachLocked(keys, subtract).IgnoreError();  // It cannot fail.
}

}  // namespace tfswitch
