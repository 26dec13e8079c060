#include "cc/rpc/server/health_service.h"

#include <grpcpp/support/method_handler.h>
#include <grpcpp/support/proto_buffer_reader.h>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"

namespace tfswitch {
namespace {

using grpc::health::v1::HealthCheckRequest;

// Longer than the name of any service.
constexpr size_t kMaxRequestBytes = 4096;

// A watcher whose connection has closed holds its thread for at most this long.
constexpr absl::Duration kCancellationCheck = absl::Seconds(1);

grpc::Status Parse(grpc::ByteBuffer bytes, HealthCheckRequest* request) {
  if (bytes.Length() > kMaxRequestBytes) {
    return grpc::Status(grpc::StatusCode::RESOURCE_EXHAUSTED,
                        absl::StrCat("a request of ", bytes.Length(),
                                     " bytes for a name of a service; at most ",
                                     kMaxRequestBytes, " are read"));
  }
  grpc::ProtoBufferReader reader(&bytes);
  if (request->ParseFromZeroCopyStream(&reader)) return grpc::Status::OK;
  return grpc::Status(grpc::StatusCode::INVALID_ARGUMENT,
                      "the message is not a grpc.health.v1.HealthCheckRequest");
}

}  // namespace

HealthService::HealthService(const std::string& service) : service_(service) {
  using grpc::ByteBuffer;
  using grpc::internal::RpcMethod;
  const auto add = [this](const char* method, RpcMethod::RpcType type,
                          grpc::internal::MethodHandler* handler) {
    AddMethod(new grpc::internal::RpcServiceMethod(method, type, handler));
  };
  add("/grpc.health.v1.Health/Check", RpcMethod::NORMAL_RPC,
      new grpc::internal::RpcMethodHandler<HealthService, ByteBuffer, Response>(
          [](HealthService* self, grpc::ServerContext*, const ByteBuffer* bytes,
             Response* response) {
            Request request;
            const grpc::Status status = Parse(*bytes, &request);
            return status.ok() ? self->Check(request, response) : status;
          },
          this));
  add("/grpc.health.v1.Health/Watch", RpcMethod::SERVER_STREAMING,
      new grpc::internal::ServerStreamingHandler<HealthService, ByteBuffer,
                                                 Response>(
          [](HealthService* self, grpc::ServerContext* context,
             const ByteBuffer* bytes, grpc::ServerWriter<Response>* writer) {
            Request request;
            const grpc::Status status = Parse(*bytes, &request);
            return status.ok() ? self->Watch(*context, request, writer)
                               : status;
          },
          this));
}

void HealthService::StartServing() {
  MutexLock lock(&mutex_);
  serving_ = !stopped_;
  changed_.NotifyAll();
}

void HealthService::StopServing() {
  MutexLock lock(&mutex_);
  serving_ = false;
  stopped_ = true;
  changed_.NotifyAll();
}

HealthService::Status HealthService::StatusOf(
    const std::string& service) const {
  if (!service.empty() && service != service_) {
    return Response::SERVICE_UNKNOWN;
  }
  return serving_ ? Response::SERVING : Response::NOT_SERVING;
}

grpc::Status HealthService::Check(const Request& request, Response* response) {
  MutexLock lock(&mutex_);
  const Status status = StatusOf(request.service());
  if (status == Response::SERVICE_UNKNOWN) {
    return grpc::Status(
        grpc::StatusCode::NOT_FOUND,
        absl::StrCat("no service '", request.service(), "' here"));
  }
  response->set_status(status);
  return grpc::Status::OK;
}

grpc::Status HealthService::Watch(const grpc::ServerContext& context,
                                  const Request& request,
                                  grpc::ServerWriter<Response>* writer) {
  Response response;
  {
    MutexLock lock(&mutex_);
    if (num_watchers_ == kMaxWatchers) {
      return grpc::Status(grpc::StatusCode::RESOURCE_EXHAUSTED,
                          absl::StrCat("there are ", kMaxWatchers,
                                       " watchers already; use Check"));
    }
    ++num_watchers_;
    response.set_status(StatusOf(request.service()));
  }
  for (bool open = true; open && !context.IsCancelled();) {
    open = writer->Write(response);
    MutexLock lock(&mutex_);
    while (!stopped_ && StatusOf(request.service()) == response.status() &&
           !context.IsCancelled()) {
      changed_.WaitFor(&mutex_, kCancellationCheck);
    }
    if (StatusOf(request.service()) == response.status()) break;
    response.set_status(StatusOf(request.service()));
  }
  MutexLock lock(&mutex_);
  --num_watchers_;
  return grpc::Status(grpc::StatusCode::UNAVAILABLE, "the server is stopping");
}

}  // namespace tfswitch
