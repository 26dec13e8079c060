// Inputs and outputs of a model, and their descriptions in a signature.

#ifndef TFSWITCH_VALUES_H_
#define TFSWITCH_VALUES_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "tfswitch/status.h"

struct TF_Tensor;

namespace tfswitch {

// The numbers are those of tensorflow.DataType. Other types have no name here.
enum class DataType : int32_t {
  kFloat = 1,
  kDouble = 2,
  kInt32 = 3,
  kUint8 = 4,
  kInt16 = 5,
  kInt8 = 6,
  kString = 7,
  kComplex64 = 8,
  kInt64 = 9,
  kBool = 10,
  kBfloat16 = 14,
  kUint16 = 17,
  kComplex128 = 18,
  kHalf = 19,
  kUint32 = 22,
  kUint64 = 23,
};

using Integers = std::vector<int64_t>;
using Floats = std::vector<float>;
using Strings = std::vector<std::string>;

// An array, row-major.
struct Values {
  std::variant<Integers, Floats, Strings> data;
  // One dimension may be -1; it is computed from the number of values.
  std::vector<int64_t> shape = {-1};
};

// An array of any type, in row-major order, in memory that TensorFlow has
// allocated. Copies share the memory.
//
// Thread-safe as long as nobody writes to it.
class TFSWITCH_EXPORTED Tensor {
 public:
  Tensor() = default;  // Only to be assigned to.

  // Makes a tensor. Numbers have undefined values; strings are empty.
  // InvalidArgument for an impossible shape, and for a type that is neither
  // numeric nor strings.
  static Result<Tensor> Make(DataType dtype, const std::vector<int64_t>& shape);

  DataType dtype() const;
  std::vector<int64_t> shape() const;
  int64_t num_values() const;

  // For numeric types.
  void* data();
  const void* data() const;
  size_t num_bytes() const;

  // For strings. REQUIRES: 0 <= index < num_values().
  std::string_view string(int64_t index) const;
  void SetString(int64_t index, std::string_view text);

  // For functions of TensorFlow's C API.
  explicit Tensor(std::shared_ptr<TF_Tensor> tensor);
  TF_Tensor* get() const { return tensor_.get(); }

 private:
  std::shared_ptr<TF_Tensor> tensor_;
};

// By the names of a signature.
using NamedValues = std::map<std::string, Values>;
using NamedTensors = std::map<std::string, Tensor>;

// The description of an input or output in a signature.
struct TensorSpec {
  DataType dtype{};
  // -1: any size. nullopt: any rank.
  std::optional<std::vector<int64_t>> shape;
  // The tensor's name in the graph. Empty if the input or output is not a
  // single dense tensor.
  std::string graph_name;
};

struct Signature {
  std::map<std::string, TensorSpec> inputs;
  std::map<std::string, TensorSpec> outputs;
  std::string def;  // The whole, as a serialized tensorflow.SignatureDef.
};

// Which alternative of Values::data holds values of this tensor type: integers
// for integers and booleans, floats for float and double. Unimplemented for
// other types, which need a Tensor.
TFSWITCH_EXPORTED Result<decltype(Values::data)> EmptyDataFor(DataType dtype);

// InvalidArgument if the values have another kind than `dtype`, are out of its
// range, or do not fill the shape.
TFSWITCH_EXPORTED Result<Tensor> ToTensor(const Values& values, DataType dtype);

// A double becomes a float.
TFSWITCH_EXPORTED Result<Values> ToValues(const Tensor& tensor);

// For example "int64 [?,2]".
TFSWITCH_EXPORTED std::string Describe(const TensorSpec& spec);
TFSWITCH_EXPORTED std::string Describe(const Tensor& tensor);

// Describes inputs or outputs, for example "'dense': float [?,3], 'ids': int64
// [?,2]".
TFSWITCH_EXPORTED std::string Describe(
    const std::map<std::string, TensorSpec>& specs);

}  // namespace tfswitch

#endif  // TFSWITCH_VALUES_H_
