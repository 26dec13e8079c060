#include "cc/recovery/state_keeper.h"

#include <cstdio>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "cc/base/status_macros.h"
#include "tfswitch/v1/parameter_server.pb.h"

namespace tfswitch {
namespace {

void Say(const std::string& line) {
  std::fprintf(stderr, "tfswitch-server: %s\n", line.c_str());
}

std::string Format(absl::Time time) {
  return absl::FormatTime("%Y-%m-%d %H:%M:%S UTC", time, absl::UTCTimeZone());
}

}  // namespace

absl::Status StateKeeper::Recover(const Shard::Interrupt& interrupt) {
  const std::string state = DataFolder::StateOf(folder_.path());
  std::atomic<uint64_t>& num_writes = *folder_.num_writes();
  const absl::StatusOr<Shard::RecoveredState> recovered =
      shard_.RecoverState(state, interrupt);
  const bool is_first = absl::IsNotFound(recovered.status());
  if (!recovered.ok() && !is_first) {
    return absl::Status(
        recovered.status().code(),
        absl::StrCat("cannot recover from '", folder_.path(),
                     "': ", recovered.status().message(),
                     ". To start without these rows, move the folder away"));
  }
  const uint64_t saved = is_first ? 0 : recovered->num_writes;
  const uint64_t applied = num_writes;
  v1::Recovery report;
  report.set_lost_writes(applied > saved ? applied - saved : 0);
  report.set_are_at_least(!folder_.is_counter_exact());
  num_writes = saved;
  const std::string lost =
      absl::StrCat(report.are_at_least() ? "at least " : "",
                   report.lost_writes(), " writes since then are lost");
  if (is_first) {
    if (report.lost_writes() > 0) {
      Say(absl::StrCat("'", folder_.path(), "' has no save yet: ", lost));
    }
    return absl::OkStatus();
  }
  report.set_saved_at_ms(absl::ToUnixMillis(recovered->saved_at));
  shard_.SetRecovery(report);
  for (const std::string& why : recovered->skipped) {
    Say(absl::StrCat("a newer save is skipped: ", why));
  }
  Say(absl::StrCat("recovered ", recovered->num_rows, " rows of ",
                   recovered->num_tables, " tables from the save of ",
                   Format(recovered->saved_at), "; ", lost));
  return absl::OkStatus();
}

void StateKeeper::Start(absl::Duration every) {
  if (every < absl::InfiniteDuration()) timer_.Set("state", every);
}

absl::Status StateKeeper::Stop() {
  timer_.Set("state", absl::ZeroDuration());
  is_stopping_ = true;
  return Save([] { return absl::OkStatus(); });
}

absl::Status StateKeeper::Save(const Shard::Interrupt& interrupt) {
  MutexLock lock(&saving_);
  return shard_.SaveState(DataFolder::StateOf(folder_.path()), interrupt)
      .status();
}

void StateKeeper::SaveOnTime() {
  const absl::Status status = Save([this] {
    return is_stopping_ ? absl::CancelledError("the server is stopping")
                        : absl::OkStatus();
  });
  if (status.ok() || is_stopping_) return;
  Say(absl::StrCat("warning: the state was not saved: ", status.message(),
                   ". Saves before it stay; it is tried again"));
}

}  // namespace tfswitch
