// Errors, and results that contain either a value or an error.

#ifndef TFSWITCH_STATUS_H_
#define TFSWITCH_STATUS_H_

#include <cstdint>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>

// Marks the names that libtfswitch_predictor.so exports.
#define TFSWITCH_EXPORTED __attribute__((visibility("default")))

namespace tfswitch {

// The codes of gRPC, with the same numbers.
enum class StatusCode : int32_t {
  kOk = 0,
  kCancelled = 1,
  kUnknown = 2,
  kInvalidArgument = 3,
  kDeadlineExceeded = 4,
  kNotFound = 5,
  kAlreadyExists = 6,
  kPermissionDenied = 7,
  kResourceExhausted = 8,
  kFailedPrecondition = 9,
  kAborted = 10,
  kOutOfRange = 11,
  kUnimplemented = 12,
  kInternal = 13,
  kUnavailable = 14,
  kDataLoss = 15,
  kUnauthenticated = 16,
};

// The code is part of the interface; the message is for people.
class [[nodiscard]] Status {
 public:
  Status() = default;  // OK.
  Status(StatusCode code, std::string message)
      : code_(code), message_(std::move(message)) {}

  bool ok() const { return code_ == StatusCode::kOk; }
  StatusCode code() const { return code_; }
  const std::string& message() const { return message_; }

  friend bool operator==(const Status& a, const Status& b) {
    return a.code_ == b.code_ && a.message_ == b.message_;
  }
  friend bool operator!=(const Status& a, const Status& b) { return !(a == b); }

 private:
  StatusCode code_ = StatusCode::kOk;
  std::string message_;
};

// Contains a value, or the error that prevented it.
template <typename T>
class [[nodiscard]] Result {
 public:
  // REQUIRES: an error.
  Result(Status status)  // NOLINT(google-explicit-constructor)
      : status_(std::move(status)) {}
  // Converts anything that converts to a T.
  template <typename U = T,
            std::enable_if_t<std::is_convertible_v<U&&, T> &&
                                 !std::is_convertible_v<U&&, Status>,
                             int> = 0>
  Result(U&& value)  // NOLINT(google-explicit-constructor)
      : value_(std::forward<U>(value)) {}

  bool ok() const { return status_.ok(); }
  const Status& status() const { return status_; }

  // REQUIRES: ok(), for all functions below.
  const T& value() const& { return *value_; }
  T&& value() && { return *std::move(value_); }
  const T& operator*() const& { return *value_; }
  T& operator*() & { return *value_; }
  T&& operator*() && { return *std::move(value_); }
  const T* operator->() const { return &*value_; }
  T* operator->() { return &*value_; }

 private:
  Status status_;
  std::optional<T> value_;
};

}  // namespace tfswitch

#endif  // TFSWITCH_STATUS_H_
