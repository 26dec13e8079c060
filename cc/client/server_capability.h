// Whether servers, which may be of an earlier version, know a part of the
// protocol.

#ifndef TFSWITCH_CC_CLIENT_SERVER_CAPABILITY_H_
#define TFSWITCH_CC_CLIENT_SERVER_CAPABILITY_H_

#include <atomic>

#include "absl/status/statusor.h"
#include "cc/client/parameter_client.h"
#include "tfswitch/v1/parameter_server.pb.h"

namespace tfswitch {

// Thread-safe.
class ServerCapability {
 public:
  using Field = bool (v1::HandshakeResponse::*)() const;

  // `field` says whether a server has the capability. `lack` says in a warning
  // what happens without it.
  ServerCapability(ParameterClient* client, Field field, const char* lack)
      : client_(client), field_(field), lack_(lack) {}

  // Whether all servers have the capability. If one has not, the first call
  // logs a warning. An error, if a server does not answer.
  absl::StatusOr<bool> IsKnown();

 private:
  enum class State { kUnknown, kYes, kNo };

  ParameterClient* const client_;
  const Field field_;
  const char* const lack_;
  std::atomic<State> state_{State::kUnknown};
};

}  // namespace tfswitch

#endif  // TFSWITCH_CC_CLIENT_SERVER_CAPABILITY_H_
