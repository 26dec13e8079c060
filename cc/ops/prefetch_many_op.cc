// Tfswitch>PrefetchMany.

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "cc/ops/blocking_threads.h"
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

REGISTER_OP("Tfswitch>PrefetchMany")
    .Input("tables: N * resource")
    .Input("ids: N * int64")
    .Attr("N: int >= 1")
    .Attr("exact: bool")
    .Attr("sources: list(int) >= 1")
    .Attr("limit: int >= 1")
    .SetIsStateful()
    .SetShapeFn([](tensorflow::shape_inference::InferenceContext*) {
      return absl::OkStatus();
    })
    .Doc(R"doc(
Begins to read the rows that a later `Tfswitch>LookupMany` of the same ids will
use, and does not wait for them.

tables: The tables.
ids: For each table, as that op will get them.
exact: Whether the lookup gets the rows that it would read itself, as far as
  this process changes them; else they may lack the last pushes.
sources: For each table a number of the dataset and the lookup, not 0.
limit: How many batches of a source wait for their lookup. If there are more, the
  oldest is dropped.
)doc");

class PrefetchManyOp : public OpKernel {
 public:
  explicit PrefetchManyOp(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("N", &n_));
    OP_REQUIRES_OK(context, context->GetAttr("exact", &exact_));
    OP_REQUIRES_OK(context, context->GetAttr("sources", &sources_));
    OP_REQUIRES_OK(context, CheckEntries("sources", sources_.size(), n_));
    OP_REQUIRES_OK(context, context->GetAttr("limit", &limit_));
  }

  void Compute(OpKernelContext* context) override {
    const auto tables = std::make_shared<TableList>();
    const absl::Status found = tables->Lookup(context, n_);
    // The dataset may live longer than the table. If the table is needed, its
    // lookup reports the error.
    if (absl::IsNotFound(found)) return;
    OP_REQUIRES_OK(context, found);
    std::vector<Tfswitch_PullPart> parts(n_);
    const std::vector<uint64_t> sources(sources_.begin(), sources_.end());
    for (int i = 0; i < n_; ++i) {
      const Tensor& ids = context->input(n_ + i);
      parts[i].table = (*tables)[i].get();
      parts[i].keys = ids.flat<int64_t>().data();
      parts[i].num_keys = static_cast<size_t>(ids.NumElements());
    }
    Tfswitch_Prefetch* prefetch = nullptr;
    const Tfswitch_Api* core = nullptr;
    OP_REQUIRES_OK(context, CallCore([&](const Tfswitch_Api& api, char* error) {
                     core = &api;
                     return api.begin_prefetch(parts.data(), parts.size(),
                                               exact_ ? 1 : 0, sources.data(),
                                               static_cast<size_t>(limit_),
                                               &prefetch, error);
                   }));
    // The tables stay open until their rows are read.
    BlockingThreads::Get().Schedule(
        [core, prefetch, tables] { core->run_prefetch(prefetch); });
  }

 private:
  // Constant after construction.
  int n_ = 0;
  bool exact_ = true;
  std::vector<int64_t> sources_;
  int64_t limit_ = 0;
};

TFSWITCH_CPU_KERNEL(PrefetchMany);

}  // namespace
}  // namespace tfswitch
