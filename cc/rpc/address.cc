#include "cc/rpc/address.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/un.h>

#include <algorithm>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"

namespace tfswitch {
namespace {

constexpr size_t kMaxUnixPath = sizeof(sockaddr_un::sun_path) - 1;

absl::Status BadAddress(absl::string_view text, absl::string_view why) {
  return absl::InvalidArgumentError(
      absl::StrCat("address '", text, "': ", why,
                   "; expected host:port (port 0 to 65535), [v6]:port or "
                   "unix:/path"));
}

}  // namespace

std::string Address::ToString() const {
  return is_unix ? absl::StrCat("unix:", path) : absl::StrCat(host, ":", port);
}

bool IsLocal(const Address& address) {
  if (address.is_unix || absl::EqualsIgnoreCase(address.host, "localhost")) {
    return true;
  }
  in_addr v4 = {};
  if (inet_pton(AF_INET, address.host.c_str(), &v4) == 1) {
    return ntohl(v4.s_addr) >> 24 == IN_LOOPBACKNET;
  }
  return address.host == "[::1]";
}

absl::StatusOr<Address> ParseAddress(absl::string_view text) {
  Address address;
  absl::string_view rest = text;
  if (absl::ConsumePrefix(&rest, "unix:")) {
    // "unix:///path" is the same as "unix:/path".
    if (absl::StartsWith(rest, "///")) rest.remove_prefix(2);
    if (rest.empty()) return BadAddress(text, "the socket's path is empty");
    if (rest.size() > kMaxUnixPath) {
      return BadAddress(text,
                        absl::StrCat("the socket's path has ", rest.size(),
                                     " characters, over ", kMaxUnixPath));
    }
    address.is_unix = true;
    address.path = std::string(rest);
    return address;
  }
  const size_t colon = text.rfind(':');
  if (colon == absl::string_view::npos) {
    return BadAddress(text, "the port is missing");
  }
  const absl::string_view host = text.substr(0, colon);
  const absl::string_view port = text.substr(colon + 1);
  if (host.empty()) return BadAddress(text, "the host is missing");
  const bool bracketed = host.front() == '[' && host.back() == ']';
  if (!bracketed && absl::StrContains(host, ':')) {
    return BadAddress(text, "an IPv6 host needs brackets");
  }
  if (std::any_of(host.begin(), host.end(), [](unsigned char letter) {
        return letter <= ' ' || letter == '/';
      })) {
    return BadAddress(text, "the host has a blank or a slash");
  }
  // SimpleAtoi would accept blanks and a sign.
  if (port.empty() || port.find_first_not_of("0123456789") != port.npos ||
      !absl::SimpleAtoi(port, &address.port) || address.port > 65535) {
    return BadAddress(text, absl::StrCat("'", port, "' is not a port"));
  }
  address.host = std::string(host);
  return address;
}

}  // namespace tfswitch
