// When an op begins to wait, Python's function for SIGINT is replaced by one
// that wakes a thread, which decides. While an op waits, it ends the waits, and
// has the main thread raise KeyboardInterrupt as soon as TensorFlow has made
// the exception of the failed op: an exception that is raised during that
// becomes a RuntimeError. At all other times it calls Python's function.

#include "cc/pybind/interrupts.h"

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
sem_t signals;
pid_t owner = 0;

void OnInterrupt(int signal) {
  // A fork has no thread that would hear of it.
  if (getpid() == owner) {
    sem_post(&signals);
  } else {
    python_handler.load()(signal);
  }
}

// In the main thread, with the GIL.
int RaiseKeyboardInterrupt(void*) {
  if (PyFrameObject* frame = PyEval_GetFrame(); frame != nullptr) {
    const auto code = py::reinterpret_steal<py::object>(
        reinterpret_cast<PyObject*>(PyFrame_GetCode(frame)));
    const auto file = code.attr("co_filename").cast<std::string>();
    if (file.find("errors_impl.py") != std::string::npos) {
      return Py_AddPendingCall(RaiseKeyboardInterrupt, nullptr);
    }
  }
  PyErr_SetNone(PyExc_KeyboardInterrupt);
  return -1;
}

// Whether Python's handler is the one that does.
bool RaisesKeyboardInterrupt() {
  const py::gil_scoped_acquire acquire;
  try {
    const py::module_ signal = py::module_::import("signal");
    const py::object raises = signal.attr("default_int_handler");
    return signal.attr("getsignal")(SIGINT).is(raises);
  } catch (const py::error_already_set&) {
    return false;  // Python is ending.
  }
}

[[noreturn]] void HandleInterrupts() {
  for (;;) {
    if (sem_wait(&signals) != 0) continue;
    const Clock::time_point asked{Clock::duration(last_asked.load())};
    if (Clock::now() - asked > kPause || Py_IsInitialized() == 0 ||
        !RaisesKeyboardInterrupt()) {
      python_handler.load()(SIGINT);
      continue;
    }
    num_interrupts.fetch_add(1);
    Py_AddPendingCall(RaiseKeyboardInterrupt, nullptr);
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
