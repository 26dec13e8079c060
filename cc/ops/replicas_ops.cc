// Tfswitch>ReplicasCall, ReplicasEndStep, ReplicasHeartbeat, ReplicasNextRound
// and ReplicasConfirmRound: they coordinate workers that take steps together on
// TensorFlow's variables. For all workers they run in the same process, the
// first parameter server.

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "cc/ops/core_calls.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/framework/tensor_shape.h"

namespace tfswitch {
namespace {

using tensorflow::AsyncOpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;
using tensorflow::tstring;
using tensorflow::shape_inference::InferenceContext;
using tensorflow::shape_inference::ShapeHandle;

// A place has incarnation, clock and round.
constexpr int64_t kPlaceSize = 3;

absl::Status PlaceOf(const Tensor& input, Tfswitch_ReplicaPlace* place) {
  if (input.dims() != 1 || input.NumElements() != kPlaceSize) {
    return absl::InvalidArgumentError(
        absl::StrCat("`place` must be of shape [3]. Received: shape ",
                     input.shape().DebugString()));
  }
  const auto values = input.vec<int64_t>();
  *place = {static_cast<uint64_t>(values(0)), values(1), values(2)};
  return absl::OkStatus();
}

// Shape function: input 0 identifies a worker (a Tfswitch_ReplicaPlace), and
// input 1 is a scalar.
absl::Status PlaceAndScalar(InferenceContext* c) {
  ShapeHandle unused;
  TF_RETURN_IF_ERROR(c->WithRank(c->input(0), 1, &unused));
  return c->WithRank(c->input(1), 0, &unused);
}

// The base class of kernels. It reads the attributes below that the op has.
template <typename Kernel>
class OfGroup : public Kernel {
 public:
  explicit OfGroup(OpKernelConstruction* context) : Kernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("group", &group_));
    if (context->HasAttr("worker")) {
      OP_REQUIRES_OK(context, context->GetAttr("worker", &worker_));
    }
    if (context->HasAttr("timeout_s")) {
      OP_REQUIRES_OK(context, context->GetAttr("timeout_s", &timeout_s_));
    }
  }

 protected:
  // Constant after construction.
  std::string group_;
  int worker_ = 0;
  float timeout_s_ = 0.0f;
};

REGISTER_OP("Tfswitch>ReplicasCall")
    .Input("request: string")
    .Output("response: string")
    .SetIsStateful()
    .SetIsDistributedCommunication()
    .SetShapeFn(ScalarsToScalar)
    .Doc(R"doc(
The method Replicas of protos/tfswitch/v1/control.proto.

request: A scalar: a message ReplicasRequest in JSON.
response: A scalar: a message ReplicasResponse in JSON.
)doc");

class ReplicasCallOp : public AsyncOpKernel {
 public:
  using AsyncOpKernel::AsyncOpKernel;

  void ComputeAsync(OpKernelContext* context, DoneCallback done) override {
    tstring request;
    OP_REQUIRES_OK_ASYNC(context, ScalarInput(context, 0, "request", &request),
                         done);
    Tensor* output = nullptr;
    OP_REQUIRES_OK_ASYNC(context, context->allocate_output(0, {}, &output),
                         done);
    // The request says how long the call may wait. If that is too short, the
    // caller makes the call again.
    RunApart(
        context,
        [output, request = std::string(request)] {
          return CallCore([&](const Tfswitch_Api& api, char* error) {
            char* response = nullptr;
            const int code = api.call(/*cluster=*/nullptr, "Replicas",
                                      request.c_str(), &response, error);
            if (code == 0) {
              output->scalar<tstring>()() = response;
              api.free_string(response);
            }
            return code;
          });
        },
        std::move(done));
  }
};

REGISTER_OP("Tfswitch>ReplicasEndStep")
    .Input("place: int64")
    .Input("weight: double")
    .Output("next_place: int64")
    .Attr("group: string")
    .Attr("worker: int >= 0")
    .Attr("timeout_s: float")
    .SetIsStateful()
    .SetIsDistributedCommunication()
    .SetShapeFn([](InferenceContext* c) {
      c->set_output(0, c->Vector(kPlaceSize));
      return PlaceAndScalar(c);
    })
    .Doc(R"doc(
Ends a worker's step, and waits until its round has been applied.

The step's gradients must have been staged before, by control dependencies.

place: incarnation, clock and round of the worker.
weight: A scalar: the number of samples of the step.
next_place: Where the next step is.
group: Name of the group.
worker: The number of the worker.
timeout_s: Longest wait.
)doc");

class ReplicasEndStepOp : public OfGroup<AsyncOpKernel> {
 public:
  using OfGroup::OfGroup;

  void ComputeAsync(OpKernelContext* context, DoneCallback done) override {
    struct State {
      Tfswitch_ReplicaPlace place;
      int32_t has_arrived = 0;
    };
    const auto state = std::make_shared<State>();
    OP_REQUIRES_OK_ASYNC(context, PlaceOf(context->input(0), &state->place),
                         done);
    double weight = 0.0;
    OP_REQUIRES_OK_ASYNC(context, ScalarInput(context, 1, "weight", &weight),
                         done);
    Tensor* output = nullptr;
    OP_REQUIRES_OK_ASYNC(
        context,
        context->allocate_output(0, TensorShape({kPlaceSize}), &output), done);
    WaitApart(
        context, timeout_s_,
        [this, state, weight, output](double wait_s) {
          absl::Status status = CallCore(
              &Tfswitch_Api::replicas_end_step, group_.c_str(), worker_, weight,
              wait_s, &state->place, &state->has_arrived);
          auto next = output->vec<int64_t>();
          next(0) = static_cast<int64_t>(state->place.incarnation);
          next(1) = state->place.clock;
          next(2) = state->place.round;
          return status;
        },
        std::move(done));
  }
};

REGISTER_OP("Tfswitch>ReplicasHeartbeat")
    .Input("place: int64")
    .Input("applier: int64")
    .Attr("group: string")
    .Attr("worker: int >= 0")
    .SetIsStateful()
    .SetIsDistributedCommunication()
    .SetShapeFn(PlaceAndScalar)
    .Doc(R"doc(
Renews the leases of a worker and, unless it is 0, of the applier.

place: incarnation, clock and round of the worker.
applier: A scalar: the answer of "begin_applying".
group: Name of the group.
worker: The number of the worker.
)doc");

class ReplicasHeartbeatOp : public OfGroup<tensorflow::OpKernel> {
 public:
  using OfGroup::OfGroup;

  void Compute(OpKernelContext* context) override {
    Tfswitch_ReplicaPlace place;
    OP_REQUIRES_OK(context, PlaceOf(context->input(0), &place));
    int64_t applier = 0;
    OP_REQUIRES_OK(context, ScalarInput(context, 1, "applier", &applier));
    OP_REQUIRES_OK(context,
                   CallCore(&Tfswitch_Api::replicas_heartbeat, group_.c_str(),
                            worker_, place.incarnation, applier));
  }
};

REGISTER_OP("Tfswitch>ReplicasNextRound")
    .Input("applier: int64")
    .Output("number: int64")
    .Output("keys: int64")
    .Output("weights: double")
    .Output("active: int64")
    .Output("next_incarnation: int64")
    .Attr("group: string")
    .Attr("timeout_s: float")
    .SetIsStateful()
    .SetIsDistributedCommunication()
    .SetShapeFn([](InferenceContext* c) {
      c->set_output(0, c->Scalar());
      c->set_output(1, c->Matrix(InferenceContext::kUnknownDim, 3));
      c->set_output(2, c->Vector(InferenceContext::kUnknownDim));
      c->set_output(3, c->Vector(InferenceContext::kUnknownDim));
      c->set_output(4, c->Scalar());
      return AllScalars(c);
    })
    .Doc(R"doc(
Waits for the next round to apply. Cancelled when all workers have left.

applier: A scalar: the answer of "begin_applying".
number: A scalar: of the round.
keys: For each contribution, in the order in which they are summed: worker,
  incarnation, clock.
weights: The weight of each contribution.
active: The incarnations that were there when the round closed.
next_incarnation: A scalar: all others below it are gone.
group: Name of the group.
timeout_s: Longest wait.
)doc");

class ReplicasNextRoundOp : public OfGroup<AsyncOpKernel> {
 public:
  using OfGroup::OfGroup;

  void ComputeAsync(OpKernelContext* context, DoneCallback done) override {
    int64_t applier = 0;
    OP_REQUIRES_OK_ASYNC(context, ScalarInput(context, 0, "applier", &applier),
                         done);
    WaitApart(
        context, timeout_s_,
        [this, context, applier](double wait_s) {
          absl::Status output;
          const absl::Status status =
              CallCore([&](const Tfswitch_Api& api, char* error) {
                Tfswitch_Round* round = nullptr;
                const int code = api.replicas_next_round(
                    group_.c_str(), static_cast<uint64_t>(applier), wait_s,
                    &round, error);
                if (code != 0) return code;
                output = Output(context, *round);
                api.free_round(round);
                return 0;
              });
          return status.ok() ? output : status;
        },
        std::move(done));
  }

 private:
  // Sets output `index` to `values`. Their number follows from `shape`.
  template <typename T>
  static absl::Status Set(OpKernelContext* context, int index,
                          const TensorShape& shape, const T* values) {
    Tensor* output = nullptr;
    TF_RETURN_IF_ERROR(context->allocate_output(index, shape, &output));
    std::copy_n(values, shape.num_elements(), output->flat<T>().data());
    return absl::OkStatus();
  }

  static absl::Status Output(OpKernelContext* context,
                             const Tfswitch_Round& round) {
    const auto num_contributions =
        static_cast<int64_t>(round.num_contributions);
    const auto num_active = static_cast<int64_t>(round.num_active);
    TF_RETURN_IF_ERROR(Set(context, 0, {}, &round.number));
    TF_RETURN_IF_ERROR(Set(context, 1, {num_contributions, 3}, round.keys));
    TF_RETURN_IF_ERROR(Set(context, 2, {num_contributions}, round.weights));
    TF_RETURN_IF_ERROR(Set(context, 3, {num_active}, round.active));
    return Set(context, 4, {}, &round.next_incarnation);
  }
};

REGISTER_OP("Tfswitch>ReplicasConfirmRound")
    .Input("applier: int64")
    .Input("number: int64")
    .Attr("group: string")
    .SetIsStateful()
    .SetIsDistributedCommunication()
    .SetShapeFn(AllScalars)
    .Doc(R"doc(
Says that a round has been applied, and lets its workers go on.

applier: A scalar: the answer of "begin_applying".
number: A scalar: of the round.
group: Name of the group.
)doc");

class ReplicasConfirmRoundOp : public OfGroup<tensorflow::OpKernel> {
 public:
  using OfGroup::OfGroup;

  void Compute(OpKernelContext* context) override {
    int64_t applier = 0;
    OP_REQUIRES_OK(context, ScalarInput(context, 0, "applier", &applier));
    int64_t number = 0;
    OP_REQUIRES_OK(context, ScalarInput(context, 1, "number", &number));
    OP_REQUIRES_OK(context, CallCore(&Tfswitch_Api::replicas_confirm_round,
                                     group_.c_str(), applier, number));
  }
};

TFSWITCH_CPU_KERNEL(ReplicasCall);
TFSWITCH_CPU_KERNEL(ReplicasEndStep);
TFSWITCH_CPU_KERNEL(ReplicasHeartbeat);
TFSWITCH_CPU_KERNEL(ReplicasNextRound);
TFSWITCH_CPU_KERNEL(ReplicasConfirmRound);

}  // namespace
}  // namespace tfswitch
