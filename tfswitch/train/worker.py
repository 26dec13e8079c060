"""This process as one of the workers that train a model."""

import atexit
import contextlib
import math
import os
import threading
import time
import traceback as traceback_lib
import weakref
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import Any

import numpy as np
import tensorflow as tf

from tfswitch import consistency as consistency_lib
from tfswitch._connection import _tf_config
from tfswitch._connection._control_calls import call, integers
from tfswitch._settings._ranges import bad_argument
from tfswitch.cluster import Cluster, default_cluster
from tfswitch.consistency import Consistency
from tfswitch.train._checks import (
    check_choice,
    check_cluster,
    check_count,
    check_replicas,
    check_seconds,
    group_options,
)

# Waits at a barrier are made in parts of this length.
_WAIT_PART_SECS = 5.0

# How often the thread of `on_event` checks whether its worker has ended.
_EVENT_SECS = 1.0

# How long a worker waits for a server when it leaves by itself.
PARTING_SECS = 2.0


class Worker:
    """Makes this process a member of a group of workers that train together.

    Joins the group on the cluster's first server, which counts the steps of its
    workers. The process's pushes to tables with consistency `bsp` belong to its
    present step; `end_step` ends this step, and waits for other workers as
    `consistency` says. A worker whose data ends leaves, and the others continue
    without it. A worker that dies is dropped when its lease ends. A worker's
    clock counts its steps. A worker that joins later gets the clock of the
    slowest worker.

    A process is one worker per cluster: a new `Worker` replaces the last one.
    `tfswitch.keras.ParameterServerOptimizer` makes and uses a worker by itself.

    Thread-safe, but only one thread at a time may end steps.

    Args:
        worker_id: A number from 0; each process has its own. By default from
            TF_CONFIG, else 0. Workers with numbers from `num_workers` on join
            later, for example when machines are added.
        num_workers: How many workers the group waits for at the start. By
            default from TF_CONFIG, else 1.
        consistency: A `Consistency`, "asp" or "bsp"; None means `asp`. All
            workers of a group must have the same consistency.
        group: Name of the group. Jobs that share servers need different names.
        cluster: The cluster to use; by default that of `tfswitch.connect`.
        lease_secs: How long a silent worker counts as alive. A background
            thread renews the lease.
        join_secs: Longest wait for other workers at the start, after the first
            worker has joined.
        wait_secs: Longest wait of `end_step` for other workers.
        replicas_to_aggregate: With `bsp`: a round closes as soon as this many
            workers have contributed; at most `num_workers`. If fewer workers
            are left, the round closes when all of these have contributed. None
            means all workers.
        late: With `replicas_to_aggregate`: what happens to gradients whose
            round has closed without them. "drop": they are dropped, and
            counted; "carry": they are added to the open round.
        on_lost_worker: "continue": when another worker is given up, the others
            continue without it; "fail": then steps, barriers and pushes of this
            worker raise `RuntimeError`. This worker learns of a loss when a
            wait of 2 s or more ends, else within a third of the lease.
        on_event: A function that a separate thread calls as
            `on_event(kind, text)` with the group's messages, which also go to
            stderr. The kinds are "waiting", with the missing workers, after 2 s
            of a wait and again each 30 s; "lost", with the worker that was
            given up; and "report" at the end, if workers were lost, steps do
            not count or items of a work queue are not done.
        job: Name of the training, the same in all its workers; by default the
            environment variable TFSWITCH_JOB. Under Keras's `fit` a restarted
            process of a job continues where its job is, or ends if the job has
            ended. A process with another name, or none, begins a new training.
        first_step: For a process that continues from its own checkpoint: the
            `stats()["num_steps"]` of the time of the checkpoint. If a former
            process of this worker has taken later steps that count, the new
            process repeats them without effect: their pushes are not sent, and
            `end_step` and `wait_at_barrier` return at once. Not with a
            `WorkQueue`, which continues after these steps by itself. None means
            that the process continues after all steps of this worker that
            count.


    Raises:
        ValueError: If an argument is out of range, or the group exists with
            other settings.
        ConnectionError, TimeoutError: If the server does not answer.

    Example:

    >>> table = tsw.EmbeddingTable("user", 2, consistency="bsp")
    >>> with tsw.train.Worker(0, 1, consistency="bsp") as worker:
    ...     for ids, gradients in batches:
    ...         table.push(ids, gradients)
    ...         worker.end_step(weight=len(ids))
    """

    _mark = 0
    # How many loops over epochs of work queues are running.
    _num_loops = 0
    # Whether a `fit` has ended in such a loop. The worker then leaves the group
    # after the last loop.
    _leaves_after_loops = False

    def __init__(
        self,
        worker_id: int | None = None,
        num_workers: int | None = None,
        *,
        consistency: consistency_lib.ConsistencyLike | None = None,
        group: str = "train",
        cluster: Cluster | None = None,
        lease_secs: float = 30.0,
        join_secs: float = 600.0,
        wait_secs: float = 600.0,
        replicas_to_aggregate: int | None = None,
        late: str = "drop",
        on_lost_worker: str = "continue",
        on_event: Callable[[str, str], object] | None = None,
        job: str | None = None,
        first_step: int | None = None,
    ) -> None:
        if worker_id is None:
            worker_id = default_worker_id()
        if num_workers is None:
            num_workers = max(1, _tf_config.num_workers())
        check_count("num_workers", num_workers, 1)
        check_count("worker_id", worker_id, 0)
        if not isinstance(group, str) or not group:
            raise bad_argument("group", group, "a name")
        check_seconds(
            lease_secs=lease_secs, join_secs=join_secs, wait_secs=wait_secs
        )
        check_cluster(cluster)
        if replicas_to_aggregate is not None:
            check_replicas(replicas_to_aggregate, "num_workers", num_workers)
        check_choice("late", late, ("drop", "carry"))
        check_choice("on_lost_worker", on_lost_worker, ("continue", "fail"))
        if on_event is not None and not callable(on_event):
            raise bad_argument("on_event", on_event, "a function, or None")
        if job is not None and (not isinstance(job, str) or not job):
            raise bad_argument("job", job, "a name, or None")
        if first_step is not None:
            check_count("first_step", first_step, 0)
        self._worker_id = int(worker_id)
        self._num_workers = int(num_workers)
        self._consistency = consistency_lib.get(consistency)
        self._group = group
        self._job = default_job() if job is None else job
        self._wait_secs = float(wait_secs)
        self._cluster = cluster if cluster is not None else default_cluster()
        self._native = self._cluster._native
        options = group_options(
            num_workers=self._num_workers,
            lease_secs=lease_secs,
            join_secs=join_secs,
            contributions_per_round=int(replicas_to_aggregate or 0),
            late=late,
        )
        # The running loops that will call `fit` again.
        self._loops: set[object] = set()
        self._join(options, first_step, on_lost_worker == "fail")
        if on_event is not None:
            self._tell_events(on_event)

    def _join(
        self,
        options: Mapping[str, Any],
        first_step: int | None,
        fails_on_loss: bool,
    ) -> None:
        """Joins the group, and makes this the process's worker."""
        call(
            self._native,
            "JoinGroup",
            group=self._group,
            worker=self._worker_id,
            options=options,
            consistency=self._consistency.to_table_config(),
            wait_timeout_secs=self._wait_secs,
            first_step=None if first_step is None else int(first_step),
            job=self._job,
            fail_on_loss=fails_on_loss,
        )
        self._process = os.getpid()
        _present[self._native.id] = self
        # Leaves the group when the process ends, so that others need not wait
        # until the lease ends.
        self._cluster._before_close = weakref.WeakMethod(self._part)
        _part_at_exit(self)

    def _tell_events(self, on_event: Callable[[str, str], Any]) -> None:
        threading.Thread(
            target=_tell_events,
            args=(weakref.ref(self), self._native, on_event),
            name="tfswitch_events",
            daemon=True,
        ).start()

    @property
    def worker_id(self) -> int:
        """The number of this worker, from 0."""
        return self._worker_id

    @property
    def num_workers(self) -> int:
        """How many workers the group waited for at the start."""
        return self._num_workers

    @property
    def is_chief(self) -> bool:
        """Whether this is worker 0."""
        return self._worker_id == 0

    @property
    def consistency(self) -> Consistency:
        """How much this worker waits for other workers."""
        return self._consistency

    @property
    def group(self) -> str:
        """Name of the group."""
        return self._group

    @property
    def job(self) -> str | None:
        """Name of the training, if it has one."""
        return self._job

    @property
    def cluster(self) -> Cluster:
        """The cluster whose first server coordinates the group."""
        return self._cluster

    def end_step(self, weight: float = 1.0) -> None:
        """Ends a step and waits for other workers.

        With `asp` this returns at once. With `ssp` it returns when the slowest
        worker is at most `staleness` steps behind this worker. With `bsp` it
        returns when the gradients of all workers for this step have been
        applied.

        If this worker was given up because it was silent for a lease, it joins
        again, with a message; with `bsp` the step does not count then.

        Args:
            weight: Number of samples of the step, at least 0: its weight in the
                average of `bsp`. With 0, the step's pushes to `bsp` tables have
                no effect.

        Raises:
            TimeoutError: If other workers do not end their step within
                `wait_secs`. The message names them. Another call continues to
                wait.
            RuntimeError: If another process has joined as this worker; if this
                process has made another `Worker`; or, with
                `on_lost_worker="fail"`, if another worker was given up.
            ConnectionError: If the server does not answer.
        """
        if tf.is_tensor(weight) and not hasattr(weight, "numpy"):
            raise ValueError(
                "`weight` is a symbolic tensor, and `end_step` runs in Python. "
                "Call it outside tf.function."
            )
        self._check_is_present()
        self._native.end_step(to_weight(weight))

    def wait_at_barrier(
        self, name: str, *, timeout_secs: float | None = None
    ) -> None:
        """Waits until all workers of the group wait at this barrier.

        Workers that still train do not wait for this worker: rounds close
        without it, and `ssp` does not count it. When the barrier opens, all
        steps that workers have ended are applied on all servers, and all
        workers have the same clock. The barrier does not wait for workers that
        leave or die. The worker may have left the group before, for example at
        the end of `fit`; see `leave`.

        Args:
            name: The name of the barrier. All workers come to the same barriers
                in the same order; a name may be used again.
            timeout_secs: Longest wait; by default `wait_secs`.

        Raises:
            TimeoutError: If not all workers have arrived in time. The message
                names the missing ones. Another call continues to wait.
            RuntimeError: If all wait, but at different barriers; with `bsp`, if
                something was pushed since the last end of a step.
            ConnectionError: If the server does not answer.

        Example:

        >>> worker.wait_at_barrier("all data used")
        >>> if worker.is_chief:
        ...     cluster.save(path)
        >>> worker.wait_at_barrier("saved")
        """
        if not isinstance(name, str) or not name:
            raise bad_argument("name", name, "that of a barrier")
        if timeout_secs is None:
            timeout_secs = self._wait_secs
        check_seconds(timeout_secs=timeout_secs)
        self._check_is_present()
        give_up = time.monotonic() + timeout_secs
        while True:
            # Waits in parts, so that Ctrl-C has an effect.
            left = max(give_up - time.monotonic(), 1e-3)
            try:
                call(
                    self._native,
                    "EnterBarrier",
                    barrier=name,
                    timeout_secs=min(left, _WAIT_PART_SECS),
                )
                return
            except TimeoutError as error:
                for_whom, gave_up, _ = str(error).rpartition("; gave up after ")
                if not gave_up:  # The server did not answer.
                    raise
                if time.monotonic() >= give_up:
                    raise TimeoutError(
                        f"{for_whom}{gave_up}{timeout_secs:g} s"
                    ) from None

    def leave(self) -> None:
        """Leaves the group, so that no other worker waits for this one.

        Call this when the worker's data ends, and after an exception, because
        the process renews the lease as long as it lives. The next step or
        barrier joins the group again. If all other workers have left by then,
        or leave while this worker waits, it waits until they have joined again,
        too, but at most `join_secs` after its own join. Idempotent; closing the
        cluster ends the wait.
        """
        if _present.get(self._native.id) is self and not self._cluster.closed:
            call(self._native, "LeaveGroup")

    def _leave_after_fit(self) -> None:
        # The mark of the next `fit`; see tfswitch/keras/_resuming.py.
        if self._mark and not self._num_loops:
            self._set_mark(((self._mark >> 32) + 1) << 32)
        # With such a loop the worker stays in the group. To join again, it
        # would have to wait for the others.
        if self._loops:
            self._leaves_after_loops = True
        else:
            self.leave()

    @contextlib.contextmanager
    def _more_to_train(self) -> Iterator[Callable[[bool], None]]:
        """Keeps the worker in its group while a loop may call `fit` again."""
        loop = object()
        self._num_loops += 1

        def is_more(more: bool) -> None:
            if more:
                self._loops.add(loop)
            else:
                self._loops.discard(loop)

        try:
            yield is_more
        finally:
            self._num_loops -= 1
            is_more(False)
            if self._leaves_after_loops and not self._loops:
                self._leaves_after_loops = False
                if not self._cluster.closed:
                    self._part()

    def _part(self) -> None:
        # Only the process that joined is the worker, not a forked child.
        if os.getpid() != self._process:
            return
        # If the servers are gone, nobody waits for this worker. If they refuse
        # its token, others wait no longer than its lease.
        with contextlib.suppress(
            ConnectionError, TimeoutError, PermissionError
        ):
            if _present.get(self._native.id) is self:
                call(self._native, "LeaveGroup", timeout_secs=PARTING_SECS)

    def stats(self) -> dict[str, Any]:
        """Returns the measurements.

        Returns:
            A dict: "clock": the worker's clock, which grows by 1 with each step
            and begins at that of the slowest worker; "round": the round of its
            next step; "dropped_steps": steps that did not count; "num_steps":
            how many steps of this worker count, those of former processes
            included; "left": whether it has left, so that its next step joins
            again; "in_step": whether something was pushed since the last step
            ended; "waits": how often and how long it has waited for others
            ("count", "total_s", "longest_s"); "waiting_for": the workers that
            it waits for, after the first 2 s of a wait, else ""; "workers": the
            group's "active", "waiting" (of these, at a barrier), "rounds",
            "contributions", "samples" (the sum of their weights), "dropped",
            "carried", "expired", "rejoined", "staleness" (a list whose element
            s is how many steps ended s clocks ahead of the slowest worker), and
            "lost" (the workers that were given up and are not back, each with
            the number of its steps that count).
        """
        self._check_is_present()
        response = call(self._native, "GetWorker")
        return {
            "group": response["group"],
            "worker": response["worker"],
            **integers(
                response, ("clock", "round", "dropped_steps", "num_steps")
            ),
            "left": response["left"],
            "in_step": response["in_step"],
            "waits": {
                "count": int(response["num_waits"]),
                "total_s": float(response["waited_secs"]),
                "longest_s": float(response["longest_wait_secs"]),
            },
            "waiting_for": response["waiting_for"],
            "workers": {
                **group_stats(response["workers"]),
                "lost": lost_workers(response["workers"]),
            },
        }

    def _position(self) -> tuple[int, int]:
        """Returns the worker's mark, and its number of steps since the mark."""
        response = call(self._native, "GetWorker")
        return int(response["mark"]), int(response["steps_since_mark"])

    def _set_mark(self, mark: int, *, join_again: bool = False) -> None:
        self._mark = mark
        call(self._native, "SetWorkerMark", mark=mark, join_again=join_again)

    def _check_is_present(self) -> None:
        if _present.get(self._native.id) is not self:
            raise RuntimeError(
                f"{self!r} is over: another Worker of this process has taken "
                "its place in the cluster. Use that one, or pass this one as "
                "`worker=` to the optimizer that made it"
            )

    def __enter__(self) -> "Worker":
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if exc is None:
            self.leave()
            return
        # An error of `leave` must not hide the first error.
        with contextlib.suppress(Exception):
            self.leave()

    def __repr__(self) -> str:
        return (
            f"<tfswitch.train.Worker {self._worker_id} of {self._num_workers} "
            f"in group {self._group!r}, {self._consistency.kind}>"
        )


# The process's worker in each cluster, by the cluster's id in the core, because
# connections are shared.
_present: weakref.WeakValueDictionary[int, Worker] = (
    weakref.WeakValueDictionary()
)


def present_workers() -> list[Worker]:
    """Returns the workers of this process, one for each cluster."""
    return [w for w in _present.values() if not w._cluster.closed]


def group_stats(response: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of GetGroupStatsResponse in the form of `stats`."""
    counts = ("rounds", "contributions", "dropped", "carried", "expired")
    staleness = [int(count) for count in response["staleness"]]
    while staleness and not staleness[-1]:
        staleness.pop()
    return {
        "active": int(response["num_active"]),
        "waiting": int(response["num_waiting"]),
        **integers(response, (*counts, "rejoined")),
        "samples": float(response["samples"]),
        "staleness": staleness,
    }


def lost_workers(response: Mapping[str, Any]) -> dict[int, int]:
    """Returns how many steps of each lost worker count."""
    return {
        int(worker): int(loss["num_steps"])
        for worker, loss in sorted(response["losses"].items())
        if not loss["is_back"]
    }


def _tell_events(
    worker: "weakref.ref[Worker]",
    native: Any,
    on_event: Callable[[str, str], object],
) -> None:
    number = 0
    # The loop ends if the cluster is closed or has another worker.
    with contextlib.suppress(RuntimeError):
        while worker() is not None and _present.get(native.id) is worker():
            event = call(
                native, "GetWorkerEvent", after=number, wait_secs=_EVENT_SECS
            )
            if int(event["number"]) > number:
                number = int(event["number"])
                try:
                    on_event(event["kind"], event["text"])
                except Exception:
                    traceback_lib.print_exc()


def default_job() -> str | None:
    """Returns the name of the training in the environment."""
    return os.environ.get("TFSWITCH_JOB") or None


def default_worker_id() -> int:
    """Returns this worker's number in TF_CONFIG; 0 without TF_CONFIG.

    Raises:
        ValueError: If this process is no worker in TF_CONFIG.
    """
    worker_id = _tf_config.worker_id()
    if worker_id is not None:
        return worker_id
    task = _tf_config.task()
    if task is None:
        return 0
    raise ValueError(
        f"TF_CONFIG says that this process is {task.type} {task.number}, which "
        "is no worker. Pass `worker_id`, or do not train here"
    )


def _part_at_exit(worker: Worker) -> None:
    reference = weakref.ref(worker)

    def part() -> None:
        present = reference()
        if present is not None and not present.cluster.closed:
            present._part()

    atexit.register(part)


def to_weight(weight: float) -> float:
    """Returns a step's weight; ValueError if it is not valid."""
    value = math.nan
    if np.ndim(weight) == 0:
        with contextlib.suppress(TypeError, ValueError):
            value = float(weight)
    if 0.0 <= value < math.inf:
        return value
    raise bad_argument("weight", weight, "a finite number of at least 0")
