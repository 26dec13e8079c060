#include "cc/serving/served_rows.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/base/internal/raw_logging.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "cc/base/status_macros.h"

namespace tfswitch {
namespace {

absl::Status NoExports(const std::string& path) {
  return absl::NotFoundError(
      absl::StrCat("there is no base export in '", path,
                   "'; publish one with tfswitch.export.base"));
}

}  // namespace

absl::StatusOr<std::shared_ptr<ServedRows>> ServedRows::Open(
    const ServedRowsOptions& options) {
  std::shared_ptr<ServedRows> rows(new ServedRows(options));
  MutexLock lock(&rows->update_mutex_);
  int64_t base_number = 0;
  absl::Status newer;
  TFSWITCH_ASSIGN_OR_RETURN(
      std::shared_ptr<const RowSnapshot> snapshot,
      rows->Build(/*number=*/0, options.verify_first, &base_number, &newer));
  rows->Serve(std::move(snapshot), base_number);
  rows->NoteError(newer);
  return rows;
}

ServedRows::~ServedRows() {
  std::thread watcher;
  {
    MutexLock lock(&update_mutex_);
    watcher.swap(watcher_);
  }
  {
    MutexLock lock(&mutex_);
    is_ending_ = true;
    changed_.NotifyAll();
  }
  if (watcher.joinable()) watcher.join();
}

std::shared_ptr<const RowSnapshot> ServedRows::Pin() const {
  MutexLock lock(&mutex_);
  return snapshot_;
}

ServedRows::State ServedRows::state() const {
  MutexLock lock(&mutex_);
  return state_;
}

void ServedRows::Serve(std::shared_ptr<const RowSnapshot> snapshot,
                       int64_t base_number) {
  MutexLock lock(&mutex_);
  if (snapshot_ == nullptr || snapshot_->number() != snapshot->number()) {
    state_.served_since_ms = absl::ToUnixMillis(absl::Now());
  }
  state_.number = snapshot->number();
  state_.base_number = base_number;
  state_.created_ms = snapshot->created_ms();
  snapshot_.swap(snapshot);
}

void ServedRows::NoteError(const absl::Status& error) {
  {
    MutexLock lock(&mutex_);
    if (error == state_.error) return;
    state_.error = error;
    if (error.ok()) return;
    ++state_.num_refused;
  }
  ABSL_RAW_LOG(ERROR, "newer rows are not served: %s",
               std::string(error.message()).c_str());
}

absl::StatusOr<ServedRows::Chain> ServedRows::FindChain(
    const std::vector<ExportName>& names, size_t base, int64_t number,
    absl::Status* stop) const {
  *stop = absl::OkStatus();
  Chain chain;
  TFSWITCH_ASSIGN_OR_RETURN(ExportManifest first,
                            ReadExport(options_.path, names[base]));
  chain.push_back(std::move(first));
  for (size_t i = base + 1; i < names.size() && names[i].is_delta; ++i) {
    if (number != 0 && names[i].number > number) break;
    auto next = ReadExport(options_.path, names[i]);
    if (!next.ok()) {
      *stop = next.status();
      break;
    }
    if (next->previous_id != chain.back().id) {
      *stop = absl::DataLossError(absl::StrCat(
          "export ", names[i].ToString(), " in '", options_.path,
          "' does not follow ", chain.back().name.ToString(),
          ": one is missing or of another base. Publish a new base."));
      break;
    }
    chain.push_back(*std::move(next));
  }
  return chain;
}

absl::Status ServedRows::AddExport(const ExportManifest& manifest, bool verify,
                                   std::vector<RowLayers>* tables) const {
  for (RowLayers& layers : *tables) {
    const auto found = manifest.tables.find(layers.table);
    if (found == manifest.tables.end()) {
      if (manifest.name.is_delta) continue;
      std::vector<std::string> there;
      for (const auto& entry : manifest.tables) there.push_back(entry.first);
      return absl::FailedPreconditionError(absl::StrCat(
          "export ", manifest.name.ToString(), " in '", options_.path,
          "' has no table '", layers.table,
          "', which the model looks up; it "
          "has: ",
          absl::StrJoin(there, ", "), ". Export the tables of this model."));
    }
    const ExportedTable& table = found->second;
    const std::string path = RowFilePath(options_.path, manifest.name, table);
    TFSWITCH_ASSIGN_OR_RETURN(std::shared_ptr<const RowFile> file,
                              RowFile::Open(path, table.info));
    if (file->kind().dim != layers.dim) {
      return absl::FailedPreconditionError(
          absl::StrCat("row file '", path, "' has dim ", file->kind().dim,
                       ", the model has ", "dim ", layers.dim, " for table '",
                       layers.table, "'. Export the tables of this model."));
    }
    if (file->kind().table != layers.table) {
      return absl::DataLossError(
          absl::StrCat("row file '", path, "' is of table '",
                       file->kind().table, "', expected '", layers.table, "'"));
    }
    if (verify) TFSWITCH_RETURN_IF_ERROR(file->Verify());
    layers.files.insert(layers.files.begin(), std::move(file));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::shared_ptr<const RowSnapshot>> ServedRows::Build(
    int64_t number, bool verify, int64_t* base_number, absl::Status* newer) {
  *newer = absl::OkStatus();
  TFSWITCH_ASSIGN_OR_RETURN(const std::vector<ExportName> names,
                            ListExports(options_.path));
  absl::Status first_error = NoExports(options_.path);
  for (size_t base = names.size(); base-- > 0;) {
    if (names[base].is_delta) continue;
    if (number != 0 && names[base].number > number) continue;
    absl::Status stop;
    std::vector<RowLayers> tables;
    for (const auto& [table, dim] : options_.tables) {
      tables.push_back({table, dim, {}});
    }
    const ExportManifest* last = nullptr;
    auto chain = FindChain(names, base, number, &stop);
    absl::Status status = chain.status();
    if (status.ok()) {
      for (const ExportManifest& manifest : *chain) {
        // A delta counts whole or not at all.
        std::vector<RowLayers> next = tables;
        status = AddExport(manifest, verify || manifest.name.is_delta, &next);
        if (!status.ok()) break;
        tables.swap(next);
        last = &manifest;
      }
    }
    if (last != nullptr && (number == 0 || last->name.number == number)) {
      if (newer->ok()) *newer = status.ok() ? stop : status;
      *base_number = names[base].number;
      for (RowLayers& layers : tables) {
        while (layers.IsWorthMerging()) {
          TFSWITCH_RETURN_IF_ERROR(layers.MergeNewest());
        }
      }
      return std::make_shared<const RowSnapshot>(
          last->name.number, last->id, last->created_ms, std::move(tables));
    }
    if (status.ok()) status = stop;
    if (status.ok()) {
      status = absl::NotFoundError(absl::StrCat("there is no export ", number,
                                                " in '", options_.path, "'"));
    }
    if (newer->ok()) {
      *newer = status;
      first_error = status;
    }
    if (number != 0) break;  // No earlier base leads there.
  }
  return first_error;
}

absl::Status ServedRows::Refresh() {
  MutexLock lock(&update_mutex_);
  absl::Status status = RefreshLocked();
  NoteError(status);
  return status;
}

absl::Status ServedRows::RefreshLocked() {
  const State before = state();
  if (before.is_held) return absl::OkStatus();
  TFSWITCH_ASSIGN_OR_RETURN(const std::vector<ExportName> names,
                            ListExports(options_.path));
  if (names.empty()) return NoExports(options_.path);
  if (names.back().number <= before.number) {
    TFSWITCH_ASSIGN_OR_RETURN(const ExportManifest last,
                              ReadExport(options_.path, names.back()));
    if (last.id == Pin()->id()) return absl::OkStatus();
    return absl::FailedPreconditionError(absl::StrCat(
        "export ", before.number, " is served, and the last one in '",
        options_.path, "' is another ", names.back().ToString(),
        ". Export to a folder of its own, or open the model again."));
  }
  const bool has_new_base =
      std::any_of(names.begin(), names.end(), [&](const ExportName& name) {
        return !name.is_delta && name.number > before.number;
      });
  absl::Status error;
  if (has_new_base) {
    int64_t base_number = 0;
    auto snapshot = Build(/*number=*/0, /*verify=*/true, &base_number, &error);
    if (snapshot.ok() && (*snapshot)->number() > before.number) {
      Serve(*std::move(snapshot), base_number);
      return error;
    }
    if (error.ok()) error = snapshot.status();
  }
  const absl::Status followed = FollowLocked(names);
  return error.ok() ? followed : error;
}

absl::Status ServedRows::FollowLocked(const std::vector<ExportName>& names) {
  for (const ExportName& name : names) {
    const std::shared_ptr<const RowSnapshot> present = Pin();
    if (name.number <= present->number()) continue;
    if (!name.is_delta) break;
    TFSWITCH_ASSIGN_OR_RETURN(const ExportManifest manifest,
                              ReadExport(options_.path, name));
    if (manifest.previous_id != present->id()) {
      return absl::DataLossError(absl::StrCat(
          "export ", name.ToString(), " in '", options_.path,
          "' does not follow number ", present->number(),
          ", which is served: one is missing or of another base. Publish a new "
          "base."));
    }
    std::vector<RowLayers> tables = present->tables();
    TFSWITCH_RETURN_IF_ERROR(AddExport(manifest, /*verify=*/true, &tables));
    Serve(std::make_shared<const RowSnapshot>(
              name.number, manifest.id, manifest.created_ms, std::move(tables)),
          state().base_number);
    TFSWITCH_RETURN_IF_ERROR(MergeLocked());
  }
  return absl::OkStatus();
}

absl::Status ServedRows::MergeLocked() {
  const std::shared_ptr<const RowSnapshot> present = Pin();
  std::vector<RowLayers> tables = present->tables();
  bool has_merged = false;
  for (RowLayers& layers : tables) {
    while (layers.IsWorthMerging()) {
      TFSWITCH_RETURN_IF_ERROR(layers.MergeNewest());
      has_merged = true;
    }
  }
  if (!has_merged) return absl::OkStatus();
  Serve(std::make_shared<const RowSnapshot>(present->number(), present->id(),
                                            present->created_ms(),
                                            std::move(tables)),
        state().base_number);
  return absl::OkStatus();
}

absl::Status ServedRows::RollBack(int64_t number) {
  MutexLock lock(&update_mutex_);
  int64_t base_number = 0;
  absl::Status newer;
  TFSWITCH_ASSIGN_OR_RETURN(
      std::shared_ptr<const RowSnapshot> snapshot,
      Build(number, /*verify=*/true, &base_number, &newer));
  Serve(std::move(snapshot), base_number);
  MutexLock state_lock(&mutex_);
  state_.is_held = true;
  return absl::OkStatus();
}

absl::Status ServedRows::Resume() {
  MutexLock lock(&update_mutex_);
  {
    MutexLock state_lock(&mutex_);
    state_.is_held = false;
  }
  absl::Status status = RefreshLocked();
  NoteError(status);
  return status;
}

void ServedRows::Watch(absl::Duration interval) {
  MutexLock lock(&update_mutex_);
  MutexLock state_lock(&mutex_);
  interval_ = interval;
  changed_.NotifyAll();
  if (interval > absl::ZeroDuration() && !watcher_.joinable()) {
    watcher_ = std::thread([this] { RunWatch(); });
  }
}

void ServedRows::RunWatch() {
  absl::Time next = absl::Now();
  for (;;) {
    {
      MutexLock lock(&mutex_);
      if (is_ending_) return;
      const bool is_on = interval_ > absl::ZeroDuration();
      const absl::Duration left = is_on
                                      ? std::min(next - absl::Now(), interval_)
                                      : absl::InfiniteDuration();
      if (left > absl::ZeroDuration()) {
        changed_.WaitFor(&mutex_, left);
        continue;
      }
      next = absl::Now() + interval_;
    }
    // What goes wrong is in the state, for whoever asks.
    Refresh().IgnoreError();
  }
}

}  // namespace tfswitch
