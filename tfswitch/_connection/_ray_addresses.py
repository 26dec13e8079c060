"""Finds the servers of "ray://NAME", and follows them when Ray moves them.

Each server is an actor with a name. In each connected process a thread asks the
actors where their servers are, and waits for the end of each actor. When an
actor has ended, the thread asks again, and gets an answer when Ray has started
the actor elsewhere.
"""

import sys
import threading
import time
from typing import Any

try:
    import ray
    from ray.exceptions import GetTimeoutError, RayError, RayTaskError
except ModuleNotFoundError as error:
    if error.name != "ray":
        raise
    raise ImportError(
        "servers and workers of Ray need Ray: `pip install 'tfswitch-ps[ray]'`"
    ) from error

from tfswitch import _native
from tfswitch._connection._control_calls import call

SCHEME = "ray://"
# The namespace of the actors; with it, programs in any namespace find them.
NAMESPACE = "tfswitch"

_POLL_SECS = 1.0

_lock = threading.Lock()
_followers: dict[str, "_Follower"] = {}
# Locks by name: one thread at a time makes the follower of a name.
_making: dict[str, threading.Lock] = {}


def actor_name(name: str, index: int) -> str:
    """Returns the name of the actor of a server."""
    return f"{name}/{index}"


def follow(address: str, timeout_secs: float) -> None:
    """Tells the core where the servers are, now and whenever they move.

    Args:
        address: "ray://NAME".
        timeout_secs: Longest wait for actors that are being started.

    Raises:
        RuntimeError: If this process is not connected to Ray.
        ConnectionError: If Ray has no such servers.
        TimeoutError: If the servers do not run in time.
        ValueError: If a token would be sent as plaintext.
    """
    name = address.removeprefix(SCHEME)
    if not ray.is_initialized():
        raise RuntimeError(
            f"this process is not connected to Ray, which has '{address}'; "
            "call ray.init(address='auto') first"
        )
    with _lock:
        making = _making.setdefault(name, threading.Lock())
    with making:
        first = ask(name, 0, timeout_secs)
        num_servers = first["num_servers"]
        with _lock:
            former = _followers.get(name)
            if former is not None and former.follows(num_servers):
                return
        others = [ask(name, i, timeout_secs) for i in range(1, num_servers)]
        follower = _Follower(name, [first, *others])
        forget(name)
        with _lock:
            _followers[name] = follower
        follower.start()


def forget(name: str) -> None:
    """Stops following the servers, because they are about to end."""
    with _lock:
        former = _followers.pop(name, None)
    if former is not None:
        former.end()


class _Follower(threading.Thread):
    """Tells the core the present addresses of the servers of one name.

    One thread at a time uses this object: first the thread that makes it, then
    the thread that `start` starts.
    """

    def __init__(self, name: str, servers: list[dict[str, Any]]) -> None:
        super().__init__(name=f"tfswitch {SCHEME}{name}", daemon=True)
        self._name = name
        self._servers = servers
        self._ends = threading.Event()
        self._said = ""
        self._place()

    def follows(self, num_servers: int) -> bool:
        """Whether the thread runs and follows all servers. Thread-safe."""
        return self.is_alive() and len(self._servers) == num_servers

    def end(self) -> None:
        """Ends this thread within seconds. Thread-safe."""
        self._ends.set()

    def run(self) -> None:
        # The calls of actors that are still unanswered, each with its method
        # and the index of the server.
        pending: dict[Any, tuple[str, int]] = {}
        for index in range(len(self._servers)):
            self._send("wait_for_end", index, pending)
        while not self._is_over():
            ready: list[Any] = []
            if pending:
                ready, _ = ray.wait(
                    list(pending), num_returns=1, timeout=_POLL_SECS
                )
            for reference in ready:
                method, index = pending.pop(reference)
                try:
                    answer = ray.get(reference)
                except RayError as error:
                    answer = None
                    if method == "info":  # The server is still away.
                        self._say(f"server {index} is away: {reason(error)}")
                        self._ends.wait(_POLL_SECS)
                if answer is None:
                    self._send("info", index, pending)
                else:
                    self._servers[index] = answer
                    self._place()
                    self._send("wait_for_end", index, pending)
            known = {index for _, index in pending.values()}
            for index in set(range(len(self._servers))) - known:
                self._ends.wait(_POLL_SECS)
                self._send("info", index, pending)

    def _is_over(self) -> bool:
        # After `ray.shutdown` a call of Ray would connect to a cluster, or
        # start one.
        return self._ends.is_set() or not ray.is_initialized()

    def _send(
        self, method: str, index: int, pending: dict[Any, tuple[str, int]]
    ) -> None:
        """Calls an actor; does nothing while Ray has no actor of that name."""
        if self._is_over():
            return
        try:
            actor = ray.get_actor(actor_name(self._name, index), NAMESPACE)
        except (ValueError, RayError) as error:
            self._say(f"server {index} is gone: {reason(error)}")
            return
        reference: Any
        if method == "info":
            reference = actor.info.remote()
        else:
            reference = actor.wait_for_end.remote(
                self._servers[index]["address"]
            )
        pending[reference] = method, index

    def _place(self) -> None:
        try:
            call(
                _native,
                "PlaceServers",
                address=f"{SCHEME}{self._name}",
                servers=[server["address"] for server in self._servers],
                has_tls=self._servers[0]["has_tls"],
            )
        except (ValueError, RuntimeError) as error:
            if not self.is_alive():  # Raises to the caller of `follow`.
                raise
            self._say(str(error))

    def _say(self, text: str) -> None:
        """Prints to stderr, unless the last line was the same."""
        if text != self._said and not self._is_over():
            self._said = text
            print(
                f"tfswitch: warning: '{SCHEME}{self._name}': {text}",
                file=sys.stderr,
                flush=True,
            )


def ask(name: str, index: int, timeout_secs: float) -> dict[str, Any]:
    """Returns the address of a server and other facts about it.

    Raises:
        ConnectionError: If Ray has no such server, or it has failed.
        TimeoutError: If the server does not run in time.
    """
    give_up = time.monotonic() + timeout_secs
    reference: Any = None
    failure: RayError | None = None
    has_said = False
    while True:
        left = max(give_up - time.monotonic(), 0.01)
        try:
            if reference is None:
                actor = ray.get_actor(actor_name(name, index), NAMESPACE)
                reference = actor.info.remote()
            return ray.get(reference, timeout=min(_POLL_SECS, left))
        except ValueError as error:
            if failure is not None:
                raise ConnectionError(
                    f"server {index} of '{SCHEME}{name}' has failed: "
                    f"{reason(failure)}"
                ) from failure
            raise ConnectionError(
                f"Ray has no servers '{name}'; start them with "
                f"tfswitch.ray.start_servers(..., name={name!r})"
            ) from error
        except GetTimeoutError:
            pass
        except RayTaskError as error:
            raise ConnectionError(reason(error)) from None
        except RayError as error:  # Its next restart may succeed.
            failure, reference = error, None
            time.sleep(min(_POLL_SECS, left))
        if time.monotonic() > give_up:
            raise TimeoutError(
                f"server {index} of '{SCHEME}{name}' did not start within "
                f"{timeout_secs:g} s"
                + (f": {reason(failure)}" if failure is not None else "")
                + ". Ray may have no node with its resources: look at "
                "`ray status`"
            ) from failure
        if not has_said:
            has_said = True
            print(
                f"tfswitch: waiting for server {index} of '{SCHEME}{name}', "
                f"for up to {timeout_secs:g} s",
                file=sys.stderr,
                flush=True,
            )


def reason(error: BaseException) -> str:
    """Returns the text of an error, without Ray's traceback."""
    if isinstance(error, RayTaskError):
        return str(error.cause)
    return str(error).strip().split("\n")[0]
