// Tfswitch>LookupMany and Tfswitch>TrainingLookupMany.

#include <cstdint>
#include <limits>
#include <memory>
#include <utility>
#include <vector>

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
using tensorflow::shape_inference::InferenceContext;
using tensorflow::shape_inference::ShapeHandle;

absl::Status CheckDims(size_t num_dims, int num_tables) {
  if (num_dims == static_cast<size_t>(num_tables)) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("`dims` must have one dim for each of ", num_tables,
                   " tables, got ", num_dims));
}

// ids[i].shape + [dims[i]] for output i, with the handles in inputs 0 to n - 1
// and ids in n to 2n - 1.
absl::Status EmbeddingsShapes(InferenceContext* c) {
  std::vector<int32_t> dims;
  int n;
  TF_RETURN_IF_ERROR(c->GetAttr("dims", &dims));
  TF_RETURN_IF_ERROR(c->GetAttr("N", &n));
  TF_RETURN_IF_ERROR(CheckDims(dims.size(), n));
  for (int i = 0; i < n; ++i) {
    ShapeHandle unused;
    TF_RETURN_IF_ERROR(c->WithRank(c->input(i), 0, &unused));
    ShapeHandle embeddings;
    TF_RETURN_IF_ERROR(
        c->Concatenate(c->input(n + i), c->Vector(dims[i]), &embeddings));
    c->set_output(i, embeddings);
  }
  return absl::OkStatus();
}

REGISTER_OP("Tfswitch>LookupMany")
    .Input("tables: N * resource")
    .Input("ids: N * int64")
    .Output("embeddings: N * float")
    .Attr("N: int >= 1")
    .Attr("dims: list(int) >= 1")
    .Attr("insert_missing: bool = false")
    .SetIsStateful()
    .SetIsDistributedCommunication()
    .SetShapeFn(EmbeddingsShapes)
    .Doc(R"doc(
`Tfswitch>Lookup` for N tables at once, with one message to each server unless
the batches are long. A table may come more than once.

tables: The tables.
ids: For each table, of any shape.
embeddings: For each table, shape `ids.shape + [dim]`.
dims: The dim of each table.
insert_missing: As for `Tfswitch>Lookup`.
)doc");

REGISTER_OP("Tfswitch>TrainingLookupMany")
    .Input("tables: N * resource")
    .Input("ids: N * int64")
    .Input("anchors: N * float")
    .Input("learning_rates: N * float")
    .Input("shows: N * float")
    .Input("clicks: N * float")
    .Input("global_steps: N * int64")
    .Output("embeddings: N * float")
    .Output("loss_scale_probe: float")
    .Output("unique_ids: N * int64")
    .Output("inverses: N * int32")
    .Attr("N: int >= 1")
    .Attr("dims: list(int) >= 1")
    .SetIsStateful()
    .SetIsDistributedCommunication()
    .SetShapeFn([](InferenceContext* c) {
      TF_RETURN_IF_ERROR(EmbeddingsShapes(c));
      int n;
      TF_RETURN_IF_ERROR(c->GetAttr("N", &n));
      c->set_output(n, c->Scalar());
      for (int i = 0; i < n; ++i) {
        ShapeHandle unused;
        for (const int list : {2, 3, 6}) {
          TF_RETURN_IF_ERROR(c->WithRank(c->input(list * n + i), 0, &unused));
        }
        c->set_output(n + 1 + i, c->Vector(InferenceContext::kUnknownDim));
        c->set_output(2 * n + 1 + i,
                      c->Vector(c->NumElements(c->input(n + i))));
      }
      return absl::OkStatus();
    })
    .Doc(R"doc(
Reads one embedding per id for training, with one message to each server unless
the batches are long; an id without a row gets one, unless its table has an
admission policy.

Its gradient pushes to all tables, likewise. Everything that the way back needs
goes out here, so that ids are made unique once per step. A table may come more
than once; then it takes a step for each.

tables: The tables.
ids: For each table, of any shape, also a scalar.
anchors: For each table a scalar that is watched for gradients. Its value does
  not matter: it ties the lookup into the tape.
learning_rates: For each table a scalar: the rate with which the gradient will
  be applied.
shows: For each table how often each id was shown, one number for each; or
  empty: once each.
clicks: Likewise how often it was clicked; or empty: never.
global_steps: For each table a scalar: which step of the training it is; 0 if
  not known.
embeddings: For each table, shape `ids.shape + [dim]`.
loss_scale_probe: A scalar 0 for all tables. Whoever scales the loss gives it
  that scale as gradient, by adding it to the unscaled loss.
unique_ids: For each table the ids without repetition, in order of first
  appearance.
inverses: For each table and each id, in row-major order, its place in
  `unique_ids`.
dims: The dim of each table.
)doc");

// The common base of both ops, with their attributes.
class ManyLookups : public AsyncOpKernel {
 public:
  explicit ManyLookups(OpKernelConstruction* context) : AsyncOpKernel(context) {
    std::vector<int32_t> dims;
    OP_REQUIRES_OK(context, context->GetAttr("dims", &dims));
    OP_REQUIRES_OK(context, context->GetAttr("N", &n_));
    OP_REQUIRES_OK(context, CheckDims(dims.size(), n_));
    dims_ = std::move(dims);
  }

 protected:
  // Checks the tables and makes room for the embeddings.
  absl::Status Prepare(OpKernelContext* context, TableList* tables,
                       std::vector<Tfswitch_PullPart>* parts) {
    TF_RETURN_IF_ERROR(tables->Lookup(context, n_));
    parts->resize(n_);
    for (int i = 0; i < n_; ++i) {
      TF_RETURN_IF_ERROR(CheckDim((*tables)[i], dims_[i]));
      const Tensor& ids = context->input(n_ + i);
      Tfswitch_PullPart& part = (*parts)[i];
      part = Tfswitch_PullPart{};
      part.table = (*tables)[i].get();
      part.keys = ids.flat<int64_t>().data();
      part.num_keys = static_cast<size_t>(ids.NumElements());
      TF_RETURN_IF_ERROR(
          AllocateEmbeddings(context, i, ids, dims_[i], &part.embeddings));
    }
    return absl::OkStatus();
  }

  static absl::Status Pull(OpKernelContext* context,
                           absl::Span<const Tfswitch_PullPart> parts,
                           bool insert_missing) {
    const Tfswitch_Threads threads = DeviceThreads(context);
    return CallCore(&Tfswitch_Api::pull, parts.data(), parts.size(),
                    insert_missing ? 1 : 0, &threads);
  }

  // Constant after construction.
  int n_ = 0;
  std::vector<int32_t> dims_;
};

class LookupManyOp : public ManyLookups {
 public:
  explicit LookupManyOp(OpKernelConstruction* context) : ManyLookups(context) {
    OP_REQUIRES_OK(context,
                   context->GetAttr("insert_missing", &insert_missing_));
  }

  void ComputeAsync(OpKernelContext* context, DoneCallback done) override {
    const auto tables = std::make_shared<TableList>();
    std::vector<Tfswitch_PullPart> parts;
    OP_REQUIRES_OK_ASYNC(context, Prepare(context, tables.get(), &parts), done);
    const bool is_remote = tables->IsAnyRemote();
    RunAsync(
        context, is_remote,
        [context, tables, parts = std::move(parts),
         insert_missing = insert_missing_] {
          absl::Status status = Pull(context, parts, insert_missing);
          tables->Clear();
          return status;
        },
        std::move(done));
  }

 private:
  bool insert_missing_ = false;
};

class TrainingLookupManyOp : public ManyLookups {
 public:
  using ManyLookups::ManyLookups;

  void ComputeAsync(OpKernelContext* context, DoneCallback done) override {
    const auto call = std::make_shared<Call>();
    OP_REQUIRES_OK_ASYNC(context, Prepare(context, &call->tables, &call->parts),
                         done);
    OP_REQUIRES_OK_ASYNC(context, PrepareTraining(context, call.get()), done);
    RunAsync(
        context, call->tables.IsAnyRemote(),
        [context, call, n = n_] {
          absl::Status status =
              Pull(context, call->parts, /*insert_missing=*/true);
          call->tables.Clear();
          if (!status.ok()) return status;
          for (int i = 0; i < n; ++i) {
            context->set_output(
                n + 1 + i, call->unique_ids[i].Slice(
                               0, static_cast<int64_t>(call->num_unique[i])));
          }
          return status;
        },
        std::move(done));
  }

 private:
  struct Call {
    TableList tables;
    std::vector<Tfswitch_PullPart> parts;
    std::vector<Tensor> unique_ids;
    std::vector<size_t> num_unique;
  };

  absl::Status PrepareTraining(OpKernelContext* context, Call* call) {
    Tensor* probe = nullptr;
    TF_RETURN_IF_ERROR(context->allocate_output(n_, {}, &probe));
    float& zero = probe->scalar<float>()();
    zero = 0.0f;
    call->unique_ids.resize(n_);
    call->num_unique.assign(n_, 0);
    for (int i = 0; i < n_; ++i) {
      const TableResource& table = call->tables[i];
      Tfswitch_PullPart& part = call->parts[i];
      const auto num_ids = static_cast<int64_t>(part.num_keys);
      // Here, where the mistakes were made, and not in the backward pass.
      float anchor;
      TF_RETURN_IF_ERROR(ScalarInput(context, 2 * n_ + i, "anchors", &anchor));
      // NaN after a push with NaN, so that the loss shows it.
      zero += 0.0f * anchor;
      float unused;
      TF_RETURN_IF_ERROR(
          ScalarInput(context, 3 * n_ + i, "learning_rates", &unused));
      Tfswitch_PushOptions unused_options = {};
      TF_RETURN_IF_ERROR(ObservationInputs(context, table, 4 * n_ + i,
                                           5 * n_ + i, 6 * n_ + i, num_ids,
                                           &unused_options));
      if (num_ids > std::numeric_limits<int32_t>::max()) {
        return absl::InvalidArgumentError(absl::StrCat(
            "table '", table.name(), "': at most ",
            std::numeric_limits<int32_t>::max(),
            " ids per training lookup, got ", num_ids, ". Split the batch."));
      }
      TF_RETURN_IF_ERROR(context->allocate_temp(
          tensorflow::DT_INT64, TensorShape({num_ids}), &call->unique_ids[i]));
      Tensor* inverse = nullptr;
      TF_RETURN_IF_ERROR(context->allocate_output(
          2 * n_ + 1 + i, TensorShape({num_ids}), &inverse));
      part.unique_keys = call->unique_ids[i].flat<int64_t>().data();
      part.inverse = inverse->flat<int32_t>().data();
      part.num_unique = &call->num_unique[i];
    }
    return absl::OkStatus();
  }
};

TFSWITCH_CPU_KERNEL(LookupMany);
TFSWITCH_CPU_KERNEL(TrainingLookupMany);

}  // namespace
}  // namespace tfswitch
