// Objects of TensorFlow's C API that free themselves, and conversion of its
// errors.

#ifndef CC_PREDICTOR_TF_OBJECTS_H_
#define CC_PREDICTOR_TF_OBJECTS_H_

#include <memory>
#include <string>
#include <string_view>

#include "tensorflow/c/c_api.h"
#include "tfswitch/status.h"
#include "tfswitch/values.h"

namespace tfswitch {

template <typename T, void (*free)(T*)>
struct TfFree {
  void operator()(T* object) const { free(object); }
};
template <typename T, void (*free)(T*)>
using TfObject = std::unique_ptr<T, TfFree<T, free>>;

using TfBuffer = TfObject<TF_Buffer, TF_DeleteBuffer>;
using TfGraph = TfObject<TF_Graph, TF_DeleteGraph>;
using TfSessionOptions = TfObject<TF_SessionOptions, TF_DeleteSessionOptions>;

// The status argument of a call. Not thread-safe.
class TfStatus {
 public:
  TF_Status* get() const { return status_.get(); }
  bool ok() const { return TF_GetCode(get()) == TF_OK; }
  // The codes are the same.
  Status ToStatus() const {
    return ok() ? Status()
                : Status(static_cast<StatusCode>(TF_GetCode(get())),
                         TF_Message(get()));
  }

 private:
  TfObject<TF_Status, TF_DeleteStatus> status_{TF_NewStatus()};
};

inline std::string_view BytesOf(const TF_Buffer& buffer) {
  return {static_cast<const char*>(buffer.data), buffer.length};
}

inline TfBuffer MakeBuffer(std::string_view bytes) {
  return TfBuffer(TF_NewBufferFromString(bytes.data(), bytes.size()));
}

// Takes ownership of the tensor.
inline Tensor MakeTensor(TF_Tensor* tensor) {
  return Tensor(std::shared_ptr<TF_Tensor>(tensor, TF_DeleteTensor));
}

// Makes a tensor of a serialized tensorflow.TensorProto.
Result<Tensor> ParseTensor(std::string_view bytes);

}  // namespace tfswitch

#endif  // CC_PREDICTOR_TF_OBJECTS_H_
