#include "cc/rpc/server/health_service.h"

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"

namespace tfswitch {
namespace {

using grpc::health::v1::HealthCheckRequest;
using grpc::health::v1::HealthCheckResponse;

// How long a watcher that has gone keeps its thread.
constexpr absl::Duration kCancellationCheck = absl::Seconds(1);

}  // namespace

HealthService::HealthService(const std::string& service) : service_(service) {}

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
    return HealthCheckResponse::SERVICE_UNKNOWN;
  }
  return serving_ ? HealthCheckResponse::SERVING
                  : HealthCheckResponse::NOT_SERVING;
}

grpc::Status HealthService::Check(grpc::ServerContext* context,
                                  const HealthCheckRequest* request,
                                  HealthCheckResponse* response) {
  MutexLock lock(&mutex_);
  const Status status = StatusOf(request->service());
  if (status == HealthCheckResponse::SERVICE_UNKNOWN) {
    return grpc::Status(
        grpc::StatusCode::NOT_FOUND,
        absl::StrCat("no service '", request->service(), "' here"));
  }
  response->set_status(status);
  return grpc::Status::OK;
}

grpc::Status HealthService::Watch(
    grpc::ServerContext* context, const HealthCheckRequest* request,
    grpc::ServerWriter<HealthCheckResponse>* writer) {
  HealthCheckResponse response;
  {
    MutexLock lock(&mutex_);
    if (num_watchers_ == kMaxWatchers) {
      return grpc::Status(grpc::StatusCode::RESOURCE_EXHAUSTED,
                          absl::StrCat("there are ", kMaxWatchers,
                                       " watchers already; use Check"));
    }
    ++num_watchers_;
    response.set_status(StatusOf(request->service()));
  }
  for (bool open = true; open && !context->IsCancelled();) {
    open = writer->Write(response);
    MutexLock lock(&mutex_);
    while (!stopped_ && StatusOf(request->service()) == response.status() &&
           !context->IsCancelled()) {
      changed_.WaitFor(&mutex_, kCancellationCheck);
    }
    if (StatusOf(request->service()) == response.status()) break;
    response.set_status(StatusOf(request->service()));
  }
  MutexLock lock(&mutex_);
  --num_watchers_;
  return grpc::Status(grpc::StatusCode::UNAVAILABLE, "the server is stopping");
}

}  // namespace tfswitch
