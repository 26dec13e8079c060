"""The rows of a layer in files that TensorFlow itself saves."""

import weakref
from typing import Any, NoReturn

import numpy as np
import tensorflow as tf


class TrackedRows(tf.__internal__.tracking.Trackable):
    """Brings a layer's rows into a `tf.train.Checkpoint`.

    And refuses that they are left out of a SavedModel, whose functions would
    look for them where the model is loaded.
    """

    def __init__(self, layer: Any) -> None:
        self._layer = weakref.ref(layer)

    def _serialize_to_tensors(self) -> dict[str, tf.Tensor]:
        if not tf.executing_eagerly():
            refuse_export(self._layer())
        layer = self._layer()
        table = None if layer is None else layer._table
        if table is None or table.cluster.is_remote:
            return {"ids": tf.zeros([0], tf.int64), "rows": tf.zeros([0, 0])}
        ids, values, slots = table._export_with_slots()
        return {
            "ids": tf.constant(ids),
            "rows": tf.constant(np.concatenate([values, slots], axis=1)),
        }

    def _restore_from_tensors(self, restored: dict[str, tf.Tensor]) -> None:
        layer = self._layer()
        ids, rows = restored["ids"].numpy(), restored["rows"].numpy()
        if layer is None or not len(ids):
            return
        table = layer.table
        width = table.dim + table._native.slot_floats
        if rows.shape[1] != width:
            raise ValueError(
                f"layer '{layer.name}': the checkpoint has rows of "
                f"{rows.shape[1]} floats, optimizer state included, and its "
                f"table has {width}. Make the layer with the same dim and "
                "optimizer, or compile the model before."
            )
        table._replace_rows(ids, rows[:, : table.dim], rows[:, table.dim :])


def refuse_export(layer: Any) -> NoReturn:
    """Raises ValueError, for a SavedModel that would be without rows."""
    owner = "a layer" if layer is None else f"layer '{layer.name}'"
    raise ValueError(
        f"{owner} has its rows in a table, which `model.export` and "
        "`tf.saved_model.save` do not know. Export the model with "
        "tfswitch.saved_model.save(model, path)."
    )
