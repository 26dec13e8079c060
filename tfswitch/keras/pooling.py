"""Combiners: many embeddings to one, for dense, ragged and sparse ids."""

from typing import Any

import tensorflow as tf

COMBINERS = ("sum", "mean", "sqrtn")


def pool_axis(
    embeddings: tf.Tensor, weights: tf.Tensor | None, combiner: str
) -> tf.Tensor:
    """Pools the axis before the last.

    Args:
        embeddings: `[..., n, dim]`.
        weights: `[..., n]`, or None for ones.
        combiner: One of `COMBINERS`.

    Returns:
        `[..., dim]`; zeros where n is 0 or all weights are 0.
    """
    return _pool(
        embeddings, lambda x: tf.reduce_sum(x, axis=-2), weights, combiner
    )


def pool_segments(
    embeddings: tf.Tensor,
    segment_ids: tf.Tensor,
    num_segments: tf.Tensor,
    weights: tf.Tensor | None,
    combiner: str,
) -> tf.Tensor:
    """Pools rows that have the same segment.

    Args:
        embeddings: `[n, dim]`.
        segment_ids: `[n]`, in any order.
        num_segments: Scalar.
        weights: `[n]`, or None for ones.
        combiner: One of `COMBINERS`.

    Returns:
        `[num_segments, dim]`; zeros for a segment without rows.
    """

    def segment_sum(x: tf.Tensor) -> tf.Tensor:
        return tf.math.unsorted_segment_sum(x, segment_ids, num_segments)

    return _pool(embeddings, segment_sum, weights, combiner)


def _pool(
    embeddings: tf.Tensor,
    reduce: Any,
    weights: tf.Tensor | None,
    combiner: str,
) -> tf.Tensor:
    if weights is None:
        weights = tf.ones(tf.shape(embeddings)[:-1], embeddings.dtype)
    weights = weights[..., tf.newaxis]
    total = reduce(embeddings * weights)
    if combiner == "sum":
        return total
    if combiner == "mean":
        return tf.math.divide_no_nan(total, reduce(weights))
    norm = tf.sqrt(reduce(tf.square(weights)))
    return tf.math.divide_no_nan(total, norm)
