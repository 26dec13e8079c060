// Somebody sets the clock of the machine while a call waits.

#include <arpa/inet.h>
#include <dlfcn.h>
#include <linux/futex.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdarg>
#include <string>
#include <thread>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "cc/base/steady_clock.h"
#include "cc/rpc/client/grpc_client.h"
#include "cc/rpc/deadlines.h"
#include "gtest/gtest.h"

namespace {

constexpr int64_t kNanos = 1'000'000'000;
std::atomic<int64_t> clock_shift_s{0};

int64_t Nanos(const timespec& time) {
  return time.tv_sec * kNanos + time.tv_nsec;
}

}  // namespace

// In place of libc's, for this program and all of its libraries.
extern "C" {

__attribute__((visibility("default"))) int clock_gettime(
    clockid_t clock, struct timespec* time) noexcept {
  static auto* const real = reinterpret_cast<int (*)(clockid_t, timespec*)>(
      dlsym(RTLD_NEXT, "clock_gettime"));
  const int result = real(clock, time);
  if (clock == CLOCK_REALTIME) time->tv_sec += clock_shift_s;
  return result;
}

// Waits of Abseil until a time of day. The kernel would look at its clock all
// the time.
__attribute__((visibility("default"))) long syscall(long number, ...) noexcept {
  static auto* const real =
      reinterpret_cast<long (*)(long, ...)>(dlsym(RTLD_NEXT, "syscall"));
  va_list list;
  va_start(list, number);
  long args[6];
  for (long& arg : args) arg = va_arg(list, long);
  va_end(list);
  const auto* end = reinterpret_cast<const timespec*>(args[3]);
  if (number != SYS_futex || (args[1] & FUTEX_CLOCK_REALTIME) == 0 ||
      end == nullptr) {
    return real(number, args[0], args[1], args[2], args[3], args[4], args[5]);
  }
  for (;;) {
    timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    const int64_t left = Nanos(*end) - Nanos(now);
    if (left <= 0) {
      errno = ETIMEDOUT;
      return -1;
    }
    const int64_t until = Nanos(now) - clock_shift_s * kNanos +
                          std::min<int64_t>(left, kNanos / 100);
    const timespec soon = {until / kNanos, until % kNanos};
    const long result =
        real(number, args[0], args[1], args[2], &soon, args[4], args[5]);
    if (result == 0 || errno != ETIMEDOUT) return result;
  }
}

}  // extern "C"

namespace tfswitch {
namespace {

constexpr absl::Duration kTimeout = absl::Seconds(1);

// The server that a client waits for, and the change of the clock meanwhile.
struct SetClockCase {
  bool is_silent;  // Takes connections, and says nothing; else nobody is there.
  int64_t shift_s;
};

class SetClockTest : public testing::TestWithParam<SetClockCase> {
 protected:
  SetClockTest() {
    sockaddr_in address = {};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof(address);
    auto* const generic = reinterpret_cast<sockaddr*>(&address);
    EXPECT_EQ(bind(socket_, generic, size), 0);
    EXPECT_EQ(getsockname(socket_, generic, &size), 0);
    if (GetParam().is_silent) {
      EXPECT_EQ(listen(socket_, 8), 0);
    }
    options_.address = absl::StrCat("127.0.0.1:", ntohs(address.sin_port));
    options_.timeout = kTimeout;
  }
  ~SetClockTest() override {
    clock_shift_s = 0;
    close(socket_);
  }

  GrpcClientOptions options_;

 private:
  const int socket_ = socket(AF_INET, SOCK_STREAM, 0);
};

// The test would not end if a clock that is set back counted. One of several
// calls polls, and the others wait for it.
TEST_P(SetClockTest, CallsWaitAsLongAsTheirTimeoutSays) {
  std::thread setter([] {
    absl::SleepFor(kTimeout / 10);
    clock_shift_s = GetParam().shift_s;
  });
  const auto wall_begin = std::chrono::system_clock::now();
  const auto call = [&] {
    const absl::Time begin = SteadyNow();

    const absl::Status status = NewGrpcClient(options_).status();

    EXPECT_EQ(status.code(), GetParam().is_silent
                                 ? absl::StatusCode::kDeadlineExceeded
                                 : absl::StatusCode::kUnavailable)
        << status;
    // A pause before the last try may not fit any more.
    EXPECT_GT(SteadyNow() - begin, kTimeout / 3) << status;
  };
  std::thread others[] = {std::thread(call), std::thread(call)};
  call();
  for (std::thread& other : others) other.join();
  setter.join();
  // absl::Now() notices it later.
  EXPECT_NE(std::chrono::round<std::chrono::hours>(
                std::chrono::system_clock::now() - wall_begin)
                .count(),
            0);
}

INSTANTIATE_TEST_SUITE_P(
    Clocks, SetClockTest,
    testing::Values(SetClockCase{false, -3600}, SetClockCase{false, 3600},
                    SetClockCase{true, -3600}, SetClockCase{true, 3600}),
    [](const auto& info) {
      return std::string(info.param.is_silent ? "Silent" : "Dead") +
             (info.param.shift_s < 0 ? "Back" : "Forward");
    });

TEST(DeadlinesTest, TheyGoByTheSteadyClock) {
  for (const absl::Time time :
       {SteadyNow() + absl::Seconds(5), absl::InfiniteFuture()}) {
    const gpr_timespec deadline = ToDeadline(time);

    EXPECT_EQ(deadline.clock_type, GPR_CLOCK_MONOTONIC);
    const gpr_timespec now = gpr_now(GPR_CLOCK_MONOTONIC);
    EXPECT_GT(gpr_time_sub(deadline, now).tv_sec, 3);
  }
}

}  // namespace
}  // namespace tfswitch
