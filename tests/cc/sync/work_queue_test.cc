#include "cc/sync/work_queue.h"

#include <algorithm>
#include <cstdint>
#include <map>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/cc/testing/coordination.h"

namespace tfswitch {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::Not;
using testing::UnorderedElementsAre;

WorkQueueOptions LetteredItems(int num_items, int64_t num_epochs = 1) {
  std::vector<std::string> items;
  for (int i = 0; i < num_items; ++i) {
    items.push_back(std::string(1, static_cast<char>('a' + i)));
  }
  return ItemsOf(items, num_epochs);
}

bool NobodyIsThere(uint32_t, uint64_t) { return false; }

// Has one worker take and finish what is left of the epoch; returns the values.
std::vector<std::string> Drain(WorkQueue* queue, uint32_t worker = 0,
                               uint64_t incarnation = 1) {
  std::vector<std::string> values;
  while (const auto item = queue->Take(worker, incarnation)) {
    values.push_back(item->value());
    EXPECT_TRUE(
        queue->Finish(worker, incarnation, item->epoch(), item->index()).ok());
  }
  return values;
}

TEST(WorkQueueTest, EveryItemIsHandedOutOnceAnEpoch) {
  WorkQueue queue("q", LetteredItems(3, 2));
  EXPECT_THAT(Drain(&queue), ElementsAre("a", "b", "c"));
  EXPECT_EQ(queue.stats().epoch(), 0);  // Until somebody asks.
  queue.EndEpochIfFinished();
  EXPECT_EQ(queue.stats().epoch(), 1);
  EXPECT_THAT(Drain(&queue), ElementsAre("a", "b", "c"));
  queue.EndEpochIfFinished();
  EXPECT_EQ(queue.stats().epoch(), 2);
  EXPECT_THAT(Drain(&queue), ElementsAre());
  queue.EndEpochIfFinished();
  EXPECT_EQ(queue.stats().epoch(), 2);
}

TEST(WorkQueueTest, WorkersHaveDifferentItemsAndOneEach) {
  WorkQueue queue("q", LetteredItems(2));
  const WorkItem a = *queue.Take(0, 1);
  const WorkItem b = *queue.Take(1, 2);
  EXPECT_NE(a.index(), b.index());
  EXPECT_FALSE(queue.Take(2, 3).has_value());
  EXPECT_EQ(queue.Take(0, 1)->index(), a.index());  // The answer was lost.
  EXPECT_EQ(queue.stats().num_leased(), 2);
}

TEST(WorkQueueTest, AnEpochGoesOnWhileSomebodyHasAnItem) {
  WorkQueue queue("q", LetteredItems(1, 2));
  ASSERT_TRUE(queue.Take(0, 1).has_value());
  queue.EndEpochIfFinished();
  EXPECT_EQ(queue.stats().epoch(), 0);
}

TEST(WorkQueueTest, AnItemOfOneThatHasGoneGoesOnAtItsOffset) {
  WorkQueue queue("q", LetteredItems(2));
  ASSERT_TRUE(queue.Take(0, 1).has_value());
  ASSERT_TRUE(queue.Advance(0, 1, ProgressOf("q", 0, 0, 5)).ok());
  queue.ReturnItems(NobodyIsThere);

  const WorkItem again = *queue.Take(1, 2);  // Before one that is new.
  EXPECT_EQ(again.index(), 0);
  EXPECT_EQ(again.offset(), 5);
  EXPECT_EQ(queue.stats().reissued(), 1);
  // Who had it has it no more.
  EXPECT_EQ(queue.Advance(0, 1, ProgressOf("q", 0, 0, 6)).code(),
            absl::StatusCode::kNotFound);
  const absl::Status finished = queue.Finish(0, 1, 0, 0);
  EXPECT_EQ(finished.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(finished.message(),
              HasSubstr("item 0 ('a') of epoch 0 of work queue 'q'"));
}

TEST(WorkQueueTest, AnotherIncarnationIsAnotherWorker) {
  WorkQueue queue("q", LetteredItems(2));
  ASSERT_TRUE(queue.Take(0, 1).has_value());
  ASSERT_TRUE(queue.Advance(0, 1, ProgressOf("q", 0, 0, 3)).ok());
  EXPECT_EQ(queue.Take(0, 2)->offset(), 3);
  EXPECT_FALSE(queue.Finish(0, 1, 0, 0).ok());
  EXPECT_TRUE(queue.Finish(0, 2, 0, 0).ok());
}

TEST(WorkQueueTest, RepeatingAnEventChangesNothing) {
  WorkQueue queue("q", LetteredItems(2));
  ASSERT_TRUE(queue.Take(0, 1).has_value());
  ASSERT_TRUE(queue.Advance(0, 1, ProgressOf("q", 0, 0, 4)).ok());
  ASSERT_TRUE(queue.Advance(0, 1, ProgressOf("q", 0, 0, 4)).ok());
  ASSERT_TRUE(queue.Advance(0, 1, ProgressOf("q", 0, 0, 2)).ok());
  EXPECT_EQ(queue.Take(0, 1)->offset(), 4);
  EXPECT_TRUE(queue.Finish(0, 1, 0, 0).ok());
  EXPECT_TRUE(queue.Finish(0, 1, 0, 0).ok());
  EXPECT_EQ(queue.stats().num_finished(), 1);
}

TEST(WorkQueueTest, OrdersDependOnSeedAndEpochAlone) {
  WorkQueueOptions options = LetteredItems(20, 3);
  options.set_shuffle(true);
  options.set_seed(7);
  const auto order_of = [](const WorkQueueOptions& of, int epochs) {
    WorkQueue queue("q", of);
    std::vector<std::vector<std::string>> orders;
    for (int i = 0; i < epochs; ++i) {
      orders.push_back(Drain(&queue));
      queue.EndEpochIfFinished();
    }
    return orders;
  };
  const auto orders = order_of(options, 3);
  for (const auto& order : orders) {
    EXPECT_EQ(std::set<std::string>(order.begin(), order.end()).size(), 20u);
  }
  EXPECT_THAT(orders[0], Not(testing::ElementsAreArray(options.items())));
  EXPECT_NE(orders[0], orders[1]);
  EXPECT_NE(orders[1], orders[2]);
  EXPECT_EQ(order_of(options, 3), orders);
  options.set_seed(8);
  EXPECT_NE(order_of(options, 3)[0], orders[0]);
}

TEST(WorkQueueTest, WhatDiffersIsNamed) {
  const WorkQueueOptions here = LetteredItems(3, 2);
  const auto changed = [&](auto change) {
    WorkQueueOptions asked = here;
    change(&asked);
    return DescribeDifference(here, asked);
  };
  EXPECT_EQ(changed([](auto*) {}), "");
  EXPECT_EQ(changed([](auto* o) { o->set_num_epochs(3); }),
            "epochs: 2 here, 3 asked");
  EXPECT_EQ(changed([](auto* o) { o->set_shuffle(true); }),
            "shuffle: false here, true asked");
  EXPECT_EQ(changed([](auto* o) { o->set_seed(1); }), "seed: 0 here, 1 asked");
  EXPECT_EQ(changed([](auto* o) { o->mutable_items()->RemoveLast(); }),
            "number of items: 3 here, 2 asked");
  EXPECT_EQ(changed([](auto* o) { o->set_items(1, "x"); }),
            "item 1: 'b' here, 'x' asked");
}

TEST(WorkQueueTest, OptionsThatMakeNoSenseAreRefused) {
  EXPECT_FALSE(Validate(LetteredItems(0)).ok());
  EXPECT_FALSE(Validate(LetteredItems(1, 0)).ok());
  EXPECT_TRUE(Validate(LetteredItems(1, 1)).ok());
}

TEST(WorkQueueTest, AStateThatDoesNotFitIsRefused) {
  using Unfinished = std::map<int64_t, int64_t>;
  const auto restore = [](int64_t epoch, int64_t num_taken,
                          const Unfinished& unfinished) {
    SavedWorkQueue state;
    state.set_epoch(epoch);
    state.set_num_taken(num_taken);
    state.mutable_unfinished()->insert(unfinished.begin(), unfinished.end());
    return WorkQueue("q", LetteredItems(3, 2)).Restore(state).code();
  };
  EXPECT_EQ(restore(0, 2, {{1, 5}}), absl::StatusCode::kOk);
  EXPECT_EQ(restore(2, 0, {}), absl::StatusCode::kOk);
  using Bad = std::tuple<int64_t, int64_t, Unfinished>;
  for (const Bad& bad : std::vector<Bad>{{3, 0, {}},
                                         {-1, 0, {}},
                                         {0, 4, {}},
                                         {2, 1, {}},
                                         {0, 2, {{2, 0}}},  // Not taken.
                                         {0, 2, {{3, 0}}},
                                         {0, 2, {{0, -1}}}}) {
    EXPECT_EQ(std::apply(restore, bad), absl::StatusCode::kDataLoss);
  }
}

// The expected state: how much of each item of the present epoch was trained,
// and which worker has which item. Copied when the queue is saved.
struct Accounts {
  int64_t epoch = 0;
  std::map<int64_t, int64_t> trained;  // Samples by index.
  std::set<int64_t> finished;
};

constexpr int64_t kSamplesPerItem = 6;
constexpr int64_t kEpochs = 3;

// Trains with workers that come and go, saves and restores, in any order.
// A worker gets an item at the sample where the last worker has left it. No
// worker gets an item that another one has. An epoch ends when all items have
// been trained.
class RandomTraining {
 public:
  explicit RandomTraining(uint32_t seed) : random_(seed) {
    options_ = LetteredItems(Draw(5) + 1, kEpochs);
    options_.set_shuffle(Draw(2) == 0);
    options_.set_seed(seed);
    queue_.emplace("q", options_);
    Save();
  }

  void Run() {
    int step = 0;
    while (queue_->stats().epoch() < kEpochs) {
      ASSERT_LT(++step, 100000);
      const uint32_t worker = Draw(4);
      switch (Draw(12)) {
        case 0:
          Die(worker);
          break;
        case 1:
          if (Draw(8) == 0) Restore();
          break;
        case 2:
          if (Draw(8) == 0) Save();
          break;
        case 3:
          EndEpoch();
          break;
        default:
          Train(worker);
      }
      if (testing::Test::HasFatalFailure()) return;
    }
  }

 private:
  struct Holder {
    uint64_t incarnation = 0;
    std::optional<WorkItem> item;
  };

  uint32_t Draw(uint32_t below) { return random_() % below; }

  void Train(uint32_t worker) {
    Holder& holder = holders_[worker];
    if (holder.incarnation == 0) holder.incarnation = next_incarnation_++;
    if (!holder.item.has_value() || Draw(6) == 0) {
      const auto taken = queue_->Take(worker, holder.incarnation);
      if (!taken.has_value()) return;
      if (holder.item.has_value()) {
        ASSERT_EQ(taken->index(), holder.item->index());
      } else {
        for (const auto& [other, its] : holders_) {
          ASSERT_FALSE(its.item.has_value() &&
                       its.item->index() == taken->index())
              << "two have item " << taken->index();
        }
      }
      ASSERT_EQ(taken->epoch(), accounts_.epoch);
      ASSERT_EQ(accounts_.finished.count(taken->index()), 0u);
      ASSERT_EQ(taken->offset(), accounts_.trained[taken->index()]);
      holder.item = taken;
      return;
    }
    WorkItem& item = *holder.item;
    if (item.offset() == kSamplesPerItem) {
      for (int i = Draw(2); i >= 0; --i) {
        ASSERT_TRUE(
            queue_
                ->Finish(worker, holder.incarnation, item.epoch(), item.index())
                .ok());
      }
      accounts_.finished.insert(item.index());
      holder.item.reset();
      return;
    }
    item.set_offset(
        std::min<int64_t>(item.offset() + 1 + Draw(3), kSamplesPerItem));
    ASSERT_TRUE(queue_
                    ->Advance(worker, holder.incarnation,
                              ProgressOf("q", item.epoch(), item.index(),
                                         item.offset()))
                    .ok());
    accounts_.trained[item.index()] = item.offset();
  }

  void Die(uint32_t worker) {
    holders_.erase(worker);
    queue_->ReturnItems([&](uint32_t other, uint64_t incarnation) {
      const auto it = holders_.find(other);
      return it != holders_.end() && it->second.incarnation == incarnation;
    });
  }

  void EndEpoch() {
    queue_->EndEpochIfFinished();
    if (queue_->stats().epoch() == accounts_.epoch) return;
    ASSERT_EQ(accounts_.finished.size(), options_.items().size());
    for (const auto& [index, samples] : accounts_.trained) {
      ASSERT_EQ(samples, kSamplesPerItem);
    }
    accounts_ = {};
    accounts_.epoch = queue_->stats().epoch();
  }

  void Save() {
    saved_accounts_ = accounts_;
    saved_ = queue_->state();
  }

  void Restore() {
    ASSERT_EQ(DescribeDifference(saved_.options(), options_), "");
    queue_.emplace("q", saved_.options());
    ASSERT_TRUE(queue_->Restore(saved_).ok());
    accounts_ = saved_accounts_;
    holders_.clear();
  }

  std::mt19937 random_;
  WorkQueueOptions options_;
  std::optional<WorkQueue> queue_;
  uint64_t next_incarnation_ = 1;
  std::map<uint32_t, Holder> holders_;
  Accounts accounts_;
  SavedWorkQueue saved_;
  Accounts saved_accounts_;
};

TEST(WorkQueueTest, EverySampleIsAccountedOnceWhateverHappens) {
  for (uint32_t seed = 0; seed < 1000; ++seed) {
    SCOPED_TRACE(seed);
    RandomTraining(seed).Run();
    if (HasFatalFailure()) return;
  }
}

}  // namespace
}  // namespace tfswitch
