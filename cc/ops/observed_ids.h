// Shows and clicks of ids, from a training lookup to the push of its gradient.
//
// A program sees the gradient of a lookup as ids and values, and may do
// anything to the values before an optimizer applies them. Shows and clicks
// must not change with them, so they stay here and are found by the ids.

#ifndef TFSWITCH_CC_OPS_OBSERVED_IDS_H_
#define TFSWITCH_CC_OPS_OBSERVED_IDS_H_

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/types/span.h"
#include "cc/base/mutex.h"

namespace tfswitch {

// The last lookups of one table that had shows or clicks.
//
// Thread-safe.
class ObservedIds {
 public:
  // Gradients of older lookups count each id as shown once.
  static constexpr size_t kMaxLookups = 64;

  // Remembers a lookup. `shows` and `clicks` are NULL, which means once and
  // never, or have one number for each id.
  void Record(absl::Span<const int64_t> ids, const float* shows,
              const float* clicks);

  // The numbers of the ids of a gradient: the ids of one lookup, or those of
  // several one after the other. An id that is in no lookup counts as shown
  // once. False, and nothing is set, if no lookup had shows or clicks.
  bool Find(absl::Span<const int64_t> ids, std::vector<float>* shows,
            std::vector<float>* clicks) const;

 private:
  struct Lookup {
    std::vector<int64_t> ids;
    std::vector<float> shows;
    std::vector<float> clicks;
  };

  // Tables without shows and clicks pay for a load.
  std::atomic<bool> is_used_{false};
  mutable Mutex mutex_;
  // The newest first.
  std::deque<std::shared_ptr<const Lookup>> lookups_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace tfswitch

#endif  // TFSWITCH_CC_OPS_OBSERVED_IDS_H_
