"""Sessions on TensorFlow's parameter servers whose waits have a limit."""

import functools
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import tensorflow as tf
from absl import logging

# How often a worker checks whether the chief has initialised the variables.
# TensorFlow itself would check only every 30 s, and the other workers would
# wait for this worker.
_POLL_SECS = 0.2


# How often a call checks whether a server has been given up.
_WATCH_SECS = 0.25

# Longest wait for the end of a session. TensorFlow itself waits 10 s for each
# server; a call that returned while Python ends would abort the process.
_CLOSE_SECS = 20.0

# How many times a call is repeated because its answer was lost.
_MAX_LOST = 3

_Result = TypeVar("_Result")


class ServerWatch:
    """Makes calls of a session end if a server does not answer any more.

    TensorFlow waits for a server without limit, even if the call has a timeout,
    and even when it closes a session. So each call runs in a thread of its own,
    which is left behind when a server has been silent for too long.

    Thread-safe, except `start` and `stop`.

    Args:
        heartbeats: For each server a function that returns when the server has
            answered. NotFound and FailedPrecondition are answers, too, because
            only a living server gives them; a RuntimeError says that the
            session is closed.
        pause_secs: The time between two heartbeats of a server.
        patience_secs: How long a server may be silent.
    """

    def __init__(
        self,
        heartbeats: Mapping[str, Callable[[], Any]],
        pause_secs: float,
        patience_secs: float,
    ) -> None:
        self._heartbeats = heartbeats
        self._pause_secs = pause_secs
        self._patience_secs = patience_secs
        self._silent_secs = dict.fromkeys(heartbeats, 0.0)
        self._has_ended = threading.Event()
        self.failure: str | None = None

    def start(self) -> None:
        """Starts watching."""
        for server in self._heartbeats:
            _start_thread(functools.partial(self._listen, server))
        _start_thread(self._count_silence)

    def stop(self) -> None:
        """Stops watching."""
        self._has_ended.set()

    def call(
        self, function: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Returns a function's result, or raises its error.

        Raises:
            ConnectionError: If a server has been given up, whatever the
                function does.
        """
        return _call_within(
            functools.partial(function, *args, **kwargs), watch=self
        )

    def close(self, function: Callable[[], Any]) -> None:
        """Runs a function that ends a session and may take some seconds."""
        try:
            _call_within(function, _CLOSE_SECS, self)
        except TimeoutError:
            logging.warning(
                "The session did not close within %g s, as a parameter server "
                "does not answer, and is left behind.",
                _CLOSE_SECS,
            )
        except ConnectionError:
            logging.warning("The session is left behind: %s", self.failure)

    def try_for(self, timeout_secs: float, function: Callable[[], Any]) -> None:
        """Runs a function for at most so many seconds; ignores its errors."""
        try:
            _call_within(function, timeout_secs)
        except (tf.errors.OpError, RuntimeError, TimeoutError) as error:
            logging.vlog(1, "Not heard of any more: %s", error)

    def _listen(self, server: str) -> None:
        while not self._has_ended.wait(self._pause_secs):
            try:
                self._heartbeats[server]()
            except (
                tf.errors.NotFoundError,
                tf.errors.FailedPreconditionError,
            ) as error:
                logging.vlog(1, "%s answers: %s", server, error)
            except tf.errors.OpError as error:
                logging.vlog(1, "%s does not answer: %s", server, error)
                continue
            except RuntimeError:
                return
            self._silent_secs[server] = 0.0

    def _count_silence(self) -> None:
        before = time.monotonic()
        while not self._has_ended.wait(_WATCH_SECS):
            now = time.monotonic()
            # A longer time means that this process was stopped. The servers
            # were not silent then, so the time does not count.
            passed = min(now - before, 2 * _WATCH_SECS)
            before = now
            for server in self._heartbeats:
                self._silent_secs[server] += passed
            if max(self._silent_secs.values()) > self._patience_secs:
                # Servers that were silent for half the time are named, too:
                # TensorFlow may wait for one server after the other.
                silent = [
                    server
                    for server, secs in self._silent_secs.items()
                    if secs > self._patience_secs / 2.0
                ]
                self.failure = (
                    f"not all of the parameter servers {', '.join(silent)} "
                    f"were heard of for {self._patience_secs:g} s: see whether "
                    "they run, and start all workers again; the last "
                    "checkpoint counts"
                )
                return


def _call_within(
    function: Callable[[], Any],
    timeout_secs: float | None = None,
    watch: ServerWatch | None = None,
) -> Any:
    """Returns a function's result, unless it takes too long.

    Raises:
        ConnectionError: If the watch has given a server up.
        TimeoutError: If the function has not returned in time.
    """
    done = threading.Event()
    results: list[Any] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(function())
        except BaseException as error:  # Raised in the caller's thread.
            errors.append(error)
        finally:
            done.set()

    give_up = (
        math.inf if timeout_secs is None else time.monotonic() + timeout_secs
    )
    _start_thread(run)
    while not done.wait(min(_WATCH_SECS, max(0.0, give_up - time.monotonic()))):
        if watch is not None and watch.failure is not None:
            raise ConnectionError(watch.failure)
        if time.monotonic() >= give_up:
            raise TimeoutError(f"not done within {timeout_secs:g} s")
    if errors:
        raise errors[0]
    return results[0]


def _start_thread(target: Callable[[], Any]) -> None:
    threading.Thread(target=target, daemon=True).start()


def repeat_lost(call: Callable[[], _Result]) -> _Result:
    """Returns the result of a call that may be made more than once.

    TensorFlow repeats a request when the connection to a server ends. If the
    server had received the request before, it refuses the repetition, and the
    answer to the first request is lost.
    """
    for _ in range(_MAX_LOST):
        try:
            return call()
        except tf.errors.AbortedError as error:
            if "received twice" not in error.message:
                raise
    return call()


class WaitingSessionCreator(tf.compat.v1.train.SessionCreator):
    """TensorFlow's `WorkerSessionCreator`, which checks for the chief often.

    Args:
        scaffold: A `tf.compat.v1.train.Scaffold`, or None.
        master: The session's.
        config: The session's.
        max_wait_secs: Longest wait for the chief.
    """

    def __init__(
        self, scaffold: Any, master: str, config: Any, max_wait_secs: float
    ) -> None:
        self._scaffold = scaffold or tf.compat.v1.train.Scaffold()
        self._master = master
        self._config = config
        self._max_wait_secs = max_wait_secs

    def create_session(self) -> Any:
        """Returns a session whose variables the chief has initialised.

        Raises:
            TimeoutError: If the chief has not done so in time.
        """
        scaffold = self._scaffold
        scaffold.finalize()
        manager = tf.compat.v1.train.SessionManager(
            local_init_op=scaffold.local_init_op,
            local_init_feed_dict=scaffold.local_init_feed_dict,
            ready_op=scaffold.ready_op,
            ready_for_local_init_op=scaffold.ready_for_local_init_op,
            graph=tf.compat.v1.get_default_graph(),
            recovery_wait_secs=_POLL_SECS,
        )
        wait = functools.partial(
            manager.wait_for_session,
            self._master,
            config=self._config,
            max_wait_secs=self._max_wait_secs,
        )
        try:
            # Limits the wait: TensorFlow's session manager would wait for a
            # server without a limit.
            return _call_within(wait, self._max_wait_secs + _CLOSE_SECS)
        except (tf.errors.DeadlineExceededError, TimeoutError) as error:
            raise TimeoutError(
                "the chief has not initialised the variables within "
                f"{self._max_wait_secs:g} s: is worker 0 running?"
            ) from error


def check_servers_answer(
    master: str,
    config: Any,
    servers: Sequence[str],
    timeout_secs: float,
    check: Callable[[Any], None],
) -> None:
    """Waits until servers answer; a session would wait without a limit.

    Args:
        master: The session's.
        config: The session's.
        servers: The devices of the servers.
        timeout_secs: Longest wait.
        check: A function that is called with a session after the servers have
            answered. The session's graph can grow.

    Raises:
        ConnectionError: If one does not answer in time.
    """

    def ask() -> None:
        with tf.Graph().as_default():
            asked = []
            for server in servers:
                with tf.device(server):
                    asked.append(tf.no_op())
            with tf.compat.v1.Session(master, config=config) as session:
                session.run(asked)
                check(session)

    wait_for_answers(ask, servers, timeout_secs)


def wait_for_answers(
    ask: Callable[[], Any], servers: Sequence[str], timeout_secs: float
) -> None:
    """Runs a function that returns when all of the servers have answered.

    Raises:
        ConnectionError: If one does not answer in time.
    """
    names = ", ".join(servers)
    try:
        _call_within(ask, timeout_secs)
    except TimeoutError as error:
        raise ConnectionError(
            f"the parameter servers {names} have not all answered within "
            f"{timeout_secs:g} s: start a tf.distribute.Server, with tfswitch "
            "imported, for each"
        ) from error
    except tf.errors.OpError as error:
        raise ConnectionError(
            f"the parameter servers {names} do not answer: {error}"
        ) from error
