// Plain values are int64, float or strings. They are checked when they are
// converted to a tensor: integers out of the dtype's range are an error, and so
// is a shape that the number of values does not fill.

#include "tfswitch/values.h"

#include <algorithm>
#include <limits>
#include <new>
#include <type_traits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "cc/base/status_macros.h"
#include "cc/predictor/errors.h"
#include "cc/predictor/tf_objects.h"

namespace tfswitch {
namespace {

constexpr size_t kMaxDims = 254;  // TensorFlow would end the process.

std::string NameOf(DataType dtype) {
  static constexpr const char* kNames[] = {
      "INVALID",    "float",  "double",    "int32",   "uint8",   "int16",
      "int8",       "string", "complex64", "int64",   "bool",    "qint8",
      "quint8",     "qint32", "bfloat16",  "qint16",  "quint16", "uint16",
      "complex128", "half",   "resource",  "variant", "uint32",  "uint64"};
  const auto number = static_cast<size_t>(dtype);
  return number < std::size(kNames)
             ? kNames[number]
             : absl::StrCat("type ", static_cast<int32_t>(dtype));
}

std::string DescribeShape(const std::vector<int64_t>& shape) {
  const auto size = [](std::string* text, int64_t dim) {
    dim < 0 ? absl::StrAppend(text, "?") : absl::StrAppend(text, dim);
  };
  return absl::StrCat("[", absl::StrJoin(shape, ",", size), "]");
}

std::string KindOf(const Values& values) {
  static constexpr const char* kKinds[] = {"integers", "floats", "strings"};
  return kKinds[values.data.index()];
}

// The number of values; -1 if an array of this shape, with values of this size,
// is impossible.
int64_t CountOf(const std::vector<int64_t>& shape, size_t value_bytes) {
  if (shape.size() > kMaxDims) return -1;
  const int64_t most =
      std::numeric_limits<int64_t>::max() / static_cast<int64_t>(value_bytes);
  // TensorFlow, too, refuses dimensions whose product is too large, even if
  // another dimension is 0.
  int64_t product = 1;
  bool is_empty = false;
  for (const int64_t dim : shape) {
    if (dim < 0) return -1;
    is_empty |= dim == 0;
    if (dim > 0 && product > most / dim) return -1;
    product *= std::max<int64_t>(dim, 1);
  }
  return is_empty ? 0 : product;
}

// The bytes of a value in memory; 0 for a type that is neither numeric nor
// strings.
size_t SizeOf(DataType dtype) {
  return dtype == DataType::kString
             ? sizeof(TF_TString)
             : TF_DataTypeSize(static_cast<TF_DataType>(dtype));
}

TF_TString* StringsOf(const Tensor& tensor) {
  return static_cast<TF_TString*>(TF_TensorData(tensor.get()));
}

// TensorFlow frees the array of a string tensor, but not the strings in it.
void FreeStrings(void* data, size_t size, void*) {
  auto* const strings = static_cast<TF_TString*>(data);
  for (size_t i = 0; i < size / sizeof(TF_TString); ++i) {
    TF_StringDealloc(&strings[i]);
  }
  ::operator delete(data);
}

TF_Tensor* NewStrings(const std::vector<int64_t>& shape, size_t size) {
  auto* const strings =
      static_cast<TF_TString*>(::operator new(size, std::nothrow));
  if (strings == nullptr) return nullptr;
  for (size_t i = 0; i < size / sizeof(TF_TString); ++i) {
    TF_StringInit(&strings[i]);
  }
  return TF_NewTensor(TF_STRING, shape.data(), static_cast<int>(shape.size()),
                      strings, size, &FreeStrings, nullptr);
}

// Calls call(T{}, P{}). T is the type of the tensor's values, and P is the
// plain type (int64, float or string) for them.
template <typename R, typename Call>
R WithTypes(DataType dtype, const Call& call) {
  switch (dtype) {
    case DataType::kBool:
      return call(bool{}, Integers());
    case DataType::kInt32:
      return call(int32_t{}, Integers());
    case DataType::kInt64:
      return call(int64_t{}, Integers());
    case DataType::kDouble:
      return call(double{}, Floats());
    case DataType::kFloat:
      return call(float{}, Floats());
    case DataType::kString:
      return call(std::string(), Strings());
    default:
      return Error(
          StatusCode::kUnimplemented,
          "plain values hold bool, int32, int64, float, double and string, "
          "and not ",
          NameOf(dtype), "; use tensors");
  }
}

template <typename T, typename From>
Status Copy(const std::vector<From>& from, Tensor* to) {
  if constexpr (std::is_same_v<T, std::string>) {
    for (size_t i = 0; i < from.size(); ++i) {
      to->SetString(static_cast<int64_t>(i), from[i]);
    }
  } else {
    T* const values = static_cast<T*>(to->data());
    for (size_t i = 0; i < from.size(); ++i) {
      values[i] = static_cast<T>(from[i]);
      if constexpr (std::is_integral_v<T> && sizeof(T) < sizeof(From)) {
        if (static_cast<From>(values[i]) != from[i]) {
          return Invalid("value ", from[i], " at ", i,
                         " is beyond the range of ", NameOf(to->dtype()));
        }
      }
    }
  }
  return Status();
}

template <typename T, typename Data>
Values Read(const Tensor& tensor) {
  Data data;
  if constexpr (std::is_same_v<T, std::string>) {
    for (int64_t i = 0; i < tensor.num_values(); ++i) {
      data.emplace_back(tensor.string(i));
    }
  } else {
    const T* const values = static_cast<const T*>(tensor.data());
    data.assign(values, values + tensor.num_values());
  }
  return {std::move(data), tensor.shape()};
}

// The shape with -1 replaced by the computed dimension.
Result<std::vector<int64_t>> FullShape(const Values& values) {
  const int64_t count = std::visit(
      [](const auto& data) { return static_cast<int64_t>(data.size()); },
      values.data);
  std::vector<int64_t> shape = values.shape;
  const auto unknown = std::find(shape.begin(), shape.end(), -1);
  if (unknown != shape.end()) {
    *unknown = 1;
    const int64_t known = CountOf(shape, 1);
    if (known > 0) *unknown = count / known;
  }
  if (CountOf(shape, 1) != count) {
    return Invalid(count, " values do not fill the shape [",
                   absl::StrJoin(values.shape, ","), "]");
  }
  return shape;
}

}  // namespace

Result<Tensor> Tensor::Make(DataType dtype, const std::vector<int64_t>& shape) {
  const size_t value_bytes = SizeOf(dtype);
  if (value_bytes == 0) {
    return Invalid("a tensor here holds numbers or strings, and not ",
                   NameOf(dtype));
  }
  const int64_t count = CountOf(shape, value_bytes);
  if (count < 0) {
    return Invalid("no tensor has the shape [", absl::StrJoin(shape, ","),
                   "]: it has more than ", kMaxDims,
                   " dimensions, a negative one, or too many values");
  }
  const size_t size = static_cast<size_t>(count) * value_bytes;
  TF_Tensor* const tensor =
      dtype == DataType::kString
          ? NewStrings(shape, size)
          : TF_AllocateTensor(static_cast<TF_DataType>(dtype), shape.data(),
                              static_cast<int>(shape.size()), size);
  if (tensor != nullptr && (size == 0 || TF_TensorData(tensor) != nullptr)) {
    return MakeTensor(tensor);
  }
  TF_DeleteTensor(tensor);
  return Error(StatusCode::kResourceExhausted, "no memory for ", NameOf(dtype),
               " ", DescribeShape(shape));
}

Tensor::Tensor(std::shared_ptr<TF_Tensor> tensor)
    : tensor_(std::move(tensor)) {}

DataType Tensor::dtype() const {
  return static_cast<DataType>(TF_TensorType(get()));
}

std::vector<int64_t> Tensor::shape() const {
  std::vector<int64_t> shape(static_cast<size_t>(TF_NumDims(get())));
  for (size_t i = 0; i < shape.size(); ++i) {
    shape[i] = TF_Dim(get(), static_cast<int>(i));
  }
  return shape;
}

int64_t Tensor::num_values() const { return TF_TensorElementCount(get()); }

void* Tensor::data() { return TF_TensorData(get()); }

const void* Tensor::data() const { return TF_TensorData(get()); }

size_t Tensor::num_bytes() const { return TF_TensorByteSize(get()); }

std::string_view Tensor::string(int64_t index) const {
  const TF_TString* const text = StringsOf(*this) + index;
  return {TF_StringGetDataPointer(text), TF_StringGetSize(text)};
}

void Tensor::SetString(int64_t index, std::string_view text) {
  TF_StringCopy(StringsOf(*this) + index, text.data(), text.size());
}

Result<decltype(Values::data)> EmptyDataFor(DataType dtype) {
  return WithTypes<Result<decltype(Values::data)>>(
      dtype, [](const auto&, auto data) { return data; });
}

Result<Tensor> ToTensor(const Values& values, DataType dtype) {
  TFSWITCH_ASSIGN_OR_RETURN(const auto empty, EmptyDataFor(dtype));
  if (empty.index() != values.data.index()) {
    return Invalid("expected ", NameOf(dtype), ", got ", KindOf(values));
  }
  TFSWITCH_ASSIGN_OR_RETURN(const auto shape, FullShape(values));
  TFSWITCH_ASSIGN_OR_RETURN(Tensor tensor, Tensor::Make(dtype, shape));
  const Status status =
      WithTypes<Status>(dtype, [&](const auto& value, const auto& data) {
        return Copy<std::decay_t<decltype(value)>>(
            std::get<std::decay_t<decltype(data)>>(values.data), &tensor);
      });
  if (!status.ok()) return status;
  return tensor;
}

Result<Values> ToValues(const Tensor& tensor) {
  return WithTypes<Result<Values>>(tensor.dtype(), [&](const auto& value,
                                                       const auto& data) {
    return Read<std::decay_t<decltype(value)>, std::decay_t<decltype(data)>>(
        tensor);
  });
}

std::string Describe(const TensorSpec& spec) {
  return absl::StrCat(NameOf(spec.dtype), " ",
                      spec.shape ? DescribeShape(*spec.shape) : "<unknown>");
}

std::string Describe(const Tensor& tensor) {
  return absl::StrCat(NameOf(tensor.dtype()), " ",
                      DescribeShape(tensor.shape()));
}

std::string Describe(const std::map<std::string, TensorSpec>& specs) {
  const auto describe = [](std::string* text, const auto& entry) {
    absl::StrAppend(text, "'", entry.first, "': ", Describe(entry.second));
  };
  return absl::StrJoin(specs, ", ", describe);
}

}  // namespace tfswitch
