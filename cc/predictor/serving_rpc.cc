// Each method authenticates its caller, converts its request to the C types of
// serving_rpc.h and calls the handler. A Collector writes the handler's answers
// into the response. The methods are registered as streams of one message of
// bytes, so that this code can read and parse the request: otherwise gRPC would
// answer a malformed request with INTERNAL and no text. It would also parse
// requests that are too long, or whose callers are refused.
//
// If a model has rows, the process also contains libtfswitch_core.so. Both
// libraries share one libprotobuf, which ends a process that registers the same
// .proto file twice. So this library uses no message of protos/tfswitch, and
// has the access rules of its methods in this file instead of in options of
// access.proto.

#include "cc/predictor/serving_rpc.h"

#include <grpcpp/grpcpp.h>
#include <grpcpp/health_check_service_interface.h>
#include <grpcpp/resource_quota.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <deque>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/cleanup/cleanup.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "cc/base/files.h"
#include "cc/base/log_writer.h"
#include "cc/base/metric_list.h"
#include "cc/base/process_metrics.h"
#include "cc/base/status_macros.h"
#include "cc/base/steady_clock.h"
#include "cc/http/http_server.h"
#include "cc/http/pages.h"
#include "cc/predictor/tensor_codec.h"
#include "cc/rpc/access_control.h"
#include "cc/rpc/address.h"
#include "cc/rpc/channel_settings.h"
#include "cc/rpc/deadlines.h"
#include "cc/rpc/edge/listener.h"
#include "cc/rpc/process_settings.h"
#include "cc/rpc/server_settings.h"
#include "cc/rpc/status_conversion.h"
#include "cc/rpc/tls.h"
#include "tensorflow_serving/prediction_service.grpc.pb.h"
#include "tensorflow_serving/prediction_service.pb.h"

namespace tfswitch {
namespace {

namespace api = tensorflow::serving;

constexpr char kSignatureDef[] = "signature_def";
// Threads for polling, health checks and reflection, not for predictions.
constexpr int kOtherThreads = 64;
// The most calls of GetModelStatus at the same time. They end quickly, and use
// some of the other threads.
constexpr int kMaxStatusCalls = 16;
constexpr uint64_t kMaxConnections = 10'000;
constexpr int kMaxStreams = 1024;  // Calls of one connection.

ServingBytes BytesOf(const std::string& text) {
  return {text.data(), text.size()};
}

std::string StringOf(ServingBytes bytes) {
  return std::string(bytes.data, bytes.size);
}

ServingModelSpec SpecOf(const api::ModelSpec& spec) {
  return {BytesOf(spec.name()), BytesOf(spec.signature_name()),
          BytesOf(spec.version_label()),
          spec.has_version() ? spec.version().value() : -1};
}

// Milliseconds until the deadline of a call; negative if it has passed, 0 if
// the call has none.
int64_t TimeoutMs(const grpc::ServerContext& context) {
  const absl::Duration time_left = TimeLeft(context);
  if (time_left == absl::InfiniteDuration()) return 0;
  const int64_t left = absl::ToInt64Milliseconds(time_left);
  return left == 0 ? -1 : left;
}

// Collects the answer of a handler. Only the pointer to the response of the
// called method is not null.
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
      auto status = static_cast<grpc::StatusCode>(code);
      // This server has admitted its own caller, so the error is about the
      // token that it shows to the parameter servers.
      if (status == grpc::StatusCode::UNAUTHENTICATED ||
          status == grpc::StatusCode::PERMISSION_DENIED) {
        status = grpc::StatusCode::FAILED_PRECONDITION;
      }
      From(answer).status = grpc::Status(status, StringOf(message));
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
      if (!encoded.ok()) From(answer).status = ToGrpcStatus(encoded);
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

// Limits how many calls are in progress, since each holds a thread.
// Thread-safe.
class Slots {
 public:
  explicit Slots(int max) : max_(max) {}

  // Takes a slot. ResourceExhausted if all slots are in use; after OK the
  // caller must call Leave().
  absl::Status Enter() {
    if (taken_.fetch_add(1) < max_) return absl::OkStatus();
    --taken_;
    return absl::ResourceExhaustedError(
        absl::StrCat(max_, " requests are under way; try again"));
  }
  void Leave() { --taken_; }

 private:
  const int max_;
  std::atomic<int> taken_{0};
};

// Makes a handler that answers calls with run(context, caller, request,
// &response), if the caller may use the model that the request names, and a
// slot is free. It authenticates the caller, reads the bytes, checks their
// length, then parses them.
template <typename Request, typename Response, typename Run>
grpc::internal::MethodHandler* GatedHandler(AccessControl* access, Slots* slots,
                                            const char* method,
                                            const Run& run) {
  using Stream = grpc::ServerUnaryStreamer<grpc::ByteBuffer, Response>;
  const auto handle = [=](grpc::ServerContext* context, Stream* stream) {
    const MethodRule rule = {method, v1::ROLE_READ};
    std::vector<std::string> models;
    Caller caller;
    grpc::ByteBuffer bytes;
    Request request;
    absl::Status status = access->Admit(context, rule, &caller);
    // Takes the slot before the message is read, because the call holds a
    // thread from then on.
    if (status.ok()) status = slots->Enter();
    const auto leave = absl::MakeCleanup([slots, is_in = status.ok()] {
      if (is_in) slots->Leave();
    });
    if (status.ok() && !stream->Read(&bytes)) {
      status = absl::InvalidArgumentError("the call has no message");
    }
    if (status.ok()) status = caller.ParseRequest(context, &bytes, &request);
    if (status.ok()) {
      models.push_back(request.model_spec().name());
      // Here the list of tables in a token's record is a list of models.
      status = caller.CheckTable(models[0]);
    }
    if (status.ok()) {
      Response response;
      status = caller.WithoutNames(
          FromGrpcStatus(run(context, &caller, request, &response)));
      if (status.ok()) stream->Write(response, grpc::WriteOptions());
    }
    access->NoteEnd(*context, caller, rule, models, /*path=*/"", status);
    return ToGrpcStatus(status);
  };
  return new grpc::internal::StreamedUnaryHandler<grpc::ByteBuffer, Response>(
      handle);
}

// Thread-safe, as the handler is.
class PredictionService final : public api::PredictionService::Service {
 public:
  PredictionService(const ServingHandler& handler,
                    const ServingRpcOptions& options, AccessControl* access)
      : handler_(handler),
        max_tensor_bytes_(options.max_message_bytes),
        slots_(options.max_requests) {
    MarkMethodStreamed(
        IndexOf<api::PredictRequest>("PredictionService", "Predict"),
        GatedHandler<api::PredictRequest, api::PredictResponse>(
            access, &slots_, "Predict",
            [this](grpc::ServerContext* context, Caller* caller,
                   const api::PredictRequest& request,
                   api::PredictResponse* response) {
              const grpc::Status status = Answer(*context, request, response);
              return status.ok() ? ToGrpcStatus(caller->AddAnswer(
                                       context, response->ByteSizeLong()))
                                 : status;
            }));
    MarkMethodStreamed(IndexOf<api::GetModelMetadataRequest>(
                           "PredictionService", "GetModelMetadata"),
                       GatedHandler<api::GetModelMetadataRequest,
                                    api::GetModelMetadataResponse>(
                           access, &slots_, "GetModelMetadata",
                           [this](grpc::ServerContext*, Caller*,
                                  const api::GetModelMetadataRequest& request,
                                  api::GetModelMetadataResponse* response) {
                             return Describe(request, response);
                           }));
  }

 private:
  grpc::Status Describe(const api::GetModelMetadataRequest& request,
                        api::GetModelMetadataResponse* response) const {
    for (const std::string& field : request.metadata_field()) {
      if (field == kSignatureDef) continue;
      return grpc::Status(
          grpc::StatusCode::INVALID_ARGUMENT,
          absl::StrCat("metadata_field '", field, "' is not known; there is '",
                       kSignatureDef, "'"));
    }
    if (request.metadata_field().empty()) {
      return grpc::Status(grpc::StatusCode::INVALID_ARGUMENT,
                          absl::StrCat("metadata_field is empty; ask for '",
                                       kSignatureDef, "'"));
    }
    api::SerializedSignatureDefMap signatures;
    Collector collector;
    collector.model = response->mutable_model_spec();
    collector.model->set_name(request.model_spec().name());
    collector.signatures = &signatures;
    const ServingAnswer answer = collector.Functions();
    const ServingModelSpec spec = SpecOf(request.model_spec());
    handler_.get_metadata(handler_.context, &spec, &answer);
    google::protobuf::Any& any = (*response->mutable_metadata())[kSignatureDef];
    any.set_type_url("type.googleapis.com/tensorflow.serving.SignatureDefMap");
    signatures.SerializeToString(any.mutable_value());
    return collector.status;
  }

  grpc::Status Answer(const grpc::ServerContext& context,
                      const api::PredictRequest& request,
                      api::PredictResponse* response) const {
    const int64_t timeout_ms = TimeoutMs(context);
    if (timeout_ms < 0 || context.IsCancelled()) {
      return grpc::Status(grpc::StatusCode::DEADLINE_EXCEEDED,
                          "the deadline passed before the request was run");
    }
    // A deque, because it does not move its elements when it grows: other
    // objects have pointers to them.
    std::deque<DecodedTensor> decoded;
    std::vector<ServingTensor> inputs;
    for (const auto& [name, tensor] : request.inputs()) {
      const absl::Status status = DecodeTensor(name, tensor, max_tensor_bytes_,
                                               &decoded.emplace_back());
      if (!status.ok()) return ToGrpcStatus(status);
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
  Slots slots_;
};

// Thread-safe, as the handler is.
class ModelService final : public api::ModelService::Service {
 public:
  ModelService(const ServingHandler& handler, AccessControl* access)
      : handler_(handler), slots_(kMaxStatusCalls) {
    MarkMethodStreamed(
        IndexOf<api::GetModelStatusRequest>("ModelService", "GetModelStatus"),
        GatedHandler<api::GetModelStatusRequest, api::GetModelStatusResponse>(
            access, &slots_, "GetModelStatus",
            [this](grpc::ServerContext*, Caller*,
                   const api::GetModelStatusRequest& request,
                   api::GetModelStatusResponse* response) {
              Collector collector;
              collector.versions = response;
              const ServingAnswer answer = collector.Functions();
              const ServingModelSpec spec = SpecOf(request.model_spec());
              handler_.get_status(handler_.context, &spec, &answer);
              return collector.status;
            }));
  }

 private:
  const ServingHandler handler_;
  Slots slots_;
};

void PrepareServing() {
  static const bool prepared = [] {
    grpc::EnableDefaultHealthCheckService(true);
    // Turns deadlock detection off, which is on in the builds of distributions:
    // the detection takes one global lock at each of gRPC's many lock
    // operations.
    absl::SetMutexDeadlockDetectionMode(absl::OnDeadlockCycle::kIgnore);
    TakeLinesOfGrpc();
    return true;
  }();
  (void)prepared;
}

}  // namespace
}  // namespace tfswitch

// Thread-safe, except for destruction.
struct ServingRpcServer {
  ServingRpcServer(const ServingHandler& handler,
                   const ServingRpcOptions& options,
                   std::unique_ptr<tfswitch::AccessControl> its_access,
                   bool has_tls)
      : access(std::move(its_access)),
        predictions(handler, options, access.get()),
        models(handler, access.get()),
        listener({tfswitch::kMaxConnections, tfswitch::kMaxStreams, has_tls}) {}

  const std::unique_ptr<tfswitch::AccessControl> access;
  tfswitch::PredictionService predictions;
  tfswitch::ModelService models;
  // Deleted before the members that it uses.
  std::unique_ptr<grpc::Server> server;
  tfswitch::Listener listener;
  std::string address;
  std::atomic<const char*> why_not_ready{"no model is loaded yet"};
  std::unique_ptr<tfswitch::HttpServer> http;  // Null: none.
};

namespace tfswitch {
namespace {

void SetServing(ServingRpcServer* server, int32_t serving) {
  server->server->GetHealthCheckService()->SetServingStatus(serving != 0);
  server->why_not_ready = serving != 0 ? "" : "the server is stopping";
}

void AddModel(const ServingHandler& handler, MetricList* list) {
  ServingNumbers numbers;
  const ServingBytes name = handler.get_numbers(handler.context, &numbers);
  if (numbers.version < 0) return;
  const MetricList::Labels labels = {{"model", {name.data, name.size}}};
  list->Gauge("tfswitch_model_version", "The version that is served.",
              static_cast<double>(numbers.version), labels);
  if (numbers.data_ms == 0) return;
  list->Gauge("tfswitch_model_data_timestamp_seconds",
              "When the rows that are served were exported, since 1970.",
              static_cast<double>(numbers.data_ms) / 1e3, labels);
}

absl::StatusOr<std::unique_ptr<ServingRpcServer>> Listen(
    const ServingRpcOptions& options, const ServingHandler& handler) {
  TFSWITCH_ASSIGN_OR_RETURN(Address address, ParseAddress(options.address));
  SecurityOptions security;
  security.tls = WithAbsolutePaths(
      {options.tls_ca, options.tls_cert, options.tls_key, ""});
  if (options.token_file[0] != '\0') {
    security.token_file = AbsolutePath(options.token_file);
  }
  security.is_insecure = options.is_insecure != 0;
  TFSWITCH_ASSIGN_OR_RETURN(auto access,
                            AccessControl::Open(address, security));
  TFSWITCH_ASSIGN_OR_RETURN(auto credentials, MakeServerTls(security.tls));
  auto server = std::make_unique<ServingRpcServer>(
      handler, options, std::move(access), !(security.tls == TlsFiles()));
  TFSWITCH_RETURN_IF_ERROR(server->listener.Open(&address));
  const uint64_t max_message_bytes =
      std::min<uint64_t>(options.max_message_bytes, kLargestMessageLimit);
  grpc::ServerBuilder builder;
  auto acceptor = builder.experimental().AddExternalConnectionAcceptor(
      grpc::ServerBuilder::experimental_type::ExternalConnectionType::FROM_FD,
      credentials);
  builder.AddChannelArgument(GRPC_ARG_MAX_CONCURRENT_STREAMS, kMaxStreams);
  SetMessageLimits(max_message_bytes, &builder);
  // The limit has room for calls that will be refused, too, because each of
  // them also holds a thread.
  grpc::ResourceQuota quota("tfswitch-serving");
  quota.SetMaxThreads(static_cast<int>(
      std::min<int64_t>(int64_t{options.max_requests} + kOtherThreads,
                        std::numeric_limits<int>::max())));
  builder.SetResourceQuota(quota);
  SetReflection(options.has_reflection != 0, &builder);
  builder.RegisterService(&server->predictions);
  builder.RegisterService(&server->models);
  server->server = builder.BuildAndStart();
  if (server->server == nullptr) {
    return absl::InternalError("gRPC cannot build a server");
  }
  server->server->GetHealthCheckService()->SetServingStatus(false);
  server->address = address.ToString();
  if (options.http_address[0] != '\0') {
    HttpServerOptions http;
    http.address = options.http_address;
    http.security = security;
    TFSWITCH_ASSIGN_OR_RETURN(
        server->http,
        HttpServer::Start(http, StandardPages(
                                    [started = SteadyNow(), handler,
                                     access = server->access.get()] {
                                      MetricList list;
                                      AddProcessMetrics(TFSWITCH_VERSION,
                                                        started, &list);
                                      access->calls().AddTo(&list);
                                      AddModel(handler, &list);
                                      return list.Text();
                                    },
                                    [why_not = &server->why_not_ready] {
                                      return why_not->load();
                                    })));
  }
  server->listener.Start(std::move(acceptor));
  return server;
}

ServingRpcServer* Start(const ServingRpcOptions* options,
                        const ServingHandler* handler, int32_t* code,
                        char* error, size_t error_size) {
  PrepareServing();
  auto server = Listen(*options, *handler);
  if (server.ok()) return server->release();
  *code = static_cast<int32_t>(server.status().code());
  std::snprintf(error, error_size, "%s",
                std::string(server.status().message()).c_str());
  return nullptr;
}

void Stop(ServingRpcServer* server, int64_t grace_ms) {
  SetServing(server, 0);
  server->listener.Stop();
  server->server->Shutdown(
      ToDeadline(SteadyNow() + absl::Milliseconds(grace_ms)));
  delete server;
  // The program ends without running exit handlers.
  LogWriter::Get().Flush(absl::Seconds(1));
}

constexpr ServingRpcApi kApi = {
    &Start,
    [](const ServingRpcServer* server) { return server->address.c_str(); },
    [](const ServingRpcServer* server) {
      return server->http != nullptr ? server->http->address().c_str() : "";
    },
    &SetServing, &Stop};

}  // namespace
}  // namespace tfswitch

extern "C" __attribute__((visibility("default"))) const ServingRpcApi*
ServingRpc_GetApi(uint32_t version) {
  return version == SERVING_RPC_API_VERSION ? &tfswitch::kApi : nullptr;
}
