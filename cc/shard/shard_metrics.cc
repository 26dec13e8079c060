#include "cc/shard/shard_metrics.h"

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/algorithm/container.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "cc/base/hash.h"
#include "cc/table/embedding_table.h"

namespace tfswitch {
namespace {

using Labels = MetricList::Labels;

// The limits of TableHeat.
constexpr size_t kShownKeys = 10;
constexpr size_t kShownVirtualShards = 64;

struct TableMetric {
  const char* name;
  const char* help;
  int64_t TableStats::*value;
  const char* part = "";  // The value of a label, unless it is empty.
};

constexpr TableMetric kGauges[] = {
    {"tfswitch_table_rows", "Rows.", &TableStats::num_rows},
    {"tfswitch_table_waiting_ids", "Ids that wait for admission.",
     &TableStats::num_candidates},
    {"tfswitch_table_bytes", "Memory by part, in bytes.",
     &TableStats::row_bytes, "rows"},
    {"tfswitch_table_bytes", "", &TableStats::index_bytes, "index"},
    {"tfswitch_table_bytes", "", &TableStats::reserved_bytes, "reserved"},
    {"tfswitch_table_bytes", "", &TableStats::admission_bytes, "admission"},
    {"tfswitch_table_bytes", "", &TableStats::change_bytes, "changes"},
    {"tfswitch_table_bytes", "", &TableStats::cold_memory_bytes, "cold"},
    {"tfswitch_table_cold_rows", "Rows on disk.", &TableStats::cold_rows},
    {"tfswitch_table_cold_file_bytes", "Bytes of the files of rows on disk.",
     &TableStats::cold_file_bytes},
};
constexpr TableMetric kCounters[] = {
    {"tfswitch_table_created_rows_total", "Created rows.",
     &TableStats::inserted_rows},
    {"tfswitch_table_removed_rows_total",
     "Removed rows, evicted ones included.", &TableStats::erased_rows},
    {"tfswitch_table_pulls_total", "Pulls.", &TableStats::num_pulls},
    {"tfswitch_table_pulled_keys_total", "Keys of pulls.",
     &TableStats::pulled_keys},
    {"tfswitch_table_missing_keys_total",
     "Keys of pulls that had no row when the pull came.",
     &TableStats::missing_keys},
    {"tfswitch_table_refused_keys_total",
     "New keys that got no row because the table was full.",
     &TableStats::refused_keys},
    {"tfswitch_table_pushes_total", "Pushes.", &TableStats::num_pushes},
    {"tfswitch_table_pushed_keys_total", "Distinct keys of pushes.",
     &TableStats::pushed_keys},
    {"tfswitch_table_promoted_rows_total", "Rows moved from disk to memory.",
     &TableStats::promoted_rows},
    {"tfswitch_table_demoted_rows_total", "Rows moved from memory to disk.",
     &TableStats::demoted_rows},
    {"tfswitch_table_cold_block_reads_total",
     "Blocks read to find rows on disk.", &TableStats::cold_block_reads},
    {"tfswitch_table_cold_written_bytes_total",
     "Bytes written to files of rows on disk.",
     &TableStats::cold_written_bytes},
    {"tfswitch_table_dense_steps_total", "Steps of tables with dense updates.",
     &TableStats::num_steps},
};

void AddGauges(const std::string& name, const TableStats& stats,
               MetricList* list) {
  const Labels table = {{"table", name}};
  for (const TableMetric& metric : kGauges) {
    Labels labels = table;
    if (*metric.part != '\0') labels.emplace_back("part", metric.part);
    list->Gauge(metric.name, metric.help,
                static_cast<double>(stats.*metric.value), labels);
  }
}

void AddCounters(const std::string& name, const TableStats& stats,
                 MetricList* list) {
  const Labels table = {{"table", name}};
  for (const TableMetric& metric : kCounters) {
    list->Counter(metric.name, metric.help,
                  static_cast<double>(stats.*metric.value), table);
  }
  for (const EvictionRule& rule : kEvictionRules) {
    list->Counter("tfswitch_table_evicted_rows_total", "Evicted rows by rule.",
                  static_cast<double>(stats.*rule.total),
                  {{"table", name}, {"rule", rule.name}});
  }
}

void AddInfo(const TableConfig& config, MetricList* list) {
  std::vector<absl::string_view> rules;
  for (const EvictionRule& rule : kEvictionRules) {
    if (rule.is_set(config.eviction)) rules.emplace_back(rule.name);
  }
  list->Gauge("tfswitch_table_info", "Always 1; the labels are settings.", 1,
              {{"table", config.name},
               {"dim", absl::StrCat(config.dim)},
               {"optimizer", OptimizerName(config.optimizer)},
               {"admission", KindName(config.admission.policy)},
               {"eviction", absl::StrJoin(rules, ",")}});
}

KeyHeat::Report HeatOf(const ShardOptions& options,
                       const EmbeddingTable& table) {
  const uint32_t num_virtual = table.config().num_virtual_shards;
  return table.heat().Read(
      FirstVirtualShardOf(options.shard_index, num_virtual, options.num_shards),
      FirstVirtualShardOf(options.shard_index + 1, num_virtual,
                          options.num_shards));
}

void AddHeat(const ShardOptions& options, const EmbeddingTable& table,
             MetricList* list) {
  const std::string& name = table.config().name;
  const KeyHeat::Report heat = HeatOf(options, table);
  if (heat.hot_keys.empty()) return;
  list->Gauge("tfswitch_table_hottest_over_mean",
              "Pulled keys of the hottest virtual shard over the mean of this "
              "server's, over the last minutes.",
              *absl::c_max_element(heat.virtual_shards), {{"table", name}});
  list->Gauge("tfswitch_table_hottest_id_ratio",
              "Share of the hottest id in the pulled keys, over the last "
              "minutes.",
              heat.hot_keys.front().share, {{"table", name}});
}

// Returns the tables with the most rows first.
std::vector<std::pair<TableStats, std::shared_ptr<EmbeddingTable>>> SortTables(
    const ShardCore& core) {
  std::vector<std::pair<TableStats, std::shared_ptr<EmbeddingTable>>> tables;
  for (const auto& table : core.tables.All()) {
    tables.emplace_back(table->stats(), table);
  }
  std::stable_sort(tables.begin(), tables.end(),
                   [](const auto& a, const auto& b) {
                     return a.first.num_rows > b.first.num_rows;
                   });
  return tables;
}

void AddTables(const ShardCore& core, MetricList* list) {
  const auto tables = SortTables(core);
  list->Gauge("tfswitch_tables", "Tables.", static_cast<double>(tables.size()));
  list->Gauge("tfswitch_memory_ceiling_bytes",
              "Ceiling of the memory of all tables; 0 if there is none.",
              static_cast<double>(core.limits.max_bytes()));
  TableStats others;
  for (size_t i = 0; i < tables.size(); ++i) {
    const auto& [stats, table] = tables[i];
    if (i >= kLabelledTables) {
      // No counters: a table may move into the others and back, and a counter
      // never falls.
      for (const TableMetric& metric : kGauges) {
        others.*metric.value += stats.*metric.value;
      }
      continue;
    }
    AddGauges(table->config().name, stats, list);
    AddCounters(table->config().name, stats, list);
    AddHeat(core.options, *table, list);
    AddInfo(table->config(), list);
  }
  if (tables.size() > kLabelledTables) AddGauges(kOtherTables, others, list);
}

void AddGroups(const ShardCore& core, MetricList* list) {
  for (const std::string& name : core.coordinator->GroupNames()) {
    const auto stats = core.coordinator->GroupStats(name);
    if (!stats.ok()) continue;  // The group has just ended.
    const Labels group = {{"group", name}};
    const auto with = [&name](const char* label, std::string value) {
      return Labels{{"group", name}, {label, std::move(value)}};
    };
    const int64_t waiting = stats->num_waiting();
    int64_t lost = 0;
    for (const auto& [worker, loss] : stats->losses()) {
      lost += loss.is_back() ? 0 : 1;
    }
    for (const auto& [state, count] :
         {std::pair<const char*, int64_t>{"running",
                                          stats->num_active() - waiting},
          {"waiting", waiting},
          {"lost", lost}}) {
      list->Gauge("tfswitch_group_workers",
                  "Workers by state: running, waiting for others, lost.",
                  static_cast<double>(count), with("state", state));
    }
    list->Counter("tfswitch_group_rounds_total", "Closed rounds (bsp).",
                  static_cast<double>(stats->rounds()), group);
    list->Counter("tfswitch_group_lost_workers_total",
                  "Workers that were given up.",
                  static_cast<double>(stats->num_losses()), group);
    for (const auto& [result, count] :
         {std::pair<const char*, int64_t>{"counted", stats->contributions()},
          {"dropped", stats->dropped()},
          {"carried", stats->carried()},
          {"expired", stats->expired()}}) {
      list->Counter("tfswitch_group_contributions_total",
                    "Contributions to rounds by result.",
                    static_cast<double>(count), with("result", result));
    }
    for (const auto& [worker, steps] : stats->num_steps()) {
      list->Counter(
          "tfswitch_worker_steps_total", "Steps of the worker that count.",
          static_cast<double>(steps), with("worker", absl::StrCat(worker)));
    }
    for (int ahead = 0; ahead < stats->staleness_size(); ++ahead) {
      list->Counter("tfswitch_group_staleness_steps_total",
                    "Steps that ended `ahead` steps ahead of the slowest "
                    "worker.",
                    static_cast<double>(stats->staleness(ahead)),
                    with("ahead", absl::StrCat(ahead)));
    }
  }
}

}  // namespace

void AddShardMetrics(const ShardCore& core, MetricList* list) {
  AddTables(core, list);
  if (core.options.shard_index == 0) AddGroups(core, list);
  list->Gauge("tfswitch_export_timestamp_seconds",
              "Time when rows were last read for an export, since 1970; 0: "
              "not in this run.",
              static_cast<double>(core.last_export_ms) / 1e3);
  if (core.options.num_writes != nullptr) {
    list->Counter("tfswitch_writes_total",
                  "Applied writes since the data folder was made.",
                  static_cast<double>(core.options.num_writes->load()));
  }
  if (const PushLog* log = core.journal.log(); log != nullptr) {
    list->Gauge("tfswitch_log_bytes", "Bytes of the push log.",
                static_cast<double>(log->num_bytes()));
    list->Gauge("tfswitch_log_unflushed_records",
                "Records of the push log that a power loss may take.",
                static_cast<double>(log->num_unflushed()));
    list->Gauge("tfswitch_log_has_failed",
                "1 while the push log refuses writes.",
                core.journal.refuses_writes() ? 1 : 0);
  }
}

void AddHeats(const ShardCore& core, v1::ServerView* view) {
  auto tables = SortTables(core);
  if (tables.size() > kLabelledTables) tables.resize(kLabelledTables);
  for (const auto& [stats, table] : tables) {
    const KeyHeat::Report report = HeatOf(core.options, *table);
    if (report.hot_keys.empty()) continue;
    v1::TableHeat* heat = view->add_heats();
    heat->set_table(table->config().name);
    heat->set_sampled_keys(report.sampled_keys);
    for (size_t i = 0; i < std::min(report.hot_keys.size(), kShownKeys); ++i) {
      v1::HotKey* hot = heat->add_hot_keys();
      hot->set_key(report.hot_keys[i].key);
      hot->set_share(report.hot_keys[i].share);
    }
    const size_t num = report.virtual_shards.size();
    const size_t num_cells = std::min(num, kShownVirtualShards);
    for (size_t i = 0; i < num_cells; ++i) {
      heat->add_virtual_shards(*std::max_element(
          report.virtual_shards.begin() + num * i / num_cells,
          report.virtual_shards.begin() + num * (i + 1) / num_cells));
    }
  }
}

}  // namespace tfswitch
