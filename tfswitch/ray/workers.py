"""Workers that train together, as actors of Ray."""

import dataclasses
import json
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util import metrics

from tfswitch._connection import _tls
from tfswitch._settings._ranges import bad_argument, is_number
from tfswitch.cluster import connect
from tfswitch.ray.servers import Servers
from tfswitch.train.worker import present_workers

_POLL_SECS = 1.0
_METRICS_SECS = 5.0
_ABSENT_SECS = 5.0  # After this silence a worker is reported.
_HEAD_SECS = 5.0  # After this silence Ray's head is reported.


class WorkersLost(RuntimeError):  # noqa: N818
    """Workers were lost before their function ended, and not replaced.

    Attributes:
        lost: The numbers of these workers.
        results: The results of the others, by number.
    """

    def __init__(self, lost: Sequence[int], results: dict[int, Any]) -> None:
        super().__init__(
            f"Ray has lost worker(s) {', '.join(map(str, lost))}; the others "
            "have trained to their end. Raise `max_restarts` to have them "
            "replaced, or `max_lost` if their data is in a WorkQueue, whose "
            "items the others have taken over"
        )
        self.lost = list(lost)
        self.results = results


class _WorkerActor:
    """One worker. One thread runs its function, another thread can end it."""

    def __init__(
        self,
        number: int,
        config: Mapping[str, Any],
        address: str,
        connection: Mapping[str, Any],
    ) -> None:
        os.environ["TF_CONFIG"] = json.dumps(config)
        self._number = number
        self._address = address
        self._connection = connection

    def run(self, train_fn: Callable[..., Any], args: Sequence[Any]) -> Any:
        threading.Thread(target=self._measure, daemon=True).start()
        with connect(self._address, **self._connection):
            return train_fn(*args)

    def leave(self) -> None:
        """Leaves the group, so that no other worker waits for this process."""
        for worker in present_workers():
            worker.leave()

    def _measure(self) -> None:
        keys = ("group", "worker")
        steps = metrics.Gauge("tfswitch_worker_steps", "Its steps.", keys)
        rate = metrics.Gauge(
            "tfswitch_worker_steps_per_second", "Its steps.", keys
        )
        former: dict[str, tuple[float, int]] = {}
        while True:
            time.sleep(_METRICS_SECS)
            for worker in present_workers():
                try:
                    count = worker.stats()["num_steps"]
                except (OSError, RuntimeError):
                    # The worker has no number here, or its servers are away.
                    continue
                tags = {"group": worker.group, "worker": str(self._number)}
                now = time.monotonic()
                then, before = former.get(worker.group, (now, count))
                steps.set(count, tags)
                if now > then:
                    rate.set(max(0, count - before) / (now - then), tags)
                former[worker.group] = now, count


@dataclasses.dataclass
class _Running:
    """A worker. Ray answers the ping when the worker's actor runs."""

    actor: Any
    ping: Any
    heard: float
    has_started: bool = False


class _Head:
    """Warns early if Ray's head is silent; Ray itself waits for a minute."""

    def __init__(self) -> None:
        self._heard = time.monotonic()
        self._said = False
        self._ends = threading.Event()
        threading.Thread(target=self._ask, daemon=True).start()

    def end(self) -> None:
        self._ends.set()

    def say_if_lost(self) -> None:
        silence = time.monotonic() - self._heard
        if silence < _HEAD_SECS:
            self._said = False
        elif not self._said:
            self._said = True
            print(
                "tfswitch: warning: Ray's head has not answered for "
                f"{silence:.0f} s. Workers and servers that run go on, and "
                "nothing that dies is started again. Ray ends this program and "
                "its nodes if the head does not come back within "
                "RAY_gcs_rpc_server_reconnect_timeout_s (60 s)",
                file=sys.stderr,
                flush=True,
            )

    def _ask(self) -> None:
        while not self._ends.wait(_POLL_SECS):
            ray.nodes()  # This waits for the head.
            self._heard = time.monotonic()


class Workers:
    """Running workers. Made by `start_workers`.

    Thread-safe: one thread may wait for the results while others add and remove
    workers. As a context manager it ends workers that still run.
    """

    def __init__(
        self,
        train_fn: Callable[..., Any],
        num_workers: int,
        address: str,
        *,
        args: Sequence[Any],
        connection: Mapping[str, Any],
        options: Mapping[str, Any],
        max_lost: int,
    ) -> None:
        self._train_fn = ray.put(train_fn)
        self._num_workers = num_workers
        self._address = address
        self._args = args
        self._connection = connection
        self._options = options
        self._max_lost = max_lost
        self._resources = {
            "CPU": options["num_cpus"],
            "GPU": options["num_gpus"],
            **options["resources"],
        }
        self._said_absent: list[int] = []
        self._lock = threading.Lock()
        self._next = 0
        self._actors: dict[int, _Running] = {}
        self._pending: dict[Any, int] = {}
        self._results: dict[int, Any] = {}
        self._lost: list[int] = []
        self.add(num_workers)

    def numbers(self) -> list[int]:
        """Returns the numbers of the running workers."""
        with self._lock:
            return sorted(self._pending.values())

    def add(self, count: int = 1) -> list[int]:
        """Starts more workers, while the others train.

        Each new worker joins the group at the clock of the slowest worker, and
        takes items of the work queue.

        Returns:
            The numbers of the new workers, which no worker of this job has had.
        """
        if not (is_number(count, int) and count >= 1):
            raise bad_argument("count", count, "an integer from 1")
        actor_type: Any = ray.remote(_WorkerActor)
        added = []
        with self._lock:
            for _ in range(count):
                number = self._next
                # Only tf.distribute would use these addresses.
                config = {
                    "cluster": {
                        "worker": [
                            f"worker-{i}:0" for i in range(self._num_workers)
                        ]
                    },
                    "task": {"type": "worker", "index": number},
                }
                actor = actor_type.options(**self._options).remote(
                    number, config, self._address, self._connection
                )
                reference = actor.run.remote(self._train_fn, self._args)
                self._actors[number] = _Running(
                    actor, actor.__ray_ready__.remote(), time.monotonic()
                )
                self._pending[reference] = number
                self._next += 1
                added.append(number)
        return added

    def remove(self, number: int) -> None:
        """Ends a worker, while the others train.

        The other workers do not wait for this one any more, and continue with
        its item of the work queue after its last step.

        Args:
            number: The number of a running worker.

        Raises:
            KeyError: If there is no running worker of that number.
        """
        with self._lock:
            if number not in self._pending.values():
                raise KeyError(
                    f"no worker {number} runs; there are "
                    f"{sorted(self._pending.values())}"
                )
            actor = self._actors.pop(number).actor
            self._pending = {
                reference: n
                for reference, n in self._pending.items()
                if n != number
            }
        try:
            ray.get(actor.leave.remote(), timeout=30.0)
        except RayError as error:
            print(
                f"tfswitch: warning: worker {number} did not leave, so the "
                f"others wait for it until its lease ends: {error}",
                file=sys.stderr,
                flush=True,
            )
        ray.kill(actor)

    def wait(self) -> dict[int, Any]:
        """Waits until all workers have ended.

        The first exception of a function ends all workers. If Ray has lost a
        worker and does not restart it, the others continue.

        Returns:
            The functions' results by the number of the worker, without workers
            that were removed or lost.

        Raises:
            WorkersLost: If more than `max_lost` were lost.
            Exception: The exception of a worker's function.
        """
        head = _Head()
        try:
            while True:
                with self._lock:
                    pending = list(self._pending)
                if not pending:
                    break
                head.say_if_lost()
                self._check_presence()
                ready, _ = ray.wait(pending, num_returns=1, timeout=_POLL_SECS)
                for reference in ready:
                    self._take(reference)
        finally:
            head.end()
            self.stop()
        if len(self._lost) > self._max_lost:
            raise WorkersLost(self._lost, self._results)
        return dict(sorted(self._results.items()))

    def stop(self) -> None:
        """Ends all workers that still run, at once. Idempotent."""
        with self._lock:
            actors, self._actors = self._actors, {}
            self._pending = {}
        if not ray.is_initialized():  # Without Ray the actors have ended.
            return
        for each in actors.values():
            ray.kill(each.actor)

    def __enter__(self) -> "Workers":
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def _check_presence(self) -> None:
        """Reports absent workers, and gives up those that stay away."""
        with self._lock:
            running = {
                number: self._actors[number]
                for number in sorted(self._pending.values())
            }
        pings = {each.ping: each for each in running.values()}
        answered, _ = ray.wait(list(pings), num_returns=len(pings), timeout=0.0)
        now = time.monotonic()
        for reference in answered:
            each = pings[reference]
            each.ping = each.actor.__ray_ready__.remote()
            try:
                ray.get(reference)
            except RayError:
                continue  # Ray restarts the worker, or `run` fails.
            each.heard, each.has_started = now, True
        absent = [
            number
            for number, each in running.items()
            if now - each.heard > _ABSENT_SECS
        ]
        if not absent:
            self._said_absent = absent
            return
        needs = {k: v for k, v in self._resources.items() if v}
        available = ray.available_resources()
        free = {k: available.get(k, 0.0) for k in needs}
        text = (
            f"worker(s) {', '.join(map(str, absent))}, each with {needs}; Ray "
            f"has free {free}"
        )
        limit = self._connection["timeout_secs"]
        for number in absent:
            if now - running[number].heard < limit:
                continue
            if running[number].has_started:
                self._lose(number, f"not started again within {limit:g} s")
            elif number < self._num_workers:
                raise TimeoutError(
                    f"Ray has not started within {limit:g} s {text}"
                )
        if absent != self._said_absent:
            self._said_absent = absent
            print(f"tfswitch: waiting for {text}", file=sys.stderr, flush=True)

    def _lose(self, number: int, why: str) -> None:
        with self._lock:
            lost = self._actors.pop(number)
            self._pending = {
                reference: n
                for reference, n in self._pending.items()
                if n != number
            }
        ray.kill(lost.actor)
        self._lost.append(number)
        print(
            f"tfswitch: warning: worker {number} is lost: {why}",
            file=sys.stderr,
            flush=True,
        )

    def _take(self, reference: Any) -> None:
        with self._lock:
            number = self._pending.pop(reference, None)
        if number is None:  # It was removed meanwhile.
            return
        try:
            self._results[number] = ray.get(reference)
        except RayTaskError as error:
            print(
                f"tfswitch: worker {number} has failed; the others are ended",
                file=sys.stderr,
                flush=True,
            )
            raise error.as_instanceof_cause() from None
        except RayError as error:
            self._lose(number, str(error))


def start_workers(
    train_fn: Callable[..., Any],
    num_workers: int,
    *,
    servers: Servers | str,
    args: Sequence[Any] = (),
    resources_per_worker: Mapping[str, float] | None = None,
    max_restarts: int = 3,
    max_lost: int = 0,
    timeout_secs: float = 300.0,
    tls: _tls.Tls | None = None,
    token: os.PathLike[str] | None = None,
    runtime_env: Mapping[str, Any] | None = None,
) -> Workers:
    """Starts workers as actors, spread over the nodes; see `run_workers`."""
    if not callable(train_fn):
        raise bad_argument("train_fn", train_fn, "a function")
    if not (is_number(num_workers, int) and num_workers >= 1):
        raise bad_argument("num_workers", num_workers, "an integer from 1")
    for name, value, least in (
        ("max_restarts", max_restarts, -1),
        ("max_lost", max_lost, 0),
    ):
        if not (is_number(value, int) and value >= least):
            raise bad_argument(name, value, f"an integer from {least}")
    if not (
        is_number(timeout_secs, int, float) and 0 < timeout_secs < math.inf
    ):
        raise bad_argument(
            "timeout_secs", timeout_secs, "a positive number of seconds"
        )
    if isinstance(args, str):
        raise bad_argument("args", args, "a list of arguments")
    if token is not None and not isinstance(token, os.PathLike):
        raise ValueError(
            "`token` must be a pathlib.Path of a file on the workers' nodes, "
            "because Ray would keep and show the token itself. Received: "
            f"a {type(token).__name__}"
        )
    address = servers.address if isinstance(servers, Servers) else servers
    resources = dict(resources_per_worker or {"CPU": 1})
    return Workers(
        train_fn,
        num_workers,
        address,
        args=list(args),
        connection={"timeout_secs": timeout_secs, "tls": tls, "token": token},
        options={
            "num_cpus": resources.pop("CPU", 0),
            "num_gpus": resources.pop("GPU", 0),
            "memory": resources.pop("memory", None),
            "resources": resources,
            "scheduling_strategy": "SPREAD",
            "max_restarts": max_restarts,
            "max_task_retries": max_restarts,
            "max_concurrency": 2,
            "runtime_env": dict(runtime_env or {}),
        },
        max_lost=max_lost,
    )


def run_workers(
    train_fn: Callable[..., Any], num_workers: int, **options: Any
) -> dict[int, Any]:
    """Runs a function in several workers, and waits for all of them.

    Each worker is a process that is connected to the servers. Its own TF_CONFIG
    tells `tfswitch.train.Worker` and `ParameterServerOptimizer` its number. If
    a worker dies, Ray restarts it as the same worker, from the beginning of the
    function. So read data from a `tfswitch.data.WorkQueue`, which continues
    after the last step.

    Args:
        train_fn: The function. It is pickled, with all that it refers to.
        num_workers: How many workers to start. At the start the group waits for
            all of these workers.
        servers: The result of `start_servers`, or an address.
        args: The arguments of the function.
        resources_per_worker: Ray's resources. None: `{"CPU": 1}`.
        max_restarts: How often Ray restarts a worker whose process or node has
            died; -1: always. If Ray has no room for it in `timeout_secs`, the
            worker is lost.
        max_lost: How many workers may be lost without an error: the others
            continue.
        timeout_secs: The longest wait of a call for a server, in seconds. This
            includes the time that Ray needs to restart a server. It is also the
            longest wait for the start of the workers.
        tls, token: As for `tfswitch.connect`, which each worker calls. `token`
            must be the `pathlib.Path` of a file. All files must be on the nodes
            of the workers. None means the values of the environment, such as
            that of `runtime_env`.
        runtime_env: Ray's environment of the actors.

    Returns:
        The function's results, by the number of the worker.

    Raises:
        WorkersLost: If more than `max_lost` were lost.
        TimeoutError: If Ray has no room for the workers.
        Exception: The first exception of a function. It ends all workers.

    Example:

    >>> tsw.ray.run_workers(train, 3, servers=servers, args=[files])
    {0: 0.81, 1: 0.81, 2: 0.81}
    """
    return start_workers(train_fn, num_workers, **options).wait()
