// Settings that both ends of a connection share; docs/benchmarks/exchange.md
// has measurements of calls with these settings.

#ifndef TFSWITCH_CC_RPC_CHANNEL_SETTINGS_H_
#define TFSWITCH_CC_RPC_CHANNEL_SETTINGS_H_

#include <grpc/grpc.h>

#include <cstddef>
#include <cstdint>
#include <utility>

namespace tfswitch {

// A pull of more than this many bytes of embeddings is sent in parts of at
// least this size.
inline constexpr size_t kMinPartBytes = 5 << 18;
// The smallest part of a push that is divided although it would fit in one
// message. It is larger than for pulls, because dividing costs more: the whole
// push is searched for NaN before the first part is sent, so that a NaN in the
// last part leaves nothing applied.
inline constexpr size_t kMinPushPartBytes = 4 << 20;
inline constexpr size_t kMaxPartsPerCall = 8;

// If the other host vanishes, gRPC notices it after the sum of these times.
inline constexpr int kKeepaliveTimeMs = 30'000;
inline constexpr int kKeepaliveTimeoutMs = 10'000;

// Arguments of gRPC for both ends.
inline constexpr std::pair<const char*, int> kChannelArguments[] = {
    // Large sizes, so that a message of megabytes needs fewer frames and reads.
    {GRPC_ARG_HTTP2_MAX_FRAME_SIZE, 1 << 20},
    {GRPC_ARG_TCP_READ_CHUNK_SIZE, 1 << 20},
    {GRPC_ARG_TCP_MIN_READ_CHUNK_SIZE, 1 << 20},
    {GRPC_ARG_TCP_MAX_READ_CHUNK_SIZE, 4 << 20},
    {GRPC_ARG_KEEPALIVE_TIME_MS, kKeepaliveTimeMs},
    {GRPC_ARG_KEEPALIVE_TIMEOUT_MS, kKeepaliveTimeoutMs},
    {GRPC_ARG_ENABLE_CHANNELZ, 0},
};

// The server closes a new connection that has not begun HTTP/2 after this time.
inline constexpr int kHandshakeTimeoutMs = 20'000;
// The server accepts pings that are at least this far apart. Must be less than
// kKeepaliveTimeMs.
inline constexpr int kMinPingIntervalMs = 10'000;

// The metadata key of the caller's token, whose value is "Bearer TOKEN".
inline constexpr const char* kTokenHeader = "authorization";
// The metadata key with which a server asks for a retry after so many
// milliseconds. The server sends it when it refuses a call with
// RESOURCE_EXHAUSTED only because other calls are in progress.
inline constexpr const char* kRetryPushback = "grpc-retry-pushback-ms";
// The metadata key of a call whose sender traces it. The server then answers
// with the trailing metadata kServerTimes: when it began to work on the call,
// in nanoseconds since 1970, and for how many nanoseconds it worked.
inline constexpr const char* kTraced = "tfswitch-traced";
inline constexpr const char* kServerTimes = "tfswitch-server-times";

// gRPC counts message sizes in ints.
inline constexpr uint64_t kSmallestMessageLimit = 1 << 10;
inline constexpr uint64_t kLargestMessageLimit = (uint64_t{1} << 31) - 1;

}  // namespace tfswitch

#endif  // TFSWITCH_CC_RPC_CHANNEL_SETTINGS_H_
