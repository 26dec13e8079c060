"""Sampled softmax and noise-contrastive estimation on a table.

This module reads only the distinct rows that a batch needs, and gives them to
`tf.nn.sampled_softmax_loss` or `tf.nn.nce_loss` as a matrix. Labels and samples
become row numbers of this matrix. Only these rows get gradients.
"""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfswitch._types import TensorLike
from tfswitch.nn.samplers import SampledValues, Sampler, check_num_sampled
from tfswitch.ops.id_tensors import to_id_tensor
from tfswitch.table import EmbeddingTable, tie_to_weight


def sampled_softmax_loss(
    weights: EmbeddingTable | Callable[..., tf.Tensor],
    biases: EmbeddingTable | Callable[..., tf.Tensor] | None,
    labels: TensorLike,
    inputs: TensorLike,
    num_sampled: int,
    sampler: Sampler | None = None,
    *,
    sampled_values: SampledValues | tuple[TensorLike, ...] | None = None,
    remove_accidental_hits: bool = True,
    training: bool = True,
    seed: int | None = None,
    name: str = "sampled_softmax_loss",
) -> tf.Tensor:
    """Softmax over the labels and a sample of the other ids.

    This is `tf.nn.sampled_softmax_loss` with a dynamic table in place of the
    matrix of classes. A training call reads the rows of the labels and of the
    sampled ids, and creates missing ones. Only these rows get a gradient,
    through the layer's weight or `EmbeddingTable.weight`. The loss is an
    estimate for training; to compare models, score candidates exactly.

    Example:

    >>> items = tsw.EmbeddingTable("item", 2, initializer="ones")
    >>> loss = tsw.nn.sampled_softmax_loss(
    ...     weights=items, biases=None, labels=[[70]],
    ...     inputs=tf.ones([1, 2]), num_sampled=2,
    ...     sampler=tsw.nn.LogUniformSampler(3, ids=[70, 50, 60]))
    >>> loss.shape
    TensorShape([1])

    Args:
        weights: An `EmbeddingTable`, or a layer such as `DynamicEmbedding` that
            maps ids `[n]` to `[n, dim]`.
        biases: A table or layer with dim 1 for the biases, or None for no
            biases.
        labels: Ids (integers or strings), `[batch_size]` or
            `[batch_size, num_true]`. If an example has several labels, each has
            the target probability 1 / num_true.
        inputs: Floats, `[batch_size, dim]`.
        num_sampled: How many ids to draw for the batch.
        sampler: The sampler that draws them, without repetition.
        sampled_values: Ids that were drawn before, instead of a sampler: a
            `SampledValues` or a tuple with its fields. `num_sampled` must be
            the number of these ids.
        remove_accidental_hits: Whether the loss of an example leaves out a
            sampled id that is one of its labels.
        training: Whether to create missing rows, and to give rows a gradient.
            If False, an unknown id reads as zeros.
        seed: The seed of the sampling operation; see `tf.random.set_seed`.
        name: The operations' name.

    Returns:
        `[batch_size]`: the loss of each example, float64 if `inputs` are, else
        float32.

    Raises:
        ValueError: If shapes do not fit; if a label is not in the sampler's
            vocabulary (from inside a graph `tf.errors.InvalidArgumentError`).

    Source: Jean et al., On Using Very Large Target Vocabulary for Neural
    Machine Translation, 2015, arXiv:1412.2007, section 3; and TensorFlow's
    "Candidate Sampling Algorithms Reference".
    """
    return _sampled_loss(
        tf.nn.sampled_softmax_loss,
        weights,
        biases,
        labels,
        inputs,
        num_sampled,
        sampler,
        sampled_values=sampled_values,
        remove_accidental_hits=remove_accidental_hits,
        training=training,
        seed=seed,
        name=name,
    )


def nce_loss(
    weights: EmbeddingTable | Callable[..., tf.Tensor],
    biases: EmbeddingTable | Callable[..., tf.Tensor] | None,
    labels: TensorLike,
    inputs: TensorLike,
    num_sampled: int,
    sampler: Sampler | None = None,
    *,
    sampled_values: SampledValues | tuple[TensorLike, ...] | None = None,
    remove_accidental_hits: bool = False,
    training: bool = True,
    seed: int | None = None,
    name: str = "nce_loss",
) -> tf.Tensor:
    """Noise-contrastive estimation: a logistic loss per label and sample.

    This is `tf.nn.nce_loss` with a dynamic table in place of the matrix of
    classes. Arguments, gradients and errors are those of
    `sampled_softmax_loss`.

    Returns:
        `[batch_size]`: the sum of the logistic losses of the labels and the
        samples, for each example; float64 if `inputs` are, else float32.

    Source: Gutmann and Hyvärinen, Noise-contrastive estimation, AISTATS 2010.
    """
    return _sampled_loss(
        tf.nn.nce_loss,
        weights,
        biases,
        labels,
        inputs,
        num_sampled,
        sampler,
        sampled_values=sampled_values,
        remove_accidental_hits=remove_accidental_hits,
        training=training,
        seed=seed,
        name=name,
    )


def _sampled_loss(
    loss: Callable[..., tf.Tensor],
    weights: EmbeddingTable | Callable[..., tf.Tensor],
    biases: EmbeddingTable | Callable[..., tf.Tensor] | None,
    labels: TensorLike,
    inputs: TensorLike,
    num_sampled: int,
    sampler: Sampler | None,
    *,
    sampled_values: Any,
    remove_accidental_hits: bool,
    training: bool,
    seed: int | None,
    name: str,
) -> tf.Tensor:
    check_num_sampled(num_sampled, name)
    if (sampler is None) == (sampled_values is None):
        raise ValueError(
            f"{name}: pass either `sampler`, such as "
            "tfswitch.nn.LogUniformSampler, or `sampled_values`. Received: "
            f"sampler={sampler!r}, sampled_values={sampled_values!r}"
        )
    inputs = _checked_inputs(inputs, name)
    with tf.name_scope(name):
        labels = _checked_labels(labels, name)
        if sampler is not None:
            sampled_values = sampler.sample(
                labels, num_sampled, unique=True, seed=seed
            )
        sampled, true_count, sampled_count = sampled_values
        sampled = _checked_sampled(sampled, num_sampled, name)
        flat_labels = tf.reshape(labels, [-1])
        ids, places = tf.unique(
            tf.concat([flat_labels, sampled], axis=0), out_idx=tf.int64
        )
        num_labels = tf.size(flat_labels)
        rows = _rows(weights, "weights", ids, inputs.shape[1], training)
        if biases is None:
            bias_rows = tf.zeros([tf.size(ids), 1])
        else:
            bias_rows = _rows(biases, "biases", ids, 1, training)
        if inputs.dtype.size < 4:
            # float16 has too few bits for a softmax, and the counts are
            # float32.
            inputs = tf.cast(inputs, tf.float32)
        return loss(
            weights=rows,
            biases=tf.reshape(bias_rows, [-1]),
            labels=tf.reshape(places[:num_labels], tf.shape(labels)),
            inputs=inputs,
            num_sampled=num_sampled,
            # Required, but TensorFlow uses `num_classes` only with its own
            # sampler.
            num_classes=tf.size(ids),
            num_true=labels.shape[1],
            sampled_values=(places[num_labels:], true_count, sampled_count),
            remove_accidental_hits=remove_accidental_hits,
        )


def _checked_sampled(sampled: Any, num_sampled: int, name: str) -> tf.Tensor:
    """Returns int64 `[num_sampled]`."""
    sampled = to_id_tensor(sampled, name)
    if not sampled.shape.is_compatible_with([num_sampled]):
        raise ValueError(
            f"{name}: `num_sampled` must be the number of sampled ids. "
            f"Received: num_sampled={num_sampled}, and sampled ids of "
            f"shape {sampled.shape}"
        )
    return sampled


def _checked_labels(labels: Any, name: str) -> tf.Tensor:
    """Returns int64 `[batch_size, num_true]`."""
    labels = to_id_tensor(labels, name)
    if labels.shape.rank == 1:
        labels = labels[:, tf.newaxis]
    if labels.shape.rank != 2 or labels.shape[1] is None:
        raise ValueError(
            f"{name}: `labels` must have shape (batch_size,) or (batch_size, "
            "num_true), with num_true known. Received: labels of shape "
            f"{labels.shape}"
        )
    return labels


def _checked_inputs(inputs: Any, name: str) -> tf.Tensor:
    inputs = tf.convert_to_tensor(inputs)
    if (
        not inputs.dtype.is_floating
        or inputs.shape.rank != 2
        or inputs.shape[1] is None
    ):
        raise ValueError(
            f"{name}: `inputs` must be floats of shape (batch_size, dim), with "
            f"dim known. Received: inputs of shape {inputs.shape} and dtype "
            f"{inputs.dtype.name}"
        )
    return inputs


def _rows(
    source: Any,
    argument: str,
    ids: tf.Tensor,
    dim: int,
    training: bool,
) -> tf.Tensor:
    """Reads the rows of distinct ids, `[n, dim]`."""
    if isinstance(source, EmbeddingTable):
        if source.dim != dim:
            raise ValueError(
                f"`{argument}` must have dim {dim}. Received: table "
                f"'{source.name}' of dim {source.dim}"
            )
        if not training:
            return source.lookup(ids)
        rows = source.lookup_or_create(ids)
        weight = tf.convert_to_tensor(source.weight)
        return tie_to_weight(source, ids, rows, weight)
    if not callable(source):
        raise ValueError(
            f"`{argument}` must be an EmbeddingTable or a layer such as "
            f"DynamicEmbedding. Received: {argument}={source!r} (of type "
            f"{type(source).__name__})"
        )
    rows = source(ids, training=training)
    if not rows.shape.is_compatible_with([None, dim]):
        raise ValueError(
            f"`{argument}` must map ids of shape (n,) to (n, {dim}). Received: "
            f"{argument}={source!r}, which maps them to {rows.shape}"
        )
    return rows
