"""Tables in checkpoints of TensorFlow.

A table of this process puts its rows into the checkpoint. A table on servers
makes the servers save it, and puts the path and the number of that save into
the checkpoint.
"""

import functools
import json
import os
import urllib.parse
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.training.saving import saveable_object

from tfswitch._settings._ranges import bad_argument, is_number

# One save more than a CheckpointManager keeps checkpoints by default: a program
# may be killed between the servers' save and the checkpoint that names it.
_KEEP = 6

_DTYPES = {
    "ids": tf.int64,
    "rows": tf.float32,  # With the optimizer's state and statistics.
    "iterations": tf.int64,
    "servers": tf.string,
    "optimizer": tf.string,  # As in the table's config.
}


class TrackedTable(tf.__internal__.tracking.Trackable):
    """The part of `EmbeddingTable` that `tf.train.Checkpoint` sees."""

    _checkpoint_path: str | None = None
    _checkpoint_keep = _KEEP

    def set_checkpoint_folder(
        self, path: str | os.PathLike[str], *, keep: int = _KEEP
    ) -> None:
        """Sets where servers save the table for a `tf.train.Checkpoint`.

        The checkpoint contains the rows of a table of this process. For a table
        on servers each save of the checkpoint is also a save of the table, and
        the checkpoint contains its path and number.

        Args:
            path: A folder for this table alone, as for `Cluster.save`: a path
                on the servers. By default "tf_checkpoints/NAME".
            keep: How many saves the servers keep there, from 1. A checkpoint
                whose save was removed cannot be restored, so `keep` should be
                more than the number of checkpoints that a `CheckpointManager`
                keeps.

        Raises:
            ValueError: If `path` is empty or `keep` is out of range.

        Example:

        >>> table.set_checkpoint_folder("jobs/7/user", keep=4)
        >>> checkpoint = tf.train.Checkpoint(table=table, step=step)
        >>> manager = tf.train.CheckpointManager(checkpoint, "jobs/7", 3)
        >>> manager.save()
        """
        if not os.fspath(path):
            raise bad_argument("path", path, "a folder")
        if not (is_number(keep, int) and keep >= 1):
            raise bad_argument("keep", keep, "an integer of at least 1")
        self._checkpoint_path = os.fspath(path)
        self._checkpoint_keep = keep

    def _serialize_to_tensors(self) -> dict[str, Any]:
        self._check_is_eager()
        # TensorFlow also calls this for a restore. So rows are read only when a
        # tensor is wanted.
        read = functools.cache(self._read_all)
        with tf.device("CPU:0"):  # Names the device as a variable's is.
            device = tf.zeros([]).device
        return {
            name: saveable_object.SaveSpec(
                lambda name=name: read()[name], "", name, dtype, device
            )
            for name, dtype in _DTYPES.items()
        }

    def _check_is_eager(self) -> None:
        if not tf.executing_eagerly():
            raise ValueError(
                f"{self!r} cannot be in a SavedModel, nor in a checkpoint that "
                "a graph or another process saves or restores. Export models "
                "with tfswitch.saved_model.save(model, path), and save tables "
                "with Cluster.save."
            )

    def _read_all(self) -> dict[str, tf.Tensor]:
        table: Any = self
        ids = np.zeros(0, np.int64)
        rows = np.zeros((0, 0), np.float32)
        servers = ""
        if table.cluster.is_remote:
            servers = json.dumps(self._save_on_servers(table))
        else:
            ids, values, slots = table._export_with_slots()
            rows = np.concatenate([values, slots], axis=1)
        return {
            "ids": tf.constant(ids),
            "rows": tf.constant(rows),
            "iterations": tf.constant(table.iterations, tf.int64),
            "servers": tf.constant(servers),
            "optimizer": tf.constant(
                json.dumps(table._optimizer_of(table._spec))
            ),
        }

    def _save_on_servers(self, table: Any) -> dict[str, Any]:
        path = self._checkpoint_path
        if path is None:
            name = urllib.parse.quote(table.name, safe="")
            path = os.path.join("tf_checkpoints", name)
        report = table.cluster.save(
            path, [table.name], keep=self._checkpoint_keep
        )
        return {"path": path, "table": table.name, "save": report["save"]}

    def _restore_from_tensors(self, restored: dict[str, tf.Tensor]) -> None:
        self._check_is_eager()
        table: Any = self
        servers = restored["servers"].numpy()
        if servers:
            table._poison.assign(0.0)
            _restore_on_servers(table, json.loads(servers))
        else:
            table._learn_as_saved(json.loads(restored["optimizer"].numpy()))
            _replace_rows(
                table, restored["ids"].numpy(), restored["rows"].numpy()
            )
        table.iterations = int(restored["iterations"])


def _replace_rows(table: Any, ids: np.ndarray, rows: np.ndarray) -> None:
    width = table.dim + table._slot_floats
    if len(ids) and rows.shape[1] != width:
        raise ValueError(
            f"table '{table.name}': the checkpoint has rows of "
            f"{rows.shape[1]} floats, optimizer state and statistics included, "
            f"and here they have {width}. Make it with the same dim, optimizer "
            'and statistics; that of a layer with optimizer="auto" is known '
            "when the model is compiled."
        )
    rows = rows.reshape(len(ids), width)
    table._replace_rows(ids, rows[:, : table.dim], rows[:, table.dim :])


def _restore_on_servers(table: Any, saved: dict[str, Any]) -> None:
    if saved["table"] != table.name:
        raise ValueError(
            f"the checkpoint has table '{saved['table']}' on servers, and "
            f"here it is called '{table.name}'. Make it with that name."
        )
    try:
        table.cluster.restore(saved["path"], [table.name], save=saved["save"])
    except KeyError as error:
        raise KeyError(
            f"table '{table.name}': the checkpoint is of save {saved['save']} "
            f"in '{saved['path']}' of its servers, which is not in "
            f"{table.cluster.address}: {error.args[0]}. A folder has the last "
            "saves only; set_checkpoint_folder(path, keep=) says how many."
        ) from error
