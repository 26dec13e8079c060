// Keeps shows and clicks of ids from a training lookup to the push of its
// gradient.
//
// A program sees the gradient of a lookup as ids and values, and may change the
// values before an optimizer applies them. Shows and clicks must not change
// with the values. So they are kept here, and the push finds them by its ids.

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

// The last training lookups of one table, if any of them had shows or clicks.
//
// Thread-safe.
class ObservedIds {
 public:
  // How many lookups are kept. A push for an older lookup counts each id as
  // shown once.
  static constexpr size_t kMaxLookups = 64;

  // Keeps a lookup. `shows` and `clicks` have one number for each id. NULL
  // means shown once, and never clicked.
  void Record(absl::Span<const int64_t> ids, const float* shows,
              const float* clicks);

  // Finds the shows and clicks for the ids of a gradient, which are the ids of
  // one lookup or of several lookups one after another. An id that is in no
  // lookup counts as shown once. Returns false, and sets nothing, if no lookup
  // had shows or clicks.
  bool Find(absl::Span<const int64_t> ids, std::vector<float>* shows,
            std::vector<float>* clicks) const;

 private:
  struct Lookup {
    std::vector<int64_t> ids;
    std::vector<float> shows;
    std::vector<float> clicks;
  };

  // False until there are shows or clicks. Until then no call needs the lock.
  std::atomic<bool> is_used_{false};
  mutable Mutex mutex_;
  // The newest lookup is first.
  std::deque<std::shared_ptr<const Lookup>> lookups_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace tfswitch

#endif  // TFSWITCH_CC_OPS_OBSERVED_IDS_H_
