#include "cc/http/pages.h"

#include <openssl/sha.h>

#include <utility>

#include "absl/algorithm/container.h"
#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "cc/http/page_html.h"

namespace tfswitch {
namespace {

// Lets the element <tag> of the page run, and no other (CSP level 2).
std::string HashOf(absl::string_view tag, absl::string_view html) {
  const std::string begin = absl::StrCat("<", tag, ">");
  html.remove_prefix(html.find(begin) + begin.size());
  html = html.substr(0, html.find(absl::StrCat("</", tag, ">")));
  unsigned char hash[SHA256_DIGEST_LENGTH];
  SHA256(reinterpret_cast<const unsigned char*>(html.data()), html.size(),
         hash);
  return absl::StrCat(
      "'sha256-",
      absl::Base64Escape({reinterpret_cast<char*>(hash), sizeof(hash)}), "'");
}

}  // namespace

HttpPages StandardPages(std::function<std::string()> metrics,
                        std::function<std::string()> why_not_ready) {
  const auto serve_metrics = [metrics = std::move(metrics)] {
    HttpAnswer answer;
    answer.content_type = "text/plain; version=0.0.4; charset=utf-8";
    answer.body = metrics();
    return answer;
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

HttpPage ServerPage(const std::vector<std::string>& servers) {
  HttpAnswer page;
  page.content_type = "text/html; charset=utf-8";
  page.body = kPageHtml;
  page.content_security_policy = absl::StrCat(
      "default-src 'none'; frame-ancestors 'none'; base-uri 'none'; "
      "form-action 'none'; script-src ",
      HashOf("script", page.body), "; style-src ", HashOf("style", page.body),
      "; connect-src 'self' ", absl::StrJoin(servers, " "));
  return {[page] { return page; }, /*is_public=*/true};
}

absl::StatusOr<std::string> ParseOrigin(absl::string_view url) {
  std::string origin = absl::AsciiStrToLower(absl::StripSuffix(url, "/"));
  const bool has_tls = absl::StartsWith(origin, "https://");
  absl::string_view address = origin;
  const bool has_scheme =
      absl::ConsumePrefix(&address, has_tls ? "https://" : "http://");
  const std::pair<absl::string_view, absl::string_view> parts =
      absl::StrSplit(address, absl::MaxSplits(':', 1));
  const auto& [host, port_text] = parts;
  uint32_t port = has_tls ? 443 : 80;
  const bool has_port = host.size() < address.size();
  // A Content-Security-Policy has neither IPv6 addresses nor underscores.
  if (!has_scheme || host.empty() ||
      !absl::c_all_of(host,
                      [](unsigned char c) {
                        return absl::ascii_isalnum(c) || c == '-' || c == '.';
                      }) ||
      (has_port && !absl::SimpleAtoi(port_text, &port)) || port < 1 ||
      port > 65535) {
    return absl::InvalidArgumentError(absl::StrCat(
        "'", url, "' is not an address such as https://ps0.example.com:9077, ",
        "with a name of letters, digits, dots and hyphens, or an IPv4 "
        "address"));
  }
  return std::string(absl::StripSuffix(origin, has_tls ? ":443" : ":80"));
}

}  // namespace tfswitch
