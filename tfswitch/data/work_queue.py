"""Hands out items, such as files, to workers while they train."""

import contextlib
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfswitch import _native
from tfswitch._connection._control_calls import call, integers
from tfswitch._settings._ranges import (
    NON_NEGATIVE_INT64,
    bad_argument,
    is_number,
)
from tfswitch.train._checks import check_count, check_seconds
from tfswitch.train.barrier import EPOCH_SECS
from tfswitch.train.worker import Worker

# How long to wait for another worker to make the queue, and how often to look.
_LONGEST_WAIT_SECS = 60
_WAIT_SECS = 0.2

# Yields the batches of an item, given its value and the offset to start at.
Read = Callable[[str, int], Iterable[Any]]


class WorkItemLost(RuntimeError):  # noqa: N818 - Nothing has gone wrong.
    """The server has taken the item from this worker, for another worker.

    This worker has sent nothing for the time of its lease, or has left its
    group. The samples of its steps that count are recorded, and the next worker
    continues after them. Stop training the item and take another one.
    """


class WorkItem:
    """An item of a queue, such as a file, that this worker has to train.

    `WorkQueue.take` and the iteration of an `Epoch` make items.

    Attributes:
        epoch: The epoch in which to train the item, from 0.
        index: The item's index in the queue's list.
        value: The string that was given to the queue.
    """

    def __init__(
        self,
        queue: "WorkQueue",
        epoch: int,
        index: int,
        value: str,
        offset: int,
    ) -> None:
        self.epoch = epoch
        self.index = index
        self.value = value
        self._queue = queue
        self._offset = offset
        self._counted = offset  # Offset at the start of the step.
        self._is_finished = False
        self._is_replaced = False

    @property
    def offset(self) -> int:
        """How many samples of the item have been trained already."""
        return self._offset

    @property
    def is_finished(self) -> bool:
        """Whether `finish` was called, by the program or by an iteration."""
        return self._is_finished

    @property
    def is_lost(self) -> bool:
        """Whether this worker must stop training the item; see `WorkItemLost`.

        This becomes true at the end of the step in which the worker learns of
        the loss.
        """
        return not self._is_finished and (
            self._is_replaced or self._state() == _native.work_item_lost
        )

    def advance(self, num_samples: int) -> None:
        """Records that the present step trains the next samples of the item.

        The server records the samples when the step ends, if the step counts.
        Call this before the step pushes anything, because this call may raise.

        Args:
            num_samples: The number of samples. You may use any other unit, if
                you read `offset` in the same unit.

        Raises:
            ValueError: If `num_samples` is not an integer of at least 0.
            WorkItemLost: If the item was taken from this worker.
            RuntimeError: If the item is finished.
        """
        if not (is_number(num_samples, int, np.integer) and num_samples >= 0):
            expected, owner = "an integer of at least 0", f"{self._name}: "
            raise bad_argument("num_samples", num_samples, expected, owner)
        if self._is_finished:
            raise RuntimeError(
                f"{self._name} is finished and cannot be advanced; take "
                "another one"
            )
        self._check_is_own()
        if self._state() != _native.work_item_in_step:
            self._counted = self._offset
        self._move_to(self._offset + int(num_samples))

    def finish(self) -> None:
        """Tells the server that the whole item is trained. Idempotent.

        Raises:
            WorkItemLost: If the item was taken from this worker.
            RuntimeError: If the item was advanced in a step that has not ended.
            ConnectionError, TimeoutError: If the server does not answer.
        """
        if self._is_finished:
            return
        self._check_is_own()
        try:
            call(
                self._queue._native,
                "FinishWorkItem",
                queue=self._queue.name,
                epoch=self.epoch,
                index=self.index,
            )
        except RuntimeError:
            self._check_is_own()
            raise
        self._is_finished = True

    @property
    def _name(self) -> str:
        return (
            f"item {self.index} ({self.value!r}) of epoch {self.epoch} of "
            f"work queue {self._queue.name!r}"
        )

    def _begin_step_anew(self) -> None:
        """Undoes the advances of a step that has pushed nothing."""
        if (
            self._state() == _native.work_item_in_step
            and not self._queue.worker.stats()["in_step"]
        ):
            self._move_to(self._counted)

    def _move_to(self, offset: int) -> None:
        self._queue._native.advance_work_item(
            self._queue.name, self.epoch, self.index, offset
        )
        self._offset = offset

    def _state(self) -> int:
        self._queue._worker._check_is_present()
        return self._queue._native.work_item_state(
            self._queue.name, self.epoch, self.index
        )

    def _check_is_own(self) -> None:
        if self.is_lost:
            raise WorkItemLost(
                f"{self._name} is lost: the group has given up worker "
                f"{self._queue._worker.worker_id}, which was not heard of for "
                "a lease, or it has left. Train nothing more of the item, and "
                "take another one"
            )

    def __repr__(self) -> str:
        return f"<tfswitch.data.WorkItem {self._name} at {self._offset}>"


class Epoch:
    """One epoch of a queue. An epoch can be iterated over once.

    `WorkQueue.epochs` yields epochs, and an epoch yields the items that this
    worker gets. Before the next item, the iteration finishes the previous item,
    unless that is lost. The iteration ends when the workers have finished all
    items of the epoch.

    Attributes:
        number: The epoch's number, from 0.
    """

    def __init__(self, queue: "WorkQueue", number: int) -> None:
        self.number = number
        self._queue = queue
        self._is_over = False

    def __iter__(self) -> Iterator[WorkItem]:
        if self._is_over:
            raise RuntimeError(
                f"{self!r} is over, and can be gone through once. With `fit` "
                "take one call for each epoch"
            )
        while True:
            item = self._queue.take()
            if item is None:
                if self._queue._finish_epoch(self.number):
                    break
                continue
            # The next epoch takes the item again.
            if item.epoch != self.number:
                break
            yield item
            # If the item is lost, the server has already recorded which of its
            # samples count.
            with contextlib.suppress(WorkItemLost):
                item.finish()
        self._is_over = True

    def dataset(self, read: Read, output_signature: Any) -> tf.data.Dataset:
        """Returns the batches of the items that this worker gets, for `fit`.

        A batch counts as trained once the dataset has yielded it and the step
        ends. So do not apply `prefetch`, `shuffle` or `batch` to the dataset,
        which read ahead, and leave `steps_per_execution` at 1. Call `fit` once
        for each epoch, because Keras makes all epochs of one call as long as
        the first.

        Args:
            read: `read(value, offset)` yields the batches of an item without
                its first `offset` samples. A batch is a tensor or a nested
                structure of tensors. The first dimension of the first tensor is
                the number of samples.
            output_signature: The signature of a batch; see
                `tf.data.Dataset.from_generator`.

        Example:

        >>> optimizer = tsw.keras.ParameterServerOptimizer(
        ...     "adam", consistency="bsp", worker=worker
        ... )
        >>> model.compile(optimizer, "binary_crossentropy")
        >>> for epoch in queue.epochs():
        ...     model.fit(
        ...         epoch.dataset(read, signature),
        ...         initial_epoch=epoch.number,
        ...         epochs=epoch.number + 1,
        ...         callbacks=[tsw.keras.SyncEpochs()],
        ...     )
        """

        def batches() -> Iterator[Any]:
            for item in self:
                # A failed `fit` may have taken a batch without training it.
                item._begin_step_anew()
                for batch in read(item.value, item.offset):
                    item.advance(_num_samples(batch))
                    yield batch
                    if item.is_lost:
                        break
                if item._state() == _native.work_item_in_step:
                    # Loss scaling has skipped the step, which therefore has not
                    # ended.
                    self._queue.worker.end_step(weight=0.0)

        dataset = tf.data.Dataset.from_generator(
            batches, output_signature=output_signature
        )
        options = tf.data.Options()
        # By default tf.data would read ahead.
        options.experimental_optimization.inject_prefetch = False
        options.autotune.enabled = False
        return dataset.with_options(options)

    def __repr__(self) -> str:
        return (
            f"<tfswitch.data.Epoch {self.number} of work queue "
            f"{self._queue.name!r}>"
        )


def _checked_items(items: Any, owner: str) -> list[str]:
    if isinstance(items, str) or not isinstance(items, Iterable):
        raise bad_argument("items", items, "a list of strings", owner)
    given = list(items)
    if not given:
        raise ValueError(
            f"{owner}`items` must not be empty. Received: items=[]"
        )
    for index, item in enumerate(given):
        if not isinstance(item, str):
            raise ValueError(
                f"{owner}`items` must be strings. "
                f"Received: items[{index}]={item!r}"
            )
        try:
            item.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"{owner}`items` must be of valid Unicode. "
                f"Received: items[{index}]={item!r}"
            ) from error
    return given


class WorkQueue:
    """Hands out a list of items, such as files, to the workers of a group.

    A fast worker gets more items, so that all workers end at nearly the same
    time. In each epoch every item is trained once, to its end. When a worker
    dies, other workers take over its items and continue after the last step of
    the dead worker. The queue is on the cluster's first server. `Cluster.save`
    saves the queue with the tables, and after `Cluster.restore` the queue
    continues from there.

    The worker's consistency decides whether a sample can count twice. With
    `bsp` each sample counts once, no matter when workers die. With `asp` and
    `ssp` the gradients of a step are applied before the step ends. So the step
    in which a worker dies, or is away for longer than its lease, may be trained
    twice.

    Args:
        items: The strings that are handed out. All workers give the same list,
            and the same other settings.
        epochs: How often all items are handed out.
        worker: The `tfswitch.train.Worker` of this process. Give it to the
            optimizer or the `SyncGroup` as well.
        name: Queues of one group need different names. A finished queue keeps
            its name: use another name for the next run on the same servers.
        shuffle: Whether each epoch has its own order. If not, all epochs have
            the order of `items`.
        seed: The orders of a shuffled queue depend only on `seed` and the
            epoch.
        timeout_secs: Longest wait at the end of an epoch, in seconds. The
            default is a day.

    Raises:
        ValueError: If an argument is out of range, or the queue exists with
            other settings; the message says which.
        ConnectionError, TimeoutError: If the server does not answer.

    Example:

    >>> worker = tsw.train.Worker(consistency="bsp")
    >>> queue = tsw.data.WorkQueue(files, epochs=3, worker=worker, shuffle=True)
    >>> for epoch in queue.epochs():
    ...     for item in epoch:
    ...         for batch in read(item.value, skip=item.offset):
    ...             item.advance(len(batch))
    ...             train(batch)  # Pushes gradients.
    ...             worker.end_step(weight=len(batch))
    ...             if item.is_lost:
    ...                 break
    """

    def __init__(
        self,
        items: Sequence[str],
        *,
        epochs: int = 1,
        worker: Worker,
        name: str = "train",
        shuffle: bool = False,
        seed: int = 0,
        timeout_secs: float = EPOCH_SECS,
    ) -> None:
        if not isinstance(name, str) or not name:
            raise bad_argument("name", name, "a non-empty string")
        owner = f"work queue {name!r}: "
        checked_items = _checked_items(items, owner)
        check_count("epochs", epochs, 1)
        if not isinstance(worker, Worker):
            expected = "a tfswitch.train.Worker, such as that of a SyncGroup"
            raise bad_argument("worker", worker, expected, owner)
        if not isinstance(shuffle, (bool, np.bool_)):
            raise bad_argument("shuffle", shuffle, "True or False")
        seed = NON_NEGATIVE_INT64.check("seed", seed)
        check_seconds(timeout_secs=timeout_secs)
        self._name = name
        self._worker = worker
        self._num_epochs = int(epochs)
        self._timeout_secs = timeout_secs
        self._taken: WorkItem | None = None
        self._native = worker._native
        worker._check_is_present()
        self._create(
            {
                "items": checked_items,
                "num_epochs": int(epochs),
                "shuffle": bool(shuffle),
                "seed": seed,
            }
        )
        if self.stats()["epoch"] >= self._num_epochs:
            warnings.warn(
                f"work queue {name!r} of group {worker.group!r} has come to "
                "its end and hands out nothing more. For another run on the "
                "same servers give it another name",
                stacklevel=2,
            )

    def _create(self, options: dict[str, Any]) -> None:
        """Makes the queue, or waits for a worker that is allowed to make it."""
        started = time.monotonic()
        has_said = False

        def create() -> None:
            call(
                self._native,
                "CreateWorkQueue",
                queue=self._name,
                options=options,
            )

        while True:
            try:
                return create()
            except PermissionError:
                waited = time.monotonic() - started
                if waited >= _LONGEST_WAIT_SECS:
                    raise
            if self._is_there():
                # Another worker has made the queue. A further `create` checks
                # the settings of this queue.
                return create()
            if waited >= 1 and not has_said:
                has_said = True
                print(
                    f"tfswitch: waiting for work queue {self._name!r}, which "
                    "only a worker with a token of role admin makes, for up to "
                    f"{_LONGEST_WAIT_SECS}s",
                    file=sys.stderr,
                )
            time.sleep(_WAIT_SECS)

    def _is_there(self) -> bool:
        try:
            call(self._native, "GetWorkQueueStats", queue=self._name)
        except RuntimeError:
            return False
        return True

    @property
    def name(self) -> str:
        """Name of the queue in its group."""
        return self._name

    @property
    def worker(self) -> Worker:
        """The worker that takes items from this queue."""
        return self._worker

    @property
    def num_epochs(self) -> int:
        """How often all items are handed out."""
        return self._num_epochs

    def epochs(self) -> Iterator[Epoch]:
        """Yields the epochs that are left, from the queue's present epoch.

        Iterate over all items of an epoch before you ask for the next epoch. At
        the end of a `fit`, the worker leaves its group only in the last epoch.

        Raises:
            RuntimeError: If an epoch was not iterated over to its end.
        """
        with self._worker._more_to_train() as is_more:
            while (number := self.stats()["epoch"]) < self._num_epochs:
                is_more(number + 1 < self._num_epochs)
                epoch = Epoch(self, number)
                yield epoch
                if not epoch._is_over:
                    raise RuntimeError(
                        f"epoch {number} of work queue {self._name!r} has not "
                        "ended: go through all its items before the next "
                        "epoch, or leave the loop over epochs, too"
                    )

    def take(self) -> WorkItem | None:
        """Returns an item to train, or None if there is none now; never waits.

        A worker has one item of a queue at a time. The method returns the same
        item until this item is finished or lost. None does not mean that the
        epoch is over: if another worker dies, its items can be taken; see
        `finish_epoch`.

        Raises:
            RuntimeError: If the server was restarted and has lost the queue.
            ConnectionError, TimeoutError: If the server does not answer.
        """
        self._worker._check_is_present()
        taken = call(self._native, "TakeWorkItem", queue=self._name).get("item")
        if taken is not None:
            taken |= integers(taken, ("epoch", "index", "offset"))
        before = self._taken
        if (
            before is not None
            and taken is not None
            and not before._is_finished
            and not before._is_replaced
            and (before.epoch, before.index, before.offset)
            == (taken["epoch"], taken["index"], taken["offset"])
        ):
            return before
        if before is not None:
            before._is_replaced = True
        self._taken = None if taken is None else WorkItem(self, **taken)
        return self._taken

    def finish_epoch(self) -> bool:
        """Waits until all workers wait here, or an item can be taken.

        Call this method when `take` has returned None. The method does not wait
        for workers that have died: their items are handed out again.

        Returns:
            True if the epoch is over; False if there is an item to take.

        Raises:
            TimeoutError: If other workers have not called `finish_epoch` within
                `timeout_secs`. The message names them.
            RuntimeError: With `bsp`, if something was pushed since the last end
                of a step.
            ConnectionError: If the server does not answer.
        """
        return self._finish_epoch(self.stats()["epoch"])

    def stats(self) -> dict[str, int]:
        """Returns the progress of the queue.

        Returns:
            A dict. "epoch" is the present epoch, equal to "epochs" when all are
            over. "epochs" and "items" are the settings. "finished", "leased"
            and "returned" count items of the present epoch: those that are
            finished, that a worker has, and that a dead worker had and nobody
            has taken since. "reissued" counts how often a returned item was
            taken again.
        """
        self._worker._check_is_present()
        response = call(self._native, "GetWorkQueueStats", queue=self._name)
        counts = ("items", "finished", "leased", "returned")
        return {
            **integers(response, ("epoch", "reissued")),
            "epochs": int(response["num_epochs"]),
            **{name: int(response[f"num_{name}"]) for name in counts},
        }

    def _finish_epoch(self, number: int) -> bool:
        if self._epoch_is_over(number):
            return True
        # WorkQueueBarrier() in C++ must make the same name.
        self._worker.wait_at_barrier(
            f"work queue '{self._name}'", timeout_secs=self._timeout_secs
        )
        return self._epoch_is_over(number)

    def _epoch_is_over(self, number: int) -> bool:
        stats = self.stats()
        return stats["epoch"] > number or stats["epoch"] >= stats["epochs"]

    def __repr__(self) -> str:
        return f"<tfswitch.data.WorkQueue {self._name!r} of {self._worker!r}>"


def _num_samples(batch: Any) -> int:
    first = tf.nest.flatten(batch)[0]
    if isinstance(first, tf.SparseTensor):
        return int(first.dense_shape[0])
    if isinstance(first, tf.RaggedTensor):
        return int(first.nrows())
    shape = np.shape(first)
    if shape:
        return int(shape[0])
    raise ValueError(
        "`read` must yield batches, whose first tensor has a dimension of "
        f"samples. Received: {batch!r}"
    )
