// Settings that both ends of a connection share; docs/benchmarks/exchange.md
// gives the cost of an exchange with them.

#ifndef TFSWITCH_CC_RPC_CHANNEL_SETTINGS_H_
#define TFSWITCH_CC_RPC_CHANNEL_SETTINGS_H_

#include <grpc/grpc.h>

#include <cstddef>
#include <cstdint>
#include <utility>

namespace tfswitch {

// A pull of more embeddings than this is sent in parts, each at least as large.
inline constexpr size_t kMinPartBytes = 5 << 18;
// The same for a push that would fit one message. Parts make it more expensive:
// all of it is searched for NaN before the first part is sent, so that a bad
// gradient in the last one leaves nothing applied.
inline constexpr size_t kMinPushPartBytes = 4 << 20;
inline constexpr size_t kMaxPartsPerCall = 8;

// A host that vanishes is noticed after the sum of both.
inline constexpr int kKeepaliveTimeMs = 30'000;
inline constexpr int kKeepaliveTimeoutMs = 10'000;

// Arguments of gRPC for both ends.
inline constexpr std::pair<const char*, int> kChannelArguments[] = {
    // Fewer frames and fewer reads per message of megabytes.
    {GRPC_ARG_HTTP2_MAX_FRAME_SIZE, 1 << 20},
    {GRPC_ARG_TCP_READ_CHUNK_SIZE, 1 << 20},
    {GRPC_ARG_TCP_MIN_READ_CHUNK_SIZE, 1 << 20},
    {GRPC_ARG_TCP_MAX_READ_CHUNK_SIZE, 4 << 20},
    {GRPC_ARG_KEEPALIVE_TIME_MS, kKeepaliveTimeMs},
    {GRPC_ARG_KEEPALIVE_TIMEOUT_MS, kKeepaliveTimeoutMs},
    {GRPC_ARG_ENABLE_CHANNELZ, 0},
};

// The time in which a new connection must speak HTTP/2.
inline constexpr int kHandshakeTimeoutMs = 20'000;
// The shortest interval that the server accepts; must be less than the client's
// time.
inline constexpr int kMinPingIntervalMs = 10'000;

// The metadata of a call with the caller's token, after "Bearer ".
inline constexpr const char* kTokenHeader = "authorization";
// The metadata of an answer of RESOURCE_EXHAUSTED to a call that was not begun,
// because others are running: try again after so many milliseconds.
inline constexpr const char* kRetryPushback = "grpc-retry-pushback-ms";

// gRPC counts message sizes in ints.
inline constexpr uint64_t kSmallestMessageLimit = 1 << 10;
inline constexpr uint64_t kLargestMessageLimit = (uint64_t{1} << 31) - 1;

}  // namespace tfswitch

#endif  // TFSWITCH_CC_RPC_CHANNEL_SETTINGS_H_
