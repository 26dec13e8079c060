// Tfswitch>PushUniqueMany.

#include <cstdint>
#include <limits>
#include <memory>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "cc/ops/core_calls.h"
#include "cc/ops/table_resource.h"
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
using tensorflow::TensorShapeUtils;
using tensorflow::shape_inference::InferenceContext;
using tensorflow::shape_inference::ShapeHandle;

REGISTER_OP("Tfswitch>PushUniqueMany")
    .Input("tables: N * resource")
    .Input("unique_ids: N * int64")
    .Input("inverses: N * int32")
    .Input("gradients: N * float")
    .Input("learning_rates: N * float")
    .Input("loss_scale: float")
    .Input("shows: N * float")
    .Input("clicks: N * float")
    .Input("global_steps: N * int64")
    .Output("anchor_gradients: N * float")
    .Attr("N: int >= 1")
    .Attr("insert_missing: bool = false")
    .SetIsStateful()
    .SetIsDistributedCommunication()
    .SetShapeFn([](InferenceContext* c) {
      int n;
      TF_RETURN_IF_ERROR(c->GetAttr("N", &n));
      ShapeHandle unused;
      TF_RETURN_IF_ERROR(c->WithRank(c->input(5 * n), 0, &unused));
      for (int i = 0; i < n; ++i) {
        TF_RETURN_IF_ERROR(c->WithRank(c->input(i), 0, &unused));
        TF_RETURN_IF_ERROR(c->WithRank(c->input(n + i), 1, &unused));
        TF_RETURN_IF_ERROR(c->WithRank(c->input(2 * n + i), 1, &unused));
        TF_RETURN_IF_ERROR(c->WithRankAtLeast(c->input(3 * n + i), 1, &unused));
        TF_RETURN_IF_ERROR(c->WithRank(c->input(4 * n + i), 0, &unused));
        TF_RETURN_IF_ERROR(c->WithRank(c->input(7 * n + 1 + i), 0, &unused));
        c->set_output(i, c->Scalar());
      }
      return absl::OkStatus();
    })
    .Doc(R"doc(
The way back of `Tfswitch>TrainingLookupMany`: sums the gradients by `inverses`
and takes one step for each unique id, with one message to each server unless
the batches are long.

With NaN or Inf in a gradient nothing is applied to any table.
After an error of a server, such as a table that is not there, others may have
taken their step. At most 256 tables.

tables: The tables.
unique_ids: From the lookup.
inverses: From the lookup.
gradients: For each table one row of `dim` floats per element of its inverse.
learning_rates: For each table, a scalar.
loss_scale: A scalar: the factor of the loss. 0 means 1.
shows: As for the lookup.
clicks: As for the lookup.
global_steps: As for the lookup.
anchor_gradients: For each table 0; or for all NaN if the gradients of one hold
  NaN or Inf. Then nothing was applied.
insert_missing: Whether an id that lost its row since the lookup gets a new one,
  or is skipped.
)doc");

class PushUniqueManyOp : public AsyncOpKernel {
 public:
  explicit PushUniqueManyOp(OpKernelConstruction* context)
      : AsyncOpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("N", &n_));
    OP_REQUIRES_OK(context,
                   context->GetAttr("insert_missing", &insert_missing_));
  }

  void ComputeAsync(OpKernelContext* context, DoneCallback done) override {
    const auto call = std::make_shared<Call>();
    OP_REQUIRES_OK_ASYNC(context, Prepare(context, call.get()), done);
    RunAsync(
        context, call->tables.IsAnyRemote(),
        [context, call] {
          const Tfswitch_Threads threads = DeviceThreads(context);
          absl::Status status =
              CallCore(&Tfswitch_Api::push, call->parts.data(),
                       call->parts.size(), &threads);
          call->tables.Clear();
          for (size_t i = 0; i < call->parts.size(); ++i) {
            if (call->parts[i].result.skipped == 0) continue;
            *call->anchor_gradients[i] =
                std::numeric_limits<float>::quiet_NaN();
          }
          return status;
        },
        std::move(done));
  }

 private:
  struct Call {
    TableList tables;
    std::vector<Tfswitch_PushPart> parts;
    std::vector<float*> anchor_gradients;
  };

  absl::Status Prepare(OpKernelContext* context, Call* call) const {
    TF_RETURN_IF_ERROR(call->tables.Lookup(context, n_));
    float loss_scale = 0.0f;
    TF_RETURN_IF_ERROR(ScalarInput(context, 5 * n_, "loss_scale", &loss_scale));
    for (int i = 0; i < n_; ++i) {
      const TableResource& table = call->tables[i];
      const Tensor& unique_ids = context->input(n_ + i);
      const Tensor& inverse = context->input(2 * n_ + i);
      const Tensor& gradients = context->input(3 * n_ + i);
      if (!TensorShapeUtils::IsVector(unique_ids.shape()) ||
          !TensorShapeUtils::IsVector(inverse.shape())) {
        return absl::InvalidArgumentError(absl::StrCat(
            "table '", table.name(),
            "': expected `unique_ids` and `inverses` of rank 1, got shapes ",
            unique_ids.shape().DebugString(), " and ",
            inverse.shape().DebugString()));
      }
      const int64_t num_ids = inverse.NumElements();
      if (gradients.NumElements() != num_ids * table.dim()) {
        return absl::InvalidArgumentError(absl::StrCat(
            "table '", table.name(), "': expected ", num_ids * table.dim(),
            " gradient floats (", num_ids, " places in its inverse x dim ",
            table.dim(), "), got ", gradients.NumElements(), " in shape ",
            gradients.shape().DebugString()));
      }
      Tfswitch_PushPart part = {};
      part.table = table.get();
      part.keys = unique_ids.flat<int64_t>().data();
      part.num_keys = static_cast<size_t>(unique_ids.NumElements());
      // NULL would say that there is no inverse.
      static constexpr int32_t kEmpty = 0;
      part.inverse = num_ids == 0 ? &kEmpty : inverse.flat<int32_t>().data();
      part.num_gradients = static_cast<size_t>(num_ids);
      part.gradients = gradients.flat<float>().data();
      part.options.insert_missing = insert_missing_ ? 1 : 0;
      part.options.loss_scale = loss_scale;
      part.options.skip_non_finite = 1;
      TF_RETURN_IF_ERROR(ScalarInput(context, 4 * n_ + i, "learning_rates",
                                     &part.options.learning_rate));
      TF_RETURN_IF_ERROR(ObservationInputs(context, table, 5 * n_ + 1 + i,
                                           6 * n_ + 1 + i, 7 * n_ + 1 + i,
                                           num_ids, &part.options));
      call->parts.push_back(part);
      Tensor* anchor_gradient = nullptr;
      TF_RETURN_IF_ERROR(context->allocate_output(i, {}, &anchor_gradient));
      anchor_gradient->scalar<float>()() = 0.0f;
      call->anchor_gradients.push_back(&anchor_gradient->scalar<float>()());
    }
    return absl::OkStatus();
  }

  // Constant after construction.
  int n_ = 0;
  bool insert_missing_ = false;
};

TFSWITCH_CPU_KERNEL(PushUniqueMany);

}  // namespace
}  // namespace tfswitch
