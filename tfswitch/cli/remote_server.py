"""The server program as a child of its companion (docs/object_stores.md).

The companion is the parent, because it must outlive the server: a container
ends all its processes when the first process ends.

Stop signals are blocked in all threads, and one thread takes them. So each
signal is handled exactly once, and interrupts no other code.
"""

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence

from absl import logging

from tfswitch.cli import _processes
from tfswitch.cli._processes import STOP_SIGNALS
from tfswitch.remote.companion import Companion

_POLL_SECS = 0.1


def run(
    command: Sequence[str],
    make_companion: Callable[[], Companion],
    *,
    hears_requests: bool,
    timeout_secs: float,
) -> int:
    """Runs a server with a companion, from the fetch to the last upload.

    Args:
        command: The program and its flags.
        make_companion: Makes the companion; this function raises its errors.
        hears_requests: Whether clients may ask the companion.
        timeout_secs: Longest time for the store before the server starts, and
            for the upload after its end.

    Returns:
        The server's exit code, or 128 and the number of the signal that ended
        it or came before it; 1 if it was not started.
    """
    # The packages of object stores log many lines.
    logging.set_verbosity(logging.WARNING)
    signals = {*STOP_SIGNALS, signal.SIGCHLD}
    former = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    companion = make_companion()
    errors: list[Exception] = []

    def prepare() -> None:
        try:
            companion.prepare(timeout_secs)
        except (OSError, ValueError, RuntimeError) as error:
            errors.append(error)

    preparing = _start(prepare)
    while preparing.is_alive():
        taken = signal.sigtimedwait(STOP_SIGNALS, _POLL_SECS)
        if taken is not None:
            # The next start continues this fetch.
            return 128 + taken.si_signo
    if errors:
        _say(f"{errors[0]}")
        return 1
    server = subprocess.Popen(
        command,
        # The server gets its own process group. Ctrl-C signals a whole group,
        # and this second signal would kill the server.
        start_new_session=True,
        preexec_fn=_processes.ending_with_parent(former),
    )
    uploading = _start(companion.run)
    if hears_requests:
        _start(companion.serve_requests)
    while server.poll() is None:
        number = signal.sigwait(signals)
        if number in STOP_SIGNALS:
            server.send_signal(number)
    companion.stop()
    _wait(uploading, timeout_secs)
    return _processes.exit_code(server.returncode)


def _wait(uploading: threading.Thread, timeout_secs: float) -> None:
    begin = time.monotonic()
    has_said = False
    while uploading.is_alive():
        taken = signal.sigtimedwait(STOP_SIGNALS, _POLL_SECS)
        waited = time.monotonic() - begin
        if not has_said and waited > 1.0:
            has_said = True
            _say(
                "the server has ended; uploading its last save, for at most "
                f"{timeout_secs:g} s"
            )
        if taken is not None or waited > timeout_secs:
            why = (
                f"signal {taken.si_signo} came"
                if taken is not None
                else f"{timeout_secs:g} s are over"
            )
            _say(
                f"warning: {why}: the last save was not uploaded. It is in the "
                "data folder, and is uploaded when the server starts again"
            )
            return


def _say(line: str) -> None:
    print(f"tfswitch serve: {line}", file=sys.stderr, flush=True)


def _start(work: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread
