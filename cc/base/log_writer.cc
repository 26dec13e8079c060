#include "cc/base/log_writer.h"

#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <climits>
#include <cstdlib>
#include <system_error>
#include <thread>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_replace.h"
#include "absl/time/clock.h"
#include "cc/base/steady_clock.h"
#include "nlohmann/json.hpp"

namespace tfswitch {
namespace {

constexpr size_t kMaxQueuedBytes = 256 << 10;
constexpr size_t kMaxBuckets = 1000;
constexpr size_t kRecentEvents = 200;
constexpr absl::Duration kSayEvery = absl::Minutes(1);
constexpr absl::Duration kPatience = absl::Seconds(1);

std::atomic<LogWriter*> of_process{nullptr};

// A child of fork() has no writing thread, and its copy of the mutex may be
// locked with no thread to unlock it. So the child gets a new writer, and only
// the parent writes the queued lines.
void ForgetInChild() { of_process = nullptr; }

void FlushAtExit() {
  if (LogWriter* const writer = of_process) writer->Flush(kPatience);
}

// Environment variables: the id of the process that shows server events, and of
// the one whose events are JSON. A forked child has another id, so the child
// does not show them.
constexpr char kEventsOf[] = "TFSWITCH_SERVER_EVENTS_OF";
constexpr char kJsonOf[] = "TFSWITCH_SERVER_JSON_OF";

std::atomic<bool> shows_server_events{false};
std::atomic<bool> uses_json{false};

bool IsThisProcess(const char* variable) {
  const char* const process = std::getenv(variable);
  return process != nullptr && process == absl::StrCat(getpid());
}

void SetThisProcess(const char* variable) {
  setenv(variable, absl::StrCat(getpid()).c_str(), /*overwrite=*/1);
}

bool ShowsServerEvents() {
  static const bool shows_program = IsThisProcess(kEventsOf);
  return shows_server_events || shows_program;
}

struct EventHistory {
  Mutex mutex;
  std::deque<std::string> events ABSL_GUARDED_BY(mutex);
};

EventHistory& History() {
  static auto* const history = new EventHistory;  // Threads may outlive main().
  return *history;
}

bool UsesJson() {
  static const bool program_uses_json = IsThisProcess(kJsonOf);
  return uses_json || program_uses_json;
}

// Returns `value` in JSON's quotes, in ASCII and at most `room` bytes, which
// must be at least 5. Bytes that are not UTF-8 become U+FFFD.
std::string JsonString(absl::string_view value, size_t room) {
  std::string text(value.substr(0, PIPE_BUF));
  for (;;) {
    const bool is_cut = text.size() < value.size();
    std::string json = nlohmann::json(is_cut ? absl::StrCat(text, "...") : text)
                           .dump(-1, ' ', /*ensure_ascii=*/true,
                                 nlohmann::json::error_handler_t::replace);
    if (json.size() <= room) return json;
    // A byte has at most six bytes of JSON.
    const size_t excess = (json.size() - room + 5) / 6;
    text.resize(text.size() - std::min(text.size(), excess));
  }
}

std::string JsonLine(absl::string_view time, absl::string_view level,
                     absl::string_view event,
                     std::initializer_list<LogField> fields) {
  std::string line = absl::StrCat("{\"time\":\"", time, "\",\"level\":\"",
                                  level, "\",\"event\":\"", event, "\"");
  for (const LogField& field : fields) {
    const absl::string_view value = field.value.Piece();
    if (value.empty()) continue;
    const std::string name = absl::StrCat(",\"", field.name, "\":");
    // Leaves room for a value of 32 bytes, the brace and the newline.
    if (line.size() + name.size() + 34 > PIPE_BUF) break;
    // NaN and Inf are no numbers of JSON.
    const bool is_number = field.is_number && nlohmann::json::accept(value);
    absl::StrAppend(&line, name,
                    is_number ? std::string(value)
                              : JsonString(value, PIPE_BUF - 2 - line.size() -
                                                      name.size()));
  }
  return absl::StrCat(line, "}");
}

std::string MessageLine(LogLevel level, absl::string_view event,
                        absl::string_view message) {
  constexpr absl::string_view kPrefixes[] = {"", "warning: ", "error: "};
  return ShowsServerEvents()
             ? EventLine(level, event, {{"message", message}})
             : absl::StrCat("tfswitch: ", kPrefixes[static_cast<int>(level)],
                            message);
}

std::string EventLine(bool is_json, LogLevel level, absl::string_view event,
                      std::initializer_list<LogField> fields) {
  constexpr absl::string_view kLevels[] = {"info", "warning", "error"};
  const absl::string_view level_name = kLevels[static_cast<int>(level)];
  const std::string time = absl::FormatTime("%Y-%m-%d%ET%H:%M:%E3SZ",
                                            absl::Now(), absl::UTCTimeZone());
  if (is_json) return JsonLine(time, level_name, event, fields);
  std::string line = absl::StrCat(time, " ", level_name, " ", event);
  for (const LogField& field : fields) {
    const absl::string_view value = field.value.Piece();
    if (value.empty()) continue;
    const bool is_plain = absl::c_all_of(value, [](char c) {
      return absl::ascii_isgraph(static_cast<unsigned char>(c)) && c != '"' &&
             c != '\\' && c != '=';
    });
    absl::StrAppend(&line, " ", field.name, "=");
    if (is_plain) {
      absl::StrAppend(&line, value);
    } else {
      // Escapes UTF-8 too, because terminals interpret some of its characters
      // as commands.
      std::string escaped = absl::CEscape(value);
      absl::StrReplaceAll({{"\\'", "'"}}, &escaped);
      absl::StrAppend(&line, "\"", escaped, "\"");
    }
  }
  return line;
}

void Remember(LogLevel level, absl::string_view event,
              std::initializer_list<LogField> fields) {
  std::string line = EventLine(/*is_json=*/true, level, event, fields);
  EventHistory& history = History();
  MutexLock lock(&history.mutex);
  history.events.push_back(std::move(line));
  if (history.events.size() > kRecentEvents) history.events.pop_front();
}

// Registers the fork handler while the library is loaded, before any fork.
const int registered =
    pthread_atfork(nullptr, nullptr, ForgetInChild) + std::atexit(FlushAtExit);

// Returns the text as one line that ends with a newline.
std::string LineOf(absl::string_view text) {
  constexpr absl::string_view kCut = "...";
  std::string line;
  for (const char c : text) {
    const bool is_control = (c >= 0 && c < ' ') || c == '\x7f';
    absl::StrAppend(&line,
                    is_control ? absl::CHexEscape({&c, 1}) : std::string(1, c));
    if (line.size() > PIPE_BUF - 1) {
      line.resize(PIPE_BUF - 1 - kCut.size());
      absl::StrAppend(&line, kCut);
      break;
    }
  }
  line.push_back('\n');
  return line;
}

bool WriteAll(int fd, absl::string_view line) {
  while (!line.empty()) {
    const ssize_t written = write(fd, line.data(), line.size());
    if (written > 0) {
      line.remove_prefix(static_cast<size_t>(written));
    } else if (written < 0 && errno == EAGAIN) {  // stderr may not block.
      pollfd polled = {fd, POLLOUT, 0};
      poll(&polled, 1, /*timeout=*/1000);
    } else if (written == 0 || errno != EINTR) {
      return false;
    }
  }
  return true;
}

}  // namespace

LogWriter& LogWriter::Get() {
  (void)registered;
  LogWriter* writer = of_process;
  if (writer != nullptr) return *writer;
  auto* const mine = new LogWriter(STDERR_FILENO);
  if (of_process.compare_exchange_strong(writer, mine)) return *mine;
  delete mine;
  return *writer;
}

bool LogWriter::Write(const LogKind& kind, absl::string_view text,
                      absl::string_view peer) {
  MutexLock lock(&mutex_);
  if (queued_bytes_ < kMaxQueuedBytes && IsWithinLimits(kind, peer)) {
    Add(LineOf(text));
    return true;
  }
  if (left_out_.empty()) {
    say_at_ = SteadyNow() + kSayEvery;
    changed_.NotifyAll();
  }
  ++left_out_[std::string(kind.name)];
  return false;
}

void LogWriter::WriteInOrder(const LogKind& kind, absl::string_view text) {
  Write(kind, text);
  MutexLock lock(&mutex_);
  if (!is_stuck_) WaitUntilWritten(kPatience);
}

bool LogWriter::Flush(absl::Duration patience) {
  MutexLock lock(&mutex_);
  SayWhatWasLeftOut();
  return WaitUntilWritten(patience);
}

bool LogWriter::WaitUntilWritten(absl::Duration patience) {
  const absl::Time end = SteadyNow() + patience;
  const uint64_t last = num_added_;
  while (num_done_ < last) {
    const absl::Duration left = end - SteadyNow();
    if (left <= absl::ZeroDuration()) {
      is_stuck_ = true;
      return false;
    }
    changed_.WaitFor(&mutex_, left);
  }
  return true;
}

bool LogWriter::IsWithinLimits(const LogKind& kind, absl::string_view peer) {
  // The map reaches this size only after hundreds of new peers, which takes
  // minutes. Then the limits of all peers are reset.
  if (buckets_.size() >= kMaxBuckets) buckets_.clear();
  const absl::Time now = SteadyNow();
  const auto refill = [&](const std::string& name, double share)
                          ABSL_NO_THREAD_SAFETY_ANALYSIS -> double& {
    const double burst = share * kind.burst;
    Bucket& bucket =
        buckets_.try_emplace(name, Bucket{burst, now}).first->second;
    bucket.left += share * kind.per_second *
                   absl::ToDoubleSeconds(now - std::exchange(bucket.last, now));
    return bucket.left = std::min(burst, bucket.left);
  };
  double& of_all = refill(std::string(kind.name), 10);
  if (of_all < 1) return false;
  double& of_peer = refill(absl::StrCat(kind.name, "\n", peer), 1);
  if (of_peer < 1) return false;
  --of_all;
  --of_peer;
  return true;
}

void LogWriter::Add(std::string line) {
  queued_bytes_ += line.size();
  queue_.push_back(std::move(line));
  ++num_added_;
  if (!is_started_) StartThread();
  changed_.NotifyAll();
}

void LogWriter::SayWhatWasLeftOut() {
  for (const auto& [name, number] : std::exchange(left_out_, {})) {
    const std::string message =
        absl::StrCat(number, " more lines about ", name, " were left out");
    Add(LineOf(MessageLine(LogLevel::kWarning, "lines_left_out", message)));
    if (ShowsServerEvents()) {
      Remember(LogLevel::kWarning, "lines_left_out", {{"message", message}});
    }
  }
}

void LogWriter::StartThread() {
  // Blocks all signals in the thread, so that it runs no signal handler of the
  // host program and gets no SIGPIPE.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  try {
    std::thread(&LogWriter::Run, this).detach();
    is_started_ = true;
  } catch (const std::system_error&) {
    // The next line tries again.
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

void LogWriter::Run() {
  MutexLock lock(&mutex_);
  for (;;) {
    if (!left_out_.empty() && SteadyNow() >= say_at_) SayWhatWasLeftOut();
    if (queue_.empty() && left_out_.empty()) {
      changed_.Wait(&mutex_);
      continue;
    }
    if (queue_.empty()) {
      changed_.WaitFor(&mutex_, say_at_ - SteadyNow());
      continue;
    }
    const std::string line = std::move(queue_.front());
    queue_.pop_front();
    queued_bytes_ -= line.size();
    mutex_.Unlock();
    const bool is_written = WriteAll(fd_, line);
    mutex_.Lock();
    ++num_done_;
    changed_.NotifyAll();
    if (!is_written) {
      ++num_refused_;
      continue;
    }
    is_stuck_ = false;
    if (num_refused_ == 0) continue;
    Add(LineOf(
        MessageLine(LogLevel::kWarning, "lines_left_out",
                    absl::StrCat("stderr did not take ",
                                 std::exchange(num_refused_, 0), " lines"))));
  }
}

std::string EventLine(LogLevel level, absl::string_view event,
                      std::initializer_list<LogField> fields) {
  return EventLine(UsesJson(), level, event, fields);
}

void LogServerEvent(LogLevel level, absl::string_view event,
                    std::initializer_list<LogField> fields,
                    absl::string_view peer) {
  if (!ShowsServerEvents()) return;
  LogKind kind = {event};
  if (peer.empty()) {
    // A limit for many lines at once: a server may make or recover many tables
    // at once, with a line for each.
    kind.burst = 2000;
    kind.per_second = 10;
  }
  if (LogWriter::Get().Write(kind, EventLine(level, event, fields), peer)) {
    Remember(level, event, fields);
  }
}

void LogMessage(LogLevel level, const LogKind& kind, absl::string_view message,
                absl::string_view peer) {
  if (LogWriter::Get().Write(kind, MessageLine(level, kind.name, message),
                             peer) &&
      ShowsServerEvents()) {
    Remember(level, kind.name, {{"message", message}});
  }
}

void LogMessageInOrder(LogLevel level, const LogKind& kind,
                       absl::string_view message) {
  LogWriter::Get().WriteInOrder(kind, MessageLine(level, kind.name, message));
}

void LogNotStarted(absl::string_view program, absl::string_view message) {
  LogWriter::Get().WriteInOrder(
      {program}, UsesJson() ? EventLine(LogLevel::kError, "not_started",
                                        {{"message", message}})
                            : absl::StrCat(program, ": ", message));
}

std::vector<std::string> RecentEvents() {
  EventHistory& history = History();
  MutexLock lock(&history.mutex);
  return {history.events.begin(), history.events.end()};
}

void ShowServerEvents() {
  shows_server_events = true;
  SetThisProcess(kEventsOf);
}

void UseJsonLog() {
  uses_json = true;
  SetThisProcess(kJsonOf);
}

LogNumber SecondsSince(absl::Time begin) {
  return {absl::StrFormat("%.3f", absl::ToDoubleSeconds(SteadyNow() - begin))};
}

}  // namespace tfswitch
