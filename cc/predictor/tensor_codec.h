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

// A decoded tensor of a request. Has pointers into the message, and into
// itself, so it must not be moved.
struct DecodedTensor {
  DecodedTensor() = default;
  DecodedTensor(const DecodedTensor&) = delete;
  DecodedTensor& operator=(const DecodedTensor&) = delete;

  ServingTensor view = {};
  std::vector<int64_t> dims;
  std::string values;  // Values that had to be copied.
  std::vector<ServingBytes> strings;
};

// Decodes a tensor as TensorFlow does, except that more values than the shape
// has are an error. InvalidArgument, naming the input, for a type that cannot
// be sent, for a shape that is unknown, negative or larger than `max_bytes`, or
// for the wrong number of values.
absl::Status DecodeTensor(const std::string& name,
                          const tensorflow::TensorProto& proto,
                          int64_t max_bytes, DecodedTensor* tensor);

// Writes the values to the field of their type, as TensorFlow Serving does:
// some clients read these fields. InvalidArgument for a type that cannot be
// sent, ResourceExhausted if they are too large for a message.
absl::Status EncodeTensor(const ServingTensor& tensor,
                          tensorflow::TensorProto* proto);

}  // namespace tfswitch

#endif  // CC_PREDICTOR_TENSOR_CODEC_H_
