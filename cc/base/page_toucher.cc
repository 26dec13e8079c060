#include "cc/base/page_toucher.h"

#include <sys/mman.h>

#include <algorithm>
#include <iterator>
#include <thread>

#include "cc/base/memory_region.h"

// Since Linux 6.1; older headers lack it.
#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif

namespace tfswitch {
namespace {

constexpr size_t kSmallPagesPerHugePage = kHugePageBytes / kSmallPageBytes;

// True if someone has been there before us.
bool IsPartlyUsed(char* page) {
  unsigned char resident[kSmallPagesPerHugePage];
  return mincore(page, kHugePageBytes, resident) == 0 &&
         std::any_of(std::begin(resident), std::end(resident),
                     [](unsigned char r) { return (r & 1) != 0; });
}

// Adds nothing, atomically, which loses no write of another thread. Not with
// madvise(MADV_POPULATE_WRITE), because that keeps the whole address space
// locked for as long as it takes, and a request that grows an array would wait
// for it.
void Touch(char* page) {
  for (size_t at = 0; at < kHugePageBytes; at += kSmallPageBytes) {
    __atomic_fetch_or(page + at, 0, __ATOMIC_RELAXED);
  }
}

}  // namespace

void PageToucher::Serve(const Range& range) {
  for (size_t at = 0; at < range.bytes; at += kHugePageBytes) {
    char* const page = range.begin + at;
    const bool is_late = IsPartlyUsed(page);
    // A refusal costs speed, nothing else.
    madvise(page, kHugePageBytes, MADV_HUGEPAGE);
    Touch(page);
    if (!is_late) continue;
    MutexLock lock(&mutex_);
    to_join_.push_back({page, kHugePageBytes});
  }
}

PageToucher& PageToucher::Get() {
  // Never destroyed: tables may outlive static destruction.
  static PageToucher* const toucher = new PageToucher();
  return *toucher;
}

void PageToucher::Request(char* begin, size_t bytes) {
  if (bytes == 0) return;
  MutexLock lock(&mutex_);
  pending_.push_back({begin, bytes});
  if (!is_started_) {
    is_started_ = true;
    std::thread([this] { Run(); }).detach();
  }
  changed_.NotifyAll();
}

void PageToucher::Cancel(const char* begin, size_t bytes) {
  const auto overlaps = [begin, bytes](const Range& range) {
    return range.bytes != 0 && range.begin < begin + bytes &&
           begin < range.begin + range.bytes;
  };
  MutexLock lock(&mutex_);
  const auto forget = [&overlaps](std::deque<Range>* ranges) {
    ranges->erase(std::remove_if(ranges->begin(), ranges->end(), overlaps),
                  ranges->end());
  };
  forget(&pending_);
  while (overlaps(current_)) changed_.Wait(&mutex_);
  // Only now: the range being served may have left pages to join.
  forget(&to_join_);
}

void PageToucher::WaitUntilIdle() {
  MutexLock lock(&mutex_);
  while (!pending_.empty() || !to_join_.empty() || current_.bytes != 0)
    changed_.Wait(&mutex_);
}

void PageToucher::Run() {
  for (;;) {
    Range range;
    bool is_join = false;
    {
      MutexLock lock(&mutex_);
      current_ = Range();
      changed_.NotifyAll();
      while (pending_.empty() && to_join_.empty()) changed_.Wait(&mutex_);
      is_join = pending_.empty();
      std::deque<Range>& ranges = is_join ? to_join_ : pending_;
      range = ranges.front();
      ranges.pop_front();
      current_ = range;
    }
    if (is_join) {
      // Where the kernel cannot, the pages stay small.
      madvise(range.begin, range.bytes, MADV_COLLAPSE);
    } else {
      Serve(range);
    }
  }
}

}  // namespace tfswitch
