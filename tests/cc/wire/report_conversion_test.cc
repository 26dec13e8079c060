#include "cc/wire/report_conversion.h"

#include "gtest/gtest.h"

namespace tfswitch {
namespace {

TEST(ReportConversionTest, TableInfoComesBackEqual) {
  TableInfo info;
  info.config.name = "user";
  info.config.dim = 16;
  info.stats = TableStats{1, 2, 3, 4, 5, 6, 7, 8, 9, 10};
  info.slot_floats = 32;

  const TableInfo back = FromProto(ToProto(info));

  EXPECT_EQ(back.config, info.config);
  EXPECT_EQ(back.slot_floats, 32);
  EXPECT_EQ(back.stats.num_rows, 1);
  EXPECT_EQ(back.stats.index_bytes, 2);
  EXPECT_EQ(back.stats.row_bytes, 3);
  EXPECT_EQ(back.stats.reserved_bytes, 4);
  EXPECT_EQ(back.stats.row_stride_bytes, 5);
  EXPECT_EQ(back.stats.inserted_rows, 6);
  EXPECT_EQ(back.stats.erased_rows, 7);
  EXPECT_EQ(back.stats.num_candidates, 8);
  EXPECT_EQ(back.stats.admission_bytes, 9);
  EXPECT_EQ(back.stats.change_bytes, 10);
}

}  // namespace
}  // namespace tfswitch
