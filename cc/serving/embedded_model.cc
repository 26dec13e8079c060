#include "cc/serving/embedded_model.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "cc/base/mutex.h"
#include "cc/base/parallel.h"
#include "cc/base/status_macros.h"
#include "cc/serving/row_snapshot.h"

namespace tfswitch {
namespace {

class PinnedSnapshot final : public PinnedRows {
 public:
  explicit PinnedSnapshot(std::shared_ptr<const RowSnapshot> snapshot)
      : snapshot_(std::move(snapshot)) {}

  absl::Status Lookup(absl::Span<const LookupPart> parts,
                      const LentThreads* threads) const override {
    std::vector<const RowLayers*> tables;
    tables.reserve(parts.size());
    size_t num_keys = 0;
    for (const LookupPart& part : parts) {
      TFSWITCH_ASSIGN_OR_RETURN(const RowLayers* const layers, TableOf(part));
      tables.push_back(layers);
      num_keys += part.keys.size();
    }
    // A thread gets at least this many keys: for fewer, waking the thread would
    // take longer than the work.
    constexpr size_t kMinKeysPerRange = 512;
    Mutex mutex;
    absl::Status first;
    // Looks up the keys [begin, end). The keys of all parts are numbered one
    // after another: first those of the first part, then those of the second.
    const auto look_up = [&](size_t begin, size_t end) {
      size_t before = 0;
      for (size_t i = 0; i < parts.size() && before < end; ++i) {
        const LookupPart& part = parts[i];
        const size_t from = std::max(begin, before) - before;
        const size_t to = std::min(end - before, part.keys.size());
        before += part.keys.size();
        if (from >= to) continue;
        absl::Status status = tables[i]->Lookup(
            part.keys.subspan(from, to - from),
            part.embeddings + from * static_cast<size_t>(part.dim));
        if (status.ok()) continue;
        MutexLock lock(&mutex);
        first.Update(std::move(status));
      }
    };
    RunRanges(threads, num_keys, kMinKeysPerRange, look_up);
    return first;
  }

 private:
  absl::StatusOr<const RowLayers*> TableOf(const LookupPart& part) const {
    for (const RowLayers& layers : snapshot_->tables()) {
      if (layers.table != part.table) continue;
      if (layers.dim != part.dim) {
        return absl::InvalidArgumentError(
            absl::StrCat("table '", part.table, "' has dim ", layers.dim,
                         " in this export, the lookup has dim ", part.dim));
      }
      return &layers;
    }
    return absl::NotFoundError(absl::StrCat(
        "table '", part.table, "' is not among those that the model serves"));
  }

  const std::shared_ptr<const RowSnapshot> snapshot_;
};

class EmbeddedModel final : public ServedModel {
 public:
  explicit EmbeddedModel(std::shared_ptr<ServedRows> rows)
      : rows_(std::move(rows)) {}

  bool is_remote() const override { return false; }
  std::shared_ptr<const PinnedRows> Pin() const override {
    return std::make_shared<const PinnedSnapshot>(rows_->Pin());
  }
  ServedState state() const override {
    ServedState state;
    state.rows = rows_->state();
    return state;
  }
  absl::Status Refresh() override { return rows_->Refresh(); }
  absl::Status Watch(absl::Duration interval) override {
    rows_->Watch(interval);
    return absl::OkStatus();
  }
  absl::Status RollBack(int64_t number) override {
    return rows_->RollBack(number);
  }
  absl::Status Resume() override { return rows_->Resume(); }

 private:
  const std::shared_ptr<ServedRows> rows_;  // Has its own locks.
};

}  // namespace

absl::StatusOr<std::shared_ptr<ServedModel>> OpenEmbeddedModel(
    const ServedRowsOptions& options, absl::Duration watch_interval) {
  TFSWITCH_ASSIGN_OR_RETURN(std::shared_ptr<ServedRows> rows,
                            ServedRows::Open(options));
  rows->Watch(watch_interval);
  return std::make_shared<EmbeddedModel>(std::move(rows));
}

}  // namespace tfswitch
