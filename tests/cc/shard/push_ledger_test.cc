#include "cc/shard/push_ledger.h"

#include <atomic>
#include <thread>
#include <vector>

#include "gtest/gtest.h"

namespace tfswitch {
namespace {

using Verdict = PushLedger::Verdict;

void Apply(PushLedger& ledger, uint64_t client, uint64_t sequence) {
  ASSERT_EQ(ledger.Begin(client, sequence), Verdict::kApply);
  ledger.End(client, sequence, /*applied=*/true);
}

TEST(PushLedgerTest, ASequenceIsAppliedOncePerClient) {
  PushLedger ledger;
  Apply(ledger, 1, 5);

  EXPECT_EQ(ledger.Begin(1, 5), Verdict::kDuplicate);
  Apply(ledger, 2, 5);
  Apply(ledger, 1, 6);
}

TEST(PushLedgerTest, SequencesMayArriveInAnyOrder) {
  PushLedger ledger;
  Apply(ledger, 1, 9);
  Apply(ledger, 1, 3);
  Apply(ledger, 1, 4);

  EXPECT_EQ(ledger.Begin(1, 3), Verdict::kDuplicate);
  EXPECT_EQ(ledger.Begin(1, 4), Verdict::kDuplicate);
  EXPECT_EQ(ledger.Begin(1, 9), Verdict::kDuplicate);
  Apply(ledger, 1, 5);
}

TEST(PushLedgerTest, WhatFellOutOfTheWindowCountsAsApplied) {
  PushLedger ledger;
  const uint64_t far = 10 * PushLedger::kWindow;
  Apply(ledger, 1, 1);
  Apply(ledger, 1, far);

  EXPECT_EQ(ledger.Begin(1, 2), Verdict::kDuplicate);
  EXPECT_EQ(ledger.Begin(1, far - PushLedger::kWindow), Verdict::kDuplicate);
  Apply(ledger, 1, far - PushLedger::kWindow + 1);
}

TEST(PushLedgerTest, ThousandsOfPushesOfAStepMayEndInAnyOrder) {
  PushLedger ledger;
  // Each has eight sequences, of which the first is used.
  for (uint64_t push = 8191; push > 0; --push) Apply(ledger, 1, 8 * push);
  for (uint64_t push = 8191; push > 0; --push) {
    EXPECT_EQ(ledger.Begin(1, 8 * push), Verdict::kDuplicate);
  }
}

TEST(PushLedgerTest, AFailedPushMayBeTriedAgain) {
  PushLedger ledger;
  ASSERT_EQ(ledger.Begin(1, 1), Verdict::kApply);
  ledger.End(1, 1, /*applied=*/false);

  Apply(ledger, 1, 1);
  EXPECT_EQ(ledger.Begin(1, 1), Verdict::kDuplicate);
}

TEST(PushLedgerTest, TheClientsHeardOfLastAreRemembered) {
  PushLedger ledger;
  Apply(ledger, 1, 1);
  for (uint64_t client = 2; client <= PushLedger::kMaxClients; ++client) {
    Apply(ledger, client, 1);
  }
  EXPECT_EQ(ledger.Begin(1, 1), Verdict::kDuplicate);  // Refreshes client 1.
  Apply(ledger, PushLedger::kMaxClients + 1, 1);       // Client 2 goes.

  EXPECT_EQ(ledger.Begin(1, 1), Verdict::kDuplicate);
  EXPECT_EQ(ledger.Begin(2, 1), Verdict::kApply);
  ledger.End(2, 1, true);
}

TEST(PushLedgerTest, OneOfManyRepetitionsAtOnceIsApplied) {
  PushLedger ledger;
  for (uint64_t sequence = 1; sequence <= 200; ++sequence) {
    std::atomic<int> applied{0};
    std::vector<std::thread> threads;
    for (int t = 0; t < 4; ++t) {
      threads.emplace_back([&] {
        if (ledger.Begin(9, sequence) == Verdict::kApply) {
          applied.fetch_add(1);
          ledger.End(9, sequence, true);
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    ASSERT_EQ(applied.load(), 1);
  }
}

}  // namespace
}  // namespace tfswitch
