#include "cc/rpc/server/call_gate.h"

#include <thread>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tfswitch {
namespace {

TEST(CallGateTest, ClosedGateLetsNobodyIn) {
  CallGate gate;
  {
    const AdmissionTicket pass(&gate);
    EXPECT_TRUE(pass.status().ok());
  }

  gate.Close(absl::ZeroDuration());

  EXPECT_EQ(gate.Enter().code(), absl::StatusCode::kUnavailable);
}

TEST(CallGateTest, CloseWaitsForTheLastToLeave) {
  CallGate gate;
  ASSERT_TRUE(gate.Enter().ok());
  ASSERT_TRUE(gate.Enter().ok());
  bool all_left = false;
  std::thread leaver([&] {
    // Once it is closed, so that Close() is under way.
    while (gate.Enter().ok()) gate.Leave();
    gate.Leave();
    all_left = true;
    gate.Leave();
  });

  gate.Close(absl::Hours(1));

  EXPECT_TRUE(all_left);
  leaver.join();
}

TEST(CallGateTest, CloseGivesUpAfterItsGrace) {
  CallGate gate;
  ASSERT_TRUE(gate.Enter().ok());

  gate.Close(absl::Milliseconds(1));

  gate.Leave();
}

TEST(CallGateTest, WaitsLeaveRoomForOtherControlCalls) {
  using Kind = CallGate::Kind;
  CallGate gate(4);
  for (int i = 0; i < 3; ++i) ASSERT_TRUE(gate.Enter(Kind::kWait).ok());

  const absl::Status wait = gate.Enter(Kind::kWait);
  ASSERT_TRUE(gate.Enter(Kind::kControl).ok());
  const absl::Status control = gate.Enter(Kind::kControl);

  for (const absl::Status& status : {wait, control}) {
    EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
    EXPECT_THAT(std::string(status.message()),
                testing::HasSubstr("--max_control_calls"));
  }
  EXPECT_TRUE(gate.Enter(Kind::kData).ok());
  gate.Leave(Kind::kWait);
  EXPECT_TRUE(gate.Enter(Kind::kWait).ok());
}

}  // namespace
}  // namespace tfswitch
