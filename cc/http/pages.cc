#include "cc/http/pages.h"

#include <utility>

#include "absl/strings/str_cat.h"

namespace tfswitch {

HttpPages StandardPages(std::function<std::string()> metrics,
                        std::function<std::string()> why_not_ready) {
  const auto serve_metrics = [metrics = std::move(metrics)] {
    return HttpAnswer{200, "text/plain; version=0.0.4; charset=utf-8",
                      metrics()};
  };
  const auto is_ready = [why_not = std::move(why_not_ready)] {
    const std::string why = why_not();
    HttpAnswer answer;
    answer.status = why.empty() ? 200 : 503;
    answer.body = absl::StrCat(why.empty() ? "ok" : why, "\n");
    return answer;
  };
  const auto is_alive = [] {
    HttpAnswer answer;
    answer.body = "ok\n";
    return answer;
  };
  return {{"/metrics", {serve_metrics, /*is_public=*/false}},
          {"/healthz", {is_alive, /*is_public=*/true}},
          {"/readyz", {is_ready, /*is_public=*/true}}};
}

}  // namespace tfswitch
