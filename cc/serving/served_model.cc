#include "cc/serving/served_model.h"

#include <cstdlib>
#include <filesystem>
#include <limits>
#include <map>
#include <system_error>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "cc/base/files.h"
#include "cc/base/mutex.h"
#include "cc/base/status_macros.h"
#include "cc/table/json_reader.h"

namespace tfswitch {
namespace {

namespace fs = std::filesystem;

constexpr size_t kMaxModelFileBytes = size_t{16} << 20;
constexpr char kVerifyFirst[] = "TFSWITCH_SERVING_VERIFY_FIRST";
constexpr char kWatchSeconds[] = "TFSWITCH_SERVING_WATCH_SECONDS";

// Never destroyed: threads of TensorFlow may still look up while static objects
// go.
struct Registry {
  Mutex mutex;
  std::map<std::string, std::weak_ptr<ServedRows>> open ABSL_GUARDED_BY(mutex);
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

absl::StatusOr<ServedRowsOptions> ReadModelFile(const std::string& file) {
  TFSWITCH_ASSIGN_OR_RETURN(const std::string text,
                            ReadWholeFile(file, kMaxModelFileBytes));
  const auto damaged = [&file](absl::string_view why) {
    return absl::DataLossError(absl::StrCat("model file '", file,
                                            "' is damaged: ", why,
                                            ". Export the model again."));
  };
  const Json json = Json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!json.is_object() || json.value("format", Json()) != kModelFileFormat) {
    return damaged("it is none of tfswitch");
  }
  const Json version = json.value("version", Json());
  if (version != kModelFileVersion) {
    return absl::FailedPreconditionError(absl::StrCat(
        "model file '", file, "' is of version ", version.dump(),
        ", this tfswitch reads version ", kModelFileVersion,
        ". Serve it with the tfswitch that exported it, or export again."));
  }
  ObjectReader reader(json, "", "model file");
  std::string format;
  uint64_t number = 0;
  std::string mode;
  std::string rows;
  reader.Read("format", &format);
  reader.Read("version", kModelFileVersion, &number);
  reader.Read("mode", &mode);
  reader.Read("rows", &rows);
  const Json* const tables = reader.Find("tables");
  if (tables == nullptr || !tables->is_object()) {
    reader.Fail("tables", "an object", tables == nullptr ? Json() : *tables);
  }
  absl::Status status = reader.Finish();
  if (!status.ok()) return damaged(status.message());
  if (mode != "embedded") {
    return damaged(absl::StrCat("mode: expected embedded, got '", mode, "'"));
  }
  ServedRowsOptions options;
  options.path =
      (fs::path(file).parent_path() / rows).lexically_normal().string();
  ObjectReader table_reader(*tables, "tables", "model file");
  for (const auto& [table, entry] : tables->items()) {
    uint64_t dim = 0;
    table_reader.Read(table.c_str(), std::numeric_limits<int32_t>::max(), &dim);
    options.tables[table] = static_cast<int>(dim);
  }
  status = table_reader.Finish();
  if (!status.ok()) return damaged(status.message());
  return options;
}

absl::Status ReadEnvironment(ServedRowsOptions* options,
                             absl::Duration* watch_interval) {
  const char* const verify = std::getenv(kVerifyFirst);
  if (verify != nullptr && !absl::SimpleAtob(verify, &options->verify_first)) {
    return absl::InvalidArgumentError(
        absl::StrCat(kVerifyFirst, ": expected 0 or 1, got '", verify, "'"));
  }
  double seconds = 0.0;
  const char* const watch = std::getenv(kWatchSeconds);
  if (watch != nullptr &&
      (!absl::SimpleAtod(watch, &seconds) || !(seconds >= 0.0))) {
    return absl::InvalidArgumentError(absl::StrCat(
        kWatchSeconds, ": expected a number of seconds, or 0 for never, got '",
        watch, "'"));
  }
  *watch_interval = absl::Seconds(seconds);
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::shared_ptr<ServedRows>> OpenServedModel(
    const std::string& model_file) {
  TFSWITCH_ASSIGN_OR_RETURN(const std::string file, CanonicalPath(model_file));
  Registry& registry = TheRegistry();
  // Also while it opens: it takes milliseconds, unless all is checked first,
  // and the others need the same rows.
  MutexLock lock(&registry.mutex);
  std::weak_ptr<ServedRows>& open = registry.open[file];
  if (std::shared_ptr<ServedRows> rows = open.lock()) return rows;
  TFSWITCH_ASSIGN_OR_RETURN(ServedRowsOptions options, ReadModelFile(file));
  absl::Duration watch_interval;
  TFSWITCH_RETURN_IF_ERROR(ReadEnvironment(&options, &watch_interval));
  TFSWITCH_ASSIGN_OR_RETURN(std::shared_ptr<ServedRows> rows,
                            ServedRows::Open(options));
  rows->Watch(watch_interval);
  open = rows;
  return rows;
}

absl::StatusOr<std::shared_ptr<ServedRows>> FindServedModel(
    const std::string& path) {
  std::error_code error;
  const std::string file = fs::is_directory(path, error)
                               ? absl::StrCat(path, "/", kModelFilePath)
                               : path;
  TFSWITCH_ASSIGN_OR_RETURN(const std::string canonical, CanonicalPath(file));
  Registry& registry = TheRegistry();
  MutexLock lock(&registry.mutex);
  const auto found = registry.open.find(canonical);
  if (found != registry.open.end()) {
    if (std::shared_ptr<ServedRows> rows = found->second.lock()) return rows;
  }
  return absl::NotFoundError(absl::StrCat(
      "model '", path, "' is not open in this process; load it first"));
}

}  // namespace tfswitch
