// Tfswitch>EndStep.

#include <utility>

#include "absl/status/status.h"
#include "cc/ops/core_calls.h"
#include "cc/ops/table_resource.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/framework/tensor_shape.h"

namespace tfswitch {
namespace {

using tensorflow::AsyncOpKernel;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::core::RefCountPtr;

REGISTER_OP("Tfswitch>EndStep")
    .Input("table: resource")
    .Input("weight: double")
    .Output("round: int64")
    .SetIsStateful()
    .SetIsDistributedCommunication()
    .SetShapeFn(ScalarsToScalar)
    .Doc(R"doc(
Ends a step of this process's worker, and waits for other workers as its
consistency says.

Everything that the step has pushed must come before, by control dependencies.

table: Any table of the cluster in which the process is a worker.
weight: A scalar: the number of samples of the step.
round: A scalar: to which round the next step contributes. With consistency bsp
  that is how many have been applied.
)doc");

class EndStepOp : public AsyncOpKernel {
 public:
  using AsyncOpKernel::AsyncOpKernel;

  void ComputeAsync(OpKernelContext* context, DoneCallback done) override {
    RefCountPtr<TableResource> table;
    OP_REQUIRES_OK_ASYNC(context, LookupTable(context, &table), done);
    double weight = 0.0;
    OP_REQUIRES_OK_ASYNC(context, ScalarInput(context, 1, "weight", &weight),
                         done);
    Tensor* round = nullptr;
    OP_REQUIRES_OK_ASYNC(context, context->allocate_output(0, {}, &round),
                         done);
    RunApart(context,
             Holding(std::move(table),
                     [weight, round](const TableResource& t) {
                       return CallCore(&Tfswitch_Api::table_end_step, t.get(),
                                       weight, &round->scalar<int64_t>()());
                     }),
             std::move(done));
  }
};

TFSWITCH_CPU_KERNEL(EndStep);

}  // namespace
}  // namespace tfswitch
