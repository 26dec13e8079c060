// Times requests to models, in turns.
//
//   time_requests --models=/models/ranking,/models/other --batch_size=128
// Each request has new values: integers below --num_ids, floats between -1 and
// 1, in the shapes of the signature. An unknown first dimension is batch_size,
// other unknown dimensions are 1. One thread sends the requests and also runs
// the ops, so that requests do not disturb each other and no thread has to be
// woken. Prints milliseconds for each model: the median and the 99th
// percentile, also as multiples of the first model's.

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/strings/str_split.h"
#include "cc/predictor/errors.h"
#include "cc/predictor/program_flags.h"
#include "tfswitch/predictor.h"

namespace tfswitch {
namespace {

constexpr int kFailed = 1;
constexpr int kBadFlag = 2;

struct Load {
  int64_t batch_size = 128;
  int64_t num_requests = 2000;
  int64_t num_warm_up = 200;
  int64_t num_ids = 10'000'000;
};

// Values for each input of a signature.
Result<NamedValues> DrawInputs(const Signature& signature, const Load& load,
                               std::mt19937_64* random) {
  NamedValues inputs;
  for (const auto& [name, spec] : signature.inputs) {
    auto data = EmptyDataFor(spec.dtype);
    if (!data.ok()) return data.status();
    Values values;
    values.data = *std::move(data);
    values.shape.clear();
    size_t size = 1;
    for (const int64_t dim : spec.shape.value_or(std::vector<int64_t>())) {
      const bool is_first = values.shape.empty();
      const int64_t open = is_first ? load.batch_size : 1;
      values.shape.push_back(dim < 0 ? open : dim);
      size *= static_cast<size_t>(values.shape.back());
    }
    if (auto* const integers = std::get_if<Integers>(&values.data)) {
      std::uniform_int_distribution<int64_t> draw(0, load.num_ids - 1);
      for (size_t i = 0; i < size; ++i) integers->push_back(draw(*random));
    } else if (auto* const floats = std::get_if<Floats>(&values.data)) {
      std::uniform_real_distribution<float> draw(-1.0f, 1.0f);
      for (size_t i = 0; i < size; ++i) floats->push_back(draw(*random));
    } else {
      return Error(StatusCode::kUnimplemented, "input '", name, "' is ",
                   Describe(spec), "; only numbers can be drawn");
    }
    inputs[name] = std::move(values);
  }
  return inputs;
}

// The values are tensors, so that only the model is timed.
Result<Request> DrawRequest(const ModelVersion& model, const Load& load,
                            std::mt19937_64* random) {
  const auto signature = model.FindSignature("");
  if (!signature.ok()) return signature.status();
  const auto inputs = DrawInputs(**signature, load, random);
  if (!inputs.ok()) return inputs.status();
  Request request;
  for (const auto& [name, values] : *inputs) {
    const auto tensor = ToTensor(values, (*signature)->inputs.at(name).dtype);
    if (!tensor.ok()) return tensor.status();
    request.inputs[name] = *tensor;
  }
  return request;
}

struct Times {
  std::vector<double> ms;

  double At(double share) {
    std::sort(ms.begin(), ms.end());
    return ms[std::min(
        ms.size() - 1,
        static_cast<size_t>(static_cast<double>(ms.size()) * share))];
  }
};

Status TimeAll(const std::vector<std::string>& folders,
               const PredictorOptions& options, const Load& load) {
  std::vector<std::unique_ptr<Predictor>> predictors;
  for (const std::string& folder : folders) {
    PredictorOptions each = options;
    each.model_dir = folder;
    auto predictor = Predictor::Load(each);
    if (!predictor.ok()) return predictor.status();
    predictors.push_back(*std::move(predictor));
  }
  std::mt19937_64 random(1);
  std::vector<Times> times(predictors.size());
  for (int64_t i = 0; i < load.num_warm_up + load.num_requests; ++i) {
    for (size_t m = 0; m < predictors.size(); ++m) {
      const auto model = predictors[m]->current();
      const auto request = DrawRequest(*model, load, &random);
      if (!request.ok()) return request.status();
      const auto begin = std::chrono::steady_clock::now();
      const auto response = model->Predict(*request);
      const std::chrono::duration<double, std::milli> took =
          std::chrono::steady_clock::now() - begin;
      if (!response.ok()) return response.status();
      if (i >= load.num_warm_up) {
        times[m].ms.push_back(took.count());
      }
    }
  }
  for (size_t m = 0; m < folders.size(); ++m) {
    std::printf("%s: median %.3f ms (%.2f), p99 %.3f ms (%.2f)\n",
                folders[m].c_str(), times[m].At(0.5),
                times[m].At(0.5) / times[0].At(0.5), times[m].At(0.99),
                times[m].At(0.99) / times[0].At(0.99));
  }
  return Status();
}

int Fail(int code, std::string_view message) {
  std::fprintf(stderr, "time_requests: %.*s\n",
               static_cast<int>(message.size()), message.data());
  return code;
}

int Run(int argc, char** argv) {
  PredictorOptions options;
  options.op_library = OpLibraryPath();
  options.poll_interval = Seconds::zero();
  // Nothing beside the requests takes time.
  options.watch_rows_interval = Seconds::zero();
  setenv("TFSWITCH_SERVING_VERIFY_FIRST", "1", /*overwrite=*/0);
  Load load;
  std::string models;
  int32_t threads = 1;
  bool help = false;
  const std::vector<Flag> flags = {
      {"models", &models, "SavedModels, with commas"},
      {"batch_size", &load.batch_size, "rows of a request"},
      {"requests", &load.num_requests, "that are timed, of each model"},
      {"num_ids", &load.num_ids, "integers are drawn below it"},
      {"threads", &threads, "for the work inside of ops"},
      {"op_library", &options.op_library,
       "library with the model's own ops; empty: none"},
      {"help", &help, "prints this text"},
  };
  const std::string usage = FlagsHelp(argv[0], flags);
  const std::string bad_flag = ParseFlags(argc, argv, flags);
  if (help) {
    std::printf("%s", usage.c_str());
    return 0;
  }
  if (!bad_flag.empty()) return Fail(kBadFlag, bad_flag);
  if (models.empty()) return Fail(kBadFlag, "give --models; see --help");
  if (load.batch_size < 1 || load.num_requests < 1 || load.num_ids < 1 ||
      threads < 1) {
    return Fail(kBadFlag, "numbers must be positive; see --help");
  }
  options.model.intra_op_threads = threads;
  options.model.inter_op_threads = -1;
  const Status status = TimeAll(absl::StrSplit(models, ','), options, load);
  if (!status.ok()) return Fail(kFailed, status.message());
  return 0;
}

}  // namespace
}  // namespace tfswitch

int main(int argc, char** argv) { return tfswitch::Run(argc, argv); }
