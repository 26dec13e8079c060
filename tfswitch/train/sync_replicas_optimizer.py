"""A SyncReplicasOptimizer for TensorFlow 1, without the original's faults."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import tensorflow as tf

from tfswitch._connection import _tf_config
from tfswitch._types import Gradient, TensorLike
from tfswitch.cluster import Cluster
from tfswitch.consistency import Consistency
from tfswitch.train._checks import (
    check_choice,
    check_cluster,
    check_count,
    check_replicas,
    check_seconds,
)
from tfswitch.train._engine import Engine, ReplicaOptions
from tfswitch.train._table_engine import (
    TableEngine,
    TableTensor,
    consistency_of,
)
from tfswitch.train._variable_engine import VariableEngine
from tfswitch.train.sync_replicas_hook import SyncReplicasHook
from tfswitch.train.worker import default_worker_id

# A gradient and its variable.
_Pair = tuple[Gradient, tf.Variable]


class SyncReplicasOptimizer(tf.compat.v1.train.Optimizer):
    """Averages the gradients of all workers, and takes one step with them.

    Replaces `tf.compat.v1.train.SyncReplicasOptimizer`, with the same
    arguments, hook and loop. Workers may have different amounts of data: steps
    do not wait for a worker whose data has ended, and every sample is trained
    as often as its worker says. `MonitoredTrainingSession` closes when all
    workers have ended, so the last checkpoint is complete.
    `docs/sync_replicas_comparison.md` compares both.

    The place of the variables decides which process takes the steps:

    - On TensorFlow's parameter servers, where `replica_device_setter` puts
      them: the servers keep the gradients, and the chief sums them and takes
      the step, with any optimizer. The servers' programs must import tfswitch.
    - Elsewhere: the variables and their optimizer are kept on tfswitch's
      servers, those of `cluster`. Each worker has its own session with a copy
      of the variables; no `tf.distribute.Server` is needed. Training survives
      a chief that dies, and embedding tables train in the same steps. This
      needs `tfswitch.train.MonitoredTrainingSession`.

    Args:
        opt: The optimizer that takes the steps: with tfswitch's servers a
            GradientDescent-, Momentum-, Adagrad- or AdamOptimizer of
            `tf.compat.v1.train`.
        replicas_to_aggregate: How many gradients make a step, at most
            `total_num_replicas`. If it is less, slow workers are backups: a
            step does not wait for them.
        total_num_replicas: How many workers there are; by default
            `replicas_to_aggregate`.
        variable_averages: An `ExponentialMovingAverage` to keep. With
            tfswitch's servers each worker averages its copies, at its own
            steps.
        variables_to_average: The averaged variables; with `variable_averages`.
        use_locking: Accepted but not used.
        name: The name of the group of workers, and of its state on the servers.
            Jobs that share servers need different names.
        batch_weight: Scalar tensor: the number of samples of the batch. None
            means that all batches have the same weight.
        normalize: The divisor of the sum of the gradients of a step. "step":
            the sum of the gradients' weights, so that each sample of the step
            has the same weight. "replicas": the number of the gradients, as in
            TensorFlow's class. "initial": `replicas_to_aggregate` times the
            weight of this worker's first batch. Steps then get smaller when
            workers have ended, and each sample of the whole run has the same
            weight.
        sparse_average: "batch": gradients of rows are averaged as all other
            gradients, as if all batches were one. "rows": the gradient of a row
            is averaged only over the workers whose batch has the row, as in
            TensorFlow's class. So rare rows take larger steps. Not allowed with
            tfswitch's servers.
        late: The treatment of gradients that come too late for their step, if
            `replicas_to_aggregate` is less than `total_num_replicas`. "drop":
            they are dropped and counted; "carry": they are added to the next
            step.
        lease_secs: How long a silent worker counts as alive.
        join_secs: Longest wait for workers at the start.
        on_evict: The reaction when a worker has died: "continue", or "raise" an
            error on all other workers.
        post_aggregate: A function that gets the list of averaged gradients and
            variables, and returns the list to apply, for example to clip by the
            global norm. Not allowed with tfswitch's servers, which take the
            steps themselves.
        task_index: The number of this worker, from 0; each worker has another
            number. By default it comes from the device scope, else from
            TF_CONFIG. A single worker has the number 0.
        wait_secs: Longest wait of a step for other workers.
        cluster: The cluster of tfswitch's servers, if they are used; by default
            that of `tfswitch.connect`.

    Raises:
        ValueError: If an argument is out of range.

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
        opt: tf.compat.v1.train.Optimizer,
        replicas_to_aggregate: int,
        total_num_replicas: int | None = None,
        variable_averages: tf.train.ExponentialMovingAverage | None = None,
        variables_to_average: Sequence[tf.Variable] | None = None,
        use_locking: bool = False,
        name: str = "sync_replicas",
        *,
        batch_weight: TensorLike | None = None,
        normalize: str = "step",
        sparse_average: str = "batch",
        late: str = "drop",
        lease_secs: float = 30.0,
        join_secs: float = 600.0,
        on_evict: str = "continue",
        post_aggregate: Callable[[list[_Pair]], Iterable[_Pair]] | None = None,
        task_index: int | None = None,
        wait_secs: float = 3600.0,
        cluster: Cluster | None = None,
    ) -> None:
        super().__init__(use_locking, name)
        if total_num_replicas is None:
            total_num_replicas = replicas_to_aggregate
            _check_known_workers(replicas_to_aggregate)
        check_replicas(
            replicas_to_aggregate, "total_num_replicas", total_num_replicas
        )
        check_choice("normalize", normalize, ("step", "replicas", "initial"))
        check_choice("sparse_average", sparse_average, ("batch", "rows"))
        check_choice("late", late, ("drop", "carry"))
        check_choice("on_evict", on_evict, ("continue", "raise"))
        check_seconds(
            lease_secs=lease_secs, join_secs=join_secs, wait_secs=wait_secs
        )
        check_cluster(cluster)
        if task_index is None:
            task_index = _task_index(total_num_replicas)
        _check_task_index(task_index, total_num_replicas)
        self._opt = opt
        self._options = ReplicaOptions(
            name=name,
            num_gradients=int(replicas_to_aggregate),
            num_workers=int(total_num_replicas),
            task_index=int(task_index),
            batch_weight=batch_weight,
            normalize=normalize,
            sparse_average=sparse_average,
            late=late,
            lease_secs=float(lease_secs),
            join_secs=float(join_secs),
            wait_secs=float(wait_secs),
            post_aggregate=post_aggregate,
            variable_averages=variable_averages,
            variables_to_average=variables_to_average,
            cluster=cluster,
        )
        self._raises_on_evict = on_evict == "raise"
        self._engine: Engine | None = None

    @property
    def consistency(self) -> Consistency:
        """The consistency of tables that are trained in the same steps."""
        return consistency_of(self._options.normalize)

    @property
    def task_index(self) -> int:
        """The number of this worker, from 0."""
        return self._options.task_index

    @property
    def total_num_replicas(self) -> int:
        """How many workers there are."""
        return self._options.num_workers

    def compute_gradients(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the inner optimizer's method."""
        return self._opt.compute_gradients(*args, **kwargs)

    def minimize(
        self,
        loss: tf.Tensor,
        global_step: tf.Variable | None = None,
        var_list: Sequence[tf.Variable] | None = None,
        gate_gradients: int = tf.compat.v1.train.Optimizer.GATE_OP,
        aggregation_method: int | None = None,
        colocate_gradients_with_ops: bool = False,
        name: str | None = None,
        grad_loss: tf.Tensor | None = None,
        *,
        table_lookups: Iterable[TableTensor] = (),
    ) -> Any:
        """Returns the operation that takes one step with all workers.

        Args:
            loss: Scalar tensor: the mean over the batch.
            global_step: Counts the steps of all workers.
            var_list: As in `tf.compat.v1.train.Optimizer.minimize`, as are all
                arguments that are not listed here.
            table_lookups: `(table, ids, embeddings)` for each lookup of the
                model in a `tfswitch.EmbeddingTable` that is to be trained. The
                table needs this optimizer's `consistency`.

        Raises:
            ValueError: As `apply_gradients`.
        """
        lookups = list(table_lookups)
        table_gradients = []
        gradients = tf.compat.v1.gradients(
            loss, [embeddings for _, _, embeddings in lookups], grad_loss
        )
        for (table, ids, _), gradient in zip(lookups, gradients, strict=True):
            if gradient is None:
                raise ValueError(
                    f"table '{table.name}': the loss does not depend on what "
                    "was looked up"
                )
            table_gradients.append((table, ids, gradient))
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
            table_gradients=table_gradients,
        )

    def apply_gradients(
        self,
        grads_and_vars: Sequence[_Pair],
        global_step: tf.Variable | None = None,
        name: str | None = None,
        *,
        table_gradients: Iterable[TableTensor] = (),
    ) -> Any:
        """Returns the operation that takes one step with all workers.

        Args:
            grads_and_vars: Pairs of gradient and variable. A variable without a
                gradient stays as it is.
            global_step: Counts the steps of all workers.
            name: The name of the operation.
            table_gradients: `(table, ids, gradients)` for each
                `tfswitch.EmbeddingTable` of this optimizer's `consistency` that
                is trained in the same steps.

        Raises:
            ValueError: If there is no gradient or no global step; if some
                variables are on servers and others are not; or if a setting has
                no counterpart on the servers of the variables. The message
                names it.
            ConnectionError, TimeoutError: If a tfswitch server does not answer.
        """
        if global_step is None:
            raise ValueError("`global_step` is needed: it counts the steps")
        pairs = [(g, v) for g, v in grads_and_vars if g is not None]
        if not pairs:
            raise ValueError(
                "no variable has a gradient. Received: "
                f"{[v.name for _, v in grads_and_vars]}"
            )
        tables = list(table_gradients)
        if _are_on_servers([variable for _, variable in pairs]):
            if tables:
                raise ValueError(
                    f"table '{tables[0][0].name}' is on tfswitch's servers and "
                    "the variables are on TensorFlow's: they cannot be trained "
                    "in one step. Build the model without "
                    "tf.compat.v1.train.replica_device_setter"
                )
            engine: Engine = VariableEngine(
                self._options, self._opt, pairs, global_step, name
            )
        else:
            engine = TableEngine(
                self._options, self._opt, pairs, global_step, tables, name
            )
        self._engine = engine
        return engine.train_op

    def make_session_run_hook(
        self, is_chief: bool, num_tokens: int = -1
    ) -> SyncReplicasHook:
        """Returns the hook that every worker gives to its session.

        Args:
            is_chief: Whether all workers begin with this worker's variables and
                global step.
            num_tokens: Accepted but not used: there are no tokens.

        Raises:
            ValueError: If there is no train operation yet.
        """
        del num_tokens
        if self._engine is None:
            raise ValueError(
                "there is no train operation yet: call `minimize` or "
                "`apply_gradients` first"
            )
        return SyncReplicasHook(
            self._engine, bool(is_chief), self._raises_on_evict
        )

    def get_init_tokens_op(self, num_tokens: int = -1) -> Any:
        """Returns an operation that does nothing: there are no tokens."""
        del num_tokens
        return tf.no_op(name="no_tokens")

    def get_chief_queue_runner(self) -> "_NoQueueRunner":
        """Returns a queue runner without threads: the hook does its work."""
        return _NoQueueRunner()

    def get_slot(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the inner optimizer's method; None with tfswitch's servers."""
        return self._opt.get_slot(*args, **kwargs)

    def get_slot_names(self, *args: Any, **kwargs: Any) -> Sequence[str]:
        """Calls the inner optimizer's method."""
        return self._opt.get_slot_names(*args, **kwargs)

    def variables(self) -> Sequence[Any]:
        """Calls the inner optimizer's method."""
        return self._opt.variables()


class _NoQueueRunner:
    """A queue runner without threads, for `tf.compat.v1.train.Supervisor`."""

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


def _are_on_servers(variables: Sequence[Any]) -> bool:
    """Whether variables are on TensorFlow's parameter servers."""
    own = tf.DeviceSpec.from_string(tf.no_op(name="here").device).job
    jobs = {
        tf.DeviceSpec.from_string(variable.device or "").job
        for variable in variables
    }
    elsewhere = jobs - {own, None}
    if not elsewhere:
        return False
    if jobs != elsewhere or len(elsewhere) > 1:
        places = {v.name: v.device for v in variables}
        raise ValueError(
            "all variables must be on the parameter servers, or none. "
            f"Received: {places}"
        )
    return True


def _check_known_workers(num_workers: Any) -> None:
    known = _tf_config.num_workers()
    if known and isinstance(num_workers, int) and num_workers > known:
        raise ValueError(
            f"TF_CONFIG has {known} workers, and {num_workers} gradients would "
            "be waited for. Received: "
            f"replicas_to_aggregate={num_workers}, total_num_replicas=None"
        )


def _check_task_index(task_index: Any, total_num_replicas: int) -> None:
    check_count("task_index", task_index, 0)
    if task_index >= total_num_replicas:
        raise ValueError(
            "`task_index` must be below `total_num_replicas`. Received: "
            f"task_index={task_index}, total_num_replicas={total_num_replicas}"
        )


def _task_index(num_workers: int) -> int:
    """Returns this worker's number, from the device scope or TF_CONFIG."""
    if not tf.executing_eagerly():
        place = tf.DeviceSpec.from_string(tf.no_op(name="task").device)
        is_worker = place.job in ("worker", "chief", "master")
        if is_worker and place.task is not None:
            return place.task
    if num_workers > 1 and _tf_config.task() is None:
        raise ValueError(
            "`task_index` is needed, from 0, and another one in each worker: "
            "neither the device scope nor TF_CONFIG says which worker this is. "
            "Received: task_index=None, "
            f"total_num_replicas={num_workers}"
        )
    return default_worker_id()
