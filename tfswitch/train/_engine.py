"""The interface of engines for SyncReplicasOptimizer and its hook."""

import abc
import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfswitch.cluster import Cluster

# A session's `run`.
Run = Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class ReplicaOptions:
    """The arguments of `SyncReplicasOptimizer`, checked."""

    name: str
    num_gradients: int
    num_workers: int
    task_index: int
    batch_weight: Any
    normalize: str
    sparse_average: str
    late: str
    lease_secs: float
    join_secs: float
    wait_secs: float
    post_aggregate: Any
    variable_averages: Any
    variables_to_average: Any
    cluster: Cluster | None

    def __post_init__(self) -> None:
        averages, variables = self.variable_averages, self.variables_to_average
        if (averages is None) != (variables is None):
            raise ValueError(
                "`variable_averages` and `variables_to_average` belong "
                f"together. Received: variable_averages={averages!r}, "
                f"variables_to_average={variables!r}"
            )

    def weight(self) -> tf.Tensor:
        """Returns the number of samples of a batch, a float64 scalar.

        Raises:
            ValueError: If the given value is no scalar.
        """
        if self.batch_weight is None:
            return tf.ones([], tf.float64)
        weight = tf.cast(self.batch_weight, tf.float64)
        if not weight.shape.is_compatible_with([]):
            raise ValueError(
                "`batch_weight` must be a scalar: the number of samples of "
                f"the batch. Received: shape {weight.shape}"
            )
        return tf.ensure_shape(weight, [])

    def counted_weight(self, weight: tf.Tensor) -> tf.Tensor:
        """Returns the weight that a batch has in the mean of a step."""
        if self.normalize == "replicas":
            return tf.ones([], tf.float64)
        return tf.identity(weight)

    def share_of_step(self, weight: tf.Tensor) -> tf.Tensor:
        """Returns the share of a batch in a step of full batches."""
        first = local_variable(0.0, tf.float64, "first_weight")
        full = tf.cond(
            first > 0.0,
            lambda: tf.identity(first),
            lambda: tf.identity(first.assign(weight)),
        )
        share = weight / (self.num_gradients * full)
        return tf.where(weight > 0.0, share, tf.zeros_like(share))

    def average(self, followed: Any) -> Any:
        """Returns `followed`, or an op that then averages variables."""
        if self.variable_averages is None:
            return followed
        with tf.control_dependencies([followed]):
            return self.variable_averages.apply(self.variables_to_average)


class Engine(abc.ABC):
    """Takes the steps of one graph, together with the session's worker.

    Base of all engines. All methods but `complete_graph` and `trains` are for a
    worker with a session, and are called by one thread at a time.
    """

    # Takes a step with all workers.
    train_op: Any

    # The TensorFlow devices that have the variables. If empty, each worker has
    # variables of its own, and so a session of its own.
    servers: Sequence[str]

    # Longest wait for workers at the start.
    join_secs: float

    # Whether a run with these fetches ends a step.
    trains: Callable[[Any], bool]

    # The session's `run`, before the hook wraps it.
    _run: Run | None = None

    # Whether the step has raised an error. Pushes of such a step must not
    # count, and the worker may have lost its membership in the group.
    _has_step_failed: bool = False

    @abc.abstractmethod
    def complete_graph(self) -> None:
        """Adds operations that need the whole graph, before it is finalised."""

    def check_is_alone(self, session: Any) -> None:
        """Checks that no other process has this worker's number.

        Args:
            session: A session on the servers, with a graph that can grow.

        Raises:
            RuntimeError: If a process of this machine has the number.
        """
        del session

    @abc.abstractmethod
    def start(self, session: Any, is_chief: bool) -> None:
        """Joins the workers.

        Raises:
            ValueError: If the group exists with other settings.
            TimeoutError: If the workers, or the chief, do not join in time.
            RuntimeError: If the chief has gone, or a process of this machine
                has this worker's number.
            ConnectionError: If a server does not answer.
        """

    def call(
        self, function: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Calls a function of the started session, and returns its result.

        Raises:
            ConnectionError: If a server does not answer any more.
        """
        return function(*args, **kwargs)

    def close(self, function: Callable[[], Any]) -> None:
        """Runs the function that closes the started session."""
        function()

    def fail_step(self) -> None:
        """Marks the present step as failed, because it has raised an error."""
        self._has_step_failed = True

    @abc.abstractmethod
    def resume(self) -> None:
        """Called before each step; joins again if the last step has raised.

        Raises:
            RuntimeError: If the worker cannot join again.
            TimeoutError, ConnectionError: If a worker or a server does not
                answer.
        """

    @abc.abstractmethod
    def end_epoch(self) -> None:
        """Waits until all workers end an epoch, and then updates variables."""

    @abc.abstractmethod
    def leave(self) -> None:
        """Leaves the group at the end of a session."""

    @abc.abstractmethod
    def part(self) -> None:
        """Leaves the group after a failure, and raises no error."""

    @abc.abstractmethod
    def stats(self) -> dict[str, Any]:
        """Returns "workers" of `tfswitch.train.Worker.stats`."""

    def _load(self, variable: Any, value: Any) -> None:
        """Sets a local variable of the session."""
        initializer = variable.initializer
        self._session_run(initializer, {initializer.inputs[1]: value})

    def _session_run(self, *args: Any) -> Any:
        assert self._run is not None  # There is a session.
        return self.call(self._run, *args)


def local_variable(value: Any, dtype: tf.DType, name: str) -> Any:
    """Returns a variable of this worker that is neither saved nor shared."""
    # Keeps the variable on this worker, because the device function of a graph
    # with parameter servers would place it on a server.
    graph = tf.compat.v1.get_default_graph()
    with graph.colocate_with(tf.no_op(name=f"{name}_place")):
        return tf.compat.v1.Variable(
            value,
            trainable=False,
            dtype=dtype,
            collections=[tf.compat.v1.GraphKeys.LOCAL_VARIABLES],
            name=name,
            use_resource=True,
        )


class StepFinder:
    """Finds out whether a run with given fetches ends a step.

    Args:
        ends_step: The operation that ends a step.
    """

    def __init__(self, ends_step: tf.Operation) -> None:
        self._ends_step = ends_step
        self._known: dict[frozenset[str], bool] = {}

    def trains(self, fetches: Any) -> bool:
        """Whether fetching `fetches` runs the operation."""
        ops = frozenset(
            found.name
            for found in map(self._find, _flatten(fetches))
            if found is not None
        )
        if ops not in self._known:
            self._known[ops] = self._is_downstream(ops)
        return self._known[ops]

    def _find(self, fetch: Any) -> tf.Operation | None:
        with contextlib.suppress(KeyError, ValueError, TypeError):
            found = self._ends_step.graph.as_graph_element(fetch)
            return found if isinstance(found, tf.Operation) else found.op
        return None

    def _is_downstream(self, names: frozenset[str]) -> bool:
        graph = self._ends_step.graph
        todo = [graph.get_operation_by_name(name) for name in names]
        seen = set(todo)
        while todo:
            op = todo.pop()
            if op is self._ends_step:
                return True
            before = [t.op for t in op.inputs] + list(op.control_inputs)
            fresh = [each for each in before if each not in seen]
            seen.update(fresh)
            todo.extend(fresh)
        return False


def _flatten(fetches: Any) -> Iterator[Any]:
    # Keys of a dict of fetches may be of any kind, also hooks.
    if isinstance(fetches, Mapping):
        fetches = list(fetches.values())
    if not isinstance(fetches, (list, tuple)):
        yield fetches
        return
    for fetch in fetches:
        yield from _flatten(fetch)


def scaled(gradient: Any, factor: tf.Tensor) -> Any:
    """Returns a gradient times a scalar."""
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(
            scaled(gradient.values, factor),
            gradient.indices,
            gradient.dense_shape,
        )
    factor = tf.cast(factor, gradient.dtype)
    # A batch whose samples are all masked has a mean of NaN.
    return tf.where(factor > 0.0, gradient * factor, tf.zeros_like(gradient))
