"""A model's dense variables on the parameter servers."""

import copy
import itertools
import math
import time
import urllib.parse
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tfswitch import optimizers as optimizers_lib
from tfswitch._settings._table_spec import TableSpec
from tfswitch._types import Gradient, TensorLike
from tfswitch.cluster import Cluster
from tfswitch.consistency import Consistency, ConsistencyLike
from tfswitch.ops import embedding_ops
from tfswitch.table import EmbeddingTable, _python_errors

_MAX_BLOCK = 1024
_MIN_BLOCK = 8
# A small model is cut into smaller blocks, so that there are at least this many
# blocks and all servers get about the same number.
_MIN_BLOCKS = 256

_POLL_SECS = 0.02


class _Part(NamedTuple):
    """Some blocks of a table, in order.

    Attributes:
        keys: The keys of the blocks.
        sizes: For each array, how many of its floats are in the blocks: all
            floats of a wanted array, and those of any other array that share a
            block with a wanted array.
        padding: Floats after the last array.
    """

    keys: np.ndarray
    sizes: list[int]
    padding: int


class DensePush(NamedTuple):
    """One push of a call of `push_many`; see `DenseTable.push`.

    Attributes:
        table: The table.
        gradients: One tensor per shape, or None for zeros.
        learning_rate: Scalar.
        global_step: int64 scalar.
        arrays: The indices of the arrays whose blocks are sent, in order. Each
            array with a gradient must be among these arrays. None means all
            arrays.
    """

    table: "DenseTable"
    gradients: Sequence[Gradient]
    learning_rate: TensorLike
    global_step: TensorLike = 0
    arrays: Collection[int] | None = None


def push_many(pushes: Sequence[DensePush]) -> list[tf.Tensor]:
    """Does `DenseTable.push` for several tables in one op."""
    with _python_errors():
        return embedding_ops.push_many(
            [
                embedding_ops.TablePush(
                    each.table._find_handle(),
                    tf.constant(each.table._part(each.arrays).keys),
                    each.table._to_blocks(each.gradients, each.arrays),
                    each.learning_rate,
                    global_step=each.global_step,
                )
                for each in pushes
            ],
            insert_missing=False,
        ).updated_rows


def pull_many(
    tables: Sequence[tuple["DenseTable", Collection[int] | None]],
) -> list[list[tf.Tensor]]:
    """Does `DenseTable.pull` for several tables in one op.

    Args:
        tables: For each table the indices of the wanted arrays, in order. None
            means all arrays.

    Returns:
        For each table the values of these arrays.
    """
    parts = [table._part(arrays) for table, arrays in tables]
    with _python_errors():
        blocks = embedding_ops.lookup_many(
            [table._find_handle() for table, _ in tables],
            [tf.constant(part.keys) for part in parts],
            dims=[table._block for table, _ in tables],
            insert_missing=False,
        )
    values = []
    for (table, arrays), part, rows in zip(tables, parts, blocks, strict=True):
        flat = tf.split(tf.reshape(rows, [-1]), [*part.sizes, part.padding])
        shapes = list(table._shapes.values())
        values.append(
            [
                tf.reshape(flat[i], shapes[i])
                for i in (range(len(shapes)) if arrays is None else arrays)
            ]
        )
    return values


class DenseTable:
    """Named arrays of float32, divided evenly among the servers of a cluster.

    The arrays are joined end to end and cut into blocks. Each block is a row of
    a table: the table's optimizer steps it, `Cluster.save` saves it, and it can
    be restored on any number of servers. Each server has a contiguous run of
    about the same number of blocks (`cc/client/dense_keys.h`).

    A second object with the same arguments uses the existing table.
    Thread-safe.

    Args:
        name: Name of the table, as of an `EmbeddingTable`.
        shapes: Shape of each array by name. The order of the names matters.
        optimizer: As for `tfswitch.EmbeddingTable`. A push updates all values,
            as a Keras optimizer does with dense variables. The optimizer must
            be elementwise: `tfswitch.optimizers.Optimizer.is_elementwise`.
        consistency: As for `tfswitch.EmbeddingTable`.
        wire_dtype: As for `tfswitch.EmbeddingTable`.
        cluster: The cluster to use; by default that of `tfswitch.connect`.

    Raises:
        ValueError: If an argument is out of range, or the cluster has a table
            of that name with other arguments: other shapes, for example.
        ConnectionError, TimeoutError: If a server does not answer.

    Example:

    >>> table = tsw.DenseTable("mlp", {"kernel": (2, 1), "bias": (1,)},
    ...                        optimizer=tsw.optimizers.SGD(0.5))
    >>> table.initialize([np.ones((2, 1)), np.zeros(1)])
    True
    >>> _ = table.push([np.ones((2, 1)), np.ones(1)], learning_rate=0.5)
    >>> [value.numpy().tolist() for value in table.pull()]
    [[[0.5], [0.5]], [-0.5]]
    """

    def __init__(
        self,
        name: str,
        shapes: Mapping[str, Sequence[int]],
        *,
        optimizer: optimizers_lib.OptimizerLike | None = None,
        consistency: ConsistencyLike | None = None,
        wire_dtype: str = "float32",
        cluster: Cluster | None = None,
    ) -> None:
        if not isinstance(shapes, Mapping) or not shapes:
            raise ValueError(
                "`shapes` must map names to shapes, at least one. "
                f"Received: shapes={shapes!r}"
            )
        self._shapes = {
            key: _to_shape(key, shape) for key, shape in shapes.items()
        }
        self._sizes = [math.prod(shape) for shape in self._shapes.values()]
        self._size = sum(self._sizes)
        if self._size == 0:
            raise ValueError(f"all shapes are empty. Received: {shapes!r}")
        self._block = _block_size(self._size)
        self._num_blocks = -(-self._size // self._block)
        layout = ";".join(
            # Escapes ":" and ";" in names, because these characters separate
            # the parts of the layout.
            f"{urllib.parse.quote(key)}:{'x'.join(map(str, shape)) or 'scalar'}"
            for key, shape in self._shapes.items()
        )
        optimizer = optimizers_lib.get(optimizer)
        optimizer.check_elementwise("a dense table")
        spec = TableSpec(
            initializer="zeros",
            optimizer=optimizer,
            seed=0,  # The values begin as zeros.
            consistency=consistency,
            wire_dtype=wire_dtype,
            layout=layout,
        )
        self._table = EmbeddingTable._of(name, self._block, spec, cluster)
        self._keys = self._table._native.dense_keys(self._num_blocks)

    @classmethod
    def _of(cls, name: str, spec: TableSpec, cluster: Cluster) -> "DenseTable":
        """Opens a table that exists with this spec."""
        shapes = {}
        for part in spec.layout.split(";"):
            key, _, shape = part.partition(":")
            sizes = [] if shape == "scalar" else shape.split("x")
            shapes[urllib.parse.unquote(key)] = tuple(map(int, sizes))
        return cls(
            name,
            shapes,
            optimizer=spec.optimizer,
            consistency=spec.consistency,
            cluster=cluster,
        )

    @property
    def name(self) -> str:
        """The table's name in its cluster."""
        return self._table.name

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of each array by name."""
        return dict(self._shapes)

    @property
    def cluster(self) -> Cluster:
        """The cluster that keeps the table."""
        return self._table.cluster

    @property
    def consistency(self) -> Consistency:
        """When the gradients of several workers are applied."""
        return self._table.consistency

    @property
    def learning_rate(self) -> float:
        """The learning rate of the next push that has no `learning_rate`.

        A schedule is called with the number of such pushes that this object has
        made. An assigned number replaces a constant rate.
        """
        return self._table.learning_rate

    @learning_rate.setter
    def learning_rate(self, value: float) -> None:
        self._table.learning_rate = value

    @property
    def handle(self) -> tf.Tensor:
        """The resource that the ops of `tfswitch.ops` take as `table`."""
        return self._table.handle

    def _find_handle(self) -> tf.Tensor:
        return self._table._find_handle()

    def initialize(
        self, values: Sequence[TensorLike], *, timeout_secs: float = 120.0
    ) -> bool:
        """Sets first values, unless they were set or restored already.

        If several workers call this method, the values of the first worker are
        used. The other workers wait until these are set.

        Args:
            values: One array per shape.
            timeout_secs: Longest wait for the first worker's values.

        Returns:
            Whether `values` were used.

        Raises:
            ValueError: If `values` do not fit the shapes, or are NaN or Inf.
            TimeoutError: If the first worker has not set all values in time, or
                a restarted server has lost some.
        """
        blocks = self._to_blocks_array(values)
        native = self._table._native
        # The worker that sets the first block also sets all other blocks. If
        # the table has other blocks but not the first, a server has lost its
        # part, and new values would not fit the trained ones.
        if native.size() == 0 and native.assign_missing(
            self._keys[:1], blocks[:1]
        ):
            native.assign_missing(self._keys[1:], blocks[1:])
            return True
        self.wait_until_initialized(timeout_secs=timeout_secs)
        return False

    def is_initialized(self) -> bool:
        """Returns whether all values have been set."""
        return self._table._native.size() >= self._num_blocks

    def wait_until_initialized(self, *, timeout_secs: float = 120.0) -> None:
        """Waits until another process has initialised or restored the table.

        Args:
            timeout_secs: Longest wait.

        Raises:
            TimeoutError: If the values are not set in time, or a restarted
                server has lost some.
            ConnectionError: If a server does not answer.
        """
        native = self._table._native
        give_up = time.monotonic() + timeout_secs
        while (count := native.size()) < self._num_blocks:
            if time.monotonic() > give_up:
                raise TimeoutError(
                    f"dense table '{self.name}': {self._num_blocks - count} of "
                    f"{self._num_blocks} blocks have no values after "
                    f"{timeout_secs} s. The worker that initialises it has not "
                    "come or has died, or a server was started again and has "
                    "lost its part. Start that worker, restore a checkpoint, "
                    "or restart all servers"
                )
            time.sleep(_POLL_SECS)

    def assign(self, values: Sequence[TensorLike]) -> None:
        """Sets all values; the state of the optimizer stays.

        Args:
            values: One array per shape.

        Raises:
            ValueError: If `values` do not fit the shapes, or are NaN or Inf.
        """
        self._table._native.assign(self._keys, self._to_blocks_array(values))

    def push(
        self,
        gradients: Sequence[Gradient],
        *,
        learning_rate: TensorLike | None = None,
        global_step: TensorLike | None = None,
    ) -> tf.Tensor:
        """Applies one optimizer step to all values.

        With consistency `bsp`, servers take the step when all workers have
        ended their step; see `tfswitch.train.Worker`.

        Args:
            gradients: One tensor per shape, or None for zeros.
            learning_rate: Scalar; by default that of the optimizer.
            global_step: int64 scalar: the number of the step, from 1, for
                optimizers that depend on it. By default this object counts its
                pushes.

        Returns:
            int64 scalar tensor: the number of blocks that took a step, 0 with
            `bsp`. In a graph, operations that depend on this tensor run after
            the push.

        Raises:
            ValueError: If gradients do not fit the shapes, or are NaN or Inf.
            ConnectionError, TimeoutError: If a server does not answer.
        """
        return self._push_beside((), gradients, learning_rate, global_step)

    def _push_beside(
        self,
        others: Sequence[DensePush],
        gradients: Sequence[Gradient],
        learning_rate: TensorLike | None = None,
        global_step: TensorLike | None = None,
    ) -> tf.Tensor:
        """Does `push`, and pushes to other tables in the same op."""
        rates = self._table._learning_rate
        rate = rates.read() if learning_rate is None else learning_rate
        step = rates.number() if global_step is None else global_step
        pushed = push_many([DensePush(self, gradients, rate, step), *others])
        rates.advance()
        return pushed[0]

    def pull(self) -> list[tf.Tensor]:
        """Returns the present values, one float32 tensor per shape.

        With a 16-bit `wire_dtype` they are rounded to it.

        Raises:
            RuntimeError: If the table has not been initialised, or a server was
                started again and has lost its values. A graph raises
                `tf.errors.FailedPreconditionError` instead.
            ConnectionError, TimeoutError: If a server does not answer.
        """
        return pull_many([(self, None)])[0]

    def _in_float32(self) -> "DenseTable":
        """Returns an object of the same table whose `pull` is exact."""
        exact = copy.copy(self)
        exact._table = self._table._in_float32()
        return exact

    def _part(self, arrays: Collection[int] | None) -> _Part:
        """Returns the blocks that contain values of these arrays."""
        if arrays is None:
            padding = self._num_blocks * self._block - self._size
            return _Part(self._keys, self._sizes, padding)
        ends = list(itertools.accumulate(self._sizes, initial=0))
        blocks = {
            block
            for i in arrays
            for block in range(
                ends[i] // self._block, -(-ends[i + 1] // self._block)
            )
        }
        kept = np.zeros(self._num_blocks + 1, np.int64)
        kept[sorted(blocks)] = self._block
        before = np.concatenate([[0], np.cumsum(kept)])

        def place(end: int) -> int:
            block, rest = divmod(end, self._block)
            return int(before[block] + min(rest, kept[block]))

        places = [place(end) for end in ends]
        return _Part(
            self._keys[kept[:-1] > 0],
            np.diff(places).tolist(),
            int(before[-1]) - places[-1],
        )

    def _to_blocks(
        self, gradients: Sequence[Gradient], arrays: Collection[int] | None
    ) -> tf.Tensor:
        self._check_count("gradients", gradients)
        part = self._part(arrays)
        parts = []
        for gradient, (key, shape), size in zip(
            gradients, self._shapes.items(), part.sizes, strict=True
        ):
            if gradient is None:
                parts.append(tf.zeros([size]))
                continue
            gradient = tf.cast(tf.convert_to_tensor(gradient), tf.float32)
            if not gradient.shape.is_compatible_with(shape):
                raise ValueError(
                    f"dense table '{self.name}': the gradient of {key!r} must "
                    f"have shape {shape}, got {tuple(gradient.shape)}"
                )
            gradient = tf.ensure_shape(gradient, shape)
            gradient = tf.debugging.check_numerics(
                gradient,
                f"dense table '{self.name}': gradient of {key!r}; nothing was "
                "applied. Check the loss and the learning rate",
            )
            parts.append(tf.reshape(gradient, [-1]))
        parts.append(tf.zeros([part.padding]))
        return tf.reshape(
            tf.concat(parts, axis=0), [len(part.keys), self._block]
        )

    def _to_blocks_array(self, values: Sequence[TensorLike]) -> np.ndarray:
        self._check_count("values", values)
        flat = np.zeros(self._num_blocks * self._block, np.float32)
        begin = 0
        for value, (key, shape) in zip(
            values, self._shapes.items(), strict=True
        ):
            value = np.asarray(value)
            if value.shape != shape:
                raise ValueError(
                    f"dense table '{self.name}': the value of {key!r} must "
                    f"have shape {shape}, got {value.shape}"
                )
            if not np.isfinite(value).all():
                raise ValueError(
                    f"dense table '{self.name}': the value of {key!r} has NaN "
                    "or Inf; nothing was applied"
                )
            flat[begin : begin + value.size] = value.reshape(-1)
            begin += value.size
        return flat.reshape(self._num_blocks, self._block)

    def _check_count(self, what: str, values: Sequence[Any]) -> None:
        if len(values) != len(self._shapes):
            raise ValueError(
                f"dense table '{self.name}': expected {len(self._shapes)} "
                f"{what} ({', '.join(self._shapes)}), got {len(values)}"
            )


def _to_shape(key: Any, shape: Any) -> tuple[int, ...]:
    try:
        sizes = tuple(shape)
    except (TypeError, ValueError):  # No sequence, or of unknown rank.
        sizes = (None,)
    if not isinstance(key, str) or not all(
        isinstance(size, (int, np.integer)) and size >= 0 for size in sizes
    ):
        raise ValueError(
            "`shapes` must map names to shapes that are known. "
            f"Received: {key!r}: {shape!r}"
        )
    return tuple(int(size) for size in sizes)


def _block_size(size: int) -> int:
    """Returns a power of two that cuts `size` floats into enough blocks."""
    wanted = max(1, size // _MIN_BLOCKS)
    return max(_MIN_BLOCK, min(_MAX_BLOCK, 1 << (wanted.bit_length() - 1)))
