// A tensor that comes is not copied if its values lie in the message as they
// are needed: in tensor_content, or in a field of the same width. Its size is
// checked before there is memory for it. A tensor that goes has its values in
// the field of its type, as TensorFlow Serving's have, because some clients
// read no other.

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

// Bytes of a value in memory, 0 for types that cannot be sent. A string takes
// what TensorFlow needs for an empty one.
int64_t SizeOf(DataType dtype) {
  switch (dtype) {
    case tensorflow::DT_BOOL:
    case tensorflow::DT_INT8:
    case tensorflow::DT_UINT8:
      return 1;
    case tensorflow::DT_BFLOAT16:
    case tensorflow::DT_HALF:
    case tensorflow::DT_INT16:
    case tensorflow::DT_UINT16:
      return 2;
    case tensorflow::DT_FLOAT:
    case tensorflow::DT_INT32:
    case tensorflow::DT_UINT32:
      return 4;
    case tensorflow::DT_COMPLEX64:
    case tensorflow::DT_DOUBLE:
    case tensorflow::DT_INT64:
    case tensorflow::DT_UINT64:
      return 8;
    case tensorflow::DT_COMPLEX128:
      return 16;
    case tensorflow::DT_STRING:
      return 24;
    default:
      return 0;
  }
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

// Copies the values of a field, of `width` numbers per value, if they are not
// there as they are needed.
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

// How many numbers or strings the field of a type has, and, with a tensor that
// knows its number of values, where they are.
int ReadFieldOf(const TensorProto& proto, DecodedTensor* tensor) {
  const auto read = [tensor](auto type, const auto& field, int width = 1) {
    if (tensor != nullptr) ReadField<decltype(type)>(field, width, tensor);
    return field.size() / width;
  };
  switch (proto.dtype()) {
    case tensorflow::DT_BFLOAT16:
    case tensorflow::DT_HALF:
      return read(uint16_t{}, proto.half_val());
    case tensorflow::DT_BOOL:
      return read(bool{}, proto.bool_val());
    case tensorflow::DT_COMPLEX128:
      return read(double{}, proto.dcomplex_val(), 2);
    case tensorflow::DT_COMPLEX64:
      return read(float{}, proto.scomplex_val(), 2);
    case tensorflow::DT_DOUBLE:
      return read(double{}, proto.double_val());
    case tensorflow::DT_FLOAT:
      return read(float{}, proto.float_val());
    case tensorflow::DT_INT16:
      return read(int16_t{}, proto.int_val());
    case tensorflow::DT_INT32:
      return read(int32_t{}, proto.int_val());
    case tensorflow::DT_INT64:
      return read(int64_t{}, proto.int64_val());
    case tensorflow::DT_INT8:
      return read(int8_t{}, proto.int_val());
    case tensorflow::DT_UINT16:
      return read(uint16_t{}, proto.int_val());
    case tensorflow::DT_UINT32:
      return read(uint32_t{}, proto.uint32_val());
    case tensorflow::DT_UINT64:
      return read(uint64_t{}, proto.uint64_val());
    case tensorflow::DT_UINT8:
      return read(uint8_t{}, proto.int_val());
    default:
      return 0;
  }
}

// Strings in tensor_content: all lengths as varints, then all bytes.
bool ReadStringContent(const std::string& content, size_t count,
                       std::vector<ServingBytes>* strings) {
  CodedInputStream lengths(reinterpret_cast<const uint8_t*>(content.data()),
                           static_cast<int>(content.size()));
  // One byte of length each, at least: `count` may be made up.
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
  // A long string that is repeated often would fill the memory.
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
                               int width = 1) -> absl::Status {
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
  switch (proto->dtype()) {
    case tensorflow::DT_BFLOAT16:
    case tensorflow::DT_HALF:
      return write(uint16_t{}, proto->mutable_half_val());
    case tensorflow::DT_BOOL:
      return write(bool{}, proto->mutable_bool_val());
    case tensorflow::DT_COMPLEX128:
      return write(double{}, proto->mutable_dcomplex_val(), 2);
    case tensorflow::DT_COMPLEX64:
      return write(float{}, proto->mutable_scomplex_val(), 2);
    case tensorflow::DT_DOUBLE:
      return write(double{}, proto->mutable_double_val());
    case tensorflow::DT_FLOAT:
      return write(float{}, proto->mutable_float_val());
    case tensorflow::DT_INT16:
      return write(int16_t{}, proto->mutable_int_val());
    case tensorflow::DT_INT32:
      return write(int32_t{}, proto->mutable_int_val());
    case tensorflow::DT_INT64:
      return write(int64_t{}, proto->mutable_int64_val());
    case tensorflow::DT_INT8:
      return write(int8_t{}, proto->mutable_int_val());
    case tensorflow::DT_UINT16:
      return write(uint16_t{}, proto->mutable_int_val());
    case tensorflow::DT_UINT32:
      return write(uint32_t{}, proto->mutable_uint32_val());
    case tensorflow::DT_UINT64:
      return write(uint64_t{}, proto->mutable_uint64_val());
    case tensorflow::DT_UINT8:
      return write(uint8_t{}, proto->mutable_int_val());
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
}

}  // namespace tfswitch
