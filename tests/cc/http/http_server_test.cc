#include "cc/http/http_server.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <openssl/ssl.h>
#include <openssl/x509.h>
#include <poll.h>
#include <signal.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <cstdlib>
#include <fstream>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "cc/access/tokens.h"
#include "cc/base/steady_clock.h"
#include "cc/http/pages.h"
#include "cc/rpc/address.h"
#include "cc/rpc/edge/edge.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/cc/testing/deadlines.h"
#include "tests/cc/testing/scoped_folder.h"

namespace tfswitch {
namespace {

using testing::AllOf;
using testing::EndsWith;
using testing::HasSubstr;
using testing::Not;
using testing::StartsWith;

constexpr char kMetrics[] = "metric 1\n";

HttpPages Pages() {
  HttpPages pages =
      StandardPages([] { return kMetrics; }, [] { return "no rows yet"; });
  pages["/large"] = {[] {
                       HttpAnswer answer;
                       answer.body.assign(64 << 20, 'x');
                       return answer;
                     },
                     /*is_public=*/true};
  return pages;
}

std::unique_ptr<HttpServer> Start(const HttpServerOptions& options = {}) {
  auto server = HttpServer::Start(options, Pages());
  EXPECT_TRUE(server.ok()) << server.status();
  return *std::move(server);
}

HttpServerOptions Hasty() {
  HttpServerOptions options;
  options.request_time = absl::Milliseconds(100);
  options.idle_time = absl::Milliseconds(100);
  return options;
}

// Makes NAME.pem, which is also its own authority, and NAME.key.
TlsFiles MakeCertificate(const std::string& folder, const std::string& name) {
  const std::string path = absl::StrCat(folder, "/", name);
  const std::string command = absl::StrCat(
      "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes "
      "-days 2 -subj /CN=",
      name, " -addext subjectAltName=IP:127.0.0.1 -keyout ", path, ".key -out ",
      path, ".pem 2>/dev/null");
  EXPECT_EQ(std::system(command.c_str()), 0);
  return {"", path + ".pem", path + ".key", ""};
}

// A connection of a client.
class Client {
 public:
  explicit Client(const HttpServer& server) {
    signal(SIGPIPE, SIG_IGN);  // OpenSSL may write to a closed connection.
    sockaddr_in address = {};
    address.sin_family = AF_INET;
    address.sin_port =
        htons(static_cast<uint16_t>(ParseAddress(server.address())->port));
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    fd_ = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    EXPECT_EQ(
        connect(fd_, reinterpret_cast<sockaddr*>(&address), sizeof(address)),
        0);
    const timeval patience = {absl::ToInt64Seconds(kLong), 0};
    setsockopt(fd_, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof(patience));
  }
  ~Client() {
    SSL_free(ssl_);
    close(fd_);
  }
  Client(const Client&) = delete;
  Client& operator=(const Client&) = delete;

  // Returns the name of the server's certificate; "" if there is no handshake.
  std::string ShakeHands(const std::string& trusted, const TlsFiles& own) {
    SSL_CTX* context = SSL_CTX_new(TLS_client_method());
    SSL_CTX_load_verify_locations(context, trusted.c_str(), nullptr);
    SSL_CTX_set_verify(context, SSL_VERIFY_PEER, nullptr);
    if (!own.cert.empty()) {
      SSL_CTX_use_certificate_file(context, own.cert.c_str(), SSL_FILETYPE_PEM);
      SSL_CTX_use_PrivateKey_file(context, own.key.c_str(), SSL_FILETYPE_PEM);
    }
    ssl_ = SSL_new(context);
    SSL_CTX_free(context);
    SSL_set_fd(ssl_, fd_);
    if (SSL_connect(ssl_) != 1) return "";
    char name[64] = "";
    X509_NAME_get_text_by_NID(
        X509_get_subject_name(SSL_get0_peer_certificate(ssl_)), NID_commonName,
        name, sizeof(name));
    return name;
  }

  bool Send(const std::string& text) {
    return ssl_ != nullptr
               ? SSL_write(ssl_, text.data(), static_cast<int>(text.size())) > 0
               : send(fd_, text.data(), text.size(), MSG_NOSIGNAL) > 0;
  }

  // Reads until the connection ends, or has sent `end`.
  std::string Read(const std::string& end = "\r\n\r\n\r\n") {
    std::string text;
    char bytes[1 << 16];
    while (!absl::EndsWith(text, end)) {
      const auto size = ssl_ != nullptr ? SSL_read(ssl_, bytes, sizeof(bytes))
                                        : recv(fd_, bytes, sizeof(bytes), 0);
      if (size <= 0) break;
      text.append(bytes, static_cast<size_t>(size));
    }
    return text;
  }

  // Sends one request, and returns the answer when the connection has ended.
  std::string Ask(const std::string& path, const std::string& headers = "") {
    Send(absl::StrCat("GET ", path, " HTTP/1.1\r\nConnection: close\r\n",
                      headers, "\r\n"));
    return Read();
  }

  // Sends the text again and again until the server has closed the connection.
  // False if it does not.
  bool IsClosedWhileSending(const std::string& text) {
    for (const absl::Time end = Soon(); SteadyNow() < end;) {
      Send(text);
      pollfd readable = {fd_, POLLIN, 0};
      if (poll(&readable, 1, /*timeout=*/10) != 1) continue;
      char byte = 0;
      if (recv(fd_, &byte, 1, 0) <= 0) return true;
    }
    return false;
  }

 private:
  int fd_ = -1;
  SSL* ssl_ = nullptr;
};

std::string Ask(const HttpServer& server, const std::string& path,
                const std::string& headers = "") {
  return Client(server).Ask(path, headers);
}

TEST(HttpServerTest, AnswersItsPages) {
  const auto server = Start();

  EXPECT_THAT(Ask(*server, "/metrics"),
              AllOf(StartsWith("HTTP/1.1 200 OK\r\n"),
                    HasSubstr("Content-Type: text/plain; version=0.0.4;"),
                    HasSubstr("X-Content-Type-Options: nosniff\r\n"),
                    HasSubstr("Cache-Control: no-store\r\n"),
                    HasSubstr("Content-Security-Policy: default-src 'none'"),
                    EndsWith(absl::StrCat("\r\n\r\n", kMetrics))));
  EXPECT_THAT(Ask(*server, "/metrics?name=x"), EndsWith(kMetrics));
  EXPECT_THAT(Ask(*server, "/healthz"),
              AllOf(StartsWith("HTTP/1.1 200"), EndsWith("\r\n\r\nok\n")));
  EXPECT_THAT(
      Ask(*server, "/readyz"),
      AllOf(StartsWith("HTTP/1.1 503"), EndsWith("\r\n\r\nno rows yet\n")));
  EXPECT_THAT(Ask(*server, "/none"),
              AllOf(StartsWith("HTTP/1.1 404"),
                    HasSubstr("there are: /healthz /large /metrics /readyz")));
}

TEST(HttpServerTest, HeadHasTheHeadersAlone) {
  const auto server = Start();
  Client client(*server);

  client.Send("HEAD /metrics HTTP/1.1\r\nConnection: close\r\n\r\n");

  EXPECT_THAT(client.Read(),
              AllOf(HasSubstr("Content-Length: 9\r\n"), EndsWith("\r\n\r\n")));
}

TEST(HttpServerTest, OneConnectionHasSeveralRequests) {
  const auto server = Start();
  Client client(*server);

  for (int i = 0; i < 3; ++i) {
    client.Send("GET /metrics HTTP/1.1\r\n\r\n");
    EXPECT_THAT(client.Read(kMetrics), StartsWith("HTTP/1.1 200"));
  }
}

TEST(HttpServerTest, OtherMethodsAreRefusedAndEndTheConnection) {
  const auto server = Start();

  for (const char* method : {"POST", "DELETE", "OPTIONS", "TRACE", "WHAT"}) {
    Client client(*server);
    client.Send(absl::StrCat(method, " /metrics HTTP/1.1\r\n\r\n"));
    EXPECT_THAT(client.Read(), AllOf(StartsWith("HTTP/1.1 405"),
                                     HasSubstr("Allow: GET, HEAD\r\n")));
  }
}

TEST(HttpServerTest, ABodyIsNotTakenForARequest) {
  const auto server = Start();
  const std::string hidden = "GET /metrics HTTP/1.1\r\n\r\n";

  for (const char* method : {"GET", "HEAD", "POST", "TRACE"}) {
    for (const std::string& length :
         {absl::StrCat("Content-Length: ", hidden.size()),
          std::string("Transfer-Encoding: chunked")}) {
      Client client(*server);
      client.Send(absl::StrCat(method, " /healthz HTTP/1.1\r\n", length,
                               "\r\n\r\n", hidden));
      EXPECT_THAT(client.Read(), Not(HasSubstr(kMetrics))) << method;
    }
  }
}

TEST(HttpServerTest, LongRequestsAreRefused) {
  const auto server = Start();

  EXPECT_THAT(Ask(*server, "/" + std::string(4000, 'x')),
              StartsWith("HTTP/1.1 414"));
  Client path(*server);
  EXPECT_TRUE(path.Send("GET /"));
  EXPECT_TRUE(path.IsClosedWhileSending(std::string(1000, 'x')));
  Client headers(*server);
  EXPECT_TRUE(headers.Send("GET /metrics HTTP/1.1\r\n"));
  EXPECT_TRUE(headers.IsClosedWhileSending(std::string(1000, 'a') + ": b\r\n"));
  Client header(*server);
  EXPECT_TRUE(header.Send("GET /metrics HTTP/1.1\r\na: "));
  EXPECT_TRUE(header.IsClosedWhileSending(std::string(1000, 'x')));
}

TEST(HttpServerTest, AnEndlessLineOfAChunkIsNotKept) {
  const auto server = Start(Hasty());
  Client client(*server);

  client.Send("POST /healthz HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n");

  EXPECT_TRUE(client.IsClosedWhileSending(std::string(1 << 10, '0')));
}

TEST(HttpServerTest, BytesThatAreNoRequestAreRefused) {
  const auto server = Start();

  for (const std::string text :
       {"\r\n\r\n", "GET\r\n\r\n", "GET /metrics HTTP/9.9\r\n\r\n",
        "GET /metrics HTTP/1.1\r\nno colon\r\n\r\n",
        "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", "CONNECT a:b HTTP/1.1\r\n\r\n",
        "GET http://[::1/metrics HTTP/1.1\r\n\r\n"}) {
    Client client(*server);
    client.Send(text);
    EXPECT_THAT(client.Read(), Not(HasSubstr(" 200 "))) << text;
  }
  EXPECT_THAT(Ask(*server, "/metrics"), EndsWith(kMetrics));
}

TEST(HttpServerTest, ASlowClientIsClosedAndDelaysNobody) {
  const auto server = Start(Hasty());
  Client slow(*server);
  Client silent(*server);
  slow.Send("GET /metrics HTTP/1.1\r\na: ");

  EXPECT_THAT(Ask(*server, "/metrics"), EndsWith(kMetrics));
  // It sends a byte from time to time.
  EXPECT_TRUE(slow.IsClosedWhileSending("x"));
  EXPECT_EQ(silent.Read(), "");
}

TEST(HttpServerTest, AnIdleConnectionIsClosed) {
  const auto server = Start(Hasty());
  Client client(*server);
  client.Send("GET /metrics HTTP/1.1\r\n\r\n");

  EXPECT_THAT(client.Read(), EndsWith(kMetrics));  // Until it is closed.
}

TEST(HttpServerTest, AnAnswerThatIsNotTakenIsGivenUp) {
  HttpServerOptions options = Hasty();
  options.max_connections = 1;
  const auto server = Start(options);
  Client client(*server);
  client.Send("GET /large HTTP/1.1\r\n\r\n");

  // There is room for it only when the other connection has ended.
  EXPECT_THAT(Ask(*server, "/metrics"), EndsWith(kMetrics));
  EXPECT_LT(client.Read().size(), size_t{64} << 20);
}

TEST(HttpServerTest, SixHundredConnectionsAreAllAnswered) {
  HttpServerOptions options = Hasty();
  options.max_connections = 100;
  const auto server = Start(options);
  std::vector<std::unique_ptr<Client>> silent;
  for (int i = 0; i < 200; ++i) {
    silent.push_back(std::make_unique<Client>(*server));
  }
  std::vector<std::unique_ptr<Client>> clients;
  for (int i = 0; i < 400; ++i) {
    clients.push_back(std::make_unique<Client>(*server));
    clients.back()->Send("GET /metrics HTTP/1.1\r\nConnection: close\r\n\r\n");
  }

  for (const auto& client : clients) {
    EXPECT_THAT(client->Read(), EndsWith(kMetrics));
  }
}

TEST(HttpServerTest, StopsWhileClientsAreSlow) {
  auto server = Start();
  Client half(*server);
  half.Send("GET /metrics HTTP/1.1\r\n");
  Client unread(*server);
  unread.Send("GET /large HTTP/1.1\r\n\r\n");
  EXPECT_THAT(Ask(*server, "/metrics"), EndsWith(kMetrics));
  const Client accepted_late(*server);

  server.reset();

  EXPECT_EQ(half.Read(), "");
}

TEST(HttpServerTest, ABadAddressIsRefusedWithTheFlag) {
  const auto server = Start();
  const auto error = [](const std::string& address) {
    HttpServerOptions options;
    options.address = address;
    return HttpServer::Start(options, Pages()).status();
  };

  const absl::Status taken = error(server->address());
  EXPECT_EQ(taken.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(taken.message(),
              AllOf(HasSubstr("--http_address"), HasSubstr(server->address()),
                    HasSubstr("take another port")));
  for (const char* address : {"9077", "unix:/tmp/socket", "0.0.0.0:0"}) {
    const absl::Status bad = error(address);
    EXPECT_EQ(bad.code(), absl::StatusCode::kInvalidArgument) << address;
    EXPECT_THAT(bad.message(),
                AllOf(HasSubstr("--http_address"), HasSubstr(address)));
  }
}

TEST(HttpServerTest, MetricsNeedATokenThatMayReadAllTables) {
  const ScopedFolder folder;
  const std::string secret(64, 'b');
  const auto token = [&](char id) {
    return absl::StrCat("tfswitch_", std::string(12, id), "_", secret);
  };
  const auto record = [&](char id, const char* table) {
    const TokenHash hash = *HashToken(token(id));
    return absl::StrCat(
        R"({"id": ")", std::string(12, id),
        R"(", "role": "read", "tables": [")", table, R"("], "sha256": ")",
        absl::BytesToHexString(absl::string_view(
            reinterpret_cast<const char*>(hash.data()), hash.size())),
        "\"}");
  };
  HttpServerOptions options;
  options.security.token_file = folder.path() + "/tokens";
  std::ofstream(options.security.token_file)
      << R"({"tokens": [)" << record('a', "*") << "," << record('c', "one")
      << "]}";
  const auto server = Start(options);
  const auto ask = [&](const std::string& shown) {
    return Ask(*server, "/metrics",
               absl::StrCat("Authorization: Bearer ", shown, "\r\n"));
  };

  EXPECT_THAT(ask(token('a')), EndsWith(kMetrics));
  EXPECT_THAT(ask(token('c')), StartsWith("HTTP/1.1 403"));
  EXPECT_THAT(ask(token('d')), StartsWith("HTTP/1.1 401"));
  EXPECT_THAT(ask(token('a') + "b"), StartsWith("HTTP/1.1 401"));
  EXPECT_THAT(Ask(*server, "/metrics"),
              AllOf(StartsWith("HTTP/1.1 401"),
                    HasSubstr("WWW-Authenticate: Bearer\r\n"),
                    Not(HasSubstr(kMetrics))));
  EXPECT_THAT(Ask(*server, "/healthz"), StartsWith("HTTP/1.1 200"));
  EXPECT_THAT(Ask(*server, "/readyz"), StartsWith("HTTP/1.1 503"));
}

TEST(HttpServerTest, TlsAnswersOnlyTls) {
  const ScopedFolder folder;
  // The process also has connections of gRPC, whose bytes the edge checks.
  std::array<int, 2> of_grpc = {};
  ASSERT_EQ(socketpair(AF_UNIX, SOCK_STREAM, 0, of_grpc.data()), 0);
  Edge::Get().Watch(of_grpc[0], {}, /*has_tls=*/true, /*max_streams=*/1);
  HttpServerOptions options = Hasty();
  options.security.tls = MakeCertificate(folder.path(), "server");
  const auto server = Start(options);
  Client half(*server);
  half.Send("\x16\x03\x01");  // The beginning of a ClientHello.

  Client client(*server);
  EXPECT_EQ(client.ShakeHands(options.security.tls.cert, {}), "server");
  EXPECT_THAT(client.Ask("/metrics"), EndsWith(kMetrics));
  EXPECT_THAT(Ask(*server, "/metrics"), Not(HasSubstr(kMetrics)));
  EXPECT_EQ(half.Read(), "");  // It is closed.
  Edge::Get().Forget(of_grpc[0]);
  for (const int fd : of_grpc) close(fd);
}

TEST(HttpServerTest, AnAuthorityAsksForCertificates) {
  const ScopedFolder folder;
  const TlsFiles known = MakeCertificate(folder.path(), "known");
  const TlsFiles stranger = MakeCertificate(folder.path(), "stranger");
  HttpServerOptions options;
  options.security.tls = MakeCertificate(folder.path(), "server");
  options.security.tls.ca = known.cert;
  const auto server = Start(options);
  const auto ask = [&](const TlsFiles& own) {
    Client client(*server);
    client.ShakeHands(options.security.tls.cert, own);
    return client.Ask("/healthz");
  };

  EXPECT_THAT(ask(known), StartsWith("HTTP/1.1 200"));
  EXPECT_EQ(ask(stranger), "");
  EXPECT_EQ(ask({}), "");
}

TEST(PagesTest, OriginsAreAsBrowsersAndPoliciesWriteThem) {
  for (const auto& [url, origin] :
       {std::pair{"HTTPS://Ps0.Example.com:9077/",
                  "https://ps0.example.com:9077"},
        {"https://ps0:443", "https://ps0"},
        {"http://10.0.0.1:80/", "http://10.0.0.1"}}) {
    EXPECT_EQ(ParseOrigin(url).value_or("refused"), origin);
  }
  for (const char* url :
       {"", "ps0:9077", "ftp://ps0", "https://", "https://:9077",
        "https://ps0:", "https://ps0:0", "https://ps0:99999", "https://a:b:c",
        "https://ps_0", "http://[::1]:9077", "http://2001:db8::1:9077",
        "https://ps0/path", "https://me@ps0", "https://ps0; script-src *"}) {
    EXPECT_TRUE(absl::IsInvalidArgument(ParseOrigin(url).status())) << url;
  }
}

TEST(HttpServerTest, ARenewedCertificateIsTakenUp) {
  const ScopedFolder folder;
  HttpServerOptions options;
  options.security.tls = MakeCertificate(folder.path(), "server");
  const auto server = Start(options);
  const TlsFiles next = MakeCertificate(folder.path(), "next");
  const auto name = [&] { return Client(*server).ShakeHands(next.cert, {}); };
  EXPECT_EQ(name(), "");

  rename(next.key.c_str(), options.security.tls.key.c_str());
  ASSERT_EQ(
      std::system(absl::StrCat("cp ", next.cert, " ", options.security.tls.cert)
                      .c_str()),
      0);

  const absl::Time end = Soon();
  while (name() != "next" && SteadyNow() < end) {
  }
  EXPECT_EQ(name(), "next");
  // A damaged file changes nothing.
  std::ofstream(options.security.tls.cert) << "nothing";
  const absl::Time enough = SteadyNow() + absl::Seconds(3);
  while (SteadyNow() < enough) ASSERT_EQ(name(), "next");
}

}  // namespace
}  // namespace tfswitch
