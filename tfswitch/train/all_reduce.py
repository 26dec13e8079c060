"""All-reduce of arrays, also to train with different amounts of data.

Training by all-reduce needs every worker in every step. So a worker whose data
is used up continues with empty batches. Each worker sends the number of its
samples in the same all-reduce: the weighted gradients are summed and divided by
the sum of the weights, which is 0 when all data has been used.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
import tensorflow as tf

from tfswitch._settings._ranges import bad_argument
from tfswitch._types import Gradient, TensorLike
from tfswitch.ops import is_of_rows
from tfswitch.train._checks import check_choice
from tfswitch.train._exchange import exchange_of, merge
from tfswitch.train.worker import Worker, present_workers

_Batch = TypeVar("_Batch")
SumOverWorkers = Callable[[list[Any]], Sequence[Any]]


def all_reduce(
    arrays: Sequence[TensorLike],
    op: str = "sum",
    *,
    worker: Worker | None = None,
    timeout_secs: float | None = None,
) -> list[np.ndarray]:
    """Reduces arrays over the workers of a group, through the servers.

    All workers call it, and each waits for all others, except workers that have
    left or died. The values are summed in the order of the workers, so all
    workers get the same result to the last bit. Use it for counts, metrics and
    common decisions, once in many steps: a call takes some ten messages to the
    servers. A worker that repeats steps, as after `Worker(first_step=...)`,
    does not wait and gets its own arrays back.

    Args:
        arrays: Numbers, arrays or eager tensors; on all workers the same
            number, with the same dtypes and shapes.
        op: "sum", "mean" (with the same weight for all workers), "max" or
            "min".
        worker: This process's worker; by default the one
            `tfswitch.train.Worker` of the process.
        timeout_secs: Longest wait for other workers; by default the worker's
            `wait_secs`.

    Returns:
        The reduced arrays, of the same dtypes; but sums of booleans are int64,
        and means of integers are float64.

    Raises:
        ValueError: If an argument is out of range, or the workers' arrays
            differ.
        TimeoutError: If other workers have not arrived in time. The message
            names them.
        RuntimeError: If this process has no worker or several workers, if the
            group has given its worker up meanwhile, or for a reason of
            `Worker.wait_at_barrier`.
        ConnectionError: If a server does not answer.

    Example:

    >>> with tsw.train.Worker(0, 1) as worker:
    ...     clicks, shows = tsw.train.all_reduce([3, 40], worker=worker)
    >>> int(shows)
    40
    """
    check_choice("op", op, ("sum", "mean", "max", "min"))
    if worker is None:
        workers = present_workers()
        if len(workers) != 1:
            raise RuntimeError(
                f"this process is {len(workers)} workers; say which one tells "
                "its arrays: `worker=`"
            )
        worker = workers[0]
    told = {}
    for i, array in enumerate(arrays):
        if tf.is_tensor(array) and not hasattr(array, "numpy"):
            raise bad_argument(
                "arrays", array, "values; call `all_reduce` outside tf.function"
            )
        told[str(i)] = np.asarray(array)
        if told[str(i)].dtype.kind not in "biuf":
            raise bad_argument("arrays", array, "arrays of numbers")
    exchange = exchange_of(worker, "all_reduce")
    return list(
        merge(exchange.tell(told, timeout_secs=timeout_secs), op).values()
    )


def uneven_batches(
    batches: Iterable[_Batch], *, like: Any = None
) -> Iterator[_Batch]:
    """Yields the batches, and then empty batches without end.

    Args:
        batches: A `tf.data.Dataset`, or an iterable that yields nested
            structures of arrays or tensors whose first dimension is the batch.
        like: A batch, or its structure of `tf.TensorSpec`, that shows the form
            of an empty batch. Needed for a worker that may have no batch at
            all, unless `batches` is a dataset.

    Yields:
        Batches. The batches that are added at the end have the structure,
        dtypes and shapes of the others, but 0 for the first dimension.

    Raises:
        ValueError: If there is no batch, and nothing else shows the form of a
            batch.

    Example:

    >>> for ids, labels in tsw.train.uneven_batches(dataset):
    ...     gradients, samples = step(ids, labels)
    ...     if samples == 0.0:
    ...         break
    """
    if like is None:
        like = getattr(batches, "element_spec", None)
    batch: Any = None
    for batch in batches:
        yield batch
    if batch is None and like is None:
        raise ValueError(
            "this worker has no batch, so there is none to make an empty one "
            "from. Pass `like=`: a batch, or its tf.TensorSpec"
        )
    empty = tf.nest.map_structure(
        _without_rows, like if batch is None else batch
    )
    while True:
        yield empty


def _without_rows(value: Any) -> Any:
    if isinstance(value, tf.TensorSpec):
        if value.shape.rank in (None, 0):
            raise ValueError(
                "`like` must tell the rank of each part of a batch, at least "
                f"1. Received: {value}"
            )
        inner = [size or 0 for size in value.shape[1:]]
        return tf.zeros([0, *inner], value.dtype)
    if isinstance(value, (tf.RaggedTensorSpec, tf.SparseTensorSpec)):
        raise ValueError(
            "an empty batch cannot be made from the spec of ragged or sparse "
            f"tensors. Pass a batch as `like=`. Received: {value}"
        )
    if isinstance(value, tf.SparseTensor):
        return tf.sparse.slice(
            value,
            tf.zeros_like(value.dense_shape),
            tf.concat([[0], value.dense_shape[1:]], axis=0),
        )
    return value[:0]


def weighted_all_reduce(
    gradients: Sequence[Gradient],
    weight: TensorLike,
    *,
    backend: str | SumOverWorkers = "mwms",
) -> tuple[list[Any], tf.Tensor]:
    """Averages gradients over workers, by weight.

    All workers call it in each step, also workers without further data, with
    weight 0. The weight is sent with the gradients, so this takes no more
    collectives than an average without weights.

    Source: the weighted mean of data-parallel SGD; the empty batches are an
    idea of PyTorch's `Join`, which finds the end of the data by a separate
    collective instead of a weight.

    Args:
        gradients: One per variable, of this worker's mean loss: tensors,
            `tf.IndexedSlices`, or None. A None stays None, and must be None on
            all workers. Gradients may be NaN for a batch without rows.
        weight: Number of samples in this worker's batch, a scalar.
        backend: "mwms": in the replica context of a
            `tf.distribute.MultiWorkerMirroredStrategy` (or any other strategy);
            "horovod"; or a function that maps a list of tensors and
            `tf.IndexedSlices` to their sums over workers.

    Returns:
        The averages `sum(weight * gradient) / sum(weight)`, and the float32
        scalar `sum(weight)`. If this sum is 0, all data is used up, and the
        averages are 0: do not apply the averages, because optimizers with
        momentum would still move. The gradient of the rows of a
        `DynamicEmbedding` is not averaged, and is 0 with a `weight` of 0: each
        worker applies its own.

    Raises:
        ValueError: If `backend` is none of these, or `weight` no scalar.
        ImportError: If Horovod is not installed.

    Example:

    >>> def step(ids, labels):
    ...     ...
    ...     return tsw.train.weighted_all_reduce(
    ...         tape.gradient(loss, variables), tf.shape(ids)[0]
    ...     )
    """
    weight = tf.cast(weight, tf.float32)
    if weight.shape.rank != 0:
        raise ValueError(
            "`weight` must be a scalar, the number of samples. Received: shape "
            f"{weight.shape}"
        )
    sum_over_workers = _backend_of(backend)
    # Gradients of rows are left out: each worker pushes these itself, and bsp
    # rounds average them by samples.
    summed = [g for g in gradients if g is not None and not is_of_rows(g)]
    weighted = [_scaled(g, weight) for g in summed]
    *sums, total = sum_over_workers([*weighted, weight])
    inverse = tf.math.divide_no_nan(1.0, total)
    averages = iter([_scaled(g, inverse) for g in sums])
    has_rows = tf.cast(weight > 0.0, tf.float32)
    return [
        None
        if g is None
        else _scaled(g, has_rows)
        if is_of_rows(g)
        else next(averages)
        for g in gradients
    ], total


def _backend_of(backend: str | SumOverWorkers) -> SumOverWorkers:
    if callable(backend):
        return backend
    if backend == "mwms":
        return _sum_over_replicas
    if backend == "horovod":
        return _sum_by_horovod
    raise bad_argument("backend", backend, '"mwms", "horovod" or a function')


def _scaled(gradient: Any, factor: tf.Tensor) -> Any:
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(
            _scaled(gradient.values, factor),
            gradient.indices,
            gradient.dense_shape,
        )
    # The mean over no rows is NaN; for weight 0 it must become 0.
    return tf.math.multiply_no_nan(gradient, tf.cast(factor, gradient.dtype))


def _sum_over_replicas(values: list[Any]) -> Sequence[Any]:
    context = tf.distribute.get_replica_context()
    if context is None:
        raise ValueError(
            'backend "mwms" works in the replica context: call '
            "weighted_all_reduce in a function that `strategy.run` runs"
        )
    return context.all_reduce(
        tf.distribute.ReduceOp.SUM, [_never_empty(v) for v in values]
    )


def _never_empty(value: Any) -> Any:
    """Adds a row of zeros, because TensorFlow 2.21 crashes without rows."""
    if not isinstance(value, tf.IndexedSlices):
        return value
    row = tf.concat([[1], tf.shape(value.values)[1:]], axis=0)
    return tf.IndexedSlices(
        tf.concat([value.values, tf.zeros(row, value.values.dtype)], axis=0),
        tf.concat([value.indices, tf.zeros([1], value.indices.dtype)], axis=0),
        value.dense_shape,
    )


def _sum_by_horovod(values: list[Any]) -> Sequence[Any]:
    import horovod.tensorflow as hvd

    dense = [v for v in values if not isinstance(v, tf.IndexedSlices)]
    sums = iter(hvd.grouped_allreduce(dense, op=hvd.Sum))
    # The sum of slices is their concatenation.
    return [
        tf.IndexedSlices(
            hvd.allgather(v.values), hvd.allgather(v.indices), v.dense_shape
        )
        if isinstance(v, tf.IndexedSlices)
        else next(sums)
        for v in values
    ]
