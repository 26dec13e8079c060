#include "predictor.h"

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

namespace serving_cc {
namespace {

namespace fs = std::filesystem;

// Names, sizes and times of the files in a folder: the same as long as nobody
// changes them. An error of the file system gives another text too.
std::string FilesOf(const std::string& folder) {
  std::vector<std::string> files;
  std::error_code error;
  for (fs::recursive_directory_iterator it(folder, error), end;
       !error && it != end; it.increment(error)) {
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
    absl::Status status = LoadOpLibrary(options.op_library);
    if (!status.ok()) return status;
  }
  std::unique_ptr<Predictor> predictor(new Predictor(options));
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
  absl::MutexLock lock(&mutex_);
  return state_;
}

absl::Status Predictor::Pin(int64_t version) {
  absl::MutexLock lock(&load_mutex_);
  if (current()->version() != version) {
    const auto found = FindVersions(options_.model_dir);
    if (!found.ok()) return found.status();
    const auto folder = found->find(version);
    if (folder == found->end()) {
      return NoSuchVersion(options_.model_dir, version, *found);
    }
    absl::Status status = Take(version, folder->second);
    if (!status.ok()) return status;
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
  const std::string files = FilesOf(folder);
  absl::StatusOr<std::unique_ptr<ModelVersion>> model =
      ModelVersion::Load(options_.model, version, folder);
  if (model.ok() && FilesOf(folder) != files) {
    model = absl::UnavailableError(
        absl::StrCat("the model in '", folder,
                     "' was changed while it was loaded; copy it "
                     "under a name that is not a number, then rename it"));
  }
  absl::MutexLock lock(&mutex_);
  state_.loading = -1;
  if (!model.ok()) {
    LOG(ERROR) << "version " << version
               << " is refused: " << model.status().message();
    state_.refused[version] = model.status();
    refused_files_[version] = files;
    return model.status();
  }
  LOG(INFO) << "version " << version << " serves, from '" << folder << "'";
  state_.refused.erase(version);
  refused_files_.erase(version);
  state_.version = version;
  if (current_ != nullptr) retired_.push_back(std::move(current_));
  current_ = *std::move(model);
  return absl::OkStatus();
}

absl::Status Predictor::Look(bool at_once) {
  retired_.erase(
      std::remove_if(retired_.begin(), retired_.end(),
                     [](const auto& model) { return model.use_count() == 1; }),
      retired_.end());
  const auto found = FindVersions(options_.model_dir);
  if (!found.ok()) return found.status();
  if (pinned_ >= 0 && found->count(pinned_) == 0) {
    return NoSuchVersion(options_.model_dir, pinned_, *found);
  }
  {
    absl::MutexLock lock(&mutex_);
    for (auto it = state_.refused.begin(); it != state_.refused.end();) {
      it = found->count(it->first) > 0 ? std::next(it)
                                       : state_.refused.erase(it);
    }
  }
  const int64_t serving = state().version;
  std::map<int64_t, std::string> seen;
  absl::Status refusal;
  for (auto it = found->rbegin(); it != found->rend(); ++it) {
    const auto& [version, folder] = *it;
    if (version == serving) break;
    if (pinned_ >= 0 && version != pinned_) continue;
    const std::string& files = seen[version] = FilesOf(folder);
    const auto before = seen_.find(version);
    const bool is_settled = before != seen_.end() && before->second == files;
    const auto refused = refused_files_.find(version);
    const bool is_refused =
        refused != refused_files_.end() && refused->second == files;
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
    const absl::Status rows = current()->RefreshRows();
    absl::MutexLock state_lock(&mutex_);
    // Each once, not at every look.
    LOG_IF(ERROR, !folder.ok() && folder != state_.folder) << folder.message();
    LOG_IF(ERROR, !rows.ok() && rows != state_.rows) << rows.message();
    state_.folder = folder;
    state_.rows = rows;
  }
}

}  // namespace serving_cc
