"""String ids of a layer, as the integers that its table knows."""

from typing import Any

import tensorflow as tf

from tfswitch.ops.string_ops import hash_strings


def to_integers(inputs: Any, *, padding: bool) -> Any:
    """Hashes strings; all other inputs stay as they are.

    Args:
        inputs: What a layer was called with.
        padding: Whether the empty string becomes 0.

    Returns:
        int64 of the shape and kind of `inputs`, if those are strings.
    """

    def to_ids(strings: tf.Tensor) -> tf.Tensor:
        ids = hash_strings(strings)
        if not padding:
            return ids
        return tf.where(tf.equal(strings, ""), tf.zeros_like(ids), ids)

    if not _are_strings(inputs):
        return inputs
    if isinstance(inputs, tf.RaggedTensor):
        return inputs.with_flat_values(to_ids(inputs.flat_values))
    if isinstance(inputs, tf.SparseTensor):
        return tf.SparseTensor(
            inputs.indices, to_ids(inputs.values), inputs.dense_shape
        )
    return to_ids(inputs)


def padding_of(inputs: Any) -> Any:
    """What is padding among a layer's inputs: 0 or the empty string."""
    return "" if _are_strings(inputs) else 0


def _are_strings(inputs: Any) -> bool:
    # Keras makes tensors of arrays before it calls a layer.
    dtype = getattr(inputs, "dtype", None)
    return dtype is not None and tf.as_dtype(dtype) == tf.string
