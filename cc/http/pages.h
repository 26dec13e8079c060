// The pages that the servers have in common.

#ifndef TFSWITCH_CC_HTTP_PAGES_H_
#define TFSWITCH_CC_HTTP_PAGES_H_

#include <functional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "cc/http/http_server.h"

namespace tfswitch {

// /metrics, for callers who may read; /healthz and /readyz, for all.
// `metrics` returns metrics in Prometheus's text format. `why_not_ready`
// returns one line; an empty one means that the server serves. Both must be
// quick, because the server's thread calls them.
HttpPages StandardPages(std::function<std::string()> metrics,
                        std::function<std::string()> why_not_ready);

// The page that people open in a browser. It holds no data: it reads
// /view.json, from this server and from `servers`, origins such as
// "https://ps0:9077".
HttpPage ServerPage(const std::vector<std::string>& servers);

// InvalidArgument unless `url` is a scheme, a host and perhaps a port, which
// ParseOrigin() returns in lower case and without the port that is usual for
// the scheme, as browsers write an origin.
absl::StatusOr<std::string> ParseOrigin(absl::string_view url);

}  // namespace tfswitch

#endif  // TFSWITCH_CC_HTTP_PAGES_H_
