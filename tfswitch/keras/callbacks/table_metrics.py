"""The measurements of tables in TensorBoard."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from tfswitch._connection._reports import TableStats
from tfswitch._settings._ranges import bad_argument, is_number
from tfswitch._types import Logs
from tfswitch.cluster import Cluster
from tfswitch.keras import _backend
from tfswitch.keras._step_meters import StepMeters, stats_by_name
from tfswitch.train import worker as worker_lib

# How tf.summary.scalar marks a scalar. That function needs TensorBoard, which
# TensorFlow does not install.
_SCALAR = tf.compat.v1.SummaryMetadata(
    plugin_data=tf.compat.v1.SummaryMetadata.PluginData(plugin_name="scalars"),
    data_class="DATA_CLASS_SCALAR",
)

# The counts of `EmbeddingTable.stats` that series use.
_COUNTS = ("inserted_rows", "pulled_keys", "missing_keys")

# Numbers that grow; the points of a series are their differences.
_Counts = dict[str, float]


class TableMetrics(_backend.Callback):
    """Writes measurements of tables for TensorBoard while `fit` trains.

    For each table whose rows learn in this process, scalars are written to
    `log_dir`/tables. Their tags are NAME/epoch_SERIES, whose step is the epoch,
    and NAME/batch_SERIES, whose step is the number of batches of this `fit`. A
    point measures the time since the last point of its tag. The series, which
    docs/tensorboard.md describes:

    * rows: the number of rows.
    * new_rows: rows that all workers have made, per batch of this process.
    * hit_rate: the share of pulled ids that had a row, of all workers.
    * gradient_norm: the mean of the L2 norm of the gradient of all rows.
    * push_ms: the mean time of the op that pushes the gradients.
    * staleness: the mean number of steps by which workers of the group were
      ahead, if this process has a `tfswitch.train.Worker`.

    The gradient is measured in the graph of the training step. So this `fit`
    traces the step again, and the next `fit` traces it without the measurement.
    If `fit` ends by an error, compile the model again to end the measurement.
    With several workers, give the callback to one worker. Steps of
    `tf.distribute.ParameterServerStrategy` are not measured.

    Args:
        log_dir: The folder that TensorBoard gets as `--logdir`, or one in it.
        update_freq: "epoch"; "batch" for points after each batch, too; or an
            integer for points after so many batches, too. Each point asks the
            servers for the numbers of their tables.

    Raises:
        ValueError: If `update_freq` is something else.

    Example:

    >>> metrics = tsw.keras.callbacks.TableMetrics("logs", update_freq=100)
    >>> model.fit(dataset, callbacks=[metrics])
    """

    def __init__(
        self,
        log_dir: str | os.PathLike[str],
        *,
        update_freq: str | int = "epoch",
    ) -> None:
        super().__init__()
        if update_freq in ("epoch", "batch"):
            self._every = int(update_freq == "batch")  # 0: only after epochs.
        elif is_number(update_freq, int) and int(update_freq) >= 1:
            self._every = int(update_freq)
        else:
            raise bad_argument(
                "update_freq", update_freq, '"epoch", "batch" or an integer'
            )
        self._folder = Path(log_dir) / "tables"
        self._meters: StepMeters | None = None

    def set_model(self, model: Any) -> None:
        super().set_model(model)
        # Keras makes it before `on_train_begin`, and traces it after.
        model.train_function = None

    def on_train_begin(self, logs: Logs | None = None) -> None:
        self._meters = StepMeters()
        self._writer: Any = tf.summary.create_file_writer(str(self._folder))
        # The counts at the last point, by the prefix of the tag.
        self._last: dict[str, dict[tuple[str, str], _Counts]] = {}
        self._num_batches = 0
        self._num_batches_before = 0  # In former epochs.

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        before = self._num_batches
        batch = _backend.last_batch(self.model, batch)
        self._num_batches = self._num_batches_before + batch + 1
        if self._every and (
            self._num_batches // self._every > before // self._every
        ):
            self._write("batch", self._num_batches)

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        self._num_batches_before = self._num_batches
        self._write("epoch", epoch)

    def on_train_end(self, logs: Logs | None = None) -> None:
        self._meters = None
        self._writer.close()
        self.model.train_function = None

    def _write(self, prefix: str, step: int) -> None:
        last = self._last.setdefault(prefix, {})
        stats: dict[str, dict[str, TableStats]] = {}
        for key, meter in (self._meters or {}).items():
            address, name = key
            if address not in stats:
                stats[address] = stats_by_name(meter.table)
            if name not in stats[address]:
                continue  # It was dropped.
            present = stats[address][name]
            num_steps, norms, secs = meter.sums.read().numpy().tolist()
            now = {
                "batches": self._num_batches,
                **{count: present[count] for count in _COUNTS},
                "steps": num_steps,
                "norms": norms,
                "secs": secs,
                **_staleness(meter.table.cluster),
            }
            before = last.get(key, {c: meter.before[c] for c in _COUNTS})
            last[key] = now
            series = {"rows": present["num_rows"], **_series(now, before)}
            with self._writer.as_default(), tf.summary.record_if(True):
                for what, value in series.items():
                    tag = f"{name}/{prefix}_{what}"
                    tf.summary.write(tag, np.float32(value), step, _SCALAR)
        self._writer.flush()


def _series(now: _Counts, before: _Counts) -> dict[str, float]:
    """Returns the points for the time between two counts."""
    # A count is less than before if a server has lost its part of the table.
    grown = {k: max(0.0, v - before.get(k, 0.0)) for k, v in now.items()}
    series = {}
    if num_batches := grown["batches"]:
        series["new_rows"] = grown["inserted_rows"] / num_batches
    if num_pulled := grown["pulled_keys"]:
        series["hit_rate"] = 1.0 - grown["missing_keys"] / num_pulled
    if num_steps := grown["steps"]:
        series["gradient_norm"] = grown["norms"] / num_steps
        series["push_ms"] = 1000.0 * grown["secs"] / num_steps
    if num_ended := grown.get("ended_steps"):
        series["staleness"] = grown["steps_ahead"] / num_ended
    return series


def _staleness(cluster: Cluster) -> _Counts:
    """Returns the counts of the group of this process's worker, or none."""
    worker = worker_lib._present.get(cluster._native.id)
    if worker is None:
        return {}
    counts = worker.stats()["workers"]["staleness"]
    return {
        "ended_steps": sum(counts),
        "steps_ahead": sum(s * count for s, count in enumerate(counts)),
    }
