#include "cc/predictor/tf_objects.h"

#include "cc/predictor/errors.h"
#include "cc/predictor/wire.h"

namespace tfswitch {

// TensorFlow parses the message as the value of a Const op. This code does not
// parse it, because TensorFlow knows the rules of the message's many fields.
Result<Tensor> ParseTensor(std::string_view bytes) {
  uint64_t dtype = 0;
  WireReader fields(bytes);
  while (fields.Next()) {
    if (fields.IsInteger(1)) dtype = fields.integer();
  }
  if (!fields.ok()) return Invalid("the bytes are no tensorflow.TensorProto");
  std::string attribute;
  AppendBytes(8, bytes, &attribute);  // AttrValue.tensor

  const TfGraph graph(TF_NewGraph());
  const TfStatus status;
  TF_OperationDescription* const constant =
      TF_NewOperation(graph.get(), "Const", "value");
  TF_SetAttrType(constant, "dtype", static_cast<TF_DataType>(dtype));
  TF_SetAttrValueProto(constant, "value", attribute.data(), attribute.size(),
                       status.get());
  if (!status.ok()) {
    // This frees the description, too.
    TF_FinishOperation(constant, TfStatus().get());
    return status.ToStatus();
  }
  TF_Operation* const operation = TF_FinishOperation(constant, status.get());
  TF_Tensor* tensor = nullptr;
  if (status.ok()) {
    TF_OperationGetAttrTensor(operation, "value", &tensor, status.get());
  }
  if (!status.ok()) return status.ToStatus();
  return MakeTensor(tensor);
}

}  // namespace tfswitch
