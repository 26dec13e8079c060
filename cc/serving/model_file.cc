// ReadServingEnvironment() runs after the file was read, and replaces only the
// settings whose variables are set. So the person who serves a model can change
// settings without saving the model again.

#include "cc/serving/model_file.h"

#include <cstdlib>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "cc/base/status_macros.h"
#include "cc/wire/json.h"

namespace tfswitch {
namespace {

constexpr size_t kMaxModelFileBytes = size_t{16} << 20;
constexpr uint64_t kMaxCacheRows = uint64_t{1} << 32;
constexpr double kMaxSeconds = 1e9;

constexpr char kVerifyFirst[] = "TFSWITCH_SERVING_VERIFY_FIRST";
constexpr char kWatchSecs[] = "TFSWITCH_SERVING_WATCH_SECS";
constexpr char kAddresses[] = "TFSWITCH_SERVING_ADDRESSES";
constexpr char kDeadlineSecs[] = "TFSWITCH_SERVING_DEADLINE_SECS";
constexpr char kCacheRows[] = "TFSWITCH_SERVING_CACHE_ROWS";
constexpr char kCacheSecs[] = "TFSWITCH_SERVING_CACHE_SECS";

absl::Status BadVariable(absl::string_view name, absl::string_view expected,
                         absl::string_view value) {
  return absl::InvalidArgumentError(
      absl::StrCat(name, ": expected ", expected, ", got '", value, "'"));
}

// Reads the variable `name`. If it is not set, *duration does not change.
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

RemoteRowsOptions OptionsOf(const v1::RemoteRows& remote) {
  RemoteRowsOptions options;
  options.addresses = remote.addresses();
  options.deadline = absl::Seconds(remote.deadline_secs());
  options.cache_rows = remote.cache_rows();
  options.cache_lifetime = absl::Seconds(remote.cache_secs());
  return options;
}

absl::StatusOr<v1::ModelFile> ReadModelFile(const std::string& file) {
  v1::ModelFile model;
  TFSWITCH_RETURN_IF_ERROR(ReadMessageFile(file, kMaxModelFileBytes, &model));
  return model;
}

absl::StatusOr<ServingEnvironment> ReadServingEnvironment(
    RemoteRowsOptions* remote) {
  // The shortest valid time. In less time no packet could be sent.
  constexpr double kLeastSeconds = 1e-6;
  constexpr char kPositive[] = "a positive number of seconds";
  ServingEnvironment environment;
  const char* const verify = std::getenv(kVerifyFirst);
  if (verify != nullptr &&
      !absl::SimpleAtob(verify, &environment.verify_first)) {
    return BadVariable(kVerifyFirst, "0 or 1", verify);
  }
  TFSWITCH_RETURN_IF_ERROR(ReadVariable(kWatchSecs,
                                        "a number of seconds, or 0 for never",
                                        0.0, &environment.watch_interval));
  const char* const addresses = std::getenv(kAddresses);
  if (addresses != nullptr && *addresses != '\0') remote->addresses = addresses;
  TFSWITCH_RETURN_IF_ERROR(
      ReadVariable(kDeadlineSecs, kPositive, kLeastSeconds, &remote->deadline));
  TFSWITCH_RETURN_IF_ERROR(ReadVariable(kCacheSecs, kPositive, kLeastSeconds,
                                        &remote->cache_lifetime));
  const char* const rows = std::getenv(kCacheRows);
  if (rows != nullptr && (!absl::SimpleAtoi(rows, &remote->cache_rows) ||
                          remote->cache_rows > kMaxCacheRows)) {
    return BadVariable(kCacheRows, "a number of rows, or 0 for no cache", rows);
  }
  return environment;
}

}  // namespace tfswitch
