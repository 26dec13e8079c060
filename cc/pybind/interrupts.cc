// When an op begins to wait, a function here replaces Python's handler of
// SIGINT. If no op waits when a signal comes, the function only calls Python's
// handler. Otherwise it wakes a thread, which checks where the main thread is.
// If the main thread is inside TensorFlow, the thread ends the waits, and makes
// the main thread raise KeyboardInterrupt. It does so when TensorFlow has
// already made the exception of the failed op, because an earlier exception
// would become a RuntimeError. If the main thread is elsewhere, the thread
// calls Python's handler, and wakes the main thread, whose own wait has started
// again after the signal.

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

// If two checks are further apart than this, they belong to different waits.
constexpr Clock::duration kPause = std::chrono::milliseconds(500);

std::atomic<void (*)(int)> python_handler{nullptr};
std::atomic<int> num_interrupts{0};
std::atomic<Clock::rep> last_asked{0};
// The time when HandleInterrupt() sent a signal to end a wait of the main
// thread. 0 if no such signal is on its way.
std::atomic<Clock::rep> sent_at{0};
sem_t signals;
pid_t owner = 0;

// A signal handler. It makes only calls that POSIX allows in one.
void OnInterrupt(int signal) {
  const auto is_recent = [now = Clock::now()](Clock::rep time) {
    return now - Clock::time_point(Clock::duration(time)) <= kPause;
  };
  if (const Clock::rep time = sent_at.exchange(0); time != 0) {
    if (is_recent(time)) return;
  }
  // A forked child does not have the thread that handles interrupts.
  if (!is_recent(last_asked) || getpid() != owner) {
    python_handler.load()(signal);
  } else {
    sem_post(&signals);
  }
}

bool Contains(const py::handle& text, const char* part) {
  return text.cast<std::string>().find(part) != std::string::npos;
}

// See KeepException(). Guarded by the GIL.
PyObject* kept[3] = {};

// Raises the kept exception. Runs in the main thread, with the GIL.
int RaiseKept(void*) {
  if (kept[0] == nullptr) return 0;
  if (PyFrameObject* frame = PyEval_GetFrame(); frame != nullptr) {
    const auto code = py::reinterpret_steal<py::object>(
        reinterpret_cast<PyObject*>(PyFrame_GetCode(frame)));
    // TensorFlow is making an exception.
    if (Contains(code.attr("co_filename"), "/tensorflow/python/") &&
        Contains(code.attr("co_name"), "__init__")) {
      return Py_AddPendingCall(RaiseKept, nullptr);
    }
  }
  RestoreException();
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
    // If the handler is another function, it belongs to the program. It may
    // return without an exception, and the program continues.
    const bool raises =
        signal.attr("getsignal")(SIGINT).is(signal.attr("default_int_handler"));
    if (raises && (Contains(code.attr("co_filename"), "/tensorflow/python/") ||
                   Contains(code.attr("co_name"), "tfswitch_"))) {
      num_interrupts.fetch_add(1);
      PyErr_SetNone(PyExc_KeyboardInterrupt);
      KeepException();
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

// Installs OnInterrupt() again, because the program may have installed its own
// handler since the last time.
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

bool HasKeptException() { return kept[0] != nullptr; }

void KeepException() {
  if (HasKeptException()) return PyErr_Clear();  // Ctrl-C twice.
  PyErr_Fetch(&kept[0], &kept[1], &kept[2]);
  Py_AddPendingCall(RaiseKept, nullptr);
}

void RestoreException() {
  PyErr_Restore(kept[0], kept[1], kept[2]);
  kept[0] = nullptr;
}

int IsOpInterrupted() {
  // The program has started this thread, and decides whether it ends.
  if (PyGILState_GetThisThreadState() != nullptr) return 0;
  thread_local Clock::time_point last;
  thread_local int seen = 0;
  const Clock::time_point now = Clock::now();
  if (now - last > kPause) {  // This is another wait than before.
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
