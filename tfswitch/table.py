"""A table of embeddings: int64 ids to rows that learn."""

import atexit
import contextlib
import dataclasses
import hashlib
import itertools
import json
import os
import re
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfswitch import _native
from tfswitch import admission as admission_lib
from tfswitch import consistency as consistency_lib
from tfswitch import eviction as eviction_lib
from tfswitch import initializers as initializers_lib
from tfswitch import optimizers as optimizers_lib
from tfswitch import statistics as statistics_lib
from tfswitch import storage_dtype as storage_dtype_lib
from tfswitch._connection._control_calls import call
from tfswitch._connection._reports import ShrinkReport, TableStats
from tfswitch._settings._learning_rate import LearningRate
from tfswitch._settings._ranges import (
    NON_NEGATIVE_INT,
    POSITIVE_INT,
    bad_argument,
    is_number,
)
from tfswitch._settings._table_spec import TableSpec
from tfswitch._table_summary import describe
from tfswitch._tracked_table import TrackedTable
from tfswitch._types import Config, TensorLike
from tfswitch.cluster import Cluster, default_cluster, num_restores
from tfswitch.ops import TablePush, embedding_ops, serving_ops
from tfswitch.ops.id_tensors import to_array, to_id_array, to_id_tensor
from tfswitch.ops.resources import (
    HOST,
    HostVariable,
    destroy_with,
    has_remote_workers,
    in_plain_graph,
)
from tfswitch.optimizers._conversion import have_equal_state
from tfswitch.storage import TieredStorage

MAX_DIM = 4096

# A thread holds this lock from its search for a free name until it has made a
# table of this name.
_names_lock = threading.RLock()

# Numbers the resources of tables in this process, so that their names differ.
_resource_ids = itertools.count()


class EmbeddingTable(TrackedTable):
    """Maps int64 ids to rows of floats; any int64 is an ordinary id.

    A row is made when an id is first seen by `lookup_or_create`, `push`,
    `assign` or a training step. Its first value depends only on `seed` and the
    id. The optimizer runs in the process that keeps the row, once per id and
    push. With `admission`, only a push makes a row, and only for an id that
    satisfies the policy. With `eviction`, the method `shrink` removes rows
    again.

    A cluster has only one table of a name: a second object with the same name
    and arguments uses the existing table. Thread-safe.

    Args:
        name: 1 to 220 bytes. Each byte that is no letter, digit, `-`, `_` or
            `.` counts as three, because files are named after the table.
        dim: Length of a row, 1 to 4096.
        dtype: The dtype of lookups and gradients: "float32", the only one.
        initializer: First value of a row: a name such as "uniform", an object
            of `tfswitch.initializers`, or the Keras initializer of that kind.
        optimizer: A name such as "adagrad" or "adam", an object of
            `tfswitch.optimizers`, or the Keras optimizer of that kind. None
            means `tfswitch.optimizers.Adam()`, whose learning rate is 0.001.
        admission: When an id gets a row: an object of `tfswitch.admission`.
            None means at its first training lookup.
        eviction: The rows that `shrink` evicts: an object of
            `tfswitch.eviction`.
        statistics: The statistics of each row: an object of
            `tfswitch.statistics`. None means the statistics that `admission`
            and `eviction` need.
        update: Which rows a push moves. "sparse" moves the rows of the pushed
            ids. "dense" moves all rows, as the optimizer of a dense variable
            does: a row makes up for missed steps when it is next read, pushed
            to or saved.
        when_full: The treatment of a new id when the table has `max_rows` rows
            (`tfswitch.eviction.MaxRows`), or the memory of all tables has
            reached `max_memory`. With "refuse" it gets no row: it reads as an
            id without a row, and does not learn. With "evict" the least used
            rows of the table are evicted for it (docs/memory.md). With "disk"
            they move to the folder `cold_dir` of the process or of the servers
            (docs/cold_rows.md); not with `max_rows`. None means "evict" for a
            table with `max_rows`, else "refuse".
        storage: A `tfswitch.TieredStorage`, which bounds the memory of this
            process and means `when_full="disk"`. None changes nothing.
        storage_dtype: How rows are kept in memory: a `tfswitch.StorageDtype`,
            or "float16" or "bfloat16" for embeddings of that dtype with a
            float32 optimizer state. None means float32.
        seed: The seed and the id determine the first value of each row. None
            means a seed made from the name and from the seed of
            `keras.utils.set_random_seed` or `tf.random.set_seed`, if one was
            set. So tables with different names have different first values.
        capacity: The expected number of rows. Memory for them is prepared when
            the table is made, so that training need not wait for memory while
            the table grows. A table that exists already does not change. None
            means that the table grows step by step.
        push_depth: How many pushes may be in flight while the program does its
            next work, 0 to 64. With 0, a step ends when its push has been
            applied. Otherwise the next step can begin earlier; its lookups wait
            for the push, so the rows learn the same (docs/faster.md). None
            means the `push_depth` of the cluster. If tables learn in one step,
            the smallest value counts for all of them.
        wire_dtype: The type in which this process exchanges rows and gradients
            with servers: "float32", or "float16" or "bfloat16" for about half
            the bytes. Servers keep and step the rows as before. Rows are
            rounded to nearest, gradients at random, so that their expected
            value is exact. In float16 values beyond 65,504 become 65,504
            (docs/faster.md). Without effect on tables of this process.
        consistency: When the gradients of several workers are applied: a
            `tfswitch.train.Consistency`, "asp" or "bsp". None means "asp". With
            any other consistency, pushes need a `tfswitch.train.Worker` in this
            process.
        cluster: The cluster that keeps the table. None means that of
            `tfswitch.connect` or, without such a call, the servers of TF_CONFIG
            or this process.

    Raises:
        ValueError: If an argument is out of range, or the cluster has a table
            of that name with other arguments.
        ConnectionError, TimeoutError: If a server does not answer.

    Example:

    >>> table = tsw.EmbeddingTable("user", 2, initializer="zeros",
    ...                            optimizer=tsw.optimizers.SGD(0.5))
    >>> table.push([7, 7], [[1.0, 1.0], [1.0, 0.0]])
    >>> table.lookup([7, 8]).numpy()
    array([[-1. , -0.5],
           [ 0. ,  0. ]], dtype=float32)
    """

    def __init__(
        self,
        name: str,
        dim: int,
        *,
        dtype: str = "float32",
        initializer: initializers_lib.InitializerLike = "uniform",
        optimizer: optimizers_lib.OptimizerLike | None = None,
        admission: admission_lib.Admission | Config | None = None,
        eviction: eviction_lib.Eviction | Config | None = None,
        statistics: statistics_lib.Statistics | Config | None = None,
        when_full: str | None = None,
        storage: TieredStorage | None = None,
        update: str = "sparse",
        storage_dtype: storage_dtype_lib.StorageDtypeLike | None = None,
        seed: int | None = None,
        capacity: int | None = None,
        push_depth: int | None = None,
        wire_dtype: str = "float32",
        consistency: consistency_lib.ConsistencyLike | None = None,
        cluster: Cluster | None = None,
    ) -> None:
        if dtype not in ("float32", tf.float32):
            raise ValueError(
                '`dtype` must be "float32"; what is kept in memory is '
                f"`storage_dtype`. Received: dtype={dtype!r}"
            )
        spec = TableSpec(
            initializer=initializer,
            optimizer=optimizer,
            admission=admission,
            eviction=eviction,
            statistics=statistics,
            when_full=when_full,
            storage=storage,
            update=update,
            storage_dtype=storage_dtype,
            seed=seed,
            capacity=capacity,
            push_depth=push_depth,
            wire_dtype=wire_dtype,
            consistency=consistency,
        )
        self._start(name, dim, spec, cluster)

    @classmethod
    def _of(
        cls, name: str, dim: int, spec: TableSpec, cluster: Cluster | None
    ) -> "EmbeddingTable":
        """Makes a table with the settings of a layer or of a dense table."""
        table = cls.__new__(cls)
        table._start(name, dim, spec, cluster)
        return table

    def _start(
        self, name: str, dim: int, spec: TableSpec, cluster: Cluster | None
    ) -> None:
        if not isinstance(name, str) or not name:
            raise bad_argument("name", name, "a string that is not empty")
        check_dim("dim", dim)
        if cluster is not None and not isinstance(cluster, Cluster):
            raise bad_argument(
                "cluster", cluster, "what tfswitch.connect returns"
            )
        if spec.optimizer is None:
            spec = dataclasses.replace(spec, optimizer=optimizers_lib.get(None))
        self._name = name
        self._dim = int(dim)
        self._cluster = cluster if cluster is not None else default_cluster()
        if spec.storage is not None:
            spec.storage._use_in(self._cluster)
        storage_dtype_lib.warn_of_slots(
            self._owner, spec.storage_dtype, spec.optimizer, self._cluster
        )
        if spec.seed is not None:
            self._open(spec)
        else:
            self._open_with_a_seed(spec)
        self._learning_rate = LearningRate(self._spec.optimizer.learning_rate)
        # The value is NaN after a push that was skipped because a gradient was
        # NaN or Inf.
        self._poison = HostVariable(0.0, tf.float32)
        self._handle_lock = threading.Lock()
        # Numbers Keras optimizers in the order of their first push.
        self._rule_numbers: weakref.WeakKeyDictionary[Any, int] = (
            weakref.WeakKeyDictionary()
        )
        self._last_rule = 0
        self._num_loads = 0
        self._known_restores = (0, 0)
        self._weight: tf.Variable | None = None
        self._handle: tf.Tensor | None = None
        self._frees_handle: weakref.finalize | None = None

    def _open(self, spec: TableSpec) -> None:
        """Makes the table, or uses the present one if it has these settings."""
        config = json.dumps(
            spec.to_table_config(self._name, self._dim), sort_keys=True
        )
        is_remote = self._cluster.is_remote
        with contextlib.nullcontext() if is_remote else _names_lock:
            native = self._cluster._native.open_table(config)
        if spec.is_open:
            present = self._cluster._list(self._name)[0]["config"]["optimizer"]
            chosen = spec.with_optimizer(present)
            if not present.get("is_open") and chosen is not spec:
                self._open(dataclasses.replace(chosen, is_open=False))
                return
        self._native = native
        self._spec = spec
        self._config = config

    def _choose_optimizer(self) -> None:
        """Makes the present optimizer final, if none has been chosen yet."""
        if not self._spec.is_open:
            return
        with self._handle_lock:
            # Raises an error if the table was dropped, because `_open` would
            # make the table again.
            self._native.size()
            try:
                self._open(dataclasses.replace(self._spec, is_open=False))
            except ValueError:
                self._find_choice()
                if self._spec.is_open:
                    raise

    def _find_choice(self) -> None:
        """Adopts the optimizer that another object has chosen for the table."""
        if self._spec.is_open:
            with contextlib.suppress(KeyError):
                # Raises an error if the table was dropped, because `_open`
                # would make the table again.
                self._native.size()
                self._open(self._spec)

    def _open_with_a_seed(self, spec: TableSpec) -> None:
        seed = self._find_seed()
        try:
            self._open(dataclasses.replace(spec, seed=seed))
        except ValueError:
            now = self._find_seed()
            if now == seed:
                raise
            # Another worker has just made the table with another seed.
            self._open(dataclasses.replace(spec, seed=now))

    def _find_seed(self) -> int:
        """Returns the seed of a present table of this name, or a new seed."""
        with contextlib.suppress(KeyError):
            return int(self._cluster._list(self._name)[0]["config"]["seed"])
        return default_seed(self._name)

    @classmethod
    def _create_private(
        cls, name: str, dim: int, spec: TableSpec, cluster: Cluster
    ) -> "EmbeddingTable":
        """Makes a table that no other object uses, named `name` or `name_N`."""
        with _names_lock:
            taken = set(cluster.tables())
            names = (f"{name}_{i}" if i else name for i in itertools.count())
            free = next(n for n in names if n not in taken)
            # Drops a freed table of the same name, if there is one. Otherwise a
            # warning would report the rows of that table.
            with contextlib.suppress(KeyError):
                cluster.drop(free)
            return cls._of(free, dim, spec, cluster)

    @property
    def name(self) -> str:
        """The table's name in its cluster."""
        return self._name

    @property
    def dim(self) -> int:
        """Length of a row."""
        return self._dim

    @property
    def seed(self) -> int:
        """Decides, together with the id, the first value of a row."""
        assert self._spec.seed is not None  # `_start` sets one.
        return self._spec.seed

    @property
    def initializer(self) -> initializers_lib.Initializer:
        """The first value of a row."""
        return self._spec.initializer

    @property
    def optimizer(self) -> optimizers_lib.Optimizer:
        """The optimizer of the rows."""
        self._find_choice()
        return self._spec.optimizer

    @property
    def admission(self) -> admission_lib.Admission:
        """The policy that decides when an id gets a row."""
        return self._spec.admission

    @property
    def eviction(self) -> eviction_lib.Eviction | None:
        """The policy that `shrink` applies, or None."""
        return self._spec.eviction

    @property
    def statistics(self) -> statistics_lib.Statistics | None:
        """The statistics of each row, or None."""
        return self._spec.statistics

    @property
    def push_depth(self) -> int:
        """How many pushes may be in flight while the program goes on."""
        if has_remote_workers():
            return 0  # Saves by this process would not wait for their pushes.
        own = self._spec.push_depth
        return self._cluster.push_depth if own is None else own

    @property
    def wire_dtype(self) -> str:
        """The type in which rows and gradients travel to and from servers."""
        return self._spec.wire_dtype

    def _in_float32(self) -> "EmbeddingTable":
        """Returns an object of the same table whose lookups are exact."""
        if self.wire_dtype == "float32":
            return self
        spec = dataclasses.replace(self._spec, wire_dtype="float32")
        return EmbeddingTable._of(self._name, self._dim, spec, self._cluster)

    @property
    def update(self) -> str:
        """Which rows a push moves: "sparse" or "dense"."""
        self._find_choice()
        return self._spec.update

    @property
    def storage_dtype(self) -> storage_dtype_lib.StorageDtype:
        """How rows are kept in memory."""
        return self._spec.storage_dtype

    @property
    def consistency(self) -> consistency_lib.Consistency:
        """When the gradients of several workers are applied."""
        return self._spec.consistency

    @property
    def cluster(self) -> Cluster:
        """The cluster that keeps the table."""
        return self._cluster

    @property
    def learning_rate(self) -> float:
        """The learning rate of the next step.

        An assigned number replaces a constant rate; functions that use the
        table are not traced again. The rate belongs to this object, so each
        process has a rate of its own. A schedule is called with the number of
        pushes that this object has made so far. A function without arguments
        can follow the model's optimizer:
        `lambda: schedule(model.optimizer.iterations)`.
        """
        with tf.init_scope():
            return float(self._learning_rate.read())

    @learning_rate.setter
    def learning_rate(self, value: float) -> None:
        self._learning_rate.assign(value)

    @property
    def iterations(self) -> int:
        """How many pushes this object has made.

        A push that is skipped because of NaN or Inf counts, as in Keras's
        `iterations`. A step that a `LossScaleOptimizer` skips does not count.
        Each push carries the number of its step, which some optimizers need.
        Set this number when training continues from a checkpoint.
        """
        with tf.init_scope():
            return self._learning_rate.steps

    @iterations.setter
    def iterations(self, value: int) -> None:
        steps = NON_NEGATIVE_INT.check("iterations", value)
        self._learning_rate.set_steps(steps)

    @property
    def handle(self) -> tf.Tensor:
        """The resource that the ops of `tfswitch.ops` take as `table`.

        The resource is in this process and keeps the table alive. In a graph
        for the workers of a `tf.distribute.ParameterServerStrategy` the
        resource is in the worker's process. In a `tf.compat.v1.Graph` the
        handle is a tensor of that graph.

        Raises:
            RuntimeError: If this process was forked from one that uses
                tfswitch.
        """
        handle = self._find_handle()
        with self._handle_lock:
            if handle is self._handle and self._frees_handle is not None:
                self._frees_handle.detach()
                self._frees_handle = None
                destroy_with(handle, handle)
        return handle

    def _find_handle(self) -> tf.Tensor:
        """Returns a handle that is freed with this object, even if captured.

        TensorFlow never frees the graph of a train step that has no sparse
        gradient. A handle that such a graph has captured would otherwise keep
        the table alive.
        """
        # In a forked child TensorFlow may wait for threads of the parent.
        _native.check_process()
        if in_plain_graph():
            return self._make_handle(f"/{self._cluster._native.id}")
        if has_remote_workers() and not tf.executing_eagerly():
            return self._handle_of_worker()
        with self._handle_lock:
            if self._handle is None:
                # Raises if the table was dropped; the op would make it again.
                self._native.size()
                with tf.init_scope():
                    handle = self._make_handle(f"/{next(_resource_ids)}")
                self._handle = handle
                self._frees_handle = destroy_with(self, handle)
            return self._handle

    def _handle_of_worker(self) -> tf.Tensor:
        # If graphs captured a resource of the coordinator, all lookups and
        # pushes of the workers would pass through the coordinator.
        if not self._cluster.is_remote:
            raise ValueError(
                f"{self._owner} is in the coordinator's process, where the "
                "workers of a ParameterServerStrategy do not reach it. Connect "
                "to servers with tfswitch.connect."
            )
        if self.consistency.kind != "asp":
            raise ValueError(
                f"{self._owner} has consistency {self.consistency.kind}, and "
                "the workers of a ParameterServerStrategy train asynchronously "
                "and are no tfswitch.train.Worker. Make the table with asp."
            )
        return self._make_handle()

    def _make_handle(self, suffix: str = "") -> tf.Tensor:
        digest = hashlib.sha256(self._config.encode()).hexdigest()
        with tf.device(HOST), _python_errors():
            return embedding_ops.table_handle(
                self._cluster.address,
                self._config,
                cluster_id=self._cluster._native.id,
                timeout_secs=self._cluster.timeout_secs,
                shared_name=(
                    f"tfswitch/{self._cluster.address}/{self._name}/"
                    f"{digest[:16]}{suffix}"
                ),
            )

    def lookup(self, ids: TensorLike) -> tf.Tensor:
        """Reads rows; an id without a row reads as zeros, and no row is made.

        With `admission` an id without a row reads as the policy's
        `not_admitted`.

        Works in eager mode, in `tf.function` and in `tf.data` maps. No
        gradient flows back: see `tfswitch.keras.DynamicEmbedding` for training.

        Args:
            ids: Integers of any shape, or strings. All methods hash strings
                with `tfswitch.ids.hash_strings`.

        Returns:
            float32 tensor of shape `ids.shape + [dim]`.

        Raises:
            ValueError: If `ids` are neither integers nor strings.
            ConnectionError, TimeoutError: If a server does not answer. A graph
                raises `tf.errors.UnavailableError` and
                `tf.errors.DeadlineExceededError` instead.
        """
        return self._lookup(ids, insert_missing=False)

    def lookup_or_create(self, ids: TensorLike) -> tf.Tensor:
        """Reads rows; an id without a row gets its first value.

        With `admission` the id gets no row here, because only pushes decide on
        admission. Arguments, result and errors are those of `lookup`.
        """
        return self._lookup(ids, insert_missing=True)

    def push(
        self,
        ids: TensorLike,
        gradients: TensorLike,
        *,
        learning_rate: TensorLike | None = None,
        shows: TensorLike | None = None,
        clicks: TensorLike | None = None,
    ) -> tf.Tensor:
        """Applies gradients: one optimizer step per id.

        Gradients, shows and clicks of repeated ids are summed first. An id
        without a row gets its first value before the step, if `admission`
        allows it. A refused push changes nothing. If one of several servers
        does not answer, the others may have applied their part.

        Args:
            ids: Integers of any shape.
            gradients: Floats of shape `ids.shape + [dim]`.
            learning_rate: The learning rate of this push; by default the
                optimizer's.
            shows: How often each id was shown: numbers of the shape of `ids`.
                By default once.
            clicks: How often each id was clicked: numbers of the shape of
                `ids`. By default never.

        Returns:
            int64 scalar tensor: the number of rows that took a step; -1 if it
            is not known yet, with `push_depth`.

        Raises:
            ValueError: If shapes do not fit, a gradient is NaN or Inf, or shows
                or clicks are negative; the message names the id. A graph raises
                `tf.errors.InvalidArgumentError` instead.
            ConnectionError, TimeoutError: If a server does not answer. The
                message says whether the push may have been applied.
        """
        ids = to_id_tensor(ids, self._owner)
        gradients = self._to_gradients(gradients)
        with _python_errors():
            (updated_rows,) = push_many(
                [
                    TablePush(
                        self,
                        ids,
                        gradients,
                        learning_rate,
                        self._to_observations("shows", shows, ids),
                        self._to_observations("clicks", clicks, ids),
                    )
                ]
            )
        return updated_rows

    @property
    def weight(self) -> Any:
        """A variable of shape `[0, dim]` that represents the rows in a tape.

        In a `tf.compat.v1.Graph` the weight is a tensor.

        For a loss of `tfswitch.nn`, a tape returns the gradient of this weight
        as a `tf.IndexedSlices`. `apply_gradients` or a Keras optimizer applies
        the gradient. Layers have weights of their own.
        """
        if in_plain_graph():
            # A constant, because a session must first run the initializer of a
            # variable.
            graph = tf.compat.v1.get_default_graph()
            known = graph.get_collection_ref(f"tfswitch_weight_{id(self)}")
            if not known:
                known.append(tf.zeros([0, self._dim]))
            return known[0]
        with self._handle_lock:
            if self._weight is None:
                with tf.init_scope():
                    self._weight = tf.Variable(
                        tf.zeros([0, self._dim]), name=f"{self._name}_rows"
                    )
                self._weight._tfswitch_owner = weakref.ref(self)
            return self._weight

    def apply_gradients(self, gradient: tf.IndexedSlices) -> tf.Tensor:
        """Pushes the gradient of `weight`, as `push` does.

        Example:

        >>> with tf.GradientTape() as tape:
        ...     loss = tfswitch.nn.sampled_softmax_loss(table, None, ...)
        >>> table.apply_gradients(tape.gradient(loss, table.weight))
        """
        if not isinstance(gradient, tf.IndexedSlices):
            raise bad_argument("gradient", gradient, "a tf.IndexedSlices")
        with _python_errors():
            push = self._step_of(None, None)._replace(
                ids=gradient.indices, gradients=gradient.values
            )
            return push_many([push], of_lookups=True)[0]

    def _step_of(self, optimizer: Any, learning_rate: Any) -> TablePush:
        """Returns an empty push, to which a step adds ids and gradients."""
        return TablePush(self, tf.zeros([0], tf.int64), tf.zeros([0]))

    def assign(self, ids: TensorLike, values: TensorLike) -> None:
        """Sets embeddings, and makes missing rows. Optimizer state stays.

        Args:
            ids: Integers of any shape. If an id is repeated, its last value is
                used.
            values: Floats of shape `ids.shape + [dim]`, as NumPy.

        Raises:
            ValueError: If shapes do not fit, values are NaN or Inf, or an
                argument is a symbolic tensor.
            ConnectionError, TimeoutError: As for `push`.
        """
        keys = self._to_keys(ids)
        rows = self._to_rows(keys, values, "values", self._dim)
        self._native.assign(keys.reshape(-1), rows)

    def remove(self, ids: TensorLike) -> int:
        """Removes rows with their optimizer state.

        Args:
            ids: Integers of any shape; those without a row are skipped.

        Returns:
            The number of rows removed.

        Raises:
            ConnectionError, TimeoutError: As for `push`.
        """
        return self._native.erase(self._to_keys(ids).reshape(-1))

    def shrink(
        self,
        dry_run: bool = False,
        *,
        policy: eviction_lib.Eviction | Config | None = None,
    ) -> ShrinkReport:
        """Evicts rows, and frees their memory.

        Training may continue meanwhile. Ids that wait for admission are evicted
        by the same rules of age and score.

        Args:
            dry_run: Whether to count the rows without evicting them.
            policy: An object of `tfswitch.eviction`; by default the table's.

        Returns:
            `{"evicted_rows": n, "evicted_bytes": n, "by": {"ttl": n,
            "show_click_score": n, "l2_norm": n, "max_rows": n},
            "evicted_candidates": n, "remaining_rows": n, "remaining_usage":
            {"count": x, "show": x, "click": x}}`, summed over servers. A row to
            which several rules apply counts for the first rule in this order.
            Usage is summed over the remaining rows; numbers that the table does
            not count are 0. A dry run returns the numbers that a real shrink
            would return. The dict has the attribute `dry_run`, and its text
            says "would evict".

        Raises:
            ValueError: If `policy` is no eviction policy.
            RuntimeError: If there is no policy, or the table does not count the
                numbers that the policy needs.
            ConnectionError, TimeoutError: If a server does not answer.

        Example:

        >>> week = tsw.eviction.Ttl(7)
        >>> table.shrink(dry_run=True, policy=week)
        would evict 1,204 of 98,000 rows (150.5 KiB): 1,204 by ttl
        """
        if not isinstance(dry_run, (bool, np.bool_)):
            raise bad_argument(
                "dry_run", dry_run, "a bool; pass a policy as `policy`"
            )
        policy = eviction_lib.get(policy)
        response = call(
            self._native,
            "Shrink",
            table=self._name,
            rules=None if policy is None else policy.to_table_config(),
            dry_run=bool(dry_run),
        )
        return ShrinkReport(response, dry_run=bool(dry_run))

    def usage(self, ids: TensorLike) -> dict[str, np.ndarray]:
        """Reads the statistics of the use of ids.

        Args:
            ids: Integers of any shape.

        Returns:
            Arrays of the shape of `ids`. "state": 0 for an unknown id, 1 for an
            id that waits for admission, 2 for an id with a row. float32 "count"
            and "last_seen_day"; with `tfswitch.statistics.ShowClick` also
            "show", "click", "delta_score" and "score", decayed to the cluster's
            day. With `admission` but without `statistics`, the numbers of an id
            with a row are NaN.

        Raises:
            ValueError: If `ids` are not integers, or the table counts nothing.
            ConnectionError, TimeoutError: If a server does not answer.
        """
        is_plain = self.statistics is None
        if is_plain and self.admission == admission_lib.Always():
            raise ValueError(
                f"{self._owner} counts nothing of its rows; make it with "
                "`statistics=tfswitch.statistics.Usage()`"
            )
        keys = self._to_keys(ids)
        values, states = self._native.read_usage(keys.reshape(-1))
        if is_plain:
            values = np.where(states[:, np.newaxis] == 2, np.nan, values)
        usage: dict[str, np.ndarray] = {"state": states.reshape(keys.shape)}
        names = ["count", "last_seen_day"]
        if isinstance(self.statistics, statistics_lib.ShowClick):
            names += ["show", "click", "delta_score"]
        for place, name in enumerate(names):
            usage[name] = values[:, place].reshape(keys.shape)
        if isinstance(self.statistics, statistics_lib.ShowClick):
            usage["score"] = self.statistics.score(
                usage["show"], usage["click"]
            )
        return usage

    def size(self) -> int:
        """Returns the number of rows, summed over servers."""
        return self._native.size()

    def stats(self, *, usage: bool = False) -> TableStats:
        """Returns row counts and memory in bytes, summed over servers.

        `prefetch_hits`, `prefetch_late` (hits that had to wait),
        `prefetch_misses` and `prefetch_unused` count lookups of this process
        since it began; see `tfswitch.data.prefetch_embeddings`.
        `prefetch_own_pushes` and `prefetch_other_pushes` are the age of rows
        that were read ahead, summed over hits: the pushes that this process
        and, as far as it knows, others made between the read and the lookup.
        `pushes_in_flight` counts those of the cluster when `stats` is called.

        Args:
            usage: Whether to add "usage": the sums of the rows' statistics on
                the cluster's day, which needs a pass over all rows. The value
                is `{"count": x}`, and with `tfswitch.statistics.ShowClick` also
                "show", "click" and "score". The method `usage` reads the
                statistics of single ids.

        Raises:
            RuntimeError: If `usage` is true and the table has no statistics.
            ConnectionError, TimeoutError: If a server does not answer.

        Example:

        >>> table = tsw.EmbeddingTable(
        ...     "ad", 1, statistics=tsw.statistics.ShowClick())
        >>> table.push([3, 4], [[0.0], [0.0]], shows=[8, 2], clicks=[1, 0])
        >>> table.stats(usage=True)["usage"]["show"]
        10.0
        """
        (stats,) = self._cluster._stats(self._name).values()
        if usage:
            stats["usage"] = self._usage_of_all()
        return stats

    def describe(self, sample: int = 10_000) -> None:
        """Prints rows, memory and settings, and norms and use of some rows.

        The sample is the first rows that the table sends, in the order of
        hashes of their ids. The rest of the table is not read.

        Args:
            sample: How many rows to read, at least 1.

        Raises:
            ValueError: If `sample` is out of range.
            ConnectionError, TimeoutError: If a server does not answer.

        Example:

        >>> table.describe()
        <tfswitch.EmbeddingTable 'user', dim 16, on 'grpc://ps0:7077'>
        rows        98,000 (99,204 made, 1,204 removed)
        ...
        norm        min 0.08, median 0.31, p99 1.25, max 4.02
        """
        print(describe(self, POSITIVE_INT.check("sample", sample)))

    def _usage_of_all(self) -> dict[str, float]:
        if self.statistics is None:
            raise RuntimeError(
                f"{self._owner} counts nothing of its rows; make it with "
                "`statistics`"
            )
        # This policy evicts no row, so the report sums over all rows.
        report = self.shrink(dry_run=True, policy=eviction_lib.Ttl(1e9))
        totals: dict[str, float] = report["remaining_usage"]
        if not isinstance(self.statistics, statistics_lib.ShowClick):
            return {"count": totals["count"]}
        return {
            **{name: totals[name] for name in ("count", "show", "click")},
            "score": self.statistics.score(totals["show"], totals["click"]),
        }

    def export_rows(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns all rows, in no particular order.

        Returns:
            ids: int64, `[num_rows]`.
            values: float32, `[num_rows, dim]`.
        """
        ids, values, _ = self._native.export_rows(False)
        return ids, values

    def save(self, path: str | os.PathLike[str]) -> dict[str, Any]:
        """Saves this table; see `Cluster.save`."""
        return self._cluster.save(path, [self._name])

    def restore(
        self,
        path: str | os.PathLike[str],
        *,
        saved_name: str | None = None,
        state: str = "saved",
    ) -> dict[str, Any]:
        """Replaces this table's rows by saved ones.

        Args:
            path: A folder that `EmbeddingTable.save` or `Cluster.save` wrote.
            saved_name: The table's name in the save. None means its present
                name.
            state: As for `Cluster.restore`.
        """
        names = {saved_name or self._name: self._name}
        return self._cluster.restore(path, names, state=state)

    def drop(self) -> None:
        """Removes the table with all its rows; see `Cluster.drop`.

        Raises:
            KeyError: If the table was dropped before.
            ConnectionError, TimeoutError: As for `Cluster.drop`.

        Example:

        >>> table.drop()
        >>> table.size()
        KeyError: "no table 'user'; it has none"
        """
        self._cluster.drop(self._name)

    def __repr__(self) -> str:
        return (
            f"<tfswitch.EmbeddingTable {self._name!r}, dim {self._dim}, on "
            f"{self._cluster.address!r}>"
        )

    @property
    def _owner(self) -> str:
        return f"table '{self._name}'"

    def _lookup(self, ids: Any, insert_missing: bool) -> tf.Tensor:
        ids = to_id_tensor(ids, self._owner)
        with _python_errors():
            return look_up_many([self], [ids], insert_missing=insert_missing)[0]

    def _learn_as(
        self, source: Any, settings: Callable[[], dict[str, Any]]
    ) -> int:
        """Makes later pushes step rows as a Keras optimizer steps variables.

        Args:
            source: The Keras optimizer.
            settings: A function that returns the settings of the table for this
                optimizer.

        Returns:
            The optimizer's number, which its pushes carry.

        Raises:
            ValueError: If a later optimizer has taken over the rows and their
                optimizer state.
        """
        with self._handle_lock:
            number = self._rule_numbers.get(source)
            if number is not None and number == self._last_rule:
                return number
            if number is not None:
                raise ValueError(
                    f"{self._owner} learns by another optimizer now, which "
                    f"came after {source!r}, and a row has the state of one "
                    "optimizer. Train with the last one only, or give each "
                    "model rows of its own."
                )
            is_first = self._last_rule == 0
            # A new Keras optimizer begins without state, but rows that were
            # loaded from a file keep their optimizer state.
            restores = (num_restores[self._cluster.address], self._num_loads)
            keeps_state = is_first or restores != self._known_restores
            self._known_restores = restores
            has_changed = self._follow(settings(), keeps_state=keeps_state)
            has_state = self._slot_floats > statistics_lib._width(
                self.statistics
            )
            if has_state and not (
                keeps_state or has_changed or self._cluster.is_remote
            ):
                with _names_lock:
                    self._make_again(self._spec, keeps_state=False)
            if has_changed or has_state or is_first:
                self._last_rule += 1
            self._rule_numbers[source] = self._last_rule
            return self._last_rule

    def _learn_as_saved(self, config: Mapping[str, Any]) -> None:
        """Adopts the optimizer of a file of rows, if none is chosen yet.

        If the table is in this process, the first push may still choose another
        optimizer.
        """
        self._find_choice()
        spec = self._spec.with_optimizer(config)
        if not self._spec.is_open or spec is self._spec:
            return
        with self._handle_lock:
            if self._cluster.is_remote:
                self._open(dataclasses.replace(spec, is_open=False))
            else:
                with _names_lock:
                    self._make_again(spec, keeps_state=False)
            self._learning_rate.follow(self._spec.optimizer.learning_rate)

    def _follow(self, settings: dict[str, Any], *, keeps_state: bool) -> bool:
        """Changes the optimizer; the values of rows stay.

        Other processes use a table on servers, too, so there only the learning
        rate may change.

        Args:
            settings: Fields of the spec: `optimizer` and `update`.
            keeps_state: Whether rows keep their state if it has the same
                meaning for both optimizers.

        Returns:
            Whether more than the learning rate differs.

        Raises:
            ValueError: If the table is on servers and more than the learning
                rate differs.
        """
        spec = dataclasses.replace(self._spec, **settings)
        has_changed = self._optimizer_of(spec) != self._optimizer_of(self._spec)
        if has_changed:
            self._change_to(spec, keeps_state)
        self._spec = spec
        self._learning_rate.follow(spec.optimizer.learning_rate)
        return has_changed

    def _optimizer_of(self, spec: TableSpec) -> Any:
        return spec.to_table_config(self._name, self._dim)["optimizer"]

    def _change_to(self, spec: TableSpec, keeps_state: bool) -> None:
        with _names_lock:
            try:
                # This call succeeds if another object has already changed the
                # table to `spec`.
                self._open(spec)
            except ValueError as error:
                if self._cluster.is_remote:
                    raise ValueError(
                        f"{self._owner} is on servers, where it keeps the "
                        f"optimizer that it was made with: {error}"
                    ) from error
                self._make_again(spec, keeps_state)

    def _make_again(self, spec: TableSpec, keeps_state: bool) -> None:
        """Replaces the table by one with other settings and the same rows."""
        ids, values, slots = self._export_with_slots()
        present = self._spec
        self._cluster.drop(self._name)
        try:
            self._open(spec)
            native = self._native
            keeps_state = (
                keeps_state
                and native.slot_floats == slots.shape[1]
                and have_equal_state(
                    present.optimizer.to_table_config(),
                    spec.optimizer.to_table_config(),
                )
            )
            native.assign(ids, values, slots if keeps_state else None)
            width = statistics_lib._width(self.statistics)
            if width and not keeps_state:
                # Statistics are the last numbers of a row's state. The numbers
                # before them stay as in a new row.
                made, values, state = native.export_rows(True)
                assert state is not None
                usage = slots[np.argsort(ids), -width:]
                state[np.argsort(made), -width:] = usage
                native.assign(made, values, state)
        except BaseException:
            with contextlib.suppress(KeyError):
                self._cluster.drop(self._name)
            self._open(present)
            self._native.assign(ids, values, slots)
            raise

    @property
    def _slot_floats(self) -> int:
        """How many floats the optimizer state and statistics of a row have."""
        self._find_choice()
        return int(self._native.slot_floats)

    def _export_with_slots(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        self._find_choice()
        ids, values, slots = self._native.export_rows(True)
        if slots is None:
            slots = np.zeros((len(ids), 0), np.float32)
        return ids, values, slots

    def _replace_rows(
        self, ids: np.ndarray, values: np.ndarray, slots: np.ndarray | None
    ) -> None:
        """Replaces all rows; without `slots` their state is the initial one."""
        self._poison.assign(0.0)
        self._num_loads += 1
        keys = self._to_keys(ids)
        rows = self._to_rows(keys, values, "values", self._dim)
        if slots is not None:
            slots = self._to_rows(keys, slots, "slots", self._slot_floats)
        present, _ = self.export_rows()
        self._native.erase(present)
        self._native.assign(keys, rows, slots)

    def _set_rows(self, ids: np.ndarray, values: np.ndarray) -> None:
        """Replaces all rows; ids that had a row keep their optimizer state."""
        self._poison.assign(0.0)
        present, _ = self.export_rows()
        self._native.erase(np.setdiff1d(present, ids, assume_unique=True))
        self._native.assign(ids, values, None)

    def _to_keys(self, ids: Any) -> np.ndarray:
        ids = to_id_array(ids, self._owner)
        return np.ascontiguousarray(ids).astype(np.int64, copy=False)

    def _to_rows(
        self, keys: np.ndarray, values: Any, what: str, width: int
    ) -> np.ndarray:
        values = to_array(values, self._owner, what)
        if values.dtype.kind not in "fiu":
            raise ValueError(
                f"{self._owner}: `{what}` must be floats, got {values.dtype}"
            )
        expected = (*keys.shape, width)
        if values.shape != expected:
            raise ValueError(
                f"{self._owner}: expected `{what}` of shape {expected} "
                f"(ids.shape + [{width}]), got {values.shape}"
            )
        rows = values.astype(np.float32, copy=False).reshape(keys.size, width)
        return np.ascontiguousarray(rows)

    def _to_observations(
        self, what: str, values: Any, ids: tf.Tensor
    ) -> tf.Tensor | None:
        if values is None:
            return None
        values = tf.convert_to_tensor(values)
        if not (values.dtype.is_floating or values.dtype.is_integer):
            raise ValueError(
                f"{self._owner}: `{what}` must be numbers, got "
                f"{values.dtype.name}"
            )
        if not values.shape.is_compatible_with(ids.shape):
            raise ValueError(
                f"{self._owner}: `{what}` must have the shape of the ids, "
                f"{ids.shape}, got {values.shape}"
            )
        return tf.cast(values, tf.float32)

    def _to_gradients(self, gradients: Any) -> tf.Tensor:
        if not tf.is_tensor(gradients):
            gradients = np.asarray(gradients)
            if gradients.dtype.kind in "fiu":
                gradients = gradients.astype(np.float32, copy=False)
        gradients = tf.convert_to_tensor(gradients)
        if not gradients.dtype.is_floating:
            raise ValueError(
                f"{self._owner}: gradients must be floats, got "
                f"{gradients.dtype.name}"
            )
        return tf.cast(gradients, tf.float32)


def push_many(
    pushes: Sequence[TablePush],
    *,
    of_lookups: bool = False,
    skip_non_finite: bool = False,
) -> list[tf.Tensor]:
    """Does `pushes` in one op. Each push counts as a step of its table object.

    Args:
        pushes: At least one.
        of_lookups: As for `tfswitch.ops.push_many`.
        skip_non_finite: As for `tfswitch.ops.push_many`. After a skipped push
            the next training lookups return NaN, so that the loss is NaN, too.

    Returns:
        For each push the number of rows that took a step, an int64 scalar; -1
        if the push is still in flight.
    """
    for each in pushes:
        each.table._choose_optimizer()
    push_depth = min(each.table.push_depth for each in pushes)
    result = embedding_ops.push_many(
        [
            each._replace(
                table=each.table._find_handle(),
                learning_rate=each.table._learning_rate.read()
                if each.learning_rate is None
                else each.learning_rate,
                global_step=each.table._learning_rate.number(),
            )
            for each in pushes
        ],
        of_lookups=of_lookups,
        skip_non_finite=skip_non_finite,
        push_depth=push_depth,
    )
    for each, poison in zip(pushes, result.poisons, strict=True):
        each.table._learning_rate.advance()
        if skip_non_finite and _can_be_poisoned():
            each.table._poison.set(poison)
    return list(result.updated_rows)


def finish_pushes() -> None:
    """Waits until no push of this process is in flight, to any cluster.

    Raises:
        ConnectionError, OSError, ValueError: If one has failed. The message
            names its step.
    """
    call(_native, "FinishPushes")


@atexit.register
def _finish_at_exit() -> None:
    try:
        _native.check_process()
    except RuntimeError:
        return  # The pushes belong to the parent of this fork.
    finish_pushes()


def look_up_many(
    tables: Sequence[EmbeddingTable],
    ids: Sequence[tf.Tensor],
    *,
    insert_missing: bool = False,
) -> list[tf.Tensor]:
    """Reads the embeddings of ids of each table.

    While a model is exported, the graph reads the rows that the model will
    serve.

    Args:
        tables: The tables; one may appear more than once.
        ids: For each table int32 or int64 of any shape.
        insert_missing: Whether an id without a row gets a row. With an
            admission policy the id gets no row here, because only pushes decide
            on admission.

    Raises:
        ValueError: If `insert_missing` is true while a model is exported.
    """
    served = serving_ops.present_rows()
    if served is not None:
        if insert_missing:
            raise ValueError(
                f"{tables[0]._owner}: an exported model makes no rows. Use "
                "`lookup` in what it calls."
            )
        return served.lookup(tables, ids)
    return embedding_ops.lookup_many(
        [table._find_handle() for table in tables],
        ids,
        dims=[table.dim for table in tables],
        insert_missing=insert_missing,
    )


# The clusters of tables that have had prefetches.
_prefetching: "weakref.WeakSet[Cluster]" = weakref.WeakSet()


def prefetch_many(
    tables: Sequence[EmbeddingTable],
    ids: Sequence[tf.Tensor],
    *,
    sources: Sequence[int],
    exact: bool,
    limit: int,
) -> None:
    """Begins to read what a later `look_up_many` of the same ids will use.

    Args:
        tables: At most 256.
        ids: As for `look_up_many`.
        sources: A number for each lookup of each dataset.
        exact: See `tfswitch.data.prefetch_embeddings`.
        limit: How many batches of a source may wait for their lookup.
    """
    _prefetching.update(table.cluster for table in tables)
    embedding_ops.prefetch_many(
        [table._find_handle() for table in tables],
        ids,
        sources=sources,
        exact=exact,
        limit=limit,
    )


def drop_prefetches(sources: Iterable[int]) -> None:
    """Frees rows that were read for datasets that no longer exist."""
    for cluster in list(_prefetching):
        for source in sources:
            with contextlib.suppress(RuntimeError):  # The cluster is closed.
                call(cluster._native, "Prefetches", drop_source=source)


def tie_to_weight(
    table: EmbeddingTable,
    ids: tf.Tensor,
    embeddings: tf.Tensor,
    weight: tf.Tensor,
    shows: tf.Tensor | None = None,
    clicks: tf.Tensor | None = None,
) -> tf.Tensor:
    """Returns the embeddings; their gradient becomes that of `weight`."""
    return embedding_ops.tie_to_weight(
        table._find_handle(),
        ids,
        embeddings,
        weight,
        poison=table._poison.read() if _can_be_poisoned() else None,
        shows=shows,
        clicks=clicks,
    )


def _can_be_poisoned() -> bool:
    # Under a ParameterServerStrategy the variable with the NaN would be in
    # another process, and each lookup would have to fetch its value.
    return not in_plain_graph() and not has_remote_workers()


def check_dim(name: str, dim: int) -> None:
    """Raises ValueError unless `dim` is a possible length of a row."""
    if not (is_number(dim, int, np.integer) and 1 <= dim <= MAX_DIM):
        raise ValueError(
            f"`{name}` must be an integer from 1 to {MAX_DIM}. "
            f"Received: {name}={dim!r} (of type {type(dim).__name__})."
        )


def default_seed(name: str) -> int:
    """The default seed, made from the table's name and TensorFlow's seed."""
    # If given the seed of an operation, get_seed also returns the program's
    # seed.
    program, _ = tf.compat.v1.get_seed(0)
    text = f"{program} {name}".encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "little")


@contextlib.contextmanager
def _python_errors() -> Iterator[None]:
    """Turns the errors of an eager op into Python's own errors."""
    try:
        yield
    except tf.errors.OpError as error:
        # Raises the KeyboardInterrupt that ended the op.
        _native.check_process()
        # Eager execution adds the op's node before the message, and its name
        # after.
        message = re.sub(r"^\{\{.*?\}\} | \[Op:[^\]]*\].*$", "", error.message)
        raise _PYTHON_ERRORS.get(type(error), RuntimeError)(message) from error


_PYTHON_ERRORS: dict[type[tf.errors.OpError], type[Exception]] = {
    tf.errors.AlreadyExistsError: ValueError,
    tf.errors.DataLossError: OSError,
    tf.errors.DeadlineExceededError: TimeoutError,
    tf.errors.InvalidArgumentError: ValueError,
    tf.errors.NotFoundError: KeyError,
    tf.errors.PermissionDeniedError: PermissionError,
    tf.errors.UnauthenticatedError: PermissionError,
    tf.errors.UnavailableError: ConnectionError,
}
