// Whether callers are told which services a gRPC server has.

#ifndef TFSWITCH_CC_RPC_REFLECTION_H_
#define TFSWITCH_CC_RPC_REFLECTION_H_

namespace grpc {
class ServerBuilder;
}  // namespace grpc

namespace tfswitch {

// Turns gRPC's reflection service on or off for the server that is built.
// Without this call it is on: the library that has it adds it to all servers of
// a process.
void SetReflection(bool is_on, grpc::ServerBuilder* builder);

}  // namespace tfswitch

#endif  // TFSWITCH_CC_RPC_REFLECTION_H_
