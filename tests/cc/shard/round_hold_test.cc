#include "cc/shard/round_hold.h"

#include <atomic>
#include <functional>
#include <future>
#include <optional>
#include <thread>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "gtest/gtest.h"

namespace tfswitch {
namespace {

constexpr absl::Duration kMoment = absl::Milliseconds(20);

absl::Status Never() { return absl::OkStatus(); }

using Asked = std::function<absl::Status()>;

// A call that waits on a thread of its own.
class Waiting {
 public:
  template <typename Call>
  explicit Waiting(const Call& call)
      : thread_([this, call] {
          status_ = call([this] {
            if (++num_asked_ == 3) waits_.set_value();
            return absl::OkStatus();
          });
          is_over_ = true;
          if (num_asked_ < 3) waits_.set_value();
        }) {}
  ~Waiting() {
    if (thread_.joinable()) thread_.join();
  }

  // Returns when it has waited for a while. Once.
  void LetWait() { waits_.get_future().wait(); }
  bool is_over() const { return is_over_; }
  absl::Status Join() {
    thread_.join();
    return status_;
  }

 private:
  int num_asked_ = 0;  // Used only by the thread.
  std::promise<void> waits_;
  std::atomic<bool> is_over_{false};
  absl::Status status_;
  std::thread thread_;
};

v1::SavedWorkQueues OneQueue() {
  v1::SavedWorkQueues saved;
  saved.add_queues()->set_queue("q");
  return saved;
}

TEST(RoundHoldTest, NothingIsHeldBeforeASave) {
  RoundHold hold;

  EXPECT_TRUE(hold.Wait([] { return absl::CancelledError(); }).ok());
  EXPECT_FALSE(RoundHold::Kept(&hold, "a").is_held());
  EXPECT_FALSE(hold.SetWorkQueues("a", v1::SavedWorkQueues()));
}

TEST(RoundHoldTest, ARoundWaitsForTheEndOfTheSave) {
  RoundHold hold;
  ASSERT_TRUE(hold.Begin("a", RoundHold::kLongest));
  Waiting round([&](const Asked& asked) { return hold.Wait(asked); });
  round.LetWait();
  hold.End("b");  // Another one.
  EXPECT_FALSE(round.is_over());

  hold.End("a");

  EXPECT_TRUE(round.Join().ok());
  EXPECT_FALSE(RoundHold::Kept(&hold, "a").is_held());
}

TEST(RoundHoldTest, AHoldEndsByItself) {
  RoundHold hold;
  ASSERT_TRUE(hold.Begin("a", kMoment));

  EXPECT_TRUE(hold.Wait(Never).ok());

  EXPECT_FALSE(RoundHold::Kept(&hold, "a").is_held());
  EXPECT_FALSE(hold.SetWorkQueues("a", v1::SavedWorkQueues()));
}

TEST(RoundHoldTest, ARepeatedBeginLetsItLast) {
  RoundHold hold;
  ASSERT_TRUE(hold.Begin("a", kMoment));
  ASSERT_TRUE(hold.Begin("a", RoundHold::kLongest));
  ASSERT_TRUE(hold.SetWorkQueues("a", OneQueue()));

  RoundHold longer;
  ASSERT_TRUE(longer.Begin("b", 2 * kMoment));
  ASSERT_TRUE(longer.Wait(Never).ok());

  const RoundHold::Kept kept(&hold, "a");
  EXPECT_TRUE(kept.is_held());
  EXPECT_EQ(kept.work_queues()->queues_size(), 1);
}

TEST(RoundHoldTest, AKeptHoldLastsUntilTheLastHasLetGo) {
  RoundHold hold;
  ASSERT_TRUE(hold.Begin("a", kMoment));
  std::optional<RoundHold::Kept> first;
  first.emplace(&hold, "a");
  std::optional<RoundHold::Kept> second;
  second.emplace(&hold, "a");
  ASSERT_TRUE(first->is_held());
  ASSERT_TRUE(second->is_held());
  Waiting round([&](const Asked& asked) { return hold.Wait(asked); });
  round.LetWait();  // For longer than it would last.

  first.reset();
  hold.End("a");
  EXPECT_TRUE(RoundHold::Kept(&hold, "a").is_held());
  EXPECT_FALSE(round.is_over());
  second.reset();

  EXPECT_TRUE(round.Join().ok());
  EXPECT_FALSE(RoundHold::Kept(&hold, "a").is_held());
}

TEST(RoundHoldTest, OneSaveAtATimeHoldsRounds) {
  RoundHold hold;
  ASSERT_TRUE(hold.Begin("a", RoundHold::kLongest));
  ASSERT_TRUE(hold.SetWorkQueues("a", OneQueue()));
  EXPECT_FALSE(hold.Begin("b", RoundHold::kLongest));
  EXPECT_TRUE(hold.IsHeldByOther("b"));
  EXPECT_FALSE(hold.IsHeldByOther("a"));

  hold.End("a");

  ASSERT_TRUE(hold.Begin("b", RoundHold::kLongest));
  const RoundHold::Kept kept(&hold, "b");
  EXPECT_TRUE(kept.is_held());
  EXPECT_FALSE(kept.work_queues().has_value());
}

TEST(RoundHoldTest, ARoundDoesNotWaitForTheNextSaveToo) {
  RoundHold hold;
  ASSERT_TRUE(hold.Begin("a", RoundHold::kLongest));
  Waiting round([&](const Asked& asked) { return hold.Wait(asked); });
  round.LetWait();

  hold.End("a");
  ASSERT_TRUE(hold.Begin("b", RoundHold::kLongest));

  EXPECT_TRUE(round.Join().ok());
  EXPECT_TRUE(RoundHold::Kept(&hold, "b").is_held());
}

TEST(RoundHoldTest, AWaitEndsWithTheErrorOfTheInterrupt) {
  RoundHold hold;
  ASSERT_TRUE(hold.Begin("a", RoundHold::kLongest));

  EXPECT_EQ(hold.Wait([] { return absl::CancelledError("stop"); }),
            absl::CancelledError("stop"));
  EXPECT_TRUE(RoundHold::Kept(&hold, "a").is_held());
}

}  // namespace
}  // namespace tfswitch
