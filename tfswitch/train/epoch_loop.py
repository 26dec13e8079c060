"""Epochs of each worker's own data that end together."""

from collections.abc import Iterator

from tfswitch._settings._ranges import bad_argument
from tfswitch.train._checks import check_count, check_seconds
from tfswitch.train.barrier import END_OF_EPOCH, EPOCH_SECS
from tfswitch.train.sync_replicas_hook import SyncReplicasHook
from tfswitch.train.worker import Worker


def epochs(
    num_epochs: int,
    worker: Worker | SyncReplicasHook,
    *,
    timeout_secs: float = EPOCH_SECS,
) -> Iterator[int]:
    """Yields epoch numbers; an epoch ends when all workers have ended it.

    Every worker trains its own data once in each epoch, and may take more or
    fewer steps than others. A worker at the end of its data waits for the other
    workers, which continue without it.

    Args:
        num_epochs: How many epochs; the same in all workers.
        worker: A `tfswitch.train.Worker`, or the hook of a
            `SyncReplicasOptimizer`, whose session is open in the loop.
        timeout_secs: Longest wait of a `Worker` at the end of an epoch; by
            default a day.

    Raises:
        ValueError: If an argument is out of range.
        TimeoutError: If other workers have not ended their epoch in time. The
            message names them.

    Example:

    >>> with tsw.train.Worker(consistency="bsp") as worker:
    ...     for epoch in tsw.train.epochs(3, worker):
    ...         for ids, gradients in my_part_of_the_data:
    ...             table.push(ids, gradients)
    ...             worker.end_step(weight=len(ids))
    """
    check_count("num_epochs", num_epochs, 1)
    check_seconds(timeout_secs=timeout_secs)
    if not isinstance(worker, (Worker, SyncReplicasHook)):
        raise bad_argument(
            "worker",
            worker,
            "a tfswitch.train.Worker or the hook of a SyncReplicasOptimizer; "
            "a SyncGroup has `epoch()`",
        )
    return _epochs(num_epochs, worker, timeout_secs)


def _epochs(
    num_epochs: int, worker: Worker | SyncReplicasHook, timeout_secs: float
) -> Iterator[int]:
    for epoch in range(num_epochs):
        if isinstance(worker, SyncReplicasHook):
            worker.start_epoch()
            yield epoch
            worker.finish_epoch()
        else:
            yield epoch
            worker.wait_at_barrier(END_OF_EPOCH, timeout_secs=timeout_secs)
