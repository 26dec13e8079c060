// Rows that are read before the step that uses them.

#ifndef TFSWITCH_CC_CLIENT_PREFETCHES_H_
#define TFSWITCH_CC_CLIENT_PREFETCHES_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "cc/base/hash.h"
#include "cc/base/mutex.h"
#include "cc/client/parameter_client.h"
#include "cc/client/server_capability.h"
#include "cc/table/table_config.h"

namespace tfswitch {

// A set of keys that may have more keys than were given to it, about one in 30.
//
// Thread-safe after construction.
class KeyBits {
 public:
  // All keys.
  KeyBits() : mask_(0), bits_({~uint64_t{0}}) {}
  explicit KeyBits(absl::Span<const Key> keys);
  bool MayContain(Key key) const {
    const uint64_t hash = HashKey(key) & mask_;
    return (bits_[hash / 64] >> (hash % 64) & 1) != 0;
  }

 private:
  uint64_t mask_;
  std::vector<uint64_t> bits_;
};

// The prefetches of a cluster's tables by this process.
//
// A ticket has the rows of one batch of one table. It begins before the batch
// is used. If it is exact, its rows stay those that a lookup would read now:
// each push of this process marks the ticket's keys that it changes, and when
// it has been applied, their rows are read again. A key that an earlier ticket
// has, too, is read only after that ticket's push, because that push will
// change it. With dense updates, each push changes the rows of all keys. The
// rows of a bsp table do not change by pushes, but by rounds, each of which may
// change the rows of all keys.
//
// If other processes evict, erase, assign or restore rows of the table, each
// ticket that was read before is dropped when this process learns of it, which
// is at its next push or prefetch.
//
// Prefetches make no rows. If a training lookup uses a key without a row, its
// first value is computed here. Its row is made by the push of the lookup's
// gradient, or by InsertUsed(), before anything can see that it is not there.
//
// Thread-safe.
class Prefetches {
 public:
  struct Options {
    bool is_exact = true;
    // The lookup that the tickets are for. Beyond `limit` tickets of one
    // source, its oldest is dropped.
    uint64_t source = 0;
    size_t limit = 1;
  };
  struct Stats {
    int64_t num_hits = 0;    // Lookups that used a ticket.
    int64_t num_late = 0;    // Hits that had to wait.
    int64_t num_misses = 0;  // Lookups that found no ticket of their ids.
    int64_t num_unused = 0;  // Tickets that were dropped.
    int64_t num_held = 0;    // Tickets that wait for their lookup.
    // The age of the rows, summed over all hits: pushes of this process, and
    // known pushes of others, that were made after the rows were read.
    int64_t own_pushes = 0;
    int64_t other_pushes = 0;

    void Add(const Stats& other) {
      num_hits += other.num_hits;
      num_late += other.num_late;
      num_misses += other.num_misses;
      num_unused += other.num_unused;
      num_held += other.num_held;
      own_pushes += other.own_pushes;
      other_pushes += other.other_pushes;
    }
  };
  struct Ticket;

  explicit Prefetches(ParameterClient* client);
  ~Prefetches();
  Prefetches(const Prefetches&) = delete;
  Prefetches& operator=(const Prefetches&) = delete;

  // Begins a ticket. Its rows are read by Run(). Null if the table cannot have
  // tickets: its optimizer is not chosen yet, or a server is too old.
  std::shared_ptr<Ticket> Begin(const TableConfig& config,
                                absl::Span<const Key> keys,
                                const Options& options);
  // Reads the rows of tickets. Blocks. A ticket whose rows could not be read is
  // dropped, so that its lookup reports the error.
  void Run(const std::vector<std::shared_ptr<Ticket>>& tickets);

  // Drops tickets that will not be run.
  void Abandon(const std::vector<std::shared_ptr<Ticket>>& tickets);

  // Writes the rows of `keys`, if there is a ticket with exactly these keys,
  // and returns true. May wait for the ticket. `inserts` is true for training.
  absl::StatusOr<bool> Use(const TableConfig& config,
                           absl::Span<const Key> keys, bool inserts, float day,
                           float* embeddings, const LentThreads* threads);

  // Must be called before a push with distinct keys is sent. Returns a number
  // for PushEnded().
  absl::StatusOr<uint64_t> PushBegins(const PushArgs& push);
  // Must be called when the push has ended. Returns whether ReadAgain() should
  // be called.
  bool PushEnded(const std::string& table, uint64_t push, bool is_applied);
  // Must be called when rounds of bsp tables may have been applied. Returns as
  // PushEnded() does.
  bool RoundEnded();
  // Reads rows again that pushes or rounds have changed. Blocks.
  void ReadAgain();

  // Makes the rows of keys that training has used and no push has made. After
  // an error, a later call tries again. Ignores tables that were lost or
  // dropped.
  absl::Status InsertUsed(float day);
  // Drops the tickets of a source, or, if it is 0, all of them. Rows that other
  // calls than pushes may have changed must be read again.
  void Drop(uint64_t source);

  std::map<std::string, Stats> stats() const;

 private:
  struct TableState;
  struct OpenPush;
  // Rows of a ticket to read after the change with this number.
  struct Fetch {
    std::shared_ptr<Ticket> ticket;
    uint64_t change = 0;
    std::vector<size_t> places;
    std::vector<Key> keys;
    std::vector<float> rows;
  };

  TableState& StateOf(const std::string& table)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Whether each push changes all rows of the table, and not only those of its
  // keys. Nothing if the table cannot have tickets.
  std::optional<bool> ChangesAllRows(const TableConfig& config);
  // Adds the rows of the ticket that may now be read to `fetches_`.
  void ReadLater(const std::shared_ptr<Ticket>& ticket, uint64_t change)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Reads the rows of all fetches.
  absl::Status Read(std::vector<Fetch>* fetches);
  // Copies the rows to their tickets, or drops these if there was an error.
  void Store(const absl::Status& status, const std::vector<Fetch>& fetches)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // The places of a ticket whose rows are now to be read: those of the last
  // change `change` (0: none), except for rows that a push in flight changes,
  // and those that a push that has not begun yet will probably change.
  std::vector<size_t> PlacesToRead(const Ticket& ticket, uint64_t change)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  std::shared_ptr<Ticket> Take(const TableConfig& config,
                               absl::Span<const Key> keys);
  // Waits until the ticket has its rows, or is dropped.
  absl::Status WaitFor(const Ticket& ticket);
  // Counts the use of a ticket. False if the ticket must not be used, because
  // it was dropped, or rows have changed other than by pushes.
  bool CountUse(const Ticket& ticket);
  // Reads the rows that a ticket still lacks. The caller has waited for it.
  absl::Status Complete(const std::shared_ptr<Ticket>& ticket);
  // Replaces the marks of missing rows by their values.
  absl::Status FillMissing(const TableConfig& config, bool inserts, float day,
                           Ticket* ticket);
  absl::Status Insert(const std::string& table, int dim,
                      absl::Span<const Key> keys, float day,
                      absl::Span<float> rows = {});

  ParameterClient* const client_;
  ServerCapability marks_missing_;

  Mutex insert_mutex_;  // Held by InsertUsed(), before mutex_.
  mutable Mutex mutex_;
  CondVar changed_;
  std::map<std::string, std::unique_ptr<TableState>> tables_
      ABSL_GUARDED_BY(mutex_);
  uint64_t last_change_ ABSL_GUARDED_BY(mutex_) = 0;
  std::vector<Fetch> fetches_ ABSL_GUARDED_BY(mutex_);
  std::atomic<bool> has_tickets_{false};  // Whether there ever was one.
  std::atomic<bool> has_used_{false};     // Whether InsertUsed() has work.
};

}  // namespace tfswitch

#endif  // TFSWITCH_CC_CLIENT_PREFETCHES_H_
