#include "cc/server/server_flags.h"

#include <algorithm>
#include <cstdint>
#include <utility>

#include "absl/flags/flag.h"
#include "absl/flags/reflection.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/strip.h"
#include "cc/base/files.h"
#include "cc/base/status_macros.h"
#include "cc/http/pages.h"
#include "cc/recovery/data_folder.h"
#include "cc/rpc/security_flags.h"
#include "cc/rpc/server/server_limits.h"

ABSL_FLAG(std::string, address, "127.0.0.1:7077",
          "Where to listen: host:port (port 0: any free one) or unix:/path.");
ABSL_FLAG(std::string, http_address, "", tfswitch::kHttpAddressHelp);
ABSL_FLAG(
    std::vector<std::string>, http_servers, {},
    "The HTTP addresses of all servers of the cluster as a browser "
    "reaches them, such as https://ps0:9077,https://ps1:9077. The page of "
    "each server then shows all of them.");
ABSL_FLAG(uint32_t, shard_index, 0,
          "Place of this server among the servers of the cluster, from 0.");
ABSL_FLAG(uint32_t, num_shards, 1, "Number of servers in the cluster.");
ABSL_FLAG(int32_t, num_threads, 0,
          "Threads that answer pulls and pushes. 0: one per core.");
ABSL_FLAG(uint64_t, max_message_bytes, uint64_t{1} << 30,
          "Longest message in either direction.");
ABSL_FLAG(std::string, checkpoint_root, "",
          "The folder that checkpoints lie below: paths of saves and restores "
          "are taken from it. Empty: 'checkpoints' in --data_dir if that is "
          "given, else the folder that the server is started in, unless that "
          "is '/'.");
ABSL_FLAG(std::string, data_dir, "",
          "The folder of this server alone, from which it comes back with its "
          "rows after it was stopped or killed. Empty: rows are in memory "
          "only.");
ABSL_FLAG(std::string, cold_dir, "",
          "The folder for rows that tables with when_full='disk' move to disk "
          "at --max_memory. Servers may share it: each has a folder in it.");
ABSL_FLAG(absl::Duration, checkpoint_every, absl::Minutes(10),
          "How often the state is saved to --data_dir. inf: only when the "
          "server is stopped.");
ABSL_FLAG(
    bool, push_log, false,
    "Keep a log of writes in --data_dir, so that no write is lost that was "
    "acknowledged.");
ABSL_FLAG(std::string, push_log_sync, "1s",
          "How often the log is flushed to the disk: the writes that a power "
          "loss may take. always: before each answer.");
ABSL_FLAG(uint64_t, push_log_max_bytes, uint64_t{8} << 30,
          "Longest log. The state is saved when it has half of that.");
ABSL_FLAG(std::string, cluster_name, "",
          "A name that --data_dir remembers: servers of clusters with other "
          "names refuse the folder.");
ABSL_FLAG(
    std::string, repair, "",
    "Repair --data_dir in place of serving. dry_run: only say what is "
    "whole. cut: cut the push log at the first damage. to_save: go back "
    "to the newest whole save. The removed files are kept in the folder.");
ABSL_FLAG(std::string, tls_cert, "", tfswitch::kTlsCertHelp);
ABSL_FLAG(std::string, tls_key, "", tfswitch::kTlsKeyHelp);
ABSL_FLAG(std::string, tls_ca, "", tfswitch::kTlsCaHelp);
ABSL_FLAG(std::string, token_file, "", tfswitch::kTokenFileHelp);
ABSL_FLAG(bool, insecure, false, tfswitch::kInsecureHelp);
ABSL_FLAG(bool, reflection, false, tfswitch::kReflectionHelp);
ABSL_FLAG(absl::Duration, grace_period, absl::Seconds(10),
          "How long running calls may take to end when the server is stopped.");
ABSL_FLAG(std::string, log_format, "text",
          "How events are written to stderr: text, or json for one object a "
          "line.");

namespace tfswitch {
namespace {

constexpr const char* kFlagNames[] = {
    "address",       "shard_index",        "num_shards",
    "num_threads",   "max_message_bytes",  "checkpoint_root",
    "data_dir",      "checkpoint_every",   "push_log",
    "push_log_sync", "push_log_max_bytes", "cluster_name",
    "repair",        "tls_cert",           "tls_key",
    "tls_ca",        "token_file",         "insecure",
    "reflection",    "grace_period",       "http_address",
    "log_format",    "http_servers",       "cold_dir"};

absl::CommandLineFlag* FindFlag(absl::string_view name) {
  for (absl::string_view known : kFlagNames) {
    if (name == known) return absl::FindCommandLineFlag(name);
  }
  return nullptr;
}

bool IsLimit(absl::string_view name, ServerFlags* flags) {
  const auto limits = ListServerLimits(&flags->server, &flags->shard);
  return std::any_of(limits.begin(), limits.end(),
                     [name](const auto& limit) { return name == limit.name; });
}

absl::Status SetFlag(absl::string_view name, absl::string_view value,
                     absl::CommandLineFlag* flag) {
  // Refuses an empty value, which may come from a variable that is not set:
  // the server must not fall back to plaintext.
  if (value.empty() &&
      (absl::StartsWith(name, "tls_") || name == "token_file")) {
    return absl::InvalidArgumentError(absl::StrCat(
        "flag --", name, " is empty; give a file, or leave it out"));
  }
  std::string error;
  if (flag->ParseFrom(value, &error)) return absl::OkStatus();
  // Some of Abseil's texts have several lines.
  const bool is_one_line = !absl::StrContains(error, '\n') && !error.empty();
  return absl::InvalidArgumentError(absl::StrCat(
      "flag --", name, ": '", value,
      flag->IsOfType<absl::Duration>() ? "' is no duration, such as 30s or 10m"
                                       : "' is not a value for it",
      "; see --help", is_one_line ? ": " : "", is_one_line ? error : ""));
}

// Sets Abseil's flags, and the limits in `flags`. If a flag was given that has
// no effect without --data_dir, `*needs_data_dir` becomes its name.
absl::Status ReadArguments(const std::vector<std::string>& arguments,
                           ServerFlags* flags, std::string* needs_data_dir) {
  for (size_t i = 0; i < arguments.size(); ++i) {
    absl::string_view argument = arguments[i];
    flags->help |= argument == "--help" || argument == "-h";
    flags->version |= argument == "--version";
    if (flags->help || flags->version) return absl::OkStatus();
    if (argument == "--check_flags") {
      flags->only_checks = true;
      continue;
    }
    if (!absl::ConsumePrefix(&argument, "--")) {
      return absl::InvalidArgumentError(absl::StrCat(
          "unexpected argument '", argument, "'; flags start with --"));
    }
    const size_t equals = argument.find('=');
    const absl::string_view name = argument.substr(0, equals);
    absl::CommandLineFlag* flag = FindFlag(name);
    if (flag == nullptr && !IsLimit(name, flags)) {
      return absl::InvalidArgumentError(
          absl::StrCat("unknown flag --", name, "; see --help"));
    }
    const bool is_switch = flag != nullptr && flag->IsOfType<bool>();
    if (equals == argument.npos && !is_switch && i + 1 == arguments.size()) {
      return absl::InvalidArgumentError(
          absl::StrCat("flag --", name, " needs a value"));
    }
    const absl::string_view value =
        equals != argument.npos ? argument.substr(equals + 1)
        : is_switch             ? absl::string_view("true")
                                : absl::string_view(arguments[++i]);
    if (flag == nullptr) {
      const absl::Status bad =
          SetServerLimit(name, value, &flags->server, &flags->shard);
      if (!bad.ok()) {
        return absl::Status(bad.code(), absl::StrCat("flag --", bad.message()));
      }
      flags->changed.push_back(absl::StrCat("--", name, "=", value));
      continue;
    }
    if (name == "checkpoint_every" || name == "cluster_name" ||
        name == "repair" || absl::StartsWith(name, "push_log")) {
      *needs_data_dir = std::string(name);
    }
    TFSWITCH_RETURN_IF_ERROR(SetFlag(name, value, flag));
    if (flag->CurrentValue() != flag->DefaultValue()) {
      flags->changed.push_back(
          absl::StrCat("--", name, "=", flag->CurrentValue()));
    }
  }
  return absl::OkStatus();
}

// Reads --data_dir and the flags that depend on it.
absl::Status ReadDataFlags(ServerFlags* flags) {
  const std::string data_dir = absl::GetFlag(FLAGS_data_dir);
  if (!data_dir.empty()) {
    flags->data_dir = AbsolutePath(data_dir);
    flags->shard.data_folder = flags->data_dir;
    flags->shard.own_folder = DataFolder::StateOf(flags->data_dir);
    flags->shard.log_folder = DataFolder::LogOf(flags->data_dir);
  }
  const std::string cold_dir = absl::GetFlag(FLAGS_cold_dir);
  if (!cold_dir.empty()) {
    flags->shard.cold_folder = absl::StrCat(AbsolutePath(cold_dir), "/",
                                            absl::GetFlag(FLAGS_shard_index));
  }
  flags->cluster_name = absl::GetFlag(FLAGS_cluster_name);
  const std::string repair = absl::GetFlag(FLAGS_repair);
  for (const auto& [name, kind] : {std::pair("dry_run", RepairKind::kDryRun),
                                   std::pair("cut", RepairKind::kCut),
                                   std::pair("to_save", RepairKind::kToSave)}) {
    if (repair == name) flags->repair = kind;
  }
  if (!repair.empty() && !flags->repair.has_value()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "flag --repair must be dry_run, cut or to_save, got '", repair, "'"));
  }
  StateKeeperOptions& keeper = flags->keeper;
  keeper.save_every = absl::GetFlag(FLAGS_checkpoint_every);
  if (keeper.save_every < absl::Seconds(1)) {
    return absl::InvalidArgumentError(
        absl::StrCat("flag --checkpoint_every must be at least 1s, got ",
                     absl::FormatDuration(keeper.save_every)));
  }
  keeper.has_log = absl::GetFlag(FLAGS_push_log);
  const std::string sync = absl::GetFlag(FLAGS_push_log_sync);
  if (sync == "always") {
    keeper.log.sync_every = absl::ZeroDuration();
  } else if (!absl::ParseDuration(sync, &keeper.log.sync_every) ||
             keeper.log.sync_every <= absl::ZeroDuration()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "flag --push_log_sync must be a duration such as 1s, or always, got '",
        sync, "'"));
  }
  keeper.log.max_bytes = absl::GetFlag(FLAGS_push_log_max_bytes);
  if (keeper.log.max_bytes < 4 * keeper.log.segment_bytes) {
    return absl::InvalidArgumentError(absl::StrCat(
        "flag --push_log_max_bytes must be at least ",
        4 * keeper.log.segment_bytes, ", got ", keeper.log.max_bytes));
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status ParseServerFlags(const std::vector<std::string>& arguments,
                              ServerFlags* flags) {
  std::string needs_data_dir;
  TFSWITCH_RETURN_IF_ERROR(ReadArguments(arguments, flags, &needs_data_dir));
  if (flags->help || flags->version) return absl::OkStatus();
  const std::string log_format = absl::GetFlag(FLAGS_log_format);
  flags->has_json_log = log_format == "json";
  if (log_format != "text" && !flags->has_json_log) {
    return absl::InvalidArgumentError(absl::StrCat(
        "flag --log_format must be text or json, got '", log_format, "'"));
  }
  flags->server.address = absl::GetFlag(FLAGS_address);
  flags->server.num_threads = absl::GetFlag(FLAGS_num_threads);
  flags->server.max_message_bytes = absl::GetFlag(FLAGS_max_message_bytes);
  SecurityOptions& security = flags->server.security;
  security.tls = WithAbsolutePaths({absl::GetFlag(FLAGS_tls_ca),
                                    absl::GetFlag(FLAGS_tls_cert),
                                    absl::GetFlag(FLAGS_tls_key), ""});
  security.token_file = absl::GetFlag(FLAGS_token_file);
  if (!security.token_file.empty()) {
    security.token_file = AbsolutePath(security.token_file);
  }
  security.is_insecure = absl::GetFlag(FLAGS_insecure);
  flags->server.has_reflection = absl::GetFlag(FLAGS_reflection);
  flags->http_address = absl::GetFlag(FLAGS_http_address);
  for (const std::string& url : absl::GetFlag(FLAGS_http_servers)) {
    const auto origin = ParseOrigin(url);
    if (!origin.ok()) {
      return absl::InvalidArgumentError(
          absl::StrCat("flag --http_servers: ", origin.status().message()));
    }
    flags->http_servers.push_back(*origin);
  }
  if (!flags->http_servers.empty() && flags->http_address.empty()) {
    return absl::InvalidArgumentError(
        "flag --http_servers needs --http_address");
  }
  flags->shard.shard_index = absl::GetFlag(FLAGS_shard_index);
  flags->shard.num_shards = absl::GetFlag(FLAGS_num_shards);
  if (!needs_data_dir.empty() && absl::GetFlag(FLAGS_data_dir).empty()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "flag --", needs_data_dir, " needs --data_dir, the folder to save to"));
  }
  TFSWITCH_RETURN_IF_ERROR(ReadDataFlags(flags));
  flags->grace_period = absl::GetFlag(FLAGS_grace_period);
  if (flags->grace_period < absl::ZeroDuration()) {
    return absl::InvalidArgumentError(
        absl::StrCat("flag --grace_period must not be negative, got ",
                     absl::FormatDuration(flags->grace_period)));
  }
  const std::string root = absl::GetFlag(FLAGS_checkpoint_root);
  flags->shard.checkpoint_root =
      root.empty() ? DefaultRoot() : AbsolutePath(root);
  TFSWITCH_RETURN_IF_ERROR(flags->shard.Validate());
  // Created together with the data folder.
  if (root.empty() && !flags->data_dir.empty()) {
    flags->shard.checkpoint_root = DataFolder::CheckpointsOf(flags->data_dir);
  }
  return absl::OkStatus();
}

std::string ServerUsage() {
  std::string text =
      "tfswitch-server: one shard of a cluster of parameter servers.\n\n"
      "  tfswitch-server --address 127.0.0.1:7077 --shard_index 0 "
      "--num_shards 2\n\n";
  for (const char* name : kFlagNames) {
    const absl::CommandLineFlag* flag = absl::FindCommandLineFlag(name);
    absl::StrAppend(&text, "  --", name, "  ", flag->Help(),
                    " Default: ", flag->DefaultValue(), "\n");
  }
  ServerFlags defaults;
  for (const ServerLimit& limit :
       ListServerLimits(&defaults.server, &defaults.shard)) {
    absl::StrAppend(&text, "  --", limit.name, "  ", limit.help,
                    " Default: ", *limit.value, "\n");
  }
  absl::StrAppend(&text,
                  "  --check_flags  Ends when the flags have been checked.\n"
                  "  --version  Prints the version.\n"
                  "  --help  Prints this text.\n");
  return text;
}

}  // namespace tfswitch
