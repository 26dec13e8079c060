// The part of io_uring that is needed here, by the system calls (man 7
// io_uring): a queue of requests and a queue of results in memory that the
// kernel shares.

#include "cc/base/batch_reads.h"

#include <linux/io_uring.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "cc/base/parallel.h"

namespace tfswitch {
namespace {

// Enough to keep a disk busy.
constexpr unsigned kDepth = 128;
constexpr int kNumThreads = 32;

}  // namespace

// One ring, for one batch at a time.
//
// Thread-compatible.
class BatchReads::Ring {
 public:
  // Null if the kernel refuses.
  static std::unique_ptr<Ring> Create() {
    io_uring_params params = {};
    const auto fd =
        static_cast<int>(syscall(SYS_io_uring_setup, kDepth, &params));
    if (fd < 0) return nullptr;
    auto ring = std::unique_ptr<Ring>(new Ring(fd));
    return ring->Map(params) ? std::move(ring) : nullptr;
  }

  ~Ring() {
    if (entries_ != nullptr) munmap(entries_, kDepth * sizeof(io_uring_sqe));
    if (shared_ != nullptr) munmap(shared_, shared_bytes_);
    close(fd_);
  }
  Ring(const Ring&) = delete;
  Ring& operator=(const Ring&) = delete;

  // False if the kernel refuses reads. No read is in progress then, and the
  // ring can not be used any more.
  bool Run(absl::Span<const FileRead> reads,
           absl::FunctionRef<void(size_t, bool)> done) {
    // Calls done() at the end, because it may throw, and the kernel must not
    // write to memory that the caller then frees.
    std::vector<bool> is_whole(reads.size());
    size_t num_begun = 0;
    unsigned num_queued = 0;
    for (size_t num_done = 0; num_done < reads.size();) {
      for (; num_begun < reads.size() && num_begun - num_done < kDepth;
           ++num_begun, ++num_queued) {
        Queue(reads[num_begun], num_begun);
      }
      const auto taken =
          syscall(SYS_io_uring_enter, fd_, num_queued,
                  /*min_complete=*/1, IORING_ENTER_GETEVENTS, nullptr, 0);
      if (taken >= 0) {
        num_queued -= static_cast<unsigned>(taken);
      } else if (errno != EINTR && num_begun - num_done == num_queued) {
        return false;
      }
      unsigned head = *result_head_;
      const unsigned tail = __atomic_load_n(result_tail_, __ATOMIC_ACQUIRE);
      for (; head != tail; ++head, ++num_done) {
        const io_uring_cqe& result = results_[head & result_mask_];
        const auto i = static_cast<size_t>(result.user_data);
        is_whole[i] = result.res == static_cast<int>(reads[i].size);
      }
      __atomic_store_n(result_head_, head, __ATOMIC_RELEASE);
    }
    for (size_t i = 0; i < reads.size(); ++i) done(i, is_whole[i]);
    return true;
  }

 private:
  explicit Ring(int fd) : fd_(fd) {}

  bool Map(const io_uring_params& params) {
    // Since Linux 5.4 both queues are in one mapping.
    if ((params.features & IORING_FEAT_SINGLE_MMAP) == 0) return false;
    shared_bytes_ = std::max<size_t>(
        params.sq_off.array + params.sq_entries * sizeof(unsigned),
        params.cq_off.cqes + params.cq_entries * sizeof(io_uring_cqe));
    const auto map = [this](size_t bytes, off_t offset) -> char* {
      void* const at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                            MAP_SHARED | MAP_POPULATE, fd_, offset);
      return at != MAP_FAILED ? static_cast<char*>(at) : nullptr;
    };
    shared_ = map(shared_bytes_, IORING_OFF_SQ_RING);
    entries_ = reinterpret_cast<io_uring_sqe*>(
        map(kDepth * sizeof(io_uring_sqe), IORING_OFF_SQES));
    if (shared_ == nullptr || entries_ == nullptr) return false;
    const auto at = [this](unsigned offset) {
      return reinterpret_cast<unsigned*>(shared_ + offset);
    };
    tail_ = at(params.sq_off.tail);
    mask_ = *at(params.sq_off.ring_mask);
    array_ = at(params.sq_off.array);
    result_head_ = at(params.cq_off.head);
    result_tail_ = at(params.cq_off.tail);
    result_mask_ = *at(params.cq_off.ring_mask);
    results_ = reinterpret_cast<io_uring_cqe*>(shared_ + params.cq_off.cqes);
    return true;
  }

  void Queue(const FileRead& read, size_t i) {
    const unsigned tail = *tail_;
    io_uring_sqe& entry = entries_[tail & mask_];
    entry = {};
    entry.opcode = IORING_OP_READ;
    entry.fd = read.fd;
    entry.off = read.offset;
    entry.addr = reinterpret_cast<uint64_t>(read.to);
    entry.len = read.size;
    entry.user_data = i;
    array_[tail & mask_] = tail & mask_;
    __atomic_store_n(tail_, tail + 1, __ATOMIC_RELEASE);
  }

  const int fd_;
  char* shared_ = nullptr;
  size_t shared_bytes_ = 0;
  io_uring_sqe* entries_ = nullptr;
  unsigned* tail_ = nullptr;
  unsigned* array_ = nullptr;
  unsigned mask_ = 0;
  unsigned* result_head_ = nullptr;
  unsigned* result_tail_ = nullptr;
  unsigned result_mask_ = 0;
  io_uring_cqe* results_ = nullptr;
};

BatchReads::BatchReads(bool uses_ring) {
  auto ring = uses_ring ? Ring::Create() : nullptr;
  if (ring == nullptr) {
    threads_ = std::make_unique<ThreadPool>(kNumThreads);
    return;
  }
  MutexLock lock(&mutex_);
  rings_.push_back(std::move(ring));
}

BatchReads::~BatchReads() = default;

std::unique_ptr<BatchReads::Ring> BatchReads::TakeRing() {
  if (threads_ != nullptr) return nullptr;
  {
    MutexLock lock(&mutex_);
    if (!rings_.empty()) {
      auto ring = std::move(rings_.back());
      rings_.pop_back();
      return ring;
    }
  }
  return Ring::Create();
}

void BatchReads::Run(absl::Span<const FileRead> reads,
                     absl::FunctionRef<void(size_t, bool)> done) {
  std::unique_ptr<Ring> ring = reads.size() > 1 ? TakeRing() : nullptr;
  if (ring != nullptr && ring->Run(reads, done)) {
    MutexLock lock(&mutex_);
    rings_.push_back(std::move(ring));
    return;
  }
  RunRanges(threads_.get(), reads.size(), 1, [&](size_t begin, size_t end) {
    for (size_t i = begin; i < end; ++i) {
      const FileRead& read = reads[i];
      const ssize_t got =
          pread(read.fd, read.to, read.size, static_cast<off_t>(read.offset));
      done(i, got == static_cast<ssize_t>(read.size));
    }
  });
}

}  // namespace tfswitch
