"""How a layer's pushes come to know the factor of the loss.

The lookup gives a probe, a scalar 0, which the layer adds to the loss. Its
gradient on the way back is the scale.
"""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf


def as_loss(probe: tf.Tensor) -> tf.Tensor:
    """The loss that a layer passes to `add_loss` for its lookup's probe."""
    # Keras divides the losses of `add_loss` by the number of replicas.
    replicas = tf.distribute.get_strategy().num_replicas_in_sync
    return probe * float(replicas)


def clipping(
    bounds: Sequence[tuple[float | None, float | None]],
) -> Callable[..., Any]:
    """Clips gradients as Keras's optimizers clip those of an `Embedding`.

    Keras's gradients are one slice for each place of an id, and neither the
    norm nor the bound of single numbers adds up the places of an id first.

    Args:
        bounds: For each of the embeddings the `clipnorm` and the `clipvalue` of
            the unscaled gradient, or None.

    Returns:
        A backward pass for `with_backward`.
    """

    def backward(probe_gradient: tf.Tensor, *gradients: tf.Tensor) -> Any:
        # The push takes a factor below 1 for a weight of the loss.
        scale = tf.maximum(probe_gradient, 1.0)
        return probe_gradient, *(
            _clip(tf.convert_to_tensor(gradient), scale, *of)
            for gradient, of in zip(gradients, bounds, strict=True)
        )

    return backward


def _clip(
    gradient: tf.Tensor,
    scale: tf.Tensor,
    clipnorm: float | None,
    clipvalue: float | None,
) -> tf.Tensor:
    if clipnorm is not None:
        bound = clipnorm * scale
        norm = tf.sqrt(tf.reduce_sum(tf.square(gradient)))
        return gradient * bound / tf.maximum(norm, bound)
    if clipvalue is not None:
        bound = clipvalue * scale
        return tf.clip_by_value(gradient, -bound, bound)
    return gradient


def checking(name: str) -> Callable[..., Any]:
    """Refuses a backward pass that float16 would make wrong.

    Losses of float16 models are scaled, and without the probe the push would
    take the scale for a part of the gradient.

    Args:
        name: The layer's, for the message.

    Returns:
        A backward pass for `with_backward`.
    """

    def backward(probe_gradient: tf.Tensor, *gradients: tf.Tensor) -> Any:
        check = tf.debugging.Assert(
            tf.not_equal(probe_gradient, 0.0),
            [
                f"layer '{name}': the loss does not hold the layer's own, so "
                "the loss scale of float16 training is unknown. Add "
                "sum(model.losses) to the loss before it is scaled."
            ],
        )
        dependencies = [] if check is None else [check]
        with tf.control_dependencies(dependencies):
            return probe_gradient, *(tf.identity(g) for g in gradients)

    return backward


def with_backward(
    backward: Callable[..., Any],
    embeddings: Sequence[tf.Tensor],
    probe: tf.Tensor,
) -> tuple[list[tf.Tensor], tf.Tensor]:
    """The same tensors of a lookup, whose gradients go through `backward`."""

    @tf.custom_gradient
    def identity(probe: tf.Tensor, *embeddings: tf.Tensor) -> Any:
        return (tf.identity(probe), *map(tf.identity, embeddings)), backward

    probe, *same = identity(probe, *embeddings)
    return same, probe
