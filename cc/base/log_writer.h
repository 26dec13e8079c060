// Writes lines to stderr without delaying the callers. A single thread writes,
// so if stderr is read slowly or not at all, only this thread waits.
//
// A line is dropped if it exceeds the limit of its kind or its peer, or if the
// queue is full. A minute later, or when the process ends, a line reports how
// many were dropped.
//
// Each shared library that contains this code has its own writer. A line is one
// write of at most PIPE_BUF bytes, so lines of several writers do not mix.

#ifndef TFSWITCH_CC_BASE_LOG_WRITER_H_
#define TFSWITCH_CC_BASE_LOG_WRITER_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <initializer_list>
#include <map>
#include <string>
#include <type_traits>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "cc/base/mutex.h"

namespace tfswitch {

// A kind of log line, with its limit: each peer may cause `burst` lines at once
// and then `per_second`. All peers together may cause ten times as many.
struct LogKind {
  absl::string_view name;  // Completes "7 more lines about".
  double burst = 20;
  double per_second = 1;
};

// Thread-safe. An object that has written lines is never destroyed.
class LogWriter {
 public:
  // The writer for stderr. The first line starts its thread. The thread blocks
  // all signals, so a closed pipe does not end the process. A child of fork()
  // gets another writer. When the process ends, it waits up to a second for the
  // last lines.
  static LogWriter& Get();

  explicit LogWriter(int fd) : fd_(fd) {}
  LogWriter(const LogWriter&) = delete;
  LogWriter& operator=(const LogWriter&) = delete;

  // Adds a line without waiting. Control characters in `text` are escaped; long
  // text is cut. `peer` names the client that caused the line; each peer has a
  // limit of its own, so that its lines do not displace those of other peers.
  // Returns whether the line was added.
  bool Write(const LogKind& kind, absl::string_view text,
             absl::string_view peer = "");

  // Waits up to a second until the line is written, so that it is in order with
  // the lines of the host, such as a Python program. Never use it where a
  // server answers calls. If the line was not written in time, later calls do
  // not wait until some line has been written.
  void WriteInOrder(const LogKind& kind, absl::string_view text);

  // Reports dropped lines, and waits until all lines are written. Returns false
  // if that takes longer than `patience`.
  bool Flush(absl::Duration patience);

 private:
  struct Bucket {
    double left;
    absl::Time last;
  };

  bool IsWithinLimits(const LogKind& kind, absl::string_view peer)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Add(std::string line) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void SayWhatWasLeftOut() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool WaitUntilWritten(absl::Duration patience)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void StartThread() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Run();

  const int fd_;
  Mutex mutex_;
  CondVar changed_;
  bool is_started_ ABSL_GUARDED_BY(mutex_) = false;
  bool is_stuck_ ABSL_GUARDED_BY(mutex_) = false;
  std::deque<std::string> queue_ ABSL_GUARDED_BY(mutex_);
  size_t queued_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t num_added_ ABSL_GUARDED_BY(mutex_) = 0;
  // Lines that stderr has taken or refused.
  uint64_t num_done_ ABSL_GUARDED_BY(mutex_) = 0;
  // Lines that stderr did not take and that are not reported yet.
  uint64_t num_refused_ ABSL_GUARDED_BY(mutex_) = 0;
  // The key is the name of a kind, or that name and a peer.
  std::map<std::string, Bucket> buckets_ ABSL_GUARDED_BY(mutex_);
  // How many lines of each kind were dropped and are not reported yet.
  std::map<std::string, uint64_t> left_out_ ABSL_GUARDED_BY(mutex_);
  absl::Time say_at_ ABSL_GUARDED_BY(mutex_);  // When to report left_out_.
};

enum class LogLevel { kInfo, kWarning, kError };

// A number that has been formatted.
struct LogNumber {
  std::string text;
};

// `name`: lower case with underscores. `value` may contain anything.
struct LogField {
  template <typename T>
  LogField(absl::string_view name, const T& value)
      : name(name), value(value), is_number(std::is_arithmetic_v<T>) {}
  LogField(absl::string_view name, const LogNumber& number)
      : name(name), value(number.text), is_number(true) {}

  absl::string_view name;
  absl::AlphaNum value;
  bool is_number;
};

// Describes an event of a server as one line: the time in UTC, the level, the
// event's stable name, and fields, such as 2026-11-27T16:25:26.123Z info saved
// path=/data/8 rows=120 seconds=0.520 Values that are not a plain word are
// quoted, in ASCII. Fields without a value are left out. docs/server_log.md
// lists the events. In a program that has called UseJsonLog(), the line is a
// JSON object with the same names.
std::string EventLine(LogLevel level, absl::string_view event,
                      std::initializer_list<LogField> fields);

// Writes the event's line if the program has called ShowServerEvents(). In
// other programs, such as Python processes with tables, does nothing. `peer`:
// as in LogWriter::Write.
void LogServerEvent(LogLevel level, absl::string_view event,
                    std::initializer_list<LogField> fields,
                    absl::string_view peer = "");

// Writes a message in every program, unlike LogServerEvent(). A program that
// shows events writes it as the event `kind.name` with the field `message`;
// other programs write a line such as "tfswitch: warning: the disk is full".
void LogMessage(LogLevel level, const LogKind& kind, absl::string_view message,
                absl::string_view peer = "");
// The same, by LogWriter::WriteInOrder.
void LogMessageInOrder(LogLevel level, const LogKind& kind,
                       absl::string_view message);

// Writes why a program does not start: a line such as "tfswitch-server: flag
// ...", or as JSON the event `not_started` with the field `message`.
void LogNotStarted(absl::string_view program, absl::string_view message);

// Makes server events be written (see LogServerEvent()). This concerns only
// libraries of the process that have not written a line yet.
//
// REQUIRES: no other thread runs yet.
void ShowServerEvents();

// Makes events JSON objects. The requirements of ShowServerEvents() apply.
void UseJsonLog();

// The last 200 events that this process has written, the oldest first, as JSON
// objects. Empty unless the program shows events.
std::vector<std::string> RecentEvents();

// Formats the time since `begin`, a time of SteadyNow(), for a field `seconds`.
LogNumber SecondsSince(absl::Time begin);

}  // namespace tfswitch

#endif  // TFSWITCH_CC_BASE_LOG_WRITER_H_
