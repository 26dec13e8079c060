"""Converts ids that users pass to the int64 tensors that the ops take."""

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tfswitch._types import IdsLike, TensorLike
from tfswitch.ops.string_ops import hash_strings


def map_values(
    function: Callable[[tf.Tensor], tf.Tensor], value: IdsLike
) -> Any:
    """Applies a function to the values of a dense, ragged or sparse tensor."""
    if isinstance(value, tf.RaggedTensor):
        return value.with_flat_values(function(value.flat_values))
    if isinstance(value, tf.SparseTensor):
        result = tf.SparseTensor(
            value.indices, function(value.values), value.dense_shape
        )
        result.set_shape(value.shape)
        return result
    return function(value)


def values_of(value: IdsLike) -> Any:
    """Returns the values of a ragged or sparse tensor, or `value` itself."""
    if isinstance(value, tf.RaggedTensor):
        return value.flat_values
    if isinstance(value, tf.SparseTensor):
        return value.values
    return value


def check_id_dtype(dtype: tf.DType, owner: str) -> None:
    """Raises ValueError if values of `dtype` cannot be ids of `owner`."""
    if not dtype.is_integer and dtype != tf.string:
        raise ValueError(
            f"{owner}: ids must be integers (int32 or int64) or strings, got "
            f"{dtype.name}. Cast them with tf.cast(ids, tf.int64)."
        )


def to_id_tensor(ids: IdsLike, owner: str) -> tf.Tensor:
    """Converts ids to a tensor of int64; strings are hashed.

    Args:
        ids: Integers or strings: a tensor, array, list or scalar of any shape.
        owner: The caller, for messages: "table 'user'".

    Raises:
        ValueError: If `ids` are neither integers nor strings.
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
    if ids.dtype == tf.string:
        return hash_strings(ids)
    return tf.cast(ids, tf.int64)


def to_id_array(ids: TensorLike, owner: str) -> np.ndarray:
    """Converts ids to integers of their own width; strings are hashed.

    Raises:
        ValueError: If `ids` are symbolic, or neither integers nor strings.
    """
    is_string = getattr(ids, "dtype", None) == tf.string
    if tf.is_tensor(ids) and is_string and hasattr(ids, "numpy"):
        # NumPy would cut zeros at the end of a scalar string.
        return np.asarray(hash_strings(ids))
    array = to_array(ids, owner, "ids")
    if array.size == 0 and array.dtype == np.float64:
        return array.astype(np.int64)  # An empty list has no dtype.
    if array.dtype.kind in "OSUT":
        if array.dtype.kind != "O" and not isinstance(ids, np.ndarray):
            # NumPy's string dtypes would cut zeros at the end of a string.
            array = np.asarray(ids, dtype=object)
        # Hashes the strings at once, even while a graph is being made.
        with tf.init_scope():
            return np.asarray(hash_strings(to_string_tensor(array, owner)))
    check_id_dtype(tf.as_dtype(array.dtype), owner)
    return array


def to_string_tensor(array: np.ndarray, owner: str) -> tf.Tensor:
    """Converts an array of strings, or of Python objects that are strings.

    Raises:
        ValueError: If an object is not a `str` or `bytes`.
    """
    if array.dtype.kind == "T":
        array = array.astype(object)
    if array.dtype.kind == "O":
        for value in array.flat:
            if not isinstance(value, (str, bytes)):
                raise ValueError(
                    f"{owner}: ids must be integers or strings, got an array "
                    f"of objects with {value!r} (of type "
                    f"{type(value).__name__}). Replace missing values, and "
                    "cast numbers to int64."
                )
    return tf.convert_to_tensor(array, tf.string)


def to_array(value: TensorLike, owner: str, what: str) -> np.ndarray:
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
