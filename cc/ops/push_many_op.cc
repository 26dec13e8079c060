// Tfswitch>PushMany.

#include <cstdint>
#include <limits>
#include <memory>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
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
using tensorflow::shape_inference::InferenceContext;
using tensorflow::shape_inference::ShapeHandle;

REGISTER_OP("Tfswitch>PushMany")
    .Input("tables: N * resource")
    .Input("ids: N * int64")
    .Input("gradients: N * float")
    .Input("learning_rates: N * float")
    .Input("shows: N * float")
    .Input("clicks: N * float")
    .Input("global_steps: N * int64")
    .Output("updated_rows: N * int64")
    .Output("poisons: N * float")
    .Attr("N: int >= 1")
    .Attr("rules: list(int) >= 1")
    .Attr("insert_missing: bool = true")
    .Attr("of_lookups: bool = false")
    .Attr("skip_non_finite: bool = false")
    .Attr("push_depth: int >= 0 = 0")
    .SetIsStateful()
    .SetIsDistributedCommunication()
    .SetShapeFn([](InferenceContext* c) {
      int n;
      std::vector<int64_t> rules;
      TF_RETURN_IF_ERROR(c->GetAttr("N", &n));
      TF_RETURN_IF_ERROR(c->GetAttr("rules", &rules));
      TF_RETURN_IF_ERROR(CheckEntries("rules", rules.size(), n));
      for (int i = 0; i < n; ++i) {
        ShapeHandle unused;
        ShapeHandle gradients;
        ShapeHandle batch;
        TF_RETURN_IF_ERROR(c->WithRank(c->input(i), 0, &unused));
        TF_RETURN_IF_ERROR(
            c->WithRankAtLeast(c->input(2 * n + i), 1, &gradients));
        TF_RETURN_IF_ERROR(c->Subshape(gradients, 0, -1, &batch));
        TF_RETURN_IF_ERROR(c->Merge(c->input(n + i), batch, &unused));
        TF_RETURN_IF_ERROR(c->WithRank(c->input(3 * n + i), 0, &unused));
        TF_RETURN_IF_ERROR(c->WithRank(c->input(6 * n + i), 0, &unused));
        c->set_output(i, c->Scalar());
        c->set_output(n + i, c->Scalar());
      }
      return absl::OkStatus();
    })
    .Doc(R"doc(
Takes one optimizer step for each distinct id of each table, with the sum of its
gradients, and with one message to each server unless the batches are long.

After an error of a server, such as a table that is not there, others may have
taken their step. At most 256 tables; one may come more than once, and then takes
a step for each.

tables: The tables.
ids: For each table, of any shape, also a scalar.
gradients: For each table, shape `ids.shape + [dim]`.
learning_rates: For each table a scalar.
shows: For each table how often each id was shown, one number for each; or
  empty: once each.
clicks: Likewise how often it was clicked; or empty: never.
global_steps: For each table a scalar: which step of the training it is; 0 if
  not known.
updated_rows: For each table how many rows changed; -1 if the push is still in
  flight.
poisons: For each table 0; or for all NaN if the push was skipped.
rules: For each table the number of the optimizer that pushes, from 1, in the
  order in which they came to the table; 0 if there is one only. An optimizer
  that came before the last one that has pushed is an error.
insert_missing: Whether an id without a row gets one first, or is skipped.
of_lookups: Whether the gradients are those of `Tfswitch>TieToWeight`. If a table
  has neither shows nor clicks, they are then as that op was told.
skip_non_finite: With NaN or Inf in a gradient nothing is applied to any table:
  whether that is an error, or all pushes are skipped with a warning.
push_depth: If not 0, the op waits until fewer pushes than this are in flight,
  and ends before its own are applied.
)doc");

class PushManyOp : public AsyncOpKernel {
 public:
  explicit PushManyOp(OpKernelConstruction* context) : AsyncOpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("N", &n_));
    OP_REQUIRES_OK(context, context->GetAttr("rules", &rules_));
    OP_REQUIRES_OK(context, CheckEntries("rules", rules_.size(), n_));
    OP_REQUIRES_OK(context, context->GetAttr("of_lookups", &of_lookups_));
    OP_REQUIRES_OK(context,
                   context->GetAttr("insert_missing", &insert_missing_));
    OP_REQUIRES_OK(context,
                   context->GetAttr("skip_non_finite", &skip_non_finite_));
    OP_REQUIRES_OK(context, context->GetAttr("push_depth", &push_depth_));
  }

  void ComputeAsync(OpKernelContext* context, DoneCallback done) override {
    const auto call = std::make_shared<Call>();
    OP_REQUIRES_OK_ASYNC(context, Prepare(context, call.get()), done);
    RunAsync(
        context, call->tables.IsAnyRemote(),
        [this, context, call] {
          const Tfswitch_Threads threads = DeviceThreads(context);
          absl::Status status =
              CallCore(&Tfswitch_Api::push, call->parts.data(),
                       call->parts.size(), push_depth_, &threads);
          for (int i = 0; status.ok() && i < n_; ++i) {
            call->tables[i].NotePush(rules_[i]);
          }
          call->tables.Clear();
          for (size_t i = 0; i < call->parts.size(); ++i) {
            const Tfswitch_PushResult& result = call->parts[i].result;
            *call->updated_rows[i] = result.updated_rows;
            if (result.skipped == 0) continue;
            *call->poisons[i] = std::numeric_limits<float>::quiet_NaN();
          }
          return status;
        },
        std::move(done));
  }

 private:
  struct Call {
    TableList tables;
    std::vector<Tfswitch_PushPart> parts;
    // Shows and clicks of the lookups. Used if the op itself has none.
    std::vector<std::vector<float>> shows;
    std::vector<std::vector<float>> clicks;
    std::vector<int64_t*> updated_rows;
    std::vector<float*> poisons;
  };

  absl::Status Prepare(OpKernelContext* context, Call* call) const {
    TF_RETURN_IF_ERROR(call->tables.Lookup(context, n_));
    call->shows.resize(n_);
    call->clicks.resize(n_);
    for (int i = 0; i < n_; ++i) {
      const TableResource& table = call->tables[i];
      TF_RETURN_IF_ERROR(table.CheckRule(rules_[i]));
      const Tensor& ids = context->input(n_ + i);
      const Tensor& gradients = context->input(2 * n_ + i);
      tensorflow::TensorShape expected = ids.shape();
      TF_RETURN_IF_ERROR(expected.AddDimWithStatus(table.dim()));
      if (gradients.shape() != expected) {
        return absl::InvalidArgumentError(absl::StrCat(
            "table '", table.name(), "': expected gradients of shape ",
            expected.DebugString(), " for ids of shape ",
            ids.shape().DebugString(), ", got ",
            gradients.shape().DebugString()));
      }
      Tfswitch_PushPart part = {};
      part.table = table.get();
      part.keys = ids.flat<int64_t>().data();
      part.num_keys = static_cast<size_t>(ids.NumElements());
      part.gradients = gradients.flat<float>().data();
      Tfswitch_PushOptions& options = part.options;
      options.insert_missing = insert_missing_ ? 1 : 0;
      options.skip_non_finite = skip_non_finite_ ? 1 : 0;
      TF_RETURN_IF_ERROR(ScalarInput(context, 3 * n_ + i, "learning_rates",
                                     &options.learning_rate));
      TF_RETURN_IF_ERROR(ScalarInput(context, 6 * n_ + i, "global_steps",
                                     &options.global_step));
      TF_RETURN_IF_ERROR(ObservationInputs(
          context, table, 4 * n_ + i, 5 * n_ + i, ids.NumElements(), &options));
      if (of_lookups_ && options.shows == nullptr &&
          options.clicks == nullptr &&
          table.FindObservations(absl::MakeConstSpan(part.keys, part.num_keys),
                                 &call->shows[i], &call->clicks[i])) {
        options.shows = call->shows[i].data();
        options.clicks = call->clicks[i].data();
      }
      call->parts.push_back(part);
      Tensor* updated_rows = nullptr;
      TF_RETURN_IF_ERROR(context->allocate_output(i, {}, &updated_rows));
      call->updated_rows.push_back(&updated_rows->scalar<int64_t>()());
      *call->updated_rows.back() = 0;
      Tensor* poison = nullptr;
      TF_RETURN_IF_ERROR(context->allocate_output(n_ + i, {}, &poison));
      call->poisons.push_back(&poison->scalar<float>()());
      *call->poisons.back() = 0.0f;
    }
    return absl::OkStatus();
  }

  // Constant after construction.
  int n_ = 0;
  std::vector<int64_t> rules_;
  bool insert_missing_ = true;
  bool of_lookups_ = false;
  bool skip_non_finite_ = false;
  int push_depth_ = 0;
};

TFSWITCH_CPU_KERNEL(PushMany);

}  // namespace
}  // namespace tfswitch
