"""The engine of SyncReplicasOptimizer whose variables are in dense tables."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfswitch import optimizers
from tfswitch.cluster import Cluster, cluster_of
from tfswitch.consistency import Consistency
from tfswitch.dense import DenseTable
from tfswitch.ops import embedding_ops
from tfswitch.table import EmbeddingTable
from tfswitch.train._engine import (
    Engine,
    ReplicaOptions,
    StepFinder,
    local_variable,
    scaled,
)
from tfswitch.train._legacy_optimizers import to_server_optimizer
from tfswitch.train.barrier import END_OF_EPOCH, EPOCH_SECS
from tfswitch.train.worker import Worker

# float32 holds integers below 2 ** 24.
_DIGITS = 1 << 20

_TRAINABLE = (tf.float32, tf.float16, tf.bfloat16)

# A table, ids, and the embeddings of these ids, or their gradients.
TableTensor = tuple[EmbeddingTable, Any, Any]


def consistency_of(normalize: str) -> Consistency:
    """Returns the consistency of tables for the optimizer's `normalize`."""
    return Consistency.bsp("sum" if normalize == "initial" else "mean")


class TableEngine(Engine):
    """Trains with tfswitch's servers.

    The servers keep the variables in a dense table and take the steps. Each
    worker has a copy of the variables in its own session. Embedding tables take
    part in the same steps.

    Args:
        options: The optimizer's options.
        opt: The TensorFlow optimizer. The servers take its steps with the
            optimizer of tfswitch that corresponds to it.
        pairs: Gradients and variables.
        global_step: Counts the steps of all workers.
        table_gradients: Embedding tables, ids and gradients.
        name: The name of the train operation.

    Raises:
        ValueError: If something has no counterpart on the servers.
        ConnectionError, TimeoutError: If a server does not answer.
    """

    def __init__(
        self,
        options: ReplicaOptions,
        opt: Any,
        pairs: Sequence[tuple[Any, Any]],
        global_step: Any,
        table_gradients: Iterable[TableTensor],
        name: str | None,
    ) -> None:
        to_tables = list(table_gradients)
        cluster = cluster_of((t for t, _, _ in to_tables), options.cluster)
        _check_options(options, cluster)
        server_optimizer, rate = to_server_optimizer(opt)
        for gradient, variable in pairs:
            if getattr(server_optimizer, "momentum", 0.0) > 0.0:
                _check_is_dense(gradient, variable)
            _check_variable(variable)
        consistency = consistency_of(options.normalize)
        _check_tables((table for table, _, _ in to_tables), consistency)
        self.servers: Sequence[str] = ()
        self.join_secs = options.join_secs
        self._options = options
        self._worker: Worker | None = None
        self._variables = [variable for _, variable in pairs]
        self._global_step = global_step
        self._dense = DenseTable(
            f"{options.name}/variables",
            {v.op.name: tuple(v.shape.as_list()) for v in self._variables},
            optimizer=server_optimizer,
            consistency=consistency,
            cluster=cluster,
        )
        # Keeps the global step that the session had before the servers took
        # their first step.
        self._origin = EmbeddingTable(
            f"{options.name}/origin",
            2,
            initializer="zeros",
            optimizer=optimizers.SGD(0.0),
            cluster=cluster,
        )
        self._others: DenseTable | None = None
        self._other_variables: list[Any] = []
        self._follow_others: Any = None
        with tf.compat.v1.name_scope(name, "sync_replicas"):
            weight = options.weight()
            gradients = [gradient for gradient, _ in pairs]
            pushed = self._push(weight, gradients, rate, to_tables)
            with tf.control_dependencies(pushed):
                rounds = embedding_ops.end_step(
                    self._dense._find_handle(), options.counted_weight(weight)
                )
            self.trains = StepFinder(rounds.op).trains
            self._rounds = tf.compat.v1.placeholder(tf.int64, [], "rounds")
            self._first_step = local_variable(0, tf.int64, "first_step")
            self._take_values = self._follow(self._rounds)
            with tf.control_dependencies([rounds]):
                followed = self._follow(rounds)
            self.train_op = options.average(followed)

    def _push(
        self,
        weight: tf.Tensor,
        gradients: Sequence[Any],
        rate: Any,
        to_tables: Iterable[TableTensor],
    ) -> list[Any]:
        if self._options.normalize == "initial":
            factor = self._options.share_of_step(weight)
            gradients = [
                scaled(tf.convert_to_tensor(g), factor) for g in gradients
            ]
            to_tables = [
                (table, ids, scaled(tf.convert_to_tensor(gradient), factor))
                for table, ids, gradient in to_tables
            ]
        rate = tf.cast(rate() if callable(rate) else rate, tf.float32)
        return [
            self._dense.push(gradients, learning_rate=rate),
            *(table.push(ids, gradient) for table, ids, gradient in to_tables),
        ]

    def complete_graph(self) -> None:
        """Finds other variables, which must also be equal on all workers."""
        if self._others is not None:
            return
        known = {v.op.name for v in [*self._variables, self._global_step]}
        self._other_variables = [
            v
            for v in tf.compat.v1.global_variables()
            if v.op.name not in known
            and v.dtype.base_dtype.is_floating
            and v.shape.is_fully_defined()
            and v.shape.num_elements() > 0
        ]
        if not self._other_variables:
            return
        self._others = DenseTable(
            f"{self._options.name}/others",
            {
                v.op.name: tuple(v.shape.as_list())
                for v in self._other_variables
            },
            optimizer=optimizers.SGD(0.0),
            cluster=self._dense.cluster,
        )
        self._follow_others = _assign_all(
            self._other_variables, self._others.pull()
        )

    def start(self, session: Any, is_chief: bool) -> None:
        """Joins the workers, and gets the chief's values from the servers."""
        self._run = session.run
        self._has_step_failed = False
        worker = self._worker = self._join()
        try:
            if is_chief:
                self._offer(worker.stats()["round"])
            else:
                self._dense.wait_until_initialized(
                    timeout_secs=self._options.join_secs
                )
            if self._others is not None:
                self._session_run(self._follow_others)
            self._catch_up()
        except BaseException:
            self.part()
            raise

    def resume(self) -> None:
        """Joins again if the last step has raised an error."""
        if self._has_step_failed:
            # The new worker object replaces the old one. Otherwise other
            # workers would wait for the old object.
            self._worker = self._join()
            self._has_step_failed = False
            self._catch_up()

    def _join(self) -> Worker:
        options = self._options
        backups = options.num_gradients < options.num_workers
        return Worker(
            options.task_index,
            options.num_workers,
            consistency=consistency_of(options.normalize),
            group=options.name,
            cluster=self._dense.cluster,
            lease_secs=options.lease_secs,
            join_secs=options.join_secs,
            wait_secs=options.wait_secs,
            replicas_to_aggregate=options.num_gradients if backups else None,
            late=options.late,
        )

    def end_epoch(self) -> None:
        self.resume()
        self._present_worker().wait_at_barrier(
            END_OF_EPOCH, timeout_secs=EPOCH_SECS
        )
        self._catch_up()

    def leave(self) -> None:
        self._present_worker().leave()

    def part(self) -> None:
        self._present_worker()._part()

    def stats(self) -> dict[str, Any]:
        """Returns the counts of all workers' work."""
        return self._present_worker().stats()["workers"]

    def _present_worker(self) -> Worker:
        assert self._worker is not None  # There is a session.
        return self._worker

    def _follow(self, rounds: tf.Tensor) -> Any:
        """Returns the op that sets variables and step to their present values.

        Args:
            rounds: int64 scalar: how many steps were taken.
        """
        step = tf.cast(
            self._first_step + rounds, self._global_step.dtype.base_dtype
        )
        return tf.group(
            _assign_all(self._variables, self._dense.pull()),
            tf.compat.v1.assign(self._global_step, step).op,
        )

    def _offer(self, rounds: int) -> None:
        """Puts a session's values on servers that have no values yet."""
        values, step = self._session_run([self._variables, self._global_step])
        is_new = not self._dense.is_initialized()
        # If the group was made again with other settings, it counts rounds from
        # 0, so the stored step can be too low.
        if is_new or self._global_step_before_all() + rounds < step:
            high, low = divmod(int(step) - rounds, _DIGITS)
            self._origin.assign([0], np.array([[high, low]], np.float32))
        if self._others is not None:
            others = self._session_run(self._other_variables)
            # Values of a restored checkpoint (`step` is above 0) replace first
            # values that another worker has set.
            if not self._others.initialize(others) and step > 0:
                self._others.assign(others)
        self._dense.initialize(values)

    def _catch_up(self) -> None:
        """Sets a session's values to those on the servers."""
        rounds = self._present_worker().stats()["round"]
        self._load(self._first_step, self._global_step_before_all())
        self._session_run(self._take_values, {self._rounds: rounds})

    def _global_step_before_all(self) -> int:
        _, rows = self._origin.export_rows()
        if not len(rows):  # No worker has set the row, or a server has lost it.
            return 0
        high, low = rows[0]
        return int(high) * _DIGITS + int(low)


def _assign_all(variables: Sequence[Any], values: Sequence[tf.Tensor]) -> Any:
    return tf.group(
        *(
            tf.compat.v1.assign(
                variable, tf.cast(value, variable.dtype.base_dtype)
            ).op
            for variable, value in zip(variables, values, strict=True)
        )
    )


def _check_is_dense(gradient: Any, variable: Any) -> None:
    if isinstance(gradient, tf.IndexedSlices):
        raise ValueError(
            f"variable '{variable.name}' has a gradient of some rows, and "
            "MomentumOptimizer lets the velocity of the other rows rest, which "
            "a dense table does not. Keep the rows in a "
            "tfswitch.EmbeddingTable, or use an optimizer without momentum"
        )


def _check_options(options: ReplicaOptions, cluster: Cluster) -> None:
    """Raises ValueError for options that servers cannot follow."""
    if options.num_workers > 1 and not cluster.is_remote:
        raise ValueError(
            f"{options.num_workers} workers need servers that all of them "
            "reach. Call tfswitch.connect first, or pass `cluster`; or "
            "put the variables on TensorFlow's parameter servers"
        )
    if options.sparse_average == "rows":
        raise ValueError(
            "the servers average gradients of rows as all others: use "
            'sparse_average="batch". With it, rare rows learn as they '
            'would in one process. Received: sparse_average="rows"'
        )
    if options.post_aggregate is not None:
        raise ValueError(
            "the servers sum the gradients and take the step, so nothing "
            "of this graph can come in between; leave `post_aggregate` out"
        )


def _check_tables(
    tables: Iterable[EmbeddingTable], consistency: Consistency
) -> None:
    for table in tables:
        if table.consistency != consistency:
            raise ValueError(
                f"table '{table.name}' has consistency "
                f"{table.consistency}; to be trained in the same steps it "
                f"needs that of the optimizer, {consistency}"
            )


def _check_variable(variable: Any) -> None:
    if variable.dtype.base_dtype not in _TRAINABLE:
        raise ValueError(
            f"variable '{variable.name}' is of {variable.dtype.base_dtype.name}"
            ", and the servers keep float32: use a type of at most 32 bits"
        )
    if not variable.shape.is_fully_defined():
        raise ValueError(
            f"variable '{variable.name}' has the unknown shape "
            f"{variable.shape}; give it a shape"
        )
