#include "cc/client/server_capability.h"

#include "absl/strings/str_cat.h"
#include "cc/base/log_writer.h"
#include "cc/base/status_macros.h"

namespace tfswitch {

absl::StatusOr<bool> ServerCapability::IsKnown() {
  if (state_ != State::kUnknown) return state_ == State::kYes;
  TFSWITCH_ASSIGN_OR_RETURN(const auto servers, client_->AskServers());
  for (const v1::HandshakeResponse& server : servers) {
    if ((server.*field_)()) continue;
    if (state_.exchange(State::kNo) == State::kUnknown) {
      LogWriter::Get().WriteInOrder(
          {"capability"},
          absl::StrCat("tfswitch: warning: shard ", server.shard_index(),
                       " runs tfswitch ", server.version(), ", which ", lack_,
                       ". Update the server"));
    }
    return false;
  }
  state_ = State::kYes;
  return true;
}

}  // namespace tfswitch
