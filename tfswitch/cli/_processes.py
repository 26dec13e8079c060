"""Child processes that end together, with all processes that they started.

`run_guarded` forks a child, which calls the function that starts the processes.
The calling process, the guard, waits for this child. Linux makes these two the
parents of orphans among their descendants (`PR_SET_CHILD_SUBREAPER`). So if one
of the two ends, even by `kill -9`, the other one can end the processes that it
has left.
"""

import collections
import contextlib
import ctypes
import errno
import os
import queue
import re
import select
import selectors
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
# The C library is opened before any fork: in a child, the lock of the loader
# may stay locked.
_prctl = ctypes.CDLL(None).prctl

# The time from SIGTERM to SIGKILL.
_GRACE_SECS = 5.0

# No pipe has more bytes.
_PIPE_BYTES = 1 << 20
# A longer line is printed in parts.
_LONGEST_LINE = 1 << 16
_NUM_LAST_LINES = 20
# While this many texts wait to be written, no more lines are read.
_MOST_TEXTS = 64
# How soon the number of waiting texts is checked again.
_POLL_SECS = 0.02
# Progress bars print these characters to overwrite their line.
_BACK = re.compile(r"[\r\b]+")


def ending_with_parent(
    mask: Iterable[int], number: int = signal.SIGKILL
) -> Callable[[], None]:
    """Returns the function that a new child has to call first.

    Args:
        mask: The signals that the child blocks.
        number: The signal that the child gets when the calling thread ends.
    """
    parent = os.getpid()

    def prepare() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        _prctl(_PR_SET_PDEATHSIG, number)
        if os.getppid() != parent:
            os._exit(1)

    return prepare


def run_guarded(work: Callable[[], int]) -> int:
    """Calls `work` in a child, and leaves no process behind in any case.

    The child is in a session of its own, so only this process gets Ctrl-C. This
    process passes the first stop signal on to the child, and kills all
    processes at a second one. If this process is killed, the child gets
    SIGTERM.

    Stop signals stay blocked, because this process must end with the child's
    exit code.

    Args:
        work: A function that makes a `Job`, and returns the exit code.

    Returns:
        The code, or 128 and the number of the signal that ended the child.
    """
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    signals = {*STOP_SIGNALS, signal.SIGCHLD}
    # These signals stay blocked until this process ends, because a signal after
    # the end of the child must not change the exit code. The child unblocks the
    # signals when it has handlers.
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    prepare = ending_with_parent(signals, signal.SIGTERM)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.setsid()
            prepare()
            code = work()
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    passed: int | None = None
    status: int | None = None
    while status is None:
        number = signal.sigwait(signals)
        if number in STOP_SIGNALS:
            os.kill(child, number if passed is None else signal.SIGKILL)
            passed = passed or number
        status = _reap().get(child)
    kill_descendants()
    return exit_code(status if passed is None or status >= 0 else -passed)


def exit_code(status: int) -> int:
    """Returns a shell's exit code for a status, negative for a signal."""
    return status if status >= 0 else 128 - status


def kill_descendants() -> None:
    """Kills all processes that this one and its children have started."""
    while children := _children():
        for pid in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid in children:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)


def _children() -> list[int]:
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        # The process may end at this moment.
        with contextlib.suppress(OSError), open(f"/proc/{name}/stat") as file:
            # Drops the program's name, which is in brackets and may contain
            # spaces.
            fields = file.read().rpartition(")")[2].split()
            if int(fields[1]) == os.getpid():
                found.append(int(name))
    return found


def _reap() -> dict[int, int]:
    """Returns the statuses of ended children, adopted ones included."""
    ended: dict[int, int] = {}
    with contextlib.suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            ended[found[0]] = os.waitstatus_to_exitcode(found[1])
    return ended


class Console:
    """Prints lines, with a few below them that are redrawn at a terminal.

    Until the console is closed, other code of this process cannot print to
    stderr; the core would report there that servers are away. A thread writes
    the lines, so that the caller never waits for a reader. Not thread-safe.

    Attributes:
        is_terminal: Whether stderr, which has the redrawn lines, is a terminal.
        has_reader: False after the reader of the output has gone; then nothing
            is printed.
    """

    def __init__(self) -> None:
        self.is_terminal = os.isatty(2)
        self.has_reader = True
        self._error = os.dup(2)
        with open(os.devnull, "wb") as nothing:
            os.dup2(nothing.fileno(), 2)
        self._below: list[str] = []
        self._has_failed = False
        self._texts: queue.Queue[tuple[int, str]] = queue.Queue()
        threading.Thread(target=self._write_texts, daemon=True).start()

    @property
    def is_writing(self) -> bool:
        """Whether printed text is not written yet."""
        return self._texts.unfinished_tasks > 0

    @property
    def is_behind(self) -> bool:
        """Whether the reader of the output is too slow for more lines."""
        return self._texts.unfinished_tasks > _MOST_TEXTS

    def close(self) -> None:
        os.dup2(self._error, 2)

    def print(self, lines: Sequence[str], is_error: bool = False) -> None:
        """Prints lines, without their ends, above the redrawn ones."""
        if lines:
            below = self._below
            self.draw([])
            file = self._error if is_error else 1
            self._texts.put((file, "".join(f"{line}\n" for line in lines)))
            self.draw(below)

    def draw(self, lines: list[str]) -> None:
        """Replaces the redrawn lines."""
        text = f"\x1b[{len(self._below)}A\x1b[J" if self._below else ""
        if lines:
            size = os.get_terminal_size(self._error)
            # The lines must fit on the screen, because a line that has left it
            # cannot be erased.
            most = max(1, (size.lines or 24) - 2)
            if len(lines) > most:
                num_others = len(lines) - most + 1
                lines = [*lines[: most - 1], f"and {num_others} more"]
            width = (size.columns or 80) - 1
            text += "".join(f"{line[:width]}\n" for line in lines)
        if text:
            self._texts.put((self._error, text))
        self._below = lines

    def _write_texts(self) -> None:
        while True:
            file, text = self._texts.get()
            data = text.encode(errors="replace")
            while data and self.has_reader:
                try:
                    data = data[os.write(file, data) :]
                # Another process has made the file non-blocking.
                except BlockingIOError:
                    select.select([], [file], [])
                except OSError as error:
                    file, data = self._error, self._after(error)
            self._texts.task_done()

    def _after(self, error: OSError) -> bytes:
        """Returns a message about lines that could not be written."""
        if error.errno in (errno.EPIPE, errno.EIO):
            self.has_reader = False
            os.kill(os.getpid(), signal.SIGCHLD)  # `Job.wait` returns.
        elif not self._has_failed:
            self._has_failed = True
            return (
                "tfswitch launch: lines are lost, as they cannot be written: "
                f"{error.strerror}\n"
            ).encode()
        return b""


class Process:
    """A child in a session of its own; its output is one stream of lines.

    Args:
        name: For example "worker 1".
        command: The program and its arguments.
        environment: Its variables, besides those of this process.

    Attributes:
        status: Its exit code, negative for a signal; None while it runs.
        begin: When it was started, by time.monotonic().
        last_lines: The last lines that it has printed.
    """

    def __init__(
        self, name: str, command: Sequence[str], environment: Mapping[str, str]
    ) -> None:
        self.name = name
        self.status: int | None = None
        self.begin = time.monotonic()
        self.last_lines: collections.deque[str] = collections.deque(
            maxlen=_NUM_LAST_LINES
        )
        self._rest = b""
        self._popen = subprocess.Popen(
            command,
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=ending_with_parent(()),
        )
        self.pid = self._popen.pid
        assert self._popen.stdout is not None
        self.output = self._popen.stdout
        os.set_blocking(self.output.fileno(), False)

    def read_lines(self) -> list[str] | None:
        """Returns the lines that have come; None at the end of the stream."""
        try:
            data = os.read(self.output.fileno(), _PIPE_BYTES)
        except BlockingIOError:
            return []
        *whole, self._rest = (self._rest + data).split(b"\n")
        if self._rest and (not data or len(self._rest) > _LONGEST_LINE):
            whole.append(self._rest)
            self._rest = b""
        lines = [self._shown(line) for line in whole]
        return lines if data or lines else None

    def set_ended(self, status: int) -> list[str]:
        """Sets the status; returns the last lines that the process printed."""
        self.status = self._popen.returncode = status
        lines = [] if self.output.closed else self.read_lines() or []
        if self._rest:
            lines.append(self._shown(self._rest))
            self._rest = b""
        return lines

    def describe_end(self) -> str:
        """Returns a text such as "worker 1 was ended by SIGKILL"."""
        status = self.status
        assert status is not None
        if status >= 0:
            return f"{self.name} ended with exit code {status}"
        try:
            number = signal.Signals(-status).name
        except ValueError:  # Real-time signals have no names.
            number = f"signal {-status}"
        return f"{self.name} was ended by {number}"

    def _shown(self, line: bytes) -> str:
        states = _BACK.split(line.decode(errors="replace").rstrip())
        # A progress bar writes each state over the one before, so only the last
        # state is kept.
        shown = next(filter(None, reversed(states)), "")
        self.last_lines.append(shown)
        return f"[{self.name}] {shown}".rstrip()


class Job:
    """The processes of one job; prints their lines as they arrive.

    Make one such object, in the function of `run_guarded`. Not thread-safe.
    """

    def __init__(self, console: Console) -> None:
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
        self.processes: list[Process] = []
        self._console = console
        self._selector = selectors.DefaultSelector()
        self._signal_selector = selectors.DefaultSelector()
        self._signals, wakeup = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
        signals = {*STOP_SIGNALS, signal.SIGCHLD}
        for number in signals:
            signal.signal(number, lambda *_: None)  # The pipe gets its number.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
        for selector in (self._selector, self._signal_selector):
            selector.register(self._signals, selectors.EVENT_READ)

    def start(
        self, name: str, command: Sequence[str], environment: Mapping[str, str]
    ) -> Process:
        """Starts a process. Raises OSError if there is no such program."""
        process = Process(name, command, environment)
        self.processes.append(process)
        self._selector.register(process.output, selectors.EVENT_READ, process)
        return process

    def wait(self, until: float) -> tuple[list[int], list[Process]]:
        """Waits for a signal or the end of a process, at most until a time.

        `until` is a time of time.monotonic().

        Returns:
            Stop signals that have come, and processes that have ended.
        """
        signals: list[int] = []
        timeout = max(0.0, until - time.monotonic())
        selector = self._selector
        if self._console.is_behind:
            # Processes that print have to wait meanwhile.
            selector, timeout = self._signal_selector, min(timeout, _POLL_SECS)
        for key, _ in selector.select(timeout):
            if key.data is None:
                numbers = os.read(self._signals, 1 << 16)
                signals += [n for n in numbers if n in STOP_SIGNALS]
                continue
            lines = key.data.read_lines()
            if lines is None:
                self._selector.unregister(key.fileobj)
                key.data.output.close()
            else:
                self._console.print(lines)
        statuses = _reap()
        ended = [p for p in self.processes if p.pid in statuses]
        for process in ended:
            self._console.print(process.set_ended(statuses[process.pid]))
            self.processes.remove(process)
        return signals, ended

    def flush(self, until: float) -> list[int]:
        """Waits until all lines are written; returns signals that came."""
        signals: list[int] = []
        while (
            self._console.is_writing
            and not signals
            and time.monotonic() < until
        ):
            signals, _ = self.wait(time.monotonic() + _POLL_SECS)
        return signals

    def end(self, processes: Iterable[Process]) -> None:
        """Ends processes and their groups: by SIGTERM, later by SIGKILL."""
        for number, secs in (
            (signal.SIGTERM, _GRACE_SECS),
            (signal.SIGKILL, float("inf")),
        ):
            running = [p for p in processes if p.status is None]
            for process in running:
                os.killpg(process.pid, number)
            until = time.monotonic() + secs
            while (
                any(p.status is None for p in running)
                and time.monotonic() < until
            ):
                # Other processes of a group may end later than its leader.
                self.wait(min(until, time.monotonic() + 1.0))
