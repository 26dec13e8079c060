#include "cc/table/table_config.h"

#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tfswitch {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

TableConfig ValidConfig() {
  TableConfig config;
  config.name = "user";
  config.dim = 16;
  return config;
}

std::string ValidateError(const TableConfig& config) {
  const absl::Status status = config.Validate();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  return std::string(status.message());
}

const ConsistencyConfig kConsistencies[] = {
    {ConsistencyKind::kAsp, 0, Reduction::kMean},
    {ConsistencyKind::kSsp, 0, Reduction::kMean},
    {ConsistencyKind::kSsp, 4294967295u, Reduction::kMean},
    {ConsistencyKind::kBsp, 0, Reduction::kMean},
    {ConsistencyKind::kBsp, 0, Reduction::kSum}};

TEST(TableConfigTest, ConsistenciesHaveNames) {
  std::vector<std::string> names;
  for (const ConsistencyConfig& consistency : kConsistencies) {
    names.push_back(consistency.ToString());
  }
  EXPECT_THAT(names, testing::ElementsAre("asp", "ssp(0)", "ssp(4294967295)",
                                          "bsp(mean)", "bsp(sum)"));
}

TEST(TableConfigTest, StorageDtypesHaveNames) {
  EXPECT_EQ((StorageDtypeConfig{FloatType::kBfloat16, FloatType::kFloat16,
                                Rounding::kNearest})
                .ToString(),
            "bfloat16 embeddings, float16 slots, nearest rounding");
}

TEST(TableConfigTest, DenseTablesHaveFloat32Rows) {
  TableConfig config;
  config.name = "a";
  config.dim = 2;
  config.storage_dtype.slots = FloatType::kFloat16;
  EXPECT_TRUE(config.Validate().ok());
  config.layout = "w:2";
  EXPECT_THAT(std::string(config.Validate().message()),
              AllOf(HasSubstr("storage_dtype"), HasSubstr("dense table")));
}

TEST(TableConfigTest, ValidateNamesTableFieldValueAndRange) {
  TableConfig config = ValidConfig();
  EXPECT_TRUE(config.Validate().ok());

  config.dim = 4097;
  EXPECT_EQ(ValidateError(config),
            "table 'user': dim: expected an integer from 1 to 4096, got 4097");
  config.dim = 0;
  EXPECT_THAT(ValidateError(config), HasSubstr("got 0"));

  config = ValidConfig();
  config.name = "";
  EXPECT_THAT(ValidateError(config), HasSubstr("1 to 256 characters"));
  config.name = std::string(257, 'x');
  EXPECT_THAT(ValidateError(config), HasSubstr("got 257"));
  // Three bytes of a file's name for each byte.
  config.name = std::string(74, '\xc3');
  EXPECT_TRUE(config.Validate().ok());
  EXPECT_THAT(std::string(config.ValidateNew().message()),
              HasSubstr("got 222"));
  config.name = "a\nb";
  EXPECT_THAT(ValidateError(config), HasSubstr("control characters"));

  config = ValidConfig();
  for (const uint32_t bad : {0u, 3u, 1000u, 131072u}) {
    config.num_virtual_shards = bad;
    EXPECT_THAT(ValidateError(config), HasSubstr("num_virtual_shards"));
  }

  config = ValidConfig();
  config.layout = std::string(65537, 'x');
  EXPECT_EQ(ValidateError(config),
            "table 'user': layout: expected at most 65536 characters, got "
            "65537");
}

TEST(TableConfigTest, ValidateChecksOptimizerAndInitializer) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const float infinity = std::numeric_limits<float>::infinity();
  for (const OptimizerConfig& bad : std::vector<OptimizerConfig>{
           SgdConfig{-0.1f, false}, SgdConfig{nan, false},
           AdagradConfig{-1.0f, 1e-7f}, AdagradConfig{0.1f, nan},
           AdamConfig{1.0f, 0.999f, 1e-7f}, AdamConfig{0.9f, -0.1f, 1e-7f},
           AdamConfig{0.9f, 0.999f, infinity},
           AdamWConfig{-0.1f, 0.9f, 0.999f, 1e-7f},
           AdamWConfig{nan, 0.9f, 0.999f, 1e-7f},
           AdamWConfig{0.0f, 1.0f, 0.999f, 1e-7f}}) {
    TableConfig config = ValidConfig();
    config.optimizer = bad;
    EXPECT_THAT(ValidateError(config), AllOf(HasSubstr("table 'user'"),
                                             HasSubstr(OptimizerName(bad))));
  }
  for (const InitializerConfig& bad : std::vector<InitializerConfig>{
           ConstantInitializer{nan}, UniformInitializer{1.0f, 0.0f},
           UniformInitializer{-infinity, 0.0f}, NormalInitializer{0.0f, -1.0f},
           NormalInitializer{nan, 1.0f},
           TruncatedNormalInitializer{0.0f, infinity}}) {
    TableConfig config = ValidConfig();
    config.initializer = bad;
    EXPECT_THAT(ValidateError(config),
                AllOf(HasSubstr("table 'user'"), HasSubstr("initializer.")));
  }
}

}  // namespace
}  // namespace tfswitch
