// Helpers for kernels: calls of the core library, scalar inputs, and the
// registration of kernels.

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

// Calls `call` with the core's functions and a buffer for an error. Loads the
// core if needed. FailedPrecondition if it cannot be loaded.
absl::Status CallCore(
    absl::FunctionRef<int(const Tfswitch_Api& api, char* error)> call);
// Calls one function of the core.
template <typename Function, typename... Args>
absl::Status CallCore(Function Tfswitch_Api::*function, const Args&... args) {
  return CallCore([&](const Tfswitch_Api& api, char* error) {
    return (api.*function)(args..., error);
  });
}

// Shape functions of ops whose inputs are all scalars. With ScalarsToScalar()
// output 0 is a scalar, too.
absl::Status AllScalars(tensorflow::shape_inference::InferenceContext* c);
absl::Status ScalarsToScalar(tensorflow::shape_inference::InferenceContext* c);

// Reads a scalar input of type T. InvalidArgument, naming the input and its
// shape, if it is not a scalar.
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

// Returns a function that calls `call` on a resource and then releases the
// resource. The release comes before the end of the op, because code that waits
// for the op may next close something that the resource needs.
template <typename Resource, typename Call>
std::function<absl::Status()> Holding(
    tensorflow::core::RefCountPtr<Resource> resource, Call call) {
  return [held = resource.release(), call = std::move(call)] {
    absl::Status status = call(*held);
    held->Unref();
    return status;
  };
}

// Runs `call` on a thread of tfswitch. Then sets the op's status to its result,
// and ends the op with `done`. `call` may wait for other ops, which may need
// TensorFlow's threads.
void RunApart(tensorflow::OpKernelContext* context,
              std::function<absl::Status()> call,
              tensorflow::AsyncOpKernel::DoneCallback done);

// Waits for other calls without blocking TensorFlow's threads. Calls
// `wait(wait_s)` repeatedly, first with 0, until it returns something other
// than DeadlineExceeded. Then sets the op's status to that result, and ends the
// op with `done`. Gives up after `timeout_s`, and soon after the step is
// cancelled.
//
// Each call of `wait` is short, so that few threads can serve many waits.
void WaitApart(tensorflow::OpKernelContext* context, double timeout_s,
               std::function<absl::Status(double wait_s)> wait,
               tensorflow::AsyncOpKernel::DoneCallback done);

}  // namespace tfswitch

#endif  // TFSWITCH_CC_OPS_CORE_CALLS_H_
