#include "cc/client/cluster.h"

#include <algorithm>
#include <exception>
#include <thread>
#include <utility>

#include "cc/base/random_id.h"
#include "cc/base/status_macros.h"

namespace tfswitch {
namespace {

// How many threads help with a push to tables of this process.
int NumHelpers() {
  constexpr int kMost = 7;
  const int cores = static_cast<int>(std::thread::hardware_concurrency());
  return std::clamp(cores - 1, 0, kMost);
}

}  // namespace

Cluster::Cluster(std::unique_ptr<ParameterClient> client, bool is_remote)
    : client_(std::move(client)),
      is_remote_(is_remote),
      client_id_(DrawId()),
      servers_know_wire_dtype_(
          client_.get(), &v1::HandshakeResponse::knows_wire_dtype,
          "does not know wire_dtype; rows and gradients travel as float32"),
      prefetches_(std::make_shared<Prefetches>(client_.get())),
      pushes_(is_remote ? 0 : NumHelpers()) {}

void Cluster::ReadAgainSoon() {
  try {
    pushes_.AddRead([this] { prefetches_->ReadAgain(); });
  } catch (const std::exception&) {  // No memory, or no thread.
    prefetches_->ReadAgain();
  }
}

absl::Status Cluster::FinishPushes() {
  TFSWITCH_RETURN_IF_ERROR(pushes_.Finish());
  return prefetches_->InsertUsed(day());
}

absl::Status Cluster::Join(const WorkerOptions& options) {
  const std::shared_ptr<WorkerSession> former = worker();
  // If the same worker joins again, the old session must not leave first: a
  // barrier at which all other workers wait would open.
  const bool takes_its_place =
      former != nullptr && former->options().group == options.group &&
      former->options().worker == options.worker &&
      former->options().group_options == options.group_options;
  if (former != nullptr && !takes_its_place) {
    TFSWITCH_RETURN_IF_ERROR(former->Leave());
  }
  // This cluster destroys its session before its queue.
  const auto on_round = [this] {
    try {
      if (prefetches_->RoundEnded()) ReadAgainSoon();
    } catch (const std::exception&) {  // No memory.
      prefetches_->Drop(/*source=*/0);
    }
  };
  TFSWITCH_ASSIGN_OR_RETURN(std::shared_ptr<WorkerSession> joined,
                            WorkerSession::Join(client_, options, on_round));
  MutexLock lock(&mutex_);
  worker_.swap(joined);
  return absl::OkStatus();
}

std::shared_ptr<WorkerSession> Cluster::worker() const {
  MutexLock lock(&mutex_);
  return worker_;
}

}  // namespace tfswitch
