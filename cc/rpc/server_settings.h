// Settings of all gRPC servers of tfswitch.

#ifndef TFSWITCH_CC_RPC_SERVER_SETTINGS_H_
#define TFSWITCH_CC_RPC_SERVER_SETTINGS_H_

#include <cstdint>

namespace grpc {
class ServerBuilder;
}  // namespace grpc

namespace tfswitch {

// Limits the length of messages in both directions, and the time until a new
// connection must have begun HTTP/2. Refuses compressed messages.
void SetMessageLimits(uint64_t max_message_bytes, grpc::ServerBuilder* builder);

// Turns gRPC's reflection service on or off for the next server that is built.
// Without this call it is on, because its library adds it to all servers of a
// process.
void SetReflection(bool is_on, grpc::ServerBuilder* builder);

}  // namespace tfswitch

#endif  // TFSWITCH_CC_RPC_SERVER_SETTINGS_H_
