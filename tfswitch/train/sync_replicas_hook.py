"""What a session of synchronous training does besides its steps."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import tensorflow as tf

from tfswitch import optimizers
from tfswitch.dense import DenseTable
from tfswitch.table import EmbeddingTable
from tfswitch.train.barrier import END_OF_EPOCH, EPOCH_SECS
from tfswitch.train.worker import Worker

# A session's `run`.
Run = Callable[..., Any]

# float32 holds integers below 2 ** 24.
_DIGITS = 1 << 20


class TrainingGraph:
    """What the hook runs besides the train operation.

    Args:
        variables: The worker's copies.
        dense: What is on the servers.
        global_step: Counts the steps of all workers.
        rounds: Output of the operation that ends a step: how many steps have
            been taken.
        name: Of the optimizer.
    """

    def __init__(
        self,
        variables: Sequence[Any],
        dense: DenseTable,
        global_step: Any,
        rounds: tf.Tensor,
        name: str,
    ) -> None:
        self.variables = list(variables)
        self.dense = dense
        self.global_step = global_step
        self._ends_step = rounds.op
        self._rounds = tf.compat.v1.placeholder(tf.int64, [], "rounds")
        self._first_step = tf.compat.v1.Variable(
            0,
            trainable=False,
            dtype=tf.int64,
            collections=[tf.compat.v1.GraphKeys.LOCAL_VARIABLES],
            name="first_step",
            use_resource=True,
        )
        self._new_first_step = tf.compat.v1.placeholder(tf.int64, [], "start")
        self._start = self._first_step.assign(
            self._new_first_step, read_value=False
        )
        self._catch_up = self.follow(self._rounds)
        # The global step at which the servers had taken none.
        self._origin = EmbeddingTable(
            f"{name}/origin",
            2,
            initializer="zeros",
            optimizer=optimizers.SGD(0.0),
            cluster=dense.cluster,
        )
        self._trains: dict[frozenset[str], bool] = {}
        self._name = name
        self._others: DenseTable | None = None
        self._other_variables: list[Any] = []
        self._follow_others: Any = None

    def add_others(self) -> None:
        """Looks for variables that nobody trains, which must be alike, too.

        To be called when the graph is complete.
        """
        if self._others is not None:
            return
        known = {v.op.name for v in [*self.variables, self.global_step]}
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
            f"{self._name}/others",
            {
                v.op.name: tuple(v.shape.as_list())
                for v in self._other_variables
            },
            optimizer=optimizers.SGD(0.0),
            cluster=self.dense.cluster,
        )
        self._follow_others = _assign_all(
            self._other_variables, self._others.pull()
        )

    def follow(self, rounds: tf.Tensor) -> Any:
        """Returns what sets variables and global step to their present values.

        Args:
            rounds: int64 scalar: how many steps have been taken.
        """
        step = tf.cast(
            self._first_step + rounds, self.global_step.dtype.base_dtype
        )
        return tf.group(
            _assign_all(self.variables, self.dense.pull()),
            tf.compat.v1.assign(self.global_step, step).op,
        )

    def offer(self, run: Run, rounds: int) -> None:
        """Puts a session's values on the servers, unless some are there."""
        values, step = run([self.variables, self.global_step])
        is_new = not self.dense.is_initialized()
        # The numbers of rounds begin anew with other settings of the group.
        if is_new or self._global_step_before_all() + rounds < step:
            high, low = divmod(int(step) - rounds, _DIGITS)
            self._origin.assign([0], np.array([[high, low]], np.float32))
        if self._others is not None:
            others = run(self._other_variables)
            # Those of a checkpoint are newer than what all began with.
            if not self._others.initialize(others) and step > 0:
                self._others.assign(others)
        self.dense.initialize(values)

    def wait_for_offer(self, timeout_secs: float) -> None:
        """Waits for the chief to offer its values.

        Raises:
            TimeoutError: If it does not.
            ConnectionError: If a server does not answer.
        """
        self.dense.wait_until_initialized(timeout_secs=timeout_secs)

    def take_others(self, run: Run) -> None:
        """Sets the variables that nobody trains to those of the chief."""
        if self._others is not None:
            run(self._follow_others)

    def catch_up(self, run: Run, rounds: int) -> None:
        """Sets a session's values to those on the servers."""
        run(self._start, {self._new_first_step: self._global_step_before_all()})
        run(self._catch_up, {self._rounds: rounds})

    def _global_step_before_all(self) -> int:
        _, rows = self._origin.export_rows()
        if not len(rows):  # Not offered yet, or before a server's restart.
            return 0
        high, low = rows[0]
        return int(high) * _DIGITS + int(low)

    def trains(self, fetches: Any) -> bool:
        """Whether what is fetched ends a step."""
        ops = frozenset(
            found.name
            for found in map(self._find, _flatten(fetches))
            if found is not None
        )
        if ops not in self._trains:
            self._trains[ops] = self._is_downstream(ops)
        return self._trains[ops]

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


def _assign_all(variables: Sequence[Any], values: Sequence[tf.Tensor]) -> Any:
    return tf.group(
        *(
            tf.compat.v1.assign(
                variable, tf.cast(value, variable.dtype.base_dtype)
            ).op
            for variable, value in zip(variables, values, strict=True)
        )
    )


class Joins(Protocol):
    """What the hook needs of its optimizer."""

    @property
    def join_secs(self) -> float: ...

    def join(self) -> Worker: ...


class SyncReplicasHook(tf.compat.v1.train.SessionRunHook):
    """Joins the workers, ends epochs with them, and leaves.

    Made by `SyncReplicasOptimizer.make_session_run_hook`. When the data of a
    train operation ends, `session.run` raises `OutOfRangeError` as ever, but
    only after all workers' data has ended, and with their last values. A loop
    that ends otherwise, and not by leaving the session's context, calls
    `finish_epoch`.
    """

    def __init__(
        self,
        optimizer: Joins,
        graph: TrainingGraph,
        is_chief: bool,
        raises_on_evict: bool,
    ) -> None:
        self._optimizer = optimizer
        self._graph = graph
        self._is_chief = is_chief
        self._raises_on_evict = raises_on_evict
        self._worker: Worker | None = None
        self._run: Run | None = None  # As the session does unwatched.
        self._is_in_epoch = False
        self._data_has_ended = False  # And with it the epoch.
        self._num_evicted = 0  # When this worker joined.

    @property
    def is_chief(self) -> bool:
        """Whether this worker's values are what all begin with."""
        return self._is_chief

    @property
    def stats(self) -> dict[str, Any]:
        """What all workers have done since the group was made.

        A dict: "rounds": steps taken; "contributions": gradients in them;
        "samples": the sum of their weights; "dropped" and "carried": gradients
        that came too late; "evicted": workers that died; "rejoined": those
        that came back.

        Raises:
            RuntimeError: If there is no session yet.
        """
        workers = self._present_worker().stats()["workers"]
        return {
            "evicted": workers["expired"],
            **{
                key: workers[key]
                for key in (
                    "rounds",
                    "contributions",
                    "samples",
                    "dropped",
                    "carried",
                    "rejoined",
                )
            },
        }

    def start_epoch(self) -> None:
        """Begins an epoch in the same session; steps do so by themselves."""
        self._present_worker()
        self._is_in_epoch = True
        self._data_has_ended = False

    def finish_epoch(self) -> None:
        """Waits until all workers have ended their epoch, and catches up.

        All workers call it after each epoch, also one that had no data. After
        an `OutOfRangeError` it does nothing: the epoch has ended then.

        Raises:
            TimeoutError: If they have not within a day.
            RuntimeError: If there is no session yet.
            ConnectionError: If a server does not answer.
        """
        self._present_worker()
        if self._data_has_ended:
            self._data_has_ended = False
            return
        self._end_epoch()

    def begin(self) -> None:
        """Completes the graph."""
        self._graph.add_others()

    def after_create_session(self, session: Any, coord: Any) -> None:
        """Joins the workers, and takes their values."""
        del coord
        self._run = session.run
        self._worker = self._optimizer.join()
        try:
            stats = self._worker.stats()
            self._num_evicted = stats["workers"]["expired"]
            if self._is_chief:
                self._graph.offer(self._run, stats["round"])
            else:
                self._graph.wait_for_offer(self._optimizer.join_secs)
            self._graph.take_others(self._run)
            self._catch_up()
        except BaseException:
            self._fail()
            raise
        self._is_in_epoch = True
        self._data_has_ended = False
        self._watch(session)

    def after_run(self, run_context: Any, run_values: Any) -> None:
        """Ends the epoch when somebody has asked the loop to stop."""
        del run_values
        if self._raises_on_evict:
            self._check_nobody_was_evicted()
        if run_context.stop_requested and self._is_in_epoch:
            self._end_epoch()

    def end(self, session: Any) -> None:
        """Ends the epoch, if it has not ended, and leaves."""
        del session
        if self._is_in_epoch:
            self._end_epoch()
        self._present_worker().leave()

    def _present_worker(self) -> Worker:
        if self._worker is None:
            raise RuntimeError(
                "there is no session yet: give the hook to a "
                "tfswitch.train.MonitoredTrainingSession first"
            )
        return self._worker

    def _end_epoch(self) -> None:
        worker = self._present_worker()
        try:
            worker.wait_at_barrier(END_OF_EPOCH, timeout_secs=EPOCH_SECS)
            self._catch_up()
            if self._raises_on_evict:
                self._check_nobody_was_evicted()
        except BaseException:
            self._fail()
            raise
        self._is_in_epoch = False

    def _catch_up(self) -> None:
        rounds = self._present_worker().stats()["round"]
        assert self._run is not None  # There is a worker, so a session.
        self._graph.catch_up(self._run, rounds)

    def _fail(self) -> None:
        # Nobody waits for one that has failed.
        self._is_in_epoch = False
        self._present_worker()._part()

    def _check_nobody_was_evicted(self) -> None:
        evicted = self.stats["evicted"] - self._num_evicted
        if evicted > 0:
            self._fail()
            raise RuntimeError(
                f"{evicted} of the workers of group "
                f"'{self._present_worker().group}' have died, and "
                'on_evict="raise" was asked for. Start all again, the servers '
                "as well: then the last checkpoint counts"
            )

    def _watch(self, session: Any) -> None:
        # Hooks do not hear of the end of data, nor of a session that is closed
        # after an exception.
        run, close = session.run, session.close

        def watched_run(fetches: Any, *args: Any, **kwargs: Any) -> Any:
            trains = self._graph.trains(fetches)
            if trains:
                self._is_in_epoch = True
                self._data_has_ended = False
            try:
                return run(fetches, *args, **kwargs)
            except tf.errors.OutOfRangeError:
                if trains:
                    self._end_epoch()
                    self._data_has_ended = True
                raise
            except (tf.errors.AbortedError, tf.errors.UnavailableError) as lost:
                if not trains:
                    raise
                self._fail()
                # Or the session would be made anew, and train the same again.
                raise ConnectionError(
                    f"{lost.message}. Start the worker again: what the step "
                    "has led to is on the servers, if they are there"
                ) from lost
            except BaseException:
                if trains:
                    self._fail()
                raise

        def watched_close() -> None:
            self._present_worker()._part()
            close()

        session.run = watched_run
        session.close = watched_close


def _flatten(fetches: Any) -> Iterator[Any]:
    # Keys of a dict of fetches may be of any kind, also hooks.
    if isinstance(fetches, Mapping):
        fetches = list(fetches.values())
    if not isinstance(fetches, (list, tuple)):
        yield fetches
        return
    for fetch in fetches:
        yield from _flatten(fetch)


def MonitoredTrainingSession(  # noqa: N802 - As TensorFlow's.
    master: str = "",
    is_chief: bool = True,
    checkpoint_dir: str | None = None,
    scaffold: Any = None,
    hooks: Sequence[Any] | None = None,
    chief_only_hooks: Sequence[Any] | None = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """TensorFlow's function of that name, for `SyncReplicasOptimizer`.

    Each worker has a session of its own, whose variables it initialises; the
    chief alone restores and saves checkpoints and writes summaries. Epochs end,
    for all workers, before the last checkpoint is saved.

    Args:
        master: See TensorFlow, as for the arguments that are not listed here.
        is_chief: Whether this worker saves.
        checkpoint_dir: Where the chief saves and restores.
        scaffold: See TensorFlow.
        hooks: With that of `SyncReplicasOptimizer.make_session_run_hook`.
        chief_only_hooks: See TensorFlow.

    Returns:
        A `tf.compat.v1.train.MonitoredSession`.

    Raises:
        ValueError: If there is no such hook, or the chief's is no chief's.
    """
    hooks = list(hooks or ())
    sync = [hook for hook in hooks if isinstance(hook, SyncReplicasHook)]
    if len(sync) != 1:
        raise ValueError(
            "`hooks` must have one of SyncReplicasOptimizer."
            f"make_session_run_hook. Received: hooks={hooks!r}"
        )
    if sync[0].is_chief != bool(is_chief):
        raise ValueError(
            "the hook and the session must agree on who is chief. Received: "
            f"is_chief={is_chief!r}, and a hook with "
            f"is_chief={sync[0].is_chief!r}"
        )
    if not is_chief:
        checkpoint_dir = None
        chief_only_hooks = None
        kwargs.pop("summary_dir", None)
    others = [hook for hook in hooks if hook is not sync[0]]
    return tf.compat.v1.train.MonitoredTrainingSession(
        master,
        True,
        checkpoint_dir,
        scaffold,
        others,
        [*sync, *(chief_only_hooks or ())],
        *args,
        **kwargs,
    )
