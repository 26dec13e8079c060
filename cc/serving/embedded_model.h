// A model whose rows are files on this machine.

#ifndef TFSWITCH_CC_SERVING_EMBEDDED_MODEL_H_
#define TFSWITCH_CC_SERVING_EMBEDDED_MODEL_H_

#include <memory>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "cc/serving/served_model.h"
#include "cc/serving/served_rows.h"

namespace tfswitch {

// Opens the model. Errors are those of ServedRows::Open. Looks for newer
// exports every `watch_interval`; zero means never.
absl::StatusOr<std::shared_ptr<ServedModel>> OpenEmbeddedModel(
    const ServedRowsOptions& options, absl::Duration watch_interval);

}  // namespace tfswitch

#endif  // TFSWITCH_CC_SERVING_EMBEDDED_MODEL_H_
