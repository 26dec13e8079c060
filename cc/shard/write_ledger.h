// Remembers which writes a shard has applied, so that a repeated write is not
// applied twice. Writes are pushes, assignments, erasures, and calls that
// create or drop a table.

#ifndef TFSWITCH_CC_SHARD_WRITE_LEDGER_H_
#define TFSWITCH_CC_SHARD_WRITE_LEDGER_H_

#include <cstdint>
#include <list>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "cc/base/mutex.h"
#include "cc/checkpoint/checkpoint.h"
#include "cc/wire/row_calls.h"

namespace tfswitch {

// Remembers for each client the last `kWindow` sequence numbers, each with the
// count in its answer. Older numbers are refused. A caller is a user that the
// server has authenticated, and may have many clients. For each caller the
// ledger remembers the `kMaxClients` clients that wrote last, and at most
// `kMaxOfAll` clients in all. So its memory is bounded.
//
// A forgotten client counts as a new one. If it then repeats a write, the write
// is applied again. For this, `kMaxClients` other clients of the same caller
// must write between the write and its repetition. Or all callers together must
// reach `kMaxOfAll` clients, and this caller must have the most.
//
// A write has two steps: Begin() claims its sequence number, End() reports the
// result. If a write is repeated while it is being applied, the repetition
// waits.
//
// Thread-safe.
class WriteLedger {
 public:
  // A client that sends pushes in parts reserves eight sequence numbers for
  // each push. The window allows it 8,192 pushes in flight. That is enough for
  // a step with one push per table, even if the last push is applied first.
  static constexpr uint64_t kWindow = 8 * 8192;
  static constexpr size_t kMaxClients = 4096;
  static constexpr size_t kMaxOfAll = 16 * kMaxClients;

  enum class Verdict { kApply, kDuplicate };

  // Returns kDuplicate if the sequence has been applied, and sets `*count`
  // (unless null) to the count that End() was given. Waits while the sequence
  // is being applied. After kApply the caller must call End().
  // FailedPrecondition if the ledger no longer knows whether the sequence has
  // been applied.
  absl::StatusOr<Verdict> Begin(const PushId& id, int64_t* count = nullptr);

  // Returns the whole state. For each caller the client that wrote longest ago
  // is first. Restore() sets the state of an empty ledger. The state does not
  // name callers: a restored client belongs to the caller of its next call.
  std::vector<checkpoint::WriteMark> Marks() const;
  void Restore(absl::Span<const checkpoint::WriteMark> marks);

  // Ends what Begin() has begun. If `applied`, later repetitions get the answer
  // `count`. If not, the sequence may be tried again.
  void End(const PushId& id, bool applied, int64_t count = 0);

 private:
  // The clients of a caller; the one that wrote last is first.
  using Recent = std::list<uint64_t>;

  struct Client {
    uint64_t caller = 0;
    uint64_t highest = 0;
    std::unordered_map<uint64_t, int64_t> applied;  // Only in the window.
    std::unordered_set<uint64_t> in_progress;       // Between Begin and End.
    Recent::iterator recency;
  };

  Client& Touch(const PushId& id) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Forgets the client that wrote longest ago. Keeps `kept`, and clients that
  // have a write between Begin() and End().
  void ForgetOneOf(Recent* recent, uint64_t kept)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  mutable Mutex mutex_;
  CondVar ended_;
  std::unordered_map<uint64_t, Client> clients_ ABSL_GUARDED_BY(mutex_);
  // The keys are callers. Caller 0 has the clients of this process and the
  // restored clients.
  std::unordered_map<uint64_t, Recent> recent_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace tfswitch

#endif  // TFSWITCH_CC_SHARD_WRITE_LEDGER_H_
