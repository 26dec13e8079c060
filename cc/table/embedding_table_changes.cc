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

// One call of ForEachChange.
//
// Thread-compatible.
class EmbeddingTable::Impl::ChangeVisit {
 public:
  ChangeVisit(Impl* table, const ChangeFilter& filter, int64_t max_keys,
              const std::function<absl::Status(const ChangeChunk&)>& visit)
      : table_(*table),
        rule_(filter.rule),
        is_all_(filter.since.log_id == 0),
        since_(filter.since.epoch),
        day_(table->DayOf(filter.day)),
        max_keys_(max_keys),
        buckets_per_visit_(std::clamp<uint64_t>(
            static_cast<uint64_t>(max_keys) / kKeysPerBucket, 1,
            kMaxBucketsPerVisit)),
        min_keys_(static_cast<size_t>(std::max<int64_t>(
            1, max_keys -
                   static_cast<int64_t>(buckets_per_visit_) * kKeysPerBucket))),
        visit_(visit),
        chunk_(table->config_.dim) {}

  // First reports the keys that have lost their row, and then the values of
  // keys. If a key is in both reports, the later one counts.
  absl::Status Run() {
    for (int s = 0; s < kNumStripes && !is_all_; ++s) {
      TFSWITCH_RETURN_IF_ERROR(VisitLost(s));
    }
    TFSWITCH_RETURN_IF_ERROR(chunk_.Emit(1, visit_));
    if (table_.has_weights()) {
      TFSWITCH_RETURN_IF_ERROR(table_.ForEachCandidate(
          max_keys_,
          [this](const CandidateChunk& chunk) { return AddCandidates(chunk); },
          is_all_ ? 0 : since_, /*snapshot=*/nullptr));
    }
    for (int s = 0; s < kNumStripes; ++s) {
      TFSWITCH_RETURN_IF_ERROR(VisitRows(s));
    }
    return chunk_.Emit(1, visit_);
  }

  absl::Status Unknown(absl::string_view why) const {
    return absl::FailedPreconditionError(
        absl::StrCat("table '", table_.config_.name,
                     "': what changed since the last export is not "
                     "known any more, because ",
                     why, ". Export a base."));
  }

 private:
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
      absl::Status status =
          visit({keys_, embeddings_, delta_scores_, removed_});
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

  bool IsChosen(const UsageOfRow& usage, const RowStatistics& counted,
                float delta_threshold) const {
    return counted.Score(usage.show, usage.click) >= rule_->base_threshold &&
           usage.delta_score >= delta_threshold &&
           day_ - usage.last_seen_day <= rule_->delta_keep_days;
  }

  absl::Status VisitLost(int s) {
    Stripe& stripe = table_.stripes_[s];
    std::vector<Key>& keys = lost_[s];
    {
      MutexLock lock(&stripe.mutex);
      if (!stripe.key_changes.Knows(since_)) {
        return Unknown(
            "more rows and waiting keys have gone since then than the table "
            "remembers");
      }
      keys = stripe.key_changes.Since(since_);
    }
    std::sort(keys.begin(), keys.end());
    keys.erase(std::unique(keys.begin(), keys.end()), keys.end());
    const auto step = static_cast<size_t>(
        std::clamp<int64_t>(max_keys_, 1, int64_t{kMaxKernelKeys}));
    for (size_t begin = 0; begin < keys.size(); begin += step) {
      for (const Key key : absl::MakeConstSpan(keys).subspan(begin, step)) {
        chunk_.Remove(key);
      }
      TFSWITCH_RETURN_IF_ERROR(chunk_.Emit(min_keys_, visit_));
    }
    if (!rule_.has_value()) keys = {};
    return absl::OkStatus();
  }

  absl::Status AddCandidates(const CandidateChunk& candidates) {
    const RowStatistics& statistics = table_.candidate_statistics_;
    for (size_t i = 0; i < candidates.keys.size(); ++i) {
      const float* const record =
          candidates.records.data() +
          i * static_cast<size_t>(table_.candidate_floats_);
      if (rule_.has_value() &&
          !IsChosen(statistics.Read(record, day_), statistics, 0.0f)) {
        continue;
      }
      chunk_.Add(candidates.keys[i], record + statistics.num_floats(), 1);
      // Gives 0 as the score to subtract. A candidate keeps its whole score,
      // which its row takes over later.
      if (rule_.has_value()) chunk_.AddScore(0.0f);
    }
    return chunk_.Emit(min_keys_, visit_);
  }

  absl::Status VisitRows(int s) {
    Stripe& stripe = table_.stripes_[s];
    std::vector<float> embedding(static_cast<size_t>(table_.config_.dim));
    counts_.resize(static_cast<size_t>(table_.statistics_.num_floats()));
    // A row may have missed steps on disk, and be in memory by now.
    const uint32_t min_stamp = table_.has_cold_rows() ? MinColdStamp()
                               : is_all_              ? 0
                                                      : since_ + 1;
    for (uint64_t begin = 0; begin < kEndOfPositions;) {
      ColdRange cold;
      {
        MutexLock lock(&stripe.mutex);
        const uint64_t from = begin;
        begin = stripe.index.VisitEntries(
            begin, buckets_per_visit_, [&](Key key, StripeIndex::Entry entry) {
              if (rule_.has_value()) {
                table_.CopyStatisticsLocked(&stripe, entry, counts_.data());
                if (!Choose(lost_[s], key, counts_.data())) return;
              } else if (RacyLoad(stripe.rows.stamps() + entry.row()) <
                         min_stamp) {
                return;
              }
              table_.CopyEmbeddingLocked(&stripe, entry, *table_.Now(),
                                         embedding.data());
              chunk_.Add(key, embedding.data(), embedding.size());
            });
        cold = table_.CollectCold(s, from, begin, MinColdStamp());
      }
      TFSWITCH_RETURN_IF_ERROR(table_.VisitCold(cold, [&](const ColdHit& hit) {
        return AddCold(lost_[s], hit.record);
      }));
      TFSWITCH_RETURN_IF_ERROR(chunk_.Emit(min_keys_, visit_));
    }
    return absl::OkStatus();
  }

  // Rows on disk with lower stamps have not changed. With dense updates a row
  // changes without a stamp while it is on disk.
  uint32_t MinColdStamp() const {
    const bool reads_all =
        is_all_ || rule_.has_value() || table_.optimizer_.moves_idle_rows();
    return reads_all ? 0 : since_ + 1;
  }

  // Adds a row on disk, if it is chosen, as it is after all steps.
  absl::Status AddCold(const std::vector<Key>& lost, const char* record) {
    const Key key = ColdFormat::KeyOf(record);
    if (rule_.has_value()) {
      const float* const counts =
          table_.cold_->tier.format().StatisticsOf(record);
      if (!Choose(lost, key, counts)) return absl::OkStatus();
    } else if (ColdFormat::StampOf(record) < MinColdStamp()) {
      return absl::OkStatus();
    }
    std::vector<float> embedding(static_cast<size_t>(table_.config_.dim));
    table_.RacyLoadEmbedding(ColdFormat::WordsOf(record), *table_.Now(),
                             embedding.data());
    chunk_.Add(key, embedding.data(), embedding.size());
    return chunk_.Emit(min_keys_, visit_);
  }

  // Whether the rule chooses the row. If so, adds the row's score to the chunk.
  bool Choose(const std::vector<Key>& lost, Key key, const float* counts) {
    const RowStatistics& statistics = table_.statistics_;
    const UsageOfRow usage = statistics.Read(counts, day_);
    // A key may have lost its row and have a new one. If the rule does not
    // choose the new row, readers see the key as removed. For such a key the
    // rule does not ask how much the score has grown, because an earlier export
    // may already have subtracted the score.
    const bool needs_gain =
        !is_all_ && !std::binary_search(lost.begin(), lost.end(), key);
    if (!IsChosen(usage, statistics,
                  needs_gain ? rule_->delta_threshold : 0.0f)) {
      return false;
    }
    chunk_.AddScore(usage.delta_score);
    return true;
  }

  Impl& table_;
  const std::optional<ScoreRule>& rule_;
  const bool is_all_;
  const uint32_t since_;
  const float day_;
  const int64_t max_keys_;
  const uint64_t buckets_per_visit_;
  const size_t min_keys_;
  const std::function<absl::Status(const ChangeChunk&)>& visit_;
  Chunk chunk_;
  std::array<std::vector<Key>, kNumStripes> lost_;
  std::vector<float> counts_;
};

absl::StatusOr<ChangeCursor> EmbeddingTable::Impl::ForEachChange(
    const ChangeFilter& filter, int64_t max_keys,
    const std::function<absl::Status(const ChangeChunk&)>& visit) {
  if (filter.rule.has_value() &&
      config_.statistics.kind != StatisticsKind::kShowClick) {
    return absl::FailedPreconditionError(absl::StrCat(
        "table '", config_.name,
        "' does not count shows and clicks, by which its rows are to be "
        "chosen. Make it with show_click statistics, or export what has "
        "changed without conditions."));
  }
  // CatchUpAll() changes rows. So it comes before the end of the epoch, and the
  // visit includes these changes.
  CatchUpAll();
  const ChangeCursor cursor = EndEpoch();
  ChangeVisit run(this, filter, max_keys, visit);
  if (filter.since.log_id != 0 && (filter.since.log_id != change_log_id_ ||
                                   filter.since.epoch > cursor.epoch)) {
    return run.Unknown("it has been made, restored or moved since then");
  }
  TFSWITCH_RETURN_IF_ERROR(run.Run());
  return cursor;
}

absl::Status EmbeddingTable::Impl::SubtractDeltaScores(
    absl::Span<const Key> keys, absl::Span<const float> scores) {
  for (size_t begin = 0; begin < keys.size(); begin += kMaxKernelKeys) {
    if (cold_ != nullptr) TFSWITCH_RETURN_IF_ERROR(cold_->make_room(*this));
    const ChangeClock::Change change(&change_clock_);
    const absl::Span<const Key> block = keys.subspan(begin, kMaxKernelKeys);
    TFSWITCH_RETURN_IF_ERROR(ReviveAbsent(block, change));
    const auto subtract = [&](const KeyPlace& place, size_t i) {
      if (!place.has_row()) return absl::OkStatus();
      const float score = scores[begin + i];
      ModifyLocked(place, RowRounding(), change.stamp(),
                   [&](const RowFloats& row) {
                     statistics_.SubtractDeltaScore(score, row.statistics);
                   });
      return absl::OkStatus();
    };
    TFSWITCH_RETURN_IF_ERROR(ForEachLocked(block, subtract));
  }
  return absl::OkStatus();
}

}  // namespace tfswitch
