// gRPC's standard health service.
//
// gRPC has a health service, but it uses the callback API. The threads of that
// API would poll the sockets of the whole server and hand each event to the
// data plane, which costs 40 us per small pull and a third more CPU per
// exchange.
//
// Anybody who reaches the port may ask. So the length of a request is checked
// before it is parsed: a parsed message of unknown fields takes forty times as
// much memory as its bytes.

#ifndef TFSWITCH_CC_RPC_SERVER_HEALTH_SERVICE_H_
#define TFSWITCH_CC_RPC_SERVER_HEALTH_SERVICE_H_

#include <grpcpp/grpcpp.h>

#include <string>

#include "absl/base/thread_annotations.h"
#include "cc/base/mutex.h"
#include "grpc/health/v1/health.grpc.pb.h"

namespace tfswitch {

// Answers for two service names, the empty one and the given one. Both are
// SERVING from StartServing() to StopServing().
//
// Thread-safe.
class HealthService final : public grpc::Service {
 public:
  // A call that watches the health holds a thread, so the number of such calls
  // is limited. Further ones get RESOURCE_EXHAUSTED.
  static constexpr int kMaxWatchers = 16;

  explicit HealthService(const std::string& service);

  void StartServing();
  // Makes both services NOT_SERVING, and ends watching calls.
  void StopServing();

 private:
  using Request = grpc::health::v1::HealthCheckRequest;
  using Response = grpc::health::v1::HealthCheckResponse;
  using Status = Response::ServingStatus;

  grpc::Status Check(const Request& request, Response* response);
  grpc::Status Watch(const grpc::ServerContext& context, const Request& request,
                     grpc::ServerWriter<Response>* writer);

  // SERVICE_UNKNOWN for an unknown service.
  Status StatusOf(const std::string& service) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const std::string service_;

  Mutex mutex_;
  CondVar changed_;
  bool serving_ ABSL_GUARDED_BY(mutex_) = false;
  bool stopped_ ABSL_GUARDED_BY(mutex_) = false;
  int num_watchers_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace tfswitch

#endif  // TFSWITCH_CC_RPC_SERVER_HEALTH_SERVICE_H_
