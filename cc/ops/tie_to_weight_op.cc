// Tfswitch>TieToWeight.

#include <cmath>
#include <cstdint>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "cc/ops/core_calls.h"
#include "cc/ops/table_resource.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"
#include "tensorflow/core/framework/tensor.h"

namespace tfswitch {
namespace {

using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::core::RefCountPtr;
using tensorflow::shape_inference::InferenceContext;

REGISTER_OP("Tfswitch>TieToWeight")
    .Input("table: resource")
    .Input("ids: int64")
    .Input("embeddings: float")
    .Input("weight: float")
    .Input("poison: float")
    .Input("shows: float")
    .Input("clicks: float")
    .Output("tied: float")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      c->set_output(0, c->input(2));
      return absl::OkStatus();
    })
    .Doc(R"doc(
Passes the embeddings of a training lookup on. Their gradient is that of
`weight`, which stands for all rows of the table: a `tf.IndexedSlices` of the
ids and of one row of gradients for each.

table: The table.
ids: The ids that were looked up, of any shape.
embeddings: What the lookup gave, of shape `ids.shape + [dim]`.
weight: The value of the variable to differentiate by; it is not read.
poison: A scalar. If it is NaN, so is the output.
shows: How often each id was shown, one number for each; or empty: once each.
  The push of the gradient finds them by the ids.
clicks: Likewise how often it was clicked; or empty: never.
tied: The embeddings.
)doc");

class TieToWeightOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* context) override {
    RefCountPtr<TableResource> table;
    OP_REQUIRES_OK(context, LookupTable(context, &table));
    const Tensor& ids = context->input(1);
    const Tensor& embeddings = context->input(2);
    float poison = 0.0f;
    OP_REQUIRES_OK(context, ScalarInput(context, 4, "poison", &poison));
    OP_REQUIRES(
        context, embeddings.NumElements() == ids.NumElements() * table->dim(),
        absl::InvalidArgumentError(absl::StrCat(
            "table '", table->name(), "': expected embeddings of dim ",
            table->dim(), " for ids of shape ", ids.shape().DebugString(),
            ", got shape ", embeddings.shape().DebugString())));
    Tfswitch_PushOptions options = {};
    OP_REQUIRES_OK(context, ObservationInputs(context, *table, 5, 6,
                                              ids.NumElements(), &options));
    table->NoteTrainingLookup(
        absl::MakeConstSpan(ids.flat<int64_t>().data(), ids.NumElements()),
        options.shows, options.clicks);
    if (!std::isnan(poison)) {
      context->set_output(0, embeddings);
      return;
    }
    Tensor* output = nullptr;
    OP_REQUIRES_OK(context,
                   context->allocate_output(0, embeddings.shape(), &output));
    output->flat<float>().setConstant(poison);
  }
};

TFSWITCH_CPU_KERNEL(TieToWeight);

}  // namespace
}  // namespace tfswitch
