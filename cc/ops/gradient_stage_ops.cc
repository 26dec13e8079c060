// Tfswitch>StageGradients, SumStagedGradients and ClearStagedGradients: they
// keep the gradients of each worker's steps on a parameter server, until the
// workers' coordinator decides which of them are added up.

#define EIGEN_USE_THREADS

#include <algorithm>
#include <cstdint>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <tuple>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "cc/ops/core_calls.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/resource_base.h"
#include "tensorflow/core/framework/resource_mgr.h"
#include "tensorflow/core/framework/shape_inference.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/framework/tensor_shape.h"
#include "tensorflow/core/framework/types.h"
#include "tensorflow/core/lib/core/refcount.h"
#include "unsupported/Eigen/CXX11/Tensor"

namespace tfswitch {
namespace {

using tensorflow::DataType;
using tensorflow::OpInputList;
using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;
using tensorflow::TensorShapeUtils;
using tensorflow::core::RefCountPtr;
using tensorflow::shape_inference::InferenceContext;
using tensorflow::shape_inference::ShapeHandle;

// One step of one worker.
struct StepKey {
  int64_t worker = 0;
  int64_t incarnation = 0;
  int64_t clock = 0;

  bool operator<(const StepKey& other) const {
    return std::tie(worker, incarnation, clock) <
           std::tie(other.worker, other.incarnation, other.clock);
  }
};

// Keeps the gradients of steps that have not been summed.
//
// Thread-safe.
class GradientStage : public tensorflow::ResourceBase {
 public:
  explicit GradientStage(std::string name) : name_(std::move(name)) {}

  std::string DebugString() const override {
    const std::lock_guard<std::mutex> lock(mutex_);
    return absl::StrCat("stage '", name_, "' with gradients of ", steps_.size(),
                        " steps");
  }

  // Keeps the gradients of a step. If `replaces` is set, drops those of the
  // worker's earlier steps in the same incarnation.
  void Put(const StepKey& key, std::vector<Tensor> gradients, bool replaces) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (replaces) {
      const auto begin = steps_.lower_bound({key.worker, key.incarnation, 0});
      steps_.erase(begin, steps_.lower_bound(key));
    }
    steps_[key] = std::move(gradients);
  }

  // Removes the gradients of the steps `keys`, and returns them. Also removes
  // the gradients of earlier steps of the same incarnations, and those of
  // workers that have ended: their incarnation is below `next_incarnation` and
  // not in `active`. If the gradients of a key are missing, returns NotFound
  // and removes nothing.
  absl::Status Take(const std::vector<StepKey>& keys,
                    const std::set<int64_t>& active, int64_t next_incarnation,
                    std::vector<std::vector<Tensor>>* gradients) {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (const StepKey& key : keys) {
      const auto it = steps_.find(key);
      if (it == steps_.end()) {
        return absl::NotFoundError(absl::StrCat(
            "stage '", name_, "' has no gradients of step ", key.clock,
            " of worker ", key.worker,
            "; the server was started again, or the step was staged on "
            "another one: have all workers build the same graph"));
      }
      gradients->push_back(it->second);
    }
    for (const StepKey& key : keys) {
      const auto end = steps_.upper_bound(key);
      steps_.erase(steps_.lower_bound({key.worker, key.incarnation, 0}), end);
    }
    for (auto it = steps_.begin(); it != steps_.end();) {
      const int64_t incarnation = it->first.incarnation;
      const bool is_gone =
          incarnation < next_incarnation && active.count(incarnation) == 0;
      it = is_gone ? steps_.erase(it) : std::next(it);
    }
    return absl::OkStatus();
  }

  // Removes all gradients. Returns the number of steps whose gradients were
  // removed.
  int64_t Clear() {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto num_steps = static_cast<int64_t>(steps_.size());
    steps_.clear();
    return num_steps;
  }

 private:
  const std::string name_;
  mutable std::mutex mutex_;
  std::map<StepKey, std::vector<Tensor>> steps_;  // Guarded by mutex_.
};

// Finds the stage of this name on the op's device.
absl::Status FindStage(OpKernelContext* context, const std::string& name,
                       RefCountPtr<GradientStage>* stage) {
  tensorflow::ResourceMgr* const manager = context->resource_manager();
  GradientStage* found = nullptr;
  TF_RETURN_IF_ERROR(manager->LookupOrCreate<GradientStage>(
      manager->default_container(), absl::StrCat("tfswitch_stage/", name),
      &found, [&name](GradientStage** created) {
        *created = new GradientStage(name);
        return absl::OkStatus();
      }));
  stage->reset(found);
  return absl::OkStatus();
}

REGISTER_OP("Tfswitch>StageGradients")
    .Input("key: int64")
    .Input("gradients: T")
    .Attr("T: list(type) >= 1")
    .Attr("stage: string")
    .Attr("worker: int >= 0")
    .Attr("replaces: bool")
    .SetIsStateful()
    .SetIsDistributedCommunication()
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle unused;
      return c->WithRank(c->input(0), 1, &unused);
    })
    .Doc(R"doc(
Keeps the gradients of a step until they are summed.

key: incarnation, clock (and what may follow) of the worker.
gradients: For each variable on this device a tensor of its shape or, for some
  rows, int64 indices [n] and values [n, ...].
stage: Name of the stage.
worker: The number of the worker.
replaces: Whether earlier steps of the same incarnation count no more.
)doc");

class StageGradientsOp : public OpKernel {
 public:
  explicit StageGradientsOp(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("stage", &stage_));
    OP_REQUIRES_OK(context, context->GetAttr("worker", &worker_));
    OP_REQUIRES_OK(context, context->GetAttr("replaces", &replaces_));
  }

  void Compute(OpKernelContext* context) override {
    const Tensor& key = context->input(0);
    OP_REQUIRES(context, key.dims() == 1 && key.NumElements() >= 2,
                absl::InvalidArgumentError(absl::StrCat(
                    "`key` must have an incarnation and a clock. Received: "
                    "shape ",
                    key.shape().DebugString())));
    RefCountPtr<GradientStage> stage;
    OP_REQUIRES_OK(context, FindStage(context, stage_, &stage));
    OpInputList inputs;
    OP_REQUIRES_OK(context, context->input_list("gradients", &inputs));
    const auto values = key.vec<int64_t>();
    stage->Put({worker_, values(0), values(1)},
               std::vector<Tensor>(inputs.begin(), inputs.end()), replaces_);
  }

 private:
  // Constant after construction.
  std::string stage_;
  int worker_ = 0;
  bool replaces_ = false;
};

REGISTER_OP("Tfswitch>SumStagedGradients")
    .Input("keys: int64")
    .Input("weights: double")
    .Input("active: int64")
    .Input("next_incarnation: int64")
    .Output("sums: T")
    .Attr("T: list(type) >= 1")
    .Attr("of_rows: list(bool) >= 1")
    .Attr("stage: string")
    .Attr("averages: bool")
    .Attr("averages_by_row: bool")
    .SetIsStateful()
    .SetIsDistributedCommunication()
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle unused;
      TF_RETURN_IF_ERROR(c->WithRank(c->input(0), 2, &unused));
      TF_RETURN_IF_ERROR(c->WithRank(c->input(1), 1, &unused));
      TF_RETURN_IF_ERROR(c->WithRank(c->input(2), 1, &unused));
      TF_RETURN_IF_ERROR(c->WithRank(c->input(3), 0, &unused));
      return tensorflow::shape_inference::UnknownShape(c);
    })
    .Doc(R"doc(
Sums the staged gradients of a round, in its order, and forgets them.

Fails with NOT_FOUND, and waits for nothing, if those of a step are not there.

keys: Shape [n, 3]: worker, incarnation and clock of each step.
weights: Shape [n]: the weight of each step.
active: The incarnations that may go on.
next_incarnation: A scalar: the gradients of all others below it are forgotten.
sums: For each variable on this device the sum, or the rows of all steps one
  after the other, as indices and values.
of_rows: For each variable, whether its gradients are indices and values.
stage: Name of the stage.
averages: Whether each gradient is multiplied with its share of the weights.
averages_by_row: Whether instead each row is averaged over the steps that have
  it. It is there once then.
)doc");

// A sum of elements of type T is computed in this type.
template <typename T>
using Wide = std::conditional_t<std::is_same_v<T, double>, double, float>;

// The gradients of one variable in several steps, and a factor for each. A
// gradient with factor 0 is left out, because it may be NaN, for example as the
// mean over a batch in which all samples are masked.
struct Terms {
  std::vector<const Tensor*> gradients;
  std::vector<double> factors;
};

absl::Status UnequalShapes(const Tensor& a, const Tensor& b) {
  return absl::InvalidArgumentError(
      absl::StrCat("gradients of one variable have different shapes: ",
                   a.shape().DebugString(), " and ", b.shape().DebugString()));
}

template <typename T>
absl::Status Sum(OpKernelContext* context, int output_index,
                 const Terms& terms) {
  const Tensor& first = *terms.gradients[0];
  for (const Tensor* gradient : terms.gradients) {
    if (gradient->shape() != first.shape()) {
      return UnequalShapes(first, *gradient);
    }
  }
  if (terms.gradients.size() == 1 && terms.factors[0] == 1.0) {
    context->set_output(output_index, first);
    return absl::OkStatus();
  }
  Tensor* sum = nullptr;
  TF_RETURN_IF_ERROR(
      context->allocate_output(output_index, first.shape(), &sum));
  T* const out = sum->flat<T>().data();
  const auto add = [&](int64_t begin, int64_t end) {
    constexpr int64_t kRun = 1024;
    Wide<T> run[kRun];
    for (; begin < end; begin += kRun) {
      const int64_t size = std::min(kRun, end - begin);
      std::fill(run, run + size, Wide<T>{0});
      for (size_t k = 0; k < terms.gradients.size(); ++k) {
        if (terms.factors[k] == 0.0) continue;
        const auto factor = static_cast<Wide<T>>(terms.factors[k]);
        const T* const in = terms.gradients[k]->flat<T>().data() + begin;
        for (int64_t i = 0; i < size; ++i) {
          run[i] += factor * static_cast<Wide<T>>(in[i]);
        }
      }
      for (int64_t i = 0; i < size; ++i)
        out[begin + i] = static_cast<T>(run[i]);
    }
  };
  const auto num_terms = static_cast<double>(terms.gradients.size());
  context->eigen_cpu_device().parallelFor(
      sum->NumElements(),
      Eigen::TensorOpCost(/*bytes_loaded=*/num_terms * sizeof(T),
                          /*bytes_stored=*/sizeof(T),
                          /*compute_cycles=*/num_terms),
      add);
  return absl::OkStatus();
}

// Checks indices [n] and values [n, ...] of all steps. `num_rows` receives the
// number of rows, and `shape` the shape of one value.
absl::Status CheckRows(const Terms& indices, const Terms& values,
                       int64_t* num_rows, TensorShape* shape) {
  *num_rows = 0;
  for (size_t k = 0; k < values.gradients.size(); ++k) {
    const Tensor& rows = *values.gradients[k];
    if (!TensorShapeUtils::IsVectorOrHigher(rows.shape()) ||
        indices.gradients[k]->dims() != 1 ||
        indices.gradients[k]->NumElements() != rows.dim_size(0)) {
      return absl::InvalidArgumentError(absl::StrCat(
          "a gradient of rows has indices of shape ",
          indices.gradients[k]->shape().DebugString(), " and values of shape ",
          rows.shape().DebugString(), "; expected [n] and [n, ...]"));
    }
    TensorShape row = rows.shape();
    row.RemoveDim(0);
    if (k == 0) *shape = row;
    if (row != *shape) return UnequalShapes(*values.gradients[0], rows);
    *num_rows += rows.dim_size(0);
  }
  return absl::OkStatus();
}

// Allocates outputs for `num_rows` indices and values of `shape`.
template <typename T>
absl::Status AllocateRows(OpKernelContext* context, int output_index,
                          int64_t num_rows, TensorShape shape,
                          int64_t** indices, T** values) {
  Tensor* index_output = nullptr;
  TF_RETURN_IF_ERROR(context->allocate_output(
      output_index, TensorShape({num_rows}), &index_output));
  *indices = index_output->flat<int64_t>().data();
  shape.InsertDim(0, num_rows);
  Tensor* value_output = nullptr;
  TF_RETURN_IF_ERROR(
      context->allocate_output(output_index + 1, shape, &value_output));
  *values = value_output->flat<T>().data();
  return absl::OkStatus();
}

template <typename T>
absl::Status SumRows(OpKernelContext* context, int output_index,
                     const Terms& indices, const Terms& values) {
  int64_t num_rows = 0;
  TensorShape shape;
  TF_RETURN_IF_ERROR(CheckRows(indices, values, &num_rows, &shape));
  int64_t* index_out = nullptr;
  T* out = nullptr;
  TF_RETURN_IF_ERROR(
      AllocateRows(context, output_index, num_rows, shape, &index_out, &out));
  for (size_t k = 0; k < values.gradients.size(); ++k) {
    const auto in_indices = indices.gradients[k]->flat<int64_t>();
    index_out = std::copy(in_indices.data(),
                          in_indices.data() + in_indices.size(), index_out);
    const auto in = values.gradients[k]->flat<T>();
    if (values.factors[k] == 0.0) {
      out = std::fill_n(out, in.size(), static_cast<T>(0.0f));
      continue;
    }
    const auto factor = static_cast<Wide<T>>(values.factors[k]);
    out = std::transform(
        in.data(), in.data() + in.size(), out, [factor](const T& value) {
          return static_cast<T>(factor * static_cast<Wide<T>>(value));
        });
  }
  return absl::OkStatus();
}

// `values.factors` are the weights of the steps.
template <typename T>
absl::Status AverageRows(OpKernelContext* context, int output_index,
                         const Terms& indices, const Terms& values) {
  int64_t num_rows = 0;
  TensorShape shape;
  TF_RETURN_IF_ERROR(CheckRows(indices, values, &num_rows, &shape));
  const int64_t row_size = shape.num_elements();
  std::unordered_map<int64_t, size_t> places;  // In order of appearance.
  std::vector<int64_t> unique;
  std::vector<double> weights;
  std::vector<size_t> last_step;
  std::vector<Wide<T>> sums;
  for (size_t k = 0; k < values.gradients.size(); ++k) {
    const auto in_indices = indices.gradients[k]->flat<int64_t>();
    const T* in = values.gradients[k]->flat<T>().data();
    const auto factor = static_cast<Wide<T>>(values.factors[k]);
    for (int64_t i = 0; i < in_indices.size(); ++i, in += row_size) {
      const auto [it, is_new] = places.emplace(in_indices(i), unique.size());
      const size_t place = it->second;
      if (is_new) {
        unique.push_back(in_indices(i));
        weights.push_back(0.0);
        last_step.push_back(values.gradients.size());
        sums.resize(sums.size() + row_size);
      }
      if (last_step[place] != k) weights[place] += values.factors[k];
      last_step[place] = k;
      if (values.factors[k] == 0.0) continue;
      Wide<T>* const sum = sums.data() + place * row_size;
      for (int64_t j = 0; j < row_size; ++j) {
        sum[j] += factor * static_cast<Wide<T>>(in[j]);
      }
    }
  }
  int64_t* index_out = nullptr;
  T* out = nullptr;
  TF_RETURN_IF_ERROR(AllocateRows(context, output_index,
                                  static_cast<int64_t>(unique.size()), shape,
                                  &index_out, &out));
  std::copy(unique.begin(), unique.end(), index_out);
  for (size_t place = 0; place < unique.size(); ++place) {
    const double weight = weights[place];
    const auto factor = static_cast<Wide<T>>(weight > 0.0 ? 1.0 / weight : 0.0);
    for (int64_t j = 0; j < row_size; ++j) {
      const size_t i = place * row_size + j;
      out[i] = static_cast<T>(factor * sums[i]);
    }
  }
  return absl::OkStatus();
}

class SumStagedGradientsOp : public OpKernel {
 public:
  explicit SumStagedGradientsOp(OpKernelConstruction* context)
      : OpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("T", &types_));
    OP_REQUIRES_OK(context, context->GetAttr("of_rows", &of_rows_));
    OP_REQUIRES_OK(context, context->GetAttr("stage", &stage_));
    OP_REQUIRES_OK(context, context->GetAttr("averages", &averages_));
    OP_REQUIRES_OK(context,
                   context->GetAttr("averages_by_row", &averages_by_row_));
    size_t num_tensors = 0;
    for (const bool of_rows : of_rows_) num_tensors += of_rows ? 2 : 1;
    OP_REQUIRES(context, num_tensors == types_.size(),
                absl::InvalidArgumentError(absl::StrCat(
                    "`of_rows` asks for ", num_tensors,
                    " tensors. Received: ", types_.size(), " types")));
    size_t at = 0;
    for (const bool of_rows : of_rows_) {
      OP_REQUIRES(context, !of_rows || types_[at] == tensorflow::DT_INT64,
                  absl::InvalidArgumentError(absl::StrCat(
                      "indices of rows must be int64. Received: T[", at,
                      "] = ", tensorflow::DataTypeString(types_[at]))));
      at += of_rows ? 2 : 1;
    }
  }

  void Compute(OpKernelContext* context) override {
    const Tensor& key_input = context->input(0);
    const Tensor& weight_input = context->input(1);
    OP_REQUIRES(
        context,
        key_input.dims() == 2 && key_input.dim_size(1) == 3 &&
            key_input.dim_size(0) > 0 && weight_input.dims() == 1 &&
            weight_input.dim_size(0) == key_input.dim_size(0) &&
            context->input(2).dims() == 1 && context->input(3).dims() == 0,
        absl::InvalidArgumentError(absl::StrCat(
            "`keys` must be of shape [n, 3] and `weights` of [n], with n > 0. "
            "Received: shapes ",
            key_input.shape().DebugString(), " and ",
            weight_input.shape().DebugString())));
    const auto keys = key_input.matrix<int64_t>();
    std::vector<StepKey> steps;
    for (int64_t i = 0; i < key_input.dim_size(0); ++i) {
      steps.push_back({keys(i, 0), keys(i, 1), keys(i, 2)});
    }
    const auto active = context->input(2).vec<int64_t>();
    RefCountPtr<GradientStage> stage;
    OP_REQUIRES_OK(context, FindStage(context, stage_, &stage));
    std::vector<std::vector<Tensor>> gradients;
    OP_REQUIRES_OK(
        context,
        stage->Take(
            steps,
            std::set<int64_t>(active.data(), active.data() + active.size()),
            context->input(3).scalar<int64_t>()(), &gradients));
    for (const std::vector<Tensor>& of_step : gradients) {
      OP_REQUIRES_OK(context, CheckTypes(of_step));
    }
    const auto weights = weight_input.vec<double>();
    int index = 0;
    for (const bool of_rows : of_rows_) {
      OP_REQUIRES_OK(context,
                     SumOne(context, index, of_rows, gradients,
                            {weights.data(), weights.data() + weights.size()}));
      index += of_rows ? 2 : 1;
    }
  }

 private:
  absl::Status CheckTypes(const std::vector<Tensor>& gradients) const {
    const auto is_of = [](const Tensor& gradient, DataType type) {
      return gradient.dtype() == type;
    };
    if (std::equal(gradients.begin(), gradients.end(), types_.begin(),
                   types_.end(), is_of)) {
      return absl::OkStatus();
    }
    return absl::InvalidArgumentError(
        absl::StrCat("stage '", stage_,
                     "' has gradients of another model; have all workers "
                     "build the same graph"));
  }

  // The terms of tensor `index`.
  static Terms TermsOf(const std::vector<std::vector<Tensor>>& gradients,
                       int index, const std::vector<double>& factors) {
    Terms terms;
    terms.factors = factors;
    for (const std::vector<Tensor>& of_step : gradients) {
      terms.gradients.push_back(&of_step[index]);
    }
    return terms;
  }

  absl::Status SumOne(OpKernelContext* context, int index, bool of_rows,
                      const std::vector<std::vector<Tensor>>& gradients,
                      const std::vector<double>& weights) const {
    std::vector<double> factors(weights.size(), 1.0);
    if (averages_) {
      double total = 0.0;
      for (const double weight : weights) total += weight;
      for (size_t k = 0; k < weights.size(); ++k) {
        factors[k] = total > 0.0 ? weights[k] / total : 0.0;
      }
    }
    const bool by_row = of_rows && averages_by_row_;
    const Terms terms = TermsOf(gradients, index, factors);
    const Terms values = TermsOf(gradients, index + (of_rows ? 1 : 0),
                                 by_row ? weights : factors);
    const DataType type = values.gradients[0]->dtype();
    const auto run = [&](auto zero) {
      using T = decltype(zero);
      if (!of_rows) return Sum<T>(context, index, values);
      if (by_row) return AverageRows<T>(context, index, terms, values);
      return SumRows<T>(context, index, terms, values);
    };
    switch (type) {
      case tensorflow::DT_FLOAT:
        return run(float{});
      case tensorflow::DT_DOUBLE:
        return run(double{});
      case tensorflow::DT_HALF:
        return run(Eigen::half{});
      case tensorflow::DT_BFLOAT16:
        return run(tensorflow::bfloat16{});
      default:
        return absl::InvalidArgumentError(
            absl::StrCat("gradients must be of a float type. Received: ",
                         tensorflow::DataTypeString(type)));
    }
  }

  // Constant after construction.
  tensorflow::DataTypeVector types_;
  std::vector<bool> of_rows_;
  std::string stage_;
  bool averages_ = false;
  bool averages_by_row_ = false;
};

REGISTER_OP("Tfswitch>ClearStagedGradients")
    .Output("num_steps: int64")
    .Attr("stage: string")
    .SetIsStateful()
    .SetIsDistributedCommunication()
    .SetShapeFn([](InferenceContext* c) {
      c->set_output(0, c->Scalar());
      return absl::OkStatus();
    })
    .Doc(R"doc(
Forgets all staged gradients.

num_steps: A scalar: how many steps had some.
stage: Name of the stage.
)doc");

class ClearStagedGradientsOp : public OpKernel {
 public:
  explicit ClearStagedGradientsOp(OpKernelConstruction* context)
      : OpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("stage", &stage_));
  }

  void Compute(OpKernelContext* context) override {
    RefCountPtr<GradientStage> stage;
    OP_REQUIRES_OK(context, FindStage(context, stage_, &stage));
    Tensor* num_steps = nullptr;
    OP_REQUIRES_OK(context, context->allocate_output(0, {}, &num_steps));
    num_steps->scalar<int64_t>()() = stage->Clear();
  }

 private:
  std::string stage_;  // Constant after construction.
};

TFSWITCH_CPU_KERNEL(StageGradients);
TFSWITCH_CPU_KERNEL(SumStagedGradients);
TFSWITCH_CPU_KERNEL(ClearStagedGradients);

}  // namespace
}  // namespace tfswitch
