// One version of a model: a SavedModel in a session.

#ifndef TFSWITCH_MODEL_VERSION_H_
#define TFSWITCH_MODEL_VERSION_H_

#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "tfswitch/status.h"
#include "tfswitch/values.h"

namespace tfswitch {

struct Request {
  NamedTensors inputs;
  std::vector<std::string> outputs;  // Those wanted; empty: all.
  std::string signature;             // Empty: that of the options.
  int64_t version = -1;              // Refused by another version; -1: any.
  std::chrono::milliseconds timeout = std::chrono::milliseconds::max();
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
  int32_t intra_op_threads = 0;
  int32_t inter_op_threads = 0;
  // Run when a version is loaded, after those that lie with it in
  // assets.extra/tf_serving_warmup_requests. A version that fails one of them
  // is refused.
  std::vector<Request> warm_up;
};

// Constant after it is loaded. Thread-safe.
class TFSWITCH_EXPORTED ModelVersion {
 public:
  // Loads a SavedModel and warms it up. An error names the folder and says what
  // to do: also for a model of another TensorFlow, and one with ops that the
  // process does not have.
  static Result<std::unique_ptr<ModelVersion>> Load(const ModelOptions& options,
                                                    int64_t version,
                                                    const std::string& folder);
  ~ModelVersion();

  // Runs the signature. The inputs are checked before: InvalidArgument names
  // the input, what came and what is expected. NotFound for an unknown
  // signature or version.
  Result<Response> Predict(const Request& request) const;

  // The same with plain values, for the signature of the options. No outputs:
  // all.
  Result<NamedValues> Predict(
      const NamedValues& inputs,
      const std::vector<std::string>& outputs = {}) const;

  // NotFound names the signatures that there are. Empty: that of the options.
  Result<const Signature*> FindSignature(const std::string& name) const;

  // NotFound for the number of another version; -1 is any.
  Status CheckVersion(int64_t wanted) const;

  int64_t version() const { return version_; }
  const std::string& folder() const { return folder_; }
  const std::map<std::string, Signature>& signatures() const {
    return signatures_;
  }

 private:
  struct Graph;

  ModelVersion(const ModelOptions& options, int64_t version,
               const std::string& folder);

  Status LoadGraph();
  Status WarmUp() const;
  // Whether the graph has what the signature names, whatever the values.
  Status CheckGraph(const Signature& signature) const;

  const ModelOptions options_;
  const int64_t version_;
  const std::string folder_;
  std::map<std::string, Signature> signatures_;
  std::unique_ptr<Graph> graph_;
};

}  // namespace tfswitch

#endif  // TFSWITCH_MODEL_VERSION_H_
