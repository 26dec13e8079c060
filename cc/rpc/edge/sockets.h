// Sockets of servers.

#ifndef TFSWITCH_CC_RPC_EDGE_SOCKETS_H_
#define TFSWITCH_CC_RPC_EDGE_SOCKETS_H_

#include <sys/types.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "cc/rpc/address.h"

namespace tfswitch {

// Listens on all addresses of the host that can be bound, and returns the
// sockets, which do not block. If the port is 0, it is replaced by the port
// that was bound. The IPv4 wildcard address also accepts IPv6 connections, if
// the machine has IPv6. Unavailable, with the reason, if no address can be
// bound.
absl::StatusOr<std::vector<int>> OpenSockets(Address* address);

// Removes the path of a Unix socket.
void RemoveSocket(const std::string& path);

// A connection also works if the option cannot be set.
void SetOption(int fd, int level, int name, int value);

// Identifies a socket. Its descriptor does not, because the number is used
// again after the socket is closed.
using SocketId = std::pair<dev_t, ino_t>;
// All zeros if the descriptor is not open.
SocketId IdOf(int fd);

// How many files the process may open.
uint64_t MaxFiles();

}  // namespace tfswitch

#endif  // TFSWITCH_CC_RPC_EDGE_SOCKETS_H_
