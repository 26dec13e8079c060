#include "cc/rpc/table_config_conversion.h"

#include <algorithm>
#include <limits>
#include <variant>

namespace tfswitch {
namespace {

constexpr uint32_t kDefaultVirtualShards = 1024;

int ClampToInt(uint32_t value) {
  return static_cast<int>(std::min<uint32_t>(
      value, static_cast<uint32_t>(std::numeric_limits<int>::max())));
}

struct OptimizerWriter {
  v1::OptimizerConfig* to;

  void operator()(const SgdConfig& config) const {
    v1::OptimizerConfig::Sgd* sgd = to->mutable_sgd();
    sgd->set_momentum(config.momentum);
    sgd->set_nesterov(config.nesterov);
  }
  void operator()(const AdagradConfig& config) const {
    v1::OptimizerConfig::Adagrad* adagrad = to->mutable_adagrad();
    adagrad->set_initial_accumulator_value(config.initial_accumulator_value);
    adagrad->set_epsilon(config.epsilon);
  }
  void operator()(const AdamConfig& config) const {
    v1::OptimizerConfig::Adam* adam = to->mutable_adam();
    adam->set_beta_1(config.beta_1);
    adam->set_beta_2(config.beta_2);
    adam->set_epsilon(config.epsilon);
  }
  void operator()(const AdamWConfig& config) const {
    v1::OptimizerConfig::AdamW* adamw = to->mutable_adamw();
    adamw->set_weight_decay(config.weight_decay);
    adamw->set_beta_1(config.beta_1);
    adamw->set_beta_2(config.beta_2);
    adamw->set_epsilon(config.epsilon);
  }
};

struct InitializerWriter {
  v1::InitializerConfig* to;

  void operator()(const ConstantInitializer& config) const {
    to->mutable_constant()->set_value(config.value);
  }
  void operator()(const UniformInitializer& config) const {
    to->mutable_uniform()->set_minval(config.minval);
    to->mutable_uniform()->set_maxval(config.maxval);
  }
  void operator()(const NormalInitializer& config) const {
    to->mutable_normal()->set_mean(config.mean);
    to->mutable_normal()->set_stddev(config.stddev);
  }
  void operator()(const TruncatedNormalInitializer& config) const {
    to->mutable_truncated_normal()->set_mean(config.mean);
    to->mutable_truncated_normal()->set_stddev(config.stddev);
  }
  void operator()(const GlorotUniformInitializer&) const {
    to->mutable_glorot_uniform();
  }
};

OptimizerConfig FromProto(const v1::OptimizerConfig& proto) {
  switch (proto.kind_case()) {
    case v1::OptimizerConfig::kAdagrad: {
      AdagradConfig config;
      const v1::OptimizerConfig::Adagrad& from = proto.adagrad();
      if (from.has_initial_accumulator_value()) {
        config.initial_accumulator_value = from.initial_accumulator_value();
      }
      if (from.has_epsilon()) config.epsilon = from.epsilon();
      return config;
    }
    case v1::OptimizerConfig::kAdam: {
      AdamConfig config;
      const v1::OptimizerConfig::Adam& from = proto.adam();
      if (from.has_beta_1()) config.beta_1 = from.beta_1();
      if (from.has_beta_2()) config.beta_2 = from.beta_2();
      if (from.has_epsilon()) config.epsilon = from.epsilon();
      return config;
    }
    case v1::OptimizerConfig::kAdamw: {
      AdamWConfig config;
      const v1::OptimizerConfig::AdamW& from = proto.adamw();
      if (from.has_weight_decay()) config.weight_decay = from.weight_decay();
      if (from.has_beta_1()) config.beta_1 = from.beta_1();
      if (from.has_beta_2()) config.beta_2 = from.beta_2();
      if (from.has_epsilon()) config.epsilon = from.epsilon();
      return config;
    }
    case v1::OptimizerConfig::kSgd:
      return SgdConfig{proto.sgd().momentum(), proto.sgd().nesterov()};
    case v1::OptimizerConfig::KIND_NOT_SET:
      break;
  }
  return SgdConfig{};
}

InitializerConfig FromProto(const v1::InitializerConfig& proto) {
  switch (proto.kind_case()) {
    case v1::InitializerConfig::kConstant:
      return ConstantInitializer{proto.constant().value()};
    case v1::InitializerConfig::kUniform: {
      UniformInitializer config;
      if (proto.uniform().has_minval())
        config.minval = proto.uniform().minval();
      if (proto.uniform().has_maxval())
        config.maxval = proto.uniform().maxval();
      return config;
    }
    case v1::InitializerConfig::kNormal: {
      NormalInitializer config;
      config.mean = proto.normal().mean();
      if (proto.normal().has_stddev()) config.stddev = proto.normal().stddev();
      return config;
    }
    case v1::InitializerConfig::kTruncatedNormal: {
      TruncatedNormalInitializer config;
      const v1::InitializerConfig::Normal& from = proto.truncated_normal();
      config.mean = from.mean();
      if (from.has_stddev()) config.stddev = from.stddev();
      return config;
    }
    case v1::InitializerConfig::kGlorotUniform:
      return GlorotUniformInitializer{};
    case v1::InitializerConfig::KIND_NOT_SET:
      break;
  }
  return UniformInitializer{};
}

v1::ConsistencyConfig ToProto(const ConsistencyConfig& config) {
  v1::ConsistencyConfig proto;
  switch (config.kind) {
    case ConsistencyKind::kAsp:
      proto.mutable_asp();
      break;
    case ConsistencyKind::kSsp:
      proto.mutable_ssp()->set_staleness(config.staleness);
      break;
    case ConsistencyKind::kBsp:
      proto.mutable_bsp()->set_reduction(config.reduction == Reduction::kSum
                                             ? v1::ConsistencyConfig::SUM
                                             : v1::ConsistencyConfig::MEAN);
      break;
  }
  return proto;
}

ConsistencyConfig FromProto(const v1::ConsistencyConfig& proto) {
  ConsistencyConfig config;
  switch (proto.kind_case()) {
    case v1::ConsistencyConfig::kSsp:
      config.kind = ConsistencyKind::kSsp;
      config.staleness = proto.ssp().staleness();
      break;
    case v1::ConsistencyConfig::kBsp:
      config.kind = ConsistencyKind::kBsp;
      if (proto.bsp().reduction() == v1::ConsistencyConfig::SUM) {
        config.reduction = Reduction::kSum;
      }
      break;
    case v1::ConsistencyConfig::kAsp:
    case v1::ConsistencyConfig::KIND_NOT_SET:
      break;
  }
  return config;
}

v1::StatisticsConfig ToProto(const StatisticsConfig& config) {
  v1::StatisticsConfig proto;
  switch (config.kind) {
    case StatisticsKind::kNone:
      break;
    case StatisticsKind::kUsage:
      proto.mutable_usage();
      break;
    case StatisticsKind::kShowClick: {
      v1::StatisticsConfig::ShowClick* to = proto.mutable_show_click();
      to->set_nonclk_coeff(config.nonclk_coeff);
      to->set_click_coeff(config.click_coeff);
      to->set_show_click_decay_rate(config.show_click_decay_rate);
      break;
    }
  }
  return proto;
}

StatisticsConfig FromProto(const v1::StatisticsConfig& proto) {
  StatisticsConfig config;
  switch (proto.kind_case()) {
    case v1::StatisticsConfig::kUsage:
      config.kind = StatisticsKind::kUsage;
      break;
    case v1::StatisticsConfig::kShowClick: {
      const v1::StatisticsConfig::ShowClick& from = proto.show_click();
      config.kind = StatisticsKind::kShowClick;
      if (from.has_nonclk_coeff()) config.nonclk_coeff = from.nonclk_coeff();
      if (from.has_click_coeff()) config.click_coeff = from.click_coeff();
      if (from.has_show_click_decay_rate()) {
        config.show_click_decay_rate = from.show_click_decay_rate();
      }
      break;
    }
    case v1::StatisticsConfig::KIND_NOT_SET:
      break;
  }
  return config;
}

struct AdmissionWriter {
  v1::AdmissionConfig* to;

  void operator()(const AlwaysAdmission&) const { to->mutable_always(); }
  void operator()(const MinCountAdmission& policy) const {
    to->mutable_min_count()->set_min_count(policy.min_count);
  }
  void operator()(const BloomMinCountAdmission& policy) const {
    v1::AdmissionConfig::BloomMinCount* bloom = to->mutable_bloom_min_count();
    bloom->set_min_count(policy.min_count);
    bloom->set_capacity(policy.capacity);
    bloom->set_false_positive_rate(policy.false_positive_rate);
  }
  void operator()(const ProbabilityAdmission& policy) const {
    to->mutable_probability()->set_probability(policy.probability);
  }
  void operator()(const ShowClickAdmission& policy) const {
    to->mutable_show_click()->set_embedx_threshold(policy.embedx_threshold);
  }
};

v1::AdmissionConfig ToProto(const AdmissionConfig& config) {
  v1::AdmissionConfig proto;
  std::visit(AdmissionWriter{&proto}, config.policy);
  v1::AdmissionConfig::NotAdmitted* value = proto.mutable_not_admitted();
  switch (config.not_admitted.kind) {
    case NotAdmittedKind::kZeros:
      value->mutable_zeros();
      break;
    case NotAdmittedKind::kConstant:
      value->mutable_constant()->set_value(config.not_admitted.constant);
      break;
    case NotAdmittedKind::kShared:
      value->mutable_shared();
      break;
    case NotAdmittedKind::kWeight:
      value->mutable_weight();
      break;
  }
  return proto;
}

AdmissionPolicy PolicyFromProto(const v1::AdmissionConfig& proto) {
  switch (proto.policy_case()) {
    case v1::AdmissionConfig::kMinCount:
      return MinCountAdmission{proto.min_count().min_count()};
    case v1::AdmissionConfig::kBloomMinCount: {
      const v1::AdmissionConfig::BloomMinCount& from = proto.bloom_min_count();
      BloomMinCountAdmission policy;
      policy.min_count = from.min_count();
      if (from.has_capacity()) policy.capacity = from.capacity();
      if (from.has_false_positive_rate()) {
        policy.false_positive_rate = from.false_positive_rate();
      }
      return policy;
    }
    case v1::AdmissionConfig::kProbability:
      return ProbabilityAdmission{proto.probability().probability()};
    case v1::AdmissionConfig::kShowClick: {
      ShowClickAdmission policy;
      if (proto.show_click().has_embedx_threshold()) {
        policy.embedx_threshold = proto.show_click().embedx_threshold();
      }
      return policy;
    }
    case v1::AdmissionConfig::kAlways:
    case v1::AdmissionConfig::POLICY_NOT_SET:
      break;
  }
  return AlwaysAdmission{};
}

AdmissionConfig FromProto(const v1::AdmissionConfig& proto) {
  AdmissionConfig config;
  config.policy = PolicyFromProto(proto);
  using Value = v1::AdmissionConfig::NotAdmitted;
  const Value& value = proto.not_admitted();
  switch (value.kind_case()) {
    case Value::kConstant:
      config.not_admitted = {NotAdmittedKind::kConstant,
                             value.constant().value()};
      break;
    case Value::kShared:
      config.not_admitted.kind = NotAdmittedKind::kShared;
      break;
    case Value::kWeight:
      config.not_admitted.kind = NotAdmittedKind::kWeight;
      break;
    case Value::kZeros:
    case Value::KIND_NOT_SET:
      break;
  }
  return config;
}

}  // namespace

v1::EvictionConfig ToProto(const EvictionConfig& config) {
  v1::EvictionConfig proto;
  if (config.delete_after_unseen_days.has_value()) {
    proto.mutable_ttl()->set_delete_after_unseen_days(
        *config.delete_after_unseen_days);
  }
  if (config.delete_threshold.has_value()) {
    proto.mutable_show_click_score()->set_delete_threshold(
        *config.delete_threshold);
  }
  if (config.min_l2_norm.has_value()) {
    proto.mutable_l2_norm()->set_min_l2_norm(*config.min_l2_norm);
  }
  if (config.max_rows.has_value()) {
    proto.mutable_max_rows()->set_max_rows(*config.max_rows);
    proto.mutable_max_rows()->set_order(config.order == EvictionOrder::kLfu
                                            ? v1::EvictionConfig::MaxRows::LFU
                                            : v1::EvictionConfig::MaxRows::LRU);
  }
  proto.set_every_secs(config.every_secs);
  return proto;
}

EvictionConfig FromProto(const v1::EvictionConfig& proto) {
  EvictionConfig config;
  if (proto.has_ttl()) {
    config.delete_after_unseen_days =
        proto.ttl().has_delete_after_unseen_days()
            ? proto.ttl().delete_after_unseen_days()
            : 30.0f;
  }
  if (proto.has_show_click_score()) {
    config.delete_threshold = proto.show_click_score().has_delete_threshold()
                                  ? proto.show_click_score().delete_threshold()
                                  : 0.8f;
  }
  if (proto.has_l2_norm()) config.min_l2_norm = proto.l2_norm().min_l2_norm();
  if (proto.has_max_rows()) {
    config.max_rows = proto.max_rows().max_rows();
    if (proto.max_rows().order() == v1::EvictionConfig::MaxRows::LFU) {
      config.order = EvictionOrder::kLfu;
    }
  }
  config.every_secs = proto.every_secs();
  return config;
}

v1::TableConfig ToProto(const TableConfig& config) {
  v1::TableConfig proto;
  proto.set_name(config.name);
  // A negative dim would wrap to a huge one; 0 is refused with a clear text.
  proto.set_dim(static_cast<uint32_t>(std::max(config.dim, 0)));
  std::visit(OptimizerWriter{proto.mutable_optimizer()}, config.optimizer);
  std::visit(InitializerWriter{proto.mutable_initializer()},
             config.initializer);
  proto.set_seed(config.seed);
  proto.set_num_virtual_shards(config.num_virtual_shards);
  *proto.mutable_consistency() = ToProto(config.consistency);
  proto.set_layout(config.layout);
  *proto.mutable_statistics() = ToProto(config.statistics);
  *proto.mutable_admission() = ToProto(config.admission);
  *proto.mutable_eviction() = ToProto(config.eviction);
  return proto;
}

TableConfig FromProto(const v1::TableConfig& proto) {
  TableConfig config;
  config.name = proto.name();
  config.dim = ClampToInt(proto.dim());
  config.optimizer = FromProto(proto.optimizer());
  config.initializer = FromProto(proto.initializer());
  config.seed = proto.seed();
  config.num_virtual_shards = proto.num_virtual_shards() == 0
                                  ? kDefaultVirtualShards
                                  : proto.num_virtual_shards();
  config.consistency = FromProto(proto.consistency());
  config.layout = proto.layout();
  config.statistics = FromProto(proto.statistics());
  config.admission = FromProto(proto.admission());
  config.eviction = FromProto(proto.eviction());
  return config;
}

v1::TableInfo ToProto(const TableInfo& info) {
  v1::TableInfo proto;
  *proto.mutable_config() = ToProto(info.config);
  proto.set_num_rows(info.stats.num_rows);
  proto.set_index_bytes(info.stats.index_bytes);
  proto.set_row_bytes(info.stats.row_bytes);
  proto.set_reserved_bytes(info.stats.reserved_bytes);
  proto.set_row_stride_bytes(info.stats.row_stride_bytes);
  proto.set_inserted_rows(info.stats.inserted_rows);
  proto.set_erased_rows(info.stats.erased_rows);
  proto.set_slot_floats(static_cast<uint32_t>(info.slot_floats));
  proto.set_num_candidates(info.stats.num_candidates);
  proto.set_admission_bytes(info.stats.admission_bytes);
  return proto;
}

TableInfo FromProto(const v1::TableInfo& proto) {
  TableInfo info;
  info.config = FromProto(proto.config());
  info.stats.num_rows = proto.num_rows();
  info.stats.index_bytes = proto.index_bytes();
  info.stats.row_bytes = proto.row_bytes();
  info.stats.reserved_bytes = proto.reserved_bytes();
  info.stats.row_stride_bytes = proto.row_stride_bytes();
  info.stats.inserted_rows = proto.inserted_rows();
  info.stats.erased_rows = proto.erased_rows();
  info.slot_floats = ClampToInt(proto.slot_floats());
  info.stats.num_candidates = proto.num_candidates();
  info.stats.admission_bytes = proto.admission_bytes();
  return info;
}

}  // namespace tfswitch
