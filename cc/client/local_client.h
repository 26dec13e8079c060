// ParameterClient on a Shard in this process: the embedded mode.

#ifndef TFSWITCH_CC_CLIENT_LOCAL_CLIENT_H_
#define TFSWITCH_CC_CLIENT_LOCAL_CLIENT_H_

#include <memory>

#include "cc/client/parameter_client.h"
#include "cc/shard/shard.h"

namespace tfswitch {

// Calls do their work when they are started; Wait() only returns the status.
//
// Thread-safe.
std::unique_ptr<ParameterClient> NewLocalClient(std::shared_ptr<Shard> shard);

}  // namespace tfswitch

#endif  // TFSWITCH_CC_CLIENT_LOCAL_CLIENT_H_
