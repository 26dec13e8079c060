"""Epochs of `fit` that end together in all processes."""

from typing import Any

from tfswitch._types import Logs
from tfswitch.keras import _backend
from tfswitch.keras._resuming import optimizer_of
from tfswitch.keras.parameter_server_optimizer import ParameterServerOptimizer
from tfswitch.train.barrier import END_OF_EPOCH, EPOCH_SECS
from tfswitch.train.worker import Worker


def server_optimizer(callback: Any) -> ParameterServerOptimizer:
    """Returns the optimizer of a callback's model.

    Raises:
        ValueError: If it is no `ParameterServerOptimizer`.
    """
    optimizer = optimizer_of(callback.model)
    if not isinstance(optimizer, ParameterServerOptimizer):
        raise ValueError(
            f"{type(callback).__name__} is for models with a "
            "tfswitch.keras.ParameterServerOptimizer. Received: "
            f"{type(optimizer).__name__}"
        )
    return optimizer


def close_step(worker: Worker) -> None:
    """Ends a step whose loss overflowed; the step does not count."""
    if worker.consistency.kind == "bsp" and worker.stats()["in_step"]:
        worker.end_step(weight=0.0)


class SyncEpochs(_backend.Callback):
    """Ends each epoch of `fit` when it has ended in all processes.

    The model must have a `ParameterServerOptimizer`. Workers may have different
    amounts of data: a worker that has trained its part waits for the other
    workers, which continue without it. When all have ended the epoch, each
    worker gets the present values of the variables. Validation, checkpoints and
    the next epoch begin with these values. (With `asp` and `ssp` fast workers
    may have begun the next epoch by then.)

    Put this callback before other callbacks, so that these see the final
    values. Without this callback, each process begins its next epoch without a
    wait.

    Args:
        timeout_secs: Longest wait for other workers at the end of an epoch; by
            default a day.

    Raises:
        ValueError: When `fit` begins, if the model has another optimizer.
        TimeoutError: If other workers have not ended their epoch in time. The
            message names them.

    Example:

    >>> model.fit(
    ...     my_part_of_the_data,
    ...     epochs=3,
    ...     callbacks=[tsw.keras.SyncEpochs()],
    ... )
    """

    def __init__(self, timeout_secs: float = EPOCH_SECS) -> None:
        super().__init__()
        self._timeout_secs = timeout_secs
        self._is_open = False
        self._iterations = 0  # The value when the epoch began.
        self._first_clock: int | None = None  # When the epoch began.

    def on_train_begin(self, logs: Logs | None = None) -> None:
        server_optimizer(self)

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        self._is_open = True
        self._iterations = int(self._optimizer.iterations.numpy())
        self._first_clock = None
        servers = self._optimizer._servers
        if servers.worker is None:
            return
        present = servers.worker.stats()
        if present["left"]:
            return  # The first step will join the group.
        # The clock is read before the first batch, because a wait for an item
        # of a work queue can advance it.
        self._first_clock = present["clock"]
        # The optimizer will set `iterations` to the clock when it joins.
        if servers.table is None:
            self._iterations = max(self._iterations, present["clock"])

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        if self._first_clock is None:
            clock = self._optimizer.worker.stats()["clock"]
            self._first_clock = clock - self._num_steps()

    def on_test_begin(self, logs: Logs | None = None) -> None:
        self._end_epoch()  # Validation needs complete weights.

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        self._end_epoch()

    @property
    def _optimizer(self) -> ParameterServerOptimizer:
        return server_optimizer(self)

    def _end_epoch(self) -> None:
        if not self._is_open:
            return
        self._is_open = False
        optimizer = self._optimizer
        worker = optimizer.worker
        close_step(worker)
        before = worker.stats()
        worker.wait_at_barrier(END_OF_EPOCH, timeout_secs=self._timeout_secs)
        optimizer.pull()
        # Learning-rate schedules continue from the step of the other workers.
        if self._first_clock is None:
            self._first_clock = before["clock"]
        steps_of_all = worker.stats()["clock"] - self._first_clock
        if steps_of_all > self._num_steps():
            optimizer.iterations.assign(self._iterations + steps_of_all)

    def _num_steps(self) -> int:
        return int(self._optimizer.iterations.numpy()) - self._iterations
