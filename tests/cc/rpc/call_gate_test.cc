#include "cc/rpc/call_gate.h"

#include <thread>

#include "gtest/gtest.h"

namespace tfswitch {
namespace {

TEST(CallGateTest, ClosedGateLetsNobodyIn) {
  CallGate gate;
  {
    const GatePass pass(&gate);
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

}  // namespace
}  // namespace tfswitch
