// Tfswitch>Lookup and Tfswitch>TrainingLookup.

#include <cstdint>
#include <limits>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
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

// ids.shape + [dim] for output 0, with the handle in input 0 and ids in 1.
absl::Status EmbeddingsShape(InferenceContext* c) {
  ShapeHandle unused;
  TF_RETURN_IF_ERROR(c->WithRank(c->input(0), 0, &unused));
  int dim;
  TF_RETURN_IF_ERROR(c->GetAttr("dim", &dim));
  ShapeHandle embeddings;
  TF_RETURN_IF_ERROR(c->Concatenate(c->input(1), c->Vector(dim), &embeddings));
  c->set_output(0, embeddings);
  return absl::OkStatus();
}

REGISTER_OP("Tfswitch>Lookup")
    .Input("table: resource")
    .Input("ids: Tids")
    .Output("embeddings: float")
    .Attr("Tids: {int32, int64}")
    .Attr("dim: int >= 1")
    .Attr("insert_missing: bool = false")
    .SetIsStateful()
    .SetIsDistributedCommunication()
    .SetShapeFn(EmbeddingsShape)
    .Doc(R"doc(
Reads one embedding per id.

table: The table.
ids: Any shape, also a scalar. Repeated ids are sent once where that pays.
embeddings: Shape `ids.shape + [dim]`.
dim: The table's dim.
insert_missing: If true, an id without a row gets one, unless the table has an
  admission policy; if false, the table stays as it is.
)doc");

REGISTER_OP("Tfswitch>TrainingLookup")
    .Input("table: resource")
    .Input("ids: Tids")
    .Input("anchor: float")
    .Input("learning_rate: float")
    .Input("shows: float")
    .Input("clicks: float")
    .Input("global_step: int64")
    .Output("embeddings: float")
    .Output("loss_scale_probe: float")
    .Output("unique_ids: int64")
    .Output("inverse: int32")
    .Attr("Tids: {int32, int64}")
    .Attr("dim: int >= 1")
    .SetIsStateful()
    .SetIsDistributedCommunication()
    .SetShapeFn([](InferenceContext* c) {
      TF_RETURN_IF_ERROR(EmbeddingsShape(c));
      ShapeHandle unused;
      TF_RETURN_IF_ERROR(c->WithRank(c->input(2), 0, &unused));
      TF_RETURN_IF_ERROR(c->WithRank(c->input(3), 0, &unused));
      TF_RETURN_IF_ERROR(c->WithRank(c->input(6), 0, &unused));
      c->set_output(1, c->Scalar());
      c->set_output(2, c->Vector(InferenceContext::kUnknownDim));
      c->set_output(3, c->Vector(c->NumElements(c->input(1))));
      return absl::OkStatus();
    })
    .Doc(R"doc(
Reads one embedding per id for training; an id without a row gets one, unless
the table has an admission policy.

Its gradient pushes to the table. Everything that the way back needs goes out
here, so that ids are made unique once per step.

table: The table.
ids: Any shape, also a scalar.
anchor: A scalar that is watched for gradients. Its value does not matter: it
  ties the lookup into the tape.
learning_rate: The rate with which the gradient will be applied.
shows: How often each id was shown, one number for each; or empty: once each.
clicks: How often it was clicked; or empty: never.
global_step: A scalar: which step of the training it is; 0 if not known.
embeddings: Shape `ids.shape + [dim]`.
loss_scale_probe: A scalar 0. Whoever scales the loss gives it that scale as
  gradient, by adding it to the unscaled loss.
unique_ids: The ids without repetition, in order of first appearance.
inverse: For each id, in row-major order, its place in `unique_ids`.
dim: The table's dim.
)doc");

absl::Status AllocateEmbeddings(OpKernelContext* context, const Tensor& ids,
                                int dim, float** embeddings) {
  TensorShape shape = ids.shape();
  TF_RETURN_IF_ERROR(shape.AddDimWithStatus(dim));
  Tensor* output = nullptr;
  TF_RETURN_IF_ERROR(context->allocate_output(0, shape, &output));
  *embeddings = output->flat<float>().data();
  return absl::OkStatus();
}

class LookupOp : public AsyncOpKernel {
 public:
  explicit LookupOp(OpKernelConstruction* context) : AsyncOpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("dim", &dim_));
    OP_REQUIRES_OK(context,
                   context->GetAttr("insert_missing", &insert_missing_));
  }

  void ComputeAsync(OpKernelContext* context, DoneCallback done) override {
    RefCountPtr<TableResource> table;
    OP_REQUIRES_OK_ASYNC(context, LookupTable(context, &table), done);
    OP_REQUIRES_OK_ASYNC(context, CheckDim(*table, dim_), done);
    const Tensor& ids = context->input(1);
    float* embeddings = nullptr;
    OP_REQUIRES_OK_ASYNC(
        context, AllocateEmbeddings(context, ids, dim_, &embeddings), done);
    if (ids.NumElements() == 0) {
      done();
      return;
    }
    RunAsync(
        context, std::move(table),
        [context, &ids, embeddings, insert_missing = insert_missing_](
            const TableResource& t) -> absl::Status {
          Tensor storage;
          absl::Span<const int64_t> keys;
          TF_RETURN_IF_ERROR(KeysOf(context, ids, &storage, &keys));
          Tfswitch_PullPart part = {};
          part.keys = keys.data();
          part.num_keys = keys.size();
          part.embeddings = embeddings;
          return t.Pull(part, insert_missing, DeviceThreads(context));
        },
        std::move(done));
  }

 private:
  int dim_ = 0;
  bool insert_missing_ = false;
};

class TrainingLookupOp : public AsyncOpKernel {
 public:
  explicit TrainingLookupOp(OpKernelConstruction* context)
      : AsyncOpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("dim", &dim_));
  }

  void ComputeAsync(OpKernelContext* context, DoneCallback done) override {
    RefCountPtr<TableResource> table;
    OP_REQUIRES_OK_ASYNC(context, LookupTable(context, &table), done);
    OP_REQUIRES_OK_ASYNC(context, CheckDim(*table, dim_), done);
    float anchor;
    OP_REQUIRES_OK_ASYNC(context, ScalarInput(context, 2, "anchor", &anchor),
                         done);
    float unused;
    OP_REQUIRES_OK_ASYNC(
        context, ScalarInput(context, 3, "learning_rate", &unused), done);
    const Tensor& ids = context->input(1);
    const int64_t num_ids = ids.NumElements();
    // Here, where the mistake was made, and not in the backward pass.
    Tfswitch_PushOptions unused_options = {};
    OP_REQUIRES_OK_ASYNC(
        context,
        ObservationInputs(context, *table, 4, num_ids, &unused_options), done);
    OP_REQUIRES_ASYNC(
        context, num_ids <= std::numeric_limits<int32_t>::max(),
        absl::InvalidArgumentError(absl::StrCat(
            "table '", table->name(), "': at most ",
            std::numeric_limits<int32_t>::max(),
            " ids per training lookup, got ", num_ids, ". Split the batch.")),
        done);
    float* embeddings = nullptr;
    OP_REQUIRES_OK_ASYNC(
        context, AllocateEmbeddings(context, ids, dim_, &embeddings), done);
    Tensor* probe = nullptr;
    OP_REQUIRES_OK_ASYNC(context, context->allocate_output(1, {}, &probe),
                         done);
    // NaN after a push with NaN, so that the loss shows it.
    probe->scalar<float>()() = 0.0f * anchor;
    Tensor* inverse = nullptr;
    OP_REQUIRES_OK_ASYNC(
        context, context->allocate_output(3, TensorShape({num_ids}), &inverse),
        done);
    if (num_ids == 0) {
      Tensor* unique_ids = nullptr;
      OP_REQUIRES_OK_ASYNC(
          context, context->allocate_output(2, TensorShape({0}), &unique_ids),
          done);
      done();
      return;
    }
    int32_t* inverse_data = inverse->flat<int32_t>().data();
    RunAsync(
        context, std::move(table),
        [context, &ids, embeddings, inverse_data,
         num_ids](const TableResource& t) -> absl::Status {
          Tensor storage;
          absl::Span<const int64_t> keys;
          TF_RETURN_IF_ERROR(KeysOf(context, ids, &storage, &keys));
          Tensor unique_keys;
          TF_RETURN_IF_ERROR(context->allocate_temp(
              tensorflow::DT_INT64, TensorShape({num_ids}), &unique_keys));
          size_t num_unique = 0;
          Tfswitch_PullPart part = {};
          part.keys = keys.data();
          part.num_keys = keys.size();
          part.embeddings = embeddings;
          part.unique_keys = unique_keys.flat<int64_t>().data();
          part.inverse = inverse_data;
          part.num_unique = &num_unique;
          TF_RETURN_IF_ERROR(
              t.Pull(part, /*insert_missing=*/true, DeviceThreads(context)));
          context->set_output(
              2, unique_keys.Slice(0, static_cast<int64_t>(num_unique)));
          return absl::OkStatus();
        },
        std::move(done));
  }

 private:
  int dim_ = 0;
};

#define TFSWITCH_REGISTER(Tids)                               \
  REGISTER_KERNEL_BUILDER(Name("Tfswitch>Lookup")             \
                              .Device(tensorflow::DEVICE_CPU) \
                              .TypeConstraint<Tids>("Tids"),  \
                          LookupOp);                          \
  REGISTER_KERNEL_BUILDER(Name("Tfswitch>TrainingLookup")     \
                              .Device(tensorflow::DEVICE_CPU) \
                              .TypeConstraint<Tids>("Tids"),  \
                          TrainingLookupOp)
TFSWITCH_REGISTER(int32_t);
TFSWITCH_REGISTER(int64_t);
#undef TFSWITCH_REGISTER

}  // namespace
}  // namespace tfswitch
