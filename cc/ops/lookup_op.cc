// Tfswitch>Lookup.

#include <cstdint>
#include <utility>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "cc/ops/core_calls.h"
#include "cc/ops/table_resource.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"
#include "tensorflow/core/framework/tensor.h"

namespace tfswitch {
namespace {

using tensorflow::AsyncOpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
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
        context, AllocateEmbeddings(context, 0, ids, dim_, &embeddings), done);
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
          part.table = t.get();
          part.keys = keys.data();
          part.num_keys = keys.size();
          part.embeddings = embeddings;
          const Tfswitch_Threads threads = DeviceThreads(context);
          return CallCore(&Tfswitch_Api::pull, &part, 1, insert_missing ? 1 : 0,
                          &threads);
        },
        std::move(done));
  }

 private:
  int dim_ = 0;
  bool insert_missing_ = false;
};

TFSWITCH_CPU_KERNEL(Lookup);

}  // namespace
}  // namespace tfswitch
