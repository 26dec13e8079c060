// Converts tensors between messages and the plain types of serving_rpc.h.

#ifndef CC_PREDICTOR_TENSOR_CODEC_H_
#define CC_PREDICTOR_TENSOR_CODEC_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "cc/predictor/serving_rpc.h"
#include "tensorflow_serving/tensor.pb.h"

namespace tfswitch {

// A tensor of a request. It refers to the message that it was decoded from, and
// to itself, so it must not move.
struct DecodedTensor {
  DecodedTensor() = default;
  DecodedTensor(const DecodedTensor&) = delete;
  DecodedTensor& operator=(const DecodedTensor&) = delete;

  ServingTensor view = {};
  std::vector<int64_t> dims;
  std::string values;  // Values that had to be copied.
  std::vector<ServingBytes> strings;
};

// Reads a tensor as TensorFlow does, except that more values than the shape
// holds are an error. InvalidArgument names the input: a type that cannot be
// sent, a shape that is unknown, negative or larger than `max_bytes`, or the
// wrong number of values.
absl::Status DecodeTensor(const std::string& name,
                          const tensorflow::TensorProto& proto,
                          int64_t max_bytes, DecodedTensor* tensor);

// Writes the values to the field of their type, as TensorFlow Serving does:
// some clients read these fields. InvalidArgument for a type that cannot be
// sent, ResourceExhausted for more than a message can hold.
absl::Status EncodeTensor(const ServingTensor& tensor,
                          tensorflow::TensorProto* proto);

}  // namespace tfswitch

#endif  // CC_PREDICTOR_TENSOR_CODEC_H_
