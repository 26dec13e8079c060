// Closed rounds between their C++ and their proto form.

#ifndef TFSWITCH_CC_RPC_ROUND_CONVERSION_H_
#define TFSWITCH_CC_RPC_ROUND_CONVERSION_H_

#include "cc/sync/worker_group.h"
#include "tfswitch/v1/coordination.pb.h"

namespace tfswitch {

v1::Round ToProto(const Round& round);
Round FromProto(const v1::Round& proto);

}  // namespace tfswitch

#endif  // TFSWITCH_CC_RPC_ROUND_CONVERSION_H_
