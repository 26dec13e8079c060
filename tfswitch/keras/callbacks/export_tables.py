"""Exports of tables while `fit` trains."""

import os
from collections.abc import Callable, Iterable
from typing import Literal

from tfswitch._settings._ranges import bad_argument, check_seconds, is_number
from tfswitch._types import Logs, TableOrName
from tfswitch.cluster import Cluster
from tfswitch.export import (
    ExportReport,
    Schedule,
    ScoreRule,
)
from tfswitch.keras import _backend


class ExportTables(_backend.Callback):
    """Exports tables at intervals while `fit` trains, and when it ends.

    With `every_secs` a thread exports, and training does not wait. Each row is
    exported as it was at one moment, but the moments of two rows may differ.
    With `every_batches` the callback exports between two batches, so all rows
    that this process trains are exported as of the same moment. The next batch
    waits for the export.

    The first export is a base, written after the first interval, because the
    first batch may make tables. Later exports follow the rules of
    `tfswitch.export.Schedule`. If an export fails, a warning of `absl.logging`
    says so, training continues, and the next export contains the same changes.

    With several workers, give the callback to one worker: only one process at a
    time may export to a folder. If `fit` ends by an error, the thread runs
    until `stop`, the next `fit`, or the end of the program.

    Args:
        path: A folder of exports on this machine, which is made if it does not
            exist, or a SavedModel of `tfswitch.saved_model.save`, which then
            serves the exported rows.
        every_secs: Time from one export to the next. Give this or
            `every_batches`.
        every_batches: Training batches from one export to the next. With
            several `steps_per_execution`, the callback exports only between two
            executions.
        base_every_secs: A base is written in place of a delta when the last
            base is this many seconds old. None means that a base is written
            only if a delta cannot follow the last export.
        tables: As for `tfswitch.export.Schedule`.
        row_format: As for `tfswitch.export.base`.
        rule: As for `tfswitch.export.base`.
        keep_bases: How many bases are kept; older files are removed. None
            removes nothing.
        cluster: As for `tfswitch.export.base`.
        log_fn: Called after each export with its result, or its error, in place
            of logging. With `every_secs` the exporting thread calls `log_fn`.

    Raises:
        ValueError: If an argument is out of range, or both or neither of
            `every_secs` and `every_batches` are given.

    Example:

    >>> model.fit(
    ...     dataset,
    ...     callbacks=[tsw.keras.ExportTables("exports", every_secs=30)],
    ... )
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        every_secs: float | None = None,
        every_batches: int | None = None,
        base_every_secs: float | None = None,
        tables: Iterable[TableOrName] | None = None,
        row_format: str | None = None,
        rule: ScoreRule | Literal["all"] | None = None,
        keep_bases: int | None = None,
        cluster: Cluster | None = None,
        log_fn: Callable[[ExportReport | Exception], None] | None = None,
    ) -> None:
        super().__init__()
        if (every_secs is None) == (every_batches is None):
            raise ValueError(
                "one of `every_secs` and `every_batches` must be given. "
                f"Received: every_secs={every_secs!r}, "
                f"every_batches={every_batches!r}"
            )
        if every_batches is not None and not (
            is_number(every_batches, int) and every_batches >= 1
        ):
            raise bad_argument(
                "every_batches", every_batches, "an integer of at least 1"
            )
        if every_secs is not None:
            check_seconds("every_secs", every_secs)
        self._every_secs = every_secs
        self._every_batches = every_batches
        self._schedule = Schedule(
            path,
            base_every_secs=base_every_secs,
            tables=tables,
            row_format=row_format,
            rule=rule,
            keep_bases=keep_bases,
            cluster=cluster,
            log_fn=log_fn,
        )
        self._num_batches = 0  # Since the last export.
        self._num_batches_of_epoch = 0

    def on_train_begin(self, logs: Logs | None = None) -> None:
        self._num_batches = 0
        if self._every_secs is not None:
            self._schedule.stop()  # The last `fit` may have ended by an error.
            self._schedule.start(self._every_secs)

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        self._num_batches_of_epoch = 0

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        if self._every_batches is None:
            return
        # Keras calls this once for all batches of one execution.
        batch = _backend.last_batch(self.model, batch)
        self._num_batches += batch + 1 - self._num_batches_of_epoch
        self._num_batches_of_epoch = batch + 1
        if self._num_batches >= self._every_batches:
            self._num_batches = 0
            self._schedule.try_export()

    def on_train_end(self, logs: Logs | None = None) -> None:
        self._schedule.stop()
        self._schedule.try_export()

    def stop(self) -> None:
        """Ends the thread after its present export.

        Call this after a `fit` that has ended by an error; any other `fit` ends
        the thread itself.
        """
        self._schedule.stop()
