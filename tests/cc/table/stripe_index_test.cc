#include "cc/table/stripe_index.h"

#include <algorithm>
#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "cc/base/memory_region.h"
#include "gtest/gtest.h"
#include "tests/cc/table/table_testing.h"

namespace tfswitch {
namespace {

// One index that is given keys one by one.
class Index {
 public:
  explicit Index(const KeyedHash& hash)
      : hash_(hash),
        memory_(
            MemoryReservation::Create(2 * kSpanBytes, 2 * kSpanBytes).value()) {
    EXPECT_TRUE(index_.Init(memory_.Span(0, kSpanBytes),
                            memory_.Span(kSpanBytes, kSpanBytes),
                            /*num_buckets=*/36, /*rows=*/nullptr, &hash_));
  }

  void Insert(Key key) {
    ASSERT_TRUE(index_.Insert(key, PositionOfHash(hash_(key)), num_keys_++));
  }

  // No search looks into more buckets.
  int64_t LongestWalk() const {
    int64_t longest = 0;
    int64_t walk = 1;
    index_.VisitBuckets(0, uint64_t{1} << 32, [&](const Bucket* bucket) {
      walk = HasOverflow(LoadMeta(bucket)) ? walk + 1 : 1;
      longest = std::max(longest, walk);
    });
    return longest;
  }

 private:
  static constexpr size_t kSpanBytes = size_t{256} << 20;

  const KeyedHash hash_;
  const MemoryReservation memory_;
  uint32_t num_keys_ = 0;
  StripeIndex index_;
};

TEST(StripeIndexTest, SearchesAreShortWhateverKeysAreChosen) {
  const std::vector<std::pair<std::string, std::function<Key(uint64_t)>>>
      choices = {
          {"equal high bits", [](uint64_t i) { return KeyOfHash(i); }},
          {"equal low bits", [](uint64_t i) { return KeyOfHash(i << 40); }},
          {"counted", [](uint64_t i) { return static_cast<Key>(i); }},
          {"high bits", [](uint64_t i) { return static_cast<Key>(i << 44); }},
          // After the first step of the hash they differ in 20 bits only.
          {"folded bits",
           [](uint64_t i) { return static_cast<Key>(i << 44 ^ i << 11); }},
      };
  for (const auto& [name, key_of] : choices) {
    for (int draw = 0; draw < 3; ++draw) {
      SCOPED_TRACE(name);
      Index index(KeyedHash::Draw());
      for (uint64_t i = 0; i < 200'000 / kSlowdown; ++i) {
        ASSERT_NO_FATAL_FAILURE(index.Insert(key_of(i)));
        // Early, for all that come after would have to pass them.
        if (i % 10'000 != 1'999) continue;
        ASSERT_LT(index.LongestWalk(), 300);
      }
      ASSERT_LT(index.LongestWalk(), 300);
    }
  }
}

}  // namespace
}  // namespace tfswitch
