// The pages that the servers have in common.

#ifndef TFSWITCH_CC_HTTP_PAGES_H_
#define TFSWITCH_CC_HTTP_PAGES_H_

#include <functional>
#include <string>

#include "cc/http/http_server.h"

namespace tfswitch {

// /metrics, for callers who may read; /healthz and /readyz, for all.
// `metrics` returns metrics in Prometheus's text format. `why_not_ready`
// returns one line; an empty one means that the server serves. Both must be
// quick, because the server's thread calls them.
HttpPages StandardPages(std::function<std::string()> metrics,
                        std::function<std::string()> why_not_ready);

}  // namespace tfswitch

#endif  // TFSWITCH_CC_HTTP_PAGES_H_
