// Records which rows have changed since a given moment.
//
// Time is counted in epochs of a table. A changed row gets the number of the
// current epoch as its stamp. A reader of changes ends the epoch, waits for the
// changes that began in it, and then reads the rows with stamps later than its
// last visit. If a row changes at the same time, the reader may get it twice,
// but it misses no row, however many other readers there are.
//
// The stamp of a key never decreases, although a change may begin in one epoch
// and reach the key in the next one. So a reader that is told that a key lost
// its row is also told if the key has got a row since.
//
// A snapshot ends an epoch, too. A row with an earlier stamp has not changed
// since the snapshot. The thread that first changes such a row keeps a copy
// (table/row_undo_log.h).

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

// A moment in the history of one server's part of a table.
struct ChangeCursor {
  uint64_t log_id = 0;  // Known to this log only. 0: none.
  uint32_t epoch = 0;   // Later changes have stamps above it.

  friend bool operator==(const ChangeCursor& a, const ChangeCursor& b) {
    return a.log_id == b.log_id && a.epoch == b.epoch;
  }
};

// The epoch in which a change was made.
struct ChangeStamp {
  // The new stamp of each changed row; 0 while nobody reads changes.
  uint32_t epoch = 0;
  // Before a row with a lower stamp changes, its old state must be copied for a
  // snapshot. 0: there is no snapshot.
  uint32_t keeps_below = 0;
};

// Raises the stamp of a row (the epoch of its last change) to `epoch`, unless
// it is higher already. The caller must have locked the row's bucket, or be the
// only thread that can change the row.
TFSWITCH_ALWAYS_INLINE void RaiseStamp(uint32_t* stamp, uint32_t epoch) {
  if (RacyLoad(stamp) < epoch) RacyStore(stamp, epoch);
}

// Counts epochs, and the threads that change rows in each.
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

    // The stamp for changes that begin now. If a change gives a key a row or
    // removes the key's row, lock the stripe's mutex before this call.
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

  // Ends the epoch, waits for all changes that began in it or before, and
  // returns its number. Before the first call, changes get no stamps.
  uint32_t EndEpoch();
  // Ends the epoch, unless it would have to wait for changes that began before
  // it.
  void TryEndEpoch();

  uint32_t epoch() const {
    return epoch_.load(std::memory_order_acquire) & ~kHeld;
  }
  bool is_running() const { return epoch() > kFirstEpoch; }

  // Hold() waits for changes that have begun. From then until Release(), which
  // the same thread must call, no row changes, and new changes wait. So a
  // thread must not begin a change inside another one.
  void Hold() ABSL_NO_THREAD_SAFETY_ANALYSIS;
  void Release() ABSL_NO_THREAD_SAFETY_ANALYSIS;

  // Ends the epoch, and returns its number. After Release(), a thread that
  // changes a row keeps a copy of its present state. REQUIRES: between Hold()
  // and Release(), in their thread.
  uint32_t BeginSnapshot();
  // Changes that began before this call may still copy rows for the snapshot.
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
  // The number of changes in progress: one counter for even epochs and one for
  // odd ones. An epoch begins only after all changes of the epoch two before it
  // have ended.
  std::atomic<int64_t> at_work_[2] = {};
  Mutex mutex_;  // One end at a time.
};

// Keys of one stripe that have lost their row, or their record as a candidate.
// They are listed here because nothing is left of them that could have a stamp.
//
// Thread-compatible: guarded by the mutex of the stripe.
class KeyChanges {
 public:
  // Remembers at most about so many keys.
  static constexpr size_t kMaxKeys = size_t{1} << 20;
  explicit KeyChanges(size_t max_keys = kMaxKeys) : max_keys_(max_keys) {}

  void Add(Key key, uint32_t stamp);

  // False if keys that lost their row after `epoch` may be missing here.
  bool Knows(uint32_t epoch) const { return forgotten_ <= epoch; }
  // The keys with stamps above `epoch`; some may repeat.
  std::vector<Key> Since(uint32_t epoch) const;

  size_t resident_bytes() const { return entries_.capacity() * sizeof(Entry); }

 private:
  struct Entry {
    Key key;
    uint32_t stamp;
  };

  // Keeps only one entry of each key. If there are still too many, keeps the
  // latest ones.
  void Compact();

  const size_t max_keys_;
  std::vector<Entry> entries_;
  uint32_t forgotten_ = 0;  // The highest stamp that is.
};

}  // namespace tfswitch

#endif  // TFSWITCH_CC_TABLE_CHANGE_LOG_H_
