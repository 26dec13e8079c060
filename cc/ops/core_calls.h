// Calls of the core library that kernels make apart from tables, scalars as
// inputs of ops, and how kernels are registered.

#ifndef TFSWITCH_CC_OPS_CORE_CALLS_H_
#define TFSWITCH_CC_OPS_CORE_CALLS_H_

#include <functional>
#include <utility>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "cc/capi/tfswitch.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/framework/tensor_shape.h"
#include "tensorflow/core/lib/core/refcount.h"

// Registers <name>Op as the kernel of op Tfswitch><name>.
#define TFSWITCH_CPU_KERNEL(name) \
  REGISTER_KERNEL_BUILDER(        \
      Name("Tfswitch>" #name).Device(tensorflow::DEVICE_CPU), name##Op)

namespace tfswitch {

// Runs `call` with the core's functions and room for an error. The core stays
// loaded; FailedPrecondition if it cannot be.
absl::Status CallCore(
    absl::FunctionRef<int(const Tfswitch_Api& api, char* error)> call);
// The same of one function.
template <typename Function, typename... Args>
absl::Status CallCore(Function Tfswitch_Api::*function, const Args&... args) {
  return CallCore([&](const Tfswitch_Api& api, char* error) {
    return (api.*function)(args..., error);
  });
}

// Shape functions of ops whose inputs are all scalars; of the second one output
// 0 is a scalar, too.
absl::Status AllScalars(tensorflow::shape_inference::InferenceContext* c);
absl::Status ScalarsToScalar(tensorflow::shape_inference::InferenceContext* c);

// The value of an input of type T that must be a scalar. InvalidArgument naming
// the input and the shape that came.
template <typename T>
absl::Status ScalarInput(tensorflow::OpKernelContext* context, int index,
                         const char* name, T* value) {
  const tensorflow::Tensor& input = context->input(index);
  if (!tensorflow::TensorShapeUtils::IsScalar(input.shape())) {
    return absl::InvalidArgumentError(
        absl::StrCat("`", name, "` must be a scalar. Received: shape ",
                     input.shape().DebugString()));
  }
  *value = input.scalar<T>()();
  return absl::OkStatus();
}

// `call` on a resource, which it lets go of before the op ends: a waiter for
// the op may close what the resource needs next.
template <typename Resource, typename Call>
std::function<absl::Status()> Holding(
    tensorflow::core::RefCountPtr<Resource> resource, Call call) {
  return [held = resource.release(), call = std::move(call)] {
    absl::Status status = call(*held);
    held->Unref();
    return status;
  };
}

// Runs `call`, which waits for others, sets its status, and ends the op with
// `done`. Never on TensorFlow's threads, which those may need to get on.
void RunApart(tensorflow::OpKernelContext* context,
              std::function<absl::Status()> call,
              tensorflow::AsyncOpKernel::DoneCallback done);

// Waits for others, never on TensorFlow's threads: calls `wait(wait_s)`, first
// with 0, until it gives something else than DeadlineExceeded, sets its status,
// and ends the op with `done`. It gives up after `timeout_s`, and soon after
// the step has been cancelled.
//
// Each part of a wait is short, and parts take turns where there are more waits
// than threads for them.
void WaitApart(tensorflow::OpKernelContext* context, double timeout_s,
               std::function<absl::Status(double wait_s)> wait,
               tensorflow::AsyncOpKernel::DoneCallback done);

}  // namespace tfswitch

#endif  // TFSWITCH_CC_OPS_CORE_CALLS_H_
