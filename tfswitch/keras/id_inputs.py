"""The ids that a layer is called with, as the integers that its table knows."""

from typing import Any

import tensorflow as tf

from tfswitch.ops.ids import check_id_dtype, map_values
from tfswitch.ops.string_ops import hash_strings

# Up to which each dtype has all integers.
_EXACT_UP_TO = {
    tf.bfloat16: 2**8,
    tf.float16: 2**11,
    tf.float32: 2**24,
    tf.float64: 2**53,
}


def to_integers(inputs: Any, *, padding: bool, owner: str) -> Any:
    """Hashes strings, and makes integers of floats that are integers.

    Keras makes floats of ids: a `keras.Input` without `dtype` is of float32, as
    is that of a Sequential model without one.

    Args:
        inputs: The inputs that a layer was called with.
        padding: Whether the empty string becomes 0.
        owner: The layer, for messages.

    Returns:
        int64 of the shape and kind of `inputs`, if those are strings or floats;
        else `inputs`. In a graph, ids that floats cannot tell apart are an
        error when it runs.

    Raises:
        tf.errors.InvalidArgumentError: If floats are not exact.
    """

    def to_ids(strings: tf.Tensor) -> tf.Tensor:
        ids = hash_strings(strings)
        if not padding:
            return ids
        return tf.where(tf.equal(strings, ""), tf.zeros_like(ids), ids)

    # Keras makes tensors of arrays before it calls a layer.
    dtype = getattr(inputs, "dtype", None)
    if dtype is None:
        return inputs
    if tf.as_dtype(dtype) == tf.string:
        return map_values(to_ids, inputs)
    if tf.as_dtype(dtype) in _EXACT_UP_TO:
        return map_values(lambda x: _from_floats(x, owner), inputs)
    return inputs


def _from_floats(numbers: Any, owner: str) -> tf.Tensor:
    numbers = tf.convert_to_tensor(numbers)
    bound = _EXACT_UP_TO[numbers.dtype]
    is_exact = (numbers == tf.round(numbers)) & (tf.abs(numbers) < bound)
    check = tf.debugging.Assert(
        tf.reduce_all(is_exact),
        [
            f"{owner}: ids came as {numbers.dtype.name}, which tells integers "
            f"apart below {bound} only, and some are none of these. Have them "
            'come as integers: keras.Input(..., dtype="int64"), or '
            "tf.cast(ids, tf.int64). Such are:",
            tf.boolean_mask(numbers, ~is_exact)[:3],
        ],
    )
    with tf.control_dependencies([] if check is None else [check]):
        return tf.cast(numbers, tf.int64)


def check_dtype(dtype: Any, owner: str) -> None:
    """Raises ValueError if values of `dtype` cannot be ids of `owner`."""
    dtype = tf.as_dtype(dtype)
    if dtype not in _EXACT_UP_TO:
        check_id_dtype(dtype, owner)


def padding_of(inputs: Any) -> Any:
    """The padding among a layer's inputs: 0 or the empty string."""
    dtype = getattr(inputs, "dtype", None)
    is_string = dtype is not None and tf.as_dtype(dtype) == tf.string
    return "" if is_string else 0
