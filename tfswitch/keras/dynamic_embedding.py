"""The embedding layer without a fixed vocabulary."""

import json
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, NoReturn

import numpy as np
import tensorflow as tf

from tfswitch import _native
from tfswitch import admission as admission_lib
from tfswitch import consistency as consistency_lib
from tfswitch import eviction as eviction_lib
from tfswitch import initializers as initializers_lib
from tfswitch import optimizers as optimizers_lib
from tfswitch import row_type as row_type_lib
from tfswitch import statistics as statistics_lib
from tfswitch.cluster import Cluster, default_cluster
from tfswitch.keras import (
    _backend,
    batch_size,
    loss_scale,
    pooling,
    string_ids,
)
from tfswitch.ops.ids import check_id_dtype, to_id_tensor
from tfswitch.table import (
    EmbeddingTable,
    check_dim,
    check_seed,
    check_update,
    find_statistics,
    look_up_many,
)

# Makes a layer's output of the float32 embeddings of its ids.
_Finish = Callable[[tf.Tensor], Any]


class TableLookup(NamedTuple):
    """What a layer asks its table for, and what it makes of the answer.

    Attributes:
        ids: int32 or int64 of any shape.
        shows: float32 of each id, or None.
        clicks: float32 of each id, or None.
        finish: Takes float32, `ids.shape + [output_dim]`.
    """

    ids: tf.Tensor
    shows: tf.Tensor | None
    clicks: tf.Tensor | None
    finish: _Finish


def is_training(training: Any) -> bool | tf.Tensor:
    """`training` as a bool, or as a tensor if it is not known yet."""
    if not tf.is_tensor(training):
        return bool(training)
    known = tf.get_static_value(training)
    return tf.cast(training, tf.bool) if known is None else bool(known)


@_backend.register_keras_serializable(package="tfswitch")
class DynamicEmbedding(_backend.Layer):
    """Maps integer ids to dense vectors without a fixed vocabulary.

    Works like `keras.layers.Embedding`, but there is no `input_dim`: an id gets
    a row the first time it is seen in training. Outside training, and in a
    frozen layer, an unknown id reads as zeros and no row is made, so that
    evaluation never grows the table.

    The rows are not Keras weights, and the model's optimizer does not see
    them: the backward pass pushes their gradients to the table, whose own
    optimizer is applied where the rows live. What Keras sees is `anchor`, a
    scalar weight that ties the layer into the gradient tape. It follows that

    *   each backward pass through a training call is a push and a step,
        whichever variables it asks gradients for; a persistent tape pushes
        each time;
    *   gradient clipping, weight decay and gradient accumulation of the model's
        optimizer do not reach the rows;
    *   under `tf.distribute` each replica pushes by itself, and none waits for
        another: one step per replica, of its part of the gradient.

    Loss scaling. In training the layer adds a loss of 0 (`add_loss`), whose
    gradient tells the backward pass what the loss was multiplied with, and the
    push divides by it. `fit` and `train_on_batch` include it. A custom loop
    that scales its loss must do the same before it scales:

    ```python
    loss = loss_fn(y, model(x, training=True)) + sum(model.losses)
    loss = optimizer.scale_loss(loss)
    ```

    with weight 1 (under `tf.distribute`,
    `tf.nn.scale_regularization_loss(sum(...))`). With float16 it is checked. A
    push whose scaled gradients overflowed is skipped, and the optimizer skips
    its step and lowers the scale.

    Saving. `model.save` and `model.save_weights` store the rows of a table in
    this process, with optimizer state; of layers that share a table one stores
    them. Loading replaces all rows of the table. Rows on servers stay there:
    use `Cluster.save`. The HDF5 formats of tf_keras (`.h5`) hold only
    `layer.weights`, hence no rows: use `.keras` and `.weights.h5`.

    XLA cannot compile the layer: `jit_compile="auto"` sees that, and Keras 3
    answers `jit_compile=True` with a warning and leaves it out.

    Example:

    >>> layer = tsw.keras.DynamicEmbedding(8)
    >>> layer(tf.constant([[3, 5], [3, 0]]), training=True).shape
    TensorShape([2, 2, 8])
    >>> layer.table.size()
    3

    Args:
        output_dim: Length of each embedding, 1 to 4096.
        table: An `EmbeddingTable`, or the name of a table of `cluster`, which
            layers may share. By default the layer has its own: a table of this
            process goes with the layer; a table on servers has the layer's
            name, so that all workers share it.
        name: Name of the layer.
        embeddings_initializer: First value of a row: a name such as "uniform",
            an object of `tfswitch.initializers`, or the Keras one.
        optimizer: How rows learn: a name, an object of `tfswitch.optimizers`,
            or the Keras one. None means `tfswitch.optimizers.Adagrad()`.
        combiner: None, "sum", "mean" or "sqrtn": whether and how to pool the
            last axis of the ids. Needed for sparse ids.
        mask_zero: Whether id 0 is padding. If true it reads as zeros, gets no
            row, takes no part in pooling, and without a combiner is masked for
            later layers.
        admission: When an id gets a row: an object of `tfswitch.admission`.
            None means when it is first seen in training.
        eviction: What `table.shrink` evicts: an object of `tfswitch.eviction`.
        statistics: What is counted of each row: an object of
            `tfswitch.statistics`. None means what the policies need.
        update: Which rows a push moves: "sparse", its own; or "dense", all, as
            with `keras.layers.Embedding`.
        row_type: How rows are kept in memory: a `tfswitch.RowType`, or
            "float16" or "bfloat16" for such embeddings with a float32 optimizer
            state. None means float32. (`dtype`, as with all layers, is what the
            layer computes in.)
        seed: Decides, with the id, the first value of each row.
        consistency: When the gradients of several workers are applied: a
            `tfswitch.train.Consistency`, "asp" or "bsp". None means `asp`.
        cluster: Where a table that the layer makes lives; by default that of
            `tfswitch.connect`, when the table is first needed. Not stored in
            the config: a loaded layer uses the default.
        **kwargs: Passed to `keras.layers.Layer`.

    Call arguments:
        inputs: Integers of any rank, `(batch_size, ...)`: a dense tensor, a
            `tf.RaggedTensor`, or a `tf.SparseTensor` (with a combiner). Or
            strings, which are hashed (`tfswitch.ids.hash_strings`); with
            `mask_zero` the empty string is padding.
        weights: Factor of each id, of the shape and kind of `inputs`. Only
            with a combiner. "mean" divides by their sum, "sqrtn" by the root of
            the sum of their squares.
        training: Whether to create rows, and to push in the backward pass.
        shows: How often each id was shown, numbers of the shape and kind of
            `inputs`. By default once. They go with the push, so only a
            training call uses them.
        clicks: How often each was clicked, likewise. By default never. Where
            each example has one label, of shape `(batch_size, 1)`, that is
            `labels * tf.ones_like(ids)` of the labels' dtype.

    Output shape:
        Input shape plus a last axis of `output_dim`; with a combiner that axis
        takes the place of the last axis of the ids. An empty row pools to
        zeros.

    Raises:
        ValueError: If an argument is out of range; if ids are neither integers
            nor strings; on the first call, if the table exists with other
            settings.
        tf.errors.UnavailableError, tf.errors.DeadlineExceededError: From calls,
            if a server does not answer.
    """

    built: bool

    def __init__(
        self,
        output_dim: int,
        *,
        table: EmbeddingTable | str | None = None,
        name: str | None = None,
        embeddings_initializer: Any = "uniform",
        optimizer: Any = None,
        combiner: str | None = None,
        mask_zero: bool = False,
        admission: Any = None,
        eviction: Any = None,
        statistics: Any = None,
        update: str = "sparse",
        row_type: Any = None,
        seed: int = 0,
        consistency: Any = None,
        cluster: Cluster | None = None,
        **kwargs: Any,
    ) -> None:
        _backend.check_backend()
        check_dim("output_dim", output_dim)
        check_seed(seed)
        if combiner is not None and combiner not in pooling.COMBINERS:
            raise ValueError(
                '`combiner` must be None, "sum", "mean" or "sqrtn". '
                f"Received: combiner={combiner!r}"
            )
        if not isinstance(table, (EmbeddingTable, str, type(None))):
            raise ValueError(
                "`table` must be an EmbeddingTable or the name of one. "
                f"Received: table={table!r}"
            )
        # Float ids must reach `call` as they are, to be named in its message.
        kwargs.setdefault("autocast", False)
        super().__init__(name=name, **kwargs)
        self.output_dim = int(output_dim)
        self.combiner = combiner
        self.mask_zero = bool(mask_zero)
        self.supports_masking = self.mask_zero
        self.supports_jit = False
        self._table_lock = threading.Lock()
        self._cluster = cluster
        self._table: EmbeddingTable | None = None
        if isinstance(table, EmbeddingTable):
            self._adopt(
                table,
                embeddings_initializer=(embeddings_initializer, "uniform"),
                optimizer=(optimizer, None),
                seed=(seed, 0),
                consistency=(consistency, None),
                admission=(admission, None),
                eviction=(eviction, None),
                statistics=(statistics, None),
                update=(update, "sparse"),
                row_type=(row_type, None),
                cluster=(cluster, None),
            )
            return
        self._table_name = table
        self._initializer = initializers_lib.get(embeddings_initializer)
        self._optimizer = optimizers_lib.get(optimizer)
        self._seed = int(seed)
        self._consistency = consistency_lib.get(consistency)
        self._admission = admission_lib.get(admission)
        self._eviction = eviction_lib.get(eviction)
        self._statistics = find_statistics(
            statistics, self._admission, self._eviction
        )
        check_update(update)
        self._update = update
        self._row_type = row_type_lib.get(row_type)

    def _adopt(
        self, table: EmbeddingTable, **arguments: tuple[Any, Any]
    ) -> None:
        # `arguments` that the table has: what was passed, and its default.
        if table.dim != self.output_dim:
            raise ValueError(
                "`output_dim` must be the table's dim. Received: "
                f"output_dim={self.output_dim}, but table '{table.name}' has "
                f"dim {table.dim}"
            )
        for argument, (value, default) in arguments.items():
            if value is not default and value != default:
                raise ValueError(
                    f"`{argument}` belongs to table '{table.name}' that was "
                    f"passed as `table`; set it there. Received: {argument}="
                    f"{value!r}"
                )
        self._table = table
        self._table_name = table.name
        self._initializer = table.initializer
        self._optimizer = table.optimizer
        self._seed = table.seed
        self._consistency = table.consistency
        self._admission = table.admission
        self._eviction = table.eviction
        self._statistics = table.statistics
        self._update = table.update
        self._row_type = table.row_type

    @property
    def table(self) -> EmbeddingTable:
        """The layer's table; made when it is first needed."""
        # In a fork a thread that is not there may hold the lock.
        _native.check_process()
        with self._table_lock:
            if self._table is None:
                self._table = self._make_table()
            return self._table

    def _make_table(self) -> EmbeddingTable:
        cluster = self._cluster or default_cluster()
        options: dict[str, Any] = {
            "initializer": self._initializer,
            "optimizer": self._optimizer,
            "seed": self._seed,
            "consistency": self._consistency,
            "admission": self._admission,
            "eviction": self._eviction,
            "statistics": self._statistics,
            "update": self._update,
            "row_type": self._row_type,
            "cluster": cluster,
        }
        if self._table_name is not None:
            return EmbeddingTable(self._table_name, self.output_dim, **options)
        if cluster.is_remote:
            return EmbeddingTable(self.name, self.output_dim, **options)
        return EmbeddingTable._create_private(
            self.name, self.output_dim, **options
        )

    def build(self, input_shape: Any = None) -> None:
        if self.built:
            return
        # Errors of the table belong here and not into the first step.
        _ = self.table
        self._anchor = _backend.add_anchor(self)
        self.built = True

    def call(
        self,
        inputs: Any,
        weights: Any = None,
        training: Any = None,
        shows: Any = None,
        clicks: Any = None,
    ) -> Any:
        batch_size.record(inputs, training if self.trainable else False)
        lookup = self._prepare(inputs, weights, shows, clicks)
        return lookup.finish(self._look_up(lookup, training))

    def _prepare(
        self, inputs: Any, weights: Any, shows: Any, clicks: Any
    ) -> TableLookup:
        """Does everything that comes before the lookup."""
        if weights is not None and self.combiner is None:
            raise ValueError(
                f"layer '{self.name}': `weights` need a combiner. Pass "
                'combiner="sum", "mean" or "sqrtn" to the layer.'
            )
        inputs = string_ids.to_integers(inputs, padding=self.mask_zero)
        shows = self._values_of("shows", shows, inputs)
        clicks = self._values_of("clicks", clicks, inputs)
        if isinstance(inputs, tf.SparseTensor):
            ids, finish = self._prepare_sparse(inputs, weights)
        elif isinstance(inputs, tf.RaggedTensor):
            ids, finish = self._prepare_ragged(inputs, weights)
        else:
            ids, finish = self._prepare_dense(inputs, weights)
        lookup = TableLookup(ids, shows, clicks, finish)
        return self._without_padding(lookup) if self.mask_zero else lookup

    def _values_of(self, what: str, numbers: Any, ids: Any) -> Any:
        """The numbers of each id, as a float32 tensor of the ids' values."""
        if numbers is None:
            return None
        for kind in (tf.RaggedTensor, tf.SparseTensor):
            if isinstance(numbers, kind) != isinstance(ids, kind):
                self._refuse_kind(what, numbers, ids)
        message = (
            f"layer '{self.name}': `{what}` must have the shape of the ids"
        )
        if isinstance(ids, tf.RaggedTensor):
            if numbers.ragged_rank != ids.ragged_rank:
                self._refuse_kind(what, numbers, ids)
            checks = [
                tf.debugging.assert_equal(
                    tf.cast(a, tf.int64), tf.cast(b, tf.int64), message
                )
                for a, b in zip(
                    numbers.nested_row_splits,
                    ids.nested_row_splits,
                    strict=True,
                )
            ]
            numbers = numbers.flat_values
        elif isinstance(ids, tf.SparseTensor):
            checks = [
                tf.debugging.assert_equal(numbers.indices, ids.indices, message)
            ]
            numbers = numbers.values
        else:
            numbers = tf.convert_to_tensor(numbers)
            if not numbers.shape.is_compatible_with(ids.shape):
                self._refuse_kind(what, numbers, ids)
            checks = [
                tf.debugging.assert_equal(
                    tf.shape(numbers), tf.shape(ids), message
                )
            ]
        # In eager mode they have been made.
        with tf.control_dependencies([c for c in checks if c is not None]):
            return tf.cast(tf.identity(numbers), tf.float32)

    def _prepare_dense(
        self, inputs: Any, weights: Any
    ) -> tuple[tf.Tensor, _Finish]:
        ids = to_id_tensor(inputs, f"layer '{self.name}'")
        self._check_rank(ids.shape.rank)
        if weights is not None:
            if isinstance(weights, (tf.RaggedTensor, tf.SparseTensor)):
                self._refuse_weights(weights, inputs)
            weights = tf.cast(tf.convert_to_tensor(weights), tf.float32)
            if not weights.shape.is_compatible_with(ids.shape):
                self._refuse_weights(weights, ids)

        def finish(embeddings: tf.Tensor) -> tf.Tensor:
            if self.combiner is not None:
                embeddings = pooling.pool_axis(
                    embeddings,
                    self._pooling_weights(ids, weights),
                    self.combiner,
                )
            return tf.cast(embeddings, self.compute_dtype)

        return ids, finish

    def _prepare_ragged(
        self, inputs: tf.RaggedTensor, weights: Any
    ) -> tuple[tf.Tensor, _Finish]:
        ids = to_id_tensor(inputs.flat_values, f"layer '{self.name}'")
        if weights is not None:
            if not isinstance(weights, tf.RaggedTensor):
                self._refuse_weights(weights, inputs)
            weights = tf.cast(weights.flat_values, tf.float32)

        def finish(embeddings: tf.Tensor) -> Any:
            if self.combiner is None:
                embeddings = tf.cast(embeddings, self.compute_dtype)
                return inputs.with_flat_values(embeddings)
            factors = self._pooling_weights(ids, weights)
            if ids.shape.rank > 1:  # The last axis is a uniform one.
                pooled = pooling.pool_axis(embeddings, factors, self.combiner)
                pooled = tf.cast(pooled, self.compute_dtype)
                return inputs.with_flat_values(pooled)
            innermost = inputs
            while innermost.ragged_rank > 1:
                innermost = innermost.values
            pooled = pooling.pool_segments(
                embeddings,
                innermost.value_rowids(),
                innermost.nrows(),
                factors,
                self.combiner,
            )
            pooled = tf.cast(pooled, self.compute_dtype)
            if innermost is inputs:
                pooled.set_shape([inputs.shape[0], self.output_dim])
                return pooled
            return _with_innermost(inputs, pooled)

        return ids, finish

    def _prepare_sparse(
        self, inputs: tf.SparseTensor, weights: Any
    ) -> tuple[tf.Tensor, _Finish]:
        combiner = self.combiner
        if combiner is None:
            self._refuse_sparse()
        ids = to_id_tensor(inputs.values, f"layer '{self.name}'")
        self._check_rank(inputs.shape.rank)
        if weights is not None:
            if not isinstance(weights, tf.SparseTensor):
                self._refuse_weights(weights, inputs)
            weights = tf.cast(weights.values, tf.float32)

        def finish(embeddings: tf.Tensor) -> tf.Tensor:
            outer = inputs.dense_shape[:-1]
            # Row-major place of each value's outer indices.
            strides = tf.math.cumprod(outer, exclusive=True, reverse=True)
            segment_ids = tf.reduce_sum(
                inputs.indices[:, :-1] * strides, axis=1
            )
            pooled = pooling.pool_segments(
                embeddings,
                segment_ids,
                tf.reduce_prod(outer),
                self._pooling_weights(ids, weights),
                combiner,
            )
            dim = tf.constant([self.output_dim], tf.int64)
            pooled = tf.reshape(pooled, tf.concat([outer, dim], axis=0))
            pooled.set_shape(inputs.shape[:-1].concatenate(self.output_dim))
            return tf.cast(pooled, self.compute_dtype)

        return ids, finish

    def _without_padding(self, lookup: TableLookup) -> TableLookup:
        """Leaves out the ids that are 0, whose embeddings are zeros."""
        ids = lookup.ids
        places = tf.where(tf.not_equal(ids, 0))

        def of_places(numbers: Any) -> Any:
            return None if numbers is None else tf.gather_nd(numbers, places)

        def finish(rows: tf.Tensor) -> Any:
            shape = tf.concat(
                [tf.shape(ids, out_type=tf.int64), [self.output_dim]], axis=0
            )
            embeddings = tf.scatter_nd(places, rows, shape)
            embeddings.set_shape(ids.shape.concatenate(self.output_dim))
            return lookup.finish(embeddings)

        return TableLookup(
            of_places(ids),
            of_places(lookup.shows),
            of_places(lookup.clicks),
            finish,
        )

    def _look_up(self, lookup: TableLookup, training: Any) -> tf.Tensor:
        """Returns the float32 embedding of each id."""
        training = is_training(training) if self.trainable else False
        if training is False:
            return self._read(lookup.ids)
        if training is True:
            embeddings, probe = self._train(lookup)
        else:
            embeddings, probe = tf.cond(
                training,
                lambda: self._train(lookup),
                lambda: (self._read(lookup.ids), tf.zeros([])),
            )
        self.add_loss(probe)
        return embeddings

    def _read(self, ids: tf.Tensor) -> tf.Tensor:
        return look_up_many([self.table], [ids])[0]

    def _train(self, lookup: TableLookup) -> tuple[tf.Tensor, tf.Tensor]:
        result = self.table._training_lookup(
            lookup.ids,
            tf.convert_to_tensor(self._anchor),
            shows=lookup.shows,
            clicks=lookup.clicks,
        )
        embeddings, probe = result.embeddings, result.loss_scale_probe
        if self.compute_dtype == "float16":
            (embeddings,), probe = loss_scale.check(
                self.name, [embeddings], probe
            )
        return embeddings, loss_scale.as_loss(probe)

    def _pooling_weights(
        self, ids: tf.Tensor, weights: tf.Tensor | None
    ) -> tf.Tensor | None:
        if not self.mask_zero:
            return weights
        mask = tf.cast(tf.not_equal(ids, 0), tf.float32)
        return mask if weights is None else mask * weights

    def compute_mask(self, inputs: Any, mask: Any = None) -> Any:
        if (
            not self.mask_zero
            or self.combiner is not None
            or isinstance(inputs, (tf.RaggedTensor, tf.SparseTensor))
            or getattr(inputs, "ragged", False)
        ):
            return None
        return _backend.not_equal(inputs, string_ids.padding_of(inputs))

    def compute_output_shape(self, input_shape: Any) -> Any:
        outer = tuple(input_shape)
        if self.combiner is not None:
            self._check_rank(len(outer))
            outer = outer[:-1]
        return (*outer, self.output_dim)

    def compute_output_spec(
        self,
        inputs: Any,
        weights: Any = None,
        training: Any = None,
        shows: Any = None,
        clicks: Any = None,
    ) -> Any:
        """What Keras 3 asks instead of `call` for a model's placeholders."""
        check_id_dtype(tf.as_dtype(inputs.dtype), f"layer '{self.name}'")
        if getattr(inputs, "sparse", False) and self.combiner is None:
            self._refuse_sparse()
        ragged = bool(getattr(inputs, "ragged", False))
        return _backend.spec(
            self.compute_output_shape(inputs.shape),
            dtype=self.compute_dtype,
            ragged=ragged and (self.combiner is None or len(inputs.shape) > 2),
        )

    def count_params(self) -> int:
        """Returns the number of floats in the rows, and 1 for the anchor."""
        if not self.built:
            return super().count_params()
        return self.table.size() * self.output_dim + 1

    def get_config(self) -> dict[str, Any]:
        config = super().get_config()
        optimizer = self._optimizer.to_config()
        rate = optimizer["config"]["learning_rate"]
        if not isinstance(rate, float):
            # Only schedules can be described; of the rest, the value stays.
            optimizer["config"]["learning_rate"] = (
                _backend.serialize(rate)
                if hasattr(rate, "get_config")
                else self.table.learning_rate
            )
        config.update(
            {
                "output_dim": self.output_dim,
                "table": self._table_name,
                "embeddings_initializer": self._initializer.to_config(),
                "optimizer": optimizer,
                "combiner": self.combiner,
                "mask_zero": self.mask_zero,
                "seed": self._seed,
                "consistency": self._consistency.get_config(),
                "admission": self._admission.to_config(),
                "eviction": _config_of(self._eviction),
                "statistics": _config_of(self._statistics),
                "update": self._update,
                "row_type": self._row_type.get_config(),
            }
        )
        return config

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "DynamicEmbedding":
        config = dict(config)
        optimizer = config.get("optimizer")
        if isinstance(optimizer, Mapping):
            arguments = dict(optimizer["config"])
            rate = arguments.get("learning_rate")
            if isinstance(rate, Mapping):
                arguments["learning_rate"] = _backend.deserialize(rate)
            config["optimizer"] = {**optimizer, "config": arguments}
        return super().from_config(config)

    def save_own_variables(self, store: Any) -> None:
        """Stores the anchor, and the rows of a table in this process."""
        super().save_own_variables(store)
        if not self.built or self.table.cluster.is_remote:
            return
        if not _stores_rows(self, self.table, store):
            return
        ids, values, slots = self.table._export_with_slots()
        store["ids"] = ids
        store["values"] = values
        store["slots"] = slots
        store["optimizer"] = _to_bytes(self._optimizer.to_table_config())
        store["statistics"] = _to_bytes(_config_of(self._statistics) or {})

    def load_own_variables(self, store: Any) -> None:
        """Loads what `save_own_variables` stored, replacing all rows."""
        names = set(store.keys())
        if "0" not in names:
            raise ValueError(
                f"layer '{self.name}': there is nothing for it in the file; "
                f"expected '0' (the anchor), got {sorted(names)}"
            )
        self._anchor.assign(np.asarray(store["0"]))
        if "ids" not in names:
            return  # On servers, or with the layer that shares the table.
        state, usage = self._split_slots(
            np.asarray(store["slots"]),
            bytes(np.asarray(store["statistics"]))
            if "statistics" in names
            else b"{}",
        )
        saved = json.loads(bytes(np.asarray(store["optimizer"])))
        width = self.table._native.slot_floats - statistics_lib.width(
            self._statistics
        )
        slots: np.ndarray | None = None
        if state.shape[1] == width and optimizers_lib.have_equal_state(
            saved, self._optimizer.to_table_config()
        ):
            slots = np.concatenate([state, self._fit_usage(usage)], axis=1)
        else:
            warnings.warn(
                f"layer '{self.name}': the rows were saved with the optimizer "
                f"{saved}, whose state is not that of the layer's; it starts "
                "anew.",
                stacklevel=2,
            )
        self.table._replace_rows(
            np.asarray(store["ids"]), np.asarray(store["values"]), slots
        )

    def _split_slots(
        self, slots: np.ndarray, statistics: bytes
    ) -> tuple[np.ndarray, np.ndarray]:
        """The optimizer's part of saved slots, and the statistics'."""
        config = json.loads(statistics)
        saved = statistics_lib.get(config) if config else None
        place = slots.shape[1] - statistics_lib.width(saved)
        return slots[:, :place], slots[:, place:]

    def _fit_usage(self, usage: np.ndarray) -> np.ndarray:
        """Saved statistics as those of this layer's table."""
        width = statistics_lib.width(self._statistics)
        fitted = np.zeros((len(usage), width), np.float32)
        common = min(width, usage.shape[1])
        fitted[:, :common] = usage[:, :common]
        if width and not common:
            # Rows that do not say it count as seen now.
            day = self.table.cluster.day
            fitted[:, 1] = time.time() / 86400 if day is None else day
        return fitted

    def _check_rank(self, rank: int | None) -> None:
        if self.combiner is not None and rank == 0:
            raise ValueError(
                f"layer '{self.name}': combiner {self.combiner!r} pools the "
                "last axis of the ids, got a scalar id"
            )

    def _refuse_sparse(self) -> NoReturn:
        raise ValueError(
            f"layer '{self.name}': sparse ids need a combiner. Pass "
            'combiner="sum", "mean" or "sqrtn" to the layer.'
        )

    def _refuse_weights(self, weights: Any, ids: Any) -> NoReturn:
        self._refuse_kind("weights", weights, ids)

    def _refuse_kind(self, what: str, numbers: Any, ids: Any) -> NoReturn:
        raise ValueError(
            f"layer '{self.name}': `{what}` must be of the kind and shape of "
            f"the ids, a {type(ids).__name__} of shape {ids.shape}, got a "
            f"{type(numbers).__name__} of shape {numbers.shape}"
        )


def _with_innermost(ragged: tf.RaggedTensor, values: Any) -> tf.RaggedTensor:
    """Puts `values` in place of the innermost rows of ragged ids."""
    if ragged.ragged_rank == 1:
        return values
    return ragged.with_values(_with_innermost(ragged.values, values))


# Which layer stored the rows of a table, and in which file.
_stored_by: weakref.WeakKeyDictionary[
    EmbeddingTable, tuple[Any, weakref.ref[Any]]
] = weakref.WeakKeyDictionary()


def _stores_rows(layer: Any, table: EmbeddingTable, store: Any) -> bool:
    """Whether `layer` is the one of its table's layers that stores the rows."""
    file = _file_of(store)
    if file is None:
        return True
    last_file, last_layer = _stored_by.get(table, (None, None))
    if last_file == file and last_layer is not None:
        return last_layer() is layer
    _stored_by[table] = (file, weakref.ref(layer))
    return True


def _file_of(store: Any) -> Any:
    """What equals itself for stores of one file under way, or None."""
    if _backend.IS_LEGACY:
        return getattr(store, "file", None)  # An open HDF5 file.
    try:
        return weakref.ref(store)
    except TypeError:  # A dict, for one; nothing is known of others.
        return None


def _config_of(policy: Any) -> dict[str, Any] | None:
    return None if policy is None else policy.to_config()


def _to_bytes(config: Mapping[str, Any]) -> np.ndarray:
    text = json.dumps(config, sort_keys=True)
    return np.frombuffer(text.encode(), np.uint8)
