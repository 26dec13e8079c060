// The state that all parts of a shard share.

#ifndef TFSWITCH_CC_SHARD_SHARD_CORE_H_
#define TFSWITCH_CC_SHARD_SHARD_CORE_H_

#include <atomic>
#include <cstdint>
#include <memory>

#include "cc/shard/gradient_accumulator.h"
#include "cc/shard/growth_limits.h"
#include "cc/shard/interval_timer.h"
#include "cc/shard/journal.h"
#include "cc/shard/round_hold.h"
#include "cc/shard/shard_options.h"
#include "cc/shard/snapshots.h"
#include "cc/shard/table_catalogue.h"
#include "cc/sync/coordinator.h"

namespace tfswitch {

// Each member is constant or thread-safe. shard.h says in which order they are
// locked.
struct ShardCore {
  ShardCore(const ShardOptions& shard_options, IntervalTimer* shrink_timer)
      : options(shard_options),
        tables(
            options, journal, &stage, shrink_timer,
            [this](EmbeddingTable& table) { return limits.Relieve(table); }) {}

  const ShardOptions options;
  const std::shared_ptr<Coordinator> coordinator =
      std::make_shared<Coordinator>(options.coordinator);
  Journal journal{options};
  GradientAccumulator stage{options.coordinator.max_groups};
  RoundHold round_hold;
  SaveTurn turn{&round_hold};
  TableCatalogue tables;
  GrowthLimits limits{options, tables, journal};
  // When this shard last wrote its part of a save, in milliseconds since 1970;
  // 0 if that is not known.
  std::atomic<int64_t> last_save_ms{0};
  // The same for the last time when rows were read for an export.
  std::atomic<int64_t> last_export_ms{0};
};

}  // namespace tfswitch

#endif  // TFSWITCH_CC_SHARD_SHARD_CORE_H_
