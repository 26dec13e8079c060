// A model whose rows are on parameter servers.

#ifndef TFSWITCH_CC_SERVING_REMOTE_MODEL_H_
#define TFSWITCH_CC_SERVING_REMOTE_MODEL_H_

#include <map>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "cc/client/parameter_client.h"
#include "cc/serving/model_file.h"
#include "cc/serving/served_model.h"

namespace tfswitch {

// Serves the servers' current rows at each lookup; pinning does not fix their
// values. A lookup in many tables is one call of the client. The call asks for
// each repeated key once, and does not ask for cached keys. Lookups create no
// rows on servers.
//
// `tables` are the tables that the model looks up, with their dims.
// FailedPrecondition if one does not exist or has another dim. Other errors are
// the client's, which name the server.
absl::StatusOr<std::shared_ptr<ServedModel>> OpenRemoteModel(
    const RemoteRowsOptions& options, const std::map<std::string, int>& tables,
    std::shared_ptr<ParameterClient> client);

}  // namespace tfswitch

#endif  // TFSWITCH_CC_SERVING_REMOTE_MODEL_H_
