// One thread checks the folder and loads new versions; it holds load_mutex_
// meanwhile. Requests lock only mutex_, to copy a pointer, so they never wait
// for a load. Look() uses a version whose files have not changed since the last
// check, and ignores a refused one until its files change. retired_ keeps the
// former version until its last request has ended. Then the next check frees
// the version, so that no request has to.

#include "tfswitch/predictor.h"

#include <dlfcn.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <future>
#include <system_error>
#include <thread>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "cc/base/log_writer.h"
#include "cc/base/status_macros.h"
#include "cc/predictor/errors.h"
#include "cc/predictor/rows_api.h"
#include "cc/predictor/tf_objects.h"

namespace tfswitch {
namespace {

namespace fs = std::filesystem;

// The folder in which tfswitch.export writes rows, before and while they are
// served.
constexpr char kRowsFolder[] = "assets.extra/tfswitch";

// Describes the names, sizes and times of the files in a folder. The text
// changes only if somebody changes the files. If files cannot be examined, the
// text contains the errors.
std::string FilesOf(const std::string& folder, bool with_rows) {
  const fs::path rows = fs::path(folder) / kRowsFolder;
  std::vector<std::string> files;
  std::error_code error;
  for (fs::recursive_directory_iterator it(folder, error), end;
       !error && it != end; it.increment(error)) {
    if (!with_rows && it->path() == rows) it.disable_recursion_pending();
    std::error_code ignored;  // The file was just removed.
    if (!it->is_regular_file(ignored)) continue;
    files.push_back(
        absl::StrCat(it->path().string(), ":", it->file_size(ignored), ":",
                     it->last_write_time(ignored).time_since_epoch().count()));
  }
  if (error) files.push_back(error.message());
  std::sort(files.begin(), files.end());
  return absl::StrJoin(files, "\n");
}

bool HasSavedModel(const fs::path& folder) {
  for (const char* ending : {"pb", "pbtxt", "cpb"}) {
    std::error_code ignored;
    if (fs::exists(folder / absl::StrCat("saved_model.", ending), ignored)) {
      return true;
    }
  }
  return false;
}

// The folders of the versions.
Result<std::map<int64_t, std::string>> FindVersions(
    const std::string& model_dir) {
  std::map<int64_t, std::string> found;
  if (HasSavedModel(model_dir)) {
    found[0] = model_dir;
    return found;
  }
  std::error_code error;
  for (fs::directory_iterator it(model_dir, error), end; !error && it != end;
       it.increment(error)) {
    const std::string name = it->path().filename().string();
    int64_t version = 0;
    if (std::all_of(name.begin(), name.end(), absl::ascii_isdigit) &&
        absl::SimpleAtoi(name, &version) && HasSavedModel(it->path())) {
      found[version] = it->path().string();
    }
  }
  if (error) {
    return Error(StatusCode::kUnavailable, "cannot look for versions in '",
                 model_dir, "': ", error.message());
  }
  if (found.empty()) {
    return Error(StatusCode::kNotFound, "'", model_dir,
                 "' has neither a saved_model.pb nor a folder that is named by "
                 "a number and has one");
  }
  return found;
}

Status NoSuchVersion(const std::string& model_dir, int64_t version,
                     const std::map<int64_t, std::string>& found) {
  const auto number = [](std::string* text, const auto& entry) {
    absl::StrAppend(text, entry.first);
  };
  return Error(StatusCode::kNotFound, "version ", version, " is not in '",
               model_dir, "', which has ", absl::StrJoin(found, ", ", number));
}

Status LoadOpLibrary(const std::string& path) {
  const TfStatus status;
  // The library stays loaded without its handle.
  TF_DeleteLibraryHandle(TF_LoadLibrary(path.c_str(), status.get()));
  if (status.ok()) return Status();
  return Error(StatusCode::kFailedPrecondition, "cannot load the op library '",
               path, "': ", TF_Message(status.get()),
               ". Give the path of one that was built for TensorFlow ",
               TF_Version());
}

}  // namespace

std::string OpLibraryPath() {
  Dl_info info;
  fs::path folder;
  if (dladdr(reinterpret_cast<const void*>(&OpLibraryPath), &info) != 0) {
    std::error_code ignored;
    folder = fs::canonical(info.dli_fname, ignored).parent_path();
  }
  const std::vector<std::string> numbers = absl::StrSplit(TF_Version(), '.');
  return folder /
         absl::StrCat("libtfswitch_ops_tf", numbers[0], numbers[1], ".so");
}

// The implementation of Predictor. Thread-safe.
class __attribute__((visibility("hidden"))) Predictor::Versions {
 public:
  explicit Versions(const PredictorOptions& options)
      : options_(options), watch_interval_(options.watch_rows_interval) {}
  ~Versions();
  Versions(const Versions&) = delete;
  Versions& operator=(const Versions&) = delete;

  // Called once, before the others.
  Status Start();

  std::shared_ptr<const ModelVersion> current() const;
  Status Pin(int64_t version);
  void Unpin();
  State state() const;
  Result<ServedState> RowsState() const;
  Status WatchRows(Seconds interval);
  // The functions that control rows, or why they are not available.
  const Result<RowsApi>& rows_api() const { return rows_api_; }

 private:
  // Starts to watch the rows of a version, and stops to watch those of the
  // former version, if there was one.
  void WatchRowsOf(const ModelVersion& model, const ModelVersion* before);
  // Stores the state of the rows for state(), and logs changes of it.
  void NoteRows();

  // Loads and serves a version. If that fails, records why it is refused.
  Status Take(int64_t version, const std::string& folder)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(load_mutex_);
  // Serves the pinned version, or the newest version that can be loaded, unless
  // it is served already. Normally it uses only versions whose files have not
  // changed since the last check; with `at_once` it does not wait for that.
  // Returns an error of the folder or, if no version is served, the error of
  // the newest version.
  Status Look(bool at_once) ABSL_EXCLUSIVE_LOCKS_REQUIRED(load_mutex_);
  void Watch();

  const PredictorOptions options_;
  // Constant after Start.
  Result<RowsApi> rows_api_ = Status(StatusCode::kUnknown, "not loaded");

  // Held while a version is loaded. Locked before `mutex_`.
  absl::Mutex load_mutex_ ABSL_ACQUIRED_BEFORE(mutex_);
  // For each version, a description of its files at the last check, and of
  // those when the version was refused.
  std::map<int64_t, std::string> seen_ ABSL_GUARDED_BY(load_mutex_);
  std::map<int64_t, std::string> refused_files_ ABSL_GUARDED_BY(load_mutex_);
  std::vector<std::shared_ptr<const ModelVersion>> retired_
      ABSL_GUARDED_BY(load_mutex_);
  int64_t pinned_ ABSL_GUARDED_BY(load_mutex_) = -1;

  // Held while an interval is passed to a version, so that the version gets the
  // interval of the last call of WatchRows. Locked after `load_mutex_`, before
  // `mutex_`.
  absl::Mutex watch_mutex_ ABSL_ACQUIRED_AFTER(load_mutex_);
  Seconds watch_interval_ ABSL_GUARDED_BY(watch_mutex_);
  // WatchRows was called.
  bool is_watch_set_ ABSL_GUARDED_BY(watch_mutex_) = false;

  mutable absl::Mutex mutex_;
  std::shared_ptr<const ModelVersion> current_ ABSL_GUARDED_BY(mutex_);
  State state_ ABSL_GUARDED_BY(mutex_);
  std::promise<void> stopping_;  // Ends Watch().

  std::thread watcher_;  // Constant after Start.
};

Status Predictor::Versions::Start() {
  if (!options_.op_library.empty()) {
    Status status = LoadOpLibrary(options_.op_library);
    if (!status.ok()) return status;
  }
  rows_api_ = RowsApi::Find(options_.op_library);
  if (options_.catch_bus_errors && rows_api_.ok()) rows_api_->CatchBusErrors();
  {
    absl::MutexLock lock(&load_mutex_);
    pinned_ = options_.version;
    Status status = Look(/*at_once=*/true);
    if (current() == nullptr) return status;
  }
  if (options_.poll_interval > Seconds::zero()) {
    watcher_ = std::thread(&Versions::Watch, this);
  }
  return Status();
}

Predictor::Versions::~Versions() {
  stopping_.set_value();
  if (watcher_.joinable()) watcher_.join();
}

std::shared_ptr<const ModelVersion> Predictor::Versions::current() const {
  absl::MutexLock lock(&mutex_);
  return current_;
}

Predictor::State Predictor::Versions::state() const {
  State state;
  {
    absl::MutexLock lock(&mutex_);
    state = state_;
  }
  // Reads the state of the rows now, because state_ has that of the last check.
  if (state.version >= 0) state.rows = RowsState();
  return state;
}

Status Predictor::Versions::Pin(int64_t version) {
  absl::MutexLock lock(&load_mutex_);
  if (current()->version() != version) {
    TFSWITCH_ASSIGN_OR_RETURN(const auto found,
                              FindVersions(options_.model_dir));
    const auto folder = found.find(version);
    if (folder == found.end()) {
      return NoSuchVersion(options_.model_dir, version, found);
    }
    Status status = Take(version, folder->second);
    if (!status.ok()) return status;
  }
  pinned_ = version;
  return Status();
}

void Predictor::Versions::Unpin() {
  absl::MutexLock lock(&load_mutex_);
  pinned_ = -1;
}

Status Predictor::Versions::Take(int64_t version, const std::string& folder) {
  {
    absl::MutexLock lock(&mutex_);
    state_.loading = version;
  }
  const std::string files = FilesOf(folder, /*with_rows=*/false);
  const std::string all_files = FilesOf(folder, /*with_rows=*/true);
  Result<std::unique_ptr<ModelVersion>> model =
      ModelVersion::Load(options_.model, version, folder);
  if (model.ok() && FilesOf(folder, /*with_rows=*/false) != files) {
    model = Error(StatusCode::kUnavailable, "the model in '", folder,
                  "' was changed while it was loaded; copy it under a name "
                  "that is not a number, then rename it");
  }
  const std::shared_ptr<const ModelVersion> before = current();
  std::shared_ptr<const ModelVersion> taken;
  {
    absl::MutexLock lock(&mutex_);
    state_.loading = -1;
    if (!model.ok()) {
      LogMessageInOrder(LogLevel::kError, {"version_refused"},
                        absl::StrCat("version ", version, " is refused: ",
                                     model.status().message()));
      state_.refused[version] = model.status();
      // `all_files` describes the files of the rows, too, so that a refused
      // version is tried again when its rows change.
      refused_files_[version] = all_files;
      return model.status();
    }
    LogServerEvent(LogLevel::kInfo, "version_served",
                   {{"version", version}, {"path", folder}});
    state_.refused.erase(version);
    refused_files_.erase(version);
    state_.version = version;
    taken = *std::move(model);
    current_ = taken;
  }
  if (before != nullptr) retired_.push_back(before);
  WatchRowsOf(*taken, before.get());
  NoteRows();
  return Status();
}

Result<ServedState> Predictor::Versions::RowsState() const {
  if (!rows_api_.ok()) return rows_api_.status();
  return rows_api_->State(current()->folder());
}

Status Predictor::Versions::WatchRows(Seconds interval) {
  if (!rows_api_.ok()) return rows_api_.status();
  if (interval < Seconds::zero()) {
    return Invalid(
        "expected how often to look for rows, or zero for never, got ",
        absl::FormatDuration(absl::Seconds(interval.count())));
  }
  absl::MutexLock lock(&watch_mutex_);
  watch_interval_ = interval;
  is_watch_set_ = true;
  return rows_api_->Watch(current()->folder(), interval);
}

void Predictor::Versions::WatchRowsOf(const ModelVersion& model,
                                      const ModelVersion* before) {
  if (!rows_api_.ok()) {
    std::error_code ignored;
    if (fs::exists(absl::StrCat(model.folder(), "/", kModelFile), ignored)) {
      LogMessageInOrder(
          LogLevel::kError, {"rows_not_watched"},
          absl::StrCat("the rows of version ", model.version(),
                       " stay as they are: ", rows_api_.status().message()));
    }
    return;
  }
  absl::MutexLock lock(&watch_mutex_);
  if (watch_interval_ > Seconds::zero() || is_watch_set_) {
    const Status status = rows_api_->Watch(model.folder(), watch_interval_);
    // FailedPrecondition means that the model has no rows of its own.
    if (!status.ok() && status.code() != StatusCode::kFailedPrecondition) {
      LogMessageInOrder(LogLevel::kError, {"rows_not_watched"},
                        absl::StrCat("the rows of version ", model.version(),
                                     " are not watched: ", status.message()));
    }
  }
  if (before != nullptr && before->folder() != model.folder()) {
    (void)rows_api_->Watch(before->folder(), Seconds::zero());
  }
}

void Predictor::Versions::NoteRows() {
  Result<ServedState> rows = RowsState();
  absl::MutexLock lock(&mutex_);
  const auto text = [](const Result<ServedState>& state) {
    return state.ok() ? Describe(*state) : std::string();
  };
  const std::string now = text(rows);
  if (!now.empty() && now != text(state_.rows)) {
    LogServerEvent(LogLevel::kInfo, "rows_served",
                   {{"version", state_.version}, {"rows", now}});
  }
  state_.rows = std::move(rows);
}

Status Predictor::Versions::Look(bool at_once) {
  retired_.erase(
      std::remove_if(retired_.begin(), retired_.end(),
                     [](const auto& model) { return model.use_count() == 1; }),
      retired_.end());
  TFSWITCH_ASSIGN_OR_RETURN(const auto found, FindVersions(options_.model_dir));
  if (pinned_ >= 0 && found.count(pinned_) == 0) {
    return NoSuchVersion(options_.model_dir, pinned_, found);
  }
  {
    absl::MutexLock lock(&mutex_);
    for (auto it = state_.refused.begin(); it != state_.refused.end();) {
      it =
          found.count(it->first) > 0 ? std::next(it) : state_.refused.erase(it);
    }
  }
  const int64_t serving = state().version;
  std::map<int64_t, std::string> seen;
  Status refusal;
  for (auto it = found.rbegin(); it != found.rend(); ++it) {
    const auto& [version, folder] = *it;
    if (version == serving) break;
    if (pinned_ >= 0 && version != pinned_) continue;
    const std::string& files = seen[version] =
        FilesOf(folder, /*with_rows=*/false);
    const auto before = seen_.find(version);
    const bool is_settled = before != seen_.end() && before->second == files;
    const auto refused = refused_files_.find(version);
    const bool is_refused =
        refused != refused_files_.end() &&
        refused->second == FilesOf(folder, /*with_rows=*/true);
    if (is_refused || !(is_settled || at_once)) continue;
    const Status status = Take(version, folder);
    if (status.ok()) break;
    if (refusal.ok()) refusal = status;
  }
  seen_ = std::move(seen);
  return serving < 0 ? refusal : Status();
}

void Predictor::Versions::Watch() {
  const std::future<void> stopping = stopping_.get_future();
  // A longer interval would overflow.
  const Seconds interval =
      std::min<Seconds>(options_.poll_interval, std::chrono::hours(24 * 365));
  while (stopping.wait_for(interval) == std::future_status::timeout) {
    absl::MutexLock lock(&load_mutex_);
    const Status folder = Look(/*at_once=*/false);
    NoteRows();
    absl::MutexLock state_lock(&mutex_);
    // Once, not at every look.
    if (!folder.ok() && folder != state_.folder) {
      LogMessageInOrder(LogLevel::kError, {"models_unreadable"},
                        folder.message());
    }
    state_.folder = folder;
  }
}

// --- Predictor ---------------------------------------------------------------

Predictor::Predictor(std::unique_ptr<Versions> versions)
    : versions_(std::move(versions)) {}

Predictor::~Predictor() = default;

Result<std::unique_ptr<Predictor>> Predictor::Load(
    const PredictorOptions& options) {
  auto versions = std::make_unique<Versions>(options);
  Status status = versions->Start();
  if (!status.ok()) return status;
  return std::unique_ptr<Predictor>(new Predictor(std::move(versions)));
}

std::shared_ptr<const ModelVersion> Predictor::current() const {
  return versions_->current();
}

Status Predictor::Pin(int64_t version) { return versions_->Pin(version); }

void Predictor::Unpin() { versions_->Unpin(); }

Predictor::State Predictor::state() const { return versions_->state(); }

Result<ServedState> Predictor::RowsState() const {
  return versions_->RowsState();
}

Status Predictor::RefreshRows() {
  const Result<RowsApi>& rows = versions_->rows_api();
  return rows.ok() ? rows->Refresh(current()->folder()) : rows.status();
}

Status Predictor::RollBackRows(int64_t number) {
  const Result<RowsApi>& rows = versions_->rows_api();
  return rows.ok() ? rows->RollBack(current()->folder(), number)
                   : rows.status();
}

Status Predictor::ResumeRows() {
  const Result<RowsApi>& rows = versions_->rows_api();
  return rows.ok() ? rows->Resume(current()->folder()) : rows.status();
}

Status Predictor::WatchRows(Seconds interval) {
  return versions_->WatchRows(interval);
}

}  // namespace tfswitch
