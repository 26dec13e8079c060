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

namespace tfswitch {

// Keeps, for each client, a window of the last `kWindow` sequences, each with
// the count that its answer had; a sequence older than the window is refused.
// Remembers the `kMaxClients` clients heard of last. Memory is bounded by both.
//
// A client that has been forgotten is a new one: if a write of it is repeated
// after that, it is applied again. This takes `kMaxClients` others that write
// while the client repeats its write.
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

  enum class Verdict { kApply, kDuplicate };

  // kDuplicate if the sequence has been applied: `*count`, which may be null,
  // is the count given to End(). Waits while it is being applied. After kApply
  // the caller must call End(). FailedPrecondition if it is not known any more
  // whether the sequence has been applied.
  absl::StatusOr<Verdict> Begin(uint64_t client_id, uint64_t sequence,
                                int64_t* count = nullptr);

  // All that it remembers, from the client heard of longest ago to the last;
  // and the way back, into an empty ledger.
  std::vector<checkpoint::WriteMark> Marks() const;
  void Restore(absl::Span<const checkpoint::WriteMark> marks);

  // `applied` false gives the sequence free for another try. A repetition is
  // answered with `count`.
  void End(uint64_t client_id, uint64_t sequence, bool applied,
           int64_t count = 0);

 private:
  struct Client {
    uint64_t highest = 0;
    std::unordered_map<uint64_t, int64_t> applied;  // Within the window.
    std::unordered_set<uint64_t> in_progress;       // Between Begin and End.
    std::list<uint64_t>::iterator recency;
  };

  Client& Touch(uint64_t client_id) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  mutable Mutex mutex_;
  CondVar ended_;
  std::unordered_map<uint64_t, Client> clients_ ABSL_GUARDED_BY(mutex_);
  std::list<uint64_t> recent_ ABSL_GUARDED_BY(mutex_);  // Last heard of first.
};

}  // namespace tfswitch

#endif  // TFSWITCH_CC_SHARD_WRITE_LEDGER_H_
