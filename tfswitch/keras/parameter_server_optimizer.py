"""An optimizer whose state and variables live on the parameter servers."""

import numbers
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfswitch import consistency as consistency_lib
from tfswitch import optimizers as optimizers_lib
from tfswitch._settings._ranges import (
    bad_argument,
    check_wire_dtype,
    is_number,
)
from tfswitch._types import Config, Gradient, TensorLike, Variable
from tfswitch.cluster import Cluster, default_cluster
from tfswitch.consistency import Consistency
from tfswitch.dense import DensePush, DenseTable, pull_many, push_many
from tfswitch.keras import _backend, _row_weights, batch_size
from tfswitch.keras._row_weights import is_rows
from tfswitch.ops import embedding_ops
from tfswitch.ops.resources import has_remote_workers
from tfswitch.optimizers._conversion import KerasRate
from tfswitch.train._checks import check_choice
from tfswitch.train._shared_variables import SharedVariables
from tfswitch.train.worker import Worker, default_job

# Settings of a Keras optimizer that `ParameterServerOptimizer` applies on the
# worker, not on the servers.
_CLIPS = ("clipnorm", "clipvalue", "global_clipnorm")


@_backend.register_keras_serializable(package="tfswitch")
class ParameterServerOptimizer(_backend.Optimizer):
    """Trains one model in many processes, with plain `fit`.

    The model's dense variables become a `tfswitch.DenseTable` on the servers.
    The values of the first worker initialise the table, and the other workers
    start with these values. In each step a worker pushes its gradients, ends
    the step of its `tfswitch.train.Worker`, and pulls the new values; the
    servers take the step of the optimizer. When `fit` ends, the worker leaves
    its group, so that no other worker waits for it. In a loop over the epochs
    of a `tfswitch.data.WorkQueue` the worker leaves only after the last `fit`.

    Each step also pushes the gradients of `DynamicEmbedding` layers to their
    tables. To train them synchronously as well, give them the same
    `consistency`.

    With `Consistency.bsp()` N workers train as one process with the union of
    their batches, if losses are means over the batch. Batches are weighted by
    their numbers of samples: the first dimension of the ids of the model's
    `DynamicEmbedding` layers. If the model has no such layer, or its ids have
    another first dimension, pass `batch_weight`; otherwise all batches have the
    same weight.

    With `non_trainable="mean"`, the default under `bsp`, workers also share
    float variables without a gradient, such as the moving averages of batch
    normalization.

    Metrics, integers, seeds and the step counter that learning-rate schedules
    read stay on the worker. Gradients are also clipped on the worker. Clipping
    is refused under `bsp`, because it would need the sum of all workers'
    gradients.

    Args:
        optimizer: A name ("sgd", "adagrad", "adam", ...), an elementwise object
            of `tfswitch.optimizers`, or a Keras optimizer of the same name.
            Options of a `tfswitch.optimizers` object are applied on the
            servers, the clipping of a Keras optimizer on the worker.
        consistency: A `tfswitch.train.Consistency`, "asp" or "bsp"; None means
            `asp`.
        table: Name of the dense table. Models that share servers need different
            names.
        worker: The `tfswitch.train.Worker` of this process. By default a worker
            is made from TF_CONFIG when the optimizer is built.
        batch_weight: Number of samples of each batch, or a function without
            arguments that returns it, as a number or a tensor.
        non_trainable: "mean": the servers keep the model's float variables
            without a gradient, in a table with the name of `table` and
            "_non_trainable". The first worker's values initialise this table.
            Under `bsp` the changes of a step are averaged by samples; under
            `asp` and `ssp` each change is multiplied by 1 / `num_workers` and
            applied when it arrives. "local": each worker has values of its own.
            None means "mean" under `bsp`, else "local".
        non_trainable_variables: For a training loop of your own: the float
            variables without a gradient, except those of metrics. Each step
            sends all of them. By default the optimizer takes these variables
            from the model that is compiled with it, and a step sends only the
            variables that it writes.
        wire_dtype: The type in which this worker exchanges variables and their
            gradients with servers, as for `tfswitch.EmbeddingTable`. With
            "float16" or "bfloat16" the model's variables are rounded while an
            epoch runs, and exact after it; the servers' are always exact.
        cluster: The cluster to use; by default that of `tfswitch.connect`.
        name: Name of the optimizer.

    Raises:
        ValueError: If an argument is out of range, or the Keras optimizer has a
            setting that has no counterpart. When built: if the table or the
            group exists with other settings.

    Example:

    >>> model.compile(
    ...     tsw.keras.ParameterServerOptimizer(
    ...         keras.optimizers.Adam(1e-3),
    ...         consistency=tsw.train.Consistency.bsp(),
    ...     ),
    ...     "binary_crossentropy",
    ... )
    >>> model.fit(my_part_of_the_data)
    """

    def __init__(
        self,
        optimizer: optimizers_lib.OptimizerLike,
        *,
        consistency: consistency_lib.ConsistencyLike | None = None,
        table: str = "dense_variables",
        worker: Worker | None = None,
        batch_weight: float | Callable[[], TensorLike] | None = None,
        non_trainable: str | None = None,
        non_trainable_variables: Iterable[Variable] | None = None,
        wire_dtype: str = "float32",
        cluster: Cluster | None = None,
        name: str = "parameter_server",
    ) -> None:
        _backend.check_backend()
        server_optimizer, clips = _split(optimizer)
        server_optimizer.check_elementwise("ParameterServerOptimizer")
        consistency = consistency_lib.get(consistency)
        if consistency.kind == "bsp" and clips:
            raise ValueError(
                "with `bsp` gradients of several workers are averaged on the "
                "servers, and clipping each worker's own would give another "
                f"result. Received: {clips}. Leave it out, or use asp or ssp."
            )
        if (
            batch_weight is not None
            and not callable(batch_weight)
            and not (
                is_number(batch_weight, numbers.Real) and batch_weight >= 0
            )
        ):
            raise ValueError(
                "`batch_weight` must be a number of samples of at least 0, or "
                "a function that returns it. "
                f"Received: batch_weight={batch_weight!r}"
            )
        if non_trainable is not None:
            check_choice("non_trainable", non_trainable, ("mean", "local"))
        _check_worker(worker, consistency, cluster)
        _backend.init_optimizer(
            self,
            super().__init__,
            learning_rate=server_optimizer.learning_rate,
            name=name,
            **clips,
        )
        self._server_optimizer = server_optimizer
        self._consistency = consistency
        self._wire_dtype = check_wire_dtype(wire_dtype)
        self._table_name = table
        self._batch_weight = batch_weight
        self._non_trainable = non_trainable
        self._servers = _Servers(worker, cluster)
        if non_trainable_variables is not None:
            self._servers.non_trainable = list(non_trainable_variables)
        batch_size.start_recording()

    @property
    def consistency(self) -> Consistency:
        """When the gradients of several workers are applied."""
        return self._consistency

    @property
    def worker(self) -> Worker:
        """This process's worker; available once built."""
        return self._servers.once_built("worker")

    @property
    def table(self) -> DenseTable:
        """The dense variables on the servers; available once built."""
        return self._servers.once_built("table")

    def build(self, variables: Sequence[Variable]) -> None:
        """Puts the variables on the servers, or takes the servers' values.

        An optimizer that was loaded with a model does so at its first step
        only: a process that only predicts must not become a worker.

        Args:
            variables: The model's trainable variables.

        Raises:
            ValueError: If the servers hold other variables under this name.
            ConnectionError, TimeoutError: If a server does not answer.
        """
        if self._servers.variables:
            return
        strategy = tf.distribute.get_strategy()
        if strategy.num_replicas_in_sync > 1 or has_remote_workers():
            raise ValueError(
                "ParameterServerOptimizer is for processes of one replica "
                f"each. Received: {type(strategy).__name__} of "
                f"{strategy.num_replicas_in_sync} replicas. Under a strategy "
                "use a plain Keras optimizer; DynamicEmbedding works with both."
            )
        super().build(variables)
        self._servers.variables = [v for v in variables if not is_rows(v)]
        for variable in self._servers.variables:
            if getattr(variable, "constraint", None) is not None:
                raise ValueError(
                    f"variable '{_backend.variable_path(variable)}' has a "
                    "constraint, which would hold on the worker and not on "
                    "the servers; remove it"
                )
        if not self._servers.waits_for_step:
            self.join_servers()

    def join_servers(self) -> None:
        """Makes this process a worker now, once the optimizer is built.

        An optimizer that was loaded with a model would otherwise wait for its
        first step.
        """
        if self._servers.table is None:
            with tf.init_scope():
                self._join_servers()

    def _join_servers(self) -> None:
        servers = self._servers
        shapes = {
            name: tuple(v.shape)
            for name, v in _by_name(servers.variables).items()
        }
        if not shapes:
            raise ValueError(
                "the model has no dense variables to train; use a plain Keras "
                "optimizer"
            )
        if servers.worker is not None:
            cluster = servers.worker.cluster
        else:
            cluster = servers.cluster or default_cluster()
        table = DenseTable(
            self._table_name,
            shapes,
            optimizer=self._server_optimizer,
            consistency=self._consistency,
            wire_dtype=self._wire_dtype,
            cluster=cluster,
        )
        if servers.worker is None:
            servers.worker = Worker(
                consistency=self._consistency, cluster=cluster
            )
        try:
            table.initialize([v.numpy() for v in servers.variables])
            servers.shared = self._share_non_trainable(servers.worker)
            servers.table = table
            self.pull()
        except BaseException:
            # Leaves the group, because the other workers would wait for this
            # worker.
            servers.table = None
            servers.worker.leave()
            raise
        # Learning-rate schedules continue from the step of the other workers.
        clock = servers.worker.stats()["clock"]
        if clock > int(self.iterations.numpy()):
            self.iterations.assign(clock)

    def _share_non_trainable(self, worker: Worker) -> SharedVariables | None:
        """Shares the variables without a gradient with all workers."""
        servers = self._servers
        kind = self._non_trainable or (
            "mean" if self._consistency.kind == "bsp" else "local"
        )
        if kind == "local":
            return None
        given = servers.non_trainable
        left_out = set(map(id, servers.variables))
        if given is None:
            model = servers.model()
            if model is None:
                if worker.num_workers > 1:
                    warnings.warn(
                        "ParameterServerOptimizer does not know the model, so "
                        "variables without a gradient, such as the moving "
                        "averages of BatchNormalization, are each worker's "
                        "own. Pass `non_trainable_variables="
                        "model.non_trainable_variables`, or "
                        '`non_trainable="local"` if there are none.',
                        stacklevel=2,
                    )
                return None
            given = model.non_trainable_weights
            left_out |= {id(v) for m in model.metrics for v in m.variables}
        found = [
            variable
            for variable in {id(v): v for v in given}.values()
            if id(variable) not in left_out
            and not is_rows(variable)
            and tf.as_dtype(variable.dtype).is_floating
            and 0 not in tuple(variable.shape)
        ]
        if not found:
            return None
        return SharedVariables(
            f"{self._table_name}_non_trainable",
            _by_name(found),
            worker,
            finds_writes=servers.non_trainable is None,
        )

    def _dense_tables(self) -> list[DenseTable]:
        shared = self._servers.shared
        return [self.table, *([] if shared is None else [shared.table])]

    def _is_compiled_with(self, model: Any) -> None:
        """Sets the model whose variables without a gradient are shared."""
        self._servers.model = weakref.ref(model)

    def worker_of_job(self) -> Worker | None:
        """Returns this process's worker, or None if it belongs to no job."""
        servers = self._servers
        if servers.worker is None and default_job() is not None:
            servers.worker = Worker(
                consistency=self._consistency,
                cluster=servers.cluster or default_cluster(),
            )
        worker = servers.worker
        return None if worker is None or worker.job is None else worker

    def pull(self) -> None:
        """Sets the model's variables to their present values on the servers."""
        self._take(self.table._in_float32().pull())
        if self._servers.shared is not None:
            self._servers.shared.pull()

    def _take(self, values: Sequence[Any]) -> None:
        for variable, value in zip(
            self._servers.variables, values, strict=True
        ):
            variable.assign(tf.cast(value, variable.dtype))

    def push_values(self) -> None:
        """Sets the values on the servers to those of the model's variables.

        Call it after `load_weights` or `set_weights`, which change only the
        variables of this process: the next step would overwrite them with the
        servers' values.
        """
        self.table.assign([v.numpy() for v in self._servers.variables])
        if self._servers.shared is not None:
            self._servers.shared.assign()

    def apply(
        self,
        grads: Sequence[Gradient],
        trainable_variables: Iterable[Variable] | None = None,
    ) -> None:
        """Takes one step with all workers; Keras 3 calls it."""
        grads = list(grads)
        if not grads:
            return
        if trainable_variables is None:
            trainable_variables = self._trainable_variables
        self._step(grads, list(trainable_variables))

    def apply_gradients(
        self,
        grads_and_vars: Iterable[tuple[Gradient, Variable]],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Takes one step with all workers.

        Args:
            grads_and_vars: Pairs of gradient and variable.
        """
        grads, variables = zip(*grads_and_vars, strict=True)
        self._step(list(grads), list(variables))
        return self.iterations

    def _step(self, grads: list[Any], variables: list[Any]) -> None:
        if self._servers.table is None:
            if not all(map(_backend.has_value, variables)):
                # Keras builds the model in this trace, and traces it again
                # before it runs.
                tf.debugging.Assert(
                    tf.constant(False),
                    [
                        "the model's variables have no values before the first "
                        "step; call the model on a batch before `fit`"
                    ],
                )
                return
            with tf.init_scope():
                self.build(variables)
                self.built = True
                self.join_servers()
        gradients = self._in_order(grads, variables)
        # Layers with rows have recorded the size of the batch.
        has_layers = any(map(is_rows, variables))
        rows = [
            _row_weights.row_gradient(variable, gradient)
            for variable, gradient in zip(variables, grads, strict=True)
            if is_rows(variable) and gradient is not None
        ]
        clipped = self._clip([*gradients, *(each.values for each in rows)])
        gradients = clipped[: len(gradients)]
        rows = [
            each._replace(values=values)
            for each, values in zip(
                rows, clipped[len(gradients) :], strict=True
            )
        ]
        table = self.table
        rate = tf.convert_to_tensor(KerasRate(self)())
        step = tf.cast(tf.convert_to_tensor(self.iterations), tf.int64) + 1
        shared = self._servers.shared
        written = [] if shared is None else shared.written()
        dense = [DensePush(table, gradients, rate, step)]
        if shared is not None and written:
            dense.append(shared.changes(written))
        pushed = [*_row_weights.push(rows, self, rate), *push_many(dense)]
        with tf.control_dependencies([tf.convert_to_tensor(p) for p in pushed]):
            weight = tf.identity(self._weight(has_layers))
            with tf.control_dependencies([weight]):
                ended = embedding_ops.end_step(table._find_handle(), weight)
        with tf.control_dependencies([ended]):
            values = pull_many([(each.table, each.arrays) for each in dense])
            self._take(values[0])
            if shared is not None and written:
                shared.take(written, values[1])
            # Only a step that has run counts, not the call that finds the end
            # of the data.
            self.iterations.assign_add(1)

    def _in_order(self, grads: list[Any], variables: list[Any]) -> list[Any]:
        """Returns the gradient of each variable on the servers, or None."""
        by_id = {
            id(variable): gradient
            for variable, gradient in zip(variables, grads, strict=True)
            if not is_rows(variable)
        }
        gradients = [by_id.pop(id(v), None) for v in self._servers.variables]
        for variable in variables:
            if id(variable) in by_id:
                raise ValueError(
                    "the optimizer was built for other variables than "
                    f"'{_backend.variable_path(variable)}'; make a new one for "
                    "each model"
                )
        return gradients

    def _clip(self, gradients: list[Any]) -> list[Any]:
        present = [g for g in gradients if g is not None]
        clipped = iter(self._clip_gradients(present) if present else [])
        return [None if g is None else next(clipped) for g in gradients]

    def _weight(self, has_layers: bool) -> tf.Tensor:
        if self._batch_weight is not None:
            given = self._batch_weight
            weight = given() if callable(given) else given
            return tf.cast(weight, tf.float64)
        if not has_layers:  # The recorded size is of another model.
            return tf.ones([], tf.float64)
        recorded = batch_size.read()
        return tf.where(recorded > 0.0, recorded, tf.ones_like(recorded))

    def finalize_variable_values(self, var_list: Sequence[Variable]) -> None:
        """Pulls the last values and leaves the group, at the end of `fit`.

        The next step joins again. In a loop over `WorkQueue.epochs` the worker
        leaves only after the last epoch.
        """
        if self._servers.table is None:
            return
        try:
            self.pull()
        finally:
            self.worker._leave_after_fit()

    def exclude_from_weight_decay(self, *args: Any, **kwargs: Any) -> None:
        """Raises ValueError, because on the servers all variables decay."""
        raise ValueError(
            "ParameterServerOptimizer cannot exclude variables from weight "
            "decay: on the servers all of them decay. Make it with an "
            "optimizer that has no `weight_decay`."
        )

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments, except objects of the process.

        The objects are `worker`, `cluster` and `non_trainable_variables`.
        """
        return {
            "name": self.name,
            "optimizer": _backend.optimizer_config(
                self._server_optimizer, lambda: float(self.learning_rate)
            ),
            "consistency": self._consistency.get_config(),
            "wire_dtype": self._wire_dtype,
            "table": self._table_name,
            "batch_weight": (
                None if callable(self._batch_weight) else self._batch_weight
            ),
            "non_trainable": self._non_trainable,
            **{clip: getattr(self, clip, None) for clip in _CLIPS},
        }

    @classmethod
    def from_config(
        cls, config: Config, custom_objects: Config | None = None
    ) -> "ParameterServerOptimizer":
        """Makes an optimizer from the config that `get_config` returned."""
        config = dict(config)
        clips = {clip: config.pop(clip, None) for clip in _CLIPS}
        # The config of the servers' optimizer must not have the worker's
        # clipping.
        config["optimizer"] = {
            **_backend.load_rate(config["optimizer"]),
            "worker_clips": clips,
        }
        made = cls(**config)
        made._servers.waits_for_step = True
        return made


def _by_name(variables: Sequence[Any]) -> dict[str, Any]:
    """Names variables alike in all processes.

    Layers have numbers in their names. The numbers differ from process to
    process, but the order of variables is the same.
    """
    return {
        f"{i}/{_backend.variable_path(v).rsplit('/', 1)[-1]}": v
        for i, v in enumerate(variables)
    }


def _check_worker(
    worker: Any, consistency: Consistency, cluster: Cluster | None
) -> None:
    if worker is None:
        return
    if not isinstance(worker, Worker):
        raise bad_argument("worker", worker, "a tfswitch.train.Worker")
    if worker.consistency != consistency:
        raise ValueError(
            "`worker` and the optimizer must have one consistency. "
            f"Received: {worker.consistency} and {consistency}"
        )
    if cluster is not None and worker.cluster is not cluster:
        raise ValueError(
            "`worker` is of another cluster. Received: "
            f"{worker.cluster!r} and {cluster!r}"
        )


class _Servers:
    """The optimizer's objects for the servers, which Keras must not track."""

    def __init__(self, worker: Worker | None, cluster: Cluster | None) -> None:
        self.worker = worker
        self.cluster = cluster
        self.table: DenseTable | None = None
        self.variables: list[Any] = []
        # A weak reference, because the model refers to the optimizer.
        self.model: Callable[[], Any] = lambda: None
        # The argument `non_trainable_variables`, or None.
        self.non_trainable: list[Any] | None = None
        self.shared: SharedVariables | None = None
        # Whether to join the servers at the first step, not when built.
        self.waits_for_step = False
        # Whether a checkpoint was restored at the start of the present `fit`.
        self.has_restored = False

    def once_built(self, what: str) -> Any:
        found = getattr(self, what)
        if found is None:
            raise ValueError(
                f"the optimizer has no {what} yet: it is made when the "
                "optimizer is built, by `fit` or `build`"
            )
        return found


def _split(optimizer: Any) -> tuple[optimizers_lib.Optimizer, dict[str, Any]]:
    """Returns the servers' optimizer, and the worker's clipping."""
    if isinstance(optimizer, Mapping):
        config = dict(optimizer.get("config", {}))
        # In a Keras config the clipping is among the other settings, and is
        # taken out of them here.
        found = optimizer.get("worker_clips")
        if found is None:
            found = {clip: config.pop(clip, None) for clip in _CLIPS}
        rule = optimizers_lib.get({**optimizer, "config": config})
    elif not hasattr(optimizer, "get_config") or isinstance(
        optimizer, optimizers_lib.Optimizer
    ):
        return optimizers_lib.get(optimizer), {}
    else:
        found = {clip: getattr(optimizer, clip, None) for clip in _CLIPS}
        rule = optimizers_lib.from_keras(optimizer, ignore=_CLIPS)
    return rule, {clip: v for clip, v in found.items() if v is not None}
