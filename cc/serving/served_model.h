// An exported model's rows in this process: opened by the ops of the model's
// graph, and steered by whoever serves it.

#ifndef TFSWITCH_CC_SERVING_SERVED_MODEL_H_
#define TFSWITCH_CC_SERVING_SERVED_MODEL_H_

#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "cc/serving/served_rows.h"

namespace tfswitch {

inline constexpr char kModelFileFormat[] = "tfswitch-model";
inline constexpr int kModelFileVersion = 1;
// Beneath the folder of a SavedModel.
inline constexpr char kModelFilePath[] = "assets/tfswitch_model.json";

// Opens the rows that a model file names, or finds them open: graphs that are
// loaded from one folder share them. The file is JSON:
//
//   {"format": "tfswitch-model", "version": 1, "mode": "embedded",
//    "rows": a folder of exports, relative to that of the file,
//    "tables": {name: dim}}
//
// The environment variable TFSWITCH_SERVING_VERIFY_FIRST, if it is 1, has all
// rows checked before they are served, and TFSWITCH_SERVING_WATCH_SECONDS has
// the folder watched from the beginning.
//
// NotFound if a file is missing, DataLoss if one is damaged,
// FailedPrecondition if it is of another version. Thread-safe.
absl::StatusOr<std::shared_ptr<ServedRows>> OpenServedModel(
    const std::string& model_file);

// Those that are open, by the path of their model file or SavedModel. NotFound
// if the model is not open in this process.
absl::StatusOr<std::shared_ptr<ServedRows>> FindServedModel(
    const std::string& path);

}  // namespace tfswitch

#endif  // TFSWITCH_CC_SERVING_SERVED_MODEL_H_
