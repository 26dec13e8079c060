"""Barriers, at which workers wait for each other."""

from tfswitch._settings._ranges import bad_argument
from tfswitch.train.worker import Worker

# The barrier at which all kinds of training end epochs. Must be equal to
# kEndOfEpoch of cc/sync/worker_group.h.
END_OF_EPOCH = "end of epoch"

# How long workers wait for the end of an epoch. A wait for a dead worker ends
# earlier, with its lease.
EPOCH_SECS = 24 * 3600.0


class Barrier:
    """Opens when all workers of a group wait at it.

    A barrier does not wait for workers that have left, or for dead workers
    whose lease has ended. For workers that have not joined yet, it waits at
    most the worker's `join_secs`.

    Args:
        name: The same name in all workers, which come to the same barriers in
            the same order.
        worker: The `tfswitch.train.Worker` of this process.
        timeout_secs: Longest wait; by default the worker's `wait_secs`.

    Raises:
        ValueError: If an argument is out of range.

    Example:

    >>> saved = tsw.train.Barrier("saved", worker)
    >>> for epoch in range(3):
    ...     train()
    ...     if worker.is_chief:
    ...         cluster.save(path)
    ...     saved.wait()
    """

    def __init__(
        self, name: str, worker: Worker, *, timeout_secs: float | None = None
    ) -> None:
        if not isinstance(name, str) or not name:
            raise bad_argument("name", name, "a non-empty string")
        if not isinstance(worker, Worker):
            raise bad_argument("worker", worker, "a tfswitch.train.Worker")
        self._name = name
        self._worker = worker
        self._timeout_secs = timeout_secs

    @property
    def name(self) -> str:
        """Name of the barrier."""
        return self._name

    @property
    def worker(self) -> Worker:
        """The worker that waits."""
        return self._worker

    def wait(self, *, timeout_secs: float | None = None) -> None:
        """Waits for all others; see `Worker.wait_at_barrier`.

        Args:
            timeout_secs: Longest wait; by default that of the barrier.

        Raises:
            TimeoutError: If not all workers have arrived in time. The message
                names the missing ones.
            RuntimeError: If all wait, but at different barriers.
            ConnectionError: If the server does not answer.
        """
        if timeout_secs is None:
            timeout_secs = self._timeout_secs
        self._worker.wait_at_barrier(self._name, timeout_secs=timeout_secs)

    def __repr__(self) -> str:
        return f"<tfswitch.train.Barrier {self._name!r} of {self._worker!r}>"
