"""Checkpoints of `fit`: model, optimizer and tables as of the same step."""

import contextlib
import os
import shutil
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
from absl import logging

from tfswitch._connection import _tf_config
from tfswitch._settings._ranges import bad_argument, is_number
from tfswitch._types import Logs
from tfswitch.cluster import cluster_of
from tfswitch.keras import _backend
from tfswitch.keras._resuming import leave_out, optimizer_of
from tfswitch.keras._row_weights import is_rows
from tfswitch.keras.callbacks._backup_folder import CheckpointFolder, Variables
from tfswitch.keras.layers.dynamic_embedding import DynamicEmbedding
from tfswitch.keras.parameter_server_optimizer import ParameterServerOptimizer
from tfswitch.table import EmbeddingTable
from tfswitch.train.barrier import EPOCH_SECS
from tfswitch.train.worker import Worker

# The names of barriers at which the workers of a `fit` wait.
_STARTS = "fit resumes from a checkpoint"
_RESTORED = "a checkpoint is restored"
_NOT_RESTORED = "worker 0 could not restore the checkpoint"
_LOOK_SECS = 1.0

# More saves than any folder has.
_ALL = 1_000_000


class BackupAndRestore(_backend.Callback):
    """Saves all that `fit` trains, so that a later `fit` continues from there.

    A checkpoint contains, as of one step: the weights and other variables of
    the model (such as the states of its random generators), the variables of
    the optimizer, the metrics, the rows of all tables of the model's layers and
    of a `ParameterServerOptimizer`, the step counts of the tables, the epoch
    and the batch. If the process is killed while it saves, the last checkpoint
    is still complete.

    When `fit` begins, this callback restores the newest checkpoint, as with
    `keras.callbacks.BackupAndRestore`: give a new process the same model, the
    same data and this callback. `fit` begins in the epoch of the checkpoint,
    reads the batches that were trained without training them again, and
    continues with the next batch. If the data come in the same order, the
    result is that of a `fit` without an interruption. Keras also calls other
    callbacks for the batches that are only read. If the newest checkpoint is
    damaged, the next older one is restored, with a warning.

    A finished `fit` is not repeated: a second process finds that all epochs are
    trained. A second `fit` with the same callback object continues with the
    model as it is, and overwrites the oldest checkpoints.

    Training waits while variables are copied and tables are saved, because both
    must be of the same step. A thread writes the files of the variables.

    With several workers, each worker needs the callback. Worker 0 saves
    checkpoints, and restores the tables. `fit` begins when all workers have
    started, and all continue from the epoch and batch of worker 0. Under `bsp`
    the tables are of one step; with `asp` and `ssp` other workers train during
    the save. A worker that restarts while others train restores nothing and
    joins them. `path` must be a folder that all workers see.

    Put this callback after callbacks that change the model or its optimizer.

    Args:
        path: A folder of this machine, for one `fit` only. It is made if it
            does not exist.
        every: "epoch", or the number of batches from one checkpoint to the
            next. The last epoch always ends with a checkpoint.
        keep: How many checkpoints stay, from 1.
        resume: Whether `fit` restores the newest checkpoint.
        delete_checkpoint: Whether to remove all checkpoints when `fit` has
            ended without an error, as Keras's `BackupAndRestore` does. Saves on
            servers stay.
        tables_path: The folder of the tables on servers, as for `Cluster.save`:
            a path on the servers. By default "server_tables" in `path`. Tables
            of this process are in "tables" in `path`.

    Raises:
        ValueError: If an argument is out of range. From `fit`: if the
            checkpoint is of another model or of tables with another dim.
        OSError: From `fit`: if there are checkpoints but none can be read, or
            if a checkpoint cannot be written. The error of a failed write comes
            when the next checkpoint is due, or earlier. Older checkpoints stay.
        RuntimeError: From `fit`: if a present table has settings that do
            not fit the saved table.

    Example:

    >>> backup = tsw.keras.callbacks.BackupAndRestore("checkpoints/ctr", 1000)
    >>> model.fit(dataset, epochs=10, callbacks=[backup])
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        every: str | int = "epoch",
        *,
        keep: int = 2,
        resume: bool = True,
        delete_checkpoint: bool = False,
        tables_path: str | os.PathLike[str] | None = None,
    ) -> None:
        super().__init__()
        if every != "epoch" and not (
            isinstance(every, int) and is_number(every, int) and every >= 1
        ):
            raise bad_argument(
                "every", every, '"epoch" or a number of batches of at least 1'
            )
        if not (is_number(keep, int) and keep >= 1):
            raise bad_argument("keep", keep, "an integer of at least 1")
        if not os.fspath(path):
            raise bad_argument("path", path, "a folder")
        self._path = os.fspath(path)
        self._every: Any = every
        self._resume = resume
        self._delete_checkpoint = delete_checkpoint
        self._folder = CheckpointFolder(path, keep)
        self._tables_paths = {
            "process": os.path.join(os.path.abspath(path), "tables"),
            "servers": os.fspath(
                tables_path or os.path.join(self._path, "server_tables")
            ),
        }
        # The number of the last save of tables in each folder, once known.
        self._last_saves: dict[str, int] = {}
        self._has_ended = False
        self._epoch = 0
        self._last_batch = -1
        self._num_batches = 0  # Since the last checkpoint.
        self._num_skipped = 0  # Batches that were not trained.
        self._writer: threading.Thread | None = None
        self._error: BaseException | None = None

    def on_train_begin(self, logs: Logs | None = None) -> None:
        self._wait_for_writer()
        self._num_batches = self._num_skipped = 0
        # An earlier `fit` may have ended before it had read all batches that it
        # had to skip.
        leave_out(self.model, 0, [])
        if not self.model.built:
            raise ValueError(
                f"BackupAndRestore: model '{self.model.name}' is not built, so "
                "its variables are not known. Call it on a batch of data, or "
                "`model.build`, before `fit`."
            )
        self.model.optimizer.build(self.model.trainable_variables)
        optimizer = self._optimizer
        if isinstance(optimizer, ParameterServerOptimizer):
            # An optimizer that was loaded from a file would otherwise join the
            # servers only at its first step.
            optimizer.join_servers()
        if self._resume and not self._has_ended:
            self._resume_together()
        self._has_ended = False

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        _backend.begin_fit_at(self.model, None)
        self._epoch = epoch
        self._last_batch = -1

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        # Keras calls this once for all batches of one execution.
        batch = _backend.last_batch(self.model, batch)
        count = batch - self._last_batch
        self._last_batch = batch
        if batch < self._num_skipped:
            return
        self._num_batches += count
        if self._every != "epoch" and self._num_batches >= self._every:
            self._save(self._epoch, batch + 1)

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        self._num_skipped = 0
        is_last = epoch + 1 == self.params.get("epochs")
        if self._every == "epoch" or is_last or self.model.stop_training:
            self._save(epoch + 1, 0)

    def on_train_end(self, logs: Logs | None = None) -> None:
        _backend.begin_fit_at(self.model, None)
        self._has_ended = True
        self._wait_for_writer()
        if self._delete_checkpoint and self._is_chief:
            self._folder.remove()
            shutil.rmtree(self._tables_paths["process"], ignore_errors=True)
            self._last_saves.clear()

    @property
    def _optimizer(self) -> Any:
        return optimizer_of(self.model)

    @property
    def _worker(self) -> Worker | None:
        """This process's worker, if there is a ParameterServerOptimizer."""
        if not isinstance(self._optimizer, ParameterServerOptimizer):
            return None
        return self._optimizer.worker

    @property
    def _is_chief(self) -> bool:
        worker = self._worker
        if worker is not None:
            return worker.is_chief
        return not _tf_config.worker_id()

    # --- Saving -------------------------------------------------------------

    def _save(self, epoch: int, batch: int) -> None:
        self._num_batches = 0
        if not self._is_chief:
            return
        self._wait_for_writer()
        variables = {
            part: [
                (_backend.variable_path(v), np.array(v.numpy()))
                for v in variables
            ]
            for part, variables in self._variables().items()
        }
        manifest = {
            "epoch": epoch,
            "batch": batch,
            "tables": {
                place: self._save_tables(place, tables)
                for place, tables in self._tables().items()
            },
        }
        self._writer = threading.Thread(
            target=self._write,
            args=(manifest, variables),
            name="tfswitch_checkpoint",
        )
        self._writer.start()

    def _save_tables(
        self, place: str, tables: list[EmbeddingTable]
    ) -> dict[str, Any]:
        last = self._last_saves.get(place)
        # The saves that older checkpoints name must stay until this checkpoint
        # is published. Saves of processes that were killed in between are not
        # counted.
        keep = _ALL
        if last is not None:
            keep = last + 2 - min([last, *self._saves(place)])
        report = tables[0].cluster.save(
            self._tables_paths[place],
            sorted({table.name for table in tables}),
            keep=keep,
            progress=False,  # `fit` shows a bar of its own.
        )
        self._last_saves[place] = report["save"]
        return {
            "save": report["save"],
            "tables": [
                {"name": t.name, "dim": t.dim, "iterations": t.iterations}
                for t in tables
            ],
        }

    def _saves(self, place: str) -> Iterator[int]:
        """Yields the saves of tables that checkpoints name."""
        for number in self._folder.numbers():
            with contextlib.suppress(OSError):
                tables = self._folder.manifest(number)["tables"]
                if place in tables:
                    yield tables[place]["save"]

    def _write(self, manifest: dict[str, Any], variables: Variables) -> None:
        try:
            self._folder.publish(manifest, variables)
        except BaseException as error:
            self._error = error

    def _wait_for_writer(self) -> None:
        """Waits until the last checkpoint is written; raises its error."""
        if self._writer is not None:
            self._writer.join()
            self._writer = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    # --- Restoring ----------------------------------------------------------

    def _resume_together(self) -> None:
        """Restores when all workers have started, while none trains."""
        worker = self._worker
        if worker is None or worker.num_workers == 1:
            self._restore(with_tables=self._is_chief)
            return
        if not _meets_all(worker):
            logging.warning(
                "tfswitch: the other workers of %r are training. This one "
                "joins them, and restores nothing of '%s'.",
                worker,
                self._path,
            )
            return
        if worker.is_chief:
            try:
                self._restore(with_tables=True)
            except BaseException:
                # The other workers get an error as well, which names this
                # barrier.
                with contextlib.suppress(Exception):
                    worker.wait_at_barrier(_NOT_RESTORED)
                raise
            worker.wait_at_barrier(_RESTORED, timeout_secs=EPOCH_SECS)
        else:
            worker.wait_at_barrier(_RESTORED, timeout_secs=EPOCH_SECS)
            self._restore(with_tables=False)

    def _restore(self, with_tables: bool) -> None:
        """Restores the newest checkpoint that can be read, if there is one."""
        failures: list[str] = []
        for number in self._folder.numbers():
            try:
                self._restore_one(number, with_tables)
            except (KeyError, OSError) as error:
                if isinstance(error, (ConnectionError, TimeoutError)):
                    raise
                failures.append(f"checkpoint {number}: {error}")
                continue
            if failures:
                logging.warning(
                    "tfswitch: goes on from checkpoint %d of '%s', as newer "
                    "ones cannot be read: %s",
                    number,
                    self._path,
                    "; ".join(failures),
                )
            return
        if failures:
            raise OSError(
                f"no checkpoint in '{self._path}' can be read: "
                + "; ".join(failures)
                + ". To start from nothing, remove the folder."
            )

    def _restore_one(self, number: int, with_tables: bool) -> None:
        manifest, saved = self._folder.read(number)
        present = self._variables()
        tables = self._tables()
        self._check(number, saved, present, manifest["tables"], tables)
        per_call = _backend.steps_per_execution(self.model)
        if manifest["batch"] % per_call:
            raise ValueError(
                f"checkpoint {number} in '{self._path}' is of batch "
                f"{manifest['batch']} of its epoch, and steps_per_execution="
                f"{per_call} does not come to it. Compile the model with a "
                "value that divides it."
            )
        for place, its_tables in tables.items() if with_tables else ():
            its_tables[0].cluster.restore(
                self._tables_paths[place],
                sorted({table.name for table in its_tables}),
                save=manifest["tables"][place]["save"],
                progress=False,
            )
        for place, its_tables in tables.items():
            described = manifest["tables"][place]["tables"]
            for table, each in zip(its_tables, described, strict=True):
                table.iterations = each["iterations"]
        for part in ("model", "optimizer"):
            _assign(present[part], [value for _, value in saved[part]])
        if isinstance(self._optimizer, ParameterServerOptimizer):
            self._optimizer.pull()
            self._optimizer._servers.has_restored = True
        _backend.begin_fit_at(self.model, manifest["epoch"])
        metrics = [value for _, value in saved["metrics"]]
        self._num_skipped = manifest["batch"]
        leave_out(self.model, manifest["batch"], metrics)

    def _check(
        self,
        number: int,
        saved: Variables,
        present: dict[str, list[Any]],
        saved_tables: dict[str, Any],
        tables: dict[str, list[EmbeddingTable]],
    ) -> None:
        """Raises ValueError unless a checkpoint is of this model."""

        def refuse(difference: str) -> ValueError:
            return ValueError(
                f"checkpoint {number} in '{self._path}' is of another model "
                f"than '{self.model.name}': {difference}. Give this model a "
                "folder of its own, or make it as the saved one."
            )

        before = {
            place: [(t["name"], t["dim"]) for t in its_tables["tables"]]
            for place, its_tables in saved_tables.items()
        }
        now = {
            place: [(t.name, t.dim) for t in its_tables]
            for place, its_tables in tables.items()
        }
        if before != now:
            raise refuse(
                f"its tables are {_describe(before)}, and here they are "
                f"{_describe(now)}"
            )
        for part in ("model", "optimizer"):
            variables = present[part]
            if len(variables) != len(saved[part]):
                raise refuse(
                    f"it has {len(saved[part])} variables of the {part}, and "
                    f"here there are {len(variables)}"
                )
            for variable, (name, value) in zip(
                variables, saved[part], strict=True
            ):
                if tuple(variable.shape) != value.shape:
                    raise refuse(
                        f"variable '{name}' of its {part} has the shape "
                        f"{value.shape}, and here "
                        f"'{_backend.variable_path(variable)}' has "
                        f"{tuple(variable.shape)}"
                    )

    # --- What is saved ------------------------------------------------------

    def _variables(self) -> dict[str, list[Any]]:
        return {
            # Weights that represent rows are left out: tables have these rows.
            "model": [v for v in self.model.variables if not is_rows(v)],
            "optimizer": list(self.model.optimizer.variables),
            "metrics": _backend.metric_variables(self.model),
        }

    def _tables(self) -> dict[str, list[EmbeddingTable]]:
        """Returns the tables in this "process", and those on "servers"."""
        found = {
            id(layer.table): layer.table
            for layer in self.model._flatten_layers()
            if isinstance(layer, DynamicEmbedding)
        }
        if isinstance(self._optimizer, ParameterServerOptimizer):
            for dense in self._optimizer._dense_tables():
                found[id(dense._table)] = dense._table
        places: dict[str, list[EmbeddingTable]] = {}
        for table in found.values():
            place = "servers" if table.cluster.is_remote else "process"
            tables = places.setdefault(place, [])
            tables.append(table)
            cluster_of(tables)
        return places


def _meets_all(worker: Worker) -> bool:
    """Waits until all workers have started; False if others are training."""

    def num_steps() -> int:
        return sum(worker.stats()["workers"]["staleness"])

    before = num_steps()
    give_up = time.monotonic() + EPOCH_SECS
    while True:
        try:
            worker.wait_at_barrier(_STARTS, timeout_secs=_LOOK_SECS)
        except TimeoutError as error:
            if num_steps() != before:
                # Leaves the group, because the others would wait for this
                # worker until its next step. This step joins the group again.
                worker.leave()
                return False
            if time.monotonic() > give_up:
                raise
            logging.log_every_n_seconds(
                logging.WARNING, "tfswitch: %s", 30, error
            )
            continue
        return num_steps() == before


def _assign(variables: list[Any], values: list[np.ndarray]) -> None:
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)


def _describe(places: dict[str, list[tuple[str, int]]]) -> str:
    return (
        ", ".join(
            f"'{name}' of dim {dim} in the {place}"
            if place == "process"
            else f"'{name}' of dim {dim} on servers"
            for place, tables in places.items()
            for name, dim in tables
        )
        or "none"
    )
