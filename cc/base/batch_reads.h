// Reads many blocks of files at the same time.

#ifndef TFSWITCH_CC_BASE_BATCH_READS_H_
#define TFSWITCH_CC_BASE_BATCH_READS_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/types/span.h"
#include "cc/base/mutex.h"
#include "cc/base/thread_pool.h"

namespace tfswitch {

struct FileRead {
  int fd;
  uint64_t offset;
  uint32_t size;
  char* to;
};

// Uses io_uring, or threads that call pread() where the kernel has no io_uring
// or a sandbox forbids it. If there is no memory for another ring, a batch is
// read one block after another.
//
// Thread-safe.
class BatchReads {
 public:
  // Tests may choose threads.
  explicit BatchReads(bool uses_ring = true);
  ~BatchReads();
  BatchReads(const BatchReads&) = delete;
  BatchReads& operator=(const BatchReads&) = delete;

  // Reads all blocks. Calls done(i, whole) for each, from any thread of this
  // object or from the calling one. `whole` is false if the read failed or
  // was short: the caller then reads again to get the error.
  void Run(absl::Span<const FileRead> reads,
           absl::FunctionRef<void(size_t i, bool whole)> done);

 private:
  class Ring;
  std::unique_ptr<Ring> TakeRing();

  Mutex mutex_;
  std::vector<std::unique_ptr<Ring>> rings_ ABSL_GUARDED_BY(mutex_);
  // Null if io_uring works. Constant after construction.
  std::unique_ptr<ThreadPool> threads_;
};

}  // namespace tfswitch

#endif  // TFSWITCH_CC_BASE_BATCH_READS_H_
