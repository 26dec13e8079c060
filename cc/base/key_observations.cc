#include "cc/base/key_observations.h"

#include <cmath>

#include "absl/strings/str_cat.h"

namespace tfswitch {
namespace {

constexpr float kMaxDay = 4194304.0f;  // 2^22

std::vector<float> Gather(absl::Span<const float> values,
                          absl::Span<const int32_t> places) {
  std::vector<float> gathered;
  if (values.empty()) return gathered;
  gathered.reserve(places.size());
  for (const int32_t place : places) gathered.push_back(values[place]);
  return gathered;
}

}  // namespace

absl::Status CheckDay(absl::string_view table, float day) {
  if ((day >= 0.0f && day <= kMaxDay) || day == kServersDay) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(
      absl::StrCat("table '", table, "': day must be a number from 0 to ",
                   kMaxDay, ". Received: ", day));
}

absl::Status CheckObservations(absl::string_view table,
                               absl::Span<const Key> keys,
                               const KeyObservations& observations) {
  const auto check = [&](absl::string_view what,
                         absl::Span<const float> values) -> absl::Status {
    if (values.empty()) return absl::OkStatus();
    if (values.size() != keys.size()) {
      return absl::InvalidArgumentError(absl::StrCat(
          "table '", table, "': expected one of ", what, " for each of ",
          keys.size(), " ids, got ", values.size()));
    }
    for (size_t i = 0; i < values.size(); ++i) {
      if (values[i] >= 0.0f && std::isfinite(values[i])) continue;
      return absl::InvalidArgumentError(
          absl::StrCat("table '", table, "': ", what, " of id ", keys[i],
                       " must be a finite number >= 0, got ", values[i],
                       "; nothing was applied"));
    }
    return absl::OkStatus();
  };
  absl::Status status = check("counts", observations.counts);
  if (status.ok()) status = check("shows", observations.shows);
  if (status.ok()) status = check("clicks", observations.clicks);
  return status;
}

OwnedObservations::OwnedObservations(const KeyObservations& observations)
    : counts_(observations.counts.begin(), observations.counts.end()),
      shows_(observations.shows.begin(), observations.shows.end()),
      clicks_(observations.clicks.begin(), observations.clicks.end()) {}

OwnedObservations::OwnedObservations(absl::Span<const int32_t> inverse,
                                     size_t num_unique,
                                     const KeyObservations& each,
                                     bool counts_needed) {
  const auto sum = [&](absl::Span<const float> values,
                       std::vector<float>* sums) {
    sums->assign(num_unique, 0.0f);
    for (size_t i = 0; i < inverse.size(); ++i) {
      (*sums)[static_cast<size_t>(inverse[i])] +=
          values.empty() ? 1.0f : values[i];
    }
  };
  // If shows are not given, each key's count is also its number of shows.
  if (counts_needed || !each.counts.empty()) sum(each.counts, &counts_);
  if (!each.shows.empty()) sum(each.shows, &shows_);
  if (!each.clicks.empty()) sum(each.clicks, &clicks_);
}

OwnedObservations::OwnedObservations(const KeyObservations& all,
                                     absl::Span<const int32_t> places)
    : counts_(Gather(all.counts, places)),
      shows_(Gather(all.shows, places)),
      clicks_(Gather(all.clicks, places)) {}

void OwnedObservations::Append(const KeyObservations& more, size_t num_keys) {
  // Appends shows before counts. If there are no shows yet, they are copied
  // from the counts, which must not yet include the new keys.
  const auto append = [&](absl::Span<const float> values,
                          absl::Span<const float> instead, float otherwise,
                          std::vector<float>* to,
                          const std::vector<float>& to_instead) {
    if (values.empty() && to->empty()) return;
    if (to->empty()) {
      *to = to_instead;
      to->resize(num_keys_, otherwise);
    }
    if (!values.empty()) {
      to->insert(to->end(), values.begin(), values.end());
    } else if (!instead.empty()) {
      to->insert(to->end(), instead.begin(), instead.end());
    } else {
      to->resize(num_keys_ + num_keys, otherwise);
    }
  };
  append(more.shows, more.counts, 1.0f, &shows_, counts_);
  append(more.counts, {}, 1.0f, &counts_, {});
  append(more.clicks, {}, 0.0f, &clicks_, {});
  num_keys_ += num_keys;
}

}  // namespace tfswitch
