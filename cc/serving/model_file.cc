// Format and version are looked at before other fields, so that a file of a
// newer version is named as such and not as damaged. ObjectReader keeps the
// first error, so that the fields need no check one by one: Finish() tells
// whether all were right. The folder of rows is taken from that of the file, so
// that the folder of a model may be moved.
//
// ReadServingEnvironment() runs after the file is read and changes only the
// settings that a variable names, so that the user who serves a model can set
// them without saving the model again.

#include "cc/serving/model_file.h"

#include <cstdlib>
#include <filesystem>
#include <limits>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "cc/base/files.h"
#include "cc/base/status_macros.h"
#include "cc/serving/object_reader.h"

namespace tfswitch {
namespace {

namespace fs = std::filesystem;

constexpr size_t kMaxModelFileBytes = size_t{16} << 20;
constexpr uint64_t kMaxCacheRows = uint64_t{1} << 32;
constexpr double kMaxSeconds = 1e9;

constexpr char kVerifyFirst[] = "TFSWITCH_SERVING_VERIFY_FIRST";
constexpr char kWatchSeconds[] = "TFSWITCH_SERVING_WATCH_SECONDS";
constexpr char kAddresses[] = "TFSWITCH_SERVING_ADDRESSES";
constexpr char kDeadlineSeconds[] = "TFSWITCH_SERVING_DEADLINE_SECONDS";
constexpr char kCacheRows[] = "TFSWITCH_SERVING_CACHE_ROWS";
constexpr char kCacheSeconds[] = "TFSWITCH_SERVING_CACHE_SECONDS";

// A time that must pass, of a field that must be there.
void ReadSeconds(const char* field, ObjectReader* reader,
                 absl::Duration* duration) {
  float seconds = 0.0f;
  reader->Read(field, &seconds);
  const Json* const json = reader->Find(field);
  if (!(seconds > 0.0f && seconds <= static_cast<float>(kMaxSeconds))) {
    reader->Fail(field, "a positive number of seconds",
                 json == nullptr ? Json() : *json);
  }
  *duration = absl::Seconds(seconds);
}

void ReadText(const char* field, ObjectReader* reader, std::string* text) {
  reader->Read(field, text);
  if (text->empty()) reader->Fail(field, "a text", Json(*text));
}

absl::Status ReadTables(const Json& json, std::map<std::string, int>* tables) {
  ObjectReader reader(json, "tables", "model file");
  for (const auto& [table, entry] : json.items()) {
    uint64_t dim = 0;
    reader.Read(table.c_str(), std::numeric_limits<int32_t>::max(), &dim);
    (*tables)[table] = static_cast<int>(dim);
  }
  return reader.Finish();
}

// The content of a file of our format and version.
absl::StatusOr<ModelFile> FromJson(const Json& json, const std::string& file) {
  ModelFile model;
  ObjectReader reader(json, "", "model file");
  reader.Find("format");
  reader.Find("version");
  std::string mode;
  reader.Read("mode", &mode);
  ReadText("id", &reader, &model.id);
  model.is_remote = mode == "remote";
  if (model.is_remote) {
    RemoteRowsOptions& remote = model.remote;
    ReadText("addresses", &reader, &remote.addresses);
    ReadSeconds("deadline_seconds", &reader, &remote.deadline);
    reader.Read("cache_rows", kMaxCacheRows, &remote.cache_rows);
    ReadSeconds("cache_seconds", &reader, &remote.cache_lifetime);
  } else if (mode == "embedded") {
    std::string rows;
    ReadText("rows", &reader, &rows);
    model.rows =
        (fs::path(file).parent_path() / rows).lexically_normal().string();
  } else {
    reader.Fail("mode", "embedded or remote", Json(mode));
  }
  const Json* const tables = reader.Find("tables");
  if (tables == nullptr || !tables->is_object()) {
    reader.Fail("tables", "an object", tables == nullptr ? Json() : *tables);
  }
  TFSWITCH_RETURN_IF_ERROR(reader.Finish());
  TFSWITCH_RETURN_IF_ERROR(ReadTables(*tables, &model.tables));
  return model;
}

absl::Status BadVariable(absl::string_view name, absl::string_view expected,
                         absl::string_view value) {
  return absl::InvalidArgumentError(
      absl::StrCat(name, ": expected ", expected, ", got '", value, "'"));
}

// Leaves *seconds alone if the variable is not set.
absl::Status ReadVariable(const char* name, const char* expected, double least,
                          absl::Duration* duration) {
  const char* const text = std::getenv(name);
  if (text == nullptr) return absl::OkStatus();
  double seconds = 0.0;
  if (!absl::SimpleAtod(text, &seconds) || !(seconds >= least) ||
      seconds > kMaxSeconds) {
    return BadVariable(name, expected, text);
  }
  *duration = absl::Seconds(seconds);
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<ModelFile> ReadModelFile(const std::string& file) {
  TFSWITCH_ASSIGN_OR_RETURN(const std::string text,
                            ReadWholeFile(file, kMaxModelFileBytes));
  const auto damaged = [&file](absl::string_view why) {
    return absl::DataLossError(absl::StrCat("model file '", file,
                                            "' is damaged: ", why,
                                            ". Save the model again."));
  };
  const absl::StatusOr<Json> json = ParseJson(text);
  if (!json.ok()) return damaged(json.status().message());
  if (!json->is_object() || json->value("format", Json()) != kModelFileFormat) {
    return damaged("it is none of tfswitch");
  }
  const Json version = json->value("version", Json());
  if (version != kModelFileVersion) {
    return absl::FailedPreconditionError(absl::StrCat(
        "model file '", file, "' is of version ",
        version.dump(-1, ' ', true, Json::error_handler_t::replace),
        ", this tfswitch reads version ", kModelFileVersion,
        ". Serve it with the tfswitch that saved it, or save the model "
        "again."));
  }
  absl::StatusOr<ModelFile> model = FromJson(*json, file);
  if (!model.ok()) return damaged(model.status().message());
  return model;
}

absl::StatusOr<ServingEnvironment> ReadServingEnvironment(
    RemoteRowsOptions* remote) {
  // Smaller ones would be over before a packet is on its way.
  constexpr double kLeastSeconds = 1e-6;
  constexpr char kPositive[] = "a positive number of seconds";
  ServingEnvironment environment;
  const char* const verify = std::getenv(kVerifyFirst);
  if (verify != nullptr &&
      !absl::SimpleAtob(verify, &environment.verify_first)) {
    return BadVariable(kVerifyFirst, "0 or 1", verify);
  }
  TFSWITCH_RETURN_IF_ERROR(ReadVariable(kWatchSeconds,
                                        "a number of seconds, or 0 for never",
                                        0.0, &environment.watch_interval));
  const char* const addresses = std::getenv(kAddresses);
  if (addresses != nullptr && *addresses != '\0') remote->addresses = addresses;
  TFSWITCH_RETURN_IF_ERROR(ReadVariable(kDeadlineSeconds, kPositive,
                                        kLeastSeconds, &remote->deadline));
  TFSWITCH_RETURN_IF_ERROR(ReadVariable(kCacheSeconds, kPositive, kLeastSeconds,
                                        &remote->cache_lifetime));
  const char* const rows = std::getenv(kCacheRows);
  if (rows != nullptr && (!absl::SimpleAtoi(rows, &remote->cache_rows) ||
                          remote->cache_rows > kMaxCacheRows)) {
    return BadVariable(kCacheRows, "a number of rows, or 0 for no cache", rows);
  }
  return environment;
}

}  // namespace tfswitch
