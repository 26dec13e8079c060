// Tests what the programs do not reach: plain values, pinning, warm-up requests
// and control of rows. tests/integration/predictor_test.py makes the models and
// runs this program. TFSWITCH_TEST_MODELS names a folder with the models 1/ and
// 2/. They take "ids", int64 [?,2], and "dense", float [?,3], and return
// "pair", twice the ids, and "version", their own number for each row. The
// model in TFSWITCH_TEST_ROWS takes "ids", int64 [?], and returns "score", the
// value of each id's row.

#include "tfswitch/predictor.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cstdlib>
#include <thread>
#include <utility>

namespace tfswitch {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

PredictorOptions Options() {
  PredictorOptions options;
  options.model_dir = std::getenv("TFSWITCH_TEST_MODELS");
  options.poll_interval = Seconds::zero();
  return options;
}

std::unique_ptr<Predictor> Load(const PredictorOptions& options) {
  auto predictor = Predictor::Load(options);
  EXPECT_TRUE(predictor.ok()) << predictor.status().message();
  return predictor.ok() ? *std::move(predictor) : nullptr;
}

NamedValues Inputs() {
  return {{"ids", {Integers{3, 4, 5, 6}, {-1, 2}}},
          {"dense", {Floats(6), {2, 3}}}};
}

Request WarmUp(DataType dtype_of_ids) {
  Request request;
  request.inputs["ids"] = *Tensor::Make(dtype_of_ids, {0, 2});
  request.inputs["dense"] = *Tensor::Make(DataType::kFloat, {0, 3});
  return request;
}

TEST(PredictorTest, PredictsFromPlainValues) {
  const auto outputs = Load(Options())->Predict(Inputs());

  ASSERT_TRUE(outputs.ok()) << outputs.status().message();
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

TEST(PredictorTest, AShapeThatNoTensorHasIsAnError) {
  const std::vector<int64_t> too_many(255, 1);
  const int64_t large = int64_t{1} << 33;

  EXPECT_TRUE(Tensor::Make(DataType::kString, {2, 0}).ok());
  for (const auto& shape :
       {too_many, {3, -2}, {large, large}, {0, large, large}}) {
    EXPECT_EQ(Tensor::Make(DataType::kInt64, shape).status().code(),
              StatusCode::kInvalidArgument);
  }
  EXPECT_THAT(Tensor::Make(DataType{20}, {1}).status().message(),
              HasSubstr("and not resource"));
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
  options.poll_interval = milliseconds(5);
  const auto predictor = Load(options);
  EXPECT_EQ(predictor->state().version, 1);

  predictor->Unpin();

  const auto give_up = steady_clock::now() + std::chrono::seconds(60);
  while (predictor->state().version != 2 && steady_clock::now() < give_up) {
    std::this_thread::sleep_for(milliseconds(5));
  }
  EXPECT_EQ(predictor->state().version, 2);
}

TEST(PredictorTest, AVersionThatFailsItsWarmUpIsRefused) {
  PredictorOptions options = Options();
  options.model.warm_up = {WarmUp(DataType::kInt64)};
  EXPECT_EQ(Load(options)->state().version, 2);

  options.model.warm_up.push_back(WarmUp(DataType::kInt32));

  EXPECT_THAT(Predictor::Load(options).status().message(),
              HasSubstr("2': a warm-up request: input 'ids': expected int64"));
}

TEST(PredictorTest, AModelWithoutRowsOfItsOwnSaysSo) {
  PredictorOptions options = Options();
  const auto plain = Load(options);
  options.op_library = std::getenv("TFSWITCH_TEST_OP_LIBRARY");
  const auto predictor = Load(options);

  EXPECT_THAT(plain->RowsState().status().message(),
              HasSubstr("no op library is loaded"));
  for (const Status& status :
       {predictor->RowsState().status(), predictor->RefreshRows(),
        predictor->RollBackRows(1), predictor->ResumeRows(),
        predictor->WatchRows(Seconds(1))}) {
    EXPECT_EQ(status.code(), StatusCode::kFailedPrecondition);
    EXPECT_THAT(status.message(), HasSubstr("2' has no rows of its own"));
  }
  EXPECT_FALSE(predictor->state().rows.ok());
}

// Serves the model with rows: in export 1 the row of each id is the id, in
// export 2 twice the id.
class RowsTest : public ::testing::Test {
 protected:
  RowsTest() {
    PredictorOptions options;
    options.model_dir = std::getenv("TFSWITCH_TEST_ROWS");
    options.op_library = std::getenv("TFSWITCH_TEST_OP_LIBRARY");
    options.poll_interval = Seconds::zero();
    predictor_ = Load(options);
  }

  Floats Scores() const {
    const auto outputs = predictor_->Predict({{"ids", {Integers{3, 5}}}});
    EXPECT_TRUE(outputs.ok()) << outputs.status().message();
    return outputs.ok() ? std::get<Floats>(outputs->at("score").data)
                        : Floats();
  }

  std::unique_ptr<Predictor> predictor_;
};

TEST_F(RowsTest, TheNewestExportIsServed) {
  const auto state = predictor_->RowsState();

  ASSERT_TRUE(state.ok()) << state.status().message();
  EXPECT_EQ(state->number, 2);
  EXPECT_EQ(state->base_number, 1);
  EXPECT_FALSE(state->is_held);
  EXPECT_EQ(state->error, "");
  EXPECT_LT(std::chrono::system_clock::now() - state->created,
            std::chrono::hours(1));
  EXPECT_EQ(Describe(*state), "rows as of export 2, base 1");
  ASSERT_TRUE(predictor_->state().rows.ok());
  EXPECT_EQ(predictor_->state().rows->number, 2);
  EXPECT_TRUE(predictor_->RefreshRows().ok());
  EXPECT_THAT(Scores(), ElementsAre(6, 10));
}

TEST(DescribeTest, RowsOnServersAreOfNoExport) {
  ServedState state;
  state.addresses = "grpc://ps0:7077";
  EXPECT_EQ(Describe(state), "rows at grpc://ps0:7077");
  state.error = "shard 0 did not answer";
  EXPECT_EQ(Describe(state),
            "rows at grpc://ps0:7077; the last lookup failed: shard 0 did not "
            "answer");
}

TEST_F(RowsTest, AnEarlierExportIsServedUntilResume) {
  EXPECT_TRUE(predictor_->RollBackRows(1).ok());
  EXPECT_THAT(Scores(), ElementsAre(3, 5));
  EXPECT_TRUE(predictor_->RefreshRows().ok());
  EXPECT_EQ(Describe(*predictor_->RowsState()),
            "rows as of export 1, base 1, held there");

  EXPECT_TRUE(predictor_->ResumeRows().ok());
  EXPECT_THAT(Scores(), ElementsAre(6, 10));
  EXPECT_FALSE(predictor_->RowsState()->is_held);
}

TEST_F(RowsTest, AnExportThatIsNotThereLeavesWhatIsServed) {
  EXPECT_EQ(predictor_->RollBackRows(7).code(), StatusCode::kNotFound);
  EXPECT_EQ(predictor_->RollBackRows(0).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(Describe(*predictor_->RowsState()), "rows as of export 2, base 1");
  EXPECT_THAT(Scores(), ElementsAre(6, 10));
}

TEST_F(RowsTest, AnIntervalThatIsNoneIsRefused) {
  EXPECT_EQ(predictor_->WatchRows(Seconds(-1)).code(),
            StatusCode::kInvalidArgument);
  EXPECT_TRUE(predictor_->WatchRows(milliseconds(5)).ok());
  EXPECT_TRUE(predictor_->WatchRows(Seconds::zero()).ok());
}

}  // namespace
}  // namespace tfswitch
