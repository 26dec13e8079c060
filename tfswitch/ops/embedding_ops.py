"""The ops as Python functions, and the gradient of training lookups.

Each op runs on the device of its table's resource, not on that of the caller.
So under `tf.distribute` every replica uses the same table of its process.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

# TensorFlow has no public functions to check whether code is inside a loop.
from tensorflow.python.ops import control_flow_util
from tensorflow.python.ops.control_flow_v2_func_graphs import (
    WhileBodyFuncGraph,
)

from tfswitch import _loader

_library = _loader.load_ops()


@contextlib.contextmanager
def _where_the_table_is() -> Iterator[None]:
    """Places ops of this context on the device of their table's resource.

    Raises:
        ValueError: If XLA is to compile them. XLA does not know these ops, and
            its own error would come only when the step runs.
    """
    if control_flow_util.GraphOrParentsInXlaContext(
        tf.compat.v1.get_default_graph()
    ):
        raise ValueError(
            "XLA cannot compile the ops of tfswitch. Compile the model with "
            "`jit_compile=False`, or leave `jit_compile=True` out of the "
            "tf.function around them."
        )
    with tf.device(None):
        yield


def _floats(values: tf.Tensor | None) -> tf.Tensor:
    """One number for each id as float32; empty for None, as the ops expect."""
    if values is None:
        return tf.constant([], tf.float32)
    return tf.cast(values, tf.float32)


def table_handle(
    cluster: str,
    config: str,
    *,
    cluster_id: int,
    timeout_secs: float,
    shared_name: str,
) -> tf.Tensor:
    """Opens a table and returns its resource.

    Args:
        cluster: Address as in `tfswitch.connect`.
        config: The table's config as JSON.
        cluster_id: Chooses among the clusters that this process has open at
            the address. If no open cluster has this id, as when the graph comes
            from another process, the op takes the cluster with the credentials
            that were given last.
        timeout_secs: Longest wait for a server, in seconds.
        shared_name: The name of the resource in TensorFlow's manager.

    Returns:
        A scalar resource tensor on the host.
    """
    return _library.tfswitch_table_handle(
        cluster=cluster,
        config=config,
        cluster_id=cluster_id,
        timeout_s=timeout_secs,
        shared_name=shared_name,
    )


def lookup_many(
    tables: Sequence[tf.Tensor],
    ids: Sequence[tf.Tensor],
    *,
    dims: Sequence[int],
    insert_missing: bool,
) -> list[tf.Tensor]:
    """Reads embeddings of each table in one op; no gradient flows back.

    Args:
        tables: Resources of the tables; one may appear more than once.
        ids: For each table int32 or int64 of any shape.
        dims: For each table its dimension.
        insert_missing: Whether an unknown id gets a row. If not, it reads as
            zeros.

    Returns:
        For each table float32, `ids.shape + [dim]`.
    """
    with _where_the_table_is():
        return _library.tfswitch_lookup_many(
            tables=list(tables),
            ids=[tf.cast(each, tf.int64) for each in ids],
            dims=list(dims),
            insert_missing=insert_missing,
        )


def tie_to_weight(
    table: tf.Tensor,
    ids: tf.Tensor,
    embeddings: tf.Tensor,
    weight: tf.Tensor,
    *,
    poison: tf.Tensor | None = None,
    shows: tf.Tensor | None = None,
    clicks: tf.Tensor | None = None,
) -> tf.Tensor:
    """Returns the embeddings; their gradient becomes that of `weight`.

    Args:
        table: Resource of the table.
        ids: int32 or int64 of any shape: the ids that were looked up.
        embeddings: float32, `ids.shape + [dim]`.
        weight: float32, `[0, dim]`: the value of a variable. Its gradient is a
            `tf.IndexedSlices` with the ids as int64 `[num_ids]` and values of
            shape `[num_ids, dim]`. `is_of_rows` recognises it.
        poison: float32 scalar. If it is NaN, the result is NaN.
        shows: float32, one number per id: how often it was shown. By default
            once. A later `push_many` of the same ids uses shows and clicks.
        clicks: float32, one number per id: how often it was clicked. By
            default never.

    Returns:
        `embeddings`.
    """
    with _where_the_table_is():
        return _library.tfswitch_tie_to_weight(
            table=table,
            ids=tf.cast(ids, tf.int64),
            embeddings=embeddings,
            weight=weight,
            poison=tf.zeros([]) if poison is None else poison,
            shows=_floats(shows),
            clicks=_floats(clicks),
        )


class TablePush(NamedTuple):
    """One of the pushes of `push_many`.

    Attributes:
        table: Resource of the table. For `tfswitch.table.push_many` it is the
            `EmbeddingTable`, whose `global_step` and, if none is given,
            `learning_rate` are then used.
        ids: int32 or int64 of any shape.
        gradients: float32, `ids.shape + [dim]`.
        learning_rate: A scalar.
        shows: float32, one number per id. None means once each.
        clicks: float32, one number per id. None means never.
        global_step: int64 scalar: the step of the training, counted from 1.
            None means unknown.
        rule: The number of the optimizer that pushes. Optimizers are numbered
            from 1, in the order of their first pushes to the table. 0 if there
            is only one optimizer.
    """

    table: Any
    ids: tf.Tensor
    gradients: tf.Tensor
    learning_rate: Any = None
    shows: tf.Tensor | None = None
    clicks: tf.Tensor | None = None
    global_step: tf.Tensor | None = None
    rule: int = 0


class Pushed(NamedTuple):
    """The results of `push_many`, with an element for each push.

    Attributes:
        updated_rows: int64 scalars: the number of rows that took a step; -1 if
            the push is still in flight.
        poisons: float32 scalars: 0, or NaN if the push was skipped because a
            gradient held NaN or Inf.
    """

    updated_rows: list[tf.Tensor]
    poisons: list[tf.Tensor]


def push_many(
    pushes: Sequence[TablePush],
    *,
    insert_missing: bool = True,
    of_lookups: bool = False,
    skip_non_finite: bool = False,
    push_depth: int = 0,
) -> Pushed:
    """Sums gradients of repeated ids and takes one step per id, in one op.

    Args:
        pushes: At least one. A table takes one step for each of its pushes.
        insert_missing: Whether an id without a row gets one first.
        of_lookups: Whether the gradients come from `tie_to_weight`. A push
            without shows and clicks then uses the shows and clicks that were
            given to `tie_to_weight`.
        skip_non_finite: Whether a gradient with NaN or Inf makes the op skip
            all pushes with a warning. If not, it raises an error. No table
            changes in either case.
        push_depth: If not 0, the op waits until fewer pushes than this are in
            flight, and ends before its own is applied.
    """
    none = tf.constant(0, tf.int64)
    with _where_the_table_is():
        outputs = _library.tfswitch_push_many(
            tables=[each.table for each in pushes],
            ids=[tf.cast(each.ids, tf.int64) for each in pushes],
            gradients=[each.gradients for each in pushes],
            learning_rates=[
                tf.cast(each.learning_rate, tf.float32) for each in pushes
            ],
            shows=[_floats(each.shows) for each in pushes],
            clicks=[_floats(each.clicks) for each in pushes],
            global_steps=[
                none
                if each.global_step is None
                else tf.cast(each.global_step, tf.int64)
                for each in pushes
            ],
            rules=[each.rule for each in pushes],
            insert_missing=insert_missing,
            of_lookups=of_lookups,
            skip_non_finite=skip_non_finite,
            push_depth=push_depth,
        )
    return Pushed(*outputs)


def prefetch_many(
    tables: Sequence[tf.Tensor],
    ids: Sequence[tf.Tensor],
    *,
    sources: Sequence[int],
    exact: bool,
    limit: int,
) -> None:
    """Begins to read rows for a later lookup; see `Tfswitch>PrefetchMany`."""
    with _where_the_table_is():
        _library.tfswitch_prefetch_many(
            tables=list(tables),
            ids=[tf.cast(each, tf.int64) for each in ids],
            sources=list(sources),
            exact=exact,
            limit=limit,
        )


def end_step(table: tf.Tensor, weight: tf.Tensor) -> tf.Tensor:
    """Ends a step of this process's worker; see `tfswitch.train.Worker`.

    Control dependencies must make the step's pushes run before this op.

    Args:
        table: Resource of any table of the worker's cluster.
        weight: float64 scalar: the number of samples of the step.

    Returns:
        int64 scalar: the round to which the next step contributes; with
        consistency `bsp`, the number of applied rounds.
    """
    with _where_the_table_is():
        return _library.tfswitch_end_step(table=table, weight=weight)


def size(table: tf.Tensor) -> tf.Tensor:
    """Returns the number of rows of a table, an int64 scalar."""
    with _where_the_table_is():
        return _library.tfswitch_size(table=table)


@tf.RegisterGradient("Tfswitch>TieToWeight")
def _tie_to_weight_gradient(op: Any, gradient: Any) -> list[Any]:
    ids, weight = op.inputs[1], op.inputs[3]
    # If a gather follows the lookup, its gradient is a tf.IndexedSlices.
    values = tf.reshape(tf.convert_to_tensor(gradient), [-1, weight.shape[-1]])
    slices = tf.IndexedSlices(
        values,
        tf.reshape(ids, [-1]),
        tf.constant([0, weight.shape[-1]], tf.int32),
    )
    return [None, None, None, slices, None, None, None]


for _name in (
    "TableHandle",
    "LookupMany",
    "PushMany",
    "EndStep",
    "Size",
):
    tf.no_gradient(f"Tfswitch>{_name}")


# The gradients of other variables never have slices in a shape of 0 rows. So
# 0 rows mark the gradient of a weight that represents the rows of a table.
def is_of_rows(gradient: object) -> bool:
    """Whether this is the gradient of a weight that represents table rows."""
    if not isinstance(gradient, tf.IndexedSlices):
        return False
    if gradient.dense_shape is None:
        return False
    shape = tf.get_static_value(gradient.dense_shape, partial=True)
    return shape is not None and shape[0] == 0


def _refuse_dense_form(
    value: Any, dtype: Any = None, name: Any = None, as_ref: bool = False
) -> Any:
    if not is_of_rows(value):
        return NotImplemented
    message = (
        "the gradient of a DynamicEmbedding's rows has no dense form, because "
        "a table has no fixed number of rows. Change it as a tf.IndexedSlices, "
        "such as `g * 0.5`, `g + h`, `tf.clip_by_global_norm` or "
        "`tf.IndexedSlices(f(g.values), g.indices, g.dense_shape)`. Call the "
        "layer before tf.while_loop, tf.map_fn and tf.recompute_grad, not "
        "inside, and leave its weight out of `tape.jacobian`."
    )
    graph = tf.compat.v1.get_default_graph()
    while graph is not None:
        if isinstance(graph, WhileBodyFuncGraph):
            # Inside a loop TensorFlow would replace a TypeError by its own
            # error.
            raise NotImplementedError(message)
        graph = getattr(graph, "outer_graph", None)
    raise TypeError(message)


tf.register_tensor_conversion_function(
    tf.IndexedSlices, _refuse_dense_form, priority=10
)


def _add_operators() -> None:
    """Lets programs write `g * 0.5` for the gradient of rows.

    `tf.IndexedSlices` has no operators. The operators that are added here do
    not apply to gradients of other variables.
    """

    def with_values(function: Any) -> Any:
        def operator(gradient: Any, other: Any) -> Any:
            if not is_of_rows(gradient) or isinstance(other, tf.IndexedSlices):
                return NotImplemented
            return tf.IndexedSlices(
                function(gradient.values, other),
                gradient.indices,
                gradient.dense_shape,
            )

        return operator

    def add(gradient: Any, other: Any) -> Any:
        if is_of_rows(gradient) and isinstance(other, int) and other == 0:
            return gradient  # `sum` begins with 0.
        if not (is_of_rows(gradient) and is_of_rows(other)):
            return NotImplemented
        return tf.IndexedSlices(
            tf.concat([gradient.values, other.values], axis=0),
            tf.concat([gradient.indices, other.indices], axis=0),
            gradient.dense_shape,
        )

    for name, operator in {
        "__mul__": with_values(lambda values, factor: values * factor),
        "__rmul__": with_values(lambda values, factor: values * factor),
        "__truediv__": with_values(lambda values, factor: values / factor),
        "__add__": add,
        "__radd__": add,
        "__sub__": lambda gradient, other: add(gradient, -other),
    }.items():
        assert not hasattr(tf.IndexedSlices, name)
        setattr(tf.IndexedSlices, name, operator)


_add_operators()
