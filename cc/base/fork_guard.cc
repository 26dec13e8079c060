#include "cc/base/fork_guard.h"

#include <pthread.h>

#include <string>

#include "absl/strings/str_cat.h"
#include "cc/base/status_macros.h"

namespace tfswitch {
namespace {

// The argument of the first call of Arm(); null before it. Never freed.
std::atomic<const std::string*> first_use{nullptr};

}  // namespace

std::atomic<bool> ForkGuard::is_tripped_{false};

// Registers the fork handler while the library is being loaded. Later, another
// thread could fork during the registration, and the child would wait without
// end for the lock that a registration takes.
const int ForkGuard::registration_error_ =
    pthread_atfork(nullptr, nullptr, AfterForkInChild);

void ForkGuard::AfterForkInChild() {
  is_tripped_.store(first_use.load() != nullptr);
}

absl::Status ForkGuard::Arm(absl::string_view use) {
  TFSWITCH_RETURN_IF_ERROR(Check());
  if (registration_error_ != 0) {
    return absl::ErrnoToStatus(registration_error_,
                               "cannot watch this process for forks");
  }
  if (first_use.load() != nullptr) return absl::OkStatus();
  const auto* const mine = new std::string(use);
  const std::string* none = nullptr;
  if (!first_use.compare_exchange_strong(none, mine)) delete mine;
  return absl::OkStatus();
}

absl::Status ForkGuard::Refusal() {
  // The remedy comes first in the text, because the end of a long list of
  // servers may be cut off.
  return absl::FailedPreconditionError(absl::StrCat(
      "this process is a fork of one that uses tfswitch, which does not "
      "survive a fork. Start it with 'spawn', as "
      "multiprocessing.get_context('spawn') does, or fork before the parent "
      "uses tfswitch. The parent has ",
      *first_use.load()));
}

}  // namespace tfswitch
