"""Sampled losses as layers, for `fit`."""

from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from tfswitch._types import Config, Placeholder, Shape, TensorLike
from tfswitch.keras import _backend
from tfswitch.keras.layers.dynamic_embedding import DynamicEmbedding
from tfswitch.nn import sampled_losses, samplers


class _SampledLoss(_backend.Layer):
    """Common base of the layers; subclasses set `_loss`."""

    _loss: Any
    built: bool

    def __init__(
        self,
        embedding: DynamicEmbedding,
        sampler: samplers.Sampler,
        num_sampled: int,
        *,
        biases: DynamicEmbedding | None = None,
        remove_accidental_hits: bool | None = None,
        seed: int | None = None,
        name: str | None = None,
        **kwargs: Any,
    ) -> None:
        _check_embedding("embedding", embedding)
        if biases is not None:
            _check_embedding("biases", biases)
            if biases.output_dim != 1:
                raise ValueError(
                    "`biases` must have `output_dim` 1. Received: layer "
                    f"'{biases.name}' with output_dim={biases.output_dim}"
                )
        if not isinstance(sampler, samplers.Sampler):
            raise ValueError(
                "`sampler` must be one of tfswitch.nn, such as "
                f"LogUniformSampler. Received: sampler={sampler!r}"
            )
        samplers.check_num_sampled(num_sampled, type(self).__name__)
        # Labels are integers or strings, which must not become float16.
        kwargs.setdefault("autocast", False)
        super().__init__(name=name, **kwargs)
        self.embedding = embedding
        self.biases = biases
        self.sampler = sampler
        self.num_sampled = int(num_sampled)
        self.remove_accidental_hits = (
            type(self)._removes_accidental_hits
            if remove_accidental_hits is None
            else bool(remove_accidental_hits)
        )
        self.seed = seed
        self.supports_jit = False

    def build(
        self,
        inputs_shape: Shape | None = None,
        labels_shape: Shape | None = None,
    ) -> None:
        if self.built:
            return
        self.embedding.build()
        if self.biases is not None:
            self.biases.build()
        self.built = True

    def call(
        self,
        inputs: TensorLike,
        labels: TensorLike,
        training: bool | tf.Tensor | None = None,
        sample_weight: TensorLike | None = None,
    ) -> Any:
        losses = type(self)._loss(
            self.embedding,
            self.biases,
            labels,
            tf.cast(inputs, tf.float32),
            self.num_sampled,
            self.sampler,
            remove_accidental_hits=self.remove_accidental_hits,
            training=training,
            seed=self.seed,
            name=type(self).__name__,
        )
        if sample_weight is not None:
            losses *= self._weights(sample_weight, losses)
        # The loss is divided by the number of examples, not by the sum of their
        # weights.
        self.add_loss(tf.reduce_mean(losses))
        return losses

    def _weights(self, sample_weight: Any, losses: tf.Tensor) -> tf.Tensor:
        given = tf.convert_to_tensor(sample_weight)
        weights = tf.cast(given, losses.dtype)
        if weights.shape.rank == 2 and weights.shape[1] == 1:
            weights = weights[:, 0]
        message = (
            f"layer '{self.name}': `sample_weight` must have one number for "
            "each example, in the shape (batch_size,) or (batch_size, 1)"
        )
        if not weights.shape.is_compatible_with(losses.shape):
            raise ValueError(
                f"{message}. Received: sample_weight of shape {given.shape}, "
                f"and {losses.shape[0]} examples"
            )
        # This check runs with the graph. Without it, TensorFlow could broadcast
        # one weight to all examples.
        tf.debugging.assert_equal(tf.shape(weights), tf.shape(losses), message)
        return weights

    def score(self, inputs: TensorLike, ids: TensorLike) -> tf.Tensor:
        """Computes the exact logits of candidates, without sampling.

        No row is created, and an id without a row scores 0.

        Args:
            inputs: Floats, `(batch_size, dim)`.
            ids: Integers or strings, `(num_candidates,)`: the same for all
                inputs.

        Returns:
            float32, `(batch_size, num_candidates)`.
        """
        rows = self.embedding.table.lookup(ids)
        scores = tf.matmul(tf.cast(inputs, tf.float32), rows, transpose_b=True)
        if self.biases is None:
            return scores
        return scores + self.biases.table.lookup(ids)[:, 0]

    def compute_output_shape(
        self, inputs_shape: Shape, labels_shape: Shape | None = None
    ) -> Any:
        return (inputs_shape[0],)

    def compute_output_spec(
        self,
        inputs: Placeholder,
        labels: Placeholder,
        training: bool | tf.Tensor | None = None,
        sample_weight: Placeholder | None = None,
    ) -> Any:
        """Replaces `call` for the placeholders of a Keras 3 model."""
        return _backend.spec((inputs.shape[0],), dtype="float32", ragged=False)

    def get_config(self) -> dict[str, Any]:
        return {
            **super().get_config(),
            "embedding": _backend.serialize(self.embedding),
            "sampler": _serialize(self.sampler),
            "num_sampled": self.num_sampled,
            "biases": self.biases and _backend.serialize(self.biases),
            "remove_accidental_hits": self.remove_accidental_hits,
            "seed": self.seed,
        }

    @classmethod
    def from_config(cls, config: Config) -> "_SampledLoss":
        config = dict(config)
        for name in ("embedding", "biases"):
            if isinstance(config[name], Mapping):
                config[name] = _backend.deserialize(config[name])
        config["sampler"] = _deserialize(config["sampler"])
        return cls(**config)


@_backend.register_keras_serializable(package="tfswitch")
class SampledSoftmax(_SampledLoss):
    """Adds the sampled softmax loss of predicting ids of a dynamic table.

    Use it as the last layer of a model whose classes are ids: a model that
    predicts the next item, or a two-tower model. The layer has the output
    embeddings, draws ids with the sampler, and adds the mean of
    `tfswitch.nn.sampled_softmax_loss` to the model's loss. Only rows of labels
    and samples are read and pushed. Compile the model with an optimizer and no
    loss.

    `evaluate` computes the same estimate with new samples, and makes no rows.
    For predictions, leave the layer out and use `score`.

    Example:

    >>> items = tsw.keras.DynamicEmbedding(8)
    >>> loss = tsw.keras.SampledSoftmax(
    ...     items, tsw.nn.LogUniformSampler(100), num_sampled=10)
    >>> user = keras.Input((8,))
    >>> label = keras.Input((), dtype="int64")
    >>> model = keras.Model([user, label], loss(user, label))
    >>> model.compile("adam")

    Args:
        embedding: A `DynamicEmbedding` without a combiner, for the rows of the
            labels. The model may also use it for its inputs.
        sampler: A sampler of `tfswitch.nn`, with all labels in its vocabulary.
        num_sampled: How many ids to draw for each batch.
        biases: A `DynamicEmbedding` of `output_dim` 1, or None for no biases.
        remove_accidental_hits: Whether an example ignores sampled ids that are
            its labels. None means yes.
        seed: The seed of the sampling operation; see `tf.random.set_seed`.
        name: Name of the layer.
        **kwargs: Passed to `keras.layers.Layer`.

    Call arguments:
        inputs: Floats, `(batch_size, dim)`, with the `dim` of `embedding`.
        labels: Integers or strings, `(batch_size,)` or `(batch_size,
            num_true)`.
        training: Whether to create rows, and to give the weight of `embedding`
            a gradient.
        sample_weight: Numbers, `(batch_size,)` or `(batch_size, 1)`: a factor
            of each example's loss. The sum is divided by the number of
            examples, as with Keras's "sum_over_batch_size". The `sample_weight`
            of `fit` has no effect here: make it an input of the model.

    Output shape:
        `(batch_size,)`, float32: the loss of each example, times its weight.

    Raises:
        ValueError: If an argument is out of range or shapes do not fit.
        tf.errors.InvalidArgumentError: If a label is not in the vocabulary.
    """

    _loss = staticmethod(sampled_losses.sampled_softmax_loss)
    _removes_accidental_hits = True


@_backend.register_keras_serializable(package="tfswitch")
class NCE(_SampledLoss):
    """Adds the noise-contrastive loss of predicting ids of a dynamic table.

    Works as `SampledSoftmax`, but uses `tfswitch.nn.nce_loss`, and
    `remove_accidental_hits=None` means no.
    """

    _loss = staticmethod(sampled_losses.nce_loss)
    _removes_accidental_hits = False


def _serialize(sampler: samplers.Sampler) -> dict[str, Any]:
    if samplers.is_custom(sampler):
        return _backend.serialize(sampler)
    return samplers.to_config(sampler)


def _deserialize(config: Mapping[str, Any]) -> samplers.Sampler:
    if "module" not in config:  # Only configs of Keras have a module.
        return samplers.from_config(config)
    try:
        return _backend.deserialize(config)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"the sampler {config['class_name']!r} of module "
            f"{config['module']!r} cannot be loaded. Decorate the class with "
            "keras.saving.register_keras_serializable, import it before "
            "loading, and let its `from_config` take what its `get_config` "
            f"returns. The reason: {error}"
        ) from error


def _check_embedding(argument: str, layer: Any) -> None:
    if not isinstance(layer, DynamicEmbedding):
        raise ValueError(
            f"`{argument}` must be a DynamicEmbedding. Received: "
            f"{argument}={layer!r} (of type {type(layer).__name__})"
        )
    if layer.combiner is not None or layer.mask_zero:
        raise ValueError(
            f"`{argument}` must have no combiner and mask_zero=False: each "
            "label and sampled id needs its row. To share rows with such a "
            "layer, pass both the same `table`. Received: layer "
            f"'{layer.name}' with combiner={layer.combiner!r} and "
            f"mask_zero={layer.mask_zero}"
        )
