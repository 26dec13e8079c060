// Addresses as users write them: "host:port", "[v6]:port" or "unix:/path".

#ifndef TFSWITCH_CC_RPC_ADDRESS_H_
#define TFSWITCH_CC_RPC_ADDRESS_H_

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace tfswitch {

struct Address {
  bool is_unix = false;
  std::string host;  // IPv6 in brackets. Empty if is_unix.
  int port = 0;      // 0 to 65535.
  std::string path;  // The socket's. Empty unless is_unix.

  std::string ToString() const;
};

// Whether only this machine can reach the address: a Unix socket, "localhost",
// or a loopback number. Other host names are not resolved, because they may
// resolve to another address later.
bool IsLocal(const Address& address);

// Parses an address without resolving the host. If the text has none of the
// valid forms, InvalidArgument with the text and these forms. gRPC would accept
// more, such as a missing port, often to the user's surprise.
absl::StatusOr<Address> ParseAddress(absl::string_view text);

}  // namespace tfswitch

#endif  // TFSWITCH_CC_RPC_ADDRESS_H_
