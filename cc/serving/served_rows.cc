// update_mutex_ is held during a whole update, so that updates run one at a
// time. mutex_ is held only to copy or replace the snapshot and the state, so
// that Pin() does not wait for an update. Build() tries the bases from the
// newest to the oldest, and adds the deltas that follow. FollowLocked() adds
// deltas to the served rows.
//
// open_ lets snapshots share their files. refused_ remembers a damaged file, so
// that it is not read again before it is replaced. Serve() waits a little until
// no request reads the former snapshot, so that the updater unmaps it, and not
// a request.

#include "cc/serving/served_rows.h"

#include <algorithm>
#include <iterator>
#include <new>
#include <set>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "cc/base/log_writer.h"
#include "cc/base/status_macros.h"
#include "cc/base/steady_clock.h"

namespace tfswitch {
namespace {

absl::Status NoExports(const std::string& path) {
  return absl::NotFoundError(
      absl::StrCat("there is no base export in '", path,
                   "'; publish one with tfswitch.export.base"));
}

void LogError(absl::string_view what, const absl::Status& status) {
  LogMessageInOrder(LogLevel::kError, {"rows_refused"},
                    absl::StrCat(what, ": ", status.message()));
}

// Merges files until a further merge is not worthwhile. Returns whether it has
// merged any. Only logs errors: with more files, lookups are slower but not
// wrong.
bool MergeWhatPays(RowLayers* layers) {
  bool has_merged = false;
  while (layers->IsWorthMerging()) {
    const absl::Status status = layers->MergeNewest();
    if (!status.ok()) {
      LogError("deltas stay unmerged", status);
      break;
    }
    has_merged = true;
  }
  return has_merged;
}

// Waits until no request reads `snapshot` any more, so that the caller frees
// and unmaps it. Otherwise a request would have to do that, which takes
// milliseconds.
void WaitForReaders(const std::shared_ptr<const RowSnapshot>& snapshot) {
  // If a request reads for longer, the request itself unmaps the snapshot.
  constexpr int kMaxWaits = 50;
  for (int i = 0; i < kMaxWaits && snapshot.use_count() > 1; ++i) {
    absl::SleepFor(absl::Milliseconds(1));
  }
}

}  // namespace

absl::StatusOr<std::shared_ptr<ServedRows>> ServedRows::Open(
    const ServedRowsOptions& options) {
  std::shared_ptr<ServedRows> rows(new ServedRows(options));
  MutexLock lock(&rows->update_mutex_);
  TFSWITCH_ASSIGN_OR_RETURN(Built built, rows->Build(/*number=*/0, /*after=*/0,
                                                     options.verify_first));
  rows->Serve(built.snapshot, built.base_number);
  rows->NoteError(built.newer);
  if (!options.verify_first) {
    rows->verifier_ =
        std::thread([served = rows.get(), built = std::move(built)] {
          served->RunVerify(built);
        });
  }
  return rows;
}

ServedRows::~ServedRows() {
  std::thread watcher;
  {
    // A running update notices this, and ends.
    MutexLock lock(&mutex_);
    is_ending_ = true;
    watcher.swap(watcher_);
    changed_.NotifyAll();
  }
  if (watcher.joinable()) watcher.join();
  if (verifier_.joinable()) verifier_.join();
}

bool ServedRows::IsEnding() const {
  MutexLock lock(&mutex_);
  return is_ending_;
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
  {
    MutexLock lock(&mutex_);
    if (snapshot_ == nullptr || snapshot_->number() != snapshot->number()) {
      state_.served_since_ms = absl::ToUnixMillis(absl::Now());
    }
    state_.number = snapshot->number();
    state_.base_number = base_number;
    state_.created_ms = snapshot->created_ms();
    snapshot_.swap(snapshot);
  }
  if (snapshot != nullptr) WaitForReaders(snapshot);
}

void ServedRows::NoteError(const absl::Status& error) {
  {
    MutexLock lock(&mutex_);
    if (error == state_.error) return;
    state_.error = error;
    if (error.ok()) return;
    ++state_.num_refused;
  }
  LogError("newer rows are not served", error);
}

absl::StatusOr<ServedRows::Chain> ServedRows::FindChain(
    const std::vector<ExportName>& names, size_t base, int64_t number,
    absl::Status* stop) const {
  *stop = absl::OkStatus();
  Chain chain;
  TFSWITCH_ASSIGN_OR_RETURN(v1::ExportContent first,
                            ReadExport(options_.path, names[base]));
  chain.push_back(std::move(first));
  for (size_t i = base + 1; i < names.size() && names[i].is_delta; ++i) {
    if (number != 0 && names[i].number > number) break;
    auto next = ReadExport(options_.path, names[i]);
    if (!next.ok()) {
      *stop = next.status();
      break;
    }
    if (next->previous_id() != chain.back().id()) {
      *stop = absl::DataLossError(absl::StrCat(
          "export ", names[i].ToString(), " in '", options_.path,
          "' does not follow ", NameOf(chain.back()).ToString(),
          ": one is missing or of another base. Publish a new base."));
      break;
    }
    chain.push_back(*std::move(next));
  }
  return chain;
}

absl::Status ServedRows::AddExport(const v1::ExportContent& manifest,
                                   bool verify,
                                   std::vector<RowLayers>* tables) {
  for (RowLayers& layers : *tables) {
    const auto found = manifest.tables().find(layers.table);
    if (found == manifest.tables().end()) {
      if (manifest.is_delta()) continue;
      std::set<std::string> there;
      for (const auto& entry : manifest.tables()) there.insert(entry.first);
      return absl::FailedPreconditionError(absl::StrCat(
          "export ", NameOf(manifest).ToString(), " in '", options_.path,
          "' has no table '", layers.table,
          "', which the model looks up; it "
          "has: ",
          absl::StrJoin(there, ", "), ". Export the tables of this model."));
    }
    const v1::ExportedTable& table = found->second;
    const std::string path =
        RowFilePath(options_.path, NameOf(manifest), table);
    TFSWITCH_ASSIGN_OR_RETURN(std::shared_ptr<const RowFile> file,
                              OpenFile(path, InfoOf(table), verify));
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
    // A delta has only a few of the ids that lookups search. With a filter,
    // lookups skip the other ids quickly.
    if (manifest.is_delta()) file->BuildFilter();
    layers.files.insert(layers.files.begin(), std::move(file));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::shared_ptr<const RowFile>> ServedRows::OpenFile(
    const std::string& path, const RowFileInfo& info, bool verify) {
  std::weak_ptr<const RowFile>& open = open_[path];
  std::shared_ptr<const RowFile> file = open.lock();
  const auto stamp = StampOf(path);
  const absl::Status change =
      file != nullptr ? file->CheckUnchanged() : absl::OkStatus();
  if (file == nullptr || !change.ok() || !(file->info() == info) ||
      !stamp.ok() || !(*stamp == file->stamp())) {
    const auto refused = refused_.find(path);
    if (refused != refused_.end()) {
      if (stamp.ok() && *stamp == refused->second.stamp) {
        return refused->second.status;
      }
      refused_.erase(refused);
    }
    TFSWITCH_ASSIGN_OR_RETURN(file, RowFile::Open(path, info));
    // Refuses a file that another process has open for writing, even if its
    // contents are undamaged so far.
    if (file->has_writer()) TFSWITCH_RETURN_IF_ERROR(change);
  }
  if (verify) {
    const absl::Status status = file->Verify([this] { return IsEnding(); });
    if (!status.ok()) {
      if (!absl::IsCancelled(status)) Refuse(*file, status);
      return status;
    }
  }
  open = file;
  return file;
}

void ServedRows::Refuse(const RowFile& file, const absl::Status& status) {
  // Stores the identity of the damaged file, because a new file at the same
  // path may be undamaged.
  refused_[file.path()] = {file.stamp(), status};
}

void ServedRows::ForgetFiles() {
  for (auto it = open_.begin(); it != open_.end();) {
    it = it->second.expired() ? open_.erase(it) : std::next(it);
  }
  for (auto it = refused_.begin(); it != refused_.end();) {
    it = StampOf(it->first).ok() ? std::next(it) : refused_.erase(it);
  }
}

absl::StatusOr<ServedRows::Built> ServedRows::Build(int64_t number,
                                                    int64_t after,
                                                    bool verify) {
  TFSWITCH_ASSIGN_OR_RETURN(const std::vector<ExportName> names,
                            ListExports(options_.path));
  Built built;
  absl::Status first_error = NoExports(options_.path);
  for (size_t base = names.size(); base-- > 0;) {
    if (names[base].number <= after) break;
    if (names[base].is_delta) continue;
    if (number != 0 && names[base].number > number) continue;
    absl::Status stop;
    std::vector<RowLayers> tables;
    for (const auto& [table, dim] : options_.tables) {
      tables.push_back({table, dim, {}});
    }
    const v1::ExportContent* last = nullptr;
    auto chain = FindChain(names, base, number, &stop);
    absl::Status status = chain.status();
    if (status.ok()) {
      for (const v1::ExportContent& manifest : *chain) {
        // Works on a copy, so that a failed delta changes nothing.
        std::vector<RowLayers> next = tables;
        status = AddExport(manifest, verify || manifest.is_delta(), &next);
        if (!status.ok()) break;
        tables.swap(next);
        // Merges after each delta, so that each row is copied only a few times.
        for (RowLayers& layers : tables) MergeWhatPays(&layers);
        last = &manifest;
      }
    }
    if (last != nullptr && (number == 0 || last->number() == number)) {
      if (built.newer.ok()) built.newer = status.ok() ? stop : status;
      built.base_number = names[base].number;
      built.snapshot = std::make_shared<const RowSnapshot>(
          last->number(), last->id(), last->created_ms(), std::move(tables));
      return built;
    }
    if (status.ok()) status = stop;
    if (status.ok()) {
      status = absl::NotFoundError(absl::StrCat("there is no export ", number,
                                                " in '", options_.path, "'"));
    }
    if (built.newer.ok()) {
      built.newer = status;
      first_error = status;
    }
    if (number != 0) break;  // No earlier base leads to `number`.
  }
  return first_error;
}

void ServedRows::RunVerify(const Built& built) {
  try {
    VerifyBuilt(built);
  } catch (const std::bad_alloc&) {
    NoteError(
        absl::ResourceExhaustedError("no memory to check what is served"));
  }
}

void ServedRows::VerifyBuilt(const Built& built) {
  for (const RowLayers& layers : built.snapshot->tables()) {
    for (const std::shared_ptr<const RowFile>& file : layers.files) {
      absl::Status status = file->Verify([this] { return IsEnding(); });
      if (status.ok()) continue;
      if (absl::IsCancelled(status)) return;
      MutexLock lock(&update_mutex_);
      // Declared after the lock, so that it is destroyed before the lock is
      // released: other threads get copies of the error.
      const absl::Status damage = std::move(status);
      Refuse(*file, damage);
      const State before = state();
      // If a later base is served by now, its rows do not use the damaged file.
      if (before.base_number != built.base_number) return;
      NoteError(damage);
      if (before.is_held) return;
      auto older = Build(/*number=*/0, /*after=*/0, /*verify=*/true);
      // If there is no undamaged base, the present rows continue to be served,
      // and reads of damaged rows fail.
      if (!older.ok()) return;
      Serve(older->snapshot, older->base_number);
      // older->newer is OK if the damaged file has been replaced meanwhile.
      NoteError(older->newer);
      return;
    }
  }
}

absl::Status ServedRows::DamageLocked() const {
  const std::shared_ptr<const RowSnapshot> present = Pin();
  for (const RowLayers& layers : present->tables()) {
    TFSWITCH_RETURN_IF_ERROR(layers.CheckUnchanged());
    const RowFile& base = *layers.files.back();
    const auto refused = refused_.find(base.path());
    if (refused != refused_.end() && !base.is_verified()) {
      return refused->second.status;
    }
  }
  return absl::OkStatus();
}

absl::Status ServedRows::Refresh() {
  MutexLock lock(&update_mutex_);
  absl::Status status = RefreshLocked();
  NoteError(status);
  return status;
}

absl::Status ServedRows::RefreshLocked() {
  ForgetFiles();
  const State before = state();
  if (before.is_held) return absl::OkStatus();
  TFSWITCH_ASSIGN_OR_RETURN(const std::vector<ExportName> names,
                            ListExports(options_.path));
  if (names.empty()) return NoExports(options_.path);
  absl::Status error = DamageLocked();
  if (!error.ok()) {
    // The damaged file may have been replaced.
    auto built = Build(/*number=*/0, /*after=*/0, /*verify=*/true);
    if (built.ok()) {
      Serve(built->snapshot, built->base_number);
      return built->newer;
    }
  }
  if (names.back().number <= before.number) {
    TFSWITCH_ASSIGN_OR_RETURN(const v1::ExportContent last,
                              ReadExport(options_.path, names.back()));
    if (last.id() == Pin()->id()) return error;
    return absl::FailedPreconditionError(absl::StrCat(
        "export ", before.number, " is served, and the last one in '",
        options_.path, "' is another ", names.back().ToString(),
        ". Export to a folder of its own, or open the model again."));
  }
  const bool has_new_base =
      std::any_of(names.begin(), names.end(), [&](const ExportName& name) {
        return !name.is_delta && name.number > before.number;
      });
  if (has_new_base) {
    auto built = Build(/*number=*/0, before.number, /*verify=*/true);
    if (built.ok()) {
      Serve(built->snapshot, built->base_number);
      return built->newer;
    }
    error = built.status();
  }
  const absl::Status followed = FollowLocked(names);
  return error.ok() ? followed : error;
}

absl::Status ServedRows::FollowLocked(const std::vector<ExportName>& names) {
  for (const ExportName& name : names) {
    // Must be null again before Serve() is called, which waits until nobody
    // holds the former snapshot.
    std::shared_ptr<const RowSnapshot> present = Pin();
    if (name.number <= present->number()) continue;
    if (!name.is_delta) break;
    TFSWITCH_ASSIGN_OR_RETURN(const v1::ExportContent manifest,
                              ReadExport(options_.path, name));
    if (manifest.previous_id() != present->id()) {
      return absl::DataLossError(absl::StrCat(
          "export ", name.ToString(), " in '", options_.path,
          "' does not follow number ", present->number(),
          ", which is served: one is missing or of another base. Publish a new "
          "base."));
    }
    std::vector<RowLayers> tables = present->tables();
    TFSWITCH_RETURN_IF_ERROR(AddExport(manifest, /*verify=*/true, &tables));
    present.reset();
    Serve(std::make_shared<const RowSnapshot>(name.number, manifest.id(),
                                              manifest.created_ms(),
                                              std::move(tables)),
          state().base_number);
    MergeLocked();
  }
  return absl::OkStatus();
}

void ServedRows::MergeLocked() {
  std::shared_ptr<const RowSnapshot> present = Pin();
  std::vector<RowLayers> tables = present->tables();
  bool has_merged = false;
  for (RowLayers& layers : tables) {
    if (MergeWhatPays(&layers)) has_merged = true;
  }
  if (!has_merged) return;
  auto merged = std::make_shared<const RowSnapshot>(
      present->number(), present->id(), present->created_ms(),
      std::move(tables));
  present.reset();
  Serve(std::move(merged), state().base_number);
}

absl::Status ServedRows::RollBack(int64_t number) {
  MutexLock lock(&update_mutex_);
  TFSWITCH_ASSIGN_OR_RETURN(const Built built,
                            Build(number, /*after=*/0, /*verify=*/true));
  Serve(built.snapshot, built.base_number);
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
  // Does not lock update_mutex_, because an update may take long.
  MutexLock lock(&mutex_);
  interval_ = interval;
  changed_.NotifyAll();
  if (interval > absl::ZeroDuration() && !watcher_.joinable()) {
    watcher_ = std::thread([this] { RunWatch(); });
  }
}

void ServedRows::RunWatch() {
  absl::Time next = SteadyNow();
  for (;;) {
    {
      MutexLock lock(&mutex_);
      if (is_ending_) return;
      const bool is_on = interval_ > absl::ZeroDuration();
      const absl::Duration left = is_on
                                      ? std::min(next - SteadyNow(), interval_)
                                      : absl::InfiniteDuration();
      if (left > absl::ZeroDuration()) {
        changed_.WaitFor(&mutex_, left);
        continue;
      }
      next = SteadyNow() + interval_;
    }
    // Ignores errors, because state() has them.
    try {
      Refresh().IgnoreError();
    } catch (const std::bad_alloc&) {
      NoteError(absl::ResourceExhaustedError("no memory for newer rows"));
    }
  }
}

}  // namespace tfswitch
