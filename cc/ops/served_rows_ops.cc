// Tfswitch>ServedModel, OpenServedModel, PinServedRows and ServedLookup: the
// ops with which exported models look up rows.

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "cc/capi/tfswitch.h"
#include "cc/ops/core_calls.h"
#include "cc/ops/table_resource.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/resource_base.h"
#include "tensorflow/core/framework/resource_handle.h"
#include "tensorflow/core/framework/resource_mgr.h"
#include "tensorflow/core/framework/shape_inference.h"
#include "tensorflow/core/framework/variant.h"
#include "tensorflow/core/framework/variant_tensor_data.h"

namespace tfswitch {
namespace {

using tensorflow::AsyncOpKernel;
using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::ResourceHandle;
using tensorflow::Tensor;
using tensorflow::core::RefCountPtr;
using tensorflow::shape_inference::InferenceContext;
using tensorflow::shape_inference::ShapeHandle;

REGISTER_OP("Tfswitch>ServedModel")
    .Output("model: resource")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::ScalarShape)
    .Doc(R"doc(
A place for the rows of an exported model. `Tfswitch>OpenServedModel` fills it.

model: Each op has its own.
)doc");

REGISTER_OP("Tfswitch>OpenServedModel")
    .Input("model: resource")
    .Input("file: string")
    .SetIsStateful()
    .SetIsDistributedCommunication()
    .SetShapeFn(AllScalars)
    .Doc(R"doc(
Opens the rows that a model file names; again, it does nothing. If they are on
servers it waits for those, no longer than the file says.

model: The output of `Tfswitch>ServedModel`.
file: The path of the file, an asset of the SavedModel.
)doc");

REGISTER_OP("Tfswitch>PinServedRows")
    .Input("model: resource")
    .Output("rows: variant")
    .SetIsStateful()
    .SetShapeFn(ScalarsToScalar)
    .Doc(R"doc(
The rows that the model serves now. A holder sees the same rows, also while
others are exchanged; but if they are on servers, each lookup reads the present
rows.

model: The output of `Tfswitch>ServedModel`.
rows: For `Tfswitch>ServedLookup`.
)doc");

REGISTER_OP("Tfswitch>ServedLookup")
    .Input("rows: variant")
    .Input("ids: N * int64")
    .Output("embeddings: N * float")
    .Attr("N: int >= 1")
    .Attr("tables: list(string) >= 1")
    .Attr("dims: list(int) >= 1")
    .SetIsDistributedCommunication()
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle embeddings;
      TF_RETURN_IF_ERROR(c->WithRank(c->input(0), 0, &embeddings));
      int n;
      TF_RETURN_IF_ERROR(c->GetAttr("N", &n));
      std::vector<std::string> tables;
      TF_RETURN_IF_ERROR(c->GetAttr("tables", &tables));
      std::vector<int> dims;
      TF_RETURN_IF_ERROR(c->GetAttr("dims", &dims));
      if (static_cast<int>(dims.size()) != n ||
          static_cast<int>(tables.size()) != n) {
        return absl::InvalidArgumentError(absl::StrCat(
            "`tables` and `dims` must have one entry for each of ", n,
            " `ids`. Received: ", tables.size(), " and ", dims.size()));
      }
      for (int i = 0; i < n; ++i) {
        if (dims[i] < 1) {
          return absl::InvalidArgumentError(
              absl::StrCat("`dims` must be at least 1. Received: ", dims[i]));
        }
        TF_RETURN_IF_ERROR(
            c->Concatenate(c->input(1 + i), c->Vector(dims[i]), &embeddings));
        c->set_output(i, embeddings);
      }
      return absl::OkStatus();
    })
    .Doc(R"doc(
Reads one embedding per id of tables of an exported model. An id without a row
reads as the default of its table, and nothing is created. From servers it reads
with one message to each, unless the batches are long.

rows: The output of `Tfswitch>PinServedRows`.
ids: For each table, of any shape.
embeddings: For each table, shape `ids.shape + [dim]`.
tables: The names of the tables; one may come more than once.
dims: The dim of each table.
)doc");

// Thread-safe.
class ServedModelResource : public tensorflow::ResourceBase {
 public:
  ~ServedModelResource() override {
    if (model_ != nullptr) api_->close_served_model(model_);
  }

  absl::Status Open(const std::string& file) {
    return CallCore([&](const Tfswitch_Api& api, char* error) {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (model_ != nullptr) return 0;
      api_ = &api;
      return api.open_served_model(file.c_str(), &model_, error);
    });
  }

  // Pins the rows; the last reference unpins them. *is_remote receives whether
  // a lookup waits for servers.
  absl::Status Pin(std::shared_ptr<const Tfswitch_ServedRows>* rows,
                   bool* is_remote) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (model_ == nullptr) {
      return absl::FailedPreconditionError(
          "the rows of this model are not open: its initializer has not run. "
          "Load it with tf.saved_model.load, or in C++ with LoadSavedModel.");
    }
    *is_remote = api_->served_model_is_remote(model_) != 0;
    Tfswitch_ServedRows* const pinned_rows = api_->pin_served_rows(model_);
    if (pinned_rows == nullptr) {
      return absl::ResourceExhaustedError("no memory to look rows up");
    }
    *rows = std::shared_ptr<const Tfswitch_ServedRows>(
        pinned_rows, [api = api_](const Tfswitch_ServedRows* pinned) {
          api->unpin_served_rows(const_cast<Tfswitch_ServedRows*>(pinned));
        });
    return absl::OkStatus();
  }

  std::string DebugString() const override { return "tfswitch served model"; }

 private:
  std::mutex mutex_;  // The members below are set once, with this locked.
  const Tfswitch_Api* api_ = nullptr;
  Tfswitch_ServedModel* model_ = nullptr;
};

// The value of a variant tensor with which ops of one process pass pinned rows.
struct PinnedRows {
  std::shared_ptr<const Tfswitch_ServedRows> rows;
  bool is_remote = false;

  static std::string TypeName() { return "tfswitch::PinnedRows"; }
  std::string DebugString() const { return TypeName(); }
  void Encode(tensorflow::VariantTensorData* data) const {
    data->set_type_name(TypeName());
  }
  static bool Decode(const tensorflow::VariantTensorData&) { return false; }
};

class ServedModelOp : public OpKernel {
 public:
  explicit ServedModelOp(OpKernelConstruction* context) : OpKernel(context) {}

  void Compute(OpKernelContext* context) override {
    // The kernel keeps the model open, because in a session this op runs in
    // each step. Handles keep it open, too: in eager mode the kernel may be
    // destroyed before the handles.
    std::call_once(once_, [this] { model_.reset(new ServedModelResource); });
    Tensor* handle = nullptr;
    OP_REQUIRES_OK(context, context->allocate_output(0, {}, &handle));
    model_->Ref();
    handle->scalar<ResourceHandle>()() = ResourceHandle::MakeRefCountingHandle(
        model_.get(), context->device()->name());
  }

 private:
  std::once_flag once_;
  RefCountPtr<ServedModelResource> model_;
};

absl::Status FindModel(OpKernelContext* context,
                       RefCountPtr<ServedModelResource>* model) {
  return tensorflow::LookupResource(
      context, tensorflow::HandleFromInput(context, 0), model);
}

class OpenServedModelOp : public AsyncOpKernel {
 public:
  using AsyncOpKernel::AsyncOpKernel;

  void ComputeAsync(OpKernelContext* context, DoneCallback done) override {
    RefCountPtr<ServedModelResource> model;
    OP_REQUIRES_OK_ASYNC(context, FindModel(context, &model), done);
    tensorflow::tstring file;
    OP_REQUIRES_OK_ASYNC(context, ScalarInput(context, 1, "file", &file), done);
    // Runs on a thread of tfswitch, because it may wait for servers, or read
    // all rows to check them.
    RunApart(context,
             Holding(std::move(model),
                     [path = std::string(file)](ServedModelResource& resource) {
                       return resource.Open(path);
                     }),
             std::move(done));
  }
};

class PinServedRowsOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* context) override {
    RefCountPtr<ServedModelResource> model;
    OP_REQUIRES_OK(context, FindModel(context, &model));
    PinnedRows pinned;
    OP_REQUIRES_OK(context, model->Pin(&pinned.rows, &pinned.is_remote));
    Tensor* output = nullptr;
    tensorflow::AllocatorAttributes on_host;
    on_host.set_on_host(true);
    OP_REQUIRES_OK(context, context->allocate_output(0, {}, &output, on_host));
    output->scalar<tensorflow::Variant>()() = std::move(pinned);
  }

  bool IsExpensive() override { return false; }
};

class ServedLookupOp : public AsyncOpKernel {
 public:
  explicit ServedLookupOp(OpKernelConstruction* context)
      : AsyncOpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("tables", &tables_));
    OP_REQUIRES_OK(context, context->GetAttr("dims", &dims_));
  }

  void ComputeAsync(OpKernelContext* context, DoneCallback done) override {
    const auto call = std::make_shared<Call>();
    OP_REQUIRES_OK_ASYNC(context, Prepare(context, call.get()), done);
    RunAsync(
        context, call->pinned.is_remote,
        [call, threads = DeviceThreads(context)] {
          absl::Status status =
              CallCore(&Tfswitch_Api::served_lookup, call->pinned.rows.get(),
                       call->parts.data(), call->parts.size(), &threads);
          // Unpins the rows before the op ends, because code that waits for the
          // op may next close the model.
          call->pinned.rows.reset();
          return status;
        },
        std::move(done));
  }

 private:
  struct Call {
    PinnedRows pinned;
    std::vector<Tfswitch_ServedPart> parts;
  };

  absl::Status Prepare(OpKernelContext* context, Call* call) {
    const auto* const pinned =
        context->input(0).scalar<tensorflow::Variant>()().get<PinnedRows>();
    if (pinned == nullptr || pinned->rows == nullptr) {
      return absl::InvalidArgumentError(
          "`rows` must be the output of Tfswitch>PinServedRows");
    }
    call->pinned = *pinned;
    call->parts.resize(dims_.size());
    for (int i = 0; i < static_cast<int>(dims_.size()); ++i) {
      const Tensor& ids = context->input(1 + i);
      float* embeddings = nullptr;
      TF_RETURN_IF_ERROR(
          AllocateEmbeddings(context, i, ids, dims_[i], &embeddings));
      call->parts[i] = {tables_[i].c_str(), dims_[i],
                        ids.flat<int64_t>().data(),
                        static_cast<size_t>(ids.NumElements()), embeddings};
    }
    return absl::OkStatus();
  }

  // Constant after construction.
  std::vector<std::string> tables_;
  std::vector<int> dims_;
};

TFSWITCH_CPU_KERNEL(ServedModel);
TFSWITCH_CPU_KERNEL(OpenServedModel);
TFSWITCH_CPU_KERNEL(PinServedRows);
TFSWITCH_CPU_KERNEL(ServedLookup);

}  // namespace
}  // namespace tfswitch
