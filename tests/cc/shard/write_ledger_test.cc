#include "cc/shard/write_ledger.h"

#include <atomic>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tfswitch {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using Verdict = WriteLedger::Verdict;

constexpr uint64_t kWindow = WriteLedger::kWindow;

void Apply(WriteLedger& ledger, uint64_t client, uint64_t sequence) {
  ASSERT_EQ(ledger.Begin({client, sequence}).value(), Verdict::kApply);
  ledger.End({client, sequence}, /*applied=*/true);
}

TEST(WriteLedgerTest, ASequenceIsAppliedOncePerClient) {
  WriteLedger ledger;
  Apply(ledger, 1, 5);

  EXPECT_EQ(ledger.Begin({1, 5}).value(), Verdict::kDuplicate);
  Apply(ledger, 2, 5);
  Apply(ledger, 1, 6);
}

TEST(WriteLedgerTest, SequencesMayArriveInAnyOrder) {
  WriteLedger ledger;
  Apply(ledger, 1, 9);
  Apply(ledger, 1, 3);
  Apply(ledger, 1, 4);

  EXPECT_EQ(ledger.Begin({1, 3}).value(), Verdict::kDuplicate);
  EXPECT_EQ(ledger.Begin({1, 4}).value(), Verdict::kDuplicate);
  EXPECT_EQ(ledger.Begin({1, 9}).value(), Verdict::kDuplicate);
  Apply(ledger, 1, 5);
}

TEST(WriteLedgerTest, WhatFellOutOfTheWindowIsRefusedWithTheWindow) {
  WriteLedger ledger;
  const uint64_t far = 10 * kWindow;
  Apply(ledger, 7, 1);
  Apply(ledger, 7, far);

  for (const uint64_t old : {uint64_t{1}, uint64_t{2}, far - kWindow}) {
    const absl::Status status = ledger.Begin({7, old}).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_THAT(std::string(status.message()),
                AllOf(HasSubstr(absl::StrCat("write ", old, " of client 7 ")),
                      HasSubstr(absl::StrCat(far - kWindow + 1, " to ", far)),
                      HasSubstr("not applied now, and may have been before"),
                      HasSubstr("fewer than 8192 writes")));
  }
  Apply(ledger, 7, far - kWindow + 1);
}

TEST(WriteLedgerTest, ARepetitionHearsTheCountOfTheFirst) {
  WriteLedger ledger;
  for (const int64_t count : {5, 0}) {
    const uint64_t sequence = static_cast<uint64_t>(count) + 1;
    ASSERT_EQ(ledger.Begin({1, sequence}).value(), Verdict::kApply);
    ledger.End({1, sequence}, /*applied=*/true, count);

    int64_t heard = -1;
    EXPECT_EQ(ledger.Begin({1, sequence}, &heard).value(), Verdict::kDuplicate);
    EXPECT_EQ(heard, count);
  }
}

TEST(WriteLedgerTest, ThousandsOfPushesOfAStepMayEndInAnyOrder) {
  WriteLedger ledger;
  // Each has eight sequences, of which the first is used.
  for (uint64_t push = 8191; push > 0; --push) Apply(ledger, 1, 8 * push);
  for (uint64_t push = 8191; push > 0; --push) {
    EXPECT_EQ(ledger.Begin({1, 8 * push}).value(), Verdict::kDuplicate);
  }
}

TEST(WriteLedgerTest, AFailedPushMayBeTriedAgain) {
  WriteLedger ledger;
  ASSERT_EQ(ledger.Begin({1, 1}).value(), Verdict::kApply);
  ledger.End({1, 1}, /*applied=*/false);

  Apply(ledger, 1, 1);
  EXPECT_EQ(ledger.Begin({1, 1}).value(), Verdict::kDuplicate);
}

TEST(WriteLedgerTest, TheClientsHeardOfLastAreRemembered) {
  WriteLedger ledger;
  Apply(ledger, 1, 1);
  for (uint64_t client = 2; client <= WriteLedger::kMaxOfAll; ++client) {
    Apply(ledger, client, 1);
  }
  EXPECT_EQ(ledger.Begin({1, 1}).value(),
            Verdict::kDuplicate);                // Refreshes client 1.
  Apply(ledger, WriteLedger::kMaxOfAll + 1, 1);  // Client 2 goes.

  EXPECT_EQ(ledger.Begin({1, 1}).value(), Verdict::kDuplicate);
  EXPECT_EQ(ledger.Begin({2, 1}).value(), Verdict::kApply);
  ledger.End({2, 1}, true);
}

TEST(WriteLedgerTest, NoCallerMakesItForgetAnothersWrites) {
  WriteLedger ledger;
  const auto begin_and_end = [&](const PushId& id) {
    const auto verdict = ledger.Begin(id).value();
    if (verdict == Verdict::kApply) ledger.End(id, /*applied=*/true);
    return verdict;
  };
  Apply(ledger, 1, 1);  // Restored: the next caller has it.
  EXPECT_EQ(begin_and_end({1, 1, /*caller=*/5}), Verdict::kDuplicate);
  begin_and_end({2, 1, /*caller=*/5});

  for (uint64_t client = 3; client < 3 + 2 * WriteLedger::kMaxOfAll; ++client) {
    begin_and_end({client, 1, /*caller=*/6});
  }

  EXPECT_LE(ledger.Marks().size(), 2 + WriteLedger::kMaxClients);
  EXPECT_EQ(begin_and_end({1, 1, /*caller=*/5}), Verdict::kDuplicate);
  EXPECT_EQ(begin_and_end({2, 1, /*caller=*/6}), Verdict::kDuplicate);
  EXPECT_EQ(begin_and_end({2, 1, /*caller=*/5}), Verdict::kDuplicate);
}

TEST(WriteLedgerTest, ManyCallersAreBoundedTogether) {
  WriteLedger ledger;
  Apply(ledger, 1, 1);
  for (uint64_t client = 2; client < 2 * WriteLedger::kMaxOfAll; ++client) {
    const PushId id = {client, 1, /*caller=*/client % 40};
    ASSERT_EQ(ledger.Begin(id).value(), Verdict::kApply);
    ledger.End(id, /*applied=*/true);
  }
  EXPECT_EQ(ledger.Marks().size(), WriteLedger::kMaxOfAll);
}

TEST(WriteLedgerTest, OneOfManyRepetitionsAtOnceIsApplied) {
  WriteLedger ledger;
  for (uint64_t sequence = 1; sequence <= 200; ++sequence) {
    std::atomic<int> applied{0};
    std::vector<std::thread> threads;
    for (int t = 0; t < 4; ++t) {
      threads.emplace_back([&] {
        if (ledger.Begin({9, sequence}).value() == Verdict::kApply) {
          applied.fetch_add(1);
          ledger.End({9, sequence}, true);
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    ASSERT_EQ(applied.load(), 1);
  }
}

}  // namespace
}  // namespace tfswitch
