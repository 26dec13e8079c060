// What the programs do not reach: plain values, pinning, warm-up requests and
// rows. tests/integration/serving_cc_test.py makes the models, 1/ and 2/ in the
// folder that SERVING_CC_TEST_MODELS names, and runs this. They take "ids",
// int64
// [?,2], and "dense", float [?,3], and give "pair", twice the ids, and
// "version", their own number for each row.

#include "predictor.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <utility>

namespace serving_cc {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

PredictorOptions Options() {
  PredictorOptions options;
  options.model_dir = std::getenv("SERVING_CC_TEST_MODELS");
  options.poll_interval = absl::ZeroDuration();
  return options;
}

std::unique_ptr<Predictor> Load(const PredictorOptions& options) {
  auto predictor = Predictor::Load(options);
  EXPECT_TRUE(predictor.ok()) << predictor.status();
  return predictor.ok() ? *std::move(predictor) : nullptr;
}

NamedValues Inputs() {
  return {{"ids", {Integers{3, 4, 5, 6}, {-1, 2}}},
          {"dense", {Floats(6), {2, 3}}}};
}

Request WarmUp(tensorflow::DataType dtype_of_ids) {
  Request request;
  request.inputs["ids"] = tensorflow::Tensor(dtype_of_ids, {0, 2});
  request.inputs["dense"] = tensorflow::Tensor(tensorflow::DT_FLOAT, {0, 3});
  return request;
}

TEST(PredictorTest, PredictsFromPlainValues) {
  const auto outputs = Load(Options())->Predict(Inputs());

  ASSERT_TRUE(outputs.ok()) << outputs.status();
  EXPECT_THAT(outputs->at("pair").shape, ElementsAre(2, 2));
  EXPECT_THAT(std::get<Integers>(outputs->at("pair").data),
              ElementsAre(6, 8, 10, 12));
}

TEST(PredictorTest, WrongValuesNameTheInput) {
  const auto predictor = Load(Options());
  NamedValues floats = Inputs();
  floats["ids"].data = Floats(4);
  NamedValues short_by_one = Inputs();
  short_by_one["ids"].data = Integers(3);
  NamedValues unknown = Inputs();
  unknown["user"] = {};

  EXPECT_THAT(predictor->Predict(floats).status().message(),
              HasSubstr("input 'ids': expected int64, got floats"));
  EXPECT_THAT(predictor->Predict(short_by_one).status().message(),
              HasSubstr("input 'ids': 3 values do not fill the shape [-1,2]"));
  EXPECT_THAT(predictor->Predict(unknown).status().message(),
              HasSubstr("no input 'user'; the inputs are 'dense': float [?,3], "
                        "'ids': int64 [?,2]"));
}

TEST(PredictorTest, PinServesAnOlderVersionAndAFailedPinChangesNothing) {
  const auto predictor = Load(Options());
  const auto version = [&] { return predictor->state().version; };
  EXPECT_EQ(version(), 2);

  EXPECT_TRUE(predictor->Pin(1).ok());
  EXPECT_EQ(version(), 1);
  EXPECT_THAT(predictor->Pin(7).message(), HasSubstr("which has 1, 2"));
  EXPECT_EQ(version(), 1);
}

TEST(PredictorTest, UnpinGoesBackToTheNewestVersion) {
  PredictorOptions options = Options();
  options.version = 1;
  options.poll_interval = absl::Milliseconds(5);
  const auto predictor = Load(options);
  EXPECT_EQ(predictor->state().version, 1);

  predictor->Unpin();

  const absl::Time give_up = absl::Now() + absl::Seconds(60);
  while (predictor->state().version != 2 && absl::Now() < give_up) {
    absl::SleepFor(absl::Milliseconds(5));
  }
  EXPECT_EQ(predictor->state().version, 2);
}

TEST(PredictorTest, AVersionThatFailsItsWarmUpIsRefused) {
  PredictorOptions options = Options();
  options.model.warm_up = {WarmUp(tensorflow::DT_INT64)};
  EXPECT_EQ(Load(options)->state().version, 2);

  options.model.warm_up.push_back(WarmUp(tensorflow::DT_INT32));

  EXPECT_THAT(Predictor::Load(options).status().message(),
              HasSubstr("2': a warm-up request: input 'ids': expected int64"));
}

TEST(PredictorTest, RowsAreLoadedForEachVersionAndCanRefuseIt) {
  PredictorOptions options = Options();
  options.model.rows.load = [](const std::string& folder,
                               tensorflow::Session* session) {
    EXPECT_NE(session, nullptr);
    return folder.back() == '2' ? absl::DataLossError("rows are broken")
                                : absl::OkStatus();
  };

  const auto predictor = Load(options);

  EXPECT_EQ(predictor->state().version, 1);
  EXPECT_THAT(predictor->state().refused.at(2).message(),
              HasSubstr("rows are broken"));
}

TEST(PredictorTest, RowsAreRefreshedAndAnErrorIsKept) {
  std::atomic<int> calls{0};
  PredictorOptions options = Options();
  options.poll_interval = absl::Milliseconds(5);
  options.model.rows.refresh = [&](const std::string&, tensorflow::Session*) {
    ++calls;
    return absl::DataLossError("delta 3 is broken");
  };
  const auto predictor = Load(options);

  const absl::Time give_up = absl::Now() + absl::Seconds(60);
  while (calls < 2 && absl::Now() < give_up) {
    absl::SleepFor(absl::Milliseconds(5));
  }

  EXPECT_THAT(predictor->state().rows.message(), HasSubstr("delta 3"));
  EXPECT_TRUE(predictor->Predict(Inputs()).ok());
}

}  // namespace
}  // namespace serving_cc
