#include "cc/wire/coordination_conversion.h"

#include <cstdint>
#include <limits>

#include "gtest/gtest.h"

namespace tfswitch {
namespace {

TEST(RoundConversionTest, EveryFieldComesBackEqual) {
  Round round;
  round.number = std::numeric_limits<int64_t>::max();
  round.contributions = {
      {0, 1, 0, 0.0}, {3, std::numeric_limits<uint64_t>::max(), -1, 1.0 / 3.0}};
  round.total_weight = 1e300;
  round.group_instance = std::numeric_limits<uint64_t>::max() - 1;
  round.active = {1, std::numeric_limits<uint64_t>::max()};
  round.next_incarnation = 7;

  const Round back = FromProto(ToProto(round));

  EXPECT_EQ(back.number, round.number);
  EXPECT_EQ(back.contributions, round.contributions);
  EXPECT_EQ(back.total_weight, round.total_weight);
  EXPECT_EQ(back.group_instance, round.group_instance);
  EXPECT_EQ(back.active, round.active);
  EXPECT_EQ(back.next_incarnation, round.next_incarnation);
}

}  // namespace
}  // namespace tfswitch
