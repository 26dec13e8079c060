"""The weight that represents the rows of a layer, and its update.

Keras sees one trainable weight of shape [0, dim]. A training lookup gives this
weight a gradient of ids and values, a `tf.IndexedSlices`, which a program may
clip, scale, add up or drop as it likes. When an optimizer applies the gradient,
`_optimizer_hooks` calls `push`, and the table takes its step.
"""

import functools
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import tensorflow as tf

from tfswitch.export import _note_step
from tfswitch.keras import _backend
from tfswitch.keras._step_meters import measured
from tfswitch.ops import is_of_rows
from tfswitch.table import (
    EmbeddingTable,
    TablePush,
    look_up_many,
    push_many,
    tie_to_weight,
)

if TYPE_CHECKING:
    from tfswitch.keras.layers.dynamic_embedding import DynamicEmbedding
    from tfswitch.keras.layers.id_inputs import IdBatch

# The most tables of one op; see TFSWITCH_MAX_PARTS of cc/capi/tfswitch.h.
MAX_TABLES = 256


def add(layer: "DynamicEmbedding") -> Any:
    """Adds the weight to a layer.

    The weight is float32 under any dtype policy, as the rows are.
    """
    weight = layer.add_weight(
        name="rows",
        shape=(0, layer.output_dim),
        dtype="float32",
        initializer="zeros",
        trainable=True,
        **_backend.NO_AUTOCAST,
    )
    reference = weakref.ref(layer)
    weight._tfswitch_owner = reference
    # Some programs pass the TensorFlow variable in place of the Keras one.
    if not _backend.IS_LEGACY:
        weight.value._tfswitch_owner = reference
    return weight


def is_rows(variable: Any) -> bool:
    """Whether a variable represents the rows of a layer or table."""
    return hasattr(variable, "_tfswitch_owner")


class RowGradient(NamedTuple):
    """The gradient of a weight that represents rows.

    Attributes:
        variable: The weight.
        ids: int64, `[num_ids]`.
        values: float32, `[num_ids, dim]`.
    """

    variable: Any
    ids: tf.Tensor
    values: tf.Tensor


def row_gradient(variable: Any, gradient: Any) -> RowGradient:
    """Returns the ids and values of a gradient.

    Raises:
        ValueError: If the gradient has no ids.
    """
    if isinstance(gradient, tf.IndexedSlices):
        return RowGradient(variable, gradient.indices, gradient.values)
    values = tf.convert_to_tensor(gradient)
    if values.shape.rank != 2 or values.shape[0] != 0:
        raise ValueError(
            f"the gradient of variable '{_backend.variable_path(variable)}', "
            "which stands for the rows of a table, must be a tf.IndexedSlices "
            f"of ids and values. Received: a tensor of shape {values.shape}"
        )
    return RowGradient(variable, tf.zeros([0], tf.int64), values)


def join(
    batches: Sequence[tuple["DynamicEmbedding", "IdBatch"]],
) -> dict[EmbeddingTable, tf.Tensor]:
    """Joins the ids of layers that share a table."""
    return {
        table: _joined([batches[place][1].ids for place in places])
        for table, places in _by_table(batches).items()
    }


def read(
    batches: Sequence[tuple["DynamicEmbedding", "IdBatch"]],
    *,
    insert_missing: bool,
) -> list[tf.Tensor]:
    """Reads the float32 rows of each layer, in one op.

    Ids of layers that share a table are looked up together.
    """
    ids = join(batches)
    together = look_up_many(
        list(ids), list(ids.values()), insert_missing=insert_missing
    )
    rows: dict[int, tf.Tensor] = {}
    for places, joined in zip(
        _by_table(batches).values(), together, strict=True
    ):
        sizes = [tf.size(batches[place][1].ids) for place in places]
        parts = tf.split(joined, sizes) if len(sizes) > 1 else [joined]
        rows.update(zip(places, parts, strict=True))
    return [rows[place] for place in range(len(batches))]


def look_up(
    batches: Sequence[tuple["DynamicEmbedding", "IdBatch"]],
) -> list[tf.Tensor]:
    """Looks up ids of layers for training, in one op.

    Returns:
        For each layer the float32 rows. Their gradient becomes that of the
        layer's weight.
    """
    return [
        tie_to_weight(
            layer.table,
            batch.ids,
            rows,
            tf.convert_to_tensor(layer._rows_weight),
            batch.shows,
            batch.clicks,
        )
        for (layer, batch), rows in zip(
            batches, read(batches, insert_missing=True), strict=True
        )
    ]


def _by_table(
    batches: Sequence[tuple["DynamicEmbedding", "IdBatch"]],
) -> dict[EmbeddingTable, list[int]]:
    """Returns the places of the batches of each table."""
    by_table: dict[EmbeddingTable, list[int]] = {}
    for place, (layer, _) in enumerate(batches):
        by_table.setdefault(layer.table, []).append(place)
    return by_table


def push(
    gradients: Sequence[RowGradient],
    optimizer: Any = None,
    learning_rate: Any = None,
) -> list[tf.Tensor]:
    """Takes a step of the tables with the sum of their gradients, in one op.

    Replicas of a `tf.distribute` strategy take one step together.

    Args:
        gradients: The gradients. If layers share a table, it takes one step
            with their sum.
        optimizer: The Keras optimizer that applies the gradients, or None. The
            rows of layers with `optimizer="auto"` learn as its variables.
        learning_rate: The learning rate of the optimizer.

    Returns:
        For each table the number of rows that took a step, an int64 scalar.

    Raises:
        ValueError: If a table cannot step rows as the optimizer would.
    """
    strategy = tf.distribute.get_strategy()
    if (
        tf.distribute.in_cross_replica_context()
        or strategy.num_replicas_in_sync == 1
    ):
        return _push(gradients, optimizer, learning_rate)

    def push_all(distribution: Any, ids: Any, values: Any, rate: Any) -> Any:
        # Each process pushes only the gradients of its own replicas.
        of = distribution.experimental_local_results
        together = [
            each._replace(ids=tf.concat(i, 0), values=tf.concat(v, 0))
            for each, i, v in zip(
                gradients, map(of, ids), map(of, values), strict=True
            )
        ]
        return _push(together, optimizer, of(rate)[0])

    return tf.distribute.get_replica_context().merge_call(
        push_all,
        args=(
            [each.ids for each in gradients],
            [each.values for each in gradients],
            learning_rate,
        ),
    )


def _push(
    gradients: Sequence[RowGradient], optimizer: Any, learning_rate: Any
) -> list[tf.Tensor]:
    by_table: dict[tuple[str, str], list[tuple[TablePush, RowGradient]]] = {}
    for gradient in gradients:
        owner = gradient.variable._tfswitch_owner()
        if owner is None:
            raise ValueError(
                f"variable '{_backend.variable_path(gradient.variable)}' "
                "stands for the rows of a layer or table that was collected. "
                "Keep it for as long as its weight is trained."
            )
        step = owner._step_of(optimizer, learning_rate)
        key = (step.table.cluster.address, step.table.name)
        by_table.setdefault(key, []).append((step, gradient))
    together = getattr(optimizer, "_trainable_variables", None) or ()
    for key in by_table:
        _note_step(*key, (v for v in together if not is_rows(v)))
    pushes = [
        steps[0][0]._replace(
            ids=_joined([tf.cast(each.ids, tf.int64) for _, each in steps]),
            gradients=_joined(
                [tf.cast(each.values, tf.float32) for _, each in steps]
            ),
        )
        for steps in by_table.values()
    ]
    updated_rows: list[tf.Tensor] = []
    for begin in range(0, len(pushes), MAX_TABLES):
        part = pushes[begin : begin + MAX_TABLES]
        updated_rows += measured(
            part,
            functools.partial(
                push_many, part, of_lookups=True, skip_non_finite=True
            ),
        )
    return updated_rows


def _joined(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """Joins the ids, or values, of one table to one tensor."""
    return tensors[0] if len(tensors) == 1 else tf.concat(tensors, axis=0)


__all__ = [
    "MAX_TABLES",
    "RowGradient",
    "add",
    "is_of_rows",
    "is_rows",
    "join",
    "look_up",
    "push",
    "read",
    "row_gradient",
]
