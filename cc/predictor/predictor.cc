// One thread looks at the folder, and loads what is new under load_mutex_, so
// that requests, which take only mutex_ for a pointer, never wait for it.
// Look() takes a version whose files are the same as at the look before, and
// passes over one that was refused until its files change. The version that
// served before is kept in retired_ until its last request has ended, and freed
// by the next look, so that no request has to free it.

#include "cc/predictor/predictor.h"

#include <algorithm>
#include <filesystem>
#include <system_error>
#include <utility>

#include "absl/log/log.h"
#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "tensorflow/c/c_api.h"
#include "tensorflow/core/platform/statusor.h"

namespace tfswitch {
namespace {

namespace fs = std::filesystem;

// Where tfswitch.export puts rows, while the model serves and before.
constexpr char kRowsFolder[] = "assets.extra/tfswitch";

// Names, sizes and times of the files in a folder: the same as long as nobody
// changes them. An error of the file system gives another text too.
std::string FilesOf(const std::string& folder, bool with_rows) {
  const fs::path rows = fs::path(folder) / kRowsFolder;
  std::vector<std::string> files;
  std::error_code error;
  for (fs::recursive_directory_iterator it(folder, error), end;
       !error && it != end; it.increment(error)) {
    if (!with_rows && it->path() == rows) it.disable_recursion_pending();
    std::error_code ignored;  // Of a file that has just gone.
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
absl::StatusOr<std::map<int64_t, std::string>> FindVersions(
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
    return absl::UnavailableError(absl::StrCat(
        "cannot look for versions in '", model_dir, "': ", error.message()));
  }
  if (found.empty()) {
    return absl::NotFoundError(
        absl::StrCat("'", model_dir,
                     "' has neither a saved_model.pb nor a folder that is "
                     "named by a number and has one"));
  }
  return found;
}

absl::Status NoSuchVersion(const std::string& model_dir, int64_t version,
                           const std::map<int64_t, std::string>& found) {
  const auto number = [](std::string* text, const auto& entry) {
    absl::StrAppend(text, entry.first);
  };
  return absl::NotFoundError(absl::StrCat("version ", version, " is not in '",
                                          model_dir, "', which has ",
                                          absl::StrJoin(found, ", ", number)));
}

absl::Status LoadOpLibrary(const std::string& path) {
  TF_Status* status = TF_NewStatus();
  TF_LoadLibrary(path.c_str(), status);  // Stays for the life of the process.
  absl::Status loaded;
  if (TF_GetCode(status) != TF_OK) {
    loaded = absl::FailedPreconditionError(absl::StrCat(
        "cannot load the op library '", path, "': ", TF_Message(status),
        ". Give the path of one that was built for TensorFlow ", TF_Version()));
  }
  TF_DeleteStatus(status);
  return loaded;
}

}  // namespace

absl::StatusOr<std::unique_ptr<Predictor>> Predictor::Load(
    const PredictorOptions& options) {
  if (!options.op_library.empty()) {
    TF_RETURN_IF_ERROR(LoadOpLibrary(options.op_library));
  }
  std::unique_ptr<Predictor> predictor(new Predictor(options));
  predictor->rows_api_ = RowsApi::Find(options.op_library);
  {
    absl::MutexLock lock(&predictor->load_mutex_);
    predictor->pinned_ = options.version;
    absl::Status status = predictor->Look(/*at_once=*/true);
    if (predictor->current() == nullptr) return status;
  }
  if (options.poll_interval > absl::ZeroDuration()) {
    predictor->watcher_ = std::thread(&Predictor::Watch, predictor.get());
  }
  return predictor;
}

Predictor::~Predictor() {
  {
    absl::MutexLock lock(&mutex_);
    stopping_ = true;
  }
  if (watcher_.joinable()) watcher_.join();
}

std::shared_ptr<const ModelVersion> Predictor::current() const {
  absl::MutexLock lock(&mutex_);
  return current_;
}

Predictor::State Predictor::state() const {
  State state;
  {
    absl::MutexLock lock(&mutex_);
    state = state_;
  }
  // As they are now, not as they were when the folder was looked at.
  if (state.version >= 0) state.rows = RowsState();
  return state;
}

absl::Status Predictor::Pin(int64_t version) {
  absl::MutexLock lock(&load_mutex_);
  if (current()->version() != version) {
    TF_ASSIGN_OR_RETURN(const auto found, FindVersions(options_.model_dir));
    const auto folder = found.find(version);
    if (folder == found.end()) {
      return NoSuchVersion(options_.model_dir, version, found);
    }
    TF_RETURN_IF_ERROR(Take(version, folder->second));
  }
  pinned_ = version;
  return absl::OkStatus();
}

void Predictor::Unpin() {
  absl::MutexLock lock(&load_mutex_);
  pinned_ = -1;
}

absl::Status Predictor::Take(int64_t version, const std::string& folder) {
  {
    absl::MutexLock lock(&mutex_);
    state_.loading = version;
  }
  const std::string files = FilesOf(folder, /*with_rows=*/false);
  const std::string all_files = FilesOf(folder, /*with_rows=*/true);
  absl::StatusOr<std::unique_ptr<ModelVersion>> model =
      ModelVersion::Load(options_.model, version, folder);
  if (model.ok() && FilesOf(folder, /*with_rows=*/false) != files) {
    model = absl::UnavailableError(
        absl::StrCat("the model in '", folder,
                     "' was changed while it was loaded; copy it "
                     "under a name that is not a number, then rename it"));
  }
  const std::shared_ptr<const ModelVersion> before = current();
  std::shared_ptr<const ModelVersion> taken;
  {
    absl::MutexLock lock(&mutex_);
    state_.loading = -1;
    if (!model.ok()) {
      LOG(ERROR) << "version " << version
                 << " is refused: " << model.status().message();
      state_.refused[version] = model.status();
      // With its rows: a refused version is tried again when they change.
      refused_files_[version] = all_files;
      return model.status();
    }
    LOG(INFO) << "version " << version << " serves, from '" << folder << "'";
    state_.refused.erase(version);
    refused_files_.erase(version);
    state_.version = version;
    taken = *std::move(model);
    current_ = taken;
  }
  if (before != nullptr) retired_.push_back(before);
  WatchRowsOf(*taken, before.get());
  NoteRows();
  return absl::OkStatus();
}

absl::StatusOr<ServedState> Predictor::RowsState() const {
  if (!rows_api_.ok()) return rows_api_.status();
  return rows_api_->State(current()->folder());
}

absl::Status Predictor::RefreshRows() {
  if (!rows_api_.ok()) return rows_api_.status();
  return rows_api_->Refresh(current()->folder());
}

absl::Status Predictor::RollBackRows(int64_t number) {
  if (!rows_api_.ok()) return rows_api_.status();
  return rows_api_->RollBack(current()->folder(), number);
}

absl::Status Predictor::ResumeRows() {
  if (!rows_api_.ok()) return rows_api_.status();
  return rows_api_->Resume(current()->folder());
}

absl::Status Predictor::WatchRows(absl::Duration interval) {
  if (!rows_api_.ok()) return rows_api_.status();
  if (interval < absl::ZeroDuration()) {
    return absl::InvalidArgumentError(
        absl::StrCat("expected how often to look for rows, or zero for never, "
                     "got ",
                     absl::FormatDuration(interval)));
  }
  absl::MutexLock lock(&watch_mutex_);
  watch_interval_ = interval;
  is_watch_set_ = true;
  return rows_api_->Watch(current()->folder(), interval);
}

void Predictor::WatchRowsOf(const ModelVersion& model,
                            const ModelVersion* before) {
  if (!rows_api_.ok()) {
    LOG_IF(ERROR, std::filesystem::exists(
                      absl::StrCat(model.folder(), "/", kModelFile)))
        << "the rows of version " << model.version()
        << " stay as they are: " << rows_api_.status().message();
    return;
  }
  absl::MutexLock lock(&watch_mutex_);
  if (watch_interval_ > absl::ZeroDuration() || is_watch_set_) {
    const absl::Status status =
        rows_api_->Watch(model.folder(), watch_interval_);
    // Which says that there are none.
    LOG_IF(ERROR, !status.ok() && !absl::IsFailedPrecondition(status))
        << "the rows of version " << model.version()
        << " are not watched: " << status.message();
  }
  if (before != nullptr && before->folder() != model.folder()) {
    rows_api_->Watch(before->folder(), absl::ZeroDuration()).IgnoreError();
  }
}

void Predictor::NoteRows() {
  absl::StatusOr<ServedState> rows = RowsState();
  absl::MutexLock lock(&mutex_);
  const auto text = [](const absl::StatusOr<ServedState>& state) {
    return state.ok() ? Describe(*state) : std::string();
  };
  const std::string now = text(rows);
  LOG_IF(INFO, !now.empty() && now != text(state_.rows))
      << "version " << state_.version << ": " << now;
  state_.rows = std::move(rows);
}

absl::Status Predictor::Look(bool at_once) {
  retired_.erase(
      std::remove_if(retired_.begin(), retired_.end(),
                     [](const auto& model) { return model.use_count() == 1; }),
      retired_.end());
  TF_ASSIGN_OR_RETURN(const auto found, FindVersions(options_.model_dir));
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
  absl::Status refusal;
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
    const absl::Status status = Take(version, folder);
    if (status.ok()) break;
    if (refusal.ok()) refusal = status;
  }
  seen_ = std::move(seen);
  return serving < 0 ? refusal : absl::OkStatus();
}

void Predictor::Watch() {
  while (true) {
    {
      absl::MutexLock lock(&mutex_);
      if (mutex_.AwaitWithTimeout(absl::Condition(&stopping_),
                                  options_.poll_interval)) {
        return;
      }
    }
    absl::MutexLock lock(&load_mutex_);
    const absl::Status folder = Look(/*at_once=*/false);
    NoteRows();
    absl::MutexLock state_lock(&mutex_);
    // Once, not at every look.
    LOG_IF(ERROR, !folder.ok() && folder != state_.folder) << folder.message();
    state_.folder = folder;
  }
}

}  // namespace tfswitch
