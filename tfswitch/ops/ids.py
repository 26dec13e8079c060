"""Ids as users pass them, as the int32 or int64 tensors that the ops take."""

from typing import Any

import numpy as np
import tensorflow as tf


def check_id_dtype(dtype: tf.DType, owner: str) -> None:
    """Raises ValueError if values of `dtype` cannot be ids of `owner`."""
    if dtype == tf.string:
        raise ValueError(
            f"{owner}: ids must be integers, got strings. Hash them first, "
            "for example with tf.strings.to_hash_bucket_fast(ids, 2**62)."
        )
    if not dtype.is_integer:
        raise ValueError(
            f"{owner}: ids must be integers (int32 or int64), got "
            f"{dtype.name}. Cast them with tf.cast(ids, tf.int64)."
        )


def to_id_tensor(ids: Any, owner: str) -> tf.Tensor:
    """Converts ids to a tensor of int32 or int64.

    Args:
        ids: Integer tensor, array, list or number of any shape.
        owner: Who asks, for messages: "table 'user'".

    Raises:
        ValueError: If `ids` are not integers.
    """
    if isinstance(ids, (tf.RaggedTensor, tf.SparseTensor)):
        raise ValueError(
            f"{owner}: ids must be a dense tensor, got "
            f"{type(ids).__name__}. Pass its values "
            "(ids.flat_values of a RaggedTensor, ids.values of a "
            "SparseTensor)."
        )
    if not tf.is_tensor(ids):
        ids = to_id_array(ids, owner)
    ids = tf.convert_to_tensor(ids)
    check_id_dtype(ids.dtype, owner)
    if ids.dtype not in (tf.int32, tf.int64):
        ids = tf.cast(ids, tf.int64)
    return ids


def to_id_array(ids: Any, owner: str) -> np.ndarray:
    """Converts ids to a NumPy array of integers of their own width.

    Raises:
        ValueError: If `ids` are symbolic or not integers.
    """
    ids = to_array(ids, owner, "ids")
    if ids.size == 0 and ids.dtype == np.float64:
        return ids.astype(np.int64)  # An empty list has no dtype of its own.
    if ids.dtype.kind in "OSU":
        check_id_dtype(tf.string, owner)
    check_id_dtype(tf.as_dtype(ids.dtype), owner)
    return ids


def to_array(value: Any, owner: str, what: str) -> np.ndarray:
    """Converts an eager tensor, list or number to a NumPy array.

    Raises:
        ValueError: If `value` is a tensor of a graph under construction.
    """
    if tf.is_tensor(value) and not hasattr(value, "numpy"):
        raise ValueError(
            f"{owner}: `{what}` is a symbolic tensor, and this method runs in "
            "Python. Call it outside tf.function, with NumPy arrays or eager "
            "tensors."
        )
    return np.asarray(value)
