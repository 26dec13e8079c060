#include "cc/predictor/warm_up_requests.h"

#include <cstring>
#include <filesystem>
#include <system_error>
#include <utility>

#include "cc/predictor/errors.h"
#include "cc/predictor/record_reader.h"
#include "cc/predictor/tf_objects.h"
#include "cc/predictor/wire.h"

namespace tfswitch {
namespace {

constexpr char kFile[] = "/assets.extra/tf_serving_warmup_requests";

// Field numbers of tensorflow.serving.PredictionLog and its parts.
constexpr int kPredictLog = 6;  // In PredictionLog.
constexpr int kRequest = 1;     // In PredictLog.
constexpr int kModelSpec = 1;   // In PredictRequest.
constexpr int kInputs = 2;
constexpr int kOutputFilter = 3;
constexpr int kSignatureName = 3;  // In ModelSpec.

// Finds the last field with this number. *found is empty if there is none.
bool Find(std::string_view message, uint32_t number, std::string_view* found) {
  *found = {};
  WireReader fields(message);
  while (fields.Next()) {
    if (fields.IsBytes(number)) *found = fields.bytes();
  }
  return fields.ok();
}

// Reads a PredictionLog; false if the bytes are not one. A log of another kind
// than Predict leaves the request without inputs.
bool Parse(std::string_view log, Request* request) {
  std::string_view message, signature;
  if (!Find(log, kPredictLog, &message) || !Find(message, kRequest, &message)) {
    return false;
  }
  WireReader fields(message);
  while (fields.Next()) {
    bool parsed = true;
    if (fields.IsBytes(kModelSpec)) {
      parsed = Find(fields.bytes(), kSignatureName, &signature);
    } else if (fields.IsBytes(kOutputFilter)) {
      request->outputs.emplace_back(fields.bytes());
    } else if (fields.IsBytes(kInputs)) {
      parsed =
          ReadEntry(fields.bytes(), [&](const std::string& name, auto value) {
            Result<Tensor> tensor = ParseTensor(value);
            if (!tensor.ok()) return false;
            request->inputs[name] = *std::move(tensor);
            return true;
          });
    }
    if (!parsed) return false;
  }
  request->signature = signature;
  return fields.ok();
}

}  // namespace

Result<std::vector<Request>> ReadWarmUpRequests(
    const std::string& saved_model) {
  const std::string path = saved_model + kFile;
  std::vector<Request> requests;
  std::error_code ignored;
  if (!std::filesystem::exists(path, ignored)) return requests;
  Result<RecordReader> reader = RecordReader::Open(path);
  if (!reader.ok()) return reader.status();
  for (int number = 0;; ++number) {
    const Result<std::string> record = reader->Read();
    if (record.status().code() == StatusCode::kOutOfRange) return requests;
    if (!record.ok()) return WithContext(record.status(), "'", path, "': ");
    Request request;
    if (!Parse(*record, &request)) {
      return Error(StatusCode::kDataLoss, "'", path, "': record ", number,
                   " is not a tensorflow.serving.PredictionLog; write it "
                   "again");
    }
    if (!request.inputs.empty()) requests.push_back(std::move(request));
  }
}

Result<Request> MakeWarmUpRequest(const Signature& signature) {
  Request request;
  for (const auto& [name, spec] : signature.inputs) {
    std::vector<int64_t> shape;
    if (spec.shape) shape = *spec.shape;
    for (int64_t& dim : shape) {
      if (dim < 0) dim = 1;
    }
    Result<Tensor> tensor = Tensor::Make(spec.dtype, shape);
    if (!tensor.ok())
      return WithContext(tensor.status(), "input '", name, "': ");
    if (spec.dtype != DataType::kString && tensor->num_bytes() > 0) {
      std::memset(tensor->data(), 0, tensor->num_bytes());
    }
    request.inputs[name] = *std::move(tensor);
  }
  return request;
}

}  // namespace tfswitch
