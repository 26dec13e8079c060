"""The embedding layer without a fixed vocabulary."""

import dataclasses
import re
import threading
import weakref
from collections.abc import (
    Callable,
    Iterable,
    Mapping,
    MutableMapping,
    Sequence,
)
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.eager import record, tape

from tfswitch import _native
from tfswitch import optimizers as optimizers_lib
from tfswitch._settings._ranges import bad_argument
from tfswitch._settings._table_spec import DEFAULTS, TableSpec
from tfswitch._types import (
    Config,
    IdsLike,
    KerasFunction,
    Placeholder,
    Shape,
    TensorLike,
)
from tfswitch._warn_once import warn_once
from tfswitch.admission import Admission
from tfswitch.cluster import Cluster, default_cluster
from tfswitch.consistency import ConsistencyLike
from tfswitch.eviction import Eviction
from tfswitch.initializers import InitializerLike
from tfswitch.keras import (
    _backend,
    _model_optimizer,
    _optimizer_hooks,
    _row_weights,
    _saved_rows,
    _tracked_rows,
    _weights,
    batch_size,
)
from tfswitch.keras.layers import _embedding_arguments, id_inputs
from tfswitch.statistics import Statistics
from tfswitch.storage import TieredStorage
from tfswitch.storage_dtype import StorageDtypeLike
from tfswitch.table import (
    EmbeddingTable,
    TablePush,
    default_seed,
    look_up_many,
)

_optimizer_hooks.install()
_weights.refuse_hdf5()


class _Count(int):
    """A count of weights that prints together with the row count of tables."""

    note: str

    @classmethod
    def of(cls, count: int, tables: Iterable[EmbeddingTable]) -> "_Count":
        result = cls(count)
        rows = num_bytes = 0
        for table in tables:
            stats = table.stats()
            rows += stats["num_rows"]
            num_bytes += stats["row_bytes"] + stats["index_bytes"]
        result.note = f" (and {rows:,} rows, {num_bytes / 2**20:,.1f} MiB)"
        return result

    def __format__(self, spec: str) -> str:
        return int.__format__(self, spec) + self.note

    def __str__(self) -> str:
        return int.__repr__(self) + self.note


def _check_choices(combiner: Any, table: Any, update: Any) -> None:
    if combiner is not None and combiner not in id_inputs.COMBINERS:
        raise bad_argument(
            "combiner", combiner, 'None, "sum", "mean" or "sqrtn"'
        )
    if not isinstance(table, (EmbeddingTable, str, type(None))):
        raise bad_argument(
            "table", table, "an EmbeddingTable or the name of one"
        )
    if update not in ("auto", "sparse", "dense"):
        raise bad_argument("update", update, '"auto", "sparse" or "dense"')


# Names that Keras gives to unnamed layers, and names of features of an unnamed
# DynamicEmbeddings.
_AUTOMATIC_NAME = re.compile(r"dynamic_embedding(s(_\d+)?_.*|(_\d+)?$)")


def is_training(training: bool | tf.Tensor) -> bool | tf.Tensor:
    """`training` as a bool, or as a tensor if it is not known yet."""
    if not tf.is_tensor(training):
        return bool(training)
    known = tf.get_static_value(training)
    return tf.cast(training, tf.bool) if known is None else bool(known)


def train_or_read(layer: Any, training: bool | tf.Tensor, batches: Any) -> Any:
    """Returns embeddings of the batches; `training` is True or a tensor."""
    if training is True:
        return layer._train(batches)
    return tf.cond(
        training, lambda: layer._train(batches), lambda: layer._read(batches)
    )


@_backend.register_keras_serializable(package="tfswitch")
class DynamicEmbedding(_backend.Layer):
    """Maps integer ids to dense vectors without a fixed vocabulary.

    Works like `keras.layers.Embedding`, but there is no `input_dim`: an id gets
    a row the first time it is seen in training. Outside training, and in a
    frozen layer, an unknown id reads as zeros and no row is made, so that
    evaluation never grows the table.

    The layer has one trainable weight. Its shape is `[0, output_dim]`, and it
    represents all rows. Its gradient is a `tf.IndexedSlices` with the ids and
    one row of values per id. A program may clip, scale, add up or drop this
    gradient. When an optimizer applies the gradient, the rows take their step
    where they are kept:

    *   with `optimizer="auto"` rows learn with the kind, settings and present
        learning rate of the optimizer that applies the gradient. If the layer
        has its own optimizer, its rule and rate are used; loss scaling,
        clipping and accumulation are still done by the optimizer that applies
        the gradient. `use_ema` is refused;
    *   layers that share a table, calls of one layer, and replicas under
        `tf.distribute` take one step together, with the sum of their gradients;
    *   a training call inside `tf.while_loop`, `tf.map_fn` or
        `tf.recompute_grad` raises an error when its gradient is taken outside,
        because rows have no dense gradient. Call the layer before the loop, or
        before `recompute_grad`.

    A loop without a Keras optimizer calls `apply_gradients` of the layer.

    `model.save` and `model.save_weights` store the rows of a table in this
    process, with optimizer state. If layers share a table, one of them stores
    the rows. Loading replaces all rows of the table. Rows on servers are not
    stored: use `Cluster.save`. The old HDF5 format (`.h5`) is refused, because
    it contains only `layer.weights`, and so no rows: use `.keras` or
    `.weights.h5`.

    XLA cannot compile the layer. With `jit_compile="auto"` Keras does not try.
    With `jit_compile=True` Keras 3 warns and runs without XLA.

    Example:

    >>> layer = tsw.keras.DynamicEmbedding(8)
    >>> layer(tf.constant([[3, 5], [3, 0]]), training=True).shape
    TensorShape([2, 2, 8])
    >>> layer.table.size()
    3

    Args:
        output_dim: Length of each embedding, 1 to 4096.
        input_dim: Accepted so that the arguments of an `Embedding` need no
            change: `DynamicEmbedding(10_000, 16)`. `input_dim` does not limit
            the ids. Initializers that depend on the number of ids, such as
            "he_normal", use it.
        table: An `EmbeddingTable`, or the name of a table of `cluster`. Layers
            may share a table. By default the layer has its own table. In this
            process the table is freed with the layer. On servers the table has
            the layer's name, so that all workers share it.
        name: Name of the layer.
        embeddings_initializer: First value of a row: a name such as "uniform",
            the default, an object of `tfswitch.initializers`, or a Keras
            initializer.
        embeddings_regularizer: None or a `keras.regularizers.L2`. The
            regularizer becomes the option `l2` of the rows' optimizer, with
            twice its factor. So it changes only the rows of the batch, and is
            no part of the loss.
        embeddings_constraint: None or one of `keras.constraints`: `NonNeg`, or
            with `axis=1` `UnitNorm`, `MaxNorm` or `MinMaxNorm` of rate 1. The
            constraint becomes one or two of the options `min_weight`,
            `min_norm` and `max_norm` of the rows' optimizer, and changes only
            the rows of the batch.
        optimizer: How rows learn: "auto", a name, an object of
            `tfswitch.optimizers`, or a Keras optimizer, whose learning rate is
            shared. "auto" or None means the optimizer that applies the layer's
            gradient. If a loop calls `apply_gradients` of the layer instead,
            "auto" means `tfswitch.optimizers.Adam()`.
        combiner: None, "sum", "mean" or "sqrtn": whether and how to pool the
            last axis of the ids. Needed for sparse ids.
        mask_zero: Whether id 0 is padding. If true, id 0 reads as zeros, gets
            no row and takes no part in pooling. Without a combiner, later
            layers get a mask that marks it.
        admission: When an id gets a row: an object of `tfswitch.admission`.
            None means when it is first seen in training.
        eviction: The rows that `table.shrink` evicts: an object of
            `tfswitch.eviction`.
        statistics: The statistics of each row: an object of
            `tfswitch.statistics`. None means the statistics that the policies
            need.
        when_full: The treatment of a new id when the table is full: "refuse",
            "evict" or "disk", as for `tfswitch.EmbeddingTable`.
        storage: A `tfswitch.TieredStorage`, as for `tfswitch.EmbeddingTable`.
            It is not stored with the model, but `when_full="disk"` is.
        update: Which rows a step moves. "sparse" moves the rows of the batch,
            "dense" all rows, as with `keras.layers.Embedding`. With
            `optimizer="auto"`, "auto" moves the rows that the Keras optimizer
            would move, if tables can do this. In all other cases "auto" means
            "sparse", with a warning if the optimizer of the model would move
            other rows.
        storage_dtype: How rows are kept in memory: a `tfswitch.StorageDtype`,
            or "float16" or "bfloat16" for embeddings of that dtype with a
            float32 optimizer state. None means float32. The layer computes in
            `dtype`, as all layers do.
        seed: The seed and the id determine the first value of each row. None
            means a seed made from the table's name (without `table`, the
            layer's) and from the seed of `keras.utils.set_random_seed`, if one
            was set.
        capacity: The expected number of rows. Memory for them is prepared when
            the table is made. None means that the table grows step by step.
        push_depth: How many pushes may be in flight while the program does its
            next work, 0 to 64. With 0, a step ends when its push has been
            applied. Otherwise the next step can begin earlier; its lookups wait
            for the push, so the rows learn the same (docs/faster.md). None
            means the `push_depth` of the cluster. If
            layers learn in one step, the smallest value counts for all of them.
        wire_dtype: The type in which this process exchanges rows and gradients
            with servers: "float32", or "float16" or "bfloat16" for about half
            the bytes. Servers keep and step the rows as before. Rows are
            rounded to nearest, gradients at random, so that their expected
            value is exact. In float16 values beyond 65,504 become 65,504
            (docs/faster.md). Without effect on tables of this process.
        consistency: When the gradients of several workers are applied: a
            `tfswitch.train.Consistency`, "asp" or "bsp". None means `asp`.
        cluster: The cluster in which the layer makes its table. By default that
            of `tfswitch.connect` at the time when the table is first needed.
            The config does not contain the cluster: a loaded layer uses the
            default.
        weights: A matrix, or a list with one matrix. Row i of the matrix
            becomes the row of id i, unless this id has a row already. A
            `keras.initializers.Constant` of a matrix as
            `embeddings_initializer` does the same.
        initializer: Another name for `embeddings_initializer`, as in
            `EmbeddingTable`; give one of the two.
        **kwargs: Passed to `keras.layers.Layer`.

    Call arguments:
        inputs: Integers of any rank, `(batch_size, ...)`: a dense tensor, a
            `tf.RaggedTensor`, or a `tf.SparseTensor` (with a combiner). Strings
            are hashed by `tfswitch.ids.hash_strings`; with `mask_zero` the
            empty string is padding. Floats are accepted, because a
            `keras.Input` without `dtype` turns ids into floats. These floats
            must be exact integers: in float32, below 2**24.
        weights: Factor of each id, of the shape and kind of `inputs`. Only
            with a combiner. "mean" divides by the sum of the weights, "sqrtn"
            by the root of the sum of their squares.
        training: Whether to create rows, and to give the layer's weight a
            gradient. None means yes inside a `tf.GradientTape` that watches the
            weight.
        shows: How often each id was shown: numbers of the shape and kind of
            `inputs`. By default once. Shows and clicks are counted when the
            gradient of the call is applied, so only a training call uses them.
        clicks: How often each id was clicked: numbers of the shape and kind of
            `inputs`. By default never. If each example has one label, of shape
            `(batch_size, 1)`, pass `labels * tf.ones_like(ids)` of the labels'
            dtype.

    Output shape:
        Input shape plus a last axis of `output_dim`. With a combiner that axis
        replaces the last axis of the ids, and an example without ids gives
        zeros.

    Raises:
        ValueError: If an argument is out of range; if ids are neither integers
            nor strings; on the first call, if the table exists with other
            settings.
        tf.errors.UnavailableError, tf.errors.DeadlineExceededError: If a server
            does not answer a call of the layer.
    """

    built: bool
    _table: EmbeddingTable | None = None
    # Set by from_config. `_found_rows` counts rows that the table of a loaded
    # layer has before its file is read.
    _is_loaded = False
    _found_rows = 0
    _has_warned = False
    # Set by a DynamicEmbeddings, whose features share one table object.
    _share: Callable[[], Any] = staticmethod(lambda: None)

    def __init__(
        self,
        *dims: int,
        output_dim: int | None = None,
        input_dim: int | None = None,
        table: EmbeddingTable | str | None = None,
        name: str | None = None,
        embeddings_initializer: InitializerLike | None = None,
        embeddings_regularizer: KerasFunction | Config | str | None = None,
        embeddings_constraint: KerasFunction | Config | str | None = None,
        optimizer: optimizers_lib.OptimizerLike | None = "auto",
        combiner: str | None = None,
        mask_zero: bool = False,
        admission: Admission | Config | None = None,
        eviction: Eviction | Config | None = None,
        statistics: Statistics | Config | None = None,
        when_full: str | None = None,
        storage: TieredStorage | None = None,
        update: str = "auto",
        storage_dtype: StorageDtypeLike | None = None,
        seed: int | None = None,
        capacity: int | None = None,
        push_depth: int | None = None,
        wire_dtype: str = "float32",
        consistency: ConsistencyLike | None = None,
        cluster: Cluster | None = None,
        weights: TensorLike | Sequence[TensorLike] | None = None,
        initializer: InitializerLike | None = None,
        **kwargs: Any,
    ) -> None:
        _backend.check_backend()
        output_dim, input_dim = _embedding_arguments.dims(
            dims, output_dim, input_dim
        )
        _embedding_arguments.drop_unused(kwargs)
        matrix = _embedding_arguments.Matrix(
            _embedding_arguments.one_of(embeddings_initializer, initializer),
            embeddings_regularizer,
            embeddings_constraint,
            weights,
        )
        _check_choices(combiner, table, update)
        # Float ids are an error of `call` that names their dtype, so Keras must
        # not cast them before.
        kwargs.setdefault("autocast", False)
        super().__init__(name=name, **kwargs)
        self.output_dim = int(output_dim)
        self.input_dim = input_dim
        self.combiner = combiner
        self.mask_zero = self.supports_masking = bool(mask_zero)
        self.supports_jit = False
        self._table_lock = threading.Lock()
        self._cluster = cluster
        self._choose_table(
            table,
            matrix,
            optimizer=optimizer,
            seed=seed,
            capacity=capacity,
            push_depth=push_depth,
            wire_dtype=wire_dtype,
            consistency=consistency,
            admission=admission,
            eviction=eviction,
            statistics=statistics,
            when_full=when_full,
            storage=storage,
            update=update,
            storage_dtype=storage_dtype,
        )

    def _choose_table(
        self,
        table: EmbeddingTable | str | None,
        matrix: _embedding_arguments.Matrix,
        **settings: Any,
    ) -> None:
        """Takes the table, or describes the table that is made later."""
        initializer, rows, self._options = matrix.translate(
            self.input_dim, self.output_dim
        )
        self._regularizer = matrix.embeddings_regularizer
        self._constraint = matrix.embeddings_constraint
        first = int(self.mask_zero)
        # The first rows of the table, set when the table is made.
        self._first_rows = _weights.Rows(
            np.arange(first, max(len(rows), first)), rows[first:]
        )
        # An initializer with a matrix, stored in the config.
        self._constant = (
            matrix.embeddings_initializer
            if matrix.weights is None and len(rows)
            else None
        )
        self._update = settings["update"]
        if self._update == "auto":
            settings["update"] = "sparse"
        self._is_auto = settings["optimizer"] in (None, "auto")
        if self._is_auto:
            # Open until the table is needed.
            settings["optimizer"] = None
        if isinstance(table, EmbeddingTable):
            own = {**matrix._asdict(), **settings, "cluster": self._cluster}
            self._adopt(table, own)
            return
        self._table_name = table
        if not self._is_auto:
            settings["optimizer"] = _embedding_arguments.with_options(
                optimizers_lib.get(settings["optimizer"]), self._options
            )
        self._spec = TableSpec(
            initializer=initializer, is_open=self._is_auto, **settings
        )

    def _adopt(self, table: EmbeddingTable, arguments: dict[str, Any]) -> None:
        """Uses a given table; `arguments` must not have settings of a table."""
        if table.dim != self.output_dim:
            raise ValueError(
                "`output_dim` must be the table's dim. Received: "
                f"output_dim={self.output_dim}, but table '{table.name}' has "
                f"dim {table.dim}"
            )
        if arguments["embeddings_initializer"] == "uniform":
            del arguments["embeddings_initializer"]
        for argument, value in arguments.items():
            default = DEFAULTS.get(argument)
            if value is not default and (default is None or value != default):
                raise ValueError(
                    f"`{argument}` belongs to table '{table.name}' that was "
                    f"passed as `table`; set it there. Received: {argument}="
                    f"{value!r}"
                )
        self._table = table
        self._is_auto = False
        self._table_name = table.name
        self._spec = table._spec

    @property
    def table(self) -> EmbeddingTable:
        """The layer's table; made when it is first needed."""
        # In a forked child the lock may belong to a thread of the parent.
        _native.check_process()
        if self._table is None and (share := self._share()) is not None:
            share()
        with self._table_lock:
            if self._table is None:
                self._table = self._make_table()
            return self._table

    def _track_trackable(
        self, trackable: Any, name: str, overwrite: bool = False
    ) -> Any:
        if name == "_table":  # TrackedRows tracks it.
            return trackable
        return super()._track_trackable(trackable, name, overwrite)

    def __dir__(self) -> list[str]:
        """The attributes without `table`.

        Keras reads each listed attribute when it saves or loads a layer.
        Reading `table` would make the table before the optimizer is known.
        """
        return [name for name in super().__dir__() if name != "table"]

    def _make_table(self) -> EmbeddingTable:
        cluster = self._cluster or default_cluster()
        name = self.name if self._table_name is None else self._table_name
        self._check_name(cluster)
        if self._spec.optimizer is None:
            # The default optimizer is used until a model's optimizer or the
            # first push replaces it.
            self._set(**self._settings_by(optimizers_lib.get(None)))
        if self._table_name is None and not cluster.is_remote:
            if self._spec.seed is None:
                self._set(seed=default_seed(name))
            table = EmbeddingTable._create_private(
                name, self.output_dim, self._spec, cluster
            )
        else:
            table = EmbeddingTable._of(
                name, self.output_dim, self._spec, cluster
            )
            self._set(seed=table.seed)
            if self._is_loaded and not cluster.is_remote:
                self._found_rows = table.size()
        if len(self._first_rows.ids):
            # Sets only ids without a row. All other rows already began with
            # these values, and training has changed them since.
            table._native.assign_missing(*self._first_rows)
            self._first_rows = _weights.no_rows(self.output_dim)
        return table

    def _set_rows(self, rows: _weights.Rows) -> None:
        """Sets all rows of the table, at the latest when the table is made."""
        is_remote = (self._cluster or default_cluster()).is_remote
        if self._table is None and not (is_remote and len(rows.ids)):
            self._first_rows = rows
        # A table on servers is set at once, because another worker may have
        # made it with other rows.
        else:
            self.table._set_rows(*rows)

    def _check_name(self, cluster: Cluster) -> None:
        """Refuses a table on servers that would have an automatic name."""
        if (
            self._table_name is None
            and cluster.is_remote
            and _AUTOMATIC_NAME.match(self.name)
        ):
            raise ValueError(
                f"layer '{self.name}' has no name of its own, and a table on "
                "servers is named after its layer: other programs' unnamed "
                "layers would share its rows. Pass `name` or `table` to the "
                "layer."
            )

    def _use_optimizer_of(self, config: Mapping[str, Any]) -> None:
        """Adopts the optimizer of saved rows if none is known yet."""
        if self._spec.optimizer is None:
            saved = self._spec.with_optimizer(config)
            self._set(optimizer=saved.optimizer)
            if self._update == "auto":
                self._set(update=saved.update)

    def _set(self, **settings: Any) -> None:
        self._spec = dataclasses.replace(self._spec, **settings)

    def _has_rows_on_servers(self) -> bool:
        cluster = self._cluster or default_cluster()
        if not cluster.is_remote:
            return False
        present = _present(cluster, self._table_name or self.name)
        return present is not None and int(present["num_rows"]) > 0

    def _settings_of(self, optimizer: Any) -> dict[str, Any]:
        """Returns settings by which rows learn as the optimizer's variables."""
        rule = _model_optimizer.rule_of(self, optimizer)
        return {**self._settings_by(rule), "is_open": False}

    def _settings_by(self, rule: optimizers_lib.Optimizer) -> dict[str, Any]:
        rule = _embedding_arguments.with_options(rule, self._options)
        return {
            "optimizer": rule,
            "update": _model_optimizer.update_of(self, rule),
        }

    def _step_of(self, optimizer: Any, learning_rate: Any) -> TablePush:
        """Returns the settings of a push, without ids and gradients.

        With "auto" and an `optimizer` the rows learn as `optimizer` from now
        on.
        """
        if not self._is_auto or optimizer is None:
            return self.table._step_of(None, None)
        if self._table is None:
            self._set(**self._settings_of(optimizer))
        table = self.table
        number = table._learn_as(
            optimizer, lambda: self._settings_of(optimizer)
        )
        self._spec = table._spec
        return table._step_of(None, None)._replace(
            learning_rate=learning_rate, rule=number
        )

    def apply_gradients(
        self, gradient: tf.IndexedSlices | Sequence[tf.IndexedSlices]
    ) -> tf.Tensor:
        """Takes a step of the rows, for loops without a Keras optimizer.

        The layer's own optimizer and learning rate are used. With "auto" the
        optimizer that was applied last is used, or Adam if there was none.

        Args:
            gradient: The gradient of the layer's weight, a `tf.IndexedSlices`;
                or a list with it, as `tape.gradient(loss,
                layer.trainable_variables)` returns.

        Returns:
            int64 scalar tensor: the number of rows that took a step.

        Raises:
            ValueError: If `gradient` is not the gradient of the weight.

        Example:

        >>> with tf.GradientTape() as tape:
        ...     loss = tf.reduce_sum(layer(ids, training=True))
        >>> layer.apply_gradients(tape.gradient(loss, layer.weights))
        """
        if isinstance(gradient, (list, tuple)):
            if not self.trainable and not gradient:
                return tf.zeros([], tf.int64)
            (gradient,) = gradient
        if gradient is None:
            raise ValueError(
                f"layer '{self.name}': there is no gradient. The loss must "
                "depend on a call of the layer with `training=True` in the "
                "tape."
            )
        return _row_weights.push(
            [_row_weights.row_gradient(self._rows_weight, gradient)]
        )[0]

    def build(self, input_shape: Shape | None = None) -> None:
        if self.built:
            return
        # Makes the table, or checks its name, now: errors must come before the
        # first step.
        if self._is_auto:
            self._check_name(self._cluster or default_cluster())
        else:
            _ = self.table
        self._tracked_rows = _tracked_rows.TrackedRows(self)
        self._rows_weight = _row_weights.add(self)
        _weights.attach(self._rows_weight, self)
        self.built = True

    def call(
        self,
        inputs: IdsLike,
        weights: IdsLike | None = None,
        training: bool | tf.Tensor | None = None,
        shows: IdsLike | None = None,
        clicks: IdsLike | None = None,
    ) -> Any:
        batch_size.record(inputs, training if self.trainable else False)
        batch = id_inputs.to_batch(self, inputs, weights, shows, clicks)
        return batch.finish(self._look_up(batch, training))

    def _look_up(self, batch: id_inputs.IdBatch, training: Any) -> tf.Tensor:
        """Returns the float32 row of each id."""
        if _backend.is_building():
            # Keras asks only for shapes, maybe before the model is compiled.
            return tf.zeros([tf.size(batch.ids), self.output_dim])
        training = self._is_training(training)
        if training is False:
            self._check_reader()
            return self._read(batch)
        return train_or_read(self, training, batch)

    def _is_training(self, training: Any) -> bool | tf.Tensor:
        """Whether to train, as a tensor if it is not known yet.

        If `training` is None, the layer trains inside a tape that watches its
        weight, as an `Embedding` does.
        """
        if not self.trainable:
            return False
        if training is not None:
            return is_training(training)
        # tf.recompute_grad calls the layer first without a tape, and then
        # takes the gradients of the variables that the first call accessed.
        tape.variable_accessed(_backend.tf_variable(self._rows_weight))
        return self._is_recorded()

    def _is_recorded(self) -> bool:
        # Only a call inside a tape reads the weight, because exported models
        # must not contain the weight.
        return record.could_possibly_record() and record.should_record_backprop(
            [tf.convert_to_tensor(self._rows_weight)]
        )

    def _check_reader(self) -> None:
        """Refuses Keras's export; warns if a tape gives rows no gradient."""
        if not tf.executing_eagerly() and _model_optimizer.is_exporting():
            _tracked_rows.refuse_export(self)
        if self._has_warned or not self.trainable:
            return
        if self._is_recorded():
            self._has_warned = True
            warn_once(
                weakref.ref(_model_optimizer.outermost_layer(self)),
                "training=False",
                f"layer '{self.name}' was called in a GradientTape with "
                "`training=False`, so that its rows do not learn. Call the "
                "model with `training=True` in a training step.",
                stacklevel=2,
            )

    def _read(self, batch: id_inputs.IdBatch) -> tf.Tensor:
        return look_up_many([self.table], [batch.ids])[0]

    def _train(self, batch: id_inputs.IdBatch) -> tf.Tensor:
        return _row_weights.look_up([(self, batch)])[0]

    def compute_mask(
        self, inputs: IdsLike, mask: tf.Tensor | None = None
    ) -> Any:
        if (
            not self.mask_zero
            or self.combiner is not None
            or isinstance(inputs, (tf.RaggedTensor, tf.SparseTensor))
            or getattr(inputs, "ragged", False)
        ):
            return None
        return _backend.not_equal(inputs, id_inputs.padding_of(inputs))

    def compute_output_shape(self, input_shape: Shape) -> Any:
        outer = tuple(input_shape)
        if self.combiner is not None:
            owner = f"layer '{self.name}'"
            id_inputs.check_rank(len(outer), self.combiner, owner)
            outer = outer[:-1]
        return (*outer, self.output_dim)

    def compute_output_spec(
        self,
        inputs: Placeholder,
        weights: Placeholder | None = None,
        training: bool | tf.Tensor | None = None,
        shows: Placeholder | None = None,
        clicks: Placeholder | None = None,
    ) -> Any:
        """Replaces `call` for the placeholders of a Keras 3 model."""
        owner = f"layer '{self.name}'"
        id_inputs.check_dtype(inputs.dtype, owner)
        if getattr(inputs, "sparse", False):
            id_inputs.check_sparse(self.combiner, owner)
        ragged = bool(getattr(inputs, "ragged", False))
        return _backend.spec(
            self.compute_output_shape(inputs.shape),
            dtype=self.compute_dtype,
            ragged=ragged and (self.combiner is None or len(inputs.shape) > 2),
        )

    def count_params(self) -> int:
        """Returns the number of weights that Keras sees, which is 0.

        The number prints with the row count of the table, so that
        `model.summary` shows it. Rows do not count as parameters: their number
        changes, and totals would not agree with the weights of the model.
        """
        weights = super().count_params()
        if self._table is None:
            return weights
        return _Count.of(weights, [self._table])

    @property
    def embeddings(self) -> Any:
        """Raises an error: the layer has no variable with all rows.

        Raises:
            AttributeError: Always. The message names the alternatives.
        """
        raise AttributeError(
            f"layer '{self.name}' has no variable `embeddings`: its rows are "
            "in a table. `layer.table.lookup(ids)` reads some, and "
            "`layer.table.export_rows()` all."
        )

    def get_config(self) -> dict[str, Any]:
        return {
            **super().get_config(),
            "input_dim": self.input_dim,
            "output_dim": self.output_dim,
            "table": self._table_name,
            "embeddings_initializer": self._spec.initializer.to_config()
            if self._constant is None
            else _serialize(self._constant),
            "embeddings_regularizer": _serialize(self._regularizer),
            "embeddings_constraint": _serialize(self._constraint),
            "optimizer": self._optimizer_config(),
            "combiner": self.combiner,
            "mask_zero": self.mask_zero,
            **self._spec.get_config(),
            "update": self._update,
        }

    def _optimizer_config(self) -> Any:
        if self._is_auto:
            return "auto"
        # Omits the options that were set by other arguments of the layer.
        optimizer = dataclasses.replace(
            self._spec.optimizer,
            **{
                field.name: field.default
                for field in dataclasses.fields(self._spec.optimizer)
                if field.name in self._options
            },
        )
        return _backend.optimizer_config(
            optimizer, lambda: self.table.learning_rate
        )

    @classmethod
    def from_config(cls, config: Config) -> "DynamicEmbedding":
        config = dict(config)
        for name in ("embeddings_regularizer", "embeddings_constraint"):
            if isinstance(config.get(name), Mapping):
                config[name] = _backend.deserialize(config[name])
        if isinstance(config.get("optimizer"), Mapping):
            config["optimizer"] = _backend.load_rate(config["optimizer"])
        layer = super().from_config(config)
        layer._is_loaded = True
        return layer

    def save_own_variables(
        self, store: MutableMapping[str, np.ndarray]
    ) -> None:
        """Stores the rows of a table in this process."""
        _saved_rows.save(self, store)

    def load_own_variables(self, store: Mapping[str, np.ndarray]) -> None:
        """Replaces all rows by those that `save_own_variables` stored."""
        _saved_rows.load(self, store)


_weights.warn_of_projector(DynamicEmbedding)


def _serialize(given: Any) -> Any:
    if given is None or isinstance(given, str):
        return given
    return _backend.serialize(given)


def _present(cluster: Cluster, name: str) -> dict[str, Any] | None:
    """Returns the cluster's record of a table; None without such a table."""
    try:
        return cluster._list(name)[0]
    except KeyError:
        return None
