// Tfswitch>LookupMany.

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "absl/status/status.h"
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

// Shape function: output i has shape ids[i].shape + [dims[i]]. Inputs 0 to n -
// 1 are the handles, and inputs n to 2n - 1 the ids.
absl::Status EmbeddingsShapes(InferenceContext* c) {
  std::vector<int32_t> dims;
  int n;
  TF_RETURN_IF_ERROR(c->GetAttr("dims", &dims));
  TF_RETURN_IF_ERROR(c->GetAttr("N", &n));
  TF_RETURN_IF_ERROR(CheckEntries("dims", dims.size(), n));
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
Reads one embedding per id of each table, with one message to each server unless
the batches are long.

tables: The tables; one may come more than once.
ids: For each table, of any shape, also a scalar. Repeated ids are sent once where
  that pays.
embeddings: For each table, shape `ids.shape + [dim]`.
dims: The dim of each table.
insert_missing: If true, an id without a row gets one, unless its table has an
  admission policy; if false, the tables stay as they are.
)doc");

class LookupManyOp : public AsyncOpKernel {
 public:
  explicit LookupManyOp(OpKernelConstruction* context)
      : AsyncOpKernel(context) {
    std::vector<int32_t> dims;
    OP_REQUIRES_OK(context, context->GetAttr("dims", &dims));
    OP_REQUIRES_OK(context, context->GetAttr("N", &n_));
    OP_REQUIRES_OK(context, CheckEntries("dims", dims.size(), n_));
    OP_REQUIRES_OK(context,
                   context->GetAttr("insert_missing", &insert_missing_));
    dims_ = std::move(dims);
  }

  void ComputeAsync(OpKernelContext* context, DoneCallback done) override {
    const auto tables = std::make_shared<TableList>();
    std::vector<Tfswitch_PullPart> parts;
    OP_REQUIRES_OK_ASYNC(context, Prepare(context, tables.get(), &parts), done);
    const bool is_remote = tables->IsAnyRemote();
    RunAsync(
        context, is_remote,
        [context, tables, parts = std::move(parts),
         insert_missing = insert_missing_ ? 1 : 0] {
          const Tfswitch_Threads threads = DeviceThreads(context);
          absl::Status status =
              CallCore(&Tfswitch_Api::pull, parts.data(), parts.size(),
                       insert_missing, &threads);
          tables->Clear();
          return status;
        },
        std::move(done));
  }

 private:
  // Checks the tables and allocates the embeddings.
  absl::Status Prepare(OpKernelContext* context, TableList* tables,
                       std::vector<Tfswitch_PullPart>* parts) const {
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

  // Constant after construction.
  int n_ = 0;
  std::vector<int32_t> dims_;
  bool insert_missing_ = false;
};

TFSWITCH_CPU_KERNEL(LookupMany);

}  // namespace
}  // namespace tfswitch
