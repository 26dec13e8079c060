"""The embedding layer of many features, looked up together."""

import types
import urllib.parse
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfswitch._types import Config, IdsLike, Placeholder, Shape
from tfswitch.cluster import Cluster
from tfswitch.keras import _backend, _row_weights, batch_size
from tfswitch.keras.layers.dynamic_embedding import (
    DynamicEmbedding,
    _Count,
    train_or_read,
)
from tfswitch.keras.layers.id_inputs import IdBatch, to_batch
from tfswitch.table import EmbeddingTable


@_backend.register_keras_serializable(package="tfswitch")
class DynamicEmbeddings(_backend.Layer):
    """Maps the ids of many features to vectors, in one lookup.

    Each feature is a `DynamicEmbedding` with its own dimension, combiner,
    optimizer, admission and so on. A feature gives the same output as that
    layer alone, but one op looks up all features and sends one message to each
    server. (Long batches need several messages; see
    docs/wire_protocol_writes.md.)

    The weight of a feature is that of its `DynamicEmbedding`. When an optimizer
    applies the gradients, the tables of all features are pushed together: if a
    gradient holds NaN or Inf, no table takes the step. Features that the loss
    does not use take no step. If features share a table, an id takes one step
    with the sum of its gradients. Everything else is as for `DynamicEmbedding`.

    Example:

    >>> layer = tsw.keras.DynamicEmbeddings({
    ...     "user": {"output_dim": 8, "optimizer": "adam"},
    ...     "genres": {"output_dim": 4, "combiner": "mean"},
    ... })
    >>> outputs = layer({
    ...     "user": tf.constant([7, 9]),
    ...     "genres": tf.ragged.constant([[3, 5, 8], []], dtype=tf.int64),
    ... })
    >>> {name: tuple(x.shape) for name, x in outputs.items()}
    {'user': (2, 8), 'genres': (2, 4)}

    Args:
        features: A dict from the name of each feature to its
            `DynamicEmbedding`, or to a dict of its arguments. A layer made from
            a dict is named after this layer and the feature, such as
            "embeddings_user", and so is its table on servers. Features share a
            table if they are given the same `table`. A layer that was used
            before keeps its `EmbeddingTable` object, and the other features of
            that table use the same object.
        name: Name of the layer.
        cluster: The cluster of the tables of features given as dicts. By
            default the one of `tfswitch.connect`.
        **kwargs: Passed to `keras.layers.Layer`. Features given as dicts get
            the same `dtype`.

    Call arguments:
        inputs: A dict with the ids of every feature: dense, ragged or sparse,
            integers or strings, as for its layer.
        weights: A dict with the weights of the features that have weights, or
            None.
        training: Whether to create rows, and to give the layers' weights a
            gradient. A feature whose layer is not trainable is only read.
        shows: A dict with the shows of the features that have shows, or None.
        clicks: A dict with the clicks of the features that have clicks, or
            None.

    Output shape:
        A dict with the output of each feature's layer.

    Raises:
        ValueError: If `features` is empty, has more than 256 entries, has a
            value of another type, or has one layer twice. In the first call: if
            features that share a table have different learning rates, or have
            already used different table objects. In each call: if the ids of a
            feature are missing, or a name is not the name of a feature. Also
            the errors of `DynamicEmbedding`.
        tf.errors.UnavailableError, tf.errors.DeadlineExceededError: If a server
            does not answer a call of the layer. Other servers may have applied
            their part of a push.
    """

    built: bool

    def __init__(
        self,
        features: Mapping[str, DynamicEmbedding | Config],
        *,
        name: str | None = None,
        cluster: Cluster | None = None,
        **kwargs: Any,
    ) -> None:
        _backend.check_backend()
        _check_features(features)
        # Keras must not cast float ids: the error of `call` names their dtype.
        kwargs.setdefault("autocast", False)
        super().__init__(name=name, **kwargs)
        self.supports_jit = False
        self._tables_are_shared = False
        self._feature_names = tuple(features)
        defaults: dict[str, Any] = {"cluster": cluster}
        if kwargs.get("dtype") is not None:
            defaults["dtype"] = kwargs["dtype"]
        for feature, given in features.items():
            # Each layer is an attribute. Keras saves attributes by name, but
            # values of a dict by position.
            setattr(
                self, _attribute(feature), self._make(feature, given, defaults)
            )
        for layer in self.features.values():
            layer._share = weakref.WeakMethod(self._share_tables)
            if not self.trainable:
                layer.trainable = False
        self.supports_masking = any(
            layer.supports_masking for layer in self.features.values()
        )

    def _make(self, feature: str, given: Any, defaults: dict[str, Any]) -> Any:
        if isinstance(given, DynamicEmbedding):
            return given
        name = f"{self.name}_{feature}".replace("/", "_")
        try:
            return DynamicEmbedding(**{"name": name, **defaults, **given})
        except (TypeError, ValueError) as error:
            raise type(error)(f"feature {feature!r}: {error}") from error

    @property
    def features(self) -> Mapping[str, DynamicEmbedding]:
        """The layer of each feature."""
        return types.MappingProxyType(
            {
                name: getattr(self, _attribute(name))
                for name in self._feature_names
            }
        )

    def build(self, input_shape: Mapping[str, Shape] | None = None) -> None:
        if self.built:
            return
        if not any(layer._is_auto for layer in self.features.values()):
            self._share_tables()
        for layer in self.features.values():
            layer.build()
        self.built = True

    def _share_tables(self) -> None:
        """Makes features of one table use one table object from the start."""
        if self._tables_are_shared:
            return
        self._tables_are_shared = True
        try:
            for layer, table in self._shared_tables():
                layer._table = table
        except BaseException:
            self._tables_are_shared = False
            raise

    def _shared_tables(self) -> list[tuple[DynamicEmbedding, EmbeddingTable]]:
        """Finds one table object for the layers that share a table.

        The object counts the steps of all features of the table. A layer that
        has an object keeps it, because other code and traced functions may use
        this object.
        """
        features = self.features
        kept = {
            name for name, layer in features.items() if layer._table is not None
        }
        shared: dict[tuple[str, str], tuple[str, EmbeddingTable]] = {}
        for name in sorted(features, key=lambda name: name not in kept):
            table = features[name].table
            first, its_table = shared.setdefault(
                (table.cluster.address, table.name), (name, table)
            )
            if name in kept and table is not its_table:
                raise ValueError(
                    f"layer '{self.name}': features {first!r} and {name!r} "
                    f"share table '{table.name}', and each has an "
                    "EmbeddingTable object of its own that was used or passed "
                    "before, so that neither can take the other's. Make both "
                    "with one EmbeddingTable as `table`."
                )
            if not _learn_alike(table, its_table):
                raise ValueError(
                    f"layer '{self.name}': features {first!r} and {name!r} "
                    f"share table '{table.name}' and have different learning "
                    "rates. Give both the same optimizer, or one "
                    "EmbeddingTable as `table`."
                )
            if table.wire_dtype != its_table.wire_dtype:
                raise ValueError(
                    f"layer '{self.name}': features {first!r} and {name!r} "
                    f"share table '{table.name}' and have different "
                    "`wire_dtype`. Give both the same one."
                )
        return [
            (layer, shared[layer.table.cluster.address, layer.table.name][1])
            for layer in features.values()
        ]

    def call(
        self,
        inputs: Mapping[str, IdsLike],
        weights: Mapping[str, IdsLike] | None = None,
        training: bool | tf.Tensor | None = None,
        shows: Mapping[str, IdsLike] | None = None,
        clicks: Mapping[str, IdsLike] | None = None,
    ) -> dict[str, Any]:
        self._check_names("inputs", inputs, all_needed=True)
        extras = {"weights": weights, "shows": shows, "clicks": clicks}
        for what, given in extras.items():
            if given is not None:
                self._check_names(what, given, all_needed=False)
        features = self.features
        trained = self._trained()
        first = inputs[trained[0] if trained else self._feature_names[0]]
        batch_size.record(first, training if trained else False)
        batches = {
            name: to_batch(
                layer,
                inputs[name],
                **{
                    what: (given or {}).get(name)
                    for what, given in extras.items()
                },
            )
            for name, layer in features.items()
        }
        rows = self._look_up(batches, trained, training)
        return {
            name: batch.finish(rows[name]) for name, batch in batches.items()
        }

    def _trained(self) -> list[str]:
        return [
            name
            for name, layer in self.features.items()
            if layer.trainable and self.trainable
        ]

    def _lookups(
        self, inputs: Mapping[str, IdsLike]
    ) -> list[list[tuple[DynamicEmbedding, IdBatch]]]:
        """Returns the groups of features that a call looks up together."""
        self._check_names("inputs", inputs, all_needed=True)
        self._share_tables()
        trained = self._trained()
        groups: list[list[tuple[DynamicEmbedding, IdBatch]]] = [[], []]
        for name, layer in self.features.items():
            batch = to_batch(layer, inputs[name], None, None, None)
            groups[name not in trained].append((layer, batch))
        return groups

    def _look_up(
        self, batches: dict[str, IdBatch], trained: list[str], training: Any
    ) -> dict[str, tf.Tensor]:
        """Returns the float32 rows of each feature's ids."""
        if _backend.is_building():
            return {
                name: self.features[name]._look_up(batch, training)
                for name, batch in batches.items()
            }
        training = (
            self.features[trained[0]]._is_training(training)
            if trained
            else False
        )
        if training is False:
            for layer in self.features.values():
                layer._check_reader()
            return self._read(batches)
        read = self._read({n: batches[n] for n in batches if n not in trained})
        to_train = {name: batches[name] for name in trained}
        return train_or_read(self, training, to_train) | read

    def _read(self, batches: dict[str, IdBatch]) -> dict[str, tf.Tensor]:
        if not batches:
            return {}
        self._share_tables()
        rows = _row_weights.read(
            [(self.features[name], batches[name]) for name in batches],
            insert_missing=False,
        )
        return dict(zip(batches, rows, strict=True))

    def _train(self, batches: dict[str, IdBatch]) -> dict[str, tf.Tensor]:
        if self._tables_are_shared is False:
            # Each layer must find its optimizer before tables are compared.
            for layer in self.features.values():
                _ = layer.table
        self._share_tables()
        rows = _row_weights.look_up(
            [(self.features[name], batches[name]) for name in batches]
        )
        return dict(zip(batches, rows, strict=True))

    def apply_gradients(
        self, gradients: Sequence[tf.IndexedSlices | None]
    ) -> list[tf.Tensor]:
        """Takes a step of the rows, for loops without a Keras optimizer.

        Args:
            gradients: The gradients of `trainable_variables`, in the same
                order. Features without a gradient (None) take no step.

        Returns:
            For each table the number of rows that took a step, an int64 scalar.

        Raises:
            ValueError: If the number of gradients differs from the number of
                variables, or a gradient is not the gradient of rows.
        """
        return _row_weights.push(
            [
                _row_weights.row_gradient(variable, gradient)
                for variable, gradient in zip(
                    self.trainable_variables, gradients, strict=True
                )
                if gradient is not None
            ]
        )

    def _check_names(self, what: str, given: Any, *, all_needed: bool) -> None:
        names = list(self._feature_names)
        if not isinstance(given, Mapping):
            raise ValueError(
                f"layer '{self.name}': `{what}` must be a dict of the features "
                f"{names}. Received: {type(given).__name__}"
            )
        unknown = [name for name in given if name not in names]
        if unknown:
            raise ValueError(
                f"layer '{self.name}': there is no feature {unknown[0]!r}; it "
                f"has {names}. Leave others out of `{what}`. Received: "
                f"{sorted(map(str, given))}"
            )
        missing = [name for name in names if name not in given]
        if missing and all_needed:
            raise ValueError(
                f"layer '{self.name}': `{what}` has no ids of feature "
                f"{missing[0]!r}. Received: {sorted(map(str, given))}, "
                f"expected {names}"
            )

    def compute_mask(
        self,
        inputs: Mapping[str, IdsLike],
        mask: Mapping[str, tf.Tensor] | None = None,
    ) -> Any:
        return {
            name: layer.compute_mask(inputs[name])
            for name, layer in self.features.items()
        }

    def compute_output_shape(self, input_shape: Mapping[str, Shape]) -> Any:
        return {
            name: layer.compute_output_shape(input_shape[name])
            for name, layer in self.features.items()
        }

    def compute_output_spec(
        self,
        inputs: Mapping[str, Placeholder],
        weights: Mapping[str, Placeholder] | None = None,
        training: bool | tf.Tensor | None = None,
        shows: Mapping[str, Placeholder] | None = None,
        clicks: Mapping[str, Placeholder] | None = None,
    ) -> Any:
        """Replaces `call` for the placeholders of a Keras 3 model."""
        self._check_names("inputs", inputs, all_needed=True)
        return {
            name: layer.compute_output_spec(inputs[name])
            for name, layer in self.features.items()
        }

    def count_params(self) -> int:
        """Returns the number of weights; its text also says how many rows."""
        weights = super().count_params()
        tables = {
            (layer._table.cluster.address, layer._table.name): layer._table
            for layer in self.features.values()
            if layer._table is not None
        }
        return _Count.of(weights, tables.values()) if tables else weights

    def get_config(self) -> dict[str, Any]:
        config = super().get_config()
        config["features"] = {
            name: _backend.serialize(layer)
            for name, layer in self.features.items()
        }
        return config

    @classmethod
    def from_config(cls, config: Config) -> "DynamicEmbeddings":
        config = dict(config)
        config["features"] = {
            # This layer builds its features itself, after it has shared their
            # tables. So Keras must not build them.
            name: _backend.deserialize({**layer, "build_config": None})
            for name, layer in config["features"].items()
        }
        return super().from_config(config)


def _check_features(features: Any) -> None:
    if not isinstance(features, Mapping) or not features:
        raise ValueError(
            "`features` must be a dict from at least one name to a "
            "DynamicEmbedding or its arguments. Received: "
            f"features={features!r}"
        )
    if len(features) > _row_weights.MAX_TABLES:
        raise ValueError(
            f"`features` has {len(features)} entries, and one layer takes at "
            f"most {_row_weights.MAX_TABLES}. Split them over several layers."
        )
    seen: dict[int, str] = {}
    for name, given in features.items():
        if not isinstance(name, str) or not name:
            raise ValueError(
                "names of features must be strings that are not empty. "
                f"Received: {name!r}"
            )
        if not isinstance(given, (DynamicEmbedding, Mapping)):
            raise ValueError(
                f"feature {name!r} must be a DynamicEmbedding or a dict of its "
                f"arguments. Received: {given!r} (of type "
                f"{type(given).__name__})"
            )
        if isinstance(given, DynamicEmbedding):
            other = seen.setdefault(id(given), name)
            if other != name:
                raise ValueError(
                    f"features {other!r} and {name!r} are the same layer "
                    f"'{given.name}'. Make two layers with the same `table`."
                )


def _attribute(feature: str) -> str:
    """The attribute that holds a feature's layer; also its name in files."""
    return "feature_" + urllib.parse.quote(feature, safe="")


def _learn_alike(one: EmbeddingTable, other: EmbeddingTable) -> bool:
    """Whether two objects of one table have the same learning rate."""
    a: Any = one.optimizer.learning_rate
    b: Any = other.optimizer.learning_rate
    if one is other or a is b:
        return True
    if isinstance(a, float) and isinstance(b, float):
        return a == b
    # Schedules are equal if their configs are.
    return (
        type(a) is type(b)
        and hasattr(a, "get_config")
        and a.get_config() == b.get_config()
    )
