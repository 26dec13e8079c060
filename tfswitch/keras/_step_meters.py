"""Measures the steps of tables in the graph, while a callback asks for it.

`_row_weights` pushes through `measured`. Without active meters no op is added.
A function that was traced before keeps its ops, so a callback that makes or
ends meters makes the model trace its step again.
"""

import weakref
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from tfswitch._connection._control_calls import call
from tfswitch._connection._reports import TableStats
from tfswitch.ops.resources import HOST, HostVariable, has_remote_workers
from tfswitch.table import EmbeddingTable, TablePush


class Meter(NamedTuple):
    """The measurements of one table.

    Attributes:
        table: The table.
        before: The table's counts before the first step.
        sums: The number of steps, and the sums of their gradient norms and
            seconds.
    """

    table: EmbeddingTable
    before: TableStats
    sums: HostVariable


class StepMeters(dict[tuple[str, str], Meter]):
    """Meters by address and name of table. Active while this object lives."""

    def __init__(self) -> None:
        super().__init__()
        _active[id(self)] = self

    def add(self, table: EmbeddingTable, numbers: tf.Tensor) -> None:
        """Adds the numbers of a step to the sums of the table."""
        key = (table.cluster.address, table.name)
        if key not in self:
            before = stats_by_name(table)[table.name]
            sums = HostVariable(np.zeros(3), tf.float64, [3])
            self[key] = Meter(table, before, sums)
        self[key].sums.add(numbers)


_active: "weakref.WeakValueDictionary[int, StepMeters]" = (
    weakref.WeakValueDictionary()
)


def stats_by_name(table: EmbeddingTable) -> dict[str, TableStats]:
    """Returns `stats` of all tables of a table's cluster.

    Works after the cluster is closed, too, as steps of the table do.
    """
    exchange = call(table._native, "Prefetches")
    tables = call(table._native, "ListTables")["tables"]
    return {
        info["config"]["name"]: TableStats(info, exchange) for info in tables
    }


def measured(
    pushes: Sequence[TablePush], push: Callable[[], list[tf.Tensor]]
) -> list[tf.Tensor]:
    """Returns the result of `push`, which does `pushes` in one op.

    A push that is skipped because a gradient is NaN or Inf is no step.
    """
    # The workers of a ParameterServerStrategy are other processes.
    if not _active or has_remote_workers():
        return push()
    with tf.device(HOST):
        with tf.control_dependencies([each.gradients for each in pushes]):
            begin = tf.timestamp()
        with tf.control_dependencies([begin]):
            updated_rows = push()
        with tf.control_dependencies(updated_rows):
            seconds = tf.timestamp() - begin
        norms = [_norm(each.ids, each.gradients) for each in pushes]
        is_step = tf.reduce_all(tf.math.is_finite(norms))
        for each, norm in zip(pushes, norms, strict=True):
            numbers = tf.stack([tf.ones([], tf.float64), norm, seconds])
            numbers = tf.where(is_step, numbers, tf.zeros_like(numbers))
            for meters in list(_active.values()):
                meters.add(each.table, numbers)
    return updated_rows


def _norm(ids: tf.Tensor, gradients: tf.Tensor) -> tf.Tensor:
    """Returns the L2 norm of a gradient whose repeated ids are summed."""
    distinct = tf.unique(ids)
    sums = tf.math.unsorted_segment_sum(
        gradients, distinct.idx, tf.size(distinct.y)
    )
    # The square of a large float32 would overflow.
    return tf.norm(tf.cast(sums, tf.float64))
