// Ids that are unique over all draws, processes and machines.

#ifndef TFSWITCH_CC_BASE_RANDOM_ID_H_
#define TFSWITCH_CC_BASE_RANDOM_ID_H_

#include <cstdint>

namespace tfswitch {

// 64 random bits, never 0. Thread-safe.
uint64_t DrawId();

}  // namespace tfswitch

#endif  // TFSWITCH_CC_BASE_RANDOM_ID_H_
