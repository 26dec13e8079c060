// Inputs and outputs of a model as plain C++ values, and what a signature says
// of them.

#ifndef CC_PREDICTOR_VALUES_H_
#define CC_PREDICTOR_VALUES_H_

#include <cstdint>
#include <map>
#include <string>
#include <variant>
#include <vector>

#include "absl/status/statusor.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/framework/types.pb.h"
#include "tensorflow/core/protobuf/meta_graph.pb.h"

namespace tfswitch {

using Integers = std::vector<int64_t>;
using Floats = std::vector<float>;
using Strings = std::vector<std::string>;

// An array, row-major.
struct Values {
  std::variant<Integers, Floats, Strings> data;
  // One dimension may be -1: it follows from the number of values.
  std::vector<int64_t> shape = {-1};
};

// By the names of a signature.
using NamedValues = std::map<std::string, Values>;
using NamedTensors = std::map<std::string, tensorflow::Tensor>;

// The alternative of Values::data that a type of tensor takes and gives:
// integers and booleans are integers, float and double are floats.
// Unimplemented for other types, which only a tensor can hold.
absl::StatusOr<decltype(Values::data)> EmptyDataFor(tensorflow::DataType dtype);

// InvalidArgument if the values are of another kind than `dtype`, beyond its
// range, or do not fill the shape.
absl::StatusOr<tensorflow::Tensor> ToTensor(const Values& values,
                                            tensorflow::DataType dtype);

// A double becomes a float.
absl::StatusOr<Values> ToValues(const tensorflow::Tensor& tensor);

// "int64 [?,2]"
std::string Describe(const tensorflow::TensorInfo& info);
std::string Describe(const tensorflow::Tensor& tensor);

// "'dense': float [?,3], 'ids': int64 [?,2]"
std::string Describe(
    const google::protobuf::Map<std::string, tensorflow::TensorInfo>& infos);

}  // namespace tfswitch

#endif  // CC_PREDICTOR_VALUES_H_
