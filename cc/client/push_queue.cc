#include "cc/client/push_queue.h"

#include <exception>
#include <utility>

#include "absl/strings/str_cat.h"
#include "cc/base/log_writer.h"
#include "cc/base/status_macros.h"
#include "cc/client/aloud_wait.h"

namespace tfswitch {
namespace {

absl::Status Call(const PushQueue::Send& send, const LentThreads* threads) {
  try {
    return send(threads);
  } catch (const std::exception& exception) {  // Out of memory, for example.
    return absl::ResourceExhaustedError(exception.what());
  }
}

}  // namespace

PushQueue::~PushQueue() {
  std::thread thread;
  {
    MutexLock lock(&mutex_);
    is_ending_ = true;
    added_.NotifyAll();
    thread.swap(thread_);
  }
  if (thread.joinable()) thread.join();
  MutexLock lock(&mutex_);
  if (error_.ok()) return;
  LogMessageInOrder(LogLevel::kError, {"push"}, error_.message());
}

absl::Status PushQueue::Add(int depth, std::string name, Send send) {
  MutexLock lock(&mutex_);
  TFSWITCH_RETURN_IF_ERROR(WaitUntilBelow(depth));
  TFSWITCH_RETURN_IF_ERROR(TakeError());
  if (!thread_.joinable()) {
    helpers_ = std::make_unique<ThreadPool>(num_helpers_);
    thread_ = std::thread([this] { Run(); });
  }
  pushes_.push_back({std::move(name), std::move(send)});
  ++num_in_flight_;
  added_.NotifyOne();
  return absl::OkStatus();
}

absl::Status PushQueue::Finish() {
  if (num_in_flight_ == 0 && !has_error_) return absl::OkStatus();
  MutexLock lock(&mutex_);
  TFSWITCH_RETURN_IF_ERROR(WaitUntilBelow(1));
  return TakeError();
}

absl::Status PushQueue::WaitUntilBelow(int limit) {
  return WaitAloud(
      &mutex_, &finished_, [&] { return num_in_flight_ < limit; },
      [this]() ABSL_NO_THREAD_SAFETY_ANALYSIS { return pushes_.front().name; });
}

absl::Status PushQueue::TakeError() {
  has_error_ = false;
  return std::exchange(error_, absl::OkStatus());
}

void PushQueue::Run() {
  MutexLock lock(&mutex_);
  for (;;) {
    while (pushes_.empty()) {
      if (is_ending_) return;
      added_.Wait(&mutex_);
    }
    Send send = std::move(pushes_.front().send);
    const ThreadPool* const helpers = helpers_.get();
    mutex_.Unlock();
    const absl::Status status = Call(send, helpers);
    send = nullptr;  // Frees the data of the push.
    mutex_.Lock();
    if (!status.ok() && error_.ok()) {
      error_ = absl::Status(
          status.code(),
          absl::StrCat(pushes_.front().name, ": ", status.message()));
      has_error_ = true;
    }
    pushes_.pop_front();
    --num_in_flight_;
    finished_.NotifyAll();
  }
}

}  // namespace tfswitch
