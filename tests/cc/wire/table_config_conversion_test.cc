#include "cc/wire/table_config_conversion.h"

#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "gmock/gmock.h"
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

using ::testing::AllOf;
using ::testing::HasSubstr;

TableConfig Parse(const std::string& json) {
  TableConfig config;
  const absl::Status status = TableConfigFromJson(json, &config);
  EXPECT_TRUE(status.ok()) << status;
  return config;
}

void ExpectToComeBack(const TableConfig& config) {
  const TableConfig back = FromProto(ToProto(config));
  EXPECT_EQ(back, config) << DescribeDifference(config, back);
  const TableConfig read = Parse(TableConfigToJson(config));
  EXPECT_EQ(read, config) << TableConfigToJson(config);
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
      ExpectToComeBack(config);
    }
  }
}

TEST(TableConfigConversionTest, EveryOptimizerComesBackEqual) {
  for (OptimizerConfig optimizer : OddOptimizers()) {
    TableConfig config = Base();
    config.optimizer = optimizer;
    EXPECT_TRUE(config.Validate().ok()) << config.Validate();
    ExpectToComeBack(config);
    config.optimizer.is_dense = true;
    ExpectToComeBack(config);
  }
}

TEST(TableConfigConversionTest, UnsetOptimizersHaveTheDefaultsOfTheStructs) {
  ForEachKind<RuleConfig>([](const auto& rule) {
    v1::TableConfig proto = ToProto(Base());
    proto.clear_optimizer();
    auto* segment = proto.mutable_optimizer()->add_segments();
    const auto* field = segment->GetDescriptor()->FindFieldByName(rule.kName);
    ASSERT_NE(field, nullptr) << rule.kName;
    segment->GetReflection()->MutableMessage(segment, field);
    EXPECT_EQ(FromProto(proto).optimizer, OptimizerConfig(rule)) << rule.kName;
  });
}

TEST(TableConfigConversionTest, ConsistencyAndLayoutComeBackEqual) {
  for (const ConsistencyConfig& consistency :
       {ConsistencyConfig{}, ConsistencyConfig{ConsistencyKind::kSsp, 0},
        ConsistencyConfig{ConsistencyKind::kSsp, 0xffffffffu},
        ConsistencyConfig{ConsistencyKind::kBsp, 0, Reduction::kMean},
        ConsistencyConfig{ConsistencyKind::kBsp, 0, Reduction::kSum}}) {
    for (const std::string& layout :
         {std::string(), std::string("a \"b\" \n \xc3\xa4"),
          std::string(65536, 'x')}) {
      TableConfig config = Base();
      config.consistency = consistency;
      config.layout = layout;
      ExpectToComeBack(config);
    }
  }
}

TEST(TableConfigConversionTest, StorageDtypesComeBackEqual) {
  constexpr FloatType kTypes[] = {FloatType::kFloat32, FloatType::kFloat16,
                                  FloatType::kBfloat16};
  for (const FloatType embeddings : kTypes) {
    for (const FloatType slots : kTypes) {
      for (const Rounding rounding :
           {Rounding::kStochastic, Rounding::kNearest}) {
        TableConfig config = Base();
        config.storage_dtype = {embeddings, slots, rounding};
        ExpectToComeBack(config);
      }
    }
  }
}

TEST(TableConfigConversionTest,
     StorageDtypesOfALaterVersionAreRefusedByValidate) {
  v1::TableConfig proto = ToProto(Base());
  proto.mutable_storage_dtype()->set_slots(
      static_cast<v1::StorageDtypeConfig::FloatType>(77));
  const absl::Status status = FromProto(proto).Validate();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_NE(status.message().find("storage_dtype"), std::string::npos)
      << status;
}

TEST(TableConfigConversionTest, KindsAndValuesOfALaterVersionAreNamed) {
  EXPECT_TRUE(CheckKnown(ToProto(Base())).ok());
  v1::TableConfig proto = ToProto(Base());
  proto.clear_optimizer();
  auto* optimizer = proto.mutable_optimizer();
  optimizer->GetReflection()->MutableUnknownFields(optimizer)->AddVarint(99, 1);
  EXPECT_THAT(std::string(CheckKnown(proto).message()),
              AllOf(HasSubstr("field 99"), HasSubstr("OptimizerConfig")));
  proto = ToProto(Base());
  proto.mutable_consistency()->set_reduction(
      static_cast<v1::ConsistencyConfig::Reduction>(7));
  EXPECT_THAT(std::string(CheckKnown(proto).message()),
              HasSubstr("reduction 7"));
  proto = ToProto(Base());
  auto* segment = proto.mutable_optimizer()->add_segments();
  segment->GetReflection()->MutableUnknownFields(segment)->AddVarint(50, 1);
  EXPECT_THAT(std::string(CheckKnown(proto).message()), HasSubstr("field 50"));
}

// A manifest may have them, too, without the check of a call.
TEST(TableConfigConversionTest, EachUnknownEnumValueIsRefusedByValidate) {
  const v1::TableConfig valid = ToProto(Base());
  const auto set_unknown = [](int i, v1::TableConfig* proto) {
    google::protobuf::Message* const messages[] = {
        proto->mutable_consistency(), proto->mutable_consistency(),
        proto->mutable_statistics(),
        proto->mutable_admission()->mutable_not_admitted(),
        proto->mutable_eviction()};
    const char* const names[] = {"kind", "reduction", "kind", "kind", "order"};
    google::protobuf::Message* const message = messages[i];
    message->GetReflection()->SetEnumValue(
        message, message->GetDescriptor()->FindFieldByName(names[i]), 7);
  };
  for (int i = 0; i < 5; ++i) {
    v1::TableConfig proto = valid;
    proto.mutable_consistency()->set_kind(v1::ConsistencyConfig::BSP);
    set_unknown(i, &proto);
    EXPECT_EQ(FromProto(proto).Validate().code(),
              absl::StatusCode::kInvalidArgument)
        << i;
  }
}

TEST(TableConfigConversionTest, FieldsWithoutEffectMakeNoDifference) {
  v1::TableConfig proto = ToProto(Base());
  const TableConfig expected = FromProto(proto);
  proto.mutable_consistency()->set_staleness(3);
  proto.mutable_consistency()->set_reduction(v1::ConsistencyConfig::SUM);
  proto.mutable_statistics()->set_click_coeff(3.0f);
  proto.mutable_admission()->mutable_not_admitted()->set_constant(3.0f);
  proto.mutable_eviction()->set_order(v1::EvictionConfig::LFU);
  EXPECT_EQ(FromProto(proto), expected);
}

TEST(TableConfigConversionTest, TheLifeOfRowsComesBackEqual) {
  for (const TableConfig& config : RowLives(Base())) {
    ExpectToComeBack(config);
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

  auto* segment = proto.mutable_optimizer()->add_segments();
  segment->mutable_adagrad();
  proto.mutable_initializer()->mutable_normal();
  expected.optimizer = AdagradConfig{};
  expected.initializer = NormalInitializer{};
  EXPECT_EQ(FromProto(proto), expected);

  segment->mutable_adam();
  proto.mutable_initializer()->mutable_truncated_normal();
  expected.optimizer = AdamConfig{};
  expected.initializer = TruncatedNormalInitializer{};
  EXPECT_EQ(FromProto(proto), expected);

  segment->mutable_adamw();
  expected.optimizer = AdamWConfig{};
  EXPECT_EQ(FromProto(proto), expected);

  segment->mutable_sgd();
  proto.mutable_initializer()->mutable_uniform();
  expected.optimizer = SgdConfig{};
  expected.initializer = UniformInitializer{};
  EXPECT_EQ(FromProto(proto), expected);

  proto.mutable_consistency();
  EXPECT_EQ(FromProto(proto), expected);
  proto.mutable_consistency()->set_kind(v1::ConsistencyConfig::BSP);
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

TEST(TableConfigConversionTest, FloatsComeBackToTheBit) {
  for (uint32_t i = 0; i < 20000; ++i) {
    const uint32_t bits = i * 107374u + 13u;  // Spread over positive floats.
    float value;
    std::memcpy(&value, &bits, sizeof(value));
    if (!std::isfinite(value)) continue;
    TableConfig config = Base();
    config.initializer = ConstantInitializer{value};
    ASSERT_EQ(Parse(TableConfigToJson(config)), config) << value;
  }
}

TEST(TableConfigConversionTest, AnErrorNamesTheFieldAndTheText) {
  const auto error = [](const std::string& json) {
    TableConfig config = Base();
    const absl::Status status = TableConfigFromJson(json, &config);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << json;
    EXPECT_EQ(config, Base()) << "changed in spite of the error";
    return std::string(status.message());
  };
  EXPECT_THAT(error("{"), HasSubstr("table config: "));
  EXPECT_THAT(error(R"({"dimm":3})"),
              AllOf(HasSubstr("dimm"), HasSubstr("Received: {")));
  EXPECT_THAT(error(R"({"dim":-1})"), HasSubstr("dim"));
  EXPECT_THAT(error(R"({"optimizer":{"segments":[{"adam":{"beta_1":"x"}}]}})"),
              HasSubstr("beta_1"));
  EXPECT_THAT(error(R"({"optimizer":{"segments":[{"sgd":{},"adam":{}}]}})"),
              HasSubstr("oneof"));
  EXPECT_THAT(
      error(R"({"optimizer":{"segments":[{"sgd":{"momentum":1e39}}]}})"),
      HasSubstr("momentum"));
  EXPECT_THAT(error(R"({"consistency":{"reduction":"mean"}})"),
              HasSubstr("reduction"));
  EXPECT_THAT(error(R"({"name":)" + std::string(200'000, '[') +
                    std::string(200'000, ']') + "}"),
              HasSubstr("table config: "));
}

TEST(TableConfigConversionTest, EachDifferingFieldIsDescribed) {
  const TableConfig here = Base();
  TableConfig asked = here;
  EXPECT_EQ(DescribeDifference(here, asked), "");
  asked.dim = 8;
  EXPECT_EQ(DescribeDifference(here, asked), "dim (16 here, 8 asked)");
  asked.seed = 3;
  asked.optimizer = AdagradConfig{};
  asked.initializer = GlorotUniformInitializer{};
  EXPECT_THAT(DescribeDifference(here, asked),
              AllOf(HasSubstr("dim (16 here, 8 asked), optimizer ("),
                    HasSubstr("adagrad { initial_accumulator_value: 0.1"),
                    HasSubstr("glorot_uniform"), HasSubstr("3 asked)")));
  asked = here;
  asked.consistency.kind = ConsistencyKind::kBsp;
  asked.layout = "kernel";
  EXPECT_EQ(DescribeDifference(here, asked),
            "consistency (asp here, bsp(mean) asked), "
            "layout (\"\" here, \"kernel\" asked)");
}

}  // namespace
}  // namespace tfswitch
