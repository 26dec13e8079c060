// Plain values are int64, float or strings, and are checked when they become a
// tensor: an integer that the dtype cannot hold is an error, and so is a shape
// that the number of values does not fill.

#include "cc/predictor/values.h"

#include <algorithm>
#include <type_traits>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "tensorflow/core/framework/tensor_shape.h"
#include "tensorflow/core/framework/types.h"
#include "tensorflow/core/platform/statusor.h"

namespace tfswitch {
namespace {

using tensorflow::DataType;
using tensorflow::Tensor;
using tensorflow::TensorInfo;

std::string KindOf(const Values& values) {
  static constexpr const char* kKinds[] = {"integers", "floats", "strings"};
  return kKinds[values.data.index()];
}

// Calls call(a value of a tensor of this dtype, the kind of plain values that
// it takes and gives).
template <typename Result, typename Call>
Result WithTypes(DataType dtype, const Call& call) {
  switch (dtype) {
    case tensorflow::DT_BOOL:
      return call(bool{}, Integers());
    case tensorflow::DT_INT32:
      return call(int32_t{}, Integers());
    case tensorflow::DT_INT64:
      return call(int64_t{}, Integers());
    case tensorflow::DT_DOUBLE:
      return call(double{}, Floats());
    case tensorflow::DT_FLOAT:
      return call(float{}, Floats());
    case tensorflow::DT_STRING:
      return call(tensorflow::tstring(), Strings());
    default:
      return absl::UnimplementedError(absl::StrCat(
          "plain values hold bool, int32, int64, float, double and string, "
          "and not ",
          tensorflow::DataTypeString(dtype), "; use tensors"));
  }
}

template <typename T, typename From>
absl::Status Copy(const std::vector<From>& from, Tensor* to) {
  auto flat = to->flat<T>();
  if constexpr (std::is_integral_v<T> && sizeof(T) < sizeof(From)) {
    for (size_t i = 0; i < from.size(); ++i) {
      flat(i) = static_cast<T>(from[i]);
      if (static_cast<From>(flat(i)) != from[i]) {
        return absl::InvalidArgumentError(absl::StrCat(
            "value ", from[i], " at ", i, " is beyond the range of ",
            tensorflow::DataTypeString(to->dtype())));
      }
    }
  } else {
    std::copy(from.begin(), from.end(), flat.data());
  }
  return absl::OkStatus();
}

template <typename T, typename Data>
Values Read(const Tensor& tensor) {
  const auto flat = tensor.flat<T>();
  Values values{Data(flat.data(), flat.data() + flat.size()), {}};
  for (const auto& dim : tensor.shape()) values.shape.push_back(dim.size);
  return values;
}

// The shape with its -1 filled in.
absl::StatusOr<tensorflow::TensorShape> FullShape(const Values& values) {
  const int64_t count = std::visit(
      [](const auto& data) { return static_cast<int64_t>(data.size()); },
      values.data);
  std::vector<int64_t> dims = values.shape;
  const auto unknown = std::find(dims.begin(), dims.end(), -1);
  if (unknown != dims.end()) {
    *unknown = 1;
    int64_t known = 1;
    for (const int64_t dim : dims) known *= dim;
    if (known > 0) *unknown = count / known;
  }
  tensorflow::TensorShape shape;
  if (!tensorflow::TensorShape::BuildTensorShape(dims, &shape).ok() ||
      shape.num_elements() != count) {
    return absl::InvalidArgumentError(
        absl::StrCat(count, " values do not fill the shape [",
                     absl::StrJoin(values.shape, ","), "]"));
  }
  return shape;
}

}  // namespace

absl::StatusOr<decltype(Values::data)> EmptyDataFor(DataType dtype) {
  return WithTypes<absl::StatusOr<decltype(Values::data)>>(
      dtype, [](const auto&, auto data) { return data; });
}

absl::StatusOr<Tensor> ToTensor(const Values& values, DataType dtype) {
  TF_ASSIGN_OR_RETURN(const auto empty, EmptyDataFor(dtype));
  if (empty.index() != values.data.index()) {
    return absl::InvalidArgumentError(
        absl::StrCat("expected ", tensorflow::DataTypeString(dtype), ", got ",
                     KindOf(values)));
  }
  TF_ASSIGN_OR_RETURN(const tensorflow::TensorShape shape, FullShape(values));
  Tensor tensor(dtype, shape);
  TF_RETURN_IF_ERROR(
      WithTypes<absl::Status>(dtype, [&](const auto& value, const auto& data) {
        return Copy<std::decay_t<decltype(value)>>(
            std::get<std::decay_t<decltype(data)>>(values.data), &tensor);
      }));
  return tensor;
}

absl::StatusOr<Values> ToValues(const Tensor& tensor) {
  return WithTypes<absl::StatusOr<Values>>(
      tensor.dtype(), [&](const auto& value, const auto& data) {
        return Read<std::decay_t<decltype(value)>,
                    std::decay_t<decltype(data)>>(tensor);
      });
}

std::string Describe(const TensorInfo& info) {
  return absl::StrCat(
      tensorflow::DataTypeString(info.dtype()), " ",
      tensorflow::PartialTensorShape(info.tensor_shape()).DebugString());
}

std::string Describe(const Tensor& tensor) {
  return absl::StrCat(tensorflow::DataTypeString(tensor.dtype()), " ",
                      tensor.shape().DebugString());
}

std::string Describe(
    const google::protobuf::Map<std::string, TensorInfo>& infos) {
  std::vector<std::string> texts;
  for (const auto& [name, info] : infos) {
    texts.push_back(absl::StrCat("'", name, "': ", Describe(info)));
  }
  std::sort(texts.begin(), texts.end());
  return absl::StrJoin(texts, ", ");
}

}  // namespace tfswitch
