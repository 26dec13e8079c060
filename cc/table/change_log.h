// Records which rows have changed since a given moment.
//
// Time is counted in epochs of a table. A row that changes is stamped with the
// current epoch. A reader of changes ends the epoch, waits for changes begun in
// it, and reads the rows whose stamps are later than its last visit. It may get
// a row that changes meanwhile twice, but misses none, however many other
// readers there are.
//
// The stamp of a key never goes down, although a change may begin in one epoch
// and reach the key in the next one: a reader that learns that a row was lost
// must also learn of the row that the key has got since then.
//
// A snapshot ends an epoch, too. A row with an earlier stamp is as it was then;
// the thread that changes it first keeps a copy (table/row_undo_log.h).

#ifndef TFSWITCH_CC_TABLE_CHANGE_LOG_H_
#define TFSWITCH_CC_TABLE_CHANGE_LOG_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "cc/base/hash.h"
#include "cc/base/mutex.h"
#include "cc/base/racy_memory.h"

namespace tfswitch {

// A moment in the life of one server's part of a table.
struct ChangeCursor {
  uint64_t log_id = 0;  // Known to this log only. 0: none.
  uint32_t epoch = 0;   // Later changes have stamps above it.

  friend bool operator==(const ChangeCursor& a, const ChangeCursor& b) {
    return a.log_id == b.log_id && a.epoch == b.epoch;
  }
};

// The epoch in which a change was made.
struct ChangeStamp {
  uint32_t epoch = 0;  // For the row; 0 while nobody reads changes.
  // A row with a stamp below this must be kept for a snapshot. 0: no snapshot.
  uint32_t keeps_below = 0;
};

// Stamps a row whose bucket is locked, or that nobody else can change.
TFSWITCH_ALWAYS_INLINE void RaiseStamp(uint32_t* stamp, uint32_t epoch) {
  if (RacyLoad(stamp) < epoch) RacyStore(stamp, epoch);
}

// Counts epochs, and the threads at work in them.
//
// Thread-safe.
class ChangeClock {
 public:
  // Held while rows are being changed.
  class Change {
   public:
    explicit Change(ChangeClock* clock)
        : clock_(clock), epoch_(clock->Enter()) {}
    ~Change() { clock_->Leave(epoch_); }
    Change(const Change&) = delete;
    Change& operator=(const Change&) = delete;

    // For changes from now on. Where a key gets or loses its row, "now" is
    // after the mutex of its stripe was locked.
    ChangeStamp stamp() const {
      const uint32_t epoch =
          clock_->epoch_.load(std::memory_order_relaxed) & ~kHeld;
      return {epoch > kFirstEpoch ? epoch : 0,
              clock_->keeps_below_.load(std::memory_order_relaxed)};
    }

   private:
    ChangeClock* const clock_;
    const uint32_t epoch_;
  };

  // Ends the epoch, and returns it once all changes that began in it have been
  // made. From the first call on changes have stamps.
  uint32_t EndEpoch();

  bool is_running() const {
    return (epoch_.load(std::memory_order_acquire) & ~kHeld) > kFirstEpoch;
  }

  // No row is being changed from the end of Hold() to Release(), which the same
  // thread calls: changes that have begun are over, and others wait. No change
  // may begin inside another one.
  void Hold() ABSL_NO_THREAD_SAFETY_ANALYSIS;
  void Release() ABSL_NO_THREAD_SAFETY_ANALYSIS;

  // Ends the epoch, and returns it: changes after Release() keep the rows of
  // this moment. REQUIRES: between Hold() and Release(), by their thread.
  uint32_t BeginSnapshot();
  // Changes that have begun may still keep rows.
  void EndSnapshot() { keeps_below_.store(0); }

 private:
  // Before the first call of EndEpoch().
  static constexpr uint32_t kFirstEpoch = 1;
  // Set in the epoch while changes wait.
  static constexpr uint32_t kHeld = uint32_t{1} << 31;

  uint32_t Enter();
  void Leave(uint32_t epoch) {
    at_work_[epoch % 2].fetch_sub(1, std::memory_order_release);
  }

  std::atomic<uint32_t> epoch_{kFirstEpoch};
  std::atomic<uint32_t> keeps_below_{0};
  // In epochs of either parity: an epoch ends when nobody is in the one before.
  std::atomic<int64_t> at_work_[2] = {};
  Mutex mutex_;  // One end at a time.
};

// Keys of one stripe that have lost their row, or their record while they
// waited for one: nothing is left of these that could have a stamp.
//
// Thread-compatible: guarded by the mutex of the stripe.
class KeyChanges {
 public:
  // Remembers at most about so many keys.
  static constexpr size_t kMaxKeys = size_t{1} << 20;
  explicit KeyChanges(size_t max_keys = kMaxKeys) : max_keys_(max_keys) {}

  void Add(Key key, uint32_t stamp);

  // Whether all losses after `epoch` are still known.
  bool Knows(uint32_t epoch) const { return forgotten_ <= epoch; }
  // The keys with stamps above `epoch`; some may repeat.
  std::vector<Key> Since(uint32_t epoch) const;

  size_t resident_bytes() const { return entries_.capacity() * sizeof(Entry); }

 private:
  struct Entry {
    Key key;
    uint32_t stamp;
  };

  // Keeps one entry of each key, and if these are still many, the later ones.
  void Compact();

  const size_t max_keys_;
  std::vector<Entry> entries_;
  uint32_t forgotten_ = 0;  // The highest stamp that is.
};

}  // namespace tfswitch

#endif  // TFSWITCH_CC_TABLE_CHANGE_LOG_H_
