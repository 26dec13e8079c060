"""The ops as Python functions, and the gradients of the training lookups.

Each runs where its table's resource lives, whatever device the caller is on:
under `tf.distribute` every replica works on the one table of its process.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

# TensorFlow keeps here the functions that its own code uses for this purpose.
from tensorflow.python.ops import control_flow_util

from tfswitch import _loader

_library = _loader.load_ops()


class TrainingLookup(NamedTuple):
    """A training lookup's answer, and the values that its way back needs.

    Attributes:
        embeddings: float32, `ids.shape + [dim]`.
        loss_scale_probe: float32 scalar, 0. Added to the loss, its gradient is
            the factor of the loss on the way back.
        unique_ids: int64, `[num_unique]`, in order of first appearance.
        inverse: int32, `[num_ids]`, the place of each id in `unique_ids`.
    """

    embeddings: tf.Tensor
    loss_scale_probe: tf.Tensor
    unique_ids: tf.Tensor
    inverse: tf.Tensor


@contextlib.contextmanager
def _where_the_table_is() -> Iterator[None]:
    """Ops made in it run with their table, and are not compiled.

    Raises:
        ValueError: If XLA is to compile them: it knows no such ops, and says so
            in its own words only when the step runs.
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


def _observations(
    shows: tf.Tensor | None,
    clicks: tf.Tensor | None,
    global_step: tf.Tensor | None,
) -> dict[str, tf.Tensor]:
    """The inputs of these names, as the ops take them."""

    def floats(values: tf.Tensor | None) -> tf.Tensor:
        if values is None:
            return tf.constant([], tf.float32)
        return tf.cast(values, tf.float32)

    if global_step is None:
        global_step = tf.constant(0, tf.int64)
    return {
        "shows": floats(shows),
        "clicks": floats(clicks),
        "global_step": tf.cast(global_step, tf.int64),
    }


def table_handle(
    cluster: str,
    config: str,
    *,
    cluster_id: int,
    timeout_s: float,
    shared_name: str,
) -> tf.Tensor:
    """Opens a table and returns the resource that stands for it.

    Args:
        cluster: Address as in `tfswitch.connect`.
        config: The table's config as JSON.
        cluster_id: Which one of those that are open at the address in this
            process. One of another process is as good as none: then it is the
            one with the credentials that were given last.
        timeout_s: Longest wait for a server, in seconds.
        shared_name: The name of the resource in TensorFlow's manager.

    Returns:
        A scalar resource tensor on the host.
    """
    return _library.tfswitch_table_handle(
        cluster=cluster,
        config=config,
        cluster_id=cluster_id,
        timeout_s=timeout_s,
        shared_name=shared_name,
    )


def lookup(
    table: tf.Tensor, ids: tf.Tensor, *, dim: int, insert_missing: bool
) -> tf.Tensor:
    """Reads embeddings; no gradient flows back.

    Args:
        table: Resource of the table.
        ids: int32 or int64 of any shape.
        dim: The table's dimension.
        insert_missing: Whether an unknown id gets a row; else it reads zeros.

    Returns:
        float32, `ids.shape + [dim]`.
    """
    with _where_the_table_is():
        return _library.tfswitch_lookup(
            table=table, ids=ids, dim=dim, insert_missing=insert_missing
        )


def training_lookup(
    table: tf.Tensor,
    ids: tf.Tensor,
    anchor: tf.Tensor,
    learning_rate: tf.Tensor,
    *,
    dim: int,
    shows: tf.Tensor | None = None,
    clicks: tf.Tensor | None = None,
    global_step: tf.Tensor | None = None,
) -> TrainingLookup:
    """Reads embeddings, creates missing rows, and pushes on the way back.

    With an admission policy rows come with the push.

    Args:
        table: Resource of the table.
        ids: int32 or int64 of any shape.
        anchor: float32 scalar that the loss is differentiated by. Its value
            has no effect; it ties the op into the gradient tape.
        learning_rate: float32 scalar of the push in the backward pass.
        dim: The table's dimension.
        shows: float32, one number per id: how often it was shown. By default
            once.
        clicks: float32, one number per id: how often it was clicked. By
            default never.
        global_step: int64 scalar: the step of the training, counted from 1. By
            default not known.
    """
    lookup = TableLookup(
        table, ids, anchor, learning_rate, dim, shows, clicks, global_step
    )
    lookups = training_lookup_many([lookup])
    return TrainingLookup(
        lookups.embeddings[0],
        lookups.loss_scale_probe,
        lookups.unique_ids[0],
        lookups.inverses[0],
    )


class TrainingLookups(NamedTuple):
    """The answer of a training lookup in many tables.

    Attributes:
        embeddings: For each table float32, `ids.shape + [dim]`.
        loss_scale_probe: float32 scalar, 0, for all tables; as of
            `TrainingLookup`.
        unique_ids: For each table int64, `[num_unique]`.
        inverses: For each table int32, `[num_ids]`.
    """

    embeddings: list[tf.Tensor]
    loss_scale_probe: tf.Tensor
    unique_ids: list[tf.Tensor]
    inverses: list[tf.Tensor]


class TableLookup(NamedTuple):
    """One of the lookups of `training_lookup_many`; as for `training_lookup`.

    Attributes:
        table: Resource of the table.
        ids: int32 or int64 of any shape.
        anchor: float32 scalar.
        learning_rate: float32 scalar.
        dim: The table's dimension.
        shows: float32, one number per id, or None.
        clicks: float32, one number per id, or None.
        global_step: int64 scalar, or None.
    """

    table: tf.Tensor
    ids: tf.Tensor
    anchor: tf.Tensor
    learning_rate: tf.Tensor
    dim: int
    shows: tf.Tensor | None = None
    clicks: tf.Tensor | None = None
    global_step: tf.Tensor | None = None


def lookup_many(
    tables: Sequence[tf.Tensor],
    ids: Sequence[tf.Tensor],
    *,
    dims: Sequence[int],
    insert_missing: bool,
) -> list[tf.Tensor]:
    """Does `lookup` for several tables in one op.

    Args:
        tables: Resources of the tables; one may come more than once.
        ids: For each table int32 or int64 of any shape.
        dims: For each table its dimension.
        insert_missing: As for `lookup`.

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


def training_lookup_many(lookups: Sequence[TableLookup]) -> TrainingLookups:
    """Does `training_lookup` for several tables in one op.

    So does its gradient: in the backward pass all tables are pushed to, those
    with zeros whose embeddings have no gradient. If one push cannot be made,
    for a gradient with NaN or Inf, none is.

    Args:
        lookups: At least one. A table may come more than once; then it takes a
            step for each.
    """
    observations = [
        _observations(each.shows, each.clicks, each.global_step)
        for each in lookups
    ]
    with _where_the_table_is():
        outputs = _library.tfswitch_training_lookup_many(
            tables=[each.table for each in lookups],
            ids=[tf.cast(each.ids, tf.int64) for each in lookups],
            anchors=[each.anchor for each in lookups],
            learning_rates=[each.learning_rate for each in lookups],
            shows=[each["shows"] for each in observations],
            clicks=[each["clicks"] for each in observations],
            global_steps=[each["global_step"] for each in observations],
            dims=[each.dim for each in lookups],
        )
    return TrainingLookups(*outputs)


def push_unique(
    table: tf.Tensor,
    unique_ids: tf.Tensor,
    inverse: tf.Tensor,
    gradients: tf.Tensor,
    learning_rate: tf.Tensor,
    loss_scale: tf.Tensor,
    *,
    shows: tf.Tensor | None = None,
    clicks: tf.Tensor | None = None,
    global_step: tf.Tensor | None = None,
    insert_missing: bool = False,
) -> tf.Tensor:
    """Sums gradients by `inverse` and applies one step per unique id.

    Args:
        table: Resource of the table.
        unique_ids: int64, `[num_unique]`, without repetition.
        inverse: int32, `[num_ids]`.
        gradients: float32, `[..., dim]`, of `num_ids` rows.
        learning_rate: float32 scalar.
        loss_scale: float32 scalar; gradients are divided by it. 0: not known,
            taken as 1.
        shows: As for `training_lookup`.
        clicks: As for `training_lookup`.
        global_step: As for `training_lookup`.
        insert_missing: Whether an id without a row gets one first.

    Returns:
        The gradient of the anchor: float32 scalar, 0, or NaN if the push was
        skipped because gradients held NaN or Inf.
    """
    observations = _observations(shows, clicks, global_step)
    with _where_the_table_is():
        (anchor_gradient,) = _library.tfswitch_push_unique_many(
            tables=[table],
            unique_ids=[unique_ids],
            inverses=[inverse],
            gradients=[gradients],
            learning_rates=[learning_rate],
            loss_scale=loss_scale,
            shows=[observations["shows"]],
            clicks=[observations["clicks"]],
            global_steps=[observations["global_step"]],
            insert_missing=insert_missing,
        )
    return anchor_gradient


def push(
    table: tf.Tensor,
    ids: tf.Tensor,
    gradients: tf.Tensor,
    learning_rate: tf.Tensor,
    *,
    shows: tf.Tensor | None = None,
    clicks: tf.Tensor | None = None,
    global_step: tf.Tensor | None = None,
    insert_missing: bool = True,
) -> tf.Tensor:
    """Sums the gradients of repeated ids and applies one step per id.

    Args:
        table: Resource of the table.
        ids: int32 or int64 of any shape.
        gradients: float32, `ids.shape + [dim]`.
        learning_rate: float32 scalar.
        shows: As for `training_lookup`.
        clicks: As for `training_lookup`.
        global_step: As for `training_lookup`.
        insert_missing: Whether an id without a row gets one first.

    Returns:
        int64 scalar: the number of rows that took a step.
    """
    with _where_the_table_is():
        return _library.tfswitch_push(
            table=table,
            ids=ids,
            gradients=gradients,
            learning_rate=learning_rate,
            **_observations(shows, clicks, global_step),
            insert_missing=insert_missing,
        )


def end_step(table: tf.Tensor, weight: tf.Tensor) -> tf.Tensor:
    """Ends a step of this process's worker; see `tfswitch.train.Worker`.

    The step's pushes must come before, by control dependencies.

    Args:
        table: Resource of any table of the worker's cluster.
        weight: float64 scalar: the number of samples of the step.

    Returns:
        int64 scalar: to which round the next step contributes; with consistency
        `bsp`, how many have been applied.
    """
    with _where_the_table_is():
        return _library.tfswitch_end_step(table=table, weight=weight)


def size(table: tf.Tensor) -> tf.Tensor:
    """Returns the number of rows of a table, an int64 scalar."""
    with _where_the_table_is():
        return _library.tfswitch_size(table=table)


@tf.RegisterGradient("Tfswitch>TrainingLookupMany")
def _training_lookup_many_gradient(op: Any, *gradients: Any) -> list[Any]:
    n = len(op.inputs) // 7
    tables, _, _, learning_rates, shows, clicks, global_steps = (
        list(op.inputs[i : i + n]) for i in range(0, 7 * n, n)
    )
    probe_gradient = gradients[n]
    if probe_gradient is None:
        probe_gradient = tf.zeros([])
    with _where_the_table_is():
        anchor_gradients = _library.tfswitch_push_unique_many(
            tables=tables,
            unique_ids=list(op.outputs[n + 1 : 2 * n + 1]),
            inverses=list(op.outputs[2 * n + 1 :]),
            gradients=[
                # A gather behind the lookup answers with IndexedSlices.
                tf.zeros_like(embeddings)
                if gradient is None
                else tf.convert_to_tensor(gradient)
                for embeddings, gradient in zip(
                    op.outputs[:n], gradients[:n], strict=True
                )
            ],
            learning_rates=learning_rates,
            loss_scale=probe_gradient,
            shows=shows,
            clicks=clicks,
            global_steps=global_steps,
        )
    # On the caller's device: strategies reduce gradients by where they are.
    anchor_gradients = [tf.identity(each) for each in anchor_gradients]
    return [None] * (2 * n) + anchor_gradients + [None] * (4 * n)


for _name in (
    "TableHandle",
    "Lookup",
    "LookupMany",
    "PushUniqueMany",
    "Push",
    "EndStep",
    "Size",
):
    tf.no_gradient(f"Tfswitch>{_name}")
