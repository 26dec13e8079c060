"""The rows of a layer in files that TensorFlow saves."""

import warnings
import weakref
from typing import Any, NoReturn

import tensorflow as tf

from tfswitch.keras import _backend


class TrackedRows(tf.__internal__.tracking.Trackable):
    """Adds a layer's table to a `tf.train.Checkpoint`.

    A layer makes its table when the table is first needed, at the latest in a
    restore. So TensorFlow asks this object for the table. For a plain
    SavedModel, which would not contain the rows, this object raises an error.
    """

    def __init__(self, layer: Any) -> None:
        self._layer = weakref.ref(layer)

    def _trackable_children(
        self, save_type: str = "checkpoint", **kwargs: Any
    ) -> dict[str, Any]:
        layer = self._layer()
        if save_type == "savedmodel":
            refuse_export(layer)
        if layer is None or layer._table is None:
            return {}
        return {"table": layer._table}

    def _lookup_dependency(self, name: str, *args: Any, **kwargs: Any) -> Any:
        layer = self._layer()
        return layer.table if name == "table" and layer is not None else None


def refuse_export(layer: Any) -> NoReturn:
    """Raises ValueError for an export that would lack the rows."""
    owner = "a layer" if layer is None else f"layer '{layer.name}'"
    message = (
        f"{owner} has its rows in a table, which `model.export`, "
        "`tf.saved_model.save` and converters to TFLite and ONNX do not know. "
        "Export the model with tfswitch.saved_model.save(model, path), and "
        "serve that: docs/serving.md."
    )
    if _backend.is_called_by("tensorflow.lite."):
        warnings.warn(message, stacklevel=2)  # Keras drops the error.
    raise ValueError(message)
