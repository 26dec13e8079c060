// One version of a model: a SavedModel in a session.

#ifndef CC_PREDICTOR_MODEL_VERSION_H_
#define CC_PREDICTOR_MODEL_VERSION_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "cc/predictor/values.h"
#include "tensorflow/cc/saved_model/loader.h"
#include "tensorflow/core/public/session.h"

namespace tfswitch {

struct Request {
  NamedTensors inputs;
  std::vector<std::string> outputs;  // Those wanted; empty: all.
  std::string signature;             // Empty: that of the options.
  int64_t version = -1;              // Refused by another version; -1: any.
  absl::Duration timeout = absl::InfiniteDuration();
};

struct Response {
  NamedTensors outputs;
  std::string signature;
  int64_t version = 0;
};

struct ModelOptions {
  std::string signature = "serving_default";
  std::vector<std::string> tags = {"serve"};
  // Threads of sessions. They are made for the first one of the process, and
  // the others share them. 0: one per core. Without threads for ops, at -1, a
  // request runs in the thread that asks: small models answer sooner so.
  int intra_op_threads = 0;
  int inter_op_threads = 0;
  // Run when a version is loaded, after those that lie with it (see
  // warm_up_requests.h). A version that fails one of them is refused.
  std::vector<Request> warm_up;
};

// Constant after it is loaded. Thread-safe.
class ModelVersion {
 public:
  // Loads a SavedModel and warms it up. An error names the folder and says what
  // to do: also for a model of another TensorFlow, and one with ops that the
  // process does not have.
  static absl::StatusOr<std::unique_ptr<ModelVersion>> Load(
      const ModelOptions& options, int64_t version, const std::string& folder);

  // Runs the signature. The inputs are checked before: InvalidArgument names
  // the input, what came and what is expected. NotFound for an unknown
  // signature or version.
  absl::StatusOr<Response> Predict(const Request& request) const;

  // The same with plain values, for the signature of the options. No outputs:
  // all.
  absl::StatusOr<NamedValues> Predict(
      const NamedValues& inputs,
      const std::vector<std::string>& outputs = {}) const;

  // NotFound names the signatures that there are. Empty: that of the options.
  absl::StatusOr<const tensorflow::SignatureDef*> Signature(
      const std::string& name) const;

  // NotFound for the number of another version; -1 is any.
  absl::Status CheckVersion(int64_t wanted) const;

  int64_t version() const { return version_; }
  const std::string& folder() const { return folder_; }
  const google::protobuf::Map<std::string, tensorflow::SignatureDef>&
  signatures() const {
    return bundle_.GetSignatures();
  }

 private:
  ModelVersion(const ModelOptions& options, int64_t version,
               const std::string& folder)
      : options_(options), version_(version), folder_(folder) {}

  absl::Status LoadGraph();
  absl::Status WarmUp() const;
  // Whether the signature can be run at all, whatever the values.
  absl::Status CheckGraph(const tensorflow::SignatureDef& signature) const;

  const ModelOptions options_;
  const int64_t version_;
  const std::string folder_;
  tensorflow::SavedModelBundleLite bundle_;
};

}  // namespace tfswitch

#endif  // CC_PREDICTOR_MODEL_VERSION_H_
