// Requests that run before a version serves. TensorFlow does extra work when a
// graph first runs. Without these requests the first clients would wait for
// this work.

#ifndef CC_PREDICTOR_WARM_UP_REQUESTS_H_
#define CC_PREDICTOR_WARM_UP_REQUESTS_H_

#include <string>
#include <vector>

#include "tfswitch/model_version.h"
#include "tfswitch/status.h"
#include "tfswitch/values.h"

namespace tfswitch {

// Reads the Predict requests in `assets.extra/tf_serving_warmup_requests`, a
// TFRecord file of tensorflow.serving.PredictionLog, which TensorFlow Serving
// also uses. Empty if there is no such file.
Result<std::vector<Request>> ReadWarmUpRequests(const std::string& saved_model);

// A request of zeros and empty strings, in which unknown dimensions are 1.
Result<Request> MakeWarmUpRequest(const Signature& signature);

}  // namespace tfswitch

#endif  // CC_PREDICTOR_WARM_UP_REQUESTS_H_
