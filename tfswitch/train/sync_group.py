"""Synchronous training in a loop of your own."""

from collections.abc import Iterable, Sequence
from types import TracebackType

import numpy as np
import tensorflow as tf

from tfswitch._settings._ranges import bad_argument
from tfswitch._types import Gradient, TensorLike, Variable
from tfswitch.dense import DenseTable, push_many
from tfswitch.ops.id_tensors import to_id_tensor
from tfswitch.optimizers import OptimizerLike
from tfswitch.table import EmbeddingTable
from tfswitch.train._shared_variables import SharedVariables
from tfswitch.train.barrier import END_OF_EPOCH, EPOCH_SECS
from tfswitch.train.worker import Worker, to_weight

# A table, ids, and the gradients of their rows.
TableGradients = tuple[EmbeddingTable, TensorLike, TensorLike]


class SyncGroup:
    """Trains dense variables and tables in step with all workers.

    In each step the gradients of all workers are averaged by their numbers of
    samples and applied once, as one process would with the union of the
    batches. Workers may have different amounts of data: an epoch ends when all
    workers have ended it, so that a save then has all steps of the epoch.

    The variables are kept in a `tfswitch.DenseTable`, where the servers take
    the steps; each worker has a copy that is updated in each step.

    Args:
        variables: `tf.Variable` or Keras variables. All workers start with the
            values of the first worker. The weight of a `DynamicEmbedding`
            represents its rows, which learn by the layer's own optimizer.
        optimizer: As for `tfswitch.DenseTable`.
        worker: A `tfswitch.train.Worker` with consistency `bsp`; by default a
            worker is made from TF_CONFIG.
        table: Name of the dense table. Models that share servers need different
            names.
        non_trainable: Float variables that steps change without a gradient,
            such as the moving averages of batch normalization. All workers
            start with the first worker's values; each step adds the workers'
            changes, averaged by samples.

    Raises:
        ValueError: If an argument is out of range, or the servers hold other
            variables under this name.
        ConnectionError, TimeoutError: If a server does not answer.

    Example:

    >>> group = tsw.train.SyncGroup(model.trainable_variables, "adam")
    >>> for epoch in range(3):
    ...     with group.epoch() as steps:
    ...         for x, y in my_part_of_the_data:
    ...             gradients = gradients_of(x, y)
    ...             steps.step(gradients, weight=len(y))
    ...     if group.is_chief:
    ...         group.worker.cluster.save(path)
    ...     group.barrier("saved")
    """

    def __init__(
        self,
        variables: Iterable[Variable] = (),
        optimizer: OptimizerLike = "sgd",
        *,
        worker: Worker | None = None,
        table: str = "dense_variables",
        non_trainable: Iterable[Variable] = (),
    ) -> None:
        if worker is None:
            worker = Worker(consistency="bsp")
        elif not isinstance(worker, Worker) or worker.consistency.kind != "bsp":
            raise bad_argument(
                "worker", worker, "a tfswitch.train.Worker with consistency bsp"
            )
        self._worker = worker
        given = list(variables)
        # For each variable the layer whose rows it represents, or None.
        self._owners = [getattr(v, "_tfswitch_owner", None) for v in given]
        self._variables = [
            v for v, owner in zip(given, self._owners, strict=True) if not owner
        ]
        self._is_in_epoch = False
        self._table: DenseTable | None = None
        self._shared: SharedVariables | None = None
        not_trained = {str(i): v for i, v in enumerate(non_trainable)}
        try:
            if not_trained:
                self._shared = SharedVariables(
                    f"{table}_non_trainable",
                    not_trained,
                    worker,
                    finds_writes=False,
                )
            if not self._variables:
                return
            self._table = DenseTable(
                table,
                {str(i): tuple(v.shape) for i, v in enumerate(self._variables)},
                optimizer=optimizer,
                consistency=worker.consistency,
                cluster=worker.cluster,
            )
            self._table.initialize([v.numpy() for v in self._variables])
            self.pull()
            # Learning-rate schedules continue from the step of the other
            # workers.
            self._skip(worker.stats()["clock"])
        except BaseException:
            worker.leave()  # Otherwise the others would wait for it.
            raise

    @property
    def worker(self) -> Worker:
        """This process's worker."""
        return self._worker

    @property
    def is_chief(self) -> bool:
        """Whether this is worker 0."""
        return self._worker.is_chief

    @property
    def table(self) -> DenseTable:
        """The variables on the servers.

        Raises:
            ValueError: If the group was made without variables.
        """
        if self._table is None:
            raise ValueError("the group was made without variables")
        return self._table

    def epoch(self, *, timeout_secs: float = EPOCH_SECS) -> "Epoch":
        """Begins an epoch: a context that ends when all workers have ended it.

        After an exception in the epoch, or at its end, the worker leaves the
        group.

        Args:
            timeout_secs: Longest wait for other workers at the end; by default
                a day.
        """
        return Epoch(self, timeout_secs)

    def barrier(self, name: str, *, timeout_secs: float | None = None) -> None:
        """Waits for all workers; see `Worker.wait_at_barrier`."""
        self._worker.wait_at_barrier(name, timeout_secs=timeout_secs)

    def pull(self) -> None:
        """Sets the variables to their present values on the servers."""
        self._pull(after_step=False)

    def _pull(self, after_step: bool) -> None:
        if self._shared is not None:
            self._shared.pull(after_step=after_step)
        if self._table is None:
            return
        for variable, value in zip(
            self._variables, self._table.pull(), strict=True
        ):
            variable.assign(tf.cast(value, variable.dtype))

    def _skip(self, steps: int) -> None:
        if self._table is not None and steps > 0:
            self._table._table._learning_rate.skip(steps)

    def leave(self) -> None:
        """Leaves the group, so that no other worker waits for this one."""
        self._worker.leave()


class Epoch:
    """One worker's part of an epoch. Made by `SyncGroup.epoch`."""

    def __init__(self, group: SyncGroup, timeout_secs: float) -> None:
        self._group = group
        self._timeout_secs = timeout_secs
        self._num_steps = 0
        self._first_clock = 0  # The clock when the first step began.

    def step(
        self,
        gradients: Sequence[Gradient] = (),
        table_gradients: Iterable[TableGradients] = (),
        *,
        weight: float,
        learning_rate: TensorLike | None = None,
    ) -> None:
        """Takes one step with all workers.

        Args:
            gradients: One tensor per variable, of this worker's mean loss;
                None for zeros.
            table_gradients: `(table, ids, gradients)` for each
                `tfswitch.EmbeddingTable` of consistency `bsp` that is trained.
                The gradients of layers are among `gradients`.
            weight: Number of samples in the batch.
            learning_rate: The variables' rate; by default the optimizer's.

        Raises:
            ValueError: If gradients do not fit the variables, or are NaN or
                Inf.
            TimeoutError: If other workers do not take the step within the
                worker's `wait_secs`.
            RuntimeError: If `step` is called outside the epoch's context.
            ConnectionError: If a server does not answer.
        """
        group = self._group
        if not group._is_in_epoch:
            raise RuntimeError(
                "the epoch is over, or has not begun: call `step` inside "
                "`with group.epoch() as steps:`"
            )
        if not group._owners and len(gradients):
            raise ValueError(
                "the group was made without variables. Received: "
                f"{len(gradients)} gradients"
            )
        gradients = list(gradients) or [None] * len(group._owners)
        if len(gradients) != len(group._owners):
            raise ValueError(
                f"expected {len(group._owners)} gradients, one per variable of "
                f"the group. Received: {len(gradients)}"
            )
        pairs = list(zip(gradients, group._owners, strict=True))
        # A push cannot be undone, so all arguments are checked first.
        weight = to_weight(weight)
        table_gradients = [_checked(*each) for each in table_gradients]
        shared = group._shared
        changes = [] if shared is None else [shared.changes(shared.written())]
        if group._table is not None:
            dense = [g for g, owner in pairs if owner is None]
            group._table._push_beside(changes, dense, learning_rate)
        elif changes:
            push_many(changes)
        for gradient, owner in pairs:
            if owner is not None and gradient is not None:
                owner().apply_gradients(gradient)
        for table, ids, values in table_gradients:
            table.push(ids, values)
        group._worker.end_step(weight)
        if self._num_steps == 0:
            self._first_clock = group._worker.stats()["clock"] - 1
        self._num_steps += 1
        group._pull(after_step=True)

    def __enter__(self) -> "Epoch":
        if self._group._is_in_epoch:
            raise RuntimeError("an epoch has begun already")
        self._group._is_in_epoch = True
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        group = self._group
        group._is_in_epoch = False
        if exc is not None:
            # Leaves the group, so that the other workers do not wait for this
            # worker.
            group._worker._part()
            return
        worker = group._worker
        try:
            if self._num_steps == 0:
                self._first_clock = worker.stats()["clock"]
            group.barrier(END_OF_EPOCH, timeout_secs=self._timeout_secs)
            group.pull()  # Other workers may have taken more steps.
            steps_of_all = worker.stats()["clock"] - self._first_clock
            group._skip(steps_of_all - self._num_steps)
        except BaseException:
            worker._part()
            raise


def _checked(
    table: EmbeddingTable, ids: TensorLike, gradients: TensorLike
) -> TableGradients:
    owner = f"table '{table.name}'"
    ids = to_id_tensor(ids, owner)
    gradients = table._to_gradients(gradients)
    if gradients.shape != [*ids.shape, table.dim]:
        raise ValueError(
            f"{owner}: gradients of ids of shape {ids.shape} must have shape "
            f"{(*ids.shape, table.dim)}, got {gradients.shape}"
        )
    if not np.isfinite(gradients.numpy()).all():
        raise ValueError(
            f"{owner}: a gradient is NaN or Inf; nothing was pushed. Check the "
            "loss and the learning rate"
        )
    return table, ids, gradients
