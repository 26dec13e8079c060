// A version is loaded in three steps. First its ops are checked, because
// TensorFlow would notice missing ops inside of functions only when a request
// runs them. Then TensorFlow loads its graph and variables into a session. Last
// it is warmed up with its own requests or, if there are none, with a request
// of zeros. If the request of zeros fails, this is only logged, because a model
// may reject values that no client sends.
//
// Predict() checks names, dtypes and shapes against the signature before the
// session runs, because TensorFlow's own errors name nodes of the graph.

#include "tfswitch/model_version.h"

#include <algorithm>
#include <filesystem>
#include <iterator>
#include <system_error>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "cc/base/log_writer.h"
#include "cc/base/status_macros.h"
#include "cc/predictor/errors.h"
#include "cc/predictor/meta_graph.h"
#include "cc/predictor/tf_objects.h"
#include "cc/predictor/warm_up_requests.h"
#include "cc/predictor/whole_file.h"
#include "cc/predictor/wire.h"

namespace tfswitch {

// A session, and the places in its graph of the signatures' inputs and outputs.
struct ModelVersion::Graph {
  using Places = std::map<std::string, TF_Output>;
  // By the names of a signature.
  struct Bound {
    Places inputs;
    Places outputs;
    NamedTensors defaults;
  };

  ~Graph() {
    if (session == nullptr) return;
    const TfStatus ignored;
    TF_CloseSession(session, ignored.get());
    TF_DeleteSession(session, ignored.get());
  }

  // Starts the session. Sets `meta` even if the result is an error.
  Status Load(const ModelOptions& model, const std::string& folder,
              Result<MetaGraph>* meta);

  // Returns where the graph has the tensor with a name such as
  // "serving_default_ids:0". `oper` is null if the graph does not have it.
  TF_Output Find(const std::string& name) const {
    const size_t colon = name.rfind(':');
    TF_Output place = {nullptr, 0};
    if (colon == name.npos ||
        absl::SimpleAtoi(name.substr(colon + 1), &place.index)) {
      place.oper =
          TF_GraphOperationByName(graph.get(), name.substr(0, colon).c_str());
    }
    if (place.oper != nullptr &&
        (place.index < 0 ||
         place.index >= TF_OperationNumOutputs(place.oper))) {
      place.oper = nullptr;
    }
    return place;
  }

  TfGraph graph{TF_NewGraph()};
  // Deleted before the graph.
  TF_Session* session = nullptr;
  // One for each signature.
  std::map<const Signature*, Bound> bound;
};

namespace {

std::string QuotedKeys(const std::map<std::string, Signature>& map) {
  return absl::StrJoin(map, ", ", [](std::string* text, const auto& entry) {
    absl::StrAppend(text, "'", entry.first, "'");
  });
}

// A tensorflow.ConfigProto.
std::string MakeConfig(const ModelOptions& options) {
  std::string config;
  AppendInteger(2, options.intra_op_threads, &config);
  AppendInteger(5, options.inter_op_threads, &config);
  AppendInteger(7, 1, &config);  // allow_soft_placement
  return config;
}

bool IsCompatible(const TensorSpec& spec, const Tensor& tensor) {
  if (tensor.dtype() != spec.dtype) return false;
  if (!spec.shape) return true;
  const std::vector<int64_t> shape = tensor.shape();
  return std::equal(
      shape.begin(), shape.end(), spec.shape->begin(), spec.shape->end(),
      [](int64_t is, int64_t wanted) { return wanted < 0 || is == wanted; });
}

Status NotDense(const char* kind, const std::string& name) {
  return Error(StatusCode::kUnimplemented, kind, " '", name,
               "' is not one dense tensor; export a signature of its parts");
}

Status CheckInput(const std::string& name, const Tensor& tensor,
                  const TensorSpec& spec) {
  if (spec.graph_name.empty()) return NotDense("input", name);
  if (tensor.get() == nullptr) {
    return Invalid("input '", name, "': the tensor holds nothing");
  }
  if (!IsCompatible(spec, tensor)) {
    return Invalid("input '", name, "': expected ", Describe(spec), ", got ",
                   Describe(tensor));
  }
  return Status();
}

Status MissingInput(const std::string& name, const Signature& signature) {
  return Invalid("input '", name, "' is missing; the inputs are ",
                 Describe(signature.inputs));
}

Status UnknownInput(const std::string& name, const Signature& signature) {
  return Invalid("no input '", name, "'; the inputs are ",
                 Describe(signature.inputs));
}

// The error for an input or output (`kind`) that the graph does not have.
Status NotInGraph(const char* kind, const std::string& name,
                  const TensorSpec& spec) {
  if (spec.graph_name.empty()) return NotDense(kind, name);
  return Error(StatusCode::kNotFound, "'", name, "' is '", spec.graph_name,
               "', which the graph does not have; export the model again");
}

Status CheckOps(const MetaGraph& graph) {
  const TfBuffer known(TF_GetAllOpList());
  const std::set<std::string> names = ParseOpNames(BytesOf(*known));
  std::vector<std::string> missing;
  std::set_difference(graph.ops.begin(), graph.ops.end(), names.begin(),
                      names.end(), std::back_inserter(missing));
  if (missing.empty()) return Status();
  return Error(StatusCode::kNotFound, "this process does not have its ops ",
               absl::StrJoin(missing, ", "),
               ". Load the op library of the package that exported it.");
}

// Adds the TensorFlow versions to an error, because the usual reason is a model
// of another version.
Status WithVersions(const Status& status, const Result<MetaGraph>& meta) {
  if (meta.ok() && meta->tensorflow_version == TF_Version()) return status;
  const std::string exported =
      meta.ok() ? absl::StrCat("It was exported with TensorFlow ",
                               meta->tensorflow_version, ", and this")
                : "This";
  return Error(status.code(), status.message(), " ", exported, " is ",
               meta.ok() ? "" : "TensorFlow ", TF_Version(),
               ". Export the model with the versions that serve it, or serve "
               "it with those that exported it.");
}

// Protobuf's limit.
constexpr uint64_t kMaxMessageBytes = (uint64_t{1} << 31) - 1;

// Reads the model's file, before TensorFlow loads it.
Result<MetaGraph> ReadFile(const std::string& path,
                           const std::vector<std::string>& tags) {
  TFSWITCH_ASSIGN_OR_RETURN(const std::string bytes,
                            ReadWholeFile(path, kMaxMessageBytes));
  return ParseSavedModel(bytes, tags);
}

// A tensorflow.RunOptions; null if there is no timeout.
Result<TfBuffer> MakeRunOptions(std::chrono::milliseconds timeout) {
  if (timeout == std::chrono::milliseconds::max()) return TfBuffer();
  if (timeout.count() <= 0) {
    return Error(StatusCode::kDeadlineExceeded,
                 "the deadline passed before the request was run");
  }
  std::string message;
  AppendInteger(2, timeout.count(), &message);
  return MakeBuffer(message);
}

}  // namespace

ModelVersion::ModelVersion(const ModelOptions& options, int64_t version,
                           const std::string& folder)
    : options_(options),
      version_(version),
      folder_(folder),
      graph_(std::make_unique<Graph>()) {}

ModelVersion::~ModelVersion() = default;

Result<std::unique_ptr<ModelVersion>> ModelVersion::Load(
    const ModelOptions& options, int64_t version, const std::string& folder) {
  std::unique_ptr<ModelVersion> model(
      new ModelVersion(options, version, folder));
  Status status = model->LoadGraph();
  if (status.ok()) status = model->FindSignature("").status();
  if (status.ok()) status = model->WarmUp();
  if (!status.ok()) return WithContext(status, "the model in '", folder, "': ");
  return model;
}

Status ModelVersion::LoadGraph() {
  const std::string path = folder_ + "/saved_model.pb";
  Result<MetaGraph> meta = ReadFile(path, options_.tags);
  Status loaded = meta.ok() ? CheckOps(*meta) : Status();
  if (loaded.ok()) loaded = graph_->Load(options_, folder_, &meta);
  if (!loaded.ok()) {
    std::error_code ignored;
    // False only if saved_model.pb exists and could not be read; then the
    // TensorFlow versions do not matter. If the file does not exist, there may
    // be a saved_model.pbtxt instead.
    const bool is_whole = meta.ok() || !std::filesystem::exists(path, ignored);
    return is_whole ? WithVersions(loaded, meta) : loaded;
  }
  signatures_ = std::move(meta->signatures);
  for (const auto& [name, signature] : signatures_) {
    Graph::Bound& bound = graph_->bound[&signature];
    for (const auto& [input, spec] : signature.inputs) {
      bound.inputs[input] = graph_->Find(spec.graph_name);
    }
    for (const auto& [output, spec] : signature.outputs) {
      bound.outputs[output] = graph_->Find(spec.graph_name);
    }
    for (const auto& [input, value] : meta->defaults[name]) {
      Result<Tensor> tensor = ParseTensor(value);
      // Ignores a default value that cannot be made into a tensor.
      if (tensor.ok()) bound.defaults[input] = *std::move(tensor);
    }
  }
  return Status();
}

Status ModelVersion::Graph::Load(const ModelOptions& model,
                                 const std::string& folder,
                                 Result<MetaGraph>* meta) {
  const TfStatus status;
  const TfSessionOptions options(TF_NewSessionOptions());
  const std::string config = MakeConfig(model);
  TF_SetConfig(options.get(), config.data(), config.size(), status.get());
  if (!status.ok()) return status.ToStatus();
  std::vector<const char*> tags;
  for (const std::string& tag : model.tags) tags.push_back(tag.c_str());
  // TensorFlow serializes the graph only on request.
  const TfBuffer bytes(meta->ok() ? nullptr : TF_NewBuffer());
  session = TF_LoadSessionFromSavedModel(
      options.get(), /*run_options=*/nullptr, folder.c_str(), tags.data(),
      static_cast<int>(tags.size()), graph.get(), bytes.get(), status.get());
  if (!status.ok()) return status.ToStatus();
  if (meta->ok()) return Status();
  *meta = ParseMetaGraph(BytesOf(*bytes));
  return meta->ok() ? CheckOps(**meta) : meta->status();
}

Status ModelVersion::CheckGraph(const Signature& signature) const {
  const auto check = [](const char* kind,
                        const std::map<std::string, TensorSpec>& specs,
                        const Graph::Places& places) {
    for (const auto& [name, place] : places) {
      if (place.oper == nullptr) return NotInGraph(kind, name, specs.at(name));
    }
    return Status();
  };
  const Graph::Bound& bound = graph_->bound.at(&signature);
  Status status = check("input", signature.inputs, bound.inputs);
  return status.ok() ? check("output", signature.outputs, bound.outputs)
                     : status;
}

Status ModelVersion::WarmUp() const {
  Result<std::vector<Request>> requests = ReadWarmUpRequests(folder_);
  if (!requests.ok()) return requests.status();
  requests->insert(requests->end(), options_.warm_up.begin(),
                   options_.warm_up.end());
  for (const Request& request : *requests) {
    const Status status = Predict(request).status();
    if (!status.ok()) return WithContext(status, "a warm-up request: ");
  }
  if (!requests->empty()) return Status();
  const Signature& signature = **FindSignature("");
  const Result<Request> zeros = MakeWarmUpRequest(signature);
  Status status = zeros.ok() ? Predict(*zeros).status() : zeros.status();
  if (status.ok()) return status;
  LogMessageInOrder(
      LogLevel::kWarning, {"warm_up_failed"},
      absl::StrCat("model in '", folder_,
                   "': a warm-up request of zeros failed; give others: ",
                   status.message()));
  return CheckGraph(signature);
}

Result<const Signature*> ModelVersion::FindSignature(
    const std::string& name) const {
  const std::string& wanted = name.empty() ? options_.signature : name;
  const auto found = signatures_.find(wanted);
  if (found == signatures_.end()) {
    return Error(StatusCode::kNotFound, "no signature '", wanted,
                 "'; the signatures are ", QuotedKeys(signatures_));
  }
  return &found->second;
}

Status ModelVersion::CheckVersion(int64_t wanted) const {
  if (wanted < 0 || wanted == version_) return Status();
  return Error(StatusCode::kNotFound, "version ", wanted,
               " is not served; version ", version_,
               " is. Ask for it, or for none");
}

Result<Response> ModelVersion::Predict(const Request& request) const {
  if (Status status = CheckVersion(request.version); !status.ok()) {
    return status;
  }
  TFSWITCH_ASSIGN_OR_RETURN(const Signature* const signature,
                            FindSignature(request.signature));

  const Graph::Bound& bound = graph_->bound.at(signature);
  std::vector<TF_Output> feeds;
  std::vector<TF_Tensor*> fed;
  const auto feed = [&](const std::string& name, const Tensor& tensor) {
    const TF_Output place = bound.inputs.at(name);
    if (place.oper == nullptr) {
      return NotInGraph("input", name, signature->inputs.at(name));
    }
    feeds.push_back(place);
    fed.push_back(tensor.get());
    return Status();
  };
  for (const auto& [name, tensor] : request.inputs) {
    const auto spec = signature->inputs.find(name);
    if (spec == signature->inputs.end()) return UnknownInput(name, *signature);
    Status status = CheckInput(name, tensor, spec->second);
    if (status.ok()) status = feed(name, tensor);
    if (!status.ok()) return status;
  }
  for (const auto& entry : signature->inputs) {
    const std::string& name = entry.first;
    if (request.inputs.count(name) > 0) continue;
    const auto standard = bound.defaults.find(name);
    if (standard == bound.defaults.end()) return MissingInput(name, *signature);
    Status status = feed(name, standard->second);
    if (!status.ok()) return status;
  }

  std::vector<std::string> names = request.outputs;
  if (names.empty()) {
    for (const auto& entry : signature->outputs) names.push_back(entry.first);
  }
  std::vector<TF_Output> fetches;
  for (const std::string& name : names) {
    const auto spec = signature->outputs.find(name);
    if (spec == signature->outputs.end()) {
      return Invalid("no output '", name, "'; the outputs are ",
                     Describe(signature->outputs));
    }
    fetches.push_back(bound.outputs.at(name));
    if (fetches.back().oper == nullptr) {
      return NotInGraph("output", name, spec->second);
    }
  }

  TFSWITCH_ASSIGN_OR_RETURN(const TfBuffer run_options,
                            MakeRunOptions(request.timeout));
  std::vector<TF_Tensor*> fetched(fetches.size());
  const TfStatus status;
  TF_SessionRun(graph_->session, run_options.get(), feeds.data(), fed.data(),
                static_cast<int>(feeds.size()), fetches.data(), fetched.data(),
                static_cast<int>(fetches.size()), /*target_opers=*/nullptr,
                /*ntargets=*/0, /*run_metadata=*/nullptr, status.get());
  Response response;
  for (size_t i = 0; i < names.size(); ++i) {
    // Frees the outputs also after an error.
    if (fetched[i] != nullptr) {
      response.outputs[names[i]] = MakeTensor(fetched[i]);
    }
  }
  if (!status.ok()) return status.ToStatus();
  response.version = version_;
  response.signature =
      request.signature.empty() ? options_.signature : request.signature;
  return response;
}

Result<NamedValues> ModelVersion::Predict(
    const NamedValues& inputs, const std::vector<std::string>& outputs) const {
  TFSWITCH_ASSIGN_OR_RETURN(const Signature* const signature,
                            FindSignature(""));
  Request request;
  request.outputs = outputs;
  for (const auto& [name, values] : inputs) {
    const auto spec = signature->inputs.find(name);
    if (spec == signature->inputs.end()) return UnknownInput(name, *signature);
    Result<Tensor> tensor = ToTensor(values, spec->second.dtype);
    if (!tensor.ok()) {
      return WithContext(tensor.status(), "input '", name, "': ");
    }
    request.inputs[name] = *std::move(tensor);
  }
  TFSWITCH_ASSIGN_OR_RETURN(const Response response, Predict(request));
  NamedValues predicted;
  for (const auto& [name, tensor] : response.outputs) {
    Result<Values> values = ToValues(tensor);
    if (!values.ok()) {
      return WithContext(values.status(), "output '", name, "': ");
    }
    predicted[name] = *std::move(values);
  }
  return predicted;
}

}  // namespace tfswitch
