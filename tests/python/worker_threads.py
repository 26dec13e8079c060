"""Several workers in one process, for all tests of workers.

A process is one worker per cluster object. Cluster objects of one address with
different timeouts are clients of their own, so each can be a worker.
"""

import contextlib
import re
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import tfswitch as tsw
from tests.support import running_servers
from tfswitch._connection import _control_calls

# A test that hangs fails after this; nothing is measured by it.
HANG_SECS = 180.0


class Call:
    """A call on a thread of its own."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self._value: Any = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(
            target=self._run, args=(function, *args), daemon=True
        )
        self._thread.start()

    def _run(self, function: Callable[..., Any], *args: Any) -> None:
        try:
            self._value = function(*args)
        except BaseException as error:
            self._error = error

    @property
    def is_over(self) -> bool:
        return not self._thread.is_alive()

    def wait(self, secs: float) -> bool:
        """Returns whether the call is over, after so long at most."""
        self._thread.join(secs)
        return self.is_over

    def result(self, timeout_secs: float = HANG_SECS) -> Any:
        """Returns what the call returned, or raises what it raised."""
        assert self.wait(timeout_secs), "a call did not return"
        if self._error is not None:
            raise self._error
        return self._value


def in_threads(
    *functions: Callable[[], Any], timeout_secs: float = HANG_SECS
) -> list[Any]:
    """Calls all at once; returns their results."""
    calls = [Call(function) for function in functions]
    return [call.result(timeout_secs) for call in calls]


def wait_until(condition: Callable[[], bool]) -> None:
    """Returns when the condition holds; fails if it never does."""
    give_up = time.monotonic() + HANG_SECS
    pause = threading.Event()
    while not condition():
        assert time.monotonic() < give_up, "the condition never came true"
        pause.wait(0.001)


def wait_for_stderr(capfd: pytest.CaptureFixture[str], pattern: str) -> str:
    """Returns stderr as soon as it has the pattern; a thread writes it."""
    read = []

    def is_there() -> bool:
        read.append(capfd.readouterr().err)
        return re.search(pattern, "".join(read)) is not None

    wait_until(is_there)
    return "".join(read)


@contextlib.contextmanager
def running_clients(
    num_servers: int, timeout: float = 20.0
) -> Iterator[Callable[[int], tsw.Cluster]]:
    """New servers (0: embedded); yields a maker of clients, by number."""
    with contextlib.ExitStack() as stack:
        address = stack.enter_context(running_servers(num_servers))
        clients: dict[int, tsw.Cluster] = {}

        def client(number: int) -> tsw.Cluster:
            if number not in clients:
                clients[number] = stack.enter_context(
                    tsw.Cluster(address, timeout_secs=timeout + number)
                )
                # While the servers are there to hear it.
                stack.callback(_leave, clients[number])
            return clients[number]

        yield client


def join_workers(
    client: Callable[[int], tsw.Cluster], count: int, **kwargs: Any
) -> list[tsw.train.Worker]:
    """Makes workers 0 to count - 1, each of a client of its own."""
    return [
        tsw.train.Worker(i, count, cluster=client(i), **kwargs)
        for i in range(count)
    ]


def leave_group(member: tsw.Cluster | tsw.train.Worker) -> None:
    """Makes the process leave its group; its Worker object is not told."""
    _control_calls.call(member._native, "LeaveGroup")


def _leave(cluster: tsw.Cluster) -> None:
    with contextlib.suppress(RuntimeError):  # No worker, or closed.
        leave_group(cluster)


def arrivals(worker: tsw.train.Worker) -> int:
    """How many steps the workers of a group have ended in all."""
    return sum(worker.stats()["workers"]["staleness"])
