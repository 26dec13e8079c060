// Which rows have changed since when.
//
// Time is counted in epochs of a table. A row that changes is stamped with the
// epoch of that moment; whoever wants the changes ends the epoch, waits for
// changes begun in it, and reads the rows with later stamps than its last time.
// A row that changes meanwhile may come once too often, but none is missed,
// whoever else reads changes and how often.
//
// Stamps of a key never go down, although a change may begin in one epoch and
// come to the key in the next one: a reader that is told of the loss of a row
// must be told of the row that the key has got since then, too.
//
// A snapshot ends an epoch, too. A row with an earlier stamp is as it was then;
// whoever changes it first keeps a copy (table/former_rows.h).

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
  uint64_t log_id = 0;  // Another log knows nothing of it. 0: none.
  uint32_t epoch = 0;   // Later changes have stamps above it.

  friend bool operator==(const ChangeCursor& a, const ChangeCursor& b) {
    return a.log_id == b.log_id && a.epoch == b.epoch;
  }
};

// When a change was made.
struct ChangeStamp {
  uint32_t epoch = 0;  // For the row; 0 while nobody wants to know.
  // A row with a stamp below it is to be kept for a snapshot. 0: there is none.
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
