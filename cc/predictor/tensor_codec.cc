// A received tensor is not copied if the message already has its values in the
// needed form: in tensor_content, or in a field of numbers of the same width.
// Its size is checked before memory is allocated. A sent tensor has its values
// in the field of its type, as TensorFlow Serving does, because some clients
// read only this field.

#include "cc/predictor/tensor_codec.h"

#include <google/protobuf/io/coded_stream.h>
#include <google/protobuf/repeated_field.h>

#include <algorithm>
#include <cstring>
#include <limits>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"

namespace tfswitch {
namespace {

using google::protobuf::RepeatedField;
using google::protobuf::io::CodedInputStream;
using tensorflow::DataType;
using tensorflow::TensorProto;

// For each numeric type: the type of its numbers in memory, the field of a
// message that has them, and how many numbers make one value.
#define TFSWITCH_NUMERIC_TYPES(OF)           \
  OF(DT_BFLOAT16, uint16_t, half_val, 1)     \
  OF(DT_BOOL, bool, bool_val, 1)             \
  OF(DT_COMPLEX128, double, dcomplex_val, 2) \
  OF(DT_COMPLEX64, float, scomplex_val, 2)   \
  OF(DT_DOUBLE, double, double_val, 1)       \
  OF(DT_FLOAT, float, float_val, 1)          \
  OF(DT_HALF, uint16_t, half_val, 1)         \
  OF(DT_INT16, int16_t, int_val, 1)          \
  OF(DT_INT32, int32_t, int_val, 1)          \
  OF(DT_INT64, int64_t, int64_val, 1)        \
  OF(DT_INT8, int8_t, int_val, 1)            \
  OF(DT_UINT16, uint16_t, int_val, 1)        \
  OF(DT_UINT32, uint32_t, uint32_val, 1)     \
  OF(DT_UINT64, uint64_t, uint64_val, 1)     \
  OF(DT_UINT8, uint8_t, int_val, 1)

// The bytes of a value in memory; 0 for types that cannot be sent. A string
// counts as the memory that TensorFlow needs for an empty string.
int64_t SizeOf(DataType dtype) {
#define TFSWITCH_SIZE(dtype, type, field, width) \
  case tensorflow::dtype:                        \
    return sizeof(type) * width;
  switch (dtype) {
    TFSWITCH_NUMERIC_TYPES(TFSWITCH_SIZE)
    case tensorflow::DT_STRING:
      return 24;
    default:
      return 0;
  }
#undef TFSWITCH_SIZE
}

std::string NameOf(DataType dtype) {
  return tensorflow::DataType_IsValid(dtype)
             ? tensorflow::DataType_Name(dtype)
             : absl::StrCat("type ", static_cast<int>(dtype));
}

absl::Status Unsupported(absl::string_view name, DataType dtype) {
  return absl::InvalidArgumentError(
      absl::StrCat("tensor '", name,
                   "': this server sends and takes numbers, booleans and "
                   "strings, and not ",
                   NameOf(dtype)));
}

// Reads the values of a field; each value consists of `width` numbers. If the
// field has all values, in the form that TensorFlow needs, points to them.
// Otherwise copies them and, if there are too few, repeats the last one.
template <typename T, typename Field>
void ReadField(const RepeatedField<Field>& field, size_t width,
               DecodedTensor* tensor) {
  const size_t count = tensor->view.num_values * width;
  const size_t given = std::min<size_t>(field.size(), count);
  if (sizeof(T) == sizeof(Field) && given == count) {
    tensor->view.values = field.data();
    return;
  }
  tensor->values.resize(count * sizeof(T));  // Zeros.
  T* values = reinterpret_cast<T*>(tensor->values.data());
  for (size_t i = 0; i < given; ++i) values[i] = static_cast<T>(field[i]);
  if (given >= width) {
    for (size_t i = given; i < count; ++i) values[i] = values[i - width];
  }
  tensor->view.values = values;
}

// Returns the number of values in the field that belongs to the tensor's type.
// If `tensor` is not null, also reads the values.
int ReadFieldOf(const TensorProto& proto, DecodedTensor* tensor) {
  const auto read = [tensor](auto type, const auto& field, int width) {
    if (tensor != nullptr) ReadField<decltype(type)>(field, width, tensor);
    return field.size() / width;
  };
#define TFSWITCH_READ(dtype, type, field, width) \
  case tensorflow::dtype:                        \
    return read(type{}, proto.field(), width);
  switch (proto.dtype()) {
    TFSWITCH_NUMERIC_TYPES(TFSWITCH_READ)
    default:
      return 0;
  }
#undef TFSWITCH_READ
}

// Reads strings from tensor_content: all lengths as varints, then all bytes.
bool ReadStringContent(const std::string& content, size_t count,
                       std::vector<ServingBytes>* strings) {
  CodedInputStream lengths(reinterpret_cast<const uint8_t*>(content.data()),
                           static_cast<int>(content.size()));
  // Checks `count`, which comes from the client, before it allocates memory:
  // each string takes at least one byte of the content.
  if (count > content.size()) return false;
  strings->resize(count);
  uint64_t total = 0;
  for (ServingBytes& string : *strings) {
    uint64_t length = 0;
    if (!lengths.ReadVarint64(&length) || length > content.size()) return false;
    string.size = length;
    total += length;
  }
  const size_t begin = lengths.CurrentPosition();
  if (total != content.size() - begin) return false;
  const char* data = content.data() + begin;
  for (ServingBytes& string : *strings) {
    string.data = data;
    data += string.size;
  }
  return true;
}

}  // namespace

absl::Status DecodeTensor(const std::string& name, const TensorProto& proto,
                          int64_t max_bytes, DecodedTensor* tensor) {
  const auto invalid = [&name](auto... what) {
    return absl::InvalidArgumentError(
        absl::StrCat("input '", name, "': ", what...));
  };
  const int64_t value_size = SizeOf(proto.dtype());
  if (value_size == 0) return Unsupported(name, proto.dtype());
  if (proto.tensor_shape().unknown_rank()) {
    return invalid("its shape has no rank; send all dimensions");
  }

  bool too_large = false;
  int64_t count = 1;
  for (const auto& dim : proto.tensor_shape().dim()) {
    if (dim.size() < 0) {
      return invalid("dimension ", tensor->dims.size(), " is ", dim.size(),
                     "; send the number of values it has");
    }
    tensor->dims.push_back(dim.size());
    too_large |= __builtin_mul_overflow(count, dim.size(), &count);
  }
  const std::string what = absl::StrCat(NameOf(proto.dtype()), " of shape [",
                                        absl::StrJoin(tensor->dims, ","), "]");
  if (too_large || count > max_bytes / value_size) {
    return invalid(what, " is larger than the ", max_bytes,
                   " bytes that this server takes");
  }

  tensor->view.name = {name.data(), name.size()};
  tensor->view.dtype = proto.dtype();
  tensor->view.dims = tensor->dims.data();
  tensor->view.num_dims = tensor->dims.size();
  tensor->view.num_values = count;
  const std::string& content = proto.tensor_content();
  const bool is_string = proto.dtype() == tensorflow::DT_STRING;
  if (!content.empty()) {
    tensor->view.values = content.data();
    if (is_string) {
      if (!ReadStringContent(content, count, &tensor->strings)) {
        return invalid("tensor_content is not ", what);
      }
      tensor->view.values = tensor->strings.data();
    } else if (static_cast<int64_t>(content.size()) != count * value_size) {
      return invalid("tensor_content has ", content.size(), " bytes, and ",
                     what, " takes ", count * value_size);
    }
    return absl::OkStatus();
  }

  const int64_t given =
      is_string ? proto.string_val_size() : ReadFieldOf(proto, nullptr);
  if (given > count) {
    return invalid("it has ", given, " values, and ", what, " holds ", count);
  }
  if (!is_string) {
    ReadFieldOf(proto, tensor);
    return absl::OkStatus();
  }
  // Limits the sum of the lengths: a message can give one long string that
  // stands for many values.
  uint64_t bytes_left = max_bytes;
  tensor->strings.reserve(count);
  for (int64_t i = 0; i < count; ++i) {
    if (given == 0) {
      tensor->strings.push_back({"", 0});
      continue;
    }
    const std::string& value =
        proto.string_val(static_cast<int>(std::min(i, given - 1)));
    if (value.size() > bytes_left) {
      return invalid("its strings are longer than the ", max_bytes,
                     " bytes that this server takes");
    }
    bytes_left -= value.size();
    tensor->strings.push_back({value.data(), value.size()});
  }
  tensor->view.values = tensor->strings.data();
  return absl::OkStatus();
}

absl::Status EncodeTensor(const ServingTensor& tensor, TensorProto* proto) {
  if (tensor.num_values > std::numeric_limits<int32_t>::max() / 16) {
    return absl::ResourceExhaustedError(absl::StrCat(
        "output '", absl::string_view(tensor.name.data, tensor.name.size),
        "' has ", tensor.num_values, " values, which no message holds"));
  }
  const auto write = [&tensor](auto type, auto* field,
                               int width) -> absl::Status {
    using T = decltype(type);
    const int count = static_cast<int>(tensor.num_values) * width;
    field->Resize(count, 0);
    const char* values = static_cast<const char*>(tensor.values);
    if (sizeof(T) == sizeof(*field->data())) {
      std::memcpy(field->mutable_data(), values, count * sizeof(T));
      return absl::OkStatus();
    }
    for (int i = 0; i < count; ++i) {
      T value;
      std::memcpy(&value, values + i * sizeof(T), sizeof(T));
      field->Set(i, value);
    }
    return absl::OkStatus();
  };
  proto->set_dtype(static_cast<DataType>(tensor.dtype));
  auto* shape = proto->mutable_tensor_shape();
  for (size_t i = 0; i < tensor.num_dims; ++i) {
    shape->add_dim()->set_size(tensor.dims[i]);
  }
#define TFSWITCH_WRITE(dtype, type, field, width) \
  case tensorflow::dtype:                         \
    return write(type{}, proto->mutable_##field(), width);
  switch (proto->dtype()) {
    TFSWITCH_NUMERIC_TYPES(TFSWITCH_WRITE)
    case tensorflow::DT_STRING: {
      const auto* strings = static_cast<const ServingBytes*>(tensor.values);
      for (size_t i = 0; i < tensor.num_values; ++i) {
        proto->add_string_val(strings[i].data, strings[i].size);
      }
      return absl::OkStatus();
    }
    default:
      return Unsupported({tensor.name.data, tensor.name.size}, proto->dtype());
  }
#undef TFSWITCH_WRITE
}

}  // namespace tfswitch
