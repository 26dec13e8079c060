"""The rows of a layer's table behind the weight that Keras sees.

`get_weights` and `set_weights` of a model, and code that uses them, as
`EarlyStopping(restore_best_weights=True)` does, read and set the values of
variables. That of the layer's variable stands for the rows as they were.
"""

import hashlib
import weakref
from typing import Any

import numpy as np

# More would not be wanted in the memory of one worker.
_MAX_BYTES_FROM_SERVERS = 4 << 30


class _Rows:
    """All rows of a table at one time. Immutable."""

    def __init__(self, ids: np.ndarray, values: np.ndarray) -> None:
        order = np.argsort(ids)
        self.ids = ids[order]
        self.values = values[order]
        # Weights of equal rows are equal.
        digest = hashlib.blake2b(self.ids.tobytes(), digest_size=4)
        digest.update(self.values.tobytes())
        bits = int.from_bytes(digest.digest(), "little") % 2**23
        self.number = float(np.float32(1.0 + bits / 2**23))
        _rows[self.number] = self


# By the number that the weight's value has: a plain array does not say more.
_rows: weakref.WeakValueDictionary[float, _Rows] = weakref.WeakValueDictionary()


class _Value(np.ndarray):
    """A scalar that holds rows. Values computed of it hold none."""

    rows: _Rows | None

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
        return _value_of, (self.rows.ids, self.rows.values)


def _value_of(ids: np.ndarray, values: np.ndarray) -> _Value:
    rows = _Rows(ids, values)
    value = np.array(rows.number, np.float32).view(_Value)
    value.rows = rows
    return value


def attach(variable: Any, layer: Any) -> None:
    """Has the values of the layer's variable stand for its rows."""
    owner = weakref.ref(layer)
    assign = variable.assign

    def numpy() -> np.ndarray:
        layer = owner()
        if layer is None or layer._table is None:
            dim = 0 if layer is None else layer.output_dim
            return _value_of(
                np.zeros(0, np.int64), np.zeros((0, dim), np.float32)
            )
        _check_size(layer)
        return _value_of(*layer._table.export_rows())

    def assign_value(value: Any, *args: Any, **kwargs: Any) -> Any:
        # The values that Keras assigns while it trains are tensors, of no rows.
        if not isinstance(value, (np.ndarray, np.generic, float, int)):
            return assign(value, *args, **kwargs)
        layer = owner()
        if layer is not None:
            _set_rows(layer, value)
        return variable

    variable.numpy = numpy
    variable.assign = assign_value


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


def _set_rows(layer: Any, value: Any) -> None:
    rows = getattr(value, "rows", None) or _rows.get(float(np.asarray(value)))
    if rows is None:
        raise ValueError(
            f"layer '{layer.name}': its weight {float(np.asarray(value))!r} "
            "does not come from `get_weights` of this program, so there are no "
            "rows to set. Rows go through files with `save_weights` and "
            "`load_weights` (`.weights.h5`), and cannot be computed with."
        )
    if len(rows.ids) == 0 and layer._table is None:
        return
    if rows.values.shape[1] != layer.output_dim:
        raise ValueError(
            f"layer '{layer.name}' has rows of length {layer.output_dim}, and "
            f"those to be set have length {rows.values.shape[1]}"
        )
    layer.table._set_rows(rows.ids, rows.values)
