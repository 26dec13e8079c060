#include "cc/server/run_server.h"

#include <pthread.h>
#include <signal.h>

#include <atomic>
#include <cstdio>
#include <cstring>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "cc/base/log_writer.h"
#include "cc/base/malloc_tuning.h"
#include "cc/base/metric_list.h"
#include "cc/base/process_metrics.h"
#include "cc/base/steady_clock.h"
#include "cc/http/http_server.h"
#include "cc/http/pages.h"
#include "cc/recovery/data_folder.h"
#include "cc/recovery/repair.h"
#include "cc/recovery/state_keeper.h"
#include "cc/rpc/process_settings.h"
#include "cc/rpc/server/grpc_server.h"
#include "cc/server/server_flags.h"
#include "cc/shard/shard.h"
#include "cc/wire/json.h"
#include "tfswitch/v1/parameter_server.pb.h"

namespace tfswitch {
namespace {

constexpr int kStopped = 0;
constexpr int kCannotServe = 1;
constexpr int kBadFlag = 2;

// Prints a line for the user who has typed the flags, or for a program's log.
void PrintError(const absl::Status& status) {
  LogNotStarted("tfswitch-server", status.message());
}

// Logs the last line of the server, and returns the exit code.
int Stopped(int code, absl::string_view why, absl::Time started) {
  LogServerEvent(code == kStopped ? LogLevel::kInfo : LogLevel::kError,
                 "stopped", {{"why", why}, {"seconds", SecondsSince(started)}});
  return code;
}

// Describes the security settings, for example " with TLS, tokens"; may be
// empty.
std::string Describe(const SecurityOptions& security) {
  std::vector<std::string> parts;
  if (!(security.tls == TlsFiles())) parts.emplace_back("TLS");
  if (!security.tls.ca.empty()) parts.emplace_back("client certificates");
  if (!security.token_file.empty()) parts.emplace_back("tokens");
  return parts.empty() ? ""
                       : absl::StrCat(" with ", absl::StrJoin(parts, ", "));
}

int RunRepair(const ServerFlags& flags) {
  const absl::Status repaired = Repair(
      flags.data_dir, *flags.repair, flags.shard, [](absl::string_view line) {
        std::printf("%s\n", std::string(line).c_str());
      });
  if (!repaired.ok()) PrintError(repaired);
  return repaired.ok() ? kStopped : kCannotServe;
}

// Cancelled if the user stops the server while it recovers.
absl::Status CheckNoStopSignal() {
  sigset_t pending;
  sigpending(&pending);
  return sigismember(&pending, SIGTERM) || sigismember(&pending, SIGINT)
             ? absl::CancelledError("the server is stopped")
             : absl::OkStatus();
}

// Called before any thread starts, so that the signals are blocked in all
// threads. sigwait() receives them in ordinary code, which may call any
// function.
sigset_t BlockStopSignals() {
  sigset_t stop_signals;
  sigemptyset(&stop_signals);
  sigaddset(&stop_signals, SIGTERM);
  sigaddset(&stop_signals, SIGINT);
  pthread_sigmask(SIG_BLOCK, &stop_signals, nullptr);
  return stop_signals;
}

// Returns null if the flags name no address.
absl::StatusOr<std::unique_ptr<HttpServer>> StartHttp(
    const ServerFlags& flags, std::function<std::string()> metrics,
    const std::function<v1::ServerView()>& view,
    const std::atomic<const char*>* why_not_ready) {
  if (flags.http_address.empty()) return nullptr;
  HttpServerOptions options;
  options.address = flags.http_address;
  options.security = flags.server.security;
  options.trusted_origins = flags.http_servers;
  HttpPages pages = StandardPages(
      std::move(metrics), [why_not_ready] { return why_not_ready->load(); });
  pages["/"] = ServerPage(flags.http_servers);
  pages["/view.json"].answer = [view, servers = flags.http_servers] {
    v1::ServerView answer = view();
    for (const std::string& server : servers) answer.add_http_servers(server);
    const auto json = MessageToJson(answer, /*with_defaults=*/true);
    HttpAnswer page;
    page.status = json.ok() ? 200 : 500;
    if (json.ok()) page.content_type = "application/json";
    page.body = json.ok() ? *json : json.status().ToString();
    return page;
  };
  return HttpServer::Start(options, std::move(pages));
}

int Serve(ServerFlags flags) {
  ShowServerEvents();
  const absl::Time started = SteadyNow();
  PrepareServerProgram();
  if (!TuneMalloc()) {
    LogMessage(LogLevel::kWarning, {"malloc_refused"},
               "malloc refused its settings; exchanges will cost more CPU");
  }

  const sigset_t stop_signals = BlockStopSignals();
  std::unique_ptr<DataFolder> folder;
  if (!flags.data_dir.empty()) {
    auto opened = DataFolder::Open(
        flags.data_dir,
        {flags.cluster_name, flags.shard.shard_index, flags.shard.num_shards});
    if (!opened.ok()) {
      return Stopped(kCannotServe, opened.status().message(), started);
    }
    folder = *std::move(opened);
    flags.shard.num_writes = folder->num_writes();
    flags.server.starts_closed = true;
  }
  // Declared before the shard, which writes to it, and so destroyed after it.
  std::optional<StateKeeper> keeper;
  auto shard = std::make_shared<Shard>(flags.shard);
  const absl::Status opened =
      shard->tables().OpenColdFolder(flags.shard.cold_folder);
  if (!opened.ok()) return Stopped(kCannotServe, opened.message(), started);
  if (folder != nullptr)
    keeper.emplace(flags.keeper, folder.get(), shard.get());
  const auto add_metrics = [&](MetricList* list) {
    AddProcessMetrics(TFSWITCH_VERSION, started, list);
    if (keeper.has_value()) keeper->AddMetrics(list);
  };
  shard->metrics().Add(add_metrics);
  auto server = GrpcServer::Start(flags.server, shard);
  if (absl::IsInvalidArgument(server.status())) {
    PrintError(server.status());
    return kBadFlag;
  }
  if (!server.ok()) {
    return Stopped(kCannotServe, server.status().message(), started);
  }
  std::atomic<const char*> why_not_ready{"the server restores its rows"};
  // The other metrics of the shard must not be read during a recovery.
  std::atomic<bool> has_recovered{false};
  const auto metrics = [&] {
    if (has_recovered) return shard->MetricsText();
    MetricList list;
    list.SetCommonLabels({{"shard", absl::StrCat(flags.shard.shard_index)}});
    add_metrics(&list);
    return list.Text();
  };
  const auto http = StartHttp(
      flags, metrics,
      [&] {
        v1::ServerView view;
        if (has_recovered) {
          shard->Describe(&view);
          return view;
        }
        view.set_shard_index(flags.shard.shard_index);
        view.set_num_shards(flags.shard.num_shards);
        view.set_metrics(metrics());
        for (std::string& event : RecentEvents()) {
          view.add_events(std::move(event));
        }
        return view;
      },
      &why_not_ready);
  if (absl::IsInvalidArgument(http.status())) {
    PrintError(http.status());
    return kBadFlag;
  }
  if (!http.ok())
    return Stopped(kCannotServe, http.status().message(), started);
  LogServerEvent(LogLevel::kInfo, "started",
                 {{"version", TFSWITCH_VERSION},
                  {"shard", flags.shard.shard_index},
                  {"num_shards", flags.shard.num_shards},
                  {"address", (*server)->address()},
                  {"http", *http != nullptr ? (*http)->address() : ""},
                  {"data_dir", flags.data_dir},
                  {"flags", absl::StrJoin(flags.changed, " ")}});
  if (folder != nullptr) {
    const absl::Status recovered = keeper->Recover(&CheckNoStopSignal);
    if (!recovered.ok()) {
      return Stopped(absl::IsCancelled(recovered) ? kStopped : kCannotServe,
                     recovered.message(), started);
    }
    (*server)->Open();
    keeper->Start();
  }
  has_recovered = true;
  why_not_ready = "";
  std::printf("tfswitch-server %s: shard %u of %u serving on %s%s\n",
              TFSWITCH_VERSION, flags.shard.shard_index, flags.shard.num_shards,
              (*server)->address().c_str(),
              Describe(flags.server.security).c_str());
  std::fflush(stdout);

  int signal_number = 0;
  sigwait(&stop_signals, &signal_number);
  // The next signal kills.
  signal(SIGTERM, SIG_DFL);
  signal(SIGINT, SIG_DFL);
  pthread_sigmask(SIG_UNBLOCK, &stop_signals, nullptr);
  why_not_ready = "the server is stopping";
  (*server)->Stop(flags.grace_period);
  if (keeper.has_value()) {
    if (const absl::Status saved = keeper->Stop(); !saved.ok()) {
      return Stopped(
          kCannotServe,
          absl::StrCat("the state was not saved at the end: ", saved.message()),
          started);
    }
  }
  return Stopped(kStopped, strsignal(signal_number), started);
}

}  // namespace

int RunServer(const std::vector<std::string>& arguments) {
  ServerFlags flags;
  const absl::Status bad = ParseServerFlags(arguments, &flags);
  if (flags.has_json_log) UseJsonLog();
  if (!bad.ok()) {
    PrintError(bad);
    return kBadFlag;
  }
  if (flags.help) {
    std::fputs(ServerUsage().c_str(), stdout);
    return kStopped;
  }
  if (flags.version) {
    std::printf("tfswitch-server %s\n", TFSWITCH_VERSION);
    return kStopped;
  }
  if (flags.only_checks) return kStopped;
  if (flags.repair.has_value()) return RunRepair(flags);
  return Serve(std::move(flags));
}

}  // namespace tfswitch
