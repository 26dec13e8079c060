// ParameterClient for tables in this process, which a Shard holds.

#ifndef TFSWITCH_CC_CLIENT_LOCAL_CLIENT_H_
#define TFSWITCH_CC_CLIENT_LOCAL_CLIENT_H_

#include <memory>

#include "cc/client/parameter_client.h"
#include "cc/shard/shard.h"

namespace tfswitch {

// Start...() does the whole work of a call; Wait() only returns the status.
//
// Thread-safe.
std::unique_ptr<ParameterClient> NewLocalClient(std::shared_ptr<Shard> shard);

}  // namespace tfswitch

#endif  // TFSWITCH_CC_CLIENT_LOCAL_CLIENT_H_
