// What all gRPC servers of tfswitch are built with.

#ifndef TFSWITCH_CC_RPC_SERVER_SETTINGS_H_
#define TFSWITCH_CC_RPC_SERVER_SETTINGS_H_

#include <cstdint>

namespace grpc {
class ServerBuilder;
}  // namespace grpc

namespace tfswitch {

// Bounds messages, in either direction, and the time that a new connection has
// until it speaks HTTP/2. Compressed messages are refused.
void SetMessageLimits(uint64_t max_message_bytes, grpc::ServerBuilder* builder);

// Turns gRPC's reflection service on or off for the server that is built.
// Without this call it is on: the library that has it adds it to all servers of
// a process.
void SetReflection(bool is_on, grpc::ServerBuilder* builder);

}  // namespace tfswitch

#endif  // TFSWITCH_CC_RPC_SERVER_SETTINGS_H_
