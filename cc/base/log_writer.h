// Lines on stderr that hold up no call. One thread writes them, so that a
// stderr that nobody reads, or reads slowly, stops that thread and nothing
// else.
//
// Lines that are too many are left out, and a line says how many there were:
// those over the limits of their kind and peer, and those that come while the
// queue is full. That line comes a minute later, or at the end.
//
// Each library that holds this code has a writer of its own. A line is one
// write of at most PIPE_BUF bytes, so that those of several do not mix.

#ifndef TFSWITCH_CC_BASE_LOG_WRITER_H_
#define TFSWITCH_CC_BASE_LOG_WRITER_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <initializer_list>
#include <map>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "cc/base/mutex.h"

namespace tfswitch {

// What lines are about, and how many there may be: of one peer so many at once,
// and so many a second after that; of all peers ten times as many.
struct LogKind {
  absl::string_view name;  // Completes "7 more lines about".
  double burst = 20;
  double per_second = 1;
};

// Thread-safe. What has written lines is never destroyed.
class LogWriter {
 public:
  // The one for stderr. Its thread starts with the first line, and takes no
  // signal: a reader that has gone ends no process. A child of fork() gets
  // another one. The end of the process waits for the last lines for a second.
  static LogWriter& Get();

  explicit LogWriter(int fd) : fd_(fd) {}
  LogWriter(const LogWriter&) = delete;
  LogWriter& operator=(const LogWriter&) = delete;

  // Adds a line, and waits for nothing. Control characters in `text` are
  // escaped; what is too long is cut. `peer`: who is the cause of it, if others
  // must not suffer for him.
  void Write(const LogKind& kind, absl::string_view text,
             absl::string_view peer = "");

  // For lines between those of the host, such as a Python program, and never
  // where a server answers calls: then waits for a second until the line is
  // out. Once that was in vain, it does not wait again until one is.
  void WriteInOrder(const LogKind& kind, absl::string_view text);

  // Says what was left out, and waits until all lines are out. False if that
  // takes longer than `patience`.
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
  uint64_t num_done_ ABSL_GUARDED_BY(mutex_) = 0;     // Written or refused.
  uint64_t num_refused_ ABSL_GUARDED_BY(mutex_) = 0;  // To be said.
  // By the name of a kind, and by that and a peer.
  std::map<std::string, Bucket> buckets_ ABSL_GUARDED_BY(mutex_);
  // By the name of a kind.
  std::map<std::string, uint64_t> left_out_ ABSL_GUARDED_BY(mutex_);
  absl::Time say_at_ ABSL_GUARDED_BY(mutex_);  // With left_out_.
};

enum class LogLevel { kInfo, kWarning, kError };

// `name`: lower case with underscores. `value` may hold anything.
struct LogField {
  absl::string_view name;
  absl::AlphaNum value;
};

// Describes one thing that happened to a server as one line: the time in UTC,
// the level, the event's stable name, and fields, such as
//   2026-11-27T16:25:26.123Z info saved path=/data/8 rows=120 seconds=0.520
// Values that are no plain word are quoted, in ASCII. Fields without a value
// are left out. docs/server_log.md lists the events.
std::string EventLine(LogLevel level, absl::string_view event,
                      std::initializer_list<LogField> fields);

// Writes that line. Writes nothing in programs that have not called
// ShowServerEvents(), so tables in a Python process are silent. `peer`: as of
// LogWriter::Write.
void LogServerEvent(LogLevel level, absl::string_view event,
                    std::initializer_list<LogField> fields,
                    absl::string_view peer = "");

// For what must be seen everywhere. In programs that show events it writes the
// event `kind.name` with the field `message`; elsewhere a line such as
// "tfswitch: warning: the disk is full".
void LogMessage(LogLevel level, const LogKind& kind, absl::string_view message,
                absl::string_view peer = "");
// The same, as LogWriter::WriteInOrder.
void LogMessageInOrder(LogLevel level, const LogKind& kind,
                       absl::string_view message);

// Counts for all libraries of the process that have not written a line yet.
//
// REQUIRES: no other thread runs yet.
void ShowServerEvents();

// The value of a field `seconds`. `begin`: by SteadyNow().
std::string SecondsSince(absl::Time begin);

}  // namespace tfswitch

#endif  // TFSWITCH_CC_BASE_LOG_WRITER_H_
