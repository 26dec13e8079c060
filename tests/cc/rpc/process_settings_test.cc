#include "cc/rpc/process_settings.h"

#include <grpcpp/version_info.h>

#include <cstdlib>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tfswitch {
namespace {

using testing::StrEq;

TEST(PrepareServerProgramTest, KeepsTheExperimentsOfTheUser) {
  setenv("GRPC_EXPERIMENTS", "of_the_user", /*overwrite=*/1);

  PrepareServerProgram();

  EXPECT_THAT(getenv("GRPC_EXPERIMENTS"), StrEq("of_the_user"));
}

TEST(PrepareServerProgramTest, TurnsSmallReadsOff) {
  if (GRPC_CPP_VERSION_MAJOR != 1 || GRPC_CPP_VERSION_MINOR != 51) {
    GTEST_SKIP() << "gRPC " << GRPC_CPP_VERSION_STRING;
  }
  unsetenv("GRPC_EXPERIMENTS");

  PrepareServerProgram();

  EXPECT_THAT(getenv("GRPC_EXPERIMENTS"), StrEq("-tcp_read_chunks"));
}

}  // namespace
}  // namespace tfswitch
