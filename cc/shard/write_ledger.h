// Remembers which writes a shard has applied (pushes, assignments, erasures,
// created and dropped tables), so that a repeated write is not applied twice.

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

// Keeps for each client the last `kWindow` sequences, each with the count of
// its answer. Older sequences are refused. Keeps for each caller the
// `kMaxClients` clients that wrote last, and at most `kMaxOfAll` clients in
// all. So memory is bounded.
//
// A forgotten client counts as a new one: if it repeats a write, the write is
// applied again. For this, `kMaxClients` other clients of the same caller must
// write while the client repeats its write. Or all callers together must reach
// `kMaxOfAll` clients, and this caller must have the most.
//
// A write has two steps: Begin() claims its sequence, End() reports the result.
// A repetition waits while the first call is being applied.
//
// Thread-safe.
class WriteLedger {
 public:
  // A client that sends pushes in parts reserves eight sequences for each push.
  // It must have fewer than 8,192 pushes in flight: a step has one push per
  // table, and the last may be applied first.
  static constexpr uint64_t kWindow = 8 * 8192;
  static constexpr size_t kMaxClients = 4096;
  static constexpr size_t kMaxOfAll = 16 * kMaxClients;

  enum class Verdict { kApply, kDuplicate };

  // Returns kDuplicate if the sequence has been applied, and sets `*count`
  // (unless null) to the count that was given to End(). Waits while the
  // sequence is being applied. After kApply the caller must call End().
  // FailedPrecondition if it is no longer known whether the sequence has been
  // applied.
  absl::StatusOr<Verdict> Begin(const PushId& id, int64_t* count = nullptr);

  // Returns the whole state; for each caller the client that wrote longest ago
  // comes first. Restore() puts it into an empty ledger. The state does not
  // name callers: a restored client belongs to the caller of its next call.
  std::vector<checkpoint::WriteMark> Marks() const;
  void Restore(absl::Span<const checkpoint::WriteMark> marks);

  // Ends what Begin() began. If not `applied`, the sequence may be tried again.
  // Repetitions are answered with `count`.
  void End(const PushId& id, bool applied, int64_t count = 0);

 private:
  // The clients of a caller; the one that wrote last comes first.
  using Recent = std::list<uint64_t>;

  struct Client {
    uint64_t caller = 0;
    uint64_t highest = 0;
    std::unordered_map<uint64_t, int64_t> applied;  // Within the window.
    std::unordered_set<uint64_t> in_progress;       // Between Begin and End.
    Recent::iterator recency;
  };

  Client& Touch(const PushId& id) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Forgets the client that wrote longest ago. Skips `kept`, and clients with a
  // write between Begin() and End().
  void ForgetOneOf(Recent* recent, uint64_t kept)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  mutable Mutex mutex_;
  CondVar ended_;
  std::unordered_map<uint64_t, Client> clients_ ABSL_GUARDED_BY(mutex_);
  // The keys are callers. Caller 0 has the clients of this process, and
  // restored ones.
  std::unordered_map<uint64_t, Recent> recent_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace tfswitch

#endif  // TFSWITCH_CC_SHARD_WRITE_LEDGER_H_
