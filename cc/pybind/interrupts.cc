// When an op begins to wait, Python's function for SIGINT is replaced by one
// that calls it, unless an op waits at that moment. Then it wakes a thread,
// which looks where the main thread is. If that is inside TensorFlow, the
// thread ends the waits, and has the main thread raise KeyboardInterrupt as
// soon as TensorFlow has made the exception of the failed op: an exception that
// is raised during that becomes a RuntimeError. Else it calls Python's
// function, and wakes the main thread, whose own wait began anew when the
// signal came.

#include "cc/pybind/interrupts.h"

#include <pthread.h>
#include <pybind11/pybind11.h>
#include <semaphore.h>
#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <string>
#include <system_error>
#include <thread>

namespace tfswitch {
namespace {

namespace py = pybind11;

using Clock = std::chrono::steady_clock;

// Between two questions of one wait at most.
constexpr Clock::duration kPause = std::chrono::milliseconds(500);

std::atomic<void (*)(int)> python_handler{nullptr};
std::atomic<int> num_interrupts{0};
std::atomic<Clock::rep> last_asked{0};
// When HandleInterrupt() has sent the signal, to end a wait of the main thread;
// 0: it has not, or that one has come.
std::atomic<Clock::rep> sent_at{0};
sem_t signals;
pid_t owner = 0;

// In a signal's handler: only calls that POSIX allows there.
void OnInterrupt(int signal) {
  const auto is_recent = [now = Clock::now()](Clock::rep time) {
    return now - Clock::time_point(Clock::duration(time)) <= kPause;
  };
  if (const Clock::rep time = sent_at.exchange(0); time != 0) {
    if (is_recent(time)) return;
  }
  // A fork has no thread that would hear of it.
  if (!is_recent(last_asked) || getpid() != owner) {
    python_handler.load()(signal);
  } else {
    sem_post(&signals);
  }
}

bool Contains(const py::handle& text, const char* part) {
  return text.cast<std::string>().find(part) != std::string::npos;
}

// In the main thread, with the GIL.
int RaiseKeyboardInterrupt(void*) {
  if (PyFrameObject* frame = PyEval_GetFrame(); frame != nullptr) {
    const auto code = py::reinterpret_steal<py::object>(
        reinterpret_cast<PyObject*>(PyFrame_GetCode(frame)));
    // TensorFlow makes an exception.
    if (Contains(code.attr("co_filename"), "/tensorflow/python/") &&
        Contains(code.attr("co_name"), "__init__")) {
      return Py_AddPendingCall(RaiseKeyboardInterrupt, nullptr);
    }
  }
  PyErr_SetNone(PyExc_KeyboardInterrupt);
  return -1;
}

void HandleInterrupt() {
  if (Py_IsInitialized() == 0) return python_handler.load()(SIGINT);
  const py::gil_scoped_acquire acquire;
  try {
    const py::module_ signal = py::module_::import("signal");
    const py::object main_thread =
        py::module_::import("threading").attr("main_thread")().attr("ident");
    const py::object code =
        py::module_::import("sys").attr("_current_frames")()[main_thread].attr(
            "f_code");
    // Otherwise the program has a handler of its own, which may go on.
    const bool raises =
        signal.attr("getsignal")(SIGINT).is(signal.attr("default_int_handler"));
    if (raises && (Contains(code.attr("co_filename"), "/tensorflow/python/") ||
                   Contains(code.attr("co_name"), "tfswitch_"))) {
      num_interrupts.fetch_add(1);
      Py_AddPendingCall(RaiseKeyboardInterrupt, nullptr);
      return;
    }
    python_handler.load()(SIGINT);
    sent_at = Clock::now().time_since_epoch().count();
    pthread_kill(main_thread.cast<pthread_t>(), SIGINT);
  } catch (const std::exception&) {
    python_handler.load()(SIGINT);  // Python is ending.
  }
}

[[noreturn]] void HandleInterrupts() {
  for (;;) {
    if (sem_wait(&signals) == 0) HandleInterrupt();
  }
}

// A program may have set its handler again since the last time.
void TakeSignal() {
  struct sigaction action;
  if (sigaction(SIGINT, nullptr, &action) != 0 ||
      (action.sa_flags & SA_SIGINFO) != 0 || action.sa_handler == SIG_DFL ||
      action.sa_handler == SIG_IGN || action.sa_handler == OnInterrupt) {
    return;
  }
  static const bool has_thread = [] {
    owner = getpid();
    sem_init(&signals, /*pshared=*/0, /*value=*/0);
    try {
      std::thread(HandleInterrupts).detach();
    } catch (const std::system_error&) {
      return false;  // Ctrl-C ends the program later.
    }
    return true;
  }();
  if (!has_thread) return;
  python_handler = action.sa_handler;
  action.sa_handler = OnInterrupt;
  sigaction(SIGINT, &action, nullptr);
}

}  // namespace

int IsOpInterrupted() {
  // A thread of the program: its end is for the program to say.
  if (PyGILState_GetThisThreadState() != nullptr) return 0;
  thread_local Clock::time_point last;
  thread_local int seen = 0;
  const Clock::time_point now = Clock::now();
  if (now - last > kPause) {  // Another wait than before.
    seen = num_interrupts;
    TakeSignal();
  }
  last = now;
  last_asked = now.time_since_epoch().count();
  if (num_interrupts == seen) return 0;
  seen = num_interrupts;
  return 1;
}

}  // namespace tfswitch
