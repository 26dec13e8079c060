// pending_ is the queue of urgent requests. Reset() puts its request at the
// front, because a table may be waiting for the memory. idle_ is the queue of
// work for which there is time when pending_ is empty, such as turning small
// pages into huge ones. current_ is the request that the thread works on;
// Cancel() waits for it. System calls are made without mutex_.

#include "cc/base/page_keeper.h"

#include <sys/mman.h>

#include <algorithm>
#include <iterator>
#include <system_error>
#include <thread>

// Since Linux 6.1; older headers lack it.
#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif

namespace tfswitch {
namespace {

constexpr size_t kSmallPagesPerHugePage = kHugePageBytes / kSmallPageBytes;

// Whether some memory of the huge page is in use already.
bool IsPartlyUsed(char* page) {
  unsigned char resident[kSmallPagesPerHugePage];
  return mincore(page, kHugePageBytes, resident) == 0 &&
         std::any_of(std::begin(resident), std::end(resident),
                     [](unsigned char r) { return (r & 1) != 0; });
}

// Adds 0 atomically, so that no write of another thread is lost.
// madvise(MADV_POPULATE_WRITE) would lock the whole address space for the
// duration, and calls that grow arrays would have to wait.
void TouchPage(char* page) {
  for (size_t at = 0; at < kHugePageBytes; at += kSmallPageBytes) {
    __atomic_fetch_or(page + at, 0, __ATOMIC_RELAXED);
  }
}

}  // namespace

PageKeeper& PageKeeper::Get() {
  // Never destroyed: tables may outlive static destruction.
  static PageKeeper* const keeper = new PageKeeper();
  return *keeper;
}

void PageKeeper::Touch(char* begin, size_t bytes) {
  Add({Kind::kTouch, begin, bytes, MemorySpan()});
}

void PageKeeper::TouchWhenIdle(char* begin, size_t bytes) {
  Add({Kind::kTouchWhenIdle, begin, bytes, MemorySpan()});
}

void PageKeeper::TouchNow(char* begin, size_t bytes) {
  for (size_t at = 0; at < bytes; at += kHugePageBytes) {
    // A refusal costs only speed.
    madvise(begin + at, kHugePageBytes, MADV_HUGEPAGE);
    TouchPage(begin + at);
  }
}

void PageKeeper::Release(const MemorySpan& span, size_t begin, size_t end) {
  Add({Kind::kRelease, span.data() + begin, end - begin, span});
}

void PageKeeper::Reset(const MemorySpan& span) {
  {
    MutexLock lock(&mutex_);
    Forget(span);
  }
  Add({Kind::kReset, span.data(), span.capacity(), span});
}

bool PageKeeper::IsBusy(const MemorySpan& span) {
  MutexLock lock(&mutex_);
  const auto overlaps = [&span](const Request& request) {
    return request.Overlaps(span);
  };
  // Starts the thread if an earlier attempt to start it has failed.
  if (!pending_.empty()) StartThread();
  return overlaps(current_) ||
         std::any_of(pending_.begin(), pending_.end(), overlaps);
}

void PageKeeper::Cancel(const MemorySpan& span) {
  MutexLock lock(&mutex_);
  Forget(span);
  while (current_.Overlaps(span)) changed_.Wait(&mutex_);
  // Drops requests once more, because the request in progress may have added
  // pages to idle_.
  Forget(span);
}

void PageKeeper::WaitUntilIdle() {
  MutexLock lock(&mutex_);
  StartThread();
  while (!pending_.empty() || !idle_.empty() || current_.bytes != 0)
    changed_.Wait(&mutex_);
}

void PageKeeper::Add(const Request& request) {
  if (request.bytes == 0) return;
  MutexLock lock(&mutex_);
  if (request.kind == Kind::kReset) {
    pending_.push_front(request);
  } else if (request.kind == Kind::kTouchWhenIdle) {
    idle_.push_back(request);
  } else {
    pending_.push_back(request);
  }
  StartThread();
  changed_.NotifyAll();
}

void PageKeeper::Forget(const MemorySpan& span) {
  for (std::deque<Request>* requests : {&pending_, &idle_}) {
    requests->erase(std::remove_if(requests->begin(), requests->end(),
                                   [&span](const Request& request) {
                                     return request.Overlaps(span);
                                   }),
                    requests->end());
  }
}

void PageKeeper::StartThread() {
  if (is_started_) return;
  try {
    std::thread([this] { Run(); }).detach();
    is_started_ = true;
  } catch (const std::system_error&) {
    // The system could not start a thread. The next request tries again; until
    // then tables use small pages.
  }
}

void PageKeeper::Run() {
  for (;;) {
    Request request;
    {
      MutexLock lock(&mutex_);
      current_ = Request();
      changed_.NotifyAll();
      while (pending_.empty() && idle_.empty()) changed_.Wait(&mutex_);
      std::deque<Request>& requests = pending_.empty() ? idle_ : pending_;
      request = requests.front();
      requests.pop_front();
      current_ = request;
    }
    Serve(request);
  }
}

void PageKeeper::Serve(const Request& request) {
  MemorySpan span = request.span;
  switch (request.kind) {
    case Kind::kTouchWhenIdle:
      // Other programs and tables may have taken the memory meanwhile.
      if (AvailableMemoryBytes() < MemoryLimitBytes() / 8) break;
      [[fallthrough]];
    case Kind::kTouch:
      TouchPages(request.begin, request.bytes);
      break;
    case Kind::kRelease: {
      const auto begin = static_cast<size_t>(request.begin - span.data());
      span.Release(begin, begin + request.bytes);
      break;
    }
    case Kind::kReset:
      span.Reset();
      break;
    case Kind::kJoin:
      // If the kernel cannot join small pages into a huge one, they stay small.
      madvise(request.begin, request.bytes, MADV_COLLAPSE);
      break;
  }
}

void PageKeeper::TouchPages(char* begin, size_t bytes) {
  for (size_t at = 0; at < bytes; at += kHugePageBytes) {
    char* const page = begin + at;
    const bool is_late = IsPartlyUsed(page);
    TouchNow(page, kHugePageBytes);
    if (!is_late) continue;
    MutexLock lock(&mutex_);
    idle_.push_back({Kind::kJoin, page, kHugePageBytes, MemorySpan()});
  }
}

}  // namespace tfswitch
