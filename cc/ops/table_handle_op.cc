// Tfswitch>TableHandle and Tfswitch>Size.

#include <cstdint>
#include <mutex>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "cc/ops/core_calls.h"
#include "cc/ops/table_resource.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/resource_handle.h"
#include "tensorflow/core/framework/resource_mgr.h"

namespace tfswitch {
namespace {

using tensorflow::AsyncOpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::ResourceMgr;
using tensorflow::Tensor;
using tensorflow::core::RefCountPtr;

REGISTER_OP("Tfswitch>TableHandle")
    .Output("handle: resource")
    .Attr("cluster: string")
    .Attr("config: string")
    .Attr("cluster_id: int = 0")
    .Attr("timeout_s: float = 30.0")
    .Attr("container: string = ''")
    .Attr("shared_name: string = ''")
    .SetIsStateful()
    .SetIsDistributedCommunication()
    .SetShapeFn(tensorflow::shape_inference::ScalarShape)
    .Doc(R"doc(
Opens a table, creating it if the cluster does not have it.

The first execution connects and waits for the servers; later ones answer with
the same handle. Handles with the same `container` and `shared_name` are one.

handle: The table, for the other ops.
cluster: `local://`, or `grpc://host:port,host:port` in shard order.
config: The settings of the table, as JSON.
cluster_id: Which one of those that are open at `cluster` in this process; if
  none has this number, the one with the credentials that were given last.
timeout_s: How long to wait for the servers to answer.
container: Where the handle lives; empty is the default container.
shared_name: The name under which ops share the handle; empty makes it private
  to this op.
)doc");

REGISTER_OP("Tfswitch>Size")
    .Input("table: resource")
    .Output("num_rows: int64")
    .SetIsStateful()
    .SetIsDistributedCommunication()
    .SetShapeFn(ScalarsToScalar)
    .Doc(R"doc(
Counts the rows of a table, on all servers.

num_rows: Exact while nothing is pushed or inserted at the same time.
)doc");

// Does not derive from ResourceOpKernel, which opens resources under the lock
// of the device's resource manager: every variable of the model would have to
// wait for our servers.
class TableHandleOp : public AsyncOpKernel {
 public:
  explicit TableHandleOp(OpKernelConstruction* context)
      : AsyncOpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("cluster", &cluster_));
    OP_REQUIRES_OK(context, context->GetAttr("config", &config_));
    OP_REQUIRES_OK(context, context->GetAttr("cluster_id", &cluster_id_));
    OP_REQUIRES_OK(context, context->GetAttr("timeout_s", &timeout_s_));
  }

  ~TableHandleOp() override {
    if (!container_.resource_is_private_to_kernel()) return;
    // Ignores NotFound: the session was reset, and the resource is gone.
    container_.resource_manager()
        ->Delete<TableResource>(container_.container(), container_.name())
        .IgnoreError();
  }

  void ComputeAsync(OpKernelContext* context, DoneCallback done) override {
    std::call_once(container_once_, [this, context] {
      container_status_ = container_.Init(context->resource_manager(), def());
    });
    OP_REQUIRES_OK_ASYNC(context, container_status_, done);
    RefCountPtr<TableResource> table;
    const absl::Status found = Lookup(context, &table);
    if (found.ok()) {
      OP_REQUIRES_OK_ASYNC(context, Output(context, *table), done);
      done();
      return;
    }
    OP_REQUIRES_ASYNC(context, absl::IsNotFound(found), found, done);
    RunApart(
        context, [this, context] { return OpenAndOutput(context); },
        std::move(done));
  }

 private:
  absl::Status Lookup(OpKernelContext* context,
                      RefCountPtr<TableResource>* table) {
    TableResource* found = nullptr;
    absl::Status status = context->resource_manager()->Lookup<TableResource>(
        container_.container(), container_.name(), &found);
    if (status.ok()) table->reset(found);
    return status;
  }

  absl::Status OpenAndOutput(OpKernelContext* context) {
    RefCountPtr<TableResource> opened;
    TF_RETURN_IF_ERROR(TableResource::Open(cluster_,
                                           static_cast<uint64_t>(cluster_id_),
                                           config_, timeout_s_, &opened));
    // If another op has opened the same handle meanwhile, uses that op's table,
    // and closes the one opened here.
    TableResource* kept = nullptr;
    TF_RETURN_IF_ERROR(
        context->resource_manager()->LookupOrCreate<TableResource>(
            container_.container(), container_.name(), &kept,
            [&opened](TableResource** created) {
              *created = opened.release();
              return absl::OkStatus();
            }));
    RefCountPtr<TableResource> table(kept);
    return Output(context, *table);
  }

  absl::Status Output(OpKernelContext* context, const TableResource& table) {
    TF_RETURN_IF_ERROR(table.Verify(container_.name(), cluster_, config_));
    return tensorflow::MakeResourceHandleToOutput(
        context, 0, container_.container(), container_.name(),
        tensorflow::TypeIndex::Make<TableResource>());
  }

  // Constant after construction.
  std::string cluster_;
  std::string config_;
  int64_t cluster_id_ = 0;
  float timeout_s_ = 0.0f;

  // Written once, under container_once_.
  std::once_flag container_once_;
  absl::Status container_status_;
  tensorflow::ContainerInfo container_;
};

class SizeOp : public AsyncOpKernel {
 public:
  using AsyncOpKernel::AsyncOpKernel;

  void ComputeAsync(OpKernelContext* context, DoneCallback done) override {
    RefCountPtr<TableResource> table;
    OP_REQUIRES_OK_ASYNC(context, LookupTable(context, &table), done);
    Tensor* num_rows = nullptr;
    OP_REQUIRES_OK_ASYNC(context, context->allocate_output(0, {}, &num_rows),
                         done);
    int64_t* value = &num_rows->scalar<int64_t>()();
    const bool is_remote = table->is_remote();
    RunAsync(context, is_remote,
             Holding(std::move(table),
                     [value](const TableResource& t) {
                       return CallCore(&Tfswitch_Api::table_size, t.get(),
                                       value);
                     }),
             std::move(done));
  }
};

TFSWITCH_CPU_KERNEL(TableHandle);
TFSWITCH_CPU_KERNEL(Size);

}  // namespace
}  // namespace tfswitch
