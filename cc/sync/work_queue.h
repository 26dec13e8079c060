// Hands out a data set's items (files, as a rule) to whichever worker comes:
// the state machine behind tfswitch.data.WorkQueue. It knows no network, reads
// no clock and never waits.
//
// In an epoch every item is handed out, worked on and finished:
//
//   not taken yet -> leased to one worker -> finished
//                     ^             |
//                     +- returned <-+  the worker has gone
//
// A worker says with the end of each step how far it has come in its item, so
// one that has gone returns it with that offset, and the next worker to take it
// goes on from there. Returned items are handed out first. The epoch ends when
// all items are finished and somebody asks for it, and the next one begins.
//
// So each sample is accounted once in an epoch, as long as the samples that a
// worker has advanced over count, and no others of it do.

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

// The messages of protos/tfswitch/v1/coordination.proto are the values here.
using v1::SavedWorkQueue;
using v1::WorkItem;
using v1::WorkProgress;
using v1::WorkQueueOptions;

// InvalidArgument if the options make no sense.
absl::Status Validate(const WorkQueueOptions& options);
// The memory of the items, and of their order.
uint64_t ItemBytes(const WorkQueueOptions& options);

// The difference, in words: "epochs: 2 here, 3 asked"; empty if there is none.
std::string DescribeDifference(const WorkQueueOptions& here,
                               const WorkQueueOptions& asked);

// Thread-compatible. Calls that depend on a worker take its incarnation, too:
// another one is another worker.
class WorkQueue {
 public:
  // REQUIRES: Validate(options) is OK.
  WorkQueue(std::string name, WorkQueueOptions options);

  // The state kept in a checkpoint, without the group; and the way back, to a
  // queue of the saved options. DataLoss if the state does not fit them.
  SavedWorkQueue state() const;
  absl::Status Restore(const SavedWorkQueue& state);

  // All of it but the options, with the holders of items; and the way back.
  // DataLoss if it is not of such a queue.
  v1::SavedGroup::Queue Save() const;
  absl::Status RestoreSaved(const v1::SavedGroup::Queue& saved);

  // The item that the worker has, or a new one; none if there is none now, or
  // all epochs are over. Repeating it is OK.
  std::optional<WorkItem> Take(uint32_t worker, uint64_t incarnation);

  // The worker has come to `progress.offset`; not further back than it was.
  // NotFound if it does not have this item, InvalidArgument if the offset is
  // negative.
  absl::Status Advance(uint32_t worker, uint64_t incarnation,
                       const WorkProgress& progress);
  // The status that Advance() would return.
  absl::Status CheckAdvance(uint32_t worker, uint64_t incarnation,
                            const WorkProgress& progress) const;

  // Nothing is left of the item. Repeating it is OK; FailedPrecondition if the
  // worker does not have it.
  absl::Status Finish(uint32_t worker, uint64_t incarnation, int64_t epoch,
                      int64_t index);

  // Returns the items of all workers for which is_there(worker, incarnation) is
  // false.
  void ReturnItems(
      absl::FunctionRef<bool(uint32_t worker, uint64_t incarnation)> is_there);

  // The progress from `before` on does not count after all, and the worker that
  // has the item loses it. Ignored unless `before.epoch` is the present one.
  void Revoke(const WorkProgress& before);

  // Begins the next epoch if all items of this one are finished.
  void EndEpochIfFinished();

  // Whether there is nothing to take until somebody returns an item, or the
  // epoch ends.
  bool is_exhausted() const {
    return !is_over() && returned_.empty() && num_taken_ == num_items();
  }

  // How far the item is that the worker has; REQUIRES: CheckAdvance() is OK.
  int64_t offset_of(uint32_t worker) const {
    return leases_.at(worker).offset();
  }

  const WorkQueueOptions& options() const { return options_; }
  uint64_t item_bytes() const { return item_bytes_; }
  v1::GetWorkQueueStatsResponse stats() const;
  // The first items of the present epoch that are not finished, `most` of them
  // and how many more there are.
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
  // Sets the epoch, num_taken and `unfinished`, as returned_ has them.
  void SetState(SavedWorkQueue* state) const;
  std::string Describe(int64_t epoch, int64_t index) const;
  std::string DescribeLoss(uint32_t worker, int64_t epoch, int64_t index) const;

  const std::string name_;
  const WorkQueueOptions options_;
  const uint64_t item_bytes_;
  int64_t epoch_ = 0;
  std::vector<int64_t> order_;           // Indices, as they are handed out.
  int64_t num_taken_ = 0;                // So many of `order_`.
  std::map<int64_t, int64_t> returned_;  // Offsets by index.
  std::map<uint32_t, Lease> leases_;     // One a worker at most.
  // The item that each worker finished last, so that it may say so again.
  std::map<uint32_t, Lease> last_finished_;
  int64_t reissued_ = 0;
};

}  // namespace tfswitch

#endif  // TFSWITCH_CC_SYNC_WORK_QUEUE_H_
