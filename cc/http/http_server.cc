// libevent's evhttp does HTTP, and its bufferevents move the bytes. evhttp 2.1
// has limits for the sizes of requests, but none for the number and the age of
// connections, which are added here. evhttp neither tells a new connection's
// descriptor nor when it closes one. So Adopt() reads the descriptors a moment
// after evhttp has accepted connections. A Connection is open as long as its
// descriptor is the same socket, and its bufferevent exists as long, because
// the bufferevent closes the descriptor when it is deleted.

#include "cc/http/http_server.h"

#include <arpa/inet.h>
#include <event2/buffer.h>
#include <event2/bufferevent.h>
#include <event2/bufferevent_ssl.h>
#include <event2/event.h>
#include <event2/http.h>
#include <event2/listener.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <openssl/ssl.h>
#include <openssl/x509.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <exception>
#include <mutex>
#include <system_error>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "absl/algorithm/container.h"
#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"
#include "cc/base/log_writer.h"
#include "cc/base/status_macros.h"
#include "cc/base/steady_clock.h"
#include "cc/http/tls_context.h"
#include "cc/rpc/address.h"
#include "cc/rpc/edge/sockets.h"

namespace tfswitch {
namespace {

constexpr ssize_t kMaxHeaderBytes = 16 << 10;
constexpr size_t kMaxPath = 2048;
// More is not read before evhttp has taken what is there. evhttp has no limit
// of its own for the line that begins a chunk.
constexpr size_t kMaxUnreadBytes = 2 * kMaxHeaderBytes;
constexpr timeval kTick = {1, 0};
// How soon a full server looks whether connections have ended.
constexpr timeval kShortTick = {0, 100'000};

template <auto kFree>
struct FreeWith {
  template <typename T>
  void operator()(T* object) const {
    kFree(object);
  }
};
template <typename T, auto kFree>
using Owned = std::unique_ptr<T, FreeWith<kFree>>;

void LogLineOfLibevent(int severity, const char* text) {
  if (severity < EVENT_LOG_WARN) return;
  LogMessage(LogLevel::kWarning, {"http"}, absl::StrCat("libevent: ", text));
}

int HttpStatus(const absl::Status& status) {
  switch (status.code()) {
    case absl::StatusCode::kUnauthenticated:
      return 401;
    case absl::StatusCode::kPermissionDenied:
      return 403;
    case absl::StatusCode::kResourceExhausted:
      return 429;
    default:
      return 500;
  }
}

HttpAnswer Refusal(int status, absl::string_view text);

// An exception must not pass libevent, which is C.
HttpAnswer AnswerOf(const HttpPage& page) {
  try {
    return page.answer();
  } catch (const std::exception& error) {
    return Refusal(500, absl::StrCat("the page failed: ", error.what()));
  }
}

HttpAnswer Refusal(int status, absl::string_view text) {
  HttpAnswer answer;
  answer.status = status;
  answer.body = absl::StrCat(text, "\n");
  return answer;
}

const char* HeaderOf(evhttp_request* request, const char* name) {
  return evhttp_find_header(evhttp_request_get_input_headers(request), name);
}

bufferevent* BuffersOf(evhttp_request* request) {
  return evhttp_connection_get_bufferevent(
      evhttp_request_get_connection(request));
}

// The caller as gRPC would describe it.
CallOrigin OriginOf(evhttp_request* request, absl::string_view authorization) {
  CallOrigin origin;
  origin.authorization = std::string(authorization);
  char* host = nullptr;
  ev_uint16_t port = 0;
  evhttp_connection_get_peer(evhttp_request_get_connection(request), &host,
                             &port);
  absl::string_view peer = host != nullptr ? host : "";
  absl::ConsumePrefix(&peer, "::ffff:");  // IPv4, on a socket for both.
  origin.peer = absl::StrContains(peer, ':')
                    ? absl::StrCat("ipv6:[", peer, "]:", port)
                    : absl::StrCat("ipv4:", peer, ":", port);
  SSL* ssl = bufferevent_openssl_get_ssl(BuffersOf(request));
  const X509* certificate =
      ssl != nullptr ? SSL_get0_peer_certificate(ssl) : nullptr;
  char name[256] = "";
  if (certificate != nullptr) {
    X509_NAME_get_text_by_NID(X509_get_subject_name(certificate),
                              NID_commonName, name, sizeof(name));
  }
  origin.certificate = name;
  return origin;
}

class RunningServer final : public HttpServer {
 public:
  // `is_open`: all users of this machine, and no others, may read all pages.
  RunningServer(const HttpServerOptions& options, bool is_open, HttpPages pages,
                std::unique_ptr<AccessControl> access,
                std::unique_ptr<TlsContext> tls)
      : options_(options),
        max_connections_(std::min(options.max_connections, MaxFiles() / 8)),
        is_open_(is_open),
        pages_(std::move(pages)),
        access_(std::move(access)),
        tls_(std::move(tls)) {}
  ~RunningServer() override;

  absl::Status Listen(Address address);

  const std::string& address() const override { return address_; }

 private:
  struct Connection {
    bufferevent* buffers = nullptr;
    SocketId socket;
    absl::Time deadline;
  };

  void Run();
  // Called by evhttp when it has accepted a connection.
  bufferevent* MakeBuffers();
  void Adopt();
  void SetDeadline(bufferevent* buffers, absl::Duration time);
  // Forgets connections that have ended.
  void Purge();
  bool IsFull() const {
    return connections_.size() + new_.size() >= max_connections_;
  }
  // Accepts no more connections until Tick() finds room.
  void Pause(const char* why);
  // Ends connections whose time is over.
  void Tick();
  void Answer(evhttp_request* request);
  HttpAnswer AnswerTo(evhttp_request* request);
  bool IsFromTrustedOrigin(evhttp_request* request) const;

  const HttpServerOptions options_;
  const uint64_t max_connections_;
  const bool is_open_;
  const HttpPages pages_;
  const std::unique_ptr<AccessControl> access_;
  std::string address_;  // Constant once listening.
  int stop_fd_ = -1;     // The thread ends when it can be read.
  std::thread thread_;

  // Only the thread uses the members below while it runs. Each is deleted
  // before those above it.
  const std::unique_ptr<TlsContext> tls_;  // Null: plaintext.
  Owned<event_base, event_base_free> base_;
  Owned<event, event_free> tick_;
  Owned<event, event_free> stop_;
  std::vector<evconnlistener*> listeners_;  // evhttp owns them.
  Owned<evhttp, evhttp_free> http_;
  std::vector<bufferevent*> new_;  // With a reference to each.
  std::unordered_map<int, Connection>
      connections_;  // The key is the descriptor.
  bool is_paused_ = false;
};

// The server whose thread this is.
thread_local RunningServer* this_server = nullptr;

RunningServer::~RunningServer() {
  if (thread_.joinable()) {
    eventfd_write(stop_fd_, 1);
    thread_.join();
  }
  for (bufferevent* each : new_) bufferevent_decref(each);
  http_.reset();
  if (stop_fd_ >= 0) close(stop_fd_);
}

absl::Status RunningServer::Listen(Address address) {
  const auto no_memory = [] {
    return absl::ResourceExhaustedError("libevent cannot make a server");
  };
  static std::once_flag logs;
  std::call_once(logs, [] { event_set_log_callback(&LogLineOfLibevent); });
  TFSWITCH_ASSIGN_OR_RETURN(const std::vector<int> sockets,
                            OpenSockets(&address));
  address_ = address.ToString();
  const Owned<event_config, event_config_free> config(event_config_new());
  if (config == nullptr) return no_memory();
  event_config_set_flag(config.get(), EVENT_BASE_FLAG_NOLOCK);
  base_.reset(event_base_new_with_config(config.get()));
  if (base_ == nullptr) return no_memory();
  http_.reset(evhttp_new(base_.get()));
  stop_fd_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  tick_.reset(event_new(
      base_.get(), -1, 0,
      [](int, short, void* self) { static_cast<RunningServer*>(self)->Tick(); },
      this));
  stop_.reset(event_new(
      base_.get(), stop_fd_, EV_READ,
      [](int, short, void* base) {
        event_base_loopbreak(static_cast<event_base*>(base));
      },
      base_.get()));
  if (http_ == nullptr || stop_fd_ < 0 || tick_ == nullptr ||
      stop_ == nullptr || event_add(tick_.get(), &kTick) != 0 ||
      event_add(stop_.get(), nullptr) != 0) {
    return no_memory();
  }
  evhttp_set_max_headers_size(http_.get(), kMaxHeaderBytes);
  evhttp_set_max_body_size(http_.get(), 0);
  // Answer() refuses methods.
  evhttp_set_allowed_methods(http_.get(), 0xffff);
  evhttp_set_bevcb(
      http_.get(),
      [](event_base*, void* self) {
        return static_cast<RunningServer*>(self)->MakeBuffers();
      },
      this);
  evhttp_set_gencb(
      http_.get(),
      [](evhttp_request* request, void* self) {
        static_cast<RunningServer*>(self)->Answer(request);
      },
      this);
  for (const int fd : sockets) {
    SetOption(fd, IPPROTO_TCP, TCP_NODELAY, 1);  // Connections inherit it.
    evconnlistener* listener =
        evconnlistener_new(base_.get(), nullptr, nullptr,
                           LEV_OPT_CLOSE_ON_FREE | LEV_OPT_CLOSE_ON_EXEC,
                           /*backlog=*/0, fd);
    if (listener == nullptr) return no_memory();
    // evhttp sets the argument of the callback.
    evconnlistener_set_error_cb(listener, [](evconnlistener*, void*) {
      this_server->Pause(std::strerror(errno));
    });
    listeners_.push_back(listener);
    if (evhttp_bind_listener(http_.get(), listener) == nullptr) {
      return no_memory();
    }
  }
  try {
    thread_ = std::thread(&RunningServer::Run, this);
  } catch (const std::system_error&) {
    return absl::ResourceExhaustedError("cannot start a thread");
  }
  return absl::OkStatus();
}

void RunningServer::Run() {
  // Writing to a closed connection shall fail, and not end the process. Other
  // signals are for other threads.
  sigset_t all;
  sigfillset(&all);
  pthread_sigmask(SIG_BLOCK, &all, nullptr);
  this_server = this;
  event_base_dispatch(base_.get());
}

bufferevent* RunningServer::MakeBuffers() {
  // The new connection gets its descriptor after this call.
  Adopt();
  if (connections_.size() + 1 >= max_connections_) Purge();
  SSL* ssl = tls_ != nullptr ? tls_->NewConnection() : nullptr;
  // Without memory for TLS, Answer() refuses the request.
  bufferevent* made =
      ssl != nullptr
          ? bufferevent_openssl_socket_new(base_.get(), -1, ssl,
                                           BUFFEREVENT_SSL_ACCEPTING,
                                           BEV_OPT_CLOSE_ON_FREE)
          : bufferevent_socket_new(base_.get(), -1, BEV_OPT_CLOSE_ON_FREE);
  if (made == nullptr) return nullptr;
  bufferevent_setwatermark(made, EV_READ, 0, kMaxUnreadBytes);
  bufferevent_incref(made);
  new_.push_back(made);
  event_base_once(
      base_.get(), -1, EV_TIMEOUT,
      [](int, short, void* self) {
        static_cast<RunningServer*>(self)->Adopt();
      },
      this, nullptr);
  if (IsFull()) Pause("all of its connections are open");
  return made;
}

void RunningServer::Adopt() {
  for (bufferevent* each : std::exchange(new_, {})) {
    const int fd = bufferevent_getfd(each);
    const SocketId id = IdOf(fd);
    if (id != SocketId()) {
      connections_[fd] = {each, id, SteadyNow() + options_.request_time};
    }
    bufferevent_decref(each);
  }
}

void RunningServer::SetDeadline(bufferevent* buffers, absl::Duration time) {
  const auto found = connections_.find(bufferevent_getfd(buffers));
  if (found != connections_.end()) found->second.deadline = SteadyNow() + time;
}

void RunningServer::Purge() {
  for (auto it = connections_.begin(); it != connections_.end();) {
    it = IdOf(it->first) == it->second.socket ? std::next(it)
                                              : connections_.erase(it);
  }
}

void RunningServer::Pause(const char* why) {
  if (!is_paused_) {
    LogMessage(LogLevel::kWarning, {"http_busy", 1, 1.0 / 60},
               absl::StrCat("the HTTP server on ", address_,
                            " accepts no connections for a moment: ", why));
  }
  is_paused_ = true;
  for (evconnlistener* each : listeners_) evconnlistener_disable(each);
  event_add(tick_.get(), &kShortTick);
}

void RunningServer::Tick() {
  Adopt();
  Purge();
  const absl::Time now = SteadyNow();
  std::vector<bufferevent*> late;
  for (const auto& [fd, connection] : connections_) {
    if (now >= connection.deadline) late.push_back(connection.buffers);
  }
  // evhttp closes them.
  for (bufferevent* each : late) {
    bufferevent_trigger_event(each, BEV_EVENT_TIMEOUT, 0);
  }
  if (is_paused_ && !IsFull()) {
    is_paused_ = false;
    for (evconnlistener* each : listeners_) evconnlistener_enable(each);
  }
  event_add(tick_.get(), is_paused_ ? &kShortTick : &kTick);
}

void RunningServer::Answer(evhttp_request* request) {
  Adopt();
  SetDeadline(BuffersOf(request), options_.request_time);
  evhttp_request_set_on_complete_cb(
      request,
      [](evhttp_request* done, void* self) {
        auto* server = static_cast<RunningServer*>(self);
        server->SetDeadline(BuffersOf(done), server->options_.idle_time);
      },
      this);
  const HttpAnswer answer = AnswerTo(request);
  evkeyvalq* headers = evhttp_request_get_output_headers(request);
  const auto add = [headers](const char* name, const std::string& value) {
    evhttp_add_header(headers, name, value.c_str());
  };
  add("Content-Type", answer.content_type);
  add("Content-Length", absl::StrCat(answer.body.size()));
  add("Cache-Control", "no-store");
  add("Content-Security-Policy", answer.content_security_policy);
  add("X-Content-Type-Options", "nosniff");
  if (IsFromTrustedOrigin(request)) {
    add("Access-Control-Allow-Origin", HeaderOf(request, "Origin"));
    add("Access-Control-Allow-Headers", "Authorization");
    add("Vary", "Origin");
  }
  if (answer.status == 401) add("WWW-Authenticate", "Bearer");
  if (answer.status == 405) add("Allow", "GET, HEAD");
  // A body that nobody has read could be taken for a request.
  if (answer.status == 405 || HeaderOf(request, "Content-Length") != nullptr ||
      HeaderOf(request, "Transfer-Encoding") != nullptr) {
    add("Connection", "close");
  }
  const Owned<evbuffer, evbuffer_free> body(evbuffer_new());
  if (body != nullptr &&
      evhttp_request_get_command(request) != EVHTTP_REQ_HEAD) {
    evbuffer_add(body.get(), answer.body.data(), answer.body.size());
  }
  evhttp_send_reply(request, answer.status, nullptr, body.get());
}

// Whether the name in the request is none that a website may have chosen.
bool IsLocalHost(evhttp_request* request) {
  const char* host = evhttp_request_get_host(request);
  if (host == nullptr) return true;  // HTTP/1.0; no browser sends it.
  const absl::string_view name = absl::StripSuffix(host, ".");
  in6_addr unused;
  return absl::EqualsIgnoreCase(name, "localhost") ||
         inet_pton(AF_INET, host, &unused) == 1 ||
         absl::StartsWith(name, "[") || absl::StrContains(name, ':');
}

bool RunningServer::IsFromTrustedOrigin(evhttp_request* request) const {
  const char* origin = HeaderOf(request, "Origin");
  return origin != nullptr &&
         absl::c_linear_search(options_.trusted_origins, origin);
}

HttpAnswer RunningServer::AnswerTo(evhttp_request* request) {
  if (tls_ != nullptr &&
      bufferevent_openssl_get_ssl(BuffersOf(request)) == nullptr) {
    return Refusal(503, "the server has no memory for TLS; try again");
  }
  const auto method = evhttp_request_get_command(request);
  // A browser asks before it sends a token from another origin.
  if (method == EVHTTP_REQ_OPTIONS && IsFromTrustedOrigin(request)) {
    HttpAnswer allowed;
    allowed.status = 204;
    return allowed;
  }
  if (method != EVHTTP_REQ_GET && method != EVHTTP_REQ_HEAD) {
    return Refusal(405, "only GET and HEAD are answered here");
  }
  if (std::strlen(evhttp_request_get_uri(request)) > kMaxPath) {
    return Refusal(
        414, absl::StrCat("the path is longer than ", kMaxPath, " characters"));
  }
  const char* path =
      evhttp_uri_get_path(evhttp_request_get_evhttp_uri(request));
  const auto page = pages_.find(path != nullptr ? path : "");
  if (page == pages_.end()) {
    return Refusal(
        404, absl::StrCat("there is no such page; there are: ",
                          absl::StrJoin(pages_, " ",
                                        [](std::string* text, const auto& at) {
                                          text->append(at.first);
                                        })));
  }
  if (page->second.is_public) return AnswerOf(page->second);
  if (is_open_ && !IsLocalHost(request)) {
    return Refusal(403,
                   "the server has no tokens, so it answers requests to "
                   "localhost and to IP addresses alone: a website could lead "
                   "its name to this machine. Use such an address, or give the "
                   "server --token_file");
  }
  const char* header = HeaderOf(request, "Authorization");
  const absl::string_view authorization = header != nullptr ? header : "";
  const MethodRule rule = {page->first.c_str(), v1::ROLE_READ,
                           /*needs_all_tables=*/true};
  Caller caller;
  const absl::Status status = access_->Admit(authorization, rule, &caller);
  if (status.ok()) return AnswerOf(page->second);
  access_->NoteEnd(OriginOf(request, authorization), caller, rule,
                   /*tables=*/{}, /*path=*/"", status);
  return Refusal(HttpStatus(status), status.message());
}

absl::StatusOr<std::unique_ptr<HttpServer>> StartServer(
    HttpServerOptions options, HttpPages pages) {
  TFSWITCH_ASSIGN_OR_RETURN(const Address address,
                            ParseAddress(options.address));
  if (address.is_unix) {
    return absl::InvalidArgumentError(absl::StrCat(
        "'", options.address, "' is a Unix socket; give host:port"));
  }
  // An address that is safe without --insecure needs no warning about it.
  if (IsLocal(address)) options.security.is_insecure = false;
  TFSWITCH_ASSIGN_OR_RETURN(auto access,
                            AccessControl::Open(address, options.security));
  std::unique_ptr<TlsContext> tls;
  if (!(options.security.tls == TlsFiles())) {
    TFSWITCH_ASSIGN_OR_RETURN(tls, TlsContext::Open(options.security.tls));
  }
  // With TLS, a browser refuses the certificate under another name.
  const bool is_open =
      IsLocal(address) && tls == nullptr && options.security.token_file.empty();
  auto server = std::make_unique<RunningServer>(
      options, is_open, std::move(pages), std::move(access), std::move(tls));
  TFSWITCH_RETURN_IF_ERROR(server->Listen(address));
  return server;
}

}  // namespace

absl::StatusOr<std::unique_ptr<HttpServer>> HttpServer::Start(
    const HttpServerOptions& options, HttpPages pages) {
  auto server = StartServer(options, std::move(pages));
  if (server.ok()) return server;
  return absl::Status(
      server.status().code(),
      absl::StrCat("flag --http_address: ", server.status().message()));
}

}  // namespace tfswitch
