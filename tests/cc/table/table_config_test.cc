#include "cc/table/table_config.h"

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/cc/table/odd_optimizers.h"
#include "tests/cc/table/row_lives.h"

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

TableConfig Parse(const std::string& json) {
  TableConfig config;
  const absl::Status status = TableConfigFromJson(json, &config);
  EXPECT_TRUE(status.ok()) << status;
  return config;
}

std::string ParseError(const std::string& json) {
  TableConfig config = ValidConfig();
  const absl::Status status = TableConfigFromJson(json, &config);
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << json;
  EXPECT_EQ(config, ValidConfig()) << "changed in spite of the error";
  return std::string(status.message());
}

std::string ValidateError(const TableConfig& config) {
  const absl::Status status = config.Validate();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  return std::string(status.message());
}

TEST(TableConfigTest, JsonReadsAsDocumented) {
  const TableConfig config = Parse(
      R"({"name":"user","dim":16,
          "optimizer":{"adagrad":{"initial_accumulator_value":0.1,
                                  "epsilon":1e-7}},
          "initializer":{"uniform":{"minval":-0.05,"maxval":0.05}},
          "seed":0,"num_virtual_shards":1024})");

  TableConfig expected = ValidConfig();
  expected.optimizer = AdagradConfig{0.1f, 1e-7f};
  EXPECT_EQ(config, expected);
  EXPECT_EQ(TableConfigToJson(expected),
            R"({"name":"user","dim":16,"optimizer":{"adagrad":)"
            R"({"initial_accumulator_value":0.1,"epsilon":1e-07}},)"
            R"("initializer":{"uniform":{"minval":-0.05,"maxval":0.05}},)"
            R"("seed":0,"num_virtual_shards":1024})");
}

TEST(TableConfigTest, UnsetFieldsTakeTheDefaults) {
  EXPECT_EQ(Parse(R"({"name":"user","dim":16})"), ValidConfig());
  EXPECT_EQ(Parse(R"({"name":"user","dim":16,"num_virtual_shards":0,
                      "optimizer":{},"initializer":{}})"),
            ValidConfig());
  TableConfig adam = ValidConfig();
  adam.optimizer = AdamConfig{0.5f, 0.999f, 1e-7f};
  EXPECT_EQ(Parse(R"({"name":"user","dim":16,
                      "optimizer":{"adam":{"beta_1":0.5}}})"),
            adam);
  TableConfig adamw = ValidConfig();
  adamw.optimizer = AdamWConfig{0.5f, 0.9f, 0.999f, 1e-7f};
  EXPECT_EQ(Parse(R"({"name":"user","dim":16,
                      "optimizer":{"adamw":{"weight_decay":0.5}}})"),
            adamw);
}

const ConsistencyConfig kConsistencies[] = {
    {ConsistencyKind::kAsp, 0, Reduction::kMean},
    {ConsistencyKind::kSsp, 0, Reduction::kMean},
    {ConsistencyKind::kSsp, 4294967295u, Reduction::kMean},
    {ConsistencyKind::kBsp, 0, Reduction::kMean},
    {ConsistencyKind::kBsp, 0, Reduction::kSum}};

TEST(TableConfigTest, ConsistencyAndLayoutReadAsDocumented) {
  TableConfig config = ValidConfig();
  config.consistency = {ConsistencyKind::kSsp, 3, Reduction::kMean};
  const std::string head = R"({"name":"user","dim":16,)";
  EXPECT_EQ(Parse(head + R"("consistency":{"ssp":{"staleness":3}}})"), config);
  EXPECT_THAT(TableConfigToJson(config),
              HasSubstr(R"("consistency":{"ssp":{"staleness":3}}})"));
  config.consistency = {ConsistencyKind::kBsp, 0, Reduction::kSum};
  config.layout = "kernel:0 [3,4]";
  EXPECT_EQ(Parse(head + R"("consistency":{"bsp":{"reduction":"SUM"}},
                            "layout":"kernel:0 [3,4]"})"),
            config);
  EXPECT_THAT(TableConfigToJson(config),
              HasSubstr(R"("consistency":{"bsp":{"reduction":"SUM"}},)"
                        R"("layout":"kernel:0 [3,4]"})"));
  // Mean and asp are what is meant if nothing is said.
  config = ValidConfig();
  EXPECT_EQ(Parse(head + R"("consistency":{}})"), config);
  EXPECT_EQ(Parse(head + R"("consistency":{"asp":{}}})"), config);
  config.consistency.kind = ConsistencyKind::kBsp;
  EXPECT_EQ(Parse(head + R"("consistency":{"bsp":{}}})"), config);
}

TEST(TableConfigTest, ConsistencyAndLayoutSurviveTheRoundTrip) {
  for (const ConsistencyConfig& consistency : kConsistencies) {
    for (const std::string& layout :
         {std::string(), std::string("a \"b\" \n \xc3\xa4"),
          std::string(65536, 'x')}) {
      TableConfig config = ValidConfig();
      config.consistency = consistency;
      config.layout = layout;
      EXPECT_TRUE(config.Validate().ok());
      EXPECT_EQ(Parse(TableConfigToJson(config)), config)
          << consistency.ToString();
    }
  }
}

TEST(TableConfigTest, ConsistenciesHaveNamesAndReadByThemselves) {
  std::vector<std::string> names;
  for (const ConsistencyConfig& consistency : kConsistencies) {
    names.push_back(consistency.ToString());
  }
  EXPECT_THAT(names, testing::ElementsAre("asp", "ssp(0)", "ssp(4294967295)",
                                          "bsp(mean)", "bsp(sum)"));

  ConsistencyConfig config;
  ASSERT_TRUE(ConsistencyFromJson(R"({"ssp":{"staleness":7}})", &config).ok());
  EXPECT_EQ(config.ToString(), "ssp(7)");
  EXPECT_THAT(std::string(ConsistencyFromJson("{", &config).message()),
              AllOf(HasSubstr("consistency"), HasSubstr("expected JSON")));
  EXPECT_EQ(config.ToString(), "ssp(7)") << "changed in spite of the error";
}

TEST(TableConfigTest, RoundTripKeepsEveryField) {
  const std::vector<OptimizerConfig> optimizers = {
      SgdConfig{}, SgdConfig{0.9f, true}, AdagradConfig{0.3f, 1e-10f},
      AdamConfig{0.8f, 0.99f, 1.17549435e-38f},
      AdamWConfig{0.1f, 0.8f, 0.99f, 1e-6f}};
  const std::vector<InitializerConfig> initializers = {
      ConstantInitializer{-1.5f}, UniformInitializer{-1.0f / 3.0f, 2.0f / 3.0f},
      NormalInitializer{0.1f, 0.2f},
      TruncatedNormalInitializer{-3.0f, std::nextafter(1.0f, 2.0f)},
      GlorotUniformInitializer{}};
  for (const OptimizerConfig& optimizer : optimizers) {
    for (const InitializerConfig& initializer : initializers) {
      TableConfig config;
      config.name = "a \"quoted\" \\ n\xc3\xa4me";
      config.dim = 4096;
      config.optimizer = optimizer;
      config.initializer = initializer;
      config.seed = std::numeric_limits<uint64_t>::max() - 1;
      config.num_virtual_shards = 65536;

      EXPECT_EQ(Parse(TableConfigToJson(config)), config)
          << TableConfigToJson(config);
    }
  }
}

TEST(TableConfigTest, RoundTripKeepsEveryOptimizer) {
  for (const OptimizerConfig& optimizer : OddOptimizers()) {
    TableConfig config = ValidConfig();
    config.optimizer = optimizer;
    EXPECT_TRUE(config.Validate().ok()) << config.Validate();
    EXPECT_EQ(Parse(TableConfigToJson(config)), config)
        << TableConfigToJson(config);
  }
}

TEST(TableConfigTest, RoundTripKeepsTheLifeOfRows) {
  for (const TableConfig& config : RowLives(ValidConfig())) {
    EXPECT_TRUE(config.Validate().ok()) << config.Validate();
    EXPECT_EQ(Parse(TableConfigToJson(config)), config)
        << TableConfigToJson(config);
  }
}

TEST(TableConfigTest, EvictionRulesReadByThemselvesAndTheirErrorsSaySo) {
  EvictionConfig config;
  ASSERT_TRUE(EvictionFromJson(R"({"max_rows":{"max_rows":"7","order":"LFU"}})",
                               &config)
                  .ok());
  EXPECT_EQ(config.max_rows, 7u);
  EXPECT_EQ(config.order, EvictionOrder::kLfu);
  const auto error = [](const char* json) {
    EvictionConfig unused;
    const absl::Status status = EvictionFromJson(json, &unused);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << json;
    return std::string(status.message());
  };
  EXPECT_EQ(error("3"),
            "eviction rules: 'eviction': expected an object, got 3");
  EXPECT_EQ(error(R"({"ttl":{"delete_after_unseen_days":"3"}})"),
            "eviction rules: 'eviction.ttl.delete_after_unseen_days': expected "
            "a number, got \"3\"");
  EXPECT_EQ(error(R"({"ttl":{"days":3}})"),
            "eviction rules: unknown field 'eviction.ttl.days'; expected one "
            "of: delete_after_unseen_days");
  EXPECT_EQ(error(R"({"max_rows":{"order":"FIFO"}})"),
            "eviction rules: 'eviction.max_rows.order': expected LRU or LFU, "
            "got \"FIFO\"");
}

TEST(TableConfigTest, OptionsAndSegmentsHaveTheFormOfTheProto) {
  TableConfig config = ValidConfig();
  StepOptions options;
  options.l2 = 0.5f;
  options.min_weight = -1.0f;
  config.optimizer = {AdagradConfig{}, options};
  EXPECT_THAT(TableConfigToJson(config),
              HasSubstr(R"("optimizer":{"adagrad":{)"
                        R"("initial_accumulator_value":0.1,"epsilon":1e-07},)"
                        R"("options":{"l2":0.5,"min_weight":-1.0}})"));

  config.optimizer = OptimizerConfig(std::vector<SegmentConfig>{
      {1, 0.5f, SgdConfig{}, options}, {0, 1.0f, LionConfig{}, {}}});
  EXPECT_THAT(
      TableConfigToJson(config),
      HasSubstr(R"("optimizer":{"segments":[{"dim":1,)"
                R"("learning_rate_scale":0.5,"optimizer":{"sgd":{)"
                R"("momentum":0.0,"nesterov":false},)"
                R"("options":{"l2":0.5,"min_weight":-1.0}}},)"
                R"({"dim":0,"learning_rate_scale":1.0,)"
                R"("optimizer":{"lion":{"beta_1":0.9,"beta_2":0.99}}}]})"));
  const std::string head = R"({"name":"user","dim":16,"optimizer":)";
  config.optimizer = OptimizerConfig(std::vector<SegmentConfig>{
      {4, 1.0f, SgdConfig{}, {}}, {0, 1.0f, AdamConfig{}, {}}});
  EXPECT_EQ(Parse(head + R"({"segments":[{"dim":4},
                                         {"optimizer":{"adam":{}}}]}})"),
            config);
}

TEST(TableConfigTest, JsonErrorsNameTheFieldOfOptionsAndSegments) {
  const auto error = [](const std::string& optimizer) {
    return ParseError(absl::StrCat(R"({"optimizer":)", optimizer, "}"));
  };
  EXPECT_THAT(error(R"({"adam":{},"options":{"l3":1}})"),
              HasSubstr("'optimizer.options.l3'"));
  EXPECT_THAT(error(R"({"options":{"l2":"1"}})"),
              HasSubstr("'optimizer.options.l2'"));
  EXPECT_THAT(error(R"({"adagrad_decay":{"decay_step":-1}})"),
              HasSubstr("'optimizer.adagrad_decay.decay_step'"));
  EXPECT_THAT(error(R"({"segments":[]})"), HasSubstr("'optimizer.segments'"));
  EXPECT_THAT(error(R"({"segments":{}})"), HasSubstr("'optimizer.segments'"));
  EXPECT_THAT(error(R"({"adam":{},"segments":[{"dim":1}]})"),
              HasSubstr("nothing beside it"));
  EXPECT_THAT(error(R"({"segments":[{"dim":1},{"dims":1}]})"),
              HasSubstr("'optimizer.segments[1].dims'"));
  EXPECT_THAT(error(R"({"segments":[{"optimizer":{"lion":{"beta":1}}}]})"),
              HasSubstr("'optimizer.segments[0].optimizer.lion.beta'"));
  EXPECT_THAT(error(R"({"segments":[{"optimizer":{"segments":[{}]}}]})"),
              HasSubstr("'optimizer.segments[0].optimizer.segments'"));
}

TEST(TableConfigTest, RowTypesReadAsDocumentedAndSurviveTheRoundTrip) {
  TableConfig config;
  ASSERT_TRUE(TableConfigFromJson(R"({"name": "a", "dim": 2, "row_type":
                  {"embeddings": "BFLOAT16", "slots": "FLOAT16",
                   "rounding": "NEAREST"}})",
                                  &config)
                  .ok());
  EXPECT_EQ(config.row_type,
            (RowTypeConfig{FloatType::kBfloat16, FloatType::kFloat16,
                           Rounding::kNearest}));
  EXPECT_EQ(config.row_type.ToString(),
            "bfloat16 embeddings, float16 slots, nearest rounding");
  TableConfig back;
  ASSERT_TRUE(TableConfigFromJson(TableConfigToJson(config), &back).ok());
  EXPECT_EQ(back, config) << DescribeDifference(config, back);

  const absl::Status status = TableConfigFromJson(
      R"({"name": "a", "dim": 2, "row_type": {"slots": "INT8"}})", &config);
  EXPECT_THAT(std::string(status.message()),
              AllOf(HasSubstr("row_type.slots"), HasSubstr("BFLOAT16"),
                    HasSubstr("INT8")));
}

TEST(TableConfigTest, DenseTablesHaveFloat32Rows) {
  TableConfig config;
  config.name = "a";
  config.dim = 2;
  config.row_type.slots = FloatType::kFloat16;
  EXPECT_TRUE(config.Validate().ok());
  config.layout = "w:2";
  EXPECT_THAT(std::string(config.Validate().message()),
              AllOf(HasSubstr("row_type"), HasSubstr("dense table")));
}

TEST(TableConfigTest, FloatsRoundTripExactly) {
  for (uint32_t i = 0; i < 20000; ++i) {
    const uint32_t bits = i * 107374u + 13u;  // Spread over positive floats.
    float value;
    std::memcpy(&value, &bits, sizeof(value));
    if (!std::isfinite(value)) continue;
    TableConfig config = ValidConfig();
    config.initializer = ConstantInitializer{value};
    ASSERT_EQ(Parse(TableConfigToJson(config)), config) << value;
  }
}

TEST(TableConfigTest, SeedMayBeAStringAsInProtobufsJson) {
  EXPECT_EQ(
      Parse(R"({"name":"user","dim":16,"seed":"18446744073709551615"})").seed,
      std::numeric_limits<uint64_t>::max());
}

TEST(TableConfigTest, JsonErrorsNameTheField) {
  EXPECT_THAT(ParseError("{"), HasSubstr("expected JSON"));
  EXPECT_THAT(ParseError(R"({"name":)" + std::string(200'000, '[') +
                         std::string(200'000, ']') + "}"),
              AllOf(HasSubstr("table config"), HasSubstr("inside each other")));
  EXPECT_THAT(ParseError("[]"), HasSubstr("expected an object"));
  EXPECT_THAT(ParseError(R"({"dimm":3})"),
              AllOf(HasSubstr("unknown field 'dimm'"), HasSubstr("dim, ")));
  EXPECT_THAT(ParseError(R"({"dim":"x"})"), HasSubstr("'dim'"));
  EXPECT_THAT(ParseError(R"({"dim":-1})"), HasSubstr("'dim'"));
  EXPECT_THAT(ParseError(R"({"dim":1.5})"), HasSubstr("'dim'"));
  EXPECT_THAT(ParseError(R"({"dim":4294967312})"), HasSubstr("'dim'"));
  EXPECT_THAT(ParseError(R"({"name":3})"), HasSubstr("'name'"));
  EXPECT_THAT(ParseError(R"({"seed":-1})"), HasSubstr("'seed'"));
  EXPECT_THAT(ParseError(R"({"seed":18446744073709551616})"),
              HasSubstr("'seed'"));
  EXPECT_THAT(ParseError(R"({"optimizer":"adam"})"), HasSubstr("'optimizer'"));
  EXPECT_THAT(ParseError(R"({"optimizer":{"adamm":{}}})"),
              HasSubstr("'optimizer.adamm'"));
  EXPECT_THAT(ParseError(R"({"optimizer":{"adam":{"beta":1}}})"),
              HasSubstr("'optimizer.adam.beta'"));
  EXPECT_THAT(ParseError(R"({"optimizer":{"adam":{"beta_1":"1"}}})"),
              HasSubstr("'optimizer.adam.beta_1'"));
  EXPECT_THAT(ParseError(R"({"optimizer":{"sgd":{"nesterov":1}}})"),
              HasSubstr("'optimizer.sgd.nesterov'"));
  EXPECT_THAT(ParseError(R"({"optimizer":{"sgd":{"momentum":1e39}}})"),
              HasSubstr("float32"));
  EXPECT_THAT(ParseError(R"({"optimizer":{"sgd":{},"adam":{}}})"),
              AllOf(HasSubstr("'optimizer'"), HasSubstr("one kind"),
                    HasSubstr("adam, sgd")));
  EXPECT_THAT(ParseError(R"({"initializer":{"normal":{},"constant":{}}})"),
              AllOf(HasSubstr("'initializer'"), HasSubstr("one kind")));
  EXPECT_THAT(ParseError(R"({"initializer":{"normal":{"sigma":1}}})"),
              HasSubstr("'initializer.normal.sigma'"));
  EXPECT_THAT(ParseError(R"({"optimizer":{"adamw":{"decay":1}}})"),
              HasSubstr("'optimizer.adamw.decay'"));
  EXPECT_THAT(ParseError(R"({"consistency":"bsp"})"),
              HasSubstr("'consistency'"));
  EXPECT_THAT(ParseError(R"({"consistency":{"bsp2":{}}})"),
              HasSubstr("'consistency.bsp2'"));
  EXPECT_THAT(ParseError(R"({"consistency":{"asp":{"staleness":1}}})"),
              HasSubstr("'consistency.asp.staleness'"));
  EXPECT_THAT(ParseError(R"({"consistency":{"asp":{},"bsp":{}}})"),
              AllOf(HasSubstr("'consistency'"), HasSubstr("one kind")));
  for (const char* bad : {"-1", "1.5", "4294967296", "true"}) {
    EXPECT_THAT(ParseError(absl::StrCat(
                    R"({"consistency":{"ssp":{"staleness":)", bad, "}}}")),
                HasSubstr("'consistency.ssp.staleness'"));
  }
  EXPECT_THAT(ParseError(R"({"consistency":{"bsp":{"reduction":"mean"}}})"),
              AllOf(HasSubstr("'consistency.bsp.reduction'"), HasSubstr("SUM"),
                    HasSubstr("mean")));
  EXPECT_THAT(ParseError(R"({"consistency":{"bsp":{"reduction":1}}})"),
              HasSubstr("'consistency.bsp.reduction'"));
  EXPECT_THAT(ParseError(R"({"layout":3})"), HasSubstr("'layout'"));
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

TEST(TableConfigTest, DescribeDifferenceListsEachDifferingField) {
  const TableConfig here = ValidConfig();
  TableConfig asked = here;
  EXPECT_EQ(DescribeDifference(here, asked), "");

  asked.dim = 8;
  EXPECT_EQ(DescribeDifference(here, asked), "dim (16 here, 8 asked)");
  asked.seed = 3;
  asked.optimizer = AdagradConfig{};
  asked.initializer = GlorotUniformInitializer{};
  EXPECT_THAT(DescribeDifference(here, asked),
              AllOf(HasSubstr("dim (16 here, 8 asked), optimizer ("),
                    HasSubstr("adagrad"), HasSubstr("glorot_uniform"),
                    HasSubstr("seed (0 here, 3 asked)")));

  asked = here;
  asked.consistency.kind = ConsistencyKind::kBsp;
  asked.layout = "kernel";
  EXPECT_EQ(DescribeDifference(here, asked),
            "consistency (asp here, bsp(mean) asked), "
            "layout ('' here, 'kernel' asked)");
}

}  // namespace
}  // namespace tfswitch
