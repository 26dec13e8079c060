// Tfswitch>Push.

#include <cstdint>
#include <limits>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
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
using tensorflow::TensorShape;
using tensorflow::core::RefCountPtr;
using tensorflow::shape_inference::InferenceContext;
using tensorflow::shape_inference::ShapeHandle;

REGISTER_OP("Tfswitch>Push")
    .Input("table: resource")
    .Input("ids: Tids")
    .Input("gradients: float")
    .Input("learning_rate: float")
    .Input("shows: float")
    .Input("clicks: float")
    .Input("global_step: int64")
    .Output("updated_rows: int64")
    .Attr("Tids: {int32, int64}")
    .Attr("insert_missing: bool = true")
    .SetIsStateful()
    .SetIsDistributedCommunication()
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle unused;
      TF_RETURN_IF_ERROR(c->WithRank(c->input(0), 0, &unused));
      ShapeHandle gradients;
      TF_RETURN_IF_ERROR(c->WithRankAtLeast(c->input(2), 1, &gradients));
      ShapeHandle batch;
      TF_RETURN_IF_ERROR(c->Subshape(gradients, 0, -1, &batch));
      TF_RETURN_IF_ERROR(c->Merge(c->input(1), batch, &unused));
      TF_RETURN_IF_ERROR(c->WithRank(c->input(3), 0, &unused));
      TF_RETURN_IF_ERROR(c->WithRank(c->input(6), 0, &unused));
      c->set_output(0, c->Scalar());
      return absl::OkStatus();
    })
    .Doc(R"doc(
Applies one optimizer step to the row of each id.

Gradients of repeated ids are summed first. A gradient with NaN or Inf fails the
op and nothing is applied.

table: The table.
ids: Any shape, also a scalar.
gradients: Shape `ids.shape + [dim]`.
learning_rate: A scalar.
shows: How often each id was shown, one number for each; or empty: once each.
clicks: How often it was clicked; or empty: never.
global_step: A scalar: which step of the training it is; 0 if not known.
updated_rows: How many rows changed.
insert_missing: Whether an id without a row gets one first, or is skipped.
)doc");

class PushOp : public AsyncOpKernel {
 public:
  explicit PushOp(OpKernelConstruction* context) : AsyncOpKernel(context) {
    OP_REQUIRES_OK(context,
                   context->GetAttr("insert_missing", &insert_missing_));
  }

  void ComputeAsync(OpKernelContext* context, DoneCallback done) override {
    RefCountPtr<TableResource> table;
    OP_REQUIRES_OK_ASYNC(context, LookupTable(context, &table), done);
    const Tensor& ids = context->input(1);
    const Tensor& gradients = context->input(2);
    TensorShape expected = ids.shape();
    OP_REQUIRES_OK_ASYNC(context, expected.AddDimWithStatus(table->dim()),
                         done);
    OP_REQUIRES_ASYNC(
        context, gradients.shape() == expected,
        absl::InvalidArgumentError(absl::StrCat(
            "table '", table->name(), "': expected gradients of shape ",
            expected.DebugString(), " for ids of shape ",
            ids.shape().DebugString(), ", got ",
            gradients.shape().DebugString())),
        done);
    Tfswitch_PushOptions options = {};
    options.insert_missing = insert_missing_ ? 1 : 0;
    options.loss_scale = 1.0f;
    OP_REQUIRES_OK_ASYNC(
        context,
        ScalarInput(context, 3, "learning_rate", &options.learning_rate), done);
    OP_REQUIRES_OK_ASYNC(context,
                         ObservationInputs(context, *table, 4, 5, 6,
                                           ids.NumElements(), &options),
                         done);
    Tensor* updated_rows = nullptr;
    OP_REQUIRES_OK_ASYNC(context,
                         context->allocate_output(0, {}, &updated_rows), done);
    int64_t* updated = &updated_rows->scalar<int64_t>()();
    *updated = 0;
    // Also without ids: that is a step of a table with dense updates.
    const float* gradient_data = gradients.flat<float>().data();
    RunAsync(
        context, std::move(table),
        [context, &ids, gradient_data, options,
         updated](const TableResource& t) -> absl::Status {
          Tensor storage;
          absl::Span<const int64_t> keys;
          TF_RETURN_IF_ERROR(KeysOf(context, ids, &storage, &keys));
          Tfswitch_PushPart part = {};
          part.table = t.get();
          part.keys = keys.data();
          part.num_keys = keys.size();
          part.gradients = gradient_data;
          part.options = options;
          const Tfswitch_Threads threads = DeviceThreads(context);
          TF_RETURN_IF_ERROR(CallCore(&Tfswitch_Api::push, &part, 1, &threads));
          *updated = part.result.updated_rows;
          return absl::OkStatus();
        },
        std::move(done));
  }

 private:
  bool insert_missing_ = true;
};

TFSWITCH_CPU_KERNEL(Push);

}  // namespace
}  // namespace tfswitch
