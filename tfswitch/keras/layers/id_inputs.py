"""Turns a layer's inputs into ids, and the rows of ids into its output."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import tensorflow as tf

from tfswitch._types import IdsLike, Placeholder
from tfswitch.ops.id_tensors import (
    check_id_dtype,
    map_values,
    to_id_tensor,
    values_of,
)
from tfswitch.ops.string_ops import hash_strings

if TYPE_CHECKING:
    from tfswitch.keras.layers.dynamic_embedding import DynamicEmbedding

COMBINERS = ("sum", "mean", "sqrtn")

# For each float dtype, the number up to which it represents all integers.
_EXACT_UP_TO = {
    tf.bfloat16: 2**8,
    tf.float16: 2**11,
    tf.float32: 2**24,
    tf.float64: 2**53,
}


def to_integers(inputs: IdsLike, *, padding: bool, owner: str) -> Any:
    """Hashes strings, and casts floats that hold integers.

    Ids may be floats because a `keras.Input` without `dtype`, and the input of
    a Sequential model without one, are float32.

    Args:
        inputs: The inputs that a layer was called with.
        padding: Whether the empty string becomes 0.
        owner: The layer, for messages.

    Returns:
        If `inputs` are strings or floats: int64 of the same shape and kind.
        Otherwise `inputs` themselves.

    Raises:
        tf.errors.InvalidArgumentError: If floats are not exact integers. In a
            graph, this error comes when the graph runs.
    """

    def to_ids(strings: tf.Tensor) -> tf.Tensor:
        ids = hash_strings(strings)
        if not padding:
            return ids
        return tf.where(tf.equal(strings, ""), tf.zeros_like(ids), ids)

    # An array was converted to a tensor by Keras before the call.
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


def check_dtype(dtype: tf.DType | str, owner: str) -> None:
    """Raises ValueError if values of `dtype` cannot be ids of `owner`."""
    dtype = tf.as_dtype(dtype)
    if dtype not in _EXACT_UP_TO:
        check_id_dtype(dtype, owner)


def padding_of(inputs: IdsLike | Placeholder) -> Any:
    """The value that means padding in `inputs`: 0 or the empty string."""
    dtype = getattr(inputs, "dtype", None)
    is_string = dtype is not None and tf.as_dtype(dtype) == tf.string
    return "" if is_string else 0


def check_rank(rank: int | None, combiner: str | None, owner: str) -> None:
    """Raises ValueError if ids of this rank cannot be pooled."""
    if combiner is not None and rank == 0:
        raise ValueError(
            f"{owner}: combiner {combiner!r} pools the last axis of the ids, "
            "got a scalar id"
        )


def check_sparse(combiner: str | None, owner: str) -> None:
    """Raises ValueError if sparse ids cannot be pooled."""
    if combiner is None:
        raise ValueError(
            f"{owner}: sparse ids need a combiner. Pass "
            'combiner="sum", "mean" or "sqrtn" to the layer.'
        )


class IdBatch(NamedTuple):
    """The ids of one call of a layer; `finish` makes the output of the rows.

    Attributes:
        ids: int64, `[num_ids]`, without padding.
        shows: float32, `[num_ids]`, or None.
        clicks: float32, `[num_ids]`, or None.
        given: All ids in the structure of the inputs.
        weights: float32 of the shape of the values of `given`, or None.
        places: The indices of `ids` in the values of `given`, int64
            `[num_ids, rank]`. None means that `ids` are all values, in order.
        layer: The `DynamicEmbedding`.
    """

    ids: tf.Tensor
    shows: tf.Tensor | None
    clicks: tf.Tensor | None
    given: Any
    weights: tf.Tensor | None
    places: tf.Tensor | None
    layer: "DynamicEmbedding"

    def finish(self, rows: tf.Tensor) -> Any:
        """Returns the layer's output for float32 rows, `[num_ids, dim]`."""
        return tf.cast(self._finish(rows), self.layer.compute_dtype)

    def _finish(self, rows: tf.Tensor) -> Any:
        given, values = self.given, values_of(self.given)
        dim = self.layer.output_dim
        shape = tf.concat([tf.shape(values), [dim]], axis=0)
        if self.places is None:
            rows = tf.reshape(rows, shape)
        else:
            rows = tf.scatter_nd(self.places, rows, tf.cast(shape, tf.int64))
        rows.set_shape(values.shape.concatenate(dim))
        if isinstance(given, tf.SparseTensor):
            return self._pool_sparse(given, rows)
        if not isinstance(given, tf.RaggedTensor):
            return self._pool(rows, _over_axis)
        # If the values have a higher rank, their last axis is uniform, and not
        # ragged.
        if self.layer.combiner is not None and values.shape.rank == 1:
            return self._pool_ragged(given, rows)
        return given.with_flat_values(self._pool(rows, _over_axis))

    def _pool(
        self, rows: tf.Tensor, add_up: Callable[[tf.Tensor], tf.Tensor]
    ) -> tf.Tensor:
        """Combines rows; gives zeros without rows or with all weights 0."""
        combiner, weights = self.layer.combiner, self.weights
        if combiner is None:
            return rows
        if weights is None:
            weights = tf.ones(tf.shape(rows)[:-1], rows.dtype)
        weights = weights[..., tf.newaxis]
        total = add_up(rows * weights)
        if combiner == "sum":
            return total
        if combiner == "mean":
            return tf.math.divide_no_nan(total, add_up(weights))
        norm = tf.sqrt(add_up(tf.square(weights)))
        return tf.math.divide_no_nan(total, norm)

    def _pool_ragged(self, ids: tf.RaggedTensor, rows: tf.Tensor) -> Any:
        if ids.ragged_rank > 1:
            return ids.with_values(self._pool_ragged(ids.values, rows))
        pooled = self._pool(
            rows, _over_segments(ids.value_rowids(), ids.nrows())
        )
        pooled.set_shape([ids.shape[0], self.layer.output_dim])
        return pooled

    def _pool_sparse(self, ids: tf.SparseTensor, rows: tf.Tensor) -> tf.Tensor:
        outer = ids.dense_shape[:-1]
        # The output row of each value: its outer indices in row-major order.
        strides = tf.math.cumprod(outer, exclusive=True, reverse=True)
        segments = tf.reduce_sum(ids.indices[:, :-1] * strides, axis=1)
        pooled = self._pool(
            rows, _over_segments(segments, tf.reduce_prod(outer))
        )
        dim = self.layer.output_dim
        pooled = tf.reshape(pooled, tf.concat([outer, [dim]], axis=0))
        pooled.set_shape(ids.shape[:-1].concatenate(dim))
        return pooled


def to_batch(
    layer: "DynamicEmbedding",
    inputs: IdsLike,
    weights: IdsLike | None,
    shows: IdsLike | None,
    clicks: IdsLike | None,
) -> IdBatch:
    """Makes a batch from the arguments of a call of a `DynamicEmbedding`.

    With `mask_zero`, 0 and the empty string are padding: they are left out of
    the lookup and pool with weight 0.

    Raises:
        ValueError: If an argument does not fit the layer or the ids.
        tf.errors.InvalidArgumentError: If float ids are not exact integers, or
            `weights`, `shows` or `clicks` have another shape than the ids. In a
            graph, this error comes when the graph runs.
    """
    owner, combiner = f"layer '{layer.name}'", layer.combiner
    if weights is not None and combiner is None:
        raise ValueError(
            f"{owner}: `weights` need a combiner. Pass "
            'combiner="sum", "mean" or "sqrtn" to the layer.'
        )
    given = to_integers(inputs, padding=layer.mask_zero, owner=owner)
    if isinstance(given, tf.SparseTensor):
        check_sparse(combiner, owner)
    given = map_values(lambda values: to_id_tensor(values, owner), given)
    check_rank(given.shape.rank, combiner, owner)
    ids = values_of(given)
    shows, clicks, weights = (
        _numbers(what, numbers, given, owner)
        for what, numbers in [
            ("shows", shows),
            ("clicks", clicks),
            ("weights", weights),
        ]
    )
    places = None
    if layer.mask_zero:
        is_id = tf.not_equal(ids, 0)
        places = tf.where(is_id)
        if combiner is not None:
            mask = tf.cast(is_id, tf.float32)
            weights = mask if weights is None else mask * weights
    ids, shows, clicks = (
        None
        if values is None
        else tf.reshape(values, [-1])
        if places is None
        else tf.gather_nd(values, places)
        for values in (ids, shows, clicks)
    )
    return IdBatch(ids, shows, clicks, given, weights, places, layer)


def _numbers(what: str, numbers: Any, ids: Any, owner: str) -> tf.Tensor | None:
    """Returns the values of `numbers`, if they have the structure of `ids`."""
    if numbers is None:
        return None
    kinds = [
        [isinstance(x, kind) for kind in (tf.RaggedTensor, tf.SparseTensor)]
        for x in (numbers, ids)
    ]
    fits = kinds[0] == kinds[1]
    if isinstance(ids, tf.RaggedTensor):
        fits = fits and numbers.ragged_rank == ids.ragged_rank
    elif fits and not isinstance(ids, tf.SparseTensor):
        numbers = tf.convert_to_tensor(numbers)
        fits = numbers.shape.is_compatible_with(ids.shape)
    if not fits:
        raise ValueError(
            f"{owner}: `{what}` must be of the kind and shape of the ids, a "
            f"{type(ids).__name__} of shape {ids.shape}, got a "
            f"{type(numbers).__name__} of shape {numbers.shape}"
        )
    message = f"{owner}: `{what}` must have the shape of the ids"
    checks = [
        tf.debugging.assert_equal(a, b, message)
        for a, b in zip(_structure(numbers), _structure(ids), strict=True)
    ]
    # In eager mode each check has run already, and has returned None.
    with tf.control_dependencies([c for c in checks if c is not None]):
        return tf.cast(tf.identity(values_of(numbers)), tf.float32)


def _structure(tensor: Any) -> list[tf.Tensor]:
    """Returns tensors that define the position of each value."""
    if isinstance(tensor, tf.RaggedTensor):
        return [tf.cast(x, tf.int64) for x in tensor.nested_row_splits]
    if isinstance(tensor, tf.SparseTensor):
        return [tensor.indices]
    return [tf.shape(tensor)]


def _over_axis(values: tf.Tensor) -> tf.Tensor:
    return tf.reduce_sum(values, axis=-2)


def _over_segments(
    segment_ids: tf.Tensor, num_segments: tf.Tensor
) -> Callable[[tf.Tensor], tf.Tensor]:
    return lambda values: tf.math.unsorted_segment_sum(
        values, segment_ids, num_segments
    )
