// Counters that many threads increment at the same time.

#ifndef TFSWITCH_CC_BASE_STRIPED_COUNTERS_H_
#define TFSWITCH_CC_BASE_STRIPED_COUNTERS_H_

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

namespace tfswitch {

// Returns the stripe of this thread. Threads get the stripes in turn.
inline size_t ThreadStripe() {
  static std::atomic<size_t> next{0};
  thread_local const size_t mine = next.fetch_add(1, std::memory_order_relaxed);
  return mine;
}

// `kSize` counters, which begin with 0. Each thread adds to one of kStripes
// copies, so threads seldom write to the same cache line. A reader adds up the
// copies.
//
// Thread-safe.
template <size_t kSize>
class StripedCounters {
 public:
  void Add(size_t counter, uint64_t value) {
    stripes_[ThreadStripe() % kStripes].values[counter].fetch_add(
        value, std::memory_order_relaxed);
  }

  uint64_t Sum(size_t counter) const {
    uint64_t sum = 0;
    for (const Stripe& stripe : stripes_) {
      sum += stripe.values[counter].load(std::memory_order_relaxed);
    }
    return sum;
  }

 private:
  static constexpr size_t kStripes = 8;
  static constexpr size_t kCacheLineBytes = 64;

  struct alignas(kCacheLineBytes) Stripe {
    std::array<std::atomic<uint64_t>, kSize> values = {};
  };
  std::array<Stripe, kStripes> stripes_;
};

}  // namespace tfswitch

#endif  // TFSWITCH_CC_BASE_STRIPED_COUNTERS_H_
