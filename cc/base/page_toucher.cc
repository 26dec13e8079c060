#include "cc/base/page_toucher.h"

#include <algorithm>
#include <thread>

#include "cc/base/memory_region.h"

namespace tfswitch {
namespace {

// Adds nothing, atomically, which loses no write of another thread. Not with
// madvise(MADV_POPULATE_WRITE), because that keeps the whole address space
// locked for as long as it takes, and a request that grows an array waits.
void Touch(char* begin, size_t bytes) {
  for (size_t at = 0; at < bytes; at += kSmallPageBytes) {
    __atomic_fetch_or(begin + at, 0, __ATOMIC_RELAXED);
  }
}

}  // namespace

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
  pending_.erase(std::remove_if(pending_.begin(), pending_.end(), overlaps),
                 pending_.end());
  while (overlaps(current_)) changed_.Wait(&mutex_);
}

void PageToucher::WaitUntilIdle() {
  MutexLock lock(&mutex_);
  while (!pending_.empty() || current_.bytes != 0) changed_.Wait(&mutex_);
}

void PageToucher::Run() {
  for (;;) {
    Range range;
    {
      MutexLock lock(&mutex_);
      current_ = Range();
      changed_.NotifyAll();
      while (pending_.empty()) changed_.Wait(&mutex_);
      range = pending_.front();
      pending_.pop_front();
      current_ = range;
    }
    Touch(range.begin, range.bytes);
  }
}

}  // namespace tfswitch
