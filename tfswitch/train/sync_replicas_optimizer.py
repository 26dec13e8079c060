"""SyncReplicasOptimizer for TensorFlow 1 graphs, without its faults."""

from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

from tfswitch import _tf_config
from tfswitch.cluster import Cluster, default_cluster
from tfswitch.consistency import Consistency
from tfswitch.dense import DenseTable
from tfswitch.ops import embedding_ops
from tfswitch.table import EmbeddingTable
from tfswitch.train._checks import check_choice, check_count, check_seconds
from tfswitch.train._legacy_optimizers import to_server_optimizer
from tfswitch.train.sync_replicas_hook import SyncReplicasHook, TrainingGraph
from tfswitch.train.worker import Worker, default_worker_id

_TRAINABLE = (tf.float32, tf.float16, tf.bfloat16)

# A table, ids, and what a lookup of them has given, or the gradient of that.
TableTensor = tuple[EmbeddingTable, Any, Any]


class SyncReplicasOptimizer(tf.compat.v1.train.Optimizer):
    """Averages the gradients of all workers, and takes one step with them.

    Takes the place of `tf.compat.v1.train.SyncReplicasOptimizer`: same
    arguments, same hook, same loop. Workers may have different amounts of data:
    one that has ended is not waited for, every sample is trained as often as
    its worker says, and `MonitoredTrainingSession` closes when all have ended,
    so that the last checkpoint is complete. `docs/sync_training.md` compares
    both.

    Variables and their optimizer live on the cluster's servers; each worker has
    a copy of the variables in a session of its own, which follows. Make the
    session with `tfswitch.train.MonitoredTrainingSession`, and no
    `tf.train.Server`.

    Args:
        opt: The optimizer that takes the steps: a GradientDescent-, Momentum-,
            Adagrad- or AdamOptimizer of `tf.compat.v1.train`.
        replicas_to_aggregate: How many gradients make a step, at most
            `total_num_replicas`. With fewer, slow workers are backups: a step
            does not wait for them.
        total_num_replicas: How many workers there are; by default
            `replicas_to_aggregate`.
        variable_averages: An `ExponentialMovingAverage` to keep of the copies:
            of each worker's, at its own steps.
        variables_to_average: Of which variables; with `variable_averages`.
        use_locking: Accepted and not used.
        name: Of the group of workers, and of what is kept on the servers. Jobs
            that share servers need different ones.
        batch_weight: Scalar tensor: the number of samples of the batch. None: a
            batch weighs as much as any other, however large it is.
        normalize: By what the sum of the gradients of a step is divided.
            "step": by the weights in it, so each sample of it counts alike.
            "replicas": by the number of gradients in it, as the stock class
            does. "initial": by `replicas_to_aggregate` times the weight of this
            worker's first batch, so steps get smaller when workers have ended,
            and each sample of the whole run counts alike.
        sparse_average: "batch", the only one with servers: gradients of rows
            are averaged as all others. The stock class divides each row by the
            number of gradients that have it.
        late: What becomes of gradients that come too late for their step, with
            fewer `replicas_to_aggregate` than workers. "drop": dropped and
            counted; "carry": they are in the next step.
        lease_secs: How long a worker is believed to live after it was last
            heard of.
        join_secs: How long workers are waited for at the start.
        on_evict: What to do when a worker has died: "continue", or "raise" on
            all others.
        post_aggregate: Not with servers, which take the steps themselves.
        task_index: Which worker this is, from 0. By default from the device
            scope (of a job that the model itself must not be placed on, as
            sessions are local), else from TF_CONFIG, else 0.
        wait_secs: Longest wait of a step for other workers.
        cluster: By default that of `tfswitch.connect`.

    Raises:
        ValueError: If an argument is out of range or has no counterpart on the
            servers.

    Example:

    >>> opt = tsw.train.SyncReplicasOptimizer(
    ...     tf.compat.v1.train.AdagradOptimizer(0.1), 2,
    ...     batch_weight=tf.size(y))
    >>> train_op = opt.minimize(loss, global_step)
    >>> hook = opt.make_session_run_hook(is_chief)
    >>> with tsw.train.MonitoredTrainingSession(
    ...         is_chief=is_chief, checkpoint_dir=path, hooks=[hook]) as sess:
    ...     while not sess.should_stop():
    ...         sess.run(train_op)
    """

    def __init__(
        self,
        opt: Any,
        replicas_to_aggregate: int,
        total_num_replicas: int | None = None,
        variable_averages: Any = None,
        variables_to_average: Any = None,
        use_locking: bool = False,
        name: str = "sync_replicas",
        *,
        batch_weight: Any = None,
        normalize: str = "step",
        sparse_average: str = "batch",
        late: str = "drop",
        lease_secs: float = 30.0,
        join_secs: float = 600.0,
        on_evict: str = "continue",
        post_aggregate: Any = None,
        task_index: int | None = None,
        wait_secs: float = 3600.0,
        cluster: Cluster | None = None,
    ) -> None:
        super().__init__(use_locking, name)
        if total_num_replicas is None:
            total_num_replicas = replicas_to_aggregate
            _check_known_workers(replicas_to_aggregate)
        check_count("replicas_to_aggregate", replicas_to_aggregate, 1)
        check_count("total_num_replicas", total_num_replicas, 1)
        if replicas_to_aggregate > total_num_replicas:
            raise ValueError(
                "`replicas_to_aggregate` must be at most `total_num_replicas`: "
                "a worker has one gradient in each step. Received: "
                f"replicas_to_aggregate={replicas_to_aggregate}, "
                f"total_num_replicas={total_num_replicas}"
            )
        check_choice("normalize", normalize, ("step", "replicas", "initial"))
        check_choice("sparse_average", sparse_average, ("batch", "rows"))
        check_choice("late", late, ("drop", "carry"))
        check_choice("on_evict", on_evict, ("continue", "raise"))
        for key, value in (
            ("lease_secs", lease_secs),
            ("join_secs", join_secs),
            ("wait_secs", wait_secs),
        ):
            check_seconds(key, value)
        if sparse_average == "rows":
            raise ValueError(
                "the servers average gradients of rows as all others: use "
                'sparse_average="batch". With it, rare rows learn as they '
                'would in one process. Received: sparse_average="rows"'
            )
        if post_aggregate is not None:
            raise ValueError(
                "the servers sum the gradients and take the step, so nothing "
                "of this graph can come in between; leave `post_aggregate` out"
            )
        if (variable_averages is None) != (variables_to_average is None):
            raise ValueError(
                "`variable_averages` and `variables_to_average` belong "
                "together. Received: "
                f"variable_averages={variable_averages!r}, "
                f"variables_to_average={variables_to_average!r}"
            )
        if task_index is None:
            task_index = _task_index()
        check_count("task_index", task_index, 0)
        if task_index >= total_num_replicas:
            raise ValueError(
                "`task_index` must be below `total_num_replicas`. Received: "
                f"task_index={task_index}, "
                f"total_num_replicas={total_num_replicas}"
            )
        if cluster is None:
            cluster = default_cluster()
        if not isinstance(cluster, Cluster):
            raise ValueError(
                "`cluster` must be what tfswitch.connect returned. "
                f"Received: cluster={cluster!r}"
            )
        if total_num_replicas > 1 and not cluster.is_remote:
            raise ValueError(
                f"{total_num_replicas} workers need servers that all of them "
                "reach. Call tfswitch.connect first, or pass `cluster`"
            )
        self._opt = opt
        self._server_optimizer, self._rate = to_server_optimizer(opt)
        self._num_gradients = int(replicas_to_aggregate)
        self._num_workers = int(total_num_replicas)
        self._averages = variable_averages
        self._averaged = variables_to_average
        self._batch_weight = batch_weight
        self._normalize = normalize
        self._late = late
        self._lease_secs = float(lease_secs)
        self._join_secs = float(join_secs)
        self._wait_secs = float(wait_secs)
        self._raises_on_evict = on_evict == "raise"
        self._task_index = int(task_index)
        self._cluster = cluster
        self._graph: TrainingGraph | None = None

    @property
    def consistency(self) -> Consistency:
        """What tables must have that are trained in the same steps."""
        return Consistency.bsp(
            "sum" if self._normalize == "initial" else "mean"
        )

    @property
    def task_index(self) -> int:
        """Which worker this is, from 0."""
        return self._task_index

    @property
    def total_num_replicas(self) -> int:
        """How many workers there are."""
        return self._num_workers

    def join(self) -> Worker:
        """Makes this process a worker; what the hook does.

        Raises:
            ValueError: If the group exists with other settings.
            ConnectionError, TimeoutError: If the server does not answer.
        """
        backups = self._num_gradients < self._num_workers
        return Worker(
            self._task_index,
            self._num_workers,
            consistency=self.consistency,
            group=self._name,
            cluster=self._cluster,
            lease_secs=self._lease_secs,
            join_secs=self._join_secs,
            wait_secs=self._wait_secs,
            replicas_to_aggregate=self._num_gradients if backups else None,
            late=self._late,
        )

    def compute_gradients(self, *args: Any, **kwargs: Any) -> Any:
        """As the inner optimizer's."""
        return self._opt.compute_gradients(*args, **kwargs)

    def minimize(
        self,
        loss: Any,
        global_step: Any = None,
        var_list: Any = None,
        gate_gradients: int = tf.compat.v1.train.Optimizer.GATE_OP,
        aggregation_method: Any = None,
        colocate_gradients_with_ops: bool = False,
        name: str | None = None,
        grad_loss: Any = None,
        *,
        table_lookups: Iterable[TableTensor] = (),
    ) -> Any:
        """Returns the operation that takes one step with all workers.

        Args:
            loss: Scalar tensor: the mean over the batch.
            global_step: Counts the steps of all workers.
            var_list: See `tf.compat.v1.train.Optimizer.minimize`, as for the
                arguments that are not listed here.
            table_lookups: `(table, ids, embeddings)` for each lookup in the
                model of a `tfswitch.EmbeddingTable`, of this optimizer's
                `consistency`, that is to be trained.

        Raises:
            ValueError: As `apply_gradients`.
        """
        lookups = list(table_lookups)
        gradients = tf.compat.v1.gradients(
            loss, [embeddings for _, _, embeddings in lookups], grad_loss
        )
        for (table, _, _), gradient in zip(lookups, gradients, strict=True):
            if gradient is None:
                raise ValueError(
                    f"table '{table.name}': the loss does not depend on what "
                    "was looked up"
                )
        grads_and_vars = self.compute_gradients(
            loss,
            var_list=var_list,
            gate_gradients=gate_gradients,
            aggregation_method=aggregation_method,
            colocate_gradients_with_ops=colocate_gradients_with_ops,
            grad_loss=grad_loss,
        )
        return self.apply_gradients(
            grads_and_vars,
            global_step,
            name,
            table_gradients=[
                (table, ids, gradient)
                for (table, ids, _), gradient in zip(
                    lookups, gradients, strict=True
                )
            ],
        )

    def apply_gradients(
        self,
        grads_and_vars: Any,
        global_step: Any = None,
        name: str | None = None,
        *,
        table_gradients: Iterable[TableTensor] = (),
    ) -> Any:
        """Returns the operation that takes one step with all workers.

        Args:
            grads_and_vars: Pairs of gradient and variable. A variable without a
                gradient stays as it is.
            global_step: Counts the steps of all workers.
            name: Of the operation.
            table_gradients: `(table, ids, gradients)` for each
                `tfswitch.EmbeddingTable` of this optimizer's `consistency` that
                is trained in the same steps.

        Raises:
            ValueError: If there is no gradient or no global step; a variable is
                on a `ps` device or not of a float type of at most 32 bits; a
                table has another consistency; or the servers hold other
                variables under the optimizer's name.
            ConnectionError, TimeoutError: If a server does not answer.
        """
        if global_step is None:
            raise ValueError("`global_step` is needed: it counts the steps")
        pairs = [(g, v) for g, v in grads_and_vars if g is not None]
        if not pairs:
            raise ValueError(
                "no variable has a gradient. Received: "
                f"{[v.name for _, v in grads_and_vars]}"
            )
        gradients = [gradient for gradient, _ in pairs]
        if getattr(self._server_optimizer, "momentum", 0.0) > 0.0:
            for gradient, variable in pairs:
                _check_is_dense(gradient, variable)
        variables = [variable for _, variable in pairs]
        for variable in variables:
            _check_variable(variable)
        to_tables = list(table_gradients)
        for table, _, _ in to_tables:
            if table.consistency != self.consistency:
                raise ValueError(
                    f"table '{table.name}' has consistency "
                    f"{table.consistency}; to be trained in the same steps it "
                    f"needs that of the optimizer, {self.consistency}"
                )
        dense = DenseTable(
            f"{self._name}/variables",
            {v.op.name: tuple(v.shape.as_list()) for v in variables},
            optimizer=self._server_optimizer,
            consistency=self.consistency,
            cluster=self._cluster,
        )
        with tf.compat.v1.name_scope(name, "sync_replicas"):
            weight = self._weight()
            if self._normalize == "initial":
                factor = self._share_of_step(weight)
                gradients = [_scaled(g, factor) for g in gradients]
                to_tables = [
                    (table, ids, _scaled(gradient, factor))
                    for table, ids, gradient in to_tables
                ]
            rate = self._rate() if callable(self._rate) else self._rate
            pushed = [
                dense.push(gradients, learning_rate=tf.cast(rate, tf.float32))
            ]
            pushed.extend(
                table.push(ids, gradient) for table, ids, gradient in to_tables
            )
            with tf.control_dependencies(pushed):
                counted = (
                    tf.ones([], tf.float64)
                    if self._normalize == "replicas"
                    else tf.identity(weight)
                )
                rounds = embedding_ops.end_step(dense.handle, counted)
            graph = TrainingGraph(
                variables, dense, global_step, rounds, self._name
            )
            with tf.control_dependencies([rounds]):
                followed = graph.follow(rounds)
            if self._averages is None:
                train_op = followed
            else:
                with tf.control_dependencies([followed]):
                    train_op = self._averages.apply(self._averaged)
        self._graph = graph
        return train_op

    def make_session_run_hook(
        self, is_chief: bool, num_tokens: int = -1
    ) -> SyncReplicasHook:
        """Returns the hook that every worker gives to its session.

        Args:
            is_chief: Whether this worker's variables and global step are what
                all begin with.
            num_tokens: Accepted and not used: there are no tokens.

        Raises:
            ValueError: If there is no train operation yet.
        """
        del num_tokens
        return SyncReplicasHook(
            self, self.graph, bool(is_chief), self._raises_on_evict
        )

    @property
    def graph(self) -> TrainingGraph:
        """What `apply_gradients` has made.

        Raises:
            ValueError: If it was not called yet.
        """
        if self._graph is None:
            raise ValueError(
                "there is no train operation yet: call `minimize` or "
                "`apply_gradients` first"
            )
        return self._graph

    @property
    def join_secs(self) -> float:
        """How long workers are waited for at the start."""
        return self._join_secs

    def get_init_tokens_op(self, num_tokens: int = -1) -> Any:
        """Returns an operation that does nothing: there are no tokens."""
        del num_tokens
        return tf.no_op(name="no_tokens")

    def get_chief_queue_runner(self) -> "_NoQueueRunner":
        """Returns a queue runner without threads: the servers do its work."""
        return _NoQueueRunner()

    def get_slot(self, *args: Any, **kwargs: Any) -> Any:
        """As the inner optimizer's: None, as slots are on the servers."""
        return self._opt.get_slot(*args, **kwargs)

    def get_slot_names(self, *args: Any, **kwargs: Any) -> Sequence[str]:
        """As the inner optimizer's."""
        return self._opt.get_slot_names(*args, **kwargs)

    def variables(self) -> Sequence[Any]:
        """As the inner optimizer's."""
        return self._opt.variables()

    def _weight(self) -> tf.Tensor:
        if self._batch_weight is None:
            return tf.ones([], tf.float64)
        weight = tf.cast(self._batch_weight, tf.float64)
        if not weight.shape.is_compatible_with([]):
            raise ValueError(
                "`batch_weight` must be a scalar: the number of samples of "
                f"the batch. Received: shape {weight.shape}"
            )
        return tf.ensure_shape(weight, [])

    def _share_of_step(self, weight: tf.Tensor) -> tf.Tensor:
        first = tf.compat.v1.Variable(
            0.0,
            trainable=False,
            dtype=tf.float64,
            collections=[tf.compat.v1.GraphKeys.LOCAL_VARIABLES],
            name="first_weight",
            use_resource=True,
        )
        full = tf.cond(
            first > 0.0,
            lambda: tf.identity(first),
            lambda: tf.identity(first.assign(weight)),
        )
        share = weight / (self._num_gradients * full)
        return tf.where(weight > 0.0, share, tf.zeros_like(share))


class _NoQueueRunner:
    """What a `tf.compat.v1.train.Supervisor` starts, and needs not."""

    name = "no_queue_runner"

    def create_threads(
        self,
        sess: Any,
        coord: Any = None,
        daemon: bool = False,
        start: bool = False,
    ) -> list[Any]:
        """Returns no threads."""
        del sess, coord, daemon, start
        return []


def _scaled(gradient: Any, factor: tf.Tensor) -> tf.Tensor:
    gradient = tf.convert_to_tensor(gradient)
    return gradient * tf.cast(factor, gradient.dtype)


def _check_is_dense(gradient: Any, variable: Any) -> None:
    if isinstance(gradient, tf.IndexedSlices):
        raise ValueError(
            f"variable '{variable.name}' has a gradient of some rows, and "
            "MomentumOptimizer lets the velocity of the other rows rest, which "
            "a dense table does not. Keep the rows in a "
            "tfswitch.EmbeddingTable, or use an optimizer without momentum"
        )


def _check_variable(variable: Any) -> None:
    job = tf.DeviceSpec.from_string(variable.device or "").job
    if job == "ps":
        raise ValueError(
            f"variable '{variable.name}' is on {variable.device}, and each "
            "worker needs a copy of its own: build the model without "
            "tf.compat.v1.train.replica_device_setter"
        )
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


def _check_known_workers(num_workers: Any) -> None:
    known = _tf_config.num_workers()
    if known and isinstance(num_workers, int) and num_workers > known:
        raise ValueError(
            f"TF_CONFIG has {known} workers, and {num_workers} gradients would "
            "be waited for. Received: "
            f"replicas_to_aggregate={num_workers}, total_num_replicas=None"
        )


def _task_index() -> int:
    """Which worker this is, from the device scope or TF_CONFIG."""
    if tf.executing_eagerly():
        return default_worker_id()
    place = tf.DeviceSpec.from_string(tf.no_op(name="task").device)
    if place.job in ("worker", "chief", "master") and place.task is not None:
        return place.task
    return default_worker_id()
