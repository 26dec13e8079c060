#include "cc/base/key_observations.h"

#include <limits>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tfswitch {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

TEST(KeyObservationsTest, SumsByKeyAndMakesTheCountsThatAreNeeded) {
  const std::vector<int32_t> inverse = {0, 1, 0, 2};
  const std::vector<float> shows = {1.0f, 2.0f, 4.0f, 8.0f};
  const OwnedObservations sums(inverse, 3, {{}, shows, {}}, true);
  EXPECT_THAT(sums.view().counts, ElementsAre(2.0f, 1.0f, 1.0f));
  EXPECT_THAT(sums.view().shows, ElementsAre(5.0f, 2.0f, 8.0f));
  EXPECT_THAT(sums.view().clicks, IsEmpty());

  const OwnedObservations none(inverse, 3, {}, false);
  EXPECT_THAT(none.view().counts, IsEmpty());
  const OwnedObservations counted(inverse, 3, {shows, {}, {}}, false);
  EXPECT_THAT(counted.view().counts, ElementsAre(5.0f, 2.0f, 8.0f));
}

TEST(KeyObservationsTest, WhatOneSideDoesNotSayMeansWhatItMeansAlone) {
  const std::vector<float> counts = {2.0f, 3.0f};
  const std::vector<float> shows = {5.0f};
  const std::vector<float> clicks = {7.0f};
  OwnedObservations all;
  all.Append({}, 1);                // One of each, shown once.
  all.Append({counts, {}, {}}, 2);  // Shown as often as counted.
  all.Append({{}, shows, {}}, 1);   // One.
  all.Append({{}, {}, clicks}, 1);
  EXPECT_THAT(all.view().counts, ElementsAre(1, 2, 3, 1, 1));
  EXPECT_THAT(all.view().shows, ElementsAre(1, 2, 3, 5, 1));
  EXPECT_THAT(all.view().clicks, ElementsAre(0, 0, 0, 0, 7));
  OwnedObservations nothing;
  nothing.Append({}, 3);
  EXPECT_THAT(nothing.view().counts, IsEmpty());
}

TEST(KeyObservationsTest, PartsAndChoicesKeepTheirKeys) {
  const std::vector<float> counts = {1.0f, 2.0f, 3.0f};
  const KeyObservations all = {counts, {}, {}};
  EXPECT_THAT(all.subspan(1, 2).counts, ElementsAre(2.0f, 3.0f));
  EXPECT_THAT(all.subspan(1, 2).shows, IsEmpty());
  const std::vector<int32_t> places = {2, 0};
  EXPECT_THAT(OwnedObservations(all, places).view().counts,
              ElementsAre(3.0f, 1.0f));
}

TEST(KeyObservationsTest, WhatNoCountCanBeIsNamed) {
  const std::vector<Key> keys = {11, 12};
  for (const float bad : {-1.0f, std::numeric_limits<float>::quiet_NaN(),
                          std::numeric_limits<float>::infinity()}) {
    const std::vector<float> values = {0.0f, bad};
    const absl::Status status =
        CheckObservations("user", keys, {{}, {}, values});
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(status.message(), HasSubstr("'user': clicks of id 12"));
  }
  const std::vector<float> one = {1.0f};
  EXPECT_THAT(CheckObservations("user", keys, {one, {}, {}}).message(),
              HasSubstr("one of counts for each of 2 ids, got 1"));
  EXPECT_TRUE(CheckObservations("user", keys, {}).ok());
}

}  // namespace
}  // namespace tfswitch
