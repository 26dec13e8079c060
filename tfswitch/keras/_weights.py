"""Carries the rows of a layer's table in the value of the layer's weight.

`get_weights` and `set_weights` of a model, and callbacks that use them, such as
`EarlyStopping(restore_best_weights=True)`, read and set the values of
variables. The value of a layer's weight is an empty matrix that carries the
rows with it.
"""

import functools
import warnings
import weakref
from typing import Any, NamedTuple

import numpy as np

from tfswitch.keras import _backend
from tfswitch.keras._row_weights import is_rows

# The most bytes of rows that `get_weights` copies from servers to one worker.
_MAX_BYTES_FROM_SERVERS = 4 << 30


class Rows(NamedTuple):
    """The rows of a table at one time.

    Attributes:
        ids: int64, `[num_rows]`.
        values: float32, `[num_rows, dim]`.
    """

    ids: np.ndarray
    values: np.ndarray


def no_rows(dim: int) -> Rows:
    """Returns the rows of an empty table."""
    return Rows(np.zeros(0, np.int64), np.zeros((0, dim), np.float32))


class _Value(np.ndarray):
    """A matrix of shape [0, dim] with rows; arrays made from it have none."""

    rows: Rows | None

    def __array_finalize__(self, source: Any) -> None:
        self.rows = getattr(source, "rows", None)

    def __array_ufunc__(
        self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any
    ) -> Any:
        plain = [
            x.view(np.ndarray) if isinstance(x, _Value) else x for x in inputs
        ]
        return getattr(ufunc, method)(*plain, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any] | None) -> "_Value":
        return self.copy()

    def __reduce__(self) -> Any:
        if self.rows is None:
            return super().__reduce__()
        return _value_of, tuple(self.rows)


def _value_of(ids: np.ndarray, values: np.ndarray) -> _Value:
    order = np.argsort(ids)
    # The array owns its data, so it is the `base` of plain views.
    value = _Value((0, values.shape[1]), np.float32)
    value.rows = Rows(ids[order], values[order])
    return value


def attach(variable: Any, layer: Any) -> None:
    """Makes a read or save of the layer's variable return the layer's rows."""
    owner = weakref.ref(layer)
    assign = variable.assign

    def numpy() -> np.ndarray:
        layer = owner()
        if layer is None:
            return np.zeros(tuple(variable.shape), np.float32)
        if layer._table is None:
            return _value_of(*layer._first_rows)
        _check_size(layer)
        return _value_of(*layer._table.export_rows())

    def assign_value(value: Any, *args: Any, **kwargs: Any) -> Any:
        # During training Keras assigns tensors, and these carry no rows.
        if not isinstance(value, np.ndarray):
            return assign(value, *args, **kwargs)
        layer = owner()
        if layer is not None:
            layer._set_rows(_rows_of(layer, value))
        return variable

    variable.numpy = numpy
    variable.assign = assign_value


def refuse_hdf5() -> None:
    """Makes Keras refuse `.h5` files, which have no place for rows.

    The error comes before Keras opens the file, so an existing file stays. Call
    this function once.
    """
    if _backend.IS_LEGACY:
        from tf_keras.src.saving.legacy import hdf5_format, save

        _refuse_rows(save, "save_weights")
    else:
        from keras.src.legacy.saving import legacy_h5_format as hdf5_format
    _refuse_rows(hdf5_format, "save_model_to_hdf5")


def _refuse_rows(module: Any, name: str) -> None:
    original = getattr(module, name)

    @functools.wraps(original)
    def save(model: Any, filepath: Any, *args: Any, **kwargs: Any) -> Any:
        form = kwargs.get("save_format")
        kind = f".{form.lower().strip()}" if form else str(filepath)
        layers = [v._tfswitch_owner() for v in model.weights if is_rows(v)]
        if layers and (
            name != "save_weights" or kind.endswith((".h5", ".hdf5", ".keras"))
        ):
            raise ValueError(
                f"layer '{layers[0].name}': a `.h5` file does not hold its "
                "rows. Save the model as `.keras`, or its weights as "
                "`.weights.h5`."
            )
        return original(model, filepath, *args, **kwargs)

    setattr(module, name, save)


def warn_of_projector(cls: type[Any]) -> None:
    """Makes the callback `TensorBoard` warn of layers that it leaves out.

    The projector of TensorBoard shows only Keras's own embeddings, and gives no
    warning about other embeddings. Call this function once.

    Args:
        cls: The class of the layers.
    """
    callback = _backend.keras.callbacks.TensorBoard
    original = getattr(callback, "_configure_embeddings", None)
    if original is None:  # A later Keras may lack the method.
        return

    @functools.wraps(original)
    def configure(self: Any) -> None:
        layers = [
            layer
            for layer in self.model._flatten_layers()
            if isinstance(layer, cls)
        ]
        if layers:
            warnings.warn(
                "TensorBoard(embeddings_freq=...) shows the rows of "
                "keras.layers.Embedding alone, and not those of layer "
                f"'{layers[0].name}'. Write them for the projector with "
                "`tfswitch.io.write_projector(log_dir, layer.table)`: "
                "docs/tensorboard.md.",
                stacklevel=2,
            )
        original(self)

    callback._configure_embeddings = configure


def _check_size(layer: Any) -> None:
    table = layer._table
    if not table.cluster.is_remote:
        return
    num_bytes = table.size() * table.dim * 4
    if num_bytes > _MAX_BYTES_FROM_SERVERS:
        raise ValueError(
            f"layer '{layer.name}': to get its weights is to copy "
            f"{num_bytes / 2**30:.1f} GiB of rows from servers, and at most "
            f"{_MAX_BYTES_FROM_SERVERS >> 30} GiB are copied. Save and restore "
            "them on the servers, with Cluster.save and Cluster.restore."
        )


def _rows_of(layer: Any, value: np.ndarray) -> Rows:
    """Returns a value's rows; tf_keras may have made a plain view of it."""
    found: Any = value
    while found is not None:
        rows = getattr(found, "rows", None)
        if isinstance(rows, Rows):
            break
        found = getattr(found, "base", None)
    else:
        raise ValueError(
            f"layer '{layer.name}': this value of its weight carries no rows, "
            "because it does not come from `get_weights`, or was computed with "
            "or written by something that knows arrays only. Rows go through "
            "files with `save_weights` and `load_weights` (`.weights.h5`), "
            "with `pickle`, or with `layer.table.assign`."
        )
    if rows.values.shape[1] != layer.output_dim:
        raise ValueError(
            f"layer '{layer.name}' has rows of length {layer.output_dim}, and "
            f"those to be set have length {rows.values.shape[1]}"
        )
    return rows
