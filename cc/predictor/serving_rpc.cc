// Each method reads its request into the C types of serving_rpc.h and calls the
// handler, whose answers a Collector writes into the response. Predict is a
// stream of one request to gRPC, so that it reads the request itself: else gRPC
// would answer a malformed one with INTERNAL and no text.

#include "cc/predictor/serving_rpc.h"

#include <grpcpp/ext/proto_server_reflection_plugin.h>
#include <grpcpp/grpcpp.h>
#include <grpcpp/health_check_service_interface.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <deque>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "cc/predictor/tensor_codec.h"
#include "tensorflow_serving/prediction_service.grpc.pb.h"
#include "tensorflow_serving/prediction_service.pb.h"

namespace tfswitch {
namespace {

namespace api = tensorflow::serving;
using std::chrono::milliseconds;
using std::chrono::system_clock;

constexpr char kSignatureDef[] = "signature_def";

ServingBytes BytesOf(const std::string& text) {
  return {text.data(), text.size()};
}

std::string StringOf(ServingBytes bytes) {
  return std::string(bytes.data, bytes.size);
}

grpc::Status ToGrpc(const absl::Status& status) {
  return grpc::Status(static_cast<grpc::StatusCode>(status.code()),
                      std::string(status.message()));
}

ServingModelSpec SpecOf(const api::ModelSpec& spec) {
  return {BytesOf(spec.name()), BytesOf(spec.signature_name()),
          BytesOf(spec.version_label()),
          spec.has_version() ? spec.version().value() : -1};
}

// Milliseconds until the deadline of a call, which may be in the past; 0 if it
// has none.
int64_t TimeoutMs(const grpc::ServerContext& context) {
  const system_clock::time_point deadline = context.deadline();
  if (deadline == system_clock::time_point::max()) return 0;
  const int64_t left =
      std::chrono::duration_cast<milliseconds>(deadline - system_clock::now())
          .count();
  return left == 0 ? -1 : left;
}

// Collects what a handler answers. The responses that a method does not have
// are null.
struct Collector {
  grpc::Status status;
  api::ModelSpec* model = nullptr;
  api::PredictResponse* prediction = nullptr;
  api::SerializedSignatureDefMap* signatures = nullptr;
  api::GetModelStatusResponse* versions = nullptr;

  static Collector& From(void* answer) {
    return *static_cast<Collector*>(answer);
  }

  ServingAnswer Functions() {
    ServingAnswer functions;
    functions.answer = this;
    functions.set_error = [](void* answer, int32_t code, ServingBytes message) {
      From(answer).status =
          grpc::Status(static_cast<grpc::StatusCode>(code), StringOf(message));
    };
    functions.set_model = [](void* answer, int64_t version,
                             ServingBytes signature) {
      api::ModelSpec* model = From(answer).model;
      model->mutable_version()->set_value(version);
      model->set_signature_name(StringOf(signature));
    };
    functions.add_output = [](void* answer, const ServingTensor* output) {
      const absl::Status encoded = EncodeTensor(
          *output,
          &(*From(answer)
                 .prediction->mutable_outputs())[StringOf(output->name)]);
      if (!encoded.ok()) From(answer).status = ToGrpc(encoded);
    };
    functions.add_signature = [](void* answer, ServingBytes name,
                                 ServingBytes def) {
      (*From(answer).signatures->mutable_signature_def())[StringOf(name)] =
          StringOf(def);
    };
    functions.add_version = [](void* answer, int64_t version, int32_t state,
                               int32_t code, ServingBytes message) {
      auto* added = From(answer).versions->add_model_version_status();
      added->set_version(version);
      added->set_state(static_cast<api::ModelVersionStatus::State>(state));
      added->mutable_status()->set_error_code(code);
      added->mutable_status()->set_error_message(message.data, message.size);
    };
    return functions;
  }
};

// Thread-safe, as the handler is.
class PredictionService final
    : public api::PredictionService::WithStreamedUnaryMethod_Predict<
          api::PredictionService::Service> {
 public:
  PredictionService(const ServingHandler& handler,
                    const ServingRpcOptions& options)
      : handler_(handler),
        max_tensor_bytes_(options.max_message_bytes),
        max_requests_(options.max_requests) {}

  // One request and one response, read here: gRPC would answer bytes that are
  // no request with INTERNAL and no text.
  grpc::Status StreamedPredict(
      grpc::ServerContext* context,
      grpc::ServerUnaryStreamer<api::PredictRequest, api::PredictResponse>*
          stream) override {
    api::PredictRequest request;
    if (!stream->Read(&request)) {
      return grpc::Status(
          grpc::StatusCode::INVALID_ARGUMENT,
          "the message is not a tensorflow.serving.PredictRequest");
    }
    api::PredictResponse response;
    grpc::Status status(
        grpc::StatusCode::RESOURCE_EXHAUSTED,
        absl::StrCat(max_requests_, " requests are under way; try again"));
    if (num_requests_.fetch_add(1) < max_requests_) {
      status = Answer(*context, request, &response);
    }
    --num_requests_;
    if (status.ok()) stream->Write(response, grpc::WriteOptions());
    return status;
  }

  grpc::Status GetModelMetadata(
      grpc::ServerContext* /*context*/,
      const api::GetModelMetadataRequest* request,
      api::GetModelMetadataResponse* response) override {
    for (const std::string& field : request->metadata_field()) {
      if (field == kSignatureDef) continue;
      return grpc::Status(
          grpc::StatusCode::INVALID_ARGUMENT,
          absl::StrCat("metadata_field '", field, "' is not known; there is '",
                       kSignatureDef, "'"));
    }
    if (request->metadata_field().empty()) {
      return grpc::Status(grpc::StatusCode::INVALID_ARGUMENT,
                          absl::StrCat("metadata_field is empty; ask for '",
                                       kSignatureDef, "'"));
    }
    api::SerializedSignatureDefMap signatures;
    Collector collector;
    collector.model = response->mutable_model_spec();
    collector.model->set_name(request->model_spec().name());
    collector.signatures = &signatures;
    const ServingAnswer answer = collector.Functions();
    const ServingModelSpec spec = SpecOf(request->model_spec());
    handler_.get_metadata(handler_.context, &spec, &answer);
    google::protobuf::Any& any = (*response->mutable_metadata())[kSignatureDef];
    any.set_type_url("type.googleapis.com/tensorflow.serving.SignatureDefMap");
    signatures.SerializeToString(any.mutable_value());
    return collector.status;
  }

 private:
  grpc::Status Answer(const grpc::ServerContext& context,
                      const api::PredictRequest& request,
                      api::PredictResponse* response) const {
    const int64_t timeout_ms = TimeoutMs(context);
    if (timeout_ms < 0 || context.IsCancelled()) {
      return grpc::Status(grpc::StatusCode::DEADLINE_EXCEEDED,
                          "the deadline passed before the request was run");
    }
    std::deque<DecodedTensor> decoded;  // Which do not move.
    std::vector<ServingTensor> inputs;
    for (const auto& [name, tensor] : request.inputs()) {
      const absl::Status status = DecodeTensor(name, tensor, max_tensor_bytes_,
                                               &decoded.emplace_back());
      if (!status.ok()) return ToGrpc(status);
      inputs.push_back(decoded.back().view);
    }
    std::vector<ServingBytes> outputs;
    for (const std::string& name : request.output_filter()) {
      outputs.push_back(BytesOf(name));
    }
    const ServingRequest call = {SpecOf(request.model_spec()),
                                 inputs.data(),
                                 inputs.size(),
                                 outputs.data(),
                                 outputs.size(),
                                 timeout_ms};

    Collector collector;
    collector.model = response->mutable_model_spec();
    collector.model->set_name(request.model_spec().name());
    collector.prediction = response;
    const ServingAnswer answer = collector.Functions();
    handler_.predict(handler_.context, &call, &answer);
    return collector.status;
  }

  const ServingHandler handler_;
  const int64_t max_tensor_bytes_;
  const int max_requests_;
  std::atomic<int> num_requests_{0};
};

// Thread-safe, as the handler is.
class ModelService final : public api::ModelService::Service {
 public:
  explicit ModelService(const ServingHandler& handler) : handler_(handler) {}

  grpc::Status GetModelStatus(grpc::ServerContext* /*context*/,
                              const api::GetModelStatusRequest* request,
                              api::GetModelStatusResponse* response) override {
    Collector collector;
    collector.versions = response;
    const ServingAnswer answer = collector.Functions();
    const ServingModelSpec spec = SpecOf(request->model_spec());
    handler_.get_status(handler_.context, &spec, &answer);
    return collector.status;
  }

 private:
  const ServingHandler handler_;
};

void PrepareProcess() {
  static const bool prepared = [] {
    grpc::EnableDefaultHealthCheckService(true);
    grpc::reflection::InitProtoReflectionServerBuilderPlugin();
    // Distributions leave it on in their builds, and it takes one global lock
    // at each of gRPC's many lock operations.
    absl::SetMutexDeadlockDetectionMode(absl::OnDeadlockCycle::kIgnore);
    return true;
  }();
  (void)prepared;
}

}  // namespace
}  // namespace tfswitch

// Thread-safe but for the end of its life.
struct ServingRpcServer {
  ServingRpcServer(const ServingHandler& handler,
                   const ServingRpcOptions& options)
      : predictions(handler, options), models(handler) {}

  tfswitch::PredictionService predictions;
  tfswitch::ModelService models;
  std::unique_ptr<grpc::Server> server;  // Goes before what it uses.
  std::string address;
};

namespace tfswitch {
namespace {

void SetServing(ServingRpcServer* server, int32_t serving) {
  server->server->GetHealthCheckService()->SetServingStatus(serving != 0);
}

ServingRpcServer* Start(const ServingRpcOptions* options,
                        const ServingHandler* handler, char* error,
                        size_t error_size) {
  PrepareProcess();
  auto server = std::make_unique<ServingRpcServer>(*handler, *options);
  const int max_message_bytes = static_cast<int>(std::min<int64_t>(
      options->max_message_bytes, std::numeric_limits<int>::max()));
  grpc::ServerBuilder builder;
  int port = 0;
  builder.AddListeningPort(options->address, grpc::InsecureServerCredentials(),
                           &port);
  // Or a second server would silently take every other connection.
  builder.AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);
  builder.SetMaxReceiveMessageSize(max_message_bytes);
  builder.SetMaxSendMessageSize(max_message_bytes);
  builder.RegisterService(&server->predictions);
  builder.RegisterService(&server->models);
  server->server = builder.BuildAndStart();
  if (server->server == nullptr) {
    std::snprintf(error, error_size,
                  "cannot listen on %s: the address is not of this machine, or "
                  "another server has it",
                  options->address);
    return nullptr;
  }
  SetServing(server.get(), 0);
  server->address = options->address;
  if (server->address.rfind("unix:", 0) != 0) {
    server->address.resize(server->address.rfind(':') + 1);
    absl::StrAppend(&server->address, port);
  }
  return server.release();
}

void Stop(ServingRpcServer* server, int64_t grace_ms) {
  SetServing(server, 0);
  server->server->Shutdown(system_clock::now() + milliseconds(grace_ms));
  delete server;
}

constexpr ServingRpcApi kApi = {
    &Start,
    [](const ServingRpcServer* server) { return server->address.c_str(); },
    &SetServing, &Stop};

}  // namespace
}  // namespace tfswitch

extern "C" __attribute__((visibility("default"))) const ServingRpcApi*
ServingRpc_GetApi(uint32_t version) {
  return version == SERVING_RPC_API_VERSION ? &tfswitch::kApi : nullptr;
}
