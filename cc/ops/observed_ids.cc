// Find() goes through the gradient's ids from left to right. At each place it
// chooses the longest lookup whose ids come next. Among lookups of equal length
// it chooses the newest one that it has not chosen yet, because the program may
// have computed the gradient of an older lookup without applying it.

#include "cc/ops/observed_ids.h"

#include <algorithm>
#include <utility>

namespace tfswitch {

void ObservedIds::Record(absl::Span<const int64_t> ids, const float* shows,
                         const float* clicks) {
  const bool has_numbers = shows != nullptr || clicks != nullptr;
  // From the first lookup with shows or clicks on, keeps all lookups: some
  // layers of a table may have shows and clicks, and others not.
  if (ids.empty() || (!has_numbers && !is_used_)) return;
  auto lookup = std::make_shared<Lookup>();
  lookup->ids.assign(ids.begin(), ids.end());
  lookup->shows.assign(ids.size(), 1.0f);
  lookup->clicks.assign(ids.size(), 0.0f);
  if (shows != nullptr) std::copy_n(shows, ids.size(), lookup->shows.begin());
  if (clicks != nullptr) {
    std::copy_n(clicks, ids.size(), lookup->clicks.begin());
  }
  MutexLock lock(&mutex_);
  is_used_ = true;
  lookups_.push_front(std::move(lookup));
  if (lookups_.size() > kMaxLookups) lookups_.pop_back();
}

bool ObservedIds::Find(absl::Span<const int64_t> ids, std::vector<float>* shows,
                       std::vector<float>* clicks) const {
  if (!is_used_) return false;
  std::vector<std::shared_ptr<const Lookup>> lookups;
  {
    MutexLock lock(&mutex_);
    lookups.assign(lookups_.begin(), lookups_.end());
  }
  std::vector<bool> is_taken(lookups.size());
  shows->assign(ids.size(), 1.0f);
  clicks->assign(ids.size(), 0.0f);
  for (size_t begin = 0; begin < ids.size();) {
    const absl::Span<const int64_t> rest = ids.subspan(begin);
    size_t best = 0;
    // The rank of a lookup: its length and, among equal lengths, whether it has
    // not been chosen yet.
    std::pair<size_t, bool> best_rank;
    for (size_t i = 0; i < lookups.size(); ++i) {
      const absl::Span<const int64_t> candidate = lookups[i]->ids;
      const std::pair<size_t, bool> rank(candidate.size(), !is_taken[i]);
      if (rank > best_rank && candidate == rest.subspan(0, candidate.size())) {
        best = i;
        best_rank = rank;
      }
    }
    if (best_rank.first == 0) {
      ++begin;
      continue;
    }
    const Lookup& lookup = *lookups[best];
    is_taken[best] = true;
    std::copy(lookup.shows.begin(), lookup.shows.end(), shows->begin() + begin);
    std::copy(lookup.clicks.begin(), lookup.clicks.end(),
              clicks->begin() + begin);
    begin += lookup.ids.size();
  }
  return true;
}

}  // namespace tfswitch
