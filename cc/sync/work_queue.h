// Hands out a data set's items, such as files, to workers that ask for them.
// This is the state machine of tfswitch.data.WorkQueue. It uses no network,
// reads no clock and never waits.
//
// In an epoch every item is handed out, trained and finished:
//
//   not taken yet -> leased to one worker -> finished
//                     ^             |
//                     +- returned <-+  the worker has gone
//
// At the end of each step a worker reports its offset in the item: how far it
// has trained the item. If the worker leaves or dies, its item returns with
// this offset, and the next worker continues there. Returned items are handed
// out first. When all items are finished and EndEpochIfFinished() is called,
// the next epoch begins.
//
// So each sample counts once in an epoch, if the samples up to the reported
// offset count and those after it do not.

#ifndef TFSWITCH_CC_SYNC_WORK_QUEUE_H_
#define TFSWITCH_CC_SYNC_WORK_QUEUE_H_

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "tfswitch/v1/coordination.pb.h"

namespace tfswitch {

// This room uses messages of protos/tfswitch/v1/coordination.proto as its
// types.
using v1::SavedWorkQueue;
using v1::WorkItem;
using v1::WorkProgress;
using v1::WorkQueueOptions;

// InvalidArgument if the options are invalid.
absl::Status Validate(const WorkQueueOptions& options);
// The bytes of memory that the items and their order need.
uint64_t ItemBytes(const WorkQueueOptions& options);

// Describes the difference, as in "epochs: 2 here, 3 asked"; empty if there is
// none.
std::string DescribeDifference(const WorkQueueOptions& here,
                               const WorkQueueOptions& asked);

// Thread-compatible. A worker is identified by its number and its incarnation.
// The same number with another incarnation is a different worker.
class WorkQueue {
 public:
  // REQUIRES: Validate(options) is OK.
  WorkQueue(std::string name, WorkQueueOptions options);

  // The state for a checkpoint, without the group. Restore() sets it in a queue
  // that has the saved options. DataLoss if the state does not fit these
  // options.
  SavedWorkQueue state() const;
  absl::Status Restore(const SavedWorkQueue& state);

  // The state with the workers that have items, and without the options.
  // RestoreSaved() restores it. DataLoss if it does not fit this queue.
  v1::SavedGroup::Queue Save() const;
  absl::Status RestoreSaved(const v1::SavedGroup::Queue& saved);

  // Returns the item that the worker has, or a new one. Nullopt if there is no
  // item to take now, or all epochs are over. A repeated call returns the same
  // item.
  std::optional<WorkItem> Take(uint32_t worker, uint64_t incarnation);

  // Sets the offset of the worker's item to `progress.offset`. An offset that
  // is lower than the present one has no effect. NotFound if the worker does
  // not have this item. InvalidArgument if the offset is negative.
  absl::Status Advance(uint32_t worker, uint64_t incarnation,
                       const WorkProgress& progress);
  // The status that Advance() would return. Changes nothing.
  absl::Status CheckAdvance(uint32_t worker, uint64_t incarnation,
                            const WorkProgress& progress) const;

  // Records that the worker has trained the item to its end. A repeated call
  // returns OK. FailedPrecondition if the worker does not have the item.
  absl::Status Finish(uint32_t worker, uint64_t incarnation, int64_t epoch,
                      int64_t index);

  // Takes their items from all workers for which is_there(worker, incarnation)
  // is false. The items can then be taken again.
  void ReturnItems(
      absl::FunctionRef<bool(uint32_t worker, uint64_t incarnation)> is_there);

  // Sets the offset of an item back to `before`. A worker that has the item
  // loses it. Does nothing unless `before.epoch` is the present epoch.
  void Revoke(const WorkProgress& before);

  // Begins the next epoch if all items of this one are finished.
  void EndEpochIfFinished();

  // Whether no item can be taken until one returns or the epoch ends.
  bool is_exhausted() const {
    return !is_over() && returned_.empty() && num_taken_ == num_items();
  }

  // The offset of the worker's item. REQUIRES: CheckAdvance() is OK.
  int64_t offset_of(uint32_t worker) const {
    return leases_.at(worker).offset();
  }

  const WorkQueueOptions& options() const { return options_; }
  uint64_t item_bytes() const { return item_bytes_; }
  v1::GetWorkQueueStatsResponse stats() const;
  // Describes at most `most` unfinished items of the present epoch. If there
  // are more, a last text says how many.
  std::vector<std::string> Unfinished(size_t most) const;

 private:
  using Lease = v1::SavedGroup::Lease;

  bool is_over() const { return epoch_ >= options_.num_epochs(); }
  int64_t num_items() const { return options_.items_size(); }
  int64_t num_finished() const {
    return num_taken_ - static_cast<int64_t>(returned_.size()) -
           static_cast<int64_t>(leases_.size());
  }
  void BeginEpoch(int64_t epoch);
  // Sets the epoch and num_taken, and copies returned_ to `unfinished`.
  void SetState(SavedWorkQueue* state) const;
  std::string Describe(int64_t epoch, int64_t index) const;
  std::string DescribeLoss(uint32_t worker, int64_t epoch, int64_t index) const;

  const std::string name_;
  const WorkQueueOptions options_;
  const uint64_t item_bytes_;
  int64_t epoch_ = 0;
  // Indices of items, in the order in which they are handed out.
  std::vector<int64_t> order_;
  // How many of `order_` were taken.
  int64_t num_taken_ = 0;
  // Item -> offset.
  std::map<int64_t, int64_t> returned_;
  // The keys are workers.
  std::map<uint32_t, Lease> leases_;
  // The item that each worker finished last. It shows that a Finish() is a
  // repeated call.
  std::map<uint32_t, Lease> last_finished_;
  int64_t reissued_ = 0;
};

}  // namespace tfswitch

#endif  // TFSWITCH_CC_SYNC_WORK_QUEUE_H_
