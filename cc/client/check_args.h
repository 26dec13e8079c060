// A client checks arguments itself, before it sends a part of a call: a call to
// several servers, or in several messages, must not be half applied.

#ifndef TFSWITCH_CC_CLIENT_CHECK_ARGS_H_
#define TFSWITCH_CC_CLIENT_CHECK_ARGS_H_

#include <cstddef>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "cc/client/parameter_client.h"

namespace tfswitch {

// InvalidArgument, naming the table, if `got` is not `num_keys` x `dim`.
absl::Status CheckSize(const std::string& table, size_t num_keys, int dim,
                       size_t got);

// InvalidArgument, naming the id, if one of its `what` is NaN or Inf.
absl::Status CheckFinite(const std::string& table, absl::string_view what,
                         absl::Span<const Key> keys,
                         absl::Span<const float> values);

// Both, the learning rate and the observations.
absl::Status CheckPush(const PushArgs& args);

// The same for each that is not checked already.
absl::Status CheckPushes(absl::Span<const PushPart> parts);

}  // namespace tfswitch

#endif  // TFSWITCH_CC_CLIENT_CHECK_ARGS_H_
