// Calls a shard with messages that are made from an input.

#ifndef TFSWITCH_TESTS_CC_SHARD_SHARD_CALLS_H_
#define TFSWITCH_TESTS_CC_SHARD_SHARD_CALLS_H_

#include <cstddef>
#include <string>

#include "cc/shard/shard.h"
#include "tests/cc/testing/choices.h"
#include "tests/cc/testing/message_maker.h"

namespace tfswitch {

// The number of calls. First come the calls of a good client, from the first
// table to the last checkpoint. Then come all other calls that a shard knows,
// with an empty message.
size_t NumShardCalls();

// Not thread-safe.
class ShardCaller {
 public:
  // `shard` must outlive this.
  explicit ShardCaller(Shard* shard) : shard_(*shard) {}

  // Makes call `number`, changed as the choices say. Without choices it is the
  // good client's call.
  absl::Status Call(size_t number, Choices* choices);

 private:
  Shard& shard_;
  MessageMaker messages_;
};

}  // namespace tfswitch

#endif  // TFSWITCH_TESTS_CC_SHARD_SHARD_CALLS_H_
