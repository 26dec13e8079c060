// The calls of a shard with messages that an input makes up.

#ifndef TFSWITCH_TESTS_CC_SHARD_SHARD_CALLS_H_
#define TFSWITCH_TESTS_CC_SHARD_SHARD_CALLS_H_

#include <cstddef>
#include <string>

#include "cc/shard/shard.h"
#include "tests/cc/testing/choices.h"
#include "tests/cc/testing/message_maker.h"

namespace tfswitch {

// Calls one after the other that a server gets from its clients: first those of
// a good client, from the first table to the last checkpoint, and then each
// other that a shard knows, with an empty message.
size_t NumShardCalls();

// Not thread-safe.
class ShardCaller {
 public:
  // It must live as long.
  explicit ShardCaller(Shard* shard) : shard_(*shard) {}

  // Does the call of this number, changed as the choices say; without a choice
  // it is that of the good client.
  absl::Status Call(size_t number, Choices* choices);

 private:
  Shard& shard_;
  MessageMaker messages_;
};

}  // namespace tfswitch

#endif  // TFSWITCH_TESTS_CC_SHARD_SHARD_CALLS_H_
