#include "cc/rpc/status_conversion.h"

#include <string>

#include "absl/strings/str_cat.h"

namespace tfswitch {
namespace {

// The longest message after encoding. In a header, a byte that is not printable
// ASCII takes three bytes. gRPC's clients refuse headers over 8 KiB.
constexpr size_t kMaxMessageBytes = 4096;

size_t HeaderBytes(char c) { return c >= ' ' && c <= '~' && c != '%' ? 1 : 3; }

static_assert(static_cast<int>(absl::StatusCode::kUnauthenticated) ==
              static_cast<int>(grpc::StatusCode::UNAUTHENTICATED));
static_assert(static_cast<int>(absl::StatusCode::kNotFound) ==
              static_cast<int>(grpc::StatusCode::NOT_FOUND));

bool IsUtf8Continuation(char c) {
  return (static_cast<unsigned char>(c) & 0xc0) == 0x80;
}

}  // namespace

grpc::Status ToGrpcStatus(const absl::Status& status) {
  if (status.ok()) return grpc::Status::OK;
  std::string message(status.message());
  size_t end = 0;
  for (size_t bytes = 0; end < message.size(); ++end) {
    bytes += HeaderBytes(message[end]);
    if (bytes > kMaxMessageBytes) break;
  }
  if (end < message.size()) {
    // Does not cut a UTF-8 character in half, because the receiver could not
    // decode it.
    while (end > 0 && IsUtf8Continuation(message[end])) --end;
    message.resize(end);
    absl::StrAppend(&message, "...");
  }
  return grpc::Status(static_cast<grpc::StatusCode>(status.code()), message);
}

absl::Status FromGrpcStatus(const grpc::Status& status) {
  if (status.ok()) return absl::OkStatus();
  const int code = status.error_code();
  const bool known = code > 0 && code <= grpc::StatusCode::UNAUTHENTICATED;
  return absl::Status(
      known ? static_cast<absl::StatusCode>(code) : absl::StatusCode::kUnknown,
      status.error_message());
}

}  // namespace tfswitch
