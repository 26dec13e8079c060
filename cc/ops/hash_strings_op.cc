// Tfswitch>HashStrings.

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "cc/ops/core_calls.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/device_base.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/framework/types.h"
#include "tensorflow/core/platform/fingerprint.h"
#include "tensorflow/core/platform/tstring.h"
#include "tensorflow/core/util/work_sharder.h"

namespace tfswitch {
namespace {

using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::tstring;

REGISTER_OP("Tfswitch>HashStrings")
    .Input("strings: string")
    .Output("ids: int64")
    .Attr("salt: int = 0")
    .SetShapeFn(tensorflow::shape_inference::UnchangedShape)
    .Doc(R"doc(
Hashes each string to 64 bits.

The hash is FarmHash's Fingerprint64, which never changes: it is the same in
every version, on every machine and for either byte order. With a salt it is that
of the salt's 8 bytes, the lowest first, followed by the string.

strings: Any shape. Their bytes count; an encoding is not looked at.
ids: The hash of each string, of the shape of `strings`. Any int64 may occur.
salt: With another salt other strings collide. 0 stands for no salt.
)doc");

// The approximate CPU cycles per string. TensorFlow uses this number to divide
// the work among threads.
constexpr int64_t kCostPerString = 100;

class HashStringsOp : public OpKernel {
 public:
  explicit HashStringsOp(OpKernelConstruction* context) : OpKernel(context) {
    int64_t salt = 0;
    OP_REQUIRES_OK(context, context->GetAttr("salt", &salt));
    if (salt == 0) return;
    const auto bits = static_cast<uint64_t>(salt);
    for (int shift = 0; shift < 64; shift += 8) {
      prefix_.push_back(static_cast<char>((bits >> shift) & 0xff));
    }
  }

  void Compute(OpKernelContext* context) override {
    const Tensor& input = context->input(0);
    Tensor* output = nullptr;
    OP_REQUIRES_OK(context,
                   context->allocate_output(0, input.shape(), &output));
    const auto strings = input.flat<tstring>();
    auto ids = output->flat<int64_t>();
    const auto hash_range = [this, &strings, &ids](int64_t begin, int64_t end) {
      std::string salted;
      for (int64_t i = begin; i < end; ++i) {
        const absl::string_view text(strings(i).data(), strings(i).size());
        ids(i) = static_cast<int64_t>(Hash(text, &salted));
      }
    };
    const auto* threads = context->device()->tensorflow_cpu_worker_threads();
    tensorflow::Shard(threads->num_threads, threads->workers, strings.size(),
                      kCostPerString, hash_range);
  }

 private:
  // `salted` is memory that is reused from string to string.
  uint64_t Hash(absl::string_view text, std::string* salted) const {
    if (prefix_.empty()) return tensorflow::Fingerprint64(text);
    salted->assign(prefix_);
    salted->append(text.data(), text.size());
    return tensorflow::Fingerprint64(*salted);
  }

  // The bytes of the salt. Constant after construction.
  std::string prefix_;
};

TFSWITCH_CPU_KERNEL(HashStrings);

}  // namespace
}  // namespace tfswitch
