// Requests that run before a version serves, so that the first clients do not
// wait for TensorFlow's work on a first run.

#ifndef CC_PREDICTOR_WARM_UP_REQUESTS_H_
#define CC_PREDICTOR_WARM_UP_REQUESTS_H_

#include <string>
#include <vector>

#include "tfswitch/model_version.h"
#include "tfswitch/status.h"
#include "tfswitch/values.h"

namespace tfswitch {

// The requests of Predict in `assets.extra/tf_serving_warmup_requests`, where
// TensorFlow Serving looks for them too: a TFRecord file of
// tensorflow.serving.PredictionLog. None if there is no such file.
Result<std::vector<Request>> ReadWarmUpRequests(const std::string& saved_model);

// A request of zeros and empty strings; unknown dimensions are 1.
Result<Request> MakeWarmUpRequest(const Signature& signature);

}  // namespace tfswitch

#endif  // CC_PREDICTOR_WARM_UP_REQUESTS_H_
