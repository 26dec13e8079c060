#include "cc/rpc/status_conversion.h"

#include <string>

#include "gtest/gtest.h"

namespace tfswitch {
namespace {

TEST(StatusConversionTest, EveryCodeAndItsMessageComeBack) {
  for (int code = 0; code <= 16; ++code) {
    const absl::Status status(static_cast<absl::StatusCode>(code), "why");
    EXPECT_EQ(static_cast<int>(ToGrpcStatus(status).error_code()), code);
    EXPECT_EQ(FromGrpcStatus(ToGrpcStatus(status)), status);
  }
}

TEST(StatusConversionTest, CodeThatIsNotGrpcsBecomesUnknown) {
  for (int code : {-1, 17, 31}) {
    const absl::Status status = FromGrpcStatus(
        grpc::Status(static_cast<grpc::StatusCode>(code), "odd"));
    EXPECT_EQ(status, absl::UnknownError("odd"));
  }
}

TEST(StatusConversionTest, LongMessageIsCutBetweenCharacters) {
  std::string text(4095, 'x');
  text += "\xe2\x82\xac and more";

  const std::string cut =
      ToGrpcStatus(absl::InternalError(text)).error_message();

  EXPECT_EQ(cut, std::string(4095, 'x') + "...");
}

TEST(StatusConversionTest, AMessageFitsAHeaderWhateverItsCharacters) {
  std::string text;
  for (int i = 0; i < 2000; ++i) text += "\xe7\x94\xa8%\n";

  const std::string cut =
      ToGrpcStatus(absl::InternalError(text)).error_message();

  EXPECT_GT(cut.size(), 1300u);
  EXPECT_LT(cut.size() * 3, 4200u);
}

}  // namespace
}  // namespace tfswitch
