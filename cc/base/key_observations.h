// Observations that a push reports besides the gradients: shows, clicks and
// counts.

#ifndef TFSWITCH_CC_BASE_KEY_OBSERVATIONS_H_
#define TFSWITCH_CC_BASE_KEY_OBSERVATIONS_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "cc/base/hash.h"

namespace tfswitch {

// Stands for the server's own day. Used if a call gives no day.
inline constexpr float kServersDay = -1.0f;

// InvalidArgument, naming the table, unless the day is kServersDay or a number
// of days since 1970 that float32 represents exactly.
absl::Status CheckDay(absl::string_view table, float day);

// Each span is empty, or has one value for each key. If a key is in a push
// several times, these are the sums of its values.
struct KeyObservations {
  absl::Span<const float> counts;  // Occurrences in the batch. Empty: 1 each.
  absl::Span<const float> shows;   // Empty: as the counts.
  absl::Span<const float> clicks;  // Empty: 0 each.

  // The observations of keys [begin, begin + size).
  KeyObservations subspan(size_t begin, size_t size) const {
    const auto part = [&](absl::Span<const float> values) {
      return values.empty() ? values : values.subspan(begin, size);
    };
    return {part(counts), part(shows), part(clicks)};
  }
};

// InvalidArgument, naming the table and the key, unless each span is empty or
// has one finite number >= 0 for each key.
absl::Status CheckObservations(absl::string_view table,
                               absl::Span<const Key> keys,
                               const KeyObservations& observations);

// Observations with their memory.
class OwnedObservations {
 public:
  OwnedObservations() = default;
  // Copies.
  explicit OwnedObservations(const KeyObservations& observations);

  // Sums observations by distinct key. `each` has one observation per
  // occurrence of a key. If it has no counts and `counts_needed` is true, each
  // occurrence counts 1.
  OwnedObservations(absl::Span<const int32_t> inverse, size_t num_unique,
                    const KeyObservations& each, bool counts_needed);

  // The observations of the keys at `places`.
  OwnedObservations(const KeyObservations& all,
                    absl::Span<const int32_t> places);

  // Appends the observations of `num_keys` more keys. If only this object or
  // only `more` has values of a kind (such as shows), the other one gets the
  // values for which an empty span stands.
  void Append(const KeyObservations& more, size_t num_keys);

  KeyObservations view() const { return {counts_, shows_, clicks_}; }

 private:
  size_t num_keys_ = 0;  // The number that Append() counts.
  std::vector<float> counts_;
  std::vector<float> shows_;
  std::vector<float> clicks_;
};

}  // namespace tfswitch

#endif  // TFSWITCH_CC_BASE_KEY_OBSERVATIONS_H_
