#include "cc/predictor/warm_up_requests.h"

#include <cstring>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "google/protobuf/unknown_field_set.h"
#include "tensorflow/core/framework/tensor.pb.h"
#include "tensorflow/core/framework/types.h"
#include "tensorflow/core/lib/io/record_reader.h"
#include "tensorflow/core/platform/env.h"

namespace tfswitch {
namespace {

using google::protobuf::UnknownFieldSet;

constexpr char kFile[] = "/assets.extra/tf_serving_warmup_requests";

// Field numbers of tensorflow.serving.PredictionLog and what is in it. Its
// messages are not in TensorFlow, and these few need no code of their own.
constexpr int kPredictLog = 6;  // In PredictionLog.
constexpr int kRequest = 1;     // In PredictLog.
constexpr int kModelSpec = 1;   // In PredictRequest.
constexpr int kInputs = 2;
constexpr int kOutputFilter = 3;
constexpr int kSignatureName = 3;  // In ModelSpec.
constexpr int kMapKey = 1;
constexpr int kMapValue = 2;

// All fields of this number that hold bytes.
std::vector<std::string> FieldsOf(const std::string& message, int number,
                                  bool* parsed) {
  UnknownFieldSet fields;
  *parsed &= fields.ParseFromString(message);
  std::vector<std::string> found;
  for (int i = 0; i < fields.field_count(); ++i) {
    const auto& field = fields.field(i);
    if (field.number() == number &&
        field.type() == google::protobuf::UnknownField::TYPE_LENGTH_DELIMITED) {
      found.emplace_back(field.length_delimited());
    }
  }
  return found;
}

std::string FieldOf(const std::string& message, int number, bool* parsed) {
  std::vector<std::string> found = FieldsOf(message, number, parsed);
  return found.empty() ? "" : std::move(found.back());
}

// Whether the bytes are a PredictionLog. One of another kind of request has no
// inputs.
bool Parse(const std::string& log, Request* request) {
  bool parsed = true;
  const std::string message =
      FieldOf(FieldOf(log, kPredictLog, &parsed), kRequest, &parsed);
  request->signature =
      FieldOf(FieldOf(message, kModelSpec, &parsed), kSignatureName, &parsed);
  request->outputs = FieldsOf(message, kOutputFilter, &parsed);
  for (const std::string& entry : FieldsOf(message, kInputs, &parsed)) {
    const std::string name = FieldOf(entry, kMapKey, &parsed);
    tensorflow::TensorProto proto;
    parsed &= proto.ParseFromString(FieldOf(entry, kMapValue, &parsed));
    parsed = parsed && request->inputs[name].FromProto(proto);
  }
  return parsed;
}

}  // namespace

absl::StatusOr<std::vector<Request>> ReadWarmUpRequests(
    const std::string& saved_model) {
  const std::string path = saved_model + kFile;
  tensorflow::Env* env = tensorflow::Env::Default();
  std::vector<Request> requests;
  if (!env->FileExists(path).ok()) return requests;
  std::unique_ptr<tensorflow::RandomAccessFile> file;
  TF_RETURN_IF_ERROR(env->NewRandomAccessFile(path, &file));
  tensorflow::io::SequentialRecordReader reader(file.get());
  tensorflow::tstring record;
  absl::Status status;
  for (int number = 0; (status = reader.ReadRecord(&record)).ok(); ++number) {
    Request request;
    if (!Parse(record, &request)) {
      return absl::DataLossError(absl::StrCat(
          "'", path, "': record ", number,
          " is not a tensorflow.serving.PredictionLog; write it again"));
    }
    if (!request.inputs.empty()) requests.push_back(std::move(request));
  }
  if (!absl::IsOutOfRange(status)) return status;  // Which names the file.
  return requests;
}

Request MakeWarmUpRequest(const tensorflow::SignatureDef& signature) {
  Request request;
  for (const auto& [name, info] : signature.inputs()) {
    tensorflow::TensorShape shape;
    for (const auto& dim : info.tensor_shape().dim()) {
      shape.AddDim(dim.size() < 0 ? 1 : dim.size());
    }
    tensorflow::Tensor tensor(info.dtype(), shape);
    if (tensorflow::DataTypeCanUseMemcpy(info.dtype())) {
      std::memset(tensor.data(), 0, tensor.TotalBytes());
    }
    request.inputs[name] = std::move(tensor);
  }
  return request;
}

}  // namespace tfswitch
