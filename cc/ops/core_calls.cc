#include "cc/ops/core_calls.h"

#include <algorithm>
#include <memory>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "cc/base/steady_clock.h"
#include "cc/capi/core_loader.h"
#include "cc/ops/blocking_threads.h"
#include "tensorflow/core/framework/cancellation.h"

namespace tfswitch {
namespace {

constexpr double kPartSeconds = 0.25;

struct WaitingOp {
  tensorflow::OpKernelContext* context;
  double timeout_s;
  absl::Time deadline;
  std::function<absl::Status(double)> wait;
  tensorflow::AsyncOpKernel::DoneCallback done;
};

void Finish(const WaitingOp& op, const absl::Status& status) {
  OP_REQUIRES_OK_ASYNC(op.context, status, op.done);
  op.done();
}

void WaitOnce(const std::shared_ptr<WaitingOp>& op) {
  const double left = absl::ToDoubleSeconds(op->deadline - SteadyNow());
  const absl::Status status =
      op->wait(std::max(0.0, std::min(left, kPartSeconds)));
  if (!absl::IsDeadlineExceeded(status)) return Finish(*op, status);
  auto* const cancellation = op->context->cancellation_manager();
  if (cancellation != nullptr && cancellation->IsCancelled()) {
    return Finish(*op, absl::CancelledError(status.message()));
  }
  if (SteadyNow() >= op->deadline) {
    return Finish(*op,
                  absl::DeadlineExceededError(absl::StrCat(
                      status.message(), "; gave up after ",
                      absl::FormatDuration(absl::Seconds(op->timeout_s)))));
  }
  BlockingThreads::Get().Schedule([op] { WaitOnce(op); });
}

}  // namespace

absl::Status CallCore(
    absl::FunctionRef<int(const Tfswitch_Api& api, char* error)> call) {
  std::string load_error;
  const Tfswitch_Api* api = OpenCore(&load_error);
  if (api == nullptr) return absl::FailedPreconditionError(load_error);
  char error[TFSWITCH_ERROR_SIZE] = "";
  const int code = call(*api, error);
  if (code == 0) return absl::OkStatus();
  return absl::Status(static_cast<absl::StatusCode>(code), error);
}

absl::Status AllScalars(tensorflow::shape_inference::InferenceContext* c) {
  tensorflow::shape_inference::ShapeHandle unused;
  for (int i = 0; i < c->num_inputs(); ++i) {
    TF_RETURN_IF_ERROR(c->WithRank(c->input(i), 0, &unused));
  }
  return absl::OkStatus();
}

absl::Status ScalarsToScalar(tensorflow::shape_inference::InferenceContext* c) {
  c->set_output(0, c->Scalar());
  return AllScalars(c);
}

void RunApart(tensorflow::OpKernelContext* context,
              std::function<absl::Status()> call,
              tensorflow::AsyncOpKernel::DoneCallback done) {
  BlockingThreads::Get().Schedule(
      [context, call = std::move(call), done = std::move(done)] {
        OP_REQUIRES_OK_ASYNC(context, call(), done);
        done();
      });
}

void WaitApart(tensorflow::OpKernelContext* context, double timeout_s,
               std::function<absl::Status(double)> wait,
               tensorflow::AsyncOpKernel::DoneCallback done) {
  const auto op = std::make_shared<WaitingOp>(
      WaitingOp{context, timeout_s, SteadyNow() + absl::Seconds(timeout_s),
                std::move(wait), std::move(done)});
  // Makes the first call of `wait` here and not in a task that may have to
  // queue. It may report something for which other calls wait.
  const absl::Status status = op->wait(0.0);
  if (!absl::IsDeadlineExceeded(status)) return Finish(*op, status);
  BlockingThreads::Get().Schedule([op] { WaitOnce(op); });
}

}  // namespace tfswitch
