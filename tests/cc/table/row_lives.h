// Configs of admission, statistics and eviction. No field has its default.

#ifndef TFSWITCH_TESTS_CC_TABLE_ROW_LIVES_H_
#define TFSWITCH_TESTS_CC_TABLE_ROW_LIVES_H_

#include <limits>
#include <vector>

#include "cc/table/table_config.h"

namespace tfswitch {

// `base` with each kind of statistics, admission and eviction; all valid for a
// dim of 2 and more.
inline std::vector<TableConfig> RowLives(const TableConfig& base) {
  StatisticsConfig usage;
  usage.kind = StatisticsKind::kUsage;
  StatisticsConfig show_click;
  show_click.kind = StatisticsKind::kShowClick;
  show_click.nonclk_coeff = 0.3f;
  show_click.click_coeff = 2.5f;
  show_click.show_click_decay_rate = 0.7f;

  std::vector<TableConfig> configs;
  for (const StatisticsConfig& statistics :
       {StatisticsConfig{}, usage, show_click}) {
    configs.push_back(base);
    configs.back().statistics = statistics;
  }
  const auto add_admission = [&](const AdmissionPolicy& policy,
                                 const NotAdmittedValue& value) {
    configs.push_back(base);
    configs.back().statistics = show_click;
    configs.back().admission = {policy, value};
    if (value.kind != NotAdmittedKind::kWeight) return;
    // The weight learns by a rule of its own.
    configs.back().optimizer = OptimizerConfig(std::vector<SegmentConfig>{
        {1, 1.0f, SgdConfig{}, {}}, {0, 1.0f, SgdConfig{}, {}}});
  };
  add_admission(MinCountAdmission{(1u << 24) - 1},
                {NotAdmittedKind::kWeight, 0.0f});
  add_admission(BloomMinCountAdmission{65534, (uint64_t{1} << 34) + 1, 0.3f},
                {NotAdmittedKind::kShared, 0.0f});
  add_admission(ProbabilityAdmission{0.1f},
                {NotAdmittedKind::kConstant, -0.7f});
  add_admission(ShowClickAdmission{0.3f}, {NotAdmittedKind::kZeros, 0.0f});
  add_admission(AlwaysAdmission{}, {NotAdmittedKind::kConstant, 0.1f});

  // Each rule alone, so that none is taken for another, and all together.
  EvictionConfig ttl;
  ttl.delete_after_unseen_days = 0.1f;
  EvictionConfig score;
  score.delete_threshold = 0.3f;
  EvictionConfig norm;
  norm.min_l2_norm = 0.7f;
  EvictionConfig lru;
  lru.max_rows = std::numeric_limits<int64_t>::max();
  EvictionConfig lfu;
  lfu.max_rows = (uint64_t{1} << 53) + 1;  // No double has this value.
  lfu.order = EvictionOrder::kLfu;
  lfu.every_secs = 0.1f;
  // A threshold of 0 is not the same as none.
  EvictionConfig zeros;
  zeros.delete_after_unseen_days = 0.0f;
  zeros.delete_threshold = 0.0f;
  zeros.min_l2_norm = 0.0f;
  zeros.max_rows = 0;
  EvictionConfig all = lfu;
  all.delete_after_unseen_days = 7.1f;
  all.delete_threshold = 1.1f;
  all.min_l2_norm = 1e-20f;
  for (const EvictionConfig& eviction :
       {ttl, score, norm, lru, lfu, zeros, all}) {
    configs.push_back(base);
    configs.back().statistics = show_click;
    configs.back().eviction = eviction;
  }
  return configs;
}

}  // namespace tfswitch

#endif  // TFSWITCH_TESTS_CC_TABLE_ROW_LIVES_H_
