// Which writes a shard has applied (pushes, assignments, erasures, created and
// dropped tables), so that a write repeated by a retry is not applied twice.

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

// Keeps, for each client, a window of the last `kWindow` sequences, each with
// the count that its answer had; a sequence older than the window is refused.
// Remembers, for each caller, the `kMaxClients` clients heard of last, and
// `kMaxOfAll` in all. Memory is bounded by these.
//
// A client that has been forgotten is a new one: if a write of it is repeated
// after that, it is applied again. This takes `kMaxClients` others of the same
// caller that write while the client repeats its write, or so many callers that
// kMaxOfAll is reached and this one has the most.
//
// A write goes through two steps: Begin() claims its sequence, End() says how
// it went. A repetition that arrives while the first is still being applied
// waits for it.
//
// Thread-safe.
class WriteLedger {
 public:
  // A client that sends its pushes in parts gives each of them eight. It must
  // have fewer than 8,192 under way at once: a step of many tables is that many
  // pushes, and the last may be applied first.
  static constexpr uint64_t kWindow = 8 * 8192;
  static constexpr size_t kMaxClients = 4096;
  static constexpr size_t kMaxOfAll = 16 * kMaxClients;

  enum class Verdict { kApply, kDuplicate };

  // kDuplicate if the sequence has been applied: `*count`, which may be null,
  // is the count given to End(). Waits while it is being applied. After kApply
  // the caller must call End(). FailedPrecondition if it is not known any more
  // whether the sequence has been applied.
  absl::StatusOr<Verdict> Begin(const PushId& id, int64_t* count = nullptr);

  // All that it remembers, for each caller from the client heard of longest ago
  // to the last; and the way back, into an empty ledger. It does not say who
  // the callers were: a client belongs to the one that it next calls as.
  std::vector<checkpoint::WriteMark> Marks() const;
  void Restore(absl::Span<const checkpoint::WriteMark> marks);

  // `applied` false gives the sequence free for another try. A repetition is
  // answered with `count`.
  void End(const PushId& id, bool applied, int64_t count = 0);

 private:
  // Clients of a caller, the last heard of first.
  using Recent = std::list<uint64_t>;

  struct Client {
    uint64_t caller = 0;
    uint64_t highest = 0;
    std::unordered_map<uint64_t, int64_t> applied;  // Within the window.
    std::unordered_set<uint64_t> in_progress;       // Between Begin and End.
    Recent::iterator recency;
  };

  Client& Touch(const PushId& id) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Forgets the client heard of longest ago, but not `kept`, and none with a
  // write under way: its End() must find it.
  void ForgetOneOf(Recent* recent, uint64_t kept)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  mutable Mutex mutex_;
  CondVar ended_;
  std::unordered_map<uint64_t, Client> clients_ ABSL_GUARDED_BY(mutex_);
  // By caller. Caller 0 has the clients of this process, and restored ones.
  std::unordered_map<uint64_t, Recent> recent_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace tfswitch

#endif  // TFSWITCH_CC_SHARD_WRITE_LEDGER_H_
