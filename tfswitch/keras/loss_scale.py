"""How a layer's pushes come to know what the loss was multiplied with.

The lookup gives a probe, a scalar 0, which the layer adds to the loss. Its
gradient on the way back is the scale.
"""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf


def as_loss(probe: tf.Tensor) -> tf.Tensor:
    """What a layer passes to `add_loss` for the probe of its lookup."""
    # Keras divides what `add_loss` got by the number of replicas.
    replicas = tf.distribute.get_strategy().num_replicas_in_sync
    return probe * float(replicas)


def check(
    name: str, embeddings: Sequence[tf.Tensor], probe: tf.Tensor
) -> tuple[list[tf.Tensor], tf.Tensor]:
    """Refuses a backward pass that float16 would make wrong.

    Losses of float16 models are scaled, and without the probe the push would
    take the scale for a part of the gradient.

    Args:
        name: The layer's, for the message.
        embeddings: What the lookup gave.
        probe: Its probe.

    Returns:
        The same tensors, whose gradients are checked.
    """

    @tf.custom_gradient
    def identity(probe: tf.Tensor, *embeddings: tf.Tensor) -> Any:
        def backward(probe_gradient: tf.Tensor, *gradients: tf.Tensor) -> Any:
            check = tf.debugging.Assert(
                tf.not_equal(probe_gradient, 0.0),
                [
                    f"layer '{name}': the loss does not hold the layer's own, "
                    "so the loss scale of float16 training is unknown. Add "
                    "sum(model.losses) to the loss before it is scaled."
                ],
            )
            dependencies = [] if check is None else [check]
            with tf.control_dependencies(dependencies):
                return probe_gradient, *(tf.identity(g) for g in gradients)

        return (tf.identity(probe), *map(tf.identity, embeddings)), backward

    probe, *checked = identity(probe, *embeddings)
    return checked, probe
