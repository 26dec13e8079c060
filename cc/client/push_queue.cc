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
  LogWriter::Get().WriteInOrder(
      {"push"}, absl::StrCat("tfswitch: error: ", error_.message()));
}

absl::Status PushQueue::WaitForRoom(int depth) {
  if (num_in_flight_ < depth && !has_error_) return absl::OkStatus();
  MutexLock lock(&mutex_);
  TFSWITCH_RETURN_IF_ERROR(WaitUntilBelow(depth));
  has_error_ = false;
  return std::exchange(error_, absl::OkStatus());
}

void PushQueue::Wait() {
  MutexLock lock(&mutex_);
  while (num_in_flight_ > 0) finished_.Wait(&mutex_);
}

void PushQueue::Add(std::string name, Send send) {
  AddTask({std::move(name), std::move(send), /*is_push=*/true});
}

void PushQueue::AddRead(std::function<void()> read) {
  AddTask({"rows of the next step",
           [read = std::move(read)](const LentThreads*) {
             read();
             return absl::OkStatus();
           },
           /*is_push=*/false});
}

void PushQueue::AddTask(Task task) {
  MutexLock lock(&mutex_);
  if (!thread_.joinable()) {
    helpers_ = std::make_unique<ThreadPool>(num_helpers_);
    thread_ = std::thread([this] { Run(); });
  }
  const bool is_push = task.is_push;
  tasks_.push_back(std::move(task));
  if (is_push) ++num_in_flight_;
  added_.NotifyOne();
}

absl::Status PushQueue::WaitUntilBelow(int limit) {
  return WaitAloud(
      &mutex_, &finished_, [&] { return num_in_flight_ < limit; },
      [this]() ABSL_NO_THREAD_SAFETY_ANALYSIS { return tasks_.front().name; });
}

void PushQueue::Run() {
  MutexLock lock(&mutex_);
  for (;;) {
    while (tasks_.empty()) {
      if (is_ending_) return;
      added_.Wait(&mutex_);
    }
    Send send = std::move(tasks_.front().send);
    const ThreadPool* const helpers = helpers_.get();
    mutex_.Unlock();
    const absl::Status status = Call(send, helpers);
    send = nullptr;  // Frees the data of the push.
    mutex_.Lock();
    if (!status.ok() && error_.ok()) {
      error_ = absl::Status(
          status.code(),
          absl::StrCat(tasks_.front().name, ": ", status.message()));
      has_error_ = true;
    }
    if (tasks_.front().is_push) --num_in_flight_;
    tasks_.pop_front();
    finished_.NotifyAll();
  }
}

}  // namespace tfswitch
