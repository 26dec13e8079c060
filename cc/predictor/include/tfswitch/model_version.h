// One version of a model: a SavedModel, loaded into a TensorFlow session.

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
  std::vector<std::string> outputs;  // The wanted ones; empty: all.
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
  // The numbers of threads for TensorFlow's sessions. The first model that the
  // process loads determines them for all later models. 0: one per core. -1: no
  // threads; a request then runs its ops in the calling thread, which is faster
  // for small models.
  int32_t intra_op_threads = 0;
  int32_t inter_op_threads = 0;
  // Further requests to run when a version is loaded, after those in the
  // model's file assets.extra/tf_serving_warmup_requests. If one fails, the
  // version is not served.
  std::vector<Request> warm_up;
};

// Constant after it is loaded. Thread-safe.
class TFSWITCH_EXPORTED ModelVersion {
 public:
  // Loads a SavedModel and runs its warm-up requests. Errors name the folder
  // and the remedy, also if the model needs another version of TensorFlow, or
  // ops that the process does not have.
  static Result<std::unique_ptr<ModelVersion>> Load(const ModelOptions& options,
                                                    int64_t version,
                                                    const std::string& folder);
  ~ModelVersion();

  // Runs a signature of the model. Checks the inputs first: InvalidArgument
  // names the input, the received value and the expected one. NotFound for an
  // unknown signature or version.
  Result<Response> Predict(const Request& request) const;

  // Runs the signature that ModelOptions names, with plain values. If `outputs`
  // is empty, returns all outputs.
  Result<NamedValues> Predict(
      const NamedValues& inputs,
      const std::vector<std::string>& outputs = {}) const;

  // Finds a signature; an empty name means the signature that the options name.
  // NotFound, with the existing names, if there is none.
  Result<const Signature*> FindSignature(const std::string& name) const;

  // NotFound if `version` is neither this version's number nor -1.
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
  // Checks that the graph has all inputs and outputs of the signature.
  Status CheckGraph(const Signature& signature) const;

  const ModelOptions options_;
  const int64_t version_;
  const std::string folder_;
  std::map<std::string, Signature> signatures_;
  std::unique_ptr<Graph> graph_;
};

}  // namespace tfswitch

#endif  // TFSWITCH_MODEL_VERSION_H_
