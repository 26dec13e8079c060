// Reads the file of an exported model that says where the model's rows are. The
// file is among the model's assets.

#ifndef TFSWITCH_CC_SERVING_MODEL_FILE_H_
#define TFSWITCH_CC_SERVING_MODEL_FILE_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "tfswitch/v1/export.pb.h"

namespace tfswitch {

// Relative to the folder of a SavedModel.
inline constexpr char kModelFilePath[] = "assets/tfswitch_model.json";

// The settings of a model whose rows are looked up on servers.
struct RemoteRowsOptions {
  // "grpc://host:port,host:port" or "grpc+unix:///path", in shard order.
  std::string addresses;
  // The longest time of a lookup, including retries.
  absl::Duration deadline = absl::Seconds(5);
  // How many rows this process caches, and for how long.
  uint64_t cache_rows = 0;
  absl::Duration cache_lifetime = absl::Seconds(10);
};

RemoteRowsOptions OptionsOf(const v1::RemoteRows& remote);

// NotFound if there is no such file, DataLoss if it is damaged,
// FailedPrecondition if its format has another version. Thread-safe.
absl::StatusOr<v1::ModelFile> ReadModelFile(const std::string& file);

// The settings of a served model in environment variables.
struct ServingEnvironment {
  bool verify_first = false;      // TFSWITCH_SERVING_VERIFY_FIRST
  absl::Duration watch_interval;  // TFSWITCH_SERVING_WATCH_SECS
};

// Reads the environment. TFSWITCH_SERVING_ADDRESSES, _DEADLINE_SECS,
// _CACHE_ROWS and _CACHE_SECS replace a model file's settings in `remote`.
// InvalidArgument, naming the variable, for an invalid value. As thread-safe as
// getenv.
absl::StatusOr<ServingEnvironment> ReadServingEnvironment(
    RemoteRowsOptions* remote);

}  // namespace tfswitch

#endif  // TFSWITCH_CC_SERVING_MODEL_FILE_H_
