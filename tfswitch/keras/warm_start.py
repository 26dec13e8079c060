"""Converts `keras.layers.Embedding` to a table of rows, and back."""

from typing import Any

import numpy as np
import tensorflow as tf

from tfswitch._connection._rows import Rows, assign_rows, find_not_finite
from tfswitch._types import TensorLike
from tfswitch._which_keras import IS_LEGACY, keras
from tfswitch.keras import _backend
from tfswitch.keras.layers import id_inputs
from tfswitch.keras.layers.dynamic_embedding import DynamicEmbedding
from tfswitch.ops.id_tensors import to_id_array, to_string_tensor

# `to_embedding` makes any matrix of up to this many rows.
_FEW_ROWS = 1_000_000
# A longer matrix may have at most this many rows for each row of the table.
_MAX_ROWS_PER_ROW = 10


def from_embedding(
    layer: keras.layers.Embedding,
    *,
    ids: TensorLike | None = None,
    **kwargs: Any,
) -> DynamicEmbedding:
    """Makes a `DynamicEmbedding` with the rows of a `keras.layers.Embedding`.

    The new layer gives the same output as `layer`, bit for bit, and also takes
    new ids. Floats as ids must be exact integers, while `layer` truncates them.
    Name, `mask_zero`, `dtype` and `trainable` are those of `layer` unless they
    are in `kwargs`. Regularizers and constraints are not copied
    (`tfswitch.optimizers` have L2 and bounds of their own).

    With `mask_zero` padding has no row and reads as zeros. `layer` itself
    returns its row 0 for padding, so the results of a later layer that ignores
    the mask can differ.

    If the table exists already, as `kwargs["table"]` or under its name on
    servers, it keeps the rows of other ids, and the optimizer state of all
    rows. With several workers, one of them calls this before the others train.

    Args:
        layer: A `keras.layers.Embedding` with weights, of the Keras that
            TF_USE_LEGACY_KERAS chooses.
        ids: The id of each row: integers or strings, `[input_dim]`, all
            different. By default the number of the row. With `mask_zero` the
            first id must be padding: 0, or the empty string.
        **kwargs: Arguments of `DynamicEmbedding`, except `output_dim`.

    Returns:
        The layer, built.

    Raises:
        ValueError: If `layer` has no weights or is no `keras.layers.Embedding`,
            if its weights are NaN, Inf or quantized, or if `ids` do not fit it.

    Example:

    >>> embedding = tsw.keras.from_embedding(
    ...     model.get_layer("word"), optimizer=tsw.optimizers.Adam(0.01))
    >>> ids = keras.Input((20,), dtype="int64")
    >>> model = keras.Sequential([ids, embedding, *model.layers[1:]])

    With the ids that a `keras.layers.StringLookup` gives to strings:

    >>> embedding = tsw.keras.from_embedding(
    ...     layer, ids=lookup.get_vocabulary())
    """
    _backend.check_backend()
    _check_embedding(layer)
    matrix = tf.convert_to_tensor(layer.embeddings)
    matrix = tf.cast(matrix, tf.float32).numpy()
    owner = f"layer '{layer.name}'"
    kwargs.setdefault("name", layer.name)
    kwargs.setdefault("mask_zero", layer.mask_zero)
    kwargs.setdefault("dtype", layer.dtype_policy)
    kwargs.setdefault("trainable", layer.trainable)
    mask_zero = bool(kwargs["mask_zero"])
    if ids is None:
        ids = np.arange(len(matrix))
    else:
        ids = _to_ids(ids, owner, mask_zero)
        if len(ids) != len(matrix):
            raise ValueError(
                f"`ids` must have one id for each of the {len(matrix)} rows of "
                f"{owner}. Received: {len(ids)} ids"
            )
        _check_distinct(ids, owner)
    if mask_zero and layer.mask_zero:
        _check_padding(ids, owner)
    found = find_not_finite(matrix)
    if found is not None:
        raise ValueError(
            f"{owner}: row {found[0]} of its weights has {matrix[found]}, and "
            "rows of a table are finite. Train it again, or set the row"
        )
    result = DynamicEmbedding(matrix.shape[1], **kwargs)
    result.build()
    rows = Rows(ids, matrix)
    if mask_zero:
        has_row = ids != 0
        rows = Rows(ids[has_row], matrix[has_row])
    assign_rows(result.table, rows)
    return result


def to_embedding(
    layer: DynamicEmbedding, *, ids: TensorLike | None = None, **kwargs: Any
) -> Any:
    """Makes a `keras.layers.Embedding` with the rows of a `DynamicEmbedding`.

    Row i is the output of `layer` for `ids[i]` with `training=False`, bit for
    bit: an id without a row reads as zeros, or as its admission policy says.
    Name, `mask_zero`, `dtype` and `trainable` are those of `layer` unless they
    are in `kwargs`. The optimizer state is not copied.

    Args:
        layer: A layer without a combiner.
        ids: The id of each row: integers or strings, `[input_dim]`. By default
            0 to the largest id of the table. Then the table must not have
            negative ids, and the matrix may have at most a million rows, or ten
            for each row of the table if that is more. With `mask_zero` the
            first id must be padding: 0, or the empty string.
        **kwargs: Arguments of `keras.layers.Embedding`, except `input_dim` and
            `output_dim`.

    Returns:
        The `keras.layers.Embedding`, built, of the Keras that
        TF_USE_LEGACY_KERAS chooses.

    Raises:
        ValueError: If `layer` has a combiner or is no `DynamicEmbedding`, or if
            the table's ids cannot be row numbers of a matrix.
        ConnectionError, TimeoutError: If a server does not answer.

    Example:

    >>> lookup = keras.layers.StringLookup(vocabulary=words)
    >>> embedding = tsw.keras.to_embedding(
    ...     layer, ids=lookup.get_vocabulary())
    """
    if not isinstance(layer, DynamicEmbedding):
        raise ValueError(
            "`layer` must be a tfswitch.keras.DynamicEmbedding; those of "
            "DynamicEmbeddings are its `features`. Received: "
            f"layer={layer!r}"
        )
    owner = f"layer '{layer.name}'"
    if layer.combiner is not None:
        raise ValueError(
            f"{owner} pools with combiner {layer.combiner!r}, which "
            "keras.layers.Embedding cannot. Pass a layer without one on the "
            f"same table: DynamicEmbedding({layer.output_dim}, "
            "table=layer.table)"
        )
    kwargs.setdefault("name", layer.name)
    kwargs.setdefault("mask_zero", layer.mask_zero)
    kwargs.setdefault("dtype", layer.dtype_policy)
    kwargs.setdefault("trainable", layer.trainable)
    if ids is None:
        ids = np.arange(_input_dim_of(layer.table))
    else:
        ids = _to_ids(ids, owner, layer.mask_zero)
    if not len(ids):
        raise ValueError(
            f"`ids` must not be empty, for {owner} must have a row"
        )
    if layer.mask_zero and kwargs["mask_zero"]:
        _check_padding(ids, owner)
    matrix = layer.table._in_float32()._native.pull(ids, False)
    if layer.mask_zero:
        matrix[ids == 0] = 0.0
    result = keras.layers.Embedding(len(ids), layer.output_dim, **kwargs)
    result.build((None,))
    result.set_weights([matrix])
    return result


def _check_embedding(layer: Any) -> None:
    if not isinstance(layer, keras.layers.Embedding):
        raise ValueError(
            "`layer` must be a keras.layers.Embedding of "
            f"{'tf_keras' if IS_LEGACY else 'Keras 3'}, which "
            f"TF_USE_LEGACY_KERAS chooses. Received: layer={layer!r} (of type "
            f"{type(layer).__module__}.{type(layer).__name__})"
        )
    if not layer.built:
        raise ValueError(
            f"layer '{layer.name}' has no weights yet; build or train its "
            "model first"
        )
    if getattr(layer, "quantization_mode", None) is not None:
        raise ValueError(
            f"layer '{layer.name}' is quantized to {layer.quantization_mode}; "
            "pass it as it was before"
        )


def _to_ids(ids: Any, owner: str, mask_zero: bool) -> np.ndarray:
    """Returns int64 ids; strings are hashed, and padding becomes 0."""
    if not tf.is_tensor(ids):
        array = np.asarray(ids)
        if array.dtype.kind in "OSUT":
            # Converts `ids` and not `array`, because NumPy's string arrays cut
            # off zero bytes at the end.
            ids = to_string_tensor(np.asarray(ids, dtype=object), owner)
    ids = to_id_array(
        id_inputs.to_integers(ids, padding=mask_zero, owner=owner), owner
    )
    if ids.ndim != 1:
        raise ValueError(
            f"`ids` must be of rank 1. Received: ids of shape {ids.shape}"
        )
    return np.ascontiguousarray(ids).astype(np.int64, copy=False)


def _check_distinct(ids: np.ndarray, owner: str) -> None:
    order = np.argsort(ids, kind="stable")
    repeated = np.flatnonzero(ids[order][1:] == ids[order][:-1])
    if repeated.size:
        first, second = order[repeated[0] : repeated[0] + 2]
        raise ValueError(
            f"`ids` must differ, for each is one row of {owner}. Received: "
            f"{ids[first]} for row {first} and for row {second}"
        )


def _check_padding(ids: np.ndarray, owner: str) -> None:
    if ids[0] != 0:
        raise ValueError(
            f"{owner} has mask_zero=True, so the first of `ids` must be "
            f"padding: 0 or the empty string. Received: {ids[0]}. If nothing "
            "is padding, pass mask_zero=False"
        )


def _input_dim_of(table: Any) -> int:
    """Returns the number of rows of a matrix whose row i is that of id i."""
    ids, _ = table.export_rows()
    if not len(ids):
        raise ValueError(
            f"table '{table.name}' has no rows, so there is no largest id; "
            "say with `ids` which rows the layer is to have"
        )
    smallest, largest = int(ids.min()), int(ids.max())
    if smallest < 0:
        raise ValueError(
            f"table '{table.name}' has ids below 0, such as {smallest}, which "
            "are no row numbers; say with `ids` which id is which row"
        )
    limit = max(_FEW_ROWS, _MAX_ROWS_PER_ROW * len(ids))
    if largest >= limit:
        raise ValueError(
            f"table '{table.name}' has {len(ids)} rows with ids up to "
            f"{largest}; a matrix with as many rows would be nearly empty. Say "
            "with `ids` which id is which row"
        )
    return largest + 1
