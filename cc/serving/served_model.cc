#include "cc/serving/served_model.h"

#include <algorithm>
#include <filesystem>
#include <map>
#include <system_error>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "cc/base/files.h"
#include "cc/base/mutex.h"
#include "cc/base/status_macros.h"
#include "cc/serving/embedded_model.h"
#include "cc/serving/model_file.h"
#include "cc/serving/remote_model.h"

namespace tfswitch {
namespace {

namespace fs = std::filesystem;

// A model that is open, that is being opened, or that was open before.
struct KnownModel {
  // Held while a thread opens the model. Locked before the registry's mutex.
  Mutex opening;
  std::string id;                    // Constant.
  std::weak_ptr<ServedModel> model;  // Guarded by the registry's mutex.
};

// Never destroyed, because threads of TensorFlow may still look up rows while
// static objects are destroyed.
struct Registry {
  Mutex mutex;
  // The key is the path of the model file. The models at one path are in the
  // order in which they were opened.
  std::map<std::string, std::vector<std::shared_ptr<KnownModel>>> entries
      ABSL_GUARDED_BY(mutex);
};

Registry& TheRegistry() {
  static Registry* const registry = new Registry;
  return *registry;
}

absl::StatusOr<std::string> CanonicalPath(const std::string& path) {
  std::error_code error;
  const fs::path canonical = fs::canonical(path, error);
  if (error) return ErrnoStatus("find model file", path, error.value());
  return canonical.string();
}

absl::StatusOr<std::shared_ptr<ServedModel>> Open(
    const std::string& file, const v1::ModelFile& model,
    const OpenClient& open_client) {
  RemoteRowsOptions remote = OptionsOf(model.remote());
  TFSWITCH_ASSIGN_OR_RETURN(const ServingEnvironment environment,
                            ReadServingEnvironment(&remote));
  const std::map<std::string, int> tables(model.tables().begin(),
                                          model.tables().end());
  if (!model.has_remote()) {
    ServedRowsOptions options;
    // In the file the path is relative, because the folder of a model may be
    // moved.
    options.path = (fs::path(file).parent_path() / model.embedded().rows())
                       .lexically_normal();
    options.tables = tables;
    options.verify_first = environment.verify_first;
    return OpenEmbeddedModel(options, environment.watch_interval);
  }
  TFSWITCH_ASSIGN_OR_RETURN(std::shared_ptr<ParameterClient> client,
                            open_client(remote.addresses, remote.deadline));
  return OpenRemoteModel(remote, tables, std::move(client));
}

// Returns the entry of a model. If there is none yet, adds one at the end of
// the list for its path.
std::shared_ptr<KnownModel> EntryOf(const std::string& file,
                                    const std::string& id) {
  Registry& registry = TheRegistry();
  MutexLock lock(&registry.mutex);
  // Removes models that nobody serves or opens.
  for (auto it = registry.entries.begin(); it != registry.entries.end();) {
    std::vector<std::shared_ptr<KnownModel>>& of_path = it->second;
    of_path.erase(std::remove_if(of_path.begin(), of_path.end(),
                                 [](const std::shared_ptr<KnownModel>& entry) {
                                   return entry.use_count() == 1 &&
                                          entry->model.expired();
                                 }),
                  of_path.end());
    it = of_path.empty() ? registry.entries.erase(it) : std::next(it);
  }
  std::vector<std::shared_ptr<KnownModel>>& entries = registry.entries[file];
  for (const std::shared_ptr<KnownModel>& entry : entries) {
    if (entry->id == id) return entry;
  }
  auto entry = std::make_shared<KnownModel>();
  entry->id = id;
  entries.push_back(entry);
  return entry;
}

std::shared_ptr<ServedModel> ModelOf(const KnownModel& entry) {
  MutexLock lock(&TheRegistry().mutex);
  return entry.model.lock();
}

}  // namespace

absl::StatusOr<std::shared_ptr<ServedModel>> OpenServedModel(
    const std::string& model_file, const OpenClient& open_client) {
  TFSWITCH_ASSIGN_OR_RETURN(const std::string file, CanonicalPath(model_file));
  TFSWITCH_ASSIGN_OR_RETURN(const v1::ModelFile content, ReadModelFile(file));
  const std::shared_ptr<KnownModel> entry = EntryOf(file, content.id());
  // Threads that open the same model wait here, and then share its rows.
  // Threads that open other models do not wait.
  MutexLock lock(&entry->opening);
  std::shared_ptr<ServedModel> model = ModelOf(*entry);
  if (model == nullptr) {
    TFSWITCH_ASSIGN_OR_RETURN(model, Open(file, content, open_client));
  }
  MutexLock registry_lock(&TheRegistry().mutex);
  entry->model = model;
  // Moves the model to the end: the path means the model that was opened last.
  auto& entries = TheRegistry().entries[file];
  const auto place = std::find(entries.begin(), entries.end(), entry);
  if (place != entries.end()) std::rotate(place, place + 1, entries.end());
  return model;
}

absl::StatusOr<std::shared_ptr<ServedModel>> FindServedModel(
    const std::string& path) {
  std::error_code error;
  const std::string file = fs::is_directory(path, error)
                               ? absl::StrCat(path, "/", kModelFilePath)
                               : path;
  TFSWITCH_ASSIGN_OR_RETURN(const std::string canonical, CanonicalPath(file));
  Registry& registry = TheRegistry();
  MutexLock lock(&registry.mutex);
  const auto found = registry.entries.find(canonical);
  if (found != registry.entries.end()) {
    const auto& entries = found->second;
    for (auto entry = entries.rbegin(); entry != entries.rend(); ++entry) {
      if (std::shared_ptr<ServedModel> model = (*entry)->model.lock()) {
        return model;
      }
    }
  }
  return absl::NotFoundError(absl::StrCat(
      "model '", path, "' is not open in this process; load it first"));
}

}  // namespace tfswitch
