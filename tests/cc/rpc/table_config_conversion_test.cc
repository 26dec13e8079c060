#include "cc/rpc/table_config_conversion.h"

#include <vector>

#include "gtest/gtest.h"
#include "tests/cc/table/odd_optimizers.h"
#include "tests/cc/table/row_lives.h"

namespace tfswitch {
namespace {

TableConfig Base() {
  TableConfig config;
  config.name = "user";
  config.dim = 16;
  config.seed = 0xfedcba9876543210u;
  config.num_virtual_shards = 64;
  return config;
}

TEST(TableConfigConversionTest, EveryConfigComesBackEqual) {
  const std::vector<OptimizerConfig> optimizers = {
      SgdConfig{}, SgdConfig{0.9f, true}, AdagradConfig{0.0f, 1e-3f},
      AdamConfig{0.5f, 0.0f, 1e-4f}, AdamWConfig{0.0f, 0.5f, 0.25f, 1e-4f}};
  const std::vector<InitializerConfig> initializers = {
      ConstantInitializer{0.0f},
      ConstantInitializer{2.5f},
      UniformInitializer{-1.0f, 0.0f},
      NormalInitializer{0.5f, 0.0f},
      TruncatedNormalInitializer{0.0f, 0.25f},
      GlorotUniformInitializer{}};
  for (const OptimizerConfig& optimizer : optimizers) {
    for (const InitializerConfig& initializer : initializers) {
      TableConfig config = Base();
      config.optimizer = optimizer;
      config.initializer = initializer;
      const TableConfig back = FromProto(ToProto(config));
      EXPECT_EQ(back, config) << DescribeDifference(config, back);
    }
  }
}

TEST(TableConfigConversionTest, EveryOptimizerComesBackEqual) {
  for (const OptimizerConfig& optimizer : OddOptimizers()) {
    TableConfig config = Base();
    config.optimizer = optimizer;
    const TableConfig back = FromProto(ToProto(config));
    EXPECT_EQ(back, config) << DescribeDifference(config, back);
  }
}

TEST(TableConfigConversionTest, UnsetOptimizersHaveTheDefaultsOfTheStructs) {
  ForEachKind<RuleConfig>([](const auto& rule) {
    v1::TableConfig proto = ToProto(Base());
    proto.clear_optimizer();
    const auto* field =
        proto.optimizer().GetDescriptor()->FindFieldByName(rule.kName);
    ASSERT_NE(field, nullptr) << rule.kName;
    v1::OptimizerConfig* optimizer = proto.mutable_optimizer();
    optimizer->GetReflection()->MutableMessage(optimizer, field);
    EXPECT_EQ(FromProto(proto).optimizer, OptimizerConfig(rule)) << rule.kName;
  });
}

TEST(TableConfigConversionTest, SegmentsAndARuleTogetherAreRefused) {
  v1::TableConfig proto = ToProto(Base());
  proto.mutable_optimizer()->add_segments();
  EXPECT_FALSE(FromProto(proto).Validate().ok());
  proto.mutable_optimizer()->clear_sgd();
  EXPECT_TRUE(FromProto(proto).Validate().ok());
  proto.mutable_optimizer()->mutable_options();
  EXPECT_FALSE(FromProto(proto).Validate().ok());
  proto.mutable_optimizer()->clear_options();
  proto.mutable_optimizer()
      ->mutable_segments(0)
      ->mutable_optimizer()
      ->add_segments();
  EXPECT_FALSE(FromProto(proto).Validate().ok());
}

TEST(TableConfigConversionTest, ConsistencyAndLayoutComeBackEqual) {
  for (const ConsistencyConfig& consistency :
       {ConsistencyConfig{}, ConsistencyConfig{ConsistencyKind::kSsp, 0},
        ConsistencyConfig{ConsistencyKind::kSsp, 0xffffffffu},
        ConsistencyConfig{ConsistencyKind::kBsp, 0, Reduction::kMean},
        ConsistencyConfig{ConsistencyKind::kBsp, 0, Reduction::kSum}}) {
    for (const char* layout : {"", "dense/kernel:0 (3, 4) float32"}) {
      TableConfig config = Base();
      config.consistency = consistency;
      config.layout = layout;
      const TableConfig back = FromProto(ToProto(config));
      EXPECT_EQ(back, config) << DescribeDifference(config, back);
    }
  }
}

TEST(TableConfigConversionTest, RowTypesComeBackEqual) {
  constexpr FloatType kTypes[] = {FloatType::kFloat32, FloatType::kFloat16,
                                  FloatType::kBfloat16};
  for (const FloatType embeddings : kTypes) {
    for (const FloatType slots : kTypes) {
      for (const Rounding rounding :
           {Rounding::kStochastic, Rounding::kNearest}) {
        TableConfig config = Base();
        config.row_type = {embeddings, slots, rounding};
        const TableConfig back = FromProto(ToProto(config));
        EXPECT_EQ(back, config) << DescribeDifference(config, back);
      }
    }
  }
}

TEST(TableConfigConversionTest, RowTypesOfALaterVersionAreRefusedByValidate) {
  v1::TableConfig proto = ToProto(Base());
  proto.mutable_row_type()->set_slots(
      static_cast<v1::RowTypeConfig::FloatType>(77));
  const absl::Status status = FromProto(proto).Validate();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_NE(status.message().find("row_type"), std::string::npos) << status;
}

TEST(TableConfigConversionTest, TheLifeOfRowsComesBackEqual) {
  for (const TableConfig& config : RowLives(Base())) {
    const TableConfig back = FromProto(ToProto(config));
    EXPECT_EQ(back, config) << DescribeDifference(config, back);
    EXPECT_EQ(FromProto(ToProto(config.eviction)), config.eviction);
  }
}

TEST(TableConfigConversionTest, UnsetFieldsHaveTheDefaultsOfTheStructs) {
  v1::TableConfig proto;
  proto.set_name("user");
  proto.set_dim(4);
  TableConfig expected;
  expected.name = "user";
  expected.dim = 4;
  EXPECT_EQ(FromProto(proto), expected);

  proto.mutable_optimizer()->mutable_adagrad();
  proto.mutable_initializer()->mutable_normal();
  expected.optimizer = AdagradConfig{};
  expected.initializer = NormalInitializer{};
  EXPECT_EQ(FromProto(proto), expected);

  proto.mutable_optimizer()->mutable_adam();
  proto.mutable_initializer()->mutable_truncated_normal();
  expected.optimizer = AdamConfig{};
  expected.initializer = TruncatedNormalInitializer{};
  EXPECT_EQ(FromProto(proto), expected);

  proto.mutable_optimizer()->mutable_adamw();
  expected.optimizer = AdamWConfig{};
  EXPECT_EQ(FromProto(proto), expected);

  proto.mutable_optimizer()->mutable_sgd();
  proto.mutable_initializer()->mutable_uniform();
  expected.optimizer = SgdConfig{};
  expected.initializer = UniformInitializer{};
  EXPECT_EQ(FromProto(proto), expected);

  proto.mutable_consistency();
  EXPECT_EQ(FromProto(proto), expected);
  proto.mutable_consistency()->mutable_ssp();
  expected.consistency.kind = ConsistencyKind::kSsp;
  EXPECT_EQ(FromProto(proto), expected);
  proto.mutable_consistency()->mutable_bsp();
  expected.consistency.kind = ConsistencyKind::kBsp;
  EXPECT_EQ(FromProto(proto), expected);
}

TEST(TableConfigConversionTest, SizesThatDoNotFitAreRefusedByValidate) {
  v1::TableConfig proto = ToProto(Base());
  for (uint32_t dim : {0u, 4097u, 0x80000000u, 0xffffffffu}) {
    proto.set_dim(dim);
    EXPECT_EQ(FromProto(proto).Validate().code(),
              absl::StatusCode::kInvalidArgument)
        << dim;
  }
  TableConfig negative = Base();
  negative.dim = -1;
  EXPECT_FALSE(FromProto(ToProto(negative)).Validate().ok());
}

TEST(TableConfigConversionTest, TableInfoComesBackEqual) {
  TableInfo info;
  info.config = Base();
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
