// What the programs do not reach: plain values, pinning, warm-up requests and
// steering rows. tests/integration/predictor_test.py makes the models and runs
// this. Those in the folder that TFSWITCH_TEST_MODELS names, 1/ and 2/, take
// "ids", int64 [?,2], and "dense", float [?,3], and give "pair", twice the ids,
// and "version", their own number for each row. That in TFSWITCH_TEST_ROWS
// takes "ids", int64 [?], and gives "score", what its rows say of each.

#include "cc/predictor/predictor.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <utility>

namespace tfswitch {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

PredictorOptions Options() {
  PredictorOptions options;
  options.model_dir = std::getenv("TFSWITCH_TEST_MODELS");
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

TEST(PredictorTest, AModelWithoutRowsOfItsOwnSaysSo) {
  PredictorOptions options = Options();
  const auto plain = Load(options);
  options.op_library = std::getenv("TFSWITCH_TEST_OP_LIBRARY");
  const auto predictor = Load(options);

  EXPECT_THAT(plain->RowsState().status().message(),
              HasSubstr("no op library is loaded"));
  for (const absl::Status& status :
       {predictor->RowsState().status(), predictor->RefreshRows(),
        predictor->RollBackRows(1), predictor->ResumeRows(),
        predictor->WatchRows(absl::Seconds(1))}) {
    EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
    EXPECT_THAT(status.message(), HasSubstr("2' has no rows of its own"));
  }
  EXPECT_FALSE(predictor->state().rows.ok());
}

// Of the model with rows: export 1 gives each id its number, export 2 twice
// that.
class RowsTest : public ::testing::Test {
 protected:
  RowsTest() {
    PredictorOptions options;
    options.model_dir = std::getenv("TFSWITCH_TEST_ROWS");
    options.op_library = std::getenv("TFSWITCH_TEST_OP_LIBRARY");
    options.poll_interval = absl::ZeroDuration();
    predictor_ = Load(options);
  }

  Floats Scores() const {
    const auto outputs = predictor_->Predict({{"ids", {Integers{3, 5}}}});
    EXPECT_TRUE(outputs.ok()) << outputs.status();
    return outputs.ok() ? std::get<Floats>(outputs->at("score").data)
                        : Floats();
  }

  std::unique_ptr<Predictor> predictor_;
};

TEST_F(RowsTest, TheNewestExportIsServed) {
  const auto state = predictor_->RowsState();

  ASSERT_TRUE(state.ok()) << state.status();
  EXPECT_EQ(state->number, 2);
  EXPECT_EQ(state->base_number, 1);
  EXPECT_FALSE(state->is_held);
  EXPECT_EQ(state->error, "");
  EXPECT_LT(absl::Now() - state->created, absl::Hours(1));
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
  EXPECT_TRUE(absl::IsNotFound(predictor_->RollBackRows(7)));
  EXPECT_TRUE(absl::IsInvalidArgument(predictor_->RollBackRows(0)));
  EXPECT_EQ(Describe(*predictor_->RowsState()), "rows as of export 2, base 1");
  EXPECT_THAT(Scores(), ElementsAre(6, 10));
}

TEST_F(RowsTest, AnIntervalThatIsNoneIsRefused) {
  EXPECT_TRUE(
      absl::IsInvalidArgument(predictor_->WatchRows(-absl::Seconds(1))));
  EXPECT_TRUE(predictor_->WatchRows(absl::Milliseconds(5)).ok());
  EXPECT_TRUE(predictor_->WatchRows(absl::ZeroDuration()).ok());
}

}  // namespace
}  // namespace tfswitch
