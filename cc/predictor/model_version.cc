// A version is loaded in three steps: its ops are looked for, because
// TensorFlow would miss those of functions only when a request runs them; its
// graph and variables go into a session; and it is warmed up, with the requests
// that lie with it or, if there are none, with zeros. A failed request of zeros
// only warns, because a model may refuse values that nobody sends.
//
// Predict() checks names, dtypes and shapes against the signature before the
// session runs, because TensorFlow's own errors name nodes of the graph.

#include "cc/predictor/model_version.h"

#include <algorithm>
#include <set>
#include <utility>

#include "absl/log/log.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "cc/predictor/warm_up_requests.h"
#include "tensorflow/c/c_api.h"
#include "tensorflow/cc/saved_model/reader.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/tensor.pb.h"
#include "tensorflow/core/framework/types.h"
#include "tensorflow/core/platform/statusor.h"
#include "tensorflow/core/protobuf/config.pb.h"

namespace tfswitch {
namespace {

using tensorflow::SignatureDef;
using tensorflow::Tensor;
using tensorflow::TensorInfo;

template <typename Map>
std::string QuotedKeys(const Map& map) {
  std::vector<std::string> keys;
  for (const auto& entry : map) {
    keys.push_back(absl::StrCat("'", entry.first, "'"));
  }
  std::sort(keys.begin(), keys.end());
  return absl::StrJoin(keys, ", ");
}

template <typename... Texts>
absl::Status Invalid(const Texts&... texts) {
  return absl::InvalidArgumentError(absl::StrCat(texts...));
}

template <typename... Texts>
absl::Status WithContext(const absl::Status& status, const Texts&... texts) {
  return absl::Status(status.code(), absl::StrCat(texts..., status.message()));
}

absl::Status CheckInput(const std::string& name, const Tensor& tensor,
                        const TensorInfo& info) {
  if (info.encoding_case() != TensorInfo::kName) {
    return absl::UnimplementedError(
        absl::StrCat("input '", name,
                     "' is not one dense tensor; export a "
                     "signature that takes its parts"));
  }
  if (tensor.dtype() != info.dtype() ||
      !tensorflow::PartialTensorShape(info.tensor_shape())
           .IsCompatibleWith(tensor.shape())) {
    return Invalid("input '", name, "': expected ", Describe(info), ", got ",
                   Describe(tensor));
  }
  return absl::OkStatus();
}

// The tensors to feed, by the names of the graph. Inputs that the signature has
// defaults for may be left out.
absl::StatusOr<std::vector<std::pair<std::string, Tensor>>> Feeds(
    const SignatureDef& signature, const NamedTensors& inputs) {
  std::vector<std::pair<std::string, Tensor>> feeds;
  for (const auto& [name, tensor] : inputs) {
    const auto info = signature.inputs().find(name);
    if (info == signature.inputs().end()) {
      return Invalid("no input '", name, "'; the inputs are ",
                     Describe(signature.inputs()));
    }
    TF_RETURN_IF_ERROR(CheckInput(name, tensor, info->second));
    feeds.emplace_back(info->second.name(), tensor);
  }
  for (const auto& [name, info] : signature.inputs()) {
    if (inputs.count(name) > 0) continue;
    const auto standard = signature.defaults().find(name);
    Tensor tensor;
    if (standard == signature.defaults().end() ||
        !tensor.FromProto(standard->second)) {
      return Invalid("input '", name, "' is missing; the inputs are ",
                     Describe(signature.inputs()));
    }
    feeds.emplace_back(info.name(), std::move(tensor));
  }
  return feeds;
}

// TensorFlow looks for the ops of functions, which all of a model usually is,
// when they first run.
absl::Status CheckOps(const tensorflow::MetaGraphDef& graph) {
  const tensorflow::FunctionDefLibrary& library = graph.graph_def().library();
  std::set<std::string> functions;
  std::set<std::string> ops;
  for (const auto& node : graph.graph_def().node()) ops.insert(node.op());
  for (const auto& function : library.function()) {
    functions.insert(function.signature().name());
    for (const auto& node : function.node_def()) ops.insert(node.op());
  }
  std::vector<std::string> missing;
  for (const std::string& op : ops) {
    const tensorflow::OpRegistrationData* known = nullptr;
    if (functions.count(op) == 0 &&
        !tensorflow::OpRegistry::Global()->LookUp(op, &known).ok()) {
      missing.push_back(op);
    }
  }
  if (missing.empty()) return absl::OkStatus();
  return absl::NotFoundError(absl::StrCat(
      "this process does not have its ops ", absl::StrJoin(missing, ", "),
      ". Load the op library of the package that exported it."));
}

}  // namespace

absl::StatusOr<std::unique_ptr<ModelVersion>> ModelVersion::Load(
    const ModelOptions& options, int64_t version, const std::string& folder) {
  std::unique_ptr<ModelVersion> model(
      new ModelVersion(options, version, folder));
  absl::Status status = model->LoadGraph();
  if (status.ok()) status = model->Signature("").status();
  if (status.ok()) status = model->WarmUp();
  if (!status.ok()) return WithContext(status, "the model in '", folder, "': ");
  return model;
}

absl::Status ModelVersion::LoadGraph() {
  tensorflow::MetaGraphDef graph;
  TF_RETURN_IF_ERROR(tensorflow::ReadMetaGraphDefFromSavedModel(
      folder_, {options_.tags.begin(), options_.tags.end()}, &graph));
  absl::Status status = CheckOps(graph);
  tensorflow::SessionOptions options;
  options.config.set_intra_op_parallelism_threads(options_.intra_op_threads);
  options.config.set_inter_op_parallelism_threads(options_.inter_op_threads);
  options.config.set_allow_soft_placement(true);
  std::unique_ptr<tensorflow::Session> session;
  if (status.ok()) {
    status = tensorflow::LoadMetagraphIntoSession(options, graph, &session);
  }
  if (status.ok()) {
    status = tensorflow::RestoreSession(tensorflow::RunOptions(), graph,
                                        folder_, &session);
  }
  // Which closes the session in any case.
  bundle_ = tensorflow::SavedModelBundleLite(std::move(session),
                                             graph.signature_def());
  if (status.ok()) return status;
  // The usual reason is a model of other versions than those of this process.
  return absl::Status(
      status.code(),
      absl::StrCat(status.message(), " It was exported with TensorFlow ",
                   graph.meta_info_def().tensorflow_version(), ", and this is ",
                   TF_Version(),
                   ". Export the model with the versions that serve it, or "
                   "serve it with those that exported it."));
}

absl::Status ModelVersion::CheckGraph(const SignatureDef& signature) const {
  tensorflow::CallableOptions options;
  for (const auto& [name, info] : signature.inputs()) {
    options.add_feed(info.name());
  }
  for (const auto& [name, info] : signature.outputs()) {
    options.add_fetch(info.name());
  }
  tensorflow::Session* session = bundle_.GetSession();
  tensorflow::Session::CallableHandle callable;
  absl::Status status = session->MakeCallable(options, &callable);
  return status.ok() ? session->ReleaseCallable(callable) : status;
}

absl::Status ModelVersion::WarmUp() const {
  absl::StatusOr<std::vector<Request>> requests = ReadWarmUpRequests(folder_);
  if (!requests.ok()) return requests.status();
  requests->insert(requests->end(), options_.warm_up.begin(),
                   options_.warm_up.end());
  for (const Request& request : *requests) {
    absl::Status status = Predict(request).status();
    if (!status.ok()) return WithContext(status, "a warm-up request: ");
  }
  if (!requests->empty()) return absl::OkStatus();
  const SignatureDef& signature = **Signature("");
  absl::Status status = Predict(MakeWarmUpRequest(signature)).status();
  if (status.ok()) return status;
  // A model may well refuse made up values, such as an empty string.
  LOG(WARNING) << "model in '" << folder_
               << "': a warm-up request of zeros failed; give others: "
               << status.message();
  return CheckGraph(signature);
}

absl::StatusOr<const SignatureDef*> ModelVersion::Signature(
    const std::string& name) const {
  const std::string& wanted = name.empty() ? options_.signature : name;
  const auto found = signatures().find(wanted);
  if (found == signatures().end()) {
    return absl::NotFoundError(absl::StrCat("no signature '", wanted,
                                            "'; the signatures are ",
                                            QuotedKeys(signatures())));
  }
  return &found->second;
}

absl::Status ModelVersion::CheckVersion(int64_t wanted) const {
  if (wanted < 0 || wanted == version_) return absl::OkStatus();
  return absl::NotFoundError(absl::StrCat("version ", wanted,
                                          " is not served; version ", version_,
                                          " is. Ask for it, or for none"));
}

absl::StatusOr<Response> ModelVersion::Predict(const Request& request) const {
  TF_RETURN_IF_ERROR(CheckVersion(request.version));
  TF_ASSIGN_OR_RETURN(const SignatureDef* const signature,
                      Signature(request.signature));
  TF_ASSIGN_OR_RETURN(const auto feeds, Feeds(*signature, request.inputs));

  const auto& known = signature->outputs();
  std::vector<std::string> names = request.outputs;
  if (names.empty()) {
    for (const auto& entry : known) names.push_back(entry.first);
  }
  std::vector<std::string> fetches;
  for (const std::string& name : names) {
    const auto found = known.find(name);
    if (found == known.end()) {
      return Invalid("no output '", name, "'; the outputs are ",
                     Describe(known));
    }
    fetches.push_back(found->second.name());
  }

  tensorflow::RunOptions run_options;
  if (request.timeout < absl::InfiniteDuration()) {
    if (request.timeout <= absl::ZeroDuration()) {
      return absl::DeadlineExceededError(
          "the deadline passed before the request was run");
    }
    // 0 would be none.
    run_options.set_timeout_in_ms(
        std::max<int64_t>(1, absl::ToInt64Milliseconds(request.timeout)));
  }
  std::vector<Tensor> outputs;
  tensorflow::RunMetadata metadata;
  TF_RETURN_IF_ERROR(bundle_.GetSession()->Run(run_options, feeds, fetches, {},
                                               &outputs, &metadata));

  Response response;
  response.version = version_;
  response.signature =
      request.signature.empty() ? options_.signature : request.signature;
  for (size_t i = 0; i < names.size(); ++i) {
    response.outputs[names[i]] = std::move(outputs[i]);
  }
  return response;
}

absl::StatusOr<NamedValues> ModelVersion::Predict(
    const NamedValues& inputs, const std::vector<std::string>& outputs) const {
  TF_ASSIGN_OR_RETURN(const SignatureDef* const signature, Signature(""));
  Request request;
  request.outputs = outputs;
  for (const auto& [name, values] : inputs) {
    const auto info = signature->inputs().find(name);
    if (info == signature->inputs().end()) {
      return Invalid("no input '", name, "'; the inputs are ",
                     Describe(signature->inputs()));
    }
    absl::StatusOr<Tensor> tensor = ToTensor(values, info->second.dtype());
    if (!tensor.ok()) {
      return WithContext(tensor.status(), "input '", name, "': ");
    }
    request.inputs[name] = *std::move(tensor);
  }
  TF_ASSIGN_OR_RETURN(const Response response, Predict(request));
  NamedValues predicted;
  for (const auto& [name, tensor] : response.outputs) {
    absl::StatusOr<Values> values = ToValues(tensor);
    if (!values.ok()) {
      return WithContext(values.status(), "output '", name, "': ");
    }
    predicted[name] = *std::move(values);
  }
  return predicted;
}

}  // namespace tfswitch
