"""Joins and leaves the group around a session of synchronous training."""

import inspect
import sys
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfswitch.train._engine import Engine
from tfswitch.train._server_sessions import (
    WaitingSessionCreator,
    check_servers_answer,
)


class SyncReplicasHook(tf.compat.v1.train.SessionRunHook):
    """Joins the group, ends epochs with its workers, and leaves the group.

    Made by `SyncReplicasOptimizer.make_session_run_hook`. When the data of a
    train operation ends, `session.run` raises `OutOfRangeError` as usual, but
    only after the data of all workers has ended; variables then have their last
    values. If a loop ends in another way, and does not leave the session's
    context, call `finish_epoch`.
    """

    def __init__(
        self, engine: Engine, is_chief: bool, raises_on_evict: bool
    ) -> None:
        self._engine = engine
        self._is_chief = is_chief
        self._raises_on_evict = raises_on_evict
        self._has_session = False
        self._is_in_epoch = False
        self._data_has_ended = False  # The end of the data ends the epoch.
        self._num_evicted = 0  # The count when this worker joined.
        # The counts at the end of the last session.
        self._last_stats: dict[str, Any] | None = None

    @property
    def engine(self) -> Engine:
        """The engine that takes the steps."""
        return self._engine

    @property
    def is_chief(self) -> bool:
        """Whether all workers begin with this worker's values."""
        return self._is_chief

    @property
    def stats(self) -> dict[str, Any]:
        """The counts of all workers since the group was made.

        After the session these are the counts at its end.

        A dict: "rounds": steps taken; "contributions": gradients in these
        steps; "samples": the sum of the weights of these gradients; "dropped"
        and "carried": gradients that came too late; "evicted": workers that
        died; "rejoined": workers that came back.

        Raises:
            RuntimeError: If there is no session yet.
        """
        self._check_has_session()
        workers = self._last_stats or self._engine.stats()
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
        """Begins an epoch in the same session, as its first step also does."""
        self._check_has_session()
        self._is_in_epoch = True
        self._data_has_ended = False

    def finish_epoch(self) -> None:
        """Waits until all workers have ended the epoch, then updates variables.

        All workers call this method after each epoch, also a worker without
        data. After an `OutOfRangeError` the call does nothing, because the
        epoch has ended.

        Raises:
            TimeoutError: If other workers have not ended the epoch within a
                day.
            RuntimeError: If there is no session yet.
            ConnectionError: If a server does not answer.
        """
        self._check_has_session()
        if self._data_has_ended:
            self._data_has_ended = False
            return
        self._end_epoch()

    def begin(self) -> None:
        """Completes the graph."""
        self._engine.complete_graph()

    def after_create_session(
        self, session: tf.compat.v1.Session, coord: tf.train.Coordinator
    ) -> None:
        """Joins the workers, and gets the values of the variables."""
        del coord
        try:
            self._engine.start(session, self._is_chief)
        except BaseException:
            close = session.close
            session.close = lambda: None
            self._engine.close(close)
            raise
        self._has_session = True
        self._last_stats = None
        self._num_evicted = self._engine.stats()["expired"]
        self.start_epoch()
        self._watch(session)

    def after_run(
        self,
        run_context: tf.compat.v1.train.SessionRunContext,
        run_values: tf.compat.v1.train.SessionRunValues,
    ) -> None:
        """Ends the epoch if the loop was asked to stop."""
        del run_values
        if self._raises_on_evict:
            self._check_nobody_was_evicted()
        if run_context.stop_requested and self._is_in_epoch:
            self._end_epoch()

    def end(self, session: tf.compat.v1.Session) -> None:
        """Ends the epoch, if it has not ended, and leaves the group."""
        del session
        if self._is_in_epoch:
            self._end_epoch()
        self._last_stats = self._engine.stats()
        self._engine.leave()

    def _check_has_session(self) -> None:
        if not self._has_session:
            raise RuntimeError(
                "there is no session yet: give the hook to a "
                "tfswitch.train.MonitoredTrainingSession first"
            )

    def _end_epoch(self) -> None:
        try:
            self._engine.end_epoch()
            if self._raises_on_evict:
                self._check_nobody_was_evicted()
        except BaseException:
            self._fail()
            raise
        self._is_in_epoch = False

    def _fail(self) -> None:
        # Leaves the group, so that the other workers do not wait for this
        # worker.
        self._is_in_epoch = False
        self._engine.part()

    def _check_nobody_was_evicted(self) -> None:
        evicted = self.stats["evicted"] - self._num_evicted
        if evicted > 0:
            self._fail()
            raise RuntimeError(
                f"{evicted} of the workers have died, and "
                'on_evict="raise" was asked for. Start all again, the servers '
                "as well: then the last checkpoint counts"
            )

    def _watch(self, session: Any) -> None:
        # TensorFlow calls no hook when the data ends, nor when a session is
        # closed after an exception.
        run, close = session.run, session.close
        is_open = True

        def watched_run(fetches: Any, *args: Any, **kwargs: Any) -> Any:
            engine = self._engine
            trains = engine.trains(fetches)
            if trains:
                engine.resume()
                self.start_epoch()
            try:
                return engine.call(run, fetches, *args, **kwargs)
            except tf.errors.OutOfRangeError:
                if trains:
                    self._end_epoch()
                    self._data_has_ended = True
                raise
            except (tf.errors.AbortedError, tf.errors.UnavailableError) as lost:
                if not trains:
                    raise
                self._fail()
                # Raises an error of another type: after its own error,
                # TensorFlow would make another session and train the same data
                # again.
                raise ConnectionError(
                    f"{lost.message}. Start the worker again: what the step "
                    "has led to is on the servers, if they are there"
                ) from lost
            except BaseException:
                if trains:  # A loop may catch this error and continue.
                    engine.fail_step()
                raise

        def watched_close() -> None:
            nonlocal is_open
            if is_open and not sys.is_finalizing():
                is_open = False
                self._engine.part()
                self._engine.close(close)
            elif is_open:  # No thread can be started any more.
                is_open = False
                close()

        session.run = watched_run
        session.close = watched_close


def MonitoredTrainingSession(  # noqa: N802 - As TensorFlow's.
    master: str = "",
    is_chief: bool = True,
    checkpoint_dir: str | None = None,
    scaffold: tf.compat.v1.train.Scaffold | None = None,
    hooks: Sequence[tf.compat.v1.train.SessionRunHook] | None = None,
    chief_only_hooks: Sequence[tf.compat.v1.train.SessionRunHook] | None = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """TensorFlow's function of that name, for `SyncReplicasOptimizer`.

    Before the last checkpoint is saved, all workers end their epoch. The wait
    for missing servers and for the chief is at most the optimizer's
    `join_secs`. With tfswitch's servers each worker has its own session and
    initialises its variables; only the chief restores and saves checkpoints and
    writes summaries.

    Args:
        master: As in TensorFlow, as are all arguments that are not listed here.
        is_chief: Whether this worker saves.
        checkpoint_dir: Where the chief saves and restores.
        scaffold: As in TensorFlow.
        hooks: Must include the hook of
            `SyncReplicasOptimizer.make_session_run_hook`.
        chief_only_hooks: As in TensorFlow.

    Returns:
        A `tf.compat.v1.train.MonitoredSession`.

    Raises:
        ValueError: If there is no such hook, or its `is_chief` differs.
        RuntimeError: If a process of this machine has this worker's number.
        ConnectionError: If a parameter server does not answer.
        TimeoutError: If the chief does not initialise the variables in time.
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
    others = [hook for hook in hooks if hook is not sync[0]]
    engine = sync[0].engine
    stock = tf.compat.v1.train.MonitoredTrainingSession
    given = (
        inspect.signature(stock)
        .bind(
            master, True, checkpoint_dir, scaffold, None, None, *args, **kwargs
        )
        .arguments
    )
    config = given.get("config")
    if engine.servers and master:
        # The check comes now, before a second chief would set the variables to
        # their first values.
        check_servers_answer(
            master,
            config,
            engine.servers,
            engine.join_secs,
            engine.check_is_alone,
        )
    if engine.servers and not is_chief:
        return tf.compat.v1.train.MonitoredSession(
            WaitingSessionCreator(scaffold, master, config, engine.join_secs),
            [*sync, *others],
            given.get("stop_grace_period_secs", 120),
        )
    given["hooks"] = others
    given["chief_only_hooks"] = [*sync, *(chief_only_hooks or ())]
    if not is_chief:
        given.update(checkpoint_dir=None, chief_only_hooks=sync)
        given.pop("summary_dir", None)
    return stock(**given)
